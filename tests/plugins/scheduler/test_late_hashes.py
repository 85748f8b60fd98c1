"""A prompt of a step that the device waits for: of its blocks the first is hashed before the step is launched, the others while it runs.

What is found in the prefix cache is the same.
"""

from __future__ import annotations

import pytest

from pelton.config import SchedulerConfig
from pelton.kv_cache.hashing import BlockHasher
from pelton.messages.outputs import FinishReason
from pelton.testing.scheduler import Harness, make_request

PROMPT = [*range(1, 15)]  # three blocks of four tokens, and two more


def started(**arguments) -> Harness:
    return Harness(max_steps_in_flight=2, **arguments)


def num_hashes(harness: Harness, name: str) -> int:
    return len(harness.scheduler._table.requests[name].block_hashes)


def num_found(harness: Harness, name: str = "later", prompt=PROMPT) -> int:
    """Tokens that a request with this prompt finds now, run to its end."""
    harness.add(make_request(name, prompt, 2))
    harness.run_and_check()
    return harness.outputs[name][0].num_cached_tokens


def test_the_others_are_hashed_when_the_step_is_over():
    """Not behind the launch of the next: a worker's thread has the first to launch."""
    harness = started()
    harness.add(make_request("a", PROMPT, 4))
    harness.launch()
    harness.launch()
    assert num_hashes(harness, "a") == 1
    state = harness.scheduler._table.requests["a"]
    assert state.packed_token_ids  # kept for them
    harness.retire()
    assert num_hashes(harness, "a") == state.num_cached_blocks == 3
    assert not state.packed_token_ids
    harness.run_and_check()
    assert num_found(harness) == 12


def test_all_are_hashed_at_once_while_the_device_has_a_step_or_none_runs_behind_it():
    harness = started()
    harness.add(make_request("a", PROMPT, 9))
    harness.launch()
    harness.add(make_request("b", 14, 4))
    harness.launch()
    assert num_hashes(harness, "b") == 3
    harness.run_and_check()
    alone = Harness(max_steps_in_flight=1)
    alone.add(make_request("a", PROMPT, 4))
    alone.launch()
    assert num_hashes(alone, "a") == 3


def test_prompts_of_one_step_share_what_they_have_in_common():
    """The second finds the first block of the first, and then all of it."""
    harness = started()
    others = {"b": PROMPT, "c": [*PROMPT[:9], 30, 31, 32], "d": 14, "e": [*PROMPT[:3], 33, 34, 35, 36, 37], "f": 3}
    harness.add(make_request("a", PROMPT, 4))
    for name, prompt in others.items():
        harness.add(make_request(name, prompt, 4))
    step = harness.launch()
    assert {new.request_id: new.num_computed_tokens for new in step.new} == {
        "a": 0, "b": 12, "c": 8, "d": 0, "e": 0, "f": 0,
    }  # fmt: skip
    harness.run_and_check()


def test_prompts_of_one_step_with_different_salts_share_nothing():
    harness = started()
    for name, salt in (("a", "x"), ("b", "y"), ("c", "x"), ("d", None)):
        harness.add(make_request(name, PROMPT, 4, cache_salt=salt))
    assert [new.num_computed_tokens for new in harness.launch().new] == [0, 0, 12, 0]
    harness.run_and_check()


@pytest.mark.parametrize("end", ["abort", "deadline"])
def test_what_ends_while_its_step_runs_is_found_later(end):
    harness = started()
    harness.add(make_request("a", PROMPT, 4, timeout_s=1.0 if end == "deadline" else None))
    harness.launch()
    if end == "abort":
        harness.scheduler.finish_requests(["a"], FinishReason.ABORT)
    else:
        harness.scheduler.expire(2.0)
    harness.run()
    harness.add(make_request("later", PROMPT, 2))
    harness.run()
    assert harness.outputs["later"][0].num_cached_tokens == 12
    harness.check_request("later")
    harness.check_empty()


def test_what_a_failed_step_has_left_is_not_found(monkeypatch):
    harness = started()
    harness.add(make_request("a", PROMPT, 4))
    output = harness.scheduler.schedule()
    error = RuntimeError("no device")
    from pelton.errors import error_info

    harness._note(harness.scheduler.update_failed(output, error_info(error)))
    assert harness.reason("a") is FinishReason.ERROR
    harness.add(make_request("later", PROMPT, 2))
    harness.run()
    assert harness.outputs["later"][0].num_cached_tokens == 0


