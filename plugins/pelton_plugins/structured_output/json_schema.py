"""Check a JSON schema, and rewrite what llguidance does not know into what it does.

A mistake is refused with the place where it stands. `not`, `if`, dependencies, `propertyNames` and a `oneOf` whose branches
overlap become combinations of other keywords that allow exactly the same texts; where that is not possible they stay, and
are refused by name. Formats that JSON Schema does not define are notes, as its text says.
"""

from __future__ import annotations

import bisect
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any

from pelton import limits
from pelton.errors import RequestError
from pelton_plugins.structured_output.closed_objects import closed
from pelton_plugins.structured_output.negation import Negation

MAX_DEPTH = 64
"""Levels of a schema. llguidance reads JSON to a depth of 128, and a level of a schema is two or three of those."""
_MAX_NODES = 50_000
"""Schemas within a schema, rewritten ones included."""
_TYPES = frozenset({"null", "boolean", "object", "array", "number", "integer", "string"})
_FORMATS = frozenset(
    {"date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6", "uri",
     "uri-reference", "iri", "iri-reference", "uuid", "uri-template", "json-pointer", "relative-json-pointer", "regex"}
)  # fmt: skip
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("additionalProperties", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames",
           "unevaluatedItems", "unevaluatedProperties")  # fmt: skip
_PARTS = frozenset({*_LISTS, *_SINGLE, "items"})
_KEYWORDS = frozenset({*_LISTS, *_SINGLE, *_MAPS, "items", "uniqueItems", "dependencies", "dependentRequired", "minContains",
                       "maxContains", "minProperties", "maxProperties", "multipleOf", "$dynamicRef"})  # fmt: skip
_EXACT = 2**53
"""From here on float64 holds only some of the whole numbers, and llguidance computes bounds as that."""
_WIDEST = {"minimum": -(2**63) + 1024, "maximum": 2**63 - 1}
"""The widest bounds of an integer that it takes: it negates a lower one in 64 bits, where this is the first float64 that it can."""
_MAX_STEPS = 4
"""Numbers of float64 that are tried on each side of one in its place: further ones are not read as it."""
_LEAST = 1e-30
"""The number next to 0 as a bound: its regexes nest as deep as a number has digits, and have a limit."""
_MOST_POWER = 308
"""Of ten, in float64."""
_MOST_COUNTED = 2**32 - 1
"""The largest repetition of its regexes."""
_MAX_OVERLAPPING = 12
"""Most branches of a `oneOf` that may overlap: each becomes itself without the others."""


def read_json(text: str, name: str) -> Any:
    """Raises `RequestError` that says where the text is no JSON."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise RequestError(
            f"{name} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}", param="structured_outputs"
        ) from None
    except RecursionError:
        raise RequestError(f"{name} is nested too deeply", param="structured_outputs") from None
    except ValueError as error:  # a number with more digits than Python reads
        raise RequestError(f"{name} cannot be read as JSON: {error}", param="structured_outputs") from None


def check_writable(value: Any, name: str) -> int:
    """Return how many characters it has as JSON. Raises `RequestError` for what JSON, or UTF-8, has no words for."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (RecursionError, ValueError, TypeError) as error:
        raise RequestError(f"{name} cannot be written as JSON: {error}", param="structured_outputs") from None
    return len(text)


def prepare_schema(schema: Any, *, closes_objects: bool = False) -> dict[str, Any]:
    """The schema as llguidance gets it. closes_objects: objects have the properties that are named, where it does not say."""
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    if not isinstance(schema, Mapping):
        raise bad_schema("", f"is a {type(schema).__name__}; a JSON schema is an object")
    _check_size(schema)
    if closes_objects:
        schema = closed(schema)
    made = _Preparation(schema).walk(schema, "", 0)
    assert isinstance(made, dict)
    return _Bounds(made).exact(made)


def bad_schema(pointer: str, what: str) -> RequestError:
    place = f" at {pointer}" if pointer else ""
    return RequestError(f"structured_outputs.json{place} {what}.", param="structured_outputs")


