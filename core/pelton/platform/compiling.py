"""Kernels that are compiled when they are first launched, and steps that are run to have them compiled."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from contextvars import ContextVar
from functools import reduce
from typing import Any

compile_only: ContextVar[bool] = ContextVar("pelton_compile_only", default=False)
"""Set by a platform's `compile_ahead` in the worker's thread: who would launch a kernel has it compiled instead. A kernel that is
launched all the same finds a step of nothing but padding, in memory that holds zeros where another one left its result out."""


def hash_callees_first(kernel: Any) -> None:
    """Have a Triton function's key not depend on what was launched before, so that every process finds what another compiled.

    Triton 3.6 makes the key of the global values of all functions that are called, but reads them before it hashes a function,
    which finds them out: those of a function that was not hashed yet would be left out. Call it before the first launch.
    """
    if getattr(kernel, "hash", "") is not None:  # hashed already, or interpreted
        return
    calling: set[int] = set()

    def visit(function: Any) -> None:
        if function.hash is None and id(function) not in calling:
            calling.add(id(function))
            for callee in _callees(function):
                visit(callee)
            _ = function.cache_key

    visit(kernel)


def _callees(function: Any) -> Iterator[Any]:
    """The Triton functions that its source names, by themselves or in a module."""
    known = {**function.__globals__, **inspect.getclosurevars(function.fn).nonlocals}
    for node in ast.walk(function.parse()):
        names = []
        while isinstance(node, ast.Attribute):
            names.append(node.attr)
            node = node.value
        if isinstance(node, ast.Name):
            value = reduce(lambda found, name: getattr(found, name, None), names[::-1], known.get(node.id))
            if hasattr(value, "cache_key") and hasattr(value, "parse"):
                yield value
