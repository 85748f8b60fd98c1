"""A block that is given up before a result told of its content is zeroed by the step that hands it on: it may hold NaN."""

from __future__ import annotations

import pytest
import torch
from pelton_worker_fakes import VOCAB, make_runner, oracle_greedy

from pelton.messages.outputs import FinishReason
from pelton.messages.step import SchedulerOutput
from pelton.testing.fake_model import FakeModel
from pelton.testing.scheduler import Harness, make_request

A_BLOCKS = {1, 2, 3}  # the first that a pool hands out


def small_harness(**arguments) -> Harness:
    """Preemption for three blocks beside the null block: whoever comes second gets those of the first."""
    return Harness(num_blocks=4, max_steps_in_flight=2, **arguments)


def give_up(harness: Harness, how: str) -> None:
    if how == "abort":
        harness.scheduler.finish_requests(["a"], FinishReason.ABORT)
    else:
        harness.scheduler._table.preempt(harness.scheduler._table.requests["a"])


def test_blocks_of_a_request_aborted_under_an_open_step_are_zeroed_when_they_are_handed_on():
    harness = small_harness()
    harness.add(make_request("a", 9, 3))
    assert set(harness.launch().new[0].block_ids[0]) == A_BLOCKS
    give_up(harness, "abort")
    harness.add(make_request("b", 6, 2))
    output = harness.launch()  # a's result is not read yet
    assert [new.request_id for new in output.new] == ["b"]
    assert output.zero_block_ids == sorted(output.new[0].block_ids[0]) and len(output.zero_block_ids) == 2
    harness.run()
    harness.check_request("b")
    harness.check_empty()


def test_a_block_taken_by_preemption_under_an_open_step_is_zeroed():
    harness = Harness(num_blocks=3, max_steps_in_flight=2)
    harness.add(make_request("a", 3, 4))
    harness.add(make_request("b", 3, 4))
    harness.launch()
    harness.launch()  # the fourth token of both
    harness.retire()
    output = harness.launch()  # a's fifth token takes b's block
    assert output.block_appends == [(0, 0, 1, [2])] and output.zero_block_ids == [2]
    harness.run_and_check()


def test_of_a_request_in_decode_only_what_the_open_step_writes_is_zeroed():
    harness = small_harness(prefix_caching=False)
    harness.add(make_request("a", 9, 3))
    harness.launch()
    harness.retire()
    harness.launch()  # the tenth token, in the third block
    give_up(harness, "abort")
    harness.add(make_request("b", 10, 2))
    output = harness.launch()
    assert set(output.new[0].block_ids[0]) == A_BLOCKS and output.zero_block_ids == [3]
    harness.run()
    harness.check_request("b")


def test_the_token_after_eos_is_as_good_as_an_abort():
    harness = small_harness(fake_model=FakeModel(eos_every=1))
    harness.add(make_request("a", 8, 9, eos_token_ids=[0]))
    harness.launch()
    wasted = harness.launch()
    assert [ids for *_, ids in wasted.block_appends] == [[3]]
    harness.retire()
    assert harness.reason("a") is FinishReason.STOP
    harness.add(make_request("b", 9, 2))
    output = harness.launch()
    assert set(output.new[0].block_ids[0]) == A_BLOCKS and output.zero_block_ids == [3]


def test_a_result_that_was_read_clears_its_blocks():
    harness = small_harness()
    harness.add(make_request("a", 9, 3))
    harness.launch()
    harness.retire()
    harness.launch()
    give_up(harness, "abort")
    harness.retire()
    harness.add(make_request("b", 9, 3))
    harness.run()
    assert not any(output.zero_block_ids for output in harness.executor.outputs)
    harness.check_request("b")


def test_chunks_before_the_last_tell_nothing_so_their_blocks_wait_for_the_next_holder():
    harness = small_harness(max_num_batched_tokens=4)
    harness.add(make_request("a", 9, 3))
    harness.launch()
    harness.launch()
    harness.retire()
    harness.retire()
    give_up(harness, "abort")
    harness.add(make_request("b", 9, 3))
    harness.run()
    zeroed = [block for output in harness.executor.outputs for block in output.zero_block_ids]
    assert sorted(zeroed) == [1, 2]  # once each, and not the third, which a never wrote
    harness.check_request("b")
    harness.check_empty()


