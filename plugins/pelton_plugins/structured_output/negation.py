"""The negation of a JSON schema as a JSON schema, where keywords without `not` can say it, and schemas that share no value.

A schema is the conjunction of its keywords, so its negation is the union of theirs: `{"required": ["a"]}` becomes an object
without `a`. A keyword for numbers accepts everything that is not a number, so its negation accepts numbers alone.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

_ALL = ("null", "boolean", "object", "array", "number", "string")
_NOTES = frozenset(
    {"title", "description", "default", "examples", "example", "$comment", "deprecated", "readOnly", "writeOnly", "$schema",
     "$id", "id", "$anchor", "definitions", "$defs"}
)  # fmt: skip
_MAX_DEPTH = 12
_MAX_STEPS = 100_000
"""Schemas that are looked at: references let a few lines stand for millions."""
_MAX_TEXTS = 64
_MAX_TEXT_CHARS = 512
"""The regex of all other texts takes memory that grows with the square of a text's length."""


class Negation:
    """root: the document that references point into. check: refuses values of keywords that are no schema's, where a reference leads."""

    def __init__(self, root: Mapping[str, Any], check: Callable[[Mapping[str, Any], str], None]) -> None:
        self._root = root
        self._check = check
        self._checked: set[int] = set()  # ids of the document's parts, which live as long as it
        self._num_left = _MAX_STEPS

    def of(self, schema: Any, depth: int = 0) -> Any:
        """A schema of all values that this one refuses; None where there is none that can be written."""
        if isinstance(schema, bool):
            return not schema
        schema = self._resolved(schema)
        if schema is None or not self._may_go_on(depth):
            return None
        parts: list[Any] = []
        for keyword, value in schema.items():
            if keyword in _NOTES:
                continue
            part = self._keyword(keyword, value, schema, depth)
            if part is None:
                return None
            if part is not False:
                parts.append(part)
        if True in parts:
            return True
        return False if not parts else parts[0] if len(parts) == 1 else {"anyOf": parts}

    def _resolved(self, schema: Any, pointer: str = "") -> Mapping[str, Any] | None:
        """Behind its reference; None where it leads nowhere that is known, or where there is no schema."""
        for _ in range(_MAX_DEPTH):
            if not isinstance(schema, Mapping):
                return None
            if id(schema) not in self._checked:
                self._check(schema, pointer)
                self._checked.add(id(schema))
            reference = schema.get("$ref")
            if reference is None:
                return schema
            if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
                return None
            if any(key not in _NOTES and key != "$ref" for key in schema):
                return None
            found: Any = self._root
            for part in reference.split("/")[1:]:
                part = part.replace("~1", "/").replace("~0", "~")
                found = found.get(part) if isinstance(found, Mapping) else None
            schema, pointer = found, reference[1:]
        return None

    def _may_go_on(self, depth: int) -> bool:
        self._num_left -= 1
        return depth <= _MAX_DEPTH and self._num_left >= 0

    def _keyword(self, keyword: str, value: Any, schema: Mapping[str, Any], depth: int) -> Any:
        """The negation of one keyword: a schema, False where it refuses nothing, None where nothing says it."""
        if keyword == "type":
            return _other_types(value)
        if keyword in ("enum", "const"):
            return _other_values(value if keyword == "enum" else [value])
        if keyword == "required":
            return _any([{"type": "object", "properties": {name: False}} for name in value])
        if keyword == "properties":
            parts = []
            for name, inner in value.items():
                negated = self.of(inner, depth + 1)
                if negated is None:
                    return None
                if negated is not False:
                    parts.append({"type": "object", "required": [name], "properties": {name: negated}})
            return _any(parts)
        if keyword in ("anyOf", "allOf"):
            negated_parts = [self.of(inner, depth + 1) for inner in value]
            if None in negated_parts:
                return None
            return {"allOf": negated_parts} if keyword == "anyOf" else _any(negated_parts)
        if keyword == "not":
            return value
        if keyword in _BOUNDS:
            return _outside(keyword, value)
        if keyword in ("additionalProperties", "items") and value in (True, {}):
            return False
        return None

    def are_disjoint(self, one: Any, other: Any, depth: int = 0) -> bool:
        """True when it is sure that no value keeps both."""
        if one is False or other is False:
            return True
        if isinstance(one, bool) or isinstance(other, bool) or not self._may_go_on(depth):
            return False
        first, second = self._resolved(one), self._resolved(other)
        if first is None or second is None:
            return False
        for keyword in ("anyOf", "oneOf"):
            for a, b in ((first, second), (second, first)):
                if keyword in a and all(self.are_disjoint(part, b, depth + 1) for part in a[keyword]):
                    return True
        for a, b in ((first, second), (second, first)):
            if any(self.are_disjoint(part, b, depth + 1) for part in a.get("allOf", ())):
                return True
        types, others = _types(first), _types(second)
        if not types & others:
            return True
        values, more = _values(first), _values(second)
        if values is not None and more is not None and not _common(values, more):
            return True
        return types & others == {"object"} and self._objects_differ(first, second, depth)

    def _objects_differ(self, first: Mapping[str, Any], second: Mapping[str, Any], depth: int) -> bool:
        for a, b in ((first, second), (second, first)):
            named, known = a.get("properties", {}), b.get("properties", {})
            for name in a.get("required", ()):
                if name in known and self.are_disjoint(named.get(name, True), known[name], depth + 1):
                    return True
                is_closed = b.get("additionalProperties") is False and "patternProperties" not in b
                if is_closed and name not in known:
                    return True
        return False


