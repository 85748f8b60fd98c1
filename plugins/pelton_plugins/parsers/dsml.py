"""Calls of DeepSeek V3.2 and V4: tags that begin with `｜DSML｜`, and parameters that say whether they are texts."""

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

SIGN = "｜DSML｜"
OPEN = (f"<{SIGN}function_calls>", f"<{SIGN}tool_calls>")
CLOSE = (f"</{SIGN}function_calls>", f"</{SIGN}tool_calls>")
INVOKE, INVOKE_CLOSE = f'<{SIGN}invoke name="', f"</{SIGN}invoke>"
PARAMETER, PARAMETER_CLOSE = f'<{SIGN}parameter name="', f"</{SIGN}parameter>"
TAG_END = '">'
IS_TEXT = '" string="'


class DSMLParser(JsonParser):
    """`<｜DSML｜function_calls>`, in it `<｜DSML｜invoke name="f">` for each call, and in that `<｜DSML｜parameter name="x"
    string="true">text</｜DSML｜parameter>` for each parameter; V4 writes `tool_calls`.

    With string="false" a value is JSON. Where the attribute is missing, the function's schema says what a value is.
    """

    @classmethod
    def markers(cls, context: ParserContext) -> Collection[str]:
        return SIGN, *OPEN, *CLOSE, INVOKE, INVOKE_CLOSE, PARAMETER, PARAMETER_CLOSE

    @classmethod
    def call_format(cls, context: ParserContext, *, is_parallel: bool) -> Mapping[str, Any]:
        call = either([
            sequence(f"{name}{TAG_END}", SPACE, *_arguments(name, tool), INVOKE_CLOSE) for name, tool in functions(context)
        ])  # fmt: skip
        more = [many(sequence(SPACE, INVOKE, call))] if is_parallel else []
        triggers: list[Part] = [
            {"text": opening, "content": sequence(SPACE, INVOKE, call, *more, SPACE, closing)}
            for opening, closing in zip(OPEN, CLOSE, strict=True)
        ]
        return guarded([*triggers, {"text": INVOKE, "content": call}], is_parallel=is_parallel)

    def script(self) -> Generator[None, None, None]:
        is_inside = False
        while (marker := (yield from self.until((*OPEN, *CLOSE, INVOKE), self.content))) is not None:
            before = marker
            if marker in OPEN:
                before += yield from self.space()
                if not (yield from self.takes(INVOKE)):
                    self.content(before)
                    continue
                before += INVOKE
            elif marker in CLOSE:
                if not is_inside:
                    self.content(marker)
                is_inside = False
                continue
            name, end = yield from self._tag()
            if end is None or not name.strip():
                self.content(before + name + (end or ""))
                continue
            yield from self._call(name.strip())
            is_inside = True
        self.end_content()

    def _tag(self) -> Steps[tuple[str, str | None]]:
        """Return what stands before the tag's end; None where it does not end on this line."""
        found, end = yield from self.gather((TAG_END, "\n", "<"))
        if end is not None and end != TAG_END:
            self.unread(end)
            end = None
        return found, end

    def _call(self, name: str) -> Steps[None]:
        self.call(name)
        written: set[str] = set()
        while True:
            yield from self.space()
            if not (yield from self.takes(PARAMETER)):
                break
            head, end = yield from self._tag()
            if end is None:
                break
            key, _, is_text = head.partition(IS_TEXT)
            yield from self._parameter(name, key, is_text, written)
        yield from self.takes(INVOKE_CLOSE)
        self.arguments("}" if written else "")
        self.end_call()

    def _parameter(self, name: str, key: str, is_text: str, written: set[str]) -> Steps[None]:
        ends = (PARAMETER_CLOSE, PARAMETER, INVOKE_CLOSE, *CLOSE)
        types = frozenset({"string"}) if is_text == "true" else ANY_TYPE if is_text else self._types(name, key)
        head = (", " if written else "{") + dumps(key) + ": "
        if key in written:  # a model that says it twice: the first counts
            marker = yield from self.until(ends)
        elif types - {"string"}:
            text = ""
            if is_held(self.context, name):  # a text in it may have closing tags
                text = yield from self.space()
                if (yield from self.peek(1)) in ("{", "["):
                    parts: list[str] = []
                    yield from self.json_value(parts.append)
                    text += "".join(parts)
            more, marker = yield from self.gather(ends)
            text += more
            self.arguments(head + dumps(from_text(text, types)))
        else:
            self.arguments(head + '"')
            marker = yield from self.until(ends, lambda text: self.arguments(dumps(text)[1:-1]))
            self.arguments('"')
        written.add(key)
        if marker not in (PARAMETER_CLOSE, None):
            self.unread(str(marker))

    def _types(self, name: str, key: str) -> frozenset[str]:
        schema = parameters_of(self.context, name)
        properties = schema.get("properties")
        own = properties.get(key) if isinstance(properties, dict) else None
        return frozenset(schema_types(own, schema)) or (ANY_TYPE if isinstance(own, dict) else frozenset())


def _arguments(name: str, tool: Mapping[str, Any]) -> list[Part]:
    closers = [PARAMETER, INVOKE_CLOSE, *CLOSE]
    if not tool.get("strict"):
        key = {"type": "raw_text", "end": IS_TEXT, "excludes": ["<", ">", "\n"], "min_length": 1, "max_length": 64}
        written = {"type": "raw_text", "end": PARAMETER_CLOSE, "excludes": closers}
        kinds = either([sequence('true">'), sequence('false">')])
        return [many(sequence(PARAMETER, key, kinds, written, SPACE))]

    def value(key: str, schema: Any, root: Mapping[str, Any]) -> Part:
        before = f"{PARAMETER}{key}{IS_TEXT}"
        tags = Tags(f'{before}false">', PARAMETER_CLOSE, closers, text_before=f'{before}true">')
        return tags.value(schema, root, name)

    made = arguments_apart(name, tool, "tags", value)
    return [
        part if has_to_be else maybe(part) for has_to_be, part in ((one[0], sequence(one[1], SPACE)) for one in made)
    ]
