"""`PagedKVCacheManager`: the built-in KV-cache manager, over one block pool and a manager per kind of layer.

`allocate` is on the step path. A request keeps three thresholds (tokens its tables have room for, tokens at which a block
becomes findable, tokens at which one leaves a window), so that a step which reaches none of them costs three comparisons.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Self

from pelton.config.kv_cache import KVCacheConfig
from pelton.kv_cache.interface import NULL_BLOCK, BlockIds, CacheableRequest, KVCacheManager, KVManagerContext
from pelton.kv_cache.spec import KVCachePlan
from pelton_plugins.kv_cache.block_pool import BlockPool, ResidencySampler
from pelton_plugins.kv_cache.coordinator import make_coordinator
from pelton_plugins.kv_cache.single_type import (
    NEVER,
    FullAttentionManager,
    ManagerEntry,
    SingleTypeManager,
    TypeBlocks,
    make_managers,
)

if TYPE_CHECKING:
    from pelton_plugins.kv_cache.states import RequestStates, StateKeeper


class _Held:
    """The blocks of one request. The three thresholds are set when its first blocks are there."""

    __slots__ = ("by_type", "next_full", "next_passed", "room", "states")

    room: int
    next_full: int
    next_passed: int

    def __init__(self, by_type: list[TypeBlocks]) -> None:
        self.by_type = by_type  # one for each single-type manager
        self.states: RequestStates | None = None  # None: none are kept


class PagedKVCacheManager(KVCacheManager):
    """See `KVCacheManager`.

    max_num_batched_tokens: most tokens of one step, for a tight bound of what a window holds; without it the bound takes a
    whole prompt in one step. extra_managers: from the hook `pelton_kv_cache_specs`.
    """

    def __init__(
        self,
        plan: KVCachePlan,
        config: KVCacheConfig,
        *,
        max_model_len: int,
        clock: Callable[[], float] = time.monotonic,
        extra_managers: Iterable[ManagerEntry] = (),
        max_num_batched_tokens: int | None = None,
    ) -> None:
        self.plan = plan
        self._max_model_len = max_model_len
        self._max_num_batched_tokens = max_num_batched_tokens
        self._sampler = ResidencySampler(config.kv_cache_metrics_sample, clock) if config.kv_cache_metrics else None
        self.pool = BlockPool(plan.num_blocks, len(plan.groups), sampler=self._sampler)
        specs = [group.spec for group in plan.groups]
        self._managers = make_managers(specs, self.pool, plan.hash_block_size, extra_managers)
        self._coordinator = make_coordinator(self._managers, enable_prefix_caching=config.enable_prefix_caching)
        self._caches_blocks = self._coordinator.caches_blocks
        self._held: dict[str, _Held] = {}
        self._nothing: BlockIds = tuple([] for _ in specs)
        state_groups = [group for manager in self._managers if manager.copies_hits for group in manager.group_ids]
        self._keeper: StateKeeper | None = None
        if state_groups and self._caches_blocks:
            from pelton_plugins.kv_cache.states import StateKeeper

            alignment = self._coordinator.alignment
            self._keeper = StateKeeper(
                state_groups, self.pool, alignment=alignment, hash_block_size=plan.hash_block_size
            )
        # Of most models: one group that keeps every token. A request then grows by a block now and then, and that is all.
        is_simple = len(specs) == 1 and type(self._managers[0]) is FullAttentionManager
        self._simple_block_size = specs[0].block_size if is_simple else 0
        is_own = type(self) is PagedKVCacheManager  # a subclass may read all hashes
        self.hits_have_first_block = is_own and is_simple and self._simple_block_size == plan.hash_block_size

    @classmethod
    def make(cls, context: KVManagerContext) -> Self:
        """Make a manager; the entry loads this."""
        return cls(
            context.plan, context.config, max_model_len=context.max_model_len,
            max_num_batched_tokens=context.max_num_batched_tokens, extra_managers=context.extra_managers,
        )  # fmt: skip

    def lookup(self, request: CacheableRequest) -> tuple[BlockIds, int]:
        keeper = self._keeper
        is_useless = keeper is not None and not self.hands_copies
        if request.skip_prefix_lookup or not self._caches_blocks or is_useless:
            return tuple([] for _ in self._nothing), 0
        hit = self._coordinator.longest_hit(request.block_hashes, request.num_tokens - 1)
        if keeper is not None:
            keeper.note_shared(request, self._coordinator.num_shared)
        return hit

    def take_copies(self) -> list[tuple[int, int]]:
        return [] if self._keeper is None else self._keeper.take_copies()

    def chunk_end(self, request: CacheableRequest, start: int, end: int) -> int:
        keeper = self._keeper
        if keeper is None or not self.hands_copies:
            return end
        held = self._held.get(request.request_id)
        wanted = keeper.wanted(request) if held is None or held.states is None else held.states.wanted
        return next((place for place in wanted if start < place < end), end)

    def allocate(
        self,
        request: CacheableRequest,
        num_new_tokens: int,
        *,
        cached_blocks: BlockIds | None = None,
        num_cached_tokens: int = 0,
        num_external_tokens: int = 0,
        num_lookahead_tokens: int = 0,
        delay_caching: bool = False,
    ) -> BlockIds | None:
        num_known = request.num_tokens
        end = request.num_computed_tokens + num_new_tokens
        held = self._held.get(request.request_id)
        if held is None:
            # Whether or not the caller counts what was found as computed already.
            num_found = num_cached_tokens + num_external_tokens
            num_computed = max(request.num_computed_tokens, num_found)
            num_confirmed = max(request.num_confirmed_tokens, num_found)
            end = num_computed + num_new_tokens
        else:
            num_confirmed = request.num_confirmed_tokens
        reach = min(end + num_lookahead_tokens, self._max_model_len)
        num_full = end if end < num_known else num_known
        keeps_state = False
        if held is not None:
            keeps_state = held.states is not None and request.num_computed_tokens >= held.states.next
            if (
                reach <= held.room
                and num_confirmed < held.next_passed
                and num_full < held.next_full
                and not keeps_state
            ):
                return self._nothing
            if held.room < reach <= held.room + self._simple_block_size:
                appended = self._add_block(held)
            else:
                appended = self._extend(held, reach, num_confirmed)
        else:
            held = _Held([])
            start = self._start_simple if self._simple_block_size else self._start
            appended = start(held, reach, num_confirmed, cached_blocks or self._nothing)
            if appended is not None:
                self._held[request.request_id] = held
                if self._keeper is not None and self.hands_copies:
                    held.states = self._keeper.begin(request, end - num_new_tokens)
        if appended is None:
            return None
        if keeps_state:
            self._keep_state(held, request)
        if not delay_caching and num_full >= held.next_full:
            self._cache_full_blocks(held, request.block_hashes, num_full)
        return appended

    def _start(self, held: _Held, reach: int, num_confirmed: int, cached: BlockIds) -> BlockIds | None:
        """A request's first blocks: those that were found, new ones, and new ones for copies of what was found."""
        num_missing = 0
        firsts = []
        needed: list[list[int]] = []
        sources: list[int] = []
        for manager in self._managers:
            first = manager.first_needed_place(num_confirmed)
            firsts.append(first)
            found = [cached[group_id] for group_id in manager.group_ids]
            num_found = 0 if manager.copies_hits else len(found[0])
            num_missing += manager.num_missing(num_found, manager.num_places(reach), first)
            if manager.copies_hits:
                sources += (block_id for table in found for block_id in table)
            else:
                needed += (table[first:] for table in found)
        num_free, num_kept = self.pool.num_free, len(sources)
        if num_missing + num_kept + sum(map(len, needed)) > num_free:  # not all of them need be free
            num_missing += sum(map(self.pool.num_free_among, needed))
            if num_missing > num_free:
                return None
            if num_missing + num_kept > num_free:
                num_kept = 0
        self.pool.touch(sources)  # so that none of them is handed out
        if not num_kept:
            self.pool.evict(sources)  # the request takes them instead of copies
        for manager, first in zip(self._managers, firsts, strict=True):
            # A copy: tables are ours, and blocks that external tokens push out of a window are not taken.
            copies = manager.copies_hits and num_kept > 0
            blocks = TypeBlocks([[] if copies else list(cached[group_id]) for group_id in manager.group_ids])
            manager.let_pass(blocks, first)
            if not manager.copies_hits:
                for table in blocks.tables:
                    self.pool.touch(table)
            held.by_type.append(blocks)
        appended = self._grow(held, reach)
        if num_kept and self._keeper is not None:
            self._keeper.copy(sources, self._running_states(held))
            self.pool.free(sources)
        return appended

    def _start_simple(self, held: _Held, reach: int, num_confirmed: int, cached: BlockIds) -> BlockIds | None:
        """`_start` of a request in one group that keeps every token."""
        pool, size = self.pool, self._simple_block_size
        table = list(cached[0])
        num_new = max(-(-reach // size) - len(table), 0)
        num_free = pool.num_free
        if num_new + len(table) > num_free and num_new + pool.num_free_among(table) > num_free:
            return None
        blocks = TypeBlocks([table])
        if table:
            pool.touch(table)
        new = pool.allocate(num_new)
        table += new
        held.by_type.append(blocks)
        held.room, held.next_passed = len(table) * size, NEVER
        held.next_full = self._managers[0].tokens_until_full(blocks) if self._caches_blocks else NEVER
        return (new,)

    def _running_states(self, held: _Held) -> list[int]:
        """The blocks of its states, a group after the other."""
        types = zip(self._managers, held.by_type, strict=True)
        return [block_id for manager, blocks in types if manager.copies_hits for (block_id,) in blocks.tables]

    def _keep_state(self, held: _Held, request: CacheableRequest) -> None:
        """Have the state of the computed tokens kept, where it is wanted: the step that is allocated for changes it."""
        states, keeper, num_computed = held.states, self._keeper, request.num_computed_tokens
        assert states is not None and keeper is not None
        if num_computed == states.next and request.num_confirmed_tokens == num_computed:
            keeper.keep(states, self._running_states(held), request.block_hashes, num_computed)
            held.next_full = min(held.next_full, states.unnamed_at)
        keeper.plan_next(states, num_computed)

    def _extend(self, held: _Held, reach: int, num_confirmed: int) -> BlockIds | None:
        """More blocks for a request that has some; those that left a window go back first."""
        num_missing = 0
        leaving: list[int] = []
        firsts = []
        for manager, blocks in zip(self._managers, held.by_type, strict=True):
            first = max(manager.first_needed_place(num_confirmed), blocks.num_passed)
            firsts.append(first)
            leaving += manager.leaving(blocks, first)
            num_missing += manager.num_missing(len(blocks.tables[0]), manager.num_places(reach), first)
        num_free = self.pool.num_free
        if num_missing > num_free and num_missing > num_free + self.pool.num_held_once(leaving):
            return None
        if leaving:
            self.pool.free(leaving)
        for manager, blocks, first in zip(self._managers, held.by_type, firsts, strict=True):
            manager.let_pass(blocks, first)
        return self._grow(held, reach)

    def _add_block(self, held: _Held) -> BlockIds | None:
        """`_extend` by one block, of a request in one group that keeps every token."""
        if not self.pool.num_free:
            return None
        new = self.pool.allocate(1)
        held.by_type[0].tables[0].append(new[0])
        held.room += self._simple_block_size
        return (new,)

    def _grow(self, held: _Held, reach: int) -> BlockIds:
        """Append the blocks that were counted, and set the thresholds anew."""
        appended = list(self._nothing)
        room = next_passed = NEVER
        for manager, blocks in zip(self._managers, held.by_type, strict=True):
            num_places = manager.num_places(reach)
            if num_places > len(blocks.tables[0]):
                for group_id, new in zip(manager.group_ids, manager.grow(blocks, num_places), strict=True):
                    appended[group_id] = new
            room = min(room, manager.room(len(blocks.tables[0])))
            next_passed = min(next_passed, manager.tokens_until_passed(blocks.num_passed))
        held.room = room
        held.next_passed = next_passed
        self._set_next_full(held)
        return tuple(appended)

    def _cache_full_blocks(self, held: _Held, block_hashes: Sequence[bytes], num_tokens: int) -> None:
        if self._simple_block_size:
            blocks = held.by_type[0]
            self._managers[0].cache_full_blocks(blocks, block_hashes, num_tokens)
            held.next_full = self._managers[0].tokens_until_full(blocks) if self._caches_blocks else NEVER
            return
        for manager, blocks in zip(self._managers, held.by_type, strict=True):
            manager.cache_full_blocks(blocks, block_hashes, num_tokens)
        if held.states is not None and self._keeper is not None:
            self._keeper.name(held.states, block_hashes)
        self._set_next_full(held)

    def _set_next_full(self, held: _Held) -> None:
        if self._caches_blocks:
            types = zip(self._managers, held.by_type, strict=True)
            held.next_full = min(manager.tokens_until_full(blocks) for manager, blocks in types)
            if held.states is not None:
                held.next_full = min(held.next_full, held.states.unnamed_at)
        else:
            held.next_full = NEVER

    def cache_blocks(self, request: CacheableRequest, num_computed_tokens: int) -> None:
        held = self._held.get(request.request_id)
        num_full = min(num_computed_tokens, request.num_tokens)
        if held is not None and num_full >= held.next_full:
            self._cache_full_blocks(held, request.block_hashes, num_full)

    def free(self, request_id: str) -> None:
        held = self._held.pop(request_id, None)
        if held is None:
            return
        types = zip(self._managers, held.by_type, strict=True)
        tables = [table for manager, blocks in types if not manager.copies_hits for table in blocks.tables]
        if len(tables) == 1:
            self.pool.free(reversed(tables[0]))
        else:
            # All groups' tails before any group's head: a prefix is a hit only where every group still has it.
            rows = list(zip_longest(*tables, fillvalue=NULL_BLOCK))
            self.pool.free(block_id for row in reversed(rows) for block_id in row)
        if len(tables) < len(self._nothing):
            self.pool.free_first(self._running_states(held))
            if held.states is not None and self._keeper is not None:
                self._keeper.end(held.states)

    def block_ids(self, request_id: str) -> BlockIds:
        held = self._held.get(request_id)
        if held is not None and self._simple_block_size:
            return (list(held.by_type[0].tables[0]),)
        tables: list[list[int]] = [[] for _ in self._nothing]
        if held is not None:
            for manager, blocks in zip(self._managers, held.by_type, strict=True):
                for group_id, table in zip(manager.group_ids, blocks.tables, strict=True):
                    tables[group_id] = list(table)
        return tuple(tables)

    def evict(self, block_ids: Iterable[int]) -> None:
        self.pool.evict(block_ids)

    def num_common_prefix_blocks(self, request_ids: Sequence[str]) -> list[int]:
        all_held = [self._held.get(request_id) for request_id in request_ids]
        counts = [0] * len(self._nothing)
        if not all_held or None in all_held:
            return counts
        for index, manager in enumerate(self._managers):
            if manager.tokens_until_passed(0) != NEVER:
                continue
            for position, group_id in enumerate(manager.group_ids):
                tables = [held.by_type[index].tables[position] for held in all_held if held is not None]
                counts[group_id] = self.pool.common_prefix(tables)
        return counts

    def reset_prefix_cache(self) -> bool:
        return self.pool.reset()

    @property
    def usage(self) -> float:
        usable = self.pool.num_usable
        return (usable - self.pool.num_free) / usable if usable else 0.0

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free

    @property
    def num_usable_blocks(self) -> int:
        return self.pool.num_usable

    def max_blocks_needed(self, num_tokens: int) -> int:
        """Exact for full attention; for a window an upper bound: see `KVCacheSpec.max_blocks`."""
        return self.plan.max_blocks_needed(min(num_tokens, self._max_model_len), self._max_num_batched_tokens)

    def take_residency(self) -> tuple[list[float], list[float], list[float]]:
        return self._sampler.take() if self._sampler is not None else ([], [], [])


__all__ = ["PagedKVCacheManager", "SingleTypeManager"]
