"""Products of up to 64 rows with adapters on Hopper, which add them to their sums before they round: `hopper_words_kernel.py`, and
`hopper_gated_kernel.py` for gate and up.

More rows, other devices and matrices: composed, of the base product and `lora`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from pelton.lora.op import AdaptedNeeds, AdaptedTensors, LoraTensors
from pelton.lora.rows import PANEL, padded_ranks
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
from pelton_backends.triton.ops.lora.hopper_gated_kernel import adapted_gated_kernel
from pelton_backends.triton.ops.lora.hopper_shared_kernel import adapted_shared_kernel
from pelton_backends.triton.ops.lora.hopper_words_kernel import adapted_words_kernel
from pelton_backends.triton.ops.lora.linear import TritonLora, sort_rows
from pelton_backends.triton.ops.lora.shrink import reasons_against
from pelton_backends.triton.ops.pieces import empty_rows
from pelton_backends.triton.runtime import H200_MEMORY, has_pdl, launch_options, num_sms

if TYPE_CHECKING:
    from torch import Tensor

MAX_TOKENS = 64
MOST_SHARES = 8
_OWN_SHARES = 4  # of programs that do nothing else
_GATED_SHARES, _FEW_TOKENS = 8, 32  # of gate and up, of up to so many rows
_SHARE_COLUMNS = 512  # of x, at least
_SCRATCH = 10 << 10
_PROGRAMS = 132  # that an H200 runs at once
HANDLES = small_batch.HANDLES | {"norm", "activation"}


def _refusals(needs: AdaptedNeeds) -> list[str]:
    return small_batch.refusals(needs.base) + reasons_against(needs.adapter)


def _token_range(needs: AdaptedNeeds) -> tuple[int, int | None]:
    return 2, MAX_TOKENS


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
    return triton.cdiv(min(MAX_TOKENS, triton.cdiv(num_slots * rank, PANEL)), 2) * 2


def low_tiles(num_tokens: int, num_slots: int, rank: int, rows: int) -> int:
    """Most tiles of A that have rows, of one part and one share."""
    return triton.cdiv(min(num_tokens, triton.cdiv(num_slots * rank, PANEL)), rows // PANEL)


def can_copy(tensors: LoraTensors) -> bool:
    """Return whether a panel of B has ranks of neighbouring slots."""
    num_slots, rank, _ = tensors.b.shape
    return tensors.b.stride() == (rank, 1, padded_ranks(num_slots * rank))


class _Cut(NamedTuple):
    """How a call is cut, and what both kernels take."""

    tiling: AdaptedTiling
    num_blocks: int  # of tokens
    low_programs: int
    num_programs: int
    descriptors: tuple[TensorDescriptor, TensorDescriptor, TensorDescriptor, TensorDescriptor]  # x, weight, A, B
    out: Tensor
    partials: Tensor | None


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
        self._described: dict[tuple[int, int], tuple[TensorDescriptor, TensorDescriptor, TensorDescriptor]] = {}
        self._is_ours = can_multiply(self._weight) and can_copy(tensors.adapter)
        self._rows.sort, self._rows.unit_slots = sort_rows, PANEL // self._rank

    def takes(self, x: Tensor) -> bool:
        if not (self._is_ours and HopperProduct.takes(x) and x.shape[0] <= MAX_TOKENS):
            return False
        rows = choose_hopper_tiling(x.shape[0], *self._weight.shape).rows
        return self._activation is not None or all(size % rows == 0 for size in self._parts[:-1])

    def __call__(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def _cut(self, x: Tensor) -> _Cut:
        num_tokens, (out_features, in_features), is_gated = x.shape[0], self._weight.shape, self._activation is not None
        tiling = choose_adapted_tiling(
            num_tokens, out_features, in_features, self._rank, len(self._parts), self._rows.num_slots, is_gated=is_gated
        )
        rows, columns, split, _, tokens, shares = tiling
        num_tiles, num_blocks = triton.cdiv(out_features, rows), triton.cdiv(num_tokens, tokens)
        partials = None
        if split > 1:
            shape = (num_tiles, num_blocks, split, rows, tokens)
            partials = torch.empty(shape, dtype=torch.float32, device=x.device)
        panels = columns // panel_of(x)
        low_programs = (
            low_tiles(num_tokens, self._rows.num_slots, self._rank, rows) * num_blocks * len(self._parts) * shares
        )
        described = self._described.get((rows, panels)) or self._describe(rows, panels)
        rows_of_x = panels_of(x, rows_in_memory(x, num_blocks * tokens), tokens, panels)
        return _Cut(
            tiling, num_blocks, low_programs, low_programs + num_tiles * split * num_blocks, (rows_of_x, *described),
            empty_rows(num_tokens, out_features // 2 if is_gated else out_features, x), partials,
        )  # fmt: skip

    def _key(self, x: Tensor, tiling: AdaptedTiling) -> tuple[Any, ...]:
        return (
            x.dtype, x.device, self._weight.shape, self._activation, self._bias is None, alignment(self._bias), self._parts,
            self._rank, tiling,
        )  # fmt: skip

    def _constants(self, tiling: AdaptedTiling) -> dict[str, Any]:
        out_features, in_features = self._weight.shape
        return {
            "N": out_features, "K": in_features, "M": tiling.tokens, "R": tiling.rows, "C": tiling.columns,
            "SPLIT": tiling.split, "STAGES": tiling.stages, "RANK": self._rank, "SHARES": tiling.shares,
        }  # fmt: skip

    def _describe(self, rows: int, panels: int) -> tuple[TensorDescriptor, TensorDescriptor, TensorDescriptor]:
        """Weight, A and B, of whose adapters a unit is copied at once."""
        (out_features, in_features), slots, rank = self._weight.shape, self._rows.num_slots, self._rank
        a, b, panel = self._a, self._b.transpose(1, 2), panel_of(self._weight)
        weight = (panels_of if self._activation is None else paired_panels_of)(self._weight, out_features, rows, panels)
        described_a = TensorDescriptor(
            a, [slots, a.shape[1], in_features], [a.stride(0), in_features, 1], [PANEL // rank, rank, panel],
            gl.NVMMASharedLayout(PANEL_BYTES, 16, 3),
        )  # fmt: skip
        # B's columns follow those of the weight: a panel has the ranks of a unit.
        num_columns, stride = slots * rank, b.stride(1)
        num_panels = triton.cdiv(num_columns, PANEL)
        half, unit = out_features // 2, min(num_columns, PANEL)
        if self._activation is None:
            shape, strides, box = [num_panels, out_features, unit], [unit, stride, 1], [1, rows, PANEL]
        else:
            shape, strides, box = (
                [num_panels, half, 2, unit],
                [unit, stride, half * stride, 1],
                [1, rows // 2, 2, PANEL],
            )
        described_b = TensorDescriptor(b, shape, strides, box, gl.NVMMASharedLayout(PANEL_BYTES, 16, len(shape)))
        found = self._described[rows, panels] = weight, described_a, described_b
        return found


class _PlainProduct(_Product):
    """Without an activation. Its programs have little to do: A x comes to each of them as words, whose way is short."""

    def __init__(self, needs: AdaptedNeeds, tensors: AdaptedTensors) -> None:
        super().__init__(needs, tensors)
        num_words = MAX_TOKENS * len(self._parts) * MOST_SHARES * self._rank
        self._words = torch.zeros(num_words, dtype=torch.int64, device=self._weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        tiling, num_blocks, low_programs, num_programs, descriptors, out, partials = self._cut(x)
        taken, (first, second) = self._rows, (*self._parts, 1 << 30, 1 << 30)[:2]
        arguments = (
            *descriptors, self._bias, out, partials, self._counters, taken.units, taken.num_units, taken.token_slots, taken.step,
            self._words, x.shape[0],
        )  # fmt: skip
        constants = {
            **self._constants(tiling), "NUM_PARTS": len(self._parts), "SECOND": first, "THIRD": first + second,
        }  # fmt: skip
        options: dict[str, Any] = {"num_warps": 4, **launch_options(has_pdl(x.device))}
        shares = shared_shares(num_programs - low_programs, low_programs, tiling.shares, num_blocks, num_sms(x.device))
        if shares is None:
            _launch_plain(
                self._key(x, tiling), (num_programs,), (*arguments, num_blocks, low_programs), constants, **options
            )
        else:
            tiling, num_shares = tiling._replace(shares=shares), low_programs // tiling.shares * shares
            _launch_shared(
                self._key(x, tiling), (num_programs - low_programs,), (*arguments, num_shares), constants | {"SHARES": shares},
                **options,
            )  # fmt: skip
        return out


class _GatedProduct(_Product):
    """Gate and up. Two rounds of programs have time for A x, which the copy engine brings them from memory."""

    def __init__(self, needs: AdaptedNeeds, tensors: AdaptedTensors) -> None:
        super().__init__(needs, tensors)
        self._most_units = most_units(self._rows.num_slots, self._rank)
        # Tiles of A, by blocks of 16 tokens: how many shares of one are done, and the step that it was last done in.
        num_tiles = self._most_units * triton.cdiv(MAX_TOKENS, 16) * 2
        self._low_counters, self._done = torch.zeros(2, num_tiles, dtype=torch.int32, device=self._weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        tiling, num_blocks, low_programs, num_programs, descriptors, out, partials = self._cut(x)
        taken, most = self._rows, self._most_units
        low = torch.empty(2 * most, MAX_TOKENS, PANEL, dtype=x.dtype, device=x.device)
        low_rows = TensorDescriptor(
            low, [*low.shape], [*low.stride()], [1, tiling.tokens, PANEL], gl.NVMMASharedLayout(PANEL_BYTES, 16, 3)
        )  # fmt: skip
        low_sums = None
        if tiling.shares > 1:
            low_sums = torch.empty(low_programs * tiling.rows * tiling.tokens, dtype=torch.float32, device=x.device)
        _launch_gated(
            (*self._key(x, tiling), most), (num_programs,),
            (
                *descriptors, low_rows, self._bias, out, partials, self._counters, taken.units, taken.num_units,
                taken.token_slots, taken.step, low, low_sums, self._low_counters, self._done, x.shape[0], num_blocks,
                low_programs,
            ),
            {
                **self._constants(tiling), "ACTIVATION": self._activation, "MOST": most,
                "LOW_TILES": triton.next_power_of_2(triton.cdiv(most, tiling.rows // PANEL)),
            },
            num_warps=4, **launch_options(has_pdl(x.device)),
        )  # fmt: skip
        return out


@cache
def choose_adapted_tiling(
    num_tokens: int, out_features: int, in_features: int, rank: int, num_parts: int, num_slots: int, *, is_gated: bool
) -> AdaptedTiling:
    """The base product's, so that sums are made in its order, with as many buffers as there is memory for.

    A x in four shares is there before the last weights are. Where only the programs of two shares find multiprocessors beside
    those of the weight, it is two. A of gate and of up that is one tile each is cut into eight, which come in whole before the
    wait: 0.2 to 0.6 us a layer of Llama-3.1-8B less with 32 rows and 8 adapters (H200).
    """
    rows, columns, split, stages, tokens = choose_hopper_tiling(num_tokens, out_features, in_features)
    stages = min(stages, triton.cdiv(in_features, columns * split))
    programs = triton.cdiv(out_features, rows) * split * triton.cdiv(num_tokens, tokens)
    others = low_tiles(num_tokens, num_slots, rank, rows) * num_parts * triton.cdiv(num_tokens, tokens)
    shares = 2 if programs + 2 * others <= _PROGRAMS < programs + 4 * others else _OWN_SHARES
    if is_gated:
        stages = max(2, stages)
        comes_in_whole = in_features <= columns * stages * _GATED_SHARES
        if num_tokens <= _FEW_TOKENS and others == num_parts and comes_in_whole:
            shares = _GATED_SHARES
        while shares > 1 and in_features < _SHARE_COLUMNS * shares:
            shares //= 2
    else:
        memory = H200_MEMORY - _SCRATCH - columns * tokens * 2
        stages = min(stages, memory // ((rows + tokens) * columns * 2))
    return AdaptedTiling(rows, columns, split, stages, tokens, shares)


def shared_shares(programs: int, low_programs: int, shares: int, num_blocks: int, num_sms: int) -> int | None:
    """In how many shares of the columns the weight's programs make A x themselves; None where programs of their own make it, which
    run beside all of the weight's."""
    if num_blocks > 1 or programs > num_sms or programs + low_programs <= num_sms:
        return None
    units, found = low_programs // shares, 1
    while found < MOST_SHARES and units * found * 2 <= programs:
        found *= 2
    return found


_launch_shared = Launcher(adapted_shared_kernel)
_launch_plain, _launch_gated = Launcher(adapted_words_kernel), Launcher(adapted_gated_kernel)


class LoraHopperLinear:
    handles = HANDLES
    unsupported = staticmethod(_refusals)
    token_range = staticmethod(_token_range)

    @staticmethod
    def bind(needs: AdaptedNeeds, tensors: AdaptedTensors) -> Callable[[Tensor], Tensor]:
        product = _PlainProduct(needs, tensors)
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
        base, parts = needs.base, tensors.base
        product = (_PlainProduct if needs.adapter.activation is None else _GatedProduct)(needs, tensors)
        assert not isinstance(needs.base, LinearNeeds)
        linear = small_batch.product_of(parts.linear)  # gate and up without their activation, which `lora` applies
        adapter = TritonLora.bind(replace(needs.adapter, norm=None), replace(tensors.adapter, norm=None))

        def lora_add_norm_linear(hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
            residual, rows = add_norm(hidden, residual, parts.norm, base.norm, parts.post_norm, base.post_norm)
            return (product(rows) if product.takes(rows) else adapter(rows, linear(rows))), residual

        return lora_add_norm_linear
