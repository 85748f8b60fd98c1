"""A process that builds outlines' indexes, so that a regex which takes too long or too much memory can be stopped.

It is run as a file, and imports outlines_core alone. Messages on both sides are a length of 8 bytes and as many bytes: first
the vocabulary, then a regex each, answered by a sign (+ for an index, - for why there is none) and bytes.
"""

from __future__ import annotations

import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from typing import BinaryIO

_LENGTH = struct.Struct("<Q")
_MEMORY_BYTES = 4 * 2**30
"""Of the process; the vocabulary and the interpreter take about 300 MB of address space."""
_START_S = 60.0


class IndexError_(Exception):
    """Why a regex has no index."""


class IndexProcess:
    """Used by one thread at a time. Started with the first regex, and again after one that had to be stopped."""

    def __init__(self, tokens: Sequence[bytes], skipped: Sequence[int], eos_token_id: int) -> None:
        hidden = set(skipped)
        parts = [b"" if token_id in hidden else token for token_id, token in enumerate(tokens)]
        self._vocabulary = b"".join(
            [_LENGTH.pack(eos_token_id), *(struct.pack("<I", len(part)) + part for part in parts)]
        )
        self._process: subprocess.Popen[bytes] | None = None

    def build(self, regex: str, timeout_s: float) -> bytes:
        """The index of a regex, as bytes. Raises `IndexError_`."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            _send(process.stdin, regex.encode())
            answer = self._receive(process.stdout, timeout_s)
        except (BrokenPipeError, EOFError):
            self.close()
            raise IndexError_("it takes more memory than a regex may") from None
        except TimeoutError:
            self.close()
            raise IndexError_(f"it takes more than {timeout_s:g} s") from None
        if answer[:1] == b"-":
            raise IndexError_(answer[1:].decode(errors="replace"))
        return answer[1:]

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _start(self) -> None:
        self.close()
        # Isolated, it reads no PYTHONPATH: it looks for its one package where this process does, the current folder left out.
        self._process = process = subprocess.Popen(
            [sys.executable, "-I", str(Path(__file__)), *filter(None, sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            _send(process.stdin, self._vocabulary)
            self._receive(process.stdout, _START_S)
        except (OSError, EOFError) as error:  # TimeoutError is an OSError
            self.close()
            raise IndexError_(f"the process that builds indexes did not start: {error!r}") from None

    @staticmethod
    def _receive(stream: BinaryIO, timeout_s: float) -> bytes:
        deadline = time.monotonic() + timeout_s
        with DefaultSelector() as selector:
            selector.register(stream, EVENT_READ)
            return _receive(stream, lambda: selector.select(max(deadline - time.monotonic(), 0.0)))


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


def _serve() -> None:
    import resource

    sys.path[:] = sys.argv[1:]
    import outlines_core

    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    data = _receive(sys.stdin.buffer)
    (eos,), at, token_id = _LENGTH.unpack_from(data), _LENGTH.size, 0
    tokens: dict[bytes, list[int]] = {}
    while at < len(data):
        (size,) = struct.unpack_from("<I", data, at)
        if size:
            tokens.setdefault(data[at + 4 : at + 4 + size], []).append(token_id)
        at, token_id = at + 4 + size, token_id + 1
    vocabulary = outlines_core.Vocabulary(eos, tokens)
    _send(sys.stdout.buffer, b"+")
    while True:
        try:
            regex = _receive(sys.stdin.buffer).decode()
        except EOFError:
            return
        try:
            _, (index,) = outlines_core.Index(regex, vocabulary).__reduce__()
        except Exception as error:
            _send(sys.stdout.buffer, b"-" + str(error).encode())
        else:
            _send(sys.stdout.buffer, b"+" + bytes(index))


if __name__ == "__main__":
    _serve()
