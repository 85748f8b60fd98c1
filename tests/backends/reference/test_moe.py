"""The reference of the op of experts against plain arithmetic, one token at a time."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pelton_moe_case import ROUTINGS, check_copies, check_whole_experts, moe_case

from pelton.ops.moe import ExpertsSpec, MoeNeeds, MoeTensors, RoutingSpec
from pelton_backends.reference.moe import ReferenceMoe, route

E, H, WIDTH, T = 8, 12, 10, 6


def chosen_by_hand(logits: list[float], spec: RoutingSpec, correction: list[float] | None) -> dict[int, float]:
    """Expert -> weight."""
    if spec.scoring == "sigmoid":
        scores = [1 / (1 + math.exp(-x)) for x in logits]
    else:
        total = sum(math.exp(x) for x in logits)
        scores = [math.exp(x) / total for x in logits]
    choice = [s + c for s, c in zip(scores, correction or [0.0] * E, strict=True)]
    size = E // spec.num_groups
    worth = []
    for group in range(spec.num_groups):
        inside = sorted(choice[group * size : (group + 1) * size], reverse=True)
        worth.append(sum(inside[: 2 if spec.group_score == "top2" else 1]))
    groups = sorted(range(spec.num_groups), key=lambda g: -worth[g])[: spec.top_groups]
    experts = sorted((e for e in range(E) if e // size in groups), key=lambda e: -choice[e])[: spec.top_k]
    total = sum(scores[e] for e in experts) if spec.is_renormalized else 1.0
    return {e: scores[e] / total * spec.scale for e in experts}


SPECS = {
    "softmax": RoutingSpec(num_experts=E, top_k=2),
    "not renormalized": RoutingSpec(num_experts=E, top_k=3, is_renormalized=False, scale=2.5),
    "one": RoutingSpec(num_experts=E, top_k=1, scoring="sigmoid", is_renormalized=False),
    "best groups": RoutingSpec(num_experts=E, top_k=3, num_groups=4, top_groups=2, is_renormalized=False),
    "corrected": RoutingSpec(
        num_experts=E, top_k=3, scoring="sigmoid", num_groups=2, top_groups=1, group_score="top2", has_correction=True,
        scale=1.5,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SPECS)
def test_routing(name: str) -> None:
    spec, generator = SPECS[name], torch.Generator().manual_seed(1)
    logits = torch.randn(50, E, generator=generator, dtype=torch.float64)
    correction = torch.randn(E, generator=generator, dtype=torch.float64) * 0.3 if spec.has_correction else None
    experts, weights = route(logits, spec, correction)
    for row in range(50):
        want = chosen_by_hand(logits[row].tolist(), spec, None if correction is None else correction.tolist())
        got = dict(zip(experts[row].tolist(), weights[row].tolist(), strict=True))
        assert got == pytest.approx(want)


def test_equal_scores_choose_the_lower_experts() -> None:
    experts, weights = route(torch.zeros(1, E), RoutingSpec(num_experts=E, top_k=3), None)
    assert experts.tolist() == [[0, 1, 2]]
    assert weights[0].tolist() == pytest.approx([1 / 3] * 3)


def case(routing: RoutingSpec, **experts: Any) -> tuple[MoeNeeds, MoeTensors, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    spec = ExpertsSpec(hidden_size=H, intermediate_size=WIDTH, **experts)
    tensors = {"gate_up": numbers(E, 2 * WIDTH, H), "down": numbers(E, H, WIDTH)}
    if spec.has_bias:
        tensors |= {"gate_up_bias": numbers(E, 2 * WIDTH), "down_bias": numbers(E, H)}
    needs = MoeNeeds(
        dtype="float32",
        routing=routing,
        experts=spec,
        max_num_tokens=T,
        counts_load=True,
        has_router_bias=spec.has_bias,
    )
    load = torch.zeros(E, dtype=torch.int64)
    return needs, MoeTensors(numbers(E, H), tensors, numbers(E) if spec.has_bias else None, load=load), numbers(T, H)


@pytest.mark.parametrize("scales_input", [False, True])
@pytest.mark.parametrize(
    "experts",
    [{}, {"activation": "swiglu_oai", "limit": 1.0, "has_bias": True}, {"activation": "silu_clamped", "limit": 1.0}],
    ids=["silu", "gpt-oss", "hy4"],
)
def test_experts_one_token_at_a_time(experts: dict[str, Any], scales_input: bool) -> None:
    routing = RoutingSpec(num_experts=E, top_k=2, scales_input=scales_input)
    needs, tensors, x = case(routing, **experts)
    slots = torch.tensor([5, 6, -1, 8, 9, -1])
    got = ReferenceMoe.bind(needs, tensors)(x, slots)
    counts = [0] * E
    for row in range(T):
        want = torch.zeros(H, dtype=torch.float64)
        if slots[row] >= 0:
            logits = x[row].double() @ tensors.router.double().T
            if tensors.router_bias is not None:
                logits = logits + tensors.router_bias
            for expert, weight in chosen_by_hand(logits.tolist(), routing, None).items():
                counts[expert] += 1
                read = x[row].double() * (weight if scales_input else 1.0)
                inner = tensors.experts["gate_up"][expert].double() @ read
                if "has_bias" in experts:
                    inner = inner + tensors.experts["gate_up_bias"][expert]
                gate, up = inner[:WIDTH], inner[WIDTH:]
                if experts:
                    gate, up = gate.clamp(max=1.0), up.clamp(-1.0, 1.0)
                if "has_bias" in experts:
                    inner = gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)
                else:
                    inner = gate / (1 + torch.exp(-gate)) * up
                out = tensors.experts["down"][expert].double() @ inner
                if "has_bias" in experts:
                    out = out + tensors.experts["down_bias"][expert]
                want += out * (1.0 if scales_input else weight)
        torch.testing.assert_close(got[row].double(), want, atol=1e-4, rtol=1e-4)
    assert tensors.load is not None
    assert tensors.load.tolist() == counts


@pytest.mark.parametrize("name", ROUTINGS)
def test_whole_experts_of_several_ranks(name: str) -> None:
    made = moe_case(torch.device("cpu"), ROUTINGS[name], 11)
    num_experts = ROUTINGS[name].num_experts
    check_whole_experts(ReferenceMoe, *made, counts=(2, num_experts - 3, 1))


@pytest.mark.parametrize("num_tokens", [0, 1, 40])
def test_copies_of_experts_and_halves_of_the_op(num_tokens: int) -> None:
    check_copies(ReferenceMoe, num_tokens)
