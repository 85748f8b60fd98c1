"""Open requests of all API processes, in shared memory: one number a process, which only that process writes."""

from __future__ import annotations

import mmap
import os

SLOT_BYTES = 8


class LoadCounts:
    """file: of `make_file`. One write and a sum over a few numbers: cheap enough for every request."""

    def __init__(self, file: int, num_processes: int) -> None:
        self._map = mmap.mmap(file, num_processes * SLOT_BYTES)
        self._slots = memoryview(self._map).cast("q")

    @staticmethod
    def make_file(num_processes: int) -> int:
        """A new anonymous file, to be inherited."""
        file = os.memfd_create("pelton-load")
        os.ftruncate(file, num_processes * SLOT_BYTES)
        return file

    def tell(self, index: int, count: int) -> None:
        self._slots[index] = count

    def total(self) -> int:
        return sum(self._slots)

    def close(self) -> None:
        self._slots.release()
        self._map.close()
