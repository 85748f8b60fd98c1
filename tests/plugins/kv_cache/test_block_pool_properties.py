"""Random operation sequences on the block pool against a plain model of it."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pelton_plugins.kv_cache.block_pool import BlockPool

NUM_BLOCKS = 9


class PoolMachine(RuleBasedStateMachine):
    """The model: reference counts, and the key of each findable block."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, num_groups=2)
        self.refs = dict.fromkeys(range(1, NUM_BLOCKS), 0)
        self.keys = {}

    def held(self):
        return sorted(block_id for block_id, count in self.refs.items() if count)

    @precondition(lambda self: self.pool.num_free)
    @rule(data=st.data())
    def allocate(self, data):
        count = data.draw(st.integers(1, self.pool.num_free))
        expected = list(self.pool.free_ids())[:count]
        assert self.pool.allocate(count) == expected
        for block_id in expected:
            self.refs[block_id] = 1
            self.keys.pop(block_id, None)

    @precondition(lambda self: self.held())
    @rule(data=st.data())
    def free(self, data):
        block_ids = data.draw(st.lists(st.sampled_from(self.held()), unique=True))
        self.pool.free(block_ids)
        for block_id in block_ids:
            self.refs[block_id] -= 1
            key = self.keys.get(block_id)
            if not self.refs[block_id] and list(self.keys.values()).count(key) > 1 and key is not None:
                del self.keys[block_id]  # a duplicate goes when it is freed

    @precondition(lambda self: self.held())
    @rule(data=st.data(), block_hash=st.sampled_from([b"a", b"b", b"c"]), group_id=st.integers(0, 1))
    def cache_full_blocks(self, data, block_hash, group_id):
        block_id = data.draw(st.sampled_from(self.held()))
        if block_id not in self.keys:
            self.pool.cache_full_blocks(block_id, block_hash, group_id)
            self.keys[block_id] = (block_hash, group_id)

    @rule(block_hash=st.sampled_from([b"a", b"b", b"c"]), group_id=st.integers(0, 1))
    def hit(self, block_hash, group_id):
        found = self.pool.find(block_hash, group_id)
        candidates = [block_id for block_id, key in self.keys.items() if key == (block_hash, group_id)]
        assert (found is None) == (not candidates)
        if found is not None:
            assert found in candidates
            self.pool.touch([found])
            self.refs[found] += 1

    @rule(block_ids=st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True))
    def touch(self, block_ids):
        self.pool.touch(block_ids)
        for block_id in block_ids:
            if block_id:
                self.refs[block_id] += 1

    @precondition(lambda self: self.pool.num_free > 1)
    @rule(data=st.data())
    def touch_a_run_of_the_free_list(self, data):
        free = list(self.pool.free_ids())
        first = data.draw(st.integers(0, len(free) - 2))
        run = free[first : data.draw(st.integers(first + 2, len(free)))]
        if data.draw(st.booleans()):
            run = run[::-1]  # as a request finds again what it gave back
        self.touch(run)

    @rule(block_ids=st.lists(st.integers(0, NUM_BLOCKS - 1), max_size=3))
    def evict(self, block_ids):
        self.pool.evict(block_ids)
        for block_id in block_ids:
            self.keys.pop(block_id, None)

    @rule()
    def reset(self):
        assert self.pool.reset() == (not self.held())
        if not self.held():
            self.keys.clear()

    @invariant()
    def the_free_list_is_the_complement_of_what_is_held(self):
        free = list(self.pool.free_ids())
        assert len(set(free)) == len(free) == self.pool.num_free
        assert sorted([*free, *self.held()]) == list(range(1, NUM_BLOCKS))
        assert {block.block_id: block.ref_cnt for block in self.pool.blocks[1:]} == self.refs
        backwards, block = [], self.pool._ends.prev
        while block is not self.pool._ends:
            backwards.append(block.block_id)
            block = block.prev
        assert backwards == free[::-1]

    @invariant()
    def the_index_holds_exactly_the_findable_blocks(self):
        for group_id in (0, 1):
            expected = {block_id for block_id, key in self.keys.items() if key[1] == group_id}
            assert self.pool.cached_ids(group_id) == expected
        for block in self.pool.blocks:
            key = self.keys.get(block.block_id)
            assert block.block_hash == (key[0] if key else None)
            assert block.is_duplicate == (list(self.keys.values()).count(key) > 1 and key is not None)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
