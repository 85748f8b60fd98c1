"""Plain ASGI around the application. It runs for every request on the server's event loop: it must not block."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

App = Callable[[Any, Any, Any], Awaitable[None]]
TENANTS = {b"blue", b"green"}


def wrap(app: App, state: Any) -> App:
    """Called once, when the application is built."""

    async def checked(scope: Any, receive: Any, send: Any) -> None:
        named = [value for name, value in scope["headers"] if name == b"x-tenant"]
        if named and named[0] not in TENANTS:
            await send(
                {"type": "http.response.start", "status": 403, "headers": [(b"content-type", b"application/json")]}
            )
            await send({"type": "http.response.body", "body": b'{"error": {"message": "unknown tenant"}}'})
            return
        await app(scope, receive, send)

    return checked
