"""Calls and starts of several engines side by side, each on a thread of its own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_EXCEPTION, Future, wait
from typing import TypeVar

from pelton.engine.client import EngineClient
from pelton.errors import EngineDeadError

LOOK_S = 0.2

T = TypeVar("T")


def run_all(jobs: Sequence[Callable[[], T]]) -> list[Future[T]]:
    """Each on a thread of its own; waits for all."""
    if len(jobs) == 1:
        return [_done(jobs[0])]
    futures = [_begin(job) for job in jobs]
    wait(futures)
    return futures


def _done(job: Callable[[], T]) -> Future[T]:
    future: Future[T] = Future()
    try:
        future.set_result(job())
    except BaseException as error:
        future.set_exception(error)
    return future


def _begin(job: Callable[[], T]) -> Future[T]:
    """On a daemon thread, which does not keep the interpreter from ending."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(job())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="pelton-engine-call", daemon=True).start()
    return future


def start_all(
    starts: Sequence[Callable[[], EngineClient]],
    give_up: Callable[[], None] | None = None,
    check_open: Callable[[], None] | None = None,
) -> list[EngineClient]:
    """Start engines side by side. Raises the first error; engines that are ready by then, or later, are ended.

    give_up: called where one did not start, and the others are waited for then, so that none is left when the error is raised; without
    it that is at once. check_open: raises `EngineDeadError` once nobody wants them any more.
    """
    futures = [_begin(start) for start in starts]
    try:
        for future in _waited(futures, FIRST_EXCEPTION, check_open):
            future.result()
    except BaseException:
        if give_up is not None:
            give_up()
            with contextlib.suppress(EngineDeadError):
                _waited(futures, ALL_COMPLETED, check_open)
        for future in futures:
            future.add_done_callback(_end_unused)
        raise
    return [future.result() for future in futures]


def _waited(futures: Sequence[Future[T]], until: str, check_open: Callable[[], None] | None) -> set[Future[T]]:
    """Return those that are done then."""
    while True:
        done, left = wait(futures, None if check_open is None else LOOK_S, until)
        if not left or check_open is None or (until == FIRST_EXCEPTION and any(one.exception() for one in done)):
            return done
        check_open()


def _end_unused(future: Future[EngineClient]) -> None:
    if future.exception() is None:
        future.result().shutdown(0.0)
