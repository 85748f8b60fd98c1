"""Products of many tokens' experts for Hopper, in Gluon: a tile is 128 places of one expert, one warp copies and two warp groups multiply.

gate and up are one product whose epilogue is the activation. Rows are sorted by expert, and each expert's begin at a multiple of ROWS.

Weights in e4m3 are multiplied as they are, and nothing is decoded into memory: by rows that are sums of two numbers in e4m3, two
products at twice the speed of one in two bytes, or by rows rounded to e4m3, one product.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from pelton_backends.triton.launch import Launcher
from pelton_backends.triton.ops.linear.hopper_many_blocks import add_block
from pelton_backends.triton.ops.linear.hopper_matmul import activated_tile, scaled_half, sigmoid, store_tile
from pelton_backends.triton.ops.moe.split import SplitRows
from pelton_backends.triton.runtime import num_sms

if TYPE_CHECKING:
    from torch import Tensor

WARP_GROUPS = 2
GROUP_ROWS = 64
ROWS = WARP_GROUPS * GROUP_ROWS
COLUMNS = 256
STEP = 64  # numbers of a row that are fetched together, of two bytes; in e4m3 twice as many
STEP_BYTES = 2 * STEP
STAGES, SPLIT_STAGES = 4, 3  # buffers of 48 KiB; of 64 KiB, for rows that are sums of two
_GROUP_ROWS, _ROWS, _COLUMNS = gl.constexpr(GROUP_ROWS), gl.constexpr(ROWS), gl.constexpr(COLUMNS)
_STEP_BYTES, _STAGES, _SPLIT_STAGES = gl.constexpr(STEP_BYTES), gl.constexpr(STAGES), gl.constexpr(SPLIT_STAGES)
_WARP_GROUPS = gl.constexpr(WARP_GROUPS)
_HALF = gl.constexpr(COLUMNS // 2)


@gluon.jit
def _copy(
    x, weight, tile_expert, left, low, right, ready, free, num_tiles, num_columns, num_steps, size, weight_rows,
    IS_GATED: gl.constexpr,
):  # fmt: skip
    """The copying warp, as far ahead as there are buffers, and into the next tile. low: buffers of the second numbers of sums in e4m3,
    None of other rows."""
    IS_SPLIT: gl.constexpr = low is not None
    STAGES: gl.constexpr = left.shape[0]
    STEP: gl.constexpr = left.shape[2]
    BYTES: gl.constexpr = (2 * _ROWS + _COLUMNS if IS_SPLIT else _ROWS + _COLUMNS) * _STEP_BYTES
    step = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        row, column = tile // num_columns, tile % num_columns
        first = gl.load(tile_expert + row) * weight_rows
        for k in range(num_steps):
            stage = step % STAGES
            barrier = ready.index(stage)
            mbarrier.wait(free.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(barrier, BYTES)
            tma.async_copy_global_to_shared(x, [row * _ROWS, k * STEP], barrier, left.index(stage))
            if IS_SPLIT:  # they lie behind the first numbers of the whole row
                tma.async_copy_global_to_shared(x, [row * _ROWS, (num_steps + k) * STEP], barrier, low.index(stage))
            if IS_GATED:  # 128 columns of the result: as many rows of gate, and as many of up
                gate, up = right.index(stage).slice(0, _HALF), right.index(stage).slice(_HALF, _HALF)
                tma.async_copy_global_to_shared(weight, [first + column * _HALF, k * STEP], barrier, gate)
                tma.async_copy_global_to_shared(weight, [first + size + column * _HALF, k * STEP], barrier, up)
            else:
                tma.async_copy_global_to_shared(
                    weight, [first + column * _COLUMNS, k * STEP], barrier, right.index(stage)
                )
            step += 1


@gluon.jit
def _gather(
    x, x_stride, source, weight, tile_expert, tile_rows, left, low, right, ready, free, num_tiles, num_columns, num_steps, size,
    weight_rows,
):  # fmt: skip
    """Four warps in place of `_copy`: rows of x are wherever `source` says, and the copy engine cannot gather."""
    IS_SPLIT: gl.constexpr = low is not None
    STAGES: gl.constexpr = left.shape[0]
    STEP: gl.constexpr = left.shape[2]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, STEP // 8], [4, 8], [4, 1], [1, 0])
    places = gl.arange(0, _ROWS, gl.SliceLayout(1, LAYOUT))
    lane = gl.arange(0, STEP, gl.SliceLayout(0, LAYOUT))
    step = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        row, column = tile // num_columns, tile % num_columns
        first = gl.load(tile_expert + row) * weight_rows
        is_row = places < gl.load(tile_rows + row)
        rows = gl.load(source + row * _ROWS + places, mask=is_row, other=0)
        offsets = (rows * x_stride)[:, None] + lane[None, :]
        for k in range(num_steps):
            stage = step % STAGES
            barrier = ready.index(stage)
            mbarrier.wait(free.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(barrier, _COLUMNS * _STEP_BYTES)
            gate, up = right.index(stage).slice(0, _HALF), right.index(stage).slice(_HALF, _HALF)
            tma.async_copy_global_to_shared(weight, [first + column * _HALF, k * STEP], barrier, gate)
            tma.async_copy_global_to_shared(weight, [first + size + column * _HALF, k * STEP], barrier, up)
            async_copy.async_copy_global_to_shared(left.index(stage), x + k * STEP + offsets, mask=is_row[:, None])
            if IS_SPLIT:
                second = x + (num_steps + k) * STEP
                async_copy.async_copy_global_to_shared(low.index(stage), second + offsets, mask=is_row[:, None])
            async_copy.mbarrier_arrive(barrier, increment_count=False)
            step += 1


@gluon.jit
def of_rows(
    inverse, source, tile_rows, tile, INDEX: gl.constexpr, TILE_ROWS: gl.constexpr, LAYOUT: gl.constexpr
):  # fmt: skip
    """Return what a warp group's rows of a tile, which has TILE_ROWS, are multiplied by."""
    place = INDEX * _GROUP_ROWS + gl.arange(0, _GROUP_ROWS, LAYOUT)
    is_row = place < gl.load(tile_rows + tile)
    rows = tile * TILE_ROWS + place
    if source is not None:
        rows = gl.load(source + rows, mask=is_row, other=0)
    return gl.load(inverse + rows, mask=is_row, other=0.0)


