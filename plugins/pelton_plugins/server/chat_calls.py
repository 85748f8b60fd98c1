"""Calls of one answer, and what becomes of each: a client's call, the input of a custom tool, text, or nothing."""

from __future__ import annotations

import json

from pelton.parsing.interface import Arguments, Content, Event, ToolCall
from pelton_plugins.server.custom_tools import InputReader


class CustomCall(ToolCall):
    """A call of a custom tool begins."""


class Input(Arguments):
    """More of its input."""


class Call:
    """A call that clients see."""

    counts = True

    def __init__(self, call: ToolCall) -> None:
        self.call = call

    def begin(self, call_id: str) -> list[Event]:
        return [ToolCall(self.call.name, call_id)]

    def feed(self, text: str) -> list[Event]:
        return [Arguments(text)]

    def finish(self) -> list[Event]:
        return []


class CallOfCustom(Call):
    """A custom tool's. is_input: its arguments are the input as it is."""

    def __init__(self, call: ToolCall, *, is_input: bool) -> None:
        super().__init__(call)
        self._reader = None if is_input else InputReader()

    def begin(self, call_id: str) -> list[Event]:
        return [CustomCall(self.call.name, call_id)]

    def feed(self, text: str) -> list[Event]:
        return self._events(text if self._reader is None else self._reader.feed(text))

    def finish(self) -> list[Event]:
        return [] if self._reader is None else self._events(self._reader.finish())

    def _events(self, text: str) -> list[Event]:
        return [Input(text)] if text else []


class TextCall(Call):
    """One that the request does not allow: what the model wrote is content."""

    counts = False

    def begin(self, call_id: str) -> list[Event]:
        return [Content(f'{{"name": {json.dumps(self.call.name, ensure_ascii=False)}, "arguments": ')]

    def feed(self, text: str) -> list[Event]:
        return [Content(text)]

    def finish(self) -> list[Event]:
        return [Content("}")]


class NoCall(Call):
    """One that is one too many."""

    counts = False

    def begin(self, call_id: str) -> list[Event]:
        return []

    def feed(self, text: str) -> list[Event]:
        return []
