"""A ring: a stream of messages from one process to several, through memory that they share.

The memory is a file without a name, handed down as a descriptor: nothing is left behind however the processes end. It holds one
line of 64 bytes for the writer's position, one for each reader's, and then the bytes themselves, in a circle. A message is its
length, 8 bytes little-endian, and its content; one that is longer than the circle goes through it in pieces.

The ring rings nobody: whoever waits is woken by other means (`RankProcess.wake`), which also order the writes for processors that
would not.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable
from typing import Final

_LINE: Final = 64
_LENGTH: Final = 8
SHARED_MEMORY = "/dev/shm"


def make_ring_file(num_readers: int, capacity: int) -> int:
    """Return the descriptor of new memory for `capacity` bytes on their way, which processes started with it can open as a ring."""
    return make_shared_file(_LINE * (1 + num_readers) + capacity)


def make_shared_file(size: int) -> int:
    """Return the descriptor of a new file without a name, in memory where there is a place for that."""
    folder = SHARED_MEMORY if os.path.isdir(SHARED_MEMORY) else None
    with tempfile.TemporaryFile(dir=folder) as file:
        file.truncate(size)
        return os.dup(file.fileno())


class _Ring:
    def __init__(self, descriptor: int, num_readers: int) -> None:
        self._memory = mmap.mmap(descriptor, 0)
        header = _LINE * (1 + num_readers)
        self._positions = memoryview(self._memory)[:header].cast("Q")
        self._bytes = memoryview(self._memory)[header:]
        self.capacity = len(self._bytes)

    def close(self) -> None:
        self._positions.release()
        self._bytes.release()
        self._memory.close()


class RingWriter(_Ring):
    def __init__(self, descriptor: int, num_readers: int) -> None:
        super().__init__(descriptor, num_readers)
        self._readers = [_LINE // 8 * (1 + reader) for reader in range(num_readers)]
        self._written = 0

    def write(self, message: bytes, wake: Callable[[], None], wait: Callable[[], None]) -> None:
        """Hand a message to all readers. `wake`: called after each piece; `wait`: while the slowest reader leaves no room, which
        may raise."""
        data = memoryview(len(message).to_bytes(_LENGTH, "little") + message)
        while data:
            room = self.capacity - self._written + min(self._positions[place] for place in self._readers)
            if room == 0:
                wait()
                continue
            start = self._written % self.capacity
            count = min(room, len(data), self.capacity - start)
            self._bytes[start : start + count] = data[:count]
            self._written += count
            self._positions[0] = self._written
            data = data[count:]
            wake()


class RingReader(_Ring):
    def __init__(self, descriptor: int, num_readers: int, reader: int) -> None:
        super().__init__(descriptor, num_readers)
        self._place = _LINE // 8 * (1 + reader)
        self._read = 0

    def read(self, wait: Callable[[], None]) -> bytes:
        """Return the next message. `wait`: called while there is nothing to read, which may raise."""
        length = int.from_bytes(self._take(_LENGTH, wait), "little")
        return bytes(self._take(length, wait))

    def _take(self, count: int, wait: Callable[[], None]) -> bytearray:
        taken = bytearray()
        while len(taken) < count:
            there = self._positions[0] - self._read
            if there == 0:
                wait()
                continue
            start = self._read % self.capacity
            piece = min(there, count - len(taken), self.capacity - start)
            taken += self._bytes[start : start + piece]
            self._read += piece
            self._positions[self._place] = self._read
        return taken
