"""States that the prefix cache keeps: which, where, and for how long."""

from __future__ import annotations

import pytest

from pelton.config.kv_cache import KVCacheConfig
from pelton.kv_cache.hashing import BlockHasher
from pelton.testing.kv_cache import SimulatedRequest
from pelton.testing.kv_specs import full_spec, make_plan, state_spec, window_spec
from pelton_plugins.kv_cache.manager import PagedKVCacheManager

HYBRID = (full_spec(4), state_spec(4), state_spec(4))


class Runs:
    """A manager, and requests that compute their tokens as a scheduler lets them."""

    def __init__(self, *specs, num_blocks=40):
        plan = make_plan(specs, num_blocks)
        self.manager = PagedKVCacheManager(plan, KVCacheConfig(), max_model_len=400)
        self.manager.hands_copies = True
        self.hasher = BlockHasher("sha256", plan.hash_block_size)

    def request(self, name, token_ids, salt=None):
        request = SimulatedRequest(name, list(token_ids), len(token_ids), salt)
        self.learn(request, [])
        return request

    def learn(self, request, token_ids):
        request.token_ids += token_ids
        self.hasher.extend(request.block_hashes, request.token_ids, cache_salt=request.salt)

    def step(self, request, num_new=None):
        """One step of it; returns (tokens found, copies), or None where blocks have run out."""
        cached, found = None, 0
        if not request.is_held:
            cached, found = self.manager.lookup(request)
        start = request.num_computed_tokens + found
        end = start + num_new if num_new else self.manager.chunk_end(request, start, request.num_tokens)
        if self.manager.allocate(request, end - start, cached_blocks=cached, num_cached_tokens=found) is None:
            return None
        request.is_held = True
        request.num_computed_tokens = request.num_confirmed_tokens = end
        return found, self.manager.take_copies()

    def prompt(self, name, token_ids, salt=None):
        """Compute a whole prompt; returns (the request, tokens found, tokens after each of its steps)."""
        request, ends, found = self.request(name, token_ids, salt), [], 0
        while request.num_computed_tokens < request.num_tokens:
            found += self.step(request)[0]
            ends.append(request.num_computed_tokens)
        return request, found, ends


def test_a_prompt_leaves_the_state_behind_its_last_full_block():
    """23 tokens in blocks of 4: a step ends at 20, where a copy of both groups' states is made before the next."""
    runs = Runs(*HYBRID)
    first = runs.request("a", range(23))
    assert runs.step(first) == (0, [])
    assert first.num_computed_tokens == 20
    assert runs.manager.lookup(runs.request("b", range(23)))[1] == 0  # not before the step that computes it was made
    states = [table[0] for table in runs.manager.block_ids("a")[1:]]
    _, copies = runs.step(first)
    assert [source for source, _ in copies] == states
    kept = [target for _, target in copies]
    tables, num_found = runs.manager.lookup(runs.request("b", range(23)))
    assert (num_found, list(tables[1:])) == (20, [[block] for block in kept])
    assert runs.manager.lookup(runs.request("b", range(20)))[1] == 0  # its last token has to be computed: 16 at most
    assert runs.manager.lookup(runs.request("b", [*range(20), 99]))[1] == 20
    assert runs.manager.lookup(runs.request("b", [*range(19), 99, 98]))[1] == 0  # a state of 16 tokens is not kept
    assert runs.manager.lookup(runs.request("b", range(23), "salt"))[1] == 0


def test_who_finds_a_state_runs_on_a_copy_and_the_kept_one_stays():
    runs = Runs(*HYBRID)
    runs.prompt("a", range(23))
    for name in "bc":
        request = runs.request(name, range(23))
        tables, _ = runs.manager.lookup(request)
        found, copies = runs.step(request)
        own = [table[0] for table in runs.manager.block_ids(name)[1:]]
        assert (found, copies) == (20, [(kept, block) for [kept], block in zip(tables[1:], own, strict=True)])
        assert not set(own) & {table[0] for table in tables[1:]}
    assert runs.manager.block_ids("b")[0][:5] == runs.manager.block_ids("a")[0][:5]  # tokens are shared


def test_nobody_holds_a_kept_state():
    """7 blocks of tokens and 2 of states: what is kept of them lies in the free list, and is gone when others need the room."""
    runs = Runs(*HYBRID, num_blocks=14)
    runs.prompt("a", range(25))
    assert runs.manager.num_free_blocks == 13 - 9
    assert runs.manager.lookup(runs.request("b", range(25)))[1] == 24
    runs.manager.free("a")
    assert runs.manager.num_free_blocks == 13
    assert runs.manager.lookup(runs.request("b", range(25)))[1] == 24
    assert runs.step(runs.request("c", range(100, 144)), 44) is not None  # takes all 13
    assert runs.manager.lookup(runs.request("b", range(25)))[1] == 0
    runs.manager.free("c")
    assert runs.manager.reset_prefix_cache() and runs.manager.num_free_blocks == 13


