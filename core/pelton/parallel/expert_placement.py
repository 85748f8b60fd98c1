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
        """Return the expert [E] that each place is to have from now on: a permutation, the same for the same arguments. Called for each
        layer, between two steps, which wait for it.

        load: tokens that each expert [E] was given lately. placement: the expert that each place [E] has now. sizes: how many places each
        rank has; ranks follow each other. group_size: where a router chooses groups of experts first, places i x group_size to
        (i + 1) x group_size - 1 have to have one group, which are the experts j x group_size to (j + 1) x group_size - 1 of some j;
        else E.
        """


def why_wrong(new: Sequence[int], placement: Sequence[int], group_size: int) -> str | None:
    """Say what a policy may not answer in this; None where all is well."""
    if sorted(new) != sorted(placement):
        return f"{list(new)} is no order of the {len(placement)} experts"
    for first in range(0, len(new), group_size):
        if len({expert // group_size for expert in new[first : first + group_size]}) > 1:
            return f"places {first} to {first + group_size - 1} have experts of several groups"
    return None
