"""Numbers from host to device: many small columns, one copy.

A ring of pinned parts: a part is written again only after its copy was done. On a CPU there is nothing to copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

Column = Sequence[int] | np.ndarray


class _Part:
    """Pinned memory, and the event after which it may be written again."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.memory = torch.zeros(capacity, dtype=torch.int64, pin_memory=True)
        self.values = self.memory.numpy()
        self.was_copied = torch.Event(device)
        self.is_used = False


class StagingRing:
    """Integers only: they travel as int64."""

    def __init__(self, num_parts: int, capacity: int, device: torch.device) -> None:
        self.device, self.num_parts = device, num_parts
        self._parts = [] if device.type == "cpu" else [_Part(capacity, device) for _ in range(num_parts)]
        self._next = 0

    def stage(self, columns: Sequence[Column]) -> list[Tensor]:
        """Copy the columns to the device, together; each comes back as a view [len(column)] int64."""
        sizes = [len(column) for column in columns]
        if not self._parts:
            values = np.empty(sum(sizes), dtype=np.int64)
            _fill(values, columns)
            return list(torch.split(torch.from_numpy(values), sizes))
        part = self._take(sum(sizes))
        _fill(part.values, columns)
        on_device = part.memory[: sum(sizes)].to(self.device, non_blocking=True)
        part.was_copied.record()
        return list(torch.split(on_device, sizes))

    def stage_into(self, target: Tensor, values: np.ndarray) -> None:
        """Copy `values` to `target`, int64 of the same size at a fixed address, behind the stream's work."""
        if not self._parts:
            target.copy_(torch.from_numpy(values))
            return
        part = self._take(values.size)
        part.values[: values.size] = values
        target.copy_(part.memory[: values.size], non_blocking=True)
        part.was_copied.record()

    def _take(self, size: int) -> _Part:
        index, self._next = self._next, (self._next + 1) % len(self._parts)
        part = self._parts[index]
        if part.is_used:
            part.was_copied.synchronize()
        if part.values.size < size:
            part = self._parts[index] = _Part(1 << (size - 1).bit_length(), self.device)
        part.is_used = True
        return part


def _fill(values: np.ndarray, columns: Sequence[Column]) -> None:
    start = 0
    for column in columns:
        values[start : start + len(column)] = column
        start += len(column)


def mask_column(bitmask: bytes, num_masks: int, num_words: int) -> np.ndarray:
    """Masks over token ids, as `GrammarMasks` has them, as a column: `num_words` int32 of each, two in a number."""
    given = np.frombuffer(bitmask, dtype="<i4").reshape(num_masks, -1)
    if given.shape[1] == num_words and num_words % 2 == 0:
        return given.reshape(-1).view(np.int64)  # as it is
    given = given[:, :num_words]
    words = np.zeros((num_masks, num_words + num_words % 2), dtype=np.int32)
    words[:, : given.shape[1]] = given
    return words.view(np.int64).reshape(-1)


def place_words(words: np.ndarray, slots: np.ndarray, bitmask: bytes) -> None:
    """Write masks to their slots' rows of `words` [slots, num_words] on the host; words that the masks do not have become 0."""
    given = np.frombuffer(bitmask, dtype="<i4").reshape(len(slots), -1)[:, : words.shape[1]]
    place: np.ndarray | slice = slots
    if len(slots) and slots[-1] - slots[0] == len(slots) - 1 and (np.diff(slots) == 1).all():
        place = slice(int(slots[0]), int(slots[-1]) + 1)  # one copy, of a third of the time
    words[place, : given.shape[1]] = given
    if given.shape[1] < words.shape[1]:
        words[place, given.shape[1] :] = 0


def mask_words(column: Tensor, num_masks: int, num_words: int) -> Tensor:
    """[num_masks, num_words] int32 of such a column on the device; words that the masks did not have are 0."""
    return column.view(torch.int32).view(num_masks, -1)[:, :num_words]
