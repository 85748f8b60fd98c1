"""/v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Any

from litestar import post
from litestar.types import ASGIApp

from pelton_plugins.server.anthropic import count_tokens, create_message, error_body
from pelton_plugins.server.anthropic_protocol import (
    AnthropicError,
    CountTokensAnswer,
    CountTokensRequest,
    MessagesAnswer,
    MessagesRequest,
)
from pelton_plugins.server.exchange import Exchange
from pelton_plugins.server.openapi import api
from pelton_plugins.server.state import ServerState


def routes(state: ServerState) -> list[Any]:
    @post("/v1/messages", status_code=200, opt=api(MessagesRequest, MessagesAnswer, AnthropicError))
    async def messages() -> ASGIApp:
        """Answer a conversation, in Anthropic's shape."""
        exchange = Exchange(state, MessagesRequest, create_message)
        exchange.whole_error = error_body
        return exchange

    @post("/v1/messages/count_tokens", status_code=200, opt=api(CountTokensRequest, CountTokensAnswer, AnthropicError))
    async def count() -> ASGIApp:
        """Count the tokens of a conversation."""
        exchange = Exchange(state, CountTokensRequest, count_tokens, generates=False)
        exchange.whole_error = error_body
        return exchange

    return [messages, count]
