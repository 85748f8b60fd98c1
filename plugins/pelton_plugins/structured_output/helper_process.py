"""A process that does for this one what may take too long or too much memory: it can be stopped, or end by itself.

What it runs is a file, with no package but what that imports. Messages on both sides are a length of 8 bytes and as many bytes: first
what it is set up with, then a text each, answered by a sign (+ for a result, - for why there is none) and bytes.
"""

from __future__ import annotations

import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from typing import BinaryIO

_LENGTH = struct.Struct("<Q")
_MEMORY_BYTES = 4 * 2**30
"""Of the process; the vocabulary and the interpreter take about 300 MB of address space."""
_START_S = 60.0
_TOO_MUCH_MEMORY = "it takes more memory than it may"
_TOO_DEEP = "its compiler descends without end, as for numbers near -2**63"


class NoAnswerError(Exception):
    """Why there is no result."""


class HelperProcess:
    """Used by one thread at a time. Started with the first text, and again after one for which it had to be stopped."""

    def __init__(self, script: str, setup: bytes) -> None:
        self._script, self._setup = script, setup
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, text: str, timeout_s: float) -> bytes:
        """The result. Raises `NoAnswerError`."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            _send(process.stdin, text.encode())
            answer = self._receive(process.stdout, timeout_s)
        except (BrokenPipeError, EOFError):
            self.close()
            is_overflow = process.returncode == -signal.SIGSEGV
            raise NoAnswerError(_TOO_DEEP if is_overflow else _TOO_MUCH_MEMORY) from None
        except TimeoutError:
            self.close()
            raise NoAnswerError(f"it takes more than {timeout_s:g} s") from None
        if answer[:1] == b"-":
            raise NoAnswerError(answer[1:].decode(errors="replace"))
        return answer[1:]

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _start(self) -> None:
        self.close()
        # Isolated, it reads no PYTHONPATH: it looks for its packages where this process does, the current folder left out.
        self._process = process = subprocess.Popen(
            [sys.executable, "-I", self._script, *filter(None, sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            _send(process.stdin, self._setup)
            self._receive(process.stdout, _START_S)
        except (OSError, EOFError) as error:  # TimeoutError is an OSError
            self.close()
            raise NoAnswerError(f"{Path(self._script).name} did not start: {error!r}") from None

    @staticmethod
    def _receive(stream: BinaryIO, timeout_s: float) -> bytes:
        deadline = time.monotonic() + timeout_s
        with DefaultSelector() as selector:
            selector.register(stream, EVENT_READ)
            return _receive(stream, lambda: selector.select(max(deadline - time.monotonic(), 0.0)))


def serve(set_up: Callable[[bytes], Callable[[str], bytes]]) -> None:
    """In the process: answer texts until there are no more. set_up: makes what answers."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answer = set_up(_receive(sys.stdin.buffer))
    _send(sys.stdout.buffer, b"+")
    while True:
        try:
            text = _receive(sys.stdin.buffer).decode()
        except EOFError:
            return
        try:
            made = b"+" + answer(text)
        except MemoryError:
            made = b"-" + _TOO_MUCH_MEMORY.encode()
        except Exception as error:
            made = b"-" + str(error).encode()
        _send(sys.stdout.buffer, made)


def pack_tokens(tokens: Sequence[bytes]) -> bytes:
    return b"".join(struct.pack("<I", len(token)) + token for token in tokens)


def unpack_tokens(data: bytes) -> list[bytes]:
    tokens, at = list[bytes](), 0
    while at < len(data):
        (size,) = struct.unpack_from("<I", data, at)
        tokens.append(data[at + 4 : at + 4 + size])
        at += 4 + size
    return tokens


def _send(stream: BinaryIO, data: bytes) -> None:
    stream.write(_LENGTH.pack(len(data)))
    stream.write(data)
    stream.flush()


def _receive(stream: BinaryIO, wait: object = None) -> bytes:
    (size,) = _LENGTH.unpack(_read(stream, _LENGTH.size, wait))
    return _read(stream, size, wait)


def _read(stream: BinaryIO, size: int, wait: object) -> bytes:
    parts = []
    while size:
        if callable(wait) and not wait():
            raise TimeoutError
        part = stream.raw.read(min(size, 2**20)) if wait is not None else stream.read(size)  # type: ignore[attr-defined]
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
