"""Blocks whose keys and values may not be used, and who has read them.

The life of a bad block. A block is bad when its request failed with NaN, when the step that wrote it failed, or when its load did.
It goes back to the pool like any other, with what is in it: attention selects away what is not a row's own, so the next holder
reads nothing but what it writes itself (`pelton.attention.interface.AttentionBackend` says so, and its suite tests it). What may not
happen is that somebody finds the block in the prefix cache. Full blocks are cached when they are allocated, before their values
are known. So when a result tells that a block is bad, it is evicted, with the blocks that its request computed after it. A request
may have given it up by then: `InvalidBlocks` remembers what was given up under a step until that step's result is there. A request
that found the block earlier has read it: after NaN its own result is NaN and it fails by itself; after a failed step or load
`find_readers` names it, and it is computed again.

All of this is rare, so it may be slow, and errs on the safe side: a table is kept as the workers have it, with blocks that left a
window since, and a request that only had such a block long ago is computed again too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from pelton.kv_cache.interface import KVCacheManager
from pelton_plugins.scheduler.request import RequestState
from pelton_plugins.scheduler.step import OpenSteps


@dataclass(slots=True)
class BlockUse:
    """Blocks that a request reads and writes, or did when it gave them up under an open step."""

    request: RequestState
    last_step_id: int
    tables: Sequence[Sequence[int]]
    """Per group."""
    kept_states: Sequence[tuple[int, int]] = ()
    """(tokens, block): states that it has found, or that are kept of it."""
    num_valid: int = 0
    """Leading tokens whose KV is known to be good: found, or computed by steps of which a result has told."""

    def blocks_from(self, num_tokens: int, block_sizes: Sequence[int]) -> set[int]:
        """Return the blocks that hold tokens after the first `num_tokens`."""
        if not self.tables:
            return set()
        pairs = zip(block_sizes, self.tables, strict=True)
        found = {block_id for size, table in pairs for block_id in table[num_tokens // size :]} - {0}
        return found | {block_id for tokens, block_id in self.kept_states if tokens >= num_tokens}

    def first_token_in(self, block_ids: set[int], block_sizes: Sequence[int]) -> int | None:
        """Return the first token that one of these blocks holds, None when the request uses none of them."""
        places = [
            place * size
            for size, table in zip(block_sizes, self.tables, strict=bool(self.tables))
            for place, block_id in enumerate(table)
            if block_id in block_ids
        ]
        places += [tokens for tokens, block_id in self.kept_states if block_id in block_ids]
        return min(places, default=None)


class InvalidBlocks:
    """The ledger: what was given up under open steps, and what is evicted when their results tell of it."""

    def __init__(self, kv: KVCacheManager, steps: OpenSteps, block_sizes: Sequence[int]) -> None:
        self._kv, self._steps, self._block_sizes = kv, steps, tuple(block_sizes)
        self._given_up: list[BlockUse] = []

    def note_given_up(self, request: RequestState) -> None:
        """Remember the blocks of a request that gives them up, where an open step uses them."""
        retired = self._steps.retired
        if request.tables and request.last_step_id > retired:
            num_valid = request.num_found_tokens
            if request.has_valid_output:
                num_valid = self._steps.computed_before(request, retired + 1)
            self._given_up.append(replace(_use_of(request), num_valid=num_valid))

    def retire(self) -> None:
        """Forget what was given up under steps that are over."""
        if self._given_up:
            self._given_up = [use for use in self._given_up if use.last_step_id > self._steps.retired]

    def evict(self, request: RequestState, step_id: int, num_trusted: int) -> None:
        """Nobody finds the blocks of a request that failed, those after its first tokens and those that it gave up under the step."""
        self._kv.evict(self.blocks_from(request, num_trusted) | self.given_up_under(step_id, request))

    def evict_readers(self, block_ids: Iterable[int], requests: Iterable[RequestState]) -> list[BlockUse]:
        """Nobody finds these blocks, nor what was computed from them. Return the uses that are touched, among those of the requests
        and those that were given up."""
        uses = [_use_of(request) for request in requests]
        bad, touched = find_readers(block_ids, [*self._given_up, *uses], self._block_sizes)
        self._kv.evict(bad)
        return touched

    def blocks_from(self, request: RequestState, num_tokens: int) -> set[int]:
        """Return the blocks that hold the request's tokens after the first `num_tokens`."""
        return _use_of(request).blocks_from(num_tokens, self._block_sizes)

    def given_up_under(self, step_id: int, request: RequestState | None = None) -> set[int]:
        """Return the blocks that were given up, by this request or any, while this step was open, and that no result has told of."""
        uses = [use for use in self._given_up if use.last_step_id >= step_id and request in (None, use.request)]
        return set[int]().union(*(use.blocks_from(use.num_valid, self._block_sizes) for use in uses))


def _use_of(request: RequestState) -> BlockUse:
    return BlockUse(request, request.last_step_id, request.tables, request.kept_states)


def find_readers(
    block_ids: Iterable[int], uses: Iterable[BlockUse], block_sizes: Sequence[int]
) -> tuple[set[int], list[BlockUse]]:
    """Return all blocks that are bad with these, and the uses among `uses` that are touched.

    What follows a bad block in a table was computed from it, and may have been found by the next request.
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
