"""Parts of a chat's answers, choice by choice: reasoning, content and calls, for any shape of API.

Only what the request asked for comes through: one call where parallel ones are off, no reasoning where that is left out.
"""

from __future__ import annotations

import secrets
import string
import uuid
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from pelton.errors import RequestError
from pelton.outputs import CompletionOutput
from pelton.parsing.interface import Arguments, Content, Event, ParserContext, Reasoning, ToolCall
from pelton.sampling_params import SamplingParams, StructuredOutputsParams
from pelton_plugins.server.parsing import AnswerPlan, AnswerReader, NamedReader, Parsers
from pelton_plugins.server.protocol import ChatCompletionRequest
from pelton_plugins.server.tools import NamedTool, constraint, functions

_ALPHANUMERIC = string.ascii_letters + string.digits


@dataclass(eq=False)
class ChatReading:
    """How all answers to one request are read."""

    plan: AnswerPlan | None
    hidden: Any
    named: str | None
    is_parallel: bool
    with_reasoning: bool
    may_call: bool

    def choice(self) -> ChoiceReader:
        return ChoiceReader(self)

    def new_id(self) -> str:
        if self.plan is not None and self.plan.ids_have_nine_characters:
            return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
        return f"chatcmpl-tool-{uuid.uuid4().hex}"


class ChoiceReader:
    """One choice, and what came of it so far."""

    def __init__(self, reading: ChatReading) -> None:
        self._reading = reading
        inner = None if reading.plan is None else AnswerReader(reading.plan, reading.hidden)
        self._reader = inner if reading.named is None else NamedReader(reading.named, inner)
        self._is_dropping = False  # a call that is one too many
        self.num_calls = 0
        self.reasoning = ""

    def take(self, output: CompletionOutput) -> list[Event]:
        """Events of what is new in `output`; the last ones where it is finished."""
        if self._reader is None:
            return [Content(output.text)] if output.text else []
        events = self._reader.feed(output.text)
        if output.finish_reason is not None:
            events += self._reader.finish()
        found = [kept for event in events if (kept := self._kept(event)) is not None]
        plan = self._reading.plan
        if output.finish_reason is not None and plan is not None and plan.count is not None:
            plan.count(self.num_calls)
        return found

    def _kept(self, event: Event) -> Event | None:
        reading = self._reading
        if isinstance(event, Reasoning):
            self.reasoning += event.text
            return event if reading.with_reasoning else None
        if isinstance(event, ToolCall):
            self._is_dropping = not reading.may_call or (self.num_calls > 0 and not reading.is_parallel)
            if self._is_dropping:
                return None
            self.num_calls += 1
            return event if event.call_id is not None else replace(event, call_id=reading.new_id())
        if isinstance(event, Arguments) and self._is_dropping:
            return None if reading.may_call else Content(event.text)
        return event

    def finish_reason(self, output: CompletionOutput) -> str | None:
        """The engine's, or "tool_calls" where the model stopped to call a tool of its choice."""
        is_call = output.finish_reason == "stop" and self.num_calls > 0 and self._reading.named is None
        return "tool_calls" if is_call else output.finish_reason


def kind_of_choice(request: ChatCompletionRequest) -> str:
    """Return "none", "auto", "required" or "named"."""
    if request.tools is None:
        return "none"
    choice = request.tool_choice
    return "named" if isinstance(choice, NamedTool) else choice or "auto"


def strict_calls(plan: AnswerPlan, *, is_parallel: bool) -> StructuredOutputsParams | None:
    """Hold calls that the model chooses to make to the schemas of functions that are strict; None without these, or where the format of
    calls does not say how.

    Where reasoning comes first, nothing in it is a call. Whether it does is known from the prompt, or the answer's beginning says it.
    """
    if not any(tool.get("strict") for tool in plan.context.tools):
        return None
    made = plan.chain[-1].call_format(plan.context, is_parallel=is_parallel)
    if made is None:
        return None
    reasoning_end = None
    if len(plan.chain) > 1:
        reasoning, prompt = plan.chain[0], plan.context.prompt.rstrip()
        begins, ends = reasoning.reasoning_begin, reasoning.reasoning_end
        if ends and not prompt.endswith(tuple(ends)):
            if begins and not prompt.endswith(tuple(begins)):
                made = {**made, "thought": {"begins": list(begins), "ends": list(ends)}}
            else:
                reasoning_end = ends[0]
    return StructuredOutputsParams(structural_tag={"format": dict(made)}, reasoning_end=reasoning_end)


def read_chat(
    parsers: Parsers, llm: Any, request: ChatCompletionRequest, params: SamplingParams, prompt: str | None
) -> tuple[ChatReading | None, SamplingParams]:
    """How the answers are read, and the sampling parameters for it. None: they are content, and nothing else.

    Raises `RequestError` where the model's calls cannot be read.
    """
    parsers = parsers.of_model(llm)
    kind = kind_of_choice(request)
    if kind == "auto" and not parsers.reads_calls:
        raise RequestError(
            'tool_choice "auto" needs a tool parser: start the server with --enable-auto-tool-choice '
            '--tool-call-parser NAME, or send tool_choice "none", "required" or a function\'s name.',
            param="tool_choice" if request.tool_choice is not None else "tools",
        )
    context = ParserContext(prompt=prompt or "", tools=functions(request.tools) if kind != "none" else ())
    plan = parsers.plan(context, tools=kind)
    hidden = None
    if plan is not None and request.skip_special_tokens is not False and llm.tokenizer is not None:
        hidden = parsers.hidden(plan, llm.tokenizer)
        if hidden is not None:
            params = msgspec.structs.replace(params, skip_special_tokens=False)
    is_parallel = request.parallel_tool_calls is not False
    forced = constraint(request.tools or (), request.tool_choice, is_parallel=is_parallel)
    # Another constraint holds the whole answer: no call is in it.
    is_free = kind == "auto" and params.structured_outputs is None
    chosen = strict_calls(plan, is_parallel=is_parallel) if is_free and plan is not None else None
    if (held := forced or chosen) is not None:
        params = msgspec.structs.replace(params, structured_outputs=held)
    constrained = params.structured_outputs
    ends = () if plan is None or chosen is not None else plan.chain[0].reasoning_end
    if constrained is not None and constrained.reasoning_end is None and ends:
        behind = msgspec.structs.replace(constrained, reasoning_end=ends[0])
        params = msgspec.structs.replace(params, structured_outputs=behind)
    named = request.tool_choice.function.name if isinstance(request.tool_choice, NamedTool) else None
    if plan is None and named is None:
        return None, params
    reading = ChatReading(
        plan=plan,
        hidden=hidden,
        named=named,
        is_parallel=is_parallel,
        with_reasoning=request.include_reasoning is not False,
        may_call=kind != "none" or request.tools is None,
    )
    return reading, params
