"""The waiting queue: a heap with lazy deletion, which is never sorted."""

from __future__ import annotations

import heapq
import logging
from typing import Any

from pelton.errors import EngineError
from pelton.scheduler.policy import SchedulingPolicy
from pelton_plugins.scheduler.request import RequestState

logger = logging.getLogger(__name__)


class RequestQueue:
    """Waiting requests in policy order. Removal marks; the heap drops what is marked when it comes to the top."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self._heap: list[tuple[tuple[Any, ...], int, RequestState]] = []
        self._live: dict[int, RequestState] = {}  # ticket to request
        self._tickets: dict[str, int] = {}
        self._next_ticket = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._tickets

    def push(self, request: RequestState) -> None:
        """Raises `EngineError`, with nothing pushed, where the policy fails."""
        ticket = self._next_ticket
        self._next_ticket += 1
        try:
            heapq.heappush(self._heap, (self._policy.queue_rank(request), ticket, request))
        except Exception as error:
            self._heap = [entry for entry in self._heap if entry[1] != ticket]  # a rank that compares with no other
            heapq.heapify(self._heap)
            made_by = f"{type(self._policy).__module__}:{type(self._policy).__qualname__}"
            logger.exception("The scheduling policy %s failed to rank %s.", made_by, request.request_id)
            raise EngineError(
                f"The scheduling policy {made_by} gives no rank that compares with others: {type(error).__name__}: {error}"
            ) from error
        self._live[ticket] = request
        self._tickets[request.request_id] = ticket

    def peek(self) -> RequestState | None:
        heap = self._heap
        while heap and heap[0][1] not in self._live:
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    def pop(self) -> RequestState:
        request = self.peek()
        assert request is not None, "pop from an empty queue"
        self.remove(request)
        return request

    def remove(self, request: RequestState) -> bool:
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
