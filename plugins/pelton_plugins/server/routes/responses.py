"""/v1/responses."""

from __future__ import annotations

from typing import Any

from litestar import Response, delete, get, post
from litestar.params import FromPath
from litestar.types import ASGIApp

from pelton_plugins.server.exchange import Exchange
from pelton_plugins.server.openapi import api
from pelton_plugins.server.responses import act, create_response
from pelton_plugins.server.responses_protocol import DeletedResponse, ResponsesAnswer, ResponsesRequest
from pelton_plugins.server.state import ServerState


def routes(state: ServerState) -> list[Any]:
    @post("/v1/responses", status_code=200, opt=api(ResponsesRequest, ResponsesAnswer))
    async def create() -> ASGIApp:
        """Answer a text or a list of items."""
        return Exchange(state, ResponsesRequest, create_response)

    @get("/v1/responses/{response_id:str}", opt=api(None, ResponsesAnswer))
    async def get_response(response_id: FromPath[str]) -> Response[bytes]:
        """Return a response that was kept."""
        return _json(await act(state, "get", response_id))

    @delete("/v1/responses/{response_id:str}", status_code=200, opt=api(None, DeletedResponse))
    async def delete_response(response_id: FromPath[str]) -> Response[bytes]:
        """Forget a response."""
        return _json(await act(state, "delete", response_id))

    @post("/v1/responses/{response_id:str}/cancel", status_code=200, opt=api(None, ResponsesAnswer))
    async def cancel_response(response_id: FromPath[str]) -> Response[bytes]:
        """Stop a response that runs in the background."""
        return _json(await act(state, "cancel", response_id))

    return [create, get_response, delete_response, cancel_response]


def _json(body: bytes) -> Response[bytes]:
    return Response(body, media_type="application/json")
