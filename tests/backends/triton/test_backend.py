"""The Triton backend keeps what every attention backend promises, and which kernel gets which rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from pelton_covering import in_turn

from pelton.attention.interface import AttentionNeeds, GraphSupport
from pelton.attention.metadata import BatchDescriptor
from pelton.attention.selector import AttentionSelector
from pelton.entries import BackendEntry
from pelton.layers.attention import AttentionLayer
from pelton.layers.norm import RMSNorm
from pelton.layers.rope import get_rope
from pelton.testing.attention import (
    CASES,
    JUNK_CASES,
    MIXED,
    PART_CASES,
    AttentionBackendConformance,
    AttentionCase,
    AttentionStep,
)
from pelton.testing.latent_attention import LatentAttentionConformance
from pelton.testing.model_driver import make_test_build
from pelton.testing.plugins import plugins_of
from pelton.testing.sparse_attention import SparseAttentionConformance
from pelton_backends.triton.backend import TritonBackend
from pelton_backends.triton.mla import TritonMLABackend
from pelton_backends.triton.plugin import pelton_attention_backends
from pelton_backends.triton.runtime import INTERPRETED
from pelton_backends.triton.sparse import TritonSparseBackend
from pelton_backends.triton.states.backend import TritonStates

DEVICE = "cpu" if INTERPRETED else "cuda"
NEEDS = AttentionNeeds(head_dim=64, num_heads=8, num_kv_heads=2, block_size=16, dtype="float32")
TOLERANCE = {"atol": 2e-5, "rtol": 2e-5}
FEW_CASES = ("decodes-of-odd-lengths", "mixed-padded", "blocks-of-seven", "float16")


class TestTritonBackend(AttentionBackendConformance):
    backend = TritonBackend
    device = DEVICE

    @pytest.mark.parametrize(
        "name", ["mixed-padded", *(pytest.param(name, marks=pytest.mark.gpu) for name in ("bfloat16", "window"))]
    )
    def test_one_bound_layer_serves_steps_of_all_kinds(self, name: str) -> None:
        """Fewer cases than the suite has: the interpreter takes ten seconds for each."""
        super().test_one_bound_layer_serves_steps_of_all_kinds(name)

    @pytest.mark.parametrize("name, junk", in_turn(JUNK_CASES, ("infinity", "largest")))
    def test_what_is_no_rows_is_selected_away(self, name: str, junk: str) -> None:
        super().test_what_is_no_rows_is_selected_away(name, junk)

    @pytest.mark.parametrize("name, num_ranks", in_turn(PART_CASES, (2, 3)))
    def test_parts_of_ranks_are_the_whole(self, name: str, num_ranks: int) -> None:
        super().test_parts_of_ranks_are_the_whole(name, num_ranks)

    @pytest.mark.covering(2)
    @pytest.mark.parametrize("in_keys", [True, False], ids=["keys", "values"])
    @pytest.mark.parametrize("spoilt", [3, 4, 6])
    @pytest.mark.parametrize("name", ["mixed", "window", "bfloat16-heads-of-128"])
    def test_nan_of_a_row_reaches_that_row_alone(self, name: str, spoilt: int, in_keys: bool) -> None:
        super().test_nan_of_a_row_reaches_that_row_alone(name, spoilt, in_keys)


class TestTritonMLABackend(LatentAttentionConformance):
    backend = TritonMLABackend
    device = DEVICE

    @pytest.mark.parametrize(
        "name, num_ranks",
        in_turn(("decodes-of-odd-lengths", "mixed-padded", "blocks-of-seven", "long-row", "bfloat16"), (3, 2)),
    )
    def test_parts_of_ranks_are_the_whole(self, name: str, num_ranks: int) -> None:
        super().test_parts_of_ranks_are_the_whole(name, num_ranks)

    @pytest.mark.parametrize("name, junk", in_turn(FEW_CASES, ("infinity", "largest")))
    def test_what_is_no_rows_is_selected_away(self, name: str, junk: str) -> None:
        super().test_what_is_no_rows_is_selected_away(name, junk)


class TestTritonSparseBackend(SparseAttentionConformance):
    backend = TritonSparseBackend
    device = DEVICE

    @pytest.mark.parametrize("name, junk", in_turn(FEW_CASES, ("infinity", "largest")))
    def test_what_is_no_rows_is_selected_away(self, name: str, junk: str) -> None:
        super().test_what_is_no_rows_is_selected_away(name, junk)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("block_size", [16, 48, 1024])
@pytest.mark.parametrize("kv_dtype", ["auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"])
def test_fits_what_the_documents_name(head_dim: int, block_size: int, kv_dtype: str) -> None:
    for dtype in ("float16", "bfloat16", "float32"):
        needs = replace(NEEDS, head_dim=head_dim, block_size=block_size, kv_dtype=kv_dtype, dtype=dtype)
        assert TritonBackend.unsupported(needs, (9, 0)) == []


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"dtype": "float64"}, "dtype float64, only float16"),
        ({"kv_dtype": "int8"}, "kv dtype int8, only auto"),
        ({"num_heads": 3}, "3 heads are not a multiple of 2 kv heads"),
        ({"head_dim": 512}, "head size 512, only"),
        ({"head_dim": 100}, "head size 100, only"),
        ({"block_size": 24}, "block size 24, only multiples of 16"),
    ],
)
def test_says_why_it_refuses(change: dict[str, object], reason: str) -> None:
    (found,) = TritonBackend.unsupported(replace(NEEDS, **change))
    assert found.startswith(reason)


def test_refuses_cards_whose_tensor_cores_lack_bfloat16() -> None:
    assert TritonBackend.unsupported(NEEDS, (7, 5)) == ["compute capability 7.5, only 8.0 and later"]


@pytest.mark.parametrize("kv_dtype", ["fp8", "fp8_e4m3", "fp8_e5m2"])
def test_refuses_cards_whose_compiler_lacks_the_caches_dtype(kv_dtype: str) -> None:
    needs = replace(NEEDS, kv_dtype=kv_dtype)
    reason = f"compute capability 8.0, only 8.9 and later for kv dtype {kv_dtype}"
    assert TritonBackend.unsupported(needs, (8, 0)) == ([] if kv_dtype == "fp8_e5m2" else [reason])
    assert TritonBackend.unsupported(needs, (8, 9)) == []


def test_is_offered_on_cuda_only_and_can_be_captured_whole() -> None:
    offered = [(entry.name, entry.priority, entry.resolve()) for entry in pelton_attention_backends("cuda")]
    attention = [
        ("triton", 50, TritonBackend),
        ("triton_mla", 50, TritonMLABackend),
        ("triton_sparse", 50, TritonSparseBackend),
    ]
    assert [one for one in offered if not issubclass(one[2], TritonStates)] == attention
    assert {name for name, _, backend in offered if issubclass(backend, TritonStates)} == {
        f"triton_{kind}"
        for kind in ("state", "delta_rule", "key_delta_rule", "selective_scan", "lightning", "rg_lru", "short_conv")
    }
    assert not pelton_attention_backends("cpu")
    assert TritonBackend.graph_support is GraphSupport.ALWAYS


DECODES = AttentionCase(rows=((1, 0), (1, 17), (1, 40)), head_dim=64, num_padding=1)
PREFILLS = AttentionCase(rows=((3, 10), (3, 0)), head_dim=64)
MIX = AttentionCase(rows=MIXED, head_dim=64, num_padding=2)


@pytest.mark.parametrize(
    "case, key, want",
    [
        pytest.param(DECODES, None, (4, 4, False), id="all-decode"),
        pytest.param(MIX, None, (4, 4, False), id="decodes-then-prefills"),
        pytest.param(PREFILLS, None, (0, 0, False), id="no-decodes"),
        pytest.param(DECODES, BatchDescriptor(4, 4, 1), (4, 4, False), id="captured-decode"),
        pytest.param(PREFILLS, BatchDescriptor(6, 2, 3), (0, 0, False), id="captured-drafts"),
        pytest.param(MIX, BatchDescriptor(45, 10), (10, 0, True), id="captured-mix"),
        pytest.param(PREFILLS, BatchDescriptor(45, 1, is_prompt=True), (0, 0, False), id="captured-prompt"),
    ],
)
def test_which_rows_go_to_which_kernel(
    case: AttentionCase, key: BatchDescriptor | None, want: tuple[int, int, bool]
) -> None:
    step = AttentionStep(TritonBackend, case, DEVICE)
    metadata = step.backend.build(step.common, key)
    assert (metadata.decode_rows, metadata.first_prefill_row, metadata.is_mixed) == want
    assert metadata.is_decode == (want[1] == len(case.rows) + case.num_padding and not want[2])


@pytest.mark.parametrize("order", ["decodes-first", "decodes-last"])
def test_a_step_captured_for_any_rows_serves_any_rows(order: str) -> None:
    """One token or several: each kernel leaves out the other's rows, whatever the host knew at capture."""
    rows = MIXED if order == "decodes-first" else tuple(reversed(MIXED))
    case = replace(MIX, rows=rows)
    step = AttentionStep(TritonBackend, case, DEVICE)
    step.write()
    metadata = step.backend.build(step.common, BatchDescriptor(step.common.num_tokens, step.common.num_reqs))
    output = torch.full_like(step.query, float("nan"))
    step.layer.attend(step.query, metadata, output)
    torch.testing.assert_close(output[: step.num_tokens].double().cpu(), step.expected(), **TOLERANCE)


