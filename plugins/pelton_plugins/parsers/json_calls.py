"""Calls written as JSON objects: `{"name": ..., "arguments": {...}}`, alone or in a list.

The arguments are handed on as the model writes them, character by character. Before a name is known nothing is certain, and
what turns out to be no call is content.
"""

from __future__ import annotations

import json
import re

from pelton_plugins.parsers.machine import Emit, ScriptParser, Steps, tool_names

_IN_TEXT = re.compile(r'["\\]')
NAME_KEYS = ("name", "function", "tool_name", "function_name")
ARGUMENT_KEYS = ("arguments", "parameters", "args", "input")
ID_KEYS = ("id", "call_id", "tool_call_id")
OTHER_KEYS = ("type",)


class JsonParser(ScriptParser):
    """Reads JSON as it comes."""

    only_known_tools = False
    """An object is a call only if its name is that of a tool: for formats without markers."""

    def json_value(self, emit: Emit, stop: str = "") -> Steps[bool]:
        """Hand one JSON value to `emit` as it comes. False where it is cut off: at the end, or at `stop` outside of a string."""
        if not (yield from self.more()):
            return False
        if self._text[self._at] not in '{["':
            text = yield from self._scalar()
            emit(text)
            return bool(text)
        depth = 0
        while (yield from self.more()):
            character = self._text[self._at]
            if character == '"':
                if not (yield from self._string(emit)):
                    return False
                if depth == 0:
                    return True
                continue
            if stop and character == stop[0] and (yield from self.peek(len(stop))) == stop:
                return False
            emit(self.take(1))
            depth += (character in "{[") - (character in "}]")
            if depth == 0:
                return True
        return False

    def _string(self, emit: Emit) -> Steps[bool]:
        emit(self.take(1))
        while (yield from self.more()):
            found = _IN_TEXT.search(self._text, self._at)
            end = len(self._text) if found is None else found.start()
            if end > self._at:
                emit(self.take(end - self._at))
            if found is None:
                continue
            if self._text[self._at] == '"':
                emit(self.take(1))
                return True
            emit(self.take(len((yield from self.peek(2)))))
        return False

    def _scalar(self) -> Steps[str]:
        found = ""
        while (yield from self.more()) and self._text[self._at] not in ' \t\r\n,:{}[]"<':
            found += self.take(1)
        return found

    def call_object(self, stop: str = "") -> Steps[str]:
        """Read one call from its `{`. Returns "" when it was one, cut off or not; else the text that was read, which is not a call.

        stop: the marker that ends a call whose brackets do not.
        """
        reader = _CallReader(self, stop)
        yield from reader.run()
        return "" if reader.is_call else reader.raw

    def calls(self, before: str, stop: str = "") -> Steps[bool]:
        """Read the object or list of calls that comes next. Where there is none, `before` and what was read is content."""
        before += yield from self.space()
        character = yield from self.peek(1)
        if character == "[":
            left = yield from self.call_list(stop)
        elif character == "{":
            left = yield from self.call_object(stop)
        else:
            self.content(before)
            return False
        if left:
            self.content(before + left)
        return not left

    def call_list(self, stop: str = "") -> Steps[str]:
        """Read `[call, call, ...]` from its `[`, or as far as it goes. Returns as `call_object`."""
        raw = self.take(1)
        has_call = False
        while True:
            space = yield from self.space()
            if not (yield from self.more()):
                return "" if has_call else raw + space
            character = self._text[self._at]
            if character == "{":
                left = yield from self.call_object(stop)
                if left and has_call:  # where the answer's length cuts the beginning of a call off, it is no text
                    return left if (yield from self.more()) else ""
                if left:
                    return raw + space + left
                has_call, raw = True, ""
            elif character == ",":
                raw += space + self.take(1)
            elif character == "]":
                raw += space + self.take(1)
                return "" if has_call else raw
            else:
                return "" if has_call else raw + space


