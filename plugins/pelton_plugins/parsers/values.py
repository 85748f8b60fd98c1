"""From a value as a model writes it, in a tag or in Python, to JSON of the type that the function's schema asks for."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping, Set
from typing import Any

ANY_TYPE = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
_HALF = re.compile(r"[\ud800-\udfff]")
MAX_REFERENCES = 8
"""A schema that refers to itself ends here."""
MAX_INTEGER_BITS = 14_000
"""Python reads hexadecimal numbers of any length, and writes decimal ones up to 4300 digits."""


def schema_types(schema: Any, root: Mapping[str, Any], depth: int = 0, seen: set[str] | None = None) -> set[str]:
    """Return the JSON types that a schema allows; empty where it does not say. seen: references that have been followed; to follow one
    again would add nothing, and takes time without end where each leads to several."""
    seen = set() if seen is None else seen
    if not isinstance(schema, Mapping) or depth > MAX_REFERENCES:
        return set()
    declared = schema.get("type")
    found = {declared} if isinstance(declared, str) else set()
    if isinstance(declared, list):
        found |= {one for one in declared if isinstance(one, str)}
    for union in ("anyOf", "oneOf", "allOf"):
        choices = schema.get(union)
        for choice in choices if isinstance(choices, list) else ():
            found |= schema_types(choice, root, depth + 1, seen)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/") and reference not in seen:
        seen.add(reference)
        target: Any = root
        for step in reference[2:].split("/"):
            target = target.get(step) if isinstance(target, Mapping) else None
        found |= schema_types(target, root, depth + 1, seen)
    if not found:
        values = schema.get("enum", [schema["const"]] if "const" in schema else [])
        found |= {type_of(value) for value in values} if isinstance(values, list) else set()
    if schema.get("nullable") is True:
        found.add("null")
    return found


def type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    kinds = ((int, "integer"), (float, "number"), (str, "string"), (list, "array"), (dict, "object"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "string")


def from_text(text: str, types: Set[str]) -> Any:
    """Return a tag's text as a value of one of `types`; unchanged where none fits, or none is known. Any type but a string may be null,
    whatever the schema says: models write it for what they leave out."""
    if not types - {"string"}:
        return text
    stripped = text.strip()
    lowered = stripped.lower()
    if lowered in ("null", "none") and ("null" in types or "string" not in types):
        return None
    if "boolean" in types and lowered in ("true", "false"):
        return lowered == "true"
    found = literal(stripped)
    kind = type_of(found)
    if kind == "number" and "integer" in types and "number" not in types and float(found).is_integer():
        return int(found)
    if kind == "integer" and "number" in types:
        return found
    return found if kind in types and kind != "string" else text


def literal(text: str) -> Any:
    """Read JSON, or else Python; text that is neither is returned as it is."""
    try:
        return _finite(json.loads(text))
    except (ValueError, RecursionError):
        pass
    try:
        return as_json(ast.literal_eval(text))
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return text


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("no JSON")
    return value


def as_json(value: Any) -> Any:
    """Return a Python literal with what JSON has no word for written in another way."""
    if isinstance(value, (list, tuple, set, frozenset)):
        return [as_json(one) for one in value]
    if isinstance(value, dict):
        return {str(key): as_json(one) for key, one in value.items()}
    if isinstance(value, float):
        return _finite(value)
    if isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS:
        raise ValueError("more digits than Python writes")
    if value is None or isinstance(value, (bool, int, str)):
        return value
    raise ValueError(f"a {type(value).__name__} is no JSON")


def dumps(value: Any) -> str:
    written = json.dumps(value, ensure_ascii=False)
    return json.dumps(value) if _HALF.search(written) else written  # half of a pair is no text that can be sent
