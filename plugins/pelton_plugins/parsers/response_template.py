"""Answers as the checkpoint itself describes them: the `response_template` in its tokenizer's config.

The template names fields (`content`, `reasoning_content`, `tool_calls`), each with the text or the regular expression that opens
it and the one that closes it; one field may have no opening, and takes what is in no other. transformers 5 defines it
(docs, "Response parsing"); as there, a calls' field is read when it closes. Here a field that comes twice is joined.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Generator, Mapping
from typing import Any, ClassVar

import msgspec

from pelton.errors import ConfigError
from pelton.parsing.interface import ParserContext
from pelton_plugins.parsers.machine import ScriptParser, Steps, parameters_of
from pelton_plugins.parsers.partial_match import first_partial
from pelton_plugins.parsers.values import dumps, from_text, schema_types

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
_PLACEHOLDER = re.compile(r"\{(\w+(?:\.\w+)*)\}")

Anchor = str | list[str]


class TemplateField(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One field of a message, as the template writes it."""

    open: Anchor | None = None
    open_pattern: str | None = None
    close: Anchor | None = None
    close_pattern: str | None = None
    content: str = "text"
    content_args: dict[str, Any] = {}
    repeats: bool = False
    join: str | None = None
    optional: bool = True
    transform: Any = None
    transform_each: bool = False


