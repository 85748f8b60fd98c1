from __future__ import annotations

import random

import pytest

from pelton_plugins.kv_cache.block_pool import BlockPool, OutOfBlocksError, ResidencySampler


def cached(pool, count, group_id=0, prefix="h"):
    """`count` new blocks that are full, findable as h0, h1, ..."""
    block_ids = pool.allocate(count)
    for i, block_id in enumerate(block_ids):
        pool.cache_full_blocks(block_id, f"{prefix}{i}".encode(), group_id)
    return block_ids


def test_hands_out_every_block_but_the_null_block():
    pool = BlockPool(5)
    assert pool.num_usable == pool.num_free == 4
    assert pool.allocate(4) == [1, 2, 3, 4]
    assert list(pool.free_ids()) == []


def test_takes_nothing_when_too_few_are_free():
    pool = BlockPool(5)
    pool.allocate(2)
    with pytest.raises(OutOfBlocksError, match="3 blocks requested, 2 of 4 free"):
        pool.allocate(3)
    assert list(pool.free_ids()) == [3, 4]


def test_reuses_in_the_order_of_freeing():
    pool = BlockPool(6)
    table = pool.allocate(3)
    pool.free(reversed(table))
    assert list(pool.free_ids()) == [4, 5, 3, 2, 1]


def test_null_blocks_are_neither_freed_nor_touched():
    pool = BlockPool(4)
    table = pool.allocate(1)
    pool.touch([0, *table])
    pool.free([0, *table, 0])
    assert pool.num_free == 2
    assert pool.blocks[0].ref_cnt == 0


def test_a_second_free_is_a_bug_that_shows():
    pool = BlockPool(4)
    (block_id,) = pool.allocate(1)
    pool.free([block_id])
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free([block_id])


def test_touch_takes_a_block_out_of_the_middle_of_the_free_list():
    pool = BlockPool(6)
    cached(pool, 5)
    pool.free([1, 2, 3, 4, 5])
    pool.touch([3])
    assert list(pool.free_ids()) == [1, 2, 4, 5]
    pool.touch([1, 5])  # both ends
    assert list(pool.free_ids()) == [2, 4]
    pool.touch([3])  # held already: a second holder
    pool.free([3])
    assert list(pool.free_ids()) == [2, 4]
    pool.free([3])
    assert list(pool.free_ids()) == [2, 4, 3]


def test_counts_what_touching_takes_and_what_freeing_gives():
    pool = BlockPool(6)
    cached(pool, 4)
    pool.free([1, 2])
    pool.touch([3])
    assert pool.num_free_among([0, 1, 2, 3, 4]) == 2
    assert pool.num_held_once([0, 3, 4]) == 1


def test_free_blocks_are_found_until_they_are_handed_out():
    pool = BlockPool(4)
    cached(pool, 3)
    pool.free([3, 2, 1])
    assert pool.find(b"h2", 0) == 3
    assert pool.allocate(1) == [3]  # the least recently used
    assert pool.find(b"h2", 0) is None
    assert pool.find(b"h0", 0) == 1


def test_groups_are_found_and_evicted_apart():
    pool = BlockPool(6, num_groups=2)
    cached(pool, 2, group_id=0)
    cached(pool, 2, group_id=1)
    assert (pool.find(b"h0", 0), pool.find(b"h0", 1)) == (1, 3)
    pool.evict([1])
    assert (pool.find(b"h0", 0), pool.find(b"h0", 1)) == (None, 3)


def test_duplicates_are_kept_while_held_and_go_first_when_freed():
    pool = BlockPool(8)
    first, second = pool.allocate(2), pool.allocate(2)
    for block_id in (first[0], second[0]):
        pool.cache_full_blocks(block_id, b"same", 0)
    assert pool.find(b"same", 0) == first[0]
    assert pool.cached_ids() == {first[0], second[0]}
    pool.free(reversed(second))
    assert pool.cached_ids() == {first[0]}
    assert list(pool.free_ids()) == [3, 5, 6, 7, 4]  # 3 held a copy: nothing is lost by reusing it
    pool.free(reversed(first))
    assert pool.find(b"same", 0) == first[0]


