"""Histograms that are cheap to feed: one bisect per observation, cumulative counts only when read."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from pelton.metrics.snapshot import Histogram


class BucketCounts:
    """Observations by upper bound. `bounds` rise; everything above the last one is in +Inf."""

    __slots__ = ("_counts", "bounds", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        assert list(self.bounds) == sorted(set(self.bounds)), "bucket bounds must rise"
        self._counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def observe_all(self, values: Iterable[float]) -> None:
        counts, bounds, total = self._counts, self.bounds, 0.0
        for value in values:
            counts[bisect_left(bounds, value)] += 1
            total += value
        self.sum += total

    def take(self) -> tuple[list[int], float]:
        """Return what was observed since the last `take`, for `add` elsewhere, and start again at 0."""
        taken = self._counts, self.sum
        self._counts, self.sum = [0] * len(self._counts), 0.0
        return taken

    def add(self, counts: Sequence[int], total: float) -> None:
        """Add what another one of the same bounds took."""
        self._counts = [mine + theirs for mine, theirs in zip(self._counts, counts, strict=True)]
        self.sum += total

    @property
    def count(self) -> int:
        return sum(self._counts)

    def cumulative(self) -> dict[str, int]:
        """Upper bound as text, "+Inf" last, to the number of observations at or below it."""
        return dict(
            zip((*(repr(float(bound)) for bound in self.bounds), "+Inf"), accumulate(self._counts), strict=True)
        )

    def as_metric(self, name: str, documentation: str, labels: Mapping[str, str]) -> Histogram:
        """Return what was observed so far."""
        return Histogram(
            name=name, labels=dict(labels), documentation=documentation, count=self.count, sum=self.sum,
            buckets=self.cumulative(),
        )  # fmt: skip
