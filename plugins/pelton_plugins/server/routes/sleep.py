"""/sleep, /wake_up, /is_sleeping."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Request, Response, get, post

from pelton.errors import RequestError
from pelton_plugins.server.errors import NotAllowedError
from pelton_plugins.server.openapi import api
from pelton_plugins.server.state import ServerState

LEVELS = {"type": "integer", "enum": [1, 2]}
TAGS = {"type": "array", "items": {"enum": ["weights", "kv_cache"]}}


class SleepAnswer(msgspec.Struct):
    is_sleeping: bool


def routes(state: ServerState) -> list[Any]:
    @post("/sleep", status_code=200, opt=api(None, None, text="text/plain", query={"level": LEVELS}))
    async def sleep(request: Request[Any, Any, Any]) -> Response[bytes]:
        """Drop the KV cache while no request runs; level=1, the default, moves the weights to the host, level=2 drops them."""
        engine, level = _engine(state), request.query_params.get("level", "1")
        if level not in ("1", "2"):
            raise RequestError(
                "Use 1 (weights go to the host) or 2 (they are dropped)", param="level", value=level[:20]
            )
        with state.http_metrics.sleep_operation("sleep"):
            await engine.sleep(int(level))
        return _empty()

    @post("/wake_up", status_code=200, opt=api(None, None, text="text/plain", query={"tags": TAGS}))
    async def wake_up(request: Request[Any, Any, Any]) -> Response[bytes]:
        """Bring back what each tags=... names, weights or kv_cache; both when there are none."""
        engine = _engine(state)
        with state.http_metrics.sleep_operation("wake"):
            await engine.wake_up(request.query_params.getall("tags", []))
        return _empty()

    @get("/is_sleeping", opt=api(None, SleepAnswer))
    async def is_sleeping() -> Response[bytes]:
        """Say whether the engine sleeps: requests are refused with status 503 meanwhile."""
        answer = SleepAnswer(is_sleeping=await _engine(state).call("is_sleeping"))
        return Response(msgspec.json.encode(answer), media_type="application/json")

    return [sleep, wake_up, is_sleeping]


def _empty() -> Response[bytes]:
    return Response(b"", status_code=200, media_type="text/plain")


def _engine(state: ServerState) -> Any:
    if not state.config.enable_sleep_mode:
        raise NotAllowedError("Clients may not send this engine to sleep: start the server with --enable-sleep-mode.")
    return state.engine()
