"""`JoinedClient`: an engine that another process owns, as a client of this one.

Its messages are read on the event loop, not by a thread: no message waits for the interpreter's lock while the loop works.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from pelton.engine import protocol
from pelton.engine.channel import Channel
from pelton.engine.client import EngineClient
from pelton.errors import EngineDeadError, EngineError, error_from_info
from pelton.messages.outputs import EngineOutputs, FinishReason
from pelton.messages.report import EngineInfo
from pelton.messages.request import EngineRequest
from pelton.metrics.stats import SchedulerStats
from pelton_plugins.server.processes.control import EngineUp

RESTART_TIMEOUT_S = 1800.0  # a large model takes long to load


class JoinedClient(EngineClient):
    """`engine_up` and `engine_down` come from the owner's messages, on the event loop, where it is made too.

    up: of the engine, or None while that is down; info: of another engine then. share: see `share_load`.
    """

    def __init__(
        self, up: EngineUp | None, loop: asyncio.AbstractEventLoop, info: EngineInfo | None = None,
        share: Callable[[int], int] | None = None,
    ) -> None:  # fmt: skip
        self._loop, self._share = loop, share
        self._call_ids = itertools.count()
        self._is_up = threading.Event()
        self._is_closed = False
        self._fd = -1
        self._channel: Channel | None = None
        if up is not None:
            self._join(up)
        else:
            assert info is not None
            self.info = info

    def engine_up(self, up: EngineUp) -> None:
        """Join the engine that took the place of a dead one; where that died too, the owner tells of the next."""
        with contextlib.suppress(zmq.ZMQError):
            self._join(up)

    def _join(self, up: EngineUp) -> None:
        self._leave()
        self.info = up.info
        self._channel = Channel(up.socket_dir, up.client_index)
        self._channel.send(protocol.Join(up.client_index))
        self._fd = self._channel.fd
        self._loop.add_reader(self._fd, self._channel.take_messages)
        self._is_up.set()

    def told_load(self, num_waiting: int, num_running: int) -> None:
        """The owner tells how many requests the engine has, those of other processes too."""
        if self._channel is not None and self._channel.error is None:
            stats = SchedulerStats(num_waiting_reqs=num_waiting, num_running_reqs=num_running)
            self._channel.put(EngineOutputs(stats=stats))

    def share_load(self, num_in_flight: int) -> int:
        return 0 if self._share is None else self._share(num_in_flight)

    def engine_down(self, reason: str) -> None:
        self._is_up.clear()
        if self._fd < 0 or self._channel is None:
            return
        self._channel.take_messages()  # what it sent before it died
        self._channel.declare_dead(EngineDeadError(reason))

    def _leave(self, linger_ms: int = 0) -> None:
        if self._fd >= 0 and self._channel is not None:
            self._loop.remove_reader(self._fd)
            self._fd = -1
            self._channel.close_both(linger_ms)

    def _live(self) -> Channel:
        if self._channel is None:
            raise EngineDeadError("The engine is down.")
        return self._channel

    def restart(self) -> None:
        """Wait until the owner has started a new engine. From a thread."""
        if not self._is_up.wait(RESTART_TIMEOUT_S) or self._is_closed:
            raise EngineDeadError("The engine did not come back.")

    def add_request(self, request: EngineRequest) -> None:
        self.add_requests([request])

    def add_requests(self, requests: Sequence[EngineRequest]) -> None:
        channel = self._live()
        for request in requests:
            request.client_index = channel.client_index
        channel.send(protocol.Add(list(requests)))

    def finish_requests(self, request_ids: Sequence[str], reason: FinishReason = FinishReason.ABORT) -> None:
        if request_ids:
            self._live().send(protocol.Finish(list(request_ids), reason))

    def get_outputs(self, timeout_s: float | None = None) -> EngineOutputs:
        raise EngineError("A joined engine is read on its event loop; await get_outputs_async().")

    async def get_outputs_async(self) -> list[EngineOutputs]:
        channel = self._live()
        if channel.error is None:
            channel.take_messages()
        return await channel.get_async()

    def call(self, method: str, *args: Any, timeout_s: float = 60.0) -> Any:
        answer = self._live().call(next(self._call_ids), method, args, timeout_s)
        if answer.error is not None:
            raise error_from_info(answer.error)
        return answer.result

    @property
    def error(self) -> Exception | None:
        return EngineDeadError("The engine is down.") if self._channel is None else self._channel.error

    @property
    def last_progress_age_s(self) -> float:
        return 0.0 if self._channel is None else self._channel.last_progress_age_s

    @property
    def silence_s(self) -> float:
        return 0.0 if self._channel is None else self._channel.silence_s

    def shutdown(self, timeout_s: float = 10.0) -> None:
        """Leave the engine, which goes on."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._channel is not None:
            if self._channel.error is None:
                with contextlib.suppress(EngineDeadError):
                    self._channel.send(protocol.Leave(self._channel.client_index))
            self._channel.declare_dead(EngineDeadError("The engine was shut down."))
        self._is_up.set()
        self._leave(linger_ms=100)
