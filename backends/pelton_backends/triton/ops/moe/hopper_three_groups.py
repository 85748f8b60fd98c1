"""Products of many tokens' experts for Hopper, in Gluon: a tile is 192 places of one expert, and three warp groups multiply 64 each.

As `hopper`, whose tiles have 128 places, with fewer bytes from L2 for each product: the card is bound by its power. Sums fill the
registers, so no warps are left to copy: each group fetches its own rows two steps ahead, and the first one fetches the weights.
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
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from pelton_backends.triton.launch import Launcher
from pelton_backends.triton.ops.linear.hopper_matmul import activated_tile, store_tile, tile_place
from pelton_backends.triton.ops.moe.hopper import of_rows
from pelton_backends.triton.ops.moe.split import SplitRows
from pelton_backends.triton.runtime import num_sms

if TYPE_CHECKING:
    from torch import Tensor

WARP_GROUPS = 3
GROUP_ROWS = 64
ROWS = WARP_GROUPS * GROUP_ROWS
COLUMNS = 256
STEP_BYTES = 128  # of a row that are fetched together
STAGES = 3  # buffers of 56 KiB
_GROUP_ROWS, _ROWS, _COLUMNS = gl.constexpr(GROUP_ROWS), gl.constexpr(ROWS), gl.constexpr(COLUMNS)
_STEP_BYTES, _STAGES, _WARP_GROUPS = gl.constexpr(STEP_BYTES), gl.constexpr(STAGES), gl.constexpr(WARP_GROUPS)
_HALF = gl.constexpr(COLUMNS // 2)


@gluon.jit
def _tile_ahead(
    INDEX: gl.constexpr, source, tile_expert, tile_rows, tile, num_row_tiles, num_columns, weight_rows, IS_GATED: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Return what a warp group fetches of a tile: the numbers of its rows of x, -1 where no pair has one, or of rows that are sorted
    the first one's; whether it fetches any; and the first of the weight's rows. Behind the last tile it fetches none."""
    is_any = tile < num_row_tiles * num_columns
    num_row_tiles = gl.maximum(num_row_tiles, 1)  # what is read there is of no tile, but in memory
    tile_row, column = tile_place(gl.minimum(tile, num_row_tiles * num_columns - 1), num_row_tiles, num_columns)
    rows = tile_row * _ROWS + INDEX * _GROUP_ROWS
    count = gl.load(tile_rows + tile_row) - INDEX * _GROUP_ROWS
    if source is not None:
        places = gl.arange(0, _GROUP_ROWS, gl.SliceLayout(1, LAYOUT))
        rows = gl.load(source + rows + places, mask=places < count, other=-1)
    weight_row = 0
    if INDEX == 0:
        weight_row = gl.load(tile_expert + tile_row) * weight_rows + column * (_HALF if IS_GATED else _COLUMNS)
    else:
        is_any = is_any & (count > 0)
    return rows, is_any, weight_row


