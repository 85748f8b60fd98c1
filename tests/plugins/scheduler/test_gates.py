"""Admission asks its gates in order: a request passes all of them, is set aside, or holds up the queue."""

from __future__ import annotations

import pytest

from pelton.errors import RequestError
from pelton.messages.outputs import FinishReason
from pelton.scheduler.gates import Gate, Verdict
from pelton.testing.scheduler import Harness, make_request


class Doorman(Gate):
    """Gives each request the verdict that a test has set, OPEN unless told otherwise."""

    def __init__(self):
        self.verdicts = {}
        self.asked = []

    def check(self, request, running):
        self.asked.append(request.request_id)
        verdict = self.verdicts.get(request.request_id, Verdict.OPEN)
        if isinstance(verdict, Exception):
            raise verdict
        return verdict

    def may_open(self, request):
        return self.verdicts.get(request.request_id, Verdict.OPEN) is not Verdict.DEFER


@pytest.fixture
def doorman():
    return Doorman()


def scheduled(harness):
    """Requests of one step, which is then taken in."""
    output = harness.launch()
    new = [] if output is None else [one.request_id for one in output.new]
    if output is not None:
        harness.retire()
    return new


def test_a_deferred_request_is_passed_and_asked_again_when_its_gate_may_open(doorman):
    harness = Harness(gates=[doorman])
    doorman.verdicts["a"] = Verdict.DEFER
    for name in "ab":
        harness.add(make_request(name, 4))
    assert scheduled(harness) == ["b"]
    doorman.asked.clear()
    assert scheduled(harness) == []
    assert doorman.asked == []  # `may_open` said no
    del doorman.verdicts["a"]
    assert scheduled(harness) == ["a"]
    harness.run_and_check()


def test_nobody_passes_a_request_that_waits(doorman):
    harness = Harness(gates=[doorman])
    doorman.verdicts["a"] = Verdict.WAIT
    for name in "ab":
        harness.add(make_request(name, 4))
    assert scheduled(harness) == []
    assert doorman.asked == ["a"]
    del doorman.verdicts["a"]
    assert scheduled(harness) == ["a", "b"]
    harness.run_and_check()


def test_a_gate_that_raises_ends_its_request_alone(doorman):
    harness = Harness(gates=[doorman])
    doorman.verdicts["a"] = RequestError("The doorman does not know you.")
    for name in "ab":
        harness.add(make_request(name, 4))
    assert scheduled(harness) == ["b"]
    (ended,) = [one for one in harness.scheduler.take_outputs() if one.request_id == "a"]
    assert ended.finish_reason is FinishReason.ERROR and "doorman" in ended.error.message


def test_the_first_gate_that_is_not_open_decides(doorman):
    second = Doorman()
    harness = Harness(gates=[doorman, second])
    doorman.verdicts["a"] = Verdict.WAIT
    harness.add(make_request("a", 4))
    assert scheduled(harness) == [] and second.asked == []
