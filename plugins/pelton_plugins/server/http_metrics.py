"""Counts of HTTP requests, beside the engine's own metrics."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from pelton.metrics.snapshot import Counter, Gauge, Metric
from pelton_plugins.histograms.buckets import BucketCounts

SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
FINE_SECONDS = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.25, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5,
    3.0, 3.5, 4.0, 4.5, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0, 180.0, 300.0, 600.0,
)  # fmt: skip
SLEEP_OPERATIONS = ("sleep", "wake")
SLEEP_SECONDS = (0.01, 0.1, 1.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
BYTES = (100.0, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8)

Series = tuple[list[int], float]
"""Observations by bucket, and their sum."""


class HttpCounts(msgspec.Struct):
    """Counts of one process since its last report; `num_in_progress` is what is open now."""

    requests: dict[tuple[str, str, str], int] = {}
    seconds: dict[tuple[str, str], Series] = {}
    fine_seconds: Series | None = None
    request_bytes: dict[str, Series] = {}
    response_bytes: dict[str, Series] = {}
    tool_answers: dict[tuple[str, str], int] = {}
    sleep_seconds: dict[str, Series] = {}
    num_sleeping: dict[str, int] = {}
    num_in_progress: int = 0
    num_stalled: int = 0


class HttpMetrics:
    """`handler` is the route's template, or "none", so that a client cannot make new series."""

    def __init__(self) -> None:
        self._requests: dict[tuple[str, str, str], int] = {}
        self._seconds: dict[tuple[str, str], BucketCounts] = {}
        self._fine_seconds = BucketCounts(FINE_SECONDS)
        self._request_bytes: dict[str, BucketCounts] = {}
        self._response_bytes: dict[str, BucketCounts] = {}
        self._tool_answers: dict[tuple[str, str], int] = {}
        self._sleep_seconds: dict[str, BucketCounts] = {}
        self.num_sleeping = dict.fromkeys(SLEEP_OPERATIONS, 0)
        """Operations of sleep that are under way."""
        self.num_in_progress = 0
        self.num_stalled = 0
        """Connections that were closed because their client did not read, or did not send."""

    def observe(
        self, handler: str, method: str, status: int, seconds: float, num_bytes_in: int = 0, num_bytes_out: int = 0
    ) -> None:
        """num_bytes_in: of the request's body; num_bytes_out: of the answer's."""
        key = (handler, method, f"{status // 100}xx")
        self._requests[key] = self._requests.get(key, 0) + 1
        _series(self._seconds, key[:2], SECONDS).observe(seconds)
        self._fine_seconds.observe(seconds)
        _series(self._request_bytes, handler, BYTES).observe(num_bytes_in)
        _series(self._response_bytes, handler, BYTES).observe(num_bytes_out)

    def count_tool_answer(self, parser: str, num_calls: int) -> None:
        """Count an answer that a tool parser has read to its end."""
        key = (parser, "calls" if num_calls else "no_calls")
        self._tool_answers[key] = self._tool_answers.get(key, 0) + 1

    @contextmanager
    def sleep_operation(self, operation: str) -> Iterator[None]:
        """Measure one, of `SLEEP_OPERATIONS`."""
        began = time.perf_counter()
        self.num_sleeping[operation] += 1
        try:
            yield
        finally:
            self.num_sleeping[operation] -= 1
            _series(self._sleep_seconds, operation, SLEEP_SECONDS).observe(time.perf_counter() - began)

    # Over several processes

    def take(self) -> HttpCounts:
        """Return what was counted since the last `take`."""
        requests, self._requests = self._requests, {}
        stalled, self.num_stalled = self.num_stalled, 0
        tool_answers, self._tool_answers = self._tool_answers, {}
        return HttpCounts(
            requests=requests,
            seconds={key: series.take() for key, series in self._seconds.items()},
            fine_seconds=self._fine_seconds.take(),
            request_bytes={key: series.take() for key, series in self._request_bytes.items()},
            response_bytes={key: series.take() for key, series in self._response_bytes.items()},
            tool_answers=tool_answers,
            sleep_seconds={key: series.take() for key, series in self._sleep_seconds.items()},
            num_sleeping=dict(self.num_sleeping),
            num_in_progress=self.num_in_progress,
            num_stalled=stalled,
        )

    def add(self, told: HttpCounts) -> None:
        """Add what another process took; not its open requests, which are not a count."""
        for key, count in told.requests.items():
            self._requests[key] = self._requests.get(key, 0) + count
        for pair, series in told.seconds.items():
            _series(self._seconds, pair, SECONDS).add(*series)
        if told.fine_seconds is not None:
            self._fine_seconds.add(*told.fine_seconds)
        for mine, theirs in (
            (self._request_bytes, told.request_bytes),
            (self._response_bytes, told.response_bytes),
        ):
            for handler, series in theirs.items():
                _series(mine, handler, BYTES).add(*series)
        for answer, count in told.tool_answers.items():
            self._tool_answers[answer] = self._tool_answers.get(answer, 0) + count
        for operation, series in told.sleep_seconds.items():
            _series(self._sleep_seconds, operation, SLEEP_SECONDS).add(*series)
        self.num_stalled += told.num_stalled

    # What others see

    def snapshot(self, prefix: str = "pelton_") -> list[Metric]:
        """prefix: of what is not HTTP's, as `metrics_prefix` says."""
        found: list[Metric] = [
            Gauge(
                name="http_requests_in_progress",
                documentation="HTTP requests that are open now.",
                value=self.num_in_progress,
            ),
            Counter(
                name="http_stalled_connections",
                documentation="Connections closed because their client did not read its answer, or did not send its request.",
                value=self.num_stalled,
            ),
        ]
        for (handler, method, status), count in self._requests.items():
            labels = {"handler": handler, "method": method, "status": status}
            found.append(
                Counter(name="http_requests", labels=labels, documentation="HTTP requests answered.", value=count)
            )
        for (parser, outcome), count in self._tool_answers.items():
            found.append(
                Counter(
                    name=prefix + "tool_call_parser_invocations", labels={"parser": parser, "outcome": outcome},
                    documentation="Answers that a tool parser has read, by whether calls were in them (calls, no_calls).",
                    value=count,
                )
            )  # fmt: skip
        for operation, count in self.num_sleeping.items():
            found.append(
                Gauge(
                    name=prefix + "sleep_mode_operations_in_flight", labels={"operation": operation},
                    documentation="Requests to sleep or to wake up that are under way.", value=count,
                )
            )  # fmt: skip
        for operation, buckets in self._sleep_seconds.items():
            found.append(
                buckets.as_metric(
                    prefix + "sleep_mode_operation_duration_seconds", "Of a request to sleep or to wake up, to its end.",
                    {"operation": operation},
                )
            )  # fmt: skip
        for (handler, method), buckets in self._seconds.items():
            found.append(
                buckets.as_metric(
                    "http_request_duration_seconds", "From the first byte of a request to the last byte of its answer.",
                    {"handler": handler, "method": method},
                )
            )  # fmt: skip
        found.append(
            self._fine_seconds.as_metric(
                "http_request_duration_highr_seconds", "The same over all routes, in finer buckets.", {}
            )
        )
        for name, what, series in (
            ("http_request_size_bytes", "Bytes of a request's body.", self._request_bytes),
            ("http_response_size_bytes", "Bytes of an answer's body.", self._response_bytes),
        ):
            found += [buckets.as_metric(name, what, {"handler": handler}) for handler, buckets in series.items()]
        return found


def _series(known: dict[Any, BucketCounts], key: object, bounds: tuple[float, ...]) -> BucketCounts:
    found = known.get(key)
    if found is None:
        found = known[key] = BucketCounts(bounds)
    return found
