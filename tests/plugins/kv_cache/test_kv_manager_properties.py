"""Random operation sequences on the whole manager: a simulated device checks every hit, the pool its own books."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pelton.config.kv_cache import KVCacheConfig
from pelton.testing.kv_cache import KVSimulation, run_randomly
from pelton.testing.kv_specs import LAYER_KINDS, STATE_KINDS, make_plan
from pelton_plugins.kv_cache.manager import PagedKVCacheManager

MAX_MODEL_LEN = 26


class ManagerMachine(RuleBasedStateMachine):
    """Chunks, drafts, open steps, preemptions, aborts, failures and evictions in any order."""

    @initialize(
        kinds=st.sampled_from(sorted(LAYER_KINDS | STATE_KINDS)),
        num_blocks=st.integers(6, 24),
        chunk=st.sampled_from([5, 26]),
    )
    def make(self, kinds, num_blocks, chunk):
        plan = make_plan((LAYER_KINDS | STATE_KINDS)[kinds], num_blocks)
        self.manager = PagedKVCacheManager(
            plan, KVCacheConfig(), max_model_len=MAX_MODEL_LEN, max_num_batched_tokens=chunk
        )
        self.simulation = KVSimulation(self.manager, plan, max_model_len=MAX_MODEL_LEN, max_chunk=chunk)
        self.pending_rows = []

    def requests(self):
        """Those that have no row in the step being made."""
        rows = [row.request for row in self.pending_rows]
        return [request for request in self.simulation.requests.values() if request not in rows]

    @rule(length=st.integers(1, MAX_MODEL_LEN - 1), odd=st.integers(0, 30), salt=st.sampled_from([None, None, "s"]))
    def add(self, length, odd, salt):
        if len(self.simulation.requests) < 5:
            self.simulation.add([int(i == odd) for i in range(length)], salt)

    @precondition(lambda self: any(map(self.simulation.can_schedule, self.requests())))
    @rule(data=st.data(), chunk=st.sampled_from([1, 4, 9, 26]), drafts=st.integers(0, 3), lookahead=st.integers(0, 3))
    def allocate(self, data, chunk, drafts, lookahead):
        request = data.draw(st.sampled_from([r for r in self.requests() if self.simulation.can_schedule(r)]))
        room = MAX_MODEL_LEN - len(request.token_ids) - request.num_pending - 1
        drafts = 0 if self.simulation.has_states else min(drafts, max(room, 0))
        row = self.simulation.allocate(request, chunk, drafts, lookahead)
        if row is not None:
            self.pending_rows.append(row)

    @precondition(lambda self: self.pending_rows and len(self.simulation.open_steps) < 3)
    @rule(seed=st.integers(0, 99))
    def launch(self, seed):
        self.simulation.launch(self.pending_rows, random.Random(seed))
        self.pending_rows = []

    @precondition(lambda self: self.pending_rows and not self.simulation.open_steps)
    @rule()
    def fail(self):
        self.simulation.fail(self.pending_rows)
        self.pending_rows = []

    @precondition(lambda self: len(self.pending_rows) == 1)
    @rule()
    def take_back(self):
        self.simulation.take_back(self.pending_rows.pop())

    @precondition(lambda self: self.simulation.open_steps)
    @rule()
    def retire(self):
        self.simulation.retire()

    @precondition(lambda self: self.requests())
    @rule(data=st.data(), ends=st.booleans())
    def preempt_or_finish(self, data, ends):
        request = data.draw(st.sampled_from(self.requests()))
        if ends:
            self.simulation.finish(request)
        elif request.is_held:
            self.simulation.preempt(request)

    @rule(data=st.data())
    def evict(self, data):
        self.manager.evict(data.draw(st.lists(st.integers(1, self.manager.num_usable_blocks), max_size=3)))

    @rule()
    def reset(self):
        assert self.manager.reset_prefix_cache() == (self.manager.usage == 0.0)

    @invariant()
    def the_interface_adds_up(self):
        if hasattr(self, "simulation"):
            self.simulation.check()

    @invariant()
    def reference_counts_are_the_tables_that_name_a_block(self):
        if not hasattr(self, "simulation"):
            return
        refs = [0] * self.manager.pool.num_blocks
        for request_id in self.simulation.requests:
            for table in self.manager.block_ids(request_id):
                for block_id in table:
                    refs[block_id] += bool(block_id)
        assert [block.ref_cnt for block in self.manager.pool.blocks] == refs
        free = list(self.manager.pool.free_ids())
        assert sorted(free) == [block_id for block_id, count in enumerate(refs) if not count and block_id]
        findable = set()
        for group_id in range(len(self.manager.plan.groups)):
            cached = self.manager.pool.cached_ids(group_id)
            assert not findable & cached
            findable |= cached
        assert findable == {block.block_id for block in self.manager.pool.blocks if block.block_hash is not None}

    def teardown(self):
        if hasattr(self, "simulation"):
            self.simulation.launch(self.pending_rows, random.Random(0))
            self.simulation.finish_all()


TestManager = ManagerMachine.TestCase
TestManager.settings = settings(max_examples=250, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("kinds", sorted(LAYER_KINDS))
def test_a_wrong_hit_would_be_seen(kinds):
    """The oracle itself: KV that is not the token's own is noticed when it is read."""
    plan = make_plan(LAYER_KINDS[kinds], 60)
    manager = PagedKVCacheManager(plan, KVCacheConfig(), max_model_len=MAX_MODEL_LEN)
    simulation = KVSimulation(manager, plan, max_model_len=MAX_MODEL_LEN)
    first = simulation.add([0] * 20)
    simulation.launch([simulation.allocate(first, 20, 0, 0)], random.Random(0))
    second = simulation.add([1] * 20)
    second.block_hashes = list(first.block_hashes)  # as if the hashes collided
    if kinds == "window-of-one":  # reads no KV but its own: no hit can be wrong
        simulation.launch([simulation.allocate(second, 20, 0, 0)], random.Random(0))
        return
    with pytest.raises(AssertionError, match="does not hold its token's KV"):
        simulation.launch([simulation.allocate(second, 20, 0, 0)], random.Random(0))


@pytest.mark.parametrize("kinds", sorted(STATE_KINDS))
def test_random_runs_over_states_find_some(kinds):
    num_hits = 0
    for seed in range(6):
        plan = make_plan(STATE_KINDS[kinds], (10, 30)[seed % 2] * len(STATE_KINDS[kinds]))
        manager = PagedKVCacheManager(plan, KVCacheConfig(), max_model_len=40, max_num_batched_tokens=40)
        simulation = KVSimulation(manager, plan, max_model_len=40)
        run_randomly(simulation, random.Random(seed), 80, max_open_steps=1 + seed % 3)
        num_hits += simulation.num_hits
    assert num_hits > 100, num_hits


@pytest.mark.parametrize("kinds", sorted(STATE_KINDS))
def test_a_wrong_state_would_be_seen(kinds):
    plan = make_plan(STATE_KINDS[kinds], 60)
    simulation = KVSimulation(
        PagedKVCacheManager(plan, KVCacheConfig(), max_model_len=MAX_MODEL_LEN), plan, max_model_len=MAX_MODEL_LEN
    )
    first = simulation.add([0] * 20)
    for _ in range(2):  # to the state that is kept, and behind it
        simulation.launch([simulation.allocate(first, 20, 0, 0)], random.Random(0))
    second = simulation.add([1] * 20)
    second.block_hashes = list(first.block_hashes)  # as if the hashes collided
    with pytest.raises(AssertionError, match="does not hold"):
        simulation.launch([simulation.allocate(second, 20, 0, 0)], random.Random(0))
