"""Float64 oracle of the linear ops, with the roundings of `pelton.ops.reference`, and random cases for them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

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

# Of the results: (relative, absolute); numbers are of size 1. Two roundings to the dtype may each fall the other way.
TOLERANCES = {torch.bfloat16: (1.6e-2, 2e-2), torch.float16: (2e-3, 3e-3), torch.float32: (2e-5, 5e-6)}

ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


def rms_norm(x: Tensor, weight: Tensor, spec: NormSpec) -> Tensor:
    """x of the model's dtype -> the same."""
    wide = x.double()
    wide = wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + spec.eps)
    if spec.unit_offset:
        return (wide * (1.0 + weight.double())).to(x.dtype)
    return (wide.to(x.dtype).double() * weight.double()).to(x.dtype)


@dataclass(kw_only=True)
class Case:
    """Inputs and weights of one op."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    norm: Tensor | None = None
    norm_spec: NormSpec | None = None
    residual: Tensor | None = None
    post_norm: Tensor | None = None
    post_spec: NormSpec | None = None
    activation: str | None = None
    packed: LinearWeights | None = None  # `weight` is what its blocks say; inputs are rounded in blocks of 32

    @property
    def needs(self) -> Any:
        dtype = str(self.hidden.dtype).removeprefix("torch.")
        spec = LinearSpec(
            in_features=self.weight.shape[1], out_features=self.weight.shape[0], has_bias=self.bias is not None
        )
        if self.packed is not None:
            spec = self.packed.spec
        if self.norm_spec is None:
            return LinearNeeds(dtype=dtype, linear=spec)
        if self.activation is None:
            return AddNormLinearNeeds(dtype=dtype, norm=self.norm_spec, linear=spec, post_norm=self.post_spec)
        return AddNormGatedLinearNeeds(
            dtype=dtype, norm=self.norm_spec, linear=spec, activation=self.activation, post_norm=self.post_spec
        )

    @property
    def tensors(self) -> Any:
        weights = self.packed or LinearWeights(self.needs.linear, {"weight": self.weight}, self.bias)
        if self.norm is None:
            return LinearTensors(weights)
        kind = AddNormLinearTensors if self.activation is None else AddNormGatedLinearTensors
        return kind(self.norm, weights, self.post_norm)

    def expected(self) -> tuple[Tensor, Tensor | None]:
        """(result, residual'), in the model's dtype."""
        rows, total, dtype = self.hidden, None, self.hidden.dtype
        if self.norm is not None and self.norm_spec is not None:
            total = self.hidden
            if self.post_norm is not None and self.post_spec is not None:
                total = rms_norm(total, self.post_norm, self.post_spec)
            if self.residual is not None:
                total = (total.double() + self.residual.double()).to(dtype)
            rows = rms_norm(total, self.norm, self.norm_spec)
        factors = rows.double() if self.packed is None else rounded_in_blocks(rows)
        result = factors @ self.weight.double().T
        if self.bias is not None:
            result = result + self.bias.double()
        result = result.to(dtype)
        if self.activation is not None:
            gate, up = result.double().chunk(2, dim=-1)
            result = (ACTIVATIONS[self.activation](gate).to(dtype).double() * up).to(dtype)
        return result, total

    def to(self, device: Any) -> Case:
        names = ("hidden", "weight", "bias", "norm", "residual", "post_norm")
        moved = {name: getattr(self, name) for name in names}
        return replace(self, **{name: t if t is None else t.to(device) for name, t in moved.items()})

    def run(self, implementation: Any) -> tuple[Tensor, Tensor | None]:
        """Bind and call on copies of the inputs, which may be overwritten."""
        assert implementation.unsupported(self.needs) == []
        call = implementation.bind(self.needs, self.tensors)
        return self.call(call)

    def call(self, bound: Any) -> tuple[Tensor, Tensor | None]:
        if self.norm is None:
            return bound(copied(self.hidden)), None
        return bound(copied(self.hidden), None if self.residual is None else copied(self.residual))


def rounded_in_blocks(x: Tensor) -> Tensor:
    """In blocks of 32 whose largest number is 127: whole steps, and the rest in 254ths of one. Float64."""
    blocks = x.float().reshape(x.shape[0], x.shape[1] // 32, 32)
    largest = blocks.abs().amax(-1, keepdim=True)
    numbers = torch.where(largest > 0, blocks * (127.0 / largest), 0.0)
    rest = ((numbers - numbers.round()) * 254.0).round()
    return ((numbers.round().double() + rest.double() / 254.0) * largest.double() / 127.0).reshape(x.shape)


def copied(x: Tensor) -> Tensor:
    """A copy with the same strides, surrounded by NaN."""
    if x.is_contiguous():
        return x.clone()
    copy = torch.full((x.shape[0], x.stride(0)), torch.nan, dtype=x.dtype, device=x.device)[:, : x.shape[1]]
    return copy.copy_(x)


def make_case(
    num_rows: int,
    in_features: int,
    out_features: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    norm: bool = True,
    activation: str | None = None,
    residual: bool = True,
    post_norm: bool = False,
    unit_offset: bool = False,
    bias: bool = False,
    row_gap: int = 0,
    seed: int = 0,
) -> Case:
    """With row_gap, hidden and residual are rows of a wider matrix whose other columns are NaN."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0, offset: float = 0.0) -> Tensor:
        numbers = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
        return (numbers * scale + offset).to(dtype)

    def rows() -> Tensor:
        wide = torch.full((num_rows, in_features + row_gap), torch.nan, dtype=dtype, device=device)
        return wide[:, :in_features].copy_(normal(num_rows, in_features))

    around = 0.0 if unit_offset else 1.0
    spec = NormSpec(size=in_features, eps=1e-6, unit_offset=unit_offset)
    return Case(
        hidden=rows(),
        residual=rows() if residual and norm else None,
        weight=normal(out_features, in_features, scale=in_features**-0.5),
        bias=normal(out_features) if bias else None,
        norm=normal(in_features, scale=0.2, offset=around) if norm else None,
        norm_spec=spec if norm else None,
        post_norm=normal(in_features, scale=0.2, offset=around) if post_norm else None,
        post_spec=replace(spec, eps=1e-5) if post_norm else None,
        activation=activation,
    )


def assert_close(actual: Tensor, expected: Tensor, what: str, factor: float = 1.0) -> None:
    relative, absolute = TOLERANCES[expected.dtype]
    if expected.dtype == torch.bfloat16 and not actual.is_cuda:
        factor *= 3  # Triton's interpreter cuts bfloat16 off where the device rounds
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, what
    torch.testing.assert_close(
        actual.double(), expected.to(actual.device).double(), rtol=factor * relative, atol=factor * absolute,
        msg=lambda text: f"{what}: {text}",
    )  # fmt: skip


def check(case: Case, implementation: Any) -> None:
    """Result and residual' of a bound call against the oracle."""
    result, total = case.run(implementation)
    wanted, wanted_total = case.expected()
    if wanted_total is not None and total is not None:
        assert_close(total, wanted_total, "residual'")
    else:
        assert total is wanted_total is None
    factor = 4.0 if case.activation else 1.0
    if case.packed is not None and result.dtype == torch.float32:
        factor *= 10.0  # an input's last step, a 32,258th of its block's largest, may fall the other way
    assert_close(result, wanted, "result", factor=factor)
