"""`InProcessClient`: the engine core in this process, stepped by the thread that asks for outputs."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from pelton.config import EngineConfig
from pelton.engine.client import EngineClient
from pelton.errors import EngineDeadError
from pelton.messages.outputs import EngineOutputs, FinishReason
from pelton.messages.request import EngineRequest
from pelton.model.resolved import ResolvedModel
from pelton.utils import garbage

if TYPE_CHECKING:
    from pelton.engine.core import EngineCore
    from pelton.plugins import Plugins


class InProcessClient(EngineClient):
    """One thread at a time, or asyncio: once `get_outputs_async` was used the core runs on a thread of its own, and what
    the event loop adds or ends waits in a list until the step is over."""

    def __init__(self, config: EngineConfig, model: ResolvedModel, plugins: Plugins, ahead: Any = None) -> None:
        with garbage.paused():
            from pelton.engine.core import EngineCore

            self._bind(EngineCore(config, model, plugins, ahead=ahead))

    @classmethod
    def over(cls, core: EngineCore) -> InProcessClient:
        """A client of a core that is there already."""
        client = cls.__new__(cls)
        client._bind(core)
        return client

    def _bind(self, core: EngineCore) -> None:
        self._core = core
        self.info = core.info
        self._error: Exception | None = None
        self._lock = threading.RLock()
        self._is_async = False
        self._pending: deque[Callable[[], Any]] = deque()
        self._refused: list[Any] = []
        self._wakeup: asyncio.Event | None = None

    def add_request(self, request: EngineRequest) -> None:
        self._check()
        if self._is_async:
            self._later(partial(self._add_now, request))
        else:
            self._core.add_request(request)

    def finish_requests(self, request_ids: Sequence[str], reason: FinishReason = FinishReason.ABORT) -> None:
        self._check()
        if not request_ids:
            return
        if self._is_async:
            self._later(partial(self._core.finish_requests, list(request_ids), reason))
        else:
            self._core.finish_requests(request_ids, reason)

    def get_outputs(self, timeout_s: float | None = None) -> EngineOutputs:
        self._check()
        with self._lock:
            while self._pending:
                self._pending.popleft()()
            if self._refused:
                refused, self._refused = self._refused, []
                return EngineOutputs(outputs=refused, timestamp=time.monotonic())
            if not self._core.has_work():
                return EngineOutputs()
            try:
                return self._core.step(timeout_s)
            except Exception as error:
                self._error = error
                raise

    async def get_outputs_async(self) -> list[EngineOutputs]:
        self._is_async = True
        if self._wakeup is None:
            self._wakeup = asyncio.Event()
        while not self.has_work:
            self._check()
            self._wakeup.clear()
            if not self._pending:
                await self._wakeup.wait()
        return [await asyncio.to_thread(self.get_outputs)]

    def call(self, method: str, *args: Any, timeout_s: float = 60.0) -> Any:
        self._check()
        with self._lock:
            return self._core.call(method, *args)

    @property
    def has_work(self) -> bool:
        return self._error is None and bool(self._pending or self._refused or self._core.has_work())

    @property
    def error(self) -> Exception | None:
        return self._error

    def shutdown(self, timeout_s: float = 10.0) -> None:
        if self._error is None:
            self._error = EngineDeadError("The engine was shut down.")
            if self._lock.acquire(timeout=timeout_s):
                self._lock.release()
            self._core.shutdown()
            if self._wakeup is not None:
                self._wakeup.set()

    def _check(self) -> None:
        if self._error is not None:
            raise EngineDeadError(str(self._error)) from self._error

    def _later(self, action: Callable[[], Any]) -> None:
        self._pending.append(action)
        if self._wakeup is not None:
            self._wakeup.set()

    def _add_now(self, request: EngineRequest) -> None:
        refused = self._core.try_add(request)
        if refused is not None:
            self._refused.append(refused)
