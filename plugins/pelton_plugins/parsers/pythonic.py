"""Calls written as a list in Python, `[get_weather(city="Paris"), get_time()]`: Llama 3.2 and 4."""

from __future__ import annotations

import re
from collections.abc import Collection, Generator

from pelton.parsing.interface import ParserContext
from pelton_plugins.parsers.machine import ScriptParser, Steps, parameters_of, tool_names
from pelton_plugins.parsers.values import dumps, from_text, literal, schema_types

_NAME = re.compile(r"[A-Za-z_][\w.\-]*")
_IN_TEXT = re.compile(r"""["'\\]""")
MAX_NAME_CHARS = 256


class PythonicParser(ScriptParser):
    """A list at the beginning of a line, perhaps between `<|python_start|>` and `<|python_end|>`, of calls of known tools."""

    START, END = "<|python_start|>", "<|python_end|>"

    @classmethod
    def markers(cls, context: ParserContext) -> Collection[str]:
        return cls.START, cls.END

    def script(self) -> Generator[None, None, None]:
        self._line = ""
        self._known = tool_names(self.context)
        while (marker := (yield from self.until((self.START, self.END, "["), self._write))) is not None:
            if marker == self.END:
                self.trim()
                continue
            if marker == self.START:
                before = marker + (yield from self.space())
                if not (yield from self.takes("[")):
                    self._write(before)
                    continue
                before += "["
            elif self._line.strip():
                self._write(marker)
                continue
            else:
                before = marker
            left = yield from self._calls()
            if left is not None:
                self._write(before + left)
        self.end_content()

    def _write(self, text: str) -> None:
        self.content(text)
        self._line = (self._line + text).rpartition("\n")[2][-64:]

    def _calls(self) -> Steps[str | None]:
        """Read from behind the bracket. None: there were calls; else the text that was read."""
        has_call = False
        while True:
            text = yield from self.space()
            name = yield from self._name()
            text += name + (yield from self.space())
            if not name or (self._known and name not in self._known) or not (yield from self.takes("(")):
                if has_call:
                    yield from self.takes("]")
                return None if has_call else text
            has_call = True
            self.call(name)
            is_whole = yield from self._arguments(name)
            yield from self.space()
            if not is_whole or not (yield from self.takes(",")):
                yield from self.takes("]")
                return None

    def _name(self) -> Steps[str]:
        found = ""
        while (yield from self.more()) and len(found) < MAX_NAME_CHARS:
            character = self._text[self._at]
            if not _NAME.fullmatch(found + character):
                break
            found += self.take(1)
        return found

    def _arguments(self, function: str) -> Steps[bool]:
        """Read from behind `(` and over `)`; each argument is written when it is whole. False where it is cut off."""
        schema = parameters_of(self.context, function)
        properties = schema.get("properties") if isinstance(schema.get("properties"), dict) else {}
        assert isinstance(properties, dict)
        num_written = 0
        while True:
            yield from self.space()
            if (yield from self.takes(")")):
                self.arguments("}" if num_written else "")
                self.end_call()
                return True
            text, end = yield from self._argument()
            key, equals, value = text.partition("=")
            key = key.strip()
            if not equals or not key.isidentifier():  # by position
                key, value = (list(properties)[num_written : num_written + 1] or [f"arg{num_written}"])[0], text
            if text.strip() and end is not None:
                types = schema_types(properties.get(key), schema)
                self.arguments(("{" if not num_written else ", ") + dumps(key) + ": " + _json(value, types))
                num_written += 1
            if end is None:
                self.end_call()
                return False
            if end == ")":
                self.unread(end)

    def _argument(self) -> Steps[tuple[str, str | None]]:
        """Return the text of one argument, and the character that ended it: a comma or a bracket."""
        parts: list[str] = []
        depth = 0
        while (yield from self.more()):
            character = self._text[self._at]
            if character in "\"'":
                yield from self._quoted(parts)
                continue
            if depth == 0 and character in ",)":
                return "".join(parts), self.take(1)
            depth += (character in "([{") - (character in ")]}")
            parts.append(self.take(1))
        return "".join(parts), None

    def _quoted(self, parts: list[str]) -> Steps[None]:
        quote = self.take(1)
        parts.append(quote)
        while (yield from self.more()):
            found = _IN_TEXT.search(self._text, self._at)
            end = len(self._text) if found is None else found.start()
            parts.append(self.take(end - self._at))
            if found is None:
                continue
            if self._text[self._at] == quote:
                parts.append(self.take(1))
                return
            count = 2 if self._text[self._at] == "\\" else 1
            parts.append(self.take(len((yield from self.peek(count)))))


def _json(text: str, types: set[str]) -> str:
    """Return a value in Python, or in JSON, as JSON; a bare word is a text."""
    stripped = text.strip()
    value = {"true": True, "false": False, "null": None}.get(stripped, stripped)
    if value is stripped:
        value = literal(stripped)
    if value is stripped and isinstance(value, str):
        value = from_text(value, types)
    return dumps(value)
