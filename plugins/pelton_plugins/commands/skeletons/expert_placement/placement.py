"""Where experts go: the most loaded one to the first rank, the next to the second, and so on in turns.

Places that are left over (`num_redundant_experts`) are given to the most loaded experts, in turns too.
"""

from __future__ import annotations

from collections.abc import Sequence

from pelton.parallel.expert_placement import ExpertPlacement


class SkeletonPlacement(ExpertPlacement):
    """Experts that a router chooses by groups stay where they are."""

    def place(self, load: Sequence[int], placement: Sequence[int], sizes: Sequence[int], group_size: int) -> list[int]:
        if group_size < len(load):
            return list(placement)
        order = sorted(range(len(load)), key=lambda expert: (-load[expert], expert))
        left = [order[place % len(order)] for place in range(len(placement))]
        ranks: list[list[int]] = [[] for _ in sizes]
        while left:
            for rank, size in zip(ranks, sizes, strict=True):
                if left and len(rank) < size:
                    rank.append(left.pop(0))
        return [expert for rank in ranks for expert in rank]
