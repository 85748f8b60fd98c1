"""Keys of compiled kernels that do not depend on what was launched before: every process finds what another one compiled."""

from __future__ import annotations

import sys
from typing import Any

from triton.runtime.jit import JITCallable


def hash_functions() -> None:
    """Those that are loaded, called ones before their callers. Triton 3.6 makes the key of a compiled kernel of its functions' global
    values, but leaves out those of a function that it has not hashed yet: the key would depend on what was launched before."""
    for _, module in sorted(list(sys.modules.items()), key=lambda item: (not item[0].startswith("triton"), item[0])):
        for value in list(getattr(module, "__dict__", {}).values()):
            if issubclass(type(value), JITCallable):  # not `isinstance`, which wakes up what others load lazily
                _hash_function(value, set())


def _hash_function(function: Any, callers: set[Any]) -> None:
    if function.hash is not None or id(function) in callers:
        return
    try:
        for name in function.fn.__code__.co_names:
            called = function.__globals__.get(name)
            if isinstance(called, JITCallable):
                _hash_function(called, callers | {id(function)})
        _ = function.cache_key
    except Exception:  # somebody's function that nobody may launch; a key that is half made is not kept
        function.hash = None