@gluon.jit
def _fetch(
    INDEX: gl.constexpr, x, x_stride, source, weight, tile_expert, tile_rows, left, right, landed, ready, free, num_row_tiles,
    num_columns, num_steps, size, weight_rows, step, tile, k, rows, is_any, weight_row, IS_GATED: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Fetch step k of a tile, a warp group's `step` of all: numbers of its rows of x, in the first group of the tile's rows of the
    weight too. Return the tile and the step of it that come then, and what `_tile_ahead` returns of that."""
    STEP: gl.constexpr = right.shape[2]
    stage = step % _STAGES
    own, own_barrier = left.index(stage * _WARP_GROUPS + INDEX), landed.index(stage * _WARP_GROUPS + INDEX)
    if is_any:
        if source is not None:
            lane = gl.arange(0, STEP, gl.SliceLayout(0, LAYOUT))
            offsets = (rows * x_stride)[:, None] + lane[None, :]
            async_copy.async_copy_global_to_shared(own, x + k * STEP + offsets, mask=(rows >= 0)[:, None])
        else:
            mbarrier.expect(own_barrier, _GROUP_ROWS * _STEP_BYTES)
            tma.async_copy_global_to_shared(x, [rows, k * STEP], own_barrier, own)
        if INDEX == 0:
            barrier, columns = ready.index(stage), right.index(stage)
            mbarrier.wait(free.index(stage), ((step // _STAGES) & 1) ^ 1)
            mbarrier.expect(barrier, _COLUMNS * _STEP_BYTES)
            if IS_GATED:  # 128 columns of the result: as many rows of gate, and as many of up
                gate, up = columns.slice(0, _HALF), columns.slice(_HALF, _HALF)
                tma.async_copy_global_to_shared(weight, [weight_row, k * STEP], barrier, gate)
                tma.async_copy_global_to_shared(weight, [weight_row + size, k * STEP], barrier, up)
            else:
                tma.async_copy_global_to_shared(weight, [weight_row, k * STEP], barrier, columns)
    elif source is None:
        mbarrier.arrive(own_barrier, count=1)
    if source is not None:
        async_copy.commit_group()
    k += 1
    if k == num_steps:
        tile, k = tile + gl.num_programs(0), 0
        rows, is_any, weight_row = _tile_ahead(
            INDEX, source, tile_expert, tile_rows, tile, num_row_tiles, num_columns, weight_rows, IS_GATED, LAYOUT
        )
    return tile, k, rows, is_any, weight_row


@gluon.jit
def _put_scales(buffer, weight_scale, weight_row, column, size, IS_GATED: gl.constexpr):
    """Put the scales of a tile's 256 rows of the weight into shared memory: registers have no room for as many addresses."""
    columns = gl.arange(0, _HALF, gl.BlockedLayout([1], [32], [4], [0]))
    if IS_GATED:
        first = gl.minimum(column * _HALF + columns, size - 1)
        second = first + size
    else:
        first = gl.minimum(column * _COLUMNS + columns, size - 1)
        second = gl.minimum(column * _COLUMNS + _HALF + columns, size - 1)
    buffer.slice(0, _HALF).store(gl.load(weight_scale + weight_row + first))
    buffer.slice(_HALF, _HALF).store(gl.load(weight_scale + weight_row + second))
    gl.thread_barrier()


@gluon.jit
def _scaled(half, scales, of_rows):
    """Return sums of 128 columns, times the scales of the weight's rows, in shared memory, and those of the rows."""
    of_columns = scales.load(gl.SliceLayout(0, half.type.layout))
    return half * of_columns[None, :] * of_rows[:, None]


@gluon.jit
def _multiply(
    INDEX: gl.constexpr, x, x_stride, source, inverse, weight, weight_scale, out, tile_expert, tile_rows, left, right, buffer, scales,
    landed, ready, free, num_row_tiles, num_columns, num_steps, size, weight_rows, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """A warp group: its 64 rows of every tile, unless no pair has one of them. It fetches two steps ahead, and into the next tile."""
    IS_GATHERED: gl.constexpr = source is not None
    IS_GATED: gl.constexpr = ACTIVATION is not None
    HAS_SCALES: gl.constexpr = left.dtype.primitive_bitwidth == 8
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _COLUMNS, 32 if HAS_SCALES else 16])
    LANES: gl.constexpr = gl.BlockedLayout([1, left.shape[2] // 8], [4, 8], [4, 1], [1, 0])
    dtype: gl.constexpr = out.dtype
    next_tile, next_k = gl.program_id(0), 0
    rows, is_fetched, weight_row = _tile_ahead(
        INDEX, source, tile_expert, tile_rows, next_tile, num_row_tiles, num_columns, weight_rows, IS_GATED, LANES
    )
    for early in gl.static_range(_STAGES - 1):
        next_tile, next_k, rows, is_fetched, weight_row = _fetch(
            INDEX, x, x_stride, source, weight, tile_expert, tile_rows, left, right, landed, ready, free, num_row_tiles, num_columns,
            num_steps, size, weight_rows, early, next_tile, next_k, rows, is_fetched, weight_row, IS_GATED, LANES,
        )  # fmt: skip
    step = 0
    for tile in range(gl.program_id(0), num_row_tiles * num_columns, gl.num_programs(0)):
        tile_row, column = tile_place(tile, num_row_tiles, num_columns)
        is_any = True
        steps = num_steps
        if INDEX > 0:
            is_any = gl.load(tile_rows + tile_row) > INDEX * _GROUP_ROWS
            steps = gl.where(is_any, num_steps, 0)
            for _ in range(steps, num_steps):
                mbarrier.wait(ready.index(step % _STAGES), (step // _STAGES) & 1)
                gl.thread_barrier()
                mbarrier.arrive(free.index(step % _STAGES), count=1)
                next_tile, next_k, rows, is_fetched, weight_row = _fetch(
                    INDEX, x, x_stride, source, weight, tile_expert, tile_rows, left, right, landed, ready, free, num_row_tiles,
                    num_columns, num_steps, size, weight_rows, step + _STAGES - 1, next_tile, next_k, rows, is_fetched, weight_row,
                    IS_GATED, LANES,
                )  # fmt: skip
                step += 1
        total = gl.zeros([_GROUP_ROWS, _COLUMNS], gl.float32, LAYOUT)
        for k in range(steps):
            stage = step % _STAGES
            if IS_GATHERED:
                async_copy.wait_group(_STAGES - 2)
                gl.thread_barrier()
                fence_async_shared()  # threads wrote these rows, not the copy engine
            else:
                mbarrier.wait(landed.index(stage * _WARP_GROUPS + INDEX), (step // _STAGES) & 1)
            mbarrier.wait(ready.index(stage), (step // _STAGES) & 1)
            own = left.index(stage * _WARP_GROUPS + INDEX)
            total = warpgroup_mma(own, right.index(stage).permute((1, 0)), total, use_acc=k > 0, is_async=True)
            total = warpgroup_mma_wait(1, deps=[total])
            gl.thread_barrier()  # every warp is done with the step before
            mbarrier.arrive(free.index((step + _STAGES - 1) % _STAGES), count=1, pred=k > 0)
            next_tile, next_k, rows, is_fetched, weight_row = _fetch(
                INDEX, x, x_stride, source, weight, tile_expert, tile_rows, left, right, landed, ready, free, num_row_tiles, num_columns,
                num_steps, size, weight_rows, step + _STAGES - 1, next_tile, next_k, rows, is_fetched, weight_row, IS_GATED, LANES,
            )  # fmt: skip
            step += 1
        total = warpgroup_mma_wait(0, deps=[total])
        gl.thread_barrier()
        mbarrier.arrive(free.index((step + _STAGES - 1) % _STAGES), count=1, pred=is_any)
        if is_any:
            row = tile_row * _ROWS + INDEX * _GROUP_ROWS
            first, second = gl.split(gl.permute(gl.reshape(total, (_GROUP_ROWS, 2, _HALF)), (0, 2, 1)))
            if HAS_SCALES:
                _put_scales(scales, weight_scale, gl.load(tile_expert + tile_row) * weight_rows, column, size, IS_GATED)
                scales_of_rows = of_rows(
                    inverse, source, tile_rows, tile_row, INDEX, _ROWS, gl.SliceLayout(1, first.type.layout)
                )
                first = _scaled(first, scales.slice(0, _HALF), scales_of_rows)
                second = _scaled(second, scales.slice(_HALF, _HALF), scales_of_rows)
            if IS_GATED:
                gate, up = first.to(dtype).to(gl.float32), second.to(dtype).to(gl.float32)
                store_tile(out, buffer, activated_tile(gate, up, ACTIVATION, dtype), row, column * _HALF)
            else:
                store_tile(out, buffer, first.to(dtype), row, column * _COLUMNS)
                store_tile(out, buffer, second.to(dtype), row, column * _COLUMNS + _HALF)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["size", "in_features", "weight_rows"])
def three_groups_kernel(
    x, source, inverse, weight, weight_scale, out, tile_expert, tile_rows, num_tiles_ptr, x_stride, size, in_features, weight_rows,
    ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Persistent: programs take tiles in turn, in the order of `tile_place`. `size` columns of the result, `weight_rows` of the weight
    an expert."""
    BITS: gl.constexpr = weight.dtype.primitive_bitwidth
    STEP: gl.constexpr = _STEP_BYTES * 8 // BITS
    TILE_COLUMNS: gl.constexpr = _COLUMNS if ACTIVATION is None else _HALF
    LINES: gl.constexpr = gl.NVMMASharedLayout(128, BITS, rank=2)
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    num_columns = (size + TILE_COLUMNS - 1) // TILE_COLUMNS
    num_row_tiles = gl.load(num_tiles_ptr)
    num_steps = (in_features + STEP - 1) // STEP
    left = gl.allocate_shared_memory(weight.dtype, [_STAGES * _WARP_GROUPS, _GROUP_ROWS, STEP], LINES)
    right = gl.allocate_shared_memory(weight.dtype, [_STAGES, _COLUMNS, STEP], LINES)
    buffers = gl.allocate_shared_memory(out.dtype, [_WARP_GROUPS, _GROUP_ROWS, _HALF], TILE)
    scales = gl.allocate_shared_memory(gl.float32, [_WARP_GROUPS, _COLUMNS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    landed = gl.allocate_shared_memory(gl.int64, [_STAGES * _WARP_GROUPS, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(_STAGES):
        for group in gl.static_range(_WARP_GROUPS):
            mbarrier.init(landed.index(stage * _WARP_GROUPS + group), count=1)
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=_WARP_GROUPS)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (
                gl.constexpr(0), x, x_stride, source, inverse, weight, weight_scale, out, tile_expert, tile_rows, left, right,
                buffers.index(0), scales.index(0), landed, ready, free, num_row_tiles, num_columns, num_steps, size, weight_rows,
                ACTIVATION,
            )),
            (_multiply, (
                gl.constexpr(1), x, x_stride, source, inverse, weight, weight_scale, out, tile_expert, tile_rows, left, right,
                buffers.index(1), scales.index(1), landed, ready, free, num_row_tiles, num_columns, num_steps, size, weight_rows,
                ACTIVATION,
            )),
            (_multiply, (
                gl.constexpr(2), x, x_stride, source, inverse, weight, weight_scale, out, tile_expert, tile_rows, left, right,
                buffers.index(2), scales.index(2), landed, ready, free, num_row_tiles, num_columns, num_steps, size, weight_rows,
                ACTIVATION,
            )),
        ],
        [4, 4],
        [168, 168],
    )  # fmt: skip


_launch = Launcher(three_groups_kernel)


def experts_matmul(
    x: Tensor | SplitRows, weight: Tensor, tile_expert: Tensor, tile_rows: Tensor, num_tiles: Tensor, activation: str | None = None,
    source: Tensor | None = None, weight_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """As `hopper.experts_matmul`, with this file's ROWS, and with weights in e4m3 for rounded rows alone, weight_scale [E, N, 1]."""
    num_experts, weight_rows, in_features = weight.shape
    rows, inverse = (x.rows, x.inverse) if isinstance(x, SplitRows) else (x, None)
    size = weight_rows if activation is None else weight_rows // 2
    num_places = rows.shape[0] if source is None else source.shape[0]
    out = torch.empty((num_places, size), dtype=x.dtype, device=rows.device)
    columns = COLUMNS if activation is None else COLUMNS // 2
    tiles = triton.cdiv(num_places, ROWS) * triton.cdiv(size, columns)
    step = STEP_BYTES // weight.element_size()
    lines, tile = gl.NVMMASharedLayout(128, 8 * weight.element_size(), rank=2), gl.NVMMASharedLayout(128, 16, rank=2)
    flat = weight.view(num_experts * weight_rows, in_features)
    _launch(
        (x.dtype, weight.dtype, rows.device, activation, source is None, rows.stride(0) % 16 == 0),
        (min(tiles, num_sms(rows.device)),),
        (
            TensorDescriptor.from_tensor(rows, [GROUP_ROWS, step], lines) if source is None else rows, source, inverse,
            TensorDescriptor.from_tensor(flat, [columns, step], lines), weight_scale,
            TensorDescriptor.from_tensor(out, [GROUP_ROWS, COLUMNS // 2], tile),
            tile_expert, tile_rows, num_tiles, rows.stride(0), size, in_features, weight_rows,
        ),
        {"ACTIVATION": activation},
        num_warps=4,
    )  # fmt: skip
    return out
