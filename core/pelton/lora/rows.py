"""Which adapter each token of a step uses, on the device and at fixed addresses: captured steps read it.

Rows are also sorted by slot into tiles, so that a kernel reads an adapter's matrices once for several rows: program i of a grid
of `num_tiles(T)` takes rows order[tile_first[i] : tile_end[i]], all of slot tile_slot[i]. Rows without an adapter come last, in
tiles of slot -1; tiles that are left over are empty. So the first `num_used` tiles are all that a kernel has to look at.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

from pelton import moved

if TYPE_CHECKING:
    from torch import Tensor
else:
    __getattr__ = moved.names_of(__name__)

SMALL_TILE, LARGE_TILE = 16, 64
"""Rows of a tile: few rows share an adapter in a decode step; prompts fill large tiles."""
LARGE_STEP = 512
SPAN = 192
"""Neighbouring rows that a kernel for prompts multiplies together."""
UNITS_PAST = 8
"""A kernel may take so many units at once, some past the last among them."""


PANEL = 64
"""Ranks of neighbouring slots that are copied at once."""


def padded_ranks(num_ranks: int) -> int:
    """Numbers between two columns of B that has all slots' ranks beside each other: whole panels, where they fill more than one."""
    return num_ranks if num_ranks <= PANEL else -(-num_ranks // PANEL) * PANEL


def tile_rows(num_tokens: int) -> int:
    """Rows of a tile in a step of `num_tokens`."""
    return SMALL_TILE if num_tokens < LARGE_STEP else LARGE_TILE


class AdapterRowTensors(ABC):
    """The tensors that a worker fills by `place` before a forward pass, int32. T tokens, S slots, L tiles, U units."""

    num_slots: int
    is_used: bool
    """Whether some row of the step has an adapter. The host's: layers look at it when they launch."""
    token_slots: Tensor  # [T], -1 without an adapter
    order: Tensor  # [T], as the next four where there are tiles
    token_tile: Tensor  # [T]
    tile_slot: Tensor  # [L]
    tile_first: Tensor  # [L]
    tile_end: Tensor  # [L]
    num_used: Tensor  # [1], tiles of rows with an adapter
    sort: Callable[[AdapterRowTensors, int], bool] | None
    """A faster sort, set by the kernels that read the tiles. It returns False for a number of tokens that it does not serve."""
    unit_slots: int
    """Neighbouring slots that a kernel reads together: a unit. Set with `sort`, which fills in the next two fields."""
    units: Tensor  # [U], those with rows, from the first on; numbers of units that there are not behind them
    num_units: Tensor  # [1]
    span_slots: Tensor  # [spans, SPAN], slots that a span's rows use, each once; of steps that `sort` does not serve
    num_span_slots: Tensor  # [spans]
    step: Tensor  # [1], counts `place`, with tiles: what a kernel leaves for another of the same step says so

    def num_tiles(self, num_tokens: int) -> int:
        """Most tiles of a step: each group of rows may leave one half empty."""
        return min(num_tokens, num_tokens // tile_rows(num_tokens) + self.num_slots + 1)

    @abstractmethod
    def place(self, token_slots: Tensor) -> None:
        """token_slots [T], -1 without an adapter. Device ops alone."""
