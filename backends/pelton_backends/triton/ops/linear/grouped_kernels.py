"""Kernels of products with weights of 4 or 8 bits in groups, on tensor cores: one row streams the matrix, and more rows.

Shapes   K = in_features, N = out_features, B = 4 or 8 bits, G = columns of a group (a multiple of 32 that divides 128, or of 128).
Codes    `codes` [N, ceil(K / 128) 4 B] int32. 128 columns of a row are 16 words of four bits a column, and of 8 bits 16 more with the upper
         half. Word 4 t + 2 u + v has, at bits 4 p and 4 p + 16, columns 32 p + 16 u + 8 v + 2 t and the one behind it: so a thread
         that loads four words has what an instruction (16 rows, 16 columns) wants from it.
Scales   `scales` [N, K / G] int32: a float32 whose last 8 bits are the zero point. A weight is (code - zero point) * scale. With MINIMA the
         upper half is a float16 scale, the lower one a float16 minimum, and a weight is code * scale + minimum.
Numbers  Codes become numbers without a conversion, which has a quarter of the rate of other instructions: put below the bits of a
         power of two they are power + code, exactly. `one_row_kernel` takes what the powers add off a group's sums, whose products are
         exact, in float32; its weights are never rounded. `many_rows_kernel` rounds them to the model's dtype.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pelton_backends.triton.ops.linear.gemv_kernels import INTERPRETED_DOT, add_bias, store_output
from pelton_backends.triton.ops.linear.split_k import store_result
from pelton_backends.triton.ops.pieces import activated, normed
from pelton_backends.triton.runtime import dot, let_next_start, wait_for_inputs

MOST_PIECES: tl.constexpr = tl.constexpr(4)
"""Of a row, which a program holds whole; pieces of a longer one are loaded as they are needed."""
_TWO_23: tl.constexpr = tl.constexpr(0x4B000000)


@triton.jit
def scale_of(word, MINIMA: tl.constexpr):
    """(scale, zero point or minimum), both float32."""
    if MINIMA:
        minimum = (word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        return (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32), minimum
    zero = ((word & 0xFF) | _TWO_23).to(tl.float32, bitcast=True) - 8388608.0
    return (word & -256).to(tl.float32, bitcast=True), zero


# One row. A program has R rows of the weight by all of K, or by its SPLIT-th from block `start` on, which is LAST at most: NUM pieces of
# W blocks of 128 columns, one a warp.


@triton.jit
def _load_words(
    codes, first, start, i: tl.constexpr, half: tl.constexpr, LAST: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    B: tl.constexpr, PARTS: tl.constexpr, W: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Words of piece i of a program's rows [8, W, R / 8, 16]; zeros outside. half: the upper one of 8 bits is 1."""
    BLOCKS: tl.constexpr = (K + 127) // 128
    block = tl.arange(0, W)[None, :, None, None] + (start + i * W)
    words = block * (4 * B) + half * 16 + tl.arange(0, 16)[None, None, None, :]
    r = tl.arange(0, R // 8)[None, None, :, None] * 8 + tl.arange(0, 8)[:, None, None, None]
    row = first + r % (R // PARTS)
    place = codes + (row + r // (R // PARTS) * N).to(tl.int64) * (BLOCKS * 4 * B) + words
    if LAST + (i + 1) * W > BLOCKS or N % (R // PARTS) != 0:
        return tl.load(place, mask=(row < N) & (block < BLOCKS), other=0, eviction_policy="evict_first")
    return tl.load(place, eviction_policy="evict_first")


@triton.jit
def _load_scales(
    scales, first, start, i: tl.constexpr, s: tl.constexpr, N: tl.constexpr, K: tl.constexpr, G: tl.constexpr,
    PARTS: tl.constexpr, W: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Scales of piece i of a program's rows [8, R / 8, 32 / R, W]: a lane has one row's, and 32 / R lanes the same. s: which group of
    a block, where it has several."""
    GROUPS: tl.constexpr = K // G
    group = ((tl.arange(0, W)[None, None, None, :] + (start + i * W)) * 128 + s * G) // G
    r = tl.arange(0, R // 8)[None, :, None, None] * 8 + tl.arange(0, 8)[:, None, None, None]
    r = r + tl.zeros([1, 1, 32 // R, 1], tl.int32)
    row = first + r % (R // PARTS)
    place = scales + (row + r // (R // PARTS) * N) * GROUPS + group
    return tl.load(place, mask=(row < N) & (group < GROUPS), other=0)


@triton.jit
def _load_piece(
    codes, scales, first, start, i: tl.constexpr, LAST: tl.constexpr, N: tl.constexpr, K: tl.constexpr, G: tl.constexpr,
    B: tl.constexpr, PARTS: tl.constexpr, W: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Words, then scales."""
    SUBS: tl.constexpr = (128 // G) if G < 128 else 1
    tensors = ()
    for half in tl.static_range(B // 4):
        tensors += (_load_words(codes, first, start, i, half, LAST, N, K, B, PARTS, W, R),)
    for s in tl.static_range(SUBS):
        tensors += (_load_scales(scales, first, start, i, s, N, K, G, PARTS, W, R),)
    return tensors


@triton.jit
def _load_tile(
    codes, scales, first, start, LAST: tl.constexpr, N: tl.constexpr, K: tl.constexpr, G: tl.constexpr, B: tl.constexpr,
    PARTS: tl.constexpr, W: tl.constexpr, R: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    tile = ()
    for i in tl.static_range(AHEAD):
        tile += _load_piece(codes, scales, first, start, i, LAST, N, K, G, B, PARTS, W, R)
    return tile


@triton.jit
def _columns(start, i: tl.constexpr, s: tl.constexpr, W: tl.constexpr, SUBS: tl.constexpr):
    """Columns of group s of the blocks of piece i [W, 128 / SUBS]."""
    return (tl.arange(0, W)[:, None] + (start + i * W)) * 128 + s * (128 // SUBS) + tl.arange(0, 128 // SUBS)[None, :]


@triton.jit
def _load_x(x, order, start, i: tl.constexpr, LAST: tl.constexpr, K: tl.constexpr, W: tl.constexpr, SUBS: tl.constexpr):
    """Piece i of a row, a tensor for each group; zeros outside."""
    parts = ()
    for s in tl.static_range(SUBS):
        columns = _columns(start, i, s, W, SUBS)
        if K % 128 == 0 and (LAST + (i + 1) * W) * 128 <= K:
            parts += (tl.load(x + (columns if order is None else tl.load(order + columns))),)
        else:
            inside = columns < K
            place = columns if order is None else tl.load(order + columns, mask=inside, other=0)
            parts += (tl.load(x + place, mask=inside, other=0.0),)
    return parts


@triton.jit
def _load_row(
    x, order, start, LAST: tl.constexpr, K: tl.constexpr, W: tl.constexpr, NUM: tl.constexpr, SUBS: tl.constexpr
):  # fmt: skip
    """A row, a tensor for each group of a piece; zeros outside."""
    parts = ()
    for i in tl.static_range(NUM):
        parts += _load_x(x, order, start, i, LAST, K, W, SUBS)
    return parts


@triton.jit
def _streamed_product(
    codes, scales, tile, x, order, magic, first, start, LAST: tl.constexpr, N: tl.constexpr, K: tl.constexpr, G: tl.constexpr,
    B: tl.constexpr, MINIMA: tl.constexpr, W: tl.constexpr, R: tl.constexpr, NUM: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """As `_row_product`, with each piece of x loaded a piece ahead of its product: for long rows."""
    SUBS: tl.constexpr = (128 // G) if G < 128 else 1
    COUNT: tl.constexpr = B // 4 + SUBS  # tensors of a piece
    total = tl.zeros([W, R, 1], tl.float32)
    row = _load_x(x, order, start, 0, LAST, K, W, SUBS)
    for i in tl.static_range(NUM):
        if i + 1 < NUM:
            row += _load_x(x, order, start, i + 1, LAST, K, W, SUBS)
        if i + AHEAD < NUM:
            tile += _load_piece(codes, scales, first, start, i + AHEAD, LAST, N, K, G, B, 1, W, R)
        for s in tl.static_range(SUBS):
            total += _group_product(
                tile[i * COUNT], tile[i * COUNT + B // 4 - 1], tile[i * COUNT + B // 4 + s], row[i * SUBS + s], magic, s, B, MINIMA,
                W, R, SUBS,
            )  # fmt: skip
    return tl.sum(total, axis=0)


@triton.jit
def _left_operand(
    words, magic, s: tl.constexpr, W: tl.constexpr, R: tl.constexpr, SUBS: tl.constexpr, dtype: tl.constexpr
):  # fmt: skip
    """Words [8, W, R / 8, 16] -> group s of their codes, and the power of two whose bits `magic` has twice [W, R, 128 / SUBS].

    No number moves between threads: lane 4 g + t has words 4 t .. 4 t + 3 of row g, and the instruction wants from it columns 2 t,
    2 t + 1, 2 t + 8, 2 t + 9. (With `tl.join` in place of shifts by a tensor, Triton would choose another order of columns.)
    """
    PAIRS: tl.constexpr = 4 // SUBS
    shift = (tl.arange(0, PAIRS) + s * PAIRS) * 4
    pair = ((tl.reshape(words, [8, W, R // 8, 16, 1]) >> shift[None, None, None, None, :]) & 0xF000F) | magic
    half = tl.arange(0, 2) * 16
    codes = tl.reshape(pair, [8, W, R // 8, 16, PAIRS, 1]) >> half[None, None, None, None, None, :]
    codes = tl.reshape(codes.to(tl.int16).to(dtype, bitcast=True), [8, W, R // 8, 4, 2, 2, PAIRS, 2])  # g w r t u v p b
    return tl.reshape(tl.permute(codes, [1, 2, 0, 6, 4, 5, 3, 7]), [W, R, 128 // SUBS])


@triton.jit
def _group_product(
    words, upper, group, x, magic, s: tl.constexpr, B: tl.constexpr, MINIMA: tl.constexpr, W: tl.constexpr, R: tl.constexpr,
    SUBS: tl.constexpr,
):  # fmt: skip
    """[W, R, 1] float32. upper: words of the upper half of 8 bits."""
    POWER: tl.constexpr = 128.0 if x.dtype == tl.bfloat16 else 1024.0
    right = tl.reshape(x, [W, 128 // SUBS, 1])
    left = _left_operand(words, magic, s, W, R, SUBS, x.dtype)
    if INTERPRETED_DOT:
        left, right = left.to(tl.float32), right.to(tl.float32)
    product = tl.dot(left, right)
    if SUBS == 1:
        total = tl.sum(x.to(tl.float32), axis=1)[:, None, None]
    else:  # where the product is, without the shuffles of a sum
        ones = tl.full([W, R, 128 // SUBS], 1.0, x.dtype)
        if INTERPRETED_DOT:
            ones = ones.to(tl.float32)
        total = tl.dot(ones, right)
    if B == 8:
        left = _left_operand(upper, magic, s, W, R, SUBS, x.dtype)
        if INTERPRETED_DOT:
            left = left.to(tl.float32)
        product += 16.0 * tl.dot(left, right)
    scale, zero = scale_of(tl.reshape(tl.permute(tl.max(group, axis=2), [2, 1, 0]), [W, R, 1]), MINIMA)
    added: tl.constexpr = POWER if B == 4 else 17.0 * POWER
    if MINIMA:
        return (product - total * added) * scale + total * zero
    return (product - total * (zero + added)) * scale


@triton.jit
def _row_product(
    codes, scales, tile, x, magic, first, start, LAST: tl.constexpr, N: tl.constexpr, K: tl.constexpr, G: tl.constexpr,
    B: tl.constexpr, MINIMA: tl.constexpr, PARTS: tl.constexpr, W: tl.constexpr, R: tl.constexpr, NUM: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """A program's rows times one row -> [R, 1] float32. tile: the first AHEAD pieces."""
    SUBS: tl.constexpr = (128 // G) if G < 128 else 1
    COUNT: tl.constexpr = B // 4 + SUBS  # tensors of a piece
    total = tl.zeros([W, R, 1], tl.float32)
    for i in tl.static_range(NUM):
        for s in tl.static_range(SUBS):
            total += _group_product(
                tile[i * COUNT],
                tile[i * COUNT + B // 4 - 1],
                tile[i * COUNT + B // 4 + s],
                x[i * SUBS + s],
                magic,
                s,
                B,
                MINIMA,
                W,
                R,
                SUBS,
            )
        if i + AHEAD < NUM:
            tile += _load_piece(codes, scales, first, start, i + AHEAD, LAST, N, K, G, B, PARTS, W, R)
    return tl.sum(total, axis=0)


@triton.jit
def _bring_near(address, num_bytes):
    """Ask for bytes, a multiple of 16, to be brought into L2: one thread does, and nobody waits for them."""
    tl.inline_asm_elementwise(
        """{ .reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0;
        @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }""",
        "=r,l,r", [address, num_bytes], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def one_row_kernel(
    x, order, codes, scales, bias, out, partials, counters, magic, N: tl.constexpr, K: tl.constexpr, G: tl.constexpr,
    B: tl.constexpr, MINIMA: tl.constexpr, W: tl.constexpr, R: tl.constexpr, NUM: tl.constexpr, AHEAD: tl.constexpr,
    SPLIT: tl.constexpr, PDL: tl.constexpr, near=None, NEAR: tl.constexpr = 0, HALF: tl.constexpr = 0,
):  # fmt: skip
    """out [1, N] = x [1, K] weight^T + bias. near: a matrix that is read next, of whose halves, HALF bytes each, NEAR bytes in all are
    brought into L2 before the wait.

    order [K] int32 or None: which column of x each column of the weight meets. magic: the bits of a power of two, twice, as an
    argument: two constants do not fit into the instruction that cuts out codes and adds them. partials [N / R, SPLIT, R] float32 and
    counters [N / R] int32, zeros: the last program of a tile sums its parts, in order.
    """
    SUBS: tl.constexpr = (128 // G) if G < 128 else 1
    LAST: tl.constexpr = (SPLIT - 1) * NUM * W
    first = tl.program_id(0) * R
    start = tl.program_id(1) * (NUM * W)
    let_next_start(PDL)
    tile = _load_tile(codes, scales, first, start, LAST, N, K, G, B, 1, W, R, AHEAD)
    if NEAR > 0:
        share = NEAR // 2 // tl.num_programs(0) // 128 * 128
        address = near.to(tl.int64) + tl.program_id(0).to(tl.int64) * share
        _bring_near(address, share)
        _bring_near(address + HALF, share)
    wait_for_inputs(PDL)
    if NUM > MOST_PIECES:
        y = _streamed_product(
            codes, scales, tile, x, order, magic, first, start, LAST, N, K, G, B, MINIMA, W, R, NUM, AHEAD
        )
    else:
        row = _load_row(x, order, start, LAST, K, W, NUM, SUBS)
        y = _row_product(codes, scales, tile, row, magic, first, start, LAST, N, K, G, B, MINIMA, 1, W, R, NUM, AHEAD)
    if SPLIT == 1:
        if bias is not None:
            y = add_bias(y, bias, first, N, R)
        store_output(out, y, first, 1, N, 1, R)
    else:
        cells = partials + tl.program_id(0) * (SPLIT * R) + tl.arange(0, R)[:, None]
        tl.store(cells + tl.program_id(1) * R, y)
        tl.debug_barrier()  # all threads' stores come before the one thread's increment, which releases them
        counter = counters + tl.program_id(0)
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == SPLIT - 1:
            tl.store(counter, 0)
            y = tl.load(cells, cache_modifier=".cg")
            for i in tl.static_range(1, SPLIT):
                y += tl.load(cells + i * R, cache_modifier=".cg")
            if bias is not None:
                y = add_bias(y, bias, first, N, R)
            store_output(out, y, first, 1, N, 1, R)


@triton.jit
def _normed_row(x, norm, eps, UNIT_OFFSET: tl.constexpr, K: tl.constexpr, COUNT: tl.constexpr):
    """RMS norm of a row in COUNT tensors, in float32, rounded to its dtype."""
    squares = x[0].to(tl.float32) * x[0].to(tl.float32)
    for i in tl.static_range(1, COUNT):
        squares += x[i].to(tl.float32) * x[i].to(tl.float32)
    scale = tl.rsqrt(tl.sum(tl.sum(squares, axis=1), axis=0) / K + eps)
    result = ()
    for i in tl.static_range(COUNT):
        result += (normed(x[i].to(tl.float32), scale, norm[i], UNIT_OFFSET, x[i].dtype),)
    return result


@triton.jit
def one_row_add_norm_kernel(
    hidden, residual, norm, post_norm, order, codes, scales, bias, out, new_residual, eps, post_eps, magic,
    UNIT_OFFSET: tl.constexpr, POST_UNIT_OFFSET: tl.constexpr, ACTIVATION: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr, G: tl.constexpr, B: tl.constexpr, MINIMA: tl.constexpr,
    W: tl.constexpr, R: tl.constexpr, NUM: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """residual' = [post_norm](hidden) + residual [1, K], stored by the first program; out [1, N] = norm(residual') weight^T + bias.

    With an activation the weight has N rows of gate, then N of up, and out = activation(gate) * up; a program has R / 2 rows of
    both. residual, post_norm, order and bias may be None. order, magic: as in `one_row_kernel`.
    """
    PARTS: tl.constexpr = 1 if ACTIVATION is None else 2
    H: tl.constexpr = R // PARTS
    SUBS: tl.constexpr = (128 // G) if G < 128 else 1
    COUNT: tl.constexpr = NUM * SUBS
    pid = tl.program_id(0)
    first = pid * H
    let_next_start(PDL)
    tile = _load_tile(codes, scales, first, 0, 0, N, K, G, B, PARTS, W, R, AHEAD)
    norms = _load_row(norm, order, 0, 0, K, W, NUM, SUBS)
    if post_norm is not None:
        post_norms = _load_row(post_norm, order, 0, 0, K, W, NUM, SUBS)
    wait_for_inputs(PDL)
    x = _load_row(hidden, order, 0, 0, K, W, NUM, SUBS)
    if post_norm is not None:
        x = _normed_row(x, post_norms, post_eps, POST_UNIT_OFFSET, K, COUNT)
    if residual is not None:
        old = _load_row(residual, order, 0, 0, K, W, NUM, SUBS)
        added = ()
        for i in tl.static_range(COUNT):
            added += ((x[i].to(tl.float32) + old[i].to(tl.float32)).to(x[i].dtype),)
        x = added
    if new_residual is not None:  # noqa: SIM102 (one is known when it is compiled)
        if pid == 0:
            for i in tl.static_range(COUNT):
                columns = _columns(0, i // SUBS, i % SUBS, W, SUBS)
                inside = columns < K
                place = columns if order is None else tl.load(order + columns, mask=inside, other=0)
                tl.store(new_residual + place, x[i], mask=inside)
    x = _normed_row(x, norms, eps, UNIT_OFFSET, K, COUNT)
    y = _row_product(codes, scales, tile, x, magic, first, 0, 0, N, K, G, B, MINIMA, PARTS, W, R, NUM, AHEAD)
    if ACTIVATION is None:
        if bias is not None:
            y = add_bias(y, bias, first, N, R)
    else:
        gate, up = tl.split(tl.permute(tl.reshape(y, [2, H, 1]), [1, 2, 0]))
        if bias is not None:
            gate = add_bias(gate, bias, first, N, H)
            up = add_bias(up, bias + N, first, N, H)
        dtype = out.dtype.element_ty
        y = activated(gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), ACTIVATION, dtype)
    store_output(out, y, first, 1, N, 1, H)


# More rows.


@triton.jit
def _tile_rows(tile, N: tl.constexpr, ACTIVATION: tl.constexpr, R: tl.constexpr):
    """Rows of the weight that a tile has, as `split_k.tile_rows`, in the order in which threads load them: warp w of R / 16, with its lane
    4 g + t, has rows 16 w + g and 16 w + 8 + g of the tile, where an instruction wants them."""
    lane = tl.arange(0, R)
    lane = lane % (R // 2) // 8 * 16 + lane // (R // 2) * 8 + lane % 8
    if ACTIVATION is None:
        return tl.minimum(tile * R + lane, N - 1)
    HALF: tl.constexpr = R // 2
    return tl.minimum(tile * HALF + lane % HALF, N // 2 - 1) + (lane // HALF) * (N // 2)


@triton.jit
def _codes_of(
    codes, rows, step, magic, half: tl.constexpr, K: tl.constexpr, B: tl.constexpr, R: tl.constexpr
):  # fmt: skip
    """Codes of one block of 128 columns and what magic is [R, 128] float32; rows of the result in the order of the tile."""
    WORDS: tl.constexpr = (K + 127) // 128 * 4 * B
    place = codes + rows.to(tl.int64)[:, None] * WORDS + step * (4 * B) + half * 16 + tl.arange(0, 16)[None, :]
    shift = tl.arange(0, 8) * 4  # of codes 4 b + 2 p1 + p0
    code = (tl.reshape(tl.load(place), [R, 1, 16]) >> shift[None, :, None]) & 15
    code = tl.reshape(code, [2, R // 16, 8, 2, 2, 2, 4, 2, 2])  # h w g b p1 p0 t u v
    code = tl.reshape(tl.permute(code, [1, 0, 2, 4, 5, 7, 8, 6, 3]), [R, 128])
    return (code | magic).to(tl.float32, bitcast=True)


@triton.jit
def _block_of_weights(
    codes, scales, rows, step, magic, K: tl.constexpr, G: tl.constexpr, B: tl.constexpr, MINIMA: tl.constexpr, R: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """Columns 128 step .. 128 step + 127 of these rows [R, 128] in `dtype`, zeros behind the last. magic: the bits of 2^23. rows: as
    `_tile_rows` has them."""
    GROUPS: tl.constexpr = K // G
    SUBS: tl.constexpr = (128 // G) if G < 128 else 1
    number = _codes_of(codes, rows, step, magic, 0, K, B, R)
    if B == 8:
        number += (_codes_of(codes, rows, step, magic, 1, K, B, R) - 8388608.0) * 16.0
    group = (step * 128 + tl.arange(0, SUBS) * (128 // SUBS)) // G
    word = tl.load(scales + rows[:, None] * GROUPS + group[None, :], mask=(group < GROUPS)[None, :], other=0)
    word = tl.reshape(tl.permute(tl.reshape(word, [2, R // 16, 8, SUBS]), [1, 0, 2, 3]), [R, SUBS, 1])
    scale, zero = scale_of(word, MINIMA)
    number = tl.reshape(number, [R, SUBS, 128 // SUBS])
    weight = (number - 8388608.0) * scale + zero if MINIMA else (number - (zero + 8388608.0)) * scale
    return tl.reshape(weight.to(dtype), [R, 128])


@triton.jit
def _as_tile(rows, R: tl.constexpr):
    """Rows in the order of the tile."""
    return tl.reshape(tl.permute(tl.reshape(rows, [2, R // 16, 8]), [1, 0, 2]), [R])


@triton.jit(do_not_specialize=["num_tokens"])
def many_rows_kernel(
    x, codes, scales, bias, out, partials, counters, num_tokens, stride, magic,
    N: tl.constexpr, K: tl.constexpr, G: tl.constexpr, B: tl.constexpr, MINIMA: tl.constexpr, ACTIVATION: tl.constexpr,
    M: tl.constexpr, R: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """R rows of the weight by a SPLIT-th of K, for M rows of x: as `split_k.multiply_kernel`, its weights unpacked in registers."""
    tile = tl.program_id(0)
    part = tl.program_id(1)
    slot = (tile * tl.num_programs(2) + tl.program_id(2)) * SPLIT  # of the first part
    BLOCKS: tl.constexpr = (K + 128 - 1) // 128
    NUM_STEPS: tl.constexpr = (BLOCKS + SPLIT - 1) // SPLIT
    rows = _tile_rows(tile, N, ACTIVATION, R)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    columns = tl.arange(0, 128)
    tokens = tl.program_id(2) * M + tl.arange(0, M)
    x_tile = x + tl.minimum(tokens, num_tokens - 1).to(tl.int64)[None, :] * stride + columns[:, None]
    total = tl.zeros((R, M), dtype=tl.float32)
    first = part * NUM_STEPS
    last = tl.minimum(first + NUM_STEPS, BLOCKS)
    for step in tl.range(first, last, num_stages=STAGES):
        if K % 128 == 0:
            y = tl.load(x_tile + step * 128)
        else:
            y = tl.load(x_tile + step * 128, mask=(columns + step * 128 < K)[:, None], other=0.0)
        w = _block_of_weights(codes, scales, rows, step, magic, K, G, B, MINIMA, R, x.dtype.element_ty)
        total = dot(w, y, total)

    rows = _as_tile(rows, R)
    if SPLIT > 1:
        cells = tl.arange(0, R)[:, None] * M + tl.arange(0, M)[None, :]
        tl.store(partials + (slot + part) * (R * M) + cells, total)
        tl.debug_barrier()  # all threads' stores come before the one thread's increment, which releases them
        if tl.atomic_add(counters + slot // SPLIT, 1, sem="acq_rel", scope="gpu") == SPLIT - 1:
            tl.store(counters + slot // SPLIT, 0)
            # In the order of the parts, whichever came last: the same bits each time.
            total = tl.load(partials + slot * (R * M) + cells, cache_modifier=".cg")
            for i in tl.static_range(1, SPLIT):
                total += tl.load(partials + (slot + i) * (R * M) + cells, cache_modifier=".cg")
            store_result(total, None, None, bias, out, rows, tile, tokens, num_tokens, N, ACTIVATION, M, R)
    else:
        store_result(total, None, None, bias, out, rows, tile, tokens, num_tokens, N, ACTIVATION, M, R)


@triton.jit
def dequantize_kernel(
    codes, scales, out, magic, N: tl.constexpr, K: tl.constexpr, G: tl.constexpr, B: tl.constexpr, MINIMA: tl.constexpr,
    R: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [N, K], R rows by 128 columns a program."""
    loaded = _tile_rows(tl.program_id(0), N, None, R)
    rows = tl.program_id(0) * R + tl.arange(0, R)
    step = tl.program_id(1)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    weight = _block_of_weights(codes, scales, loaded, step, magic, K, G, B, MINIMA, R, out.dtype.element_ty)
    columns = step * 128 + tl.arange(0, 128)
    place = out + rows.to(tl.int64)[:, None] * K + columns[None, :]
    tl.store(place, weight, mask=(rows < N)[:, None] & (columns < K)[None, :])
