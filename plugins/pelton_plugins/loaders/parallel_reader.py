"""Read tensors from files, or from whatever else has bytes in order, into their places: by several threads, in parts.

Threads matter even where the bytes are in memory already: one thread copies them out of the page cache at a fraction of what a
host link takes. Parts for a GPU go through pinned buffers, two for each thread: the device takes one while the other is filled.
"""

from __future__ import annotations

import math
import mmap
import os
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from pelton.errors import ConfigError
from pelton_plugins.loaders.safetensors_header import TensorPlace

PART_BYTES = 16 * 2**20
MAX_THREADS = 12
"""Measured on an H200's host with 16 CPUs, 16 GB from the page cache: 32 to 36 GB/s with 12 threads and parts of 16 MiB, 24 with 8 and
8 MiB; 23 for the first 16 GB, whose buffers are pinned on the way."""
BUFFERS = 2  # of a thread
LEAST_BYTES = 2**20
"""Smaller tensors are read by the caller's thread."""


class ByteSource(Protocol):
    """Bytes in order, of a known size. `read_into` is called by several threads at once."""

    name: str
    size: int

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill `view` with the bytes from `offset` on. Raises `ConfigError` naming the source."""
        ...


class FileSource:
    """A file, mapped; what has been read no longer counts as this process's memory. (Copies by the kernel, `preadv`, have half of the
    speed on the machine that was measured.)"""

    def __init__(self, file: Path) -> None:
        self.name = str(file)
        try:
            descriptor = os.open(file, os.O_RDONLY)
        except OSError as error:
            raise ConfigError(f"{file} cannot be read: {error.strerror}.") from error
        try:
            self.size = os.fstat(descriptor).st_size
            self._map = mmap.mmap(descriptor, self.size, prot=mmap.PROT_READ) if self.size else None
        finally:
            os.close(descriptor)
        self._bytes = np.frombuffer(self._map or b"", dtype=np.uint8)

    def read_into(self, offset: int, view: memoryview) -> None:
        stop = offset + len(view)
        if stop > self.size:
            raise ConfigError(f"{self.name} ends at byte {self.size}, within a tensor. Download it again.")
        np.copyto(np.frombuffer(view, dtype=np.uint8), self._bytes[offset:stop])
        first, last = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
        if self._map is not None and first < last:
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)


@dataclass(slots=True)
class Part:
    """Rows of a tensor, and where they go."""

    source: ByteSource
    dtype: torch.dtype
    offset: int
    target: Tensor  # rows of the whole target
    row: tuple[int, ...]  # of the tensor, [shape[1:]]
    columns: tuple[int, int, int] | None  # slice [start, stop) along a dim of the tensor from 1 on; None: whole rows

    @property
    def num_bytes(self) -> int:
        return len(self.target) * math.prod(self.row) * self.dtype.itemsize


class ParallelReader:
    """Used from one thread. After `finish`, or when leaving `running`, everything is in its place."""

    def __init__(self, num_threads: int = 0, part_bytes: int = PART_BYTES) -> None:
        """num_threads: 0 for as many as there are CPUs, up to MAX_THREADS."""
        self._num_threads = num_threads or min(MAX_THREADS, len(os.sched_getaffinity(0)))
        self._part_bytes = part_bytes
        self._parts: queue.Queue[tuple[Part, Any] | None] = queue.Queue(2 * self._num_threads)
        self._threads: list[threading.Thread] = []
        self._error: Exception | None = None
        self._streams: set[Any] = set()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Wait at the end, and end the threads in any case."""
        try:
            yield
            self.finish()
        finally:
            for _ in self._threads:
                self._parts.put(None)
            for thread in self._threads:
                thread.join()
            self._threads.clear()

    def fill(
        self, source: ByteSource, place: TensorPlace, target: Tensor, dim: int | None, start: int, stop: int | None
    ) -> bool:
        """Read the slice [start, stop) along `dim` into `target`, which has its shape, some time before `finish` returns. False, and
        nothing is read, where the copy is left to the caller: small tensors, very long rows, and devices other than CPUs and CUDA's."""
        if not place.shape or target.device.type not in ("cpu", "cuda") or place.num_bytes < LEAST_BYTES:
            return False
        row, columns = place.shape[1:], None
        row_bytes = math.prod(row) * place.dtype.itemsize
        offset = place.offset + (start * row_bytes if dim == 0 else 0)
        if dim is not None and dim > 0:
            columns = (dim, start, place.shape[dim] if stop is None else stop)
        elif target.is_contiguous():  # parts may end anywhere
            target, row, row_bytes = target.view(-1), (), place.dtype.itemsize
        if row_bytes > self._part_bytes:
            return False
        stream = torch.cuda.current_stream(target.device) if target.device.type == "cuda" else None
        num_rows = self._part_bytes // row_bytes
        for index in range(0, len(target), num_rows):
            rows = target[index : index + num_rows]
            self._put((Part(source, place.dtype, offset + index * row_bytes, rows, row, columns), stream))
        return True

    def finish(self) -> None:
        """Wait for all that was asked for. Raises what a thread raised."""
        self._parts.join()
        self._raise()
        for stream in self._streams:
            stream.synchronize()

    def _put(self, item: tuple[Part, Any]) -> None:
        self._raise()
        if item[1] is not None:
            self._streams.add(item[1])
        if len(self._threads) < self._num_threads:
            thread = threading.Thread(target=self._run, name=f"weights-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._parts.put(item)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        reader = _PartReader()
        while (item := self._parts.get()) is not None:
            try:
                if self._error is None:
                    reader.read(*item)
            except Exception as error:  # raised by the caller's thread
                self._error = error
            finally:
                self._parts.task_done()
        self._parts.task_done()


class _PartReader:
    """One thread's buffers."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        self._events: list[Any] = []
        self._turn = 0
        self._scratch = torch.empty(0, dtype=torch.uint8)

    @torch.inference_mode()
    def read(self, part: Part, stream: Any) -> None:
        is_plain = part.columns is None and part.dtype == part.target.dtype and part.target.is_contiguous()
        if stream is None and is_plain:
            part.source.read_into(part.offset, bytes_of(part.target))
            return
        if stream is None:
            self._scratch = _read(part, self._scratch)
            part.target.copy_(_rows(part, self._scratch))
            return
        turn = self._turn = (self._turn + 1) % BUFFERS
        buffer = self._pinned(turn, part)
        if part.columns is None:
            _read(part, buffer)
            rows = _rows(part, buffer)
        else:
            self._scratch = _read(part, self._scratch)
            found = _rows(part, self._scratch)
            rows = buffer[: found.numel() * part.dtype.itemsize].view(part.dtype).view(found.shape)
            rows.copy_(found)
        with torch.cuda.stream(stream):
            part.target.copy_(rows, non_blocking=True)
            self._events[turn].record(stream)

    def _pinned(self, turn: int, part: Part) -> Tensor:
        while len(self._buffers) <= turn:
            self._buffers.append(torch.empty(0, dtype=torch.uint8))
            self._events.append(torch.cuda.Event())
        self._events[turn].synchronize()
        if self._buffers[turn].numel() < part.num_bytes:
            self._buffers[turn] = torch.empty(max(part.num_bytes, PART_BYTES), dtype=torch.uint8, pin_memory=True)
        return self._buffers[turn]


def _read(part: Part, buffer: Tensor) -> Tensor:
    """The part's bytes, in `buffer` or in a larger one."""
    if buffer.numel() < part.num_bytes:
        buffer = torch.empty(part.num_bytes, dtype=torch.uint8)
    part.source.read_into(part.offset, bytes_of(buffer[: part.num_bytes]))
    return buffer


def _rows(part: Part, buffer: Tensor) -> Tensor:
    rows = buffer[: part.num_bytes].view(part.dtype).view(len(part.target), *part.row)
    if part.columns is None:
        return rows
    dim, start, stop = part.columns
    return rows.narrow(dim, start, stop - start)


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, writable."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