def qwen_like_layer(step: AttentionStep, kv_dtype: str = "auto", **options: object) -> AttentionLayer:
    """Query and key norms, rotation; bound to the step's cache."""
    case = step.case
    entry = BackendEntry(name="triton", load="pelton_backends.triton.backend:TritonBackend", priority=50)
    build = make_test_build(
        {"rope_theta": 100.0, "max_position_embeddings": 256}, plugins_of(), dtype=step.dtype,
        attention=AttentionSelector([entry]), block_size=case.block_size, kv_dtype=kv_dtype,
    )  # fmt: skip
    build.device = step.device
    norms = [RMSNorm(case.head_dim, config=build, prefix=name) for name in ("q_norm", "k_norm")]
    for norm in norms:
        norm.weight.copy_(torch.randn(case.head_dim, generator=step.generator))
    layer = AttentionLayer(
        case.num_heads, case.num_kv_heads, case.head_dim, config=build, prefix="norms_and_rope",
        rope=get_rope(build, case.head_dim), q_norm=norms[0], k_norm=norms[1], **options,
    )  # fmt: skip
    layer.bind_cache((step.layer.k_cache, step.layer.v_cache), 0, step.backend)
    return layer


@pytest.mark.parametrize("name", ["decodes", "mix"])
def test_the_one_kernel_does_what_seam_and_attention_do(name: str) -> None:
    case = replace(DECODES if name == "decodes" else MIX, sliding_window=30)
    results = []
    for is_fused in (True, False):
        step = AttentionStep(TritonBackend, case, DEVICE)
        slopes = torch.linspace(0.01, 0.1, case.num_heads, device=DEVICE)
        layer = qwen_like_layer(step, sliding_window=30, soft_cap=5.0, sinks=slopes + 1, alibi_slopes=slopes)
        assert layer.needs.has_sinks and layer.needs.has_alibi and layer.selection.name == "triton"
        step.write(only_context=True)
        width = (case.num_heads + 2 * case.num_kv_heads) * case.head_dim
        qkv = torch.randn(step.common.num_tokens, width, generator=step.generator).to(DEVICE)
        counts = [tokens for tokens, _ in case.rows]
        starts = [before for _, before in case.rows]
        positions = [start + i for start, count in zip(starts, counts, strict=True) for i in range(count)]
        positions = torch.tensor(positions + [0] * case.num_padding, device=DEVICE)
        metadata = step.backend.build(step.common)
        output = torch.zeros(step.common.num_tokens, case.num_heads, case.head_dim, device=DEVICE)
        if is_fused:
            layer.attend.write_and_attend(qkv, positions, step.common.slot_mapping, metadata, output)
        else:
            query = layer.qk_norm_rope_write_kv(qkv, positions, step.common.slot_mapping)
            layer.attend(query, metadata, output)
        results.append((output, layer.k_cache.nan_to_num(9.0), layer.v_cache.nan_to_num(9.0)))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, **TOLERANCE)


