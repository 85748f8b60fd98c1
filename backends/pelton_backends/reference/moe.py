"""Plain torch implementation of the op of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from pelton.ops.packed_blocks import KINDS, dequantize, kinds_of
from pelton.ops.reference import ACTIVATIONS
from pelton_backends.code_tables import TABLES

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from pelton.ops.moe import ExpertsSpec, MoeNeeds, MoeParts, MoeTensors, RoutingSpec
    from pelton.ops.packed_blocks import BlockKind

_CLAMPED = ("swiglu_oai", "silu_clamped")
_OAI_ALPHA = 1.702


def route(logits: Tensor, spec: RoutingSpec, correction: Tensor | None) -> tuple[Tensor, Tensor]:
    """logits [T, E] float32 -> experts [T, k] int64 in the order of their score, weights [T, k] float32."""
    scores = logits.sigmoid() if spec.scoring == "sigmoid" else logits.softmax(dim=-1)
    choice = scores if correction is None else scores + correction
    if spec.num_groups > 1:
        choice = _within_groups(choice, spec)
    experts = choice.sort(dim=-1, descending=True, stable=True).indices[:, : spec.top_k]
    weights = scores.gather(-1, experts)
    if spec.is_renormalized:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return experts, weights * spec.scale


def _within_groups(choice: Tensor, spec: RoutingSpec) -> Tensor:
    groups = choice.view(choice.shape[0], spec.num_groups, -1)
    best = groups.topk(2, dim=-1).values.sum(dim=-1) if spec.group_score == "top2" else groups.amax(dim=-1)
    chosen = best.sort(dim=-1, descending=True, stable=True).indices[:, : spec.top_groups]
    is_chosen = torch.zeros_like(best, dtype=torch.bool).scatter(1, chosen, value=True)
    return groups.masked_fill(~is_chosen.unsqueeze(-1), float("-inf")).flatten(1)


def activated(gate_up: Tensor, spec: ExpertsSpec) -> Tensor:
    """[T, 2 I], gate and up -> [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    if spec.activation not in _CLAMPED:
        return ACTIVATIONS[spec.activation](gate) * up
    if spec.limit is not None:
        gate, up = gate.clamp(max=spec.limit), up.clamp(-spec.limit, spec.limit)
    if spec.activation == "silu_clamped":
        return F.silu(gate) * up
    return gate * torch.sigmoid(_OAI_ALPHA * gate) * (up + 1)


def _from_e4m3(numbers: Tensor, scales: Tensor, spec: ExpertsSpec) -> Tensor:
    spread = scales.repeat_interleave(spec.group_size or numbers.shape[-1], dim=-1)
    return numbers.float() * spread[..., : numbers.shape[-1]]


def _from_mxfp4(packed: Tensor, scales: Tensor, spec: ExpertsSpec) -> Tensor:
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], device=packed.device)
    blocks = packed.unflatten(-1, (-1, 16))
    numbers = torch.cat([table[(blocks & 15).long()], table[(blocks >> 4).long()]], dim=-1)
    return torch.ldexp(numbers, (scales.to(torch.int32) - 127).unsqueeze(-1)).flatten(-2)


