"""Matrix-vector kernels: one to eight rows times a plain weight matrix, bound by reading the weights once.

Shapes   T = num_tokens <= M (a power of two), K = in_features, N = out_features.
Tile     R rows of the weight by all of K, cut into NUM pieces of [R, C, L] with C * L columns each. A thread holds eight
         neighbours of a row (16 bytes of a 16-bit type), a warp 256 neighbours of a row; warps lie along L first (L / 256
         of them), then along R. So L says over how many warps a row's sum runs: few for short rows (fewer barriers and
         shuffles), many for long ones (fewer registers for the input rows).
Order    All weights of the tile are loaded into registers before `wait_for_inputs`: a program that starts while the
         kernel before it still runs has its weights when its inputs arrive.
Numbers  Products are accumulated in float32 and rounded once to the model's dtype, after the bias.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pelton_backends.triton.ops.pieces import activated, normed
from pelton_backends.triton.runtime import INTERPRETED, let_next_start, wait_for_inputs

ONE_BY_ONE: tl.constexpr = tl.constexpr(INTERPRETED)  # Triton's interpreter takes a Python loop for a joint reduction


@triton.jit
def load_tile(
    weight, row, N: tl.constexpr, K: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, L: tl.constexpr, NUM: tl.constexpr,
):  # fmt: skip
    """Rows row .. row + R - 1 of weight [N, K], contiguous: a tuple of NUM pieces [R, C, L]; zeros outside."""
    rows = row + tl.arange(0, R)[:, None, None]
    cols = tl.arange(0, C)[None, :, None] * L + tl.arange(0, L)[None, None, :]
    start = weight + rows.to(tl.int64) * K + cols
    pieces = ()
    for i in tl.static_range(NUM):
        if K % (C * L) == 0:
            if N % R == 0:
                piece = tl.load(start + i * C * L, eviction_policy="evict_first")
            else:
                piece = tl.load(start + i * C * L, mask=rows < N, other=0.0, eviction_policy="evict_first")
        else:
            mask = (rows < N) & (cols + i * C * L < K)
            piece = tl.load(start + i * C * L, mask=mask, other=0.0, eviction_policy="evict_first")
        pieces += (piece,)
    return pieces


@triton.jit
def load_row(row, K: tl.constexpr, C: tl.constexpr, L: tl.constexpr, NUM: tl.constexpr):
    """row [K], contiguous: a tuple of NUM pieces [C, L]; zeros outside."""
    cols = tl.arange(0, C)[:, None] * L + tl.arange(0, L)[None, :]
    pieces = ()
    for i in tl.static_range(NUM):
        if K % (C * L) == 0:
            piece = tl.load(row + cols + i * C * L)
        else:
            piece = tl.load(row + cols + i * C * L, mask=cols + i * C * L < K, other=0.0)
        pieces += (piece,)
    return pieces


@triton.jit
def load_rows(
    x, stride, num_rows, K: tl.constexpr, M: tl.constexpr, C: tl.constexpr, L: tl.constexpr, NUM: tl.constexpr
):
    """M rows of x [num_rows, K], the last one again for those beyond it: NUM pieces of row 0, of row 1, ..."""
    pieces = ()
    for m in tl.static_range(M):
        pieces += load_row(x + tl.minimum(m, num_rows - 1) * stride, K, C, L, NUM)
    return pieces


@triton.jit
def store_rows(
    x, pieces, num_rows, K: tl.constexpr, M: tl.constexpr, C: tl.constexpr, L: tl.constexpr, NUM: tl.constexpr
):
    """The rows in pieces to x [num_rows, K], contiguous."""
    cols = tl.arange(0, C)[:, None] * L + tl.arange(0, L)[None, :]
    for m in tl.static_range(M):
        for i in tl.static_range(NUM):
            mask = (cols + i * C * L < K) & (m < num_rows)
            tl.store(x + m * K + cols + i * C * L, pieces[m * NUM + i], mask=mask)


@triton.jit
def _add2(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def _add4(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def _add8(a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5, a6 + b6, a7 + b7


@triton.jit
def sums(tensors, AXIS: tl.constexpr, M: tl.constexpr):
    """The sum of each of M tensors over AXIS (None: over all), in one reduction: its barriers are paid once."""
    if M == 1:
        return (tl.sum(tensors[0], axis=AXIS),)
    elif ONE_BY_ONE:
        result = ()
        for m in tl.static_range(M):
            result += (tl.sum(tensors[m], axis=AXIS),)
        return result
    elif M == 2:
        return tl.reduce(tensors, AXIS, _add2)
    elif M == 4:
        return tl.reduce(tensors, AXIS, _add4)
    else:
        return tl.reduce(tensors, AXIS, _add8)


@triton.jit
def normed_rows(pieces, norm, eps, UNIT_OFFSET: tl.constexpr, K: tl.constexpr, M: tl.constexpr, NUM: tl.constexpr):
    """RMS norm of M rows, in float32, rounded to their dtype."""
    squares = ()
    for m in tl.static_range(M):
        total = pieces[m * NUM].to(tl.float32) * pieces[m * NUM].to(tl.float32)
        for i in tl.static_range(1, NUM):
            total += pieces[m * NUM + i].to(tl.float32) * pieces[m * NUM + i].to(tl.float32)
        squares += (total,)
    squares = sums(squares, None, M)
    result = ()
    for m in tl.static_range(M):
        scale = tl.rsqrt(squares[m] / K + eps)
        for i in tl.static_range(NUM):
            x = pieces[m * NUM + i]
            result += (normed(x.to(tl.float32), scale, norm[i], UNIT_OFFSET, x.dtype),)
    return result


@triton.jit
def added(hidden, residual, NUM: tl.constexpr):
    """hidden + residual, rounded to their dtype."""
    result = ()
    for i in tl.static_range(NUM):
        result += ((hidden[i].to(tl.float32) + residual[i].to(tl.float32)).to(hidden[i].dtype),)
    return result


@triton.jit
def product(tile, x, M: tl.constexpr, NUM: tl.constexpr):
    """tile [R, K] and rows x [M, K], both in pieces: a tuple of M columns [R] float32."""
    totals = ()
    for m in tl.static_range(M):
        total = tl.sum(tile[0].to(tl.float32) * x[m * NUM].to(tl.float32)[None, :, :], axis=1)
        for i in tl.static_range(1, NUM):
            total += tl.sum(tile[i].to(tl.float32) * x[m * NUM + i].to(tl.float32)[None, :, :], axis=1)
        totals += (total,)
    return sums(totals, 1, M)


@triton.jit
def add_norm_rows(
    hidden, residual, new_residual, norm, post_norm, eps, post_eps, num_tokens, hidden_stride, residual_stride,
    is_first, HAS_RESIDUAL: tl.constexpr, HAS_POST: tl.constexpr,
    UNIT_OFFSET: tl.constexpr, POST_UNIT_OFFSET: tl.constexpr,
    K: tl.constexpr, M: tl.constexpr, C: tl.constexpr, L: tl.constexpr, NUM: tl.constexpr,
):  # fmt: skip
    """norm([post_norm](hidden) + residual), in pieces; the first program stores the sum."""
    x = load_rows(hidden, hidden_stride, num_tokens, K, M, C, L, NUM)
    if HAS_RESIDUAL:
        old = load_rows(residual, residual_stride, num_tokens, K, M, C, L, NUM)
    if HAS_POST:
        x = normed_rows(x, post_norm, post_eps, POST_UNIT_OFFSET, K, M, NUM)
    if HAS_RESIDUAL:
        x = added(x, old, M * NUM)
    if (HAS_RESIDUAL or HAS_POST) and is_first:
        store_rows(new_residual, x, num_tokens, K, M, C, L, NUM)
    return normed_rows(x, norm, eps, UNIT_OFFSET, K, M, NUM)


@triton.jit
def store_output(out, columns, row, num_tokens, N: tl.constexpr, M: tl.constexpr, R: tl.constexpr):
    """M columns [R] to out [num_tokens, N] at row .. row + R - 1 of its last axis."""
    rows = row + tl.arange(0, R)
    for m in tl.static_range(M):
        tl.store(out + m * N + rows, columns[m].to(out.dtype.element_ty), mask=(rows < N) & (m < num_tokens))


@triton.jit
def add_bias(columns, bias, row, N: tl.constexpr, M: tl.constexpr, R: tl.constexpr):
    rows = row + tl.arange(0, R)
    values = tl.load(bias + rows, mask=rows < N, other=0.0).to(tl.float32)
    result = ()
    for m in tl.static_range(M):
        result += (columns[m] + values,)
    return result


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr, M: tl.constexpr, dtype: tl.constexpr):
    """activation(gate) * up, each step rounded to the model's dtype."""
    result = ()
    for m in tl.static_range(M):
        rounded = gate[m].to(dtype).to(tl.float32), up[m].to(dtype).to(tl.float32)
        result += (activated(rounded[0], rounded[1], ACTIVATION, dtype),)
    return result


