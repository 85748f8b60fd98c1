"""From a request to /v1/responses to the chat that it stands for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from pelton import limits
from pelton.errors import RequestError
from pelton_plugins.server.body import explained
from pelton_plugins.server.custom_tools import (
    ARGUMENT,
    CustomDefinition,
    CustomFormat,
    GrammarDefinition,
    arguments_of,
)
from pelton_plugins.server.protocol import ChatCompletionRequest, JsonSchemaFormat, Message, ResponseFormat
from pelton_plugins.server.responses_protocol import ResponsesCustomTool, ResponsesRequest
from pelton_plugins.server.rules import check_offered
from pelton_plugins.server.tools import (
    AllowedTools,
    FunctionDefinition,
    Tool,
    ToolChoice,
    ToolName,
    ToolReference,
    ToolSelection,
)

INCLUDED = ("message.output_text.logprobs", "reasoning.encrypted_content")
SAME_NAME = (
    "model", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "min_tokens", "ignore_eos", "skip_special_tokens", "priority", "cache_salt",
    "request_id", "timeout_s", "chat_template_kwargs", "include_reasoning", "parallel_tool_calls", "stream",
)  # fmt: skip


def as_chat(request: ResponsesRequest, before: Sequence[Mapping[str, Any]] = ()) -> ChatCompletionRequest:
    """before: items of the responses that this one continues. Raises `RequestError` for what is not offered."""
    check_offered(request)
    for one in request.include or ():
        if one not in INCLUDED:
            raise RequestError(f"include has {one[:100]!r}; this server has {', '.join(INCLUDED)}.", param="include")
    if request.max_output_tokens is not None and request.max_output_tokens < 1:
        raise RequestError(
            "max_output_tokens must be at least 1", param="max_output_tokens", value=request.max_output_tokens
        )
    items = [*before, *input_items(request.input)]
    if len(items) > limits.MAX_MESSAGES:
        raise RequestError(f"input has {len(items)} items; at most {limits.MAX_MESSAGES}", param="input")
    messages = [] if request.instructions is None else [Message(role="system", content=request.instructions)]
    messages += messages_of(items)
    wants_logprobs = request.top_logprobs is not None or "message.output_text.logprobs" in (request.include or ())
    return ChatCompletionRequest(
        messages=messages,
        max_completion_tokens=request.max_output_tokens,
        logprobs=wants_logprobs or None,
        top_logprobs=request.top_logprobs,
        tools=_tools(request) or None,
        tool_choice=_choice(request),
        response_format=_format(request),
        reasoning_effort=None if request.reasoning is None else request.reasoning.effort,
        **{name: getattr(request, name) for name in SAME_NAME},
    )


def input_items(given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    if not given:
        raise RequestError("input is empty; send a text or items.", param="input")
    return given


def _tools(request: ResponsesRequest) -> list[Tool]:
    return [
        Tool(type="custom", custom=_custom(tool, f"tools[{index}].format"))
        if isinstance(tool, ResponsesCustomTool)
        else Tool(
            function=FunctionDefinition(
                name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
            )
        )
        for index, tool in enumerate(request.tools or ())
    ]


def _custom(tool: ResponsesCustomTool, place: str) -> CustomDefinition:
    given = tool.format
    if given is None or given.type == "text":
        return CustomDefinition(name=tool.name, description=tool.description)
    if given.syntax is None or given.definition is None:
        raise RequestError("a format of type grammar needs a syntax and a definition", param=place)
    grammar = GrammarDefinition(syntax=given.syntax, definition=given.definition)
    made = CustomFormat(type="grammar", grammar=grammar)
    return CustomDefinition(name=tool.name, description=tool.description, format=made)


def _choice(request: ResponsesRequest) -> ToolChoice | None:
    choice = request.tool_choice
    if choice is None or isinstance(choice, str):
        return None if not request.tools and choice != "required" else choice
    if choice.type == "allowed_tools":
        if choice.mode is None or not choice.tools:
            raise RequestError(
                "tool_choice of type allowed_tools needs a mode and at least one tool",
                param=f"tool_choice.{'mode' if choice.mode is None else 'tools'}",
            )
        tools = [ToolReference(type=one.type, **{one.type: ToolName(name=one.name)}) for one in choice.tools or ()]
        return ToolSelection(type="allowed_tools", allowed_tools=AllowedTools(mode=choice.mode, tools=tools))
    if choice.name is None:
        raise RequestError(f"tool_choice of type {choice.type} needs a name", param="tool_choice.name")
    name = ToolName(name=choice.name)
    return ToolSelection(type=choice.type, **{choice.type: name})  # type: ignore[arg-type]


def _format(request: ResponsesRequest) -> ResponseFormat | None:
    given = None if request.text is None else request.text.format
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return ResponseFormat(type="json_object")
    schema = JsonSchemaFormat(name=given.name or "", schema=given.schema, strict=given.strict)
    return ResponseFormat(type="json_schema", json_schema=schema)


def messages_of(items: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Items as messages: what the model said in one turn is one message."""
    found: list[Message] = []
    for index, item in enumerate(items):
        place, kind = f"input[{index}]", item.get("type", "message")
        if kind == "message":
            message = _message(item, place)
            if message.role == "assistant" and _is_open(found) and not message.tool_calls:
                found[-1].content = f"{found[-1].content or ''}{message.content or ''}"
            else:
                found.append(message)
        elif kind == "reasoning":
            parts = item.get("content") or item.get("summary") or ()
            text = "".join(
                part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)
            )
            found.append(Message(role="assistant", reasoning=text))
        elif kind in ("function_call", "custom_tool_call"):
            if not _is_open(found):
                found.append(Message(role="assistant"))
            is_custom = kind == "custom_tool_call"
            arguments = arguments_of(_text(item, ARGUMENT, place)) if is_custom else _text(item, "arguments", place)
            function = {"name": _text(item, "name", place), "arguments": arguments}
            call = {"id": _text(item, "call_id", place), "type": "function", "function": function}
            found[-1].tool_calls = [*(found[-1].tool_calls or ()), call]
        elif kind in ("function_call_output", "custom_tool_call_output"):
            output = item.get("output")
            content = output if isinstance(output, str) else _parts(output, f"{place}.output")
            found.append(Message(role="tool", tool_call_id=_text(item, "call_id", place), content=content))
        else:
            raise RequestError(f"an item has type {str(kind)[:40]!r}, which is not offered", param=f"{place}.type")
    return found


def _is_open(found: Sequence[Message]) -> bool:
    """The last message is the assistant's, and nothing that ends its turn came after it."""
    return bool(found) and found[-1].role == "assistant"


def _message(item: Mapping[str, Any], place: str) -> Message:
    content = item.get("content")
    text = content if isinstance(content, str) else _parts(content, f"{place}.content")
    try:
        return msgspec.convert({"role": item.get("role"), "content": text}, Message)
    except msgspec.ValidationError as error:
        message, path = explained(error, Message)
        raise RequestError(f"1 validation error: {place}{path}: {message}", param=f"{place}{path}") from None


def _parts(parts: Any, place: str) -> str:
    if not isinstance(parts, list):
        raise RequestError("content must be a text or a list of parts", param=place)
    texts: list[str] = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text", part.get("refusal")) if isinstance(part, dict) else None
        if kind not in ("input_text", "output_text", "text", "refusal") or not isinstance(text, str):
            raise RequestError(f"This model reads text only; a part has type {str(kind)[:40]!r}.", param=place)
        texts.append(text)
    return "\n".join(texts)


def _text(item: Mapping[str, Any], name: str, place: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{name} must be a text", param=f"{place}.{name}")
    return value
