"""The constraint that makes a model call a tool: `tool_choice` "required", or one that is named."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pelton.errors import RequestError
from pelton.sampling_params import StructuredOutputsParams
from pelton_plugins.server.custom_tools import ARGUMENT, GrammarDefinition
from pelton_plugins.server.tools import Offer, Tool


def constraint(offer: Offer, *, is_parallel: bool) -> StructuredOutputsParams | None:
    """Return what a forced call's text has to be: the arguments of a named tool, or a list of calls. None: nothing is forced.

    The text of a named tool whose input keeps to a grammar is that input.
    """
    if offer.named is not None:
        if (grammar := grammar_of(offer.named)) is not None:
            if grammar.syntax == "lark":
                return StructuredOutputsParams(grammar=grammar.definition)
            return StructuredOutputsParams(regex=grammar.definition)
        (function,) = Offer(tools=[offer.named]).functions()
        return StructuredOutputsParams(json=_parameters(function), **_TIGHT)
    if offer.kind != "required":
        return None
    functions = offer.functions()
    if any("grammar" in function for function in functions):
        return StructuredOutputsParams(structural_tag=_tag(functions, is_parallel), **_TIGHT)
    definitions: dict[str, Any] = {}
    calls = []
    for index, function in enumerate(functions):
        schema = _with_own_definitions(function["name"], _parameters(function), f"tool{index}_", definitions)
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"type": "string", "enum": [function["name"]]}, "parameters": schema},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    most = {} if is_parallel else {"maxItems": 1}
    found: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}, **most}
    schema = found | ({"$defs": definitions} if definitions else {})
    return StructuredOutputsParams(json=schema, **_TIGHT)


_TIGHT: dict[str, Any] = {"disable_any_whitespace": True, "disable_additional_properties": True}
"""A model that is made to write JSON may write whitespace, or arguments that nobody named, to the end."""
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


def _parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of the arguments; a function without parameters has none."""
    found: dict[str, Any] = function.get("parameters") or _NO_ARGUMENTS
    return found


def grammar_of(tool: Tool) -> GrammarDefinition | None:
    return tool.custom.grammar if tool.type == "custom" and tool.custom is not None else None


def _tag(functions: Sequence[Mapping[str, Any]], is_parallel: bool) -> dict[str, Any]:
    """The list of calls where the input of one is Lark's, which no JSON schema says."""

    def text(value: str) -> dict[str, Any]:
        return {"type": "const_string", "value": value}

    def sequence(*parts: dict[str, Any]) -> dict[str, Any]:
        return {"type": "sequence", "elements": list(parts)}

    def arguments(function: Mapping[str, Any]) -> dict[str, Any]:
        name = f"The schema of {function['name']}"
        if "grammar" in function:
            held = {"type": "json_text", "grammar": function["grammar"], "name": f"The grammar of {function['name']}"}
            return sequence(text(f'{{"{ARGUMENT}":'), held, text("}"))
        return {"type": "json_schema", "json_schema": _parameters(function), "name": name}

    calls = [
        sequence(
            text(f'{{"name":{json.dumps(function["name"], ensure_ascii=False)},"parameters":'),
            arguments(function),
            text("}"),
        )
        for function in functions
    ]
    call = {"type": "or", "elements": calls}
    more = [{"type": "star", "content": sequence(text(","), call)}] if is_parallel else []
    return {"format": sequence(text("["), call, *more, text("]"))}


def _with_own_definitions(
    function: str, schema: Mapping[str, Any], prefix: str, definitions: dict[str, Any]
) -> dict[str, Any]:
    """Return a schema whose definitions lie in `definitions`, under names of its own: references begin at the root.

    One that refers to itself, or to a part of itself that is no definition, lies there as a whole.
    """
    itself, refers_to_itself = prefix.rstrip("_"), False
    moved = {}
    for home in ("$defs", "definitions"):
        if not isinstance(schema.get(home) or {}, Mapping):
            raise RequestError(
                f"The parameters of {function} have {home} that are not an object of schemas", param="tools"
            )
        for key in schema.get(home) or ():
            moved[f"#/{home}/{key}"] = f"#/$defs/{prefix}{key}"

    def walk(value: Any) -> Any:
        nonlocal refers_to_itself
        if isinstance(value, dict):
            found = {key: walk(one) for key, one in value.items()}
            reference = value.get("$ref")
            if isinstance(reference, str) and reference.startswith("#"):
                for old, new in moved.items():
                    if reference == old or reference.startswith(old + "/"):
                        found["$ref"] = new + reference[len(old) :]
                        break
                else:
                    found["$ref"] = f"#/$defs/{itself}{reference[1:]}"
                    refers_to_itself = True
            return found
        return [walk(one) for one in value] if isinstance(value, list) else value

    try:
        walked: dict[str, Any] = walk(dict(schema))
    except RecursionError:
        raise RequestError("parameters are nested too deeply", param="tools") from None
    for home in ("$defs", "definitions"):
        own = walked.pop(home, None)
        for name, definition in (own or {}).items():
            definitions[prefix + name] = definition
    if refers_to_itself:
        definitions[itself] = walked
        return {"$ref": f"#/$defs/{itself}"}
    return walked
