"""`Channel`: one front end's two sockets to an engine process, and what came through them until somebody asks for it.

Who reads the socket is the owner's affair: a thread (`process_client.py`), or the event loop itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

import msgspec
import zmq

from pelton import limits
from pelton.engine import protocol
from pelton.errors import EngineDeadError, EngineError
from pelton.logging import get_logger
from pelton.messages.outputs import EngineOutputs

logger = get_logger(__name__)


class Channel:
    """Binds the socket of its outputs before the engine hears of it. `take_messages` from one thread, the rest from any."""

    def __init__(self, socket_dir: str, client_index: int = 0) -> None:
        self.error: EngineDeadError | None = None
        self.client_index = client_index
        self._outputs: deque[EngineOutputs] = deque()
        self._arrived = threading.Condition()
        self._async_waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None
        self._calls: dict[int, Future[protocol.CallResult]] = {}
        self._last_sign = time.monotonic()
        self._busy_s = 0.0
        self._decoder = protocol.decoder_for_front_end()
        self._context = zmq.Context(io_threads=1)
        self._from_engine = self._context.socket(zmq.PULL)
        self._from_engine.setsockopt(zmq.RCVHWM, 0)
        self._from_engine.setsockopt(zmq.MAXMSGSIZE, limits.MAX_IPC_MESSAGE_BYTES)
        try:
            self._from_engine.bind(protocol.address(socket_dir, protocol.output_socket(client_index)))
        except BaseException:
            self._context.destroy(0)  # waits for open sockets otherwise, for ever, once it is collected
            raise
        self._to_engine = self._context.socket(zmq.PUSH)
        self._to_engine.setsockopt(zmq.SNDHWM, 0)
        self._to_engine.setsockopt(zmq.LINGER, 0)
        self._to_engine.setsockopt(zmq.SNDTIMEO, 1000)
        self._to_engine.connect(protocol.address(socket_dir, protocol.INPUT_SOCKET))
        self._send_lock = threading.Lock()

    # -- caller's side --

    def send(self, message: protocol.ToEngine) -> None:
        if self.error is not None:
            raise self.error
        data = protocol.encode(message)
        try:
            with self._send_lock:
                self._to_engine.send(data, 0, len(data) < 65_536)
        except zmq.ZMQError as error:
            raise self.error or EngineDeadError(f"The engine process takes no messages: {error}.") from None

    @property
    def has_outputs(self) -> bool:
        return bool(self._outputs)

    def get(self, timeout_s: float | None) -> EngineOutputs:
        with self._arrived:
            self._arrived.wait_for(lambda: self._outputs or self.error is not None, timeout_s)
            if self._outputs:
                return self._outputs.popleft()
        if self.error is not None:
            raise self.error
        return EngineOutputs()

    async def get_async(self) -> list[EngineOutputs]:
        while True:
            with self._arrived:
                if self._outputs:
                    outputs = list(self._outputs)
                    self._outputs.clear()
                    return outputs
                if self.error is not None:
                    raise self.error
                loop = asyncio.get_running_loop()
                waiter = loop.create_future()
                self._async_waiter = (loop, waiter)
            await waiter

    def call(self, call_id: int, method: str, args: Sequence[Any], timeout_s: float) -> protocol.CallResult:
        future: Future[protocol.CallResult] = Future()
        self._calls[call_id] = future
        try:
            self.send(protocol.Call(call_id, method, list(args), self.client_index))
            return future.result(timeout_s)
        except FutureTimeoutError:
            raise EngineError(
                f"The engine did not answer {method!r} within {timeout_s:g} s; its step loop has been busy for "
                f"{self.last_progress_age_s:.1f} s."
            ) from None
        finally:
            self._calls.pop(call_id, None)

    @property
    def last_progress_age_s(self) -> float:
        silent_s = time.monotonic() - self._last_sign
        # A heartbeat comes every second: silence up to then is not news.
        return self._busy_s + silent_s if self._busy_s else max(0.0, silent_s - 1.5)

    @property
    def silence_s(self) -> float:
        """Since the engine's process said anything; it does every second."""
        return time.monotonic() - self._last_sign

    def close_sender(self) -> None:
        with self._send_lock:
            self._to_engine.close(0)

    def close_both(self, linger_ms: int = 0) -> None:
        """Close both sockets; called by the thread that reads. linger_ms: time for messages that are still being sent."""
        with self._send_lock:
            self._to_engine.close(linger_ms)
        self._from_engine.close(0)
        self._context.term()

    @property
    def fd(self) -> int:
        """Readable when messages came: then `take_messages`, which leaves none behind."""
        return int(self._from_engine.getsockopt(zmq.FD))

    # -- reader's side --

    def take_messages(self) -> None:
        """Take in all that has come. Never waits."""
        while True:
            try:
                frames = self._from_engine.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                self._take(self._decoder.decode(frames[0].buffer))
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                logger.error("A message of %d bytes from the engine was dropped: %s", len(frames[0].buffer), error)

    def _take(self, message: protocol.ToFrontEnd) -> None:
        self._last_sign = time.monotonic()
        if isinstance(message, protocol.Outputs):
            self._busy_s = 0.0
            self.put(message.outputs)
        elif isinstance(message, protocol.Heartbeat):
            self._busy_s = message.busy_s
        elif isinstance(message, protocol.CallResult):
            future = self._calls.pop(message.call_id, None)
            if future is not None:
                future.set_result(message)
        else:
            self.handle(message)

    def put(self, outputs: EngineOutputs) -> None:
        with self._arrived:
            self._outputs.append(outputs)
            self._notify()

    def handle(self, message: protocol.ToFrontEnd) -> None:
        """Take in a message of the engine's life: `Hello`, `Ready` or `Failed`."""

    def declare_dead(self, error: EngineDeadError) -> None:
        """All who wait get `error`, now and from now on."""
        self.error = error
        for future in list(self._calls.values()):
            if not future.done():
                future.set_exception(error)
        with self._arrived:
            self._notify()

    def _notify(self) -> None:
        """Wake the threads that wait for outputs; the caller holds `_arrived`."""
        self._arrived.notify_all()
        if self._async_waiter is not None:
            loop, waiter = self._async_waiter
            self._async_waiter = None
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(_wake, waiter)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
