"""Conformance of policies that place experts. Subclass `ExpertPlacementConformance` in a test module and set `policy_class`."""

from __future__ import annotations

import random
from typing import ClassVar

import pytest

from pelton.parallel.expert_placement import ExpertPlacement, why_wrong

SHAPES = [
    (8, 8, (4, 4)), (7, 7, (3, 4)), (12, 3, (6, 6)), (12, 4, (3, 3, 3, 3)), (16, 4, (8, 8)), (4, 4, (4,)),
    (8, 10, (5, 5)), (6, 12, (4, 4, 4)), (5, 7, (3, 4)),
]  # fmt: skip
"""Experts, those of a group, and places of each rank; with more places than experts there are no groups."""


class ExpertPlacementConformance:
    policy_class: ClassVar[type[ExpertPlacement]]

    @pytest.mark.parametrize(("num_experts", "group_size", "sizes"), SHAPES)
    def test_every_answer_has_each_expert(self, num_experts: int, group_size: int, sizes: tuple[int, ...]) -> None:
        """Once, or more often where there are places for it. Whatever the load, over many moves; and two ranks say the same."""
        chooser, placement = random.Random(0), [place % num_experts for place in range(sum(sizes))]
        first, second = self.policy_class(), self.policy_class()
        for most in (0, 1, 10, 1000, 10**12):
            load = [chooser.randint(0, most) for _ in range(num_experts)]
            before = list(placement), list(load)
            new = first.place(load, placement, sizes, group_size)
            assert (placement, load) == before, "the arguments were changed"
            why = why_wrong(new, placement, group_size)
            assert why is None, why
            assert new == second.place(load, placement, sizes, group_size), "two ranks place experts differently"
            placement = new
