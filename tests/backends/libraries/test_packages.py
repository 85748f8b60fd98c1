"""What FlashAttention and FlashInfer are told, by stand-ins that compute what the packages' documents say; and answers without them.

Neither package is installed where these tests run: their own kernels are not tested here.
"""

import itertools
from types import SimpleNamespace

import pytest
import torch

from pelton.attention.interface import AttentionNeeds
from pelton.attention.selector import select_backend
from pelton.config import EngineConfig
from pelton.errors import ConfigError
from pelton.testing.attention import AttentionBackendConformance, AttentionCase, AttentionStep
from pelton_backends.libraries import flash_attn, flashinfer, needs
from pelton_backends.libraries.flash_attn import FlashAttentionBackend
from pelton_backends.libraries.flashinfer import FlashInferBackend
from pelton_backends.libraries.plugin import pelton_attention_backends

NEEDS = AttentionNeeds(head_dim=64, num_heads=8, num_kv_heads=2, block_size=16, dtype="bfloat16")


def attend(query, k_cache, v_cache, table, length, scale, causal, window, soft_cap):
    """One row's tokens [T, H, D]; window: (left, right), -1 for no bound."""
    position = torch.arange(length)
    size = k_cache.shape[1]
    keys, values = (
        cache[table[position // size].long(), position % size].to(query.dtype) for cache in (k_cache, v_cache)
    )
    group = query.shape[1] // keys.shape[1]
    scores = torch.einsum("thd,lhd->htl", query, keys.repeat_interleave(group, 1)).float() * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    asked = torch.arange(length - len(query), length)[:, None]
    seen = position <= asked if causal else torch.ones(len(query), length, dtype=torch.bool)
    if window[0] >= 0:
        seen &= position >= asked - window[0]
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).to(query.dtype)
    values = values.masked_fill(
        ~seen.any(0)[:, None, None], 0.0
    )  # junk behind a window: blocks are zeroed for these backends
    return torch.einsum("htl,lhd->thd", weights, values.repeat_interleave(group, 1))


def rows_of(query, starts, lengths, table, call):
    parts = [
        call(query[first:last], table[row], int(lengths[row]))
        for row, (first, last) in enumerate(itertools.pairwise(starts.tolist()))
        if last > first
    ]
    return torch.cat(parts)


def flash_attn_with_kvcache(
    q, k_cache, v_cache, *, cache_seqlens, page_table, cu_seqlens_q, max_seqlen_q, softmax_scale, causal, window_size, softcap
):  # fmt: skip
    assert cu_seqlens_q.diff().max() <= max_seqlen_q

    def call(rows, table, length):
        return attend(rows, k_cache, v_cache, table, length, softmax_scale, causal, window_size, softcap)

    return rows_of(q, cu_seqlens_q, cache_seqlens, page_table, call)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, softmax_scale, causal, window_size, softcap, block_table
):  # fmt: skip
    assert k.shape[1] % 256 == 0 and cu_seqlens_k.diff().max() <= max_seqlen_k
    return flash_attn_with_kvcache(
        q, k, v, cache_seqlens=cu_seqlens_k.diff(), page_table=block_table, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q,
        softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
    )  # fmt: skip


def flash_attn_cute(
    q, k, v, *, cu_seqlens_q, seqused_k, max_seqlen_q, max_seqlen_k, page_table, softmax_scale, causal, window_size, softcap
):  # fmt: skip
    assert page_table.dtype == torch.int32 and seqused_k.max() <= max_seqlen_k
    window = tuple(-1 if side is None else side for side in window_size)
    out = flash_attn_with_kvcache(
        q, k, v, cache_seqlens=seqused_k, page_table=page_table, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q,
        softmax_scale=softmax_scale, causal=causal, window_size=window, softcap=softcap,
    )  # fmt: skip
    return out, None


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(self, float_workspace_buffer, kv_layout):
        assert kv_layout == "NHD"

    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads, head_dim_qk,
        page_size, *, causal, sm_scale, logits_soft_cap, window_left, q_data_type,
    ):  # fmt: skip
        pages = paged_kv_indptr.diff()
        lengths = torch.where(pages > 0, (pages - 1) * page_size + paged_kv_last_page_len, 0)
        table = torch.zeros(len(pages), max(int(pages.max()), 1), dtype=torch.int32)
        for row, (first, last) in enumerate(itertools.pairwise(paged_kv_indptr.tolist())):
            table[row, : last - first] = paged_kv_indices[first:last]
        self.planned = qo_indptr, lengths, table, sm_scale, causal, (window_left, 0), logits_soft_cap

    def run(self, q, paged_kv_cache):
        starts, lengths, table, scale, causal, window, soft_cap = self.planned

        def call(rows, own_table, length):
            return attend(rows, *paged_kv_cache, own_table, length, scale, causal, window, soft_cap)

        return rows_of(q, starts, lengths, table, call)


@pytest.fixture
def flash_three(monkeypatch):
    monkeypatch.setattr(needs, "DTYPES", ("float32", "bfloat16", "float16"))
    module = SimpleNamespace(flash_attn_with_kvcache=flash_attn_with_kvcache)
    monkeypatch.setattr(flash_attn, "find_library", lambda wanted=None: (3, module))


