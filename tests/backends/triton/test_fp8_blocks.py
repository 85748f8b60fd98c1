"""Products with e4m3 weights whose blocks have scales, against torch's op."""

from dataclasses import replace

import pytest
import torch

from pelton.ops.interface import (
    AddNormGatedLinearNeeds,
    AddNormGatedLinearTensors,
    AddNormLinearNeeds,
    AddNormLinearTensors,
    InputRounding,
    LinearNeeds,
    LinearSpec,
    LinearTensors,
    LinearWeights,
    NormSpec,
)
from pelton.ops.selector import reasons_against
from pelton_backends.triton.ops.linear import decoded, fp8_blocks
from pelton_backends.triton.ops.linear.fp8 import add_norm_rounded, rounded
from pelton_backends.triton.ops.linear.fp8_blocks import Fp8BlocksAddNormLinear, Fp8BlocksLinear, Fp8BlocksMatrix
from pelton_backends.triton.ops.linear.hopper_blocks import ROWS, add_norm_split, choose_blocks_tiling, split_rows
from pelton_backends.triton.ops.linear.large_batch import add_norm, gated
from pelton_backends.triton.ops.pieces import Norm
from pelton_plugins.quantization.reference import Fp8BlocksReference

DYNAMIC = InputRounding(dtype="float8_e4m3fn")


def case(device, num_rows, num_cols, size, dtype="bfloat16", has_bias=False, group_rows=1, inputs=None):
    generator = torch.Generator(device).manual_seed(num_rows)
    draw = {"generator": generator, "device": device}
    weight = (torch.randn(num_rows, num_cols, **draw) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-num_rows // group_rows), num_cols // size, **draw) * 1e-3
    scale = scale.repeat_interleave(group_rows, dim=0)[:num_rows].contiguous()
    bias = torch.randn(num_rows, **draw).to(getattr(torch, dtype)) if has_bias else None
    spec = LinearSpec(
        in_features=num_cols,
        out_features=num_rows,
        weight_format="fp8_blocks",
        has_bias=has_bias,
        group_rows=group_rows,
        inputs=inputs,
    )
    weights = LinearWeights(spec, {"weight": weight, "weight_scale": scale}, bias)
    return LinearNeeds(dtype=dtype, linear=spec), LinearTensors(weights)


def check(needs, tensors, num_tokens, tolerance=6e-3):
    device = tensors.linear.tensors["weight"].device
    generator = torch.Generator(device).manual_seed(num_tokens)
    x = torch.randn(num_tokens, needs.linear.in_features + 8, generator=generator, device=device).to(
        getattr(torch, needs.dtype)
    )[:, 8:]
    want = Fp8BlocksReference.bind(needs, tensors)(x).float()
    got = Fp8BlocksLinear.bind(needs, tensors)(x).float()
    assert got.shape == want.shape
    assert (got - want).norm() <= tolerance * want.norm()


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 17, 70])
@pytest.mark.parametrize(
    "num_rows, num_cols, size", [(40, 256, 128), (100, 384, 128), (64, 96, 32), (8, 1024, 64), (130, 48, 16)]
)
def test_equals_torch(device, num_rows, num_cols, size, num_tokens):
    check(*case(device, num_rows, num_cols, size), num_tokens)


@pytest.mark.parametrize("num_tokens", [1, 5, 300])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_biases_and_more_rows(device, dtype, num_tokens, monkeypatch):
    monkeypatch.setattr(decoded, "NUMBERS_AT_ONCE", 16 * 256)
    check(*case(device, 100, 256, 128, dtype, has_bias=True), num_tokens)


@pytest.mark.parametrize("activation", [None, "silu"])
def test_many_rows_go_to_the_kernel_that_computes_the_activation(activation, device, monkeypatch):
    calls = []

    def multiply(x, weight, activation):
        calls.append((weight.shape, activation))
        out = x.float() @ weight.float().T
        return (out if activation is None else gated(out, activation)).to(x.dtype)

    monkeypatch.setattr(decoded, "can_multiply_many", lambda weight: True)
    monkeypatch.setattr(decoded, "hopper_matmul", multiply)
    monkeypatch.setattr(decoded, "share_of_work", lambda *sizes: 0.9)
    monkeypatch.setattr(decoded, "MIN_ROWS", 300)
    needs, tensors = behind_norm(device, 128, 256, activation=activation)
    for num_tokens in (299, 300):
        check_behind_norm(needs, tensors, num_tokens)
    assert calls == [((128, 256), activation)]


