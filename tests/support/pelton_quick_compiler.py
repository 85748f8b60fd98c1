"""Triton's front end (3.6) without what it repeats: for programs that compile many kernels. What it makes of a kernel stays the same.

For each node of a function's tree it filters warnings that Python 3.8 gave, for each call it looks at the signature of a built-in again,
for each call of a device function it parses that again, for each value it makes a tuple of its sizes, and for each sum of integers it
computes another one in 64 bits for an assertion that is off.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import math
from types import SimpleNamespace
from typing import Any

import triton.language as tl
from triton.compiler import code_generator
from triton.language.semantic import TritonSemantic
from triton.runtime.jit import JITCallable


def quicken() -> None:
    """Once a process, before it compiles."""
    nothing = contextlib.nullcontext()
    code_generator.warnings = SimpleNamespace(catch_warnings=lambda: nothing, simplefilter=lambda *given: None)
    signature = functools.lru_cache(maxsize=None)(inspect.signature)

    def known_signature(function: Any) -> inspect.Signature:
        return (
            signature(getattr(function, "__func__", function))
            if inspect.isfunction(function)
            else inspect.signature(function)
        )

    code_generator.inspect = SimpleNamespace(signature=known_signature, getcallargs=inspect.getcallargs)
    parse = JITCallable.parse
    trees: dict[int, tuple[Any, ast.Module]] = {}

    def parse_once(self: Any) -> ast.Module:
        if id(self) not in trees:
            trees[id(self)] = self, parse(self)
        return trees[id(self)][1]

    JITCallable.parse = parse_once
    TritonSemantic.binary_op_sanitize_overflow_impl = lambda self, *given: None
    sizes: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def init(self: Any, handle: Any, type: Any) -> None:
        shape = tuple(type.shape) if type.is_block() else ()
        if shape not in sizes:
            sizes[shape] = tl.constexpr(math.prod(shape)), tl.tuple([tl.constexpr(size) for size in shape])
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = sizes[shape]

    tl.tensor.__init__ = init
