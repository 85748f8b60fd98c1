"""The admission gates that the scheduler has itself. Blocks are not a gate: they are taken, not asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pelton.scheduler.gates import Gate, Verdict
from pelton.scheduler.policy import SchedulingPolicy
from pelton.scheduler.request import RequestStatus, ScheduledRequest
from pelton_plugins.scheduler.grammars import is_compiled
from pelton_plugins.scheduler.request import RequestState
from pelton_plugins.scheduler.slots import SlotPool
from pelton_plugins.scheduler.step import OpenSteps


class InFlightGate(Gate):
    """A preempted request resumes once the token that was in flight has arrived, in a step or two."""

    def __init__(self, steps: OpenSteps) -> None:
        self._steps = steps

    def check(self, request: ScheduledRequest, running: Sequence[ScheduledRequest]) -> Verdict:
        assert isinstance(request, RequestState)
        return Verdict.WAIT if request.last_step_id > self._steps.retired else Verdict.OPEN


class RemoteKVGate(Gate):
    """A request whose KV a connector brings later waits until it has arrived."""

    def check(self, request: ScheduledRequest, running: Sequence[ScheduledRequest]) -> Verdict:
        assert isinstance(request, RequestState)
        return Verdict.DEFER if request.is_receiving else Verdict.OPEN

    def may_open(self, request: ScheduledRequest) -> bool:
        assert isinstance(request, RequestState)
        return request.status is not RequestStatus.RECEIVING or request.is_remote_ready


class GrammarGate(Gate):
    """A constrained request waits until its grammar is compiled."""

    def check(self, request: ScheduledRequest, running: Sequence[ScheduledRequest]) -> Verdict:
        assert isinstance(request, RequestState)
        return Verdict.OPEN if is_compiled(request) else Verdict.DEFER

    def may_open(self, request: ScheduledRequest) -> bool:
        assert isinstance(request, RequestState)
        return request.grammar_job is None or request.grammar_job.done()


class AdapterGate(Gate):
    """A request with an adapter waits until `is_ready(adapter_id)` says that the workers have it."""

    def __init__(self, is_ready: Callable[[int], bool]) -> None:
        self._is_ready = is_ready

    def check(self, request: ScheduledRequest, running: Sequence[ScheduledRequest]) -> Verdict:
        adapter_id = request.request.adapter_id
        return Verdict.OPEN if not adapter_id or self._is_ready(adapter_id) else Verdict.DEFER


class SideSlotGate(Gate):
    """Penalties, bias and token sets live in side tables of the device, which have few slots."""

    def __init__(self, side_slots: SlotPool) -> None:
        self._side_slots = side_slots

    def check(self, request: ScheduledRequest, running: Sequence[ScheduledRequest]) -> Verdict:
        return Verdict.OPEN if self.may_open(request) else Verdict.DEFER

    def may_open(self, request: ScheduledRequest) -> bool:
        assert isinstance(request, RequestState)
        return not request.needs_side_slot or self._side_slots.num_free > 0


class PolicyGate(Gate):
    """The scheduling policy may hold back the head of the queue, alone or with all behind it."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy

    def check(self, request: ScheduledRequest, running: Sequence[ScheduledRequest]) -> Verdict:
        if self._policy.holds_back(request, running):
            return Verdict.DEFER
        return Verdict.OPEN if self._policy.admits(request, running) else Verdict.WAIT