def behind_norm(device, num_rows, num_cols, dtype="bfloat16", activation=None, has_post_norm=False, **form):
    """Needs and tensors of a product behind a norm, and the norm's."""
    needs, tensors = case(device, num_rows, num_cols, 128, dtype, **form)
    norm, post_norm = NormSpec(size=num_cols, eps=1e-6), NormSpec(size=num_cols, eps=1e-5) if has_post_norm else None
    generator = torch.Generator(device).manual_seed(3)
    vectors = torch.randn(2, num_cols, generator=generator, device=device).to(getattr(torch, dtype))
    given = {"norm": vectors[0], "post_norm": vectors[1] if has_post_norm else None, "linear": tensors.linear}
    shared = {"dtype": dtype, "linear": needs.linear, "norm": norm, "post_norm": post_norm}
    if activation is None:
        return AddNormLinearNeeds(**shared), AddNormLinearTensors(**given)
    return AddNormGatedLinearNeeds(**shared, activation=activation), AddNormGatedLinearTensors(**given)


def check_behind_norm(needs, tensors, num_tokens, tolerance=6e-3):
    linear, dtype = tensors.linear, getattr(torch, needs.dtype)
    device = linear.tensors["weight"].device
    generator = torch.Generator(device).manual_seed(num_tokens)
    rows = torch.randn(2, num_tokens, needs.norm.size, generator=generator, device=device)
    hidden, residual = (rows * torch.tensor([1.0, 30.0], device=device)[:, None, None]).to(dtype)
    post = (tensors.post_norm, needs.post_norm)
    total, x = add_norm(hidden.clone(), residual.clone(), tensors.norm, needs.norm, *post)
    want = Fp8BlocksReference.bind(LinearNeeds(dtype=needs.dtype, linear=needs.linear), LinearTensors(linear))(x)
    activation = getattr(needs, "activation", None)
    want = (want if activation is None else gated(want.contiguous(), activation)).float()
    assert Fp8BlocksAddNormLinear.unsupported(needs) == []
    got, found = Fp8BlocksAddNormLinear.bind(needs, tensors)(hidden, residual)
    assert torch.equal(found, total)
    assert (got.float() - want).norm() <= tolerance * want.norm()
    assert (got.float() - want).norm(dim=1).le(max(2e-2, 2 * tolerance) * want.norm(dim=1)).all()


@pytest.mark.parametrize("num_tokens", [1, 5, 70])
@pytest.mark.parametrize("activation, has_post_norm", [(None, False), ("silu", False), (None, True)])
def test_norm_and_activation(device, activation, has_post_norm, num_tokens):
    check_behind_norm(*behind_norm(device, 128, 256, "bfloat16", activation, has_post_norm, group_rows=64), num_tokens)


def test_rows_are_the_sum_of_two(device):
    generator = torch.Generator().manual_seed(0)
    sizes = 10.0 ** torch.arange(-4, 4)[:, None]
    x = (torch.randn(8, 200, generator=generator) * sizes).bfloat16().to(device)
    x[3] = 0
    rows, inverse = split_rows(x)
    made = (rows[:, :200].double() + rows[:, 200:].double()) * inverse[:, None].double()
    large = x.abs() >= 2.0**-9 * x.abs().amax(1, keepdim=True)
    assert torch.equal(made[large], x[large].double())
    assert ((made - x.double()).abs() <= 2.0**-16 * x.abs().amax(1, keepdim=True)).all()
    x[5, 7] = torch.inf
    rows, inverse = split_rows(x)
    assert rows[5].float().isnan().all() and not rows[4].float().isnan().any()


