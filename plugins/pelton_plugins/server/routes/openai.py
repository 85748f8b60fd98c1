"""/v1/models, /v1/completions, /v1/chat/completions."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Response, get, post
from litestar.params import FromPath
from litestar.types import ASGIApp

from pelton_plugins.server.chat import create_chat_completion
from pelton_plugins.server.completions import create_completion
from pelton_plugins.server.exchange import Exchange
from pelton_plugins.server.openapi import api
from pelton_plugins.server.prompts import max_model_len
from pelton_plugins.server.protocol import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    CompletionRequest,
    CompletionResponse,
    ModelCard,
    ModelList,
)
from pelton_plugins.server.state import ServerState


def routes(state: ServerState) -> list[Any]:
    @get("/v1/models", opt=api(None, ModelList))
    async def models() -> Response[bytes]:
        """List the names that requests may use as `model`."""
        return Response(msgspec.json.encode(_models(state)), media_type="application/json")

    @get("/v1/models/{name:path}", opt=api(None, ModelCard))
    async def model(name: FromPath[str]) -> Response[bytes]:
        """Describe one of them."""
        wanted = name.removeprefix("/")
        state.check_model(wanted)
        found = next(card for card in _models(state).data if card.id == wanted)
        return Response(msgspec.json.encode(found), media_type="application/json")

    @post("/v1/completions", status_code=200, opt=api(CompletionRequest, CompletionResponse))
    async def completions() -> ASGIApp:
        """Continue one or more prompts."""
        return Exchange(state, CompletionRequest, create_completion)

    @post("/v1/chat/completions", status_code=200, opt=api(ChatCompletionRequest, ChatCompletionResponse))
    async def chat_completions() -> ASGIApp:
        """Answer a conversation."""
        return Exchange(state, ChatCompletionRequest, create_chat_completion)

    return [models, model, completions, chat_completions]


def _models(state: ServerState) -> ModelList:
    llm = state.engine()
    permission = {
        "id": f"modelperm-{state.started_at}",
        "object": "model_permission",
        "created": state.started_at,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return ModelList(
        data=[
            ModelCard(
                id=name,
                created=state.started_at,
                root=state.model_names[0],
                max_model_len=max_model_len(llm),
                permission=[permission],
            )
            for name in state.model_names
        ]
        + [
            ModelCard(
                id=name,
                created=state.started_at,
                root=name,
                parent=state.model_names[0],
                max_model_len=max_model_len(llm),
                permission=[permission],
            )
            for name in state.adapters
        ]
    )
