"""Products of some rows and weights of four bits in groups on Hopper: decoded in registers, where tensor cores take the left operand.

Weights are on their way before the rows exist, as in `hopper_split_k`. The bits of a code, alone in the lower byte of 16, are a number far
below 1; one instruction multiplies two of them by a power of two and takes off their zero point, exactly. The sums of a group of columns
meet its scale in float32, so weights are not rounded. The order of the codes in `grouped_kernels.py` gives each thread what it multiplies.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pelton_backends.triton.launch import Launcher, alignment
from pelton_backends.triton.ops.linear.hopper_split_k import (
    PROGRAMS,
    begin_ring,
    fetch,
    paired_panels_of,
    panels_of,
    rows_in_memory,
    store_split,
)
from pelton_backends.triton.ops.pieces import empty_rows, is_hopper
from pelton_backends.triton.runtime import has_pdl, launch_options

if TYPE_CHECKING:
    from torch import Tensor
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

STEP = 256  # columns of a buffer: 128 bytes of codes of each row
ROWS, MOST_TOKENS = 128, 128  # of a tile
_STEP, _BLOCK, _CHUNK = gl.constexpr(STEP), gl.constexpr(128), gl.constexpr(64)


def _assembly(kind: str, low: str, high: str) -> str:
    """Return what makes differences from the zero point, times a power of two, of a word's first and second code of both its halves."""
    return (
        f"{{ .reg .b32 t, low, high; mov.b32 low, {low}; mov.b32 high, {high};"
        f"and.b32 t, $4, 0x000f000f; fma.rn.{kind} t, t, low, $5; mov.b32 {{$0, $1}}, t;"
        f"and.b32 t, $4, 0x00f000f0; fma.rn.{kind} t, t, high, $5; mov.b32 {{$2, $3}}, t; }}"
    )


def zeros_assembly(kind: str, factor: str) -> str:
    """Return what makes a scale's zero point, its last byte, times a negative power of two in both halves of a register."""
    return f"{{ .reg .b32 t, u; mov.b32 u, {factor}; prmt.b32 t, $1, 0, 0x4040; mul.{kind} $0, t, u; }}"


_BFLOAT16_ASM: gl.constexpr = gl.constexpr(_assembly("bf16x2", "0x7f007f00", "0x7d007d00"))  # 2^127, 2^123
_FLOAT16_ASM: gl.constexpr = gl.constexpr(_assembly("f16x2", "0x78007800", "0x68006800"))  # 2^15, 2^11
_BFLOAT16_ZEROS_ASM: gl.constexpr = gl.constexpr(zeros_assembly("bf16x2", "0xff00ff00"))  # -2^127
_FLOAT16_ZEROS_ASM: gl.constexpr = gl.constexpr(zeros_assembly("f16x2", "0xf800f800"))  # -2^15
_BFLOAT16_NUMBERS, _FLOAT16_NUMBERS = gl.constexpr((gl.bfloat16,) * 4), gl.constexpr((gl.float16,) * 4)
_BFLOAT16_LESS, _FLOAT16_LESS = gl.constexpr(64.0), gl.constexpr(512.0)
"""Weights over what tensor cores are given, without the scale."""


