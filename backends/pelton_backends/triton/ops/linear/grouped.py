"""Products with weights of 4 or 8 bits in groups of columns that share a scale and a zero point ("int4_grouped", "int8_grouped") or a
scale and a minimum ("int4_minima", "int8_minima").

One row streams the codes through a matrix-vector kernel, which norms it too. Up to `MAX_TOKENS` rows take a kernel that unpacks a tile
of the weight in registers and multiplies on tensor cores, where it can Hopper's own (`hopper_grouped`); beyond that the matrix is
dequantized into memory first (`decoded`). The layout of codes and scales is in `grouped_kernels.py`.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton

from pelton.ops.interface import (
    AddNormGatedLinear,
    AddNormGatedLinearNeeds,
    AddNormGatedLinearTensors,
    AddNormLinear,
    AddNormLinearNeeds,
    AddNormLinearTensors,
    Linear,
    LinearNeeds,
    LinearTensors,
    LinearWeights,
)
from pelton.platform.compiling import launch
from pelton_backends.triton.launch import alignment
from pelton_backends.triton.ops.linear import hopper_grouped
from pelton_backends.triton.ops.linear.decoded import multiply_decoded
from pelton_backends.triton.ops.linear.gemv import HANDLES, inner_contiguous
from pelton_backends.triton.ops.linear.grouped_kernels import (
    dequantize_kernel,
    many_rows_kernel,
    one_row_add_norm_kernel,
    one_row_kernel,
)
from pelton_backends.triton.ops.linear.large_batch import add_norm, takes_unsummed
from pelton_backends.triton.ops.linear.refusals import product_refusals
from pelton_backends.triton.runtime import has_pdl, launch_options, num_sms

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

FORMATS = {"int4_grouped": 4, "int8_grouped": 8, "int4_minima": 4, "int8_minima": 8}
DTYPES = ("bfloat16", "float16")
MAX_TOKENS = 256
BLOCK = 128  # columns
_SMALLEST_TILE = 64  # rows of a weight
NEAR_BYTES, _LARGE_BYTES = 8 << 20, 48 << 20
"""Of a large matrix behind O, brought into L2 while attention, at one row, leaves the memory idle. One row of Llama-3.1-8B, us a step:
4 MiB -13, 8 MiB -17 to -25, 12 MiB -16, 20 MiB +7. Before other products it was slower, see docs/performance/models.md."""
TWO_23 = 0x4B000000
"""Bits of 2.0 ** 23."""
POWERS = {torch.bfloat16: 0x43004300, torch.float16: 0x64006400}
"""Bits of 128 and of 1,024, twice."""


class RowTile(NamedTuple):
    """Sizes of what one program of a matrix-vector kernel computes, in the words of `grouped_kernels.py`."""

    W: int
    R: int
    NUM: int
    AHEAD: int
    SPLIT: int = 1  # programs that share K: of a product without a norm before it


@cache
def choose_row_tile(num_rows: int, in_features: int, bits: int, programs: int, has_norm: bool) -> RowTile:
    """num_rows: of the weight; programs: multiprocessors of the device.

    Measured on an H200, Llama-3.1-8B's shapes in 4 bits, us (GB/s): QKV 6.4 (2,100), O 5.2 (1,720), gate and up 19.5 (3,200), down 11.4
    (2,730; with 2 or 4 pieces ahead 12.2 and 16.6; 14.6 where 14 programs share its rows, and add up). A third piece of O ahead makes the
    chain of the four 0.25 to 0.4 us shorter, one of QKV 0.3 longer.
    """
    blocks = triton.cdiv(in_features, BLOCK)
    if blocks > 32 and not has_norm:
        if bits == 8:  # whole rows leave room for one program a multiprocessor
            return RowTile(4, 32, 2, 2, triton.cdiv(blocks, 8))
        return RowTile(8, 16, triton.cdiv(blocks, 8), 3)
    warps, rows = (4, 32) if num_rows >= 32 * 4 * programs else (8, 16)
    warps = min(triton.next_power_of_2(blocks), warps)
    num = triton.cdiv(blocks, warps)
    is_light = bits == 4 and rows == 16 and not has_norm
    return RowTile(warps, rows, num, min(num, 3 if is_light else 2))


class Tiling(NamedTuple):
    """How `many_rows_kernel` cuts its work."""

    tokens: int
    rows: int
    split: int
    stages: int
    num_warps: int


@cache
def choose_tiling(num_tokens: int, out_features: int, in_features: int, programs: int) -> Tiling:
    """programs: multiprocessors of the device. K is cut as measured on an H200: 8 rows O 10.8, gate and up 54.5, down 26.8 us; 32 rows
    12.0, 56.7, 29.0; 64 rows 13.6, 66.8, 34.0; 128 rows 22.2, 94.8, 59.2."""
    tokens = min(max(triton.next_power_of_2(num_tokens), 16), 128)
    rows = 128 if tokens == 128 else _SMALLEST_TILE
    tiles = triton.cdiv(out_features, rows) * triton.cdiv(num_tokens, tokens)
    blocks, split = triton.cdiv(in_features, BLOCK), 1
    wanted = {16: 2 * programs, 32: 2 * programs, 64: programs, 128: programs // 2}[tokens]
    while tiles * split < wanted and blocks >= 8 * split:
        split *= 2
    return Tiling(tokens, rows, split, 3 if tokens == 128 else 4, 8 if tokens == 128 else 4)


class GroupedMatrix:
    """One bound matrix."""

    def __init__(
        self, weights: LinearWeights, dtype: str, activation: str | None = None, *, has_norm: bool = False
    ) -> None:  # fmt: skip
        spec = weights.spec
        self.codes, self.scales, self.bias = weights.tensors["codes"], weights.tensors["scales"], weights.bias
        self.order = weights.tensors.get("order")
        self.activation, self.dtype = activation, getattr(torch, dtype)
        self.out_features, self.in_features = spec.out_features, spec.in_features
        self.num_columns = spec.out_features // (1 if activation is None else 2)
        self.form = {
            "K": spec.in_features, "G": spec.in_features // self.scales.shape[1], "B": FORMATS[spec.weight_format],
            "MINIMA": spec.weight_format.endswith("_minima"),
        }  # fmt: skip
        self.programs = num_sms(self.codes.device)
        num_counters = triton.cdiv(spec.out_features, _SMALLEST_TILE // 2) * triton.cdiv(MAX_TOKENS, 16)
        self.counters = torch.zeros(num_counters, dtype=torch.int32, device=self.codes.device)
        pdl = has_pdl(self.codes.device)
        self.launch_flags = {"PDL": pdl, **launch_options(pdl)}
        self.near: Tensor | None = None
        self.on_hopper: hopper_grouped.GroupedProduct | None = None
        if spec.weight_format == "int4_grouped" and hopper_grouped.can_multiply(
            self.codes, self.scales, spec.in_features
        ):
            self.on_hopper = hopper_grouped.GroupedProduct(
                self.codes, self.scales, self.bias, activation, self.counters
            )
        self.row_tile = choose_row_tile(spec.out_features, spec.in_features, self.form["B"], self.programs, has_norm)

    def read_next(self, tensors: Mapping[str, Tensor]) -> None:
        """See `Linear`."""
        codes = tensors.get("codes")
        is_like = codes is not None and codes.dtype == self.codes.dtype and self.form["B"] == 4
        if is_like and self.launch_flags["PDL"] and codes is not None and codes.nbytes >= _LARGE_BYTES:
            self.near = codes

    def row_flags(self, tile: RowTile) -> dict[str, Any]:
        flags = {"W": tile.W, "R": tile.R, "NUM": tile.NUM, "AHEAD": tile.AHEAD}
        return {"N": self.num_columns, **self.form, **flags, "num_warps": tile.W, **self.launch_flags}

    def num_row_programs(self, tile: RowTile) -> int:
        return triton.cdiv(self.num_columns, tile.R if self.activation is None else tile.R // 2)

    def multiply_one(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """x [1, K] -> [1, N] of `out_dtype` (x's when None), without an activation."""
        out = torch.empty((1, self.num_columns), dtype=out_dtype or x.dtype, device=x.device)
        tile, num_tiles, partials = self.row_tile, self.num_row_programs(self.row_tile), None
        if tile.SPLIT > 1:
            partials = torch.empty((num_tiles, tile.SPLIT, tile.R), dtype=torch.float32, device=x.device)
        flags = self.row_flags(tile)
        if self.near is not None:
            flags |= {"near": self.near, "NEAR": NEAR_BYTES, "HALF": self.near.nbytes // 2}
        launch(
            one_row_kernel, (num_tiles, tile.SPLIT),
            x, self.order, self.codes, self.scales, self.bias, out, partials, self.counters, POWERS[x.dtype],
            SPLIT=tile.SPLIT, **flags,
        )  # fmt: skip
        return out

    def __call__(self, x: Tensor, tiling: Tiling | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
        """x [T, K] -> x @ weight.T + bias of `out_dtype` (x's when None), or activation(gate) * up of its halves, of x's."""
        num_tokens, out_dtype = x.shape[0], out_dtype or x.dtype
        if num_tokens == 0:
            return torch.empty((0, self.num_columns), dtype=out_dtype, device=x.device)
        x = inner_contiguous(x) if self.order is None else x.index_select(1, self.order)
        if num_tokens > MAX_TOKENS:
            out = multiply_decoded(x, self.dequantized, self.out_features, self.bias, self.activation)
            return out.to(out_dtype)
        is_readable = x.stride(0) >= x.shape[1] and x.stride(0) % 16 == 0 and alignment(x) == 0
        if self.on_hopper is not None and tiling is None and is_readable:
            return self.on_hopper(x, out_dtype)
        tiling = tiling or choose_tiling(num_tokens, self.out_features, self.in_features, self.programs)
        num_tiles = triton.cdiv(self.num_columns, tiling.rows // (1 if self.activation is None else 2))
        num_blocks = triton.cdiv(num_tokens, tiling.tokens)
        partials = None
        if tiling.split > 1:
            shape = (num_tiles, num_blocks, tiling.split, tiling.rows, tiling.tokens)
            partials = torch.empty(shape, dtype=torch.float32, device=x.device)
        out = torch.empty((num_tokens, self.num_columns), dtype=out_dtype, device=x.device)
        launch(
            many_rows_kernel, (num_tiles, tiling.split, num_blocks),
            x, self.codes, self.scales, self.bias, out, partials, self.counters, num_tokens, x.stride(0), TWO_23,
            N=self.out_features, **self.form, ACTIVATION=self.activation, M=tiling.tokens, R=tiling.rows,
            SPLIT=tiling.split, STAGES=tiling.stages, num_warps=tiling.num_warps, **self.launch_flags,
        )  # fmt: skip
        return out

    def dequantized(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """Rows of the matrix in `dtype`, columns in the order of the codes."""
        codes, scales = self.codes[rows], self.scales[rows]
        weight = torch.empty((codes.shape[0], self.in_features), dtype=dtype, device=codes.device)
        grid = (triton.cdiv(codes.shape[0], 32), triton.cdiv(self.in_features, BLOCK))
        launch(
            dequantize_kernel,
            grid,
            codes,
            scales,
            weight,
            TWO_23,
            N=codes.shape[0],
            **self.form,
            R=32,
            **self.launch_flags,
        )
        return weight


def _refusals(needs: Any) -> list[str]:
    return product_refusals(needs, FORMATS, DTYPES)


class _BoundLinear:
    def __init__(self, matrix: GroupedMatrix, *, is_summed: bool) -> None:
        """is_summed: over ranks, before the next product reads the results."""
        self._matrix, self._is_summed = matrix, is_summed

    def __call__(self, x: Tensor) -> Tensor:
        return self._matrix.multiply_one(x.contiguous()) if x.shape[0] == 1 else self._matrix(x)

    def read_next(self, tensors: Mapping[str, Tensor]) -> None:
        if not self._is_summed:
            self._matrix.read_next(tensors)


class GroupedLinear:
    handles = HANDLES | {"is_ordered"}
    unsupported = staticmethod(_refusals)

    @staticmethod
    def bind(needs: LinearNeeds, tensors: LinearTensors) -> Linear:
        return _BoundLinear(GroupedMatrix(tensors.linear, needs.dtype), is_summed=tensors.reduce is not None)


def _add_norm_product(
    needs: AddNormLinearNeeds | AddNormGatedLinearNeeds,
    tensors: AddNormLinearTensors | AddNormGatedLinearTensors,
    activation: str | None,
) -> Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]:
    matrix = GroupedMatrix(tensors.linear, needs.dtype, activation, has_norm=True)
    norm, post_norm, tile = needs.norm, needs.post_norm, matrix.row_tile
    flags = {
        "UNIT_OFFSET": norm.unit_offset, "POST_UNIT_OFFSET": post_norm is not None and post_norm.unit_offset,
        "ACTIVATION": activation, **matrix.row_flags(tile),
    }  # fmt: skip
    post_eps = 0.0 if post_norm is None else post_norm.eps

    def one(hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        hidden, residual = hidden.contiguous(), None if residual is None else residual.contiguous()
        out = torch.empty((1, matrix.num_columns), dtype=hidden.dtype, device=hidden.device)
        # Not in place: programs read the old row while the first one writes the new one.
        total = None if residual is None and post_norm is None else torch.empty_like(hidden)
        launch(
            one_row_add_norm_kernel, (matrix.num_row_programs(tile),),
            hidden, residual, tensors.norm, tensors.post_norm, matrix.order, matrix.codes, matrix.scales, matrix.bias,
            out, total, norm.eps, post_eps, POWERS[hidden.dtype], **flags,
        )  # fmt: skip
        return out, hidden if total is None else total

    def call(hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if hidden.shape[0] == 1:
            return one(hidden, residual)
        residual, rows = add_norm(hidden, residual, tensors.norm, norm, tensors.post_norm, post_norm)
        return matrix(rows), residual

    call.takes_unsummed = activation is None and takes_unsummed(needs)  # type: ignore[attr-defined]
    return call


class GroupedAddNormLinear:
    handles = HANDLES | {"is_ordered"}
    unsupported = staticmethod(_refusals)

    @staticmethod
    def bind(needs: AddNormLinearNeeds, tensors: AddNormLinearTensors) -> AddNormLinear:
        return _add_norm_product(needs, tensors, None)


class GroupedAddNormGatedLinear:
    handles = HANDLES | {"is_ordered"}
    unsupported = staticmethod(_refusals)

    @staticmethod
    def bind(needs: AddNormGatedLinearNeeds, tensors: AddNormGatedLinearTensors) -> AddNormGatedLinear:
        return _add_norm_product(needs, tensors, needs.activation)
