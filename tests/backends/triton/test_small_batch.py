from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
from pelton_linear_oracle import ACTIVATIONS, assert_close, check, make_case

from pelton.ops.interface import LinearSpec, LinearWeights
from pelton_backends.triton.attention.decode_resident import resident_shape
from pelton_backends.triton.ops.linear import small_batch, split_k
from pelton_backends.triton.ops.linear.hopper_mid_batch import MidBatchProduct
from pelton_backends.triton.ops.linear.hopper_split_k import HopperProduct, HopperTiling, choose_hopper_tiling
from pelton_backends.triton.ops.linear.mid_batch_tilings import MidBatchTiling, choose_mid_batch_tiling
from pelton_backends.triton.ops.linear.small_batch import (
    MAX_TOKENS,
    MIN_TOKENS,
    SmallBatchAddNormGatedLinear,
    SmallBatchAddNormLinear,
    SmallBatchLinear,
)
from pelton_backends.triton.ops.linear.split_k import Tiling, multiply
from pelton_backends.triton.runtime import attention_starts_early

DTYPES = (torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """Outputs and workspaces hold NaN before a kernel writes them."""
    made = torch.empty

    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = made(*args, **kwargs)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(split_k.torch, "empty", empty)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"residual": False}, id="first-layer"),
        pytest.param({"post_norm": True, "row_gap": 8}, id="post-norm"),
        pytest.param({"unit_offset": True, "bias": True, "row_gap": 3}, id="unit-offset-bias"),
    ],
)
def test_add_norm_linear_follows_the_oracle(options, dtype, device):
    for rows, size, out in ((9, 128, 64), (17, 100, 75)):
        check(make_case(rows, size, out, dtype, device, **options), SmallBatchAddNormLinear)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_add_norm_gated_linear_follows_the_oracle(activation, dtype, device):
    check(make_case(9, 96, 2 * 75, dtype, device, activation=activation), SmallBatchAddNormGatedLinear)
    check(make_case(16, 64, 2 * 32, dtype, device, activation=activation, bias=True), SmallBatchAddNormGatedLinear)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_follows_the_oracle(dtype, device):
    check(make_case(9, 513, 50, dtype, device, norm=False, row_gap=8), SmallBatchLinear)
    check(make_case(33, 512, 64, dtype, device, norm=False, bias=True), SmallBatchLinear)


# Of 100 and 200 columns some parts have a cut last step, and of 100 in four parts of 32 one is empty but for 4 columns.
@pytest.mark.parametrize("tiling", [Tiling(64, 32, 1, 2, 4), Tiling(64, 32, 4, 2, 4), Tiling(32, 16, 3, 3, 4)], ids=str)
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("in_features", [64, 100, 200])
def test_every_tiling_gives_the_product(in_features, activation, tiling, device):
    case = make_case(11, in_features, 150, torch.float16, device, norm=False, bias=True)
    counters = torch.zeros(8, dtype=torch.int32, device=device)
    for _ in range(2):  # the second call starts from the counters that the first one left
        result = multiply(case.hidden, case.weight, case.bias, activation, counters, tiling)
        assert not counters.any()
        assert_close(result, replace(case, activation=activation).expected()[0], "result", factor=2.0)


def test_refuses_with_reasons(device):
    case = make_case(9, 64, 64, torch.float32, device, activation="silu")
    assert "dtype float32" in SmallBatchAddNormGatedLinear.unsupported(case.needs)[0]
    needs = replace(case.to("cpu").needs, dtype="float16")
    assert SmallBatchAddNormGatedLinear.unsupported(needs) == []
    assert "tp_size 2" in SmallBatchAddNormLinear.unsupported(replace(needs, tp_size=2))[0]
    assert "'relu'" in SmallBatchAddNormGatedLinear.unsupported(replace(needs, activation="relu"))[0]
    quantized = replace(needs.linear, weight_format="int4")
    assert "'int4'" in SmallBatchAddNormGatedLinear.unsupported(replace(needs, linear=quantized))[0]


