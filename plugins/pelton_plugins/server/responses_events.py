"""The parts of a response, and the events that tell of them as they grow."""

from __future__ import annotations

import time
import uuid
from typing import Any

import msgspec

from pelton.parsing.interface import Arguments, Content, Event, Reasoning, ToolCall
from pelton_plugins.server.chat_calls import CustomCall, Input
from pelton_plugins.server.protocol import ChatLogprobs, Usage
from pelton_plugins.server.responses_protocol import ResponsesRequest

END_REASONS = {"length": "max_output_tokens"}
"""From finish_reason to incomplete_details.reason."""


class ResponseBuilder:
    """One response object. Each method returns the events that it makes; who does not stream drops them."""

    def __init__(self, response_id: str, model: str, request: ResponsesRequest, *, is_stored: bool) -> None:
        self.output: list[dict[str, Any]] = []
        self._number = 0
        self._open: str | None = None  # the kind of the last item, while it grows
        self._held: list[Any] = []  # logprobs of tokens whose text is held back, or that have none
        self.response = _outline(response_id, model, request, is_stored=is_stored)
        self.response["output"] = self.output

    def begin(self) -> list[dict[str, Any]]:
        return [
            self.event("response.created", response=self.copy()),
            self.event("response.in_progress", response=self.copy()),
        ]

    def copy(self) -> dict[str, Any]:
        """The object as it is now."""
        found: dict[str, Any] = msgspec.to_builtins(self.response)
        return found

    def take(self, events: list[Event], logprobs: ChatLogprobs | None = None) -> list[dict[str, Any]]:
        """logprobs: of the tokens of this step, which go with its first text; of a step without any part, with the next."""
        found: list[dict[str, Any]] = []
        rows = self._held + ([] if logprobs is None else msgspec.to_builtins(logprobs.content or []))
        for event in events:
            if isinstance(event, Content):
                found += self._text(event.text, rows)
                rows = []
            elif isinstance(event, Reasoning):
                found += self._reasoning(event.text)
            elif isinstance(event, ToolCall):
                found += self.close()
                kind = "custom_tool_call" if isinstance(event, CustomCall) else "function_call"
                prefix, text = ("ctc", "input") if isinstance(event, CustomCall) else ("fc", "arguments")
                found += self._add(kind, _item(prefix, type=kind, call_id=event.call_id, name=event.name, **{text: ""}))
            else:
                found += self._arguments(event)
        self._held = [] if events else rows
        return found

    def finish(self, finish_reason: str | None, usage: Usage) -> list[dict[str, Any]]:
        """The answer is over."""
        reason = END_REASONS.get(finish_reason or "")
        if self._open == "message":
            self.output[-1]["content"][0]["logprobs"] += self._held
        events = self.close(is_whole=reason is None)
        self.response["usage"] = usage_of(usage)
        self.response["status"] = "completed" if reason is None else "incomplete"
        self.response["completed_at"] = int(time.time()) if reason is None else None
        self.response["incomplete_details"] = None if reason is None else {"reason": reason}
        return [*events, self.event(f"response.{self.response['status']}", response=self.copy())]

    def fail(self, status: str, error: dict[str, Any] | None) -> dict[str, Any]:
        """The response ends as "failed" or "cancelled"."""
        self.close(is_whole=False)
        self.response["status"], self.response["error"] = status, error
        return self.event("response.failed", response=self.copy())

    # Items

    def event(self, kind: str, **fields: Any) -> dict[str, Any]:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return event

    def _add(self, kind: str, item: dict[str, Any]) -> list[dict[str, Any]]:
        self._open = kind
        self.output.append(item)
        return [
            self.event("response.output_item.added", output_index=len(self.output) - 1, item=msgspec.to_builtins(item))
        ]

    def _at(self) -> dict[str, Any]:
        return {"item_id": self.output[-1]["id"], "output_index": len(self.output) - 1}

    def _part(self, kind: str, part: dict[str, Any]) -> dict[str, Any]:
        return self.event(
            f"response.content_part.{kind}", **self._at(), content_index=0, part=msgspec.to_builtins(part)
        )

    def _text(self, text: str, rows: list[Any]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        if self._open != "message":
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            found += self.close()
            found += self._add("message", _item("msg", type="message", role="assistant", content=[]))
            self.output[-1]["content"].append(part)
            found.append(self._part("added", part))
        part = self.output[-1]["content"][0]
        part["text"] += text
        part["logprobs"] += rows
        found.append(self.event("response.output_text.delta", **self._at(), content_index=0, delta=text, logprobs=rows))
        return found

    def _reasoning(self, text: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        if self._open != "reasoning":
            found += self.close()
            found += self._add("reasoning", _item("rs", type="reasoning", summary=[], content=[]))
            self.output[-1]["content"].append({"type": "reasoning_text", "text": ""})
            found.append(self._part("added", self.output[-1]["content"][0]))
        self.output[-1]["content"][0]["text"] += text
        found.append(self.event("response.reasoning_text.delta", **self._at(), content_index=0, delta=text))
        return found

    def _arguments(self, event: Arguments) -> list[dict[str, Any]]:
        kind, name = ("custom_tool_call", "input") if isinstance(event, Input) else ("function_call", "arguments")
        self.output[-1][name] += event.text
        return [self.event(f"response.{kind}_{name}.delta", **self._at(), delta=event.text)]

    def close(self, *, is_whole: bool = True) -> list[dict[str, Any]]:
        """End the item that grows, if one does."""
        if self._open is None:
            return []
        item, kind, found = self.output[-1], self._open, []
        self._open = None
        item["status"] = "completed" if is_whole else "incomplete"
        if kind == "function_call":
            found.append(
                self.event(
                    "response.function_call_arguments.done",
                    **self._at(),
                    name=item["name"],
                    arguments=item["arguments"],
                )
            )
        elif kind == "custom_tool_call":
            found.append(self.event("response.custom_tool_call_input.done", **self._at(), input=item["input"]))
        else:
            part = item["content"][0]
            where = {**self._at(), "content_index": 0, "text": part["text"]}
            if kind == "message":
                where["logprobs"] = part["logprobs"]
            name = "output_text" if kind == "message" else "reasoning_text"
            found += [self.event(f"response.{name}.done", **where), self._part("done", part)]
        found.append(
            self.event("response.output_item.done", output_index=len(self.output) - 1, item=msgspec.to_builtins(item))
        )
        return found


def _item(prefix: str, **fields: Any) -> dict[str, Any]:
    return {"id": f"{prefix}_{uuid.uuid4().hex}", "status": "in_progress", **fields}


def usage_of(usage: Usage) -> dict[str, Any]:
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details is not None else 0
    reasoning = (usage.completion_tokens_details or {}).get("reasoning_tokens", 0)
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached or 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": usage.total_tokens,
    }


def _choice(request: ResponsesRequest) -> Any:
    """As it was sent."""
    choice = request.tool_choice
    if choice is None or isinstance(choice, str):
        return choice or "auto"
    return {name: value for name, value in msgspec.to_builtins(choice).items() if value is not None}


def _outline(response_id: str, model: str, request: ResponsesRequest, *, is_stored: bool) -> dict[str, Any]:
    """A response before its first token: mostly what was asked for."""
    text = request.text
    tools = [msgspec.to_builtins(tool) for tool in request.tools or ()]
    outline: dict[str, Any] = {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": bool(request.background),
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": None,
        "model": model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "reasoning": {"effort": None if request.reasoning is None else request.reasoning.effort, "summary": None},
        "service_tier": "default",
        "store": is_stored,
        "temperature": request.temperature,
        "text": {
            "format": {"type": "text"} if text is None or text.format is None else msgspec.to_builtins(text.format)
        },
        "tool_choice": _choice(request),
        "tools": tools,
        "top_logprobs": request.top_logprobs or 0,
        "top_p": request.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": request.user,
        "metadata": request.metadata or {},
    }
    return outline
