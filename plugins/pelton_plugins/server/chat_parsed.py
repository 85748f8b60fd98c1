"""Chat completions whose answers have parts: reasoning, content, calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from pelton.outputs import CompletionOutput
from pelton.parsing.interface import Content, Event, Reasoning, ToolCall
from pelton_plugins.server.chat import ChatAnswer, _plain
from pelton_plugins.server.chat_calls import CustomCall, Input
from pelton_plugins.server.chat_reading import ChatReading, ChoiceReader
from pelton_plugins.server.generation import Ready
from pelton_plugins.server.protocol import ChatChoice, ChatMessage

encode = msgspec.json.encode


@dataclass(eq=False)
class ParsedChatAnswer(ChatAnswer):
    """A chunk for each part of a step; logprobs and ids of tokens whose text is held back come with the next chunk."""

    reading: ChatReading

    _readers: dict[int, ChoiceReader] = field(init=False, default_factory=dict)
    _held: dict[int, list[CompletionOutput]] = field(init=False, default_factory=dict)

    def _reader(self, index: int) -> ChoiceReader:
        found = self._readers.get(index)
        if found is None:
            found = self._readers[index] = self.reading.choice()
        return found

    def _count_reasoning(self, reader: ChoiceReader) -> None:
        if reader.reasoning and self.llm.tokenizer is not None:
            ids = self.llm.tokenizer.encode(reader.reasoning, add_special_tokens=False)
            self.counts.reasoning_tokens = (self.counts.reasoning_tokens or 0) + len(ids)

    # Whole

    def _choice(self, choice: CompletionOutput) -> ChatChoice:
        reader = self._reader(choice.index)
        message = ChatMessage(role=self._role)
        content = self._echoed()
        for event in reader.take(choice):
            if isinstance(event, Content):
                content += event.text
            elif isinstance(event, Reasoning):
                message.reasoning = message.reasoning_content = (message.reasoning or "") + event.text
            elif isinstance(event, ToolCall):
                message.tool_calls = [*message.tool_calls, _begun(event)]
            else:
                _add_text(message.tool_calls[-1], event.text)
        self._count_reasoning(reader)
        message.content = content or (None if message.tool_calls or message.reasoning else "")
        found = super()._choice(choice)
        found.message, found.finish_reason = message, reader.finish_reason(choice)
        return found

    # Streamed

    def around_text(self) -> None:
        """Text is looked at before it goes out."""
        return None

    def deltas(self, ready: Ready) -> list[bytes]:
        found = [] if self._has_begun else self._opening()
        self._has_begun = True
        for _, output in ready:
            for choice in output.outputs:
                found += self._chunks(choice)
        return found

    def _chunks(self, choice: CompletionOutput) -> list[bytes]:
        reader = self._reader(choice.index)
        if self._is_plain and choice.finish_reason is None:
            events = reader.take(choice)
            if all(isinstance(event, (Content, Reasoning)) for event in events):
                return [_plain_part(choice.index, event) for event in events]
            deltas = self._merged(events, reader)
            return [self._chunk(choice.index, delta, []) for delta in deltas]
        held = self._held.setdefault(choice.index, [])
        held.append(choice)
        deltas = self._merged(reader.take(choice), reader)
        chunks = [self._chunk(choice.index, delta, held if place == 0 else []) for place, delta in enumerate(deltas)]
        if choice.finish_reason is not None:
            self._count_reasoning(reader)
            last = self._body(choice.index, {}, [] if deltas else held)
            last |= {"finish_reason": reader.finish_reason(choice), "stop_reason": choice.stop_reason}
            chunks.append(encode(last))
        if chunks:
            held.clear()
        return chunks

    def _merged(self, events: list[Event], reader: ChoiceReader) -> list[dict[str, Any]]:
        """Deltas, with the arguments that follow a call in one with it."""
        found: list[dict[str, Any]] = []
        position = reader.num_calls - sum(isinstance(event, ToolCall) for event in events) - 1
        for event in events:
            if isinstance(event, Content):
                found.append({"content": event.text})
            elif isinstance(event, Reasoning):
                found.append({"reasoning": event.text, "reasoning_content": event.text})
            elif isinstance(event, ToolCall):
                position += 1
                found.append({"tool_calls": [{"index": position, **_begun(event)}]})
            elif found and "tool_calls" in found[-1]:
                _add_text(found[-1]["tool_calls"][-1], event.text)
            else:
                kind, name = ("custom", "input") if isinstance(event, Input) else ("function", "arguments")
                found.append({"tool_calls": [{"index": position, kind: {name: event.text}}]})
        return found

    def _chunk(self, index: int, delta: dict[str, Any], tokens: list[CompletionOutput]) -> bytes:
        return encode(self._body(index, delta, tokens))

    def _body(self, index: int, delta: dict[str, Any], tokens: list[CompletionOutput]) -> dict[str, Any]:
        logprobs = None
        for output in tokens:
            found = self._logprobs(output)
            if logprobs is None or found is None:
                logprobs = logprobs or found
            else:
                logprobs.content = [*(logprobs.content or ()), *(found.content or ())]
        body: dict[str, Any] = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        if self.request.return_token_ids:
            body["token_ids"] = [token for output in tokens for token in output.token_ids]
        return body


def _plain_part(index: int, event: Event) -> bytes:
    if isinstance(event, Content):
        return _plain(index, event.text)
    assert isinstance(event, Reasoning)
    text = encode(event.text)
    return _REASONING % (index, text, text)


_REASONING = b'{"index":%d,"delta":{"reasoning":%b,"reasoning_content":%b},"logprobs":null,"finish_reason":null}'


def _begun(event: ToolCall) -> dict[str, Any]:
    """A call without its arguments or its input."""
    if isinstance(event, CustomCall):
        return {"id": event.call_id, "type": "custom", "custom": {"name": event.name, "input": ""}}
    return {"id": event.call_id, "type": "function", "function": {"name": event.name, "arguments": ""}}


def _add_text(call: dict[str, Any], text: str) -> None:
    if "custom" in call:
        call["custom"]["input"] += text
    else:
        call["function"]["arguments"] += text
