"""Calls written as a list in Python, `[get_weather(city="Paris"), get_time()]`: Llama 3.2 and 4."""

from __future__ import annotations

import re
from collections.abc import Collection, Generator, Mapping
from typing import Any

from pelton.errors import RequestError
from pelton.parsing.interface import ParserContext
from pelton_plugins.parsers.call_parts import (
    SPACE,
    Part,
    Refused,
    arguments_apart,
    branches,
    either,
    functions,
    guarded,
    json_schema,
    json_text,
    many,
    maybe,
    sequence,
    text,
    with_definitions,
)
from pelton_plugins.parsers.machine import SPACE as SPACES
from pelton_plugins.parsers.machine import ScriptParser, Steps, parameters_of, tool_names
from pelton_plugins.parsers.values import dumps, from_text, literal, schema_types

_NAME = re.compile(r"[A-Za-z_][\w.\-]*")
_IN_TEXT = re.compile(r"""["'\\]""")
MAX_NAME_CHARS = 256
_ANY_ARGUMENTS = r"""
start: (argument (/, */ argument)*)?
argument: /[A-Za-z_][A-Za-z0-9_]*/ "=" value
value: TEXT | NUMBER | WORD | list | mapping
list: "[" (value (/, */ value)*)? "]"
mapping: "{" (TEXT /: */ value (/, */ TEXT /: */ value)*)? "}"
TEXT: /"([^"\\\n]|\\["\\nrt])*"/ | /'([^'\\\n]|\\['\\nrt])*'/
NUMBER: /-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,15})?/
WORD: "True" | "False" | "None"
"""
"""Of a function that is not strict."""


class PythonicParser(ScriptParser):
    """A list at the beginning of a line, perhaps between `<|python_start|>` and `<|python_end|>`, of calls of known tools."""

    START, END = "<|python_start|>", "<|python_end|>"

    @classmethod
    def markers(cls, context: ParserContext) -> Collection[str]:
        return cls.START, cls.END

    @classmethod
    def call_format(cls, context: ParserContext, *, is_parallel: bool) -> Mapping[str, Any]:
        behind: dict[str, Part] = {}  # a name, with its arguments
        for name, tool in functions(context):
            if not _NAME.fullmatch(name):
                raise RequestError(f"{name[:64]!r} is no name of a function in Python", param="tools")
            behind[name] = sequence(_arguments_of(name, tool), SPACE, ")")
        call = either([sequence(name, "(", SPACE, made) for name, made in behind.items()])
        rest = [many(sequence(SPACE, ",", SPACE, call))] if is_parallel else []
        space, indent = r"[ \t\r\n]*", r"[ \t\r]*"
        triggers: list[Part] = [
            {
                "pattern": rf"{indent}\[{space}{re.escape(name)}{space}\(",
                "beginning": rf"{indent}\[{space}([A-Za-z_][A-Za-z0-9_.\-]*{space})?",
                "content": sequence(SPACE, made, *rest, SPACE, "]"),
            }
            for name, made in behind.items()
        ]
        triggers.append({"text": cls.START, "content": sequence(SPACE, "[", SPACE, call, *rest, SPACE, "]")})
        return guarded(triggers, is_parallel=is_parallel)

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
            elif self._line.strip(SPACES):
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
        line = (self._line + text).rpartition("\n")[2]
        self._line = line.strip(SPACES)[:1] or line[-64:]

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


def _arguments_of(name: str, tool: Mapping[str, Any]) -> Part:
    """The arguments of a call, without its brackets."""
    if not tool.get("strict"):
        return {"type": "grammar", "grammar": _ANY_ARGUMENTS}
    made = arguments_apart(name, tool, "Python", lambda key, schema, root: _argument_of(name, key, schema, root))
    if not made:
        return SPACE
    following = [
        part if has_to_be else maybe(part) for has_to_be, part in ((one[0], _after_comma(one[1])) for one in made)
    ]
    firsts: list[Part] = []
    for index, (has_to_be, part) in enumerate(made):
        firsts.append(sequence(part, *following[index + 1 :]))
        if has_to_be:
            return either(firsts)
    return maybe(either(firsts))


def _after_comma(part: Part) -> Part:
    return sequence(",", SPACE, part)


def _argument_of(name: str, key: str, schema: Any, root: Mapping[str, Any]) -> Part:
    if not key.isidentifier():
        raise Refused("its name")
    return sequence(key, "=", either([_written(one, root, name) for one in branches(schema, root)]))


def _written(schema: Any, root: Mapping[str, Any], name: str) -> Part:
    """A value: JSON, whose texts, numbers and lists are Python too."""
    if isinstance(schema, Mapping) and "grammar" in schema:
        return json_text(schema["grammar"], name)
    if isinstance(schema, Mapping) and not {"enum", "const"} & schema.keys():
        if schema.get("type") == "boolean":
            return either([text("True"), text("False")])
        if schema.get("type") == "null":
            return text("None")
    return json_schema(with_definitions(schema, root), name)


def _json(written: str, types: set[str]) -> str:
    """Return a value in Python, or in JSON, as JSON; a bare word is a text."""
    stripped = written.strip()
    value = {"true": True, "false": False, "null": None}.get(stripped, stripped)
    if value is stripped:
        value = literal(stripped)
    if value is stripped and isinstance(value, str):
        value = from_text(value, types)
    return dumps(value)
