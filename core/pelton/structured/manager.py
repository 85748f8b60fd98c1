"""Compile constraints on a thread pool, off the step loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from pelton.sampling_params import StructuredOutputsParams
from pelton.structured.interface import Grammar, StructuredOutputBackend


class GrammarSource(Protocol):
    """Where the scheduler gets grammars from."""

    def submit(self, params: StructuredOutputsParams) -> Future[Grammar]:
        """Begin to compile; returns at once. The future raises `RequestError` for a constraint that is not valid."""

    def take_compile_times(self) -> list[float]:
        """Seconds of each grammar compiled since the last call."""


class GrammarManager:
    """`GrammarSource` over one structured-output backend, made with the first constraint, on a thread of the pool too.

    A grammar has state, so each request gets its own.
    """

    def __init__(self, make_backend: Callable[[], StructuredOutputBackend], *, num_threads: int = 2) -> None:
        self._make_backend = make_backend
        self._backend: StructuredOutputBackend | None = None
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="pelton-grammar")
        self._compile_s: list[float] = []

    def submit(self, params: StructuredOutputsParams) -> Future[Grammar]:
        if (known := self._backend.known(params) if self._backend else None) is None:
            return self._pool.submit(self._compile, params)
        future = Future[Grammar]()
        future.set_result(known)
        return future

    def take_compile_times(self) -> list[float]:
        times, self._compile_s = self._compile_s, []
        return times

    def shutdown(self) -> None:
        """Drop what waits; a compilation that runs ends on its own."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _compile(self, params: StructuredOutputsParams) -> Grammar:
        with self._lock:
            if self._backend is None:
                self._backend = self._make_backend()
        started = time.monotonic()
        grammar = self._backend.compile(params)
        self._compile_s.append(time.monotonic() - started)
        return grammar
