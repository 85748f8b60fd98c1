"""/cohere/v2/chat and /v2/embed; /rerank and its versions are with the pooling routes."""

from __future__ import annotations

from typing import Any

from litestar import post
from litestar.types import ASGIApp

from pelton_plugins.server.cohere import create_cohere_chat, create_cohere_embedding, error_body
from pelton_plugins.server.cohere_protocol import (
    CohereChatRequest,
    CohereChatResponse,
    CohereEmbedRequest,
    CohereEmbedResponse,
    CohereError,
)
from pelton_plugins.server.exchange import Exchange
from pelton_plugins.server.openapi import api
from pelton_plugins.server.state import ServerState


def routes(state: ServerState) -> list[Any]:
    @post(["/cohere/v2/chat", "/v2/chat"], status_code=200, opt=api(CohereChatRequest, CohereChatResponse, CohereError))
    async def chat() -> ASGIApp:
        """Answer a conversation, in Cohere's shape."""
        exchange = Exchange(state, CohereChatRequest, create_cohere_chat)
        exchange.whole_error = error_body
        return exchange

    @post(
        ["/v2/embed", "/cohere/v2/embed"],
        status_code=200,
        opt=api(CohereEmbedRequest, CohereEmbedResponse, CohereError),
    )
    async def embed() -> ASGIApp:
        """Make a vector of each text, in Cohere's shape."""
        exchange = Exchange(state, CohereEmbedRequest, create_cohere_embedding)
        exchange.whole_error = error_body
        return exchange

    return [chat, embed]
