"""From token times to the figures of a serving benchmark: TTFT, ITL, TPOT, E2E, percentiles, goodput."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pelton.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

SLO_NAMES = ("ttft", "tpot", "e2el")
"""In milliseconds: time to first token, time per output token, end-to-end latency."""


@dataclass(slots=True)
class RequestTimes:
    """One request: when each of its tokens came, in seconds after it was sent."""

    tokens: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    error: str | None = None
    was_aborted: bool = False
    sent_s: float = 0.0
    """When it was sent, by the monotonic clock."""

    @property
    def ttft_s(self) -> float:
        return self.tokens[0]

    @property
    def itls_s(self) -> list[float]:
        """Times between successive tokens; those that came together have 0 between them."""
        return [late - early for early, late in zip(self.tokens, self.tokens[1:], strict=False)]

    @property
    def tpot_s(self) -> float | None:
        """Mean inter-token latency; None for one token."""
        itls = self.itls_s
        return sum(itls) / len(itls) if itls else None

    @property
    def e2e_s(self) -> float:
        """TTFT and all inter-token latencies."""
        return self.ttft_s + sum(self.itls_s)

    def meets(self, slos_ms: Mapping[str, float]) -> bool:
        """True when every objective holds; one token alone has no TPOT to miss."""
        times = {"ttft": self.ttft_s, "tpot": self.tpot_s or 0.0, "e2el": self.e2e_s}
        return all(times[name] * 1e3 <= limit for name, limit in slos_ms.items())


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest ranks; NaN of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summary(values: Sequence[float], percents: Iterable[float], *, scale: float = 1.0) -> dict[str, float]:
    """Mean and percentiles, times `scale`."""
    mean = sum(values) / len(values) if values else math.nan
    return {"mean": mean * scale, **{f"p{p:g}": percentile(values, p) * scale for p in percents}}


def read_slos(texts: Sequence[str]) -> dict[str, float]:
    """Objectives from "ttft:200" and the like. Raises `ConfigError`."""
    slos: dict[str, float] = {}
    for text in texts:
        name, _, limit = text.partition(":")
        try:
            value = float(limit)
        except ValueError:
            value = math.nan
        if name not in SLO_NAMES or not value > 0:
            raise ConfigError(f"--goodput is {text!r}; use {', '.join(SLO_NAMES)} with milliseconds, such as ttft:200.")
        slos[name] = value
    return slos


class LogHistogram:
    """Counts on a logarithmic scale: percentiles within 1 % in a memory that does not grow with the run."""

    _STEP = math.log(1.01)
    _LEAST = 1e-7

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.num_values = 0

    def add(self, value: float, count: int = 1) -> None:
        index = round(math.log(max(value, self._LEAST)) / self._STEP)
        self._counts[index] = self._counts.get(index, 0) + count
        self.num_values += count

    def add_many(self, values: np.ndarray, counts: np.ndarray) -> None:
        """As `add` for each: [N] values, [N] int64 counts."""
        import numpy as np

        indexes = np.rint(np.log(np.maximum(values, self._LEAST)) / self._STEP).astype(np.int64)
        places, where = np.unique(indexes, return_inverse=True)
        totals = np.bincount(where, weights=counts)
        for index, total in zip(places.tolist(), totals.tolist(), strict=True):
            self._counts[index] = self._counts.get(index, 0) + int(total)
        self.num_values += int(counts.sum())

    def to_dict(self) -> dict[str, int]:
        """As plain data, for another process."""
        return {str(index): count for index, count in self._counts.items()}

    @classmethod
    def from_dict(cls, counts: Mapping[str, int]) -> LogHistogram:
        found = cls()
        found._counts = {int(index): count for index, count in counts.items()}
        found.num_values = sum(counts.values())
        return found

    def merge(self, other: LogHistogram) -> None:
        for index, count in other._counts.items():
            self._counts[index] = self._counts.get(index, 0) + count
        self.num_values += other.num_values

    def percentile(self, percent: float) -> float:
        """NaN of nothing."""
        left = self.num_values * percent / 100
        for index in sorted(self._counts):
            left -= self._counts[index]
            if left <= 0:
                return math.exp(index * self._STEP)
        return math.nan
