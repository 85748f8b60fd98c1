"""Blocks whose content is bad are handed on as they are, and nobody finds them."""

from __future__ import annotations

import pytest
import torch
from pelton_worker_fakes import VOCAB, make_runner, oracle_greedy

from pelton.messages.outputs import FinishReason
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


@pytest.mark.parametrize("how", ["abort", "preempt"])
def test_blocks_of_a_nan_row_that_gave_them_up_are_not_found_again(how):
    """A request that found such a block would fail too."""
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
    assert set(second.new[0].block_ids[0]) <= A_BLOCKS
    told = runner.execute(second)
    outputs = scheduler.update(first, unread.result()) + scheduler.update(second, told.result())
    assert [output.new_token_ids for output in outputs] == [oracle_greedy([7, 9, 3, 1, 4], 1)]


def test_blocks_of_a_failed_step_are_handed_on_and_not_found(monkeypatch):
    harness = small_harness()
    harness.executor.fails = lambda step_id: "boom" if step_id == 0 else None
    prompt = [*range(1, 10)]
    harness.add(make_request("a", prompt, 3))
    harness.launch()
    harness.retire()
    harness.take_outputs()
    assert harness.reason("a") is FinishReason.ERROR
    harness.add(make_request("b", prompt, 3))
    output = harness.launch()
    assert set(output.new[0].block_ids[0]) == A_BLOCKS and output.new[0].num_computed_tokens == 0
    harness.run()
    harness.check_request("b")


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
