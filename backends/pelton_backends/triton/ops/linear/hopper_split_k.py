"""`split_k.multiply` for Hopper, in Gluon: a program's weights are on their way into its shared memory before its inputs exist.

Triton decides itself when a pipelined loop's first loads are made: after the wait for the kernel before. Here the copy
engine fills the weight buffers first, and only the rows of x are fetched after the wait. Results are to be evicted from L2 last,
which is faster: weights streaming by probably pushed them out before, and memory had writes between its reads.
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
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pelton_backends.triton.launch import Launcher, alignment
from pelton_backends.triton.ops.pieces import empty_rows, is_hopper
from pelton_backends.triton.runtime import has_pdl, launch_options

if TYPE_CHECKING:
    from torch import Tensor

PANEL_BYTES = 128  # of a row: the widest swizzle of shared memory
PROGRAMS = 132  # that run at once, one a multiprocessor of an H200
LONG_ROW = 8192
LONG_ROW_OF_RANKS = 7168  # of Llama-3.1-8B's down, half of it


DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)


@gluon.jit
def fetch(source, row, panel, barrier, buffer, IS_PAIRED: gl.constexpr):
    """PANELS panels of rows from `row` on."""
    if IS_PAIRED:
        tma.async_copy_global_to_shared(source, [panel, row, 0, 0], barrier, buffer)
    else:
        tma.async_copy_global_to_shared(source, [panel, row, 0], barrier, buffer)


@gluon.jit
def begin_ring(
    x, weight, row, first, STAGES: gl.constexpr, PANELS: gl.constexpr, TERMS: gl.constexpr, IS_PAIRED: gl.constexpr
):
    """Make a ring of STAGES buffers for PANELS panels of the weight, from panel `first` on, and for TERMS boxes of x; fetch the weights.
    Return buffers of both, and the barriers of each."""
    weights = gl.allocate_shared_memory(weight.dtype, [STAGES] + weight.block_type.shape, weight.layout)  # noqa: RUF005
    rows = gl.allocate_shared_memory(x.dtype, [TERMS * STAGES] + x.block_type.shape, x.layout)  # noqa: RUF005
    weight_barriers = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    row_barriers = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(weight_barriers.index(i), count=1)
        mbarrier.init(row_barriers.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.expect(weight_barriers.index(i), weight.block_type.nbytes)
        mbarrier.expect(row_barriers.index(i), TERMS * x.block_type.nbytes)
    for i in gl.static_range(STAGES):
        fetch(weight, row, first + i * PANELS, weight_barriers.index(i), weights.index(i), IS_PAIRED)
    return weights, rows, weight_barriers, row_barriers


@gluon.jit
def activated(gate, up, ACTIVATION: gl.constexpr, dtype: gl.constexpr):
    """As `pieces.activated`."""
    if ACTIVATION == "silu":
        active = gate / (1.0 + gl.exp(-gate))
    elif ACTIVATION == "gelu":
        active = 0.5 * gate * (1.0 + gl.erf(gate * 0.7071067811865476))
    else:
        gl.static_assert(ACTIVATION == "gelu_tanh", "an activation that no kernel knows")
        active = gate / (1.0 + gl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))
    return (active.to(dtype).to(gl.float32) * up).to(dtype)


@gluon.jit
def scale_of(x_scale, tokens, num_tokens):
    """Scales of the tokens, [1, M] from [T] in memory, or the only row's number."""
    if x_scale.dtype.is_ptr():
        return gl.load(x_scale + gl.minimum(tokens, num_tokens - 1))[None, :]
    else:
        return x_scale


