from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pelton.errors import ConfigError
from pelton.kv_cache.spec import FullAttentionSpec, MambaSpec, MLASpec
from pelton.testing.kv_specs import chunked_spec, full_spec, window_spec
from pelton_plugins.kv_cache.block_pool import BlockPool
from pelton_plugins.kv_cache.single_type import (
    NEVER,
    ChunkedLocalManager,
    FullAttentionManager,
    MambaManager,
    SlidingWindowManager,
    TypeBlocks,
    make_managers,
)


def hashes(count):
    return [b"h%d" % i for i in range(count)]


def manager_with(cls, spec, cached, num_groups=1):
    """A manager whose places `cached` are findable; block ids are place + 1 in group 0."""
    pool = BlockPool(200, num_groups)
    for group_id in range(num_groups):
        for place, block_id in enumerate(pool.allocate(20)):
            if place in cached:
                pool.cache_full_blocks(block_id, b"h%d" % place, group_id)
    return cls(spec, range(num_groups), pool, spec.block_size)


def hit(manager, num_hashes, max_tokens, alignment=1):
    tables, num_tokens = manager.longest_hit(hashes(num_hashes), max_tokens, alignment)
    assert all(len(table) * manager.block_size == num_tokens for table in tables)
    return tables[0], num_tokens


def test_full_attention_is_found_left_to_right():
    manager = manager_with(FullAttentionManager, full_spec(1), range(7))
    assert hit(manager, 15, 14) == ([1, 2, 3, 4, 5, 6, 7], 7)
    manager = manager_with(FullAttentionManager, full_spec(1), {0, 1, 3, 4})
    assert hit(manager, 15, 14) == ([1, 2], 2)


def test_a_window_is_found_right_to_left():
    """Worked example 5.6: window 4, 15 tokens, cached {2,3,4,5,11,12,13}: possible hits 5, 6 and 14."""
    manager = manager_with(SlidingWindowManager, window_spec(4, 1), {2, 3, 4, 5, 11, 12, 13})
    assert hit(manager, 15, 14) == ([0] * 11 + [12, 13, 14], 14)
    assert hit(manager, 15, 13)[1] == 6
    assert hit(manager, 15, 6) == ([0, 0, 0, 4, 5, 6], 6)
    assert hit(manager, 15, 5)[1] == 5
    assert hit(manager, 15, 4) == ([], 0)


def test_a_short_prefix_is_a_window_hit_only_from_its_start():
    manager = manager_with(SlidingWindowManager, window_spec(4, 1), {0, 1})
    assert hit(manager, 15, 14) == ([1, 2], 2)


def test_a_window_of_one_token_needs_nothing():
    manager = manager_with(SlidingWindowManager, window_spec(1, 1), set())
    assert hit(manager, 15, 14) == ([0] * 14, 14)


def test_a_window_hit_over_blocks_holds_the_window_and_no_more():
    # 16 tokens a block, window 32: before token 80 it reads 49 .. 79, in blocks 3 and 4.
    manager = manager_with(SlidingWindowManager, window_spec(32, 16), {3, 4})
    assert hit(manager, 6, 95, 16) == ([0, 0, 0, 4, 5], 80)


def test_a_hit_needs_the_block_in_every_group():
    manager = manager_with(FullAttentionManager, full_spec(1), range(6), num_groups=2)
    manager.pool.evict([20 + 4])  # place 3 of group 1
    tables, num_tokens = manager.longest_hit(hashes(10), 9, 1)
    assert (tables, num_tokens) == ([[1, 2, 3], [21, 22, 23]], 3)


def test_a_chunk_is_found_whole_and_a_chunk_border_needs_nothing():
    manager = manager_with(ChunkedLocalManager, chunked_spec(4, 1), {4, 5, 8})
    assert hit(manager, 20, 11) == ([0] * 8 + [9], 9)
    assert hit(manager, 20, 7) == ([0] * 4 + [5, 6], 6)
    assert hit(manager, 20, 12) == ([0] * 12, 12)


def test_hits_are_aligned():
    full = manager_with(FullAttentionManager, full_spec(2), range(7))
    assert hit(full, 15, 28, 8) == ([1, 2, 3, 4], 8)
    window = manager_with(SlidingWindowManager, window_spec(4, 2), {1, 2, 3, 4, 5, 8, 9})
    assert hit(window, 15, 20, 2)[1] == 20
    assert hit(window, 15, 20, 8)[1] == 8


