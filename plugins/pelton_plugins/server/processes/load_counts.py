"""Requests of all API processes, in shared memory: a row of numbers for each process, which only that process writes."""

from __future__ import annotations

import mmap
import os

SLOT_BYTES = 8
MOST_ENGINES = 1023
"""Engines beyond have no numbers here: routers know of them what they are told."""
ROW_SLOTS = 1 + MOST_ENGINES


class LoadCounts:
    """file: of `make_file`. One write and a sum over a few numbers: cheap enough for every request.

    A row has the process' open requests, and then how many of its requests each engine has.
    """

    def __init__(self, file: int, num_processes: int) -> None:
        self._map = mmap.mmap(file, num_processes * ROW_SLOTS * SLOT_BYTES)
        self._slots = memoryview(self._map).cast("q")

    @staticmethod
    def make_file(num_processes: int) -> int:
        """A new anonymous file, to be inherited."""
        file = os.memfd_create("pelton-load")
        os.ftruncate(file, num_processes * ROW_SLOTS * SLOT_BYTES)
        return file

    def tell(self, index: int, count: int) -> None:
        self._slots[index * ROW_SLOTS] = count

    def total(self) -> int:
        return sum(self._slots[::ROW_SLOTS])

    def share(self, index: int, engine: int, count: int) -> int:
        """Write how many requests of a process an engine has; return how many it has of the others."""
        if engine >= MOST_ENGINES:
            return 0
        self._slots[index * ROW_SLOTS + 1 + engine] = count
        return sum(self._slots[1 + engine :: ROW_SLOTS]) - count

    def clear(self, index: int) -> None:
        """A process is gone, and its requests with it."""
        for slot in range(index * ROW_SLOTS, (index + 1) * ROW_SLOTS):
            self._slots[slot] = 0

    def close(self) -> None:
        self._slots.release()
        self._map.close()
