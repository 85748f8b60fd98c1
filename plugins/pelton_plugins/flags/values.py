"""Text of a command line as a value of a setting's type, and what these types are called in help and errors."""

from __future__ import annotations

import enum
import json
import re
import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin

_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def alternatives(hint: Any) -> list[Any]:
    """The members of a union in the order in which text is tried as one of them: a name among choices first (`none` may be
    one), text last since it takes everything."""
    if get_origin(hint) in (Union, types.UnionType):
        return sorted(get_args(hint), key=lambda kind: (kind is str, not _is_choice(kind), kind is not type(None)))
    return [hint]


def _is_choice(kind: Any) -> bool:
    return get_origin(kind) is Literal or (isinstance(kind, type) and issubclass(kind, enum.Enum))


def list_item(hint: Any) -> Any:
    for kind in alternatives(hint):
        if get_origin(kind) is list:
            return get_args(kind)[0]
    return str


def read_as(text: str, kind: Any) -> Any:
    """Text as one type. Raises `ValueError`."""
    if kind is type(None):
        if text.lower() in ("none", "null"):
            return None
        raise ValueError(text)
    if kind is str:
        return text
    if kind is bool:
        return _read_bool(text)
    if kind is int:
        return _read_int(text)
    if kind is float:
        return float(text)
    if kind is Any:
        return read_any(text)
    if get_origin(kind) is Literal:
        return _read_choice(text, {str(choice): choice for choice in get_args(kind)})
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _read_choice(text, {str(member.value): member for member in kind})
    found = json.loads(text)
    wanted = list if get_origin(kind) is list else dict
    if not isinstance(found, wanted):
        raise ValueError(text)
    return found


def _read_bool(text: str) -> bool:
    if text.lower() in ("true", "1", "yes", "on"):
        return True
    if text.lower() in ("false", "0", "no", "off"):
        return False
    raise ValueError(text)


def _read_int(text: str) -> int:
    """A whole number; 8k is 8,000 and 8K is 8,192."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT])", text)
    if match is None:
        return int(text)
    value = float(match[1]) * _SUFFIXES[match[2]]
    if value != int(value):
        raise ValueError(text)
    return int(value)


def _read_choice(text: str, choices: Mapping[str, Any]) -> Any:
    for name, value in choices.items():
        if name.lower() == text.lower():
            return value
    raise ValueError(text)


def read_any(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def kind_metavar(kind: Any) -> str:
    if get_origin(kind) is list:
        return f"{kind_metavar((get_args(kind) or (str,))[0])} ..."
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return "|".join(str(member.value) for member in kind)
    return {int: "INT", float: "NUMBER", str: "TEXT", bool: "BOOL"}.get(kind, "JSON")


def kind_name(kind: Any) -> str:
    if get_origin(kind) is list:
        return "a list"
    if _is_choice(kind):
        return "one of " + kind_metavar(kind).replace("|", ", ")
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}.get(kind, "a JSON object")
