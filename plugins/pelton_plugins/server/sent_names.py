"""Errors in the names of the fields that a client sent, where the engine or the chat that a request stands for call them otherwise."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec

from pelton_plugins.server.anthropic_protocol import CountTokensRequest
from pelton_plugins.server.cohere_protocol import CohereChatRequest
from pelton_plugins.server.protocol import ChatCompletionRequest, CompletionRequest, GenerateRequest
from pelton_plugins.server.responses_protocol import ResponsesRequest
from pelton_plugins.server.structured_outputs import constraint_field

Names = Sequence[tuple[str, str]]
"""Pairs of a name, or a beginning of it up to a dot, and what was sent; the first that fits counts."""

OF_A_CHAT: Mapping[type[msgspec.Struct], Names] = {
    ResponsesRequest: (
        ("max_tokens", "max_output_tokens"), ("max_completion_tokens", "max_output_tokens"), ("logprobs", "top_logprobs"),
        ("response_format.json_schema", "text.format.schema"), ("response_format", "text.format"),
        ("tool_choice.allowed_tools", "tool_choice"), ("messages", "input"),
    ),
    CountTokensRequest: (
        ("max_completion_tokens", "max_tokens"), ("stop", "stop_sequences"),
        ("response_format.json_schema", "output_config.format.schema"), ("response_format", "output_config.format"),
    ),
    CohereChatRequest: (
        ("max_completion_tokens", "max_tokens"), ("stop", "stop_sequences"), ("top_p", "p"), ("top_k", "k"),
    ),
}  # fmt: skip
CONSTRAINTS = {
    ResponsesRequest: ("text.format", "text.format"),
    CountTokensRequest: ("output_config.format", "output_config.format"),
    CohereChatRequest: ("response_format", "response_format"),
}
"""The field of a constraint in APIs that are not OpenAI's chat."""
_FLAT_TOOL = re.compile(r"^(tools\[\d+\])\.(?:function|custom)\b")
_ARGUMENTS = re.compile(r"^(tools\[\d+\])\.parameters\b")


def sent_names(request: msgspec.Struct) -> list[tuple[str, str]]:
    for struct, names in OF_A_CHAT.items():
        if isinstance(request, struct):
            return [("structured_outputs", _constraint(request, struct)), *names]
    if not isinstance(request, GenerateRequest):
        return []
    found: list[tuple[str, str, bool]] = [
        ("extra_args", "vllm_xargs", True),
        ("structured_outputs", constraint_field(request) or "tools", request.structured_outputs is None),
    ]
    if isinstance(request, ChatCompletionRequest):
        found += [("logprobs", "top_logprobs", True), ("max_tokens", "max_completion_tokens", True)]
    elif isinstance(request, CompletionRequest):
        found += [("prompt_logprobs", "logprobs", request.prompt_logprobs is None)]  # with echo
    return [(name, field) for name, field, is_sent in found if is_sent and getattr(request, field, None) is not None]


def _constraint(request: msgspec.Struct, struct: type[msgspec.Struct]) -> str:
    value: object = request
    for part in (field := CONSTRAINTS[struct][0]).split("."):
        value = getattr(value, part, None)
    return "tools" if value is None else field


def in_sent_names(message: str, param: str | None, request: msgspec.Struct) -> tuple[str, str | None]:
    """Return an error's text and field."""
    sent = param or ""
    is_found = False
    for name, field in sent_names(request):
        begins = not is_found and re.match(rf"{name}(?=$|[.\[])", sent) is not None
        if begins or name == "max_tokens":  # which errors of other fields and of the prompt's length mention
            message = re.sub(rf"\b{name}\b", field, message)
        if begins:
            is_found, sent = True, field + sent[len(name) :]
    if isinstance(request, ResponsesRequest):
        sent = re.sub(r"^input\[.*", "input", sent) if param and param.startswith("messages") else sent
        sent = _FLAT_TOOL.sub(r"\1", sent)
    elif isinstance(request, CountTokensRequest):
        sent = _ARGUMENTS.sub(r"\1.input_schema", _FLAT_TOOL.sub(r"\1", sent))
    return message, sent or None
