"""Products of up to 64 rows with adapters on Hopper: `hopper_split_k.py`'s kernel adds them to its sums, before it rounds.

`lora_shrink` comes before each product, which fetches its first weights meanwhile; nothing comes behind it. More rows, other
devices and matrices: composed, of the base product and `lora`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import triton

from pelton.lora.op import AdaptedNeeds, AdaptedTensors, LoraNeeds
from pelton.ops.interface import LinearNeeds
from pelton_backends.triton.launch import alignment
from pelton_backends.triton.ops import small_batch
from pelton_backends.triton.ops.hopper_split_k import HopperAdapters, HopperProduct, can_multiply, choose_hopper_tiling
from pelton_backends.triton.ops.large_batch import add_norm
from pelton_backends.triton.ops.lora import TritonLora
from pelton_backends.triton.ops.lora_gemv import can_read
from pelton_backends.triton.ops.lora_shrink import Expand, Low, Shrink, reasons_against
from pelton_backends.triton.ops.split_k import SMALLEST_TILE

if TYPE_CHECKING:
    from torch import Tensor

MAX_TOKENS = 64
MOST_TILES = 16
"""Of rows, whose B a product's programs read themselves; that of more is multiplied by a kernel of its own before the product."""
HANDLES = small_batch.HANDLES | {"norm", "activation"}
_NUMBERS_AHEAD = 8192  # of B, that a program's registers hold while its weights stream


def _refusals(needs: AdaptedNeeds) -> list[str]:
    return small_batch.refusals(needs.base) + reasons_against(needs.adapter)


def _token_range(needs: AdaptedNeeds) -> tuple[int, int | None]:
    return 2, MAX_TOKENS


class _Product:
    """A product of normed rows with adapters, of up to MAX_TOKENS rows."""

    def __init__(self, needs: AdaptedNeeds, tensors: AdaptedTensors) -> None:
        weights, adapter = tensors.base.linear, needs.adapter
        self._weight, self._parts = weights.tensors["weight"], adapter.parts
        self._activation = getattr(needs.base, "activation", None)
        counters = torch.zeros(
            triton.cdiv(self._weight.shape[0], SMALLEST_TILE) * triton.cdiv(MAX_TOKENS, 16), dtype=torch.int32,
            device=self._weight.device,
        )  # fmt: skip
        self._product = HopperProduct(self._weight, weights.bias, self._activation, counters)
        bare = LoraNeeds(
            dtype=adapter.dtype, in_features=adapter.in_features, parts=adapter.parts, rank=adapter.rank,
            num_slots=adapter.num_slots,
        )  # fmt: skip
        self._shrink, self._rank, self._b, self._rows = (
            Shrink(bare, tensors.adapter),
            adapter.rank,
            tensors.adapter.b,
            tensors.adapter.rows,
        )
        self._expand = Expand(bare, tensors.adapter)
        self._is_ours = can_multiply(self._weight) and can_read(tensors.adapter)

    def takes(self, x: Tensor) -> bool:
        if not (self._is_ours and self._product.takes(x)):
            return False
        rows = choose_hopper_tiling(x.shape[0], *self._weight.shape).rows
        return self._activation is not None or all(size % rows == 0 for size in self._parts[:-1])

    def __call__(self, x: Tensor) -> Tensor:
        tiling = choose_hopper_tiling(x.shape[0], *self._weight.shape)
        low = self._shrink(x)
        adapters = (
            self._given(self._expand(low, x.shape[0]))
            if self._rows.num_tiles(x.shape[0]) > MOST_TILES
            else self._adapters(low, tiling.rows)
        )
        return self._product(x, tiling, adapters=adapters)

    def _given(self, delta: Tensor) -> HopperAdapters:
        constants = dict.fromkeys(("RANK", "LOW_SPLITS", "NUM_PARTS", "SECOND", "THIRD", "AHEAD"), 0)
        return HopperAdapters((None, None, None, None, None, 0, delta, self._rows.token_slots), constants, "apart")

    def _adapters(self, low: Low, rows: int) -> HopperAdapters:
        first, second = (*self._parts, 1 << 30, 1 << 30)[:2]
        numbers = rows * self._rank * (1 if self._activation is None else 2)
        constants = {
            "RANK": self._rank, "LOW_SPLITS": low.splits, "NUM_PARTS": len(self._parts), "SECOND": first,
            "THIRD": first + second, "AHEAD": max(min(_NUMBERS_AHEAD // numbers, 8), 1),
        }  # fmt: skip
        taken, b = self._rows, self._b
        return HopperAdapters(
            (low.sums, b, taken.tile_slot, taken.token_tile, taken.num_used, b.stride(0), None, None),
            constants, (*constants.values(), alignment(b), b.stride(0) % 16),
        )  # fmt: skip


class LoraHopperLinear:
    handles = HANDLES
    unsupported = staticmethod(_refusals)
    token_range = staticmethod(_token_range)

    @staticmethod
    def bind(needs: AdaptedNeeds, tensors: AdaptedTensors) -> Callable[[Tensor], Tensor]:
        product = _Product(needs, tensors)
        linear = small_batch.SmallBatchLinear.bind(needs.base, tensors.base)
        adapter = TritonLora.bind(needs.adapter, tensors.adapter)

        def lora_linear(x: Tensor) -> Tensor:
            return product(x) if product.takes(x) else adapter(x, linear(x))

        return lora_linear


class LoraHopperAddNormLinear:
    handles = HANDLES
    unsupported = staticmethod(_refusals)
    token_range = staticmethod(_token_range)

    @staticmethod
    def bind(needs: AdaptedNeeds, tensors: AdaptedTensors) -> Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]:
        product, base, parts = _Product(needs, tensors), needs.base, tensors.base
        assert not isinstance(needs.base, LinearNeeds)
        linear = small_batch.product_of(parts.linear)  # gate and up without their activation, which `lora` applies
        adapter = TritonLora.bind(needs.adapter, tensors.adapter)

        def lora_add_norm_linear(hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
            residual, rows = add_norm(hidden, residual, parts.norm, base.norm, parts.post_norm, base.post_norm)
            return (product(rows) if product.takes(rows) else adapter(residual, linear(rows))), residual

        return lora_add_norm_linear