class ResponseTemplate(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The whole template."""

    fields: dict[str, TemplateField]
    version: int | str | None = None
    defaults: dict[str, Any] = {}
    start_anchor: Anchor | None = None
    start_anchor_pattern: str | None = None


def read_response_template(given: Mapping[str, Any]) -> ResponseTemplate:
    """Raises `ConfigError` for one that is not sound."""
    try:
        template = msgspec.convert(given, ResponseTemplate)
        _anchor(template.start_anchor, template.start_anchor_pattern)
        for field in template.fields.values():
            _anchor(field.open, field.open_pattern)
            _anchor(field.close, field.close_pattern)
            if field.content not in _READERS:
                raise ValueError(f"content {field.content!r} is none of {', '.join(_READERS)}")
        if sum(_anchor(field.open, field.open_pattern) is None for field in template.fields.values()) > 1:
            raise ValueError("more than one field has no opening")
    except (msgspec.ValidationError, re.error, ValueError) as error:
        raise ConfigError(
            f"The checkpoint's response_template is not valid: {error}. Name --tool-call-parser and "
            "--reasoning-parser instead."
        ) from None
    return template


def _anchor(literal: Anchor | None, pattern: str | None) -> re.Pattern[str] | None:
    if literal is None:
        return None if pattern is None else re.compile(pattern, re.DOTALL)
    texts = sorted([literal] if isinstance(literal, str) else literal, key=len, reverse=True)
    if pattern is not None or not texts or not all(texts):
        raise ValueError("an anchor is a text, a list of texts, or a pattern")
    return re.compile("|".join(map(re.escape, texts)), re.DOTALL)


class ResponseTemplateParser(ScriptParser):
    """Reads reasoning and calls alike."""

    reads_reasoning: ClassVar[bool] = True

    def __init__(self, context: ParserContext) -> None:
        if context.response_template is None:
            raise ConfigError("The checkpoint has no response_template in tokenizer_config.json; name another parser.")
        self._template = read_response_template(context.response_template)
        self._openings: dict[str, re.Pattern[str]] = {}
        self._implicit: str | None = None
        for name, field in self._template.fields.items():
            opening = _anchor(field.open, field.open_pattern)
            if opening is None:
                self._implicit = name
            else:
                self._openings[name] = opening
        super().__init__(context)

    @classmethod
    def markers(cls, context: ParserContext) -> Collection[str] | None:
        return None  # patterns may name any special token

    def script(self) -> Generator[None, None, None]:
        self._begun = ""  # what of the answer the prompt holds
        start = _anchor(self._template.start_anchor, self._template.start_anchor_pattern)
        ends = [found.end() for found in start.finditer(self.context.prompt)] if start is not None else []
        self.unread(self.context.prompt[ends[-1] :] if ends else "")
        implicit = None if self._implicit is None else self._template.fields[self._implicit]
        closing = None if implicit is None else _anchor(implicit.close, implicit.close_pattern)
        while True:
            watched = {**self._openings} | ({"": closing} if closing is not None else {})
            writer = self._writer(self._implicit)
            name, found = yield from self._find(watched, writer)
            if found is None:
                break
            if name:
                yield from self._field(name, found)
            elif found.start() == found.end() and not (yield from self.more()):
                break
        self.end_content()

    def _field(self, name: str, opening: re.Match[str]) -> Steps[None]:
        field = self._template.fields[name]
        closing = _anchor(field.close, field.close_pattern)
        captures = {key: value for key, value in opening.groupdict().items() if value is not None}
        if name in REASONING_FIELDS or name == "content":
            self.trim()
            self._has_thought, self._pause = False, ""
            if name != "content" and field.join:
                self._pause = field.join if self._has_reasoned else ""
            yield from self._find({"": closing} if closing is not None else {}, self._writer(name))
            self.trim()
            return
        parts: list[str] = []
        yield from self._find({"": closing} if closing is not None else {}, parts.append)
        if name == "tool_calls":
            self._calls("".join(parts), field, captures, opening[0])

    _has_thought = _has_reasoned = False
    _pause = ""

    def _writer(self, name: str | None) -> Any:
        if name in REASONING_FIELDS:
            return self._think
        return self.content if name == "content" else (lambda text: None)

    def _think(self, text: str) -> None:
        if not self._has_thought:
            text = text.lstrip()
            if not text:
                return
        text = self._pause + text
        kept = text.rstrip()
        self._pause = text[len(kept) :]
        if kept:
            self._has_thought = self._has_reasoned = True
            self.reasoning(kept)

    def _find(self, watched: Mapping[str, re.Pattern[str]], emit: Any) -> Steps[tuple[str, re.Match[str] | None]]:
        """Read up to the first anchor and over it; which it was. What stands before goes to `emit` as it comes."""
        while True:
            text, at = self._text, self._at
            best: tuple[tuple[int, int], str, re.Match[str]] | None = None
            held = len(text)
            for name, pattern in watched.items():
                found = pattern.search(text, at)
                if not self._is_whole:
                    held = min(held, first_partial(pattern, text, at))
                if found is not None:
                    key = (found.start(), found.start() - found.end())
                    if best is None or key < best[0]:
                        best = (key, name, found)
            if best is not None and best[2].start() < held:
                if best[2].start() > at:
                    emit(text[at : best[2].start()])
                self._at = best[2].end()
                return best[1], best[2]
            if held > at:
                emit(text[at:held])
                self._at = held
            if self._is_whole:
                return "", None
            yield

    # Calls

    def _calls(self, body: str, field: TemplateField, captures: Mapping[str, str], opening: str) -> None:
        """Write the calls of one region; one that cannot be read is content, as the model wrote it."""
        try:
            value = _READERS[field.content](body, field.content_args)
            if field.transform is None:
                values = value if isinstance(value, list) else [value]
            elif field.transform_each:
                values = [_filled(field.transform, {**captures, **item}) for item in value]
            else:
                values = [_filled(field.transform, {**captures, "content": value})]
            calls = [self._call_of(one) for one in values]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            self.content(opening + body)
            return
        for name, arguments in calls:
            self.call(name)
            self.arguments(arguments)
            self.end_call()

    def _call_of(self, value: Any) -> tuple[str, str]:
        function = value.get("function", value)
        name, arguments = function["name"], function.get("arguments", {})
        if not isinstance(name, str) or not name:
            raise ValueError("a call has no name")
        if isinstance(arguments, str):
            return name, arguments
        schema = parameters_of(self.context, name)
        properties = schema.get("properties")
        if isinstance(arguments, dict) and isinstance(properties, dict):
            arguments = {key: _typed(one, properties.get(key), schema) for key, one in arguments.items()}
        return name, dumps(arguments if arguments is not None else {})


def _typed(value: Any, schema: Any, root: Mapping[str, Any]) -> Any:
    types = schema_types(schema, root)
    if isinstance(value, list) and "array" not in types:
        return [_typed(one, schema, root) for one in value]
    return from_text(value, types) if isinstance(value, str) else value


def _filled(transform: Any, scope: Mapping[str, Any]) -> Any:
    """Return the transform with what its placeholders name."""
    if isinstance(transform, dict):
        return {key: _filled(value, scope) for key, value in transform.items()}
    if isinstance(transform, list):
        return [_filled(value, scope) for value in transform]
    found = _PLACEHOLDER.fullmatch(transform) if isinstance(transform, str) else None
    if found is None:
        return transform
    value: Any = scope
    for key in found[1].split("."):
        value = value[key]
    return value


# What a field's text stands for.


def _text(text: str, arguments: Mapping[str, Any]) -> str:
    return text.strip() if arguments.get("strip", True) else text


def _read_json(text: str, arguments: Mapping[str, Any]) -> Any:
    """JSON, perhaps with bare keys and strings between markers of their own."""
    strings: list[str] = []

    def keep(found: re.Match[str]) -> str:
        strings.append(found[1])
        return f"\x01{len(strings) - 1}\x02"

    written = text
    for opening, closing in arguments.get("string_delims", ()):
        written = re.sub(re.escape(opening) + "(.*?)" + re.escape(closing), keep, written, flags=re.DOTALL)
    if arguments.get("unquoted_keys"):
        written = re.sub(r"(?<=[{,])(\s*)(\w+):", r'\1"\2":', written)
    written = re.sub("\x01(\\d+)\x02", lambda found: json.dumps(strings[int(found[1])]), written)
    try:
        return json.loads(written)
    except ValueError:
        if arguments.get("allow_non_json"):
            return text.strip()
        raise


def _sub_value(text: str, reader: Mapping[str, Any] | None) -> Any:
    return text if reader is None else _READERS[reader.get("name", "text")](text, reader.get("args", {}))


def _read_tags(text: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for tag in re.finditer(arguments["tag_pattern"], text, re.DOTALL):
        key, value = tag["key"], _sub_value(tag["value"] or "", arguments.get("value_parser"))
        if key in found and arguments.get("merge_duplicates"):
            found[key] = [*(found[key] if isinstance(found[key], list) else [found[key]]), value]
        else:
            found[key] = value
    return found


def _read_lines(text: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    separator = arguments.get("kv_sep", ":")
    pairs = [line.partition(separator) for line in text.split(arguments.get("line_sep", "\n")) if separator in line]
    return {key.strip(): _sub_value(value.strip(), arguments.get("value_parser")) for key, _, value in pairs}


_READERS: Mapping[str, Any] = {
    "text": _text,
    "int": lambda text, arguments: int(text),
    "float": lambda text, arguments: float(text),
    "bool": lambda text, arguments: text.strip().lower() in ("true", "1"),
    "json": _read_json,
    "xml-inline": _read_tags,
    "kv-lines": _read_lines,
}