def _any(parts: list[Any]) -> Any:
    parts = [part for part in parts if part is not False]
    return True if True in parts else False if not parts else parts[0] if len(parts) == 1 else {"anyOf": parts}


def _other_types(value: Any) -> Any:
    given = set(value if isinstance(value, list) else [value])
    if "integer" in given and "number" not in given:
        return None  # numbers that are not integers
    rest = [kind for kind in _ALL if kind not in given]
    return {"type": rest} if rest else False


def _other_values(values: list[Any]) -> Any:
    """Everything else."""
    texts = [value for value in values if isinstance(value, str)]
    numbers = sorted({value for value in values if isinstance(value, int | float) and not isinstance(value, bool)})
    flags = [value for value in values if isinstance(value, bool)]
    if any(isinstance(value, list | dict) for value in values) or len(texts) > _MAX_TEXTS or len(numbers) > _MAX_TEXTS:
        return None
    if any(len(text) > _MAX_TEXT_CHARS for text in texts):
        return None
    parts: list[Any] = [{"type": ["object", "array"]}]
    if None not in values:
        parts.append({"type": "null"})
    parts += [{"const": flag} for flag in (False, True) if flag not in flags]
    parts.append({"type": "string", "pattern": not_texts(texts)} if texts else {"type": "string"})
    edges = [-math.inf, *numbers, math.inf]
    for low, high in itertools.pairwise(edges):
        part: dict[str, Any] = {"type": "number"}
        if low > -math.inf:
            part["exclusiveMinimum"] = low
        if high < math.inf:
            part["exclusiveMaximum"] = high
        parts.append(part)
    return {"anyOf": parts}


def not_texts(texts: list[str]) -> str:
    """A regex of all texts but these."""
    follows: dict[str, set[str]] = {}
    for text in texts:
        for end in range(len(text)):
            follows.setdefault(text[:end], set()).add(text[end])
        follows.setdefault(text, set())

    rest: dict[str, str] = {}  # by prefix: a regex of all that may follow it
    for prefix in sorted(follows, key=len, reverse=True):
        letters = sorted(follows[prefix])
        ways = [] if prefix in texts else [""]
        others = "".join(re.escape(letter) if letter in "\\]^-[&~" else letter for letter in letters)
        ways.append(f"[^{others}](?s:.*)" if letters else "(?s:.+)")
        ways += [re.escape(letter) + rest[prefix + letter] for letter in letters]
        rest[prefix] = f"({'|'.join(ways)})"
    return f"^{rest['']}$"


_BOUNDS = {
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
}


def _outside(keyword: str, value: Any) -> Any:
    kind, opposite, step = _BOUNDS[keyword]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None  # draft 4's exclusiveMinimum is a flag
    if step == -1 and value <= 0:
        return False
    return {"type": kind, opposite: value + step}


def _types(schema: Mapping[str, Any]) -> set[str]:
    values = _values(schema)
    if values is not None:
        return {_type_of(value) for value in values}
    kinds = schema.get("type", list(_ALL))
    found = set(kinds if isinstance(kinds, list) else [kinds])
    return {"number" if kind == "integer" else kind for kind in found}


def _type_of(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    kinds = ((int | float, "number"), (str, "string"), (list, "array"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "object")


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _common(one: list[Any], other: list[Any]) -> bool:
    return any(a == b and (type(a) is type(b) or _both_numbers(a, b)) for a in one for b in other)


def _both_numbers(one: Any, other: Any) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in (one, other))
