"""uvicorn's HTTP protocol with what it leaves unbounded: the size of a request's head, and how long a client may take to send it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from pelton.logging import get_logger
from pelton_plugins.server.errors import error_response

logger = get_logger(__name__)

MAX_HEAD_BYTES = 64 * 1024  # request line and headers
STALL_TIMEOUT_S = 60.0  # a client that reads nothing of an answer for so long is cut off
HEAD_TIMEOUT_S = 30.0  # from the connection, or the first byte of a later request, to the end of its headers

MAX_SENT_AHEAD = 4  # requests that are read behind one that is being answered: their bodies wait in memory


class Direct:
    """Writes parts of an answer that has begun straight to its connection: a stream's hot path.

    It lies in the scope as `pelton_direct`. Nothing between here and the route may change bodies then; see `build_app`.
    """

    __slots__ = ("_cycle", "_flow", "_transport", "num_bytes")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle, self._flow, self._transport = cycle, cycle.flow, cycle.transport
        self.num_bytes = 0

    def write(self, data: bytes) -> bool:
        """False, and nothing is written: the client reads too slowly, is gone, or the answer has not begun."""
        cycle = self._cycle
        if self._flow.write_paused or cycle.disconnected or cycle.response_complete or not cycle.chunked_encoding:
            return False
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        self.num_bytes += len(data)
        return True


class Stalls:
    """Watches a connection whose write buffer is full: it is closed when its client reads nothing for `timeout_s`."""

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, on_stall: Callable[[], None]
    ) -> None:
        self._transport, self._loop, self._on_stall = transport, loop, on_stall
        self._timer: asyncio.TimerHandle | None = None
        self._left = 0  # bytes in the buffer when looked at last

    def begin(self) -> None:
        self._left = self._transport.get_write_buffer_size()
        self._timer = self._loop.call_later(STALL_TIMEOUT_S, self._look)

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        left = self._transport.get_write_buffer_size()
        if left < self._left:  # slowly, but it reads
            self.begin()
            return
        self._timer = None
        self._on_stall()
        self._transport.abort()


class BoundedHttpProtocol(HttpToolsProtocol):
    """Refusals are in the error shape too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = logger  # uvicorn's own has no handler here
        self._is_in_head = self._is_too_long = False
        self._head_bytes = 0  # of packets that the head did not begin in
        self._header_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._cycles: list[RequestResponseCycle] = []  # that are not answered: one, and those that a client sent ahead

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._stalls = Stalls(transport, self.loop, self._count_stall)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stalls.end()
        for cycle in self._cycles:  # uvicorn tells the last of them alone
            cycle.disconnected = not cycle.response_complete
            cycle.message_event.set()
        self._cycles.clear()
        self.pipeline.clear()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalls.begin()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stalls.end()

    def _count_stall(self) -> None:
        on_stall = getattr(self.config.app, "on_stall", None)
        if on_stall is not None:
            on_stall()

    def data_received(self, data: bytes) -> None:
        was_in_head = self._is_in_head
        super().data_received(data)
        if was_in_head and self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse_head()

    def _refuse_head(self) -> None:
        self._is_in_head = False
        self._refuse(431, f"The request's headers are longer than {MAX_HEAD_BYTES} bytes.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head, self._head_bytes, self._header_bytes = True, 0, 0
        if self._head_timer is None:
            self._start_timer()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    def _count(self, num_bytes: int) -> None:
        self._header_bytes += num_bytes
        if self._header_bytes > MAX_HEAD_BYTES:
            self._is_too_long = True
            raise ValueError("a head that is too long")  # ends the parser, which then asks for `send_400_response`

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._stop_timer()
        super().on_headers_complete()
        if self.cycle is not None:
            self._cycles = [*(one for one in self._cycles if not one.response_complete), self.cycle]
            if 0 < len(self.pipeline) <= MAX_SENT_AHEAD:  # who does not read does not see a client go
                self.flow.resume_reading()
            self.scope["pelton_direct"] = Direct(self.cycle)  # type: ignore[typeddict-unknown-key]

    def _unsupported_upgrade_warning(self) -> None:
        """Say nothing: the request is answered as any other, and logged."""

    def send_400_response(self, msg: str) -> None:
        if self._is_too_long:
            self._refuse_head()
        else:
            self._refuse(400, msg)

    def _start_timer(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._on_timeout)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_timeout(self) -> None:
        self._head_timer = None
        self._refuse(408, f"The request's headers did not come within {HEAD_TIMEOUT_S:g} s.")

    def _refuse(self, status: int, message: str) -> None:
        body = msgspec.json.encode(error_response(status, message))
        head = (
            f"HTTP/1.1 {status} Refused\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            "connection: close\r\n\r\n"
        )
        if not self.transport.is_closing():
            self.transport.write(head.encode() + body)
            self.transport.close()
