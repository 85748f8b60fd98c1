"""Counts of HTTP requests, beside the engine's own metrics."""

from __future__ import annotations

from pelton.metrics.buckets import BucketCounts
from pelton.metrics.snapshot import Counter, Gauge, Histogram, Metric

SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class HttpMetrics:
    """`handler` is the route's template, or "none", so that a client cannot make new series."""

    def __init__(self) -> None:
        self._requests: dict[tuple[str, str, str], int] = {}
        self._seconds: dict[tuple[str, str], BucketCounts] = {}
        self.num_in_progress = 0

    def observe(self, handler: str, method: str, status: int, seconds: float) -> None:
        key = (handler, method, f"{status // 100}xx")
        self._requests[key] = self._requests.get(key, 0) + 1
        buckets = self._seconds.get(key[:2])
        if buckets is None:
            buckets = self._seconds[key[:2]] = BucketCounts(SECONDS)
        buckets.observe(seconds)

    def snapshot(self) -> list[Metric]:
        found: list[Metric] = [
            Gauge(
                name="http_requests_in_progress",
                documentation="HTTP requests that are open now.",
                value=self.num_in_progress,
            )
        ]
        for (handler, method, status), count in self._requests.items():
            labels = {"handler": handler, "method": method, "status": status}
            found.append(
                Counter(name="http_requests", labels=labels, documentation="HTTP requests answered.", value=count)
            )
        for (handler, method), buckets in self._seconds.items():
            found.append(
                Histogram(
                    name="http_request_duration_seconds",
                    labels={"handler": handler, "method": method},
                    documentation="From the first byte of a request to the last byte of its answer.",
                    count=buckets.count,
                    sum=buckets.sum,
                    buckets=buckets.cumulative(),
                )
            )
        return found
