"""From a request to /v1/messages to the chat that it stands for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from pelton.errors import RequestError
from pelton_plugins.server.anthropic_protocol import AnthropicMessage, CountTokensRequest, MessagesRequest, OutputConfig
from pelton_plugins.server.protocol import ChatCompletionRequest, JsonSchemaFormat, Message, ResponseFormat
from pelton_plugins.server.rules import check_offered
from pelton_plugins.server.tools import FunctionDefinition, Tool, ToolChoice, ToolSelection


def as_chat(request: CountTokensRequest) -> ChatCompletionRequest:
    """Raises `RequestError` for what is not offered."""
    if not request.messages:
        raise RequestError("messages is empty; send at least one message.", param="messages")
    messages: list[Message] = []
    if request.system:
        messages.append(Message(role="system", content=_text(request.system, "system")))
    for index, message in enumerate(request.messages):
        messages += _messages(message, f"messages[{index}].content")
    choice, wanted = request.tool_choice, request.output_config or OutputConfig()
    chat = ChatCompletionRequest(
        messages=messages,
        model=request.model,
        tools=_tools(request) or None,
        tool_choice=_choice(request),
        parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
        chat_template_kwargs=request.chat_template_kwargs,
        include_reasoning=False if request.thinking is not None and request.thinking.type == "disabled" else None,
        reasoning_effort=wanted.effort,
        response_format=None
        if wanted.format is None
        else ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat(schema=wanted.format.schema)),
        continue_final_message=(messages[-1].role == "assistant" and not messages[-1].tool_calls) or None,
    )
    if not isinstance(request, MessagesRequest):
        return chat
    check_offered(request)
    if request.max_tokens < 1:
        raise RequestError("max_tokens must be at least 1", param="max_tokens", value=request.max_tokens)
    return msgspec.structs.replace(
        chat,
        max_tokens=request.max_tokens,
        stop=request.stop_sequences,
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        stream=bool(request.stream),
    )


def _tools(request: CountTokensRequest) -> list[Tool]:
    found = []
    for index, tool in enumerate(request.tools or ()):
        if tool.type not in (None, "custom"):
            raise RequestError(
                f"a tool has type {tool.type[:40]!r}; this server runs no tools of its own",
                param=f"tools[{index}].type",
            )
        definition = FunctionDefinition(
            name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
        )
        found.append(Tool(function=definition))
    return found


def _choice(request: CountTokensRequest) -> ToolChoice | None:
    choice = request.tool_choice
    if choice is None:
        return None
    if choice.type == "tool":
        if choice.name is None:
            raise RequestError("tool_choice of type tool needs a name", param="tool_choice.name")
        return ToolSelection.of_function(choice.name)
    if choice.type == "any":
        return "required"
    return choice.type if request.tools else None


def _messages(message: AnthropicMessage, place: str) -> list[Message]:
    """One message of Anthropic's is several: results of tools have messages of their own, before the text."""
    if isinstance(message.content, str):
        return [Message(role=message.role, content=message.content)]
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[Message] = []
    for index, block in enumerate(message.content):
        kind, at = block.get("type"), f"{place}[{index}]"
        if kind == "text":
            texts.append(_string(block, "text", at))
        elif kind == "tool_use" and message.role == "assistant":
            arguments = msgspec.json.encode(block.get("input") or {}).decode()
            function = {"name": _string(block, "name", at), "arguments": arguments}
            calls.append({"id": _string(block, "id", at), "type": "function", "function": function})
        elif kind == "tool_result" and message.role == "user":
            text = _text(block.get("content") or "", at)
            results.append(Message(role="tool", tool_call_id=_string(block, "tool_use_id", at), content=text))
        elif kind == "thinking" and message.role == "assistant":
            reasoning.append(_string(block, "thinking", at))
        elif kind != "redacted_thinking":
            raise RequestError(
                f"a block of type {str(kind)[:40]!r} is not offered in a {message.role} message", param=at
            )
    if results and not texts:
        return results
    own = Message(
        role=message.role,
        content="\n".join(texts) if texts or not calls else None,
        tool_calls=calls or None,
        reasoning="".join(reasoning) or None,
    )
    return [*results, own]


def _text(content: Any, place: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise RequestError("content must be a text or a list of blocks", param=f"{place}.content")
    texts = []
    for index, block in enumerate(content):
        if not isinstance(block, dict) or block.get("type") != "text":
            raise RequestError("This model reads text only", param=f"{place}[{index}]")
        texts.append(_string(block, "text", f"{place}[{index}]"))
    return "\n".join(texts)


def _string(block: dict[str, Any], name: str, place: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{name} must be a text", param=f"{place}.{name}")
    return value
