"""Parts of a chat's answers, choice by choice: reasoning, content and calls, for any shape of API.

Only what the request asked for comes through: one call where parallel ones are off, no reasoning where that is left out.
"""

from __future__ import annotations

import secrets
import string
import uuid
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pelton.errors import RequestError
from pelton.outputs import CompletionOutput
from pelton.parsing.interface import Arguments, Content, Event, ParserContext, Reasoning, ToolCall
from pelton.sampling_params import SamplingParams, StructuredOutputsParams
from pelton_plugins.server.chat_calls import Call, CallOfCustom, NoCall, TextCall
from pelton_plugins.server.forced_calls import constraint, grammar_of
from pelton_plugins.server.parsing import AnswerPlan, AnswerReader, NamedReader, Parsers
from pelton_plugins.server.protocol import ChatCompletionRequest
from pelton_plugins.server.structured_outputs import is_json_format
from pelton_plugins.server.tools import Offer

_ALPHANUMERIC = string.ascii_letters + string.digits


@dataclass(eq=False)
class ChatReading:
    """How all answers to one request are read."""

    plan: AnswerPlan | None = None
    hidden: Any = None
    offer: Offer = field(default_factory=Offer)
    is_parallel: bool = True
    with_reasoning: bool = True
    may_call: bool = False

    def __post_init__(self) -> None:
        named = self.offer.named
        self.custom = frozenset(tool.name for tool in self.offer.tools if tool.type == "custom")
        self.allowed = self.offer.names if self.offer.is_part else None
        self.is_input = named is not None and grammar_of(named) is not None

    def choice(self) -> ChoiceReader:
        return ChoiceReader(self)

    def begin(self, call: ToolCall) -> Call:
        """A call, and what becomes of it."""
        if not self.may_call or (self.allowed is not None and call.name not in self.allowed):
            return TextCall(call)
        return CallOfCustom(call, is_input=self.is_input) if call.name in self.custom else Call(call)

    def new_id(self) -> str:
        if self.plan is not None and self.plan.ids_have_nine_characters:
            return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
        return f"chatcmpl-tool-{uuid.uuid4().hex}"


class ChoiceReader:
    """One choice, and what came of it so far."""

    def __init__(self, reading: ChatReading) -> None:
        self._reading = reading
        inner = None if reading.plan is None else AnswerReader(reading.plan, reading.hidden)
        named = reading.offer.named
        self._reader = inner if named is None else NamedReader(named.name, inner, reads_input=reading.is_input)
        self._call: Call | None = None
        self.num_calls = 0
        self.reasoning = ""

    def take(self, output: CompletionOutput) -> list[Event]:
        """Events of what is new in `output`; the last ones where it is finished."""
        if self._reader is None:
            return [Content(output.text)] if output.text else []
        events = self._reader.feed(output.text)
        if output.finish_reason is not None:
            events += self._reader.finish()
        found = [kept for event in events for kept in self._kept(event)]
        if output.finish_reason is not None:
            found += self._end_call()
            plan = self._reading.plan
            if plan is not None and plan.count is not None:
                plan.count(self.num_calls)
        return found

    def _kept(self, event: Event) -> list[Event]:
        reading = self._reading
        if isinstance(event, Arguments):
            return [event] if self._call is None else self._call.feed(event.text)
        found = self._end_call()
        if isinstance(event, Reasoning):
            self.reasoning += event.text
            return [*found, event] if reading.with_reasoning else found
        if not isinstance(event, ToolCall):
            return [*found, event]
        self._call = reading.begin(event)
        if self._call.counts and self.num_calls > 0 and not reading.is_parallel:
            self._call = NoCall(event)
        self.num_calls += self._call.counts
        return [*found, *self._call.begin(event.call_id if event.call_id is not None else reading.new_id())]

    def _end_call(self) -> list[Event]:
        call, self._call = self._call, None
        return [] if call is None else call.finish()

    def finish_reason(self, output: CompletionOutput) -> str | None:
        """The engine's, or "tool_calls" where the model stopped to call a tool of its choice."""
        is_call = output.finish_reason == "stop" and self.num_calls > 0 and self._reading.offer.named is None
        return "tool_calls" if is_call else output.finish_reason


