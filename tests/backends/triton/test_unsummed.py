"""Rows of experts that their reader adds up: what the sum, and then the norm, give."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pelton_linear_oracle import make_case
from pelton_moe_case import moe_case

from pelton.ops.interface import (
    AddNormLinearNeeds,
    AddNormLinearTensors,
    InputRounding,
    LinearSpec,
    LinearWeights,
    NormSpec,
)
from pelton.ops.moe import RoutingSpec
from pelton_backends.triton.ops.linear.fp8 import Fp8AddNormLinear, add_norm_rounded
from pelton_backends.triton.ops.linear.fp8_blocks import Fp8BlocksAddNormLinear, Fp8BlocksMatrix
from pelton_backends.triton.ops.linear.hopper_blocks import add_norm_split
from pelton_backends.triton.ops.linear.large_batch import LargeBatchAddNormLinear, add_norm
from pelton_backends.triton.ops.linear.small_batch import SmallBatchAddNormLinear
from pelton_backends.triton.ops.moe import hopper
from pelton_backends.triton.ops.moe.experts import BoundMoe
from pelton_backends.triton.ops.moe.unsummed import UnsummedRows, sum_add_norm_rounded, sum_add_norm_rows
from pelton_backends.triton.ops.pieces import Norm

pytestmark = pytest.mark.usefixtures("large_programs")


def one_op(
    device: torch.device, num_tokens: int, dtype: torch.dtype, **experts: Any
) -> tuple[BoundMoe, torch.Tensor, torch.Tensor]:
    needs, tensors, x, slots = moe_case(device, RoutingSpec(num_experts=6, top_k=2), num_tokens, dtype, **experts)
    return BoundMoe(needs, tensors), x, slots


def left_to(reader: Any) -> Any:
    return lambda num_tokens: reader


TAKES = SimpleNamespace(takes_unsummed=True)


def multiplied(
    x: torch.Tensor, weight: torch.Tensor, experts: torch.Tensor, tile_rows: torch.Tensor, num_tiles: torch.Tensor,
    activation: str | None = None, source: torch.Tensor | None = None, bias: None = None, limit: None = None,
) -> torch.Tensor:  # fmt: skip
    """In place of the product for Hopper."""
    rows = x if source is None else x[source.clamp(0, len(x) - 1)]
    of_rows = experts.clamp(0, len(weight) - 1).repeat_interleave(hopper.ROWS)
    out = torch.einsum("rk,rnk->rn", rows, weight[of_rows])
    gate, up = out.chunk(2, dim=-1)
    return out if activation is None else torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("is_sorted", [False, True])
@pytest.mark.parametrize("held", [None, 4], ids=["all", "some"])
def test_equals_sum_then_norm(
    held: int | None, is_sorted: bool, unit_offset: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, and what the op counts is zeros again."""
    monkeypatch.setattr(hopper, "experts_matmul", multiplied)
    monkeypatch.setattr(hopper, "ROWS", 4)
    monkeypatch.setattr("pelton_backends.triton.ops.moe.experts.BANDS", (4, 8, 16))
    op, x, slots = one_op(device, 40, torch.float16, num_held=held)
    if held is not None:
        for name, weights in op._weights.items():
            op._weights[name] = weights[:held].contiguous()
    op._is_sorted = is_sorted
    spec, norm = NormSpec(size=x.shape[1], eps=1e-6, unit_offset=unit_offset), torch.rand_like(x[0]) + 0.5
    residual = torch.randn(40, 2 * x.shape[1], device=device, dtype=x.dtype)[:, : x.shape[1]]
    sums = op(x, slots)
    want_residual, want = add_norm(sums, residual.clone(), norm, spec)
    op.read_by(left_to(TAKES))
    for _ in range(2):
        rows, own = op(x, slots), residual.clone()
        assert isinstance(rows, UnsummedRows) and rows.shape == x.shape
        got = sum_add_norm_rows(rows, own, norm, spec)
        assert torch.equal(got, want) and torch.equal(own, want_residual)
        with pytest.raises(AssertionError, match="read before"):
            rows.take()
    op.read_by(left_to(lambda hidden, residual: None))
    assert torch.equal(op(x, slots), sums)


def test_rows_that_are_rounded(device: torch.device) -> None:
    op, x, slots = one_op(device, 40, torch.bfloat16)
    spec, norm, residual = NormSpec(size=x.shape[1], eps=1e-6), torch.rand_like(x[0]) + 0.5, torch.randn_like(x)
    sums = op(x, slots)
    op.read_by(left_to(TAKES))
    for scale, bound in ((None, None), (None, 1.5), (torch.tensor(0.01, device=device), None)):
        before = Norm(norm, spec.eps, spec.unit_offset)
        want_residual, want, want_scales = add_norm_rounded(sums, residual.clone(), before, None, scale, bound)
        rows, own = op(x, slots), residual.clone()
        assert isinstance(rows, UnsummedRows)
        got, scales = sum_add_norm_rounded(rows, own, before, scale, bound)
        assert torch.equal(got.float(), want.float()) and torch.equal(scales, want_scales)
        assert torch.equal(own, want_residual)


