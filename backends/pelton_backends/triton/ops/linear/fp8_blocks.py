"""Products with weights in float8_e4m3fn whose blocks have scales ("fp8_blocks").

The checkpoint has a scale for each block of a matrix; here each row has its blocks' (`weight_scale` [N, K / G] float32, G a power of
two from 16), so that parts of a merged matrix may begin anywhere. Up to `MAX_TOKENS` rows the sums of a block meet its scale in
float32: on Hopper, in bfloat16, for blocks of 128 columns whose rows come in runs of 64 (`LinearSpec.group_rows`), in `hopper_blocks`,
with the norm before and the activation behind; else by kernels of this module, one of them for one row. For more rows the matrix is
decoded into memory.

Where the checkpoint has inputs rounded (`LinearSpec.inputs`) more than `MAX_SUMS` rows are, each by a scale of its own: they then take half
of the products in `hopper_blocks`, and more than `MAX_TOKENS` go to `hopper_many_blocks` (the matrix's rows in runs of 128, no
bias).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from pelton.ops.interface import (
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
from pelton_backends.triton.ops.linear.decoded import multiply_decoded
from pelton_backends.triton.ops.linear.fp8 import add_norm_rounded, rounded
from pelton_backends.triton.ops.linear.gemv import HANDLES, inner_contiguous
from pelton_backends.triton.ops.linear.hopper_blocks import (
    BLOCK_COLUMNS,
    BLOCK_ROWS,
    BlocksProduct,
    add_norm_split,
    split_rows,
)
from pelton_backends.triton.ops.linear.hopper_many_blocks import BLOCK, many_blocks_matmul
from pelton_backends.triton.ops.linear.hopper_matmul import can_multiply_many
from pelton_backends.triton.ops.linear.hopper_split_k import can_multiply
from pelton_backends.triton.ops.linear.large_batch import add_norm, gated, takes_unsummed
from pelton_backends.triton.ops.linear.refusals import dtype_refusals, format_refusals, product_refusals
from pelton_backends.triton.ops.moe.packed import _product_e4m3, _row_sums, decode_kernel
from pelton_backends.triton.ops.pieces import Norm
from pelton_backends.triton.runtime import has_pdl, launch_options, let_next_start, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = "fp8_blocks"
DTYPES = ("bfloat16", "float16")
MAX_TOKENS = 256
MAX_SUMS = 32
"""Up to so many rows they are sums of two even where they may be rounded: reading the weights is what costs. As measured on an H200, all
four products of a layer of Llama-3.1-8B, us, sums and rounded: 16 rows 71.0 and 67.4, 32 76.9 and 71.9, 48 87.2 and 74.0, 128 129.0 and
95.6."""
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
    """Products and sums in float32, rounded once; equals the torch op to the last place or two of the model's dtype, but where inputs are
    rounded."""

    handles = HANDLES | {"inputs"}

    @staticmethod
    def unsupported(needs: LinearNeeds) -> list[str]:
        return format_refusals(needs.linear.weight_format, (FORMAT,)) + dtype_refusals(needs.dtype, DTYPES)

    @staticmethod
    def bind(needs: LinearNeeds, tensors: LinearTensors) -> Linear:
        return Fp8BlocksMatrix(tensors.linear, needs.dtype)


class Fp8BlocksAddNormLinear:
    handles = HANDLES | {"inputs"}

    @staticmethod
    def unsupported(needs: AddNormLinearNeeds | AddNormGatedLinearNeeds) -> list[str]:
        return product_refusals(needs, (FORMAT,), DTYPES)

    @staticmethod
    def bind(
        needs: AddNormLinearNeeds | AddNormGatedLinearNeeds, tensors: AddNormLinearTensors | AddNormGatedLinearTensors
    ) -> AddNormLinear:
        matrix = Fp8BlocksMatrix(tensors.linear, needs.dtype, getattr(needs, "activation", None))
        norm, post_norm = needs.norm, needs.post_norm
        before, after = Norm(tensors.norm, norm.eps, norm.unit_offset), None
        if post_norm is not None:
            assert tensors.post_norm is not None
            after = Norm(tensors.post_norm, post_norm.eps, post_norm.unit_offset)

        def call(hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
            if matrix.rounds(hidden.shape[0]):
                residual, rows, scales = add_norm_rounded(hidden, residual, before, after, None, matrix.bound)
                return matrix.multiply_rounded(rows, scales, residual.dtype), residual
            if matrix.few is not None and hidden.shape[0] <= MAX_TOKENS:
                residual, rows, inverse = add_norm_split(hidden, residual, before, after)
                return matrix.few(rows, inverse, residual.dtype), residual
            residual, rows = add_norm(hidden, residual, tensors.norm, norm, tensors.post_norm, post_norm)
            return matrix(rows), residual

        call.takes_unsummed = matrix.activation is None and takes_unsummed(needs)  # type: ignore[attr-defined]
        return call


class Fp8BlocksMatrix:
    """One bound matrix, with the activation of its halves if there is one."""

    def __init__(self, weights: LinearWeights, dtype: str, activation: str | None = None) -> None:
        self.weight, self.scales, self.bias = weights.tensors["weight"], weights.tensors["weight_scale"], weights.bias
        self.activation = activation
        self.num_rows, self.num_cols = self.weight.shape
        self.size = self.num_cols // self.scales.shape[1]
        pdl = has_pdl(self.weight.device)
        self.flags = {"PDL": pdl, **launch_options(pdl)}
        self.form = {"N": self.num_rows, "K": self.num_cols, "G": self.size, **self.flags}
        self.few: BlocksProduct | None = None
        parts = self.num_rows if activation is None else self.num_rows // 2
        has_runs = weights.spec.group_rows % BLOCK_ROWS == parts % BLOCK_ROWS == 0
        # A number in float16 has more bits than two in e4m3.
        if dtype == "bfloat16" and can_multiply(self.weight) and self.size == BLOCK_COLUMNS and has_runs:
            num_counters = triton.cdiv(self.num_rows, 64) * triton.cdiv(MAX_TOKENS, 16)
            counters = torch.zeros(num_counters, dtype=torch.int32, device=self.weight.device)
            self.few = BlocksProduct(self.weight, self.scales, self.bias, activation, counters)
        inputs = weights.spec.inputs
        self.may_round, self.bound = inputs is not None and inputs.is_dynamic, inputs and inputs.bound
        has_whole_runs = weights.spec.group_rows % BLOCK == 0 and (activation is None or parts % BLOCK == 0)
        is_plain = self.bias is None and self.size == BLOCK_COLUMNS
        self.takes_tiles = self.may_round and is_plain and has_whole_runs and can_multiply_many(self.weight)

    def rounds(self, num_tokens: int) -> bool:
        """Return whether so many rows are rounded."""
        if num_tokens > MAX_TOKENS:
            return self.takes_tiles
        return self.may_round and self.few is not None and num_tokens > MAX_SUMS

    def multiply_rounded(self, rows: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """rows [T, K] and scales [T] as `fp8.rounded` gives them, where `rounds` says so"""
        if rows.shape[0] <= MAX_TOKENS:
            assert self.few is not None
            return self.few(rows, scales, dtype)
        return many_blocks_matmul(rows, scales, self.weight, self.scales, self.activation, dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, K] -> [T, N] or [T, N / 2]"""
        num_tokens = x.shape[0]
        x = inner_contiguous(x)
        if self.rounds(num_tokens):
            return self.multiply_rounded(*rounded(x, None, self.bound), x.dtype)
        if self.few is not None and num_tokens <= MAX_TOKENS:
            return self.few(*split_rows(x), x.dtype)
        if num_tokens > MAX_TOKENS:
            return multiply_decoded(x, self.decoded, self.num_rows, self.bias, self.activation)
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
        return out if self.activation is None else gated(out, self.activation)

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
