"""Where the matrices of all slots lie on a device, and how an adapter comes to its slot.

An adapter is packed on the host: one layer's A [ranks, in] and B [columns, R] behind the other. On a CPU a slot is as an adapter is
packed. Elsewhere a layer's matrices lie together: A of one slot after the other, and B with the ranks of all slots beside each other in
a column's row. To the kernel of a product B is then more columns of the weight: a line of 128 bytes has the ranks of several slots.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from pelton.lora.rows import padded_ranks

ALIGNMENT = 64  # numbers: every matrix starts at a multiple of 128 bytes


def aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """Where a layer's matrices lie in a packed adapter."""

    a_start: int
    b_start: int
    num_ranks: int  # of all parts
    in_features: int
    columns: int


class SlotMemory:
    """The slots of one worker: slot s is tensor[s]."""

    def __init__(
        self, layers: Sequence[PackedLayer], *, size: int, num_slots: int, rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:  # fmt: skip
        """size: numbers of a packed adapter."""
        self._layers, self._num_slots, self._rank = layers, num_slots, rank
        self.tensor = torch.zeros(self._shape(size), dtype=dtype, device=device)

    def _shape(self, size: int) -> tuple[int, ...]:
        return self._num_slots, size

    def of(self, index: int) -> tuple[Tensor, Tensor]:
        """A [S, ranks, in] and B [S, R, columns] of a layer; neighbouring columns are lanes."""
        layer, size = self._layers[index], self.tensor.stride(0)
        shape = (self._num_slots, layer.num_ranks, layer.in_features)
        a = self.tensor.as_strided(shape, (size, layer.in_features, 1), layer.a_start)
        shape = (self._num_slots, self._rank, layer.columns)
        return a, self.tensor.as_strided(shape, (size, layer.columns, 1), layer.b_start)

    def place(self, slot: int, adapter: Tensor) -> None:
        """Bring a packed adapter to its slot, behind what the device does now."""
        self.tensor[slot].copy_(adapter, non_blocking=True)


class LayeredSlotMemory(SlotMemory):
    """The slots of one worker, by layers. `tensor` is flat."""

    def __init__(
        self, layers: Sequence[PackedLayer], *, size: int, num_slots: int, rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:  # fmt: skip
        self._width = padded_ranks(num_slots * rank)
        self._starts: list[tuple[int, int]] = []  # of A and B
        super().__init__(layers, size=size, num_slots=num_slots, rank=rank, dtype=dtype, device=device)
        self._staged = self.tensor[-size:]  # the adapter on its way
        self._runs = self._find_runs()

    def _shape(self, size: int) -> tuple[int, ...]:
        end = 0
        for layer in self._layers:
            b_start = end + aligned(self._num_slots * layer.num_ranks * layer.in_features)
            self._starts.append((end, b_start))
            end = b_start + aligned(layer.columns * self._width)
        return (end + size,)

    def of(self, index: int) -> tuple[Tensor, Tensor]:
        """A [S, ranks, in] and B [S, R, columns] of a layer; a program takes all ranks of some columns."""
        layer, (a_start, b_start) = self._layers[index], self._starts[index]
        shape = (self._num_slots, layer.num_ranks, layer.in_features)
        a = self.tensor.as_strided(shape, (layer.num_ranks * layer.in_features, layer.in_features, 1), a_start)
        shape = (self._num_slots, self._rank, layer.columns)
        return a, self.tensor.as_strided(shape, (self._rank, 1, self._width), b_start)

    def place(self, slot: int, adapter: Tensor) -> None:
        self._staged.copy_(adapter, non_blocking=True)
        staged = self._staged.storage_offset()
        for first, count, packed_step, step in self._runs:
            layer, (a_start, b_start) = self._layers[first], self._starts[first]
            size = layer.num_ranks * layer.in_features
            target = self.tensor.as_strided((count, size), (step, 1), a_start + slot * size)
            target.copy_(self._staged.as_strided((count, size), (packed_step, 1), staged + layer.a_start))
            shape = (count, layer.columns, self._rank)
            target = self.tensor.as_strided(shape, (step, self._width, 1), b_start + slot * self._rank)
            target.copy_(self._staged.as_strided(shape, (packed_step, self._rank, 1), staged + layer.b_start))

    def _find_runs(self) -> list[tuple[int, int, int, int]]:
        """Layers that are brought in one copy: (the first, how many, numbers between two in an adapter and here). Those of one kind, where
        they lie evenly."""
        kinds: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        for index, layer in enumerate(self._layers):
            kinds[layer.num_ranks, layer.in_features, layer.columns].append(index)
        found = []
        for indices in kinds.values():
            places = [
                (self._layers[index].a_start, self._layers[index].b_start, *self._starts[index]) for index in indices
            ]
            steps = {tuple(y - x for x, y in zip(*pair, strict=True)) for pair in pairwise(places)} or {(0, 0, 0, 0)}
            packed, packed_b, own, own_b = next(iter(steps))
            if len(steps) == 1 and (packed, own) == (packed_b, own_b):
                found.append((indices[0], len(indices), packed, own))
            else:
                found += [(index, 1, 0, 0) for index in indices]
        return found