def test_one_that_gave_up_its_blocks_meanwhile_starts_again():
    harness = started()
    harness.add(make_request("a", PROMPT, 4))
    harness.launch()
    harness.scheduler._table.preempt(harness.scheduler._table.requests["a"])
    harness.run_and_check()
    assert num_found(harness) == 12


def test_one_that_is_preempted_at_its_first_token_finds_its_prompt_again():
    harness = started(num_blocks=8)  # seven for requests
    for name in "ab":
        harness.add(make_request(name, 12, 8))
    harness.launch()
    step = harness.launch()
    assert (
        len(step.slots) == 1 and step.block_appends
    )  # the other gave up its blocks for the last free one, or waits for one
    harness.run_and_check()
    assert all(harness.outputs[name] for name in "ab")
    recomputed = [new for output in harness.executor.outputs[1:] for new in output.new]
    assert all(new.num_computed_tokens >= 8 for new in recomputed)


def test_a_prompt_in_chunks_is_cached_as_far_as_it_is_computed():
    """Before its next chunk."""
    harness = started(max_num_batched_tokens=8)
    harness.add(make_request("a", PROMPT, 4))
    harness.launch()
    state = harness.scheduler._table.requests["a"]
    assert (num_hashes(harness, "a"), state.num_cached_blocks, harness.kv.pool.cached_ids()) == (1, 0, set())
    harness.launch()
    assert (num_hashes(harness, "a"), state.num_cached_blocks, len(harness.kv.pool.cached_ids())) == (3, 3, 3)
    harness.run_and_check()


def test_a_prompt_that_comes_with_the_next_step_finds_what_waits():
    harness = started()
    harness.add(make_request("a", PROMPT, 4))
    harness.launch()
    harness.add(make_request("b", 14, 4))
    harness.add(make_request("c", PROMPT, 4))
    assert [new.num_computed_tokens for new in harness.launch().new] == [0, 12]
    harness.run_and_check()


def test_the_hasher_is_asked_for_the_first_blocks_alone_before_the_launch(monkeypatch):
    asked = []
    extend = BlockHasher.extend
    monkeypatch.setattr(
        BlockHasher, "extend", lambda *args, **more: (asked.append(len(args[2])), extend(*args, **more))[1]
    )
    harness = started()
    for name in "abc":
        harness.add(make_request(name, 20, 4))
    harness.launch()
    assert asked == [4, 4, 4]
    harness.retire()
    assert asked[3:] == [20, 20, 20]
    harness.run_and_check()


def test_a_request_with_a_grammar_has_all_hashes():
    """A mask that is late takes its blocks away at once, and it has to find them again."""
    harness = started()
    harness.add(make_request("a", PROMPT, 4))
    harness.scheduler._table.requests["a"].grammar = object()
    harness.scheduler.schedule()
    assert num_hashes(harness, "a") == 3


def test_a_prompt_of_which_a_token_is_left_is_found_as_far_as_it_is_computed():
    """Its last token is a row of the step in which another finds it, and fills a block that must not be read there."""
    harness = started(max_num_batched_tokens=7)
    prompt = [*range(1, 9)]
    harness.add(make_request("a", prompt, 4))
    harness.launch()
    harness.add(make_request("c", [*prompt, 30], 4))
    step = harness.launch()
    assert [row.num_computed_tokens for row in step.new] == [4]
    harness.run_and_check()


def test_first_tokens_that_are_blocks_are_not_read_in_the_step_that_fills_them():
    harness = started(block_size=1, num_blocks=64, config=SchedulerConfig(long_prefill_token_threshold=1))
    harness.add(make_request("a", [1, 2, 3], 2))
    harness.add(make_request("b", [1, 9], 2))
    step = harness.launch()
    assert [row.num_computed_tokens for row in step.new] == [0, 0]
    harness.run_and_check()


def test_one_that_gives_up_its_blocks_for_a_prompt_in_chunks_finds_them_again():
    config = SchedulerConfig(long_prefill_token_threshold=24)
    harness = started(max_num_batched_tokens=64, num_blocks=23, max_num_seqs=4, config=config)
    harness.add(make_request("long", 76, 1))
    harness.launch()
    harness.retire()
    harness.add(make_request("a", [41 + i % 5 for i in range(16)], 4))
    harness.run_and_check()
    admitted = [
        row.num_computed_tokens for step in harness.executor.outputs for row in step.new if row.request_id == "a"
    ]
    assert admitted == [0, 12]
