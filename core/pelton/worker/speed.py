"""How many tokens a step may have so that it lasts no longer than it should: by a measurement at the start.

A large model on a slow device computes a few tokens a second, a small one on a fast device thousands: no one number of tokens
suits both. While a step runs nobody gets a token, and nothing can be stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable

LEAST_STEP_TOKENS = 64
"""Fewer would read the weights too often, whatever the speed."""
_FIRST_TOKENS, _MOST_TOKENS, _GROWTH = 4, 256, 4
_ENOUGH_S = 0.06
"""Of a step that says the speed well enough: one `_GROWTH` times as large is not tried any more."""


def measure_speed(run: Callable[[int], None], most: int, *, clock: Callable[[], float] = time.perf_counter) -> float:
    """Tokens a second of steps with many, by `run(num_tokens)`, which computes one and waits for it; never with more than
    `most`. It starts with few tokens, so that a slow device has done after one step, and a fast one in a quarter of a second."""
    num_tokens = min(_FIRST_TOKENS, most)
    while True:
        started = clock()
        run(num_tokens)
        seconds = clock() - started
        larger = num_tokens * _GROWTH
        if seconds > _ENOUGH_S or larger > min(most, _MOST_TOKENS):
            return num_tokens / max(seconds, 1e-9)
        num_tokens = larger


def fitting_tokens(speed: float, target_s: float, least: int, most: int) -> int:
    """Tokens of a step that takes `target_s` at most: a power of two, within the bounds whatever the speed."""
    fitting = max(int(speed * target_s), 1)
    return min(max(1 << (fitting.bit_length() - 1), least), most)
