"""Interface of a policy that says which rank has which experts (`--enable-eplb`).

A plugin offers one through the hook `pelton_expert_placements`. Each rank has one of its own, and all must say the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence


class ExpertPlacement(ABC):
    """Made without arguments, in each rank."""

    @abstractmethod
    def place(self, load: Sequence[int], placement: Sequence[int], sizes: Sequence[int], group_size: int) -> list[int]:
        """Return the expert that each place [P] is to have from now on, the same for the same arguments: each expert has one place or
        more. Called for each layer, between two steps, which wait for it.

        load: tokens that each expert [E] was given lately. placement: the expert that each place [P] has now; P > E with redundant experts
        (`num_redundant_experts`), and tokens take the places of an expert in turn. sizes: how many places each rank has; ranks follow each
        other. group_size: where a router chooses groups of experts first, and P = E, places i x group_size to (i + 1) x group_size - 1
        have to have one group, which are the experts j x group_size to (j + 1) x group_size - 1 of some j; else P.
        """


def why_wrong(new: Sequence[int], placement: Sequence[int], group_size: int) -> str | None:
    """Say what a policy may not answer in this; None where all is well."""
    experts = sorted(set(placement))
    if len(new) != len(placement) or sorted(set(new)) != experts:
        return f"{list(new)} does not give {len(experts)} experts {len(placement)} places, one each or more"
    for first in range(0, len(new), group_size):
        if len({expert // group_size for expert in new[first : first + group_size]}) > 1:
            return f"places {first} to {first + group_size - 1} have experts of several groups"
    return None