@gluon.jit
def scales_of_rows(weight_scale, tile, N: gl.constexpr, ACTIVATION: gl.constexpr, R: gl.constexpr):
    """Scales of a tile's rows [R], for `store_result`. Where they are read at the end they come from memory while nothing else does:
    what the products before have read since has taken their place in the second-level cache."""
    layout: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, gl.num_warps()], [0, 1])
    row = gl.arange(0, R, gl.SliceLayout(1, layout))
    if ACTIVATION is None:
        return gl.load(weight_scale + gl.minimum(tile * R + row, N - 1))
    else:
        HALF: gl.constexpr = N // 2
        return gl.load(weight_scale + gl.minimum(tile * (R // 2) + row // 2, HALF - 1) + row % 2 * HALF)


@gluon.jit
def scales_of_tokens(x_scale, token, num_tokens, M: gl.constexpr):
    """Scales of a tile's rows of x [1, M], for `store_result`."""
    layout: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, gl.num_warps()], [0, 1])
    return scale_of(x_scale, token + gl.arange(0, M, gl.SliceLayout(0, layout)), num_tokens)


@gluon.jit
def store_result(
    total, weight_scale, x_scale, bias, out, tile, token, num_tokens,
    N: gl.constexpr, ACTIVATION: gl.constexpr, M: gl.constexpr, R: gl.constexpr,
):  # fmt: skip
    """Scales, bias, activation and the only rounding of the product, of [R, M] float32; out is [T, N] or [T, N / 2]. The scales: None,
    or as `scales_of_rows` and `scales_of_tokens` give them."""
    dtype: gl.constexpr = out.dtype.element_ty
    layout: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, gl.num_warps()], [0, 1])
    total = gl.convert_layout(total, layout)
    if weight_scale is not None:
        total = total * weight_scale[:, None] * x_scale
    if ACTIVATION is None:
        columns = tile * R + gl.arange(0, R, gl.SliceLayout(1, layout))
        tokens = token + gl.arange(0, M, gl.SliceLayout(0, layout))
        if bias is not None:
            total += gl.load(bias + gl.minimum(columns, N - 1)).to(gl.float32)[:, None]
        is_inside = (tokens < num_tokens)[None, :] & (columns < N)[:, None]
        gl.store(
            out + tokens[None, :] * N + columns[:, None], total.to(dtype), mask=is_inside, eviction_policy="evict_last"
        )
    else:  # a thread has neighbouring rows: of the gate and of up
        HALF: gl.constexpr = N // 2
        gate, up = gl.split(gl.permute(gl.reshape(total, (R // 2, 2, M)), (0, 2, 1)))
        half: gl.constexpr = gate.type.layout
        columns = tile * (R // 2) + gl.arange(0, R // 2, gl.SliceLayout(1, half))
        tokens = token + gl.arange(0, M, gl.SliceLayout(0, half))
        if bias is not None:
            gate += gl.load(bias + gl.minimum(columns, HALF - 1)).to(gl.float32)[:, None]
            up += gl.load(bias + HALF + gl.minimum(columns, HALF - 1)).to(gl.float32)[:, None]
        is_inside = (tokens < num_tokens)[None, :] & (columns < HALF)[:, None]
        result = activated(gate.to(dtype).to(gl.float32), up.to(dtype).to(gl.float32), ACTIVATION, dtype)
        gl.store(out + tokens[None, :] * HALF + columns[:, None], result, mask=is_inside, eviction_policy="evict_last")


@gluon.jit
def store_split(
    total, place, part, partials, counters, weight_scale, x_scale, bias, out, tile, token, num_tokens,
    N: gl.constexpr, ACTIVATION: gl.constexpr, M: gl.constexpr, R: gl.constexpr, SPLIT: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """`store_result` of the sum of SPLIT programs' totals, by the last of them; place: of the tile among all."""
    if SPLIT > 1:
        slot = place * SPLIT
        cells = (
            gl.arange(0, R, gl.SliceLayout(1, layout))[:, None] * M
            + gl.arange(0, M, gl.SliceLayout(0, layout))[None, :]
        )
        gl.store(partials + (slot + part) * (R * M) + cells, total, eviction_policy="evict_last")
        gl.thread_barrier()  # all threads' stores come before the one thread's increment, which releases them
        if gl.atomic_add(counters + slot // SPLIT, 1, sem="acq_rel", scope="gpu") == SPLIT - 1:
            gl.store(counters + slot // SPLIT, 0)
            total = gl.load(partials + slot * (R * M) + cells, cache_modifier=".cg")
            for i in gl.static_range(1, SPLIT):
                total += gl.load(partials + (slot + i) * (R * M) + cells, cache_modifier=".cg")
            store_result(total, weight_scale, x_scale, bias, out, tile, token, num_tokens, N, ACTIVATION, M, R)
    else:
        store_result(total, weight_scale, x_scale, bias, out, tile, token, num_tokens, N, ACTIVATION, M, R)


@gluon.jit
def add_stage(
    total, step, weights, rows, weight_barriers, row_barriers, STAGES: gl.constexpr, PANELS: gl.constexpr, PANEL: gl.constexpr,
    R: gl.constexpr, M: gl.constexpr,
):  # fmt: skip
    """Begin the products of a step's buffers, as soon as they are filled, and add them to total [R, M]."""
    stage = step % STAGES
    phase = (step // STAGES) & 1
    mbarrier.wait(weight_barriers.index(stage), phase)
    mbarrier.wait(row_barriers.index(stage), phase)
    left = weights.index(stage).reshape((PANELS * R, PANEL))
    right = rows.index(stage).reshape((PANELS * M, PANEL))
    for i in gl.static_range(PANELS):
        total = warpgroup_mma(left.slice(i * R, R), right.slice(i * M, M).permute((1, 0)), total, is_async=True)
    return total


@gluon.jit(do_not_specialize=["num_tokens"])
def multiply_kernel(
    x, weight, weight_scale, x_scale, bias, out, partials, counters, num_tokens,
    N: gl.constexpr, K: gl.constexpr, ACTIVATION: gl.constexpr,
    M: gl.constexpr, R: gl.constexpr, C: gl.constexpr, SPLIT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """R rows of the weight by a SPLIT-th of K, for M rows of x.

    A ring of STAGES buffers, C columns each, for both: filled with weights before the wait for the kernels before, with x
    after it, and anew as the products (wgmma, weights on the left) of a buffer are done. Numbers of 8 bits have scales.
    """
    PANEL: gl.constexpr = 1024 // weight.dtype.primitive_bitwidth
    INNER: gl.constexpr = 256 // weight.dtype.primitive_bitwidth  # columns of one instruction
    tile = gl.program_id(0)
    part = gl.program_id(1)
    token = gl.program_id(2) * M
    NUM_STEPS: gl.constexpr = (K + C * SPLIT - 1) // (C * SPLIT)
    PANELS: gl.constexpr = C // PANEL
    gl.static_assert(STAGES >= 2 or NUM_STEPS == 1, "a buffer is filled anew while another is read")
    IS_PAIRED: gl.constexpr = ACTIVATION is not None
    row = tile * (R // 2 if IS_PAIRED else R)
    first = part * NUM_STEPS * PANELS
    weights, rows, weight_barriers, row_barriers = begin_ring(x, weight, row, first, STAGES, PANELS, 1, IS_PAIRED)
    if weight_scale is not None:
        weight_scale = scales_of_rows(weight_scale, tile, N, ACTIVATION, R)
    gdc_launch_dependents()
    gdc_wait()
    for i in gl.static_range(STAGES):
        fetch(x, token, first + i * PANELS, row_barriers.index(i), rows.index(i), False)
    if x_scale is not None:
        x_scale = scales_of_tokens(x_scale, token, num_tokens, M)

    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, M, INNER])
    total = warpgroup_mma_init(gl.zeros((R, M), gl.float32, layout))
    for step in range(NUM_STEPS):
        total = add_stage(
            total, step, weights, rows, weight_barriers, row_barriers, STAGES, PANELS, PANEL, R, M
        )  # fmt: skip
        if NUM_STEPS > STAGES:
            total = warpgroup_mma_init(warpgroup_mma_wait(PANELS, deps=(total,)))
            free = (step + STAGES - 1) % STAGES  # the stage of the step before, which is done
            later = step + STAGES - 1
            if (step > 0) & (later < NUM_STEPS):
                gl.thread_barrier()  # every warp's products of that stage are done
                mbarrier.expect(weight_barriers.index(free), weight.block_type.nbytes)
                mbarrier.expect(row_barriers.index(free), x.block_type.nbytes)
                fetch(weight, row, first + later * PANELS, weight_barriers.index(free), weights.index(free), IS_PAIRED)
                fetch(x, token, first + later * PANELS, row_barriers.index(free), rows.index(free), False)
    total = warpgroup_mma_wait(0, deps=(total,))

    place = tile * gl.num_programs(2) + gl.program_id(2)
    store_split(
        total, place, part, partials, counters, weight_scale, x_scale, bias, out, tile, token, num_tokens, N, ACTIVATION, M, R,
        SPLIT, layout,
    )  # fmt: skip


_launch = Launcher(multiply_kernel)


class HopperTiling(NamedTuple):
    """How `HopperProduct` cuts its work: tiles of `rows` of the weight by `tokens` of x, K in `split` parts, and buffers for
    `stages` times `columns` of both."""

    rows: int
    columns: int
    split: int
    stages: int
    tokens: int


@cache
def choose_hopper_tiling(num_tokens: int, out_features: int, in_features: int, element_size: int = 2) -> HopperTiling:
    """Choose as measured on an H200 (132 multiprocessors, 227 KB of shared memory each); see docs/performance.md.

    About 64 programs, each with nearly all of a multiprocessor's memory as buffers, were best: bytes on their way matter
    more than busy multiprocessors. Where weights are few, rows of x are shared out first, as each part of K costs a round
    trip through L2; where a row is long, K first, from 4,096 on at the last of them: O of Qwen3-30B-A3B (2,048 x 4,096) with 32 rows
    9.5 us in tiles of 16 rows, 7.2 in halves of K. What does not run at once waits for a whole program: QKV (5,120 x 2,048) with 128
    rows 13.6 us as 160 programs, 9.4 as 80. Where there are more tiles than multiprocessors after all, two programs share one: a layer of
    half of Llama-3.1-8B (of two ranks, gate and up in 224 tiles) 69.7 us with 64 rows, 71.3 with all memory for one; with down (4,096 x
    7,168) in halves of K, 74.2 without.
    """
    tokens = min(max(triton.next_power_of_2(num_tokens), 16), 128)
    rows = 128 if out_features > 264 * 64 else 64
    tiles = triton.cdiv(out_features, rows)
    is_long = in_features >= (LONG_ROW_OF_RANKS if element_size == 2 and tiles >= 64 else LONG_ROW)
    least_tokens = 32 if in_features >= 4096 else 16
    while (
        not is_long
        and tokens > least_tokens
        and tiles * triton.cdiv(num_tokens, tokens) < (96 if tokens == 128 else 64)
    ):
        if tokens == 128 and tiles * triton.cdiv(num_tokens, 64) > PROGRAMS:
            break
        tokens //= 2
    programs, split = tiles * triton.cdiv(num_tokens, tokens), 1
    while programs * split < (128 if is_long else 64) and in_features >= 512 * split:
        split *= 2
    if (
        rows * tokens > 8192
    ):  # many tiles, and sums that fill the registers: two programs a multiprocessor, short buffers
        return HopperTiling(rows, 128 // element_size, split, 3, tokens)
    if element_size == 1 and rows == 128:  # the same: gate and up of Llama-3.1-8B with 8 rows 29.8 us, not 30.6
        # With 32 rows a layer takes 80.8 us with five stages, 81.7 to 82.1 with four.
        return HopperTiling(rows, 128, split, 110_000 // ((rows + tokens) * 128), tokens)
    is_wide = tokens <= 32 and in_features < 4096 and (tiles > 64 or programs * split > tiles)
    columns = (256 if is_wide else 128) * 2 // element_size
    stages = min(200_000 // ((rows + tokens) * columns * element_size), triton.cdiv(in_features, columns * split), 9)
    if element_size == 2 and rows == 64 and in_features >= 4096 and tokens in (32, 64) and tiles > PROGRAMS:
        stages = min(stages, 100_000 // ((rows + tokens) * 256))  # two programs a multiprocessor
    return HopperTiling(rows, columns, split, stages, tokens)


@cache
def choose_tiling_beside_attention(
    num_tokens: int, out_features: int, in_features: int, is_gated: bool
) -> HopperTiling | None:
    """In steps where `attention_starts_early`, a product in front of it leaves it room. None: as in other steps.

    QKV of Qwen3-0.6B (4,096 x 1,024) with 65 to 128 rows, of 17 to 32 with three drafts each: 128 KiB of buffers leave a program of
    attention room on the same multiprocessor. On an H200 the step of 32 rows of 256 tokens takes 1,049 us so, 1,094 as 64 programs of all
    rows through 192 KiB, 1,105 as in other steps; through 96 KiB, or 160, where attention finds no room, 1,119 and 1,110. Of 24 and 18
    rows 1,027 and 978 for 1,076 and 1,049. Steps of so many rows without drafts were not measured with it."""
    if 64 < num_tokens <= 128 and (out_features, in_features) == (4096, 1024) and not is_gated:
        return HopperTiling(64, 128, 1, 4, 64)
    return None


def panel_of(matrix: Tensor) -> int:
    """Columns of a panel."""
    return PANEL_BYTES // matrix.element_size()


def panels_of(matrix: Tensor, num_rows: int, rows: int, panels: int) -> TensorDescriptor:
    """[N, K] as K / P panels of [N, P]: one copy brings several panels, each in its swizzled place."""
    num_columns, panel = matrix.shape[1], panel_of(matrix)
    shape, strides = [num_columns // panel, num_rows, panel], [panel, matrix.stride(0), 1]
    layout = gl.NVMMASharedLayout(PANEL_BYTES, 8 * matrix.element_size(), 3)
    return TensorDescriptor(matrix, shape, strides, [panels, rows, panel], layout)


def rows_in_memory(x: Tensor, num_rows: int) -> int:
    """x's rows, and the memory's rows behind them, up to num_rows."""
    behind = (x.untyped_storage().nbytes() // x.element_size() - x.storage_offset() - x.shape[1]) // x.stride(0)
    return max(x.shape[0], min(num_rows, behind + 1))


def paired_panels_of(matrix: Tensor, num_rows: int, rows: int, panels: int) -> TensorDescriptor:
    """The same for gate and up, [2 I, K]: row j of gate lies before row j of up."""
    half, num_columns, panel = num_rows // 2, matrix.shape[1], panel_of(matrix)
    shape, strides = [num_columns // panel, half, 2, panel], [panel, num_columns, half * num_columns, 1]
    layout = gl.NVMMASharedLayout(PANEL_BYTES, 8 * matrix.element_size(), 4)
    return TensorDescriptor(matrix, shape, strides, [panels, rows // 2, 2, panel], layout)


def can_multiply(weight: Tensor) -> bool:
    """A Hopper device, and a matrix that its copy engine can read."""
    is_readable = weight.is_contiguous() and weight.shape[1] % panel_of(weight) == 0 and weight.data_ptr() % 16 == 0
    return is_hopper(weight.device) and is_readable and weight.dtype in DTYPES


class HopperProduct:
    """`split_k.multiply` with one weight; its contract and roundings, for K a multiple of 64 (of 128 in 8 bits).

    On an H200, bf16, in a captured chain over distinct weights, us (cuBLAS without norms and activation beside it):
      Qwen3-0.6B, 32 rows      QKV  2.9 (5.3)  O  3.7 (5.9)  gate and up  4.3 (6.3)  down  4.6 (7.7)
      Llama-3.1-8B, 32 rows    QKV 14.6 (16.4) O 10.6 (13.9) gate and up 57.3 (57.1) down 29.6 (33.1)

    counters  [at least ceil(N / 64) * ceil(T / 16)] int32, zeros; zeros again when the kernel is done
    Rows of x begin at multiples of 16 bytes (`takes`).
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        activation: str | None,
        counters: Tensor,
        weight_scale: Tensor | None = None,
    ) -> None:
        self._weight, self._bias, self._activation, self._counters = weight, bias, activation, counters
        self._weight_scale, self._alignment = weight_scale, alignment(bias, weight_scale)
        self._described: dict[tuple[int, int], TensorDescriptor] = {}

    @staticmethod
    def takes(x: Tensor) -> bool:
        return (
            x.shape[0] > 0
            and x.data_ptr() % 16 == 0
            and x.stride(0) * x.element_size() % 16 == 0
            and x.stride(0) >= x.shape[1]
        )

    def __call__(
        self,
        x: Tensor,
        tiling: HopperTiling | None = None,
        *,
        x_scale: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """x_scale: [T] float32, where the weight has scales too; dtype: of the result, if not that of x."""
        num_tokens, (out_features, in_features) = x.shape[0], self._weight.shape
        activation = self._activation
        tiling = tiling or choose_hopper_tiling(num_tokens, out_features, in_features, x.element_size())
        rows, columns, split, stages, tokens = tiling
        stages = min(stages, triton.cdiv(in_features, columns * split))
        num_columns = out_features // 2 if activation is not None else out_features
        num_tiles, num_blocks = triton.cdiv(out_features, rows), triton.cdiv(num_tokens, tokens)
        out = empty_rows(num_tokens, num_columns, x, dtype)
        partials = None
        if split > 1:
            shape = (num_tiles, num_blocks, split, rows, tokens)
            partials = torch.empty(shape, dtype=torch.float32, device=x.device)
        panels = columns // panel_of(x)
        weight = self._described.get((rows, panels))
        if weight is None:
            describe = panels_of if activation is None else paired_panels_of
            weight = self._described[rows, panels] = describe(self._weight, out_features, rows, panels)
        # What lies behind x's rows is multiplied too where there is memory: it reaches no row of the result.
        rows_of_x = panels_of(x, rows_in_memory(x, num_blocks * tokens), tokens, panels)
        _launch(
            (
                x.dtype, out.dtype, x.device, out_features, in_features, activation, self._bias is None, self._alignment,
                tiling,
            ),
            (num_tiles, split, num_blocks),
            (
                rows_of_x, weight, self._weight_scale, x_scale, self._bias, out, partials, self._counters, num_tokens,
            ),
            {
                "N": out_features, "K": in_features, "ACTIVATION": activation,
                "M": tokens, "R": rows, "C": columns, "SPLIT": split, "STAGES": stages,
            },
            num_warps=4, **launch_options(has_pdl(x.device)),
        )  # fmt: skip
        return out
