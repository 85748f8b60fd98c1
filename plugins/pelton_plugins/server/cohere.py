"""POST /cohere/v2/chat and /v2/embed, as Cohere's clients expect them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pelton.errors import RequestError
from pelton.parsing.interface import Arguments, Content, Reasoning, ToolCall
from pelton_plugins.server.chat import ChatRun, prepare_chat
from pelton_plugins.server.chat_stream import Step, chat_steps
from pelton_plugins.server.cohere_protocol import (
    CohereChatRequest,
    CohereChatResponse,
    CohereEmbedRequest,
    CohereEmbedResponse,
    CohereError,
)
from pelton_plugins.server.errors import ErrorResponse
from pelton_plugins.server.exchange import Exchange
from pelton_plugins.server.generation import Counts
from pelton_plugins.server.pooling import as_base64, embeddings_of
from pelton_plugins.server.pooling_protocol import EmbeddingRequest
from pelton_plugins.server.protocol import ChatCompletionRequest, Message, ResponseFormat
from pelton_plugins.server.rules import check_offered
from pelton_plugins.server.tools import Tool

FINISH_REASONS = {"stop": "COMPLETE", "length": "MAX_TOKENS", "tool_calls": "TOOL_CALL", "abort": "ERROR"}


def error_body(body: ErrorResponse) -> bytes:
    return msgspec.json.encode(CohereError(message=body.error.message))


def _error_event(body: ErrorResponse) -> bytes:
    return _event("message-end", delta={"finish_reason": "ERROR", "error": body.error.message})


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode({"type": kind, **fields}))


def as_chat(request: CohereChatRequest) -> ChatCompletionRequest:
    check_offered(request)
    messages = [
        Message(
            role=one.role, content=one.content if one.content is not None or one.role != "assistant" else one.tool_plan,
            tool_calls=one.tool_calls, tool_call_id=one.tool_call_id,
        )
        for one in request.messages
    ]  # fmt: skip
    found: dict[str, Any] = {}
    wanted = request.response_format
    if wanted is not None and wanted.type == "json_object":
        shape = {"type": "json_object"}
        if wanted.json_schema is not None:
            shape = {"type": "json_schema", "json_schema": {"name": "answer", "schema": wanted.json_schema}}  # type: ignore[dict-item]
        found["response_format"] = msgspec.convert(shape, ResponseFormat)
    if request.tool_choice is not None:
        found["tool_choice"] = request.tool_choice.lower()
    tools = None if request.tools is None else [Tool(function=tool.function) for tool in request.tools]
    if tools and request.strict_tools:
        for tool in tools:
            assert tool.function is not None
            tool.function = msgspec.structs.replace(tool.function, strict=True)
    return ChatCompletionRequest(
        messages=messages, model=request.model, stream=request.stream, max_completion_tokens=request.max_tokens,
        temperature=request.temperature, top_p=request.p, top_k=request.k, seed=request.seed, stop=request.stop_sequences,
        frequency_penalty=request.frequency_penalty, presence_penalty=request.presence_penalty, tools=tools,
        priority=request.priority, **found,
    )  # fmt: skip


async def create_cohere_chat(exchange: Exchange, request: CohereChatRequest) -> None:
    run = await prepare_chat(exchange, as_chat(request))
    answer = _CohereAnswer(exchange, run, exchange.request_id)
    await (answer.stream() if request.stream else answer.whole())


@dataclass(eq=False)
class _CohereAnswer:
    exchange: Exchange
    run: ChatRun
    answer_id: str
    _parts: list[dict[str, Any]] = field(init=False, default_factory=list)  # of the content
    _calls: list[dict[str, Any]] = field(init=False, default_factory=list)
    _open: str = field(init=False, default="")  # "content" or "tool-call", while one is
    _counts: Counts = field(init=False, default_factory=Counts)

    def _steps(self) -> AsyncGenerator[Step, None]:
        return chat_steps(self.exchange, self.run, self._counts, self.answer_id)

    def _usage(self) -> dict[str, Any]:
        tokens = {"input_tokens": self._counts.prompt_tokens, "output_tokens": self._counts.completion_tokens}
        return {"billed_units": tokens, "tokens": tokens, "cached_tokens": self._counts.cached_tokens}

    def _finish_reason(self, step: Step) -> str:
        if isinstance(step.output.stop_reason, str):
            return "STOP_SEQUENCE"
        return "TOOL_CALL" if self._calls else FINISH_REASONS.get(step.finish_reason or "stop", "COMPLETE")

    async def whole(self) -> None:
        reason = "COMPLETE"
        async with contextlib.aclosing(self._steps()) as steps:
            async for step in steps:
                self._take(step)
                if step.finish_reason is not None:
                    reason = self._finish_reason(step)
        message: dict[str, Any] = {"role": "assistant", "content": self._parts}
        if self._calls:
            message["tool_calls"] = self._calls
        body = CohereChatResponse(id=self.answer_id, finish_reason=reason, message=message, usage=self._usage())
        await self.exchange.answer(msgspec.json.encode(body))

    async def stream(self) -> None:
        self.exchange.stream_error = _error_event
        begin = {"message": {"role": "assistant", "content": [], "tool_plan": "", "tool_calls": [], "citations": []}}
        out = _event("message-start", id=self.answer_id, delta=begin)
        async with contextlib.aclosing(self._steps()) as steps:
            async for step in steps:
                out += b"".join(self._take(step))
                if step.finish_reason is not None:
                    end = {"finish_reason": self._finish_reason(step), "usage": self._usage()}
                    out += b"".join(self._close()) + _event("message-end", id=self.answer_id, delta=end)
                if out:
                    await self.exchange.write(out)
                out = b""
        await self.exchange.finish(b"")

    def _take(self, step: Step) -> list[bytes]:
        found: list[bytes] = []
        for part in step.events:
            if isinstance(part, ToolCall):
                found += self._close()
                function = {"name": part.name, "arguments": ""}
                self._calls.append({"id": part.call_id, "type": "function", "function": function})
                self._open = "tool-call"
                message = {"message": {"tool_calls": self._calls[-1]}}
                found.append(_event("tool-call-start", index=len(self._calls) - 1, delta=message))
            elif isinstance(part, Arguments):
                self._calls[-1]["function"]["arguments"] += part.text
                message = {"message": {"tool_calls": {"function": {"arguments": part.text}}}}
                found.append(_event("tool-call-delta", index=len(self._calls) - 1, delta=message))
            else:
                assert isinstance(part, Content | Reasoning)
                found += self._more("text" if isinstance(part, Content) else "thinking", part.text)
        return found

    def _more(self, kind: str, text: str) -> list[bytes]:
        found: list[bytes] = []
        if self._open != "content" or self._parts[-1]["type"] != kind:
            found = self._close()
            self._parts.append({"type": kind, kind: ""})
            self._open = "content"
            start = {"message": {"content": dict(self._parts[-1])}}
            found.append(_event("content-start", index=len(self._parts) - 1, delta=start))
        self._parts[-1][kind] += text
        delta = {"message": {"content": {kind: text}}}
        return [*found, _event("content-delta", index=len(self._parts) - 1, delta=delta)]

    def _close(self) -> list[bytes]:
        if not self._open:
            return []
        kind, self._open = self._open, ""
        index = len(self._parts if kind == "content" else self._calls) - 1
        return [_event(f"{kind}-end", index=index)]


async def create_cohere_embedding(exchange: Exchange, request: CohereEmbedRequest) -> None:
    check_offered(request)
    if not request.texts:
        raise RequestError("texts is empty; send at least one.", param="texts")
    most = request.max_tokens if request.max_tokens is not None else -1 if request.truncate == "END" else None
    inner = EmbeddingRequest(
        model=request.model, input=list(request.texts), priority=request.priority, truncate_prompt_tokens=most,
        dimensions=request.output_dimension,
    )  # fmt: skip
    outputs, usage = await embeddings_of(exchange, inner)
    kinds = request.embedding_types or ["float"]
    made: dict[str, Any] = {}
    if "float" in kinds:
        made["float"] = [output.outputs.numbers() for output in outputs]
    if "base64" in kinds:
        made["base64"] = [as_base64(output) for output in outputs]
    meta = {"api_version": {"version": "2"}, "billed_units": {"input_tokens": usage.prompt_tokens}}
    body = CohereEmbedResponse(id=exchange.request_id, texts=request.texts, embeddings=made, meta=meta)
    await exchange.answer(msgspec.json.encode(body))