def test_a_run_of_blocks_is_cached_as_each_of_them_is():
    one, other = BlockPool(12), BlockPool(12)
    for pool in (one, other):
        cached(pool, 2)  # blocks 1 and 2 are h0 and h1
        pool.allocate(4)
        pool.free([2])
    block_ids = [0, 2, 3, 4, 5, 6]  # null, one that is there already, a copy, a new one, a copy, a new one
    hashes = [b"h9", b"h1", b"h0", b"h5", b"h0", b"h6"]
    for block_id, block_hash in zip(block_ids, hashes, strict=True):
        one.cache_full_blocks(block_id, block_hash, 0)
    other.cache_run(block_ids, hashes, 0)
    assert one._index == other._index == [{b"h0": {1: None, 3: None, 5: None}, b"h1": 2, b"h5": 4, b"h6": 6}]
    for pool in (one, other):
        pool.free([5, 3, 4])
        assert pool.allocate(8) == [3, 5, 7, 8, 9, 10, 11, 2], "copies first"
        assert pool.allocate(1) == [4]
        assert (pool.find(b"h0", 0), pool.find(b"h1", 0), pool.find(b"h5", 0)) == (1, None, None)


def test_the_last_of_several_duplicates_stays_findable():
    pool = BlockPool(8)
    blocks = pool.allocate(3)
    for block_id in blocks:
        pool.cache_full_blocks(block_id, b"same", 0)
    pool.free([blocks[0]])
    assert pool.find(b"same", 0) == blocks[1]
    pool.evict([blocks[1]])
    assert pool.find(b"same", 0) == blocks[2]
    pool.free([blocks[2]])
    assert pool.find(b"same", 0) == blocks[2]


def test_making_findable_twice_changes_nothing():
    pool = BlockPool(4)
    (block_id,) = pool.allocate(1)
    pool.cache_full_blocks(block_id, b"h", 0)
    pool.cache_full_blocks(block_id, b"h", 0)
    pool.cache_full_blocks(0, b"null", 0)
    assert pool.cached_ids() == {block_id}
    pool.evict([block_id])
    assert pool.cached_ids() == set()


def test_eviction_leaves_holders_and_the_free_list_alone():
    pool = BlockPool(5)
    cached(pool, 3)
    pool.free([3])
    pool.evict([0, 1, 3, 4])
    assert pool.cached_ids() == {2}
    assert list(pool.free_ids()) == [4, 3]
    assert pool.blocks[1].ref_cnt == 1


def test_reset_waits_until_nothing_is_held():
    pool = BlockPool(4)
    cached(pool, 2)
    assert pool.reset() is False
    assert pool.cached_ids() == {1, 2}
    pool.free([1, 2])
    assert pool.reset() is True
    assert pool.cached_ids() == set()
    assert pool.allocate(3) == [3, 1, 2]


def test_common_prefix_stops_at_the_first_difference_and_at_null():
    pool = BlockPool(8)
    pool.allocate(6)
    pool.touch([1, 2, 3])
    assert pool.common_prefix([[1, 2, 4], [1, 2, 5]]) == 2
    assert pool.common_prefix([[1, 4], [1, 5]]) == 1
    assert pool.common_prefix([[1, 2, 3], [1, 2, 4]]) == 2
    assert pool.common_prefix([[0, 1], [0, 1]]) == 0
    assert pool.common_prefix([[4, 1], [5, 1]]) == 0
    assert pool.common_prefix([[1, 2], [1, 2, 3]]) == 2


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_residency_is_measured_from_allocation_touch_to_touch_and_to_eviction():
    clock = Clock()
    sampler = ResidencySampler(1.0, clock)
    pool = BlockPool(2, sampler=sampler)
    cached(pool, 1)
    for clock.now in (3.0, 4.0, 6.5):
        pool.touch([1])
    pool.free([1] * 4)
    clock.now = 10.0
    pool.allocate(1)
    assert sampler.take() == ([10.0], [3.5], [1.0, 2.5])
    assert sampler.take() == ([], [], [])


def test_a_block_that_was_never_touched_idles_since_its_allocation():
    clock = Clock()
    sampler = ResidencySampler(1.0, clock)
    pool = BlockPool(2, sampler=sampler)
    clock.now = 1.0
    cached(pool, 1)
    clock.now = 5.0
    pool.evict([1])
    assert sampler.take() == ([4.0], [4.0], [])


def test_a_block_that_held_nothing_is_not_evicted():
    sampler = ResidencySampler(1.0, Clock())
    pool = BlockPool(2, sampler=sampler)
    pool.free(pool.allocate(1))
    pool.allocate(1)
    assert sampler.take() == ([], [], [])


def test_residency_samples_the_given_share():
    sampler = ResidencySampler(0.1, Clock(), random.Random(0))
    pool = BlockPool(2001, sampler=sampler)
    cached(pool, 2000)
    pool.evict(range(1, 2001))
    lifetimes, idle, _ = sampler.take()
    assert len(lifetimes) == len(idle)
    assert 150 < len(lifetimes) < 250