@pytest.fixture
def flash_four(monkeypatch):
    monkeypatch.setattr(needs, "DTYPES", ("float32", "bfloat16", "float16"))
    module = SimpleNamespace(flash_attn_varlen_func=flash_attn_cute)
    monkeypatch.setattr(flash_attn, "find_library", lambda wanted=None: (4, module))


@pytest.fixture
def infer(monkeypatch):
    monkeypatch.setattr(needs, "DTYPES", ("float32", "bfloat16", "float16"))
    monkeypatch.setattr(flashinfer, "HEAD_DIMS", (16, 24, 64, 128))
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 16)
    module = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=BatchPrefillWithPagedKVCacheWrapper)
    monkeypatch.setattr(flashinfer, "find_library", lambda: module)


@pytest.mark.usefixtures("flash_three")
class TestFlashAttention(AttentionBackendConformance):
    backend = FlashAttentionBackend


@pytest.mark.usefixtures("flash_four")
class TestFlashAttentionFour(AttentionBackendConformance):
    backend = FlashAttentionBackend


@pytest.mark.usefixtures("infer")
class TestFlashInfer(AttentionBackendConformance):
    backend = FlashInferBackend


def test_flash_attention_two_reads_pages_of_256(monkeypatch):
    module = SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
    monkeypatch.setattr(flash_attn, "find_library", lambda wanted=None: (2, module))
    assert "block size 16, only multiples of 256 with FlashAttention 2" in FlashAttentionBackend.unsupported(NEEDS)
    case = AttentionCase(rows=((1, 300), (1, 5), (17, 250)), block_size=256, dtype="bfloat16", sliding_window=40)
    step = AttentionStep(FlashAttentionBackend, case)
    step.write()
    torch.testing.assert_close(step.run().float(), step.expected().float(), atol=2e-2, rtol=2e-2)


def test_the_first_version_that_is_there_is_taken(monkeypatch):
    """Version 4 alone leaves a folder `flash_attn` without calls: no version 2."""
    two, four = SimpleNamespace(flash_attn_varlen_func=1), SimpleNamespace(flash_attn_varlen_func=2)
    folder = SimpleNamespace()

    def found(modules, wanted=None):
        def load(name):
            if name not in modules:
                raise ImportError(f"No module named {name!r}")
            return modules[name]

        monkeypatch.setattr(flash_attn, "importlib", SimpleNamespace(import_module=load))
        return flash_attn.find_library.__wrapped__(wanted)

    assert found({"flash_attn": two}) == (2, two)
    assert found({"flash_attn": folder, "flash_attn.cute": four}) == (4, four)
    assert found({"flash_attn": folder}).startswith(
        "the package flash_attn is not here (flash_attn has no flash_attn_varlen_func)"
    )
    assert found({}).endswith("pip install flash-attn or flash-attn-4")
    assert found({"flash_attn": two, "flash_attn.cute": four}, 2) == (2, two)
    assert found({"flash_attn": two}, 3).startswith("the package flash_attn is not here in version 3 (No module named")
    assert found({"flash_attn": two}, 5) == "flash_attn_version is 5; there is 2, 3, 4"


def test_the_settings_name_a_version(monkeypatch):
    versions = {None: 3, 2: 2}
    monkeypatch.setattr(flash_attn, "find_library", lambda wanted=None: (versions[wanted], SimpleNamespace()))
    wants_256 = "block size 16, only multiples of 256 with FlashAttention 2"
    for version, is_refused in [(None, False), (2, True)]:
        config = EngineConfig.from_flat(attention_config={"backend": "FLASH_ATTN", "flash_attn_version": version})
        configured = FlashAttentionBackend.configured(config)
        assert (wants_256 in configured.unsupported(NEEDS)) is is_refused
    assert wants_256 not in FlashAttentionBackend.unsupported(NEEDS)  # the settings are of one engine


@pytest.mark.parametrize(
    "named, reason",
    [
        ("FLASH_ATTN", r"flash_attn' cannot|the package flash_attn is not here .*pip install flash-attn"),
        ("FLASHINFER", "the package flashinfer is not here .*pip install flashinfer-python"),
        ("TREE_ATTN", "serves drafts that branch"),
    ],
)
def test_a_missing_package_is_a_reason(named, reason):
    with pytest.raises(ConfigError, match=rf"'{named}'.* cannot serve this model: .*{reason}"):
        select_backend(pelton_attention_backends("cuda"), NEEDS, named=named, capability=(9, 0))


@pytest.mark.parametrize(
    "name, device, winner",
    [("FLEX_ATTENTION", "cuda", "flex_attention"), ("TORCH_SDPA", "cuda", "sdpa"), ("TORCH_SDPA", "cpu", "sdpa"),
     ("FLEX_ATTENTION", "cpu", "flex_attention")],
)  # fmt: skip
def test_vllms_names_are_taken(name, device, winner):
    from pelton_backends.sdpa import plugin as sdpa

    entries = [*pelton_attention_backends(device), *sdpa.pelton_attention_backends(device)]
    assert select_backend(entries, NEEDS, named=name).name == winner
