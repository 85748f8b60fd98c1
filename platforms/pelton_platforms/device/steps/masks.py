"""Grammar masks on their way to where variants of the `sample` op read them, by slot."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from pelton_platforms.device.steps.staging import place_words
from pelton_platforms.device.steps.step_plan import Ints

_COPY_BYTES = 128 * 1024
"""What the device copies from pinned memory in the time that the host needs to queue one more copy: 5 us at 25 GB/s."""
_NUM_PARTS = 2


class _Part:
    """Pinned masks by slot, and the event after which they may be written again."""

    def __init__(self, num_slots: int, num_words: int, device: torch.device) -> None:
        self.words = torch.zeros(num_slots, num_words, dtype=torch.int32, pin_memory=True)
        self.has_mask = torch.zeros(num_slots, dtype=torch.bool, pin_memory=True)
        self.was_copied = torch.Event(device)


class MaskPlaces:
    """words [slots, ceil(V / 32)] int32 and has_mask [slots] bool, at fixed addresses on the device.

    A device that is not this process gets them in few copies and without a kernel: runs of slots that lie together.
    """

    def __init__(self, words: Tensor, has_mask: Tensor) -> None:
        self._words, self._has_mask = words, has_mask
        self._parts: list[_Part] = []
        self._next = 0
        self.placed: bytes | None = None  # the slots that the device's `has_mask` is known to say

    def place(self, slots: Ints, bitmask: bytes) -> None:
        """Write one mask for each of `slots`, as `GrammarMasks` has them; other slots have none from now on. Words that the masks
        do not have become 0."""
        if self._words.device.type == "cpu":  # numpy's copy: torch's wakes threads that the step's own have to wait for
            _place(self._words, self._has_mask, slots, bitmask)
            return
        part = self._take()
        _place(part.words, part.has_mask, slots, bitmask)
        for target, source in self.copies(slots, part.words, part.has_mask):
            target.copy_(source, non_blocking=True)
        self.placed = None
        part.was_copied.record()

    def room(self) -> Any:
        """[slots, words] int32 of this process that steps read, where masks may be written once the step before has been sampled; None
        where the device is another."""
        return self._words.numpy() if self._words.device.type == "cpu" else None

    def flag(self, slots: Ints) -> None:
        """Let `slots` alone have the masks that were written to `room`."""
        _flag(self._has_mask, slots)

    def copies(self, slots: Ints, words: Tensor, has_mask: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return what comes from where for the masks of `slots`, from pinned memory of the same shapes; last, which slots have one."""
        parts = runs(np.sort(slots), max(_COPY_BYTES // (4 * self._words.shape[1]), 1))
        return [*((self._words[first:end], words[first:end]) for first, end in parts), (self._has_mask, has_mask)]

    @property
    def device(self) -> torch.device:
        return self._words.device

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        return self._words, self._has_mask

    def _take(self) -> _Part:
        if len(self._parts) < _NUM_PARTS:
            num_slots, num_words = self._words.shape
            self._parts.append(_Part(num_slots, num_words, self._words.device))
            return self._parts[-1]
        part, self._next = self._parts[self._next], (self._next + 1) % _NUM_PARTS
        part.was_copied.synchronize()
        return part


def _place(words: Tensor, has_mask: Tensor, slots: Ints, bitmask: bytes) -> None:
    place_words(words.numpy(), slots, bitmask)
    _flag(has_mask, slots)


def _flag(has_mask: Tensor, slots: Ints) -> None:
    flags = has_mask.numpy()
    flags[:] = False
    flags[slots] = True


def runs(slots: Ints, most_between: int) -> list[tuple[int, int]]:
    """The sorted slots as ranges (first, end), joined over at most `most_between` others."""
    if not len(slots):
        return []
    breaks = np.flatnonzero(np.diff(slots) > most_between + 1)
    firsts, lasts = [slots[0], *slots[breaks + 1]], [*slots[breaks], slots[-1]]
    return [(int(first), int(last) + 1) for first, last in zip(firsts, lasts, strict=True)]
