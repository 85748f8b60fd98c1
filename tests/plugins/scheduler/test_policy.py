"""Order of the waiting queue and of running requests, and the queue's lazy deletion."""

from __future__ import annotations

import random

import pytest

from pelton.scheduler.request import RequestStatus
from pelton.testing.scheduler import Harness, make_request
from pelton_plugins.scheduler.gates import PolicyGate
from pelton_plugins.scheduler.policies import FCFSPolicy, PriorityPolicy
from pelton_plugins.scheduler.queue import RequestQueue
from pelton_plugins.scheduler.request import RequestState


def record(name, arrival, *, priority=0, status=RequestStatus.WAITING):
    request = RequestState(make_request(name, 3, priority=priority), arrival, max_model_len=64, now=0.0)
    request.status = status
    return request


PREEMPTED = RequestStatus.PREEMPTED


@pytest.mark.parametrize(
    "policy, requests, order",
    [
        pytest.param(FCFSPolicy, [("b", 2, 0), ("a", 1, 9)], "ab", id="fcfs-ignores-priority"),
        pytest.param(PriorityPolicy, [("a", 1, 3), ("b", 2, -1), ("c", 3, 3)], "bac", id="lower-value-first"),
        pytest.param(FCFSPolicy, [("a", 1, 0), ("p", 9, 0, PREEMPTED)], "pa", id="preempted-to-the-front"),
        pytest.param(
            PriorityPolicy, [("a", 1, 5), ("p", 9, 5, PREEMPTED), ("c", 3, 4)], "cpa", id="front-of-its-own-priority"
        ),
    ],
)
def test_queue_order(policy, requests, order):
    for shuffled in (requests, requests[::-1]):
        queue = RequestQueue(policy())
        for name, arrival, priority, *status in shuffled:
            queue.push(record(name, arrival, priority=priority, status=status[0] if status else RequestStatus.WAITING))
        assert "".join(queue.pop().request_id for _ in requests) == order
        assert queue.peek() is None and len(queue) == 0


def test_removed_requests_never_come_up_and_do_not_pile_up():
    rng = random.Random(3)
    queue = RequestQueue(FCFSPolicy())
    requests = [record(f"r{index}", index) for index in range(2000)]
    for request in requests:
        queue.push(request)
    gone = set(rng.sample(range(2000), 1950))
    for index in gone:
        assert queue.remove(requests[index]) and not queue.remove(requests[index])
    assert len(queue) == 50 and len(queue._heap) < 200
    assert [queue.pop().arrival for _ in range(50)] == sorted(set(range(2000)) - gone)


def test_a_request_pushed_again_has_its_new_place():
    queue = RequestQueue(FCFSPolicy())
    first, second = record("a", 1), record("b", 2)
    queue.push(first)
    queue.push(second)
    queue.remove(second)
    second.status = PREEMPTED
    queue.push(second)
    assert [queue.pop().request_id, queue.pop().request_id] == ["b", "a"]


class Shortest(FCFSPolicy):
    """A stranger's policy: shortest prompt first, one running request at a time, small chunks, first victim."""

    def rank(self, request):
        return (request.num_prompt_tokens, request.arrival)

    def admits(self, request, running):
        return not running

    def max_new_tokens(self, request, num_tokens):
        return min(num_tokens, 2)


def test_a_policy_decides_order_admission_and_share():
    harness = Harness(policy=Shortest())
    for name, length in (("long", 9), ("short", 2), ("middle", 5)):
        harness.add(make_request(name, length, 2))
    ends = []
    while harness.scheduler.has_unfinished_requests():
        ends += [output.request_id for output in harness.step() if output.finish_reason is not None]
        assert len(harness.executor.outputs[-1].slots) == 1
        assert harness.executor.outputs[-1].max_query_len <= 2
    assert ends == ["short", "middle", "long"]
    harness.run_and_check()


@pytest.mark.parametrize("name, is_asked", [("", False), ("admits", True), ("holds_back", True)])
def test_a_policy_that_lets_all_in_is_not_asked(name, is_asked):
    asked = []
    policy = FCFSPolicy()
    if name:
        setattr(policy, name, lambda request, running: asked.append(request) or name == "admits")
    harness = Harness(policy=policy)
    harness.add(make_request("a", 5, 2))
    assert any(isinstance(gate, PolicyGate) for gate in harness.scheduler._admission._gates) == is_asked
    harness.run_and_check()
    assert bool(asked) == is_asked


def test_requests_keep_their_rank_whenever_they_come_back():
    harness = Harness(policy=PriorityPolicy(), max_steps_in_flight=2)
    for name, priority in (("a", 2), ("b", 0), ("c", 1), ("d", 0)):
        harness.add(make_request(name, 5, 20, priority=priority))
        harness.step()
    running = harness.scheduler._table.running
    assert [request.request_id for request in running] == ["b", "d", "c", "a"]
    harness.scheduler._table.preempt(running[1])
    for _ in range(3):
        harness.step()
    assert [request.request_id for request in running] == ["b", "d", "c", "a"]
    harness.run_and_check()


def test_a_policy_chooses_the_victim():
    class FirstOfAll(FCFSPolicy):
        def victim(self, candidates):
            return candidates[0]

    harness = Harness(policy=FirstOfAll(), num_blocks=7)
    harness.add(make_request("first", 8, 12))
    harness.add(make_request("second", 8, 12))
    harness.run_and_check()
    assert len(harness.events("first")) > 2 and len(harness.events("second")) == 2


class Capped(FCFSPolicy):
    """One request of a tenant at a time, by its first letter; what each got is known at its end."""

    def __init__(self):
        self.got = {}

    def holds_back(self, request, running):
        return any(one.request_id[0] == request.request_id[0] for one in running)

    def ended(self, request):
        self.got[request.request_id] = request.num_output_tokens


def test_a_policy_caps_one_tenant_and_no_other_waits():
    policy = Capped()
    harness = Harness(policy=policy)
    for name in ("a1", "a2", "a3", "b1"):
        harness.add(make_request(name, 3, 4))
    harness.step()
    assert [request.request_id for request in harness.scheduler._table.running] == ["a1", "b1"]
    most = 0
    while harness.scheduler.has_unfinished_requests():
        harness.step()
        names = [request.request_id[0] for request in harness.scheduler._table.running]
        assert len(set(names)) == len(names)
        most = max(most, len(names))
    assert most == 2 and policy.got == {"a1": 4, "a2": 4, "a3": 4, "b1": 4}


def test_a_policy_that_fails_at_the_end_of_a_request_is_logged(caplog):
    class Failing(FCFSPolicy):
        def ended(self, request):
            raise KeyError("tenant")

    harness = Harness(policy=Failing())
    harness.add(make_request("a", 3, 4))
    harness.run()
    assert len(harness.tokens("a")) == 4 and "policy failed at the end of a" in caplog.text
