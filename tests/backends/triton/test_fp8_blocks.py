"""Products with e4m3 weights whose blocks have scales, against torch's op."""

import pytest
import torch

from pelton.ops.interface import LinearNeeds, LinearSpec, LinearTensors, LinearWeights
from pelton_backends.triton.ops.linear import fp8_blocks
from pelton_backends.triton.ops.linear.fp8_blocks import Fp8BlocksLinear
from pelton_plugins.quantization.reference import Fp8BlocksReference


def case(device, num_rows, num_cols, size, dtype="bfloat16", has_bias=False):
    generator = torch.Generator(device).manual_seed(num_rows)
    draw = {"generator": generator, "device": device}
    weight = (torch.randn(num_rows, num_cols, **draw) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    scale = torch.rand(num_rows, num_cols // size, **draw) * 1e-3
    bias = torch.randn(num_rows, **draw).to(getattr(torch, dtype)) if has_bias else None
    spec = LinearSpec(in_features=num_cols, out_features=num_rows, weight_format="fp8_blocks", has_bias=has_bias)
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
    monkeypatch.setattr(fp8_blocks, "NUMBERS_AT_ONCE", 16 * 256)
    check(*case(device, 40, 256, 128, dtype, has_bias=True), num_tokens)


def test_says_why_it_refuses(device):
    needs, _ = case(device, 16, 32, 16)
    assert Fp8BlocksLinear.unsupported(needs) == []
    other = LinearNeeds(dtype="float32", linear=LinearSpec(in_features=32, out_features=16, weight_format="fp8_e4m3"))
    assert Fp8BlocksLinear.unsupported(other) == [
        "weight format 'fp8_e4m3', only 'fp8_blocks'", "dtype float32, only bfloat16, float16",
    ]  # fmt: skip
