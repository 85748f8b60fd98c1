"""Parts of structural tags for calls that a model chooses to make: what each format writes behind its trigger.

A function that is `strict` gets arguments by its schema, any other an object of whatever it likes. Formats whose arguments are JSON
have the schema as it is. Those that write each argument apart (Python, tags) get the schema of an object taken apart: what such an
object may ask for beyond its properties cannot be held there, and is refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from pelton.errors import RequestError
from pelton.parsing.interface import ParserContext
from pelton_plugins.parsers.values import ANY_TYPE, MAX_REFERENCES, from_text, schema_types, type_of

Part = Mapping[str, Any]

SPACE: Part = {"type": "space"}
NOTES = frozenset(
    {"title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly", "$schema", "$id"}
)
"""Keywords that ask for nothing."""
_OF_OBJECTS = NOTES | {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
_NAME = re.compile(r"[\w.\-]+", re.ASCII)
MAX_WRITTEN_CHARS = 4 * 2**20
"""Of a function's definitions: each alternative of an argument that refers to one is written with all of them."""
_PLAIN = re.compile(r"[^<>\n\"=]+")


def text(value: str) -> Part:
    return {"type": "const_string", "value": value}


def sequence(*parts: Part | str) -> Part:
    return {"type": "sequence", "elements": [text(part) if isinstance(part, str) else part for part in parts]}


def either(parts: Sequence[Part]) -> Part:
    return parts[0] if len(parts) == 1 else {"type": "or", "elements": list(parts)}


def maybe(part: Part) -> Part:
    return {"type": "optional", "content": part}


def many(part: Part) -> Part:
    return {"type": "star", "content": part}


def guarded(triggers: Sequence[Part], *, is_parallel: bool, excludes: Sequence[Part] = ()) -> Part:
    return {"type": "guarded", "triggers": list(triggers), "excludes": list(excludes), "repeats": is_parallel}


def is_held(context: ParserContext, name: str | None = None) -> bool:
    """Return whether a grammar holds the calls to the functions, or to one of them: their JSON is whole and sound."""
    return any(tool.get("strict") and name in (None, tool["name"]) for tool in context.tools)


def functions(context: ParserContext) -> list[tuple[str, Mapping[str, Any]]]:
    """The functions with their names, which have to be ones that every format can write."""
    found = []
    for index, tool in enumerate(context.tools):
        name = tool["name"]
        if not _NAME.fullmatch(name):
            raise RequestError(
                "names beside a function that is strict have letters, digits, _, - and . alone",
                param=f"tools[{index}].function.name", value=name,
            )  # fmt: skip
        found.append((name, tool))
    return found


