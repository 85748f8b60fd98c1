"""Products of many rows in e4m3 and weights in e4m3 whose blocks have scales, in Gluon: one warp copies, two warp groups multiply.

Tensor cores keep some 14 bits of their own sums and cut off the rest, which adds up over a long row whose products have one sign: sums of
14,336 numbers that were alike on both sides came out 16 % too small. So they add up 128 columns alone, a block, whose sums meet the block's
scale in float32. While one warp group does that the other one multiplies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from pelton_backends.triton.launch import Launcher, alignment
from pelton_backends.triton.ops.linear.hopper_matmul import activated_tile, store_tile, tile_place
from pelton_backends.triton.runtime import num_sms

if TYPE_CHECKING:
    from torch import Tensor

GROUP_ROWS, ROWS = 64, 128  # of a warp group, and of a tile
COLUMNS = 256
BLOCK = 128  # rows and columns that have one scale
STAGES = 4  # buffers of 48 KiB
GROUP = 16  # neighbouring row tiles that share a weight tile in L2: 132 tiles at a time read the fewest bytes then
_GROUP_ROWS, _ROWS, _COLUMNS = gl.constexpr(GROUP_ROWS), gl.constexpr(ROWS), gl.constexpr(COLUMNS)
_BLOCK, _STAGES, _GROUP = gl.constexpr(BLOCK), gl.constexpr(STAGES), gl.constexpr(GROUP)
_STEP_BYTES = gl.constexpr((ROWS + COLUMNS) * BLOCK)


@gluon.jit
def _product(rows, low, columns, LAYOUT: gl.constexpr, IS_SPLIT: gl.constexpr):
    """Return rows [64, 128] times columns [128, 128]^T: [64, 128] float32. IS_SPLIT: rows + low."""
    part = warpgroup_mma_init(gl.zeros([_GROUP_ROWS, _BLOCK], gl.float32, LAYOUT))
    part = warpgroup_mma(rows, columns.permute((1, 0)), part, use_acc=False, is_async=True)
    if IS_SPLIT:
        part = warpgroup_mma(low, columns.permute((1, 0)), part, is_async=True)
    return warpgroup_mma_wait(0, deps=(part,))


@gluon.jit
def add_block(first, second, rows, low, columns, first_scale, second_scale, IS_SPLIT: gl.constexpr):
    """Return sums [64, 128] float32 of both halves of 256 columns, with a block's products times their scales added."""
    LAYOUT: gl.constexpr = first.type.layout
    first += _product(rows, low, columns.slice(0, _BLOCK), LAYOUT, IS_SPLIT) * first_scale
    second += _product(rows, low, columns.slice(_BLOCK, _BLOCK), LAYOUT, IS_SPLIT) * second_scale
    return first, second


