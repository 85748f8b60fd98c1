"""Requests that read blocks with invalid content, after a step or a load failed.

Rare, so it may be slow, and errs on the safe side: a table is kept as the workers have it, with blocks that left a
window since, and a request that only had such a block long ago is computed again too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pelton.scheduler.request import ScheduledRequest


@dataclass(slots=True)
class BlockUse:
    """Blocks that a request reads and writes, or did when it gave them up under an open step."""

    request: ScheduledRequest
    last_step_id: int
    tables: Sequence[Sequence[int]]
    """Per group."""
    num_valid: int = 0
    """Leading tokens whose KV is known to be good: found, or computed by steps of which a result has told."""

    def blocks_from(self, num_tokens: int, block_sizes: Sequence[int]) -> set[int]:
        """Blocks that hold tokens after the first `num_tokens`."""
        if not self.tables:
            return set()
        pairs = zip(block_sizes, self.tables, strict=True)
        return {block_id for size, table in pairs for block_id in table[num_tokens // size :]} - {0}

    def first_token_in(self, block_ids: set[int], block_sizes: Sequence[int]) -> int | None:
        """The first token that one of these blocks holds; None when the request uses none of them."""
        places = [
            place * size
            for size, table in zip(block_sizes, self.tables, strict=bool(self.tables))
            for place, block_id in enumerate(table)
            if block_id in block_ids
        ]
        return min(places, default=None)


def find_readers(
    block_ids: Iterable[int], uses: Iterable[BlockUse], block_sizes: Sequence[int]
) -> tuple[set[int], list[BlockUse]]:
    """All blocks that are spoilt with these, and the uses among `uses` that are touched.

    What follows a spoilt block in a table was computed from it, and may have been found by the next request.
    """
    bad = set(block_ids)
    touched: list[BlockUse] = []
    clean = list(uses)
    found = bool(bad)
    while found:
        found = False
        for use in list(clean):
            first = use.first_token_in(bad, block_sizes)
            if first is not None:
                bad |= use.blocks_from(first, block_sizes)
                clean.remove(use)
                touched.append(use)
                found = True
    return bad, touched
