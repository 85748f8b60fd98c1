"""Health, load, version, settings, metrics, and the description of the API itself."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import HttpMethod, Response, get, route

import pelton
from pelton.errors import PeltonError
from pelton_plugins.server.api_page import HEADERS, page
from pelton_plugins.server.errors import UnavailableError, error_response, scrub
from pelton_plugins.server.metrics_text import render_text
from pelton_plugins.server.openapi import api
from pelton_plugins.server.process_metrics import ProcessMetrics
from pelton_plugins.server.server_info import ServerInfo, server_info_of
from pelton_plugins.server.state import ServerState

MAX_SILENCE_S = 10.0  # of the engine's process, which says every second that it lives; a long step is another matter

PLAIN = api(None, None, text="text/plain")


class Load(msgspec.Struct):
    server_load: int


class Version(msgspec.Struct):
    version: str


def routes(state: ServerState) -> list[Any]:
    process_metrics = ProcessMetrics()

    @get("/health", opt=PLAIN)
    async def health() -> Response[bytes]:
        """200 when requests are taken; 503 with the reason when not."""
        return await _health(state)

    @get(["/ready", "/readyz"], opt=PLAIN)
    async def ready() -> Response[bytes]:
        """As /health: 503 while the model loads, while the engine comes back, and while the server shuts down."""
        return await _health(state)

    @get("/live", opt=PLAIN)
    async def live() -> Response[bytes]:
        """200 as long as this process answers, whatever becomes of the engine."""
        return Response(b"", status_code=200, media_type="text/plain")

    @route("/ping", http_method=[HttpMethod.GET, HttpMethod.POST], status_code=200, opt=PLAIN)
    async def ping() -> Response[bytes]:
        """As /health."""
        return await _health(state)

    @get("/load", opt=api(None, Load))
    async def load() -> Response[bytes]:
        """Generating requests that are open now."""
        return _json(Load(server_load=state.num_open))

    @get("/version", opt=api(None, Version))
    async def version() -> Response[bytes]:
        """Pelton's version."""
        return _json(Version(version=pelton.__version__))

    @get("/server_info", opt=api(None, ServerInfo))
    async def server_info() -> Response[bytes]:
        """Settings of the server and of its engine, and what the engine found when it started; no keys."""
        return _json(await server_info_of(state))

    @get("/metrics", opt=PLAIN)
    async def metrics() -> Response[bytes]:
        """Prometheus text exposition."""
        if state.ask_metrics is not None:
            text = await state.ask_metrics()
        else:
            found = state.llm.get_metrics() if state.llm is not None else []
            counted = state.http_metrics.snapshot(state.metrics_prefix)
            text = render_text([*found, *counted]) + process_metrics.text()
        return Response(text.encode(), media_type="text/plain; version=0.0.4")

    @get("/openapi.json", opt=api(None, None, text="application/json"))
    async def openapi() -> Response[bytes]:
        """This API, as OpenAPI 3.1."""
        assert state.openapi is not None
        return Response(state.openapi, media_type="application/json")

    @get("/docs", opt=api(None, None, text="text/html"))
    async def docs() -> Response[bytes]:
        """This API, as a page to read."""
        assert state.openapi is not None
        return Response(page(state.openapi), media_type="text/html", headers=HEADERS)

    described = [] if state.config.disable_fastapi_docs else [openapi, docs]
    return [health, ready, live, ping, load, version, server_info, metrics, *described]


def _json(value: Any) -> Response[bytes]:
    return Response(msgspec.json.encode(value), media_type="application/json")


async def _health(state: ServerState) -> Response[bytes]:
    try:
        llm = state.engine()
        await llm.check_health()
        if llm.silence_s > MAX_SILENCE_S:
            raise UnavailableError(f"The engine's process has given no sign of life for {llm.silence_s:.0f} s.")
        if llm.last_progress_age_s > state.config.max_engine_silence_s:
            raise UnavailableError(f"The engine has made no progress for {llm.last_progress_age_s:.0f} s.")
    except PeltonError as error:
        body = error_response(503, scrub(str(error)))
        return Response(msgspec.json.encode(body), status_code=503, media_type="application/json")
    return Response(b"", status_code=200, media_type="text/plain")
