"""Triton's compiler: it works when a kernel is first launched. What it compiles while steps wait is said; and the kernels of
steps that are to come are compiled together, without running them.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import triton
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton import knobs
from triton.runtime.jit import JITCallable

from pelton.logging import get_logger
from pelton.platform.compiling import compile_only

logger = get_logger(__name__)

_MOST_THREADS = 16  # each has a compiler in memory, and they share Python's lock
_UNFILLED = (torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty, Tensor.new_empty_strided)


class _Filled(TorchFunctionMode):
    """Memory that is taken comes as zeros. Kernels that are not launched leave it so, and zero is an index into anything."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.zero_() if func in _UNFILLED else result


class _Ahead(triton.AsyncCompileMode):  # type: ignore[misc]
    """Kernels are loaded as well, and the C functions that launch them compiled."""

    def submit(self, key: Any, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None]) -> Any:
        known = self.future_kernels.get(key)
        if known is not None and known.future.done():
            known.result(ignore_errors=True)  # from now on the kernel is found without a look at its source

        def compile_and_load() -> Any:
            kernel = compile_fn()
            with contextlib.suppress(Exception):  # a launch tries again, and says why
                _ = kernel.run
            return kernel

        return super().submit(key, compile_and_load, finalize_fn)


def compile_ahead(run: Callable[[], None], local_rank: int = 0) -> int:
    """See `Platform.compile_ahead`; what is compiled later is said in the log. A kernel that cannot be compiled is left out: its
    launch says why."""
    compiled: list[str] = []

    def note(*, src: Any, cache_hit: bool, **rest: Any) -> None:
        if not cache_hit:
            compiled.append(src.name)

    _hash_functions()
    listener = knobs.compilation.listener
    is_compile_only = compile_only.set(True)
    try:
        knobs.compilation.listener = note
        with (
            ThreadPoolExecutor(_num_threads(), initializer=_select, initargs=(local_rank,)) as pool,
            _Ahead(pool, ignore_errors=True),
            _Filled(),
        ):
            run()
    except Exception as error:
        logger.info(
            "Not all kernels could be compiled ahead (%s: %s); steps compile them.", type(error).__name__, error
        )
    finally:
        knobs.compilation.listener = listener or _tell
        compile_only.reset(is_compile_only)
    logger.debug("compiled ahead: %s", ", ".join(compiled) or "nothing")
    return len(compiled)


def _hash_functions() -> None:
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


def _tell(*, src: Any, times: Any, cache_hit: bool, **rest: Any) -> None:
    """A line for each kernel that a step has waited for."""
    if not cache_hit:
        logger.info("compiled %s: %.1f s", src.name, times.total / 1e6)


def _select(local_rank: int) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)


def _num_threads() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, _MOST_THREADS)