def _from_integers(packed: Tensor, words: Tensor, spec: ExpertsSpec) -> Tensor:
    codes = packed
    if spec.weight_format.startswith("int4"):
        blocks = packed.unflatten(-1, (-1, 16))
        codes = torch.cat([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
    if spec.weight_format.endswith("_minima"):
        scales, minima = (half.to(torch.int16).view(torch.float16).float() for half in (words >> 16, words))
    else:
        scales = (words & ~0xFF).view(torch.float32)
        minima = (words & 0xFF).float() * -scales
    groups = codes.float().unflatten(-1, (words.shape[-1], -1))
    return (groups * scales.unsqueeze(-1) + minima.unsqueeze(-1)).flatten(-2)


def _from_panels(
    weights: dict[str, Tensor], name: str, index: int, kinds: list[BlockKind], spec: ExpertsSpec
) -> Tensor:
    gate, up, down = kinds * 3 if len(kinds) == 1 else kinds
    if name == "down":
        return dequantize(weights["down"][index], down, spec.hidden_size)
    parts = (("gate", gate), ("up", up))
    return torch.cat([dequantize(weights[part][index], kind, spec.intermediate_size) for part, kind in parts])


def _from_table(packed: Tensor, scales: Tensor, spec: ExpertsSpec) -> Tensor:
    table = torch.tensor(TABLES[spec.weight_format], device=packed.device)
    blocks = packed.unflatten(-1, (-1, 16)).int()
    numbers = table[torch.cat([blocks & 15, blocks >> 4], dim=-1)].flatten(-2).unflatten(-1, (scales.shape[-1], -1))
    return (numbers * scales.unsqueeze(-1)).flatten(-2)


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_INTEGERS = ("int4_grouped", "int8_grouped", "int4_minima", "int8_minima")
_DECODERS = {
    "e4m3": _from_e4m3, "mxfp4": _from_mxfp4, **dict.fromkeys(_INTEGERS, _from_integers),
    **dict.fromkeys(TABLES, _from_table),
}  # fmt: skip


class ReferenceMoe:
    """On a CPU each chosen expert computes its own tokens, which a recorded step cannot hold. Elsewhere every expert computes every
    token, so that nothing is asked of the device: right, and slow."""

    handles = frozenset(
        [
            "has_correction",
            "scales_input",
            "limit",
            "has_bias",
            "has_router_bias",
            "counts_load",
            "weight_format",
            "first_expert",
            "num_held",
            "group_size",
            "has_copies",
            "has_parts",
        ]
    )
    is_recordable = False

    @staticmethod
    def unsupported(needs: MoeNeeds) -> list[str]:
        known = (*ACTIVATIONS, *_CLAMPED)
        reasons = [] if needs.experts.activation in known else [f"activation {needs.experts.activation!r}"]
        weight_format = needs.experts.weight_format
        if weight_format not in ("plain", *_DECODERS) and kinds_of(weight_format) is None:
            reasons.append(f"weight format {weight_format!r}, only plain, {', '.join((*_DECODERS, *KINDS))}")
        return reasons

    @staticmethod
    def bind(needs: MoeNeeds, tensors: MoeTensors) -> MoeParts:
        routing, spec, weights = needs.routing, needs.experts, tensors.experts
        num_held = routing.num_experts if spec.num_held is None else spec.num_held
        kinds = kinds_of(spec.weight_format)

        def matrix(name: str, index: int, dtype: torch.dtype) -> Tensor:
            if spec.weight_format == "plain":
                return weights[name][index]
            if kinds is not None:
                return _from_panels(weights, name, index, kinds, spec).to(dtype)
            decode = _DECODERS[spec.weight_format]
            return decode(weights[name][index], weights[f"{name}_scale"][index], spec).to(dtype)

        def expert(index: int, x: Tensor, share: Tensor) -> Tensor:
            """The weighted output [n, H] of this rank's expert `index` for rows x [n, H] with weights share [n, 1]."""
            if routing.scales_input:
                x = (x * share).to(x.dtype)
            bias = {name: weights[name][index] for name in ("gate_up_bias", "down_bias") if spec.has_bias}
            inner = activated(F.linear(x, matrix("gate_up", index, x.dtype), bias.get("gate_up_bias")), spec)
            out = F.linear(inner, matrix("down", index, x.dtype), bias.get("down_bias")).float()
            return out if routing.scales_input else out * share

        def choose(x: Tensor, slot_mapping: Tensor) -> tuple[Tensor, Tensor]:
            logits = F.linear(x.float(), tensors.router.float())
            if tensors.router_bias is not None:
                logits = logits + tensors.router_bias.float()
            chosen, share = route(logits, routing, tensors.correction)
            if tensors.copies is not None:  # each in turn
                turn = torch.arange(len(x), device=x.device).unsqueeze(-1) % tensors.copies[chosen, 0]
                chosen = tensors.copies[chosen, 1 + turn]
            return torch.where((slot_mapping >= 0).unsqueeze(-1), chosen, -1).to(torch.int32), share

        def compute(x: Tensor, places: Tensor, share: Tensor) -> Tensor:
            chosen = places.long() - spec.first_expert
            chosen = torch.where((places >= 0) & (chosen >= 0) & (chosen < num_held), chosen, num_held)
            if tensors.load is not None:
                ones = torch.ones_like(chosen).flatten()
                counts = torch.zeros(num_held + 1, dtype=torch.int64, device=x.device)
                held = tensors.load[spec.first_expert : spec.first_expert + num_held]
                held.add_(counts.index_add_(0, chosen.flatten(), ones)[:-1])
            result = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
            if x.device.type != "cpu":
                for index in range(num_held):
                    is_its = chosen == index
                    own = torch.where(is_its, share, 0.0).sum(dim=-1, keepdim=True)
                    result += torch.where(is_its.any(dim=-1, keepdim=True), expert(index, x, own), 0.0)
                return result.to(x.dtype)
            for index in sorted(set(chosen.flatten().tolist())):
                if index < num_held:
                    tokens, place = torch.where(chosen == index)
                    result.index_add_(0, tokens, expert(index, x[tokens], share[tokens, place].unsqueeze(-1)))
            return result.to(x.dtype)

        return _BoundReference(choose, compute)


class _BoundReference:
    def __init__(
        self,
        choose: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
        compute: Callable[[Tensor, Tensor, Tensor], Tensor],
    ) -> None:
        self._choose, self._compute = choose, compute

    def choose(self, x: Tensor, slot_mapping: Tensor) -> tuple[Tensor, Tensor]:
        return self._choose(x, slot_mapping)

    def compute(self, x: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        return self._compute(x, places, weights)

    def __call__(self, x: Tensor, slot_mapping: Tensor) -> Tensor:
        return self._compute(x, *self._choose(x, slot_mapping))
