"""Requests by the time at which their limit passes."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from pelton_plugins.scheduler.request import RequestState

_Entry = tuple[float, int, str]
"""Deadline, arrival, request id: a limit may be a day away, and what ended must not be kept for so long."""


class Deadlines:
    """requests: the unfinished ones, by id. The rest is dropped when it comes to the top, or is more than half."""

    def __init__(self, requests: Mapping[str, RequestState]) -> None:
        self._requests = requests
        self._heap: list[_Entry] = []

    def add(self, request: RequestState) -> None:
        """One of the unfinished."""
        if request.deadline is None:
            return
        heapq.heappush(self._heap, (request.deadline, request.arrival, request.request_id))
        if len(self._heap) > 2 * len(self._requests):
            self._heap = [entry for entry in self._heap if self._find(entry) is not None]
            heapq.heapify(self._heap)

    def next(self) -> float | None:
        """The earliest one of an unfinished request."""
        while self._heap and self._find(self._heap[0]) is None:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def take_passed(self, now: float) -> list[RequestState]:
        """Unfinished requests whose limit has passed by now."""
        passed: list[RequestState] = []
        while self._heap and self._heap[0][0] <= now:
            request = self._find(heapq.heappop(self._heap))
            if request is not None:
                passed.append(request)
        return passed

    def _find(self, entry: _Entry) -> RequestState | None:
        """Return the entry's request while that is unfinished; another may have come with the same id."""
        request = self._requests.get(entry[2])
        return request if request is not None and request.arrival == entry[1] else None
