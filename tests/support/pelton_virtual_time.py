"""An event loop whose time is what its timers ask for: nobody waits, and nothing depends on the machine's speed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its clock begins at 0. It goes on when there is nothing to do before the next timer, and stands while a thread works."""

    def __init__(self) -> None:
        self.now_s, self._num_jobs = 0.0, 0
        super().__init__()
        select = self._selector.select  # type: ignore[attr-defined]

        def select_or_skip(timeout: float | None = None) -> Any:
            found = select(0)
            if found or timeout == 0:
                return found
            if timeout is None or self._num_jobs:
                return select(None)
            self.now_s += timeout
            return found

        self._selector.select = select_or_skip  # type: ignore[attr-defined]

    def time(self) -> float:
        return self.now_s

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> asyncio.Future[Any]:
        self._num_jobs += 1
        future = super().run_in_executor(executor, func, *args)
        future.add_done_callback(self._job_is_done)
        return future

    def _job_is_done(self, future: object) -> None:
        self._num_jobs -= 1


class Clock:
    """`time`, for the modules under test: of the loop that runs."""

    @staticmethod
    def perf_counter() -> float:
        return asyncio.get_running_loop().time()

    @staticmethod
    def sleep(seconds: float) -> None:
        """Stand still: no timer is looked at meanwhile."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.now_s += seconds


def run(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