@gluon.jit
def _biased_half(half, bias, column, end):
    """Return numbers of 128 columns from `column` on, and their biases."""
    columns = column + gl.arange(0, _HALF, gl.SliceLayout(0, half.type.layout))
    return half + gl.load(bias + gl.minimum(columns, end - 1)).to(gl.float32)[None, :]


@gluon.jit
def _clamped_tile(gate, up, LIMIT: gl.constexpr, dtype: gl.constexpr):
    """swiglu_oai, as `kernels.gated`."""
    if LIMIT is not None:
        gate = gl.minimum(gate, LIMIT)
        up = gl.minimum(gl.maximum(up, -LIMIT), LIMIT)
    return (gate * sigmoid(1.702 * gate) * (up + 1.0)).to(dtype)


@gluon.jit
def _multiply(
    INDEX: gl.constexpr,
    out,
    source,
    inverse,
    weight_scale,
    bias,
    tile_expert,
    tile_rows,
    left,
    low,
    right,
    buffer,
    ready,
    free,
    num_tiles,
    num_columns,
    num_steps,
    size,
    weight_rows,
    BLOCKS: gl.constexpr,
    ACTIVATION: gl.constexpr,
    LIMIT: gl.constexpr,
):
    """A warp group: its 64 rows of every tile, unless no pair has one of them.

    BLOCKS: scales of a row of the weight. Where there are several the sums of each block meet its scale: `add_block`."""
    STAGES: gl.constexpr = left.shape[0]
    HAS_SCALES: gl.constexpr = left.dtype.primitive_bitwidth == 8
    IS_SPLIT: gl.constexpr = low is not None
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _COLUMNS, 32 if HAS_SCALES else 16])
    dtype: gl.constexpr = out.dtype
    step = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        row, column = tile // num_columns * _ROWS + INDEX * _GROUP_ROWS, tile % num_columns
        if BLOCKS == 1:
            total = warpgroup_mma_init(gl.zeros([_GROUP_ROWS, _COLUMNS], gl.float32, LAYOUT))
        is_any = gl.load(tile_rows + tile // num_columns) > INDEX * _GROUP_ROWS
        steps = gl.where(is_any, num_steps, 0)
        if BLOCKS > 1:
            place = gl.minimum(column * (_COLUMNS if ACTIVATION is None else _HALF), size - 1)
            other = place + size if ACTIVATION is not None else gl.minimum(place + _HALF, size - 1)
            of_expert = gl.load(tile_expert + tile // num_columns) * weight_rows  # less than 2^31 scales
            first_scales, second_scales = (of_expert + place) * BLOCKS, (of_expert + other) * BLOCKS
            HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _HALF, 32])
            first = gl.zeros([_GROUP_ROWS, _HALF], gl.float32, HALF)
            second = gl.zeros([_GROUP_ROWS, _HALF], gl.float32, HALF)
        for _ in range(steps, num_steps):
            mbarrier.wait(ready.index(step % STAGES), (step // STAGES) & 1)
            gl.thread_barrier()
            mbarrier.arrive(free.index(step % STAGES), count=1)
            step += 1
        for k in range(steps):
            stage = step % STAGES
            if BLOCKS > 1:  # asked for before the wait
                first_scale, second_scale = (
                    gl.load(weight_scale + first_scales + k),
                    gl.load(weight_scale + second_scales + k),
                )
            mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
            if source is not None:
                fence_async_shared()  # threads wrote these rows, not the copy engine
            if BLOCKS > 1:
                rows = left.index(stage).slice(INDEX * _GROUP_ROWS, _GROUP_ROWS)
                low_rows = low.index(stage).slice(INDEX * _GROUP_ROWS, _GROUP_ROWS) if IS_SPLIT else rows
                first, second = add_block(
                    first, second, rows, low_rows, right.index(stage), first_scale, second_scale, IS_SPLIT
                )
                gl.thread_barrier()  # every warp is done with the step
                mbarrier.arrive(free.index(stage), count=1)
            else:
                columns = right.index(stage).permute((1, 0))
                rows = left.index(stage).slice(INDEX * _GROUP_ROWS, _GROUP_ROWS)
                total = warpgroup_mma(rows, columns, total, is_async=True)
                if IS_SPLIT:
                    rows = low.index(stage).slice(INDEX * _GROUP_ROWS, _GROUP_ROWS)
                    total = warpgroup_mma(rows, columns, total, is_async=True)
                total = warpgroup_mma_wait(2 if IS_SPLIT else 1, deps=(total,))
                total = warpgroup_mma_init(total)
                gl.thread_barrier()  # every warp is done with the step before
                mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), count=1, pred=k > 0)
            step += 1
        if BLOCKS == 1:
            total = warpgroup_mma_wait(0, deps=(total,))
            gl.thread_barrier()
            mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), count=1, pred=is_any)
        if is_any:
            if BLOCKS == 1:
                first, second = gl.split(gl.permute(gl.reshape(total, (_GROUP_ROWS, 2, _HALF)), (0, 2, 1)))
            if HAS_SCALES:
                scales_of_rows = of_rows(
                    inverse, source, tile_rows, tile // num_columns, INDEX, _ROWS, gl.SliceLayout(1, first.type.layout)
                )
                if BLOCKS > 1:
                    first, second = first * scales_of_rows[:, None], second * scales_of_rows[:, None]
                else:
                    scales = weight_scale + gl.load(tile_expert + tile // num_columns) * weight_rows
                    place = column * (_COLUMNS if ACTIVATION is None else _HALF)
                    first = scaled_half(first, scales, scales_of_rows, place, size)
                    if ACTIVATION is None:
                        second = scaled_half(second, scales, scales_of_rows, place + _HALF, size)
                    else:
                        second = scaled_half(second, scales + size, scales_of_rows, place, size)
            if bias is not None:
                biases = bias + gl.load(tile_expert + tile // num_columns) * weight_rows
                if ACTIVATION is None:
                    first = _biased_half(first, biases, column * _COLUMNS, size)
                    second = _biased_half(second, biases, column * _COLUMNS + _HALF, size)
                else:
                    first = _biased_half(first, biases, column * _HALF, size)
                    second = _biased_half(second, biases + size, column * _HALF, size)
            if ACTIVATION is None:
                store_tile(out, buffer, first.to(dtype), row, column * _COLUMNS)
                store_tile(out, buffer, second.to(dtype), row, column * _COLUMNS + _HALF)
            elif ACTIVATION == "swiglu_oai":
                store_tile(out, buffer, _clamped_tile(first, second, LIMIT, dtype), row, column * _HALF)
            else:
                gate, up = first.to(dtype).to(gl.float32), second.to(dtype).to(gl.float32)
                store_tile(out, buffer, activated_tile(gate, up, ACTIVATION, dtype), row, column * _HALF)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["size", "in_features", "weight_rows"])
def experts_matmul_kernel(
    x,
    source,
    inverse,
    weight,
    weight_scale,
    bias,
    out,
    tile_expert,
    tile_rows,
    num_tiles_ptr,
    x_stride,
    size,
    in_features,
    weight_rows,
    IS_SPLIT: gl.constexpr,
    BLOCKS: gl.constexpr,
    ACTIVATION: gl.constexpr,
    LIMIT: gl.constexpr,
):
    """Persistent: programs take tiles in turn, columns first. `size` columns of the result, `weight_rows` of the weight an expert."""
    IS_GATHERED: gl.constexpr = source is not None
    BITS: gl.constexpr = weight.dtype.primitive_bitwidth
    STEP: gl.constexpr = _STEP_BYTES * 8 // BITS
    STAGES: gl.constexpr = _SPLIT_STAGES if IS_SPLIT else _STAGES
    TILE_COLUMNS: gl.constexpr = _COLUMNS if ACTIVATION is None else _HALF
    LINES: gl.constexpr = gl.NVMMASharedLayout(128, BITS, rank=2)
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    num_columns = (size + TILE_COLUMNS - 1) // TILE_COLUMNS
    num_tiles = gl.load(num_tiles_ptr) * num_columns
    num_steps = (in_features + STEP - 1) // STEP
    left = gl.allocate_shared_memory(weight.dtype, [STAGES, _ROWS, STEP], LINES)
    if IS_SPLIT:
        low = gl.allocate_shared_memory(weight.dtype, [STAGES, _ROWS, STEP], LINES)
    else:
        low: gl.constexpr = None
    right = gl.allocate_shared_memory(weight.dtype, [STAGES, _COLUMNS, STEP], LINES)
    buffers = gl.allocate_shared_memory(out.dtype, [_WARP_GROUPS, _GROUP_ROWS, _HALF], TILE)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1 + 128 if IS_GATHERED else 1)
        mbarrier.init(free.index(stage), count=_WARP_GROUPS)
    fence_async_shared()
    if IS_GATHERED:
        gl.static_assert(ACTIVATION is not None, "rows are gathered for gate and up alone")
        gl.warp_specialize(
            [
                (_multiply, (
                    gl.constexpr(0), out, source, inverse, weight_scale, bias, tile_expert, tile_rows, left, low, right, buffers.index(0),
                    ready, free, num_tiles, num_columns, num_steps, size, weight_rows, BLOCKS, ACTIVATION, LIMIT,
                )),
                (_multiply, (
                    gl.constexpr(1), out, source, inverse, weight_scale, bias, tile_expert, tile_rows, left, low, right, buffers.index(1),
                    ready, free, num_tiles, num_columns, num_steps, size, weight_rows, BLOCKS, ACTIVATION, LIMIT,
                )),
                (_gather, (
                    x, x_stride, source, weight, tile_expert, tile_rows, left, low, right, ready, free, num_tiles, num_columns,
                    num_steps, size, weight_rows,
                )),
            ],
            [4, 4],
            [216, 72],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (
                    gl.constexpr(0), out, source, inverse, weight_scale, bias, tile_expert, tile_rows, left, low, right, buffers.index(0),
                    ready, free, num_tiles, num_columns, num_steps, size, weight_rows, BLOCKS, ACTIVATION, LIMIT,
                )),
                (_multiply, (
                    gl.constexpr(1), out, source, inverse, weight_scale, bias, tile_expert, tile_rows, left, low, right, buffers.index(1),
                    ready, free, num_tiles, num_columns, num_steps, size, weight_rows, BLOCKS, ACTIVATION, LIMIT,
                )),
                (_copy, (
                    x, weight, tile_expert, left, low, right, ready, free, num_tiles, num_columns, num_steps, size, weight_rows,
                    gl.constexpr(ACTIVATION is not None),
                )),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip


