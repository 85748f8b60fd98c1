"""Blocks and slots of requests: entered as they come, given back when no open step can touch them.

Where one stream orders all steps that is at once; else they wait for their fence, the last step that uses them. Who gives
something up, and when, is decided elsewhere; what becomes of blocks with bad values is told in `invalid_blocks.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pelton.kv_cache.interface import BlockIds, KVCacheManager
from pelton_plugins.scheduler.invalid_blocks import InvalidBlocks
from pelton_plugins.scheduler.request import RequestState
from pelton_plugins.scheduler.slots import SlotPool
from pelton_plugins.scheduler.step import OpenSteps, StepBuilder


def is_cached_later(num_new: int) -> bool:
    """Return whether the blocks that a row of so many tokens fills are cached with its result, not when they are allocated:
    a backend may write and read a step of one-token rows in one launch, so no row of it may read what another brings."""
    return num_new == 1


class Allocations:
    """block_sizes: tokens a block, per KV group. hash_block_size: 0 without prefix caching."""

    def __init__(
        self,
        kv: KVCacheManager,
        steps: OpenSteps,
        *,
        block_sizes: Sequence[int],
        hash_block_size: int,
        num_slots: int,
        num_side_slots: int,
        steps_are_ordered: bool,
    ) -> None:
        self.slots = SlotPool(num_slots)
        self.side_slots = SlotPool(num_side_slots)
        self.block_sizes = tuple(block_sizes)
        self.hash_block_size = hash_block_size
        self.invalid = InvalidBlocks(kv, steps, block_sizes)
        self._kv = kv
        self._steps = steps
        self._is_ordered = steps_are_ordered
        self._fenced: list[tuple[int, str, int, int]] = []  # (step, request id or "", slot, side slot)

    # Taken.

    def start(
        self,
        request: RequestState,
        block_ids: BlockIds,
        num_tokens: int,
        copies: Sequence[tuple[int, int]],
        *,
        is_cached_now: bool,
    ) -> None:
        """The first blocks of a request, with room for `num_tokens`. copies: of states that were found."""
        request.tables = [list(ids) for ids in block_ids]
        # Their last token is known to be good, as those of found blocks are.
        request.kept_states = [(request.num_computed_tokens - 1, source) for source, _ in copies]
        self._note_capacity(request, num_tokens)
        if is_cached_now:
            self._note_cached(request, num_tokens)

    def grow(self, request: RequestState, num_new: int, num_draft: int, step: StepBuilder) -> bool:
        """Blocks for a running request's next tokens and drafts. False, and nothing done, when the pool has none."""
        delay_caching = is_cached_later(num_new)
        new_ids = self._kv.allocate(request, num_new, num_lookahead_tokens=num_draft, delay_caching=delay_caching)
        if new_ids is None:
            return False
        self.append(request, new_ids, num_new, num_draft, step)
        if not delay_caching:
            self._note_cached(request, request.num_computed_tokens + num_new)
        return True

    def append(self, request: RequestState, new_ids: BlockIds, num_new: int, num_draft: int, step: StepBuilder) -> None:
        """Enter what was allocated for these tokens, and tell the workers."""
        if copies := self._kv.take_copies():
            step.copies += copies
            request.kept_states += [(request.num_computed_tokens, target) for _, target in copies]
        for group, ids in enumerate(new_ids):
            if ids:
                table = request.tables[group]
                step.appends.append((group, request.slot, len(table), list(ids)))
                table += ids
        self._note_capacity(request, request.num_computed_tokens + num_new + num_draft)

    def _note_capacity(self, request: RequestState, num_tokens: int) -> None:
        """Each group has blocks for `num_tokens`, rounded up to its block size."""
        if len(self.block_sizes) == 1:
            size = self.block_sizes[0]
            request.capacity = -(-num_tokens // size) * size
        else:
            capacities = (-(-num_tokens // size) * size for size in self.block_sizes)
            request.capacity = min(capacities, default=sys.maxsize)  # without a cache nothing runs out

    def _note_cached(self, request: RequestState, num_computed: int) -> None:
        """`allocate` has made the full blocks of known tokens findable."""
        if self.hash_block_size:
            request.num_cached_blocks = min(num_computed, len(request.token_ids)) // self.hash_block_size

    # Given back.

    def release(self, request: RequestState, *, keeps_blocks: bool = False) -> None:
        """Give back slots and, unless a connector still needs them, blocks."""
        kv_id, slot, side_slot = "" if keeps_blocks else request.request_id, request.slot, request.side_slot
        request.slot = request.side_slot = -1
        self.invalid.note_given_up(request)
        self._give_back_after(request.last_step_id, kv_id, slot, side_slot)

    def release_sent(self, request_id: str, last_step_id: int) -> None:
        """A connector needs these blocks of a finished request no more."""
        self._give_back_after(last_step_id, request_id, -1, -1)

    def retire(self) -> None:
        """A step is over: what waited for it comes back, and its result has told of what was given up under it."""
        retired = self._steps.retired
        self.invalid.retire()
        if not self._fenced:
            return
        passed = [entry for entry in self._fenced if entry[0] <= retired]
        self._fenced = [entry for entry in self._fenced if entry[0] > retired]
        for _, request_id, slot, side_slot in passed:
            self._give_back(request_id, slot, side_slot)

    @property
    def has_fenced(self) -> bool:
        """Something comes back when a step is over."""
        return bool(self._fenced)

    def is_fenced(self, request_id: str) -> bool:
        return any(entry[1] == request_id for entry in self._fenced)

    def _give_back_after(self, step_id: int, request_id: str, slot: int, side_slot: int) -> None:
        if self._is_ordered or step_id <= self._steps.retired:
            self._give_back(request_id, slot, side_slot)
        else:
            self._fenced.append((step_id, request_id, slot, side_slot))

    def _give_back(self, request_id: str, slot: int, side_slot: int) -> None:
        if request_id:
            self._kv.free(request_id)
        if slot >= 0:
            self.slots.give_back(slot)
        if side_slot >= 0:
            self.side_slots.give_back(side_slot)
