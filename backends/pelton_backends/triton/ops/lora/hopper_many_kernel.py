"""`hopper_matmul`'s kernel with adapters: a tile's sums are given B A x of its rows before they are rounded, and before the activation.

A x is there when the product begins. To a tile, B of each adapter that its rows have is a few more columns of the weight, which come
through the same buffers behind those of the weight; each warp group keeps A x of its rows in registers, zeros where a row has another
adapter or none. So what a step has of adapters costs a tile nothing that its own rows do not have, and the product is neither written
nor read once more.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from pelton_backends.triton.ops.linear import hopper_matmul
from pelton_backends.triton.ops.linear.hopper_matmul import activated_tile, fetch_step, piece_of, store_tile, tile_place

_ROWS, _COLUMNS, _STEP = (
    gl.constexpr(hopper_matmul.ROWS),
    gl.constexpr(hopper_matmul.COLUMNS),
    gl.constexpr(hopper_matmul.STEP),
)
_STAGES, _WARP_GROUPS = gl.constexpr(hopper_matmul.STAGES), gl.constexpr(hopper_matmul.WARP_GROUPS)
_HALF = gl.constexpr(hopper_matmul.COLUMNS // 2)
_TILE_ROWS = gl.constexpr(hopper_matmul.WARP_GROUPS * hopper_matmul.ROWS)
_STEP_BYTES = gl.constexpr(hopper_matmul.COLUMNS * hopper_matmul.STEP * 2)


@gluon.jit
def _fetch_b(
    b, pieces, barrier, stage, slots, counts, row, column, step, num_slots, size,
    RANK: gl.constexpr, IS_GATED: gl.constexpr,
):  # fmt: skip
    """B of the tile's columns, of the adapters that a step has; zeros past the last one, and for gate and up where they cross."""
    PIECES: gl.constexpr = _STEP // RANK
    mbarrier.expect(barrier, _STEP_BYTES)
    count = gl.load(counts + row)
    for i in gl.static_range(PIECES):
        if IS_GATED:
            index = (step * PIECES + i) // 2
            is_up = (step * PIECES + i) % 2
            slot = gl.load(slots + row * _TILE_ROWS + index, mask=index < count, other=num_slots)
            gate_slot = gl.where(is_up == 0, slot, num_slots)
            up_slot = gl.where(is_up == 0, num_slots, slot)
            piece = (stage * PIECES + i) * 2
            tma.async_copy_global_to_shared(b, [gate_slot, column * _HALF, 0], barrier, pieces.index(piece))
            tma.async_copy_global_to_shared(b, [up_slot, size + column * _HALF, 0], barrier, pieces.index(piece + 1))
        else:
            index = step * PIECES + i
            slot = gl.load(slots + row * _TILE_ROWS + index, mask=index < count, other=num_slots)
            tma.async_copy_global_to_shared(b, [slot, column * _COLUMNS, 0], barrier, pieces.index(stage * PIECES + i))


@gluon.jit
def _piece_with_added(
    turn, counts, num_row_tiles, num_column_tiles, num_steps, num_halved, SIDES: gl.constexpr, PIECES: gl.constexpr
):
    """A program's turn: its tile, the steps that it does of the weight, and where those of adapters end."""
    num_tiles = num_row_tiles * num_column_tiles
    tile, begin, end = piece_of(turn, num_tiles, num_halved, num_steps)
    row, column = tile_place(tile, num_row_tiles, num_column_tiles)
    count = gl.load(counts + gl.minimum(row, num_row_tiles - 1))
    num_added = (count * SIDES + PIECES - 1) // PIECES
    return tile, row, column, begin, end, end + gl.where(end == num_steps, num_added, 0)