@gluon.constexpr_function
def _words_layout(rows, warps, words):
    """A tile's words [rows, words], 16 of a block of 128 columns: those that a thread's registers of the left operand are made of."""
    registers = [[0, 1], [0, 2]] + [[0, 16 << i] for i in range((words // 16).bit_length() - 1)] + [[8, 0]]
    registers += [[16 * warps << i, 0] for i in range((rows // (16 * warps)).bit_length() - 1)]
    lanes = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(
        registers, lanes, [[16 << i, 0] for i in range(warps.bit_length() - 1)], [], [rows, words]
    )


@gluon.jit
def _decoded(words, scale, half: gl.constexpr, LEFT: gl.constexpr, dtype: gl.constexpr):
    """Words of a block [R, 16], scales with zero points [R] -> half of its columns as the left operand [R, 64]."""
    R: gl.constexpr = words.shape[0]
    ZEROS: gl.constexpr = _BFLOAT16_ZEROS_ASM if dtype == gl.bfloat16 else _FLOAT16_ZEROS_ASM
    NUMBERS: gl.constexpr = _BFLOAT16_NUMBERS if dtype == gl.bfloat16 else _FLOAT16_NUMBERS
    ASM: gl.constexpr = _BFLOAT16_ASM if dtype == gl.bfloat16 else _FLOAT16_ASM
    zeros = gl.inline_asm_elementwise(ZEROS, "=r,r", [scale], dtype=gl.int32, is_pure=True, pack=1)
    if half == 1:
        words = words >> 8
    words, zeros = gl.broadcast(words, gl.expand_dims(zeros, 1))
    a, b, c, d = gl.inline_asm_elementwise(ASM, "=h,=h,=h,=h,r,r", [words, zeros], dtype=NUMBERS, is_pure=True, pack=1)
    numbers = gl.reshape(gl.join(gl.join(a, b), gl.join(c, d)), (R, 4, 2, 2, 2, 2))  # row, t, u, v, neighbour, p
    numbers = gl.reshape(gl.permute(numbers, (0, 5, 2, 3, 1, 4)), (R, _CHUNK))
    return gl.convert_layout(numbers, LEFT, assert_trivial=True)


@gluon.jit
def _scale_words(cells, block, s: gl.constexpr, K: gl.constexpr, G: gl.constexpr):
    """Return the scales of group s of a block, for a tile's rows."""
    return gl.load(cells + gl.minimum((block * _BLOCK + s * _CHUNK) // G, K // G - 1))


@gluon.jit(do_not_specialize=["num_tokens"])
def hopper_grouped_kernel(
    x, codes, scales, bias, out, partials, counters, num_tokens,
    N: gl.constexpr, K: gl.constexpr, G: gl.constexpr, ACTIVATION: gl.constexpr, M: gl.constexpr, R: gl.constexpr,
    SPLIT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """R rows of the weight by a SPLIT-th of K, for M rows of x, through a ring of STAGES buffers of 256 columns."""
    dtype: gl.constexpr = x.dtype
    LESS: gl.constexpr = _BFLOAT16_LESS if dtype == gl.bfloat16 else _FLOAT16_LESS
    STEPS: gl.constexpr = K // (_STEP * SPLIT)
    PANELS: gl.constexpr = x.block_type.shape[0]
    WARPS: gl.constexpr = gl.num_warps()
    SUBS: gl.constexpr = 2 if G == _CHUNK else 1  # groups of a block
    IS_PAIRED: gl.constexpr = ACTIVATION is not None
    OTHER: gl.constexpr = N // 2 if IS_PAIRED else 0
    ACROSS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, M, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACROSS, 2)
    WORDS: gl.constexpr = _words_layout(R, WARPS, 32)
    OF_BLOCK: gl.constexpr = _words_layout(R, WARPS, 16)
    tile, part, token = gl.program_id(0), gl.program_id(1), gl.program_id(2) * M
    row = tile * (R // 2 if IS_PAIRED else R)
    first = part * STEPS
    weights, rows, weight_barriers, row_barriers = begin_ring(x, codes, row, first, STAGES, 1, 1, IS_PAIRED)
    place = gl.arange(0, R, gl.SliceLayout(1, OF_BLOCK))
    if IS_PAIRED:
        weight_row = gl.minimum(row + place // 2, OTHER - 1) + place % 2 * OTHER
    else:
        weight_row = gl.minimum(row + place, N - 1)
    cells = scales + weight_row.to(gl.int64) * (K // G)
    # Of a step's two blocks, asked for a step ahead; the second and the fourth where a block has two groups.
    scale_0, scale_2 = _scale_words(cells, 2 * first, 0, K, G), _scale_words(cells, 2 * first + 1, 0, K, G)
    scale_1, scale_3 = scale_0, scale_2
    if SUBS > 1:
        scale_1, scale_3 = _scale_words(cells, 2 * first, 1, K, G), _scale_words(cells, 2 * first + 1, 1, K, G)
    gdc_launch_dependents()
    gdc_wait()
    for i in gl.static_range(STAGES):
        fetch(x, token, (first + i) * PANELS, row_barriers.index(i), rows.index(i), False)

    total = gl.zeros((R, M), gl.float32, ACROSS)
    sums = warpgroup_mma_init(gl.zeros((R, M), gl.float32, ACROSS))
    for step in range(STEPS):
        stage, phase, block = step % STAGES, (step // STAGES) & 1, 2 * (first + step)
        own = (scale_0, scale_1, scale_2, scale_3)
        scale_0, scale_2 = _scale_words(cells, block + 2, 0, K, G), _scale_words(cells, block + 3, 0, K, G)
        if SUBS > 1:
            scale_1, scale_3 = _scale_words(cells, block + 2, 1, K, G), _scale_words(cells, block + 3, 1, K, G)
        else:
            scale_1, scale_3 = scale_0, scale_2
        mbarrier.wait(weight_barriers.index(stage), phase)
        words = weights.index(stage).reshape((R, 32)).load(WORDS)
        words = gl.split(gl.permute(gl.reshape(words, (R, 2, 16)), (0, 2, 1)))
        both = (
            gl.convert_layout(words[0], OF_BLOCK, assert_trivial=True),
            gl.convert_layout(words[1], OF_BLOCK, assert_trivial=True),
        )
        left = _decoded(both[0], own[0], 0, LEFT, dtype)
        mbarrier.wait(row_barriers.index(stage), phase)
        lines = rows.index(stage).reshape((PANELS * M, _CHUNK))
        for i in gl.static_range(4):
            right = lines.slice(i * M, M).permute((1, 0))
            sums = warpgroup_mma(left, right, sums, use_acc=i % 2 != 0 and SUBS == 1, is_async=True)
            if i < 3:  # while the product runs
                left = _decoded(both[(i + 1) // 2], own[i + 1], (i + 1) % 2, LEFT, dtype)
            done = warpgroup_mma_wait(0, deps=(sums,))
            if i % 2 == 1 or SUBS > 1:
                factor = (own[i] & -256).to(gl.float32, bitcast=True)
                total += done * gl.convert_layout(factor, gl.SliceLayout(1, ACROSS), assert_trivial=True)[:, None]
            sums = warpgroup_mma_init(done)
        if STEPS > STAGES:  # noqa: SIM102
            if step + STAGES < STEPS:
                gl.thread_barrier()  # every warp's products of that stage are done
                mbarrier.expect(weight_barriers.index(stage), codes.block_type.nbytes)
                mbarrier.expect(row_barriers.index(stage), x.block_type.nbytes)
                at = first + step + STAGES
                fetch(codes, row, at, weight_barriers.index(stage), weights.index(stage), IS_PAIRED)
                fetch(x, token, at * PANELS, row_barriers.index(stage), rows.index(stage), False)
    total = total * LESS
    slot = tile * gl.num_programs(2) + gl.program_id(2)
    store_split(
        total, slot, part, partials, counters, None, None, bias, out, tile, token, num_tokens, N, ACTIVATION, M, R, SPLIT, ACROSS
    )  # fmt: skip


_launch = Launcher(hopper_grouped_kernel)


class GroupedTiling(NamedTuple):
    """Tiles of `rows` of the weight by `tokens` of x, K in `split` parts, `stages` buffers, `warps` warps of so many registers a thread."""

    tokens: int
    rows: int
    split: int
    stages: int
    warps: int
    registers: int


@cache
def choose_grouped_tiling(num_tokens: int, out_features: int, in_features: int) -> GroupedTiling:
    """Choose as measured on an H200 with Llama-3.1-8B's matrices: see docs/performance/models.md.

    O of 32 rows in eight parts of K 14.8 us, in four 9.2; gate and up of 64 rows with 255 registers a thread, which leave no room for a
    second program, 43.5, with 128 40.3."""
    tokens = min(max(triton.next_power_of_2(num_tokens), 16), MOST_TOKENS)
    programs = triton.cdiv(out_features, ROWS) * triton.cdiv(num_tokens, tokens)
    steps, split = in_features // STEP, 1
    wanted = PROGRAMS if tokens >= 64 else 2 * PROGRAMS
    while steps % (2 * split) == 0 and 2 * programs * split <= wanted and steps >= 8 * split:
        split *= 2
    is_alone = tokens == MOST_TOKENS or programs * split <= PROGRAMS  # on its multiprocessor, else two share one
    registers, memory = (255, 205_000) if is_alone else (128, 105_000)
    stages = max(min(memory // ((ROWS + 4 * tokens) * 128), steps // split, 6), 1)
    if tokens == 16:
        registers, stages = 128, min(stages, 4)
    return GroupedTiling(tokens, ROWS, split, stages, 8, registers)


def can_multiply(codes: Tensor, scales: Tensor, in_features: int) -> bool:
    """Whole buffers of columns, groups of whole products, and what the copy engine can read."""
    group_size = in_features // scales.shape[1]
    is_whole = in_features % STEP == 0 and (group_size == 64 or group_size % 128 == 0)
    return is_hopper(codes.device) and is_whole and codes.is_contiguous() and alignment(codes, scales) == 0


class GroupedProduct:
    """x @ weight.T + bias, or activation(gate) * up of its halves, for weights of four bits in groups with zero points.

    codes, scales  [N, K / 8], [N, K / G] int32, as in `grouped_kernels.py`; with an activation gate's rows, then up's
    counters       [at least ceil(N / 128) ceil(T / 16)] int32, zeros; zeros again when the kernel is done
    """

    def __init__(
        self, codes: Tensor, scales: Tensor, bias: Tensor | None, activation: str | None, counters: Tensor
    ) -> None:
        self._scales, self._bias, self._activation, self._counters = scales, bias, activation, counters
        self._out_features, self._in_features = codes.shape[0], 8 * codes.shape[1]
        self._alignment = alignment(bias)
        describe = panels_of if activation is None else paired_panels_of
        self._codes: TensorDescriptor = describe(codes, self._out_features, ROWS, 1)

    def __call__(self, x: Tensor, dtype: torch.dtype, tiling: GroupedTiling | None = None) -> Tensor:
        """x [T, K], rows at multiples of 16 bytes -> [T, N] or [T, N / 2] of dtype"""
        num_tokens, out_features, in_features = x.shape[0], self._out_features, self._in_features
        tiling = tiling or choose_grouped_tiling(num_tokens, out_features, in_features)
        num_columns = out_features if self._activation is None else out_features // 2
        num_tiles, num_blocks = triton.cdiv(out_features, tiling.rows), triton.cdiv(num_tokens, tiling.tokens)
        out = empty_rows(num_tokens, num_columns, x, dtype)
        partials = None
        if tiling.split > 1:
            shape = (num_tiles, num_blocks, tiling.split, tiling.rows, tiling.tokens)
            partials = torch.empty(shape, dtype=torch.float32, device=x.device)
        rows_of_x = panels_of(x, rows_in_memory(x, num_blocks * tiling.tokens), tiling.tokens, STEP // 64)
        _launch(
            (
                x.dtype, dtype, x.device, out_features, in_features, self._scales.shape[1], self._activation,
                self._bias is None or self._bias.dtype, self._alignment, tiling,
            ),
            (num_tiles, tiling.split, num_blocks),
            (rows_of_x, self._codes, self._scales, self._bias, out, partials, self._counters, num_tokens),
            {
                "N": out_features, "K": in_features, "G": in_features // self._scales.shape[1], "ACTIVATION": self._activation,
                "M": tiling.tokens, "R": tiling.rows, "SPLIT": tiling.split, "STAGES": tiling.stages,
            },
            num_warps=tiling.warps, maxnreg=tiling.registers, **launch_options(has_pdl(x.device)),
        )  # fmt: skip
        return out
