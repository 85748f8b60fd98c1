"""Tools of a chat: what a request may say of them, and the constraint that makes a model call one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from pelton import limits
from pelton.errors import RequestError
from pelton.sampling_params import StructuredOutputsParams


class FunctionDefinition(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of an object."""
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    function: FunctionDefinition
    type: Literal["function"] = "function"


class FunctionName(msgspec.Struct, kw_only=True):
    name: str


class NamedTool(msgspec.Struct, kw_only=True):
    function: FunctionName
    type: Literal["function"] = "function"


ToolChoice = Literal["none", "auto", "required"] | NamedTool


def check_tools(tools: Sequence[Tool] | None, choice: ToolChoice | None) -> None:
    """Raises `RequestError` that names the field."""
    if tools is None:
        if choice is not None and choice != "none":
            raise RequestError("tool_choice needs tools", param="tool_choice")
        return
    if not tools:
        raise RequestError("tools is empty; give at least one tool, or leave it out.", param="tools")
    if len(tools) > limits.MAX_TOOLS:
        raise RequestError(f"tools has {len(tools)} entries; at most {limits.MAX_TOOLS}", param="tools")
    names: set[str] = set()
    for index, tool in enumerate(tools):
        _check_function(tool.function, f"tools[{index}].function")
        if tool.function.name in names:
            raise RequestError(
                "tools has this name twice", param=f"tools[{index}].function.name", value=tool.function.name
            )
        names.add(tool.function.name)
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise RequestError(
            "tool_choice names a tool that is not in tools", param="tool_choice", value=choice.function.name[:200]
        )


def _check_function(function: FunctionDefinition, place: str) -> None:
    if not 1 <= len(function.name) <= limits.MAX_TOOL_NAME_CHARS:
        raise RequestError(
            f"name has {len(function.name)} characters; give 1 to {limits.MAX_TOOL_NAME_CHARS}", param=f"{place}.name"
        )
    try:
        size = len(msgspec.json.encode(function))
    except RecursionError:
        raise RequestError("parameters are nested too deeply", param=f"{place}.parameters") from None
    if size > limits.MAX_TOOL_BYTES:
        raise RequestError(
            f"the function has {size} bytes of JSON; at most {limits.MAX_TOOL_BYTES}", param=f"{place}.parameters"
        )


def functions(tools: Sequence[Tool] | None) -> list[dict[str, Any]]:
    """As parsers take them."""
    return [msgspec.to_builtins(tool.function) for tool in tools or ()]


def template_tools(tools: Sequence[Tool] | None) -> list[dict[str, Any]]:
    """As chat templates take them."""
    return [{"type": "function", "function": function} for function in functions(tools)]


def constraint(
    tools: Sequence[Tool], choice: ToolChoice | None, *, is_parallel: bool
) -> StructuredOutputsParams | None:
    """Return what a forced call's text has to be: the arguments of a named tool, or a list of calls. None: nothing is forced.

    No whitespace: a model that is made to write JSON may write nothing else for long.
    """
    if isinstance(choice, NamedTool):
        function = next(tool.function for tool in tools if tool.function.name == choice.function.name)
        return StructuredOutputsParams(json=function.parameters or {"type": "object"}, disable_any_whitespace=True)
    if choice != "required":
        return None
    definitions: dict[str, Any] = {}
    calls = []
    for index, tool in enumerate(tools):
        schema = _with_own_definitions(tool.function.parameters or {"type": "object"}, f"tool{index}_", definitions)
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"type": "string", "enum": [tool.function.name]}, "parameters": schema},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    most = {} if is_parallel else {"maxItems": 1}
    found: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}, **most}
    schema = found | ({"$defs": definitions} if definitions else {})
    return StructuredOutputsParams(json=schema, disable_any_whitespace=True)


def _with_own_definitions(schema: Mapping[str, Any], prefix: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return a schema whose definitions lie in `definitions`, under names of its own: references begin at the root.

    One that refers to itself, or to a part of itself that is no definition, lies there as a whole.
    """
    itself, refers_to_itself = prefix.rstrip("_"), False
    moved = {}
    for home in ("$defs", "definitions"):
        for name in schema.get(home) or ():
            moved[f"#/{home}/{name}"] = f"#/$defs/{prefix}{name}"

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
