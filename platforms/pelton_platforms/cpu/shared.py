"""`SharedMemoryCommunicator`: sums, gathers and what one rank sends to another through memory that ranks of this host share.

What is too large for it, and all else, goes over gloo.

Each rank has two places for what it brings, used in turn, and a counter of what it has brought. It copies its part, counts up, waits until
all have counted as far, and reads all parts in order of rank. Who brings the next but one has seen that all have brought the next, and so
that all have read this one: two places are enough, and nobody waits at the end. From each rank to each other goes a ring of bytes: who
sends waits only where it has no room.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from pelton.errors import EngineError
from pelton.graphs.recordable import launch
from pelton.parallel.communicator import CommunicatorContext
from pelton_platforms.cpu.gloo import WIDE, GlooCommunicator, tensor_at, unseen
from pelton_platforms.device.meeting import all_told, this_host

FOLDER = "/dev/shm"
PLACE_BYTES = 1 << 20
"""Of one rank's part; larger ones go over gloo, whose pieces overlap."""
CHANNEL_BYTES = 1 << 22
"""Between two ranks; what is larger goes over gloo. Memory that nothing was sent through is not taken."""
_LINE = 64
_SPINS = 400  # looks at the counters before the core is offered to others
_PAUSE_S = 50e-6
_YIELD_S = 2e-3  # after so long others need the core: it is left for a moment at each look


