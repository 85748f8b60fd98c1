"""/v1/responses."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Request, Response, delete, get, post
from litestar.params import FromPath
from litestar.types import ASGIApp

from pelton.errors import RequestError
from pelton_plugins.server.exchange import Exchange
from pelton_plugins.server.openapi import api
from pelton_plugins.server.responses import MAX_LISTED, act, count_input_tokens, create_response, list_input_items
from pelton_plugins.server.responses_protocol import (
    DeletedResponse,
    InputItems,
    InputTokens,
    ResponsesAnswer,
    ResponsesRequest,
)
from pelton_plugins.server.state import ServerState

OF_A_PAGE: dict[str, dict[str, Any]] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_LISTED}, "order": {"enum": ["asc", "desc"]},
    "after": {"type": "string"},
}  # fmt: skip


def routes(state: ServerState) -> list[Any]:
    @post("/v1/responses", status_code=200, opt=api(ResponsesRequest, ResponsesAnswer))
    async def create() -> ASGIApp:
        """Answer a text or a list of items."""
        return Exchange(state, ResponsesRequest, create_response)

    @post("/v1/responses/input_tokens", status_code=200, opt=api(ResponsesRequest, InputTokens, streams=False))
    async def count() -> ASGIApp:
        """Count the tokens of a response's prompt."""
        return Exchange(state, ResponsesRequest, count_input_tokens, generates=False)

    @get("/v1/responses/{response_id:str}", opt=api(None, ResponsesAnswer, query={"stream": {"type": "boolean"}}))
    async def get_response(response_id: FromPath[str], request: Request[Any, Any, Any]) -> Response[bytes]:
        """Return a response that was kept."""
        if request.query_params.get("stream", "false").lower() not in ("false", "0", ""):
            raise RequestError("A response that is kept comes as a whole; leave stream out.", param="stream")
        return _json(await act(state, "get", response_id))

    @get("/v1/responses/{response_id:str}/input_items", opt=api(None, InputItems, query=OF_A_PAGE))
    async def get_input_items(response_id: FromPath[str], request: Request[Any, Any, Any]) -> Response[bytes]:
        """Return the items that a response was asked with, those of the conversation before it too."""
        query = request.query_params
        limit = query.get("limit", "20")
        if not (limit.isascii() and limit.isdigit() and len(limit) < 10):
            raise RequestError("limit must be an integer", param="limit", value=limit[:20])
        found = await list_input_items(
            state, response_id, limit=int(limit), order=query.get("order", "desc"), after=query.get("after")
        )
        return _json(msgspec.json.encode(found))

    @delete("/v1/responses/{response_id:str}", status_code=200, opt=api(None, DeletedResponse))
    async def delete_response(response_id: FromPath[str]) -> Response[bytes]:
        """Forget a response."""
        return _json(await act(state, "delete", response_id))

    @post("/v1/responses/{response_id:str}/cancel", status_code=200, opt=api(None, ResponsesAnswer))
    async def cancel_response(response_id: FromPath[str]) -> Response[bytes]:
        """Stop a response that runs in the background."""
        return _json(await act(state, "cancel", response_id))

    return [create, count, get_response, get_input_items, delete_response, cancel_response]


def _json(body: bytes) -> Response[bytes]:
    return Response(body, media_type="application/json")