def chosen_calls(
    plan: AnswerPlan, wanted: StructuredOutputsParams | None, *, is_parallel: bool
) -> StructuredOutputsParams | None:
    """Hold calls that the model chooses to make to the schemas of functions that are strict; with the JSON that is wanted of an answer,
    the answer is that, or calls. None where there is nothing of that to hold, or the format of calls does not say how.

    Where reasoning comes first, nothing in it is a call. Whether it does is known from the prompt, or the answer's beginning says it.
    """
    if wanted is None and not any(tool.get("strict") for tool in plan.context.tools):
        return None
    made = plan.chain[-1].call_format(plan.context, is_parallel=is_parallel)
    if made is None:
        return None
    if wanted is not None:
        if not any("text" in trigger for trigger in made.get("triggers", ())):
            return None
        schema = {"type": "object"} if wanted.json is None else wanted.json
        made = {**made, "instead": {"type": "json_schema", "json_schema": schema, "name": "response_format"}}
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


def _with_grammar(request: ChatCompletionRequest, offer: Offer) -> str | None:
    """The place of the first format that is a grammar, of a tool that may be called."""
    held = {tool.name for tool in offer.tools if grammar_of(tool) is not None}
    found = (index for index, tool in enumerate(request.tools or ()) if tool.name in held)
    return next((f"tools[{index}].custom.format" for index in found), None)


def read_chat(
    parsers: Parsers,
    llm: Any,
    request: ChatCompletionRequest,
    offer: Offer,
    params: SamplingParams,
    prompt: str | None,
) -> tuple[ChatReading | None, SamplingParams]:
    """How the answers are read, and the sampling parameters for it. None: they are content, and nothing else.

    Raises `RequestError` where the model's calls cannot be read.
    """
    parsers = parsers.of_model(llm)
    kind = offer.kind
    if kind == "auto" and not parsers.reads_calls:
        raise RequestError(
            'tool_choice "auto" needs a tool parser: start the server with --enable-auto-tool-choice '
            '--tool-call-parser NAME, or send tool_choice "none", "required" or a function\'s name.',
            param="tool_choice" if request.tool_choice is not None else "tools",
        )
    plan = parsers.plan(ParserContext(prompt=prompt or "", tools=offer.functions()), tools=kind)
    hidden = None
    if plan is not None and request.skip_special_tokens is not False and llm.tokenizer is not None:
        hidden = parsers.hidden(plan, llm.tokenizer)
        if hidden is not None:
            params = msgspec.structs.replace(params, skip_special_tokens=False)
    is_parallel = request.parallel_tool_calls is not False
    forced = constraint(offer, is_parallel=is_parallel)
    wanted, chosen = params.structured_outputs, None
    # A constraint that is not of JSON holds the whole answer: no call is in it.
    if kind == "auto" and plan is not None and (wanted is None or is_json_format(request)):
        chosen = chosen_calls(plan, wanted, is_parallel=is_parallel)
        if wanted is None and chosen is None and (place := _with_grammar(request, offer)) is not None:
            raise RequestError(
                "the format of this model's calls does not say how to hold one to a grammar: name the tool in tool_choice, "
                'require a call, or use a format of type "text"',
                param=place,
            )
    if (held := forced or chosen) is not None:
        params = msgspec.structs.replace(params, structured_outputs=held)
    constrained = params.structured_outputs
    ends = () if plan is None or chosen is not None else plan.chain[0].reasoning_end
    if constrained is not None and constrained.reasoning_end is None and ends:
        behind = msgspec.structs.replace(constrained, reasoning_end=ends[0])
        params = msgspec.structs.replace(params, structured_outputs=behind)
    if plan is None and offer.named is None:
        return None, params
    reading = ChatReading(
        plan=plan,
        hidden=hidden,
        offer=offer,
        is_parallel=is_parallel,
        with_reasoning=request.include_reasoning is not False,
        may_call=kind != "none" or request.tools is None,
    )
    return reading, params