def test_a_block_of_several_hashes_is_known_by_the_last():
    pool = BlockPool(10)
    manager = FullAttentionManager(full_spec(8), [0], pool, 4)
    blocks = TypeBlocks([[]])
    manager.grow(blocks, 2)
    manager.cache_full_blocks(blocks, hashes(4), 16)
    assert pool.find(b"h1", 0) == 1 and pool.find(b"h3", 0) == 2
    assert pool.find(b"h0", 0) is None
    assert manager.longest_hit(hashes(3), 12, 8) == ([[1]], 8)


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize(
    "make", [lambda size: SlidingWindowManager(window_spec(7, size), [0], BlockPool(2), size),
             lambda size: ChunkedLocalManager(chunked_spec(6, size), [0], BlockPool(2), size)]
)  # fmt: skip
def test_a_place_is_passed_exactly_when_no_later_token_reads_it(make, size):
    manager = make(size)
    for place in range(6):
        threshold = manager.tokens_until_passed(place)
        assert manager.first_needed_place(threshold - 1) <= place < manager.first_needed_place(threshold)


def test_full_attention_never_lets_a_block_go():
    manager = FullAttentionManager(full_spec(4), [0], BlockPool(2), 4)
    assert manager.first_needed_place(10**6) == 0
    assert manager.tokens_until_passed(0) == NEVER


def test_a_state_takes_one_block_and_is_found_where_every_group_keeps_one():
    pool = BlockPool(10, 2)
    manager = MambaManager(MambaSpec(block_size=16, state_bytes=64), [0, 1], pool, 16)
    assert [manager.num_places(n) for n in (0, 1, 10**6)] == [0, 1, 1]
    assert manager.room(1) == NEVER
    assert manager.longest_hit(hashes(3), 48, 16) == ([[], []], 0)
    for block_hash, group_id in ((b"h0", 0), (b"h0", 1), (b"h1", 0), (b"h1", 1), (b"h2", 1)):
        pool.cache_full_blocks(*pool.allocate(1), block_hash, group_id)
    assert manager.longest_hit(hashes(3), 48, 16) == ([[3], [4]], 32)
    assert manager.longest_hit(hashes(3), 31, 16) == ([[1], [2]], 16)
    assert manager.longest_hit(hashes(3), 48, 48) == ([[], []], 0)


def test_groups_of_equal_spec_share_a_manager():
    specs = [full_spec(), window_spec(8), window_spec(8), window_spec(9)]
    managers = make_managers(specs, BlockPool(10, 4), 4)
    assert [(type(m).__name__, m.group_ids) for m in managers] == [
        ("FullAttentionManager", (0,)), ("SlidingWindowManager", (1, 2)), ("SlidingWindowManager", (3,)),
    ]  # fmt: skip
    mla = MLASpec(block_size=4, latent_dim=8, dtype="float16")
    assert type(make_managers([mla], BlockPool(10), 4)[0]) is FullAttentionManager


class SinkSpec(FullAttentionSpec):
    """A plugin's spec."""


class SinkManager(FullAttentionManager):
    """A plugin's manager."""


def test_a_plugin_adds_a_manager_and_may_replace_one():
    spec = SinkSpec(block_size=4, num_kv_heads=1, head_dim=8, dtype="float16")
    extra = [(SinkSpec, SinkManager), (FullAttentionSpec, SinkManager)]
    managers = make_managers([spec, full_spec()], BlockPool(10, 2), 4, extra)
    assert [type(m) for m in managers] == [SinkManager, SinkManager]


def test_a_spec_without_a_manager_is_refused_even_where_its_parent_has_one():
    class OddSpec(FullAttentionSpec):
        """A plugin's, which forgot its manager."""

    odd = OddSpec(block_size=4, num_kv_heads=1, head_dim=8, dtype="float16")
    with pytest.raises(ConfigError, match=r"OddSpec, which no KV-cache manager handles.*pelton_kv_cache_specs"):
        make_managers([odd], BlockPool(10), 4)


def longest_by_trial(manager, cached, max_tokens, alignment):
    for end in range(max_tokens // alignment * alignment, 0, -alignment):
        first = manager.first_needed_place(end)
        if all(place in cached for place in range(first, end // manager.block_size)):
            return end
    return 0


@settings(max_examples=300, deadline=None)
@given(
    cached=st.sets(st.integers(0, 19)),
    size=st.integers(1, 3),
    span=st.integers(1, 12),
    max_tokens=st.integers(0, 59),
    multiple=st.integers(1, 3),
    kind=st.sampled_from(["full", "window", "chunked"]),
)
def test_the_longest_hit_is_what_trying_every_length_finds(cached, size, span, max_tokens, multiple, kind):
    cls, spec = {
        "full": (FullAttentionManager, full_spec(size)),
        "window": (SlidingWindowManager, window_spec(span, size)),
        "chunked": (ChunkedLocalManager, chunked_spec(span, size)),
    }[kind]
    manager = manager_with(cls, spec, cached)
    table, num_tokens = hit(manager, 20, min(max_tokens, 20 * size), multiple * size)
    assert num_tokens == longest_by_trial(manager, cached, min(max_tokens, 20 * size), multiple * size)
    first = manager.first_needed_place(num_tokens)
    assert table == [0] * first + [place + 1 for place in range(first, num_tokens // size)]
