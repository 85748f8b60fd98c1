"""Bodies of requests and answers that are token ids: rendered prompts, the engine alone, and what is made of its tokens."""

from __future__ import annotations

from typing import Any

import msgspec

from pelton_plugins.server.protocol import ChatCompletionRequest, ChatLogprobs, StreamOptions, Usage


class TokensRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A prompt as token ids, with the engine's own sampling parameters."""

    token_ids: list[int]
    sampling_params: dict[str, Any] = {}
    """Fields of `SamplingParams`."""
    model: str | None = None
    request_id: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    cache_salt: str | None = None
    timeout_s: float | None = None
    kv_transfer_params: dict[str, Any] | None = None
    features: Any = None
    """Of prompts that are more than text; null."""


class TokensChoice(msgspec.Struct, kw_only=True):
    index: int
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: ChatLogprobs | None = None


class TokensResponse(msgspec.Struct, kw_only=True):
    request_id: str
    choices: list[TokensChoice]
    kv_transfer_params: dict[str, Any] | None = None
    usage: Usage | None = None


class DerenderChatRequest(msgspec.Struct, kw_only=True):
    generate_response: TokensResponse
    model: str | None = None
    prompt_tokens: int | None = None
    """Of the prompt, for `usage`."""
    chat_request: ChatCompletionRequest | None = None
    """The request that was rendered: its tools and template decide how the answer is read."""
    stream: bool | None = None


class DerenderCompletionRequest(msgspec.Struct, kw_only=True):
    generate_response: TokensResponse
    model: str | None = None
    prompt_tokens: int | None = None
    stream: bool | None = None
