"""When requests arrive: a Poisson process, or one with Gamma intervals that is burstier or steadier."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

from pelton.errors import ConfigError


def arrival_times(rate: float, burstiness: float, rng: random.Random) -> Iterator[float]:
    """Seconds from the start, without end.

    Intervals are Gamma with shape `burstiness` and mean 1 / rate: 1 is a Poisson process, less comes in bursts, more is
    steadier. An infinite rate sends everything at once.
    """
    if not rate > 0 or not burstiness > 0 or math.isinf(burstiness):
        raise ConfigError(f"request_rate is {rate} and burstiness {burstiness}; use positive numbers.")
    now = 0.0
    while True:
        if not math.isinf(rate):
            now += rng.gammavariate(burstiness, 1.0 / (rate * burstiness))
        yield now
