"""Objects of a JSON schema that have the properties which are named, where the schema says nothing of others.

A model that may write further properties often goes on with them to the end. Only objects that stand alone are closed: where several
schemas say together what an object is (`allOf`, `if`, a reference beside `properties`, ...), one closed part would forbid what
another asks for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ALTERNATIVES = ("anyOf", "oneOf")
_COMBINING = frozenset(
    {"allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas", "dependencies", "$ref", "$dynamicRef",
     "$recursiveRef"}
)  # fmt: skip
_SAYS_MORE = frozenset(
    {"additionalProperties", "unevaluatedProperties", "propertyNames", "minProperties", "dependentRequired"}
)
_OF_OBJECTS = _SAYS_MORE | {"properties", "required", "patternProperties", "maxProperties"}
_DEFINITIONS = ("$defs", "definitions")
_MAX_DEPTH = 100
"""Levels; a deeper schema is refused anyway."""


def closed(root: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema with `additionalProperties: false` wherever that forbids no more than properties which nobody names."""
    combined: set[str] = set()
    if not _find_combined(root, root, True, combined, set(), 0):
        return root
    found = dict(_close(root, True, 0))
    for home in _DEFINITIONS:
        if isinstance(root.get(home), Mapping):
            found[home] = {name: _close(one, f"#/{home}/{name}" not in combined, 1) for name, one in root[home].items()}
    return found


def _stands_alone(schema: Mapping[str, Any]) -> bool:
    """Return whether this schema says alone what a value is: not together with others, or with alternatives of its own."""
    combining = _COMBINING & schema.keys()
    if not combining:
        return True
    if len(combining) > 1 or _OF_OBJECTS & schema.keys():
        return False
    (keyword,) = combining
    branches = schema[keyword]
    return keyword in (*_ALTERNATIVES, "$ref") or (
        keyword == "allOf" and isinstance(branches, list) and len(branches) == 1
    )


def _inner(schema: Mapping[str, Any]) -> list[Any]:
    """Schemas within it, without definitions."""
    found: list[Any] = []
    for keyword, value in schema.items():
        if keyword in ("properties", "patternProperties", "dependentSchemas") and isinstance(value, Mapping):
            found += value.values()
        elif keyword in ("allOf", *_ALTERNATIVES, "prefixItems", "items") and isinstance(value, list):
            found += value
        elif keyword in (
            "items",
            "additionalProperties",
            "not",
            "if",
            "then",
            "else",
            "contains",
            "unevaluatedProperties",
        ):
            found.append(value)
    return [one for one in found if isinstance(one, Mapping)]


def _find_combined(
    root: Mapping[str, Any], schema: Mapping[str, Any], is_alone: bool, combined: set[str], seen: set[Any], depth: int
) -> bool:
    """Gather the definitions that are parts of something; False where a part is no definition, so that nothing may be closed."""
    is_alone = is_alone and _stands_alone(schema)
    if depth > _MAX_DEPTH:
        return False
    reference = schema.get("$ref")
    if isinstance(reference, str):
        home, name = [*reference.split("/", 2), "", ""][1:3]
        definitions = root.get(home) if reference.startswith("#/") and home in _DEFINITIONS else None
        target = definitions.get(name) if isinstance(definitions, Mapping) and "/" not in name else None
        if not is_alone:
            combined.add(reference)
        if not isinstance(target, Mapping):
            if not is_alone:
                return False
        elif (reference, is_alone) not in seen:
            seen.add((reference, is_alone))
            if not _find_combined(root, target, is_alone, combined, seen, depth + 1):
                return False
    return all(_find_combined(root, one, is_alone, combined, seen, depth + 1) for one in _inner(schema))


def _close(schema: Any, is_alone: bool, depth: int) -> Any:
    if not isinstance(schema, Mapping) or not is_alone or depth > _MAX_DEPTH or not _stands_alone(schema):
        return schema
    found: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in ("properties", "patternProperties") and isinstance(value, Mapping):
            found[keyword] = {name: _close(one, True, depth + 1) for name, one in value.items()}
        elif keyword in ("allOf", *_ALTERNATIVES, "prefixItems", "items") and isinstance(value, list):
            found[keyword] = [_close(one, True, depth + 1) for one in value]
        elif keyword in ("items", "additionalProperties"):
            found[keyword] = _close(value, True, depth + 1)
        else:
            found[keyword] = value
    named, required = found.get("properties"), found.get("required", [])
    if isinstance(named, Mapping) and isinstance(required, list) and not _SAYS_MORE & found.keys():
        patterns = found.get("patternProperties")
        if patterns or all(isinstance(name, str) and name in named for name in required):
            found["additionalProperties"] = False
    return found
