"""Products of rows and weights in e4m3 against the torch reference."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.nn.functional as F
import triton
from pelton_linear_oracle import Case, make_case

from pelton.ops.interface import InputRounding, LinearWeights
from pelton_backends.reference.ops import (
    ReferenceAddNorm,
    ReferenceAddNormGatedLinear,
    ReferenceAddNormLinear,
    ReferenceGated,
)
from pelton_backends.triton.ops.linear import fp8, fp8_one_row, hopper_matmul, hopper_split_k
from pelton_backends.triton.ops.linear.fp8 import Fp8AddNormGatedLinear, Fp8AddNormLinear, Fp8Linear
from pelton_backends.triton.ops.linear.mid_batch_tilings import choose_e4m3_tiling
from pelton_backends.triton.ops.pieces import Norm
from pelton_plugins.quantization.numbers import round_rows, row_scales
from pelton_plugins.quantization.reference import Fp8LinearReference

DYNAMIC = InputRounding(dtype="float8_e4m3fn")
OPS = {
    "linear": (Fp8Linear, {"norm": False}),
    "add_norm_linear": (Fp8AddNormLinear, {}),
    "add_norm_gated_linear": (Fp8AddNormGatedLinear, {"activation": "silu"}),
}


def make(num_rows, in_features, out_features, device, inputs=DYNAMIC, dtype=torch.float16, **options) -> Case:
    case = make_case(num_rows, in_features, out_features, dtype, device, **options)
    scales = row_scales(case.weight)
    tensors = {"weight": round_rows(case.weight, scales), "weight_scale": scales}
    if not inputs.is_dynamic:
        tensors["input_scale"] = torch.tensor(0.005, device=device)
    spec = replace(case.needs.linear, weight_format="fp8_e4m3", inputs=inputs)
    case.packed = LinearWeights(spec, tensors, case.bias)
    return case


def bind_reference(op, needs, tensors):
    return {"add_norm": ReferenceAddNorm, "linear": Fp8LinearReference, "gated": ReferenceGated}[op].bind(
        needs, tensors
    )


def check(case: Case, implementation) -> None:
    """An input between two numbers of e4m3 may fall either way, as norms are summed in another order."""
    needs, tensors = case.needs, case.tensors
    if case.norm is None:
        want, total = Fp8LinearReference.bind(needs, tensors)(case.hidden), None
    else:
        composed = ReferenceAddNormLinear if case.activation is None else ReferenceAddNormGatedLinear
        want, total = case.call(composed.compose(needs, tensors, bind_reference))
    got, got_total = case.run(implementation)
    assert got.dtype == want.dtype and got.shape == want.shape
    factor = 1.0 if got.dtype == torch.float16 else 2.0
    assert (got.double() - want.double()).norm() <= factor * 6e-3 * want.double().norm()
    torch.testing.assert_close(got, want, atol=0.1, rtol=0 if got.dtype == torch.float16 else 1.6e-2)
    if total is not None:
        torch.testing.assert_close(got_total, total, atol=3e-3, rtol=2e-3 if got.dtype == torch.float16 else 1.6e-2)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("num_rows", [0, 1, 2, 19])
def test_follows_the_reference(op, num_rows, device):
    implementation, kind = OPS[op]
    check(make(num_rows, 96, 64, device, **kind), implementation)


OPTIONS = [
    pytest.param({"residual": False}, id="first-layer"),
    pytest.param({"bias": True, "inputs": replace(DYNAMIC, is_dynamic=False)}, id="one-scale-bias"),
    pytest.param({"post_norm": True, "unit_offset": True, "inputs": replace(DYNAMIC, bound=1.0)}, id="norms-bound"),
    pytest.param({"post_norm": True, "residual": False}, id="post-norm-first-layer"),
]


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("options", OPTIONS)
def test_options(options, num_rows, device):
    for op in ("add_norm_linear", "add_norm_gated_linear"):
        implementation, kind = OPS[op]
        check(make(num_rows, 160, 48, device, **kind, **options), implementation)


LARGE = [
    pytest.param(4096, 4112, {}, id="rows-of-64"),
    pytest.param(1024, 17424, {"residual": False}, id="rows-of-128-and-a-rest"),
    pytest.param(2048, 5120, {}, id="a-short-row-whole"),
    pytest.param(4096, 2048, {}, id="few-rows-in-two-parts"),
    pytest.param(14336, 1184, {}, id="a-long-row-in-parts"),
    pytest.param(2048, 8208, {"bias": True, "inputs": replace(DYNAMIC, is_dynamic=False)}, id="one-scale-bias"),
    pytest.param(
        4096, 8192, {"post_norm": True, "unit_offset": True, "inputs": replace(DYNAMIC, bound=1.0)}, id="norms-bound"
    ),
]


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("in_features, out_features, options", LARGE)
def test_one_row_of_a_large_matrix_is_streamed(op, in_features, out_features, options, device):
    implementation, kind = OPS[op]
    if op == "linear":
        options = {name: value for name, value in options.items() if name in ("bias", "inputs")}
    case = make(1, in_features, out_features, device, dtype=torch.bfloat16, **kind, **options)
    assert case.weight.numel() >= fp8.ONE_ROW_NUMBERS
    if not fp8_one_row.OneRowProduct.takes(case.packed.tensors["weight"]):
        pytest.skip("only on Hopper")
    for _ in range(2):  # the second finds the counters as the first left them
        check(case, implementation)


@pytest.mark.parametrize(
    "out_features, in_features, is_taken",
    [
        (28672, 4096, True),
        (4096, 14336, True),
        (6144, 4096, True),
        (57344, 8192, False),  # three buffers
        (4096, 18432, False),  # too long a row
        (4096, 3584, False),  # half a piece
        (5120, 2048, True),
        (2048, 4096, True),
    ],
)
def test_one_row_is_streamed_where_buffers_and_pieces_fit(monkeypatch, out_features, in_features, is_taken):
    monkeypatch.setattr(hopper_split_k, "is_hopper", lambda device: True)
    weight = torch.empty(out_features, in_features, dtype=torch.float8_e4m3fn)
    assert fp8_one_row.OneRowProduct.takes(weight) == is_taken


def test_one_row_has_a_kernel_for_each_set_of_its_tensors(monkeypatch):
    """What is there is compiled in: a launch whose key left out the norm took the kernel of a product without one."""
    keys: list[object] = []
    monkeypatch.setattr(hopper_split_k, "is_hopper", lambda device: True)
    monkeypatch.setattr(fp8_one_row, "_launch", lambda key, *arguments, **options: keys.append(key))
    size, out = 4096, 128
    weight, scale = torch.zeros(out, size, dtype=torch.float8_e4m3fn), torch.ones(out)
    row, one, bias = torch.zeros(1, size, dtype=torch.bfloat16), torch.ones(()), torch.zeros(out, dtype=torch.bfloat16)
    norm = Norm(torch.ones(size, dtype=torch.bfloat16), 1e-6, False)
    assert fp8_one_row.OneRowProduct.takes(weight)
    for bias_given, input_scale, norms in product(
        (None, bias), (None, one), ((None, None), (norm, None), (norm, norm))
    ):
        bound = fp8_one_row.OneRowProduct(weight, scale, bias_given, None, input_scale, None, *norms)
        for residual in (None, row):
            bound(row, residual)
    assert len(set(keys)) == len(keys) == 24


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [2, 17, 65, 100, 128])
@pytest.mark.parametrize("op", OPS)
def test_few_rows_with_copies_ahead(op, num_rows, device):
    implementation, kind = OPS[op]
    large = ((4096, 28672),) if num_rows > 64 else ()
    for size, out in ((384, 208), (4096, 1024), (14336, 4096), *large):
        case = make(num_rows, size, out, device, dtype=torch.bfloat16, **kind)
        if not hopper_split_k.can_multiply(case.packed.tensors["weight"]):
            pytest.skip("only on Hopper")
        for _ in range(2):  # the second finds the counters as the first left them
            check(case, implementation)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("num_rows, in_features, out_features", [(129, 272, 48), (400, 512, 1040), (3100, 2048, 1024)])
def test_tiles_of_gate_and_up(num_rows, in_features, out_features, activation, device):
    """Rows and columns that no tile divides, and tiles of the last round in two halves."""
    weight = torch.randn(out_features, in_features, device=device)
    if not hopper_matmul.can_multiply_many(weight.to(torch.float8_e4m3fn)):
        pytest.skip("only on Hopper")
    scales = row_scales(weight)
    numbers = round_rows(weight, scales)
    rows, row_scale = fp8.rounded(torch.randn(num_rows, in_features, device=device).to(torch.bfloat16))
    gate, up = ((rows.float() * row_scale[:, None]) @ (numbers.float() * scales[:, None]).T).chunk(2, dim=1)
    want = (F.silu(gate) if activation == "silu" else F.gelu(gate)) * up
    for _ in range(2):
        got = hopper_matmul.hopper_matmul(rows, numbers, activation, scales=(row_scale, scales), dtype=torch.bfloat16)
        assert (got.float() - want).norm() <= 6e-3 * want.norm()


def test_gate_and_up_take_tiles_where_they_fill_the_device():
    taken = [rows for rows in (129, 2048, 4096, 4250, 16384) if fp8.is_for_tiles(rows, 28672, 4096, "silu", 132)]
    assert taken == [4096, 16384]


def test_tilings_of_65_to_128_rows_cover_the_product_and_fit_the_device():
    chosen = {}
    for num_tokens, (out, size), is_gated in product(
        (64, 65, 128, 129), ((28672, 4096), (24576, 4096), (4096, 14336), (3216, 18432), (208, 384)), (False, True)
    ):
        tiling = choose_e4m3_tiling(num_tokens, out, size, is_gated)
        if tiling is None:
            continue
        chosen[out, size] = tiling
        assert 64 < num_tokens <= 128 and tiling.run == tiling.rows <= 256
        assert size % (128 * tiling.split) == 0 and not (is_gated and (tiling.split > 1 or out % 16))
        assert 96 <= triton.cdiv(out, tiling.run) * tiling.split * triton.cdiv(num_tokens, 64 * tiling.groups) <= 132
        assert (triton.next_power_of_2(tiling.rows) + 64 * tiling.groups) * 128 * tiling.stages <= 225_000
    assert set(chosen) == {(28672, 4096), (24576, 4096), (4096, 14336), (3216, 18432)}


def test_several_pieces_of_a_long_row_and_strided_rows(device):
    check(make(1, 2304, 48, device, norm=False), Fp8Linear)
    check(make(1, 8208, 16, device, norm=False), Fp8Linear)
    check(make(1, 1040, 48, device), Fp8AddNormLinear)
    check(make(3, 96, 48, device, norm=False, bias=True, row_gap=8), Fp8Linear)


@pytest.mark.parametrize("inputs", [DYNAMIC, replace(DYNAMIC, bound=1.5)], ids=["dynamic", "bound"])
def test_rows_are_rounded_as_the_reference_does(inputs, device):
    x = torch.randn(7, 200, device=device).half() * torch.logspace(-3, 3, 7, device=device)[:, None].half()
    x[2] = 0
    rows, scales = fp8.rounded(x, None, inputs.bound)
    wanted = row_scales(x, inputs.bound)
    assert torch.equal(scales, wanted)
    assert torch.equal(rows.view(torch.uint8), round_rows(x, wanted).view(torch.uint8))
    fixed, _ = fp8.rounded(x, torch.tensor(0.01, device=device))
    assert torch.equal(fixed.view(torch.uint8), round_rows(x, torch.full((7,), 0.01, device=device)).view(torch.uint8))


@pytest.mark.parametrize("num_rows", [1, 3])
def test_nan_stays_in_its_row_and_is_not_lost(num_rows, device):
    case = make(num_rows, 96, 48, device, norm=False)
    case.hidden[0, 5] = torch.nan
    result, _ = case.run(Fp8Linear)
    assert result[0].isnan().all() and not result[1:].isnan().any()


def test_refuses_with_reasons(device):
    needs = make(1, 96, 64, device, norm=False).needs
    linear = needs.linear

    def why(**changes):
        return Fp8Linear.unsupported(replace(needs, linear=replace(linear, **changes)))

    assert why() == []
    assert why(weight_format="plain") == ["weight format 'plain', only 'fp8_e4m3'"]
    assert why(inputs=None) == ["inputs that are not rounded to float8_e4m3fn"]
    assert why(in_features=40) == ["64 x 40 numbers, only multiples of 16"]
    assert Fp8Linear.unsupported(replace(needs, dtype="float32")) == ["dtype float32, only bfloat16, float16"]