_launch = Launcher(experts_matmul_kernel)


def takes_blocks(columns: int, rows: int) -> bool:
    """Return whether a scale for each block of so many columns, the same for so many rows, is what half of a tile's columns has."""
    return columns == STEP_BYTES and rows % (COLUMNS // 2) == 0


def can_split(hidden_size: int, size: int) -> bool:
    """Return whether rows of these lengths can be sums of two, or rounded: whole steps of them are fetched."""
    return hidden_size % STEP_BYTES == size % STEP_BYTES == 0


def experts_matmul(
    x: Tensor | SplitRows, weight: Tensor, tile_expert: Tensor, tile_rows: Tensor, num_tiles: Tensor, activation: str | None = None,
    source: Tensor | None = None, weight_scale: Tensor | None = None, bias: Tensor | None = None, limit: float | None = None,
) -> Tensor:  # fmt: skip
    """Each tile of ROWS rows of x by its expert's weight: x @ weight[e].T, or activation(x @ gate.T) * (x @ up.T).

    Each product has its expert's bias added; "swiglu_oai", clamped to `limit`, is as `pelton.ops.moe.ExpertsSpec` says.

    x            [P, K]     fp16 or bf16, P a multiple of ROWS, contiguous; rows of no pair may hold anything
    source       [P] int32  with an activation: row p of the product's input is x[source[p]], for x [T, K] with rows at multiples of 16
                 numbers, in less than 2^31, and K a multiple of STEP
    weight       [E, N, K]  dtype of x, contiguous, K and N multiples of 8; with an activation gate's rows, then up's, N = 2 I. Or
                 float8_e4m3fn, for x of the same rows as `SplitRows`, rounded or not, and K a multiple of 128; weight_scale [E, N, 1]
                 float32 then, or [E, N, K / 128], the same for each 128 rows (of gate, of up)
    bias         [E, N] or None
    tile_expert  [P / ROWS] int32, tile_rows as many: how many rows from a tile's first on are pairs', or more than ROWS; halves
                 without any are not computed. num_tiles [1] int32: how many tiles there are; the others are not computed
    -> [P, N] or [P, I]

    Sums in float32, those of e4m3's products on the device's 14 bits; products (gate, up), the activation and its product with up are
    rounded as in `pelton.ops.reference`.
    """
    num_experts, weight_rows, in_features = weight.shape
    rows, inverse, is_split = (x.rows, x.inverse, not x.is_rounded) if isinstance(x, SplitRows) else (x, None, False)
    size = weight_rows if activation is None else weight_rows // 2
    num_places = rows.shape[0] if source is None else source.shape[0]
    out = torch.empty((num_places, size), dtype=x.dtype, device=rows.device)
    columns = COLUMNS if activation is None else COLUMNS // 2
    tiles = triton.cdiv(num_places, ROWS) * triton.cdiv(size, columns)
    step, num_blocks = STEP_BYTES // weight.element_size(), 1 if weight_scale is None else weight_scale.shape[2]
    lines, tile = gl.NVMMASharedLayout(128, 8 * weight.element_size(), rank=2), gl.NVMMASharedLayout(128, 16, rank=2)
    flat = weight.view(num_experts * weight_rows, in_features)
    _launch(
        (x.dtype, weight.dtype, bias is None or bias.dtype, rows.device, activation, limit, source is None, rows.stride(0) % 16 == 0,
         is_split, num_blocks),
        (min(tiles, num_sms(rows.device)),),
        (
            TensorDescriptor.from_tensor(rows, [ROWS, step], lines) if source is None else rows, source, inverse,
            TensorDescriptor.from_tensor(flat, [columns, step], lines), weight_scale, bias,
            TensorDescriptor.from_tensor(out, [GROUP_ROWS, COLUMNS // 2], tile),
            tile_expert, tile_rows, num_tiles, rows.stride(0), size, in_features, weight_rows,
        ),
        {"IS_SPLIT": is_split, "BLOCKS": num_blocks, "ACTIVATION": activation, "LIMIT": limit},
        num_warps=4,
    )  # fmt: skip
    return out