def find_keyword(schema: Any, keyword: str, pointer: str = "") -> str | None:
    """Where a keyword of a JSON schema first stands, as a JSON pointer."""
    if not isinstance(schema, Mapping):
        return None
    if keyword in schema:
        return f"{pointer}/{keyword}"
    for place, inner in _inner(schema, pointer):
        found = find_keyword(inner, keyword, place)
        if found is not None:
            return found
    return None


_QUOTED = re.compile(r"\"([^\"]+)\"")


def find_blamed(schema: Any, message: str) -> str | None:
    """The place of what an error of llguidance speaks of: a keyword in quotes, or a regex or a reference of the schema."""
    if isinstance(schema, str):
        schema = read_json(schema, "structured_outputs.json")
    words = [*_QUOTED.findall(message), *(["oneOf"] if message.startswith("oneOf") else [])]
    if "Properties only" in message:
        words += ["minProperties", "maxProperties"]
    for word in words:
        found = find_keyword(schema, word) if word in _KEYWORDS else None
        if found is not None:
            return found
    return next(
        (place for name in ("pattern", "format") for place, value in _values_of(schema, name, "") if value in message),
        None,
    )


def _values_of(schema: Any, name: str, pointer: str) -> Iterator[tuple[str, str]]:
    """All texts that stand under a keyword, with their places."""
    if isinstance(schema, Mapping):
        if isinstance(schema.get(name), str):
            yield f"{pointer}/{name}", schema[name]
        for place, inner in _inner(schema, pointer):
            yield from _values_of(inner, name, place)


def _inner(schema: Mapping[str, Any], pointer: str) -> list[tuple[str, Any]]:
    """The schemas within a schema, with their places."""
    found: list[tuple[str, Any]] = []
    for name in _MAPS:
        if isinstance(schema.get(name), Mapping):
            found += [(f"{pointer}/{name}/{_escape(key)}", inner) for key, inner in schema[name].items()]
    for name in (*_LISTS, "items"):
        if isinstance(schema.get(name), list):
            found += [(f"{pointer}/{name}/{index}", inner) for index, inner in enumerate(schema[name])]
    found += [
        (f"{pointer}/{name}", schema[name]) for name in (*_SINGLE, "items") if isinstance(schema.get(name), Mapping)
    ]
    return found