def test_blocks_of_a_failed_step_are_zeroed_when_they_are_handed_on():
    harness = small_harness()
    harness.executor.fails = lambda step_id: "boom" if step_id == 0 else None
    harness.add(make_request("a", 9, 3))
    harness.launch()
    harness.retire()
    harness.add(make_request("b", 9, 3))
    assert set(harness.launch().zero_block_ids) == A_BLOCKS
    harness.run()
    harness.check_request("b")


def test_a_block_that_another_found_is_not_zeroed():
    harness = Harness(max_steps_in_flight=2)
    prompt = [*range(1, 10)]
    harness.add(make_request("a", prompt, 3))
    harness.launch()
    give_up(harness, "abort")
    harness.add(make_request("b", prompt, 3))
    output = harness.launch()
    assert output.new[0].num_computed_tokens == 8 and not {1, 2} & set(output.zero_block_ids)
    harness.run()
    harness.check_request("b")


@pytest.mark.parametrize("how", ["abort", "preempt"])
def test_blocks_of_a_nan_row_that_gave_them_up_are_not_found_again(how):
    """The workers put zeros for NaN: whoever found such a block would read them in silence."""
    harness = Harness(max_steps_in_flight=2)
    harness.executor.row_error = lambda name, step_id: "NaN logits" if (name, step_id) == ("a", 0) else None
    prompt = [*range(1, 12)]
    harness.add(make_request("a", prompt, 5))
    harness.launch()
    give_up(harness, how)
    harness.retire()
    harness.take_outputs()
    assert harness.reason("a") is (FinishReason.ABORT if how == "abort" else FinishReason.ERROR)
    harness.add(make_request("b", prompt, 5))
    harness.run()
    assert harness.outputs["b"][0].num_cached_tokens == 0
    harness.check_request("b")
    harness.check_empty()


def test_nan_of_an_aborted_request_does_not_reach_who_gets_its_blocks(monkeypatch):
    """Scheduler and worker together, results read late as on a device."""
    runner = make_runner(num_blocks=4)
    runner.model.poison = {39}
    monkeypatch.setattr(runner, "_given", lambda launched: launched)
    harness = small_harness(fake_model=FakeModel(vocab_size=VOCAB))
    scheduler = harness.scheduler
    scheduler.add_request(make_request("a", [39, *range(1, 9)], 3))
    first = scheduler.schedule()
    unread = runner.execute(first)
    for layer in runner.pool.layers:
        layer.views[1][sorted(A_BLOCKS)] = torch.nan  # what such a step leaves there
    scheduler.finish_requests(["a"], FinishReason.ABORT)
    scheduler.add_request(make_request("b", [7, 9, 3, 1, 4], 3))
    second = scheduler.schedule()
    handed_on = second.new[0].block_ids[0]
    told = runner.execute(second)
    assert set(handed_on) <= A_BLOCKS
    assert all(bool(layer.views[1][handed_on].isfinite().all()) for layer in runner.pool.layers)
    outputs = scheduler.update(first, unread.result()) + scheduler.update(second, told.result())
    assert [output.new_token_ids for output in outputs] == [oracle_greedy([7, 9, 3, 1, 4], 1)]
    runner.execute(SchedulerOutput(step_id=9))  # a's result was NaN: now all of its blocks are mended
    assert all(bool(layer.views[1].isfinite().all()) for layer in runner.pool.layers)


def test_blocks_of_a_request_that_came_back_after_preemption_are_trusted_again():
    """Its token in flight arrives while it waits, and its first step afterwards computes all of it."""
    harness = Harness(max_steps_in_flight=2)
    harness.add(make_request("a", 9, 12))
    harness.launch()
    harness.retire()
    harness.launch()
    harness.launch()
    harness.retire()
    request = harness.scheduler._table.requests["a"]
    assert request.has_valid_output
    give_up(harness, "preempt")
    harness.retire()
    harness.launch()
    harness.retire()
    assert request.has_valid_output
    harness.run_and_check()
    assert not harness.scheduler._allocations._uninitialized


def test_prompt_logprobs_are_told_once_by_a_request_whose_blocks_were_spoilt():
    harness = Harness(max_steps_in_flight=2, max_num_batched_tokens=4)
    harness.add(make_request("a", [*range(1, 9)], 3, prompt_logprobs=0))
    harness.launch()
    harness.launch()
    harness.retire()  # of the prompt's first half; the second is in flight
    harness.scheduler._recompute_readers({harness.scheduler._table.requests["a"].tables[0][0]})
    harness.run_and_check()
    told = [output.prompt_logprobs for output in harness.outputs["a"] if output.prompt_logprobs is not None]
    assert [len(packed) for packed in told] == [7]
