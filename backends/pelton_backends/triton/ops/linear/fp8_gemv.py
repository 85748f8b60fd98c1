"""One row times a matrix in float8_e4m3fn, bound by reading it once; the row is rounded to the same type in every program.

Tiles, order and shapes are those of `gemv_kernels.py` without DOT. A weight is widened in registers; products and sums are
float32, and the scales of the matrix's row and of the input come last. (Programs with several tiles in turn, which round the row
less often, took 20 to 50 % longer on an H200: the next tile's registers leave room for fewer programs.)
"""

from __future__ import annotations

import triton
import triton.language as tl

from pelton_backends.triton.ops.linear.gemv_kernels import (
    add_bias,
    add_norm_rows,
    load_rows,
    load_tile,
    product,
    store_output,
)
from pelton_backends.triton.ops.pieces import activated, e4m3_scale, to_cache
from pelton_backends.triton.runtime import let_next_start, wait_for_inputs


@triton.jit
def rounded_row(pieces, input_scale, BOUND: tl.constexpr, NUM: tl.constexpr):
    """One row in pieces -> (pieces in e4m3, the scale [1, 1] they were divided by)."""
    if input_scale is None:
        largest = tl.abs(pieces[0].to(tl.float32))
        for i in tl.static_range(1, NUM):
            largest = tl.maximum(largest, tl.abs(pieces[i].to(tl.float32)))
        scale = e4m3_scale(tl.max(largest, axis=1)[:, None], BOUND)
    else:
        scale = tl.load(input_scale) + tl.zeros([1, 1], tl.float32)
    inverse = tl.div_rn(1.0 + tl.zeros([1, 1], tl.float32), scale)
    result = ()
    for i in tl.static_range(NUM):
        rounded = pieces[i].to(tl.float32) * inverse
        if (input_scale is None) and (BOUND is None):  # none is beyond 448
            result += (rounded.to(tl.float8e4nv),)
        else:
            result += (to_cache(rounded, tl.float8e4nv),)
    return result, scale


@triton.jit
def scaled(y, weight_scale, scale, first, N: tl.constexpr, R: tl.constexpr):
    """y [R, 1], times the scales of rows first .. first + R - 1 and of the input."""
    rows = first + tl.arange(0, R)
    return y * tl.load(weight_scale + rows, mask=rows < N, other=0.0)[:, None] * scale


@triton.jit
def fp8_linear_kernel(
    x, weight, weight_scale, input_scale, bias, out, HAS_BIAS: tl.constexpr, BOUND: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr,
    W: tl.constexpr, R: tl.constexpr, C: tl.constexpr, NUM: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [1, N] = e4m3(x [1, K]) weight^T."""
    first = tl.program_id(0) * R
    let_next_start(PDL)
    tile = load_tile(weight, first, N, K, 1, W, R, C, AHEAD, False)
    wait_for_inputs(PDL)
    row, scale = rounded_row(load_rows(x + tl.zeros([1, 1], tl.int32), K, W * C * 32, NUM), input_scale, BOUND, NUM)
    y = product(tile, row, weight, first, weight, N, K, 1, 1, W, R, C, NUM, AHEAD, NUM, False)
    y = scaled(y, weight_scale, scale, first, N, R)
    if HAS_BIAS:
        y = add_bias(y, bias, first, N, R)
    store_output(out, y, first, 1, N, 1, R)


@triton.jit
def fp8_add_norm_linear_kernel(
    hidden, residual, norm, post_norm, weight, weight_scale, input_scale, bias, out, new_residual, eps, post_eps,
    HAS_RESIDUAL: tl.constexpr, HAS_POST: tl.constexpr, UNIT_OFFSET: tl.constexpr, POST_UNIT_OFFSET: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, BOUND: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    W: tl.constexpr, R: tl.constexpr, C: tl.constexpr, NUM: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """residual' = [post_norm](hidden) + residual [1, K], stored by the first program; out [1, N] = e4m3(norm(residual')) weight^T.

    With an activation the weight has N rows of gate, then N of up, and out = activation(gate) * up; a program has R / 2 rows of
    both.
    """
    P: tl.constexpr = W * C * 32
    PARTS: tl.constexpr = 1 if ACTIVATION is None else 2
    H: tl.constexpr = R // PARTS
    pid = tl.program_id(0)
    first = pid * H
    let_next_start(PDL)
    tile = load_tile(weight, first, N, K, PARTS, W, R, C, AHEAD, False)
    norm_pieces = load_rows(norm + tl.zeros([1, 1], tl.int32), K, P, NUM)
    post_pieces = norm_pieces
    if HAS_POST:
        post_pieces = load_rows(post_norm + tl.zeros([1, 1], tl.int32), K, P, NUM)
    wait_for_inputs(PDL)
    x = add_norm_rows(
        hidden, residual, new_residual, norm_pieces, post_pieces, eps, post_eps, 1, K, K,
        pid == 0, HAS_RESIDUAL, HAS_POST, UNIT_OFFSET, POST_UNIT_OFFSET, K, 1, P, NUM,
    )  # fmt: skip
    row, scale = rounded_row(x, input_scale, BOUND, NUM)
    y = product(tile, row, weight, first, weight, N, K, PARTS, 1, W, R, C, NUM, AHEAD, NUM, False)
    if ACTIVATION is None:
        y = scaled(y, weight_scale, scale, first, N, R)
        if HAS_BIAS:
            y = add_bias(y, bias, first, N, R)
    else:
        gate, up = tl.split(tl.permute(tl.reshape(y, [2, H, 1]), [1, 2, 0]))
        gate = scaled(gate, weight_scale, scale, first, N, H)
        up = scaled(up, weight_scale + N, scale, first, N, H)
        if HAS_BIAS:
            gate = add_bias(gate, bias, first, N, H)
            up = add_bias(up, bias + N, first, N, H)
        dtype = out.dtype.element_ty
        y = activated(gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), ACTIVATION, dtype)
    store_output(out, y, first, 1, N, 1, H)
