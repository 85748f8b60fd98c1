"""Products of many rows for Hopper, in Gluon: three warp groups multiply, and the first of them fetches for all.

gate and up are one product whose epilogue is the activation: [T, 2 I] is never written. Numbers have two bytes, or are float8_e4m3fn with
scales.

Of two ranks that will add their results up, each has the copy engine write the other's half of its tiles to the other's memory too, while
the next ones are computed (`RowsToSend`): by the end of the product nearly all is there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from pelton_backends.triton.launch import Launcher
from pelton_backends.triton.ops.linear.hopper_split_k import DTYPES, activated
from pelton_backends.triton.ops.pieces import is_hopper
from pelton_backends.triton.runtime import num_sms

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.ops.interface import RowsToSend

# A warp group has 64 rows of x by 256 of the weight: the widest instruction there is, which reads the fewest bytes of shared
# memory for its work. Three of them share the weight's; their sums fill the registers, and no warp is left to copy.
WARP_GROUPS = 3
ROWS = 64  # of a warp group
COLUMNS = 256
STEP = 64  # numbers of two bytes of a row that are fetched together; of one byte twice as many
STAGES = 3
MIN_HALVED = 1024  # numbers of a row of which two programs may have half each
GROUP = 10  # neighbouring row tiles that share a weight tile in L2: 132 tiles at a time are then about square
_ROWS, _COLUMNS, _STAGES = gl.constexpr(ROWS), gl.constexpr(COLUMNS), gl.constexpr(STAGES)
_WARP_GROUPS, _GROUP = gl.constexpr(WARP_GROUPS), gl.constexpr(GROUP)
_HALF = gl.constexpr(COLUMNS // 2)
_STEP_BYTES = gl.constexpr((WARP_GROUPS * ROWS + COLUMNS) * STEP * 2)


@gluon.jit
def tile_place(tile, num_row_tiles, num_column_tiles, GROUP: gl.constexpr = _GROUP):
    """Row and column of a tile: down the rows of a group, then on to the next column."""
    group = tile // (GROUP * num_column_tiles)
    place = tile % (GROUP * num_column_tiles)
    size = gl.minimum(num_row_tiles - group * GROUP, GROUP)
    return group * GROUP + place % size, place // size


@gluon.jit
def piece_of(turn, num_tiles, num_halved, num_steps):
    """A program's tile in its turn, and the steps that it does of it; num_tiles: none. The last `num_halved` tiles have two
    programs each."""
    place = gl.program_id(0)
    tile = place + turn * gl.num_programs(0)
    begin = 0
    end = num_steps
    if (tile >= num_tiles - num_halved) & (num_halved > 0):
        tile = gl.where(place < 2 * num_halved, num_tiles - num_halved + place % num_halved, num_tiles)
        tile = gl.where(turn > num_tiles // gl.num_programs(0), num_tiles, tile)
        if place < num_halved:
            end = num_steps // 2
        else:
            begin = num_steps // 2
    return tile, begin, end


@gluon.jit
def fetch_step(x, weight, left, right, barrier, stage, row, column, k, size, IS_GATED: gl.constexpr):
    """One step's numbers of the tile's rows of x, and of its rows of the weight."""
    STEP: gl.constexpr = x.block_type.shape[1]
    mbarrier.expect(barrier, _STEP_BYTES)
    for i in gl.static_range(_WARP_GROUPS):
        rows = left.index(stage * _WARP_GROUPS + i)
        tma.async_copy_global_to_shared(x, [(row * _WARP_GROUPS + i) * _ROWS, k * STEP], barrier, rows)
    if IS_GATED:  # 128 columns of the result: as many rows of gate, and as many of up
        gate, up = right.index(stage).slice(0, _HALF), right.index(stage).slice(_HALF, _HALF)
        tma.async_copy_global_to_shared(weight, [column * _HALF, k * STEP], barrier, gate)
        tma.async_copy_global_to_shared(weight, [size + column * _HALF, k * STEP], barrier, up)
    else:
        tma.async_copy_global_to_shared(weight, [column * _COLUMNS, k * STEP], barrier, right.index(stage))


@gluon.jit
def sigmoid(x):
    """From the approximate exponential and reciprocal: for what is rounded to 16 bits."""
    return gl.inline_asm_elementwise(
        "{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; add.f32 t, t, 0f3F800000; "
        "rcp.approx.ftz.f32 $0, t; }", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def activated_tile(gate, up, ACTIVATION: gl.constexpr, dtype: gl.constexpr):
    """As `pieces.activated`."""
    if ACTIVATION == "silu":
        result = ((gate * sigmoid(gate)).to(dtype).to(gl.float32) * up).to(dtype)
    else:
        result = activated(gate, up, ACTIVATION, dtype)
    return result


@gluon.jit
def scaled_half(half, weight_scale, of_rows, column, end):
    """Numbers of 128 columns from `column` on, times their scales and those of their rows."""
    columns = column + gl.arange(0, _HALF, gl.SliceLayout(0, half.type.layout))
    of_columns = gl.load(weight_scale + gl.minimum(columns, end - 1))
    return half * of_columns[None, :] * gl.convert_layout(of_rows, gl.SliceLayout(1, half.type.layout))[:, None]


@gluon.jit
def store_tile(out, buffer, result, row, column):
    """64 x 128 numbers, through shared memory; they leave while the next tile is computed."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _HALF, 16])
    tma.store_wait(0)  # the buffer's last contents have left
    gl.thread_barrier()
    buffer.store(gl.convert_layout(result, LAYOUT, assert_trivial=True))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(out, [row, column], buffer)