class SharedMemoryCommunicator(GlooCommunicator):
    """Where ranks are on several hosts all of it goes over gloo."""

    def __init__(self, context: CommunicatorContext) -> None:
        super().__init__(context)
        self._timeout_s = context.timeout_s
        self._is_open = context.size == 1 or self._is_one_host()
        if not self._is_open:
            return
        self._memory = self._open(context)
        self._counters = memoryview(self._memory)[: _LINE * self.size].cast("Q")
        self._own = _LINE // 8 * self.rank
        self._others = [_LINE // 8 * rank for rank in range(self.size) if rank != self.rank]
        self._data = torch.frombuffer(
            self._memory, dtype=torch.uint8, offset=_LINE * self.size, count=2 * self.size * PLACE_BYTES
        )
        self._first_channel = _LINE * self.size + 2 * self.size * PLACE_BYTES
        self._channels: dict[tuple[int, int], _Channel] = {}
        self._count = 0
        self._places: dict[tuple[int, torch.dtype], list[list[Tensor]]] = {}

    def _is_one_host(self) -> bool:
        """Return whether all ranks see the same memory."""
        here = this_host(FOLDER)
        return all(there == here for there in all_told(self._store, self.rank, self.size, "host", here))

    def _open(self, context: CommunicatorContext) -> mmap.mmap:
        """The first rank makes the file and tells its name; nobody finds it once all have it."""
        size = self.size * (_LINE + 2 * PLACE_BYTES) + self.size**2 * (CHANNEL_BYTES + 2 * _LINE)
        with self._naming("the opening of shared memory"):
            if self.rank == 0:
                path = f"{FOLDER}/pelton-{os.getpid()}-{os.urandom(8).hex()}"
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
                os.ftruncate(descriptor, size)
                self._store.set("memory", path)
            else:
                path = self._store.get("memory").decode()
                descriptor = os.open(path, os.O_RDWR)
            memory = mmap.mmap(descriptor, size)
            os.close(descriptor)
            self._group.barrier().wait(timedelta(seconds=context.timeout_s))
            if self.rank == 0:
                os.unlink(path)
        return memory

    def _reduce_at(self, address: int, count: int, dtype: torch.dtype) -> None:
        if not self._is_open or count * dtype.itemsize > PLACE_BYTES:
            return super()._reduce_at(address, count, dtype)
        with unseen():
            target = tensor_at(address, count, dtype)
            parts = self._exchange(target, "all_reduce")
            if self.size > 1:
                torch.add(parts[0], parts[1], out=target)
            for part in parts[2:]:
                target.add_(part)

    def _gather_at(self, target: int, source: int, count: int, dtype: torch.dtype) -> None:
        if not self._is_open or count * dtype.itemsize > PLACE_BYTES:
            return super()._gather_at(target, source, count, dtype)
        with unseen():
            parts = self._exchange(tensor_at(source, count, dtype), "all_gather")
            torch.cat(parts, out=tensor_at(target, count * self.size, dtype))

    def swap(self, tensor: Tensor) -> Tensor:
        if not self._is_open or tensor.nbytes > PLACE_BYTES:
            return super().swap(tensor)
        found, tensor = torch.empty(tensor.shape, dtype=tensor.dtype), tensor.contiguous()
        launch(self._swap_parts_at, found.data_ptr(), tensor.data_ptr(), tensor.numel(), tensor.dtype)
        return found

    def _swap_parts_at(self, target: int, source: int, count: int, dtype: torch.dtype) -> None:
        with unseen():
            parts = self._exchange(tensor_at(source, count, dtype), "swap")
            torch.cat([part.chunk(self.size)[self.rank] for part in parts], out=tensor_at(target, count, dtype))

    def reduce_scatter(self, tensor: Tensor, dim: int = -1) -> Tensor:
        is_small = tensor.numel() * tensor.element_size() <= PLACE_BYTES
        if not (self._is_open and is_small and dim == 0 and tensor.numel()) or len(tensor) % self.size:
            return super().reduce_scatter(tensor, dim)
        rows = len(tensor) // self.size
        own = slice(self.rank * tensor.numel() // self.size, (self.rank + 1) * tensor.numel() // self.size)
        parts = self._exchange(tensor.reshape(-1), "reduce_scatter")
        total = parts[0][own].to(WIDE.get(tensor.dtype, tensor.dtype), copy=True)
        for part in parts[1:]:
            total += part[own]
        return total.to(tensor.dtype).view(rows, *tensor.shape[1:])

    def _send_at(self, address: int, count: int, dtype: torch.dtype, to: int) -> None:
        num_bytes = count * dtype.itemsize
        if not self._is_open or num_bytes > CHANNEL_BYTES:
            return super()._send_at(address, count, dtype, to)
        channel = self._channel(self.rank, to)
        self._wait_until(lambda: channel.room() >= num_bytes, f"send to {to}", to)
        channel.write(address, num_bytes)

    def _recv_at(self, address: int, count: int, dtype: torch.dtype, source: int) -> None:
        num_bytes = count * dtype.itemsize
        if not self._is_open or num_bytes > CHANNEL_BYTES:
            return super()._recv_at(address, count, dtype, source)
        channel = self._channel(source, self.rank)
        self._wait_until(lambda: channel.filled() >= num_bytes, f"recv from {source}", source)
        channel.read(address, num_bytes)

    def _channel(self, source: int, to: int) -> _Channel:
        found = self._channels.get((source, to))
        if found is None:
            start = self._first_channel + (source * self.size + to) * (CHANNEL_BYTES + 2 * _LINE)
            found = self._channels[source, to] = _Channel(
                self._memory, self._data.data_ptr() - _LINE * self.size, start
            )
        return found

    def _wait_until(self, is_there: Callable[[], bool], what: str, other: int) -> None:
        """Ranks of other stages work for milliseconds: the core is soon theirs."""
        for _ in range(_SPINS):
            if is_there():
                return
        began = time.monotonic()
        while not is_there():
            waited = time.monotonic() - began
            time.sleep(0 if waited < _YIELD_S else _PAUSE_S)
            if waited > self._timeout_s:
                raise self._late(what, other)

    def _exchange(self, mine: Tensor, what: str) -> list[Tensor]:
        """Return what each rank brings, in order: to be read before the next call."""
        self._count = count = self._count + 1
        parts = self._parts(mine.numel(), mine.dtype)[count & 1]
        parts[self.rank].copy_(mine)
        self._counters[self._own] = count
        counters, spins = self._counters, 0
        for place in self._others:
            while counters[place] < count:
                spins += 1
                if spins >= _SPINS:
                    self._wait_long(place, count, what)
        return parts

    def _wait_long(self, place: int, count: int, what: str) -> None:
        began, counters = time.monotonic(), self._counters
        while counters[place] < count:
            waited = time.monotonic() - began
            time.sleep(0 if waited < _YIELD_S else _PAUSE_S)
            if waited > self._timeout_s:
                raise self._late(what, place * 8 // _LINE)

    def _late(self, what: str, other: int) -> EngineError:
        return EngineError(
            f"Communication fails at rank {self.rank} of {self.size} in group {self._group_name!r}: {what}: rank "
            f"{other} did not come within {self._timeout_s:g} s."
        )

    def _parts(self, numel: int, dtype: torch.dtype) -> list[list[Tensor]]:
        """Views of both places of each rank: [place][rank]."""
        found = self._places.get((numel, dtype))
        if found is None:
            places: Any = self._data.view(2, self.size, PLACE_BYTES)[:, :, : numel * dtype.itemsize]
            found = [[part.view(dtype) for part in place.unbind()] for place in places.unbind()]
            self._places[numel, dtype] = found
        return found


class _Channel:
    """Bytes from one rank to another: two counters that only grow, of what was written and of what was read, and the ring itself."""

    def __init__(self, memory: mmap.mmap, base: int, start: int) -> None:
        self._counters = memoryview(memory)[start : start + 2 * _LINE].cast("Q")
        self._ring = base + start + 2 * _LINE

    def filled(self) -> int:
        return self._counters[0] - self._counters[_LINE // 8]

    def room(self) -> int:
        return CHANNEL_BYTES - self.filled()

    def write(self, address: int, num_bytes: int) -> None:
        written = self._counters[0]
        first, at = self._parts(written, num_bytes)
        ctypes.memmove(at, address, first)
        ctypes.memmove(self._ring, address + first, num_bytes - first)
        self._counters[0] = written + num_bytes

    def read(self, address: int, num_bytes: int) -> None:
        taken = self._counters[_LINE // 8]
        first, at = self._parts(taken, num_bytes)
        ctypes.memmove(address, at, first)
        ctypes.memmove(address + first, self._ring, num_bytes - first)
        self._counters[_LINE // 8] = taken + num_bytes

    def _parts(self, count: int, num_bytes: int) -> tuple[int, int]:
        """Bytes up to the ring's end, and the address of the first."""
        place = count % CHANNEL_BYTES
        return min(num_bytes, CHANNEL_BYTES - place), self._ring + place
