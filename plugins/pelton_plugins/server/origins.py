"""Browsers: which pages may use this server (CORS), and under which names it may be asked (DNS rebinding)."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence

import msgspec
from litestar.types import Message, Scope, Send

from pelton_plugins.server.config import ServerConfig, is_loopback
from pelton_plugins.server.errors import ErrorResponse, error_response

ANY = "*"
ALLOWED = [
    (b"access-control-allow-methods", b"GET, POST, DELETE, OPTIONS"),
    (b"access-control-allow-headers", b"authorization, content-type, x-request-id, x-api-key, anthropic-version"),
    (b"access-control-max-age", b"600"),
]


class Origins:
    """Pages of `allowed_origins` may read answers; with none set no header says anything to browsers."""

    def __init__(self, allowed: Sequence[str]) -> None:
        self._allowed = frozenset(allowed)

    def _origin(self, scope: Scope) -> bytes | None:
        """The page's origin, where it is allowed."""
        if not self._allowed:
            return None
        origin = _header(scope, b"origin")
        if origin is None or (ANY not in self._allowed and origin.decode("latin-1") not in self._allowed):
            return None
        return origin

    def is_preflight(self, scope: Scope) -> bool:
        """A browser asks before the request itself, without the key."""
        is_asked = scope.get("method") == "OPTIONS" and _header(scope, b"access-control-request-method") is not None
        return is_asked and self._origin(scope) is not None

    async def answer(self, scope: Scope, send: Send) -> None:
        headers = [*self._marks(scope), *ALLOWED, (b"content-length", b"0")]
        await send({"type": "http.response.start", "status": 204, "headers": headers})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def marking(self, scope: Scope, send: Send) -> Send:
        """`send` that lets the page read the answer."""
        if self._origin(scope) is None:
            return send

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *self._marks(scope)]
            await send(message)

        return marked

    def _marks(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        origin = self._origin(scope) or b""
        return [(b"access-control-allow-origin", origin), (b"vary", b"origin")]


class Hosts:
    """Names in the Host header. A page whose name was pointed at this machine is of the same origin: without a key it could
    read everything, so that loopback is served under its own names only."""

    def __init__(self, config: ServerConfig) -> None:
        self._is_open = bool(config.api_key) or not is_loopback(config.host) or ANY in config.allowed_hosts
        self._names = frozenset(name.lower() for name in (*config.allowed_hosts, config.host.strip("[]")))

    def allows(self, scope: Scope) -> bool:
        if self._is_open:
            return True
        host = _header(scope, b"host")
        if host is None:
            return True  # HTTP/1.0, which no browser speaks
        name = _without_port(host.decode("latin-1")).lower()
        is_local = "." not in name or name.endswith(".localhost")  # no public name, so nobody else's
        return is_local or name in self._names or _is_address(name)


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if host.count(":") == 1 else host


def _is_address(name: str) -> bool:
    """An address cannot be pointed elsewhere."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _header(scope: Scope, wanted: bytes) -> bytes | None:
    return next((value for name, value in scope["headers"] if name == wanted), None)


async def refuse(
    send: Send,
    status: int,
    message: str,
    *headers: tuple[bytes, bytes],
    encode: Callable[[ErrorResponse], bytes] = msgspec.json.encode,
) -> None:
    """Answer with an error. encode: to the shape that the route's errors have, where that is another than OpenAI's."""
    body = encode(error_response(status, message))
    head = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *headers]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body, "more_body": False})
