"""The fake executor sees what a wrong scheduler would tell it."""

from __future__ import annotations

import pytest

from pelton.testing.scheduler import Harness, make_request


@pytest.fixture
def harness() -> Harness:
    """One request in its first decode step, another waiting for its first block."""
    harness = Harness(block_size=4)
    harness.add(make_request("a", 5, 8))
    harness.step()
    harness.add(make_request("b", 6, 8))
    return harness


def other_blocks(output):
    output.new[0].block_ids[0][0] = 1


def no_block(output):
    output.new[0].block_ids[0].pop()


def one_more_token(output):
    output.num_scheduled[1] += 1


@pytest.mark.parametrize(
    "spoil, fault",
    [
        pytest.param(other_blocks, "reads a foreign token", id="another-request's-block"),
        pytest.param(no_block, "writes position 4 of group 0 without a block", id="table-too-short"),
        pytest.param(one_more_token, "b computes token 6 of 6", id="token-that-is-not-there"),
        pytest.param(lambda output: output.slots.__setitem__(1, output.slots[0]), "has a slot twice", id="slot-twice"),
        pytest.param(lambda output: output.num_scheduled.reverse(), "rows with one token first", id="order-of-rows"),
        pytest.param(lambda output: output.samples.__setitem__(1, False), "b samples=False", id="no-sample-at-the-end"),
    ],
)
def test_a_wrong_step_is_a_violation(harness, spoil, fault):
    output = harness.scheduler.schedule()
    harness.check_sound()
    spoil(output)
    harness.executor.execute(output)
    assert any(fault in one for one in harness.executor.violations), harness.executor.violations


def test_a_result_taken_before_an_older_one_is_a_violation():
    harness = Harness(max_steps_in_flight=2)
    harness.add(make_request("a", 5, 8))
    harness.launch()
    harness.launch()
    harness.open[1][1].result()
    assert "was taken before an older one's" in harness.executor.violations[0]


def test_a_block_that_an_open_step_reads_may_not_be_written_without_order():
    harness = Harness(block_size=4, max_steps_in_flight=2, steps_are_ordered=False)
    harness.add(make_request("a", 5, 8))
    harness.launch()
    harness.add(make_request("b", 5, 8))
    output = harness.scheduler.schedule()
    output.new[0].block_ids[0][0] = harness.executor.outputs[0].new[0].block_ids[0][0]
    harness.executor.execute(output)
    assert any("open step 0 reads for {'a'}" in one for one in harness.executor.violations)
