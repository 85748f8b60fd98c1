"""KV that comes from, or goes to, elsewhere: the connector's call points, with overlap."""

from __future__ import annotations

import pytest

from pelton.messages.outputs import FinishReason
from pelton.testing.fake_connector import FakeConnector
from pelton.testing.scheduler import Harness, make_request

OVERLAPS = pytest.mark.parametrize("overlap", [1, 2, 3])


@OVERLAPS
def test_tokens_that_a_connector_brings_in_the_step_are_not_computed(overlap):
    harness = Harness(connector=FakeConnector(lambda request: 8), max_steps_in_flight=overlap)
    harness.add(make_request("a", 11, 5))
    harness.run_and_check()
    assert harness.executor.outputs[0].new[0].num_computed_tokens == 8
    assert harness.executor.num_computed_tokens == 11 - 8 + 5 - 1
    assert harness.outputs["a"][0].num_cached_tokens == harness.outputs["a"][0].num_external_tokens == 8


def test_tokens_that_it_is_asked_for_and_brings_are_counted():
    harness = Harness(connector=FakeConnector(lambda request: 8 if request.request_id == "a" else 0))
    for name in "ab":
        harness.add(make_request(name, [*range(1, 12)], 2))
        harness.run()
    stats = harness.scheduler.take_stats()
    # b finds 8 of its 11 tokens here, and asks for the rest.
    assert (stats.external_prefix_cache_queries, stats.external_prefix_cache_hits) == (11 + 3, 8)
    without = Harness()
    without.add(make_request("a", 11, 2))
    without.run()
    assert without.scheduler.take_stats().external_prefix_cache_queries == 0


def test_the_connector_is_asked_after_the_local_lookup():
    connector = FakeConnector(lambda request: 0)
    harness = Harness(connector=connector)
    harness.add(make_request("a", [*range(1, 11)], 1))
    harness.run()
    harness.add(make_request("b", [*range(1, 11)], 1))
    harness.run_and_check()
    assert connector.asked == [("a", 0), ("b", 8)]


def test_a_whole_prompt_elsewhere_still_computes_the_last_token():
    harness = Harness(connector=FakeConnector(lambda request: 100))
    harness.add(make_request("a", 9, 3))
    harness.run_and_check()
    assert harness.executor.outputs[0].num_scheduled == [1]


@OVERLAPS
def test_late_kv_is_waited_for_without_blocking_the_queue(overlap):
    connector = FakeConnector(
        lambda request: 8 if request.request_id == "late" else 0, is_later=lambda request: request.request_id == "late"
    )
    harness = Harness(connector=connector, max_steps_in_flight=overlap)
    harness.executor.transfers.num_steps = 4
    harness.add(make_request("late", 11, 5))
    harness.add(make_request("other", 5, 9))
    harness.step()
    stats = harness.scheduler.take_stats()
    assert (stats.num_running_reqs, stats.num_deferred_reqs) == (1, 1)
    assert stats.kv_fetch_reqs == {"waiting_to_start": 0, "in_progress": 1, "completed_waiting": 0}
    harness.run_and_check()
    first = next(output for output in harness.executor.outputs if any(n.request_id == "late" for n in output.new))
    assert first.step_id > 3 and first.new[-1].num_computed_tokens == 8


def test_a_preempted_request_is_counted_once():
    harness = Harness(connector=FakeConnector(lambda request: 0), num_blocks=9)
    for name in "ab":
        harness.add(make_request(name, 9, 14))
    harness.run()
    stats = harness.scheduler.take_stats()
    assert stats.num_preemptions > 0
    assert (stats.external_prefix_cache_queries, stats.prefix_cache_queries) == (18, 18)


def test_late_kv_is_counted_as_brought_and_not_as_found():
    connector = FakeConnector(
        lambda request: 8 if request.request_id == "late" else 0, is_later=lambda request: request.request_id == "late"
    )
    harness = Harness(connector=connector)
    for name in ("late", "here"):
        harness.add(make_request(name, [*range(1, 12)], 2))
        harness.run()
    stats = harness.scheduler.take_stats()
    assert (stats.external_prefix_cache_queries, stats.external_prefix_cache_hits) == (11 + 3, 8)
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (11 + 11, 8)


