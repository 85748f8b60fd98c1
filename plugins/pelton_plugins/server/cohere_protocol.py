"""Bodies of Cohere's API: /cohere/v2/chat and /v2/embed."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from pelton_plugins.server.protocol import ContentPart
from pelton_plugins.server.tools import FunctionDefinition


class CohereMessage(msgspec.Struct, kw_only=True):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    tool_plan: str | None = None


class CohereFormat(msgspec.Struct, kw_only=True):
    type: Literal["text", "json_object"]
    json_schema: dict[str, Any] | None = None


class CohereTool(msgspec.Struct, kw_only=True):
    function: FunctionDefinition
    type: Literal["function"] = "function"


class CohereChatRequest(msgspec.Struct, kw_only=True):
    messages: list[CohereMessage]
    model: str | None = None
    stream: bool | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    p: float | None = None
    k: int | None = None
    seed: int | None = None
    stop_sequences: list[str] | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    tools: list[CohereTool] | None = None
    tool_choice: Literal["REQUIRED", "NONE"] | None = None
    strict_tools: bool | None = None
    response_format: CohereFormat | None = None
    priority: int | None = None
    # Refused unless they ask for nothing.
    documents: list[Any] | None = None
    logprobs: bool | None = None
    citation_options: Any = None
    safety_mode: str | None = None
    thinking: Any = None


class CohereError(msgspec.Struct, kw_only=True):
    message: str
    id: str | None = None


class CohereEmbedRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    texts: list[str] | None = None
    input_type: str | None = None
    """Accepted; a prompt of that kind is the model's own matter."""
    embedding_types: list[Literal["float", "base64"]] | None = None
    output_dimension: int | None = None
    max_tokens: int | None = None
    truncate: Literal["NONE", "END"] | None = None
    """END keeps what fits of a text that is too long."""
    priority: int | None = None
    images: Any = None
    inputs: Any = None


class CohereChatResponse(msgspec.Struct, kw_only=True):
    id: str
    finish_reason: str
    message: dict[str, Any]
    usage: dict[str, Any]


class CohereEmbedResponse(msgspec.Struct, kw_only=True):
    id: str
    texts: list[str]
    embeddings: dict[str, Any]
    meta: dict[str, Any]
    response_type: str = "embeddings_by_type"