def test_where_no_block_is_free_nothing_is_kept():
    runs = Runs(*HYBRID, num_blocks=1 + 7 + 2)
    _, _, ends = runs.prompt("a", range(25))
    assert ends == [24, 25]
    assert runs.manager.lookup(runs.request("b", range(25)))[1] == 0


def test_it_takes_the_kept_state_where_a_copy_has_no_room():
    runs = Runs(*HYBRID, num_blocks=1 + 7 + 2)
    _, _, ends = runs.prompt("a", range(21))  # 6 blocks and 2: one block is free, which is too few to keep a state
    assert ends == [20, 21]
    runs.manager.free("a")
    _, found, _ = runs.prompt("b", range(13))  # 4 and 2: three are free
    assert found == 0
    runs.manager.free("b")
    assert runs.manager.lookup(runs.request("c", range(13)))[1] == 12
    third = runs.request("c", range(28))  # needs 7 and 2, all there are
    tables, found = runs.manager.lookup(third)
    assert found == 12
    assert runs.step(third, 16) == (12, [])
    assert [table[0] for table in runs.manager.block_ids("c")[1:]] == [table[0] for table in tables[1:]]
    runs.manager.free("c")
    assert runs.manager.num_free_blocks == 9
    assert runs.manager.lookup(runs.request("d", range(28)))[1] == 0  # what it took has changed since


def test_the_second_of_two_prompts_leaves_a_state_where_they_part():
    runs = Runs(*HYBRID)
    assert runs.prompt("a", [*range(18), *[90] * 9])[1:] == (0, [24, 27])
    assert runs.prompt("b", [*range(18), *[91] * 9])[1:] == (0, [16, 24, 27])
    assert runs.prompt("c", [*range(18), *[92] * 9])[1:] == (16, [24, 27])


def test_the_output_leaves_its_last_state_alone():
    """Tokens are known a step late, as they are where steps overlap: the state is kept first, and found when all its tokens are."""
    for is_late in (False, True):
        runs = Runs(*HYBRID)
        request, _, _ = runs.prompt("a", range(9))
        targets = []
        for number in range(12):  # each computes the token sampled before: 10 .. 21 are computed
            if not is_late:
                runs.learn(request, [100 + number])
            _, copies = runs.step(request, 1)
            targets += [target for _, target in copies]
            if is_late:
                runs.learn(request, [100 + number])
            runs.manager.cache_blocks(request, request.num_computed_tokens)
        chat = runs.request("b", [*request.token_ids, *range(60, 70)])
        assert runs.manager.lookup(chat)[1] == 20
        assert len(set(targets)) == 2 and len(targets) == 6  # behind 12, 16 and 20 tokens, in the same two blocks
        assert runs.manager.lookup(runs.request("c", [*range(9), 7]))[1] == 8  # the prompt's own
        runs.manager.free("a")
        assert runs.manager.lookup(chat)[1] == 20


def test_a_request_that_ends_before_its_tokens_are_known_leaves_no_state():
    runs = Runs(*HYBRID)
    request, _, _ = runs.prompt("a", range(11))
    for _ in range(2):
        runs.step(request, 1)  # tokens 11 and 12, neither known
    runs.manager.free("a")
    assert runs.manager.num_free_blocks == 39
    assert all(len(runs.manager.pool.cached_ids(group)) == 1 for group in (1, 2))  # behind 8 tokens


def test_a_model_of_states_alone_finds_the_prompts_last():
    runs = Runs(state_spec(4))
    assert runs.manager.plan.hash_block_size == 4
    assert runs.prompt("a", range(23))[1:] == (0, [20, 23])
    assert runs.prompt("b", [*range(23), *range(50, 60)])[1:] == (20, [32, 33])


def test_a_window_and_a_state_agree():
    runs = Runs(full_spec(4), window_spec(6), state_spec(4))
    runs.prompt("a", range(23))
    tables, num_found = runs.manager.lookup(runs.request("b", range(23)))
    assert num_found == 20 and [bool(block) for block in tables[1]] == [False] * 3 + [True] * 2
    runs.manager.evict(tables[1][-1:])
    assert (
        runs.manager.lookup(runs.request("b", range(23)))[1] == 0
    )  # the window would reach 16, of which no state is kept


def test_a_scheduler_that_hands_no_copies_on_finds_nothing():
    runs = Runs(*HYBRID)
    runs.manager.hands_copies = False
    assert runs.prompt("a", range(23))[1:] == (0, [23])
    assert runs.prompt("b", range(23))[1:] == (0, [23])


@pytest.mark.parametrize("specs", [HYBRID, (full_spec(4), window_spec(6)), (full_spec(4),)])
def test_chunks_are_cut_for_states_alone(specs):
    runs = Runs(*specs)
    assert runs.manager.chunk_end(runs.request("a", range(23)), 0, 23) == (20 if specs is HYBRID else 23)
