"""Matrix-vector kernels: one to eight rows times a plain weight matrix, bound by reading the weights once.

Shapes   T = num_tokens <= M (a power of two), K = in_features, N = out_features.
Tile     A program has R rows of the weight by all of K, cut into NUM pieces of P = W C 32 columns, W warps. AHEAD of the
         pieces are in registers at a time; a thread loads 16 bytes at once, eight neighbours of a row of a 16-bit type.
Product  DOT: on tensor cores, the weights as the left operand, straight from the registers they were loaded to: columns are
         summed in whatever order, so the eight neighbours of a thread stand for the columns that the instruction wants from
         it (see `left_operand`). R is a multiple of 8; each warp sums over C 32 columns of a piece, then the warps are summed.
         Without DOT: multiplied and added in float32. For float32 (tensor cores would round it), and for one row and large
         matrices: a warp reads 512 neighbouring bytes where DOT reads 64 of eight rows, which memory likes better.
Order    The first pieces are loaded before `wait_for_inputs`: a program that starts while the kernel before it still runs
         has its weights when its inputs arrive. The next kernel is let start first of all (0.4 us a layer of four small
         products, H200): its programs find places as soon as there are any.
Norm     In every program, of all rows (Zhang and Sennrich, arXiv:1910.07467): K numbers are less than its weights.
Numbers  Norms, activations and roundings follow `pelton.ops.reference`. Products are accumulated in
         float32 and rounded once to the model's dtype, after the bias. Oracle: tests/support/pelton_linear_oracle.py, float64,
         with its tolerances.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pelton_backends.triton.ops.pieces import activated, normed
from pelton_backends.triton.runtime import INTERPRETED, let_next_start, wait_for_inputs

INTERPRETED_DOT: tl.constexpr = tl.constexpr(INTERPRETED)  # Triton's interpreter multiplies bfloat16 as integers


@triton.jit
def load_piece(
    weight, first, i: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr,
    W: tl.constexpr, R: tl.constexpr, C: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Piece i of a program's tile of weight [PARTS N, K]; zeros outside. [8, W, R / 8, C, 32] with DOT, else [R, P].

    Rows first .. first + R / PARTS - 1 of each part: along R the parts follow each other.
    """
    if DOT:
        w = tl.arange(0, W)[None, :, None, None, None]
        c = tl.arange(0, C)[None, None, None, :, None]
        cols = (w * C + c) * 32 + tl.arange(0, 32)[None, None, None, None, :]
        r = tl.arange(0, R // 8)[None, None, :, None, None] * 8 + tl.arange(0, 8)[:, None, None, None, None]
    else:
        cols = tl.arange(0, W * C * 32)[None, :]
        r = tl.arange(0, R)[:, None]
    row = first + r % (R // PARTS)
    offset: tl.constexpr = i * W * C * 32
    piece = weight + (row + r // (R // PARTS) * N).to(tl.int64) * K + cols + offset
    if offset + W * C * 32 > K:
        return tl.load(piece, mask=(row < N) & (cols + offset < K), other=0.0, eviction_policy="evict_first")
    elif N % (R // PARTS) != 0:
        return tl.load(piece, mask=row < N, other=0.0, eviction_policy="evict_first")
    else:
        return tl.load(piece, eviction_policy="evict_first")


@triton.jit
def load_tile(
    weight, first, N: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr,
    W: tl.constexpr, R: tl.constexpr, C: tl.constexpr, AHEAD: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """The first AHEAD pieces."""
    pieces = ()
    for i in tl.static_range(AHEAD):
        pieces += (load_piece(weight, first, i, N, K, PARTS, W, R, C, DOT),)
    return pieces


@triton.jit
def load_rows_piece(start, i: tl.constexpr, K: tl.constexpr, P: tl.constexpr):
    """Piece i [M, P] of the rows that begin at start [M, 1]; zeros outside."""
    cols = tl.arange(0, P)[None, :] + i * P
    if (i + 1) * P <= K:
        return tl.load(start + cols)
    else:
        return tl.load(start + cols, mask=cols < K, other=0.0)


@triton.jit
def load_rows(start, K: tl.constexpr, P: tl.constexpr, NUM: tl.constexpr):
    """The first NUM pieces."""
    pieces = ()
    for i in tl.static_range(NUM):
        pieces += (load_rows_piece(start, i, K, P),)
    return pieces


@triton.jit
def store_rows(x, pieces, num_rows, K: tl.constexpr, M: tl.constexpr, P: tl.constexpr, NUM: tl.constexpr):
    """The first num_rows rows in pieces to x [num_rows, K], contiguous."""
    cols = tl.arange(0, P)[None, :]
    m = tl.arange(0, M)[:, None]
    for i in tl.static_range(NUM):
        tl.store(x + m * K + cols + i * P, pieces[i], mask=(m < num_rows) & (cols + i * P < K))


@triton.jit
def normed_rows(pieces, norm, eps, UNIT_OFFSET: tl.constexpr, K: tl.constexpr, NUM: tl.constexpr):
    """RMS norm of rows in pieces, in float32, rounded to their dtype."""
    squares = pieces[0].to(tl.float32) * pieces[0].to(tl.float32)
    for i in tl.static_range(1, NUM):
        squares += pieces[i].to(tl.float32) * pieces[i].to(tl.float32)
    scale = tl.rsqrt(tl.sum(squares, axis=1) / K + eps)[:, None]
    result = ()
    for i in tl.static_range(NUM):
        result += (normed(pieces[i].to(tl.float32), scale, norm[i], UNIT_OFFSET, pieces[i].dtype),)
    return result


@triton.jit
def added(hidden, residual, NUM: tl.constexpr):
    """hidden + residual, rounded to their dtype."""
    result = ()
    for i in tl.static_range(NUM):
        result += ((hidden[i].to(tl.float32) + residual[i].to(tl.float32)).to(hidden[i].dtype),)
    return result


@triton.jit
def left_operand(piece, W: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """[8, W, R / 8, C, 32] -> [W, R, 32 C] without moving a number between threads.

    Lane 4 g + t has numbers 8 t .. 8 t + 7 of row g. The instruction (16 rows, 16 columns) wants from it columns 2 t, 2 t + 1,
    2 t + 8, 2 t + 9: so number 8 t + 4 s + 2 h + b is taken for column 16 s + 8 h + 2 t + b.
    """
    piece = tl.reshape(piece, [8, W, R // 8, C, 4, 2, 2, 2])  # g w j c t s h b
    return tl.reshape(tl.permute(piece, [1, 2, 0, 3, 5, 6, 4, 7]), [W, R, 32 * C])


@triton.jit
def right_operand(piece, M: tl.constexpr, W: tl.constexpr, C: tl.constexpr):
    """Rows [M, W 32 C] -> [W, 32 C, M], columns in the order of `left_operand`."""
    piece = tl.reshape(piece, [M, W, C, 4, 2, 2, 2])  # m w c t s h b
    return tl.reshape(tl.permute(piece, [1, 2, 4, 5, 3, 6, 0]), [W, 32 * C, M])


@triton.jit
def product(
    tile, x, weight, first, x_start, N: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, M: tl.constexpr,
    W: tl.constexpr, R: tl.constexpr, C: tl.constexpr, NUM: tl.constexpr, AHEAD: tl.constexpr, X_AHEAD: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """A program's tile times rows x [M, K] -> [R, M] float32.

    tile and x hold the first AHEAD and X_AHEAD of the NUM pieces; each further one is loaded when an earlier one is used up.
    """
    if DOT:
        total = tl.zeros([W, R, M], tl.float32)
    else:
        total = no_sums(R, W * C * 32, M)
    for i in tl.static_range(NUM):
        if DOT:
            left, right = left_operand(tile[i], W, R, C), right_operand(x[i], M, W, C)
            if INTERPRETED_DOT:
                left, right = left.to(tl.float32), right.to(tl.float32)
            total = tl.dot(left, right, total)
        else:
            total = added_products(total, tile[i].to(tl.float32), x[i].to(tl.float32), M)
        if i + AHEAD < NUM:
            tile += (load_piece(weight, first, i + AHEAD, N, K, PARTS, W, R, C, DOT),)
        if i + X_AHEAD < NUM:
            x += (load_rows_piece(x_start, i + X_AHEAD, K, W * C * 32),)
    if DOT:
        return tl.sum(total, axis=0)
    else:
        return columns_of_sums(total, M)


@triton.jit
def no_sums(R: tl.constexpr, P: tl.constexpr, M: tl.constexpr):
    """A zero [R, P] for each of M rows."""
    totals = ()
    for _ in tl.static_range(M):
        totals += (tl.zeros([R, P], tl.float32),)
    return totals


@triton.jit
def added_products(totals, piece, x, M: tl.constexpr):
    """totals[m] + piece [R, P] * row m of x [M, P], for each m."""
    result = ()
    for m in tl.static_range(M):
        row = x
        if M > 1:
            row = tl.sum(tl.where(tl.arange(0, M)[:, None] == m, x, 0.0), axis=0)[None, :]
        result += (totals[m] + piece * row,)
    return result


@triton.jit
def columns_of_sums(totals, M: tl.constexpr):
    """totals[m] [R, P] summed over P -> [R, M]."""
    result = tl.sum(totals[0], axis=1)[:, None]
    for m in tl.static_range(1, M):
        result = tl.where(tl.arange(0, M)[None, :] == m, tl.sum(totals[m], axis=1)[:, None], result)
    return result


@triton.constexpr_function
def is_by_warps(M, P, NUM, HAS_POST, DOT):
    """Return whether each of four or eight rows is a warp's own, so that sums of squares cross no warp."""
    return M >= 4 and NUM == 1 and P % 256 == 0 and DOT and not HAS_POST


@triton.jit
def load_by_warps(starts, K: tl.constexpr, M: tl.constexpr, P: tl.constexpr):
    """Rows that begin at starts [M] -> [M, P / 256, 256]: the layout that the compiler gives this has rows in warps of their own."""
    cols = tl.arange(0, P // 256)[None, :, None] * 256 + tl.arange(0, 256)[None, None, :]
    start = starts[:, None, None]
    if P <= K:
        return tl.load(start + cols)
    else:
        return tl.load(start + cols, mask=cols < K, other=0.0)


@triton.jit
def add_norm_by_warps(
    hidden, residual, new_residual, norm, eps, num_tokens, hidden_stride, residual_stride, is_first,
    HAS_RESIDUAL: tl.constexpr, UNIT_OFFSET: tl.constexpr, K: tl.constexpr, M: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """`add_norm_rows`, as its only piece [M, P]; norm [1, P / 256, 256]."""
    m = tl.arange(0, M)
    rows = tl.minimum(m, num_tokens - 1)
    x = load_by_warps(hidden + rows * hidden_stride, K, M, P)
    if HAS_RESIDUAL:
        old = load_by_warps(residual + rows * residual_stride, K, M, P)
        x = (x.to(tl.float32) + old.to(tl.float32)).to(x.dtype)
        if is_first:
            cols = tl.arange(0, P // 256)[None, :, None] * 256 + tl.arange(0, 256)[None, None, :]
            is_inside = (m < num_tokens)[:, None, None] & (cols < K)
            tl.store(new_residual + m[:, None, None] * K + cols, x, mask=is_inside)
    numbers = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(tl.sum(numbers * numbers, axis=1), axis=1) / K + eps)[:, None, None]
    x = normed(numbers, scale, norm, UNIT_OFFSET, x.dtype)
    return (tl.reshape(x, [M, P]),)


@triton.jit
def add_norm_rows(
    hidden, residual, new_residual, norm, post_norm, eps, post_eps, num_tokens, hidden_stride, residual_stride,
    is_first, HAS_RESIDUAL: tl.constexpr, HAS_POST: tl.constexpr,
    UNIT_OFFSET: tl.constexpr, POST_UNIT_OFFSET: tl.constexpr,
    K: tl.constexpr, M: tl.constexpr, P: tl.constexpr, NUM: tl.constexpr,
):  # fmt: skip
    """norm([post_norm](hidden) + residual), in pieces; the first program stores the sum."""
    rows = tl.minimum(tl.arange(0, M), num_tokens - 1)[:, None]
    x = load_rows(hidden + rows * hidden_stride, K, P, NUM)
    if HAS_RESIDUAL:
        old = load_rows(residual + rows * residual_stride, K, P, NUM)
    if HAS_POST:
        x = normed_rows(x, post_norm, post_eps, POST_UNIT_OFFSET, K, NUM)
    if HAS_RESIDUAL:
        x = added(x, old, NUM)
    if (HAS_RESIDUAL or HAS_POST) and is_first:
        store_rows(new_residual, x, num_tokens, K, M, P, NUM)
    return normed_rows(x, norm, eps, UNIT_OFFSET, K, NUM)


@triton.jit
def add_bias(y, bias, first, N: tl.constexpr, R: tl.constexpr):
    """y [R, M] + bias of rows first .. first + R - 1."""
    rows = first + tl.arange(0, R)
    return y + tl.load(bias + rows, mask=rows < N, other=0.0).to(tl.float32)[:, None]


@triton.jit
def store_output(out, y, first, num_tokens, N: tl.constexpr, M: tl.constexpr, R: tl.constexpr):
    """y [R, M] to out [num_tokens, N] at first .. first + R - 1 of its last axis."""
    rows = first + tl.arange(0, R)[:, None]
    tokens = tl.arange(0, M)[None, :]
    tl.store(out + tokens * N + rows, y.to(out.dtype.element_ty), mask=(rows < N) & (tokens < num_tokens))


@triton.jit
def _adapter_rows(first, N: tl.constexpr, PARTS: tl.constexpr, R: tl.constexpr):
    """Rows of a tile within the whole matrix, as `load_piece` takes them [R]."""
    r = tl.arange(0, R)
    return first + r % (R // PARTS) + r // (R // PARTS) * N


@triton.jit
def adapter_tile(
    slots, b, slot_stride, row_stride, first, num_tokens, N: tl.constexpr, PARTS: tl.constexpr, M: tl.constexpr, R: tl.constexpr,
    RANK: tl.constexpr,
):  # fmt: skip
    """Slots of the rows of x [M], -1 without an adapter, and their B of a program's rows [R, M, RANK].

    May be called before `wait_for_inputs`, with slots of another step: what it reads is written by no kernel but them."""
    m = tl.arange(0, M)
    slot = tl.load(slots + m, mask=m < num_tokens, other=-1, cache_modifier=".cg")
    rows = _adapter_rows(first, N, PARTS, R)
    place = rows.to(tl.int64)[:, None, None] * row_stride + tl.arange(0, RANK)[None, None, :]
    inside = (rows < N * PARTS)[:, None, None] & (slot >= 0)[None, :, None]
    return slot, tl.load(b + slot.to(tl.int64)[None, :, None] * slot_stride + place, mask=inside, other=0.0)


@triton.jit
def adapter_product(
    slot, tile, low, squares, eps, first, num_tokens, N: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, M: tl.constexpr,
    R: tl.constexpr, RANK: tl.constexpr, SPLITS: tl.constexpr, WIDTH: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr,
    NUM: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Return what adapters add to a program's rows [R, M]: tile times A x, whose sums `lora.shrink` has left in SPLITS shares.

    NUM parts have matrices of their own; the second's rows begin at SECOND, the third's at THIRD."""
    m = tl.arange(0, M)
    s = tl.arange(0, WIDTH)
    is_share = (s < SPLITS)[:, None] & ((m < num_tokens) & (slot >= 0))[None, :]
    share = m[None, :] * SPLITS + s[:, None]
    scale = tl.full([M], 1.0, tl.float32)
    if HAS_NORM:
        scale = 1.0 / tl.sqrt_rn(tl.sum(tl.load(squares + share, mask=is_share, other=0.0), axis=0) / K + eps)
    rows = _adapter_rows(first, N, PARTS, R)
    total = tl.zeros([R, M], tl.float32)
    for part in tl.static_range(NUM):
        place = ((share * NUM + part) * RANK)[:, :, None] + tl.arange(0, RANK)[None, None, :]
        x = tl.sum(tl.load(low + place, mask=is_share[:, :, None], other=0.0), axis=0) * scale[:, None]
        x = x.to(tile.dtype).to(tl.float32)
        y = tl.sum(tile.to(tl.float32) * x[None, :, :], axis=2)
        is_own = (rows >= SECOND).to(tl.int32) + (rows >= THIRD).to(tl.int32) == part
        total = tl.where(is_own[:, None], y, total)
    return total


@triton.jit
def store_low(low, step, y, first, rows_end, dtype: tl.constexpr, R: tl.constexpr):
    """A x of one row, y [R, 1], as words that say of which step they are: whoever waits for them reads nothing else."""
    rows = first + tl.arange(0, R)
    value = tl.reshape(y, [R]).to(dtype).to(tl.float32)
    bits = value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    tl.store(low + rows, (step.to(tl.int64) << 32) | bits, mask=rows < rows_end)


@triton.jit
def low_places(low, first, N: tl.constexpr, PARTS: tl.constexpr, R: tl.constexpr, RANK: tl.constexpr, SECOND: tl.constexpr,
               THIRD: tl.constexpr):  # fmt: skip
    """Where the words are that a program's rows meet [R, RANK]; rows past the last one meet its: others are never written."""
    rows = tl.minimum(_adapter_rows(first, N, PARTS, R), N * PARTS - 1)
    part = (rows >= SECOND).to(tl.int32) + (rows >= THIRD).to(tl.int32)
    return low + part[:, None] * RANK + tl.arange(0, RANK)[None, :]


@triton.jit
def rows_of_b(
    slot, b, slot_stride, row_stride, first, N: tl.constexpr, PARTS: tl.constexpr, R: tl.constexpr, RANK: tl.constexpr
):
    """B of a program's rows [R, RANK], of the only row's adapter."""
    rows = _adapter_rows(first, N, PARTS, R)
    place = (
        b
        + tl.maximum(slot, 0).to(tl.int64) * slot_stride
        + rows.to(tl.int64)[:, None] * row_stride
        + tl.arange(0, RANK)[None, :]
    )
    return tl.load(place, mask=(rows < N * PARTS)[:, None], other=0.0)


@triton.jit
def with_adapter(y, slot, tile, words, places, step):
    """y [R, 1] and what the adapter adds to it: tile [R, RANK] times A x, whose words the first programs of the launch write."""
    while tl.sum(tl.sum(((words >> 32) != step).to(tl.int32), axis=1), axis=0) > 0:
        words = tl.load(places, volatile=True)
    low = words.to(tl.int32).to(tl.float32, bitcast=True)
    more = tl.sum(tile.to(tl.float32) * low, axis=1)[:, None]
    return tl.where(slot >= 0, y + more, y)


@triton.jit
def add_norm_low(
    hidden, residual, new_residual, norm, post_norm, eps, post_eps, num_tokens, hidden_stride, residual_stride,
    slots, a, a_stride, low, step, pid,
    HAS_RESIDUAL: tl.constexpr, HAS_POST: tl.constexpr, UNIT_OFFSET: tl.constexpr, POST_UNIT_OFFSET: tl.constexpr,
    K: tl.constexpr, W: tl.constexpr, R: tl.constexpr, C: tl.constexpr, NUM: tl.constexpr, AHEAD: tl.constexpr,
    DOT: tl.constexpr, LOW_ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """R of A's LOW_ROWS rows times the only row, normed: what a program does with rows of the weight."""
    P: tl.constexpr = W * C * 32
    first = pid * R
    let_next_start(PDL)
    weight = a + tl.maximum(tl.load(slots), 0).to(tl.int64) * a_stride
    this_step = tl.load(step)
    tile = load_tile(weight, first, LOW_ROWS, K, 1, W, R, C, AHEAD, DOT)
    norm_pieces = load_rows(norm + tl.zeros([1, 1], tl.int32), K, P, NUM)
    post_pieces = norm_pieces
    if HAS_POST:
        post_pieces = load_rows(post_norm + tl.zeros([1, 1], tl.int32), K, P, NUM)
    wait_for_inputs(PDL)
    x = add_norm_rows(
        hidden, residual, new_residual, norm_pieces, post_pieces, eps, post_eps, num_tokens, hidden_stride,
        residual_stride, False, HAS_RESIDUAL, HAS_POST, UNIT_OFFSET, POST_UNIT_OFFSET, K, 1, P, NUM,
    )  # fmt: skip
    y = product(tile, x, weight, first, weight, LOW_ROWS, K, 1, 1, W, R, C, NUM, AHEAD, NUM, DOT)
    store_low(low, this_step, y, first, LOW_ROWS, a.dtype.element_ty, R)


@triton.jit
def linear_low(
    x, slots, a, a_stride, low, step, pid,
    K: tl.constexpr, W: tl.constexpr, R: tl.constexpr, C: tl.constexpr, NUM: tl.constexpr, AHEAD: tl.constexpr,
    X_AHEAD: tl.constexpr, DOT: tl.constexpr, LOW_ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """R of A's LOW_ROWS rows times the only row."""
    first = pid * R
    let_next_start(PDL)
    weight = a + tl.maximum(tl.load(slots), 0).to(tl.int64) * a_stride
    this_step = tl.load(step)
    tile = load_tile(weight, first, LOW_ROWS, K, 1, W, R, C, AHEAD, DOT)
    wait_for_inputs(PDL)
    start = x + tl.zeros([1, 1], tl.int32)
    x_pieces = load_rows(start, K, W * C * 32, X_AHEAD)
    y = product(tile, x_pieces, weight, first, start, LOW_ROWS, K, 1, 1, W, R, C, NUM, AHEAD, X_AHEAD, DOT)
    store_low(low, this_step, y, first, LOW_ROWS, a.dtype.element_ty, R)


@triton.jit
def add_adapters(
    y, slots, early, tile, b, slot_stride, row_stride, low, squares, eps, first, num_tokens, N: tl.constexpr, K: tl.constexpr,
    PARTS: tl.constexpr, M: tl.constexpr, R: tl.constexpr, RANK: tl.constexpr, SPLITS: tl.constexpr, WIDTH: tl.constexpr,
    SECOND: tl.constexpr, THIRD: tl.constexpr, NUM: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """y [R, M] and what the adapters of its rows add; early, tile: what `adapter_tile` gave before the wait."""
    m = tl.arange(0, M)
    slot = tl.load(slots + m, mask=m < num_tokens, other=-1, cache_modifier=".cg")
    if tl.sum((slot != early).to(tl.int32), axis=0) > 0:  # this step's slots came after the first look
        slot, tile = adapter_tile(slots, b, slot_stride, row_stride, first, num_tokens, N, PARTS, M, R, RANK)
    more = adapter_product(
        slot, tile, low, squares, eps, first, num_tokens, N, K, PARTS, M, R, RANK, SPLITS, WIDTH, SECOND, THIRD, NUM,
        HAS_NORM,
    )  # fmt: skip
    return tl.where((slot >= 0)[None, :], y + more, y)


@triton.jit
def add_norm_product(
    hidden, residual, norm, post_norm, weight, new_residual, eps, post_eps, num_tokens, hidden_stride, residual_stride,
    pid, HAS_RESIDUAL: tl.constexpr, HAS_POST: tl.constexpr, UNIT_OFFSET: tl.constexpr, POST_UNIT_OFFSET: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, M: tl.constexpr, W: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    NUM: tl.constexpr, AHEAD: tl.constexpr, DOT: tl.constexpr, PDL: tl.constexpr,
    slots, b, low, squares, slot_stride, row_stride, RANK: tl.constexpr, LOW_SPLITS: tl.constexpr, LOW_WIDTH: tl.constexpr,
    SECOND: tl.constexpr, THIRD: tl.constexpr, NUM_PARTS: tl.constexpr, step, LOW_PROGRAMS: tl.constexpr,
):  # fmt: skip
    """R rows of the weight, R / PARTS of each of its PARTS, times the normed rows, with adapters [R, M]; pid: without those that
    multiply with A."""
    P: tl.constexpr = W * C * 32
    if LOW_PROGRAMS > 0:
        slot, this_step = tl.load(slots), tl.load(step)  # before the wait: see `runtime`
    first = pid * (R // PARTS)
    let_next_start(PDL)
    tile = load_tile(weight, first, N, K, PARTS, W, R, C, AHEAD, DOT)
    BY_WARPS: tl.constexpr = is_by_warps(M, P, NUM, HAS_POST, DOT)
    if BY_WARPS:
        norm_pieces = load_by_warps(norm + tl.zeros([1], tl.int32), K, 1, P)
        post_pieces = norm_pieces
    else:
        norm_pieces = load_rows(norm + tl.zeros([1, 1], tl.int32), K, P, NUM)
        post_pieces = norm_pieces
        if HAS_POST:
            post_pieces = load_rows(post_norm + tl.zeros([1, 1], tl.int32), K, P, NUM)
    if LOW_PROGRAMS > 0:
        adapter = rows_of_b(slot, b, slot_stride, row_stride, first, N, PARTS, R, RANK)
        places = low_places(low, first, N, PARTS, R, RANK, SECOND, THIRD)
    elif RANK > 0:
        early, adapter = adapter_tile(slots, b, slot_stride, row_stride, first, num_tokens, N, PARTS, M, R, RANK)
    wait_for_inputs(PDL)
    if BY_WARPS:
        x = add_norm_by_warps(
            hidden, residual, new_residual, norm_pieces, eps, num_tokens, hidden_stride, residual_stride, pid == 0,
            HAS_RESIDUAL, UNIT_OFFSET, K, M, P,
        )  # fmt: skip
    else:
        x = add_norm_rows(
            hidden, residual, new_residual, norm_pieces, post_pieces, eps, post_eps, num_tokens, hidden_stride,
            residual_stride, pid == 0, HAS_RESIDUAL, HAS_POST, UNIT_OFFSET, POST_UNIT_OFFSET, K, M, P, NUM,
        )  # fmt: skip
    if LOW_PROGRAMS > 0:
        words = tl.load(places, volatile=True)
    y = product(tile, x, weight, first, weight, N, K, PARTS, M, W, R, C, NUM, AHEAD, NUM, DOT)
    if LOW_PROGRAMS > 0:
        y = with_adapter(y, slot, adapter, words, places, this_step)
    elif RANK > 0:
        y = add_adapters(
            y, slots, early, adapter, b, slot_stride, row_stride, low, squares, eps, first, num_tokens, N, K, PARTS, M, R, RANK,
            LOW_SPLITS, LOW_WIDTH, SECOND, THIRD, NUM_PARTS, True,
        )  # fmt: skip
    return y


@triton.jit(do_not_specialize=["num_tokens"])
def add_norm_linear_kernel(
    hidden, residual, norm, post_norm, weight, bias, out, new_residual, eps, post_eps,
    num_tokens, hidden_stride, residual_stride,
    HAS_RESIDUAL: tl.constexpr, HAS_POST: tl.constexpr, UNIT_OFFSET: tl.constexpr, POST_UNIT_OFFSET: tl.constexpr,
    HAS_BIAS: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    M: tl.constexpr, W: tl.constexpr, R: tl.constexpr, C: tl.constexpr, NUM: tl.constexpr, AHEAD: tl.constexpr,
    DOT: tl.constexpr, PDL: tl.constexpr,
    slots=None, b=None, low=None, squares=None, slot_stride=0, row_stride=0, RANK: tl.constexpr = 0, LOW_SPLITS: tl.constexpr = 1,
    LOW_WIDTH: tl.constexpr = 1, SECOND: tl.constexpr = 0, THIRD: tl.constexpr = 0, NUM_PARTS: tl.constexpr = 1,
    a=None, a_stride=0, step=None, LOW_PROGRAMS: tl.constexpr = 0,
):  # fmt: skip
    """residual' = [post_norm](hidden) + residual [T, K], stored by the first program; out [T, N] = norm(residual') weight^T."""
    pid = tl.program_id(0)
    if LOW_PROGRAMS > 0:
        if pid < LOW_PROGRAMS:
            add_norm_low(
                hidden, residual, new_residual, norm, post_norm, eps, post_eps, num_tokens, hidden_stride, residual_stride,
                slots, a, a_stride, low, step, pid, HAS_RESIDUAL, HAS_POST, UNIT_OFFSET, POST_UNIT_OFFSET, K, W, R, C, NUM,
                AHEAD, DOT, RANK * NUM_PARTS, PDL,
            )  # fmt: skip
            return
        pid -= LOW_PROGRAMS
    y = add_norm_product(
        hidden, residual, norm, post_norm, weight, new_residual, eps, post_eps, num_tokens, hidden_stride, residual_stride, pid,
        HAS_RESIDUAL, HAS_POST, UNIT_OFFSET, POST_UNIT_OFFSET, N, K, 1, M, W, R, C, NUM, AHEAD, DOT, PDL,
        slots, b, low, squares, slot_stride, row_stride, RANK, LOW_SPLITS, LOW_WIDTH, SECOND, THIRD, NUM_PARTS, step, LOW_PROGRAMS,
    )  # fmt: skip
    first = pid * R
    if HAS_BIAS:
        y = add_bias(y, bias, first, N, R)
    store_output(out, y, first, num_tokens, N, M, R)


@triton.jit(do_not_specialize=["num_tokens"])
def linear_kernel(
    x, weight, bias, out, num_tokens, stride, HAS_BIAS: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    M: tl.constexpr, W: tl.constexpr, R: tl.constexpr, C: tl.constexpr, NUM: tl.constexpr, AHEAD: tl.constexpr,
    X_AHEAD: tl.constexpr, DOT: tl.constexpr, PDL: tl.constexpr,
    slots=None, b=None, low=None, squares=None, slot_stride=0, row_stride=0, RANK: tl.constexpr = 0, LOW_SPLITS: tl.constexpr = 1,
    LOW_WIDTH: tl.constexpr = 1, SECOND: tl.constexpr = 0, THIRD: tl.constexpr = 0, NUM_PARTS: tl.constexpr = 1,
    a=None, a_stride=0, step=None, LOW_PROGRAMS: tl.constexpr = 0,
):  # fmt: skip
    """out [T, N] = x [T, K] weight^T."""
    pid = tl.program_id(0)
    if LOW_PROGRAMS > 0:
        if pid < LOW_PROGRAMS:
            linear_low(
                x, slots, a, a_stride, low, step, pid, K, W, R, C, NUM, AHEAD, X_AHEAD, DOT, RANK * NUM_PARTS, PDL
            )
            return
        pid -= LOW_PROGRAMS
        slot, this_step = tl.load(slots), tl.load(step)  # before the wait: see `runtime`
    first = pid * R
    let_next_start(PDL)
    tile = load_tile(weight, first, N, K, 1, W, R, C, AHEAD, DOT)
    if LOW_PROGRAMS > 0:
        adapter = rows_of_b(slot, b, slot_stride, row_stride, first, N, 1, R, RANK)
        places = low_places(low, first, N, 1, R, RANK, SECOND, THIRD)
    elif RANK > 0:
        early, adapter = adapter_tile(slots, b, slot_stride, row_stride, first, num_tokens, N, 1, M, R, RANK)
    wait_for_inputs(PDL)
    start = x + tl.minimum(tl.arange(0, M), num_tokens - 1)[:, None] * stride
    x_pieces = load_rows(start, K, W * C * 32, X_AHEAD)
    if LOW_PROGRAMS > 0:
        words = tl.load(places, volatile=True)
    y = product(tile, x_pieces, weight, first, start, N, K, 1, M, W, R, C, NUM, AHEAD, X_AHEAD, DOT)
    if LOW_PROGRAMS > 0:
        y = with_adapter(y, slot, adapter, words, places, this_step)
    elif RANK > 0:
        y = add_adapters(
            y, slots, early, adapter, b, slot_stride, row_stride, low, squares, 0.0, first, num_tokens, N, K, 1, M, R, RANK,
            LOW_SPLITS, LOW_WIDTH, SECOND, THIRD, NUM_PARTS, False,
        )  # fmt: skip
    if HAS_BIAS:
        y = add_bias(y, bias, first, N, R)
    store_output(out, y, first, num_tokens, N, M, R)


@triton.jit(do_not_specialize=["num_tokens"])
def add_norm_gated_linear_kernel(
    hidden, residual, norm, post_norm, weight, bias, out, new_residual, eps, post_eps,
    num_tokens, hidden_stride, residual_stride,
    HAS_RESIDUAL: tl.constexpr, HAS_POST: tl.constexpr, UNIT_OFFSET: tl.constexpr, POST_UNIT_OFFSET: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    M: tl.constexpr, W: tl.constexpr, R: tl.constexpr, C: tl.constexpr, NUM: tl.constexpr, AHEAD: tl.constexpr,
    DOT: tl.constexpr, PDL: tl.constexpr,
    slots=None, b=None, low=None, squares=None, slot_stride=0, row_stride=0, RANK: tl.constexpr = 0, LOW_SPLITS: tl.constexpr = 1,
    LOW_WIDTH: tl.constexpr = 1, SECOND: tl.constexpr = 0, THIRD: tl.constexpr = 0, NUM_PARTS: tl.constexpr = 1,
    a=None, a_stride=0, step=None, LOW_PROGRAMS: tl.constexpr = 0,
):  # fmt: skip
    """As `add_norm_linear_kernel`; weight has N rows of gate, then N of up, and out [T, N] = activation(gate) * up.

    A program has the same R / 2 rows of both.
    """
    H: tl.constexpr = R // 2
    pid = tl.program_id(0)
    if LOW_PROGRAMS > 0:
        if pid < LOW_PROGRAMS:
            add_norm_low(
                hidden, residual, new_residual, norm, post_norm, eps, post_eps, num_tokens, hidden_stride, residual_stride,
                slots, a, a_stride, low, step, pid, HAS_RESIDUAL, HAS_POST, UNIT_OFFSET, POST_UNIT_OFFSET, K, W, R, C, NUM,
                AHEAD, DOT, RANK * NUM_PARTS, PDL,
            )  # fmt: skip
            return
        pid -= LOW_PROGRAMS
    y = add_norm_product(
        hidden, residual, norm, post_norm, weight, new_residual, eps, post_eps, num_tokens, hidden_stride, residual_stride, pid,
        HAS_RESIDUAL, HAS_POST, UNIT_OFFSET, POST_UNIT_OFFSET, N, K, 2, M, W, R, C, NUM, AHEAD, DOT, PDL,
        slots, b, low, squares, slot_stride, row_stride, RANK, LOW_SPLITS, LOW_WIDTH, SECOND, THIRD, NUM_PARTS, step, LOW_PROGRAMS,
    )  # fmt: skip
    first = pid * H
    gate, up = tl.split(tl.permute(tl.reshape(y, [2, H, M]), [1, 2, 0]))
    if HAS_BIAS:
        gate = add_bias(gate, bias, first, N, H)
        up = add_bias(up, bias + N, first, N, H)
    dtype = out.dtype.element_ty
    y = activated(gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), ACTIVATION, dtype)
    store_output(out, y, first, num_tokens, N, M, H)


@triton.jit(do_not_specialize=["num_tokens"])
def add_norm_logits_kernel(
    hidden, residual, index, norm, post_norm, weight, bias, out, eps, post_eps,
    num_tokens, hidden_stride, residual_stride, soft_cap,
    HAS_RESIDUAL: tl.constexpr, HAS_POST: tl.constexpr, UNIT_OFFSET: tl.constexpr, POST_UNIT_OFFSET: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    M: tl.constexpr, W: tl.constexpr, R: tl.constexpr, C: tl.constexpr, NUM: tl.constexpr, AHEAD: tl.constexpr,
    DOT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows index [num_tokens] of hidden and residual; out [num_tokens, N] float32, never rounded to the model's dtype."""
    P: tl.constexpr = W * C * 32
    first = tl.program_id(0) * R
    let_next_start(PDL)
    tile = load_tile(weight, first, N, K, 1, W, R, C, AHEAD, DOT)
    norm_pieces = load_rows(norm + tl.zeros([1, 1], tl.int32), K, P, NUM)
    post_pieces = norm_pieces
    if HAS_POST:
        post_pieces = load_rows(post_norm + tl.zeros([1, 1], tl.int32), K, P, NUM)
    wait_for_inputs(PDL)
    rows = tl.load(index + tl.minimum(tl.arange(0, M), num_tokens - 1))[:, None]
    x = load_rows(hidden + rows * hidden_stride, K, P, NUM)
    if HAS_RESIDUAL:
        old = load_rows(residual + rows * residual_stride, K, P, NUM)
    if HAS_POST:
        x = normed_rows(x, post_pieces, post_eps, POST_UNIT_OFFSET, K, NUM)
    if HAS_RESIDUAL:
        x = added(x, old, NUM)
    x = normed_rows(x, norm_pieces, eps, UNIT_OFFSET, K, NUM)
    y = product(tile, x, weight, first, weight, N, K, 1, M, W, R, C, NUM, AHEAD, NUM, DOT)
    if HAS_BIAS:
        y = add_bias(y, bias, first, N, R)
    if HAS_CAP:
        # tanh of the magnitude, so that exp does not overflow; off by some 1e-7 soft_cap.
        e = tl.exp(-2.0 * tl.abs(y) / soft_cap)
        tanh = (1.0 - e) / (1.0 + e)
        y = tl.where(y < 0, -tanh, tanh) * soft_cap
    store_output(out, y, first, num_tokens, N, M, R)
