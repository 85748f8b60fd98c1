"""Custom tools: tools that take a text. A model calls one as a function with one argument, and clients get that argument's text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from pelton.errors import RequestError

ARGUMENT = "input"
"""Name of the one argument."""


class GrammarDefinition(msgspec.Struct, kw_only=True):
    syntax: Literal["lark", "regex"]
    definition: str


class CustomFormat(msgspec.Struct, kw_only=True):
    type: Literal["text", "grammar"] = "text"
    grammar: GrammarDefinition | None = None


class CustomDefinition(msgspec.Struct, kw_only=True):
    """A tool whose input is a text, which may have to keep to a grammar."""

    name: str
    description: str | None = None
    format: CustomFormat | None = None

    @property
    def grammar(self) -> GrammarDefinition | None:
        return None if self.format is None or self.format.type == "text" else self.format.grammar


def check_format(given: CustomFormat | None, place: str) -> None:
    """Raises `RequestError` that names the field."""
    if given is None or given.type == "text":
        return
    if given.grammar is None or not given.grammar.definition.strip():
        raise RequestError("a format of type grammar needs a grammar with a definition", param=f"{place}.grammar")


def as_function(tool: CustomDefinition, *, is_shown: bool = False) -> dict[str, Any]:
    """The function that stands for a tool, as parsers take it; is_shown: as chat templates do.

    One whose input keeps to a grammar is strict, and has that beside it, as Lark.
    """
    text: dict[str, Any] = {"type": "string"}
    grammar = tool.grammar
    if is_shown and grammar is not None:
        kind = "Lark grammar" if grammar.syntax == "lark" else "regex"
        text["description"] = f"Text that matches this {kind}: {grammar.definition}"
    found: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        found["description"] = tool.description
    found["parameters"] = {
        "type": "object", "properties": {ARGUMENT: text}, "required": [ARGUMENT], "additionalProperties": False,
    }  # fmt: skip
    if grammar is not None and not is_shown:
        found["strict"] = True
        found["grammar"] = grammar.definition if grammar.syntax == "lark" else _lark_of(grammar.definition)
    return found


_ANCHORS = re.compile(r"^\^|(?<!\\)((?:\\\\)*)\$$")
_SLASH = re.compile(r"(?<!\\)((?:\\\\)*)/")


def _lark_of(regex: str) -> str:
    """A regex, which matches all of a text in any case, as a grammar."""
    whole = _SLASH.sub(r"\1\\/", _ANCHORS.sub(r"\1", regex)).replace("\n", "\\n")
    return f"start: /{whole}/"


def call_of_function(call: Mapping[str, Any], place: str) -> Mapping[str, Any]:
    """A call in a conversation as templates read it: one of a custom tool becomes the function's that stands for it."""
    if call.get("type") != "custom":
        return call
    custom = call.get("custom")
    name, text = (custom.get("name"), custom.get("input")) if isinstance(custom, dict) else (None, None)
    if not isinstance(name, str) or not isinstance(text, str):
        raise RequestError("a call of type custom needs custom.name and custom.input, both texts", param=place)
    return {**_without(call, "custom"), "type": "function", "function": {"name": name, "arguments": arguments_of(text)}}


def _without(call: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in call.items() if key != name}


def arguments_of(text: str) -> str:
    """The arguments whose input is `text`, as JSON."""
    return json.dumps({ARGUMENT: text}, ensure_ascii=False)


_HEAD = re.compile(r'\s*\{\s*"' + ARGUMENT + r'"\s*:\s*"')
_SPACE = re.compile(r"\s+")
_MAX_HEAD_CHARS = 64
_STOPS = re.compile(r'["\\]')


class InputReader:
    """Reads a call's input out of its arguments as they come. Arguments of another form are the input as they are."""

    def __init__(self) -> None:
        self._held = ""
        self._state: Literal["head", "text", "raw", "over"] = "head"

    def feed(self, text: str) -> str:
        """Return what is certain by now."""
        self._held += text
        if self._state == "head":
            self._begin()
        if self._state == "text":
            return self._text()
        if self._state == "head":
            return ""
        found, self._held = self._held, ""
        return found if self._state == "raw" else ""

    def finish(self) -> str:
        """Return what was held back of arguments that ended early."""
        is_form = self._state == "text" or _SPACE.sub("", self._held) == "{}" or self._may_be_head()
        return "" if is_form else self._held

    def _begin(self) -> None:
        found = _HEAD.match(self._held)
        if found is not None:
            self._state, self._held = "text", self._held[found.end() :]
        elif not (self._may_be_head() or _SPACE.sub("", self._held) == "{}") or len(self._held) > _MAX_HEAD_CHARS:
            self._state = "raw"

    def _may_be_head(self) -> bool:
        return f'{{"{ARGUMENT}":"'.startswith(_SPACE.sub("", self._held))

    def _text(self) -> str:
        parts: list[str] = []
        at = 0
        while (found := _STOPS.search(self._held, at)) is not None:
            parts.append(self._held[at : found.start()])
            at = found.start()
            if found.group() == '"':
                self._state, self._held = "over", ""
                return "".join(parts)
            size = _escape_size(self._held, at)
            if size is None:
                self._held = self._held[at:]
                return "".join(parts)
            parts.append(_unescaped(self._held[at : at + size]))
            at += size
        parts.append(self._held[at:])
        self._held = ""
        return "".join(parts)


def _escape_size(text: str, at: int) -> int | None:
    """Characters of the escape that begins at `at`, two of a pair included; None where more of it may come."""
    if len(text) < at + 2:
        return None
    if text[at + 1] != "u":
        return 2
    if len(text) < at + 6:
        return None
    if text[at + 2 : at + 4].lower() not in ("d8", "d9", "da", "db"):
        return 6
    if not "\\u".startswith(text[at + 6 : at + 8]):
        return 6
    return 12 if len(text) >= at + 12 else None


def _unescaped(escape: str) -> str:
    try:
        found: str = json.loads(f'"{escape}"')
    except ValueError:
        return escape
    return found.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
