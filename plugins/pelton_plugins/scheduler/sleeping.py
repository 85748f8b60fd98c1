"""Sleep of the engine: workers have given memory back, so requests are refused until they have taken it again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pelton.errors import RequestError
from pelton.scheduler.interface import Scheduler

LEVELS = (1, 2)


class Rest:
    """See `Scheduler.rest`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.level = 0  # awake

    @property
    def is_asleep(self) -> bool:
        return self.level > 0

    def check(self) -> None:
        """Raise while the engine sleeps."""
        if self.is_asleep:
            error = RequestError("The engine sleeps: wake it up first, with wake_up() or POST /wake_up.")
            error.status = 503
            raise error

    def call(self, call: Callable[..., Any], method: str, *args: Any) -> bool:
        """Do it; return whether the engine sleeps now. Sleeping twice does nothing, nor does waking up when awake."""
        if method == "sleep":
            self._sleep(call, *args)
        elif method == "wake_up" and self.is_asleep and call(method, *args):
            self.level = 0
        return self.is_asleep

    def _sleep(self, call: Callable[..., Any], level: Any) -> None:
        if level not in LEVELS:
            raise RequestError("Use 1 (weights go to the host) or 2 (they are dropped)", param="level", value=level)
        if self.is_asleep:
            return
        if self._scheduler.has_unfinished_requests() or not self._scheduler.reset_prefix_cache():
            raise RequestError("Requests run: wait for them, or abort them, before the engine sleeps.", param="level")
        call("sleep", level)
        self.level = level
