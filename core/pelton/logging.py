"""One logger, `pelton`, with concise lines on stderr; and phases: what takes long says so, and is timed.

    INFO 12:30:05 loading weights: 1.2 s

`setup` is called by programs (the command line, the engine process), never at import: a program that uses Pelton
as a library keeps its own logging.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import TextIO

ROOT = "pelton"
_PROGRESS_INTERVAL_TTY_S = 0.1
_PROGRESS_INTERVAL_LOG_S = 5.0


def get_logger(name: str = ROOT) -> logging.Logger:
    """The logger of a module (`get_logger(__name__)`), under the one that `setup` configures."""
    return logging.getLogger(name if name == ROOT or name.startswith(ROOT + ".") else f"{ROOT}.{name}")


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%H:%M:%S", time.localtime(record.created))
        process = "" if record.processName == "MainProcess" else f" [{record.processName}]"
        line = f"{record.levelname} {stamp}{process} {record.getMessage()}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Looks sys.stderr up at every line, so that a redirected stderr is honoured."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, value: TextIO) -> None:
        pass


def setup(level: str = "info") -> logging.Logger:
    """Send Pelton's log to stderr at `level`. Calling it again only changes the level."""
    logger = logging.getLogger(ROOT)
    logger.setLevel(level.upper())
    logger.propagate = False
    if not any(isinstance(handler, _StderrHandler) for handler in logger.handlers):
        handler = _StderrHandler()
        handler.setFormatter(_Formatter())
        logger.addHandler(handler)
    return logger


class Progress:
    """Progress of one phase: `advance(n)` as often as you like, it writes at most ten lines a second to a terminal, and one
    every five seconds to a log."""

    def __init__(self, name: str, total: float = 0.0, unit: str = "") -> None:
        self.name = name
        self.total = total
        self.unit = unit
        self.done = 0.0
        self._is_tty = sys.stderr.isatty() and get_logger().isEnabledFor(logging.INFO)
        self._next = time.monotonic() + (0.0 if self._is_tty else _PROGRESS_INTERVAL_LOG_S)

    def advance(self, amount: float = 1.0) -> None:
        self.done += amount
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + (_PROGRESS_INTERVAL_TTY_S if self._is_tty else _PROGRESS_INTERVAL_LOG_S)
        if self._is_tty:
            print(f"\r\x1b[K{self}", end="", file=sys.stderr, flush=True)
        else:
            get_logger().info("%s", self)

    def clear(self) -> None:
        """Take the terminal's progress line away."""
        if self._is_tty:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def __str__(self) -> str:
        if self.total > 0:
            return f"{self.name}: {min(self.done / self.total, 1.0):.0%} of {amount(self.total, self.unit)}"
        return f"{self.name}: {amount(self.done, self.unit)}"


@contextmanager
def phase(
    name: str, seconds: MutableMapping[str, float] | None = None, *, total: float = 0.0, unit: str = ""
) -> Iterator[Progress]:
    """A long phase of start-up: said when it begins, timed when it ends, `seconds[name]` set to what it took.

    with phase("load weights", report.phase_s, total=num_bytes, unit="B") as progress:
        progress.advance(len(part))
    """
    logger = get_logger()
    progress = Progress(name, total, unit)
    start = time.monotonic()
    logger.info("%s ...", name)
    try:
        yield progress
    except BaseException:
        progress.clear()
        logger.info("%s: failed after %.1f s", name, time.monotonic() - start)
        raise
    progress.clear()
    took = time.monotonic() - start
    if seconds is not None:
        seconds[name] = seconds.get(name, 0.0) + took
    logger.info("%s: %.1f s", name, took)


def amount(value: float, unit: str) -> str:
    """Return a number as people read it: bytes (B) in KiB, MiB and GiB, others with their unit."""
    if unit == "B":
        for prefix, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
            if value >= size:
                return f"{value / size:.1f} {prefix}"
    return f"{value:g} {unit}".rstrip()


_print_lock = threading.Lock()
_print_depth = 0
_redirection = contextlib.ExitStack()


@contextmanager
def to_stderr() -> Iterator[None]:
    """Send what plugins print while they are loaded to stderr: what a command prints stays readable. Any number of threads, the
    last of which puts stdout back."""
    global _print_depth
    with _print_lock:
        if not _print_depth:
            _redirection.enter_context(contextlib.redirect_stdout(sys.stderr))
        _print_depth += 1
    try:
        yield
    finally:
        with _print_lock:
            _print_depth -= 1
            if not _print_depth:
                _redirection.close()
