"""Products of some tokens' experts with integers of four bits in groups on Hopper: decoded in registers, as `hopper_mxfp4` does.

The bits of a code, alone in the lower half of 16, are a bfloat16: 2^-133 times the code, or 2^-129 times an upper code of a byte. One
instruction multiplies two of them by a power of two and takes off the zero point, exactly: they are 2^-6 times their difference. The
products over a group are a sum of their own, which meets the group's scale in float32. So weights are not rounded.

A thread reads its words of a group at once, which lie together. Numbers within a group are multiplied in the order which that makes, and
rows of x are copied to shared memory in the same order.
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
from pelton_backends.triton.ops.linear.hopper_grouped import zeros_assembly
from pelton_backends.triton.ops.moe.hopper_tiles import (
    Tiling,
    as_left,
    cells_of_rows,
    column_of,
    fetch_rows,
    finished,
    results_of,
    store,
    tile_of,
    words_layout,
)
from pelton_backends.triton.runtime import has_pdl, launch_options, let_next_start, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

STEP = 256
"""Numbers of a row of the weights that a program has at a time: 128 bytes, whole groups."""
GROUP_SIZES = (32, 64, 128)
_STEP = gl.constexpr(STEP)
_BLOCK = gl.constexpr(32)  # numbers of four words
_LESS = gl.constexpr(64.0)
"""Weights over what tensor cores are given, without the scale."""


def _numbers(place: int, word: str, mask: int, factor: str) -> str:
    """Two codes, one of each half of a word, as the difference from their zero point."""
    return f"and.b32 t, {word}, {mask:#010x}; fma.rn.bf16x2 t, t, {factor}, $9; mov.b32 {{${place}, ${place + 1}}}, t;"


_DECODE = (
    "{ .reg .b32 t, u, low, high; mov.b32 low, 0x7f007f00; mov.b32 high, 0x7d007d00; shr.b32 u, $8, 8;"  # 2^127, 2^123
    + _numbers(0, "$8", 0x000F000F, "low")  # lower codes of bytes 0 and 2
    + _numbers(2, "u", 0x000F000F, "low")  # of 1 and 3
    + _numbers(4, "$8", 0x00F000F0, "high")  # upper codes of 0 and 2
    + _numbers(6, "u", 0x00F000F0, "high")  # of 1 and 3
    + "}"
)
_DECODE_ASM: gl.constexpr = gl.constexpr(_DECODE)
_ZEROS = zeros_assembly("bf16x2", "0xff00ff00")  # -2^127
_ZEROS_ASM: gl.constexpr = gl.constexpr(_ZEROS)
_NUMBERS: gl.constexpr = gl.constexpr((gl.bfloat16,) * 8)
_CONSTRAINTS: gl.constexpr = gl.constexpr(",".join(["=h"] * 8 + ["r", "r"]))


@gluon.constexpr_function
def _bits(count):
    return count.bit_length() - 1


@gluon.constexpr_function
def _rows_layout(rows, warps, own):
    """[rows, 4 own]: a thread has its rows of the left operand, `own` numbers of each, which lie together."""
    registers = [[0, 1 << i] for i in range(_bits(own))] + [[8, 0]]
    registers += [[16 * warps << i, 0] for i in range(_bits(rows // (16 * warps)))]
    lanes = [[0, own], [0, 2 * own], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(
        registers, lanes, [[16 << i, 0] for i in range(_bits(warps))], [], [rows, 4 * own]
    )


@gluon.constexpr_function
def _column_layout(rows, warps):
    """[rows, 1]: a thread has its rows of the left operand."""
    registers = [[8, 0]] + [[16 * warps << i, 0] for i in range(_bits(rows // (16 * warps)))]
    lanes = [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16 << i, 0] for i in range(_bits(warps))], [], [rows, 1])


@gluon.constexpr_function
def _copied_layout(rows, warps, own):
    """A step's words [groups, rows, 4 own], 16 bytes a thread: what eight threads write lies together."""
    groups = 8 // own
    inside = [[0, 0, 4 << i] for i in range(_bits(own))]
    near = [[0, 1 << i, 0] for i in range(_bits(groups))]
    across = [[1 << i, 0, 0] for i in range(_bits(groups))]
    far = [[0, groups << i, 0] for i in range(_bits(rows // groups))]
    places, last = inside + near + across + far, 5 + _bits(warps)
    registers = [[0, 0, 1], [0, 0, 2], *places[last:]]
    return gl.DistributedLinearLayout(registers, places[:5], places[5:last], [], [groups, rows, 4 * own])


@gluon.jit
def _place_in_words(number, OWN: gl.constexpr):
    """Return where a number lies in rows of x: in the order in which threads with OWN words of a row each have their codes."""
    BYTES: gl.constexpr = 4 * OWN
    inside = number % (_BLOCK * OWN)
    byte = inside // 32 * 16 + inside % 16
    product = byte % BYTES // 4 * 2 + inside // 16 % 2
    return number - inside + product * 16 + byte % 2 * 8 + byte // BYTES * 2 + byte // 2 % 2


@gluon.jit
def _starts_of(place, first, expert, SIZE: gl.constexpr, WIDTH: gl.constexpr, IS_GATED: gl.constexpr):
    """Return where a tile's rows begin among all experts' ones, of WIDTH each, as two summands.

    The second is a constant to a thread that has every 16th row: addresses are not kept for each of them."""
    inside = place % 16
    if IS_GATED:
        row = expert.to(gl.int64) * (2 * SIZE) + first + inside % 8 + inside // 8 * SIZE
        further = place // 16 * (8 * WIDTH)
    else:
        row = expert.to(gl.int64) * SIZE + first + inside
        further = place // 16 * (16 * WIDTH)
    return row * WIDTH, further


@gluon.jit
def _is_row(place, first, SIZE: gl.constexpr, COLUMNS: gl.constexpr, IS_GATED: gl.constexpr):
    return (column_of(place, first, IS_GATED) < SIZE) | (SIZE % COLUMNS == 0)


@gluon.jit
def _cells_of_words(
    weight, first, expert, SIZE: gl.constexpr, WORDS: gl.constexpr, COLUMNS: gl.constexpr, IS_GATED: gl.constexpr, LAYOUT: gl.constexpr
):  # fmt: skip
    """Return where a step's words [groups, M, words] lie, and which of the M rows there are; WORDS: of a row."""
    GROUPS: gl.constexpr = LAYOUT.shape[0]
    M: gl.constexpr = LAYOUT.shape[1]
    IN_GROUP: gl.constexpr = LAYOUT.shape[2]
    place = gl.arange(0, M, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    group = gl.arange(0, GROUPS, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    word = gl.arange(0, IN_GROUP, gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT)))
    start, further = _starts_of(place, first, expert, SIZE, WORDS, IS_GATED)
    cells = weight + gl.expand_dims(gl.expand_dims(start, 0), 2)
    cells = cells + gl.expand_dims(gl.expand_dims(group * IN_GROUP, 1), 2) + gl.expand_dims(gl.expand_dims(word, 0), 0)
    cells = cells + gl.expand_dims(gl.expand_dims(further, 0), 2)
    return cells, gl.expand_dims(gl.expand_dims(_is_row(place, first, SIZE, COLUMNS, IS_GATED), 0), 2)


@gluon.jit
def _cells_of_scales(
    scale, first, expert, SIZE: gl.constexpr, SCALES: gl.constexpr, COLUMNS: gl.constexpr, IS_GATED: gl.constexpr, M: gl.constexpr,
    GROUPS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Return where a step's scales [M, GROUPS] lie, and which of the M rows there are; SCALES: of a row."""
    VECTOR: gl.constexpr = min(GROUPS, 4)
    ACROSS: gl.constexpr = GROUPS // VECTOR
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, VECTOR], [32 // ACROSS, ACROSS], [WARPS, 1], [1, 0])
    place = gl.arange(0, M, gl.SliceLayout(1, LAYOUT))
    group = gl.arange(0, GROUPS, gl.SliceLayout(0, LAYOUT))
    start, further = _starts_of(place, first, expert, SIZE, SCALES, IS_GATED)
    cells = scale + start[:, None] + group[None, :] + further[:, None]
    return cells, _is_row(place, first, SIZE, COLUMNS, IS_GATED)[:, None]


@gluon.jit
def _fetch_weights(
    words, scales, word_cells, scale_cells, is_row, is_scale, step, stage, K: gl.constexpr, G: gl.constexpr
):
    """Start the copies of a step's words [groups, M, words] and of its scales [M, groups]."""
    layout: gl.constexpr = word_cells.type.layout
    GROUPS: gl.constexpr = word_cells.shape[0]
    WORDS: gl.constexpr = word_cells.shape[2]
    group = step * GROUPS + gl.arange(0, GROUPS, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    mask = is_row & gl.expand_dims(gl.expand_dims((group < K // G) | (K % _STEP == 0), 1), 2)
    async_copy.async_copy_global_to_shared(words.index(stage), word_cells + step * (GROUPS * WORDS), mask)
    group = step * GROUPS + gl.arange(0, GROUPS, gl.SliceLayout(0, scale_cells.type.layout))
    mask = is_scale & ((group < K // G) | (K % _STEP == 0))[None, :]
    async_copy.async_copy_global_to_shared(scales.index(stage), scale_cells + step * GROUPS, mask)


@gluon.jit
def _parts_of(words, B: gl.constexpr):
    """[M, W, 4] -> W / B tensors [M, B, 4]"""
    M: gl.constexpr = words.shape[0]
    W: gl.constexpr = words.shape[1]
    if W == B:
        return (words,)
    else:
        first, second = gl.split(gl.permute(gl.reshape(words, (M, 2, W // 2, 4)), (0, 2, 3, 1)))
        return _parts_of(first, B) + _parts_of(second, B)


@gluon.jit
def _words_of(words, CHUNK: gl.constexpr, WARPS: gl.constexpr):
    """Read a group's words [M, W], as what each of its products over CHUNK numbers is made of [M, CHUNK / 32, 4]."""
    M: gl.constexpr = words.shape[0]
    OWN: gl.constexpr = words.shape[1] // 4
    own = gl.reshape(words.load(_rows_layout(M, WARPS, OWN)), (M, 4, OWN))
    return _parts_of(gl.permute(own, (0, 2, 1)), CHUNK // _BLOCK)


@gluon.jit
def _scale_of(scales, i: gl.constexpr, WARPS: gl.constexpr):
    """Read the scales of a step's i-th group [M]."""
    M: gl.constexpr = scales.shape[0]
    return gl.reshape(scales.slice(i, 1, dim=1).load(_column_layout(M, WARPS)), (M,))


@gluon.jit
def _decoded(words, scale, LEFT: gl.constexpr, WARPS: gl.constexpr):
    """Words [M, B, 4], scales with zero points [M] -> the left operand [M, 32 B]."""
    M: gl.constexpr = words.shape[0]
    B: gl.constexpr = words.shape[1]
    WORDS: gl.constexpr = words_layout(M, WARPS, B)
    zeros = gl.inline_asm_elementwise(_ZEROS_ASM, "=r,r", [scale], dtype=gl.int32, is_pure=True, pack=1)
    words = gl.convert_layout(words, WORDS, assert_trivial=True)
    zeros = gl.convert_layout(zeros, gl.SliceLayout(1, gl.SliceLayout(2, WORDS)), assert_trivial=True)
    words, zeros = gl.broadcast(words, gl.expand_dims(gl.expand_dims(zeros, 1), 2))
    numbers = gl.inline_asm_elementwise(_DECODE_ASM, _CONSTRAINTS, [words, zeros], dtype=_NUMBERS, is_pure=True, pack=1)
    return as_left(numbers, LEFT)


@gluon.jit
def _add_step(total, part, words, scales, numbers, stage, G: gl.constexpr, CHUNK: gl.constexpr, WARPS: gl.constexpr):
    """Return total [M, N] + a step's products. part: room for a group's sums; words, numbers: those of all stages, by group and chunk."""
    CHUNKS: gl.constexpr = _STEP // CHUNK
    OF_GROUP: gl.constexpr = G // CHUNK  # products
    GROUPS: gl.constexpr = _STEP // G
    ACROSS: gl.constexpr = total.type.layout
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACROSS, 2)
    scales = scales.index(stage)
    own, scale = _words_of(words.index(stage * GROUPS), CHUNK, WARPS), _scale_of(scales, 0, WARPS)
    left = _decoded(own[0], scale, LEFT, WARPS)
    next_scale = scale
    for i in gl.static_range(CHUNKS):
        right = numbers.index(stage * CHUNKS + i).permute((1, 0))
        part = warpgroup_mma(left, right, part, use_acc=i % OF_GROUP != 0, is_async=True)
        if i + 1 < CHUNKS:  # while the product runs
            if (i + 1) % OF_GROUP == 0:
                own = _words_of(words.index(stage * GROUPS + (i + 1) // OF_GROUP), CHUNK, WARPS)
                next_scale = _scale_of(scales, (i + 1) // OF_GROUP, WARPS)
            left = _decoded(own[(i + 1) % OF_GROUP], next_scale, LEFT, WARPS)
        sums = warpgroup_mma_wait(0, deps=(part,))
        if (i + 1) % OF_GROUP == 0:
            factor = (scale & -256).to(gl.float32, bitcast=True)
            factor = gl.convert_layout(factor, gl.SliceLayout(1, ACROSS), assert_trivial=True)
            total += sums * factor[:, None]
            scale = next_scale
        part = warpgroup_mma_init(sums)
    return total, part


@gluon.jit(do_not_specialize=["capacity", "is_early"])
def int4_kernel(
    x, weight, weight_scale, bias, share, out, order, count_ptr, capacity, is_early, x_stride,
    E: gl.constexpr, SIZE: gl.constexpr, WIDTH: gl.constexpr, G: gl.constexpr, K: gl.constexpr, M: gl.constexpr, N: gl.constexpr,
    STAGES: gl.constexpr, ACTIVATION: gl.constexpr, LIMIT: gl.constexpr, PDL: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """One tile: M rows of an expert's weights by N of its pairs. x: two numbers a word; weights eight.

    is_early: the weights of an expert's first tile are on their way before the experts are chosen."""
    IS_GATED: gl.constexpr = ACTIVATION is not None
    COLUMNS: gl.constexpr = M // 2 if IS_GATED else M
    STEPS: gl.constexpr = (WIDTH + _STEP - 1) // _STEP
    GROUPS: gl.constexpr = _STEP // G
    OWN: gl.constexpr = G // 32
    CHUNK: gl.constexpr = min(G, 64)
    CHUNKS: gl.constexpr = _STEP // CHUNK
    dtype: gl.constexpr = out.dtype.element_ty
    ACROSS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, N, 16])
    COPIED: gl.constexpr = _copied_layout(M, WARPS, OWN)
    GATHERED: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 256 // CHUNK, CHUNK // 8], [1, WARPS, 1], [2, 1, 0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    weights = gl.allocate_shared_memory(
        gl.int32, [STAGES, GROUPS, M, 4 * OWN], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    )
    words = weights._reinterpret(gl.int32, [STAGES * GROUPS, M, 4 * OWN], PLAIN)
    scales = gl.allocate_shared_memory(gl.int32, [STAGES, M, GROUPS], PLAIN)
    rows = gl.allocate_shared_memory(gl.int32, [STAGES, CHUNKS, N, CHUNK // 2], gl.NVMMASharedLayout(2 * CHUNK, 32, 3))
    numbers = rows._reinterpret(dtype, [STAGES * CHUNKS, N, CHUNK], gl.NVMMASharedLayout(2 * CHUNK, 16, 2))
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
    word_cells, is_row = _cells_of_words(weight, first, expert, SIZE, WIDTH // 8, COLUMNS, IS_GATED, COPIED)
    scale_cells, is_scale = _cells_of_scales(
        weight_scale, first, expert, SIZE, WIDTH // G, COLUMNS, IS_GATED, M, GROUPS, WARPS
    )
    if is_early != 0:
        for i in gl.static_range(min(STAGES - 1, STEPS)):
            _fetch_weights(weights, scales, word_cells, scale_cells, is_row, is_scale, i, i, WIDTH, G)
    if tile < E:
        if PDL:
            gdc_wait()
        count = gl.minimum(gl.load(count_ptr + expert), capacity)
        if count == 0:
            async_copy.commit_group()
            async_copy.wait_group(0)
            return
    if is_early == 0:
        for i in gl.static_range(min(STAGES - 1, STEPS)):
            _fetch_weights(weights, scales, word_cells, scale_cells, is_row, is_scale, i, i, WIDTH, G)
    order += expert.to(gl.int64) * capacity
    row_cells, is_pair = cells_of_rows(x, order, start, count, x_stride, K, N, CHUNKS, CHUNK // 2, GATHERED)
    for i in gl.static_range(min(STAGES - 1, STEPS)):
        fetch_rows(rows, row_cells, is_pair, i, i, WIDTH)
        async_copy.commit_group()
    total = gl.zeros((M, N), gl.float32, ACROSS)
    part = warpgroup_mma_init(gl.zeros((M, N), gl.float32, ACROSS))
    for step in range(STEPS):
        async_copy.wait_group(STAGES - 2)
        gl.thread_barrier()
        fence_async_shared()
        ahead = step + STAGES - 1
        if ahead < STEPS:
            stage = ahead % STAGES
            _fetch_weights(weights, scales, word_cells, scale_cells, is_row, is_scale, ahead, stage, WIDTH, G)
            fetch_rows(rows, row_cells, is_pair, ahead, stage, WIDTH)
        async_copy.commit_group()
        gl.thread_barrier()
        total, part = _add_step(total, part, words, scales, numbers, step % STAGES, G, CHUNK, WARPS)
    async_copy.wait_group(0)
    result = finished(total * _LESS, bias, first, expert, SIZE, ACTIVATION, LIMIT, dtype)
    pairs, is_pair, column = results_of(result, order, start, count, first)
    target = _place_in_words(column, OWN) if IS_GATED else column
    store(result, pairs, is_pair, column, target, share, out, SIZE, IS_GATED)


@triton.jit
def reordered_kernel(
    x_ptr, out_ptr, x_stride, WIDTH: tl.constexpr, OWN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """A row a program, in the order of the words' codes: the inverse of `_place_in_words`."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    inside = place % (32 * OWN)
    byte = inside % 8 // 2 * (4 * OWN) + inside // 32 * 4 + inside % 2 * 2 + inside // 8 % 2
    source = place - inside + byte // 16 * 32 + inside // 16 % 2 * 16 + byte % 16
    let_next_start(PDL)
    wait_for_inputs(PDL)
    numbers = tl.load(x_ptr + row * x_stride + source, mask=place < WIDTH)
    tl.store(out_ptr + row * WIDTH + place, numbers, mask=place < WIDTH, eviction_policy="evict_last")


_launch, _launch_reordered = Launcher(int4_kernel), Launcher(reordered_kernel)


def reordered(x: Tensor, group_size: int) -> Tensor:
    """x [T, K] bfloat16 in the order of `experts_product`, which depends on how many words of a group a thread has."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    pdl, width = has_pdl(x.device), x.shape[1]
    constants = {"WIDTH": width, "OWN": group_size // 32, "BLOCK": triton.next_power_of_2(width), "PDL": pdl}
    _launch_reordered(
        (x.device, x.dtype, x.stride(0) % 16, alignment(x), *constants.values()), (x.shape[0],), (x, out, x.stride(0)), constants,
        num_warps=4, **launch_options(pdl),
    )  # fmt: skip
    return out


MOST_PAIRS = 64
_TILINGS = {16: Tiling(128, 16, 4, 2, 168), 32: Tiling(128, 32, 4, 2, 168), MOST_PAIRS: Tiling(128, 64, 8, 2, 128)}
"""By pairs."""
_EARLY_PAIRS = 2
"""Of an expert on average, from which on weights are read before it is known whether the expert has any."""


def can_multiply(hidden_size: int, size: int, group_size: int | None) -> bool:
    """Products are over whole groups, and the compiler refuses loops over one step."""
    return (
        group_size in GROUP_SIZES
        and hidden_size % group_size == size % group_size == 0
        and min(hidden_size, size) > STEP
    )


def experts_product(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, share: Tensor, out: Tensor, order: Tensor, counts: Tensor, top_k: int,
    most_pairs: int, activation: str | None = None, limit: float | None = None,
) -> None:  # fmt: skip
    """Write each pair's product with its expert's weight to its row of out.

    Math   activation(x @ gate.T + b, x @ up.T + b), or share * (x @ w.T + b); sums in float32

    x             [T, K] or [pairs, K]  bfloat16, numbers in the order of `reordered`: pair p's row is row p // top_k
    weight, scale [E, N, K / 2] uint8, [E, N, K / G] int32, as `pelton.ops.moe.ExpertsSpec` says; with an activation gate's rows, then up's
    bias          [E, N] or None
    share         [pairs] float32, read without an activation
    out           [pairs, N or N / 2]  bfloat16, written for the pairs that there are; with an activation in the order of `reordered`
    order         [E, T] int32, each expert's pairs; counts [E] int32, how many
    most_pairs    of a tile
    """
    tiling = _TILINGS[min(most_pairs, MOST_PAIRS)]
    num_experts, num_pairs, size, width = weight.shape[0], out.shape[0], out.shape[1], 2 * weight.shape[2]
    num_tiles = num_experts + num_pairs // tiling.pairs
    columns = tiling.rows // 2 if activation is not None else tiling.rows
    pairs_of_x = x.view(torch.int32)
    constants = {
        "E": num_experts, "SIZE": size, "WIDTH": width, "G": width // scale.shape[2], "K": top_k, "M": tiling.rows, "N": tiling.pairs,
        "STAGES": tiling.stages, "ACTIVATION": activation, "LIMIT": limit, "PDL": has_pdl(x.device), "WARPS": tiling.warps,
    }  # fmt: skip
    _launch(
        (x.device, bias is None or bias.dtype, pairs_of_x.stride(0) % 16, alignment(x, weight, scale, bias, share, out, order, counts),
         *constants.values()),
        (triton.cdiv(size, columns), num_tiles),
        (
            pairs_of_x, weight.view(torch.int32), scale, bias, share, out, order, counts, order.shape[1],
            int(num_pairs >= _EARLY_PAIRS * num_experts), pairs_of_x.stride(0),
        ),
        constants,
        num_warps=tiling.warps, maxnreg=tiling.registers, **launch_options(has_pdl(x.device)),
    )  # fmt: skip
