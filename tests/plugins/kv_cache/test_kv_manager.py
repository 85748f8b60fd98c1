from __future__ import annotations

import time
from dataclasses import dataclass

import pytest
from pelton_pace import store_s

from pelton.config.kv_cache import KVCacheConfig
from pelton.kv_cache.hashing import BlockHasher
from pelton.kv_cache.planner import plan_kv_cache
from pelton.kv_cache.spec import FullAttentionSpec, MambaSpec
from pelton.testing.kv_specs import full_spec, make_plan, window_spec
from pelton_plugins.kv_cache.manager import PagedKVCacheManager
from pelton_plugins.kv_cache.single_type import FullAttentionManager


class Request:
    """A request that takes its steps one by one: `run` allocates and computes."""

    skip_prefix_lookup = False

    def __init__(self, manager, request_id, token_ids, **extras):
        self.manager = manager
        self.request_id = request_id
        self.token_ids = list(token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed_tokens = self.num_confirmed_tokens = 0
        self.block_hashes = []
        self.extras = extras
        self.hasher = BlockHasher("sha256", manager.plan.hash_block_size)
        self.append([])

    @property
    def num_tokens(self):
        return len(self.token_ids)

    @property
    def tables(self):
        return self.manager.block_ids(self.request_id)

    def append(self, token_ids):
        self.token_ids += token_ids
        self.hasher.extend(self.block_hashes, self.token_ids, **self.extras)

    def start(self, num_tokens=None, **kwargs):
        cached, num_cached = self.manager.lookup(self)
        num_new = num_tokens or self.num_tokens - num_cached
        appended = self.manager.allocate(self, num_new, cached_blocks=cached, num_cached_tokens=num_cached, **kwargs)
        if appended is not None:
            self.num_computed_tokens = self.num_confirmed_tokens = num_cached + num_new
        return appended

    def go_on(self, num_tokens=1):
        appended = self.manager.allocate(self, num_tokens)
        if appended is not None:
            self.num_computed_tokens += num_tokens
            self.num_confirmed_tokens += num_tokens
        return appended


def make_manager(
    *specs, num_blocks, max_model_len=4096, clock=time.monotonic, extra_managers=(), chunk=None, **settings
):
    return PagedKVCacheManager(
        make_plan(specs, num_blocks), KVCacheConfig(**settings), max_model_len=max_model_len, clock=clock,
        extra_managers=extra_managers, max_num_batched_tokens=chunk,
    )  # fmt: skip


def without_null(ids):
    """The documents count from 0; block 0 is the null block here."""
    return [block_id - 1 for block_id in ids]


def test_block_arithmetic_of_a_batch():
    """Worked example 5.1: block size 4, prompts of 5, 7 and 3 tokens."""
    manager = make_manager(full_spec(4), num_blocks=6)
    requests = [
        Request(manager, "a", [1, 2, 3, 4, 5]),
        Request(manager, "b", [1, 6, 5, 7, 8, 9, 10]),
        Request(manager, "c", [1, 12, 13]),
    ]
    assert [request.start() for request in requests] == [([1, 2],), ([3, 4],), ([5],)]
    slots = [
        request.tables[0][position // 4] * 4 + position % 4
        for request in requests
        for position in range(request.num_tokens)
    ]
    assert slots == [4, 5, 6, 7, 8, *range(12, 19), 20, 21, 22]
    for request, token_id in zip(requests, [14, 15, 16], strict=True):
        request.append([token_id])
        assert request.go_on() == ([],)  # no new block
    assert [request.tables[0][p // 4] * 4 + p % 4 for request, p in zip(requests, [5, 7, 3], strict=True)] == [
        9,
        19,
        23,
    ]


def test_17_tokens_take_2_blocks_of_16():
    manager = make_manager(full_spec(16), num_blocks=10)
    assert manager.max_blocks_needed(17) == 2
    request = Request(manager, "a", range(17))
    assert len(request.start()[0]) == 2


def test_48_tokens_of_a_shared_prefix_are_hit_and_16_computed():
    manager = make_manager(full_spec(16), num_blocks=20)
    Request(manager, "a", range(64)).start()
    request = Request(manager, "b", [*range(48), *range(100, 116)])
    assert manager.lookup(request)[1] == 48
    assert len(request.start()[0]) == 1
    assert request.tables[0][:3] == manager.block_ids("a")[0][:3]


def test_prefix_cache_trace():
    """Worked example 5.2: 10 usable blocks of 4 tokens."""
    manager = make_manager(full_spec(4), num_blocks=11)
    pool = manager.pool

    def queue():
        return without_null(pool.free_ids())

    def cached():
        return set(without_null(pool.cached_ids()))

    zero = Request(manager, "0", range(15))
    zero.start()  # t1
    assert without_null(zero.tables[0]) == [0, 1, 2, 3]
    assert cached() == {0, 1, 2}
    zero.append([15, 16])
    zero.go_on(2)  # t2
    assert cached() == {0, 1, 2, 3}
    assert without_null(zero.tables[0]) == [0, 1, 2, 3, 4]
    one = Request(manager, "1", [*range(10), 90, 91, 92, 93])
    assert manager.lookup(one)[1] == 8
    one.start()  # t3
    assert without_null(one.tables[0]) == [0, 1, 5, 6]
    manager.free("0")  # t4
    assert queue() == [7, 8, 9, 4, 3, 2]
    manager.free("1")  # t5
    assert queue() == [7, 8, 9, 4, 3, 2, 6, 5, 1, 0]
    two = Request(manager, "2", [*range(12), *range(200, 217)])
    assert two.num_tokens == 29
    found, num_tokens = manager.lookup(two)
    assert (without_null(found[0]), num_tokens) == ([0, 1, 2], 12)
    pool.touch(found[0])
    assert queue() == [7, 8, 9, 4, 3, 6, 5]
    pool.free(reversed(found[0]))
    assert pool.find(zero.block_hashes[3], 0) == 4  # block 3 is cached
    two.start()  # t6
    assert without_null(two.tables[0]) == [0, 1, 2, 7, 8, 9, 4, 3]
    assert queue() == [6, 5]
    assert pool.find(zero.block_hashes[3], 0) is None  # and evicted


def test_duplicate_blocks():
    """Worked example 5.3: ABCDEF then GHI, twice, while the first request still holds its blocks."""
    manager = make_manager(full_spec(4), num_blocks=10)

    def cached():
        return set(without_null(manager.pool.cached_ids()))

    def decode(request):
        states = []
        for token in "GHI":
            request.append([ord(token)])
            request.go_on()
            manager.cache_blocks(request, request.num_computed_tokens)
            states.append(cached())
        return states

    first = Request(manager, "1", map(ord, "ABCDEF"))
    first.start()
    assert decode(first) == [{0}, {0, 1}, {0, 1}]
    assert without_null(first.tables[0]) == [0, 1, 2]
    second = Request(manager, "2", map(ord, "ABCDEF"))
    second.start()
    assert decode(second) == [{0, 1}, {0, 1, 3}, {0, 1, 3}]
    assert without_null(second.tables[0])[:2] == [0, 3]
    assert without_null(first.tables[0]) == [0, 1, 2]  # tables are never rewritten
    manager.free("2")
    assert cached() == {0, 1}  # the duplicate goes when it is freed


def test_the_last_block_of_a_repeated_prompt_is_computed_again():
    manager = make_manager(full_spec(4), num_blocks=10)
    Request(manager, "1", range(8)).start()
    second = Request(manager, "2", range(8))
    assert manager.lookup(second)[1] == 4
    second.start()
    assert second.tables[0] == [1, 3]


def hybrid_manager(num_blocks=100):
    """10 full and 20 window layers, block size 16, window 32: worked example 5.5."""
    layers = {f"full.{i}": full_spec(16) for i in range(10)} | {f"sw.{i}": window_spec(32, 16) for i in range(20)}
    plan = plan_kv_cache(layers, 0, num_blocks_override=num_blocks, max_model_len=16)
    return PagedKVCacheManager(plan, KVCacheConfig(), max_model_len=4096, max_num_batched_tokens=16)


def test_112_tokens_of_a_hybrid_model_take_11_blocks():
    manager = hybrid_manager()
    request = Request(manager, "a", range(112))
    # All but the last token come from elsewhere: windows get blocks only for what is still read.
    request.start(1, num_external_tokens=111)
    full, first, second = request.tables
    assert without_null(full) == [0, 1, 2, 3, 4, 5, 6]
    assert (first[:5], without_null(first[5:])) == ([0] * 5, [7, 8])
    assert (second[:5], without_null(second[5:])) == ([0] * 5, [9, 10])
    assert manager.num_usable_blocks - manager.num_free_blocks == 11


def test_112_tokens_computed_in_chunks_end_with_the_same_11_blocks():
    manager = hybrid_manager()
    request = Request(manager, "a", range(112))
    request.start(16)
    while request.num_computed_tokens < 112:
        request.go_on(16)
        assert manager.num_usable_blocks - manager.num_free_blocks <= manager.max_blocks_needed(112)
    request.append([1])
    request.go_on()
    held = [[place for place, block_id in enumerate(table) if block_id] for table in request.tables]
    assert held == [list(range(8)), [5, 6, 7], [5, 6, 7]]  # logical blocks 5 and 6, and one for the new token


def test_blocks_of_all_groups_go_back_tail_first():
    manager = make_manager(full_spec(4), window_spec(100, 4), num_blocks=9)
    Request(manager, "a", range(12)).start()
    assert manager.block_ids("a") == ([1, 2, 3], [4, 5, 6])
    manager.free("a")
    assert list(manager.pool.free_ids()) == [7, 8, 3, 6, 2, 5, 1, 4]


def test_a_hybrid_hit_takes_only_the_window_it_needs():
    manager = make_manager(full_spec(4), window_spec(6, 4), num_blocks=40)
    Request(manager, "a", range(32)).start()
    request = Request(manager, "b", [*range(32), 99])
    found, num_tokens = manager.lookup(request)
    assert num_tokens == 32
    assert [bool(block_id) for block_id in found[1]] == [False] * 6 + [True] * 2
    assert request.start() is not None
    assert request.tables[0][:8] == manager.block_ids("a")[0]
    assert request.tables[1][:6] == [0] * 6


def test_a_window_moves_by_what_is_certain_not_by_what_open_drafts_may_bring():
    manager = make_manager(window_spec(4, 4), num_blocks=20)
    request = Request(manager, "a", range(8))
    request.start()
    request.num_computed_tokens = 16  # eight drafts are open and may all be rejected
    manager.allocate(request, 4)
    assert request.tables[0][:2] == [0, 2]  # token 8 still reads 5 .. 7
    request.num_confirmed_tokens = 16
    manager.allocate(request, 8)
    assert request.tables[0][:4] == [0, 0, 0, 4]


def test_blocks_leaving_a_window_count_as_free_for_the_same_allocation():
    manager = make_manager(window_spec(4, 4), num_blocks=4)
    request = Request(manager, "a", range(40))
    request.start(12)
    assert manager.num_free_blocks == 0
    assert request.go_on(12) is None  # two blocks leave, three are needed
    assert request.tables[0] == [1, 2, 3]
    assert request.go_on(8) == ([2, 1],)
    assert request.tables[0] == [0, 0, 3, 2, 1]


def test_a_shared_block_that_leaves_a_window_does_not_count_as_free():
    manager = make_manager(window_spec(4, 4), num_blocks=4)
    request = Request(manager, "a", range(40))
    request.start(12)
    manager.pool.touch([1, 2])  # someone else holds them as well
    assert request.go_on(4) is None
    assert request.tables[0] == [1, 2, 3]
    manager.pool.free([1, 2])
    assert request.go_on(4) == ([2],)


def test_external_tokens_get_blocks_and_are_found_by_their_arrival():
    manager = make_manager(full_spec(4), num_blocks=20)
    Request(manager, "a", range(9)).start()
    request = Request(manager, "b", range(30))
    found, num_cached = manager.lookup(request)
    appended = manager.allocate(
        request, 0, cached_blocks=found, num_cached_tokens=num_cached, num_external_tokens=12, delay_caching=True
    )
    assert (num_cached, len(appended[0])) == (8, 3)
    assert manager.lookup(Request(manager, "c", range(30)))[1] == 8
    request.num_computed_tokens = request.num_confirmed_tokens = 20
    manager.cache_blocks(request, 20)
    assert manager.lookup(Request(manager, "c", range(30)))[1] == 20
    assert len(manager.allocate(request, 10)[0]) == 3


def test_found_blocks_that_external_tokens_push_out_of_the_window_are_not_taken():
    manager = make_manager(window_spec(4, 4), num_blocks=3)
    Request(manager, "a", range(8)).start()
    manager.free("a")
    request = Request(manager, "b", range(40))
    assert manager.lookup(request) == (([0, 2],), 8)
    # Token 16 reads 13 .. 15: two blocks are needed, and two are free.
    assert request.start(1, num_external_tokens=8) is not None
    assert [bool(block_id) for block_id in request.tables[0]] == [False, False, False, True, True]


def test_the_count_of_cached_tokens_may_be_in_num_computed_tokens_already():
    manager = make_manager(full_spec(4), num_blocks=20)
    Request(manager, "a", range(9)).start()
    request = Request(manager, "b", range(12))
    found, request.num_computed_tokens = manager.lookup(request)
    request.num_confirmed_tokens = request.num_computed_tokens
    appended = manager.allocate(request, 4, cached_blocks=found, num_cached_tokens=request.num_computed_tokens)
    assert len(appended[0]) == 1


def test_a_state_is_one_block_for_a_whole_request():
    spec = MambaSpec(block_size=4, state_bytes=full_spec(4).page_size_bytes)
    manager = make_manager(full_spec(4), spec, num_blocks=20)
    request = Request(manager, "a", range(17))
    assert [len(new) for new in request.start()] == [5, 1]
    assert manager.max_blocks_needed(17) == 6
    assert manager.lookup(Request(manager, "b", range(17))) == (([], []), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossAttentionSpec(FullAttentionSpec):
    """Keys and values of an encoder's output: as many tokens as it made, written once."""

    max_encoder_tokens: int


def test_a_manager_of_a_plugin_is_used():
    class CrossAttentionManager(FullAttentionManager):
        supports_prefix_cache = False

        def num_places(self, num_tokens):
            return self.spec.max_encoder_tokens // self.block_size if num_tokens else 0

        def room(self, num_places):
            return 10**9 if num_places else 0

    spec = CrossAttentionSpec(block_size=4, num_kv_heads=1, head_dim=8, dtype="float32", max_encoder_tokens=12)
    manager = make_manager(
        full_spec(4), spec, num_blocks=20, extra_managers=[(CrossAttentionSpec, CrossAttentionManager)]
    )
    assert [len(new) for new in Request(manager, "a", range(5)).start()] == [2, 3]


def test_residency_is_taken_with_the_injected_clock():
    now = [0.0]
    manager = make_manager(
        full_spec(4), num_blocks=2, clock=lambda: now[0], kv_cache_metrics=True, kv_cache_metrics_sample=1.0
    )
    Request(manager, "a", range(4)).start()
    now[0] = 2.0
    manager.free("a")
    now[0] = 5.0
    Request(manager, "b", range(10, 14)).start()
    assert manager.take_residency() == ([5.0], [5.0], [])
    assert manager.take_residency() == ([], [], [])
    assert make_manager(full_spec(4), num_blocks=2).take_residency() == ([], [], [])


def test_a_block_is_found_from_the_step_that_fills_it():
    manager = make_manager(full_spec(4), num_blocks=10)
    request = Request(manager, "a", range(3))
    request.start()
    request.append([3])
    request.go_on()  # in the block that it has
    assert manager.lookup(Request(manager, "b", range(5)))[1] == 4


def test_blocks_are_looked_at_again_when_the_next_one_is_full(monkeypatch):
    looked = []
    plain = FullAttentionManager.cache_full_blocks

    def cache_full_blocks(self, blocks, block_hashes, num_tokens):
        looked.append(num_tokens)
        plain(self, blocks, block_hashes, num_tokens)

    monkeypatch.setattr(FullAttentionManager, "cache_full_blocks", cache_full_blocks)
    manager = make_manager(full_spec(4), window_spec(8, 4), num_blocks=20)
    request = Request(manager, "a", range(3))
    request.start()
    for token in range(3, 13):
        request.append([token])
        request.go_on()
    assert looked == [4, 8, 12]


def test_a_step_that_needs_nothing_returns_the_same_empty_lists():
    manager = make_manager(full_spec(16), num_blocks=10)
    request = Request(manager, "a", range(20))
    request.start()
    request.append([1])
    assert request.go_on() is request.go_on()


def test_the_step_behind_a_full_block_needs_nothing_where_there_is_room():
    manager = make_manager(full_spec(4), window_spec(8, 4), num_blocks=20)
    request = Request(manager, "a", range(4))
    request.start(num_lookahead_tokens=4)
    request.append([4, 5])
    assert request.go_on() is request.go_on()


def test_usage_is_the_share_of_usable_blocks_that_requests_hold():
    manager = make_manager(full_spec(4), num_blocks=11)
    Request(manager, "a", range(12)).start()
    assert manager.usage == pytest.approx(0.3)
    manager.free("a")
    assert manager.usage == 0.0  # cached blocks are free


def test_a_plan_without_groups_holds_nothing():
    manager = PagedKVCacheManager(plan_kv_cache({}, 0, max_model_len=9), KVCacheConfig(), max_model_len=9)
    request = Request.__new__(Request)
    request.__dict__.update(
        manager=manager, request_id="a", token_ids=[1, 2], num_prompt_tokens=2, num_computed_tokens=0,
        num_confirmed_tokens=0, block_hashes=[],
    )  # fmt: skip
    assert request.start() == ()
    assert (manager.usage, manager.max_blocks_needed(5), manager.num_usable_blocks) == (0.0, 0, 0)


def test_the_step_that_needs_nothing_costs_microseconds():
    """It runs for every running request in every step. The bound is loose: it fails on work by blocks or groups, not by noise."""
    manager = hybrid_manager(num_blocks=1000)
    request = Request(manager, "a", range(2000))
    request.start(2000)
    request.append([1])
    request.go_on()
    best = min(_seconds_of_100(manager, request) for _ in range(20))
    assert best / 100 < 110 * store_s()


def _seconds_of_100(manager, request):
    start = time.perf_counter()
    for _ in range(100):
        manager.allocate(request, 1)
    return time.perf_counter() - start
