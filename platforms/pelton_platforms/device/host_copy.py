"""Copy tensors from host memory (a mapped file, as a rule) to a device, through two pinned buffers.

While the device takes one buffer, the next part is read into the other: reading the file and the transfer overlap, no
tensor has a second copy on the host, and none has one on the device. Dtypes are converted on the way in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from torch import Tensor

PART_BYTES = 32 * 2**20


class Event(Protocol):
    """As torch.cuda.Event."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class HostCopier:
    """For one device, used from one thread, on its current stream; `finish` when all is queued."""

    def __init__(self, events: tuple[Event, Event], *, pin_memory: bool = True, part_bytes: int = PART_BYTES) -> None:
        self._buffers = [torch.empty(part_bytes, dtype=torch.uint8, pin_memory=pin_memory) for _ in events]
        self._events = events
        self._is_used = [False, False]
        self._turn = 0

    def copy(self, source: Tensor, target: Tensor) -> None:
        """target[...] = source, of any strides. Has read all of `source` when it returns."""
        if target.numel() == 0:
            return
        if target.dim() == 0:
            source, target = source[None], target[None]
        row_bytes = target[0].numel() * target.element_size()
        num_rows = self._buffers[0].numel() // row_bytes
        if num_rows == 0:  # a row is larger than a buffer
            for source_row, target_row in zip(source, target, strict=True):
                self.copy(source_row, target_row)
            return
        for source_part, target_part in zip(torch.split(source, num_rows), torch.split(target, num_rows), strict=True):
            self._copy_part(source_part, target_part)

    def finish(self) -> None:
        """Wait until the device has everything."""
        for event, is_used in zip(self._events, self._is_used, strict=True):
            if is_used:
                event.synchronize()

    def _copy_part(self, source: Tensor, target: Tensor) -> None:
        turn, self._turn = self._turn, 1 - self._turn
        if self._is_used[turn]:
            self._events[turn].synchronize()
        num_bytes = target.numel() * target.element_size()
        staged = self._buffers[turn][:num_bytes].view(target.dtype).view(target.shape)
        staged.copy_(source)
        target.copy_(staged, non_blocking=True)
        self._events[turn].record()
        self._is_used[turn] = True


def cuda_copier() -> HostCopier:
    return HostCopier((torch.cuda.Event(), torch.cuda.Event()))
