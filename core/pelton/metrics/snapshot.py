"""Metrics as values: what `LLM.get_metrics()` returns. A stat logger that counts offers `snapshot() -> list[Metric]`."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One time series. `name` has the prefix, and no `_total`, `_bucket`, `_sum` or `_count`."""

    name: str
    labels: dict[str, str] = field(default_factory=dict)
    documentation: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counter(Metric):
    """Only goes up."""

    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauge(Metric):
    """Goes up and down."""

    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram(Metric):
    """`buckets`: upper bound as text (the last is "+Inf") to the number of observations at or below it."""

    count: int
    sum: float
    buckets: dict[str, int]
