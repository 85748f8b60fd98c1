"""One row times a matrix in float8_e4m3fn, bound by reading it once; the row is rounded to the same type in every program.

Shapes   K = in_features, N = out_features.
Tile     R rows of the weight by all of K, cut into NUM pieces of P = W C 32 columns, W warps; all of it in registers.
Order    A program has several tiles, one after the other: the next one is on its way while one is multiplied. The input is
         normed and rounded once a program, which takes as many instructions as a tile of eight rows does. The first tile is
         loaded before `wait_for_inputs`.
Product  A weight is widened in registers, multiplied and added in float32; the scales of the matrix's row and of the input come
         last. Norms, activations and roundings of the output follow `pelton.ops.reference`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pelton_backends.triton.ops.gemv_kernels import add_bias, add_norm_rows, load_rows, store_output
from pelton_backends.triton.ops.pieces import activated, e4m3_scale, to_cache
from pelton_backends.triton.runtime import let_next_start, wait_for_inputs


@triton.jit
def load_tile(
    weight, tile, num_tiles, N: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, R: tl.constexpr, P: tl.constexpr,
    NUM: tl.constexpr,
):  # fmt: skip
    """R / PARTS rows of each part of weight [PARTS N, K] in NUM pieces [R, P]; zeros outside, nothing behind the last tile."""
    H: tl.constexpr = R // PARTS
    r = tl.arange(0, R)[:, None]
    row = tile * H + r % H
    cols = tl.arange(0, P)[None, :]
    start = weight + (row + r // H * N).to(tl.int64) * K + cols
    is_row = (row < N) & (tile < num_tiles)
    pieces = ()
    for i in tl.static_range(NUM):
        mask = is_row
        if (i + 1) * P > K:
            mask = mask & (cols + i * P < K)
        pieces += (tl.load(start + i * P, mask=mask, other=0.0, eviction_policy="evict_first"),)
    return pieces


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
def product(tile, row, R: tl.constexpr, P: tl.constexpr, NUM: tl.constexpr):
    """A tile times the row -> [R, 1] float32."""
    total = tl.zeros([R, P], tl.float32)
    for i in tl.static_range(NUM):
        total += tile[i].to(tl.float32) * row[i].to(tl.float32)
    return tl.sum(total, axis=1)[:, None]


@triton.jit
def scaled(y, weight_scale, scale, first, N: tl.constexpr, R: tl.constexpr):
    """y [R, 1], times the scales of rows first .. first + R - 1 and of the input."""
    rows = first + tl.arange(0, R)
    return y * tl.load(weight_scale + rows, mask=rows < N, other=0.0)[:, None] * scale


@triton.jit
def store_products(
    tile, row, scale, weight, weight_scale, bias, out, num_tiles,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, N: tl.constexpr, K: tl.constexpr, R: tl.constexpr, P: tl.constexpr,
    NUM: tl.constexpr, HOISTS: tl.constexpr,
):  # fmt: skip
    """All of a program's tiles, of which `tile` is the first: to out [1, N]."""
    PARTS: tl.constexpr = 1 if ACTIVATION is None else 2
    H: tl.constexpr = R // PARTS
    for index in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), num_stages=1, disable_licm=not HOISTS):
        following = load_tile(weight, index + tl.num_programs(0), num_tiles, N, K, PARTS, R, P, NUM)
        first = index * H
        y = product(tile, row, R, P, NUM)
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
        tile = following


@triton.jit
def fp8_linear_kernel(
    x, weight, weight_scale, input_scale, bias, out, num_tiles, HAS_BIAS: tl.constexpr, BOUND: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr, W: tl.constexpr, R: tl.constexpr, C: tl.constexpr, NUM: tl.constexpr,
    HOISTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [1, N] = e4m3(x [1, K]) weight^T."""
    P: tl.constexpr = W * C * 32
    let_next_start(PDL)
    tile = load_tile(weight, tl.program_id(0), num_tiles, N, K, 1, R, P, NUM)
    wait_for_inputs(PDL)
    row, scale = rounded_row(load_rows(x + tl.zeros([1, 1], tl.int32), K, P, NUM), input_scale, BOUND, NUM)
    store_products(
        tile, row, scale, weight, weight_scale, bias, out, num_tiles, HAS_BIAS, None, N, K, R, P, NUM, HOISTS
    )  # fmt: skip


@triton.jit
def fp8_add_norm_linear_kernel(
    hidden, residual, norm, post_norm, weight, weight_scale, input_scale, bias, out, new_residual, eps, post_eps, num_tiles,
    HAS_RESIDUAL: tl.constexpr, HAS_POST: tl.constexpr, UNIT_OFFSET: tl.constexpr, POST_UNIT_OFFSET: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, BOUND: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    W: tl.constexpr, R: tl.constexpr, C: tl.constexpr, NUM: tl.constexpr, HOISTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """residual' = [post_norm](hidden) + residual [1, K], stored by the first program; out [1, N] = e4m3(norm(residual')) weight^T.

    With an activation the weight has N rows of gate, then N of up, and out = activation(gate) * up; a tile has R / 2 rows of
    both.
    """
    P: tl.constexpr = W * C * 32
    PARTS: tl.constexpr = 1 if ACTIVATION is None else 2
    let_next_start(PDL)
    tile = load_tile(weight, tl.program_id(0), num_tiles, N, K, PARTS, R, P, NUM)
    norm_pieces = load_rows(norm + tl.zeros([1, 1], tl.int32), K, P, NUM)
    post_pieces = norm_pieces
    if HAS_POST:
        post_pieces = load_rows(post_norm + tl.zeros([1, 1], tl.int32), K, P, NUM)
    wait_for_inputs(PDL)
    x = add_norm_rows(
        hidden, residual, new_residual, norm_pieces, post_pieces, eps, post_eps, 1, K, K,
        tl.program_id(0) == 0, HAS_RESIDUAL, HAS_POST, UNIT_OFFSET, POST_UNIT_OFFSET, K, 1, P, NUM,
    )  # fmt: skip
    row, scale = rounded_row(x, input_scale, BOUND, NUM)
    store_products(
        tile, row, scale, weight, weight_scale, bias, out, num_tiles, HAS_BIAS, ACTIVATION, N, K, R, P, NUM, HOISTS
    )  # fmt: skip