@gluon.jit
def _copy(
    x, weight, left, right, ready, free, num_row_tiles, num_column_tiles, num_steps, size, IS_GATED: gl.constexpr
):  # fmt: skip
    """The copying warp, as far ahead as there are buffers, and into the next tile."""
    step = 0
    for tile in range(gl.program_id(0), num_row_tiles * num_column_tiles, gl.num_programs(0)):
        row, column = tile_place(tile, num_row_tiles, num_column_tiles, _GROUP)
        for k in range(num_steps):
            stage = step % _STAGES
            barrier = ready.index(stage)
            mbarrier.wait(free.index(stage), ((step // _STAGES) & 1) ^ 1)
            mbarrier.expect(barrier, _STEP_BYTES)
            tma.async_copy_global_to_shared(x, [row * _ROWS, k * _BLOCK], barrier, left.index(stage))
            if IS_GATED:  # 128 columns of the result: as many rows of gate, and as many of up
                gate, up = right.index(stage).slice(0, _BLOCK), right.index(stage).slice(_BLOCK, _BLOCK)
                tma.async_copy_global_to_shared(weight, [column * _BLOCK, k * _BLOCK], barrier, gate)
                tma.async_copy_global_to_shared(weight, [size + column * _BLOCK, k * _BLOCK], barrier, up)
            else:
                tma.async_copy_global_to_shared(weight, [column * _COLUMNS, k * _BLOCK], barrier, right.index(stage))
            step += 1


@gluon.jit
def _multiply(
    INDEX: gl.constexpr, out, x_scale, weight_scale, left, right, buffer, ready, free, num_row_tiles, num_column_tiles, num_steps,
    num_rows, size, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """A warp group: its 64 rows of every tile, unless they are all beyond the last one."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _BLOCK, 32])
    IS_GATED: gl.constexpr = ACTIVATION is not None
    dtype: gl.constexpr = out.dtype
    step = 0
    for tile in range(gl.program_id(0), num_row_tiles * num_column_tiles, gl.num_programs(0)):
        row, column = tile_place(tile, num_row_tiles, num_column_tiles, _GROUP)
        row = row * _ROWS + INDEX * _GROUP_ROWS
        place = column * (_BLOCK if IS_GATED else _COLUMNS)
        other = place + size if IS_GATED else gl.minimum(place + _BLOCK, size - 1)
        first_scales, second_scales = weight_scale + place * num_steps, weight_scale + other * num_steps
        first = gl.zeros([_GROUP_ROWS, _BLOCK], gl.float32, LAYOUT)
        second = gl.zeros([_GROUP_ROWS, _BLOCK], gl.float32, LAYOUT)
        steps = gl.where(row < num_rows, num_steps, 0)
        for _ in range(steps, num_steps):
            mbarrier.wait(ready.index(step % _STAGES), (step // _STAGES) & 1)
            gl.thread_barrier()
            mbarrier.arrive(free.index(step % _STAGES), count=1)
            step += 1
        for k in range(steps):
            stage = step % _STAGES
            first_scale, second_scale = gl.load(first_scales + k), gl.load(second_scales + k)
            mbarrier.wait(ready.index(stage), (step // _STAGES) & 1)
            rows = left.index(stage).slice(INDEX * _GROUP_ROWS, _GROUP_ROWS)
            first, second = add_block(first, second, rows, None, right.index(stage), first_scale, second_scale, False)
            gl.thread_barrier()  # every warp is done with the step
            mbarrier.arrive(free.index(stage), count=1)
            step += 1
        if steps > 0:
            tokens = gl.minimum(row + gl.arange(0, _GROUP_ROWS, gl.SliceLayout(1, LAYOUT)), num_rows - 1)
            of_rows = gl.load(x_scale + tokens)[:, None]
            first, second = first * of_rows, second * of_rows
            if IS_GATED:
                gate, up = first.to(dtype).to(gl.float32), second.to(dtype).to(gl.float32)
                store_tile(out, buffer, activated_tile(gate, up, ACTIVATION, dtype), row, place)
            else:
                store_tile(out, buffer, first.to(dtype), row, place)
                store_tile(out, buffer, second.to(dtype), row, place + _BLOCK)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_rows", "size", "num_steps"])
def many_blocks_kernel(x, weight, x_scale, weight_scale, out, num_rows, size, num_steps, ACTIVATION: gl.constexpr):
    """Persistent: programs take tiles in turn. `size` columns of the result, `num_steps` blocks of a row."""
    TILE_COLUMNS: gl.constexpr = _COLUMNS if ACTIVATION is None else _BLOCK
    num_row_tiles = (num_rows + _ROWS - 1) // _ROWS
    num_column_tiles = (size + TILE_COLUMNS - 1) // TILE_COLUMNS
    left = gl.allocate_shared_memory(x.dtype, [_STAGES, _ROWS, _BLOCK], x.layout)
    right = gl.allocate_shared_memory(x.dtype, [_STAGES, _COLUMNS, _BLOCK], x.layout)
    buffers = gl.allocate_shared_memory(out.dtype, [2, _GROUP_ROWS, _BLOCK], out.layout)
    ready = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(_STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (
                gl.constexpr(0), out, x_scale, weight_scale, left, right, buffers.index(0), ready, free, num_row_tiles, num_column_tiles,
                num_steps, num_rows, size, ACTIVATION,
            )),
            (_multiply, (
                gl.constexpr(1), out, x_scale, weight_scale, left, right, buffers.index(1), ready, free, num_row_tiles, num_column_tiles,
                num_steps, num_rows, size, ACTIVATION,
            )),
            (_copy, (
                x, weight, left, right, ready, free, num_row_tiles, num_column_tiles, num_steps, size,
                gl.constexpr(ACTIVATION is not None),
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


_launch = Launcher(many_blocks_kernel)


def many_blocks_matmul(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, activation: str | None, dtype: torch.dtype
) -> Tensor:
    """x @ weight.T, or activation(x @ gate.T) * (x @ up.T), of numbers in float8_e4m3fn that have scales.

    x [T, K], K a multiple of 128, rows at multiples of 16 bytes; x_scale [T] float32
    weight [N, K] contiguous, N a multiple of 16; with an activation gate's rows, then up's, N = 2 I
    weight_scale [N, K / 128] float32, contiguous, the same for each 128 rows (of gate, and of up)
    -> [T, N] or [T, I] of dtype, which has two bytes

    Sums in float32, but for those of a block's 128 columns, as the tensor cores make them. Products (gate, up), the activation and its
    product with up are rounded as in `pelton.ops.reference`.
    """
    num_rows, in_features = x.shape
    size = weight.shape[0] if activation is None else weight.shape[0] // 2
    out = torch.empty((num_rows, size), dtype=dtype, device=x.device)
    if num_rows == 0:
        return out
    columns = COLUMNS if activation is None else COLUMNS // 2
    tile, lines = gl.NVMMASharedLayout(128, 16, rank=2), gl.NVMMASharedLayout(128, 8, rank=2)
    tiles = triton.cdiv(num_rows, ROWS) * triton.cdiv(size, columns)
    _launch(
        (dtype, x.device, activation, alignment(weight_scale)),
        (min(tiles, num_sms(x.device)),),
        (
            TensorDescriptor.from_tensor(x, [ROWS, BLOCK], lines), TensorDescriptor.from_tensor(weight, [columns, BLOCK], lines),
            x_scale, weight_scale, TensorDescriptor.from_tensor(out, [GROUP_ROWS, BLOCK], tile), num_rows, size, in_features // BLOCK,
        ),
        {"ACTIVATION": activation},
        num_warps=4,
    )  # fmt: skip
    return out
