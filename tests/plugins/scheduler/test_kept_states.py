"""States that the prefix cache keeps: which steps copy them, and what becomes of them when a step fails."""

from __future__ import annotations

import pytest

from pelton.messages.outputs import FinishReason
from pelton.testing.kv_specs import full_spec, state_spec
from pelton.testing.scheduler import Harness, make_request

PROMPT = [*range(1, 12)]  # 11 tokens, in blocks of 4: the state behind 8 is kept


def make_harness(**settings) -> Harness:
    return Harness(specs=[full_spec(4), state_spec()], **{"num_blocks": 60} | settings)


def test_a_state_is_copied_between_two_steps_of_a_prompt_and_before_the_first_of_who_finds_it():
    harness = make_harness()
    harness.add(make_request("a", PROMPT, 3))
    harness.run()
    first, second, *_ = harness.executor.outputs
    [own] = first.new[0].block_ids[1]
    assert (first.num_scheduled, first.block_copies) == ([8], [])
    assert second.num_scheduled == [3]
    [(source, kept)] = second.block_copies
    assert source == own != kept
    harness.add(make_request("b", [*PROMPT, 40, 41], 3))
    found = harness.launch()
    assert found.new[0].num_computed_tokens == 8
    assert found.block_copies == [(kept, found.new[0].block_ids[1][0])]
    harness.run_and_check()
    assert next(output.num_cached_tokens for output in harness.outputs["b"]) == 8


def test_without_chunks_a_prompt_is_one_step():
    from pelton.config import SchedulerConfig

    harness = make_harness(config=SchedulerConfig(enable_chunked_prefill=False))
    harness.add(make_request("a", PROMPT, 3))
    harness.run_and_check()
    assert harness.executor.outputs[0].num_scheduled == [11]


@pytest.mark.parametrize("overlap", [1, 2])
def test_a_preempted_request_finds_its_last_state(overlap):
    harness = make_harness(max_steps_in_flight=overlap)
    harness.add(make_request("a", PROMPT, 20))
    while len(harness.tokens("a")) < 8:
        harness.step()
    harness.scheduler._table.preempt(harness.scheduler._table.requests["a"])
    harness.run_and_check()
    starts = [new.num_computed_tokens for output in harness.executor.outputs for new in output.new]
    assert starts == [0, 16]  # 18 tokens or 19 were computed


@pytest.mark.parametrize("overlap", [1, 2, 3])
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_the_state_of_a_failed_step_is_not_found(failing, overlap):
    """Step 0 computes 8 tokens, step 1 keeps their state; who has found it by then computes again."""
    harness = make_harness(max_steps_in_flight=overlap)
    harness.executor.fails = lambda step_id: "boom" if step_id == failing else None
    harness.add(make_request("a", PROMPT, 6))
    for _ in range(min(overlap, 2)):
        harness.launch()
    harness.add(make_request("b", PROMPT, 3))
    harness.run()
    assert harness.reason("a") is FinishReason.ERROR
    if harness.reason("b") is not FinishReason.ERROR:
        harness.check_request("b")
    harness.add(make_request("c", PROMPT, 3))
    harness.run()
    harness.check_request("c")
    harness.check_empty()


@pytest.mark.parametrize("overlap", [1, 2])
def test_a_request_with_nan_takes_its_states_along(overlap):
    harness = make_harness(max_steps_in_flight=overlap)
    harness.executor.row_error = lambda name, step_id: "NaN" if name == "a" and step_id == 1 else None
    harness.add(make_request("a", PROMPT, 6))
    harness.run()
    assert harness.reason("a") is FinishReason.ERROR
    harness.add(make_request("b", PROMPT, 3))
    assert harness.launch().new[0].num_computed_tokens == 0
    harness.run()
    harness.check_request("b")
    harness.check_empty()
