"""The rules of scheduling: budget, order, chunks, victims, overlap, slots, waiting, failures."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pelton.config import SchedulerConfig
from pelton.errors import EngineError, NotSupportedError, QueueFullError, RequestError
from pelton.messages.outputs import EventType, FinishReason, LogprobColumns
from pelton.messages.request import PoolingParams
from pelton.messages.step import ModelOutput
from pelton.sampling.error_codes import ERROR_MESSAGES, NOTHING_ALLOWED
from pelton.sampling_params import StructuredOutputsParams
from pelton.testing.fake_connector import FakeConnector
from pelton.testing.fake_grammar import FakeGrammar, FakeGrammarSource
from pelton.testing.fake_model import FakeModel
from pelton.testing.fake_proposer import FakeProposer
from pelton.testing.kv_specs import window_spec
from pelton.testing.scheduler import Harness, make_request
from pelton_plugins.scheduler.policies import FCFSPolicy, PriorityPolicy
from pelton_plugins.scheduler.request import RequestState
from pelton_plugins.scheduler.slots import SlotPool

OVERLAPS = pytest.mark.parametrize("overlap", [1, 2, 3])


def rows(harness: Harness) -> dict[str, int]:
    """Request id to tokens in the newest step."""
    output = harness.executor.outputs[-1]
    names = {slot: state.new.request_id for slot, state in harness.executor.store.slots.items()}
    return {names[slot]: count for slot, count in zip(output.slots, output.num_scheduled, strict=True)}


# Budget and order.


def test_running_requests_come_before_waiting_ones():
    harness = Harness(max_num_batched_tokens=4)
    harness.add(make_request("a", 3, 8))
    harness.step()
    harness.add(make_request("b", 8, 2))
    harness.step()
    assert rows(harness) == {"a": 1, "b": 3}  # b gets what a leaves
    harness.run_and_check()


def test_a_request_added_in_mid_run_joins_at_the_next_step_and_may_finish_first():
    harness = Harness()
    harness.add(make_request("old", 5, 20))
    harness.step()
    harness.add(make_request("new", 5, 2))
    harness.step()
    assert "new" in rows(harness)
    harness.step()
    assert harness.reason("new") is FinishReason.LENGTH and harness.reason("old") is None
    harness.run_and_check()


def test_max_num_seqs_bounds_a_step_and_the_rest_waits():
    harness = Harness(max_num_seqs=2)
    for name in "abc":
        harness.add(make_request(name, 3, 2))
    harness.step()
    assert set(rows(harness)) == {"a", "b"}
    stats = harness.scheduler.take_stats()
    assert (stats.num_running_reqs, stats.num_waiting_reqs) == (2, 1)
    harness.run_and_check()


def test_chunks_of_a_prompt_are_cut_by_the_threshold_and_only_the_last_samples():
    harness = Harness(config=SchedulerConfig(long_prefill_token_threshold=8))
    harness.add(make_request("a", 18, 1))
    harness.run_and_check()
    assert [output.num_scheduled for output in harness.executor.outputs] == [[8], [8], [2]]
    assert [output.samples for output in harness.executor.outputs] == [[False], [False], [True]]


@OVERLAPS
def test_few_prompt_tokens_ride_along_with_rows_that_decode(overlap):
    config = SchedulerConfig(max_mixed_prefill_tokens=4)
    harness = Harness(config=config, max_num_batched_tokens=16, max_steps_in_flight=overlap)
    harness.add(make_request("long", 20, 12))
    for _ in range(3):
        harness.step()
    assert [output.num_scheduled for output in harness.executor.outputs][:3] == [[16], [4], [1]]  # alone: no bound
    harness.add(make_request("a", 6, 2))
    harness.add(make_request("b", 7, 1))
    harness.run_and_check()
    later = [output.num_scheduled for output in harness.executor.outputs[2:]]
    assert [counts for counts in later if sum(counts) > 3] == [[1, 4], [1, 2, 2], [1, 1, 4]]


def test_the_last_token_of_the_budget_goes_to_a_row():
    """Where the row before it takes a block, too."""
    harness = Harness(max_num_seqs=2, max_num_batched_tokens=2)
    for name in "ab":
        harness.add(make_request(name, 1, 20))
    harness.run_and_check()
    assert {tuple(output.num_scheduled) for output in harness.executor.outputs} == {(1, 1)}


def test_chunks_behind_a_long_context_are_smaller():
    harness = Harness(max_model_len=320, num_blocks=100, max_num_batched_tokens=64, context_tokens=64)
    harness.add(make_request("long", 300, 1))
    harness.run_and_check()
    # At 64 tokens of context one costs two, and no chunk has fewer than 16.
    assert [output.num_scheduled for output in harness.executor.outputs][:6] == [[64], [32], [25], [22], [19], [18]]
    assert min(counts[0] for counts in (output.num_scheduled for output in harness.executor.outputs[:-1])) == 16


def test_a_chunk_of_one_token_takes_its_part_of_the_bound():
    config = SchedulerConfig(max_mixed_prefill_tokens=17)
    harness = Harness(config=config, max_num_batched_tokens=64)
    harness.add(make_request("decode", 3, 60))
    for _ in range(32):  # what comes later is no burst
        harness.step()
    for name in "abc":
        harness.add(make_request(name, 16, 1))
    harness.run_and_check()
    later = [output.num_scheduled for output in harness.executor.outputs[32:]]
    assert later[:3] == [[1, 1, 16], [1, 15, 2], [1, 14]]  # and not one of each that waits


def test_several_chunks_share_what_their_contexts_leave():
    config = SchedulerConfig(max_mixed_prefill_tokens=40)
    harness = Harness(config=config, max_num_batched_tokens=64, context_tokens=64)
    harness.add(make_request("decode", 3, 30))
    harness.step()
    harness.add(make_request("a", 60, 1))
    harness.add(make_request("b", 60, 1))
    harness.run_and_check()
    later = [output.num_scheduled for output in harness.executor.outputs[1:]]
    assert later[:2] == [[1, 40], [1, 20, 8]]  # 20 behind 40 cost 32 of 40


@OVERLAPS
def test_short_remainders_come_beyond_the_bound_until_the_step_is_full(overlap):
    config = SchedulerConfig(max_mixed_prefill_tokens=8)
    harness = Harness(config=config, max_num_batched_tokens=16, max_steps_in_flight=overlap)
    harness.add(make_request("decode", 3, 12))
    harness.step()
    harness.add(make_request("long", 20, 1))
    for name in "ab":
        harness.add(make_request(name, 4, 1))  # half of the bound
    harness.add(make_request("longer", 5, 1))
    harness.run_and_check()
    later = [output.num_scheduled for output in harness.executor.outputs if output.max_query_len > 1][1:]
    # Beside two chunks of the long one, which does not keep them from their first token; the last has to wait for its turn.
    assert later == [[1, 8, 4], [1, 8, 4], [1, 4, 4]]


@OVERLAPS
@pytest.mark.parametrize(
    "num_steps_before, lengths, expected",
    [
        pytest.param(1, [10] * 20, [1, *[10] * 6], id="the-engine-was-idle-and-whole-prompts-fill-the-step"),
        pytest.param(1, [10] * 3, [1, 10, 10, 10], id="three-are-one"),
        pytest.param(1, [30, *[10] * 3], [1, 30, 10, 10, 10], id="longer-than-the-bound"),
        pytest.param(1, [70, *[10] * 3], [1, 8, 10, 10, 10], id="one-that-is-longer-than-a-step-keeps-to-the-bound"),
        pytest.param(1, [10] * 2, [1, 8], id="two-are-none"),
        pytest.param(32, [10] * 20, [1, 8], id="32-steps-later-they-are-none"),
        pytest.param(
            1, [63] * 33, [1, 8], id="more-than-32-steps-compute"
        ),  # 2,079 tokens; a step has 63 beside the row
        pytest.param(1, [63] * 32, [1, 63], id="as-much-as-32-steps-compute"),
    ],
)
def test_a_burst_is_taken_in_full_steps(overlap, num_steps_before, lengths, expected):
    config = SchedulerConfig(max_mixed_prefill_tokens=8)
    harness = Harness(
        config=config, max_num_batched_tokens=64, prefix_caching=False, num_blocks=800, max_num_seqs=64,
        max_steps_in_flight=overlap,
    )  # fmt: skip
    harness.add(make_request("decode", 3, 60))
    while len(harness.executor.outputs) < num_steps_before:
        harness.step()
    before = len(harness.executor.outputs)
    for index, length in enumerate(lengths):
        harness.add(make_request(str(index), length, 1))
    harness.step()
    assert harness.executor.outputs[before].num_scheduled == expected
    harness.run_and_check()


@pytest.mark.parametrize(
    "context_tokens, expected",
    [(0, [[1, 6, 6]]), (64, [[1, 6, 4], [1, 2]])],
)
def test_what_is_short_counts_what_is_cached_and_what_its_context_costs(context_tokens, expected):
    config = SchedulerConfig(max_mixed_prefill_tokens=16)
    harness = Harness(config=config, max_model_len=320, num_blocks=200, context_tokens=context_tokens)
    shared = list(range(1, 65))
    harness.add(make_request("decode", shared, 20))
    harness.step()
    harness.step()
    for index in range(2):
        harness.add(make_request(str(index), [*shared, *range(100 + 6 * index, 106 + 6 * index)], 1))
    harness.run_and_check()
    assert [output.num_scheduled for output in harness.executor.outputs if output.max_query_len > 1][1:] == expected


def test_prompts_run_whole_beside_rows_that_decode_where_none_may_be_cut():
    config = SchedulerConfig(max_mixed_prefill_tokens=4, enable_chunked_prefill=False)
    harness = Harness(config=config, max_num_batched_tokens=16)
    harness.add(make_request("a", 6, 9))
    harness.step()
    harness.add(make_request("b", 12, 1))
    harness.run_and_check()
    assert [1, 12] in [output.num_scheduled for output in harness.executor.outputs]


@OVERLAPS
def test_running_requests_get_a_token_each_step_while_a_long_prompt_is_chunked(overlap):
    harness = Harness(max_num_batched_tokens=8, max_steps_in_flight=overlap)
    harness.add(make_request("a", 2, 30))
    harness.add(make_request("b", 2, 30))
    harness.step()
    harness.add(make_request("long", 50, 2))
    for _ in range(8):
        harness.step()
        assert rows(harness)["a"] == rows(harness)["b"] == 1
    harness.run_and_check()


def test_a_long_prompt_of_higher_rank_leaves_a_token_for_each_running_request():
    harness = Harness(max_num_batched_tokens=6, policy=PriorityPolicy())
    for name in "abc":
        harness.add(make_request(name, 2, 20, priority=5))
    harness.step()
    harness.add(make_request("long", 30, 2, priority=0))
    for _ in range(6):
        harness.step()
        assert rows(harness) == {"a": 1, "b": 1, "c": 1, "long": 3}
    harness.run_and_check()


def test_rows_with_one_token_come_first_and_columns_agree():
    harness = Harness()
    harness.add(make_request("a", 3, 9))
    harness.step()
    harness.add(make_request("b", 7, 2))
    harness.add(make_request("one", [9], 2))
    output = harness.launch()
    assert output.num_scheduled == [1, 1, 7] and output.samples == [True] * 3
    assert (output.max_query_len, output.total_num_scheduled_tokens) == (7, 9)
    assert output.max_seq_len == 7
    harness.run_and_check()


def test_without_chunked_prefill_a_prompt_waits_for_a_step_with_room():
    harness = Harness(config=SchedulerConfig(enable_chunked_prefill=False), max_num_batched_tokens=10)
    harness.add(make_request("a", 6, 3))
    harness.add(make_request("b", 6, 3))
    harness.step()
    assert rows(harness) == {"a": 6}
    harness.step()
    assert rows(harness) == {"a": 1, "b": 6}
    harness.run_and_check()


def test_without_chunked_prefill_a_prompt_over_the_budget_is_refused():
    harness = Harness(config=SchedulerConfig(enable_chunked_prefill=False), max_num_batched_tokens=10)
    with pytest.raises(RequestError, match="11 tokens; without chunked prefill at most 10"):
        harness.add(make_request("a", 11))


def test_without_chunked_prefill_a_preempted_request_that_outgrew_a_step_still_comes_back():
    config = SchedulerConfig(enable_chunked_prefill=False)
    harness = Harness(config=config, max_num_batched_tokens=9, num_blocks=8, prefix_caching=False)
    harness.add(make_request("a", 8, 14))
    harness.add(make_request("b", 8, 14))
    harness.run_and_check()
    assert EventType.PREEMPTED in harness.events("b")
    resumed = [new for output in harness.executor.outputs for new in output.new][-1]
    assert resumed.request_id == "b" and len(resumed.token_ids) > 9


# Blocks and victims.


@OVERLAPS
def test_a_waiting_request_never_preempts(overlap):
    harness = Harness(num_blocks=5, max_steps_in_flight=overlap)  # 4 usable: 16 tokens
    harness.add(make_request("a", 12, 4))
    harness.add(make_request("b", 9, 2))
    harness.step()
    assert harness.scheduler.take_stats().num_waiting_reqs == 1
    harness.run_and_check()
    assert EventType.PREEMPTED not in harness.events("a") + harness.events("b")


def test_the_head_of_the_queue_that_does_not_fit_is_not_passed():
    harness = Harness(num_blocks=6)
    harness.add(make_request("a", 12, 4))
    harness.step()
    harness.add(make_request("big", 12, 2))
    harness.add(make_request("small", 2, 1))
    harness.step()
    assert set(rows(harness)) == {"a"}
    harness.run_and_check()


@OVERLAPS
def test_the_latest_arrival_is_the_victim_and_comes_back_with_its_tokens(overlap):
    harness = Harness(num_blocks=7, max_steps_in_flight=overlap)
    harness.add(make_request("first", 8, 12))
    harness.add(make_request("second", 8, 8))
    harness.run()
    assert EventType.PREEMPTED in harness.events("second") and EventType.PREEMPTED not in harness.events("first")
    for name in harness.requests:
        harness.check_request(name)
    harness.check_sound()


def test_the_victim_goes_to_the_front_of_the_queue_frees_all_and_is_counted():
    harness = Harness(num_blocks=7, prefix_caching=False)
    harness.add(make_request("first", 8, 12))
    harness.add(make_request("second", 8, 12))
    harness.step()
    harness.add(make_request("third", 4, 4))
    preempted = 0
    while not preempted:
        harness.step()
        preempted = harness.scheduler.take_stats().num_preemptions
    assert preempted == 1 and set(rows(harness)) == {"first"}
    assert harness.scheduler._table.waiting.peek().request_id == "second"
    assert all(not ids for ids in harness.kv.block_ids("second"))
    resumed = next(
        (output for output in iter(lambda: (harness.step(), harness.executor.outputs[-1])[1], None) if output.new), None
    )
    assert resumed.new[0].request_id == "second" and resumed.new[0].num_computed_tokens == 0
    assert resumed.new[0].token_ids == harness.requests["second"].prompt_token_ids + harness.tokens("second")[:-1]
    harness.run_and_check()


def test_priority_serves_the_lower_value_first_and_ties_by_arrival():
    harness = Harness(max_num_seqs=1, policy=PriorityPolicy())
    for name, priority in (("late", 5), ("tie1", 1), ("tie2", 1), ("early", -3)):
        harness.add(make_request(name, 3, 1, priority=priority))
    order = []
    while harness.scheduler.has_unfinished_requests():
        order += [output.request_id for output in harness.step()]
    assert order == ["early", "tie1", "tie2", "late"]


def test_the_victim_by_priority_is_the_highest_value():
    harness = Harness(num_blocks=7, policy=PriorityPolicy())
    harness.add(make_request("unimportant", 8, 10, priority=7))
    harness.add(make_request("important", 8, 10, priority=1))
    harness.run_and_check()
    assert EventType.PREEMPTED in harness.events("unimportant")
    assert EventType.PREEMPTED not in harness.events("important")


def test_a_request_that_fills_the_pool_alone_is_cut_with_length():
    harness = Harness(num_blocks=4, max_steps_in_flight=2)  # 12 tokens
    harness.add(make_request("a", 5, 50))
    harness.run()
    tokens, _ = harness.expected("a")
    assert harness.reason("a") is FinishReason.LENGTH
    assert harness.tokens("a") == tokens[:8]  # 12 slots hold 5 + 7; the eighth token was sampled by the twelfth
    harness.check_empty()


def test_64_requests_with_one_prefix_in_one_step_compute_it_once():
    harness = Harness(num_blocks=400, max_num_seqs=64, max_num_batched_tokens=2048)
    prefix = [1 + index % 40 for index in range(32)]
    for index in range(64):
        harness.add(make_request(f"r{index}", [*prefix, index % 50], 2))
    output = harness.launch()
    assert len(output.slots) == 64 and output.total_num_scheduled_tokens == 33 + 63
    harness.run_and_check()
    stats_hits = [harness.outputs[f"r{index}"][0].num_cached_tokens for index in range(64)]
    assert stats_hits == [0] + [32] * 63


@pytest.mark.parametrize(
    "limit", [{"max_num_batched_tokens": 7}, {"config": SchedulerConfig(long_prefill_token_threshold=7)}]
)
def test_a_block_that_one_token_fills_is_found_from_the_next_step_on(limit):
    """Kernels may write and read a step of one-token rows in one launch: no row reads what another brings."""
    harness = Harness(**limit)
    prefix = [*range(1, 9)]
    harness.add(make_request("a", prefix, 4))
    harness.launch()
    harness.retire()
    harness.add(make_request("b", [*prefix, 5], 4))
    output = harness.launch()  # a's eighth token fills its second block
    assert output.num_scheduled[0] == 1 and output.new[0].num_computed_tokens == 4
    harness.run_and_check()
    harness.add(make_request("c", [*prefix, 6], 4))
    harness.run_and_check()
    assert harness.outputs["c"][0].num_cached_tokens == 8


def test_a_block_that_a_known_sampled_token_fills_is_found_from_the_next_step_on():
    harness = Harness()  # one step at a time: the token is known when its KV is written
    harness.add(make_request("a", 5, 8))
    for _ in range(3):
        harness.step()
    tokens = [*harness.requests["a"].prompt_token_ids, *harness.tokens("a")]
    harness.add(make_request("b", [*tokens, 3], 2))
    output = harness.launch()
    assert len(tokens) == 8 and output.num_scheduled[0] == 1 and output.new[0].num_computed_tokens == 4
    harness.run_and_check()


def test_prefix_queries_and_hits_are_counted_once_a_request():
    harness = Harness(num_blocks=7)
    harness.add(make_request("a", [*range(1, 9)], 12))
    harness.add(make_request("b", [*range(1, 9)], 12))
    queries = hits = requests = preemptions = 0
    while harness.scheduler.has_unfinished_requests():
        harness.step()
        stats = harness.scheduler.take_stats()
        queries, hits = queries + stats.prefix_cache_queries, hits + stats.prefix_cache_hits
        requests, preemptions = requests + stats.prefix_cache_requests, preemptions + stats.num_preemptions
    assert preemptions > 0
    assert (queries, hits, requests) == (16, 4, 2)  # the last of b's two equal blocks is computed again


def test_the_same_prompt_with_another_salt_finds_nothing():
    harness = Harness()
    for name, salt in (("a", "x"), ("b", "y"), ("c", "x")):
        harness.add(make_request(name, [*range(1, 12)], 1, cache_salt=salt))
    harness.run_and_check()
    assert [harness.outputs[name][0].num_cached_tokens for name in "abc"] == [0, 0, 8]


def test_a_whole_conversation_is_found_again_with_sampled_tokens():
    harness = Harness(max_steps_in_flight=2)
    harness.add(make_request("a", 7, 12))
    harness.run()
    harness.add(make_request("b", harness.requests["a"].prompt_token_ids + harness.tokens("a") + [3], 3))
    harness.run_and_check()
    assert harness.outputs["b"][0].num_cached_tokens == 16


# Overlap.


def test_steps_in_flight_are_numbered_and_bounded():
    harness = Harness(max_steps_in_flight=2)
    harness.add(make_request("a", 3, 9))
    assert [harness.launch().step_id, harness.launch().step_id] == [0, 1]
    assert harness.launch() is None
    harness.run_and_check()


@OVERLAPS
def test_a_length_stop_wastes_no_row(overlap):
    harness = Harness(max_steps_in_flight=overlap)
    harness.add(make_request("a", 3, 5))
    harness.add(make_request("b", 4, None))
    harness.run_and_check()
    assert harness.executor.num_computed_tokens == (3 + 4) + 127


@pytest.mark.parametrize("overlap, wasted", [(1, 0), (2, 1)])
def test_eos_wastes_one_token_with_overlap_on(overlap, wasted):
    harness = Harness(max_steps_in_flight=overlap, fake_model=FakeModel(eos_every=6))
    harness.add(make_request("a", 3, 100, eos_token_ids=[0]))
    harness.run_and_check()
    assert harness.reason("a") is FinishReason.STOP
    assert harness.executor.num_computed_tokens == 3 + len(harness.tokens("a")) - 1 + wasted


def test_a_preempted_request_keeps_the_token_in_flight_and_resumes_when_nothing_is_pending():
    harness = Harness(num_blocks=7, max_steps_in_flight=2, prefix_caching=False)
    harness.add(make_request("first", 8, 14))
    harness.add(make_request("second", 8, 14))
    record = harness.scheduler._table.requests["second"]
    while not harness.scheduler.take_stats().num_preemptions:
        harness.launch() or harness.retire()
    pending, known = record.num_pending, len(record.token_ids)
    assert pending == 1 and record.slot == -1
    harness.retire()
    assert (record.num_pending, len(record.token_ids)) == (0, known + 1)
    harness.run_and_check()


def test_a_preempted_request_may_finish_with_the_token_in_flight():
    harness = Harness(num_blocks=6, max_steps_in_flight=2, prefix_caching=False)
    harness.add(make_request("first", 8, 12))
    harness.add(make_request("second", 8, 2))
    harness.launch()  # both prompts
    record = harness.scheduler._table.requests["second"]
    harness.scheduler._table.preempt(record)
    harness.scheduler._table.requests["second"].max_total_tokens = 9
    harness.retire()
    assert harness.reason("second") is FinishReason.LENGTH and len(harness.tokens("second")) == 1
    harness.run()
    harness.check_empty()


def test_results_are_found_through_the_step_and_not_the_slot():
    harness = Harness(max_steps_in_flight=2, max_num_seqs=1)
    harness.add(make_request("a", 3, 20))
    harness.add(make_request("b", 3, 3))
    harness.launch()
    harness.launch()
    harness.scheduler.finish_requests(["a"], FinishReason.ABORT)
    harness.retire()
    assert harness.launch().new[0].slot == 0  # b has a's slot while a's step is open
    harness.run()
    assert harness.tokens("a") == []
    harness.check_request("b")
    harness.check_empty()


def test_without_order_blocks_and_slots_wait_for_their_fence():
    harness = Harness(max_steps_in_flight=2, max_num_seqs=1, steps_are_ordered=False, num_blocks=4)
    harness.add(make_request("a", 5, 20))
    harness.add(make_request("b", 5, 2))
    harness.launch()
    harness.launch()
    free = harness.kv.num_free_blocks
    harness.scheduler.finish_requests(["a"], FinishReason.ABORT)
    harness.retire()
    assert harness.kv.num_free_blocks == free and harness.launch() is None
    harness.retire()
    assert harness.kv.num_free_blocks == harness.kv.num_usable_blocks
    harness.run()
    harness.check_request("b")
    harness.check_empty()


def test_ordered_steps_release_at_once():
    harness = Harness(max_steps_in_flight=2)
    harness.add(make_request("a", 5, 20))
    harness.launch()
    harness.scheduler.finish_requests(["a"], FinishReason.ABORT)
    assert harness.kv.num_free_blocks == harness.kv.num_usable_blocks
    harness.run()
    harness.check_empty()


def test_a_freed_slot_is_told_once_and_before_it_is_used_again():
    harness = Harness(max_num_seqs=1)
    harness.add(make_request("a", 3, 1))
    harness.add(make_request("b", 3, 1))
    harness.run_and_check()
    assert [output.freed_slots for output in harness.executor.outputs] == [[], [0]]


# Endings.


def test_stop_ids_stay_in_the_output_and_are_named():
    harness = Harness()
    probe = harness.fake_model.generate(make_request("a", 4, 9), max_model_len=128)[0]
    harness.add(make_request("a", 4, 9, stop_token_ids=[probe[2]]))
    harness.run_and_check()
    last = harness.outputs["a"][-1]
    assert harness.tokens("a")[-1] == probe[2] and last.stop_reason == probe[2]


def test_eos_has_no_stop_reason_and_ignore_eos_goes_on():
    harness = Harness(fake_model=FakeModel(eos_every=5))
    harness.add(make_request("a", 4, 60, eos_token_ids=[0]))
    harness.add(make_request("b", harness.requests["a"].prompt_token_ids, 60, eos_token_ids=[0], ignore_eos=True))
    harness.run_and_check()
    assert (harness.reason("a"), harness.outputs["a"][-1].stop_reason) == (FinishReason.STOP, None)
    assert harness.tokens("a")[-1] == 0
    assert harness.reason("b") is FinishReason.LENGTH and len(harness.tokens("b")) == 60


def test_a_prompt_leaves_room_for_one_token():
    harness = Harness(max_model_len=20)
    harness.add(make_request("fits", 19, 1))
    with pytest.raises(
        RequestError, match=r"has 20 tokens; at most 19 fit the context of 20 with one token to generate"
    ):
        harness.add(make_request("too-long", 20, 1))
    harness.run_and_check()


def test_max_model_len_ends_with_length():
    harness = Harness(max_model_len=20)
    harness.add(make_request("a", 15, None))
    harness.run_and_check()
    assert harness.reason("a") is FinishReason.LENGTH and len(harness.tokens("a")) == 5


def test_no_stop_before_min_tokens():
    harness = Harness(fake_model=FakeModel(eos_every=2))
    harness.add(make_request("a", 4, 60, eos_token_ids=[0], min_tokens=9))
    harness.run_and_check()
    assert len(harness.tokens("a")) > 9 or 0 not in harness.tokens("a")[:9]


def test_a_deadline_ends_a_running_and_a_waiting_request_with_its_error():
    harness = Harness(max_num_seqs=1)
    harness.add(make_request("running", 3, 90, timeout_s=5.0))
    harness.add(make_request("waiting", 3, 90, timeout_s=6.0))
    harness.add(make_request("none", 3, 2))
    harness.step()
    assert harness.scheduler.next_deadline() == 5.0
    harness.scheduler.expire(4.9)
    assert harness.reason("running") is None
    harness.scheduler.expire(7.0)
    harness.take_outputs()
    assert harness.outputs["waiting"][-1].error.kind == harness.outputs["running"][-1].error.kind
    assert harness.outputs["running"][-1].error.kind == "DeadlineExceededError"
    assert harness.scheduler.next_deadline() is None
    harness.run()
    harness.check_request("none")
    harness.check_empty()


def test_a_stop_string_ends_without_an_output():
    harness = Harness(max_steps_in_flight=2)
    harness.add(make_request("a", 3, 90))
    harness.step()
    harness.scheduler.finish_requests(["a"], FinishReason.STOP)
    harness.run()
    assert harness.reason("a") is None
    harness.check_empty()


def test_admission_limits_refuse_with_queue_full():
    harness = Harness(config=SchedulerConfig(max_num_queued_reqs=2), max_num_seqs=1)
    harness.add(make_request("a", 3, 9))
    harness.step()
    harness.add(make_request("b", 3, 1))
    harness.add(make_request("c", 3, 1))
    with pytest.raises(QueueFullError, match="2 requests wait already; at most 2") as caught:
        harness.add(make_request("d", 3, 1))
    assert caught.value.param == "max_num_queued_reqs"
    harness.scheduler.finish_requests(["b"], FinishReason.ABORT)
    harness.add(make_request("d", 3, 1))
    harness.run()
    harness = Harness(config=SchedulerConfig(max_num_queued_tokens=10))
    harness.add(make_request("a", 8))
    with pytest.raises(
        QueueFullError, match="8 prompt tokens wait already and this request has 3; at most 10"
    ) as caught:
        harness.add(make_request("b", 3))
    assert caught.value.param == "max_num_queued_tokens"
    harness.add(make_request("c", 2))  # as many as may wait
    harness.step()
    harness.add(make_request("b", 3))
    harness.run_and_check()


def test_a_prompt_of_more_tokens_than_may_wait_is_taken_when_nothing_waits():
    """Told to try again later, it would never come in."""
    harness = Harness(config=SchedulerConfig(max_num_queued_tokens=10))
    harness.add(make_request("a", 3))
    with pytest.raises(QueueFullError, match="Try again later"):
        harness.add(make_request("long", 11))
    harness.step()
    harness.add(make_request("long", 11))
    with pytest.raises(QueueFullError, match="11 prompt tokens wait already and this request has 1; at most 10"):
        harness.add(make_request("b", 1))
    harness.run_and_check()


@pytest.mark.parametrize(
    "prompt, message",
    [
        pytest.param([], "prompt is empty", id="empty"),
        pytest.param(128, "at most 127 fit the context of 128", id="context"),
        pytest.param(40, "needs 11 blocks of KV cache; there are 9", id="pool"),
    ],
)
def test_refuses_prompts_that_can_never_run(prompt, message):
    harness = Harness(num_blocks=10)
    with pytest.raises(RequestError, match=message) as caught:
        harness.add(make_request("a", prompt))
    assert caught.value.param == "prompt"


def test_refuses_an_id_in_use_and_what_nobody_offers():
    harness = Harness()
    harness.add(make_request("a", 3))
    with pytest.raises(RequestError, match="in use by an unfinished request"):
        harness.add(make_request("a", 4))
    with pytest.raises(NotSupportedError, match="no plugin offers one"):
        harness.add(make_request("b", 3, structured_outputs=StructuredOutputsParams(regex="3")))
    with pytest.raises(NotSupportedError, match="no adapters"):
        harness.add(make_request("c", 3, adapter_id=4))
    harness.run_and_check()


# Waiting for something else.


def test_a_request_waiting_for_its_grammar_blocks_nobody_and_joins_when_it_is_there():
    source = FakeGrammarSource(is_held=True)
    harness = Harness(grammar_source=source, max_steps_in_flight=2)
    harness.add(make_request("held", 3, 8, eos_token_ids=[0], structured_outputs=StructuredOutputsParams(regex="4")))
    harness.add(make_request("free", 3, 8))
    harness.step()
    assert rows(harness) == {"free": 1} or rows(harness) == {"free": 3}
    assert harness.scheduler.take_stats().num_deferred_reqs == 1
    source.release()
    harness.run()
    grammar = FakeGrammar(4, 50, (0,))
    expected = harness.fake_model.generate(harness.requests["held"], max_model_len=128, grammar=grammar)
    assert (harness.tokens("held"), harness.reason("held")) == expected
    harness.check_request("free")
    harness.check_empty()


def test_a_constraint_that_is_not_valid_ends_its_request_only():
    harness = Harness(grammar_source=FakeGrammarSource())
    harness.add(make_request("bad", 3, structured_outputs=StructuredOutputsParams(regex="x")))
    harness.add(make_request("good", 3))
    harness.run()
    assert harness.outputs["bad"][-1].error.kind == "RequestError"
    assert harness.outputs["bad"][-1].error.status == 400
    harness.check_request("good")
    harness.check_empty()


def test_an_aborted_request_never_waits_for_its_grammar():
    source = FakeGrammarSource(is_held=True)
    harness = Harness(grammar_source=source)
    harness.add(make_request("a", 3, structured_outputs=StructuredOutputsParams(regex="2")))
    harness.step()
    ((job, _),) = source._held
    harness.scheduler.finish_requests(["a"], FinishReason.ABORT)
    harness.run()
    assert job.cancelled(), "nobody waits for this grammar: it is not to be compiled"
    source.release()
    assert harness.reason("a") is FinishReason.ABORT
    harness.check_empty()


@OVERLAPS
def test_grammar_rows_run_beside_others_in_every_step(overlap):
    harness = Harness(grammar_source=FakeGrammarSource(), max_steps_in_flight=overlap)
    harness.add(make_request("g", 3, 9, eos_token_ids=[0], structured_outputs=StructuredOutputsParams(regex="6")))
    harness.add(make_request("p", 3, 9))
    harness.run()
    harness.check_request("p")
    expected = harness.fake_model.generate(harness.requests["g"], max_model_len=128, grammar=FakeGrammar(6, 50, (0,)))
    assert (harness.tokens("g"), harness.reason("g")) == expected
    assert sum(bool(output.grammar_rows) for output in harness.executor.outputs) <= 7 + overlap
    harness.check_empty()


def test_a_request_without_a_side_slot_waits_and_others_go_on():
    harness = Harness(config=SchedulerConfig(max_side_table_seqs=1))
    harness.add(make_request("a", 3, 4, min_tokens=1))
    harness.add(make_request("b", 3, 4, min_tokens=1))
    harness.add(make_request("c", 3, 4))
    harness.step()
    assert set(rows(harness)) == {"a", "c"}
    sides = {new.request_id: new.side_slot for new in harness.executor.outputs[0].new}
    assert sides == {"a": 0, "c": -1}
    harness.run_and_check()


def test_a_request_waits_for_its_adapter_without_blocking_the_queue():
    loaded = set()
    harness = Harness(adapter_is_ready=loaded.__contains__)
    harness.add(make_request("a", 3, 4, adapter_id=7))
    harness.add(make_request("b", 3, 4))
    harness.step()
    assert set(rows(harness)) == {"b"}
    loaded.add(7)
    harness.step()
    assert set(rows(harness)) == {"a", "b"}
    harness.run_and_check()


# Failures.


def test_a_row_error_ends_one_request_and_its_blocks_are_not_found_again():
    harness = Harness(max_steps_in_flight=2)
    harness.executor.row_error = lambda name, step_id: "NaN logits" if (name, step_id) == ("a", 0) else None
    harness.add(make_request("a", [*range(1, 12)], 5))
    harness.add(make_request("b", 5, 5))
    harness.run()
    assert "NaN logits" in harness.outputs["a"][-1].error.message
    assert harness.scheduler.take_stats().num_corrupted_reqs == 1
    harness.check_request("b")
    harness.add(make_request("c", [*range(1, 12)], 5))
    harness.run()
    assert harness.outputs["c"][0].num_cached_tokens == 0
    harness.check_request("c")
    harness.check_empty()


def test_a_request_that_forbids_every_token_is_refused_and_the_blocks_that_it_found_stay():
    harness = Harness()
    prompt = [*range(1, 12)]
    harness.add(make_request("a", prompt, 3))
    harness.run()
    forbidden = ERROR_MESSAGES[NOTHING_ALLOWED]
    harness.executor.row_error = lambda name, step_id: forbidden if name == "b" else None
    harness.add(make_request("b", prompt, 3))
    harness.run()
    error = harness.outputs["b"][-1].error
    assert (error.kind, error.status, error.message) == ("RequestError", 400, forbidden)
    assert harness.scheduler.take_stats().num_corrupted_reqs == 0
    harness.add(make_request("c", prompt, 3))
    harness.run()
    assert harness.outputs["c"][0].num_cached_tokens == 8
    harness.check_empty()


def test_blocks_that_a_row_with_an_error_found_are_not_found_again():
    """NaN of a request that ended before a result told of it: who finds its blocks fails, once and not for ever."""
    harness = Harness(max_num_batched_tokens=8)
    prompt = [*range(1, 20)]
    harness.add(make_request("a", prompt, 3))
    harness.step()  # a chunk: nothing is sampled
    poisoned = set(harness.kv.block_ids("a")[0])
    harness.scheduler.finish_requests(["a"], FinishReason.ABORT)
    slots = harness.executor.store.slots

    def row_error(name, step_id):
        [table] = [row.tables[0] for row in slots.values() if row.new.request_id == name]
        return "NaN logits" if poisoned & set(table) else None

    harness.executor.row_error = row_error
    for name in "bc":
        harness.add(make_request(name, prompt, 3))
        harness.run()
    assert (harness.reason("b"), harness.outputs["b"][-1].num_cached_tokens) == (FinishReason.ERROR, 8)
    assert harness.outputs["c"][0].num_cached_tokens == 0
    harness.check_request("c")
    harness.check_empty()


def test_what_is_no_row_error_leaves_the_blocks_that_were_found():
    harness = Harness()
    prompt = [*range(1, 12)]
    for name in "abc":
        harness.add(make_request(name, prompt, 3))
        if name == "b":
            output = harness.scheduler.schedule()
            harness.executor.execute(output).result()
            harness.scheduler.update(output, ModelOutput(step_id=output.step_id, token_ids=[[]]))  # should sample
        harness.run()
    assert harness.reason("b") is FinishReason.ERROR
    assert harness.outputs["c"][0].num_cached_tokens == 8
    harness.check_request("c")


@OVERLAPS
def test_blocks_of_a_failed_step_are_computed_again_by_those_who_found_them(overlap):
    harness = Harness(max_steps_in_flight=overlap)
    prompt = [*range(1, 14)]
    harness.executor.fails = lambda step_id: "boom" if step_id == 0 else None
    harness.add(make_request("a", prompt, 3))
    harness.launch()
    harness.add(make_request("b", prompt, 3))
    harness.launch()  # with overlap b reads what the failed step should have written
    harness.run()
    assert harness.reason("a") is FinishReason.ERROR
    harness.check_request("b")
    harness.check_empty()


def test_a_result_with_the_wrong_rows_is_refused():
    harness = Harness()
    harness.add(make_request("a", 3, 3))
    output = harness.scheduler.schedule()
    result = harness.executor.execute(output).result()
    result.token_ids.append([1])
    with pytest.raises(Exception, match="Step 0 with 1 rows came back as step 0 with 2 rows"):
        harness.scheduler.update(output, result)


# Events, logprobs, windows, drafts.


def test_events_tell_when_a_request_was_queued_scheduled_and_preempted():
    harness = Harness(num_blocks=7)
    harness.clock.now = 1.0
    harness.add(make_request("a", 8, 12))
    harness.add(make_request("b", 8, 12))
    harness.clock.now = 2.0
    harness.run_and_check()
    assert harness.events("a") == [EventType.QUEUED, EventType.SCHEDULED]
    assert harness.events("b")[:3] == [EventType.QUEUED, EventType.SCHEDULED, EventType.PREEMPTED]
    first = harness.outputs["b"][0]
    assert [event.timestamp for event in first.events] == [1.0, 2.0]


@OVERLAPS
def test_prompt_logprobs_come_complete_and_once_with_the_first_token(overlap):
    harness = Harness(max_steps_in_flight=overlap, max_num_batched_tokens=4, num_blocks=7)
    harness.add(make_request("cached", [*range(1, 10)], 6))
    harness.add(make_request("a", [*range(1, 10)], 8, prompt_logprobs=0, logprobs=0))
    harness.run()
    sent = [output.prompt_logprobs for output in harness.outputs["a"] if output.prompt_logprobs is not None]
    assert len(sent) == 1 and harness.outputs["a"][0].prompt_logprobs is sent[0]
    assert [ids[0] for ids in sent[0].columns().token_ids] == [*range(2, 10)]
    assert [output.logprobs.columns().token_ids for output in harness.outputs["a"]] == [
        [[t]] for t in harness.tokens("a")
    ]
    harness.check_request("a")


@OVERLAPS
def test_window_blocks_are_given_back_while_a_request_runs(overlap):
    harness = Harness(specs=[window_spec(8, 4)], num_blocks=7, max_steps_in_flight=overlap, max_num_batched_tokens=8)
    harness.add(make_request("a", 20, 60))
    harness.run_and_check()


@pytest.mark.parametrize("mode", ["host", "device", "told"])
@OVERLAPS
def test_drafts_change_nothing_but_the_number_of_steps(overlap, mode):
    model = FakeModel(eos_every=40)
    arguments = {
        "host": {"proposer": FakeProposer(model, 3)}, "device": {"num_draft_tokens": 3}, "told": {"tells_drafts": True},
    }[mode]  # fmt: skip
    harness = Harness(fake_model=model, max_steps_in_flight=overlap, num_blocks=20, **arguments)
    accepted = drafted = 0
    for index in range(4):
        harness.add(make_request(f"r{index}", 4 + index, 30, eos_token_ids=[0]))
    while harness.scheduler.has_unfinished_requests():
        harness.step()
        stats = harness.scheduler.take_stats()
        accepted, drafted = accepted + stats.spec_num_accepted_tokens, drafted + stats.spec_num_draft_tokens
    harness.run_and_check()
    if mode != "told" or overlap == 1:  # told drafts are of use only when nothing is pending
        assert 0 < accepted < drafted


def test_the_last_token_of_a_prompt_has_no_drafts_behind_it():
    """They are made from what it samples."""
    model = FakeModel()
    harness = Harness(fake_model=model, num_draft_tokens=3, max_num_batched_tokens=8)
    harness.add(make_request("a", 9, 20))
    harness.run_and_check()
    steps = harness.executor.outputs
    assert [output.num_scheduled for output in steps[:2]] == [[8], [1]]
    assert [sum(output.num_draft) for output in steps[:3]] == [0, 0, 3]


def test_rejected_drafts_are_never_found_in_the_prefix_cache():
    model = FakeModel()
    harness = Harness(fake_model=model, block_size=2, num_draft_tokens=3, max_steps_in_flight=2)
    harness.add(make_request("a", 5, 30))
    harness.run()
    harness.add(make_request("b", harness.requests["a"].prompt_token_ids + harness.tokens("a"), 10))
    harness.run_and_check()
    assert harness.outputs["b"][0].num_cached_tokens == 34


@OVERLAPS
def test_rows_with_drafts_are_counted_and_cached_as_they_go(overlap):
    """Of what open steps compute as many tokens are unconfirmed as they have drafts, and full blocks are found before the end."""
    model = FakeModel()
    harness = Harness(fake_model=model, block_size=4, num_draft_tokens=3, max_steps_in_flight=overlap)
    harness.add(make_request("a", 5, 60))
    most = 0
    while harness.scheduler.has_unfinished_requests():
        harness.step()
        for state in harness.scheduler._table.running:
            known = state.num_tokens
            assert 0 <= state.num_unconfirmed_tokens <= 3 * overlap
            assert state.num_confirmed_tokens < known + overlap
            assert state.num_tokens_with_pending <= state.max_total_tokens
            assert state.capacity == 4 * len(state.tables[0])
            if known > 5:
                assert state.num_cached_blocks == min(state.num_computed_tokens, known) // 4
            most = max(most, state.num_cached_blocks)
    assert most > 10
    harness.run_and_check()


def test_drafts_that_a_device_did_not_find_are_not_counted(monkeypatch):
    model = FakeModel()
    harness = Harness(fake_model=model, num_draft_tokens=3, max_steps_in_flight=2)
    update, made, accepted = harness.scheduler.update, [], []

    def with_fewer(output, result):
        counts = [max(len(tokens) - 1, 0) for tokens in result.token_ids]
        result.num_draft = counts  # it found those that were right, and nothing else
        made.extend(count for count in counts if count)
        accepted.extend(counts)
        return update(output, result)

    monkeypatch.setattr(harness.scheduler, "update", with_fewer)
    for index in range(3):
        harness.add(make_request(f"r{index}", 5, 40))
    rows, by_position = [0, 0, 0], [0, 0, 0]
    while harness.scheduler.has_unfinished_requests():
        harness.step()
        stats = harness.scheduler.take_stats()
        told = stats.spec_num_drafts, stats.spec_num_draft_tokens, stats.spec_num_accepted_tokens
        rows = [sum(counts) for counts in zip(rows, told, strict=True)]
        for place, count in enumerate(stats.spec_num_accepted_by_position):
            by_position[place] += count
    assert rows == [len(made), sum(made), sum(accepted)] and len(made) > 10
    assert by_position == [sum(count > place for count in accepted) for place in range(3)]


def test_a_proposer_that_fails_costs_drafts_only():
    class Broken(FakeProposer):
        def propose(self, request_id, token_ids):
            raise ValueError("no")

    model = FakeModel()
    harness = Harness(fake_model=model, proposer=Broken(model))
    harness.add(make_request("a", 5, 5))
    harness.run_and_check()


class Scripted(FakeProposer):
    """Always proposes the same, and says who it has heard of."""

    def __init__(self, fake_model, drafts):
        super().__init__(fake_model, 3)
        self.drafts, self.known, self.num_calls = drafts, set(), 0

    def propose(self, request_id, token_ids):
        self.known.add(request_id)
        self.num_calls += 1
        return list(self.drafts)

    def finished(self, request_id):
        self.known.discard(request_id)


@OVERLAPS
def test_drafts_that_are_never_accepted_pause(overlap):
    model = FakeModel()
    proposer = Scripted(model, [0, 0, 0])  # the fake model never says 0 here
    harness = Harness(
        fake_model=model, proposer=proposer, min_acceptance_rate=0.15, max_steps_in_flight=overlap, max_model_len=400,
        num_blocks=128,
    )  # fmt: skip
    harness.add(make_request("a", 5, 300))
    drafted = num_pauses = 0
    while harness.scheduler.has_unfinished_requests():
        harness.step()
        stats = harness.scheduler.take_stats()
        drafted, num_pauses = drafted + stats.spec_num_draft_tokens, num_pauses + stats.spec_num_pauses
    harness.run_and_check()
    # 0.75 ** 7 < 0.15 ends the first try, one step each later one; 64 tokens lie between two of them.
    assert num_pauses == 1 + (300 - 7) // 65 and drafted == 3 * (7 + num_pauses - 1)


def test_a_proposer_that_finds_nothing_is_asked_more_seldom():
    model = FakeModel()
    proposer = Scripted(model, [])
    harness = Harness(fake_model=model, proposer=proposer, min_acceptance_rate=0.15, max_model_len=400, num_blocks=128)
    harness.add(make_request("a", 5, 300))
    harness.run_and_check()
    # 0.9 ** 19 < 0.15: from the 19th step on one call in 4 tokens.
    assert 19 + 280 // 4 - 2 <= proposer.num_calls <= 19 + 280 // 4 + 2


@OVERLAPS
def test_drafts_of_the_device_pause_for_all_requests_together(overlap):
    """Steps without drafts then take the fast paths; one step with drafts, and what is open by its result, ends each pause."""
    model = FakeModel()
    harness = Harness(
        fake_model=model, num_draft_tokens=3, min_acceptance_rate=1.0, max_steps_in_flight=overlap, max_model_len=400,
        num_blocks=256,
    )  # fmt: skip
    for index in range(3):
        harness.add(make_request(f"r{index}", 5 + index, 200))
    num_pauses = num_steps = drafted = 0
    while harness.scheduler.has_unfinished_requests():
        harness.step()
        stats = harness.scheduler.take_stats()
        num_pauses, num_steps = num_pauses + stats.spec_num_pauses, num_steps + stats.num_steps
        drafted += stats.spec_num_draft_tokens
    harness.run_and_check()
    assert num_pauses == pytest.approx(num_steps / (64 + overlap), abs=1) and num_pauses >= 2
    assert 0 < drafted <= 3 * 3 * 2 * (num_pauses + 1) * overlap  # some take two steps to fall below the least rate


def test_rows_that_ask_for_more_than_a_sample_keep_the_device_from_drafting():
    model = FakeModel()
    harness = Harness(fake_model=model, num_draft_tokens=3, num_blocks=128)
    harness.add(make_request("a", 5, 20, logprobs=1))
    harness.add(make_request("b", 5, 40))
    num_draft = []
    while harness.scheduler.has_unfinished_requests():
        harness.step()
        num_draft.append(harness.scheduler.take_stats().spec_num_draft_tokens)
    assert not any(num_draft[:20]) and any(num_draft[20:])
    harness.run_and_check()


def test_without_a_least_rate_drafting_never_pauses():
    model = FakeModel()
    proposer = Scripted(model, [0])
    harness = Harness(fake_model=model, proposer=proposer, max_model_len=400, num_blocks=128)
    harness.add(make_request("a", 5, 100))
    harness.run_and_check()
    assert proposer.num_calls == 98  # none with the first token, and none where one token is left


@pytest.mark.parametrize("overlap", [1, 2])
def test_a_proposer_forgets_requests_that_end(overlap):
    model = FakeModel()
    proposer = Scripted(model, [0])
    harness = Harness(fake_model=model, proposer=proposer, max_steps_in_flight=overlap)
    harness.add(make_request("a", 5, 5))
    harness.add(make_request("b", 5, 30))
    for _ in range(8):
        harness.step()
    assert proposer.known == {"b"}
    harness.scheduler.finish_requests(["b"], FinishReason.ABORT)
    assert not proposer.known


def test_a_failing_policy_or_lookup_ends_the_request_it_was_asked_about():
    harness = Harness()
    lookup = harness.kv.lookup

    def broken(request):
        if request.request_id == "bad":
            raise ZeroDivisionError("lookup")
        return lookup(request)

    harness.kv.lookup = broken
    harness.add(make_request("bad", 5, 5))
    harness.add(make_request("good", 5, 5))
    harness.run()
    assert "ZeroDivisionError" in harness.outputs["bad"][-1].error.message
    harness.check_request("good")
    harness.check_empty()


class FailsOnce(FCFSPolicy):
    """Gives chunks of 8, and raises at `fails_at` while others have their rows already."""

    fails_at = ""

    def max_new_tokens(self, request, num_tokens):
        if request.request_id == self.fails_at:
            self.fails_at = ""
            raise ZeroDivisionError("policy")
        return min(num_tokens, 8)


@pytest.mark.parametrize("is_ordered", [True, False])
@OVERLAPS
def test_blocks_for_a_step_that_could_not_be_made_are_not_found_again(overlap, is_ordered):
    policy = FailsOnce()
    harness = Harness(
        policy=policy, max_steps_in_flight=overlap, steps_are_ordered=is_ordered, num_blocks=17, max_num_seqs=2
    )
    prompt = [*range(1, 30)]
    harness.add(make_request("a", prompt, 3))
    harness.add(make_request("b", [*reversed(prompt)], 3))
    harness.launch()
    policy.fails_at = "b"
    harness.run()
    assert "ZeroDivisionError: policy" in harness.outputs["b"][-1].error.message
    harness.add(make_request("c", [*reversed(prompt)], 3))
    harness.run()
    assert harness.outputs["c"][0].num_cached_tokens <= 8  # those of the first step
    for name in "ac":
        harness.check_request(name)
    harness.check_empty()


def test_a_step_that_fails_when_its_rows_are_made_is_not_open_and_its_connector_still_tells():
    is_late = lambda request: request.request_id == "late"  # noqa: E731
    connector = FakeConnector(lambda request: 4 if is_late(request) else 0, is_later=is_late)
    harness = Harness(num_blocks=100, max_num_seqs=9, connector=connector)
    for index in range(8):
        harness.add(make_request(f"r{index}", 5, 9))
    harness.step()
    harness.add(make_request("late", 6, 3))
    count, harness.kv.num_common_prefix_blocks = harness.kv.num_common_prefix_blocks, lambda request_ids: 1 / 0
    assert harness.launch() is None
    harness.kv.num_common_prefix_blocks = count
    harness.scheduler.finish_requests(["late"], FinishReason.ABORT)
    harness.take_outputs()
    assert {harness.reason(f"r{index}") for index in range(8)} == {FinishReason.ERROR}
    harness.add(make_request("after", 5, 9))
    harness.run()
    harness.check_request("after")
    harness.check_empty()


def run_as_the_core(harness):
    """To the end; a step whose `update` raises has failed."""
    while harness.scheduler.has_unfinished_requests() or harness.open:
        while len(harness.open) < harness.max_steps_in_flight and harness.launch():
            pass
        oldest = harness.open[0][0]
        try:
            harness.retire()
        except ZeroDivisionError as error:
            harness._note(harness.scheduler.update_failed(oldest, EngineError(str(error)).to_info()))
        harness.take_outputs()


@pytest.mark.parametrize("fault", ["in a row", "after the rows"])
@OVERLAPS
def test_what_a_step_brought_before_its_update_failed_is_told(overlap, fault):
    connector = FakeConnector()
    harness = Harness(max_steps_in_flight=overlap, connector=connector)
    harness.add(make_request("ends", 5, 4))
    harness.add(make_request("goes-on", 9 if overlap == 1 else 8, 30))  # both end with step 3
    cache_blocks = harness.kv.cache_blocks

    def broken(request, num_tokens):
        assert request.request_id != "goes-on" or num_tokens < 12 or 1 / 0
        cache_blocks(request, num_tokens)

    if fault == "in a row":
        harness.kv.cache_blocks = broken
    else:
        connector.update = lambda result: 1 / (result.step_id - 3)
    run_as_the_core(harness)
    harness.check_request("ends")
    assert harness.reason("goes-on") is FinishReason.ERROR
    assert harness.tokens("goes-on") == harness.expected("goes-on")[0][: 3 if fault == "in a row" else 4]
    harness.check_empty()


def test_kv_that_arrived_with_a_step_whose_update_failed_is_not_waited_for():
    connector = FakeConnector(
        lambda request: 8 if request.request_id == "late" else 0, is_later=lambda request: request.request_id == "late"
    )
    harness = Harness(connector=connector)
    cache_blocks = harness.kv.cache_blocks

    def broken(request, num_tokens):
        assert request.request_id != "bad" or 1 / 0
        cache_blocks(request, num_tokens)

    harness.kv.cache_blocks = broken
    harness.add(make_request("late", 11, 5))
    harness.add(make_request("bad", 6, 9))  # its block is full in the step with which the other's KV arrives
    run_as_the_core(harness)
    assert harness.reason("bad") is FinishReason.ERROR
    harness.check_request("late")
    harness.check_empty()


def test_an_end_whose_output_cannot_be_made_is_told_as_an_error():
    harness = Harness()
    harness.add(make_request("a", 3, 1, logprobs=0))
    output = harness.scheduler.schedule()
    result = harness.executor.execute(output).result()
    result.logprobs[0] = LogprobColumns([[1], [2]], [[-0.5], [-0.5]], None)
    harness.scheduler.update(output, result)
    harness.take_outputs()
    assert harness.reason("a") is FinishReason.ERROR
    harness.check_empty()


def test_nobody_is_admitted_in_the_step_that_preempts():
    def start():
        harness = Harness(num_blocks=8, policy=PriorityPolicy(), prefix_caching=False)
        harness.add(make_request("first", 8, 12))
        harness.add(make_request("second", 12, 12, priority=1))
        return harness

    harness, num_steps = start(), 0
    while not harness.scheduler.take_stats().num_preemptions:
        harness.step()
        num_steps += 1
    harness = start()
    for _ in range(num_steps - 1):
        harness.step()
    harness.add(make_request("vip", 1, 3))
    harness.step()
    assert harness.scheduler.take_stats().num_preemptions == 1 and set(rows(harness)) == {"first"}
    harness.step()
    assert set(rows(harness)) == {"first", "vip"}
    harness.run_and_check()


def test_blocks_given_up_under_an_open_step_that_fails_are_not_found_again():
    for how in ("abort", "preempt"):
        harness = Harness(max_steps_in_flight=2, max_num_seqs=2)
        harness.executor.fails = lambda step_id: "boom" if step_id == 0 else None
        prompt = [*range(1, 14)]
        harness.add(make_request("a", prompt, 5))
        harness.launch()
        if how == "abort":
            harness.scheduler.finish_requests(["a"], FinishReason.ABORT)
        else:
            harness.scheduler._table.preempt(harness.scheduler._table.requests["a"])
        harness.retire()
        harness.add(make_request("b", prompt, 5))
        harness.run()
        assert harness.outputs["b"][0].num_cached_tokens == 0
        harness.check_request("b")
        harness.check_empty()


def test_a_slot_freed_in_a_step_that_never_arrived_is_told_again():
    slots = SlotPool(3)
    taken = [slots.take() for _ in range(3)]
    assert taken == [0, 1, 2]
    slots.give_back(1)
    slots.give_back(2)
    lost = slots.take_freed()
    assert slots.take() == 2
    slots.tell_again(lost)
    assert slots.take_freed() == [1]  # 2 has a new holder
    assert slots.take_freed() == []


def test_stop_tokens_before_min_tokens_do_not_end_a_request_even_if_they_are_sampled():
    harness = Harness()
    harness.scheduler.add_request(make_request("a", 3, 9, eos_token_ids=[0], min_tokens=3))
    told = []
    for token in (0, 0, 0):
        output = harness.scheduler.schedule()
        told += harness.scheduler.update(output, ModelOutput(step_id=output.step_id, token_ids=[[token]]))
    assert [output.finish_reason for output in told] == [None, None, FinishReason.STOP]


@OVERLAPS
def test_a_row_that_should_sample_and_brings_nothing_ends_its_request(overlap):
    harness = Harness(max_steps_in_flight=overlap)
    harness.scheduler.add_request(make_request("a", 3, 9))
    output = harness.scheduler.schedule()
    assert harness.scheduler.update(output, ModelOutput(step_id=0, token_ids=[[]])) == []
    (told,) = harness.scheduler.take_outputs()
    assert told.finish_reason is FinishReason.ERROR and "0 tokens came back" in told.error.message


def test_the_scheduler_imports_neither_torch_nor_transformers():
    code = (
        "import sys, pelton_plugins.scheduler.scheduler, pelton.engine.core, pelton.testing.scheduler; "
        "print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("skips", [True, False, None])
def test_a_pooling_request_that_needs_every_token_looks_nothing_up(skips):
    request = make_request("a", 5)
    request.pooling_params = PoolingParams(skip_reading_prefix_cache=skips)
    state = RequestState(request, 0, max_model_len=64, now=0.0)
    assert state.skip_prefix_lookup is bool(skips) and state.pools
