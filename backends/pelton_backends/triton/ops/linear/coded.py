"""Products with weights in codes of a table ("nf4", "fp4").

One row streams the codes, with sums in float32. Up to `MAX_TOKENS` rows take a kernel that unpacks a tile of the weight in registers and
multiplies on tensor cores; beyond that the matrix is dequantized into memory first (`decoded`). The layout is in `coded_kernels.py`.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton

from pelton.ops.interface import (
    Linear,
    LinearNeeds,
    LinearTensors,
    LinearWeights,
)
from pelton.platform.compiling import launch
from pelton_backends.triton.ops.linear.coded_kernels import (
    coded_rows_kernel,
    decode_rows_kernel,
    one_coded_row_kernel,
)
from pelton_backends.triton.ops.linear.decoded import multiply_decoded
from pelton_backends.triton.ops.linear.gemv import HANDLES, inner_contiguous
from pelton_backends.triton.ops.linear.refusals import dtype_refusals, format_refusals
from pelton_backends.triton.runtime import has_pdl, launch_options, num_sms

if TYPE_CHECKING:
    from torch import Tensor

FORMATS = ("nf4", "fp4")
DTYPES = ("bfloat16", "float16")
MAX_TOKENS = 256
_SMALLEST_TILE = 64  # rows of a weight


class RowTile(NamedTuple):
    """Sizes of a program of the product with one row: rows, columns at a time, programs that share K."""

    rows: int
    columns: int
    split: int
    num_warps: int = 4


@cache
def choose_row_tile(num_rows: int, in_features: int, programs: int) -> RowTile:
    """num_rows: of the weight; programs: multiprocessors of the device."""
    columns = min(triton.next_power_of_2(in_features), 2048)
    rows, split = 8, 1
    while rows > 2 and triton.cdiv(num_rows, rows) < 4 * programs:
        rows //= 2
    steps = triton.cdiv(in_features, columns)
    while split < steps and triton.cdiv(num_rows, rows) * split < 4 * programs:
        split *= 2
    return RowTile(rows, columns, min(split, steps))


class Tiling(NamedTuple):
    """How `coded_rows_kernel` cuts its work."""

    tokens: int
    rows: int
    columns: int
    split: int
    stages: int
    num_warps: int


@cache
def choose_tiling(num_tokens: int, out_features: int, in_features: int, programs: int) -> Tiling:
    """programs: multiprocessors of the device."""
    tokens = min(max(triton.next_power_of_2(num_tokens), 16), 128)
    rows = 128 if tokens == 128 else _SMALLEST_TILE
    tiles = triton.cdiv(out_features, rows) * triton.cdiv(num_tokens, tokens)
    steps, split = triton.cdiv(in_features, 128), 1
    wanted = {16: 2 * programs, 32: 2 * programs, 64: programs, 128: programs // 2}[tokens]
    while tiles * split < wanted and steps >= 8 * split:
        split *= 2
    return Tiling(tokens, rows, 128, split, 3 if tokens == 128 else 4, 8 if tokens == 128 else 4)


class CodedMatrix:
    """One bound matrix."""

    def __init__(self, weights: LinearWeights) -> None:
        spec = weights.spec
        self.codes, self.scales, self.bias = weights.tensors["codes"], weights.tensors["scales"], weights.bias
        self.out_features, self.in_features = spec.out_features, spec.in_features
        self.form = {
            "N": spec.out_features, "K": spec.in_features, "G": spec.in_features // self.scales.shape[1], "FORMAT": spec.weight_format,
        }  # fmt: skip
        self.programs = num_sms(self.codes.device)
        num_counters = triton.cdiv(spec.out_features, 2) + triton.cdiv(spec.out_features, _SMALLEST_TILE) * triton.cdiv(
            MAX_TOKENS, 16
        )
        self.counters = torch.zeros(num_counters, dtype=torch.int32, device=self.codes.device)
        pdl = has_pdl(self.codes.device)
        self.launch_flags = {"PDL": pdl, **launch_options(pdl)}
        self.row_tile = choose_row_tile(spec.out_features, spec.in_features, self.programs)

    def multiply_one(self, x: Tensor, out_dtype: torch.dtype | None = None, tile: RowTile | None = None) -> Tensor:
        """x [1, K] -> [1, N] of `out_dtype` (x's when None)."""
        tile = tile or self.row_tile
        out = torch.empty((1, self.out_features), dtype=out_dtype or x.dtype, device=x.device)
        num_tiles, partials = triton.cdiv(self.out_features, tile.rows), None
        if tile.split > 1:
            partials = torch.empty((num_tiles, tile.split, tile.rows), dtype=torch.float32, device=x.device)
        launch(
            one_coded_row_kernel, (num_tiles, tile.split),
            x, self.codes, self.scales, self.bias, out, partials, self.counters, **self.form, R=tile.rows,
            BK=max(tile.columns, self.form["G"]), SPLIT=tile.split, num_warps=tile.num_warps, **self.launch_flags,
        )  # fmt: skip
        return out

    def __call__(self, x: Tensor, tiling: Tiling | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
        """x [T, K] -> x @ weight.T + bias of `out_dtype` (x's when None)."""
        num_tokens, out_dtype = x.shape[0], out_dtype or x.dtype
        if num_tokens == 0:
            return torch.empty((0, self.out_features), dtype=out_dtype, device=x.device)
        x = inner_contiguous(x)
        if num_tokens > MAX_TOKENS:
            return multiply_decoded(x, self.dequantized, self.out_features, self.bias, None).to(out_dtype)
        tiling = tiling or choose_tiling(num_tokens, self.out_features, self.in_features, self.programs)
        num_tiles, num_blocks = (
            triton.cdiv(self.out_features, tiling.rows), triton.cdiv(num_tokens, tiling.tokens)
        )  # fmt: skip
        partials = None
        if tiling.split > 1:
            shape = (num_tiles, num_blocks, tiling.split, tiling.rows, tiling.tokens)
            partials = torch.empty(shape, dtype=torch.float32, device=x.device)
        out = torch.empty((num_tokens, self.out_features), dtype=out_dtype, device=x.device)
        launch(
            coded_rows_kernel, (num_tiles, tiling.split, num_blocks),
            x, self.codes, self.scales, self.bias, out, partials, self.counters, num_tokens, x.stride(0), **self.form,
            M=tiling.tokens, R=tiling.rows, BK=tiling.columns, SPLIT=tiling.split, STAGES=tiling.stages,
            num_warps=tiling.num_warps, **self.launch_flags,
        )  # fmt: skip
        return out

    def dequantized(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """Rows of the matrix in `dtype`."""
        codes, scales = self.codes[rows], self.scales[rows]
        weight = torch.empty((codes.shape[0], self.in_features), dtype=dtype, device=codes.device)
        launch(
            decode_rows_kernel, (triton.cdiv(codes.shape[0], 16), triton.cdiv(self.in_features, 256)),
            codes, scales, weight, **{**self.form, "N": codes.shape[0]}, R=16, BK=256, **self.launch_flags,
        )  # fmt: skip
        return weight


class CodedLinear:
    handles = HANDLES

    @staticmethod
    def unsupported(needs: LinearNeeds) -> list[str]:
        return format_refusals(needs.linear.weight_format, FORMATS) + dtype_refusals(needs.dtype, DTYPES)

    @staticmethod
    def bind(needs: LinearNeeds, tensors: LinearTensors) -> Linear:
        matrix = CodedMatrix(tensors.linear)

        def call(x: Tensor) -> Tensor:
            return matrix.multiply_one(x.contiguous()) if x.shape[0] == 1 else matrix(x)

        return call
