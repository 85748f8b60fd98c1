"""Products of some tokens' experts with weights in mxfp4 on Hopper: decoded in registers, right where tensor cores take them.

A program multiplies a tile of rows of an expert's weights by a tile of its pairs. The weights are the left operand, whose registers each
thread fills from a word of eight codes: a code's bits are moved to those of a bfloat16 and multiplied by the block's scale, exactly. The
order of the numbers within a product over K is that of the words; rows of x are copied to shared memory in the same order. So nothing is
exchanged between threads, and no decoded weight is written anywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pelton_backends.triton.launch import Launcher, alignment
from pelton_backends.triton.ops.moe.hopper_tiles import (
    Tiling,
    as_left,
    cells_of_rows,
    column_of,
    fetch_rows,
    finished,
    results_of,
    row_of,
    store,
    tile_of,
    words_layout,
)
from pelton_backends.triton.runtime import has_pdl, launch_options, let_next_start, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

STEP = 256
"""Numbers of a row of the weights that a program has at a time: 128 bytes, four products over 64 of them."""
_STEP, _CHUNKS = gl.constexpr(STEP), gl.constexpr(4)
_UP = 63
"""A code in the bits of a bfloat16 is 2^-126 times its value, and a scale of exponent e is 2^(e - 127). The factor of both, 2^(e - 1), is
too large for a bfloat16 from e = 129 on: weights are 2^-63 times what they are, and sums are multiplied at the end. So scales may be
2^-70 to 2^64."""
_UPWARDS = gl.constexpr(2.0**_UP)


def _moved(place: int, signs: str, sign: int, magnitude: int) -> str:
    """Move two codes, one of each half of a word, to the bits of two bfloat16, and multiply: the sign to bit 15, the rest to bits 6 to 8.

    Shifts are to the left. Another code's sign comes along to bit 7, where the magnitude replaces it."""
    shift = f"shl.b32 t, w, {magnitude};" if magnitude > 0 else f"shr.b32 t, w, {-magnitude};"
    return (
        f"{shift} shl.b32 v, {signs}, {sign}; lop3.b32 t, t, 0x01c001c0, v, 0xe2;"  # t & mask | v & ~mask
        f"mul.bf16x2 t, t, $9; mov.b32 {{${place}, ${place + 1}}}, t;"
    )


_DECODE = (
    # Bytes 0 and 1 to the lower bytes of both halves, 2 and 3 to the upper ones.
    "{ .reg .b32 w, t, u, v, y; prmt.b32 w, $8, 0, 0x3120; and.b32 u, w, 0x80808080; and.b32 y, w, 0x08080808;"
    + _moved(0, "y", 12, 6)  # lower codes of bytes 0 and 1
    + _moved(2, "y", 4, -2)  # of 2 and 3
    + _moved(4, "u", 8, 2)  # upper codes of 0 and 1
    + _moved(6, "u", 0, -6)  # of 2 and 3
    + "}"
)
_DECODE_ASM: gl.constexpr = gl.constexpr(_DECODE)
_FACTORS_ASM: gl.constexpr = gl.constexpr(
    "{ .reg .b32 t; cvt.u32.u16 t, $2; "
    + "".join(f"prmt.b32 ${i}, t, 0, 0x4{i}4{i}; mad.lo.u32 ${i}, ${i}, 128, {_UP * 0x800080};" for i in range(2))
    + "}"
)
_NUMBERS: gl.constexpr = gl.constexpr((gl.bfloat16,) * 8)
_CONSTRAINTS: gl.constexpr = gl.constexpr(",".join(["=h"] * 8 + ["r", "r"]))


