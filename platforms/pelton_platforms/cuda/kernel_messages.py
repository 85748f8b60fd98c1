"""A kernel with the types and constants that it is compiled for, as JSON for another process: functions go by their names, and the
other process imports their modules."""

from __future__ import annotations

import importlib
import json
import operator
from collections.abc import Callable
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.language import constexpr, dtype
from triton.runtime.jit import JITCallable

_SOURCES = {source.__name__: source for source in (ASTSource, GluonASTSource)}


def encode_kernel(compile_fn: Callable[[], Any]) -> bytes | None:
    """The work of the closure that Triton 3.6's `JITFunction` hands to `AsyncCompileMode.submit`; None where it cannot be sent."""
    cells = dict(zip(compile_fn.__code__.co_freevars, compile_fn.__closure__ or (), strict=True))
    try:
        src, target, options = (cells[name].cell_contents for name in ("src", "target", "options"))
        if _SOURCES[type(src).__name__] is not type(src):
            return None
        parts = (src.fn, src.signature, src.constants, src.attrs, vars(target), vars(options))
        return json.dumps([type(src).__name__, *map(_encode, parts)]).encode()
    except (
        AttributeError,
        KeyError,
        TypeError,
    ):  # another Triton, or a constant or function that stays in this process
        return None


def decode_kernel(message: bytes) -> tuple[Any, Any, dict[str, Any]]:
    """The source, the target and the options to compile with."""
    kind, *parts = json.loads(message)
    function, signature, constants, attributes, target, options = map(_decode, parts)
    return _SOURCES[kind](function, signature, constants, attributes), GPUTarget(**target), options


def _encode(value: Any) -> Any:
    """Lists with a tag in front, and what JSON has itself."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in (tuple, list):
        return [type(value).__name__, *map(_encode, value)]
    if type(value) is dict:
        return ["dict", *([_encode(key), _encode(item)] for key, item in value.items())]
    if isinstance(value, JITCallable):
        module, name = value.fn.__module__, value.fn.__qualname__
        if module != "__main__" and _function(module, name) is value:
            return ["function", module, name]
    if type(value) is dtype:
        return ["dtype", value.name]
    if type(value) is constexpr:
        return ["constexpr", _encode(value.value)]
    raise TypeError(f"{value!r} cannot be sent")


def _decode(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    tag, *items = value
    if tag == "tuple":
        return tuple(map(_decode, items))
    if tag == "list":
        return [_decode(item) for item in items]
    if tag == "dict":
        return {_decode(key): _decode(item) for key, item in items}
    if tag == "function":
        return _function(*items)
    return dtype(*items) if tag == "dtype" else constexpr(_decode(*items))


def _function(module: str, name: str) -> Any:
    return operator.attrgetter(name)(importlib.import_module(module))
