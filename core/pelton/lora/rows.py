"""Which adapter each token of a step uses, on the device and at fixed addresses: captured steps read it.

Rows are also sorted by slot into tiles, so that a kernel reads an adapter's matrices once for several rows: program i of a grid
of `num_tiles(T)` takes rows order[tile_first[i] : tile_end[i]], all of slot tile_slot[i]. Rows without an adapter come last, in
tiles of slot -1; tiles that are left over are empty. So the first `num_used` tiles are all that a kernel has to look at.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

SMALL_TILE, LARGE_TILE = 16, 64
"""Rows of a tile: few rows share an adapter in a decode step; prompts fill large tiles."""
_LARGE_STEP = 512
UNITS_PAST = 8
"""A kernel may take so many units at once, some past the last among them."""


def tile_rows(num_tokens: int) -> int:
    """Rows of a tile in a step of `num_tokens`."""
    return SMALL_TILE if num_tokens < _LARGE_STEP else LARGE_TILE


class AdapterRows:
    """Filled by `place` before a forward pass. T tokens, S slots."""

    def __init__(
        self, *, max_num_tokens: int, num_slots: int, device: torch.device, has_tiles: bool | None = None
    ) -> None:
        """has_tiles: whether rows are sorted into tiles; where kernels want them, which is not on a CPU, when None."""
        self.num_slots = num_slots
        self.is_used = False
        """Whether some row of the step has an adapter. The host's: layers look at it when they launch."""
        self.token_slots = torch.full((max_num_tokens,), -1, dtype=torch.int32, device=device)
        self.sort: Callable[[AdapterRows, int], bool] | None = None
        """A faster sort, set by the kernels that read the tiles. It returns False for a number of tokens that it does not serve."""
        self._has_tiles = device.type != "cpu" if has_tiles is None else has_tiles
        sizes = (max_num_tokens, min(max_num_tokens, _LARGE_STEP - 1)) if self._has_tiles else ()
        most = max(map(self.num_tiles, sizes), default=0)
        self.order = torch.zeros(max_num_tokens if self._has_tiles else 0, dtype=torch.int32, device=device)
        self.tile_slot = torch.full((most,), -1, dtype=torch.int32, device=device)
        self.tile_first = torch.zeros(most, dtype=torch.int32, device=device)
        self.tile_end = torch.zeros(most, dtype=torch.int32, device=device)
        self.token_tile = torch.zeros(max_num_tokens if self._has_tiles else 0, dtype=torch.int32, device=device)
        """The tile of each token."""
        self.num_used = torch.zeros(1, dtype=torch.int32, device=device)
        """Tiles of rows with an adapter."""
        self.unit_slots = 1
        """Neighbouring slots that a kernel reads together: a unit. Set with `sort`, which fills in the next two fields."""
        self.units = torch.zeros(min(max_num_tokens, num_slots) + UNITS_PAST, dtype=torch.int32, device=device)
        """Units with rows, from the first on; numbers of units that there are not behind them."""
        self.num_units = torch.zeros(1, dtype=torch.int32, device=device)
        self.step = torch.zeros(1, dtype=torch.int32, device=device)
        """Counts `place`, with tiles: what a kernel leaves for another of the same step says so."""
        self._groups = torch.arange(num_slots + 1, dtype=torch.int32, device=device)
        self._tiles = torch.arange(most, dtype=torch.int32, device=device)

    def num_tiles(self, num_tokens: int) -> int:
        """Most tiles of a step: each group of rows may leave one half empty."""
        return min(num_tokens, num_tokens // tile_rows(num_tokens) + self.num_slots + 1)

    def place(self, token_slots: Tensor) -> None:
        """token_slots [T], -1 without an adapter. Device ops alone."""
        num_tokens = token_slots.shape[0]
        self.token_slots[:num_tokens] = token_slots
        if self._has_tiles and not (self.sort is not None and self.sort(self, num_tokens)):
            self._sort(self.token_slots[:num_tokens])

    def _sort(self, slots: Tensor) -> None:
        num_tokens, rows = slots.shape[0], tile_rows(slots.shape[0])
        # Group g is slot g; the last group has no adapter.
        groups, order = torch.sort(torch.where(slots < 0, self.num_slots, slots), stable=True)
        self.order[:num_tokens] = order
        ends = torch.searchsorted(groups, self._groups, right=True, out_int32=True)
        starts = torch.cat([ends.new_zeros(1), ends[:-1]])
        tile_ends = ((ends - starts + rows - 1) // rows).cumsum(0, dtype=torch.int32)
        count = self.num_tiles(num_tokens)
        tiles = self._tiles[:count]
        group = torch.searchsorted(tile_ends, tiles, right=True, out_int32=True)
        is_tile = group <= self.num_slots
        group = group.clamp(max=self.num_slots)
        before = torch.where(group > 0, tile_ends[(group - 1).clamp(min=0)], 0)
        first = starts[group] + (tiles - before) * rows
        self.tile_first[:count] = torch.where(is_tile, first, 0)
        self.tile_end[:count] = torch.where(is_tile, torch.minimum(first + rows, ends[group]), 0)
        is_used = is_tile & (group < self.num_slots)
        self.tile_slot[:count] = torch.where(is_used, group, -1)
        self.num_used[0] = is_used.sum()
        self.step += 1
        place = torch.arange(num_tokens, dtype=torch.int32, device=groups.device) - starts[groups]
        tile = torch.where(groups > 0, tile_ends[groups - 1], 0) + place // rows
        self.token_tile[:num_tokens].scatter_(0, order, tile)
