"""A product with adapters, for tests of its implementations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from pelton_lora_op import make_lora_case

from pelton.lora.op import AdaptedNeeds, AdaptedTensors
from pelton.lora.rows import AdapterRowTensors, padded_ranks
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


def beside_each_other(b: torch.Tensor) -> torch.Tensor:
    """B [S, R, N] as it lies off CPUs: a column's ranks of all slots beside each other."""
    num_slots, rank, columns = b.shape
    rows = torch.zeros(columns, padded_ranks(num_slots * rank), dtype=b.dtype, device=b.device)
    found = rows.as_strided((num_slots, rank, columns), (rank, 1, rows.stride(0)))
    found.copy_(b)
    return found


class AdaptedCase:
    """Random weights and adapters of one product."""

    def __init__(
        self, slots: list[int], size: int, parts: tuple[int, ...], *, dtype: torch.dtype, device: Any, rank: int = 16,
        norm: bool = False, activation: str | None = None, has_bias: bool = False, num_slots: int = 3,
    ) -> None:  # fmt: skip
        case = make_lora_case(
            slots,
            size,
            parts,
            dtype=dtype,
            device=device,
            rank=rank,
            norm=norm,
            activation=activation,
            has_tiles=True,
            num_slots=num_slots,
        )
        generator = torch.Generator().manual_seed(size)
        columns, count = sum(parts), len(slots)

        def numbers(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(*shape, generator=generator) * scale).to(device, dtype)

        a = case.tensors.a.clone().mul_(size**-0.5)
        b = beside_each_other(case.tensors.b)
        self.rows: AdapterRowTensors = case.tensors.rows
        adapter = replace(case.tensors, a=a, b=b)
        spec = LinearSpec(in_features=size, out_features=columns, has_bias=has_bias)
        weights = LinearWeights(
            spec, {"weight": numbers(columns, size, scale=size**-0.5)}, numbers(columns) if has_bias else None
        )
        name = case.needs.dtype
        base: Any
        tensors: Any
        if norm:
            norm_spec = NormSpec(size=size, eps=1e-6)
            if activation is None:
                base = AddNormLinearNeeds(dtype=name, norm=norm_spec, linear=spec)
                tensors = AddNormLinearTensors(case.tensors.norm, weights)
            else:
                base = AddNormGatedLinearNeeds(dtype=name, norm=norm_spec, linear=spec, activation=activation)
                tensors = AddNormGatedLinearTensors(case.tensors.norm, weights)
            self.inputs = [numbers(count, size), numbers(count, size)]
        else:
            base, tensors = LinearNeeds(dtype=name, linear=spec), LinearTensors(weights)
            self.inputs = [numbers(count, size)]
        self.needs, self.tensors = AdaptedNeeds(base=base, adapter=case.needs), AdaptedTensors(tensors, adapter)
        self.is_gated, self.slots = activation is not None, slots

    def run(self, call: Any) -> tuple[torch.Tensor, ...]:
        found = call(*(x.clone() for x in self.inputs))
        return found if isinstance(found, tuple) else (found,)

    def expected(self) -> tuple[torch.Tensor, ...]:
        """Of merged weights, in float64."""
        adapter, weights = self.tensors.adapter, self.tensors.base.linear
        x, *residual = (one.double() for one in self.inputs)
        dtype = self.inputs[0].dtype
        if residual:
            x = residual[0] = (x + residual[0]).to(dtype).double()
            x = x / (x.square().mean(1, keepdim=True) + 1e-6).sqrt() * self.tensors.base.norm.double()
        rank, result = self.needs.adapter.rank, []
        for row, slot in zip(x, self.slots, strict=True):
            weight = weights.tensors["weight"].double()
            if slot >= 0:
                start, merged = 0, []
                for index, part in enumerate(self.needs.adapter.parts):
                    a = adapter.a[slot, index * rank : (index + 1) * rank].double()
                    merged.append(
                        weight[start : start + part] + adapter.b[slot, :, start : start + part].double().T @ a
                    )
                    start += part
                weight = torch.cat(merged)
            product = weight @ row
            result.append(product if weights.bias is None else product + weights.bias.double())
        y = torch.stack(result)
        if self.is_gated:
            gate, up = y.to(dtype).double().chunk(2, dim=1)
            y = torch.nn.functional.silu(gate) * up
        return (y, *residual)


TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Of the largest number."""
CASES: dict[str, tuple[list[int], dict[str, Any]]] = {
    "one row": ([2], {"size": 160, "parts": (64, 24, 24), "norm": True, "has_bias": True}),
    "one row without": ([-1], {"size": 160, "parts": (72,)}),
    "mixed rows": ([-1, 2, 0, -1, 2, 2], {"size": 128, "parts": (128, 64, 64), "norm": True}),
    "rank 64": ([1, -1, 0], {"size": 192, "parts": (72,), "rank": 64}),
    "gate and up": ([0, -1, 1, 1, 0], {"size": 128, "parts": (64, 64), "norm": True, "activation": "silu"}),
    "one row, less than a tile": ([2], {"size": 128, "parts": (12,)}),
    "one row, two parts and less than a tile": ([0], {"size": 128, "parts": (16, 12), "norm": True}),
    "one row of gate and up, less than a tile": (
        [1],
        {"size": 128, "parts": (10, 10), "norm": True, "activation": "silu"},
    ),
    "one row of gate and up": ([1], {"size": 130, "parts": (48, 48), "norm": True, "activation": "silu", "rank": 32}),
}
"""Products of few rows: their slots, and what they are made of."""


def implementations(family: str) -> dict[type, tuple[Any, Any]]:
    """By the base's needs: the product with adapters, and the base op whose bits rows without one have. gemv, hopper or many."""
    from pelton_backends.triton.ops.linear import gemv, large_batch, small_batch
    from pelton_backends.triton.ops.lora import gemv as lora_gemv
    from pelton_backends.triton.ops.lora import hopper as lora_hopper
    from pelton_backends.triton.ops.lora import hopper_many

    if family == "gemv":
        return {
            LinearNeeds: (lora_gemv.LoraGemvLinear, gemv.GemvLinear),
            AddNormLinearNeeds: (lora_gemv.LoraGemvAddNormLinear, gemv.GemvAddNormLinear),
            AddNormGatedLinearNeeds: (lora_gemv.LoraGemvAddNormLinear, gemv.GemvAddNormGatedLinear),
        }
    if family == "many":
        return {
            LinearNeeds: (hopper_many.LoraManyLinear, large_batch.LargeBatchLinear),
            AddNormLinearNeeds: (hopper_many.LoraManyAddNormLinear, large_batch.LargeBatchAddNormLinear),
            AddNormGatedLinearNeeds: (hopper_many.LoraManyAddNormLinear, large_batch.LargeBatchAddNormGatedLinear),
        }
    return {
        LinearNeeds: (lora_hopper.LoraHopperLinear, small_batch.SmallBatchLinear),
        AddNormLinearNeeds: (lora_hopper.LoraHopperAddNormLinear, small_batch.SmallBatchAddNormLinear),
        AddNormGatedLinearNeeds: (lora_hopper.LoraHopperAddNormLinear, small_batch.SmallBatchAddNormGatedLinear),
    }


def check_adapted(case: AdaptedCase, family: str, tolerance: float | None = None) -> None:
    """Near merged weights in float64, though slots were others when it was first called; rows without an adapter have the bits of
    the base op."""
    implementation, base = implementations(family)[type(case.needs.base)]
    assert implementation.unsupported(case.needs) == []
    call = implementation.bind(case.needs, case.tensors)
    slots = torch.tensor(case.slots, device=case.inputs[0].device)
    case.rows.place(slots.flip(0).clamp(max=0))
    case.run(call)
    case.rows.place(slots)
    found, expected, bare = case.run(call), case.expected(), case.run(base.bind(case.needs.base, case.tensors.base))
    for one, other in zip(found, expected, strict=True):
        error = float((one.double() - other).abs().max() / other.abs().max())
        assert error < (tolerance or TOLERANCE[case.inputs[0].dtype]), error
    without = [index for index, slot in enumerate(case.slots) if slot < 0]
    assert torch.equal(found[0][without], bare[0][without])
    assert len(without) == len(case.slots) or not torch.equal(found[0], bare[0])