def schema_of(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments."""
    schema = (tool.get("parameters") or {}) if tool.get("strict") else {}
    if "grammar" in tool:  # of its one text
        (key,) = schema["properties"]
        schema = {**schema, "properties": {key: {"type": "string", "grammar": tool["grammar"]}}}
    return schema if "type" in schema or "$ref" in schema else {"type": "object", **schema}


def json_schema(schema: Any, name: str) -> Part:
    return {"type": "json_schema", "json_schema": schema, "name": f"The schema of {name}"}


def json_text(grammar: str, name: str) -> Part:
    return {"type": "json_text", "grammar": grammar, "name": f"The grammar of {name}"}


def json_arguments(name: str, tool: Mapping[str, Any]) -> Part:
    """Arguments as an object; of a function with a `grammar`, one text that keeps to it."""
    if "grammar" in tool:
        (key,) = tool["parameters"]["properties"]
        return sequence("{", SPACE, f'"{key}"', SPACE, ":", SPACE, json_text(tool["grammar"], name), SPACE, "}")
    return json_schema(schema_of(tool), name)


def json_call(context: ParserContext, key: str) -> Part:
    """`{"name": ..., KEY: {...}}`."""
    return sequence("{", SPACE, '"name"', behind_name_key(context, key))


def behind_name_key(context: ParserContext, key: str) -> Part:
    """The rest of such an object."""
    calls = [
        sequence(
            json.dumps(name, ensure_ascii=False), SPACE, ",", SPACE, f'"{key}"', SPACE, ":", SPACE,
            json_arguments(name, tool),
        )
        for name, tool in functions(context)
    ]  # fmt: skip
    return sequence(SPACE, ":", SPACE, either(calls), SPACE, "}")


def listed(call: Part, *, is_parallel: bool) -> Part:
    """Calls in brackets."""
    more = [many(sequence(SPACE, ",", SPACE, call))] if is_parallel else []
    return sequence("[", SPACE, call, *more, SPACE, "]")


# Arguments that are written apart.


class Refused(Exception):
    """A part of a schema that cannot be held: says which."""


def arguments_apart(
    name: str, tool: Mapping[str, Any], what: str, value: Callable[[str, Any, Mapping[str, Any]], Part]
) -> list[tuple[bool, Part]]:
    """Return for each argument, in the order of the schema, whether it has to be there, and its part.

    value: makes the part from key, schema and root.
    """
    root = schema_of(tool)
    more = sorted(root.keys() - _OF_OBJECTS)
    place = ""
    try:
        if root.get("type") != "object" or more:
            raise Refused(more[0] if more else "type")
        properties, required = root.get("properties") or {}, root.get("required") or []
        if not isinstance(properties, Mapping):
            place = " at /properties"
            raise Refused("it is not an object of schemas")
        if not isinstance(required, list) or not all(isinstance(key, str) for key in required):
            place = " at /required"
            raise Refused("it is not a list of names")
        definition_chars = sum(len(json.dumps(root[home])) for home in ("$defs", "definitions") if home in root)
        num_chars = definition_chars * sum(
            bool(_references(branch)) for one in properties.values() for branch in branches(one, root)
        )
        if num_chars > MAX_WRITTEN_CHARS:
            raise Refused(f"its definitions would be written with {num_chars} characters; at most {MAX_WRITTEN_CHARS}")
        found = []
        for key in dict.fromkeys([*properties, *required]):
            place = f" at /properties/{key}"
            if not _PLAIN.fullmatch(key):
                raise Refused("its name")
            found.append((key in required, value(key, properties.get(key, True), root)))
        return found
    except Refused as error:
        raise RequestError(
            f"The schema of {name}{place} cannot be enforced in the form of {what}: {error}", param="tools"
        ) from None
    except RecursionError:
        raise RequestError(f"The schema of {name}{place} is nested too deeply", param="tools") from None


def with_definitions(schema: Any, root: Mapping[str, Any]) -> Any:
    """A part of a schema that stands alone."""
    if not isinstance(schema, Mapping):
        return schema
    homes = {home: root[home] for home in ("$defs", "definitions") if home in root}
    references = set(_references({"": schema, **homes}))
    if any(not reference.startswith(("#/$defs/", "#/definitions/")) for reference in references):
        raise Refused("$ref")
    return {**schema, **homes} if references else schema


def _references(value: Any) -> list[str]:
    found: list[str] = []
    for one in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        found += _references(one)
    if isinstance(value, Mapping) and isinstance(value.get("$ref"), str):
        found.append(value["$ref"])
    return found


def branches(schema: Any, root: Mapping[str, Any]) -> list[Any]:
    """The schemas one of which a value has to keep, each of one type as far as it says; as written where that cannot be told."""
    return list(_branches(schema, root, set(), 0)) or [schema]


def _branches(schema: Any, root: Mapping[str, Any], seen: set[str], depth: int) -> Iterator[Any]:
    """seen: references that have been followed; what one leads to again is there already."""
    if not isinstance(schema, Mapping) or depth > MAX_REFERENCES:
        yield schema
        return
    asked = schema.keys() - NOTES
    if asked == {"$ref"} and str(schema["$ref"]).startswith(("#/$defs/", "#/definitions/")):
        if schema["$ref"] in seen:
            return
        seen.add(schema["$ref"])
        target: Any = root
        for step in schema["$ref"][2:].split("/"):
            target = target.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
        yield from [schema] if target is None else _branches(target, root, seen, depth + 1)
    elif asked == {"anyOf"} and isinstance(schema["anyOf"], list):
        for one in schema["anyOf"]:
            yield from _branches(one, root, seen, depth + 1)
    elif isinstance(declared := schema.get("type"), list) and "enum" not in schema and "const" not in schema:
        yield from (_of_type(schema, one) for one in declared)
    else:
        yield schema


_OF_TEXTS = {"minLength", "maxLength", "pattern", "format"}
_WITHOUT_KEYWORDS = ("null", "boolean")


def _of_type(schema: Mapping[str, Any], name: Any) -> dict[str, Any]:
    """A schema of several types as one of them has it."""
    if name in _WITHOUT_KEYWORDS:
        return {"type": name}
    return {key: one for key, one in schema.items() if name == "string" or key not in _OF_TEXTS} | {"type": name}


def is_free(schema: Any) -> bool:
    """Return whether every value of the schema's type will do."""
    return schema is True or (isinstance(schema, Mapping) and not schema.keys() - NOTES - {"type"})


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """As parsers take them."""
    return frozenset(schema_types(schema, root)) or ANY_TYPE


class Tags:
    """Arguments in tags, whose texts stand for values as `from_text` reads them.

    before, end: around the text. closers: where parsers end it too. text_before: the tag before what is a text, where tags say that (DSML);
    else the schema alone says it. edge: a line break at both ends that does not belong to the text.
    """

    def __init__(
        self, before: str, end: str, closers: Collection[str], *, text_before: str | None = None, edge: str = ""
    ) -> None:
        self._before, self._end, self._closers, self._edge = before, end, list(closers), edge
        self._text_before = text_before

    def value(self, schema: Any, root: Mapping[str, Any], name: str) -> Part:
        """One argument's text and its end."""
        found = branches(schema, root)
        types = types_of(schema, root) if isinstance(schema, Mapping) else ANY_TYPE
        parts: list[Part] = []
        has_text = False
        for one in found:
            if isinstance(one, Mapping) and "grammar" in one:
                return self._held(one["grammar"], name)
            made, is_text = self._branch(one, root, types, name)
            parts += made
            has_text = has_text or is_text
        if has_text and self._text_before is None and not all(map(is_free, found)):
            others = [one for one in found if isinstance(one, Mapping) and one.get("type") != "string"]
            if not all(map(is_free, others)) or len(found) - len(others) > 1:
                raise Refused("a text, or a value with a schema of its own")
        return either(parts)

    def _branch(
        self, schema: Any, root: Mapping[str, Any], types: frozenset[str], name: str
    ) -> tuple[list[Part], bool]:
        """The ways to write values of one schema; whether any text is one."""
        schema = {} if schema is True else schema
        if not isinstance(schema, Mapping):
            raise Refused("false")
        if not schema.keys() - NOTES:
            parts = [self._text({})]
            if self._text_before is not None:
                parts.append(self._json({"type": sorted(ANY_TYPE - {"string"})}, name))
            return parts, True
        if "enum" in schema or "const" in schema:
            return [self._literal(one, types) for one in _allowed(schema)], False
        declared = schema.get("type")
        if declared == "string":
            return [self._text(schema)], True
        if not isinstance(declared, str):
            raise Refused(next(iter(sorted(schema.keys() - NOTES))) + " without a type")
        return [self._json(with_definitions(schema, root), name)], False

    def _json(self, schema: Any, name: str) -> Part:
        return sequence(self._before + self._edge, json_schema(schema, name), self._edge + self._end)

    def _literal(self, value: Any, types: frozenset[str]) -> Part:
        written = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        is_text = isinstance(value, str)
        if self._text_before is None:
            read = from_text(written, types) if types - {"string"} else written
        else:
            read = written if is_text else from_text(written, ANY_TYPE)
        is_cut = any(closer in written for closer in (self._end, *self._closers))
        if read != value or type(read) is not type(value) or is_cut:
            raise Refused(f"the value {written[:100]!r}, which would be read as another")
        before = self._text_before if is_text and self._text_before is not None else self._before
        return text(f"{before}{self._edge}{written}{self._edge}{self._end}")

    def _held(self, grammar: str, name: str) -> Part:
        """A text that keeps to a grammar."""
        before = self._before if self._text_before is None else self._text_before
        held = {
            "type": "lark_text", "grammar": grammar, "name": f"The grammar of {name}", "end": self._edge + self._end,
            "marker": self._end, "excludes": self._closers,
        }  # fmt: skip
        return sequence(before + self._edge, held)

    def _text(self, schema: Mapping[str, Any]) -> Part:
        more = sorted(schema.keys() - NOTES - {"type", "minLength", "maxLength"})
        if more:
            raise Refused(f"{more[0]} of a text")
        before = self._before if self._text_before is None else self._text_before
        raw = {
            "type": "raw_text", "end": self._edge + self._end, "marker": self._end, "excludes": self._closers,
            "min_length": schema.get("minLength"), "max_length": schema.get("maxLength"),
        }  # fmt: skip
        return sequence(before + self._edge, raw)


def _allowed(schema: Mapping[str, Any]) -> list[Any]:
    """The values that an enum or a const names."""
    if schema.keys() - NOTES - {"enum", "const", "type"}:
        raise Refused("enum with other keywords")
    values = schema["enum"] if "enum" in schema else [schema["const"]]
    if not isinstance(values, list):
        raise Refused("enum without a list of values")
    declared = schema.get("type", list(ANY_TYPE))
    kinds = [declared] if isinstance(declared, str) else declared
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise Refused("enum with another type")
    types = set(kinds)
    types |= {"integer"} if "number" in types else set()
    found = [one for one in values if type_of(one) in types and ("const" not in schema or one == schema["const"])]
    if not found:
        raise Refused("enum without a value of its type")
    return found
