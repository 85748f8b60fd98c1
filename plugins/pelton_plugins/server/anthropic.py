"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic's clients expect them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pelton.parsing.interface import Arguments, Content, Reasoning, ToolCall
from pelton_plugins.server.anthropic_input import as_chat
from pelton_plugins.server.anthropic_protocol import (
    AnthropicError,
    AnthropicErrorDetail,
    CountTokensAnswer,
    CountTokensRequest,
    MessagesAnswer,
    MessagesRequest,
    MessagesUsage,
)
from pelton_plugins.server.chat import ChatRun, prepare_chat
from pelton_plugins.server.chat_stream import Step, chat_steps
from pelton_plugins.server.errors import ErrorResponse
from pelton_plugins.server.exchange import Exchange
from pelton_plugins.server.generation import Counts
from pelton_plugins.server.params import check_chat
from pelton_plugins.server.prompts import render

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def error_body(body: ErrorResponse) -> bytes:
    """An error in Anthropic's shape."""
    kind = ERROR_TYPES.get(body.error.code, "invalid_request_error" if body.error.code < 500 else "api_error")
    return msgspec.json.encode(AnthropicError(error=AnthropicErrorDetail(type=kind, message=body.error.message)))


def event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode({"type": kind, **fields}))


def _error_event(body: ErrorResponse) -> bytes:
    return b"event: error\ndata: %b\n\n" % error_body(body)


async def create_message(exchange: Exchange, request: MessagesRequest) -> None:
    run = await prepare_chat(exchange, as_chat(request))
    answer = _Message(exchange, run, f"msg_{exchange.request_id}", request.model or exchange.state.model_name)
    await (answer.stream() if request.stream else answer.whole())


async def count_tokens(exchange: Exchange, request: CountTokensRequest) -> None:
    state = exchange.state
    llm = state.generating_engine()
    state.check_model(request.model)
    chat = as_chat(request)
    offer = check_chat(chat, trust_template=False)
    prompt = await render(llm, chat, offer.tools, with_specials=state.config.special_tokens_in_messages)
    await exchange.answer(msgspec.json.encode(CountTokensAnswer(input_tokens=len(prompt.token_ids))))


@dataclass(eq=False)
class _Message:
    exchange: Exchange
    run: ChatRun
    message_id: str
    model: str
    _content: list[dict[str, Any]] = field(init=False, default_factory=list)
    _arguments: str = field(init=False, default="")
    _counts: Counts = field(init=False, default_factory=Counts)

    def _steps(self) -> AsyncGenerator[Step, None]:
        return chat_steps(self.exchange, self.run, self._counts, self.message_id)

    def _usage(self) -> MessagesUsage:
        """Cached tokens count apart from the rest of the input, as Anthropic does."""
        cached = self._counts.cached_tokens
        return MessagesUsage(
            input_tokens=self._counts.prompt_tokens - cached,
            cache_read_input_tokens=cached,
            output_tokens=self._counts.completion_tokens,
        )

    def _stop(self, step: Step) -> dict[str, Any]:
        stopped_at = step.output.stop_reason if isinstance(step.output.stop_reason, str) else None
        is_call = bool(self._content) and self._content[-1]["type"] == "tool_use" and step.finish_reason == "stop"
        reason = "tool_use" if is_call else STOP_REASONS.get(step.finish_reason or "stop", "end_turn")
        return {"stop_reason": reason if stopped_at is None else "stop_sequence", "stop_sequence": stopped_at}

    async def whole(self) -> None:
        stop: dict[str, Any] = {}
        async with contextlib.aclosing(self._steps()) as steps:
            async for step in steps:
                self._take(step)
                if step.finish_reason is not None:
                    stop = self._stop(step)
        self._end_block()
        body = MessagesAnswer(id=self.message_id, model=self.model, content=self._content, usage=self._usage(), **stop)
        await self.exchange.answer(msgspec.json.encode(body))

    async def stream(self) -> None:
        self.exchange.stream_error = _error_event
        has_begun = False
        async with contextlib.aclosing(self._steps()) as steps:
            async for step in steps:
                out = b"" if has_begun else self._begin()
                has_begun = True
                out += b"".join(self._take(step))
                if step.finish_reason is not None:
                    stop = self._stop(step)
                    out += b"".join(self._end_block())
                    out += event("message_delta", delta=stop, usage=self._usage()) + event("message_stop")
                if out:
                    await self.exchange.write(out)
        await self.exchange.finish(b"")

    def _begin(self) -> bytes:
        usage = msgspec.structs.replace(self._usage(), output_tokens=0)
        return event(
            "message_start", message=MessagesAnswer(id=self.message_id, model=self.model, content=[], usage=usage)
        )

    # Blocks

    def _take(self, step: Step) -> list[bytes]:
        found: list[bytes] = []
        for part in step.events:
            if isinstance(part, ToolCall):
                assert part.call_id is not None
                found += self._open("tool_use", id=_tool_id(part.call_id), name=part.name, input={})
            elif isinstance(part, Arguments):
                self._arguments += part.text
                found.append(self._delta(type="input_json_delta", partial_json=part.text))
            elif isinstance(part, Content):
                found += self._more("text", part.text)
                found.append(self._delta(type="text_delta", text=part.text))
            else:
                assert isinstance(part, Reasoning)
                found += self._more("thinking", part.text)
                found.append(self._delta(type="thinking_delta", thinking=part.text))
        return found

    def _more(self, kind: str, text: str) -> list[bytes]:
        found: list[bytes] = []
        if not self._content or self._content[-1]["type"] != kind:
            found = self._open(kind, **({"text": ""} if kind == "text" else {"thinking": "", "signature": ""}))
        self._content[-1][kind] += text
        return found

    def _open(self, kind: str, **fields: Any) -> list[bytes]:
        found = self._end_block()
        self._content.append({"type": kind, **fields})
        return [*found, event("content_block_start", index=len(self._content) - 1, content_block=self._content[-1])]

    def _delta(self, **delta: Any) -> bytes:
        return event("content_block_delta", index=len(self._content) - 1, delta=delta)

    def _end_block(self) -> list[bytes]:
        """End the last block; a call's arguments are read."""
        if not self._content:
            return []
        block = self._content[-1]
        if block["type"] == "tool_use":
            try:
                found = json.loads(self._arguments)
            except ValueError:
                found = None
            # Anthropic's clients take an object alone; what the model wrote instead is not lost.
            block["input"] = found if isinstance(found, dict) else {"_raw": self._arguments}
            self._arguments = ""
        return [event("content_block_stop", index=len(self._content) - 1)]


def _tool_id(call_id: str) -> str:
    return "toolu_" + call_id.removeprefix("chatcmpl-tool-")
