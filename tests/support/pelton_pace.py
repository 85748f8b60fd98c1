"""How quick this machine's Python is: for bounds that mean the same on each."""

from __future__ import annotations

import time


def store_s() -> float:
    """Seconds of one turn of a loop that sets an item of a dict, at best: 45 ns on the machine that bounds were set on."""
    return min(_thousand_stores_s() for _ in range(50)) / 1000


def _thousand_stores_s() -> float:
    items: dict[int, int] = {}
    began = time.perf_counter()
    for number in range(1000):
        items[number & 63] = number
    return time.perf_counter() - began
