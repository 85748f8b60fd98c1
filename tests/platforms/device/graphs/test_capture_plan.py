"""The plan of captures as a value: what it has, in which order, and how it is worked off."""

from __future__ import annotations

import pytest
from pelton_worker_fakes import make_runner

from pelton.config import CUDAGraphMode
from pelton.sampling.tails import FULL, GREEDY, Sample, Verify
from pelton.testing.graphs import FakeGraphRecorder
from pelton_platforms.device.graphs.capture_plan import CapturePlan, CaptureQueue
from pelton_platforms.device.graphs.dispatcher import GraphDispatcher

VARIANTS = (GREEDY, FULL)


def dispatcher(mode: CUDAGraphMode, **settings: object) -> GraphDispatcher:
    return GraphDispatcher(mode, max_num_seqs=24, max_num_tokens=64, **settings)  # type: ignore[arg-type]


def test_small_sizes_come_first_then_those_that_stand_in_for_others() -> None:
    plan = CapturePlan.make(dispatcher(CUDAGraphMode.FULL_DECODE_ONLY), VARIANTS)
    assert [capture.key.num_reqs for capture in plan.captures[::2]] == [1, 2, 4, 8, 16, 24]
    assert plan.num_first == 2 * 4
    assert [capture.key.tail for capture in plan.captures] == [Sample(GREEDY), Sample(FULL)] * 6
    wide = CapturePlan.make(dispatcher(CUDAGraphMode.FULL_DECODE_ONLY, sizes=[3, 12, 16, 20]), VARIANTS)
    assert [capture.key.num_reqs for capture in wide.captures[::2]] == [3, 16, 12, 20]


def test_fewer_are_captured_at_the_start_where_a_late_one_loses_little() -> None:
    usual = CapturePlan.make(dispatcher(CUDAGraphMode.FULL_DECODE_ONLY), VARIANTS)
    few = CapturePlan.make(dispatcher(CUDAGraphMode.FULL_DECODE_ONLY), VARIANTS, first_tokens=1)
    assert few.num_first == 2 and [capture.key.num_tokens for capture in few.captures[:2]] == [1, 1]
    assert set(few.captures) == set(usual.captures)


def test_every_valid_key_is_there_once_with_the_tails_that_it_can_have() -> None:
    graphs = dispatcher(CUDAGraphMode.FULL_AND_PIECEWISE, decode_query_len=4, captures_prompts=True)
    plan = CapturePlan.make(graphs, VARIANTS)
    assert len(set(plan.captures)) == len(plan.captures)
    tails = {(key.uniform_query_len, key.tail) for _, key in plan.captures}
    assert tails == {(0, None), *((1, Sample(one)) for one in VARIANTS), *((4, Verify(one)) for one in VARIANTS)}
    kinds = {(mode, key.num_tokens, key.uniform_query_len, key.is_prompt) for mode, key in plan.captures}
    assert kinds == {(mode, key.num_tokens, key.uniform_query_len, key.is_prompt) for mode, key in graphs.valid_keys()}


def test_small_steps_with_adapters_are_captured_at_the_start_and_the_others_behind_all() -> None:
    graphs = dispatcher(CUDAGraphMode.FULL_AND_PIECEWISE)
    without, with_lora = CapturePlan.make(graphs, VARIANTS), CapturePlan.make(graphs, VARIANTS, has_lora=True)
    assert len(set(with_lora.captures)) == len(with_lora.captures) == 2 * len(without.captures)
    assert [one for one in with_lora.captures if not one.key.has_lora] == list(without.captures)
    first = with_lora.captures[without.num_first : with_lora.num_first]
    assert first and all(
        key.has_lora and key.num_tokens <= 8 and key.tail in (None, Sample(GREEDY)) for _, key in first
    )
    assert {key.num_tokens for _, key in first} == {1, 2, 4, 8}
    assert all(
        key.has_lora for _, key in with_lora.captures[with_lora.num_first + len(without.captures) - without.num_first :]
    )


def test_it_is_readable() -> None:
    graphs = dispatcher(CUDAGraphMode.FULL_AND_PIECEWISE, sizes=[8, 16], decode_query_len=2, captures_prompts=True)
    assert str(CapturePlan.make(graphs, [GREEDY], has_lora=True)).splitlines() == [
        "at the start:",
        "FULL: 8 tokens in 8 rows of 1: sample greedy",
        "FULL: 8 tokens in 4 rows of 2: verify greedy",
        "PIECEWISE: 8 tokens",
        "FULL: 8 tokens in 8 rows of 1 with adapters: sample greedy",
        "FULL: 8 tokens in 4 rows of 2 with adapters: verify greedy",
        "PIECEWISE: 8 tokens with adapters",
        "in idle moments:",
        *[
            "FULL: 16 tokens in 16 rows of 1: sample greedy",
            "FULL: 16 tokens in 8 rows of 2: verify greedy",
            "PIECEWISE: 16 tokens",
            "FULL: a prompt of 16 tokens",
        ],
        "FULL: 16 tokens in 16 rows of 1 with adapters: sample greedy",
        "FULL: 16 tokens in 8 rows of 2 with adapters: verify greedy",
        "PIECEWISE: 16 tokens with adapters",
        "FULL: a prompt of 16 tokens with adapters",
    ]


@pytest.mark.parametrize("mode", [CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE])
def test_working_it_off_captures_all_of_it_once_and_says_when_it_is_done(
    mode: CUDAGraphMode, caplog: pytest.LogCaptureFixture
) -> None:
    runner = make_runner(num_blocks=128)
    graphs = runner.use_graphs(GraphDispatcher(mode, max_num_seqs=8, max_num_tokens=64), FakeGraphRecorder())
    plan = CapturePlan.make(graphs.dispatcher, VARIANTS)
    queue, waits = CaptureQueue(plan, graphs, lambda: waits.append(1)), []
    queue.capture_first({})
    assert len(graphs.full) + len(graphs.pieces) == plan.num_first and len(waits) == 1
    later = plan.captures[plan.num_first :]
    if later:
        graphs.warm_up(*later[0])  # a step has come first
    with caplog.at_level("INFO", "pelton"):
        while queue.capture_next():
            assert "All graphs" not in caplog.text
        assert not queue.capture_next()
    assert caplog.messages == [f"All graphs are captured: {len(plan.captures)}."]
    assert all(graphs.has(*capture) for capture in plan.captures)
    assert len(graphs.full) + len(graphs.pieces) == len(plan.captures)
    assert len(waits) == max(len(later), 1)
