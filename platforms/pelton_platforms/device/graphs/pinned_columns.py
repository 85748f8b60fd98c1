"""Columns of captured steps in pinned memory, from which a step's first kernel takes them: nothing is copied between two graphs.

Parts are written in turn, and a step takes the next one: a number on the device says which. Each has the columns behind the
address at which the host expects the step's result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

_HEADER = 2


class PinnedColumns:
    """Each `write` is followed by one step that runs `take`, captured or not."""

    def __init__(self, prepare_inputs: Any, num_parts: int, most: int, device: torch.device) -> None:
        """prepare_inputs: the op, with `take` and `give`. most: numbers of a step."""
        self._op, self._device = prepare_inputs, device
        is_pinned = device.type != "cpu"
        self._parts = torch.zeros(num_parts, _HEADER + most, dtype=torch.int64, pin_memory=is_pinned)
        self._taken = torch.zeros(1, dtype=torch.int64, pin_memory=is_pinned)
        self._turn, self._place = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2))
        self._values, self._num_taken = self._parts.numpy(), self._taken.numpy()
        self._num_written = 0

    def write(self, values: np.ndarray, address: int) -> None:
        """values [n] int64. address: of pinned memory for the result; 0: nobody reads it."""
        number, num_parts = self._num_written, len(self._values)
        if number - self._num_taken[0] >= num_parts:
            self._wait()
        part = self._values[number % num_parts]
        part[0] = address
        part[_HEADER : _HEADER + values.size] = values
        self._num_written = number + 1

    def take(self, columns: Tensor, num_rows: int) -> None:
        """Bring the next part to `columns` [n], and its blocks to their tables."""
        self._op.take(self._parts, self._turn, self._taken, self._place, columns, num_rows)

    def give(self, result: Tensor) -> None:
        self._op.give(result, self._place)

    def start_again(self) -> None:
        """A step has failed, and may not have taken its part: the next one takes what is written next."""
        self._wait()
        self._turn.fill_(self._num_written)
        self._taken.fill_(self._num_written)

    def _wait(self) -> None:
        """Until all launched steps are done."""
        if self._device.type != "cpu":
            done = torch.Event(self._device)
            done.record()
            done.synchronize()
