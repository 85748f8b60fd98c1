from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pelton.kv_cache.spec import MambaSpec
from pelton.testing.kv_specs import chunked_spec, full_spec, window_spec
from pelton_plugins.kv_cache.block_pool import BlockPool
from pelton_plugins.kv_cache.coordinator import HybridCoordinator, NoPrefixCache, UnitaryCoordinator, make_coordinator
from pelton_plugins.kv_cache.single_type import make_managers


def coordinator_with(specs, cached, hash_block_size=1, enable_prefix_caching=True):
    """cached: findable places per group; block ids of group g start at 100 x g + 1."""
    pool = BlockPool(100 * len(specs) + 1, len(specs))
    managers = make_managers(specs, pool, hash_block_size)
    for group_id, places in enumerate(cached):
        per_block = specs[group_id].block_size // hash_block_size
        for place, block_id in enumerate(pool.allocate(100)):
            if place in places:
                pool.cache_full_blocks(block_id, b"h%d" % ((place + 1) * per_block - 1), group_id)
    return make_coordinator(managers, enable_prefix_caching=enable_prefix_caching)


def hashes(count):
    return [b"h%d" % i for i in range(count)]


@pytest.mark.parametrize(
    "specs, enabled, expected",
    [
        pytest.param([full_spec()], False, NoPrefixCache, id="switched-off"),
        pytest.param([full_spec(), MambaSpec(block_size=4, state_bytes=9)], True, HybridCoordinator, id="states-too"),
        pytest.param([full_spec()], True, UnitaryCoordinator, id="one-group"),
        pytest.param([window_spec(8), window_spec(8)], True, UnitaryCoordinator, id="groups-of-one-spec"),
        pytest.param([full_spec(), window_spec(8)], True, HybridCoordinator, id="two-kinds"),
    ],
)
def test_chooses_by_what_there_is_to_agree_on(specs, enabled, expected):
    coordinator = coordinator_with(specs, [()] * len(specs), 4, enable_prefix_caching=enabled)
    assert type(coordinator) is expected


def test_nothing_is_found_where_prefix_caching_is_off():
    coordinator = coordinator_with([full_spec(1), full_spec(1)], [range(9)] * 2, enable_prefix_caching=False)
    assert coordinator.longest_hit(hashes(15), 14) == (([], []), 0)


def test_full_first_then_the_window_within_it():
    """Worked example 5.6: full 0..12, window cached {2,3,4,5,11,12,13} -> 6."""
    coordinator = coordinator_with([full_spec(1), window_spec(4, 1)], [range(13), {2, 3, 4, 5, 11, 12, 13}])
    tables, num_tokens = coordinator.longest_hit(hashes(15), 14)
    assert num_tokens == 6
    assert tables == ([1, 2, 3, 4, 5, 6], [0, 0, 0, 104, 105, 106])


def test_the_window_alone_would_reach_further():
    coordinator = coordinator_with([full_spec(1), window_spec(4, 1)], [range(14), {2, 3, 4, 5, 11, 12, 13}])
    assert coordinator.longest_hit(hashes(15), 14)[1] == 14


def test_two_windows_answer_until_they_agree():
    # Windows of 3 and 5 need 2 and 4 tokens: the first can end at 12, 9 or 4; the second at 10, 9, 8 or 4.
    small, large = {2, 3, 7, 8, 10, 11}, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9}
    coordinator = coordinator_with([full_spec(1), window_spec(3, 1), window_spec(5, 1)], [range(14), small, large])
    assert coordinator.longest_hit(hashes(15), 14)[1] == 9
    coordinator = coordinator_with([full_spec(1), window_spec(3, 1), window_spec(5, 1)], [range(14), small, range(7)])
    tables, num_tokens = coordinator.longest_hit(hashes(15), 14)
    assert num_tokens == 4
    assert tables == ([1, 2, 3, 4], [0, 0, 103, 104], [201, 202, 203, 204])


def test_block_sizes_that_differ_meet_at_common_multiples():
    coordinator = coordinator_with([full_spec(4), window_spec(7, 6)], [range(5), range(5)], 2)
    tables, num_tokens = coordinator.longest_hit(hashes(15), 30)
    assert num_tokens == 12  # full reaches 20, the window 30; 12 and 24 are multiples of both
    assert [len(table) for table in tables] == [3, 2]


SPANS = st.integers(1, 9)


@settings(max_examples=300, deadline=None)
@given(
    cached=st.lists(st.sets(st.integers(0, 11)), min_size=3, max_size=3),
    spans=st.tuples(SPANS, SPANS),
    sizes=st.tuples(*[st.sampled_from([1, 2, 3])] * 3),
    has_full=st.booleans(),
    has_chunks=st.booleans(),
    max_tokens=st.integers(0, 23),
)
def test_the_answer_is_the_longest_length_that_is_a_hit_for_all(cached, spans, sizes, has_full, has_chunks, max_tokens):
    first = full_spec(sizes[0]) if has_full else window_spec(2, sizes[0])
    last = chunked_spec(spans[1], sizes[2]) if has_chunks else window_spec(spans[1], sizes[2])
    coordinator = coordinator_with([first, window_spec(spans[0], sizes[1]), last], cached)
    max_tokens = min(max_tokens, 12 * min(sizes))

    def is_hit(num_tokens):
        return all(
            place in cached[group_id]
            for manager in coordinator.managers
            for group_id in manager.group_ids
            for place in range(manager.first_needed_place(num_tokens), num_tokens // manager.block_size)
        )

    lengths = range(0, max_tokens + 1, math.lcm(*sizes))
    tables, num_tokens = coordinator.longest_hit(hashes(36), max_tokens)
    assert num_tokens == max(length for length in lengths if is_hit(length))
    for manager in coordinator.managers:
        first_needed = manager.first_needed_place(num_tokens)
        for group_id in manager.group_ids:
            expected = [100 * group_id + 1 + place for place in range(first_needed, num_tokens // manager.block_size)]
            assert tables[group_id] == [0] * first_needed + expected
