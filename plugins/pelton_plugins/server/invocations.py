"""POST /invocations: SageMaker's one route for everything; what a body asks for follows from its fields."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from litestar.types import Receive, Scope, Send

from pelton_plugins.server.body import read_body
from pelton_plugins.server.chat import create_chat_completion
from pelton_plugins.server.completions import create_completion
from pelton_plugins.server.exchange import Exchange
from pelton_plugins.server.pooling import create_classification, create_embedding, create_rerank, create_score
from pelton_plugins.server.pooling_protocol import (
    ClassifyRequest,
    ClassifyResponse,
    EmbeddingRequest,
    EmbeddingResponse,
    RerankRequest,
    RerankResponse,
    ScoreRequest,
    ScoreResponse,
)
from pelton_plugins.server.protocol import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    CompletionRequest,
    CompletionResponse,
)
from pelton_plugins.server.state import ServerState

INVOKED = (ChatCompletionRequest, CompletionRequest, EmbeddingRequest, ClassifyRequest, ScoreRequest, RerankRequest)
ANSWERED = (
    ChatCompletionResponse, CompletionResponse, EmbeddingResponse, ClassifyResponse, ScoreResponse, RerankResponse,
)  # fmt: skip
Route = tuple[type[msgspec.Struct], Callable[..., Awaitable[None]]]
CHAT: Route = (ChatCompletionRequest, create_chat_completion)
COMPLETION: Route = (CompletionRequest, create_completion)
_SCORED = ("text_1", "data_1", "queries")


class Invocation:
    """An ASGI application for one request: reads the body, and gives it to the route that it is for."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        config = self._state.config
        failure: BaseException | None = None
        body = b""
        try:
            body = await read_body(scope, receive, config.max_body_bytes, timeout_s=config.body_timeout_s or None)
        except Exception as error:  # the route's own reading meets it again, and answers it
            failure = error
        unread = [body]

        async def replay() -> Any:
            if failure is not None:
                raise failure
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            return await receive()

        struct, work = route_of(body, self._state)
        await Exchange(self._state, struct, work)(scope, replay, send)


def route_of(body: bytes, state: ServerState) -> Route:
    """Return the request's struct and what answers it. A body that cannot be read is a chat's, whose errors say what is wrong."""
    try:
        fields: Mapping[str, Any] = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        return CHAT
    pooling = None if state.llm is None else state.llm.model.pooling
    if "query" in fields and "documents" in fields:
        return RerankRequest, create_rerank
    if any(name in fields for name in _SCORED):
        return ScoreRequest, create_score
    if "input" in fields or (pooling is not None and "messages" in fields):
        if pooling is not None and "embed" not in pooling.tasks:
            return ClassifyRequest, create_classification
        return EmbeddingRequest, create_embedding
    return COMPLETION if "prompt" in fields or "prompt_embeds" in fields else CHAT