def test_large_matrices_and_many_rows_go_to_the_library(monkeypatch, device):
    needs = make_case(9, 64, 64, torch.float16, device).needs
    assert SmallBatchAddNormLinear.token_range(needs) == (MIN_TOKENS, MAX_TOKENS)
    calls: list[int] = []

    def noted(product: Any) -> Any:
        return lambda *args, **kwargs: (
            calls.append(kwargs["out"].untyped_storage().nbytes()) or product(*args, **kwargs)
        )

    monkeypatch.setattr(small_batch.torch, "mm", noted(torch.mm))
    monkeypatch.setattr(small_batch.torch, "addmm", noted(torch.addmm))
    monkeypatch.setattr(small_batch, "SMALL_MATRIX", 100 * 160)
    for rows in (128, 129):
        check(make_case(rows, 100, 160, torch.float16, device), SmallBatchAddNormLinear)
        check(make_case(rows, 101, 160, torch.float16, device, bias=True), SmallBatchAddNormLinear)
        check(make_case(rows, 101, 160, torch.float16, device, activation="silu"), SmallBatchAddNormGatedLinear)
    assert calls == [256 * 160 * 2] * 2  # bytes: there are rows behind the 129th, for kernels that read tiles of rows


def test_mid_batch_tilings_cover_the_product_and_fit_the_device():
    chosen = set()
    for num_tokens in range(1, 260):
        for out, size in (
            (1024, 3072),
            (6144, 1024),
            (6144, 4096),
            (4096, 4096),
            (4096, 14336),
            (4096, 14400),
            (4096, 7168),
            (2048, 4096),
            (3584, 18944),
            (14336, 4096),
            (28672, 4096),
            (31744, 4096),
        ):
            for is_gated in (False, True):
                tiling = choose_mid_batch_tiling(num_tokens, out, size, is_gated)
                if tiling is None:
                    continue
                assert 64 < num_tokens <= 256
                chosen.add(tiling)
                run, rows, groups, split, stages, _ = tiling
                assert size % (64 * split) == 0 and (split == 1 or run == rows)
                assert rows <= run <= 2 * rows and rows <= 256 and groups * rows <= 512
                assert run % (16 if is_gated else 32) == 0 and rows.bit_count() <= 3
                assert stages >= 2 and (triton.next_power_of_2(rows) + 64 * groups) * 128 * stages <= 225_000
                programs = -(-out // run) * -(-num_tokens // (64 * groups)) * split
                assert 96 <= programs <= 132, (tiling, num_tokens, out, size)
                # `_product` has a counter for each.
                assert programs * groups <= -(-out // split_k.SMALLEST_TILE) * (MAX_TOKENS // 16)
    assert len(chosen) >= 4
    groups = {
        (rows, out): choose_mid_batch_tiling(rows, out, 1024, True) for rows in (64, 65, 128) for out in (6144, 6400)
    }
    assert {place for place, tiling in groups.items() if tiling} == {(65, 6144), (128, 6144)}, "runs of 96 rows alone"
    assert choose_mid_batch_tiling(128, 6144, 4096, True) is None, "a large matrix"
    small = {rows: choose_mid_batch_tiling(rows, 2048, 4096, False) for rows in (64, 65, 128, 129, 192, 193, 256)}
    assert [rows for rows, tiling in small.items() if tiling] == [65, 128, 193, 256], "as measured of Qwen3-30B-A3B's O"
    assert choose_mid_batch_tiling(128, 2048, 2048, False) is None, "short rows"


def test_products_in_front_of_attention_that_starts_early_leave_it_room(device, monkeypatch):
    """Of the sizes that were measured, in such steps alone."""
    tilings = []

    def multiply(self: HopperProduct, x: torch.Tensor, tiling: HopperTiling | None = None) -> torch.Tensor:
        tilings.append(tiling)
        return x.new_empty(len(x), 1)

    monkeypatch.setattr(small_batch, "can_multiply", lambda weight: True)
    monkeypatch.setattr(HopperProduct, "__call__", multiply)
    for starts_early in (True, False):
        token = attention_starts_early.set(starts_early)
        for out, size in ((4096, 1024), (4096, 2048), (1024, 2048)):
            spec = LinearSpec(in_features=size, out_features=out)
            weight = torch.zeros(out, size, dtype=torch.bfloat16, device=device)
            product = small_batch.product_of(LinearWeights(spec, {"weight": weight}))
            for rows in (64, 65, 128):
                product(torch.zeros(rows, size, dtype=weight.dtype, device=device))
        attention_starts_early.reset(token)
    chosen = [tiling for tiling in tilings if tiling is not None]
    assert len(tilings) == 18 and chosen == tilings[1:3]
    (tiling,) = set(chosen)
    assert -(-4096 // tiling.rows) * -(-128 // tiling.tokens) == 128 and 1024 % (tiling.columns * tiling.split) == 0
    for group, num_tokens, sums in ((2, 4, 4096), (2, 6, 8192)):  # bytes of a warp's sums
        shape = resident_shape(17, 8, group, num_tokens, 132)
        of_attention = shape.buffers * shape.chunk * 512 + shape.warps * sums
        of_product = tiling.stages * (tiling.rows + tiling.tokens) * tiling.columns * 2
        assert of_attention + of_product <= 226 * 1024, "on one multiprocessor, with 1 KiB for each program"
    assert (tiling.rows + tiling.tokens) * tiling.columns * 2 * tiling.stages <= 200_000


def test_tilings_cover_the_product_and_fit_the_device():
    for num_tokens in (1, 8, 9, 24, 40, 80, 128, 200, 256):
        for out, size in ((1024, 3072), (6144, 1024), (28672, 4096), (4096, 14336), (128, 64), (150000, 1024)):
            tiling = choose_hopper_tiling(num_tokens, out, size)
            assert (tiling.rows + tiling.tokens) * tiling.columns * 2 * tiling.stages <= 200_000
            assert tiling.stages >= 2 or tiling.columns * tiling.split >= size
            blocks = -(-num_tokens // tiling.tokens)
            # `_product` has a counter for each.
            assert -(-out // tiling.rows) * blocks <= -(-out // split_k.SMALLEST_TILE) * (MAX_TOKENS // 16)


@pytest.mark.parametrize("num_tokens", [1, 16, 17, 32, 64, 128])
def test_two_programs_with_gate_and_up_in_8_bits_fit_a_multiprocessor(num_tokens):
    tiling = choose_hopper_tiling(num_tokens, 28672, 4096, 1)
    assert (tiling.rows, tiling.columns) == (128, 128) and tiling.stages >= 3
    assert (tiling.rows + tiling.tokens) * tiling.columns * tiling.stages + 2048 <= 228 * 1024 // 2 - 1024
    assert num_tokens not in (17, 32) or tiling.stages == 5


SHAPES = [  # hidden, QKV, O in, gate and up, down in
    pytest.param((1024, 4096, 2048, 6144, 3072), id="0.6B"),
    pytest.param((4096, 6144, 4096, 28672, 14336), id="8B"),
    pytest.param((4096, 3072, 2048, 14336, 7168), id="8B, one of two ranks"),
    pytest.param((1152, 1792, 1000, 2 * 1001, 1001), id="odd"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 9, 24, 33, 64, 65, 128, 189, 200, 256])
def test_real_sizes(rows, shape, device):
    hidden, qkv, o_in, gate_up, down_in = shape
    dtype = torch.bfloat16 if rows % 2 else torch.float16
    check(make_case(rows, hidden, qkv, dtype, device), SmallBatchAddNormLinear)
    check(make_case(rows, o_in, hidden, dtype, device, norm=False, row_gap=qkv - o_in, bias=True), SmallBatchLinear)
    check(make_case(rows, hidden, gate_up, dtype, device, activation="gelu_tanh"), SmallBatchAddNormGatedLinear)
    check(make_case(rows, down_in, hidden, dtype, device, norm=False), SmallBatchLinear)


HOPPER_TILINGS = [  # rows, columns, split, stages, tokens
    (64, 128, 1, 4, 128),
    (64, 64, 1, 2, 16),
    (64, 128, 2, 2, 16),
    (64, 256, 3, 2, 32),
    (64, 128, 1, 3, 64),
    (128, 64, 2, 3, 128),
    (128, 128, 1, 2, 32),
]


@pytest.mark.gpu
@pytest.mark.parametrize("tiling", HOPPER_TILINGS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_hopper_tiling_gives_the_product(dtype, tiling, device):
    if torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("for compute capability 9")
    # All of K in the buffers and several times round them, cut tiles of rows, tokens and K.
    for num_tokens, out_features, in_features, bias in ((11, 150, 192, True), (70, 1002, 1600, False)):
        case = make_case(num_tokens, in_features, out_features, dtype, device, norm=False, bias=bias, row_gap=8)
        for activation in (None, *sorted(ACTIVATIONS)):
            counters = torch.zeros(512, dtype=torch.int32, device=device)
            product = HopperProduct(case.weight, case.bias, activation, counters)
            for _ in range(2):
                result = product(case.hidden, HopperTiling(*tiling))
                assert not counters.any()
                assert_close(result, replace(case, activation=activation).expected()[0], "result", factor=2.0)


MID_BATCH_TILINGS = [  # run, rows, groups, split, stages
    (96, 96, 1, 1, 9, 128),
    (64, 64, 1, 2, 3, 96),
    (64, 64, 2, 1, 8),
    (64, 64, 2, 2, 9, 72),
    (48, 48, 2, 2, 4),
    (112, 112, 2, 1, 6),
    (224, 224, 2, 1, 4),
    (192, 192, 2, 4, 4),
    (224, 128, 4, 1, 4),
    (128, 128, 3, 4, 5),
]


@pytest.mark.gpu
@pytest.mark.parametrize("tiling", MID_BATCH_TILINGS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_mid_batch_tiling_gives_the_product(dtype, tiling, device):
    if torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("for compute capability 9")
    tiling = MidBatchTiling(*tiling)
    # One block of rows and several, cut runs, fewer steps than buffers and several times round them.
    for num_tokens, out_features, in_features, bias in (
        (65, 1008, 256, True),
        (131, 1264, 1280, False),
        (300, 160, 768, True),
    ):
        case = make_case(num_tokens, in_features, out_features, dtype, device, norm=False, bias=bias, row_gap=8)
        for activation in (None, *sorted(ACTIVATIONS)) if tiling.split == 1 else (None,):
            counters = torch.zeros(512, dtype=torch.int32, device=device)
            product = MidBatchProduct(case.weight, case.bias, activation, counters)
            results = [product(case.hidden, tiling) for _ in range(3)]
            assert not counters.any()
            assert all(torch.equal(results[0], other) for other in results[1:])
            assert_close(results[0], replace(case, activation=activation).expected()[0], "result", factor=2.0)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "sizes"),
    [
        *((rows, (1024, 4096, 2048, 6144, 3072)) for rows in (24, 64, 128, 200)),
        *((rows, (4096, 2560, 2560, 16384, 8192)) for rows in (190, 250)),
    ],
)
def test_captured_chain_repeats_bit_for_bit(rows, sizes, device):
    """Dependent launches over shared workspaces: a race would show as other bits, or as a counter left above zero."""
    hidden, qkv, o_in, gate_up, down_in = sizes
    cases = [
        (
            make_case(rows, hidden, qkv, torch.bfloat16, device, seed=seed),
            make_case(rows, o_in, hidden, torch.bfloat16, device, norm=False, seed=seed),
            make_case(rows, hidden, gate_up, torch.bfloat16, device, activation="silu", seed=seed),
            make_case(rows, down_in, hidden, torch.bfloat16, device, norm=False, seed=seed),
        )
        for seed in range(6)
    ]
    made: list[torch.Tensor] = []
    zeros = torch.zeros
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small_batch.torch, "zeros", lambda *a, **k: made.append(zeros(*a, **k)) or made[-1])
        kinds = (SmallBatchAddNormLinear, SmallBatchLinear, SmallBatchAddNormGatedLinear, SmallBatchLinear)
        layers = [[kind.bind(c.needs, c.tensors) for kind, c in zip(kinds, layer, strict=True)] for layer in cases]
    start, first_residual = cases[0][0].hidden, torch.empty_like(cases[0][0].hidden).copy_(cases[0][0].hidden)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        rows, residual = start.clone(), first_residual.clone()
        for qkv_product, o_product, gated_product, down_product in layers:
            qkv_rows, residual = qkv_product(rows, residual)
            rows, residual = gated_product(o_product(qkv_rows[:, :o_in]), residual)
            rows = down_product(rows)
        return rows, residual

    eager = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    for _ in range(200):
        for tensor in result:
            tensor.fill_(torch.nan)
        graph.replay()
        assert all(torch.equal(new, old) for new, old in zip(result, eager, strict=True))
    assert len(made) == 24 and not any(counters.any() for counters in made)
