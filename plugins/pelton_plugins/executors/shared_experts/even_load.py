"""`EvenLoad`: the most loaded expert first, to the rank that has the least so far (longest processing time first).

Graham, Bounds on Multiprocessing Timing Anomalies (1969). The largest load of a rank is at most 4/3 of the least possible where places
are plenty. An expert that stays on its rank stays at its place.
"""

from __future__ import annotations

from collections.abc import Sequence

from pelton.parallel.expert_placement import ExpertPlacement

LEAST_GAIN = 0.05
"""By how much of the largest load a move has to lower it: weights that travel cost more than they bring otherwise."""


class EvenLoad(ExpertPlacement):
    def place(self, load: Sequence[int], placement: Sequence[int], sizes: Sequence[int], group_size: int) -> list[int]:
        owner = [rank for rank, size in enumerate(sizes) for _ in range(size)]
        if len(placement) > len(load):
            new = _spread_copies(load, placement, owner)
        elif len(placement) == group_size:
            new = _spread(load, placement, owner)
        elif all(size % group_size == 0 for size in sizes):
            new = self._spread_groups(load, placement, sizes, group_size)
        else:  # ranks share groups: each group is spread over its own places
            new = []
            for first in range(0, len(placement), group_size):
                places = slice(first, first + group_size)
                new += _spread(load, placement[places], owner[places])
        most, before = _largest(load, new, owner), _largest(load, placement, owner)
        return new if most < before * (1 - LEAST_GAIN) else list(placement)

    def _spread_groups(
        self, load: Sequence[int], placement: Sequence[int], sizes: Sequence[int], group_size: int
    ) -> list[int]:
        firsts = range(0, len(placement), group_size)
        members = {placement[first] // group_size: placement[first : first + group_size] for first in firsts}
        loads = {group: sum(load[expert] for expert in found) for group, found in members.items()}
        owner = [rank for rank, size in enumerate(sizes) for _ in range(size // group_size)]
        groups = _spread([loads[group] for group in range(len(members))], list(members), owner)
        return [expert for group in groups for expert in members[group]]


def _spread(load: Sequence[int], placement: Sequence[int], owner: Sequence[int]) -> list[int]:
    """Deal these experts out to their places, of which `owner` says whose each is."""
    room = {rank: owner.count(rank) for rank in sorted(set(owner))}
    total = dict.fromkeys(room, 0)
    home = dict(zip(placement, owner, strict=True))
    rank_of: dict[int, int] = {}
    for expert in sorted(placement, key=lambda expert: (-load[expert], expert)):
        rank = min((rank for rank in room if room[rank]), key=lambda rank: (total[rank], rank != home[expert], rank))
        rank_of[expert] = rank
        room[rank] -= 1
        total[rank] += load[expert]
    coming = {rank: [e for e in placement if rank_of[e] == rank != home[e]] for rank in room}
    return [
        expert if rank_of[expert] == rank else coming[rank].pop(0)
        for expert, rank in zip(placement, owner, strict=True)
    ]


def _spread_copies(load: Sequence[int], placement: Sequence[int], owner: Sequence[int]) -> list[int]:
    """Give the places beyond one for each expert to those whose places have the most to do, and deal all out: those of one expert to
    different ranks."""
    ranks = sorted(set(owner))
    counts = [1] * len(load)
    for _ in range(len(placement) - len(load)):
        spare = [expert for expert, count in enumerate(counts) if count < len(ranks)] or range(len(load))
        counts[max(spare, key=lambda expert: (load[expert] / counts[expert], -expert))] += 1
    room, total = {rank: owner.count(rank) for rank in ranks}, dict.fromkeys(ranks, 0.0)
    wanted: dict[int, list[int]] = {rank: [] for rank in ranks}
    home = set(zip(placement, owner, strict=True))
    copies = [expert for expert, count in enumerate(counts) for _ in range(count)]
    for expert in sorted(copies, key=lambda expert: (-load[expert] / counts[expert], expert)):
        rank = min(
            (rank for rank in ranks if room[rank] > len(wanted[rank])),
            key=lambda rank: (expert in wanted[rank], total[rank], (expert, rank) not in home, rank),
        )
        wanted[rank].append(expert)
        total[rank] += load[expert] / counts[expert]
    new: list[int | None] = [None] * len(placement)
    for place, (expert, rank) in enumerate(zip(placement, owner, strict=True)):
        if expert in wanted[rank]:
            wanted[rank].remove(expert)
            new[place] = expert
    return [wanted[rank].pop(0) if expert is None else expert for expert, rank in zip(new, owner, strict=True)]


def _largest(load: Sequence[int], placement: Sequence[int], owner: Sequence[int]) -> float:
    total = dict.fromkeys(owner, 0.0)
    for expert, rank in zip(placement, owner, strict=True):
        total[rank] += load[expert] / placement.count(expert)
    return max(total.values())