@gluon.constexpr_function
def _flat_words_layout(rows, warps):
    """The same of a step's words [rows, 32]."""
    registers = [[8, 0], [0, 4], [0, 8], [0, 16]]
    registers += [[16 * warps << i, 0] for i in range((rows // (16 * warps)).bit_length() - 1)]
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(
        registers, lanes, [[16 << i, 0] for i in range(warps.bit_length() - 1)], [], [rows, 32]
    )


@gluon.constexpr_function
def _scales_layout(rows, warps):
    """A step's scales [rows, 4], two a number: every thread has those of its rows."""
    registers = [[8, 0], [0, 1], [0, 2]]
    registers += [[16 * warps << i, 0] for i in range((rows // (16 * warps)).bit_length() - 1)]
    lanes = [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(
        registers, lanes, [[16 << i, 0] for i in range(warps.bit_length() - 1)], [], [rows, 4]
    )


@gluon.jit
def _halves(blocks):
    """[M, B, 4] or [M, B] -> the first and the second half of the B blocks."""
    M: gl.constexpr = blocks.shape[0]
    B: gl.constexpr = blocks.shape[1]
    if len(blocks.shape) == 3:
        first, second = gl.split(gl.permute(gl.reshape(blocks, (M, 2, B // 2, 4)), (0, 2, 3, 1)))
    else:
        first, second = gl.split(gl.permute(gl.reshape(blocks, (M, 2, B // 2)), (0, 2, 1)))
    return first, second


@gluon.jit
def _quarters(blocks):
    first, second = _halves(blocks)
    return _halves(first) + _halves(second)


@gluon.jit
def _decoded(words, scales, LEFT: gl.constexpr, WARPS: gl.constexpr):
    """Words [M, B, 4] and scales [M, B] (two bfloat16 each) -> the left operand [M, 32 B]."""
    M: gl.constexpr = words.shape[0]
    B: gl.constexpr = words.shape[1]
    WORDS: gl.constexpr = words_layout(M, WARPS, B)
    words = gl.convert_layout(words, WORDS, assert_trivial=True)
    scales = gl.convert_layout(scales, gl.SliceLayout(2, WORDS), assert_trivial=True)
    words, scales = gl.broadcast(words, gl.expand_dims(scales, 2))
    numbers = gl.inline_asm_elementwise(
        _DECODE_ASM,
        _CONSTRAINTS,
        [words, scales],
        dtype=_NUMBERS,
        is_pure=True,
        pack=1,
    )
    return as_left(numbers, LEFT)


@gluon.jit
def _place_in_words(number):
    """Return where a number lies in rows of x: in the order in which a thread's words have their codes."""
    return number // 16 * 16 + number % 4 // 2 * 8 + number % 16 // 4 * 2 + number % 2


@gluon.jit
def _fetch_weights(weights, cells, is_row, step, stage, K: gl.constexpr):
    """Start the copy of a step's words [M, 32]."""
    layout: gl.constexpr = cells.type.layout
    word = step * (_STEP // 8) + gl.arange(0, _STEP // 8, gl.SliceLayout(0, layout))
    mask = is_row[:, None] & (word < K // 8)[None, :]
    async_copy.async_copy_global_to_shared(weights.index(stage), cells + step * (_STEP // 8), mask)


@gluon.jit
def _factors(scales, LAYOUT: gl.constexpr):
    """Exponents, two a number [M, 4] -> two bfloat16 of each, [M, 8]."""
    M: gl.constexpr = scales.shape[0]
    first, second = gl.inline_asm_elementwise(
        _FACTORS_ASM, "=r,=r,h", [scales], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    return gl.convert_layout(gl.reshape(gl.join(first, second), (M, 8)), LAYOUT, assert_trivial=True)


@gluon.jit(do_not_specialize=["capacity"])
def mxfp4_kernel(
    x, weight, weight_scale, bias, share, out, order, count_ptr, capacity, x_stride,
    E: gl.constexpr, SIZE: gl.constexpr, WIDTH: gl.constexpr, K: gl.constexpr, M: gl.constexpr, N: gl.constexpr,
    STAGES: gl.constexpr, ACTIVATION: gl.constexpr, LIMIT: gl.constexpr, PDL: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """One tile: M rows of an expert's weights by N of its pairs. x: two numbers a word; weights eight, scales two.

    The weights of an expert's first tile are on their way before the experts are chosen."""
    IS_GATED: gl.constexpr = ACTIVATION is not None
    COLUMNS: gl.constexpr = M // 2 if IS_GATED else M
    STEPS: gl.constexpr = (WIDTH + _STEP - 1) // _STEP
    SCALES: gl.constexpr = WIDTH // 64
    dtype: gl.constexpr = out.dtype.element_ty
    ACROSS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, N, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACROSS, 2)
    WORDS: gl.constexpr = words_layout(M, WARPS, 8)
    OF_SCALES: gl.constexpr = _scales_layout(M, WARPS)
    COPIED: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [WARPS, 1], [1, 0])
    GATHERED: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 4, 8], [1, WARPS, 1], [2, 1, 0])
    weights = gl.allocate_shared_memory(gl.int32, [STAGES, M, _STEP // 8], gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
    rows = gl.allocate_shared_memory(gl.int32, [STAGES, _CHUNKS, N, 32], gl.NVMMASharedLayout(128, 32, 3))
    numbers = rows._reinterpret(dtype, [STAGES * _CHUNKS, N, 64], gl.NVMMASharedLayout(128, 16, 2))
    first, tile = gl.program_id(0) * COLUMNS, gl.program_id(1)
    if PDL:
        gdc_launch_dependents()
        if tile >= E:
            gdc_wait()
    expert, start, count = tile, tile * 0, tile
    if tile >= E:
        expert, start, count = tile_of(count_ptr, capacity, tile, E, N, WARPS)
        if start >= count:
            return
    place = gl.arange(0, M, gl.SliceLayout(1, COPIED))
    column = column_of(place, first, IS_GATED)
    word = gl.arange(0, _STEP // 8, gl.SliceLayout(0, COPIED))
    weight_row = row_of(place, column, expert, SIZE, IS_GATED)
    weight_cells = weight + (weight_row * (WIDTH // 8))[:, None] + word[None, :]
    is_row = column < SIZE
    for i in gl.static_range(min(STAGES - 1, STEPS)):
        _fetch_weights(weights, weight_cells, is_row, i, i, WIDTH)
    if tile < E:
        if PDL:
            gdc_wait()
        count = gl.minimum(gl.load(count_ptr + expert), capacity)
        if count == 0:
            async_copy.commit_group()
            async_copy.wait_group(0)
            return
    order += expert.to(gl.int64) * capacity
    row_cells, is_pair = cells_of_rows(x, order, start, count, x_stride, K, N, _CHUNKS, 32, GATHERED)
    for i in gl.static_range(min(STAGES - 1, STEPS)):
        fetch_rows(rows, row_cells, is_pair, i, i, WIDTH)
        async_copy.commit_group()
    place = gl.arange(0, M, gl.SliceLayout(1, OF_SCALES))
    column = gl.minimum(column_of(place, first, IS_GATED), SIZE - 1)
    scale = gl.arange(0, _STEP // 64, gl.SliceLayout(0, OF_SCALES))
    scale_cells = weight_scale + (row_of(place, column, expert, SIZE, IS_GATED) * SCALES)[:, None] + scale[None, :]
    next_scales = gl.load(scale_cells, mask=(scale < SCALES)[None, :], other=0)
    total = warpgroup_mma_init(gl.zeros((M, N), gl.float32, ACROSS))
    for step in range(STEPS):
        stage = step % STAGES
        scales = _factors(next_scales, gl.SliceLayout(2, WORDS))
        behind = (step + 1) * (_STEP // 64)
        next_scales = gl.load(scale_cells + behind, mask=(behind + scale < SCALES)[None, :], other=0)
        async_copy.wait_group(STAGES - 2)
        fence_async_shared()
        gl.thread_barrier()
        ahead = step + STAGES - 1
        if ahead < STEPS:
            _fetch_weights(weights, weight_cells, is_row, ahead, ahead % STAGES, WIDTH)
            fetch_rows(rows, row_cells, is_pair, ahead, ahead % STAGES, WIDTH)
        async_copy.commit_group()
        words = gl.reshape(weights.index(stage).load(_flat_words_layout(M, WARPS)), (M, 8, 4))
        words, scales = _quarters(gl.convert_layout(words, WORDS, assert_trivial=True)), _quarters(scales)
        left = _decoded(words[0], scales[0], LEFT, WARPS)
        for i in gl.static_range(_CHUNKS):
            right = numbers.index(stage * _CHUNKS + i).permute((1, 0))
            total = warpgroup_mma(left, right, total, is_async=True)
            if i + 1 < _CHUNKS:  # while the product runs
                left = _decoded(words[i + 1], scales[i + 1], LEFT, WARPS)
            total = warpgroup_mma_init(warpgroup_mma_wait(0, deps=(total,)))
    total = warpgroup_mma_wait(0, deps=(total,)) * _UPWARDS
    async_copy.wait_group(0)
    result = finished(total, bias, first, expert, SIZE, ACTIVATION, LIMIT, dtype)
    pairs, is_pair, column = results_of(result, order, start, count, first)
    target = _place_in_words(column) if IS_GATED else column
    store(result, pairs, is_pair, column, target, share, out, SIZE, IS_GATED)


@triton.jit
def reordered_kernel(x_ptr, out_ptr, x_stride, WORDS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """A row a program, two numbers a word, in the order of the words' codes."""
    row = tl.program_id(0).to(tl.int64)
    word = tl.arange(0, BLOCK)
    source = word // 8 * 8 + word % 4 * 2 + word // 4 % 2
    let_next_start(PDL)
    wait_for_inputs(PDL)
    numbers = tl.load(x_ptr + row * x_stride + source, mask=word < WORDS)
    tl.store(out_ptr + row * WORDS + word, numbers, mask=word < WORDS, eviction_policy="evict_last")


_launch, _launch_reordered = Launcher(mxfp4_kernel), Launcher(reordered_kernel)


def reordered(x: Tensor) -> Tensor:
    """x [T, K] bfloat16 in the order of `experts_product`: of 16 numbers 0, 1, 4, 5, 8, 9, 12, 13, then the others."""
    words = x.view(torch.int32)
    out = torch.empty(words.shape, dtype=torch.int32, device=x.device)
    pdl, num_words = has_pdl(x.device), words.shape[1]
    constants = {"WORDS": num_words, "BLOCK": triton.next_power_of_2(num_words), "PDL": pdl}
    _launch_reordered(
        (x.device, words.stride(0) % 16, alignment(words), *constants.values()), (x.shape[0],), (words, out, words.stride(0)), constants,
        num_warps=4, **launch_options(pdl),
    )  # fmt: skip
    return out.view(x.dtype)


MOST_PAIRS = 64
_TILINGS = {16: Tiling(128, 16, 4, 2, 168), 32: Tiling(128, 32, 4, 2, 168), MOST_PAIRS: Tiling(128, 64, 8, 2, 128)}
"""By pairs, as measured on an H200 with gpt-oss-20b's experts: see docs/performance/models.md."""


def can_multiply(hidden_size: int, size: int) -> bool:
    """Two scales of a row are read at once, and the compiler refuses loops over one step."""
    return hidden_size % 64 == size % 64 == 0 and min(hidden_size, size) > STEP


def experts_product(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, share: Tensor, out: Tensor, order: Tensor, counts: Tensor, top_k: int,
    most_pairs: int, activation: str | None = None, limit: float | None = None,
) -> None:  # fmt: skip
    """Write each pair's product with its expert's weight to its row of out.

    Math   activation(x @ gate.T + b, x @ up.T + b), or share * (x @ w.T + b); sums in float32

    x             [T, K] or [pairs, K]  bfloat16, numbers in the order of `reordered`: pair p's row is row p // top_k
    weight, scale [E, N, K / 2], [E, N, K / 32]  uint8, as `pelton.ops.moe.ExpertsSpec` says; with an activation gate's rows, then up's
    bias          [E, N] or None
    share         [pairs] float32, read without an activation
    out           [pairs, N or N / 2]  bfloat16, written for the pairs that there are; with an activation in the order of `reordered`
    order         [E, T] int32, each expert's pairs; counts [E] int32, how many
    most_pairs    of a tile

    Weights are exact where their scales are 2^-70 to 2^64.
    """
    tiling = _TILINGS[min(most_pairs, MOST_PAIRS)]
    num_experts, size, width = weight.shape[0], out.shape[1], 2 * weight.shape[2]
    num_tiles = num_experts + out.shape[0] // tiling.pairs
    columns = tiling.rows // 2 if activation is not None else tiling.rows
    pairs_of_x = x.view(torch.int32)
    constants = {
        "E": num_experts, "SIZE": size, "WIDTH": width, "K": top_k, "M": tiling.rows, "N": tiling.pairs, "STAGES": tiling.stages,
        "ACTIVATION": activation, "LIMIT": limit, "PDL": has_pdl(x.device), "WARPS": tiling.warps,
    }  # fmt: skip
    _launch(
        (x.device, bias is None or bias.dtype, pairs_of_x.stride(0) % 16, alignment(x, weight, scale, bias, share, out, order, counts),
         *constants.values()),
        (triton.cdiv(size, columns), num_tiles),
        (
            pairs_of_x, weight.view(torch.int32), scale.view(torch.int16), bias, share, out, order, counts, order.shape[1],
            pairs_of_x.stride(0),
        ),
        constants,
        num_warps=tiling.warps, maxnreg=tiling.registers, **launch_options(has_pdl(x.device)),
    )  # fmt: skip
