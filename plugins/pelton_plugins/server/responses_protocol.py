"""Bodies of /v1/responses: what clients send. Answers are plain dictionaries, as their parts have many shapes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from pelton_plugins.server.protocol import NOT_EMPTY


class ResponsesFunction(msgspec.Struct, kw_only=True, tag_field="type", tag="function"):
    """A tool, flat: unlike in chat completions its name stands beside its type."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponsesCustomFormat(msgspec.Struct, kw_only=True):
    type: Literal["text", "grammar"] = "text"
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class ResponsesCustomTool(msgspec.Struct, kw_only=True, tag_field="type", tag="custom"):
    """A tool that takes a text."""

    name: str
    description: str | None = None
    format: ResponsesCustomFormat | None = None


class ResponsesToolReference(msgspec.Struct, kw_only=True):
    name: str
    type: Literal["function", "custom"] = "function"


class ResponsesToolSelection(msgspec.Struct, kw_only=True):
    """One tool that has to be called, by its `name`; or, of type `allowed_tools`, some of the tools."""

    type: Literal["function", "custom", "allowed_tools"] = "function"
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[ResponsesToolReference] | None = None


class TextFormat(msgspec.Struct, kw_only=True):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, kw_only=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(msgspec.Struct, kw_only=True):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesStreamOptions(msgspec.Struct, kw_only=True):
    include_obfuscation: bool | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True):
    input: str | Annotated[list[dict[str, Any]], NOT_EMPTY]
    """A text, or items: messages, function calls, their outputs, and reasoning."""
    model: str | None = None
    instructions: str | None = None
    """A system message before the input; not kept for `previous_response_id`."""
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    tools: list[ResponsesFunction | ResponsesCustomTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponsesToolSelection | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    store: bool | None = None
    """Keep the answer for `previous_response_id` and GET; needs a server with --max-stored-responses."""
    previous_response_id: str | None = None
    background: bool | None = None
    """Answer at once, and work on; needs `store`."""
    include: list[str] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    image: Any = None
    moderation: Any = None
    prompt: Any = None
    conversation: Any = None
    context_management: Any = None
    # Of no effect on the answer.
    metadata: dict[str, Any] | None = None
    user: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    access_programs: Any = None
    background_options: dict[str, Any] | None = None
    # As in chat completions.
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    timeout_s: float | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool | None = None


class ResponsesAnswer(msgspec.Struct, kw_only=True):
    """The answer's outline, for the description of the API."""

    id: str
    object: Literal["response"]
    created_at: float
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    model: str
    output: list[dict[str, Any]]
    error: dict[str, Any] | None = None
    incomplete_details: dict[str, Any] | None = None
    usage: dict[str, Any] | None = None


class DeletedResponse(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class InputTokens(msgspec.Struct, kw_only=True):
    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class InputItems(msgspec.Struct, kw_only=True):
    data: list[dict[str, Any]]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: Literal["list"] = "list"
