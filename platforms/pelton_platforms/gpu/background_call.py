"""`BackgroundCall`: a call that takes a start long, and whose result is not needed at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ClassVar, Generic, TypeVar

T = TypeVar("T")


class BackgroundCall(Generic[T]):
    """Result of a call that runs on a thread of its own. One runs at a time in a process, since ranks that make several things
    together make them in one order."""

    last: ClassVar[BackgroundCall[Any] | None] = None
    """The one that may still run."""

    def __init__(self, make: Callable[[], T]) -> None:
        self.wait_for_last()
        self._made: Future[T] = Future()
        BackgroundCall.last = self
        threading.Thread(target=self._run, args=(make,), name="pelton-background", daemon=True).start()

    @classmethod
    def wait_for_last(cls) -> None:
        """Wait until none runs. Raises nothing of it: `result` does."""
        if (last := BackgroundCall.last) is not None:
            last._made.exception()
            BackgroundCall.last = None

    @property
    def has_succeeded(self) -> bool:
        return self._made.done() and self._made.exception() is None

    def result(self) -> T:
        """Wait for it. Raises what the call raised, each time."""
        return self._made.result()

    def _run(self, make: Callable[[], T]) -> None:
        try:
            self._made.set_result(make())
        except BaseException as error:
            self._made.set_exception(error)