def test_late_kv_that_arrived_is_found_by_others():
    connector = FakeConnector(
        lambda request: 8 if request.request_id == "late" else 0, is_later=lambda request: request.request_id == "late"
    )
    harness = Harness(connector=connector)
    harness.add(make_request("late", [*range(1, 12)], 2))
    harness.run()
    harness.add(make_request("b", [*range(1, 12)], 2))
    harness.run_and_check()
    assert harness.outputs["b"][0].num_cached_tokens == 8


def test_a_connector_that_does_not_know_yet_is_asked_again():
    answers = [None, None, 4]
    connector = FakeConnector(lambda request: answers.pop(0) if request.request_id == "a" else 0)
    harness = Harness(connector=connector)
    harness.add(make_request("a", 9, 2))
    harness.add(make_request("b", 9, 6))
    harness.step()
    assert harness.scheduler.take_stats().kv_fetch_reqs["waiting_to_start"] == 1
    harness.run_and_check()
    assert not any(harness.scheduler.take_stats().kv_fetch_reqs.values())
    assert [name for name, _ in connector.asked].count("a") == 3
    assert harness.executor.outputs[0].new[0].request_id == "b"


@OVERLAPS
def test_blocks_are_held_until_they_are_sent(overlap):
    connector = FakeConnector(sends=lambda request_id: True)
    harness = Harness(connector=connector, max_steps_in_flight=overlap)
    harness.add(make_request("a", 9, 3))
    while harness.reason("a") is None:
        harness.step()
    assert harness.kv.num_free_blocks < harness.kv.num_usable_blocks
    assert harness.scheduler.has_unfinished_requests()
    harness.run()
    harness.check_request("a")
    harness.check_empty()
    assert connector.finished == ["a"]


def test_an_abort_while_kv_arrives_keeps_the_blocks_until_it_is_there():
    connector = FakeConnector(lambda request: 8, is_later=lambda request: True)
    harness = Harness(connector=connector)
    harness.executor.transfers.num_steps = 3
    harness.add(make_request("a", 11, 5))
    harness.step()
    harness.scheduler.finish_requests(["a"], FinishReason.ABORT)
    harness.take_outputs()
    assert harness.kv.num_free_blocks < harness.kv.num_usable_blocks
    harness.run()
    assert harness.reason("a") is FinishReason.ABORT
    harness.check_empty()


@OVERLAPS
@pytest.mark.parametrize("is_later", [False, True])
def test_blocks_that_could_not_be_loaded_are_computed_here(overlap, is_later):
    connector = FakeConnector(lambda request: 8 if request.request_id == "a" else 0, is_later=lambda request: is_later)
    harness = Harness(connector=connector, max_steps_in_flight=overlap)
    harness.executor.transfers.is_bad = lambda request_id: True
    harness.add(make_request("a", [*range(1, 14)], 5))
    harness.launch()
    harness.add(make_request("b", [*range(1, 14)], 5))  # finds the bad blocks, with overlap
    harness.run_and_check()


def test_a_connector_that_fails_ends_the_requests_of_its_step_only(monkeypatch):
    connector = FakeConnector()
    harness = Harness(connector=connector)
    build = connector.build_metadata
    monkeypatch.setattr(connector, "build_metadata", lambda output: build(output) if output.step_id else 1 / 0)
    harness.add(make_request("a", 5, 3))
    harness.step()
    assert "ZeroDivisionError" in harness.outputs["a"][-1].error.message
    harness.add(make_request("b", 5, 3))
    harness.run()
    harness.check_request("b")
    harness.check_empty()


def test_a_lone_request_waits_for_blocks_that_a_transfer_holds_and_is_not_cut():
    connector = FakeConnector(
        lambda request: 12 if request.request_id == "late" else 0, is_later=lambda request: request.request_id == "late"
    )
    harness = Harness(connector=connector, num_blocks=8, prefix_caching=False)
    harness.executor.transfers.num_steps = 30
    harness.add(make_request("a", 13, 12))
    harness.add(make_request("late", 13, 3))
    harness.run_and_check()