def test_norms_of_rows_that_are_the_sum_of_two(device):
    hidden, residual = torch.randn(2, 5, 96, device=device).bfloat16()
    norm = Norm(torch.randn(96, device=device).bfloat16(), 1e-5, True)
    total, normed = add_norm(
        hidden.clone(), residual.clone(), norm.weight, NormSpec(size=96, eps=1e-5, unit_offset=True)
    )
    found, *split = add_norm_split(hidden, residual, norm, None)
    assert torch.equal(found, total)
    for one, other in zip(split, split_rows(normed), strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def pretend_hopper(monkeypatch):
    """As on such a device, with torch in place of its two products; return what they are called with: rows, terms or blocks."""
    calls = []

    def product(x, weight, scales, activation, dtype):
        out = (x @ (weight.double() * scales.double().repeat_interleave(128, 1)).T).to(dtype)
        return out if activation is None else gated(out.contiguous(), activation)

    class Few:
        def __init__(self, weight, scales, bias, activation, counters):
            self.weight, self.scales, self.bias, self.activation = weight, scales, bias, activation

        def __call__(self, rows, inverse, dtype):
            terms = rows.shape[1] // self.weight.shape[1]
            calls.append(("few", len(rows), terms))
            x = sum(part.double() for part in rows.chunk(terms, 1)) * inverse.double()[:, None]
            return product(x, self.weight, self.scales, self.activation, dtype)

    def many(x, inverse, weight, scales, activation, dtype):
        calls.append(("many", len(x), 1))
        return product(x.double() * inverse.double()[:, None], weight, scales, activation, dtype)

    def multiply_decoded(x, decoded, out_features, bias, activation):
        calls.append(("decoded", len(x), None))
        weight = decoded(slice(0, out_features), x.dtype)
        out = torch.nn.functional.linear(x, weight, bias)
        return out if activation is None else gated(out, activation)

    for name, value in {
        "can_multiply": lambda weight: True, "can_multiply_many": lambda weight: True,
        "BlocksProduct": Few, "many_blocks_matmul": many, "multiply_decoded": multiply_decoded,
    }.items():  # fmt: skip
        monkeypatch.setattr(fp8_blocks, name, value)
    return calls


FEW, MANY, DECODED = ("few", 32, 2), ("many", 257, 1), ("decoded", 257, None)


@pytest.mark.parametrize("num_tokens", [32, 33, 256, 257])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_rows_are_rounded_where_they_may_be(activation, num_tokens, device, monkeypatch):
    """Each path's result, and the sum that is handed on, are as torch says of the rows as they are: 3 bits of them are left."""
    calls = pretend_hopper(monkeypatch)
    form = {"group_rows": 128, "inputs": DYNAMIC}
    needs, tensors = behind_norm(device, 256, 128, "bfloat16", activation, **form)
    check_behind_norm(needs, tensors, num_tokens, 4e-2)
    if activation is None:
        check(LinearNeeds(dtype="bfloat16", linear=needs.linear), LinearTensors(tensors.linear), num_tokens, 4e-2)
    wanted = {32: FEW, 33: ("few", 33, 1), 256: ("few", 256, 1), 257: MANY}[num_tokens]
    assert set(calls) == {wanted}


@pytest.mark.parametrize(
    "form, more, most",
    [
        pytest.param({"group_rows": 128}, 2, DECODED, id="inputs-as-they-are"),
        pytest.param({"group_rows": 128, "inputs": replace(DYNAMIC, is_dynamic=False)}, 2, DECODED, id="one-scale"),
        pytest.param({"group_rows": 64, "inputs": DYNAMIC}, 1, DECODED, id="runs-of-64"),
        pytest.param({"group_rows": 128, "inputs": DYNAMIC, "has_bias": True}, 1, DECODED, id="bias"),
        pytest.param({"group_rows": 256, "inputs": DYNAMIC}, 1, MANY, id="runs-of-256"),
        pytest.param({"group_rows": 128, "inputs": DYNAMIC, "dtype": "float16"}, None, MANY, id="float16"),
    ],
)
def test_which_rows_are_rounded(form, more, most, device, monkeypatch):
    calls = pretend_hopper(monkeypatch)
    needs, tensors = case(device, 256, 128, 128, **form)
    for implementation in (Fp8BlocksLinear, Fp8BlocksReference):
        assert reasons_against(implementation, needs) == []
    matrix = Fp8BlocksMatrix(tensors.linear, needs.dtype)
    for num_tokens in (70, 257) if more is not None else (257,):
        matrix(torch.zeros(num_tokens, 128, dtype=getattr(torch, needs.dtype), device=device))
    assert calls == ([] if more is None else [("few", 70, more)]) + [most]


def test_halves_of_a_matrix_have_blocks_of_their_own(device, monkeypatch):
    pretend_hopper(monkeypatch)
    for num_rows, activation, takes in (
        (192, None, True),
        (192, "silu", False),
        (384, "silu", False),
        (256, "silu", True),
    ):
        _, tensors = case(device, num_rows, 128, 128, group_rows=128, inputs=DYNAMIC)
        assert Fp8BlocksMatrix(tensors.linear, "bfloat16", activation).takes_tiles is takes


def test_norms_of_rounded_rows(device):
    hidden, residual = torch.randn(2, 5, 96, device=device).bfloat16()
    norm = Norm(torch.randn(96, device=device).bfloat16(), 1e-5, True)
    total, normed = add_norm(
        hidden.clone(), residual.clone(), norm.weight, NormSpec(size=96, eps=1e-5, unit_offset=True)
    )
    found, *given = add_norm_rounded(hidden, residual, norm, None, None, None)
    assert torch.equal(found, total)
    for one, other in zip(given, rounded(normed), strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("num_tokens", [1, 16, 32, 33, 65, 128, 256])
@pytest.mark.parametrize(
    "sizes", [(28672, 4096), (6144, 4096), (4096, 14336), (2048, 768), (100, 128), (512, 2688)], ids=str
)
def test_tilings_fit(num_tokens, sizes, terms):
    out_features, in_features = sizes
    tokens, split, panels, stages = choose_blocks_tiling(num_tokens, out_features, in_features, terms)
    blocks = in_features // 128
    assert blocks % (split * panels) == 0 and 1 <= stages <= blocks // (split * panels)
    assert stages * panels * 128 * (ROWS + terms * tokens) < 226 * 1024
    assert panels * ROWS * tokens // 128 <= 128, "sums that registers hold"


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 3, 16, 33, 64, 100, 256])
@pytest.mark.parametrize(
    "num_rows, num_cols, activation",
    [(6144, 4096, None), (28672, 4096, "silu"), (4096, 14336, None), (2048, 768, None), (1536, 2048, "gelu_tanh"), (704, 128, None),
     (17088, 384, "silu")],
)  # fmt: skip
def test_blocks_on_hopper(device, num_rows, num_cols, activation, num_tokens):
    needs, tensors = behind_norm(device, num_rows, num_cols, "bfloat16", activation, group_rows=64)
    assert Fp8BlocksAddNormLinear.unsupported(needs) == []
    check_behind_norm(needs, tensors, num_tokens)
    if activation is None:
        plain = LinearNeeds(dtype="bfloat16", linear=needs.linear)
        check(plain, LinearTensors(tensors.linear), num_tokens)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [2, 200, 1100])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_blocks_on_hopper_with_biases_and_many_rows(device, dtype, num_tokens):
    check(*case(device, 4096, 2048, 128, dtype, has_bias=True, group_rows=128), num_tokens)
    check_behind_norm(*behind_norm(device, 8192, 2048, dtype, "silu", group_rows=128), num_tokens)


