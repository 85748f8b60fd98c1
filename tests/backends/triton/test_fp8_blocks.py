"""Products with e4m3 weights whose blocks have scales, against torch's op."""

import pytest
import torch

from pelton.ops.interface import (
    AddNormGatedLinearNeeds,
    AddNormGatedLinearTensors,
    AddNormLinearNeeds,
    AddNormLinearTensors,
    LinearNeeds,
    LinearSpec,
    LinearTensors,
    LinearWeights,
    NormSpec,
)
from pelton_backends.triton.ops.linear import decoded
from pelton_backends.triton.ops.linear.fp8_blocks import Fp8BlocksAddNormLinear, Fp8BlocksLinear
from pelton_backends.triton.ops.linear.hopper_blocks import ROWS, add_norm_split, choose_blocks_tiling, split_rows
from pelton_backends.triton.ops.linear.large_batch import add_norm, gated
from pelton_backends.triton.ops.pieces import Norm
from pelton_plugins.quantization.reference import Fp8BlocksReference


def case(device, num_rows, num_cols, size, dtype="bfloat16", has_bias=False, group_rows=1):
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
    )
    weights = LinearWeights(spec, {"weight": weight, "weight_scale": scale}, bias)
    return LinearNeeds(dtype=dtype, linear=spec), LinearTensors(weights)


def check(needs, tensors, num_tokens):
    device = tensors.linear.tensors["weight"].device
    generator = torch.Generator(device).manual_seed(num_tokens)
    x = torch.randn(num_tokens, needs.linear.in_features + 8, generator=generator, device=device).to(
        getattr(torch, needs.dtype)
    )[:, 8:]
    want = Fp8BlocksReference.bind(needs, tensors)(x).float()
    got = Fp8BlocksLinear.bind(needs, tensors)(x).float()
    assert got.shape == want.shape
    assert (got - want).norm() <= 6e-3 * want.norm()


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


def check_behind_norm(needs, tensors, num_tokens):
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
    assert (got.float() - want).norm() <= 6e-3 * want.norm()
    assert (got.float() - want).norm(dim=1).le(2e-2 * want.norm(dim=1)).all()


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


@pytest.mark.parametrize("num_tokens", [1, 16, 40, 64, 65, 128, 256])
@pytest.mark.parametrize(
    "sizes", [(28672, 4096), (6144, 4096), (4096, 14336), (2048, 768), (100, 128), (512, 2688)], ids=str
)
def test_tilings_fit(num_tokens, sizes):
    out_features, in_features = sizes
    tokens, split, panels, stages = choose_blocks_tiling(num_tokens, out_features, in_features)
    blocks = in_features // 128
    assert blocks % (split * panels) == 0 and 1 <= stages <= blocks // (split * panels)
    assert stages * panels * 128 * (ROWS + 2 * tokens) < 226 * 1024
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


def test_says_why_it_refuses(device):
    needs, _ = case(device, 16, 32, 16)
    assert Fp8BlocksLinear.unsupported(needs) == []
    other = LinearNeeds(dtype="float32", linear=LinearSpec(in_features=32, out_features=16, weight_format="fp8_e4m3"))
    assert Fp8BlocksLinear.unsupported(other) == [
        "weight format 'fp8_e4m3', only 'fp8_blocks'", "dtype float32, only bfloat16, float16",
    ]  # fmt: skip
