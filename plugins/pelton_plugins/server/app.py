"""The ASGI application: built-in and plugins' routes on Litestar, behind the edge."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Litestar, Request, Response
from litestar.types import ASGIApp

from pelton.plugins import Plugins
from pelton_plugins.server.edge import Edge
from pelton_plugins.server.errors import describe
from pelton_plugins.server.openapi import describe_api
from pelton_plugins.server.state import ServerState


def build_app(state: ServerState, plugins: Plugins) -> ASGIApp:
    """Routes come from the `pelton_http_routes` hook, the built-in ones too."""
    handlers: list[Any] = []
    for entry in plugins.entries("pelton_http_routes"):
        handlers += entry.resolve()(state)
    state.openapi = describe_api(handlers)

    def on_error(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
        request_id = str(request.scope.get("pelton_request_id", ""))
        body = describe(error, request_id, in_detail=state.config.return_errors_in_detail)
        return Response(msgspec.json.encode(body), status_code=body.error.code, media_type="application/json")

    router = Litestar(
        route_handlers=handlers,
        exception_handlers={Exception: on_error},
        openapi_config=None,
        logging_config=None,
        request_max_body_size=None,  # read and bounded by Exchange
        debug=False,
    )
    return Edge(router, state)
