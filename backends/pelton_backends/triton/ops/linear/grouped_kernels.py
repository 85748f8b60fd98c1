"""Kernels of products with weights of 4 or 8 bits in groups: one row streams the matrix, more rows multiply on tensor cores.

Shapes   K = in_features, N = out_features, B = 4 or 8 bits, G = columns of a group (a multiple of 32 that divides 128, or of 128).
Codes    `codes` [N, ceil(K / 128) 4 B] int32. 128 columns of a row are 4 B words: code j of word i is column 4 B j + i, at bit B j.
Scales   `scales` [N, K / G] int32: a float32 whose last 8 bits are the zero point. A weight is (code - zero point) * scale.
Codes become floats without a conversion, which has a quarter of the rate of other instructions: a code within the mantissa of
1.0 is 1 + code / 2^s, exactly. Sums take off what the ones add.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pelton_backends.triton.ops.linear.gemv_kernels import add_bias, store_output
from pelton_backends.triton.ops.linear.split_k import store_result, tile_rows
from pelton_backends.triton.ops.pieces import activated, normed
from pelton_backends.triton.runtime import dot, let_next_start, wait_for_inputs

_TWO_23: tl.constexpr = tl.constexpr(0x4B000000)


@triton.jit
def scale_of(word):
    """(scale, zero point), both float32."""
    zero = ((word & 0xFF) | _TWO_23).to(tl.float32, bitcast=True) - 8388608.0
    return (word & -256).to(tl.float32, bitcast=True), zero


# One row.


@triton.jit
def _columns(i: tl.constexpr, j: tl.constexpr, W: tl.constexpr, B: tl.constexpr):
    """Columns of code j of piece i's words [W 128]."""
    word = tl.arange(0, W * 128) + i * W * 128
    return word // (4 * B) * 128 + word % (4 * B) + j * 4 * B


