"""A layer whose only state is that of a short convolution between two gates (LFM2), as its kernel sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pelton.attention.interface import BoundAttention
from pelton_backends.triton.states.conv import ShortConv

if TYPE_CHECKING:
    from torch import Tensor

    from pelton_backends.triton.states.backend import StateMetadata


class GatedConv(BoundAttention):
    """A layer's convolution: its `conv_weight` [E, K], `conv_bias` [E] or None, and `conv_states` [num_blocks, E, K - 1]."""

    def __init__(self, layer: Any, *, pdl: bool) -> None:
        super().__init__(layer)
        self._convolve = ShortConv(layer.conv_weight, layer.conv_bias, layer.conv_states, is_gated=True, pdl=pdl)

    def __call__(self, query: Tensor, metadata: StateMetadata, output: Tensor) -> None:
        """query [T, 3 E] -> output [T, E], contiguous; rows of padding are left as they are"""
        common = metadata.common
        self._convolve(
            query, output, common.query_start_loc, common.seq_lens, common.block_table, num_reqs=common.num_reqs,
            is_single=not metadata.is_scanned,
        )  # fmt: skip
