"""The adapters of a step's rows on a device: filled in before the forward pass, and sorted into tiles where kernels read those."""

from __future__ import annotations

import torch
from torch import Tensor

from pelton.lora.rows import LARGE_STEP, SPAN, UNITS_PAST, AdapterRowTensors, tile_rows


class AdapterRows(AdapterRowTensors):
    """All memory is made here: captured steps read it."""

    def __init__(
        self, *, max_num_tokens: int, num_slots: int, device: torch.device, has_tiles: bool | None = None
    ) -> None:
        """has_tiles: whether rows are sorted into tiles; where kernels want them, which is not on a CPU, when None."""
        self.num_slots = num_slots
        self.is_used = False
        self.sort = None
        self._has_tiles = device.type != "cpu" if has_tiles is None else has_tiles
        sizes = (max_num_tokens, min(max_num_tokens, LARGE_STEP - 1)) if self._has_tiles else ()
        most, num_sorted = max(map(self.num_tiles, sizes), default=0), max_num_tokens if self._has_tiles else 0

        def integers(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        self.token_slots, self.tile_slot = integers(max_num_tokens) - 1, integers(most) - 1
        self.order, self.token_tile = integers(num_sorted), integers(num_sorted)
        self.tile_first, self.tile_end, self.num_used = integers(most), integers(most), integers(1)
        self.unit_slots = 1
        self.units, self.num_units = integers(min(max_num_tokens, num_slots) + UNITS_PAST), integers(1)
        self.step = integers(1)
        num_spans = -(-num_sorted // SPAN)
        self.span_slots, self.num_span_slots = integers(num_spans * SPAN), integers(num_spans)
        self._groups = torch.arange(num_slots + 1, dtype=torch.int32, device=device)
        self._tiles = torch.arange(most, dtype=torch.int32, device=device)

    def place(self, token_slots: Tensor) -> None:
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
