"""Products of rows and weights that are both float8_e4m3fn: the ops of weight format "fp8_e4m3" whose inputs are rounded too.

Inputs are divided by a scale (of each row, from its largest number; or one that the checkpoint gives), rounded, and the product
is multiplied by the scales of row and matrix. One row takes a kernel that does the rounding itself: of a matrix of
`ONE_ROW_NUMBERS` or more one that streams it (`fp8_one_row.py`), else a matrix-vector kernel. Up to `MAX_STREAMED` rows take a kernel
that streams the matrix too; more take `torch._scaled_mm` (cuBLAS), many rows of gate and up `hopper_matmul`. All round alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

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
from pelton_backends.triton.launch import Launcher, alignment
from pelton_backends.triton.ops.linear.fp8_gemv import fp8_add_norm_linear_kernel, fp8_linear_kernel
from pelton_backends.triton.ops.linear.fp8_one_row import OneRowProduct
from pelton_backends.triton.ops.linear.gemv import HANDLES
from pelton_backends.triton.ops.linear.hopper_matmul import can_multiply_many, halves_of, hopper_matmul, share_of_work
from pelton_backends.triton.ops.linear.hopper_mid_batch import MidBatchProduct
from pelton_backends.triton.ops.linear.hopper_split_k import HopperProduct, can_multiply
from pelton_backends.triton.ops.linear.large_batch import add_norm_row, gated, takes_unsummed
from pelton_backends.triton.ops.linear.mid_batch_tilings import choose_e4m3_tiling
from pelton_backends.triton.ops.linear.refusals import product_refusals
from pelton_backends.triton.ops.linear.split_k import SMALLEST_TILE, multiply
from pelton_backends.triton.ops.moe.unsummed import UnsummedRows, sum_add_norm_rounded
from pelton_backends.triton.ops.pieces import Norm, empty_rows, kept_policy, store_rounded
from pelton_backends.triton.runtime import has_pdl, launch_options, let_next_start, num_sms, wait_for_inputs

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

FORMAT = "fp8_e4m3"
DTYPES = ("bfloat16", "float16")
MAX_STREAMED = 128  # rows
ONE_ROW_NUMBERS = 8 << 20
"""From here on one row is faster with the kernel that makes the row and streams the matrix: all matrices of Llama-3.1-8B, QKV and O of
Qwen3-30B-A3B, see docs/performance/models.md. A matrix-vector kernel's many programs each norm and round the row, which then takes longer
than their weights."""
STREAMED_NUMBERS = 32 << 20
"""From here on, where that kernel does not take the row, what more rows take is faster than a matrix-vector kernel."""
MIN_TILED_ROWS, MIN_TILED_SHARE = 4096, 0.95
"""From here on gate and up are multiplied by `hopper_matmul`: Llama-3.1-8B's with 16,384 rows in 2,652 us, for 2,877 by cuBLAS and
`gated` (H200; of QKV, O and down nothing is known)."""
MULTIPLE = 16  # of rows and columns of a matrix: what `torch._scaled_mm` takes


@triton.jit
def _round_kernel(
    x_ptr, out_ptr, scales_ptr, input_scale_ptr, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, BOUND: tl.constexpr,
    PDL: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """One row a program."""
    row = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    x = tl.load(x_ptr + row * stride + columns, mask=columns < SIZE, other=0.0)
    store_rounded(x, out_ptr, scales_ptr, input_scale_ptr, row, SIZE, BLOCK, BOUND, KEPT)


@triton.jit
def _add_norm_round_kernel(
    hidden_ptr, residual_ptr, sum_ptr, out_ptr, scales_ptr, input_scale_ptr, norm_ptr, post_norm_ptr,
    hidden_stride, residual_stride, sum_stride, eps, post_eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, UNIT_OFFSET: tl.constexpr, POST_UNIT_OFFSET: tl.constexpr,
    BOUND: tl.constexpr, PDL: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """`large_batch.add_norm`, its rows rounded."""
    row = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    x = add_norm_row(
        hidden_ptr, residual_ptr, sum_ptr, norm_ptr, post_norm_ptr, row, hidden_stride, residual_stride, sum_stride,
        eps, post_eps, SIZE, BLOCK, UNIT_OFFSET, POST_UNIT_OFFSET, PDL, KEPT,
    )  # fmt: skip
    store_rounded(x, out_ptr, scales_ptr, input_scale_ptr, row, SIZE, BLOCK, BOUND, KEPT)


_launch_round = Launcher(_round_kernel)
_launch_add_norm_round = Launcher(_add_norm_round_kernel)


def rounded(x: Tensor, input_scale: Tensor | None = None, bound: float | None = None) -> tuple[Tensor, Tensor]:
    """Rows in float8_e4m3fn, and what each was divided by.

    Math   scale = min(max |x|, bound) / 448, at least 1e-30 / 448, or input_scale;  e4m3(x * (1 / scale)), saturated

    x [T, K] fp16 or bf16, strides (any, 1); input_scale [] float32 -> [T, K] contiguous; [T] float32

    Oracle: `pelton_plugins.quantization.numbers`, bit-exact on a CPU. One row a program. A row with NaN or an infinite number
    becomes NaN where no scale is given and there is no bound.
    """
    num_rows, size = x.shape
    out = empty_rows(num_rows, size, x, torch.float8_e4m3fn)
    scales = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    if num_rows:
        block, pdl, kept = triton.next_power_of_2(size), has_pdl(x.device), kept_policy(num_rows)
        _launch_round(
            (kept, x.dtype, x.device, size, bound, input_scale is None, x.stride(0) % 16, alignment(x, input_scale)),
            (num_rows,),
            (x, out, scales, input_scale, x.stride(0)),
            {"SIZE": size, "BLOCK": block, "BOUND": bound, "PDL": pdl, "KEPT": kept},
            num_warps=min(max(block // 256, 1), 16), **launch_options(pdl),
        )  # fmt: skip
    return out, scales


def add_norm_rounded(
    hidden: Tensor | UnsummedRows,
    residual: Tensor | None,
    norm: Norm,
    post_norm: Norm | None,
    input_scale: Tensor | None,
    bound: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`large_batch.add_norm` and `rounded` in one pass: (the new residual, rows in float8_e4m3fn, their scales)."""
    if isinstance(hidden, UnsummedRows):
        assert residual is not None and post_norm is None
        return residual, *sum_add_norm_rounded(hidden, residual, norm, input_scale, bound)
    num_rows, size = hidden.shape
    out = empty_rows(num_rows, size, hidden, torch.float8_e4m3fn)
    scales = torch.empty(num_rows, dtype=torch.float32, device=hidden.device)
    total = hidden if residual is None else residual
    if num_rows == 0:
        return total, out, scales
    is_stored = residual is not None or post_norm is not None
    block, pdl = triton.next_power_of_2(size), has_pdl(hidden.device)
    residual_stride = 0 if residual is None else residual.stride(0)
    constants = {
        "SIZE": size, "BLOCK": block, "UNIT_OFFSET": norm.unit_offset,
        "POST_UNIT_OFFSET": post_norm is not None and post_norm.unit_offset, "BOUND": bound, "PDL": pdl,
        "KEPT": kept_policy(num_rows),
    }  # fmt: skip
    tensors = (hidden, residual, input_scale, norm.weight, post_norm and post_norm.weight)
    _launch_add_norm_round(
        (
            hidden.dtype, hidden.device, *constants.values(), *(tensor is None for tensor in tensors), hidden.stride(0),
            residual_stride, alignment(*tensors),
        ),
        (num_rows,),
        (
            hidden, residual, total if is_stored else None, out, scales, input_scale, norm.weight,
            post_norm and post_norm.weight, hidden.stride(0), residual_stride, total.stride(0), norm.eps,
            post_norm.eps if post_norm else 0.0,
        ),
        constants, num_warps=min(max(block // 256, 1), 16), **launch_options(pdl),
    )  # fmt: skip
    return total, out, scales


class Tile(NamedTuple):
    """Sizes of what one program computes, as `gemv.Tile`."""

    W: int
    R: int
    C: int
    NUM: int
    AHEAD: int


def choose_fp8_tile(in_features: int, *, has_norm: bool, is_gated: bool) -> Tile:
    """Measured on an H200, Llama-3.1-8B's shapes, us (GB/s): QKV 8.2 (3,085), O 6.0 (2,817), gate and up 31.7 (3,702), down 17.1
    (3,443). Norm and rounding are more than half of a program's instructions, and more rows a program leave fewer registers."""
    if in_features > 8192:
        W, R, C, AHEAD = 8, 4, 4, 14
    elif is_gated:
        W, R, C, AHEAD = 4, 8, 4, 8
    else:
        W, R, C, AHEAD = (4, 16, 2, 8) if has_norm else (4, 8, 8, 2)
    while C > 1 and in_features <= W * C * 16:
        C //= 2
    num = triton.cdiv(in_features, W * C * 32)
    return Tile(W, R, C, num, min(num, AHEAD))


def is_for_tiles(num_rows: int, out_features: int, in_features: int, activation: str | None, programs: int) -> bool:
    """Return whether so many rows of gate and up go to `hopper_matmul`."""
    share = share_of_work(num_rows, out_features, in_features, programs, activation)
    return num_rows >= MIN_TILED_ROWS and share >= MIN_TILED_SHARE


class _Fp8Matrix:
    """One bound matrix."""

    def __init__(
        self, weights: LinearWeights, dtype: str, activation: str | None = None, *, has_norm: bool = False
    ) -> None:
        spec = weights.spec
        assert spec.inputs is not None
        self.weight, self.scale = weights.tensors["weight"], weights.tensors["weight_scale"]
        self.input_scale = None if spec.inputs.is_dynamic else weights.tensors["input_scale"]
        self.bias, self.bound, self.activation = weights.bias, spec.inputs.bound, activation
        self.dtype, self.in_features = getattr(torch, dtype), spec.in_features
        parts = 1 if activation is None else 2
        self.num_columns = spec.out_features // parts
        tile = choose_fp8_tile(spec.in_features, has_norm=has_norm, is_gated=activation is not None)
        self.num_programs = triton.cdiv(self.num_columns, tile.R // parts)
        pdl = has_pdl(self.weight.device)
        self.flags = {
            "HAS_BIAS": self.bias is not None, "BOUND": self.bound, "N": self.num_columns, "K": spec.in_features,
            **tile._asdict(), "num_warps": tile.W, "PDL": pdl, **launch_options(pdl),
        }  # fmt: skip
        num_counters = triton.cdiv(spec.out_features, SMALLEST_TILE) * triton.cdiv(MAX_STREAMED, 16)
        self.counters = torch.zeros(max(num_counters, 128), dtype=torch.int32, device=self.weight.device)
        self.few: HopperProduct | None = None
        if can_multiply(self.weight):
            self.few = HopperProduct(self.weight, self.bias, activation, self.counters, self.scale)
            self.more = MidBatchProduct(self.weight, self.bias, activation, self.counters, self.scale)
        self.takes_tiles = activation is not None and self.bias is None and can_multiply_many(self.weight)
        self.arrived = halves_of(self.weight.device) if self.takes_tiles else None
        self.num_sms = num_sms(self.weight.device)
        self.streams_one = self.few is not None and self.weight.numel() >= STREAMED_NUMBERS

    def one_row(self, norm: Norm | None = None, post_norm: Norm | None = None) -> OneRowProduct | None:
        """The kernel that streams the matrix for one row and makes that row itself, where it pays."""
        if self.weight.numel() < ONE_ROW_NUMBERS or not OneRowProduct.takes(self.weight):
            return None
        return OneRowProduct(
            self.weight,
            self.scale,
            self.bias,
            self.activation,
            self.input_scale,
            self.bound,
            norm,
            post_norm,
        )

    def multiply(self, rows: Tensor, scales: Tensor) -> Tensor:
        """rows [T, K], rounded."""
        num_rows = rows.shape[0]
        if num_rows <= MAX_STREAMED or not rows.is_cuda or self.dtype != torch.bfloat16:
            if num_rows == 0:
                return torch.empty((0, self.num_columns), dtype=self.dtype, device=rows.device)
            if self.few is not None and num_rows <= MAX_STREAMED:
                tiling = choose_e4m3_tiling(num_rows, *self.weight.shape, self.activation is not None)
                if tiling is not None:
                    return self.more(rows, tiling, x_scale=scales, dtype=self.dtype)
                return self.few(rows, x_scale=scales, dtype=self.dtype)
            return multiply(
                rows, self.weight, self.bias, self.activation, self.counters, scales=(self.scale, scales),
                dtype=self.dtype,
            )  # fmt: skip
        if self.takes_tiles and is_for_tiles(num_rows, *self.weight.shape, self.activation, self.num_sms):
            return hopper_matmul(
                rows, self.weight, self.activation, scales=(scales, self.scale), dtype=self.dtype, arrived=self.arrived
            )
        out = torch._scaled_mm(
            rows, self.weight.T, scale_a=scales[:, None], scale_b=self.scale[None, :], bias=self.bias,
            out_dtype=self.dtype, use_fast_accum=True,
        )  # fmt: skip
        return out if self.activation is None else gated(out, self.activation)

    def multiply_one(self, x: Tensor) -> Tensor:
        out = torch.empty((1, self.num_columns), dtype=self.dtype, device=x.device)
        launch(
            fp8_linear_kernel, (self.num_programs,), x, self.weight, self.scale, self.input_scale, self.bias, out,
            **self.flags,
        )  # fmt: skip
        return out


def _refusals(needs: Any) -> list[str]:
    reasons, linear = product_refusals(needs, (FORMAT,), DTYPES), needs.linear
    if linear.inputs is None or linear.inputs.dtype != "float8_e4m3fn":
        reasons.append("inputs that are not rounded to float8_e4m3fn")
    if linear.in_features % MULTIPLE or linear.out_features % MULTIPLE:
        reasons.append(f"{linear.out_features} x {linear.in_features} numbers, only multiples of {MULTIPLE}")
    return reasons


class Fp8Linear:
    handles = HANDLES | {"inputs"}
    unsupported = staticmethod(_refusals)

    @staticmethod
    def bind(needs: LinearNeeds, tensors: LinearTensors) -> Linear:
        matrix = _Fp8Matrix(tensors.linear, needs.dtype)
        one_row = matrix.one_row()

        def call(x: Tensor) -> Tensor:
            if x.shape[0] == 1 and one_row is not None:
                return one_row(x.contiguous())[0]
            if x.shape[0] == 1 and not matrix.streams_one:
                return matrix.multiply_one(x.contiguous())
            return matrix.multiply(*rounded(x, matrix.input_scale, matrix.bound))

        return call


def _add_norm_product(
    needs: AddNormLinearNeeds | AddNormGatedLinearNeeds,
    tensors: AddNormLinearTensors | AddNormGatedLinearTensors,
    activation: str | None,
) -> Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]:
    matrix = _Fp8Matrix(tensors.linear, needs.dtype, activation, has_norm=True)
    norm, post_norm = needs.norm, needs.post_norm
    before, after = Norm(tensors.norm, norm.eps, norm.unit_offset), None
    if post_norm is not None:
        assert tensors.post_norm is not None
        after = Norm(tensors.post_norm, post_norm.eps, post_norm.unit_offset)
    flags = {
        "HAS_POST": post_norm is not None, "UNIT_OFFSET": norm.unit_offset,
        "POST_UNIT_OFFSET": post_norm is not None and post_norm.unit_offset, "ACTIVATION": activation, **matrix.flags,
    }  # fmt: skip
    post_eps = 0.0 if post_norm is None else post_norm.eps

    def one(hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        hidden, residual = hidden.contiguous(), None if residual is None else residual.contiguous()
        out = torch.empty((1, matrix.num_columns), dtype=hidden.dtype, device=hidden.device)
        # Not in place: programs read the old row while the first one writes the new one.
        total = hidden if residual is None and post_norm is None else torch.empty_like(hidden)
        launch(
            fp8_add_norm_linear_kernel, (matrix.num_programs,),
            hidden, residual, tensors.norm, tensors.post_norm, matrix.weight, matrix.scale, matrix.input_scale,
            matrix.bias, out, total, norm.eps, post_eps, HAS_RESIDUAL=residual is not None, **flags,
        )  # fmt: skip
        return out, total

    one_row = matrix.one_row(before, after)

    def call(hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if hidden.shape[0] == 1 and one_row is not None:
            return one_row(hidden.contiguous(), None if residual is None else residual.contiguous())
        if hidden.shape[0] == 1 and not matrix.streams_one:
            return one(hidden, residual)
        residual, rows, scales = add_norm_rounded(hidden, residual, before, after, matrix.input_scale, matrix.bound)
        return matrix.multiply(rows, scales), residual

    call.takes_unsummed = activation is None and takes_unsummed(needs)  # type: ignore[attr-defined]
    return call


class Fp8AddNormLinear:
    handles = HANDLES | {"inputs"}
    unsupported = staticmethod(_refusals)

    @staticmethod
    def bind(needs: AddNormLinearNeeds, tensors: AddNormLinearTensors) -> AddNormLinear:
        return _add_norm_product(needs, tensors, None)


class Fp8AddNormGatedLinear:
    handles = HANDLES | {"inputs"}
    unsupported = staticmethod(_refusals)

    @staticmethod
    def bind(needs: AddNormGatedLinearNeeds, tensors: AddNormGatedLinearTensors) -> AddNormGatedLinear:
        return _add_norm_product(needs, tensors, needs.activation)
