"""Handlers of Litestar. They run on the server's event loop: what blocks for long belongs on a thread (`asyncio.to_thread`)."""

from __future__ import annotations

import json
from typing import Any

from litestar import Request, get, post
from pelton.errors import RequestError

MAX_BYTES = 65_536
"""No input is unbounded; the server does not read a body for a plugin."""


def routes(state: Any) -> list[Any]:
    """Called once, when the application is built. state.model_name is the served model; state.engine() is the `AsyncLLM`, or an
    error that says why it is not ready."""

    @get("/skeleton/model")
    async def model() -> dict[str, str]:
        """Name of the served model."""
        return {"model": state.model_name}

    @post("/skeleton/length", status_code=200)
    async def length(request: Request[Any, Any, Any]) -> dict[str, int]:
        """Number of tokens of a text."""
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BYTES:
                raise RequestError(f"the body has more than {MAX_BYTES} bytes")
        try:
            text = json.loads(body)["text"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise RequestError("send a JSON object with `text`", param="text") from None
        if not isinstance(text, str):
            raise RequestError("text must be a string", param="text", value=text)
        return {"length": len(state.engine().tokenizer.encode(text))}

    return [model, length]