def _escape(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _check_size(schema: Mapping[str, Any]) -> None:
    size = check_writable(schema, "structured_outputs.json")
    if size > limits.MAX_CONSTRAINT_CHARS:
        raise bad_schema("", f"has {size} characters; at most {limits.MAX_CONSTRAINT_CHARS}")


class _Preparation:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._num_nodes = 0
        self._negation = Negation(root, _check_keywords)

    def walk(self, schema: Any, pointer: str, depth: int) -> dict[str, Any] | bool:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise bad_schema(pointer, f"is a {type(schema).__name__}; a schema is an object, true or false")
        if depth > MAX_DEPTH:
            raise bad_schema(pointer, f"is nested {depth} levels deep; at most {MAX_DEPTH}")
        self._num_nodes += 1
        if self._num_nodes > _MAX_NODES:
            raise bad_schema("", f"has more than {_MAX_NODES} schemas in it")
        _check_keywords(schema, pointer)
        made = _with_bounds({key: value for key, value in schema.items() if key not in _DROPPED}, pointer)
        for name in _MAPS:
            if isinstance(made.get(name), Mapping):
                made[name] = {
                    key: self.walk(inner, f"{pointer}/{name}/{_escape(key)}", depth + 1)
                    for key, inner in made[name].items()
                }
        for name in (*_LISTS, "items"):
            if isinstance(made.get(name), list):
                made[name] = [
                    self.walk(inner, f"{pointer}/{name}/{i}", depth + 1) for i, inner in enumerate(made[name])
                ]
        for name in (*_SINGLE, "items"):
            if isinstance(made.get(name), Mapping):
                made[name] = self.walk(made[name], f"{pointer}/{name}", depth + 1)
        if "format" in made and made["format"] not in _FORMATS:
            del made["format"]
        for keyword, rewrite in _REWRITES.items():
            if keyword in made:
                made = rewrite(self, made)
        return made

    # What is rewritten.

    def _without_not(self, schema: dict[str, Any]) -> dict[str, Any]:
        negated = self._negation.of(schema["not"])
        return schema if negated is None else _and(_without(schema, "not"), negated)

    def _without_if(self, schema: dict[str, Any]) -> dict[str, Any]:
        rest = _without(schema, "if", "then", "else")
        if "then" not in schema and "else" not in schema:
            return rest
        condition, negated = schema["if"], self._negation.of(schema["if"])
        if negated is None:
            return schema
        return _and(
            rest,
            {
                "anyOf": [
                    {"allOf": [condition, schema.get("then", True)]},
                    {"allOf": [negated, schema.get("else", True)]},
                ]
            },
        )

    def _without_dependencies(self, schema: dict[str, Any]) -> dict[str, Any]:
        for name in ("dependencies", "dependentRequired", "dependentSchemas"):
            for key, needed in schema.pop(name, {}).items():
                then = {"required": needed} if isinstance(needed, list) else needed
                schema = _and(schema, {"anyOf": [{"properties": {key: False}}, then]})
        return schema

    def _without_property_names(self, schema: dict[str, Any]) -> dict[str, Any]:
        names = schema["propertyNames"]
        if names is True or "patternProperties" in schema:
            return _without(schema, "propertyNames") if names is True else schema
        rest = {key: value for key, value in _without(schema, "propertyNames").items()}
        value = rest.get("additionalProperties", True)
        asked = {key: part for key, part in (names.items() if isinstance(names, dict) else ()) if key not in _NOTES}
        asked.pop("type", None)
        known = rest.get("properties", {})
        if set(asked) == {"enum"} and value is not False:
            allowed = [name for name in asked["enum"] if isinstance(name, str)]
            rest["properties"] = {**known, **{name: value for name in allowed if name not in known}}
            rest["additionalProperties"] = False
            bad = [name for name in known if name not in allowed]
        elif set(asked) == {"pattern"} and value is not False:
            try:
                bad = [name for name in known if not re.search(asked["pattern"], name)]
            except re.error:
                return schema
            rest["patternProperties"] = {asked["pattern"]: value}
            rest["additionalProperties"] = False
        else:
            return schema
        rest["properties"] = {**rest.get("properties", {}), **dict.fromkeys(bad, False)}
        return rest

    def _without_one_of(self, schema: dict[str, Any]) -> dict[str, Any]:
        branches = schema["oneOf"]
        if len(branches) == 1:
            return _and(_without(schema, "oneOf"), branches[0])
        base = _without(schema, "oneOf")
        told_apart = []
        for index, branch in enumerate(branches):
            others = [
                other for place, other in enumerate(branches)
                if place != index and not self._negation.are_disjoint(branch, other)
            ]  # fmt: skip
            negated = [self._negation.of(other) for other in others]
            if len(others) > _MAX_OVERLAPPING or None in negated:
                return schema
            told_apart.append({"allOf": [branch, *negated]} if others else branch)
        return _and(base, {"anyOf": told_apart})

    def _without_unique(self, schema: dict[str, Any]) -> dict[str, Any]:
        is_sure = not schema["uniqueItems"] or schema.get("maxItems", 2) <= 1
        return _without(schema, "uniqueItems") if is_sure else schema


_DROPPED = frozenset({"x-guidance"})
"""Options of llguidance, which are ours to give."""
_NOTES = frozenset({"title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly"})
_REWRITES: dict[str, Callable[[_Preparation, dict[str, Any]], dict[str, Any]]] = {
    "propertyNames": _Preparation._without_property_names,
    "uniqueItems": _Preparation._without_unique,
    "dependencies": _Preparation._without_dependencies,
    "dependentRequired": _Preparation._without_dependencies,
    "dependentSchemas": _Preparation._without_dependencies,
    "if": _Preparation._without_if,
    "not": _Preparation._without_not,
    "oneOf": _Preparation._without_one_of,
}


def _without(schema: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key not in names}


def _and(schema: Mapping[str, Any], other: Any) -> dict[str, Any]:
    """Both."""
    if other is True:
        return dict(schema)
    return {**schema, "allOf": [*schema.get("allOf", ()), other]}


def _check_keywords(schema: Mapping[str, Any], pointer: str) -> None:
    """Refuse values that are no JSON schema's."""
    kinds = schema.get("type")
    for kind in kinds if isinstance(kinds, list) else [] if kinds is None else [kinds]:
        if not isinstance(kind, str) or kind not in _TYPES:
            raise bad_schema(f"{pointer}/type", f"is {kind!r}; use one of {', '.join(sorted(_TYPES))}")
    for name, right, words in _SHAPES:
        if name in schema and not right(schema[name]):
            raise bad_schema(f"{pointer}/{name}", f"is {_short(schema[name])}; give {words}")
    for name in ("const", "enum"):
        if name in schema and (found := next(_unheld(schema[name], f"{pointer}/{name}"), None)) is not None:
            place, number = found
            raise bad_schema(
                place,
                f"is {_short(number)}; a whole number is enforced below 2**63, and where a float64 is exactly that number, another "
                "one of up to 15 digits, and most of more. Use a text, or another number",
            )
    reference = schema.get("$ref")
    if isinstance(reference, str) and not reference.startswith("#") and "://" in reference:
        raise bad_schema(f"{pointer}/$ref", f"is {_short(reference)}; references to other documents are not followed")


def _with_bounds(schema: dict[str, Any], pointer: str) -> dict[str, Any]:
    """The schema with large bounds as llguidance takes them. Raises `RequestError` for one that it would take for another number."""
    schema = _without_flags(schema)
    made = {key: value for key, value in schema.items() if key not in _COUNTS_ABOVE or value <= _MOST_COUNTED}
    kinds = schema.get("type")
    is_integer = kinds == "integer" or (isinstance(kinds, list) and "integer" in kinds and "number" not in kinds)
    for name, plain, sign in _BOUNDS:
        bound = schema.get(name)
        if not _is_number(bound) or abs(bound) < _EXACT:
            continue
        if is_integer:
            del made[name]
            made |= _integer_bound(
                made, int(bound) - (sign if name != plain else 0), plain, sign, f"{pointer}/{name}", bound
            )
        elif sign * bound >= sys.float_info.max:  # every number keeps it
            del made[name]
        elif kinds is None and sign * bound >= 2**63 - 1:  # it may be of integers by another part of the schema
            made[name] = sign * -_WIDEST["minimum"]
        elif abs(bound) >= 2**63 or Decimal(repr(float(bound))) != bound:  # the digits that it writes of it
            raise _unheld_bound(f"{pointer}/{name}", bound)
    return made


def _each_part(schema: Mapping[str, Any], call: Callable[[Any], Any]) -> dict[str, Any]:
    """Return, by keyword, what `call` makes of the schemas within a schema."""
    made: dict[str, Any] = {}
    for name, value in schema.items():
        if name in _MAPS and isinstance(value, dict):
            made[name] = {key: call(inner) for key, inner in value.items()}
        elif name in _PARTS and isinstance(value, list | dict):
            made[name] = [call(inner) for inner in value] if isinstance(value, list) else call(value)
    return made


def _without_flags(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with numbers where draft 4 says that its `minimum` or `maximum` is not allowed itself."""
    made = dict(schema)
    for name, plain, _ in _BOUNDS:
        if name != plain and isinstance(is_open := made.get(name), bool):
            del made[name]
            if is_open and plain in made:
                made[name] = made.pop(plain)
    return made


class _Bounds:
    """Bounds of numbers in a whole document, whose parts may meet: by `allOf`, `anyOf` or a reference."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._found: dict[int, list[int | float]] = {-1: [], 1: []}  # by where they bound to
        self._made: dict[int, dict[str, Any]] = {}  # by the id of a part, as rewritten ones stand in several places
        self._collect(schema, set())
        for bounds in self._found.values():
            bounds.sort()

    def _collect(self, schema: Any, seen: set[int]) -> None:
        if isinstance(schema, dict) and id(schema) not in seen:
            seen.add(id(schema))
            for name, _, sign in _BOUNDS:
                if name in schema and _is_number(schema[name]):
                    self._found[sign].append(schema[name])
            _each_part(schema, lambda part: self._collect(part, seen))

    def exact(self, schema: Any) -> Any:
        """Return the schema without an open bound that is a whole number, where another bound is less than 1 farther from 0 (llguidance
        allows 0 where a number is above 0 and at most 0.5), and with bounds that llguidance reads as they are, or as less allowed."""
        if not isinstance(schema, dict):
            return schema
        if id(schema) not in self._made:
            self._made[id(schema)] = self._with_numbers({**schema, **_each_part(schema, self.exact)})
        return self._made[id(schema)]

    def _with_numbers(self, made: dict[str, Any]) -> dict[str, Any]:
        made |= {name: _with_same(made[name]) for name in ("const", "enum") if name in made}
        for name, plain, sign in _BOUNDS:
            if name not in made or not _is_number(bound := made[name]):
                continue
            near = _readable(bound, sign)
            is_allowed = name != plain and bound == int(bound) and sign * bound <= 0 and self._has_near(bound, -sign)
            if is_allowed:
                near = _readable(math.nextafter(bound, -sign * math.inf) if bound else -sign * _LEAST, sign)
            if name == plain or (not is_allowed and _as_read(near) == bound):
                made[name] = near
                continue
            del made[name]  # that number, farther in, keeps it
            made[plain] = max(near, made.get(plain, near), key=lambda number, side=-sign: side * _as_read(number))
        return made

    def _has_near(self, bound: int | float, side: int) -> bool:
        """Return whether a bound to `side` is less than 1 farther from 0."""
        others = self._found[side]
        if side > 0:
            place = bisect.bisect_right(others, bound)
            return place < len(others) and others[place] - bound < 1
        place = bisect.bisect_left(others, bound)
        return place > 0 and bound - others[place - 1] < 1


def _readable(bound: int | float, sign: int) -> int | float:
    """Return the number that llguidance reads as the bound, else the nearest that it reads as one farther in; sign: where it bounds to."""
    if 0 < abs(bound) < _LEAST:
        return -sign * _LEAST if sign * bound < 0 else 0
    if isinstance(bound, int):
        return bound
    if (same := _same(bound)) is not None:
        return same
    inward = bound
    while sign * _as_read(inward) > sign * bound:
        inward = math.nextafter(inward, -sign * math.inf)
    return inward


def _same(number: float) -> float | None:
    """Return one that llguidance reads as this number."""
    below = above = number
    for _ in range(_MAX_STEPS):
        for near in (below, above):
            if _as_read(near) == number:
                return near
        below, above = math.nextafter(below, -math.inf), math.nextafter(above, math.inf)
    return None


def _with_same(value: Any) -> Any:
    """Return a value with such numbers."""
    if isinstance(value, list):
        return [_with_same(one) for one in value]
    if isinstance(value, dict):
        return {key: _with_same(one) for key, one in value.items()}
    return _same(value) if isinstance(value, float) else value


def _as_read(number: int | float) -> int | float:
    """Return what serde_json, which llguidance reads schemas by, makes of a number: its digits as float64, times or by a power of ten."""
    if isinstance(number, int):
        return number
    sign, digits, exponent = Decimal(repr(number)).as_tuple()
    value, exponent = float(int("".join(map(str, digits)))), int(exponent)
    while exponent < -_MOST_POWER:
        value, exponent = value / float(f"1e{_MOST_POWER}"), exponent + _MOST_POWER
    power = float(f"1e{abs(exponent)}")
    value = value / power if exponent < 0 else value * power
    return -value if sign else value


def _integer_bound(
    schema: Mapping[str, Any], last: int, plain: str, sign: int, pointer: str, given: Any
) -> dict[str, int | float]:
    """The bounds in place of `given`. last: the last integer that keeps it."""
    outward = sign * last
    if outward >= 2**63 - 1:
        last = _WIDEST[plain]
    elif outward <= -(2**63) + 1024 or int(float(last)) != last:
        raise _unheld_bound(pointer, given)
    other = "minimum" if plain == "maximum" else "maximum"
    found = {plain: sign * min(sign * last, sign * schema.get(plain, last))}
    # Without the other one llguidance counts up to the next power of ten, which 64 bits do not hold.
    return found | ({other: _WIDEST[other]} if -outward >= 10**18 and other not in schema else {})


def _unheld_bound(pointer: str, bound: Any) -> RequestError:
    return bad_schema(
        pointer,
        f"is {_short(bound)}; a bound is enforced below 2**63, and from 2**53 on only where a float64 is exactly the last number "
        "that it allows, for numbers that are no integers in 17 digits. Use another number",
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_number(value) and 0 <= value < math.inf and value == int(value)


def _is_schema(value: Any) -> bool:
    return isinstance(value, bool | Mapping)


def _unheld(value: Any, pointer: str) -> Iterator[tuple[str, Any]]:
    """Numbers of a value that llguidance takes for others: it computes whole ones as float64, and then as int64."""
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from _unheld(one, f"{pointer}/{_escape(key)}")
    elif isinstance(value, list):
        for index, one in enumerate(value):
            yield from _unheld(one, f"{pointer}/{index}")
    elif _is_number(value) and value == value // 1:
        whole = int(value)
        is_held = whole == 2**63 - 1 or (abs(whole) < 2**63 and int(float(whole)) == whole)
        if not is_held:
            yield pointer, value
    elif isinstance(value, float) and _same(value) is None:
        yield pointer, value


_COUNTS_ABOVE = frozenset({"maxLength", "maxItems", "maxProperties"})
_BOUNDS = (
    ("minimum", "minimum", -1),
    ("exclusiveMinimum", "minimum", -1),
    ("maximum", "maximum", 1),
    ("exclusiveMaximum", "maximum", 1),
)
"""(keyword, the one that allows the bound itself, where it bounds to)"""
_SHAPES: list[tuple[str, Callable[[Any], bool], str]] = [
    *((name, lambda value: isinstance(value, Mapping), "an object of schemas") for name in _MAPS),
    *((name, lambda value: isinstance(value, list) and bool(value), "a list of schemas") for name in ("anyOf", "oneOf", "allOf")),
    *((name, _is_schema, "a schema: an object, true or false") for name in _SINGLE),
    ("items", lambda value: isinstance(value, list) or _is_schema(value), "a schema, or a list of schemas"),
    ("dependencies", lambda value: isinstance(value, Mapping), "an object"),
    ("dependentRequired", lambda value: isinstance(value, Mapping) and all(map(_is_names, value.values())), "lists of names"),
    ("required", _is_names, "a list of names"),
    ("enum", lambda value: isinstance(value, list), "a list of values"),
    ("pattern", lambda value: isinstance(value, str), "a regex"),
    ("format", lambda value: isinstance(value, str), "the name of a format"),
    *((name, _is_count, "a whole number, not below 0") for name in ("maxLength", "maxItems", "maxProperties")),
    *((name, lambda value: _is_count(value) and value <= _MOST_COUNTED, "a whole number from 0 to 2**32 - 1")
      for name in ("minLength", "minItems", "minProperties")),
    *((name, _is_number, "a number") for name in ("minimum", "maximum")),
    ("multipleOf", lambda value: _is_number(value) and value > 0, "a number above 0"),
]  # fmt: skip
