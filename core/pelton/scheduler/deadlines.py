"""Requests by the time at which their limit passes."""

from __future__ import annotations

import heapq

from pelton.scheduler.request import ScheduledRequest


class Deadlines:
    """Nothing is removed: what finished in time is dropped when it comes to the top."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, ScheduledRequest]] = []

    def add(self, request: ScheduledRequest) -> None:
        if request.deadline is not None:
            heapq.heappush(self._heap, (request.deadline, request.arrival, request))

    def next(self) -> float | None:
        """The earliest one of an unfinished request."""
        while self._heap and self._heap[0][2].is_finished:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def take_passed(self, now: float) -> list[ScheduledRequest]:
        """Unfinished requests whose limit has passed by now."""
        passed: list[ScheduledRequest] = []
        while (deadline := self.next()) is not None and deadline <= now:
            passed.append(heapq.heappop(self._heap)[2])
        return passed