@pytest.mark.parametrize("is_captured", [False, True])
def test_a_prefix_that_all_decode_rows_share_gives_the_same(monkeypatch: pytest.MonkeyPatch, is_captured: bool) -> None:
    monkeypatch.setattr("pelton_backends.triton.backend.pays", lambda num_rows, prefix_len: prefix_len > 0)
    case = AttentionCase(rows=((1, 33), (1, 17), (1, 40)), head_dim=64, num_padding=1)
    step = AttentionStep(TritonBackend, case, DEVICE)
    step.share_prefix(0, 16)
    step.write()
    want = step.expected()
    torch.testing.assert_close(step.run().double().cpu(), want, **TOLERANCE)
    key = None
    if is_captured:
        key = BatchDescriptor(4, 4, 1, has_common_prefix=True)
        step.common.common_prefix = torch.tensor([16], dtype=torch.int32, device=DEVICE)
    else:
        step.common.common_prefix_len = 16
    metadata = step.backend.build(step.common, key)
    assert metadata.prefix_len is not None
    output = torch.full_like(step.query, float("nan"))
    step.layer.attend(step.query, metadata, output)
    torch.testing.assert_close(output[:3].double().cpu(), want, **TOLERANCE)


@pytest.mark.gpu
def test_a_captured_step_follows_lengths_and_tables_of_each_replay(device: torch.device) -> None:
    case = AttentionCase(
        rows=tuple((1, 600) for _ in range(48)), num_heads=16, num_kv_heads=8, head_dim=128, dtype="bfloat16"
    )
    step = AttentionStep(TritonBackend, case, DEVICE)
    step.write()
    key = BatchDescriptor(48, 48, 1)
    step.backend.reserve(key)
    output = torch.empty_like(step.query)
    metadata = step.backend.build(step.common, key)
    step.layer.attend(step.query, metadata, output)
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(3):
            step.layer.attend(step.query, metadata, output)
    want = step.expected()
    for seed in range(3):
        order = torch.randperm(48, generator=torch.Generator().manual_seed(seed))
        step.common.block_table.copy_(step.common.block_table[order.to(device)])
        step.query.copy_(step.query[order.to(device)])
        want = want[order]
        output.fill_(float("nan"))
        graph.replay()
        torch.testing.assert_close(output.double().cpu(), want, atol=2e-2, rtol=2e-2)
    step.common.seq_lens[5:] = 0
    output.fill_(float("nan"))
    graph.replay()
    torch.testing.assert_close(output[:5].double().cpu(), want[:5], atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("name", CASES)
def test_what_the_suite_leaves_out_is_block_sizes_alone(name: str) -> None:
    reasons = TritonBackend.unsupported(CASES[name].needs())
    assert reasons == [] or reasons == [f"block size {CASES[name].block_size}, only multiples of 16"]
