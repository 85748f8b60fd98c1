"""Kernels that are compiled when they are first launched, and steps that are run to have them compiled."""

from __future__ import annotations

import inspect
from contextvars import ContextVar
from types import CodeType, ModuleType
from typing import Any

compile_only: ContextVar[bool] = ContextVar("pelton_compile_only", default=False)
"""Set by a platform's `compile_ahead` in the worker's thread: who would launch a kernel has it compiled instead. A kernel that is
launched all the same finds a step of nothing but padding, in memory that holds zeros where another one left its result out."""


def launch(kernel: Any, grid: tuple[int, ...], /, *args: Any, **options: Any) -> Any:
    """`kernel[grid](*args, **options)`, and what it returns. Where kernels are only compiled: None."""
    hash_callees_first(kernel)
    if compile_only.get():
        kernel.warmup(*args, grid=grid, **options)
        return None
    return kernel[grid](*args, **options)


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


def _callees(function: Any) -> list[Any]:
    """The Triton functions that its code names, by themselves or in a module. Looking for them computes no key."""
    names = _names(function.fn.__code__)
    known = {**function.__globals__, **inspect.getclosurevars(function.fn).nonlocals}
    found = [known[name] for name in names if name in known]
    modules = {id(value): value for value in found if isinstance(value, ModuleType)}.values()
    found += [getattr(module, name) for module in modules for name in names if hasattr(module, name)]
    return [value for value in found if hasattr(type(value), "cache_key")]


def _names(code: CodeType) -> list[str]:
    """Global names, attributes and names of enclosing functions, those of functions inside too, in the order of the source."""
    inner = (name for constant in code.co_consts if isinstance(constant, CodeType) for name in _names(constant))
    return [*code.co_names, *code.co_freevars, *inner]
