"""The supervisor of one engine: takes its outputs, kills it when it hangs, and starts it again when it is dead."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from pelton.engine.client import EngineClient
from pelton.errors import EngineDeadError, PeltonError
from pelton.logging import get_logger
from pelton.messages.outputs import EngineOutputs
from pelton.metrics.stats import SchedulerStats

logger = get_logger(__name__)

MAX_RESTARTS = 5
HEALTHY_S = 600.0  # after this long alive, earlier deaths are forgotten
FAILED_STEPS = 5  # in a row, after which the engine is said to be ill, though it lives
FAILING_S = 30.0  # for so long after the last of them
BACKOFF_S = (0.0, 1.0, 2.0, 5.0, 10.0)


class Supervisor:
    """`run` and `watch` are tasks of one event loop.

    max_restarts: how often in a row a dead engine is started again. hand_on: takes outputs. died: ends all requests with the cause.
    started: takes the seconds of a start.
    """

    def __init__(
        self,
        client: EngineClient,
        *,
        max_restarts: int,
        hand_on: Callable[[EngineOutputs], None],
        died: Callable[[EngineDeadError], None],
        started: Callable[[float], None],
        name: str = "The engine",
    ) -> None:
        self.client = client
        self.down: EngineDeadError | None = None
        """Why there is no engine; None while it runs."""
        self._failed: tuple[str, float] | None = None  # why steps fail one after another, and when the last one did
        self._max_restarts = max_restarts
        self._hand_on, self._died, self._started, self._name = hand_on, died, started, name

    @property
    def failing(self) -> str | None:
        """Why steps fail, for FAILING_S after FAILED_STEPS of them did in a row. Requests are taken meanwhile: one may show that all is
        well again."""
        if self._failed is None or time.monotonic() - self._failed[1] >= FAILING_S:
            return None
        return self._failed[0]

    async def run(self) -> None:
        """Take outputs until the engine is dead; then start it again, a bounded number of times."""
        deaths = 0
        while True:
            since = time.monotonic()
            error = await self._take_outputs()
            deaths = 1 if time.monotonic() - since > HEALTHY_S else deaths + 1
            self.down = error
            logger.error("%s", error)
            self._died(error)
            while not await self._restart(deaths, error):
                deaths += 1

    async def _take_outputs(self) -> EngineDeadError:
        """Hand outputs on until the engine is dead; returns why."""
        while True:
            try:
                batches = await self.client.get_outputs_async()
            except EngineDeadError as error:
                return error
            except Exception as error:
                logger.exception("Taking the engine's outputs failed")
                return EngineDeadError(f"Taking the engine's outputs failed: {type(error).__name__}: {error}")
            for outputs in batches:
                self._hand_on(outputs)
                if outputs.stats is not None:
                    self._note_failures(outputs.stats)
            # The engine may be faster than we are, and the next outputs are there already: those who wait for these come
            # first, and so do new requests.
            await asyncio.sleep(0)

    def _note_failures(self, stats: SchedulerStats) -> None:
        count = stats.num_failed_steps
        if count >= FAILED_STEPS:
            self._failed = f"The last {count} steps failed: {stats.step_failure}", time.monotonic()
        elif not count:
            self._failed = None

    async def _restart(self, deaths: int, error: EngineDeadError) -> bool:
        """Try once. True when the engine is back; never returns when there are no tries left."""
        if deaths > self._max_restarts:
            logger.error("%s failed %d times and will not be restarted; restart the server.", self._name, deaths)
            self.down = EngineDeadError(f"{error} It will not be restarted (it failed {deaths} times).")
            await asyncio.Event().wait()
        await asyncio.sleep(BACKOFF_S[min(deaths - 1, len(BACKOFF_S) - 1)])
        began = time.monotonic()
        try:
            await asyncio.to_thread(self.client.restart)
        except Exception as failure:  # also what the system refuses, such as a process or a socket: later it may not
            is_known = isinstance(failure, PeltonError)
            cause = str(failure) if is_known else f"{type(failure).__name__}: {failure}"
            logger.error("%s: restarting it failed: %s", self._name, cause, exc_info=not is_known)
            self.down = EngineDeadError(f"{error} Restarting it failed: {cause}")
            return False
        self._started(time.monotonic() - began)
        self.down = None
        logger.info("%s is running again.", self._name)
        return True

    async def watch(self, most_s: float) -> None:
        """Kill an engine whose step hangs, or whose process says nothing: `run` then starts another."""
        interval = min(1.0, most_s / 4)
        looked = time.monotonic()
        while True:
            await asyncio.sleep(interval)
            now = time.monotonic()
            was_late = now - looked > 2 * interval + 1.0  # we stood still ourselves: signs of life wait to be read
            looked = now
            age = self.client.last_progress_age_s
            if age > most_s and not was_late and self.client.error is None:
                reason = f"It made no progress for {age:.1f} s (max_step_s is {most_s:g})."
                logger.error("%s is killed. %s", self._name, reason)
                self.client.kill(reason)
