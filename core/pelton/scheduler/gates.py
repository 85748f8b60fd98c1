"""Admission gates: each says whether a waiting request has one thing that it needs before it may start.

`admission` asks the gates in their order, for the head of the queue. Blocks are not a gate: they are taken, not asked for.
A feature with a resource of its own (adapter slots, an encoder budget) adds a gate here and changes no other file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import Enum, auto

from pelton.scheduler.grammars import is_compiled
from pelton.scheduler.policy import SchedulingPolicy
from pelton.scheduler.request import RequestStatus, ScheduledRequest
from pelton.scheduler.slots import SlotPool
from pelton.scheduler.step import OpenSteps


class Verdict(Enum):
    OPEN = auto()
    """The request has what this gate looks after."""
    DEFER = auto()
    """Set the request aside until `Gate.may_open`; those behind it pass."""
    WAIT = auto()
    """The request keeps its place, and nobody is admitted behind it in this step."""


class Gate(ABC):
    """One resource that a request needs to start. Called on the step loop: no method may block."""

    @abstractmethod
    def check(self, request: ScheduledRequest, running: Sequence[ScheduledRequest]) -> Verdict:
        """Say whether the head of the queue may start. An exception ends the request, and only it."""

    def may_open(self, request: ScheduledRequest) -> bool:
        """Say whether a deferred request is worth another `check`. Asked once a step for each of them; must be cheap."""
        return True


class InFlightGate(Gate):
    """A preempted request resumes once the token that was in flight has arrived, in a step or two."""

    def __init__(self, steps: OpenSteps) -> None:
        self._steps = steps

    def check(self, request: ScheduledRequest, running: Sequence[ScheduledRequest]) -> Verdict:
        return Verdict.WAIT if request.last_step_id > self._steps.retired else Verdict.OPEN


class RemoteKVGate(Gate):
    """A request whose KV a connector brings later waits until it has arrived."""

    def check(self, request: ScheduledRequest, running: Sequence[ScheduledRequest]) -> Verdict:
        return Verdict.DEFER if request.is_receiving else Verdict.OPEN

    def may_open(self, request: ScheduledRequest) -> bool:
        return request.status is not RequestStatus.RECEIVING or request.is_remote_ready


class GrammarGate(Gate):
    """A constrained request waits until its grammar is compiled."""

    def check(self, request: ScheduledRequest, running: Sequence[ScheduledRequest]) -> Verdict:
        return Verdict.OPEN if is_compiled(request) else Verdict.DEFER

    def may_open(self, request: ScheduledRequest) -> bool:
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
        return not request.request.sampling_params.needs_side_slot or self._side_slots.num_free > 0


class PolicyGate(Gate):
    """The scheduling policy may hold back the head of the queue, and all behind it."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy

    def check(self, request: ScheduledRequest, running: Sequence[ScheduledRequest]) -> Verdict:
        return Verdict.OPEN if self._policy.admits(request, running) else Verdict.WAIT
