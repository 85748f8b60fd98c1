"""Cases of the op of experts: routings, weights, rows of which some are padding, and how a result is checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from pelton.ops.moe import ExpertsSpec, MoeNeeds, MoeTensors, RoutingSpec
from pelton.ops.packed_blocks import kinds_of, panels_shape
from pelton.ops.selector import reasons_against
from pelton_backends.reference.moe import ReferenceMoe
from pelton_plugins.models.experts import copies_of
from pelton_plugins.weight_forms.block_writing import pack, quantize
from pelton_plugins.weight_forms.groups import pack_minima, pack_scales

SIZES = 72, 40  # hidden, of an expert
ROUTINGS = {
    "softmax": RoutingSpec(num_experts=6, top_k=2),
    "groups": RoutingSpec(num_experts=12, top_k=3, num_groups=4, top_groups=2, is_renormalized=False, scale=2.5),
    "corrected": RoutingSpec(
        num_experts=16, top_k=4, scoring="sigmoid", num_groups=4, top_groups=2, group_score="top2", has_correction=True
    ),
    "input": RoutingSpec(num_experts=5, top_k=1, scoring="sigmoid", is_renormalized=False, scales_input=True),
}


def moe_case(
    device: torch.device,
    routing: RoutingSpec,
    num_tokens: int,
    dtype: torch.dtype = torch.float32,
    sizes: tuple[int, int] = SIZES,
    **experts: Any,
) -> tuple[MoeNeeds, MoeTensors, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)

    def numbers(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * shape[-1] ** -0.5).to(device, dtype)

    hidden, width = sizes
    spec = ExpertsSpec(hidden_size=hidden, intermediate_size=width, **experts)
    count = routing.num_experts
    tensors = {"gate_up": numbers(count, 2 * width, hidden) * 3, "down": numbers(count, hidden, width) * 3}
    if kinds_of(spec.weight_format) is not None:
        tensors = expert_panels(tensors, spec)
    elif spec.weight_format != "plain":
        for name in ("gate_up", "down"):
            tensors |= packed_experts(name, tensors[name], spec)
    if spec.has_bias:
        tensors |= {"gate_up_bias": numbers(count, 2 * width), "down_bias": numbers(count, hidden)}
    needs = MoeNeeds(
        dtype=str(dtype).removeprefix("torch."), routing=routing, experts=spec, max_num_tokens=num_tokens,
        counts_load=True, has_router_bias=spec.has_bias,
    )  # fmt: skip
    bound = MoeTensors(
        numbers(count, hidden) * 4, tensors, numbers(count) if spec.has_bias else None,
        numbers(count).float() if routing.has_correction else None,
        torch.zeros(count, dtype=torch.int64, device=device),
    )  # fmt: skip
    slots = torch.arange(num_tokens, device=device)
    slots[num_tokens // 2 :: 3] = -1 if num_tokens > 2 else 7
    return needs, bound, numbers(num_tokens, hidden) * hidden**0.5, slots


def expert_panels(tensors: dict[str, torch.Tensor], spec: ExpertsSpec) -> dict[str, torch.Tensor]:
    """The same in blocks, rounded."""
    gate, up = tensors["gate_up"].chunk(2, dim=1)
    kinds, made = kinds_of(spec.weight_format) or [], {}
    parts = {"gate": gate, "up": up, "down": tensors["down"]}
    for (name, weight), kind in zip(parts.items(), kinds * 3 if len(kinds) == 1 else kinds, strict=True):
        panels = torch.empty(len(weight), *panels_shape(kind, *weight.shape[1:]), dtype=torch.uint8)
        for index, matrix in enumerate(weight):
            pack(quantize(matrix, kind), kind, panels[index])
        made[name] = panels
    return made


def packed_experts(name: str, weight: torch.Tensor, spec: ExpertsSpec) -> dict[str, torch.Tensor]:
    """Numbers in the spec's format with scales that vary, of about the size of `weight` [E, rows, columns]."""
    generator = torch.Generator().manual_seed(len(name))
    count, rows, columns = weight.shape
    if spec.weight_format == "mxfp4":
        packed = torch.randint(0, 256, (count, rows, columns // 2), dtype=torch.uint8, generator=generator)
        scales = torch.randint(122, 126, (count, rows, columns // 32), dtype=torch.uint8, generator=generator)
        return {name: packed.to(weight.device), f"{name}_scale": scales.to(weight.device)}
    groups = -(-columns // (spec.group_size or columns))
    if spec.weight_format in ("nf4", "fp4"):
        packed = torch.randint(0, 256, (count, rows, columns // 2), dtype=torch.uint8, generator=generator)
        scales = (torch.rand(count, rows, groups, generator=generator) + 0.5) * 3 * columns**-0.5
        return {name: packed.to(weight.device), f"{name}_scale": scales.to(weight.device)}
    if spec.weight_format.startswith("int"):
        bits = int(spec.weight_format[3])
        packed = torch.randint(0, 256, (count, rows, columns * bits // 8), dtype=torch.uint8, generator=generator)
        scale = (torch.rand(count, rows, groups, generator=generator) + 0.5) * 2.0 ** (2 - bits) * columns**-0.5
        if spec.weight_format.endswith("_minima"):
            words = pack_minima(scale.half(), (-scale * 2 ** (bits - 1) * torch.rand_like(scale)).half())
        else:
            zeros = torch.randint(0, 2**bits, scale.shape, generator=generator)
            words = pack_scales(scale.bfloat16(), zeros)
        return {name: packed.to(weight.device), f"{name}_scale": words.to(weight.device)}
    some = (torch.rand(count, -(-rows // spec.group_rows), groups, generator=generator) + 0.5) / 448
    scales = some.repeat_interleave(spec.group_rows, dim=1)[:, :rows].contiguous()
    return {
        name: (weight.float() * 448).clamp(-448, 448).to(torch.float8_e4m3fn),
        f"{name}_scale": scales.to(weight.device),
    }


def check_moe(
    implementation: Any, needs: MoeNeeds, tensors: MoeTensors, x: torch.Tensor, slots: torch.Tensor, tolerance: float
) -> None:
    """Result and load are the reference's, padding gives zeros; a share of 1e-3 of rounded numbers may be off: where two experts are
    almost equally good, rounding chooses."""
    assert implementation.unsupported(needs) == []
    assert tensors.load is not None
    tensors.load.zero_()
    want = ReferenceMoe.bind(needs, tensors)(x.clone(), slots)
    load = tensors.load.clone()
    tensors.load.zero_()
    op = implementation.bind(needs, tensors)
    if hasattr(op, "weights_loaded"):
        op.weights_loaded()
    got = op(x, slots)
    assert not got[slots < 0].any()
    if kinds_of(needs.experts.weight_format) is not None:
        check_mean_square(got, want, tolerance)
    elif x.dtype == torch.float32:
        torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)
        assert torch.equal(tensors.load, load)
    else:
        assert ((got - want).abs() <= tolerance * (1 + want.abs())).float().mean() > 0.999


def check_mean_square(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    """Of rows that were rounded by the largest number of each block: small ones lose what large ones do."""
    got, want = got.float(), want.float()
    assert (got - want).square().mean().sqrt() <= tolerance * want.square().mean().sqrt()


def check_whole_experts(
    implementation: Any,
    needs: MoeNeeds,
    tensors: MoeTensors,
    x: torch.Tensor,
    slots: torch.Tensor,
    counts: Sequence[int],
    tolerance: float = 1e-4,
) -> None:
    """Ranks that hold so many experts each, all of each: their results add up to the result of one rank with all, their loads too."""
    assert tensors.load is not None and sum(counts) == needs.routing.num_experts
    want = ReferenceMoe.bind(needs, tensors)(x, slots)
    total, first = torch.zeros_like(want), 0
    load = torch.zeros_like(tensors.load)
    for count in counts:
        part = MoeTensors(
            tensors.router, {name: one[first : first + count].clone() for name, one in tensors.experts.items()},
            tensors.router_bias, tensors.correction, torch.zeros_like(load),
        )  # fmt: skip
        held = replace(needs, experts=replace(needs.experts, first_expert=first, num_held=count))
        assert implementation.unsupported(held) == []
        op = implementation.bind(held, part)
        if hasattr(op, "weights_loaded"):
            op.weights_loaded()
        total += op(x, slots)
        assert part.load is not None
        load += part.load
        first += count
    if kinds_of(needs.experts.weight_format) is not None:
        check_mean_square(total, want, tolerance)
    else:
        torch.testing.assert_close(total, want, atol=tolerance, rtol=tolerance)
    assert torch.equal(load, tensors.load)


PLACES = (1, 0, 3, 2, 0, 4, 5, 1, 0)
"""The expert at each place, of six."""


def check_copies(
    implementation: Any,
    num_tokens: int,
    tolerance: float = 1e-4,
    device: str | torch.device = "cpu",
    **experts: Any,
) -> None:
    """Three ranks with three places each add up to one rank with all experts, whole and, where it has them, by halves of the op. Rows take
    an expert's places in turn, and every place counts its own."""
    needs, tensors, x, slots = moe_case(
        torch.device(device), RoutingSpec(num_experts=6, top_k=2), num_tokens, **experts
    )
    has_parts = "has_parts" in implementation.handles
    assert tensors.load is not None
    want, chosen = ReferenceMoe.bind(needs, tensors)(x, slots), ReferenceMoe.bind(needs, tensors).choose(x, slots)[0]
    copies = copies_of(list(PLACES)).to(device)
    places = [
        [int(copies[expert, 1 + row % copies[expert, 0]]) if expert >= 0 else -1 for expert in pair]
        for row, pair in enumerate(chosen.tolist())
    ]
    total, by_halves = torch.zeros_like(want), torch.zeros_like(want)
    load = torch.zeros(len(PLACES), dtype=torch.int64, device=device)
    for first in range(0, len(PLACES), 3):
        held = [PLACES[place] for place in range(first, first + 3)]
        part = replace(
            tensors,
            experts={name: one[held].clone() for name, one in tensors.experts.items()},
            load=load,
            copies=copies,
        )
        held_here = replace(needs.experts, first_expert=first, num_held=3)
        own = replace(needs, experts=held_here, has_copies=True, has_parts=has_parts)
        assert reasons_against(implementation, own) == []
        op = implementation.bind(own, part)
        if hasattr(op, "weights_loaded"):
            op.weights_loaded()
        result = op(x, slots)
        total += result
        if not has_parts:
            continue
        found = op.choose(x, slots)
        assert [sorted(row) for row in found[0].tolist()] == [sorted(row) for row in places]
        assert torch.equal(op.compute(x, *found), result), "the halves compute what the op does"
        by_halves += op.compute(x.flip(0), *(one.flip(0) for one in found)).flip(0)
    torch.testing.assert_close(total, want, atol=tolerance, rtol=tolerance)
    if has_parts:
        torch.testing.assert_close(by_halves, want, atol=tolerance, rtol=tolerance)
    counts = torch.bincount(torch.tensor(places, dtype=torch.int64).flatten() + 1, minlength=len(PLACES) + 1)[1:]
    assert torch.equal(load.cpu(), (3 if has_parts else 1) * counts)
