"""Tools of a chat: what a request may say of them, and which of them a model may call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from pelton import limits
from pelton.errors import RequestError
from pelton_plugins.server.custom_tools import CustomDefinition, as_function, check_format


class FunctionDefinition(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of an object."""
    strict: bool | None = None


ToolType = Literal["function", "custom"]


class Tool(msgspec.Struct, kw_only=True):
    """A function, or a tool that takes a text, by its `type`: the other one of the definitions is not read."""

    type: ToolType = "function"
    function: FunctionDefinition | None = None
    custom: CustomDefinition | None = None

    @property
    def definition(self) -> FunctionDefinition | CustomDefinition:
        found = self.custom if self.type == "custom" else self.function
        assert found is not None  # `check_tools` has seen to it
        return found

    @property
    def name(self) -> str:
        return self.definition.name


class ToolName(msgspec.Struct, kw_only=True):
    name: str


class ToolReference(msgspec.Struct, kw_only=True):
    type: ToolType = "function"
    function: ToolName | None = None
    custom: ToolName | None = None


class AllowedTools(msgspec.Struct, kw_only=True):
    mode: Literal["auto", "required"]
    tools: list[ToolReference]


class ToolSelection(msgspec.Struct, kw_only=True):
    """One tool that has to be called; or, of type `allowed_tools`, some of the tools, and whether one has to."""

    type: Literal["function", "custom", "allowed_tools"] = "function"
    function: ToolName | None = None
    custom: ToolName | None = None
    allowed_tools: AllowedTools | None = None

    @classmethod
    def of_function(cls, name: str) -> ToolSelection:
        return cls(function=ToolName(name=name))


ToolChoice = Literal["none", "auto", "required"] | ToolSelection


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """The tools that a model may call, by `tools` and `tool_choice` together."""

    kind: Literal["none", "auto", "required", "named"] = "none"
    """A call of a named tool is forced, and so is one of any tool that is required."""
    tools: Sequence[Tool] = ()
    """The ones that the model is shown."""
    named: Tool | None = None
    is_part: bool = False
    """Some of the request's tools are not among them: calls of those are text."""

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool.name for tool in self.tools)

    def functions(self) -> list[dict[str, Any]]:
        """As parsers take them."""
        return [
            as_function(one) if isinstance(one := tool.definition, CustomDefinition) else msgspec.to_builtins(one)
            for tool in self.tools
        ]


def check_tools(tools: Sequence[Tool] | None, choice: ToolChoice | None = None) -> Offer:
    """Raises `RequestError` that names the field."""
    if tools is None:
        if choice is not None and choice != "none":
            raise RequestError("tool_choice needs tools", param="tool_choice")
        return Offer()
    if not tools:
        raise RequestError("tools is empty; give at least one tool, or leave it out.", param="tools")
    if len(tools) > limits.MAX_TOOLS:
        raise RequestError(f"tools has {len(tools)} entries; at most {limits.MAX_TOOLS}", param="tools")
    named: dict[str, Tool] = {}
    for index, tool in enumerate(tools):
        _check_tool(tool, f"tools[{index}]")
        if tool.name in named:
            raise RequestError("tools has this name twice", param=f"tools[{index}].{tool.type}.name", value=tool.name)
        named[tool.name] = tool
    if choice == "none":
        return Offer()
    if choice is None or isinstance(choice, str):
        return Offer(kind=choice or "auto", tools=tools)
    if choice.type != "allowed_tools":
        return Offer(kind="named", tools=tools, named=_find(named, choice, "tool_choice"))
    return _allowed(named, choice.allowed_tools)


def _allowed(named: dict[str, Tool], given: AllowedTools | None) -> Offer:
    if given is None or not given.tools:
        raise RequestError(
            "tool_choice of type allowed_tools needs allowed_tools with a mode and at least one tool",
            param="tool_choice.allowed_tools",
        )
    allowed = {
        id(_find(named, one, f"tool_choice.allowed_tools.tools[{index}]")) for index, one in enumerate(given.tools)
    }
    found = [tool for tool in named.values() if id(tool) in allowed]
    return Offer(kind=given.mode, tools=found, is_part=len(found) < len(named))


def _find(named: dict[str, Tool], choice: ToolReference | ToolSelection, place: str) -> Tool:
    name = choice.custom if choice.type == "custom" else choice.function
    if name is None:
        raise RequestError(f"{choice.type} is missing: give its name", param=f"{place}.{choice.type}")
    tool = named.get(name.name)
    if tool is None or tool.type != choice.type:
        raise RequestError("tool_choice names a tool that is not in tools", param=place, value=name.name[:200])
    return tool


def _check_tool(tool: Tool, place: str) -> None:
    place = f"{place}.{tool.type}"
    if (tool.custom if tool.type == "custom" else tool.function) is None:
        raise RequestError(f"{tool.type} is missing: give its name and more", param=place)
    definition = tool.definition
    is_custom = isinstance(definition, CustomDefinition)
    if not 1 <= len(definition.name) <= limits.MAX_TOOL_NAME_CHARS:
        raise RequestError(
            f"name has {len(definition.name)} characters; give 1 to {limits.MAX_TOOL_NAME_CHARS}", param=f"{place}.name"
        )
    large = f"{place}.{'format' if is_custom else 'parameters'}"
    try:
        size = len(msgspec.json.encode(definition))
    except RecursionError:
        raise RequestError("parameters are nested too deeply", param=large) from None
    if size > limits.MAX_TOOL_BYTES:
        what = "function" if tool.type == "function" else "tool"
        raise RequestError(f"the {what} has {size} bytes of JSON; at most {limits.MAX_TOOL_BYTES}", param=large)
    if isinstance(definition, CustomDefinition):
        check_format(definition.format, f"{place}.format")


def template_tools(tools: Iterable[Tool]) -> list[dict[str, Any]]:
    """As chat templates take them."""
    return [
        {
            "type": "function",
            "function": as_function(one, is_shown=True)
            if isinstance(one := tool.definition, CustomDefinition)
            else msgspec.to_builtins(one),
        }
        for tool in tools
    ]