@triton.jit(do_not_specialize=["num_tokens"])
def add_norm_linear_kernel(
    hidden, residual, norm, post_norm, weight, bias, out, new_residual, eps, post_eps,
    num_tokens, hidden_stride, residual_stride,
    HAS_RESIDUAL: tl.constexpr, HAS_POST: tl.constexpr, UNIT_OFFSET: tl.constexpr, POST_UNIT_OFFSET: tl.constexpr,
    HAS_BIAS: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    M: tl.constexpr, R: tl.constexpr, C: tl.constexpr, L: tl.constexpr, NUM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    tile = load_tile(weight, pid * R, N, K, R, C, L, NUM)
    norm_pieces = load_row(norm, K, C, L, NUM)
    post_pieces = norm_pieces
    if HAS_POST:
        post_pieces = load_row(post_norm, K, C, L, NUM)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    x = add_norm_rows(
        hidden, residual, new_residual, norm_pieces, post_pieces, eps, post_eps, num_tokens, hidden_stride,
        residual_stride, pid == 0, HAS_RESIDUAL, HAS_POST, UNIT_OFFSET, POST_UNIT_OFFSET, K, M, C, L, NUM,
    )  # fmt: skip
    y = product(tile, x, M, NUM)
    if HAS_BIAS:
        y = add_bias(y, bias, pid * R, N, M, R)
    store_output(out, y, pid * R, num_tokens, N, M, R)


@triton.jit(do_not_specialize=["num_tokens"])
def linear_kernel(
    x, weight, bias, out, num_tokens, stride, HAS_BIAS: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    M: tl.constexpr, R: tl.constexpr, C: tl.constexpr, L: tl.constexpr, NUM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    tile = load_tile(weight, pid * R, N, K, R, C, L, NUM)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    y = product(tile, load_rows(x, stride, num_tokens, K, M, C, L, NUM), M, NUM)
    if HAS_BIAS:
        y = add_bias(y, bias, pid * R, N, M, R)
    store_output(out, y, pid * R, num_tokens, N, M, R)


@triton.jit(do_not_specialize=["num_tokens"])
def add_norm_gated_linear_kernel(
    hidden, residual, norm, post_norm, weight, bias, out, new_residual, eps, post_eps,
    num_tokens, hidden_stride, residual_stride,
    HAS_RESIDUAL: tl.constexpr, HAS_POST: tl.constexpr, UNIT_OFFSET: tl.constexpr, POST_UNIT_OFFSET: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    M: tl.constexpr, R: tl.constexpr, C: tl.constexpr, L: tl.constexpr, NUM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    gate_tile = load_tile(weight, pid * R, N, K, R, C, L, NUM)
    up_tile = load_tile(weight + N * K, pid * R, N, K, R, C, L, NUM)
    norm_pieces = load_row(norm, K, C, L, NUM)
    post_pieces = norm_pieces
    if HAS_POST:
        post_pieces = load_row(post_norm, K, C, L, NUM)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    x = add_norm_rows(
        hidden, residual, new_residual, norm_pieces, post_pieces, eps, post_eps, num_tokens, hidden_stride,
        residual_stride, pid == 0, HAS_RESIDUAL, HAS_POST, UNIT_OFFSET, POST_UNIT_OFFSET, K, M, C, L, NUM,
    )  # fmt: skip
    gate = product(gate_tile, x, M, NUM)
    up = product(up_tile, x, M, NUM)
    if HAS_BIAS:
        gate = add_bias(gate, bias, pid * R, N, M, R)
        up = add_bias(up, bias + N, pid * R, N, M, R)
    y = gated(gate, up, ACTIVATION, M, out.dtype.element_ty)
    store_output(out, y, pid * R, num_tokens, N, M, R)


@triton.jit
def capped(columns, soft_cap, M: tl.constexpr):
    """soft_cap * tanh(x / soft_cap)."""
    result = ()
    for m in tl.static_range(M):
        # Of the magnitude, so that exp does not overflow; the error is some 1e-7 soft_cap.
        z = tl.abs(columns[m]) / soft_cap
        e = tl.exp(-2.0 * z)
        tanh = (1.0 - e) / (1.0 + e)
        result += (tl.where(columns[m] < 0, -tanh, tanh) * soft_cap,)
    return result


@triton.jit(do_not_specialize=["num_tokens"])
def add_norm_logits_kernel(
    hidden, residual, index, norm, post_norm, weight, bias, out, eps, post_eps,
    num_tokens, hidden_stride, residual_stride, soft_cap,
    HAS_RESIDUAL: tl.constexpr, HAS_POST: tl.constexpr, UNIT_OFFSET: tl.constexpr, POST_UNIT_OFFSET: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    M: tl.constexpr, R: tl.constexpr, C: tl.constexpr, L: tl.constexpr, NUM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows index [num_tokens] of hidden and residual; out [num_tokens, N] float32, not rounded before."""
    pid = tl.program_id(0)
    tile = load_tile(weight, pid * R, N, K, R, C, L, NUM)
    norm_pieces = load_row(norm, K, C, L, NUM)
    post_pieces = norm_pieces
    if HAS_POST:
        post_pieces = load_row(post_norm, K, C, L, NUM)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    x = ()
    for m in tl.static_range(M):
        row = tl.load(index + tl.minimum(m, num_tokens - 1))
        one = load_row(hidden + row * hidden_stride, K, C, L, NUM)
        if HAS_POST:
            one = normed_rows(one, post_pieces, post_eps, POST_UNIT_OFFSET, K, 1, NUM)
        if HAS_RESIDUAL:
            one = added(one, load_row(residual + row * residual_stride, K, C, L, NUM), NUM)
        x += one
    columns = product(tile, normed_rows(x, norm_pieces, eps, UNIT_OFFSET, K, M, NUM), M, NUM)
    if HAS_BIAS:
        columns = add_bias(columns, bias, pid * R, N, M, R)
    if HAS_CAP:
        columns = capped(columns, soft_cap, M)
    store_output(out, columns, pid * R, num_tokens, N, M, R)