class _CallReader:
    """One object, and what is known of it so far."""

    def __init__(self, parser: JsonParser, stop: str) -> None:
        self.parser = parser
        self.stop = stop
        self.raw = ""
        self.is_call = False
        self._parts: list[str] = []
        self._name: str | None = None
        self._call_id: str | None = None
        self._waiting: str | None = None  # arguments that came before the name
        self._known = tool_names(parser.context) if parser.only_known_tools else frozenset()

    def run(self) -> Steps[None]:
        parser = self.parser
        self._keep(parser.take(1))
        is_whole = yield from self._members()
        if self._name is not None and not self.is_call and is_whole:
            self._begin()
            parser.arguments(self._waiting or "")
        if self.is_call:
            parser.end_call()
        self.raw = "".join(self._parts)

    def _keep(self, text: str) -> None:
        if not self.is_call:
            self._parts.append(text)

    def _begin(self) -> None:
        assert self._name is not None
        self.is_call = True
        self.parser.call(self._name, self._call_id)

    def _members(self) -> Steps[bool]:
        """Return whether the object came to its end."""
        parser = self.parser
        while True:
            self._keep((yield from parser.space()))
            if not (yield from parser.more()):
                return False
            character = parser._text[parser._at]
            if character == "}":
                self._keep(parser.take(1))
                return True
            if character == ",":
                self._keep(parser.take(1))
                continue
            if character != '"':
                return False
            key = yield from self._text_value()
            if key is None:
                return False
            self._keep((yield from parser.space()))
            if not (yield from parser.takes(":")):
                return False
            self._keep(":")
            self._keep((yield from parser.space()))
            if not (yield from self._value(key)):
                return False

    def _value(self, key: str) -> Steps[bool]:
        parser = self.parser
        if not (yield from parser.more()):
            return False
        character = parser._text[parser._at]
        if key in ARGUMENT_KEYS:
            if self._name is None or self.is_call:
                return (yield from self._late_arguments())
            self._begin()
            if character in "{[":
                return (yield from parser.json_value(parser.arguments, self.stop))
            parts: list[str] = []
            is_whole = yield from parser.json_value(parts.append, self.stop)
            parser.arguments(plain_arguments("".join(parts)))
            return is_whole
        if key in NAME_KEYS and character == '"':
            name = yield from self._text_value()
            if not name or (self._known and name not in self._known):
                return False
            self._name = name
            return True
        if key in NAME_KEYS and character == "{":  # {"type": "function", "function": {"name": ..., "arguments": ...}}
            self._keep(parser.take(1))
            return (yield from self._members())
        if self._known and self._name is None and key not in (*ID_KEYS, *OTHER_KEYS):
            return False  # an answer in JSON
        if key in ID_KEYS and character == '"':
            self._call_id = yield from self._text_value()
            return self._call_id is not None
        return (yield from parser.json_value(self._keep, self.stop))

    def _late_arguments(self) -> Steps[bool]:
        parts: list[str] = []

        def keep(text: str) -> None:
            parts.append(text)
            self._keep(text)

        is_whole = yield from self.parser.json_value(keep, self.stop)
        if not self.is_call:
            self._waiting = plain_arguments("".join(parts))
        return is_whole

    def _text_value(self) -> Steps[str | None]:
        parts: list[str] = []

        def keep(text: str) -> None:
            parts.append(text)
            self._keep(text)

        if not (yield from self.parser.json_value(keep)):
            return None
        try:
            found = json.loads("".join(parts), strict=False)
        except ValueError:
            return None
        return found if isinstance(found, str) else None


def plain_arguments(text: str) -> str:
    """Return arguments that may be JSON in a JSON string, or null, as a JSON object."""
    if not text.startswith('"'):
        return "" if text.strip() in ("null", "None") else text
    try:
        found = json.loads(text, strict=False)
    except ValueError:
        return text
    return str(found).strip()
