"""Calls with room for deep recursion in native code: what overflows a stack ends the process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_STACK_BYTES = 256 * 2**20
"""Of the thread that compiles. llguidance descends a level for each rule or reference that leads to the next, and needs up to 4 kB for
it; a constraint of the greatest length has 33,000. It is address space: what is not touched takes no memory."""

_lock = threading.Lock()
T = TypeVar("T")


def on_deep_stack(function: Callable[[], T], timeout_s: float | None = None) -> T:
    """Call a function on a thread of its own. Raises `TimeoutError` where it takes longer; it goes on, and what it gives is lost."""
    made: Future[T] = Future()

    def run() -> None:
        try:
            made.set_result(function())
        except BaseException as error:
            made.set_exception(error)

    with _lock:  # the size is that of all threads which start meanwhile
        before = threading.stack_size(_STACK_BYTES)
        try:
            threading.Thread(target=run, name="pelton-compile", daemon=True).start()
        finally:
            threading.stack_size(before)
    return made.result(timeout_s)