def test_rows_that_are_sums_of_two(device: torch.device) -> None:
    op, x, slots = one_op(device, 40, torch.bfloat16)
    norm, residual, sums = Norm(torch.rand_like(x[0]) + 0.5, 1e-6, False), torch.randn_like(x), op(x, slots)
    op.read_by(left_to(TAKES))
    want_residual, want, want_inverse = add_norm_split(sums, residual.clone(), norm, None)
    rows = op(x, slots)
    assert isinstance(rows, UnsummedRows)
    own, got, inverse = add_norm_split(rows, residual.clone(), norm, None)
    assert torch.equal(got.float(), want.float()) and torch.equal(inverse, want_inverse)
    assert torch.equal(own, want_residual)


def test_few_tokens_are_summed_in_the_product(device: torch.device) -> None:
    op, x, slots = one_op(device, 3, torch.float16)
    op.read_by(left_to(TAKES))
    assert isinstance(op(x, slots), torch.Tensor)


@pytest.mark.parametrize("kind", [SmallBatchAddNormLinear, LargeBatchAddNormLinear])
def test_products_take_them(kind: Any, device: torch.device) -> None:
    op, x, slots = one_op(device, 40, torch.bfloat16, sizes=(64, 32))
    case = make_case(40, 64, 48, torch.bfloat16, device)
    needs = AddNormLinearNeeds(
        dtype="bfloat16", norm=case.norm_spec, linear=LinearSpec(in_features=64, out_features=48)
    )
    tensors = AddNormLinearTensors(case.norm, LinearWeights(needs.linear, {"weight": case.weight}))
    product, residual, sums = kind.bind(needs, tensors), torch.randn_like(x), op(x, slots)
    want, want_residual = product(sums, residual.clone())
    op.read_by(left_to(product))
    rows = op(x, slots)
    assert isinstance(rows, UnsummedRows)
    got, own = product(rows, residual.clone())
    assert torch.equal(got, want) and torch.equal(own, want_residual)
    behind = replace(needs, post_norm=case.norm_spec)
    assert not kind.bind(behind, replace(tensors, post_norm=case.norm)).takes_unsummed
    assert not kind.bind(replace(needs, tp_size=2), tensors).takes_unsummed


def test_products_in_e4m3_take_them(device: torch.device) -> None:
    op, x, slots = one_op(device, 40, torch.bfloat16, sizes=(64, 32))
    spec = LinearSpec(
        in_features=64, out_features=48, weight_format="fp8_e4m3", inputs=InputRounding(dtype="float8_e4m3fn")
    )
    needs = AddNormLinearNeeds(dtype="bfloat16", norm=NormSpec(size=64, eps=1e-6), linear=spec)
    matrix = {
        "weight": (torch.randn(48, 64, device=device) * 8).to(torch.float8_e4m3fn), "weight_scale": torch.rand(48, device=device) / 64,
    }  # fmt: skip
    tensors = AddNormLinearTensors(torch.rand_like(x[0]) + 0.5, LinearWeights(spec, matrix))
    product, residual, sums = Fp8AddNormLinear.bind(needs, tensors), torch.randn_like(x), op(x, slots)
    want, want_residual = product(sums, residual.clone())
    op.read_by(left_to(product))
    rows = op(x, slots)
    assert isinstance(rows, UnsummedRows)
    got, own = product(rows, residual.clone())  # type: ignore[arg-type]
    assert torch.equal(got, want) and torch.equal(own, want_residual)


@pytest.mark.parametrize("way", ["rounded", "split", "plain"])
def test_products_of_blocks_take_them(way: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch in place of the products for Hopper."""
    op, x, slots = one_op(device, 40, torch.bfloat16, sizes=(64, 32))
    needs = AddNormLinearNeeds(
        dtype="bfloat16", norm=NormSpec(size=64, eps=1e-6),
        linear=LinearSpec(in_features=64, out_features=48, weight_format="fp8_blocks", group_rows=16),
    )  # fmt: skip
    weight = (torch.randn(48, 64, device=device) * 8).to(torch.float8_e4m3fn)
    matrix = {"weight": weight, "weight_scale": torch.rand(48, 4, device=device) / 64}

    def multiplied(rows: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        parts = rows.float().view(len(rows), -1, 64).sum(1)
        return ((parts * scales[:, None]) @ weight.float().T).to(dtype)

    monkeypatch.setattr(Fp8BlocksMatrix, "rounds", lambda self, num_tokens: way == "rounded")
    monkeypatch.setattr(Fp8BlocksMatrix, "multiply_rounded", lambda self, *arguments: multiplied(*arguments))
    made = Fp8BlocksMatrix.__init__

    def with_few(self: Fp8BlocksMatrix, *arguments: Any) -> None:
        made(self, *arguments)
        self.few = multiplied if way == "split" else None  # type: ignore[assignment]

    monkeypatch.setattr(Fp8BlocksMatrix, "__init__", with_few)
    tensors = AddNormLinearTensors(torch.rand_like(x[0]) + 0.5, LinearWeights(needs.linear, matrix))
    product, residual, sums = Fp8BlocksAddNormLinear.bind(needs, tensors), torch.randn_like(x), op(x, slots)
    want, want_residual = product(sums, residual.clone())
    op.read_by(left_to(product))
    rows = op(x, slots)
    assert isinstance(rows, UnsummedRows)
    got, own = product(rows, residual.clone())  # type: ignore[arg-type]
    assert torch.equal(got, want) and torch.equal(own, want_residual)
