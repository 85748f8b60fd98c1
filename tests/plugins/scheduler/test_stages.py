"""Steps of a pipeline: what may be in a step while others are open."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from pelton.config import EngineConfig
from pelton.messages.outputs import FinishReason
from pelton.messages.step import SchedulerOutput
from pelton.scheduler.interface import Scheduler, SchedulerContext
from pelton.spec_decode.interface import DraftProposer
from pelton.testing.scheduler import Harness, SchedulerConformance, make_request
from pelton_plugins.scheduler.scheduler import DefaultScheduler


def make_harness(num_stages: int, **arguments: Any) -> Harness:
    config = EngineConfig.from_flat(pipeline_parallel_size=num_stages)
    settings = {"max_steps_in_flight": config.max_steps_in_flight, "engine_config": config, "num_blocks": 200}
    return Harness(**{**settings, **arguments})


class TestTwoStages(SchedulerConformance):
    overlaps = (2, 3)

    def make_scheduler(self, context: SchedulerContext) -> Scheduler:
        return DefaultScheduler(context)

    def harness(self, **arguments: Any) -> Harness:
        return make_harness(2, **arguments)

    def test_a_failed_step_ends_its_requests_only(self) -> None:
        """Of the steps that are open at once one fails."""
        for overlap in self.overlaps:
            harness = self.harness(max_steps_in_flight=overlap, max_num_seqs=2)
            for name in "abc":
                harness.add(make_request(name, 5, 8))
            harness.executor.fails = lambda step_id: "boom" if step_id == 2 else None
            harness.run()
            ends = [harness.reason(name) for name in "abc"]
            assert ends.count(FinishReason.ERROR) == 1
            for name, end in zip("abc", ends, strict=True):
                if end is not FinishReason.ERROR:
                    harness.check_request(name)
            harness.check_empty()


class TestFourStages(TestTwoStages):
    overlaps = (2, 5)

    def harness(self, **arguments: Any) -> Harness:
        return make_harness(4, **arguments)


class Repeats(DraftProposer):
    max_draft_tokens = 2

    def __init__(self) -> None: ...

    def propose(self, request_id: str, token_ids: Any) -> list[int]:
        return list(token_ids[-2:])


def samples(output: SchedulerOutput) -> set[int]:
    """Slots of the rows that sample."""
    return {slot for slot, is_last in zip(output.slots, output.samples, strict=True) if is_last}


@pytest.mark.parametrize("num_stages", [2, 3])
def test_steps_that_follow_each_other_have_other_requests(num_stages: int) -> None:
    """Until all stages have one, so that nobody waits for a token; each step has its share of the rows."""
    harness = make_harness(num_stages)
    for index in range(6):
        harness.add(make_request(f"r{index}", 3, 40))
    harness.step()
    steps = []
    for _ in range(12):
        while harness.may_launch and (output := harness.launch()) is not None:
            steps.append(output)
        harness.retire()
    assert len(steps) > num_stages
    for first, *behind in zip(*(steps[place:] for place in range(num_stages)), strict=False):
        assert not any(samples(first) & samples(later) for later in behind)
    assert {len(step.slots) for step in steps} == {6 // num_stages}
    harness.run_and_check()


def test_chunks_of_one_prompt_follow_each_other() -> None:
    harness = make_harness(2, max_num_batched_tokens=16)
    harness.add(make_request("a", 40, 3))
    chunks = [harness.launch(), harness.launch(), harness.launch()]
    assert [chunk and chunk.num_scheduled for chunk in chunks] == [[16], [16], [8]]
    harness.run_and_check()


def test_a_request_that_is_alone_has_its_next_step_ready() -> None:
    """And none more; one that comes shares the stages with it."""
    harness = make_harness(2)
    harness.add(make_request("a", 4, 20))
    harness.launch()
    assert harness.launch() is not None
    assert harness.launch() is None
    harness.add(make_request("b", 4, 20))
    assert (joined := harness.launch()) is not None
    assert len(joined.new) == len(joined.slots) == 1
    harness.retire()
    steps = [harness.step() and harness.open[-1][0] for _ in range(6)]
    assert all(
        not (samples(one) & samples(other)) for one, other in pairwise(steps) if one and other and one is not other
    )
    harness.run_and_check()


@pytest.mark.parametrize(
    "arguments",
    [{"num_blocks": 14}, {"num_blocks": 14, "max_num_batched_tokens": 8}, {"num_draft_tokens": 2, "num_blocks": 20},
     {"proposer": Repeats()}, {"max_num_seqs": 3}],
    ids=["few-blocks", "chunks", "drafts-of-the-device", "drafts-of-the-host", "few-rows"],
)  # fmt: skip
@pytest.mark.parametrize("num_stages", [2, 3])
def test_everybody_gets_its_own_tokens(arguments: dict[str, Any], num_stages: int) -> None:
    harness = make_harness(num_stages, **arguments)
    for index in range(7):
        harness.add(make_request(f"r{index}", 2 + 3 * index, 6 + index))
    harness.run_and_check()


def test_one_open_step_has_all_requests() -> None:
    """With overlap off."""
    harness = make_harness(2, max_steps_in_flight=1)
    for index in range(4):
        harness.add(make_request(f"r{index}", 3, 4))
    harness.step()
    output = harness.launch()
    assert output is not None and len(output.slots) == 4
    harness.run_and_check()
