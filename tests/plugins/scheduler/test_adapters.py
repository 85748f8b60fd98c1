"""Adapters' slots: who gets one, who loses one, and what the workers are told."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from pelton.errors import InvalidAdapterError, RequestError
from pelton.messages.request import AdapterRef
from pelton.messages.step import SchedulerOutput
from pelton.scheduler.interface import AdapterLoads
from pelton.testing.scheduler import Harness, make_request
from pelton_plugins.scheduler.adapters import FAILURE_S, AdapterSlots


class Loads:
    """Futures of the loads that were asked for, by adapter id."""

    def __init__(self, *, is_done: bool = True) -> None:
        self.futures: dict[int, Future[None]] = {}
        self.is_done = is_done

    def __call__(self, ref: AdapterRef, load_id: int) -> Future[Any]:
        self.futures[ref.id] = future = Future()
        if self.is_done:
            future.set_result(None)
        return future


class Running:
    def __init__(self, adapter_id: int) -> None:
        self.request = self
        self.adapter_id = adapter_id


def ref(number: int) -> AdapterRef:
    return AdapterRef(id=number, name=f"a{number}", path="/a")


def loads_of(num_slots: int, num_host: int, load: Any) -> AdapterLoads:
    return AdapterLoads(num_slots=num_slots, num_host=num_host, load=load)


def make_slots(num_slots: int, num_host: int, load: Any, **options: Any) -> AdapterSlots:
    return AdapterSlots(loads_of(num_slots, num_host, load), **options)


def told(adapters: AdapterSlots) -> tuple[list[tuple[int, int]], list[int]]:
    """(slot, id), dropped loads"""
    output = SchedulerOutput(step_id=1)
    adapters.describe(output)
    return [(slot, one) for slot, one, _ in output.adapter_slots], output.dropped_adapters


def test_the_longest_unused_gives_up_its_slot():
    adapters = make_slots(2, 8, Loads())
    assert [adapters.take(ref(number)) for number in (1, 2, 1)] == [True] * 3
    assert told(adapters) == ([(0, 1), (1, 2)], [])
    assert adapters.take(ref(3))
    assert told(adapters) == ([(1, 3)], [])


def test_a_slot_in_use_is_kept():
    adapters = make_slots(1, 8, Loads())
    assert adapters.take(ref(1))
    adapters.running = [Running(1)]  # type: ignore[list-item]
    adapters.begin_step()
    assert not adapters.take(ref(2))
    assert not adapters.may_take(ref(2))
    adapters.running = []
    adapters.begin_step()
    assert adapters.may_take(ref(2))
    assert adapters.take(ref(2))


def test_a_load_takes_its_time_and_blocks_nobody():
    loads = Loads(is_done=False)
    adapters = make_slots(2, 8, loads)
    assert not adapters.take(ref(1))
    assert not adapters.may_take(ref(1))
    loads.futures[1].set_result(None)
    assert adapters.may_take(ref(1))
    assert adapters.take(ref(1))


def test_a_failed_load_is_told_and_tried_again_later():
    now, loads = [0.0], Loads(is_done=False)
    adapters = make_slots(2, 8, loads, clock=lambda: now[0])
    adapters.prefetch(ref(1))
    first = loads.futures[1]
    first.set_exception(InvalidAdapterError("no good"))
    for _ in range(2):
        with pytest.raises(InvalidAdapterError, match="no good"):
            adapters.take(ref(1))
    now[0] = FAILURE_S + 0.1
    assert not adapters.take(ref(1))
    assert loads.futures[1] is not first


def test_host_memory_is_bounded():
    adapters = make_slots(1, 2, Loads())
    for number in (1, 2, 3):
        assert adapters.take(ref(number))
    assert len(adapters.loaded()) == 2
    assert told(adapters)[1] == [1]


def test_a_pinned_adapter_is_never_given_up():
    adapters = make_slots(2, 2, Loads())
    assert adapters.take(ref(1))
    adapters.pin(1)
    for number in (2, 3, 4):
        assert adapters.take(ref(number))
    assert 1 in adapters.loaded()
    with pytest.raises(RequestError, match="one slot has to be left for others"):
        adapters.pin(4)
    with pytest.raises(RequestError, match="not loaded"):
        adapters.pin(9)


def test_a_removed_adapter_goes_when_nobody_runs_with_it():
    adapters = make_slots(2, 8, Loads())
    adapters.take(ref(1))
    adapters.running = [Running(1)]  # type: ignore[list-item]
    assert adapters.remove(1)
    assert adapters.loaded() == [1]
    adapters.running = []
    adapters.begin_step()
    assert adapters.loaded() == []
    assert told(adapters) == ([], [1])
    assert not adapters.remove(1)


def test_workers_that_may_not_have_heard_are_told_again():
    adapters = make_slots(2, 8, Loads())
    adapters.take(ref(1))
    output = SchedulerOutput(step_id=1)
    adapters.describe(output)
    adapters.tell_again(output)
    assert told(adapters) == ([(0, 1)], [])


def test_a_step_of_running_requests_brings_one_adapter_to_its_slot():
    """Where none runs, nobody is delayed: one step brings all of them."""
    harness = Harness(adapters=loads_of(8, 8, Loads()), max_steps_in_flight=2)
    for number in (1, 2):
        harness.add(make_request(f"first-{number}", 3, 12, adapter_id=number))
    assert [one for _, one, _ in harness.launch().adapter_slots] == [1, 2]
    for number in (3, 4, 5, 5, 1):
        harness.add(make_request(f"late-{number}-{len(harness.requests)}", 3, 2, adapter_id=number))
    brought, joined = [], []
    for _ in range(3):
        output = harness.launch()
        brought.append([one for _, one, _ in output.adapter_slots])
        joined.append(sorted(new.request_id[:6] for new in output.new))
        harness.retire()
    assert brought == [[3], [4], [5]]
    assert joined == [["late-1", "late-3"], ["late-4"], ["late-5", "late-5"]]
    harness.run()


def test_in_the_scheduler_requests_wait_for_their_adapter_and_others_pass():
    loads = Loads(is_done=False)
    harness = Harness(adapters=loads_of(1, 8, loads), max_steps_in_flight=2)
    harness.add(make_request("a", 3, 2, adapter_id=7))
    harness.add(make_request("b", 3, 2))
    output = harness.scheduler.schedule()
    assert [new.request_id for new in output.new] == ["b"]
    assert output.adapter_slots == []
    loads.futures[7].set_result(None)
    later = harness.scheduler.schedule()
    assert [new.request_id for new in later.new] == ["a"]
    assert later.adapter_slots == [(0, 7, 1)]
    stats = harness.scheduler.take_stats()
    assert (stats.running_adapters, stats.waiting_adapters) == ({"adapter-7": 1}, {})
