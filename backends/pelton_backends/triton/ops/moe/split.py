"""Rows as sums of two numbers in e4m3, for products with weights in e4m3 that lose next to nothing of them; or rounded to e4m3.

The first number has four of the eight bits of a number in bfloat16, the second the rest; a power of two of each row brings its largest
number to 128 to 256. Nothing is lost down to 2^-16 of the row's largest number. A row that has an infinite number becomes NaN.

The first numbers alone are the row rounded to e4m3: from 2^-13 of its largest number on, by at most 1/16 of each, whatever the scale is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from pelton_backends.triton.launch import Launcher, alignment
from pelton_backends.triton.ops.pieces import sum_of_two_powers
from pelton_backends.triton.runtime import has_pdl, launch_options, let_next_start, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

_ROWS = 4  # of a program, a warp each


@dataclass(frozen=True, slots=True)
class SplitRows:
    """K numbers a row, first numbers and then second ones: x = inverse * (rows[:, :K] + rows[:, K:]). Rounded: the first ones alone."""

    rows: Tensor  # [R, 2 K] float8_e4m3fn; rounded: [R, K]
    inverse: Tensor  # [R] float32, powers of two
    dtype: torch.dtype  # of x
    is_rounded: bool = False


@triton.jit(do_not_specialize=["num_rows"])
def split_kernel(
    x_ptr, out_ptr, inverse_ptr, num_tiles_ptr, num_rows, x_stride, K: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr,
    TILE: tl.constexpr, IS_ROUNDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """R rows a program. num_tiles, if there: rows behind so many tiles of TILE are left out. IS_ROUNDED: no second numbers."""
    WIDTH: tl.constexpr = K if IS_ROUNDED else 2 * K
    row = tl.program_id(0) * R + tl.arange(0, R)
    lane = tl.arange(0, BLOCK)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    if num_tiles_ptr is not None:
        num_rows = tl.minimum(num_rows, tl.load(num_tiles_ptr) * TILE)
        if tl.program_id(0) * R >= num_rows:
            return
    mask = (row < num_rows)[:, None] & (lane < K)[None, :]
    numbers = tl.load(x_ptr + (row.to(tl.int64) * x_stride)[:, None] + lane[None, :], mask=mask, other=0.0).to(
        tl.float32
    )
    power, inverse = sum_of_two_powers(tl.max(tl.abs(numbers), 1))
    numbers *= power[:, None]
    high = numbers.to(tl.float8e4nv)
    target = out_ptr + (row.to(tl.int64) * WIDTH)[:, None] + lane[None, :]
    tl.store(target, high, mask=mask)
    if not IS_ROUNDED:
        tl.store(target + K, (numbers - high.to(tl.float32)).to(tl.float8e4nv), mask=mask)
    tl.store(inverse_ptr + row, inverse, mask=row < num_rows)


_launch = Launcher(split_kernel)


def split(x: Tensor, num_tiles: Tensor | None = None, tile: int = 1, *, is_rounded: bool = False) -> SplitRows:
    """x [R, K] fp16 or bf16, rows contiguous; num_tiles [1] int32: what is behind so many tiles of `tile` rows is not read."""
    num_rows, size = x.shape
    rows = torch.empty((num_rows, size if is_rounded else 2 * size), dtype=torch.float8_e4m3fn, device=x.device)
    inverse = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    pdl = has_pdl(x.device)
    constants = {
        "K": size, "BLOCK": triton.next_power_of_2(size), "R": _ROWS, "TILE": tile, "IS_ROUNDED": is_rounded, "PDL": pdl,
    }  # fmt: skip
    _launch(
        (x.dtype, x.device, num_tiles is None, x.stride(0) % 16 == 0, alignment(x), *constants.values()),
        (triton.cdiv(num_rows, _ROWS),), (x, rows, inverse, num_tiles, num_rows, x.stride(0)), constants,
        num_warps=_ROWS, **launch_options(pdl),
    )  # fmt: skip
    return SplitRows(rows, inverse, x.dtype, is_rounded)
