"""ASGI middleware that every request passes first: request id, key, counting, the log line. Plain ASGI around the router, so that
nothing, unknown paths included, is answered without it."""

from __future__ import annotations

import hashlib
import hmac
import re
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec
from litestar.types import ASGIApp, Message, Receive, Scope, Send

from pelton.logging import get_logger
from pelton_plugins.server.errors import ErrorResponse
from pelton_plugins.server.origins import Hosts, Origins, refuse
from pelton_plugins.server.state import ServerState

access_logger = get_logger("pelton.access")

CLIENT_LEFT = 499
"""As nginx counts a request whose client went away before an answer began."""

BUSY = (429, 503)
RETRY_SOON_S, RETRY_LATER_S = 1, 5
"""Told with 429 and 503: where too much waits, and where the engine is not there."""

REQUEST_ID = re.compile(r"[\w.:\-]{1,128}")


class Middleware:
    """Deny by default: with keys set, all paths but the public ones need one."""

    def __init__(
        self,
        app: ASGIApp,
        state: ServerState,
        wraps: Sequence[Callable[[ASGIApp], ASGIApp]] = (),
        public: Collection[str] = (),
    ) -> None:
        """wraps: of plugins, the outermost first. They lie around the check of the key, and within the counting.
        public: paths whose handlers say that they need no key."""
        self._app = app
        self._state = state
        self._guarded: ASGIApp = self._checked
        for wrap in reversed(wraps):
            self._guarded = wrap(self._guarded)
        self._hosts = Hosts(state.config)
        self._origins = Origins(state.config.allowed_origins)
        self._keys = [hashlib.sha256(key.encode()).digest() for key in state.config.api_key]
        root = state.config.root_path.rstrip("/")
        self._public = frozenset(
            path for route in (*state.config.public_routes, *public) for path in (route, root + route)
        )

    def on_stall(self) -> None:
        """A connection was cut off whose client read nothing."""
        self._state.http_metrics.num_stalled += 1

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if "method" not in scope:  # a websocket
            await send({"type": "websocket.close", "code": 1008, "reason": "No websockets here."})
            return
        config, metrics = self._state.config, self._state.http_metrics
        started = time.perf_counter()
        request_id = self._request_id(scope)
        scope["pelton_request_id"] = request_id  # type: ignore[typeddict-unknown-key]
        status: int | None = None  # of the answer, once it began
        has_left = False
        num_in = num_out = 0

        async def watched() -> Any:
            nonlocal has_left, num_in
            message: Any = await receive()
            num_in += len(message.get("body", b""))
            has_left = has_left or message["type"] == "http.disconnect"
            return message

        async def counted(message: Message) -> None:
            nonlocal status, num_out
            num_out += len(message.get("body", b""))  # type: ignore[arg-type]
            if message["type"] == "http.response.start":
                status = message["status"]
                if status in BUSY and not any(name == b"retry-after" for name, _ in message["headers"]):
                    message["headers"] = [*message["headers"], (b"retry-after", self._retry_after())]
                if config.enable_request_id_headers:
                    message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        metrics.num_in_progress += 1
        try:
            if self._origins.is_preflight(scope):
                await self._origins.answer(scope, counted)
            elif not self._hosts.allows(scope):
                await refuse(
                    counted,
                    403,
                    "This Host is not served here: without an API key only names of this machine are. "
                    "See --allowed-hosts.",
                )
            else:
                await self._guarded(scope, watched, self._origins.marking(scope, counted))
        except BaseException:
            status = status or 500
            raise
        finally:
            status = status or (CLIENT_LEFT if has_left else 500)
            seconds = time.perf_counter() - started
            metrics.num_in_progress -= 1
            method = _method(scope)
            template = str(scope.get("path_template") or "none") if status not in (404, 405) else "none"
            direct = scope.get("pelton_direct")
            num_out += direct.num_bytes if direct is not None else 0  # type: ignore[attr-defined]
            metrics.observe(template, method, status, seconds, num_in, num_out)
            if config.access_log:
                access_logger.info("%s %s %d %.1f ms %s", method, _shown(scope), status, 1000 * seconds, request_id)

    async def _checked(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._is_allowed(scope):
            await self._app(scope, receive, send)
        else:
            await refuse(
                send, 401, "Wrong or missing API key. Send it as `Authorization: Bearer KEY`.",
                (b"www-authenticate", b"Bearer"), encode=_shape_of(scope["path"]),
            )  # fmt: skip

    def _retry_after(self) -> bytes:
        llm = self._state.llm
        is_there = llm is not None and getattr(llm, "is_healthy", True)
        return b"%d" % (RETRY_SOON_S if is_there else RETRY_LATER_S)

    def _is_allowed(self, scope: Scope) -> bool:
        if not self._keys or scope["path"] in self._public:
            return True
        for name, value in scope["headers"]:
            if name in (b"authorization", b"x-api-key"):  # the second is Anthropic's
                kind, _, token = (b"bearer", b"", value) if name == b"x-api-key" else value.partition(b" ")
                found = hashlib.sha256(token.strip()).digest()
                # Every key is compared, in constant time, so that time tells nothing of which one is near.
                matches = [hmac.compare_digest(found, key) for key in self._keys]
                if kind.lower() == b"bearer" and any(matches):
                    return True
        return False

    @staticmethod
    def _request_id(scope: Scope) -> str:
        for name, value in scope["headers"]:
            if name == b"x-request-id":
                text = value.decode("latin-1")
                if REQUEST_ID.fullmatch(text):
                    return text
        return uuid.uuid4().hex


def _shape_of(path: str) -> Callable[[ErrorResponse], bytes]:
    """Return how an error is encoded for the clients of a route. Modules of other clients' shapes are read here: a start does without."""
    if path.startswith("/v1/messages"):
        from pelton_plugins.server.anthropic import error_body

        return error_body
    if path.startswith(("/v2/", "/cohere/")):
        from pelton_plugins.server.cohere import error_body as cohere_error

        return cohere_error
    return msgspec.json.encode


def _method(scope: Scope) -> str:
    method = str(scope.get("method"))
    return method if method in ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH") else "OTHER"


def _shown(scope: Scope) -> str:
    """The path as it was sent: what is encoded in it, line ends and escapes too, stays encoded in the log."""
    raw = scope.get("raw_path") or scope["path"].encode()
    return raw[:200].decode("ascii", "backslashreplace").translate(_CONTROLS)


_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), 127)}
