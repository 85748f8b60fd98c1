"""Experts without a gate: the sum of those that are chosen, computed for their tokens alone and for all."""

from __future__ import annotations

import torch

from pelton.ops.moe import RoutingSpec
from pelton_backends.reference.moe import route as reference_route
from pelton_plugins.models.ungated import route, sum_of_all, sum_of_chosen

T, E, K, SIZE, WIDTH = 9, 6, 2, 8, 12


def test_the_sum_of_chosen_experts() -> None:
    torch.manual_seed(0)
    x, up, down = torch.randn(T, SIZE), torch.randn(E, WIDTH, SIZE), torch.randn(E, SIZE, WIDTH)
    experts, shares = torch.rand(T, E).topk(K).indices, torch.rand(T, K)
    expected = torch.stack([
        sum(shares[t, place] * (down[index] @ (up[index] @ x[t]).clamp(min=0) ** 2) for place, index in enumerate(experts[t]))
        for t in range(T)
    ])  # fmt: skip
    torch.testing.assert_close(sum_of_chosen(x, experts, shares, up, down), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sum_of_all(x, experts, shares, up, down), expected, rtol=1e-5, atol=1e-5)


def test_routing_is_that_of_the_op() -> None:
    torch.manual_seed(1)
    logits, correction = torch.randn(50, 12), torch.randn(12)
    for groups, top, is_renormalized in ((1, 1, True), (4, 2, True), (3, 1, False)):
        spec = RoutingSpec(
            num_experts=12, top_k=3, scoring="sigmoid", is_renormalized=is_renormalized, scale=1.5, num_groups=groups,
            top_groups=top, group_score="top2", has_correction=True,
        )  # fmt: skip
        found, expected = route(logits, correction, spec), reference_route(logits, spec, correction)
        torch.testing.assert_close(found[0], expected[0])
        torch.testing.assert_close(found[1], expected[1])
