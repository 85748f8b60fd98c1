"""Scheduling policies: the order of requests, admission, the victims of preemption, and how much a request gets.

The waiting queue is a heap with lazy deletion; it is never sorted.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pelton.scheduler.request import RequestStatus, ScheduledRequest

if TYPE_CHECKING:
    from pelton.config import EngineConfig


class SchedulingPolicy(ABC):
    """Made once per scheduler, without arguments. Called on the step loop: no method may block."""

    def configure(self, config: EngineConfig) -> None:  # noqa: B027
        """Take settings (`pelton.config.plugin_settings.read_settings`). Called once, before the first request."""

    @abstractmethod
    def rank(self, request: ScheduledRequest) -> tuple[Any, ...]:
        """Order among running requests, lowest first; must not change while a request lives, and tell any two apart."""

    def queue_rank(self, request: ScheduledRequest) -> tuple[Any, ...]:
        """Order in the waiting queue, lowest first. A preempted request comes before all that have not run yet."""
        return (request.status is not RequestStatus.PREEMPTED, *self.rank(request))

    def admits(self, request: ScheduledRequest, running: Sequence[ScheduledRequest]) -> bool:
        """False leaves the head of the queue, and all behind it, for a later step."""
        return True

    def victim(self, candidates: Sequence[ScheduledRequest]) -> ScheduledRequest:
        """Choose the request that gives up its blocks: one of `candidates`, the running requests that this step has not served yet, in rank
        order. The first of them is the one that needs a block."""
        return candidates[-1]

    def max_new_tokens(self, request: ScheduledRequest, num_tokens: int) -> int:
        """Most of `num_tokens` that this request may get in this step, at least 1."""
        return num_tokens


class FCFSPolicy(SchedulingPolicy):
    """First come, first served: the latest arrival is the victim."""

    def rank(self, request: ScheduledRequest) -> tuple[Any, ...]:
        return (request.arrival,)


class PriorityPolicy(SchedulingPolicy):
    """Lower `priority` first, ties by arrival: the highest value, latest arrival, is the victim.

    A preempted request goes to the front of its own priority only: one of lower value that waits still comes first.
    """

    def rank(self, request: ScheduledRequest) -> tuple[Any, ...]:
        return (request.request.priority, request.arrival)

    def queue_rank(self, request: ScheduledRequest) -> tuple[Any, ...]:
        return (request.request.priority, request.status is not RequestStatus.PREEMPTED, request.arrival)


class RequestQueue:
    """Waiting requests in policy order. Removal marks; the heap drops what is marked when it comes to the top."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self._heap: list[tuple[tuple[Any, ...], int, ScheduledRequest]] = []
        self._live: dict[int, ScheduledRequest] = {}  # ticket to request
        self._tickets: dict[str, int] = {}
        self._next_ticket = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._tickets

    def push(self, request: ScheduledRequest) -> None:
        ticket = self._next_ticket
        self._next_ticket += 1
        self._live[ticket] = request
        self._tickets[request.request_id] = ticket
        heapq.heappush(self._heap, (self._policy.queue_rank(request), ticket, request))

    def peek(self) -> ScheduledRequest | None:
        heap = self._heap
        while heap and heap[0][1] not in self._live:
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    def pop(self) -> ScheduledRequest:
        request = self.peek()
        assert request is not None, "pop from an empty queue"
        self.remove(request)
        return request

    def remove(self, request: ScheduledRequest) -> bool:
        """True when it was here."""
        ticket = self._tickets.pop(request.request_id, None)
        if ticket is None:
            return False
        del self._live[ticket]
        # Many aborted requests deep in the heap must not pile up.
        if len(self._heap) > 2 * len(self._live) + 64:
            self._heap = [entry for entry in self._heap if entry[1] in self._live]
            heapq.heapify(self._heap)
        return True