def check_rounded(needs, tensors, num_tokens):
    """Against float64 of the same rounded numbers, each row and all of them.

    Results are rounded to bfloat16 (2^-9 at most, a third of it in the mean of squares' root; those with an activation four times over).
    Sums of e4m3 keep 13 bits behind the largest of what is added, and cut off the rest: 2^-14 of the sums so far in the mean, for each of
    a block's four instructions, at most all one way. Sums of blocks are float32. As many rows as the weight has are alike on both sides
    (one seed makes them), so that products have one sign: where tensor cores add up 14,336 numbers, 0.15 of a row's norm is lost."""
    linear, activation = tensors.linear, getattr(needs, "activation", None)
    weight, scales = linear.tensors["weight"], linear.tensors["weight_scale"]
    generator = torch.Generator(weight.device).manual_seed(num_tokens)
    numbers = torch.randn(2, num_tokens, weight.shape[1], generator=generator, device=weight.device)
    hidden, residual = (
        numbers * torch.logspace(-2, 2, num_tokens, device=weight.device)[torch.randperm(num_tokens), None]
    ).bfloat16()
    tolerance = (2e-3 + 4 * 2**-14) * (1 if activation is None else 2)

    def compare(got, rows, inverse):
        x = rows.double() * inverse.double()[:, None]
        want = x @ (weight.double() * scales.double().repeat_interleave(128, 1)).T
        if activation is not None:
            gate, up = want.chunk(2, dim=1)
            want = (torch.nn.functional.silu(gate) if activation == "silu" else torch.nn.functional.gelu(gate)) * up
        off, size = (got.double() - want).norm(dim=1), want.norm(dim=1)
        assert off.norm() <= tolerance * size.norm()
        assert (off <= 2 * tolerance * size).all(), (off / size).max()

    norm = Norm(tensors.norm, needs.norm.eps, needs.norm.unit_offset)
    for _ in range(2):  # the second finds counters as the first left them
        total, *rows = add_norm_rounded(hidden.clone(), residual.clone(), norm, None, None, None)
        got, found = Fp8BlocksAddNormLinear.bind(needs, tensors)(hidden.clone(), residual.clone())
        assert torch.equal(found, total)
        compare(got, *rows)
    if activation is None:
        plain = LinearNeeds(dtype="bfloat16", linear=needs.linear)
        compare(Fp8BlocksLinear.bind(plain, LinearTensors(linear))(hidden), *rounded(hidden))


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [33, 65, 100, 128, 192, 256, 257, 300, 1000, 2111, 4096])
@pytest.mark.parametrize(
    "num_rows, num_cols, activation",
    [(6144, 4096, None), (28672, 4096, "silu"), (4096, 14336, None), (2048, 768, None), (1536, 2048, "gelu"), (704, 128, None),
     (2112, 7168, None), (17152, 384, "silu")],
)  # fmt: skip
def test_rounded_rows_on_hopper(device, num_rows, num_cols, activation, num_tokens):
    """Rows and columns that no tile divides, and blocks that the matrix ends in."""
    form = {"group_rows": 128, "inputs": DYNAMIC}
    needs, tensors = behind_norm(device, num_rows, num_cols, "bfloat16", activation, **form)
    if not Fp8BlocksMatrix(tensors.linear, "bfloat16", activation).takes_tiles:
        pytest.skip("only on Hopper")
    check_rounded(needs, tensors, num_tokens)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [65, 256, 257, 3000])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_scales_of_nothing_and_far_apart(device, activation, num_tokens):
    form = {"group_rows": 128, "inputs": DYNAMIC}
    needs, tensors = behind_norm(device, 2048, 2048, "bfloat16", activation, **form)
    if not Fp8BlocksMatrix(tensors.linear, "bfloat16", activation).takes_tiles:
        pytest.skip("only on Hopper")
    scales = tensors.linear.tensors["weight_scale"]
    scales[:, 1] *= 1e-6
    scales[:, 2], scales[:, -1], scales[128:256, 0] = 0, 0, 0
    scales[256:384, 5::2] *= 1e-4
    check_rounded(needs, tensors, num_tokens)


def test_says_why_it_refuses(device):
    needs, _ = case(device, 16, 32, 16)
    assert Fp8BlocksLinear.unsupported(needs) == []
    other = LinearNeeds(dtype="float32", linear=LinearSpec(in_features=32, out_features=16, weight_format="fp8_e4m3"))
    assert Fp8BlocksLinear.unsupported(other) == [
        "weight format 'fp8_e4m3', only 'fp8_blocks'", "dtype float32, only bfloat16, float16",
    ]  # fmt: skip
