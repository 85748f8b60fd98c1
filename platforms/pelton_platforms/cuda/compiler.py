"""Triton's compiler: it works when a kernel is first launched. What it compiles while steps wait is said; and the kernels of
steps that are to come are compiled together, without running them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton import knobs
from triton.runtime._async_compile import FutureKernel

from pelton.logging import get_logger
from pelton.platform.compiling import compile_only
from pelton_platforms.cuda.compile_client import COMPILED, FAILED, CompileServer, num_compilers
from pelton_platforms.cuda.kernel_messages import encode_kernel

logger = get_logger(__name__)

_LOADING = threading.Lock()
"""Of the C function that launches a kernel, where several threads load kernels: Python has one module for all such functions, and
Triton 3.6 reads the function from it after another thread may have put its own there."""
_UNFILLED = (torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty, Tensor.new_empty_strided)


class _Filled(TorchFunctionMode):
    """Memory that is taken comes as zeros. Kernels that are not launched leave it so, and zero is an index into anything."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.zero_() if func in _UNFILLED else result


class _Ahead(triton.AsyncCompileMode):  # type: ignore[misc]
    """Compile ahead, load the kernels and compile the C functions that launch them. Leaving the context waits for all."""

    def __init__(self, threads: Executor, server: CompileServer | None, compiled: list[str]) -> None:
        super().__init__(threads, ignore_errors=True)
        self._server, self._compiled = server, compiled

    def submit(self, key: Any, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None]) -> Any:
        known = self.future_kernels.get(key)
        if known is not None and known.future.done():
            known.result(ignore_errors=True)  # from now on the kernel is found without a look at its source
        if known is not None:
            return known
        message = None if self._server is None else encode_kernel(compile_fn)
        return super().submit(key, partial(self._compile, compile_fn, message), finalize_fn)

    def _compile(self, compile_fn: Callable[[], Any], message: bytes | None) -> Any:
        answer = FAILED if self._server is None or message is None else self._server.compile(message)
        kernel = compile_fn()  # found where a process has compiled it
        if answer == COMPILED:
            self._compiled.append(kernel.name)
        with contextlib.suppress(Exception), _LOADING:  # a launch tries again, and says why
            _ = kernel.run
        return kernel


class _Soon(_Ahead):
    """Compile in the background: only the launch of a kernel that is not ready waits for it."""

    def submit(self, key: Any, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None]) -> Any:
        message = encode_kernel(compile_fn)
        if message is None:  # left to `_Ahead`
            return None
        known = self.future_kernels.get(key)
        future = self.executor.submit(self._compile, compile_fn, message) if known is None else known.future
        kernel = self.future_kernels[key] = FutureKernel(finalize_fn, future)
        finalize_fn(kernel)  # a launch finds it, and waits for it
        return kernel


class FirstStart:
    """Processes that compile kernels, and threads that wait for them and load what they have compiled: from `compile_soon` until
    `close`."""

    def __init__(self, server: CompileServer, local_rank: int) -> None:
        self.server = server
        self.compiled: list[str] = []
        # More than processes: while some load a kernel, and compile the function that launches it, no process waits.
        num_threads = server.num_processes * 3 // 2
        self.threads = ThreadPoolExecutor(num_threads, initializer=_select, initargs=(local_rank,))
        self._kernels: list[Any] = []

    def compile_soon(self, run: Callable[[], None]) -> None:
        """See `Platform.compile_soon`."""
        mode = _Soon(self.threads, self.server, self.compiled)
        try:
            with _compiling_only(), mode:
                run()
        except Exception:  # said by `compile_ahead`
            logger.debug("Not all steps could be gone through early", exc_info=True)
        self._kernels += mode.future_kernels.values()

    def wait(self) -> None:
        for kernel in self._kernels:
            kernel.result(ignore_errors=True)
        self._kernels.clear()

    def close(self) -> None:
        self.wait()
        self.threads.shutdown()
        self.server.close()


def compile_ahead(run: Callable[[], None], local_rank: int = 0, first_start: FirstStart | None = None) -> int:
    """See `Platform.compile_ahead`; what is compiled later is said in the log. A kernel that cannot be compiled is left out: its
    launch says why. Without processes, threads compile."""
    compiled: list[str] = [] if first_start is None else first_start.compiled

    def note(*, src: Any, cache_hit: bool, **rest: Any) -> None:
        if not cache_hit:
            compiled.append(src.name)

    listener = knobs.compilation.listener
    server = None if first_start is None else first_start.server
    try:
        knobs.compilation.listener = note
        with (
            ThreadPoolExecutor(num_compilers(), initializer=_select, initargs=(local_rank,)) as threads,
            _Ahead(threads, server, compiled),
            _compiling_only(),
        ):
            run()
        if first_start is not None:
            first_start.wait()
    except Exception as error:
        logger.warning(
            "Not all kernels could be compiled ahead (%s: %s). The first request of a kind waits for its kernels.",
            type(error).__name__, error,
        )  # fmt: skip
    finally:
        knobs.compilation.listener = listener or _tell
    logger.debug("compiled ahead: %s", ", ".join(compiled) or "nothing")
    return len(compiled)


@contextlib.contextmanager
def _compiling_only() -> Iterator[None]:
    is_compile_only = compile_only.set(True)
    try:
        with _Filled():
            yield
    finally:
        compile_only.reset(is_compile_only)


def _tell(*, src: Any, times: Any, cache_hit: bool, **rest: Any) -> None:
    """A line for each kernel that a step has waited for."""
    if not cache_hit:
        logger.info("compiled %s: %.1f s", src.name, times.total / 1e6)


def _select(local_rank: int) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
