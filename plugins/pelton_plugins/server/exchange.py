"""One JSON request and its answer, JSON or a stream of events, with everything that may end it early.

A request ends early when its client goes away or when the server stops: both cancel the task that works on
it, which closes the engine's streams and so aborts them there. Errors before the first byte of the answer
are plain HTTP errors; later ones are an event, and the stream still ends with [DONE].
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec
from litestar.types import Receive, Scope, Send

from pelton.errors import DeadlineExceededError, RequestError
from pelton.lora.request import LoRARequest
from pelton_plugins.server.body import check_headers, decode, read_body
from pelton_plugins.server.errors import ClientDisconnected, ErrorResponse, describe
from pelton_plugins.server.generation import Counts
from pelton_plugins.server.load_header import load_header
from pelton_plugins.server.request_log import log_request
from pelton_plugins.server.sent_names import in_sent_names
from pelton_plugins.server.state import ServerState
from pelton_plugins.server.tracing import RequestTrace, request_attributes
from pelton_plugins.server.wire import Direct

SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

NO_RETRY = (b"x-should-retry", b"false")
"""Heeded by OpenAI's and Anthropic's clients, which would else run a request again whose own time was up."""

LARGE_BODY_BYTES = 2**20

T = TypeVar("T", bound=msgspec.Struct)


def _openai_event(body: ErrorResponse) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n" + DONE


class Exchange:
    """An ASGI application for one request: reads the body, runs `work`, answers."""

    def __init__(
        self,
        state: ServerState,
        struct: type[T],
        work: Callable[[Exchange, T], Awaitable[None]],
        *,
        generates: bool = True,
    ) -> None:
        self.state = state
        self.request_id = ""
        self.tenant = ""
        """Whose share of the engine it is charged to."""
        self.lora_request: LoRARequest | None = None
        """The adapter that the request's model is; None: the model alone."""
        self.whole_error: Callable[[ErrorResponse], bytes] = msgspec.json.encode
        """Gives an error the shape of the endpoint; so does the next, in a stream that has begun."""
        self.stream_error: Callable[[ErrorResponse], bytes] = _openai_event
        self._struct = struct
        self._work: Callable[[Exchange, Any], Awaitable[None]] = work
        self._generates = generates
        self._send: Send | None = None
        self._direct: Direct | None = None
        self.counts: Counts | None = None
        """Tokens of the request, once it runs."""
        self._trace: RequestTrace | None = None
        self._load_form = b""
        self._error: str | None = None
        self._is_streaming = False
        self._is_answered = False
        self._last_write = 0.0
        self._task: asyncio.Task[Any] | None = None
        self._ended_by: Exception | None = None
        self._request: msgspec.Struct | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        if self.state.writes_directly:
            self._direct = scope.get("pelton_direct")  # type: ignore[assignment]
        self.tenant = self.state.tenant_of(scope)
        self.request_id = str(scope.get("pelton_request_id", ""))
        tracing = self.state.tracing
        if tracing is None or not self._generates:
            await self._run(scope, receive)
            return
        self._trace = trace = tracing.begin(scope)
        try:
            await self._run(scope, receive)
        finally:
            if self.counts is not None:
                trace.metrics = self.counts.metrics
            model = self.state.model_name
            attributes = request_attributes(self._request, model, self.request_id, self.counts)
            tracing.end(trace, scope["path"], attributes, self._error)

    async def _run(self, scope: Scope, receive: Receive) -> None:
        config = self.state.config
        try:
            self._load_form = check_headers(scope)
            budget = self.state.body_budget
            body = await read_body(
                scope, receive, config.max_body_bytes, timeout_s=config.body_timeout_s or None, budget=budget
            )
            size = len(body)
            try:
                request = decode(body, self._struct)
                del body
                if size < LARGE_BODY_BYTES:  # what became of it is small too
                    budget.give_back(size)
                    size = 0
                self._request = request
                self.mark("body")
                if config.log_requests and self._generates:
                    log_request(self.request_id, request, with_prompts=config.log_request_prompts)
                if self._generates:
                    await self._run_until_ended(request, receive)
                else:
                    await self._work(self, request)
            finally:
                budget.give_back(size)
        except ClientDisconnected:
            self._error = "The client went away."
        except Exception as error:
            await self._fail(error)

    async def _run_until_ended(self, request: msgspec.Struct, receive: Receive) -> None:
        self.state.admit(self)
        self._task = asyncio.current_task()
        assert self._task is not None
        watch = asyncio.create_task(self._watch(receive))
        keep_alive = None
        if self.state.config.sse_keep_alive_interval is not None:
            keep_alive = asyncio.create_task(self._keep_alive(self.state.config.sse_keep_alive_interval))
        try:
            await self._work(self, request)
        except asyncio.CancelledError:
            if self._ended_by is None:
                raise
            self._task.uncancel()
            raise self._ended_by from None
        finally:
            # Synchronous up to here from the last await of `work`: nobody can call end() in between.
            self._task = None
            self.state.dismiss(self)
            watch.cancel()
            if keep_alive is not None:
                keep_alive.cancel()

    def end(self, error: Exception) -> None:
        """Stop working on the request, from another task; the client, if there, gets `error`."""
        if self._task is not None and self._ended_by is None and not self._is_answered:
            self._ended_by = error
            self._task.cancel()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.end(ClientDisconnected())

    async def _keep_alive(self, interval: float) -> None:
        while not self._is_answered:
            silence = time.monotonic() - self._last_write if self._is_streaming else 0.0
            if silence >= interval:
                await self.write(KEEP_ALIVE)
                silence = 0.0
            await asyncio.sleep(interval - silence)

    def mark(self, name: str) -> None:
        """Note the time of a stage, where requests are traced."""
        if self._trace is not None:
            self._trace.mark(name)

    async def _fail(self, error: Exception) -> None:
        body = describe(error, self.request_id, in_detail=self.state.config.return_errors_in_detail)
        if self._request is not None and isinstance(error, RequestError):
            body.error.message, body.error.param = in_sent_names(body.error.message, body.error.param, self._request)
        self._error = body.error.message
        if self._is_answered:
            return
        with contextlib.suppress(OSError):
            if self._is_streaming:
                await self.finish(self.stream_error(body))
            else:
                more = [NO_RETRY] if isinstance(error, DeadlineExceededError) else []
                await self.answer(self.whole_error(body), body.error.code, more)

    # Writing

    async def answer(self, body: bytes, status: int = 200, more: Sequence[tuple[bytes, bytes]] = ()) -> None:
        """The whole answer, JSON. more: headers."""
        assert self._send is not None and not self._is_streaming
        self._is_answered = True
        self.mark("first_byte")
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *more]
        if self._load_form and (load := await load_header(self.state, self._load_form)) is not None:
            headers.append(load)
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def write(self, events: bytes) -> None:
        """Some events of a stream; the first call sends the headers too."""
        assert self._send is not None
        if not self._is_streaming:
            self._is_streaming = True
            self.mark("first_byte")
            await self._send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
        self._last_write = time.monotonic()
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    @property
    def can_write_now(self) -> bool:
        return self._direct is not None

    def write_now(self, events: bytes) -> bool:
        """Write some events of a stream that has begun, without waiting; False when that cannot be, and nothing is written."""
        assert self._direct is not None
        if not self._is_streaming or self._is_answered or not self._direct.write(events):
            return False
        self._last_write = time.monotonic()
        return True

    async def finish(self, events: bytes) -> None:
        """The last events of a stream."""
        assert self._send is not None and self._is_streaming
        self._is_answered = True
        await self._send({"type": "http.response.body", "body": events, "more_body": False})
