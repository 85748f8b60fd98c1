"""Formats whose calls are JSON objects between markers: Hermes and Qwen, Llama 3, Mistral, Granite."""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping
from typing import Any, ClassVar

from pelton.parsing.interface import ParserContext
from pelton_plugins.parsers.call_parts import (
    SPACE,
    behind_name_key,
    either,
    functions,
    guarded,
    json_arguments,
    json_call,
    listed,
    maybe,
    sequence,
)
from pelton_plugins.parsers.json_calls import ARGUMENT_KEYS, ID_KEYS, NAME_KEYS, OTHER_KEYS, JsonParser
from pelton_plugins.parsers.machine import Steps


class HermesParser(JsonParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, of Hermes 2 Pro, Qwen 2.5, Qwen 3, and Granite 4."""

    OPENINGS: ClassVar[tuple[str, ...]] = ("<tool_call>",)
    CLOSE = "</tool_call>"

    @classmethod
    def markers(cls, context: ParserContext) -> Collection[str]:
        return *cls.OPENINGS, cls.CLOSE

    @classmethod
    def call_format(cls, context: ParserContext, *, is_parallel: bool) -> Mapping[str, Any]:
        content = sequence(SPACE, json_call(context, "arguments"), SPACE, cls.CLOSE)
        return guarded([{"text": opening, "content": content} for opening in cls.OPENINGS], is_parallel=is_parallel)

    def script(self) -> Generator[None, None, None]:
        while (marker := (yield from self.until(self.OPENINGS, self.content))) is not None:
            if (yield from self.calls(marker, self.CLOSE)):
                yield from self._close()
        self.end_content()

    def _close(self) -> Steps[None]:
        """Read the rest of a call's tag. Some models leave the closing one out, and some write a bracket too many before it."""
        while True:
            yield from self.space()
            if (yield from self.takes(self.CLOSE)):
                return
            if (yield from self.peek(1)) not in ("}", "]"):
                return
            self.take(1)


class GraniteParser(HermesParser):
    """`<|tool_call|>[{"name": ..., "arguments": {...}}]`, also as `<tool_call>[...]` (3.0) and `<function_call> {...}` (20b)."""

    OPENINGS = ("<|tool_call|>", "<tool_call>", "<function_call>")

    @classmethod
    def call_format(cls, context: ParserContext, *, is_parallel: bool) -> Mapping[str, Any]:
        call = json_call(context, "arguments")
        content = sequence(SPACE, either([listed(call, is_parallel=is_parallel), call]))
        return guarded([{"text": opening, "content": content} for opening in cls.OPENINGS], is_parallel=is_parallel)


class MistralParser(JsonParser):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, and from tokenizer v11 on `[TOOL_CALLS]name[ARGS]{...}`, with or without
    `[CALL_ID]` between them."""

    ids_have_nine_characters: ClassVar[bool] = True
    CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"

    @classmethod
    def markers(cls, context: ParserContext) -> Collection[str]:
        return cls.CALLS, cls.ARGS, cls.CALL_ID

    @classmethod
    def call_format(cls, context: ParserContext, *, is_parallel: bool) -> Mapping[str, Any]:
        call = json_call(context, "arguments")
        call_id = {"type": "raw_text", "end": cls.ARGS, "excludes": ["\n", "{", " "], "min_length": 1, "max_length": 64}
        marked = [sequence(cls.ARGS, SPACE), sequence(cls.CALL_ID, call_id, SPACE)]
        named = [sequence(name, maybe(either(marked)), json_arguments(name, tool)) for name, tool in functions(context)]
        content = sequence(SPACE, either([listed(call, is_parallel=is_parallel), call, *named]))
        return guarded([{"text": cls.CALLS, "content": content}], is_parallel=is_parallel)

    def script(self) -> Generator[None, None, None]:
        while (yield from self.until((self.CALLS,), self.content)) is not None:
            before = self.CALLS + (yield from self.space())
            if (yield from self.peek(1)) in ("[", "{") and not (yield from self._is_marker()):
                yield from self.calls(before)
            else:
                yield from self._named(before)
        self.end_content()

    def _is_marker(self) -> Steps[bool]:
        return (yield from self.peek(len(self.CALLS))) == self.CALLS

    def _named(self, before: str) -> Steps[None]:
        name, marker = yield from self._name_until((self.ARGS, self.CALL_ID, "{"))
        call_id = None
        if marker == self.CALL_ID:
            call_id, marker = yield from self._name_until((self.ARGS, "{"))
            before, name = before + name + self.CALL_ID, name.strip()
        if marker is None or not name.strip():
            self.content(before + (call_id if call_id is not None else name) + (marker or ""))
            return
        self.call(name.strip(), call_id.strip() if call_id else None)
        if marker == "{":
            self.unread(marker)
        yield from self.space()
        yield from self.json_value(self.arguments)
        self.end_call()

    def _name_until(self, markers: tuple[str, ...]) -> Steps[tuple[str, str | None]]:
        """Return a name and the marker behind it; None for one where no name ends on this line."""
        name = ""
        while (yield from self.more()) and len(name) < 256:
            for marker in markers:
                if (yield from self.takes(marker)):
                    return name, marker
            if self._text[self._at] == "\n":
                break
            name += self.take(1)
        return name, None


class Llama3JsonParser(JsonParser):
    """A line that begins with `{"name": ..., "parameters": {...}}`, several with `;` between them, perhaps after `<|python_tag|>`.

    There is no marker, so an object is a call only if its name is that of a tool.
    """

    only_known_tools = True
    TAG = "<|python_tag|>"

    @classmethod
    def markers(cls, context: ParserContext) -> Collection[str]:
        return (cls.TAG,)

    @classmethod
    def call_format(cls, context: ParserContext, *, is_parallel: bool) -> Mapping[str, Any]:
        """No text has a line that begins with an object whose first key is one of a call: it is a call, or is not written."""
        others = "|".join(sorted({*NAME_KEYS, *ARGUMENT_KEYS, *ID_KEYS, *OTHER_KEYS} - {"name"}))
        space = r"[ \t\r\n]*"
        beginning = r"[ \t;,]*\{[ \t\r\n,]*(\x22[^\x22\n]*)?"
        written = rf"[ \t;,]*\{{{space}\x22name\x22"
        excluded = (
            rf"[ \t;,]*\{{{space},",  # which the parser reads over
            rf"[ \t;,]*\{{{space}\x22({others})\x22",
            rf"[ \t;,]*\{{{space}\x22[^\x22\n]*\\",  # a key with an escape
        )
        return guarded(
            [
                {"pattern": written, "beginning": beginning, "content": behind_name_key(context, "parameters")},
                {"text": cls.TAG, "content": sequence(SPACE, json_call(context, "parameters"))},
            ],
            is_parallel=is_parallel,
            excludes=[{"pattern": pattern, "beginning": beginning} for pattern in excluded],
        )

    def script(self) -> Generator[None, None, None]:
        self._line = ""  # what stands on this line so far
        has_call = False
        while True:
            marker = yield from self.until((self.TAG, "{"), self._write)
            if marker is None:
                break
            if marker == self.TAG:
                before = marker + (yield from self.space())
                if (yield from self.peek(1)) != "{":
                    self._write(before)
                    continue
                self.take(1)
            elif self._line.strip(" \t" if not has_call else " \t;,"):
                self._write(marker)
                continue
            else:
                before = ""
            self.unread("{")
            left = yield from self.call_object()
            self._line = ""
            if left:
                self._write(before + left)
            else:
                has_call = True
                yield from self._separator()
        self.end_content()

    def _write(self, text: str) -> None:
        self.content(text)
        line = (self._line + text).rpartition("\n")[2]
        self._line = line.strip(" \t;,")[:1] or line[-64:]

    def _separator(self) -> Steps[None]:
        """Read what stands between two calls."""
        space = yield from self.space()
        if (yield from self.peek(1)) in (";", ","):
            separator = self.take(1)
            space = yield from self.space()
            if (yield from self.peek(1)) not in ("{", ""):
                self._write(separator + space)


class JsonCallsParser(JsonParser):
    """A list of calls and nothing else: what the constraint of `tool_choice` "required" makes a model write."""

    @classmethod
    def markers(cls, context: ParserContext) -> Collection[str]:
        return ()

    def script(self) -> Generator[None, None, None]:
        yield from self.calls("")
        yield from self.rest(self.content)
        self.end_content()
