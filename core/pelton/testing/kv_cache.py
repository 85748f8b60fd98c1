"""Conformance of KV-cache managers: what any implementation has to keep, run with pytest.

Subclass `KVCacheManagerConformance` in a test module and give it `make_manager`. `KVSimulation` is the tool behind its random
runs: a host that schedules requests as an engine may (chunks, drafts, open steps, preemption, failures), and a device that
records which token's KV each slot of each block holds, so that a wrong hit or a block reused too early is seen at once.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import pytest

from pelton.config.kv_cache import KVCacheConfig
from pelton.kv_cache.hashing import BlockHasher
from pelton.kv_cache.interface import BlockIds, KVCacheManager
from pelton.kv_cache.spec import ChunkedLocalSpec, KVCachePlan, KVCacheSpec, SlidingWindowSpec
from pelton.testing.kv_specs import BLOCK_SIZE, LAYER_KINDS, make_plan

NEED_PREFIXES = frozenset({
    "test_a_prefix_is_found_in_whole_blocks_and_never_to_the_last_token", "test_a_prefix_is_found_after_its_request_has_ended",
    "test_a_salt_separates", "test_requests_of_one_step_share_what_the_first_of_them_computes",
    "test_a_refused_allocation_changes_nothing", "test_found_blocks_that_are_free_count_as_taken",
    "test_preempted_requests_find_their_own_tokens_again", "test_sampled_tokens_become_findable_when_known",
    "test_drafts_and_lookahead_get_room_and_are_never_findable", "test_delayed_caching_waits_for_cache_blocks",
    "test_evicted_blocks_are_not_found_and_stay_held", "test_the_index_empties_only_while_nothing_is_held",
    "test_common_prefix_counts_the_leading_blocks_of_all",
    "test_a_first_block_is_looked_up_alone_where_all_hits_have_one",
})  # fmt: skip
"""Tests of `KVCacheManagerConformance` that need hits."""


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """A `CacheableRequest`, with what only the device knows yet."""

    request_id: str
    token_ids: list[int]  # known on the host
    num_prompt_tokens: int
    salt: str | None = None
    num_computed_tokens: int = 0
    num_confirmed_tokens: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    skip_prefix_lookup: bool = False
    # The host's view of open steps.
    num_pending: int = 0
    is_held: bool = False
    epoch: int = 0  # counts preemptions: results of earlier steps bring tokens only
    most_tokens: int = 0  # that its tables ever had to hold
    # The device.
    device_tokens: list[int] = field(default_factory=list)
    device_computed: int = 0
    tables: list[list[int]] = field(default_factory=list)
    kept_states: list[tuple[int, int]] = field(default_factory=list)  # (tokens, block), each that was kept of it

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(slots=True)
class _Row:
    request: SimulatedRequest
    num_scheduled: int
    num_draft: int
    epoch: int
    new_tokens: list[int] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)  # of blocks, before the step

    @property
    def num_rejected(self) -> int:
        return self.num_draft + 1 - len(self.new_tokens) if self.new_tokens else 0


class KVSimulation:
    """Drives a manager as a scheduler does, and checks after each step what each row reads."""

    def __init__(
        self,
        manager: KVCacheManager,
        plan: KVCachePlan,
        *,
        max_model_len: int,
        vocab_size: int = 2,
        max_chunk: int = 64,
    ) -> None:
        manager.hands_copies = True
        self.manager = manager
        self.plan = plan
        self.max_model_len = max_model_len
        self.max_chunk = max_chunk
        self.vocab_size = vocab_size  # small: prefixes and outputs shall repeat
        self.requests: dict[str, SimulatedRequest] = {}
        self.open_steps: list[list[_Row]] = []
        self.num_hits = 0  # tokens
        self._slots: dict[tuple[int, int], tuple[int, int]] = {}  # (block, slot) -> (group, signature)
        self._states: dict[int, tuple[int, int]] = {}  # block -> (group, signature of the last token)
        self.has_states = any(group.spec.has_fixed_page for group in plan.groups)
        self._hasher = BlockHasher("sha256", plan.hash_block_size)
        self._num_added = 0

    def add(self, prompt: Sequence[int], salt: str | None = None) -> SimulatedRequest:
        self._num_added += 1
        request = SimulatedRequest(f"r{self._num_added}", list(prompt), len(prompt), salt)
        request.device_tokens = list(prompt)
        self._hasher.extend(request.block_hashes, request.token_ids, cache_salt=salt)
        self.requests[request.request_id] = request
        return request

    def can_schedule(self, request: SimulatedRequest) -> bool:
        reached = len(request.token_ids) + request.num_pending >= self.max_model_len
        return not reached and (request.is_held or request.num_pending == 0)

    def allocate(self, request: SimulatedRequest, chunk: int, num_draft: int, num_lookahead: int) -> _Row | None:
        """One row of a step, or None when blocks run out; then nothing may have changed."""
        cached: BlockIds | None = None
        num_cached = 0
        if not request.is_held:
            cached, num_cached = self.manager.lookup(request)
            assert num_cached < request.num_tokens, "the last token has to be computed"
        start = request.num_computed_tokens + num_cached
        num_new = min(chunk, self.max_chunk, len(request.token_ids) + request.num_pending - start)
        if num_new > 1:
            num_new = self.manager.chunk_end(request, start, start + num_new) - start
        if start + num_new < len(request.token_ids) + request.num_pending:
            num_draft = 0  # not the last chunk
        before = self.snapshot()
        appended = self.manager.allocate(
            request, num_new + num_draft, cached_blocks=cached, num_cached_tokens=num_cached,
            num_lookahead_tokens=num_lookahead,
        )  # fmt: skip
        if appended is None:
            assert self.snapshot() == before, "a refused allocation changed something"
            return None
        if not request.is_held:
            assert cached is not None
            self.num_hits += num_cached
            request.tables = [list(table) for table in cached]
            for group_id, group in enumerate(self.plan.groups):
                if group.spec.has_fixed_page:  # what was found is copied, or taken
                    request.tables[group_id] = [] if appended[group_id] else request.tables[group_id]
            request.device_computed = num_cached
            request.num_computed_tokens = request.num_confirmed_tokens = num_cached
            request.is_held = True
        for table, new in zip(request.tables, appended, strict=True):
            table.extend(new)
        reach = request.num_computed_tokens + num_new + num_draft + num_lookahead
        request.most_tokens = max(request.most_tokens, min(reach, self.max_model_len))
        request.num_computed_tokens += num_new + num_draft
        request.num_confirmed_tokens += num_new
        self._check_tables(request)
        copies = self.manager.take_copies()
        if start > num_cached:
            request.kept_states += [(start, target) for _, target in copies]
        return _Row(request, num_new + num_draft, num_draft, request.epoch, copies=copies)

    def take_back(self, row: _Row) -> None:
        """The row will not run: its request became a victim after it was allocated."""
        request = row.request
        self._distrust(request, request.num_computed_tokens - row.num_scheduled)
        self.preempt(request)

    def launch(self, rows: list[_Row], choose: random.Random) -> None:
        """The device runs the step: blocks are copied, all rows write, then all read. The host sees the result in `retire`."""
        for row in rows:
            for source, target in row.copies:
                self._put_state(target, self._states.get(source, (-1, -1)))
        written = [self._write(row, choose) for row in rows]
        for row, (start, end) in zip(rows, written, strict=True):
            self._read(row.request, start, end)
            if row.new_tokens:
                row.request.num_pending += 1 + row.num_draft
        self.open_steps.append(rows)

    def fail(self, rows: list[_Row]) -> None:
        """The step left garbage behind: its requests end, what it made findable is not."""
        for row in rows:
            request = row.request
            first = request.num_computed_tokens - row.num_scheduled
            for _, target in row.copies:
                self._put_state(target, (-1, -1))
            for group, table in zip(self.plan.groups, request.tables, strict=True):
                size = group.spec.block_size
                if group.spec.has_fixed_page:
                    self._put_state(table[0], (-1, -1))
                    continue
                for position in range(first, request.num_computed_tokens):
                    self._slots[table[position // size], position % size] = (-1, -1)
            self._distrust(request, first)
            self.finish(request)

    def retire(self) -> None:
        """The oldest open step's result reaches the host."""
        for row in self.open_steps.pop(0):
            request = row.request
            if request.request_id not in self.requests:
                continue
            if row.new_tokens:
                request.num_pending -= 1 + row.num_draft
                request.token_ids += row.new_tokens
                self._hasher.extend(request.block_hashes, request.token_ids, cache_salt=request.salt)
            if row.epoch == request.epoch:
                request.num_computed_tokens -= row.num_rejected
                request.num_confirmed_tokens += row.num_draft - row.num_rejected
                self.manager.cache_blocks(request, request.num_computed_tokens)

    def preempt(self, request: SimulatedRequest) -> None:
        self._release(request)
        request.epoch += 1
        request.num_computed_tokens = request.num_confirmed_tokens = request.most_tokens = 0
        request.is_held = False
        request.tables, request.kept_states = [], []

    def finish(self, request: SimulatedRequest) -> None:
        self._release(request)
        del self.requests[request.request_id]

    def finish_all(self) -> None:
        while self.open_steps:
            self.retire()
        for request in list(self.requests.values()):
            self.finish(request)
        assert self.manager.num_free_blocks == self.manager.num_usable_blocks, "blocks leaked"
        assert self.manager.usage == 0.0

    def snapshot(self) -> tuple[object, ...]:
        tables = {request_id: self.manager.block_ids(request_id) for request_id in self.requests}
        return tables, self.manager.num_free_blocks, self.manager.usage

    def check(self) -> None:
        """Check the invariants that the interface lets see."""
        held: set[int] = set()
        owners: dict[int, int] = {}
        for request_id in self.requests:
            for group_id, table in enumerate(self.manager.block_ids(request_id)):
                for block_id in table:
                    if block_id:
                        held.add(block_id)
                        assert owners.setdefault(block_id, group_id) == group_id, f"block {block_id} is in two groups"
        usable = self.manager.num_usable_blocks
        assert usable - self.manager.num_free_blocks == len(held), "free and held blocks are not the whole pool"
        assert abs(self.manager.usage - len(held) / usable) < 1e-9
        assert all(0 < block_id <= usable for block_id in held)

    def _release(self, request: SimulatedRequest) -> None:
        self.manager.free(request.request_id)
        assert not any(self.manager.block_ids(request.request_id)), "a freed request still has blocks"

    def _distrust(self, request: SimulatedRequest, num_tokens: int) -> None:
        """Blocks with more than the first `num_tokens` were made findable before their KV was there."""
        for group, table in zip(self.plan.groups, self.manager.block_ids(request.request_id), strict=True):
            self.manager.evict(block_id for block_id in table[num_tokens // group.spec.block_size :] if block_id)
        self.manager.evict(block_id for tokens, block_id in request.kept_states if tokens >= num_tokens)

    def _check_tables(self, request: SimulatedRequest) -> None:
        """Tables only grow: what the device was given once stays, or is null on the host by now."""
        num_held = 0
        tables = self.manager.block_ids(request.request_id)
        for given, table in zip(request.tables, tables, strict=True):
            assert len(given) == len(table)
            for place, block_id in enumerate(table):
                assert block_id in (given[place], 0)
            live = [block_id for block_id in table if block_id]
            assert len(set(live)) == len(live), "a table holds a block twice"
            num_held += len(live)
        assert num_held <= self.manager.max_blocks_needed(request.most_tokens)

    def _write(self, row: _Row, choose: random.Random) -> tuple[int, int]:
        """Returns the positions that the row's true tokens have."""
        request = row.request
        start = request.device_computed
        num_true = row.num_scheduled - row.num_draft
        if start + num_true == len(request.device_tokens):
            num_accepted = choose.randint(0, row.num_draft)
            row.new_tokens = [choose.randrange(self.vocab_size) for _ in range(num_accepted + 1)]
            request.device_tokens += row.new_tokens
            num_true += num_accepted
        signatures = self._signatures(request)
        for group_id, (group, table) in enumerate(zip(self.plan.groups, request.tables, strict=True)):
            size = group.spec.block_size
            if group.spec.has_fixed_page:
                self._advance_state(request, group_id, start, start + num_true, signatures)
                continue
            for position in range(start, start + row.num_scheduled):
                is_true = position < start + num_true
                content = (group_id, signatures[position]) if is_true else (-1, -1)  # a rejected draft
                block_id = table[position // size]
                assert block_id, "a token to be written has no block"
                self._slots[block_id, position % size] = content
                self._states.pop(block_id, None)
        request.device_computed = start + num_true
        return start, start + num_true

    def _advance_state(
        self, request: SimulatedRequest, group_id: int, start: int, end: int, signatures: Sequence[int]
    ) -> None:
        [block_id] = request.tables[group_id]
        if start:
            assert self._states.get(block_id) == (group_id, signatures[start - 1]), (
                f"{request.request_id}, group {group_id}: block {block_id} does not hold the state behind {start} tokens"
            )
        self._put_state(block_id, (group_id, signatures[end - 1]))

    def _put_state(self, block_id: int, content: tuple[int, int]) -> None:
        """A state takes the whole block."""
        self._states[block_id] = content
        for place in [place for place in self._slots if place[0] == block_id]:
            del self._slots[place]

    def _read(self, request: SimulatedRequest, start: int, end: int) -> None:
        signatures = self._signatures(request)
        for group_id, (group, table) in enumerate(zip(self.plan.groups, request.tables, strict=True)):
            size = group.spec.block_size
            if group.spec.has_fixed_page:
                continue
            for position in range(_first_read(group.spec, start), end):
                found = self._slots.get((table[position // size], position % size))
                assert found == (group_id, signatures[position]), (
                    f"{request.request_id}, group {group_id}: position {position} does not hold its token's KV"
                )

    def _signatures(self, request: SimulatedRequest) -> list[int]:
        """Return by position a number that stands for all tokens up to it."""
        signature = 0 if request.salt is None else sum(request.salt.encode())
        signatures = []
        for token_id in request.device_tokens:
            signature = hash((signature, token_id))
            signatures.append(signature)
        return signatures


def _first_read(spec: KVCacheSpec, position: int) -> int:
    if isinstance(spec, SlidingWindowSpec):
        return max(position - spec.sliding_window + 1, 0)
    if isinstance(spec, ChunkedLocalSpec):
        return position // spec.attention_chunk_size * spec.attention_chunk_size
    return 0


def run_randomly(simulation: KVSimulation, rng: random.Random, num_steps: int, *, max_open_steps: int = 2) -> None:
    """Random requests, chunks, drafts, preemptions, aborts, evictions and failures; everything is checked on the way."""
    manager = simulation.manager
    for _ in range(num_steps):
        if len(simulation.requests) < 5 and rng.random() < 0.6:
            length = rng.randint(1, simulation.max_model_len - 1)
            prompt = [rng.randrange(2) if rng.random() < 0.1 else 0 for _ in range(length)]
            simulation.add(prompt, rng.choice([None, None, None, "salt"]))
        rows = list(_random_rows(simulation, rng))
        if rows and not simulation.open_steps and rng.random() < 0.05:
            simulation.fail(rows)
        else:
            simulation.launch(rows, rng)
        while len(simulation.open_steps) >= max_open_steps or (simulation.open_steps and rng.random() < 0.4):
            simulation.retire()
        for request in list(simulation.requests.values()):
            done = len(request.token_ids) >= simulation.max_model_len
            if done or rng.random() < 0.04:
                simulation.finish(request)
            elif request.is_held and rng.random() < 0.06:
                simulation.preempt(request)
        if rng.random() < 0.05:
            manager.evict(rng.sample(range(1, manager.num_usable_blocks + 1), 2))
        simulation.check()
    simulation.finish_all()


def _random_rows(simulation: KVSimulation, rng: random.Random) -> Iterator[_Row]:
    # Running requests first, as a scheduler does: only they become victims after their allocation.
    for request in sorted(simulation.requests.values(), key=lambda request: not request.is_held):
        if not simulation.can_schedule(request) or rng.random() < 0.1:
            continue
        was_held = request.is_held
        room = simulation.max_model_len - len(request.token_ids) - request.num_pending - 1
        drafts = 0 if simulation.has_states else min(rng.choice([0, 0, 1, 3]), max(room, 0))
        row = simulation.allocate(request, rng.choice([1, 3, 7, 64]), drafts, rng.choice([0, 0, 2]))
        if row is None:
            continue
        if was_held and rng.random() < 0.05:
            simulation.take_back(row)
        else:
            yield row


class KVCacheManagerConformance:
    """Subclass as `TestMine(KVCacheManagerConformance)`, with `make_manager`."""

    finds_prefixes: ClassVar[bool] = True
    """False: a manager without prefix caching, whose `lookup` finds nothing. Tests of what is found are left out."""

    @pytest.fixture(autouse=True)
    def _left_out(self, request: pytest.FixtureRequest) -> None:
        if not self.finds_prefixes and request.function.__name__ in NEED_PREFIXES:
            pytest.skip("finds_prefixes is False")

    def test_a_manager_without_prefix_caching_finds_nothing(self) -> None:
        if self.finds_prefixes:
            return
        simulation = self.make()
        simulation.finish(self.compute(simulation, range(9)))
        assert simulation.manager.lookup(simulation.add(range(9)))[1] == 0, (
            "it finds a prefix; leave finds_prefixes out"
        )

    def make_manager(
        self, plan: KVCachePlan, config: KVCacheConfig, max_model_len: int, max_num_batched_tokens: int
    ) -> KVCacheManager:
        raise NotImplementedError

    def make(
        self, kinds: str = "full", num_blocks: int = 20, max_model_len: int = 64, **settings: object
    ) -> KVSimulation:
        plan = make_plan(LAYER_KINDS[kinds], num_blocks)
        config = KVCacheConfig(block_size=BLOCK_SIZE, **settings)  # type: ignore[arg-type]
        manager = self.make_manager(plan, config, max_model_len, max_model_len)
        return KVSimulation(manager, plan, max_model_len=max_model_len, max_chunk=max_model_len)

    def compute(self, simulation: KVSimulation, prompt: Sequence[int], salt: str | None = None) -> SimulatedRequest:
        """Run a request through one step that computes its whole prompt."""
        request = simulation.add(prompt, salt)
        row = simulation.allocate(request, len(prompt), 0, 0)
        assert row is not None
        simulation.launch([row], random.Random(0))
        simulation.retire()
        return request

    def test_an_empty_pool_is_all_free(self) -> None:
        manager = self.make(num_blocks=20).manager
        assert (manager.num_usable_blocks, manager.num_free_blocks, manager.usage) == (19, 19, 0.0)

    def test_full_attention_holds_the_tokens_rounded_up_to_blocks(self) -> None:
        for num_tokens in (1, 3, 4, 5, 16, 17):
            simulation = self.make()
            request = self.compute(simulation, range(num_tokens))
            assert len(simulation.manager.block_ids(request.request_id)[0]) == -(-num_tokens // BLOCK_SIZE)
            assert simulation.manager.max_blocks_needed(num_tokens) == -(-num_tokens // BLOCK_SIZE)

    def test_a_prefix_is_found_in_whole_blocks_and_never_to_the_last_token(self) -> None:
        for kinds in ("full", "full+window", "2-windows"):
            simulation = self.make(kinds, num_blocks=60)
            self.compute(simulation, range(16))
            assert simulation.manager.lookup(simulation.add(range(16)))[1] == 12, kinds
            assert simulation.manager.lookup(simulation.add(range(17)))[1] == 16, kinds
            assert simulation.manager.lookup(simulation.add([*range(10), 99, 98, 97]))[1] == 8, kinds
            assert simulation.manager.lookup(simulation.add([99, *range(1, 16)]))[1] == 0, kinds

    def test_a_prefix_is_found_after_its_request_has_ended(self) -> None:
        simulation = self.make()
        request = self.compute(simulation, range(9))
        blocks = simulation.manager.block_ids(request.request_id)[0][:2]
        simulation.finish(request)
        assert simulation.manager.lookup(simulation.add(range(12))) == ((blocks,), 8)

    def test_a_salt_separates(self) -> None:
        simulation = self.make()
        self.compute(simulation, range(9), "mine")
        assert simulation.manager.lookup(simulation.add(range(9)))[1] == 0
        assert simulation.manager.lookup(simulation.add(range(9), "theirs"))[1] == 0
        assert simulation.manager.lookup(simulation.add(range(9), "mine"))[1] == 8

    def test_requests_of_one_step_share_what_the_first_of_them_computes(self) -> None:
        simulation = self.make()
        first = simulation.allocate(simulation.add(range(10)), 64, 0, 0)
        second = simulation.allocate(simulation.add(range(10)), 64, 0, 0)
        assert first is not None and second is not None
        assert (first.num_scheduled, second.num_scheduled) == (10, 2)
        simulation.launch([first, second], random.Random(0))

    def test_a_request_may_refuse_what_is_found(self) -> None:
        simulation = self.make()
        self.compute(simulation, range(9))
        request = simulation.add(range(9))
        request.skip_prefix_lookup = True
        assert simulation.manager.lookup(request) == (([],), 0)

    def test_nothing_is_found_without_prefix_caching(self) -> None:
        for kinds in ("full", "full+window"):
            simulation = self.make(kinds, enable_prefix_caching=False)
            self.compute(simulation, range(9))
            assert simulation.manager.lookup(simulation.add(range(9)))[1] == 0

    def test_a_refused_allocation_changes_nothing(self) -> None:
        simulation = self.make(num_blocks=7)
        self.compute(simulation, range(9))  # 3 of 6 blocks
        assert simulation.allocate(simulation.add([7] * 17), 64, 0, 0) is None
        # Two found blocks are held by the first request: two new ones are enough.
        assert simulation.allocate(simulation.add([*range(8), 1, 2, 3, 4, 5]), 64, 0, 0) is not None

    def test_found_blocks_that_are_free_count_as_taken(self) -> None:
        simulation = self.make(num_blocks=5)
        simulation.finish(self.compute(simulation, range(16)))  # all 4 blocks, free and findable
        assert simulation.allocate(simulation.add([*range(12), *range(50, 58)]), 64, 0, 0) is None
        assert simulation.allocate(simulation.add([*range(12), *range(50, 54)]), 64, 0, 0) is not None

    def test_preempted_requests_find_their_own_tokens_again(self) -> None:
        simulation = self.make()
        request = self.compute(simulation, range(9))
        simulation.preempt(request)
        assert simulation.manager.num_free_blocks == simulation.manager.num_usable_blocks
        assert simulation.manager.lookup(request)[1] == 8

    def test_sampled_tokens_become_findable_when_known(self) -> None:
        simulation = self.make()
        request = self.compute(simulation, range(7))
        for _ in range(2):  # computes position 7, then 8
            row = simulation.allocate(request, 1, 0, 0)
            assert row is not None
            simulation.launch([row], random.Random(0))
            simulation.retire()
        assert simulation.manager.lookup(simulation.add([*request.token_ids[:8], 1]))[1] == 8

    def test_drafts_and_lookahead_get_room_and_are_never_findable(self) -> None:
        simulation = self.make()
        request = self.compute(simulation, range(6))
        # Position 6 and three drafts: the block of 4 .. 7 is full, but not of known tokens.
        simulation.manager.allocate(request, 4, num_lookahead_tokens=4)
        assert len(simulation.manager.block_ids(request.request_id)[0]) == 4  # 6 + 4 + 4 tokens
        assert simulation.manager.lookup(simulation.add([*request.token_ids, 1, 2, 3]))[1] == 4
        simulation.manager.cache_blocks(request, 10)
        assert simulation.manager.lookup(simulation.add([*request.token_ids, 1, 2, 3]))[1] == 4

    def test_room_never_goes_beyond_max_model_len(self) -> None:
        simulation = self.make(max_model_len=12)
        request = simulation.add(range(11))
        assert simulation.manager.allocate(request, 11, num_lookahead_tokens=20) is not None
        assert len(simulation.manager.block_ids(request.request_id)[0]) == 3

    def test_delayed_caching_waits_for_cache_blocks(self) -> None:
        simulation = self.make()
        request = simulation.add(range(9))
        appended = simulation.manager.allocate(request, 0, num_external_tokens=8, delay_caching=True)
        assert appended is not None and len(appended[0]) == 2
        assert simulation.manager.lookup(simulation.add(range(9)))[1] == 0
        request.num_computed_tokens = request.num_confirmed_tokens = 8
        simulation.manager.cache_blocks(request, 8)
        assert simulation.manager.lookup(simulation.add(range(9)))[1] == 8

    def test_a_first_block_is_looked_up_alone_where_all_hits_have_one(self) -> None:
        for kinds in LAYER_KINDS:
            simulation = self.make(kinds, num_blocks=60)
            if not simulation.manager.hits_have_first_block:
                continue
            request, hashes = simulation.add(range(13)), list(simulation.requests["r1"].block_hashes)
            del request.block_hashes[1:]
            assert simulation.manager.lookup(request)[1] == 0
            assert simulation.manager.allocate(request, 13, delay_caching=True) is not None
            request.block_hashes[1:] = hashes[1:]
            request.num_computed_tokens = request.num_confirmed_tokens = 13
            simulation.manager.cache_blocks(request, 13)
            assert simulation.manager.lookup(simulation.add(range(13)))[1] == 12
            other = simulation.add(range(13))
            del other.block_hashes[1:]
            assert simulation.manager.lookup(other)[1] > 0

    def test_evicted_blocks_are_not_found_and_stay_held(self) -> None:
        simulation = self.make()
        request = self.compute(simulation, range(13))
        table = simulation.manager.block_ids(request.request_id)[0]
        simulation.manager.evict(table[1:2])
        assert simulation.manager.lookup(simulation.add(range(13)))[1] == 4
        assert simulation.manager.block_ids(request.request_id)[0] == table

    def test_blocks_that_leave_a_window_are_free_at_once(self) -> None:
        simulation = self.make("window", num_blocks=8)
        request = self.compute(simulation, range(8))
        for _ in range(40):  # far more tokens than the pool holds
            row = simulation.allocate(request, 1, 0, 0)
            assert row is not None
            simulation.launch([row], random.Random(0))
            simulation.retire()
            assert sum(map(bool, simulation.manager.block_ids(request.request_id)[0])) <= 3

    def test_the_index_empties_only_while_nothing_is_held(self) -> None:
        simulation = self.make()
        request = self.compute(simulation, range(9))
        assert simulation.manager.reset_prefix_cache() is False
        assert simulation.manager.lookup(simulation.add(range(9)))[1] == 8
        simulation.finish(request)
        assert simulation.manager.reset_prefix_cache() is True
        assert simulation.manager.lookup(simulation.add(range(9)))[1] == 0

    def test_common_prefix_counts_the_leading_blocks_of_all(self) -> None:
        simulation = self.make()
        ids = [self.compute(simulation, [*range(8), n, n, n, n, n]).request_id for n in (50, 51, 52)]
        assert simulation.manager.num_common_prefix_blocks(ids) == [2]
        other = self.compute(simulation, [60] * 5).request_id
        assert simulation.manager.num_common_prefix_blocks([*ids, other]) == [0]

    def test_freeing_an_unknown_request_is_no_error(self) -> None:
        manager = self.make().manager
        manager.free("never seen")
        assert manager.num_free_blocks == manager.num_usable_blocks

    def test_random_runs_never_read_wrong_kv_and_never_leak(self) -> None:
        for kinds in LAYER_KINDS:
            num_hits = 0
            for seed in range(4):
                simulation = self.make(kinds, num_blocks=(14, 30)[seed % 2] * len(LAYER_KINDS[kinds]), max_model_len=40)
                run_randomly(simulation, random.Random(seed), 60, max_open_steps=1 + seed % 3)
                num_hits += simulation.num_hits
            assert num_hits > 0 or not self.finds_prefixes, f"{kinds}: the run found nothing, so it tested no hit"
