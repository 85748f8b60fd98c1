"""Calls written as tags with a parameter each: Qwen 3 Coder, and Qwen 3.5."""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping
from typing import Any

from pelton.parsing.interface import ParserContext
from pelton_plugins.parsers.call_parts import (
    SPACE,
    Part,
    Tags,
    arguments_apart,
    either,
    functions,
    guarded,
    is_held,
    many,
    maybe,
    sequence,
)
from pelton_plugins.parsers.json_calls import JsonParser
from pelton_plugins.parsers.machine import Steps, parameters_of
from pelton_plugins.parsers.values import ANY_TYPE, dumps, from_text, schema_types

MAX_NAME_CHARS = 256


class Qwen3CoderParser(JsonParser):
    """`<tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>`.

    Values are texts; the function's schema says what they stand for. A text that is to be a text is written as it comes. Closing
    tags that the model leaves out are not waited for; some calls come without `<tool_call>`, and some as JSON.
    """

    OPEN, CLOSE = "<tool_call>", "</tool_call>"
    FUNCTION, FUNCTION_CLOSE = "<function=", "</function>"
    PARAMETER, PARAMETER_CLOSE = "<parameter=", "</parameter>"

    @classmethod
    def markers(cls, context: ParserContext) -> Collection[str]:
        return cls.OPEN, cls.CLOSE, cls.FUNCTION, cls.FUNCTION_CLOSE, cls.PARAMETER, cls.PARAMETER_CLOSE

    @classmethod
    def call_format(cls, context: ParserContext, *, is_parallel: bool) -> Mapping[str, Any]:
        calls = either([
            sequence(f"{name}>", SPACE, *cls._arguments(name, tool), cls.FUNCTION_CLOSE) for name, tool in functions(context)
        ])  # fmt: skip
        triggers = [
            {"text": cls.OPEN, "content": sequence(SPACE, cls.FUNCTION, calls, SPACE, cls.CLOSE)},
            {"text": cls.FUNCTION, "content": calls},
        ]
        return guarded(triggers, is_parallel=is_parallel)

    @classmethod
    def _arguments(cls, name: str, tool: Mapping[str, Any]) -> list[Part]:
        closers = [cls.PARAMETER, cls.FUNCTION_CLOSE, cls.CLOSE]
        if not tool.get("strict"):
            key = {"type": "raw_text", "end": ">", "excludes": ["<", "\n"], "min_length": 1, "max_length": 64}
            value = {"type": "raw_text", "end": cls.PARAMETER_CLOSE, "excludes": closers}
            return [many(sequence(cls.PARAMETER, key, value, SPACE))]
        made = arguments_apart(
            name, tool, "tags",
            lambda key, schema, root: Tags(f"{cls.PARAMETER}{key}>", cls.PARAMETER_CLOSE, closers, edge="\n").value(
                schema, root, name
            ),
        )  # fmt: skip
        return [
            part if has_to_be else maybe(part)
            for has_to_be, part in ((one[0], sequence(one[1], SPACE)) for one in made)
        ]

    def script(self) -> Generator[None, None, None]:
        while (marker := (yield from self.until((self.OPEN, self.FUNCTION), self.content))) is not None:
            before = ""
            if marker == self.OPEN:
                before = marker + (yield from self.space())
                if (yield from self.peek(1)) == "{":
                    if (yield from self.calls(before, self.CLOSE)):
                        yield from self._close()
                    continue
                if not (yield from self.takes(self.FUNCTION)):
                    self.content(before)
                    continue
            name, end = yield from self._name()
            if end is None or not name.strip():
                self.content(before + self.FUNCTION + name + (end or ""))
                continue
            yield from self._call(name.strip().strip('"'))
            if marker == self.OPEN:
                yield from self._close()
        self.end_content()

    def _close(self) -> Steps[None]:
        yield from self.space()
        yield from self.takes(self.CLOSE)

    def _name(self) -> Steps[tuple[str, str | None]]:
        """Return what stands before `>`; None where there is none on this line."""
        found = ""
        while (yield from self.more()) and len(found) < MAX_NAME_CHARS:
            character = self._text[self._at]
            if character == ">":
                return found, self.take(1)
            if character in "\n<":
                break
            found += self.take(1)
        return found, None

    def _call(self, name: str) -> Steps[None]:
        self.call(name)
        schema = parameters_of(self.context, name)
        written: set[str] = set()
        while True:
            yield from self.space()
            if not (yield from self.takes(self.PARAMETER)):
                break
            key, end = yield from self._name()
            if end is None:
                break
            yield from self._parameter(key.strip().strip('"'), schema, written, is_held(self.context, name))
        yield from self.takes(self.FUNCTION_CLOSE)
        self.arguments("}" if written else "")
        self.end_call()

    def _parameter(self, key: str, schema: Mapping[str, Any], written: set[str], is_text_held: bool) -> Steps[None]:
        properties = schema.get("properties")
        own = properties.get(key) if isinstance(properties, dict) else None
        types = schema_types(own, schema) or (ANY_TYPE if isinstance(own, dict) else frozenset())
        head = (", " if written else "{") + dumps(key) + ": "
        if key in written:  # a model that says it twice: the first counts
            yield from self._value(lambda text: None)
        elif types - {"string"}:
            parts: list[str] = []
            if is_text_held:  # a text in it may have closing tags
                parts.append((yield from self.space()))
                if (yield from self.peek(1)) in ("{", "["):
                    yield from self.json_value(parts.append)
            yield from self._value(parts.append)
            self.arguments(head + dumps(from_text("".join(parts), types)))
        else:
            self.arguments(head + '"')
            yield from self._value(lambda text: self.arguments(dumps(text)[1:-1]))
            self.arguments('"')
        written.add(key)

    def _value(self, emit: Any) -> Steps[None]:
        """Hand a parameter's text to `emit`, without the line break at either end, and read over its closing tag."""
        if (yield from self.peek(1)) == "\r":
            self.take(1)
        if (yield from self.peek(1)) == "\n":
            self.take(1)
        held = ""  # a line break, which may be the last

        def write(text: str) -> None:
            nonlocal held
            text = held + text
            held = "\n" if text.endswith("\n") else ""
            if text := text[: len(text) - len(held)]:
                emit(text)

        ends = (self.PARAMETER_CLOSE, self.PARAMETER, self.FUNCTION_CLOSE, self.CLOSE)
        marker = yield from self.until(ends, write)
        if marker not in (self.PARAMETER_CLOSE, None):
            self.unread(str(marker))