@triton.jit
def _load_columns(x, order, i: tl.constexpr, K: tl.constexpr, W: tl.constexpr, B: tl.constexpr):
    """Piece i of a row, a tensor [W 128] for each code of a word; zeros outside."""
    parts = ()
    for j in tl.static_range(32 // B):
        columns = _columns(i, j, W, B)
        if K % 128 == 0 and (i + 1) * W * 4096 // B <= K:
            parts += (tl.load(x + (columns if order is None else tl.load(order + columns))),)
        else:
            inside = columns < K
            place = columns if order is None else tl.load(order + columns, mask=inside, other=0)
            parts += (tl.load(x + place, mask=inside, other=0.0),)
    return parts


@triton.jit
def _load_row(x, order, K: tl.constexpr, W: tl.constexpr, B: tl.constexpr, NUM: tl.constexpr):
    parts = ()
    for i in tl.static_range(NUM):
        parts += _load_columns(x, order, i, K, W, B)
    return parts


@triton.jit
def _tile_rows(first, N: tl.constexpr, PARTS: tl.constexpr, R: tl.constexpr):
    """Rows first .. first + R / PARTS - 1 of each part, and whether they are there."""
    r = tl.arange(0, R)
    row = first + r % (R // PARTS)
    return row + r // (R // PARTS) * N, row < N


@triton.jit
def _load_codes(
    codes, first, i: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, W: tl.constexpr, R: tl.constexpr,
    B: tl.constexpr,
):  # fmt: skip
    """Words of piece i of a program's rows [R, W 128]."""
    WORDS: tl.constexpr = (K + 127) // 128 * 4 * B
    rows, inside = _tile_rows(first, N, PARTS, R)
    words = tl.arange(0, W * 128) + i * W * 128
    place = codes + rows.to(tl.int64)[:, None] * WORDS + words[None, :]
    if (i + 1) * W * 128 > WORDS or N % (R // PARTS) != 0:
        mask = inside[:, None] & (words < WORDS)[None, :]
        return tl.load(place, mask=mask, other=0, eviction_policy="evict_first")
    return tl.load(place, eviction_policy="evict_first")


@triton.jit
def _load_scales(
    scales, first, i: tl.constexpr, s: tl.constexpr, N: tl.constexpr, K: tl.constexpr, G: tl.constexpr, PARTS: tl.constexpr,
    W: tl.constexpr, R: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Scales of piece i of a program's rows [R, W 32], one for four words; s: which group of a block of 128, where it has several."""
    GROUPS: tl.constexpr = K // G
    rows, inside = _tile_rows(first, N, PARTS, R)
    quads = tl.arange(0, W * 32) + i * W * 32
    group = (quads // B * 128 + s * G) // G
    # Transposed, so that neighbouring threads have neighbouring quads, as they have them of the codes.
    mask = (group < GROUPS)[:, None] & inside[None, :]
    return tl.trans(tl.load(scales + rows[None, :] * GROUPS + group[:, None], mask=mask, other=0))


@triton.jit
def _value(words, one, j: tl.constexpr, B: tl.constexpr):
    """Code j of each word, as 1 + code / 128 (4 bits, even j), 1 + code / 2048 (odd j), 1 + code / 256 (8 bits)."""
    if B == 4:
        # Two codes lie within the mantissa at each shift.
        SHIFT: tl.constexpr = 16 - 8 * (j // 2) if j % 2 == 0 else 12 - 4 * j
        MASK: tl.constexpr = 0xF0000 if j % 2 == 0 else 0xF000
    else:
        SHIFT: tl.constexpr = 15 - 8 * j
        MASK: tl.constexpr = 0x7F8000
    if SHIFT > 0:
        words = words << SHIFT
    elif SHIFT < 0:
        words = words >> (-SHIFT)
    return ((words & MASK) | one).to(tl.float32, bitcast=True)


@triton.jit
def _row_product(
    codes, scales, tile, groups, x, one, first, N: tl.constexpr, K: tl.constexpr, G: tl.constexpr, PARTS: tl.constexpr,
    W: tl.constexpr, R: tl.constexpr, B: tl.constexpr, NUM: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """A program's rows times one row -> [R, 1] float32. tile, groups: the first AHEAD pieces' words and scales."""
    PER: tl.constexpr = 32 // B
    SUBS: tl.constexpr = (128 // G) if G < 128 else 1  # groups of a block
    STEPS: tl.constexpr = PER // SUBS  # codes of a word in one group
    SPREAD: tl.constexpr = 128.0 if B == 4 else 256.0
    total = tl.zeros([R, W * 32], tl.float32)
    for i in tl.static_range(NUM):
        for s in tl.static_range(SUBS):
            scale, zero = scale_of(groups[i * SUBS + s])
            acc = tl.zeros([R, W * 128], tl.float32)
            plain = x[i * PER + s * STEPS].to(tl.float32)
            ones = plain * (16.0 if B == 4 and s * STEPS % 2 == 1 else 1.0)
            for j in tl.static_range(s * STEPS, (s + 1) * STEPS):
                number = x[i * PER + j].to(tl.float32)
                if j > s * STEPS:
                    plain += number
                if B == 4 and j % 2 == 1:
                    number = number * 16.0
                if j > s * STEPS:
                    ones += number
                acc += _value(tile[i], one, j, B) * number[None, :]
            product = tl.sum(tl.reshape(acc, [R, W * 32, 4]), axis=2)
            product -= tl.sum(tl.reshape(ones, [W * 32, 4]), axis=1)[None, :]
            product -= zero * (tl.sum(tl.reshape(plain, [W * 32, 4]), axis=1) * (1.0 / SPREAD))[None, :]
            total += product * (scale * SPREAD)
        if i + AHEAD < NUM:
            tile += (_load_codes(codes, first, i + AHEAD, N, K, PARTS, W, R, B),)
            for s in tl.static_range(SUBS):
                groups += (_load_scales(scales, first, i + AHEAD, s, N, K, G, PARTS, W, R, B),)
    return tl.sum(total, axis=1)[:, None]


@triton.jit
def _load_tile(
    codes, scales, first, N: tl.constexpr, K: tl.constexpr, G: tl.constexpr, PARTS: tl.constexpr, W: tl.constexpr,
    R: tl.constexpr, B: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    SUBS: tl.constexpr = (128 // G) if G < 128 else 1
    tile = ()
    groups = ()
    for i in tl.static_range(AHEAD):
        tile += (_load_codes(codes, first, i, N, K, PARTS, W, R, B),)
        for s in tl.static_range(SUBS):
            groups += (_load_scales(scales, first, i, s, N, K, G, PARTS, W, R, B),)
    return tile, groups


@triton.jit
def one_row_kernel(
    x, order, codes, scales, bias, out, one, N: tl.constexpr, K: tl.constexpr, G: tl.constexpr, B: tl.constexpr,
    W: tl.constexpr, R: tl.constexpr, NUM: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [1, N] = x [1, K] weight^T + bias.

    order [K] int32 or None: which column of x each column of the weight meets. one: the bits of 1.0, as an argument; two constants
    do not fit into the instruction that cuts out a code and adds them.
    """
    first = tl.program_id(0) * R
    let_next_start(PDL)
    tile, groups = _load_tile(codes, scales, first, N, K, G, 1, W, R, B, AHEAD)
    wait_for_inputs(PDL)
    row = _load_row(x, order, K, W, B, NUM)
    y = _row_product(codes, scales, tile, groups, row, one, first, N, K, G, 1, W, R, B, NUM, AHEAD)
    if bias is not None:
        y = add_bias(y, bias, first, N, R)
    store_output(out, y, first, 1, N, 1, R)


@triton.jit
def _normed_row(x, norm, eps, UNIT_OFFSET: tl.constexpr, K: tl.constexpr, COUNT: tl.constexpr):
    """RMS norm of a row in COUNT tensors, in float32, rounded to its dtype."""
    squares = x[0].to(tl.float32) * x[0].to(tl.float32)
    for i in tl.static_range(1, COUNT):
        squares += x[i].to(tl.float32) * x[i].to(tl.float32)
    scale = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
    result = ()
    for i in tl.static_range(COUNT):
        result += (normed(x[i].to(tl.float32), scale, norm[i], UNIT_OFFSET, x[i].dtype),)
    return result


@triton.jit
def one_row_add_norm_kernel(
    hidden, residual, norm, post_norm, order, codes, scales, bias, out, new_residual, eps, post_eps, one,
    UNIT_OFFSET: tl.constexpr, POST_UNIT_OFFSET: tl.constexpr, ACTIVATION: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr, G: tl.constexpr, B: tl.constexpr,
    W: tl.constexpr, R: tl.constexpr, NUM: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """residual' = [post_norm](hidden) + residual [1, K], stored by the first program; out [1, N] = norm(residual') weight^T + bias.

    With an activation the weight has N rows of gate, then N of up, and out = activation(gate) * up; a program has R / 2 rows of
    both. residual, post_norm, order and bias may be None. order, one: as in `one_row_kernel`.
    """
    PARTS: tl.constexpr = 1 if ACTIVATION is None else 2
    H: tl.constexpr = R // PARTS
    COUNT: tl.constexpr = NUM * (32 // B)
    pid = tl.program_id(0)
    first = pid * H
    let_next_start(PDL)
    tile, groups = _load_tile(codes, scales, first, N, K, G, PARTS, W, R, B, AHEAD)
    norms = _load_row(norm, order, K, W, B, NUM)
    if post_norm is not None:
        post_norms = _load_row(post_norm, order, K, W, B, NUM)
    wait_for_inputs(PDL)
    x = _load_row(hidden, order, K, W, B, NUM)
    if post_norm is not None:
        x = _normed_row(x, post_norms, post_eps, POST_UNIT_OFFSET, K, COUNT)
    if residual is not None:
        old = _load_row(residual, order, K, W, B, NUM)
        added = ()
        for i in tl.static_range(COUNT):
            added += ((x[i].to(tl.float32) + old[i].to(tl.float32)).to(x[i].dtype),)
        x = added
    if new_residual is not None:  # noqa: SIM102 (one is known when it is compiled)
        if pid == 0:
            for i in tl.static_range(COUNT):
                columns = _columns(i // (32 // B), i % (32 // B), W, B)
                inside = columns < K
                place = columns if order is None else tl.load(order + columns, mask=inside, other=0)
                tl.store(new_residual + place, x[i], mask=inside)
    x = _normed_row(x, norms, eps, UNIT_OFFSET, K, COUNT)
    y = _row_product(codes, scales, tile, groups, x, one, first, N, K, G, PARTS, W, R, B, NUM, AHEAD)
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
def _block_of_weights(
    codes, scales, rows, step, magic, K: tl.constexpr, G: tl.constexpr, B: tl.constexpr, R: tl.constexpr, dtype: tl.constexpr
):  # fmt: skip
    """Columns 128 step .. 128 step + 127 of these rows [R, 128] in `dtype`, zeros behind the last. magic: the bits of 2^23."""
    WORDS: tl.constexpr = (K + 128 - 1) // 128 * 4 * B
    PER: tl.constexpr = 32 // B
    GROUPS: tl.constexpr = K // G
    SUBS: tl.constexpr = (128 // G) if G < 128 else 1
    word = tl.load(codes + rows.to(tl.int64)[:, None] * WORDS + step * 4 * B + tl.arange(0, 4 * B)[None, :])
    shift = tl.arange(0, PER) * B
    code = (tl.reshape(word, [R, 1, 4 * B]) >> shift[None, :, None]) & ((1 << B) - 1)
    number = (code | magic).to(tl.float32, bitcast=True)
    number = tl.reshape(number, [R, SUBS, 128 // SUBS])
    group = (step * 128 + tl.arange(0, SUBS) * (128 // SUBS)) // G
    scale, zero = scale_of(
        tl.load(scales + rows[:, None] * GROUPS + group[None, :], mask=(group < GROUPS)[None, :], other=0)
    )
    weight = (number - tl.reshape(zero + 8388608.0, [R, SUBS, 1])) * tl.reshape(scale, [R, SUBS, 1])
    return tl.reshape(weight.to(dtype), [R, 128])


@triton.jit(do_not_specialize=["num_tokens"])
def many_rows_kernel(
    x, codes, scales, bias, out, partials, counters, num_tokens, stride, magic,
    N: tl.constexpr, K: tl.constexpr, G: tl.constexpr, B: tl.constexpr, ACTIVATION: tl.constexpr,
    M: tl.constexpr, R: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """R rows of the weight by a SPLIT-th of K, for M rows of x: as `split_k.multiply_kernel`, its weights unpacked in registers."""
    tile = tl.program_id(0)
    part = tl.program_id(1)
    slot = (tile * tl.num_programs(2) + tl.program_id(2)) * SPLIT  # of the first part
    BLOCKS: tl.constexpr = (K + 128 - 1) // 128
    NUM_STEPS: tl.constexpr = (BLOCKS + SPLIT - 1) // SPLIT
    rows = tile_rows(tile, N, ACTIVATION, R)
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
        w = _block_of_weights(codes, scales, rows, step, magic, K, G, B, R, x.dtype.element_ty)
        total = dot(w, y, total)

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
    codes, scales, out, magic, N: tl.constexpr, K: tl.constexpr, G: tl.constexpr, B: tl.constexpr, R: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out [N, K], R rows by 128 columns a program."""
    rows = tl.program_id(0) * R + tl.arange(0, R)
    step = tl.program_id(1)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    weight = _block_of_weights(codes, scales, tl.minimum(rows, N - 1), step, magic, K, G, B, R, out.dtype.element_ty)
    columns = step * 128 + tl.arange(0, 128)
    place = out + rows.to(tl.int64)[:, None] * K + columns[None, :]
    tl.store(place, weight, mask=(rows < N)[:, None] & (columns < K)[None, :])