@gluon.jit
def _fetch_ahead(
    step, turn, tile, row, column, k, end, last, x, weight, b, slots, counts, left, right, b_pieces, ready, free, num_row_tiles,
    num_column_tiles, size, num_steps, num_halved, num_slots, RANK: gl.constexpr, IS_GATED: gl.constexpr,
):  # fmt: skip
    """Let step k of a tile come into the buffers that all have done with, and return what is to come next."""
    if tile < num_row_tiles * num_column_tiles:
        later = step + _STAGES - 1
        place = later % _STAGES
        mbarrier.wait(free.index(place), ((later // _STAGES) & 1) ^ 1)
        barrier = ready.index(place)
        if k < end:
            fetch_step(x, weight, left, right, barrier, place, row, column, k, size, IS_GATED)
        else:
            _fetch_b(b, b_pieces, barrier, place, slots, counts, row, column, k - end, num_slots, size, RANK, IS_GATED)
    k += 1
    if k == last:
        turn += 1
        tile, row, column, k, end, last = _piece_with_added(
            turn, counts, num_row_tiles, num_column_tiles, num_steps, num_halved, 2 if IS_GATED else 1, _STEP // RANK
        )
    return turn, tile, row, column, k, end, last


@gluon.jit
def _multiply(
    INDEX: gl.constexpr, x, weight, b, out, parts, arrived, low, token_slots, slots, counts, left, right, buffer, ready, free,
    num_rows, num_row_tiles, num_column_tiles, size, num_steps, num_halved, num_slots,
    ACTIVATION: gl.constexpr, RANK: gl.constexpr, NUM_PARTS: gl.constexpr, SECOND: gl.constexpr, THIRD: gl.constexpr,
):  # fmt: skip
    """As `hopper_matmul._multiply`."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _COLUMNS, 16])
    LOW: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    IS_GATED: gl.constexpr = ACTIVATION is not None
    SIDES: gl.constexpr = 2 if IS_GATED else 1
    PIECES: gl.constexpr = _STEP // RANK
    dtype: gl.constexpr = out.dtype
    b_buffers = right._reinterpret(
        x.dtype, [_STAGES * PIECES, _COLUMNS, RANK], gl.NVMMASharedLayout(2 * RANK, 16, rank=2)
    )
    b_pieces = right._reinterpret(x.dtype, [_STAGES * PIECES * SIDES] + b.block_type.shape, b.layout)  # noqa: RUF005
    num_tiles = num_row_tiles * num_column_tiles
    next_turn = 0
    next_tile, next_row, next_column, next_k, next_end, next_last = _piece_with_added(
        0, counts, num_row_tiles, num_column_tiles, num_steps, num_halved, SIDES, PIECES
    )
    if INDEX == 0:
        for early in gl.static_range(_STAGES - 1):  # no piece is so short that it ends with them
            if next_tile < num_tiles:
                barrier = ready.index(early)
                fetch_step(x, weight, left, right, barrier, early, next_row, next_column, next_k, size, IS_GATED)
            next_k += 1
    step = 0
    turn = 0
    tile, row_tile, column, begin, end, last = _piece_with_added(
        0, counts, num_row_tiles, num_column_tiles, num_steps, num_halved, SIDES, PIECES
    )
    while tile < num_tiles:
        row = (row_tile * _WARP_GROUPS + INDEX) * _ROWS
        total = gl.zeros([_ROWS, _COLUMNS], gl.float32, LAYOUT)
        for k in range(begin, end):
            stage = step % _STAGES
            mbarrier.wait(ready.index(stage), (step // _STAGES) & 1)
            rows = left.index(stage * _WARP_GROUPS + INDEX)
            total = warpgroup_mma(rows, right.index(stage).permute((1, 0)), total, use_acc=k != begin, is_async=True)
            total = warpgroup_mma_wait(1, deps=[total])
            gl.thread_barrier()  # every warp is done with the step before
            mbarrier.arrive(free.index((step + _STAGES - 1) % _STAGES), count=1, pred=k != begin)
            if INDEX == 0:
                next_turn, next_tile, next_row, next_column, next_k, next_end, next_last = _fetch_ahead(
                    step, next_turn, next_tile, next_row, next_column, next_k, next_end, next_last, x, weight, b, slots, counts, left,
                    right, b_pieces, ready, free, num_row_tiles, num_column_tiles, size, num_steps, num_halved, num_slots, RANK, IS_GATED,
                )  # fmt: skip
            step += 1
        total = warpgroup_mma_wait(0, deps=[total])
        gl.thread_barrier()
        mbarrier.arrive(free.index((step + _STAGES - 1) % _STAGES), count=1)

        tokens = row + gl.arange(0, _ROWS, gl.SliceLayout(1, LOW))
        ranks = gl.arange(0, RANK, gl.SliceLayout(0, LOW))
        slot_of = gl.load(token_slots + tokens, mask=tokens < num_rows, other=-1)
        if IS_GATED:
            part = 0
        else:
            part = (column * _COLUMNS >= SECOND).to(gl.int32) + (column * _COLUMNS >= THIRD).to(gl.int32)
        own = low + part * RANK + (tokens * (NUM_PARTS * RANK))[:, None] + ranks[None, :]
        for added in range(last - end):
            stage = step % _STAGES
            mbarrier.wait(ready.index(stage), (step // _STAGES) & 1)
            for i in gl.static_range(PIECES):
                index = (added * PIECES + i) // SIDES
                slot = gl.load(slots + row_tile * _TILE_ROWS + index, mask=index < _TILE_ROWS, other=0)
                side = (added * PIECES + i) % SIDES
                value = gl.load(own + side * RANK, mask=(slot_of == slot)[:, None], other=0.0)
                total = warpgroup_mma(value, b_buffers.index(stage * PIECES + i).permute((1, 0)), total)
            gl.thread_barrier()
            mbarrier.arrive(free.index(stage), count=1)
            if INDEX == 0:
                next_turn, next_tile, next_row, next_column, next_k, next_end, next_last = _fetch_ahead(
                    step, next_turn, next_tile, next_row, next_column, next_k, next_end, next_last, x, weight, b, slots, counts, left,
                    right, b_pieces, ready, free, num_row_tiles, num_column_tiles, size, num_steps, num_halved, num_slots, RANK, IS_GATED,
                )  # fmt: skip
            step += 1

        slot = (tile - (num_tiles - num_halved)) * _WARP_GROUPS + INDEX
        cells = (
            gl.arange(0, _ROWS, gl.SliceLayout(1, LAYOUT))[:, None] * _COLUMNS
            + gl.arange(0, _COLUMNS, gl.SliceLayout(0, LAYOUT))[None, :]
        )
        if end < num_steps:  # the first half of a tile: its sums are for the program of the second
            gl.store(parts + slot * (_ROWS * _COLUMNS) + cells, total)
            gl.thread_barrier()  # all threads' stores come before the one thread's increment, which releases them
            gl.atomic_add(arrived + slot, 1, sem="release", scope="gpu")
        else:
            if begin > 0:
                # Programs start in the order of their numbers: the one that is waited for is not behind this one.
                seen = gl.atomic_add(arrived + slot, 0, sem="acquire", scope="gpu")
                while seen == 0:
                    seen = gl.atomic_add(arrived + slot, 0, sem="acquire", scope="gpu")
                total += gl.load(parts + slot * (_ROWS * _COLUMNS) + cells, cache_modifier=".cg")
            first, second = gl.split(gl.permute(gl.reshape(total, (_ROWS, 2, _HALF)), (0, 2, 1)))
            if ACTIVATION is None:
                store_tile(out, buffer, first.to(dtype), row, column * _COLUMNS)
                store_tile(out, buffer, second.to(dtype), row, column * _COLUMNS + _HALF)
            else:
                gate, up = first.to(dtype).to(gl.float32), second.to(dtype).to(gl.float32)
                store_tile(out, buffer, activated_tile(gate, up, ACTIVATION, dtype), row, column * _HALF)
        turn += 1
        tile, row_tile, column, begin, end, last = _piece_with_added(
            turn, counts, num_row_tiles, num_column_tiles, num_steps, num_halved, SIDES, PIECES
        )
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_rows", "size", "in_features", "num_halved", "num_slots"])
def adapted_matmul_kernel(
    x, weight, b, out, parts, arrived, low, token_slots, slots, counts, num_rows, size, in_features, num_halved, num_slots,
    ACTIVATION: gl.constexpr, RANK: gl.constexpr, NUM_PARTS: gl.constexpr, SECOND: gl.constexpr, THIRD: gl.constexpr,
):  # fmt: skip
    """As `hopper_matmul_kernel`, and

    b            [num_slots, N, RANK] in boxes of a tile's columns, of gate and up each its half
    low          [T, NUM_PARTS, RANK] of x's dtype: A x of each row's own adapter; undefined for rows without one
    token_slots  [T] int32
    slots        [row tiles, 192] int32: the adapters that a tile's rows have; counts [row tiles]: how many
    SECOND       the first column of the second part, a tile's first; THIRD of the third
    """
    TILE_COLUMNS: gl.constexpr = _COLUMNS if ACTIVATION is None else _HALF
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    num_row_tiles = (num_rows + _TILE_ROWS - 1) // _TILE_ROWS
    num_column_tiles = (size + TILE_COLUMNS - 1) // TILE_COLUMNS
    num_steps = (in_features + _STEP - 1) // _STEP
    left = gl.allocate_shared_memory(x.dtype, [_STAGES * _WARP_GROUPS, _ROWS, _STEP], TILE)
    right = gl.allocate_shared_memory(x.dtype, [_STAGES, _COLUMNS, _STEP], TILE)
    buffers = gl.allocate_shared_memory(x.dtype, [_WARP_GROUPS, _ROWS, _HALF], TILE)
    ready = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(_STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=_WARP_GROUPS)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (
                gl.constexpr(0), x, weight, b, out, parts, arrived, low, token_slots, slots, counts, left, right, buffers.index(0),
                ready, free, num_rows, num_row_tiles, num_column_tiles, size, num_steps, num_halved, num_slots,
                ACTIVATION, RANK, NUM_PARTS, SECOND, THIRD,
            )),
            (_multiply, (
                gl.constexpr(1), x, weight, b, out, parts, arrived, low, token_slots, slots, counts, left, right, buffers.index(1),
                ready, free, num_rows, num_row_tiles, num_column_tiles, size, num_steps, num_halved, num_slots,
                ACTIVATION, RANK, NUM_PARTS, SECOND, THIRD,
            )),
            (_multiply, (
                gl.constexpr(2), x, weight, b, out, parts, arrived, low, token_slots, slots, counts, left, right, buffers.index(2),
                ready, free, num_rows, num_row_tiles, num_column_tiles, size, num_steps, num_halved, num_slots,
                ACTIVATION, RANK, NUM_PARTS, SECOND, THIRD,
            )),
        ],
        [4, 4],
        [168, 168],
    )  # fmt: skip
