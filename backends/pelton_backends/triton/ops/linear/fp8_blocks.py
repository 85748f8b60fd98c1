"""Products with weights in float8_e4m3fn whose blocks have scales ("fp8_blocks"); inputs are not rounded.

The checkpoint has a scale for each block of a matrix; here each row has its blocks' (`weight_scale` [N, K / G] float32, G a power of
two from 16), so that parts of a merged matrix may begin anywhere. One row reads the matrix once; up to `MAX_TOKENS` rows go through
tensor cores, the sums of a block meeting its scale in float32; more rows have a part of the matrix decoded into memory, for cuBLAS.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from pelton.ops.interface import Linear, LinearNeeds, LinearTensors
from pelton.platform.compiling import launch
from pelton_backends.triton.ops.linear.gemv import HANDLES, inner_contiguous
from pelton_backends.triton.ops.linear.refusals import dtype_refusals, format_refusals
from pelton_backends.triton.ops.moe.packed import _product_e4m3, _row_sums, decode_kernel
from pelton_backends.triton.runtime import has_pdl, launch_options, let_next_start, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = "fp8_blocks"
DTYPES = ("bfloat16", "float16")
MAX_TOKENS = 256
NUMBERS_AT_ONCE = 2**25
"""Of a matrix, decoded for cuBLAS."""
_DECODED_ROWS = 16
_ONE_ROW = {"R": 8, "BK": 512}
"""Rows of the weight and columns at once, of a program."""


@triton.jit
def one_row_kernel(
    x, weight, scales, bias, out, N: tl.constexpr, K: tl.constexpr, G: tl.constexpr, R: tl.constexpr, BK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out [1, N] = x [1, K] weight^T + bias; R rows of the weight a program."""
    rows = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    is_row = rows < N
    let_next_start(PDL)
    wait_for_inputs(PDL)
    result = _row_sums(x, weight, scales, rows, is_row, 1.0, K, "e4m3", G, R, BK, False)
    if bias is not None:
        result += tl.load(bias + rows, mask=is_row, other=0.0).to(tl.float32)
    tl.store(out + rows, result.to(out.dtype.element_ty), mask=is_row)


@triton.jit
def rows_kernel(
    x, weight, scales, bias, out, num_tokens, x_stride, N: tl.constexpr, K: tl.constexpr, G: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [T, N] = x [T, K] weight^T + bias; a tile [BM, BN] a program."""
    columns = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    tokens = tl.program_id(1).to(tl.int64) * BM + tl.arange(0, BM)
    is_token, is_column = tokens < num_tokens, columns < N
    let_next_start(PDL)
    wait_for_inputs(PDL)
    GROUPS: tl.constexpr = (K + G - 1) // G
    total = _product_e4m3(
        tl.zeros((BM, BN), tl.float32), x + tokens * x_stride, weight + columns * K, scales + columns * GROUPS, is_token, is_column,
        tl.zeros((BM,), tl.float32), K, G, BM, BN, BK, False,
    )  # fmt: skip
    if bias is not None:
        total += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    target = out + tokens[:, None] * N + columns[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=is_token[:, None] & is_column[None, :])


class Fp8BlocksLinear:
    """Products and sums in float32, rounded once; equals the torch op to the last place or two of the model's dtype."""

    handles = HANDLES

    @staticmethod
    def unsupported(needs: LinearNeeds) -> list[str]:
        return format_refusals(needs.linear.weight_format, (FORMAT,)) + dtype_refusals(needs.dtype, DTYPES)

    @staticmethod
    def bind(needs: LinearNeeds, tensors: LinearTensors) -> Linear:
        return Fp8BlocksMatrix(tensors)


class Fp8BlocksMatrix:
    """One bound matrix."""

    def __init__(self, tensors: LinearTensors) -> None:
        weights = tensors.linear
        self.weight, self.scales, self.bias = weights.tensors["weight"], weights.tensors["weight_scale"], weights.bias
        self.num_rows, self.num_cols = self.weight.shape
        self.size = self.num_cols // self.scales.shape[1]
        pdl = has_pdl(self.weight.device)
        self.flags = {"PDL": pdl, **launch_options(pdl)}
        self.form = {"N": self.num_rows, "K": self.num_cols, "G": self.size, **self.flags}

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, K] -> [T, N]"""
        num_tokens = x.shape[0]
        x = inner_contiguous(x)
        if num_tokens > MAX_TOKENS:
            return self._by_library(x)
        out = torch.empty((num_tokens, self.num_rows), dtype=x.dtype, device=x.device)
        operands = x, self.weight, self.scales, self.bias, out
        if num_tokens == 1:
            grid: tuple[int, ...] = (triton.cdiv(self.num_rows, _ONE_ROW["R"]),)
            launch(one_row_kernel, grid, *operands, **self.form, **_ONE_ROW, num_warps=4)
        elif num_tokens:
            tokens = min(max(triton.next_power_of_2(num_tokens), 16), 64)
            grid = (triton.cdiv(self.num_rows, 64), triton.cdiv(num_tokens, tokens))
            launch(
                rows_kernel, grid, *operands, num_tokens, x.stride(0), **self.form, BM=tokens, BN=64, BK=min(self.size, 128),
                num_warps=4, num_stages=4,
            )  # fmt: skip
        return out

    def _by_library(self, x: Tensor) -> Tensor:
        out = torch.empty((x.shape[0], self.num_rows), dtype=x.dtype, device=x.device)
        step = max(NUMBERS_AT_ONCE // self.num_cols // _DECODED_ROWS, 1) * _DECODED_ROWS
        for first in range(0, self.num_rows, step):
            rows = slice(first, min(first + step, self.num_rows))
            weight = self.decoded(rows, x.dtype)
            out[:, rows] = F.linear(x, weight, None if self.bias is None else self.bias[rows])
        return out

    def decoded(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """Rows of the matrix in `dtype`."""
        numbers, scales = self.weight[rows], self.scales[rows]
        weight = torch.empty(numbers.shape, dtype=dtype, device=numbers.device)
        whole = len(numbers) // _DECODED_ROWS * _DECODED_ROWS
        if whole:
            launch(
                decode_kernel, (whole // _DECODED_ROWS,), numbers, scales, weight, WIDTH=self.num_cols, R=_DECODED_ROWS,
                BLOCK=256, FORMAT="e4m3", G=self.size, **self.flags,
            )  # fmt: skip
        if whole < len(numbers):  # the last rows of an odd matrix
            column = torch.arange(self.num_cols, device=weight.device) // self.size
            weight[whole:] = numbers[whole:].float() * scales[whole:][:, column]
        return weight
