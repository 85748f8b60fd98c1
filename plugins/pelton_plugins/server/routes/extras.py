"""Routes of vLLM's beyond OpenAI's: /invocations, batches of chats, tokens in and out, /reset_prefix_cache."""

from __future__ import annotations

from typing import Any

from litestar import Response, post
from litestar.types import ASGIApp

from pelton.errors import QueueFullError
from pelton_plugins.server.anthropic import error_body as anthropic_error
from pelton_plugins.server.anthropic_protocol import AnthropicError, MessagesRequest
from pelton_plugins.server.chat_batch import BatchChatRequest, create_chat_batch
from pelton_plugins.server.exchange import Exchange
from pelton_plugins.server.invocations import ANSWERED, INVOKED, Invocation
from pelton_plugins.server.openapi import api
from pelton_plugins.server.protocol import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    CompletionRequest,
    CompletionResponse,
)
from pelton_plugins.server.responses_protocol import ResponsesRequest
from pelton_plugins.server.state import ServerState
from pelton_plugins.server.token_io import (
    create_tokens,
    derender_chat,
    derender_completion,
    render_chat,
    render_completion,
    render_message,
    render_response,
)
from pelton_plugins.server.token_protocol import (
    DerenderChatRequest,
    DerenderCompletionRequest,
    TokensRequest,
    TokensResponse,
)


def routes(state: ServerState) -> list[Any]:
    @post("/invocations", status_code=200, opt=api(INVOKED, ANSWERED))
    async def invocations() -> ASGIApp:
        """Do what the body's fields ask for: messages, prompt, input, query with documents, or two texts to compare."""
        return Invocation(state)

    @post(
        "/v1/chat/completions/batch", status_code=200, opt=api(BatchChatRequest, ChatCompletionResponse, streams=False)
    )
    async def batch() -> ASGIApp:
        """Answer several conversations, with a choice for each."""
        return Exchange(state, BatchChatRequest, create_chat_batch)

    @post("/v1/chat/completions/render", status_code=200, opt=api(ChatCompletionRequest, TokensRequest, streams=False))
    async def chat_render() -> ASGIApp:
        """Make of a chat the request for /inference/v1/generate."""
        return Exchange(state, ChatCompletionRequest, render_chat, generates=False)

    @post("/v1/responses/render", status_code=200, opt=api(ResponsesRequest, TokensRequest, streams=False))
    async def response_render() -> ASGIApp:
        """Make of a request for a response the one for /inference/v1/generate."""
        return Exchange(state, ResponsesRequest, render_response, generates=False)

    @post(
        "/v1/messages/render", status_code=200, opt=api(MessagesRequest, TokensRequest, AnthropicError, streams=False)
    )
    async def message_render() -> ASGIApp:
        """Make of Anthropic's messages the request for /inference/v1/generate."""
        exchange = Exchange(state, MessagesRequest, render_message, generates=False)
        exchange.whole_error = anthropic_error
        return exchange

    @post(
        "/v1/completions/render",
        status_code=200,
        opt=api(CompletionRequest, TokensRequest, answers_list=True, streams=False),
    )
    async def completion_render() -> ASGIApp:
        """Make of each prompt the request for /inference/v1/generate."""
        return Exchange(state, CompletionRequest, render_completion, generates=False)

    @post("/inference/v1/generate", status_code=200, opt=api(TokensRequest, TokensResponse))
    async def tokens() -> ASGIApp:
        """Continue token ids by token ids."""
        return Exchange(state, TokensRequest, create_tokens)

    @post(
        "/v1/chat/completions/derender",
        status_code=200,
        opt=api(DerenderChatRequest, ChatCompletionResponse, streams=False),
    )
    async def chat_derender() -> ASGIApp:
        """Make the answer of a chat of generated tokens."""
        return Exchange(state, DerenderChatRequest, derender_chat, generates=False)

    @post(
        "/v1/completions/derender",
        status_code=200,
        opt=api(DerenderCompletionRequest, CompletionResponse, streams=False),
    )
    async def completion_derender() -> ASGIApp:
        """Make the answer of a completion of generated tokens."""
        return Exchange(state, DerenderCompletionRequest, derender_completion, generates=False)

    @post("/reset_prefix_cache", status_code=200, opt=api(None, None, text="text/plain"))
    async def reset_prefix_cache() -> Response[bytes]:
        """Forget cached blocks. 503 while requests hold blocks."""
        if not await state.engine().reset_prefix_cache():
            raise QueueFullError("Requests hold blocks; try again when none runs.")
        return Response(b"", media_type="text/plain")

    return [
        invocations, batch, chat_render, response_render, message_render, completion_render, tokens, chat_derender, completion_derender,
        reset_prefix_cache,
    ]  # fmt: skip