@gluon.jit
def _send_tile(even_copy, odd_copy, parity, buffer, row, column):
    """Send what `store_tile` has put there."""
    if parity == 0:
        tma.async_copy_shared_to_global(even_copy, [row, column], buffer)
    else:
        tma.async_copy_shared_to_global(odd_copy, [row, column], buffer)


@gluon.jit
def _count_part(counts, block):
    """Tell the other rank that what this warp group has stored so far is there, the last of it in this block of 64 rows."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    # Not only read from shared memory, as `store_wait` waits for, but written. Each thread waits for its own stores.
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; fence.proxy.async; mov.b32 $0, $1;", "=r,r", [gl.arange(0, 128, LANES)], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip
    gl.thread_barrier()
    gl.atomic_add(counts + block, 1, sem="release", scope="sys")


@gluon.jit
def _multiply(
    INDEX: gl.constexpr, x, weight, x_scale, weight_scale, out, parts, arrived, even_copy, odd_copy, counts, own_counts, calls,
    rank, turn_rows, left, right, buffer, ready, free, num_row_tiles, num_column_tiles, num_rows, size, num_steps, num_halved,
    ACTIVATION: gl.constexpr, SENT_BLOCKS: gl.constexpr,
):  # fmt: skip
    """A warp group: its 64 rows of every tile. The first one fetches two steps ahead, and into the next tile."""
    INNER: gl.constexpr = 256 // x.dtype.primitive_bitwidth
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _COLUMNS, INNER])
    IS_GATED: gl.constexpr = ACTIVATION is not None
    dtype: gl.constexpr = out.dtype
    num_tiles = num_row_tiles * num_column_tiles
    if SENT_BLOCKS:
        call = gl.load(calls)
        parity = call & 1
        counts += parity * SENT_BLOCKS
        pending = -1  # the block of the last tile
        if INDEX == 0:  # noqa: SIM102
            if gl.program_id(0) == 0:
                # Nobody counts for the next call before this one's parts are all counted.
                LANES: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
                cleared = own_counts + (1 - parity) * SENT_BLOCKS + gl.arange(0, SENT_BLOCKS, LANES)
                gl.store(cleared, gl.zeros([SENT_BLOCKS], gl.int32, LANES))
    next_turn = 0
    next_tile, next_k, next_end = piece_of(0, num_tiles, num_halved, num_steps)
    next_row, next_column = tile_place(next_tile, num_row_tiles, num_column_tiles)
    if INDEX == 0:
        for early in gl.static_range(_STAGES - 1):
            if next_tile < num_tiles:
                barrier = ready.index(early)
                fetch_step(x, weight, left, right, barrier, early, next_row, next_column, next_k, size, IS_GATED)
            next_k += 1
            if next_k == next_end:
                next_turn += 1
                next_tile, next_k, next_end = piece_of(next_turn, num_tiles, num_halved, num_steps)
                next_row, next_column = tile_place(next_tile, num_row_tiles, num_column_tiles)
    step = 0
    turn = 0
    tile, begin, end = piece_of(0, num_tiles, num_halved, num_steps)
    while tile < num_tiles:
        row, column = tile_place(tile, num_row_tiles, num_column_tiles)
        row = (row * _WARP_GROUPS + INDEX) * _ROWS
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
                if next_tile < num_tiles:
                    later = step + _STAGES - 1
                    place = later % _STAGES
                    mbarrier.wait(free.index(place), ((later // _STAGES) & 1) ^ 1)
                    barrier = ready.index(place)
                    fetch_step(x, weight, left, right, barrier, place, next_row, next_column, next_k, size, IS_GATED)
                next_k += 1
                if next_k == next_end:
                    next_turn += 1
                    next_tile, next_k, next_end = piece_of(next_turn, num_tiles, num_halved, num_steps)
                    next_row, next_column = tile_place(next_tile, num_row_tiles, num_column_tiles)
            step += 1
        total = warpgroup_mma_wait(0, deps=[total])
        gl.thread_barrier()
        mbarrier.arrive(free.index((step + _STAGES - 1) % _STAGES), count=1)
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
                gl.store(arrived + slot, 0)  # for the next launch
                total += gl.load(parts + slot * (_ROWS * _COLUMNS) + cells, cache_modifier=".cg")
            if x_scale is not None:
                of_rows = gl.load(
                    x_scale + gl.minimum(row + gl.arange(0, _ROWS, gl.SliceLayout(1, LAYOUT)), num_rows - 1)
                )
            first, second = gl.split(gl.permute(gl.reshape(total, (_ROWS, 2, _HALF)), (0, 2, 1)))
            if ACTIVATION is None:
                gl.static_assert(x_scale is None, "of numbers with scales gate and up alone")
                if SENT_BLOCKS:
                    is_sent = (row // turn_rows) % 2 != rank
                    if pending >= 0:
                        _count_part(counts, pending)
                        pending = -1
                store_tile(out, buffer, first.to(dtype), row, column * _COLUMNS)
                if SENT_BLOCKS:  # noqa: SIM102
                    if is_sent:
                        _send_tile(even_copy, odd_copy, parity, buffer, row, column * _COLUMNS)
                store_tile(out, buffer, second.to(dtype), row, column * _COLUMNS + _HALF)
                if SENT_BLOCKS:  # noqa: SIM102
                    if is_sent:
                        _send_tile(even_copy, odd_copy, parity, buffer, row, column * _COLUMNS + _HALF)
                        pending = row // _ROWS
            else:
                if x_scale is not None:
                    first = scaled_half(first, weight_scale, of_rows, column * _HALF, size)
                    second = scaled_half(second, weight_scale + size, of_rows, column * _HALF, size)
                gate, up = first.to(dtype).to(gl.float32), second.to(dtype).to(gl.float32)
                store_tile(out, buffer, activated_tile(gate, up, ACTIVATION, dtype), row, column * _HALF)
        turn += 1
        tile, begin, end = piece_of(turn, num_tiles, num_halved, num_steps)
    if SENT_BLOCKS:
        if pending >= 0:
            _count_part(counts, pending)
        gl.thread_barrier()
        if (
            gl.atomic_add(calls + 1, 1, sem="acq_rel", scope="gpu") == _WARP_GROUPS * gl.num_programs(0) - 1
        ):  # the last of all
            gl.store(calls + 1, 0)
            gl.store(calls, call + 1)
    else:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["rank", "turn_rows", "num_rows", "size", "in_features", "num_halved"])
def hopper_matmul_kernel(
    x, weight, x_scale, weight_scale, out, parts, arrived, even_copy, odd_copy, counts, own_counts, calls, rank, turn_rows, num_rows,
    size, in_features, num_halved, ACTIVATION: gl.constexpr, SENT_BLOCKS: gl.constexpr,
):  # fmt: skip
    """Persistent: programs take tiles in turn, and halves of the last `num_halved` ones. `size` columns of the result.

    x_scale, weight_scale: [T], and of the weight's rows, float32, of numbers of one byte; else None
    parts        [num_halved, 3, 64, 256] float32, for the sums of first halves
    arrived      [num_halved, 3] int32, zeros, and zeros again at the end
    even_copy, odd_copy, counts, own_counts, calls, rank, turn_rows: as `RowsToSend` has them, None where nothing is sent
    SENT_BLOCKS  blocks of `counts`, a power of two; 0: nothing is sent
    """
    TILE_ROWS: gl.constexpr = _WARP_GROUPS * _ROWS
    TILE_COLUMNS: gl.constexpr = _COLUMNS if ACTIVATION is None else _HALF
    STEP: gl.constexpr = x.block_type.shape[1]
    num_row_tiles = (num_rows + TILE_ROWS - 1) // TILE_ROWS
    num_column_tiles = (size + TILE_COLUMNS - 1) // TILE_COLUMNS
    num_steps = (in_features + STEP - 1) // STEP
    left = gl.allocate_shared_memory(x.dtype, [_STAGES * _WARP_GROUPS, _ROWS, STEP], x.layout)
    right = gl.allocate_shared_memory(x.dtype, [_STAGES, _COLUMNS, STEP], x.layout)
    buffers = gl.allocate_shared_memory(out.dtype, [_WARP_GROUPS, _ROWS, _HALF], out.layout)
    ready = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(_STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=_WARP_GROUPS)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (
                gl.constexpr(0), x, weight, x_scale, weight_scale, out, parts, arrived, even_copy, odd_copy, counts, own_counts,
                calls, rank, turn_rows, left, right, buffers.index(0), ready, free, num_row_tiles, num_column_tiles, num_rows, size,
                num_steps, num_halved, ACTIVATION, SENT_BLOCKS,
            )),
            (_multiply, (
                gl.constexpr(1), x, weight, x_scale, weight_scale, out, parts, arrived, even_copy, odd_copy, counts, own_counts,
                calls, rank, turn_rows, left, right, buffers.index(1), ready, free, num_row_tiles, num_column_tiles, num_rows, size,
                num_steps, num_halved, ACTIVATION, SENT_BLOCKS,
            )),
            (_multiply, (
                gl.constexpr(2), x, weight, x_scale, weight_scale, out, parts, arrived, even_copy, odd_copy, counts, own_counts,
                calls, rank, turn_rows, left, right, buffers.index(2), ready, free, num_row_tiles, num_column_tiles, num_rows, size,
                num_steps, num_halved, ACTIVATION, SENT_BLOCKS,
            )),
        ],
        [4, 4],
        [168, 168],
    )  # fmt: skip


_launch = Launcher(hopper_matmul_kernel)


def can_multiply_many(weight: Tensor) -> bool:
    """Return whether the copy engine can read it and write the result: rows that begin at multiples of 16 bytes."""
    is_readable = weight.is_contiguous() and weight.data_ptr() % 16 == 0
    is_readable = is_readable and weight.shape[0] % 16 == 0 and weight.shape[1] * weight.element_size() % 16 == 0
    return is_hopper(weight.device) and is_readable and weight.dtype in DTYPES


def num_tiles(num_rows: int, out_features: int, activation: str | None) -> int:
    columns = COLUMNS if activation is None else COLUMNS // 2
    size = out_features if activation is None else out_features // 2
    return triton.cdiv(num_rows, WARP_GROUPS * ROWS) * triton.cdiv(size, columns)


def halved_tiles(tiles: int, in_features: int, programs: int) -> int:
    """The tiles of the last round where they are so few that each can have two programs, and their rows long."""
    rest = tiles % programs
    return rest if 2 * rest <= programs and in_features >= MIN_HALVED else 0


def share_of_work(
    num_rows: int, out_features: int, in_features: int, programs: int, activation: str | None = None
) -> float:
    """Return the share of what the multiprocessors could do in the busiest one's time: less where tiles pass the rows, or the last
    round of tiles has not one for each."""
    tiles = num_tiles(num_rows, out_features, activation)
    rounds: float = triton.cdiv(tiles, programs)
    if halved_tiles(tiles, in_features, programs):
        rounds -= 0.5
    return tiles / (rounds * programs) * num_rows / (triton.cdiv(num_rows, WARP_GROUPS * ROWS) * WARP_GROUPS * ROWS)


def halves_of(device: torch.device, most: int | None = None) -> Tensor:
    """Return what says of tiles that two programs have whether the first half is there: zeros whenever no kernel runs."""
    most = num_sms(device) // 2 if most is None else most
    return torch.zeros((most, WARP_GROUPS), dtype=torch.int32, device=device)


def hopper_matmul(
    x: Tensor, weight: Tensor, activation: str | None = None, sent: RowsToSend | None = None, *,
    scales: tuple[Tensor, Tensor] | None = None, dtype: torch.dtype | None = None, arrived: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """x @ weight.T, or activation(x @ gate.T) * (x @ up.T).

    x       [T, K]  fp16 or bf16, with an activation also float8_e4m3fn; rows begin at multiples of 16 bytes
    weight  [N, K]  dtype of x, contiguous, rows of a multiple of 16 bytes; with an activation gate's rows, then up's, N = 2 I
    sent    without an activation: where the result goes too, at most as many rows as there is room for; see `RowsToSend`
    scales  of float8_e4m3fn: those of x [T] and of the weight [N], float32, which sums are multiplied by
    dtype   of the result, of two bytes, where x has one
    arrived of `halves_of`, for calls on one stream: none has to fill it with zeros
    -> [T, N] or [T, I], contiguous; N or I a multiple of 8

    Sums in float32, of float8_e4m3fn as the tensor cores make them; products (gate, up), the activation and its product with up are
    rounded as in `pelton.ops.reference`.
    Tiles come and go through tensor descriptors: the copy engine fills in zeros outside and cuts off what is too much.

    On an H200 with random bf16, kept busy, products are bound by its 700 W (1,440 to 1,530 MHz): fewer bytes from L2 make them
    faster, and so do multiprocessors that are not idle. All of a layer of Llama-3.1-8B at 16,384 rows, ms: 10.18 (702 TFLOP/s);
    without halved tiles 10.38; in another run that 10.63, with tiles of 128 x 256 10.80 to 10.97, with cuBLAS and one product for
    gate and up of 128 x 256 tiles 10.87 to 11.02. gate and up against cuBLAS and `gated`: 2,048 rows 716 us (754); Qwen3-0.6B's
    39 (47), 16,384 rows 310 (368). Without an activation 1 to 6 % faster than cuBLAS where `share_of_work` is 0.94 or more,
    slower at 0.86. gate and up of float8_e4m3fn at 16,384 rows 2,652 us (1,451 TFLOP/s), for 2,877.
    """
    num_rows, in_features = x.shape
    size = weight.shape[0] if activation is None else weight.shape[0] // 2
    out = torch.empty((num_rows, size), dtype=dtype or x.dtype, device=x.device)
    if num_rows == 0:
        return out
    columns = COLUMNS if activation is None else COLUMNS // 2
    tiles, programs = num_tiles(num_rows, weight.shape[0], activation), num_sms(x.device)
    halved = halved_tiles(tiles, in_features, programs)
    parts = torch.empty((halved, WARP_GROUPS, ROWS, COLUMNS), dtype=torch.float32, device=x.device)
    if arrived is None:
        arrived = halves_of(x.device, halved)
    tile, tile_of_x = (gl.NVMMASharedLayout(128, 8 * one.element_size(), rank=2) for one in (out, x))
    step, (x_scale, weight_scale) = 2 * STEP // x.element_size(), scales or (None, None)
    sending: tuple[Any, ...] = (None,) * 7
    if sent is not None:
        copies = (TensorDescriptor.from_tensor(copy[:num_rows], [ROWS, COLUMNS // 2], tile) for copy in sent.copies)
        sending = (*copies, sent.counts, sent.own_counts, sent.calls, sent.rank, sent.turn)
        out.pelton_parts = triton.cdiv(size, COLUMNS)  # type: ignore[attr-defined]
    blocks = 0 if sent is None else sent.counts.shape[1]
    _launch(
        (x.dtype, out.dtype, x.device, activation, blocks),
        (min(tiles + halved, programs),),
        (
            TensorDescriptor.from_tensor(x, [ROWS, step], tile_of_x),
            TensorDescriptor.from_tensor(weight, [columns, step], tile_of_x), x_scale, weight_scale,
            TensorDescriptor.from_tensor(out, [ROWS, COLUMNS // 2], tile),
            parts, arrived, *sending, num_rows, size, in_features, halved,
        ),
        {"ACTIVATION": activation, "SENT_BLOCKS": blocks},
        num_warps=4,
    )  # fmt: skip
    return out
