"""The op of experts against its reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pelton.ops.moe import ExpertsSpec, MoeNeeds, MoeTensors, RoutingSpec
from pelton_backends.reference.moe import ReferenceMoe
from pelton_backends.triton.ops.moe.experts import FEW_PAIRS, TritonMoe

H, WIDTH = 72, 40
ROUTINGS = {
    "softmax": RoutingSpec(num_experts=6, top_k=2),
    "groups": RoutingSpec(num_experts=12, top_k=3, num_groups=4, top_groups=2, is_renormalized=False, scale=2.5),
    "corrected": RoutingSpec(
        num_experts=16, top_k=4, scoring="sigmoid", num_groups=4, top_groups=2, group_score="top2", has_correction=True
    ),
    "input": RoutingSpec(num_experts=5, top_k=1, scoring="sigmoid", is_renormalized=False, scales_input=True),
}


def case(
    device: torch.device, routing: RoutingSpec, num_tokens: int, dtype: torch.dtype = torch.float32, **experts: Any
) -> tuple[MoeNeeds, MoeTensors, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)

    def numbers(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * shape[-1] ** -0.5).to(device, dtype)

    spec = ExpertsSpec(hidden_size=H, intermediate_size=WIDTH, **experts)
    count = routing.num_experts
    tensors = {"gate_up": numbers(count, 2 * WIDTH, H) * 3, "down": numbers(count, H, WIDTH) * 3}
    if spec.has_bias:
        tensors |= {"gate_up_bias": numbers(count, 2 * WIDTH), "down_bias": numbers(count, H)}
    needs = MoeNeeds(
        dtype=str(dtype).removeprefix("torch."), routing=routing, experts=spec, max_num_tokens=num_tokens,
        counts_load=True, has_router_bias=spec.has_bias,
    )  # fmt: skip
    assert TritonMoe.unsupported(needs) == []
    bound = MoeTensors(
        numbers(count, H) * 4, tensors, numbers(count) if spec.has_bias else None,
        numbers(count).float() if routing.has_correction else None,
        torch.zeros(count, dtype=torch.int64, device=device),
    )  # fmt: skip
    slots = torch.arange(num_tokens, device=device)
    slots[num_tokens // 2 :: 3] = -1 if num_tokens > 2 else 7
    return needs, bound, numbers(num_tokens, H) * H**0.5, slots


def check(needs: MoeNeeds, tensors: MoeTensors, x: torch.Tensor, slots: torch.Tensor, tolerance: float) -> None:
    assert tensors.load is not None
    want = ReferenceMoe.bind(needs, tensors)(x.clone(), slots)
    load = tensors.load.clone()
    tensors.load.zero_()
    got = TritonMoe.bind(needs, tensors)(x, slots)
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)
    assert torch.equal(tensors.load, load)
    assert not got[slots < 0].any()


@pytest.mark.parametrize("num_tokens", [1, 5, 40])
@pytest.mark.parametrize("name", ROUTINGS)
def test_equals_the_reference(name: str, num_tokens: int, device: torch.device) -> None:
    check(*case(device, ROUTINGS[name], num_tokens), tolerance=2e-5)


@pytest.mark.parametrize("num_tokens", [3, 40])
def test_biases_and_the_activation_of_gpt_oss(num_tokens: int, device: torch.device) -> None:
    routing = RoutingSpec(num_experts=6, top_k=2)
    made = case(device, routing, num_tokens, activation="swiglu_oai", limit=0.5, has_bias=True)
    check(*made, tolerance=2e-5)


def test_one_expert_has_all_tokens(device: torch.device) -> None:
    needs, tensors, x, slots = case(device, RoutingSpec(num_experts=6, top_k=1), 40)
    tensors.router.zero_()
    check(needs, tensors, x, slots, tolerance=2e-5)
    assert tensors.load is not None
    assert tensors.load.tolist()[1:] == [0] * 5


def test_both_ways_are_taken() -> None:
    assert 5 * 2 <= FEW_PAIRS < 40


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 33, 300, 3000])
def test_bfloat16_stays_near(num_tokens: int, device: torch.device) -> None:
    routing = RoutingSpec(num_experts=64, top_k=8)
    needs, tensors, x, slots = case(device, routing, num_tokens, torch.bfloat16)
    assert tensors.load is not None
    want = ReferenceMoe.bind(needs, tensors)(x, slots)
    got = TritonMoe.bind(needs, tensors)(x, slots)
    # Where two experts are almost equally good, rounding of the logits chooses.
    assert ((got - want).abs() <= 0.06 * (1 + want.abs())).float().mean() > 0.999
    assert not got[slots < 0].any()


def test_layers_that_differ_in_their_experts_alone_do_not_share_kernels(device: torch.device) -> None:
    for routing in (RoutingSpec(num_experts=8, top_k=2), RoutingSpec(num_experts=9, top_k=4)):
        check(*case(device, routing, 40), tolerance=2e-5)
