"""Parts that products of packed weights with some tokens' experts share on Hopper: tiles, copies of rows of x, and results.

A tile is M rows of an expert's weights, the left operand, by N of its pairs. Its sums are [M, N].
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from pelton_backends.triton.ops.moe.kernels import gated


class Tiling(NamedTuple):
    """Tiles of `rows` of the weights by `pairs` of an expert's pairs, by `warps` warps, through `stages` buffers."""

    rows: int
    pairs: int
    warps: int
    stages: int
    registers: int  # of a thread


@gluon.constexpr_function
def _next_power_of_2(count):
    return 1 << (count - 1).bit_length()


@gluon.constexpr_function
def words_layout(rows, warps, blocks):
    """Words [rows, blocks, 4] of blocks of 32 codes: those that a thread's registers of the left operand are made of."""
    registers = [[8, 0, 0]]
    registers += [[0, 1 << i, 0] for i in range(blocks.bit_length() - 1)]
    registers += [[16 * warps << i, 0, 0] for i in range((rows // (16 * warps)).bit_length() - 1)]
    lanes = [[0, 0, 1], [0, 0, 2], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    across = [[16 << i, 0, 0] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, across, [], [rows, blocks, 4])


@gluon.jit
def as_left(numbers, LEFT: gl.constexpr):
    """Return what words [M, B, 4] become, eight tensors of a number each, as the left operand [M, 32 B]: numbers 0, 1, 2 and 3 of a word
    are 0, 1, 8 and 9 of a thread's 16 columns, and 4 to 7 are those of the next 16."""
    M: gl.constexpr = numbers[0].shape[0]
    B: gl.constexpr = numbers[0].shape[1]
    a, b, c, d, e, f, g, h = numbers
    first = gl.join(gl.join(a, b), gl.join(c, d))  # [M, B, 4, number of a pair, half of 16]
    second = gl.join(gl.join(e, f), gl.join(g, h))
    columns = gl.permute(gl.join(first, second), (0, 1, 5, 4, 2, 3))
    return gl.convert_layout(gl.reshape(columns, (M, 32 * B)), LEFT, assert_trivial=True)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def tile_of(count_ptr, capacity, tile, E: gl.constexpr, N: gl.constexpr, WARPS: gl.constexpr):
    """Return expert, first pair, and how many pairs the expert has, of a tile beyond the experts' first ones (`kernels.tile_of`)."""
    BINS: gl.constexpr = _next_power_of_2(E)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    bins = gl.arange(0, BINS, LAYOUT)
    counts = gl.load(count_ptr + bins, mask=bins < E, other=0)
    further = gl.maximum((counts + N - 1) // N - 1, 0)
    ends = gl.associative_scan(further, 0, _add)
    expert = gl.sum((ends <= tile - E).to(gl.int32), 0)
    begin = gl.sum(gl.where(bins == expert, ends - further, 0), 0)
    count = gl.load(count_ptr + expert, mask=expert < E, other=0)
    return expert, (tile - E - begin + 1) * N, gl.minimum(count, capacity)


@gluon.jit
def column_of(place, first, IS_GATED: gl.constexpr):
    """Return the column of the result that a row of a tile is for. Of gate and up there are eight rows each in turns."""
    if IS_GATED:
        place = place // 16 * 8 + place % 8
    return first + place


@gluon.jit
def row_of(place, column, expert, SIZE: gl.constexpr, IS_GATED: gl.constexpr):
    """Return a tile's row among all experts' rows of the weights; `column`: of `column_of`."""
    if IS_GATED:
        row = expert.to(gl.int64) * (2 * SIZE) + column + place // 8 % 2 * SIZE
    else:
        row = expert.to(gl.int64) * SIZE + column
    return row


@gluon.jit
def cells_of_rows(
    x, order, start, count, x_stride, K: gl.constexpr, N: gl.constexpr, CHUNKS: gl.constexpr, WORDS: gl.constexpr, LAYOUT: gl.constexpr
):  # fmt: skip
    """Return where a step's numbers of x lie, two a word [CHUNKS, N, WORDS], and which of the N pairs there are."""
    at = start + gl.arange(0, N, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    is_pair = at < count
    pairs = gl.load(order + at, mask=is_pair, other=0)
    word = gl.arange(0, WORDS, gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT)))
    chunk = gl.arange(0, CHUNKS, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    cells = x + gl.expand_dims(gl.expand_dims((pairs // K).to(gl.int64) * x_stride, 0), 2)
    cells = cells + gl.expand_dims(gl.expand_dims(chunk * WORDS, 1), 2) + gl.expand_dims(gl.expand_dims(word, 0), 0)
    return cells, is_pair


@gluon.jit
def fetch_rows(rows, cells, is_pair, step, stage, K: gl.constexpr):
    """Start the copy of a step's numbers of x, two a word, [chunks, N, words]."""
    layout: gl.constexpr = cells.type.layout
    CHUNKS: gl.constexpr = cells.shape[0]
    WORDS: gl.constexpr = cells.shape[2]
    word = gl.arange(0, WORDS, gl.SliceLayout(0, gl.SliceLayout(0, layout)))
    chunk = step * CHUNKS + gl.arange(0, CHUNKS, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    place = gl.expand_dims(gl.expand_dims(chunk, 1), 2) * WORDS + gl.expand_dims(gl.expand_dims(word, 0), 0)
    mask = gl.expand_dims(gl.expand_dims(is_pair, 0), 2) & (place < K // 2)
    async_copy.async_copy_global_to_shared(rows.index(stage), cells + step * (CHUNKS * WORDS), mask)


@gluon.jit
def finished(
    total, bias, first, expert, SIZE: gl.constexpr, ACTIVATION: gl.constexpr, LIMIT: gl.constexpr, dtype: gl.constexpr
):
    """Return a tile's sums [M, N] with their bias, and with the activation [M / 2, N]."""
    M: gl.constexpr = total.shape[0]
    N: gl.constexpr = total.shape[1]
    IS_GATED: gl.constexpr = ACTIVATION is not None
    if bias is not None:
        place = gl.arange(0, M, gl.SliceLayout(1, total.type.layout))
        column = column_of(place, first, IS_GATED)
        cells = bias + row_of(place, column, expert, SIZE, IS_GATED)
        total += gl.load(cells, mask=column < SIZE, other=0.0).to(gl.float32)[:, None]
    if IS_GATED:
        gate, up = gl.split(gl.permute(gl.reshape(total, (M // 16, 2, 8, N)), (0, 2, 3, 1)))
        gate, up = gl.reshape(gate, (M // 2, N)), gl.reshape(up, (M // 2, N))
        result = gated(gate, up, LIMIT, ACTIVATION, dtype)
    else:
        result = total
    return result


@gluon.jit
def results_of(result, order, start, count, first):
    """Return the expert's pairs [N] that columns of results [columns, N] are of, which of them there are, and the columns."""
    layout: gl.constexpr = result.type.layout
    at = start + gl.arange(0, result.shape[1], gl.SliceLayout(0, layout))
    is_pair = at < count
    pairs = gl.load(order + at, mask=is_pair, other=0)
    return pairs, is_pair, first + gl.arange(0, result.shape[0], gl.SliceLayout(1, layout))


@gluon.jit
def store(result, pairs, is_pair, column, target, share, out, SIZE: gl.constexpr, IS_GATED: gl.constexpr):
    """Store results [columns, N] at `target` of the pairs' rows; times the pairs' weights where they are not gated."""
    if not IS_GATED:
        result = (result * gl.load(share + pairs, mask=is_pair, other=0.0)[None, :]).to(out.dtype.element_ty)
    cells = out + (pairs.to(gl.int64) * SIZE)[None, :] + target[:, None]
    gl.store(cells, result, mask=is_pair[None, :] & (column < SIZE)[:, None], eviction_policy="evict_last")
