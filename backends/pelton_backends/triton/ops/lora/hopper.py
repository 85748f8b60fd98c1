"""Products of up to 64 rows with adapters on Hopper: `lora_hopper_kernel.py` adds them to its sums, before it rounds.

More rows, other devices and matrices: composed, of the base product and `lora`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from pelton.lora.op import AdaptedNeeds, AdaptedTensors
from pelton.ops.interface import LinearNeeds
from pelton_backends.triton.launch import Launcher, alignment
from pelton_backends.triton.ops.linear import small_batch
from pelton_backends.triton.ops.linear.hopper_split_k import (
    PANEL_BYTES,
    HopperProduct,
    can_multiply,
    choose_hopper_tiling,
    paired_panels_of,
    panel_of,
    panels_of,
    rows_in_memory,
)
from pelton_backends.triton.ops.linear.large_batch import add_norm
from pelton_backends.triton.ops.linear.split_k import SMALLEST_TILE
from pelton_backends.triton.ops.lora.gemv import can_read
from pelton_backends.triton.ops.lora.hopper_kernel import adapted_kernel
from pelton_backends.triton.ops.lora.linear import TritonLora, sort_rows
from pelton_backends.triton.ops.lora.shrink import reasons_against
from pelton_backends.triton.ops.pieces import empty_rows
from pelton_backends.triton.runtime import has_pdl, launch_options

if TYPE_CHECKING:
    from torch import Tensor

MAX_TOKENS = 64
MOST_SHARES = 4
UNIT_RANKS = 64
"""Of the neighbouring slots that are copied at once."""
_SHARE_COLUMNS = 512  # of x, at least
_PROGRAMS = 132  # that an H200 runs at once
HANDLES = small_batch.HANDLES | {"norm", "activation"}


def _refusals(needs: AdaptedNeeds) -> list[str]:
    return small_batch.refusals(needs.base) + reasons_against(needs.adapter)


def _token_range(needs: AdaptedNeeds) -> tuple[int, int | None]:
    return 2, MAX_TOKENS


class _Product:
    """A product of normed rows with adapters, of up to MAX_TOKENS rows."""

    def __init__(self, needs: AdaptedNeeds, tensors: AdaptedTensors) -> None:
        weights, adapter = tensors.base.linear, needs.adapter
        self._weight, self._bias, self._parts = weights.tensors["weight"], weights.bias, adapter.parts
        self._activation = getattr(needs.base, "activation", None)
        self._a, self._b, self._rows, self._rank = (
            tensors.adapter.a, tensors.adapter.b, tensors.adapter.rows, adapter.rank
        )  # fmt: skip
        device = self._weight.device
        num_counters = triton.cdiv(self._weight.shape[0], SMALLEST_TILE) * triton.cdiv(MAX_TOKENS, 16)
        self._counters = torch.zeros(num_counters, dtype=torch.int32, device=device)
        # Tiles of A, by blocks of 16 tokens: how many shares of one are done, and the step that it was last done in.
        num_tiles = most_units(self._rows.num_slots, self._rank) * triton.cdiv(MAX_TOKENS, 16) * len(self._parts)
        self._low_counters, self._done = torch.zeros(2, num_tiles, dtype=torch.int32, device=device)
        self._described: dict[tuple[int, int], tuple[TensorDescriptor, TensorDescriptor, TensorDescriptor]] = {}
        self._is_ours = can_multiply(self._weight) and can_read(tensors.adapter)
        self._rows.sort, self._rows.unit_slots = sort_rows, UNIT_RANKS // self._rank

    def takes(self, x: Tensor) -> bool:
        if not (self._is_ours and HopperProduct.takes(x) and x.shape[0] <= MAX_TOKENS):
            return False
        rows = choose_hopper_tiling(x.shape[0], *self._weight.shape).rows
        return self._activation is not None or all(size % rows == 0 for size in self._parts[:-1])

    def __call__(self, x: Tensor) -> Tensor:
        num_tokens, (out_features, in_features) = x.shape[0], self._weight.shape
        tiling = choose_adapted_tiling(
            num_tokens, out_features, in_features, self._rank, len(self._parts), self._rows.num_slots
        )  # fmt: skip
        rows, columns, split, stages, tokens, shares = tiling
        num_columns = out_features // 2 if self._activation is not None else out_features
        num_tiles, num_blocks = triton.cdiv(out_features, rows), triton.cdiv(num_tokens, tokens)
        out, partials = empty_rows(num_tokens, num_columns, x), None
        if split > 1:
            shape = (num_tiles, num_blocks, split, rows, tokens)
            partials = torch.empty(shape, dtype=torch.float32, device=x.device)
        panels = columns // panel_of(x)
        weight, a, b = self._described.get((rows, panels)) or self._describe(rows, panels)
        rows_of_x = panels_of(x, rows_in_memory(x, num_blocks * tokens), tokens, panels)
        num_parts, most = len(self._parts), most_units(self._rows.num_slots, self._rank)
        low_programs = low_tiles(num_tokens, self._rows.num_slots, self._rank, rows) * num_blocks * num_parts * shares
        low = torch.empty(
            num_parts * most * (UNIT_RANKS // self._rank), MAX_TOKENS, self._rank, dtype=x.dtype, device=x.device
        )
        box = [UNIT_RANKS // self._rank, tokens, self._rank]
        low_rows = TensorDescriptor(
            low, [*low.shape], [*low.stride()], box, gl.NVMMASharedLayout(2 * self._rank, 16, 3)
        )
        low_sums = None
        if shares > 1:
            low_sums = torch.empty(low_programs * rows * tokens, dtype=torch.float32, device=x.device)
        taken, (first, second) = self._rows, (*self._parts, 1 << 30, 1 << 30)[:2]
        _launch(
            (x.dtype, x.device, out_features, in_features, self._activation, self._bias is None, alignment(self._bias),
             self._parts, self._rank, most, tiling),
            (low_programs + num_tiles * split * num_blocks,),
            (
                rows_of_x, weight, a, b, low_rows, self._bias, out, partials, self._counters, taken.units, taken.num_units,
                taken.token_slots, taken.step, low, low_sums, self._low_counters, self._done, num_tokens, num_blocks,
                low_programs,
            ),
            {
                "N": out_features, "K": in_features, "ACTIVATION": self._activation, "M": tokens, "R": rows, "C": columns,
                "SPLIT": split, "STAGES": stages, "RANK": self._rank, "NUM_PARTS": num_parts, "SECOND": first,
                "THIRD": first + second, "SHARES": shares, "MOST": most,
                "LOW_TILES": triton.next_power_of_2(triton.cdiv(most, rows // UNIT_RANKS)),
            },
            num_warps=4, **launch_options(has_pdl(x.device)),
        )  # fmt: skip
        return out

    def _describe(self, rows: int, panels: int) -> tuple[TensorDescriptor, TensorDescriptor, TensorDescriptor]:
        """Weight, A and B, of whose adapters a unit is copied at once."""
        (out_features, in_features), slots, rank = self._weight.shape, self._rows.num_slots, self._rank
        a, b, panel = self._a, self._b.transpose(1, 2), panel_of(self._weight)
        weight = (panels_of if self._activation is None else paired_panels_of)(self._weight, out_features, rows, panels)
        described_a = TensorDescriptor(
            a, [slots, a.shape[1], in_features], [a.stride(0), in_features, 1], [UNIT_RANKS // rank, rank, panel],
            gl.NVMMASharedLayout(PANEL_BYTES, 16, 3),
        )  # fmt: skip
        if self._activation is None:
            shape, strides, box = [slots, out_features, rank], [b.stride(0), rank, 1], [UNIT_RANKS // rank, rows, rank]
        else:
            half = out_features // 2
            shape, strides, box = (
                [slots, half, 2, rank],
                [b.stride(0), rank, half * rank, 1],
                [UNIT_RANKS // rank, rows // 2, 2, rank],
            )
        described_b = TensorDescriptor(b, shape, strides, box, gl.NVMMASharedLayout(2 * rank, 16, len(shape)))
        found = self._described[rows, panels] = weight, described_a, described_b
        return found


class AdaptedTiling(NamedTuple):
    """`HopperTiling`, and in how many shares of the columns A x is made."""

    rows: int
    columns: int
    split: int
    stages: int
    tokens: int
    shares: int


def most_units(num_slots: int, rank: int) -> int:
    """Most units of a step, as a tile of A has two of them at most."""
    return triton.cdiv(min(MAX_TOKENS, triton.cdiv(num_slots * rank, UNIT_RANKS)), 2) * 2


def low_tiles(num_tokens: int, num_slots: int, rank: int, rows: int) -> int:
    """Most tiles of A that have rows, of one part and one share."""
    return triton.cdiv(min(num_tokens, triton.cdiv(num_slots * rank, UNIT_RANKS)), rows // UNIT_RANKS)


@cache
def choose_adapted_tiling(
    num_tokens: int, out_features: int, in_features: int, rank: int, num_parts: int, num_slots: int
) -> AdaptedTiling:
    """The base product's, so that sums are made in its order.

    A x in four shares is there before the last weights are. Where only the programs of two shares find multiprocessors beside
    those of the weight, it is two.
    """
    rows, columns, split, stages, tokens = choose_hopper_tiling(num_tokens, out_features, in_features)
    stages = max(2, min(stages, triton.cdiv(in_features, columns * split)))
    programs = triton.cdiv(out_features, rows) * split * triton.cdiv(num_tokens, tokens)
    others = low_tiles(num_tokens, num_slots, rank, rows) * num_parts * triton.cdiv(num_tokens, tokens)
    shares = 2 if programs + 2 * others <= _PROGRAMS < programs + 4 * others else MOST_SHARES
    while shares > 1 and in_features < _SHARE_COLUMNS * shares:
        shares //= 2
    return AdaptedTiling(rows, columns, split, stages, tokens, shares)


_launch = Launcher(adapted_kernel)


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
