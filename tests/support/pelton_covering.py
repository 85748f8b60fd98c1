"""Fewer cases of a grid: as many as it takes to meet every pair (or triple) of values once.

Faults of a kernel mostly need two or three values together: a dtype and a number of rows, an instruction set, a size and a
form. A grid of five parameters asks each of these questions dozens of times.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heapify, heapreplace
from itertools import combinations
from typing import Any

import pytest

Case = tuple[int, ...]


def covering(cases: Sequence[Case], strength: int) -> list[int]:
    """Indices of `cases` (each a tuple with a name of its value on each axis), in order, that together have every
    combination of values on any `strength` axes which some case has. Greedy: never the smallest choice, always the same."""
    axes = list(combinations(range(len(cases[0])), min(strength, len(cases[0])))) if cases else []
    met_by = [{(places, *(case[place] for place in places)) for places in axes} for case in cases]
    missing = set().union(*met_by)
    chosen: list[int] = []
    # How many of the missing ones a case has only falls: who has the most by what was counted last, and still has, is the best.
    counted = [(-len(met), index) for index, met in enumerate(met_by)]
    heapify(counted)
    while missing:
        negative, best = counted[0]
        count = len(met_by[best] & missing)
        if count != -negative:
            heapreplace(counted, (-count, best))
            continue
        missing -= met_by[best]
        chosen.append(best)
    return sorted(chosen)


def in_turn(first: Iterable[object], second: Sequence[object]) -> list[Any]:
    """All pairs. Without a GPU each of the first values is met once, with one of the second ones in turn: one that the interpreter
    takes seconds for, or that differs by what a single value asks."""
    return [
        pytest.param(one, other, marks=[] if (at - kind) % len(second) == 0 else [pytest.mark.gpu])
        for at, one in enumerate(first)
        for kind, other in enumerate(second)
    ]
