"""Products of some tokens' experts in e4m3 on Hopper, while reading the weights is most of their cost: nothing is converted to 16 bits.

A program has the same part of the weights in any step, of about one expert: its buffers fill before the experts are chosen, and the tokens
of an expert come to it once, as sums of two numbers in e4m3. The weights are the left operand, the pairs of one expert the right one; pairs
beyond the first 16 or 32 are tiles of their own, which are dealt out after all first ones. Choosing and adding up are left to `experts`.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pelton_backends.triton.launch import Launcher, alignment
from pelton_backends.triton.ops.linear.hopper_matmul import activated_tile
from pelton_backends.triton.runtime import has_pdl, launch_options

if TYPE_CHECKING:
    from torch import Tensor

LINE = 128  # bytes of a row: the widest swizzle of shared memory
PROGRAMS, MIN_PROGRAMS = 132, 96  # multiprocessors of an H200, and so many of them that are worth it
MIN_STAGES, MIN_LINES = 3, 4  # of a ring
MIN_PAIRS, MOST_PAIRS = 16, 32  # of one expert, whose rows a program holds beside its buffers
FEW_PAIRS_ROWS, ROWS, LINES = 128, 64, 2
"""Rows of the weights in a buffer, for MIN_PAIRS and for more, and how many times 128 bytes of each."""
_MEMORY = 226 * 1024  # bytes of shared memory, less barriers and padding
_LINE = gl.constexpr(LINE)
_SPLIT_ROWS = gl.constexpr(16)  # whose numbers registers hold at once


@gluon.constexpr_function
def _per_thread(bins):
    return max(bins // 128, 1)


@gluon.constexpr_function
def _next_power_of_2(count):
    return 1 << (count - 1).bit_length()


@gluon.jit
def _counts(count_ptr, E: gl.constexpr):
    """Return the numbers of all experts, and how many pairs each has."""
    BINS: gl.constexpr = _next_power_of_2(E)
    LAYOUT: gl.constexpr = gl.BlockedLayout([_per_thread(BINS)], [32], [4], [0])
    bins = gl.arange(0, BINS, LAYOUT)
    return bins, gl.load(count_ptr + bins, mask=bins < E, other=0)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _piece(turn, count_ptr, own, E: gl.constexpr, UNITS: gl.constexpr, N: gl.constexpr):
    """Return the unit of a program's turn, of its own ones and then of further tiles: expert, its first pair, place among its weights."""
    unit = gl.program_id(0) * own + turn
    expert, start = unit // UNITS, unit * 0
    if turn >= own:
        unit = gl.program_id(0) + (turn - own) * gl.num_programs(0)
        tile = unit // UNITS
        bins, counts = _counts(count_ptr, E)
        further = gl.maximum((counts + N - 1) // N - 1, 0)  # tiles beyond an expert's first
        ends = gl.associative_scan(further, 0, _add)
        expert = gl.sum((ends <= tile).to(gl.int32), 0)
        start = (tile - gl.sum(gl.where(bins == expert, ends - further, 0), 0) + 1) * N
    return expert, start, unit % UNITS


@gluon.jit
def _experts_with_pairs(count_ptr, E: gl.constexpr, OWN: gl.constexpr, UNITS: gl.constexpr, N: gl.constexpr):
    """Return a bit for each of the few experts of a program's own units, and how many tiles there are beyond all experts' first ones."""
    bins, counts = _counts(count_ptr, E)
    bit = bins - gl.program_id(0) * OWN // UNITS
    is_own = (bit >= 0) & (bit < OWN // UNITS + 2) & (counts > 0)
    present = gl.sum(gl.where(is_own, 1 << gl.where(is_own, bit, 0), 0), 0)
    return present, gl.sum(gl.maximum((counts + N - 1) // N - 1, 0), 0)


@gluon.jit
def _next_turn(turn, present, OWN: gl.constexpr, UNITS: gl.constexpr, FORCED: gl.constexpr):
    """Return the next turn: of own units all of the first FORCED, and others whose expert has a bit in `present`."""
    turn += 1
    first = gl.program_id(0) * OWN
    is_idle = (turn >= FORCED) & (turn < OWN)
    while is_idle:
        expert = (first + turn) // UNITS
        is_idle = (present >> (expert - first // UNITS)) & 1 == 0
        turn = gl.where(is_idle, gl.minimum((expert + 1) * UNITS - first, OWN), turn)
        is_idle = is_idle & (turn < OWN)
    return turn


@gluon.jit
def _fetch(
    weight, expert, column, step, barrier, buffers, stage, SIZE: gl.constexpr, ROWS: gl.constexpr, IS_GATED: gl.constexpr
):  # fmt: skip
    """Fetch a buffer: lines of ROWS rows of an expert's weights; of gate and up eight rows of one, the same eight of the other, ..."""
    mbarrier.expect(barrier, weight.block_type.nbytes)
    line = step * weight.block_type.shape[0]
    if IS_GATED:
        eight = (expert * (2 * SIZE) + column * (ROWS // 2)) // 8
        tma.async_copy_global_to_shared(weight, [line, eight, 0, 0, 0], barrier, buffers.index(stage))
    else:
        tma.async_copy_global_to_shared(weight, [line, expert * SIZE + column * ROWS, 0], barrier, buffers.index(stage))


@gluon.jit
def _pairs_at(order, start, capacity, places):
    """Return an expert's pairs; behind those that there are any number, so that nobody waits for the count first."""
    return gl.load(order + start + places, mask=start + places < capacity, other=0)


@gluon.jit
def _split_rows(
    x, x_stride, order, start, count, capacity, rows, inverse, N: gl.constexpr, K: gl.constexpr, STEPS: gl.constexpr
):  # fmt: skip
    """Write rows of x times a power of two, as sums of two numbers in e4m3, to `rows` [STEPS, 2 N, 128], and one by the power to `inverse`.

    The first has four of a number's eight bits, the second the rest: nothing is lost down to 2^-16 of the row's largest number. A row that
    has an infinite number becomes NaN."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    G: gl.constexpr = _SPLIT_ROWS
    for i in gl.static_range(N // G):
        places = i * G + gl.arange(0, G, gl.SliceLayout(1, LAYOUT))
        pairs, is_pair = _pairs_at(order, start, capacity, places), start + places < count
        lane = gl.arange(0, rows.shape[2], gl.SliceLayout(0, LAYOUT))
        cells = x + ((pairs // K) * x_stride)[:, None] + lane[None, :]
        pieces = ()
        for k in gl.static_range(STEPS):
            pieces += (gl.load(cells + k * rows.shape[2], mask=is_pair[:, None], other=0.0),)
        most = gl.abs(pieces[0].to(gl.float32))
        for k in gl.static_range(1, STEPS):
            most = gl.maximum(most, gl.abs(pieces[k].to(gl.float32)))
        exponent = gl.max(most, 1).to(gl.int32, bitcast=True) >> 23
        power = gl.where(exponent == 255, 0x7FC00000, gl.minimum(261 - exponent, 254) << 23)
        scale = power.to(gl.float32, bitcast=True)  # the largest becomes 128 to 256
        inverse.slice(i * G, G).store((gl.maximum(exponent - 7, 1) << 23).to(gl.float32, bitcast=True))
        for k in gl.static_range(STEPS):
            number = pieces[k].to(gl.float32) * scale[:, None]
            high = number.to(gl.float8e4nv)
            rows.index(k).slice(i * G, G).store(high)
            rows.index(k).slice(N + i * G, G).store((number - high.to(gl.float32)).to(gl.float8e4nv))


@gluon.constexpr_function
def _stored(rows, is_gated):
    """Return the layout in which a program stores [rows of the result, pairs]: 16 bytes a thread, of one pair."""
    own, across = (8, rows // 16) if is_gated else (4, rows // 4)
    return gl.BlockedLayout([own, 1], [across, 32 // across], [1, 4], [0, 1])


@gluon.jit
def _scale_of(
    weight_scale, expert, column, SIZE: gl.constexpr, ROWS: gl.constexpr, IS_GATED: gl.constexpr, layout: gl.constexpr
):
    """Return the scales of a unit's rows, in their order in a buffer."""
    row = gl.arange(0, ROWS, layout)
    if IS_GATED:
        place = expert * (2 * SIZE) + column * (ROWS // 2) + row // 16 * 8 + row % 8 + row // 8 % 2 * SIZE
    else:
        place = expert * SIZE + column * ROWS + row
    return gl.load(weight_scale + place)


@gluon.jit
def _store(
    total, inverse, share, out, pairs, is_pair, column,
    SIZE: gl.constexpr, ROWS: gl.constexpr, N: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Apply the activation, or the pairs' weights, to [ROWS, N] float32, and store it; out [pairs, SIZE]."""
    dtype: gl.constexpr = out.dtype.element_ty
    total = total * inverse.load(gl.SliceLayout(0, total.type.layout))[None, :]
    STORED: gl.constexpr = _stored(ROWS, ACTIVATION is not None)
    COLUMNS: gl.constexpr = ROWS if ACTIVATION is None else ROWS // 2
    if ACTIVATION is None:
        result = (gl.convert_layout(total, STORED) * share[None, :]).to(dtype)
    else:
        gate, up = gl.split(gl.permute(gl.reshape(total, (ROWS // 16, 2, 8, N)), (0, 2, 3, 1)))
        gate, up = gl.reshape(gate, (COLUMNS, N)), gl.reshape(up, (COLUMNS, N))
        result = activated_tile(gate.to(dtype).to(gl.float32), up.to(dtype).to(gl.float32), ACTIVATION, dtype)
        result = gl.convert_layout(result, STORED)
    columns = column * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(1, STORED))
    gl.store(out + (pairs * SIZE)[None, :] + columns[:, None], result, mask=is_pair[None, :])


@gluon.jit(do_not_specialize=["capacity"])
def streamed_kernel(
    x, x_stride, weight, weight_scale, share, out, order, count_ptr, capacity,
    E: gl.constexpr, SIZE: gl.constexpr, WIDTH: gl.constexpr, K: gl.constexpr, N: gl.constexpr, ROWS: gl.constexpr,
    OWN: gl.constexpr, STAGES: gl.constexpr, ACTIVATION: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Compute a program's OWN units, which are ROWS of an expert's weights by N of its pairs, and its share of further tiles' units. The
    first of its own are computed whether the expert has a pair or not: their weights are on their way before that is known."""
    IS_GATED: gl.constexpr = ACTIVATION is not None
    LINES: gl.constexpr = weight.block_type.shape[0]
    STEPS: gl.constexpr = WIDTH // (_LINE * LINES)
    UNITS: gl.constexpr = SIZE // (ROWS // 2 if IS_GATED else ROWS)
    gl.static_assert(STAGES <= STEPS * OWN, "a program's own units fill all buffers")
    gl.static_assert(OWN // UNITS < 30, "a bit for each expert of a program")
    FLAT: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    ACROSS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * N, 32])
    buffers = gl.allocate_shared_memory(weight.dtype, [STAGES] + weight.block_type.shape, weight.layout)  # noqa: RUF005
    lines = buffers._reinterpret(weight.dtype, [STAGES * LINES, ROWS, _LINE], FLAT)
    rows = gl.allocate_shared_memory(weight.dtype, [STEPS * LINES, 2 * N, _LINE], FLAT)
    inverse = gl.allocate_shared_memory(gl.float32, [N], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()
    for i in gl.static_range(STAGES):
        unit = gl.program_id(0) * OWN + i // STEPS
        _fetch(weight, unit // UNITS, unit % UNITS, i % STEPS, ready.index(i), buffers, i, SIZE, ROWS, IS_GATED)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()

    FORCED: gl.constexpr = (STAGES + STEPS - 1) // STEPS  # units whose weights are on their way, or some of them
    now, held, turn = 0, -1, 0
    present, num_turns = 0, 1  # until the experts are known
    fetched_turn = gl.to_tensor(STAGES // STEPS)
    fetched_step = gl.to_tensor(STAGES % STEPS)
    fetched_expert, fetched_column = fetched_turn, fetched_turn
    places = gl.arange(0, N, gl.SliceLayout(0, _stored(ROWS, IS_GATED)))
    pairs, is_pair, weights = places, places < 0, places.to(gl.float32)  # of the rows that are held
    while turn < num_turns:
        expert, start, column = _piece(turn, count_ptr, OWN, E, UNITS, N)
        if held != expert * capacity + start:
            held = expert * capacity + start
            own_order = order + expert.to(gl.int64) * capacity
            count = gl.minimum(gl.load(count_ptr + expert), capacity)
            pairs, is_pair = _pairs_at(own_order, start, capacity, places), start + places < count
            _split_rows(x, x_stride, own_order, start, count, capacity, rows, inverse, N, K, STEPS * LINES)
            if not IS_GATED:
                weights = gl.load(share + pairs, mask=is_pair, other=0.0)
            if turn == 0:
                present, num_further = _experts_with_pairs(count_ptr, E, OWN, UNITS, N)
                programs = gl.num_programs(0)
                num_turns = OWN + (num_further * UNITS - gl.program_id(0) + programs - 1) // programs
                if STAGES % STEPS == 0:
                    fetched_turn = _next_turn(fetched_turn - 1, present, OWN, UNITS, FORCED)
                fetched_expert, _, fetched_column = _piece(fetched_turn, count_ptr, OWN, E, UNITS, N)
            fence_async_shared()
            gl.thread_barrier()
        # Asked for before the sums, behind which it would be waited for.
        scale = _scale_of(weight_scale, expert, column, SIZE, ROWS, IS_GATED, gl.SliceLayout(1, ACROSS))
        sums = gl.zeros((ROWS, 2 * N), gl.float32, ACROSS)
        total = warpgroup_mma_init(sums)
        for step in range(STEPS):
            stage = now % STAGES
            mbarrier.wait(ready.index(stage), (now // STAGES) & 1)
            for i in gl.static_range(LINES):
                right = rows.index(step * LINES + i).permute((1, 0))
                left = lines.index(stage * LINES + i)
                total = warpgroup_mma(left, right, total, use_acc=i > 0, is_async=True)
            # Few numbers at a time: within a sum of e4m3's products the device keeps 14 bits.
            part = warpgroup_mma_wait(0, deps=(total,))
            sums += part
            total = warpgroup_mma_init(part)
            if fetched_turn < num_turns:
                gl.thread_barrier()  # every warp's product of that buffer is done
                _fetch(
                    weight, fetched_expert, fetched_column, fetched_step, ready.index(stage), buffers, stage, SIZE, ROWS, IS_GATED
                )  # fmt: skip
                fetched_step += 1
                if fetched_step == STEPS:
                    fetched_step = 0
                    fetched_turn = _next_turn(fetched_turn, present, OWN, UNITS, FORCED)
                    if fetched_turn < num_turns:
                        fetched_expert, _, fetched_column = _piece(fetched_turn, count_ptr, OWN, E, UNITS, N)
            now += 1
        sums = sums * scale[:, None]
        high, low = gl.split(gl.permute(gl.reshape(sums, (ROWS, 2, N)), (0, 2, 1)))
        _store(high + low, inverse, weights, out, pairs, is_pair, column, SIZE, ROWS, N, ACTIVATION)
        gl.thread_barrier()
        turn = _next_turn(turn, present, OWN, UNITS, FORCED)


_launch = Launcher(streamed_kernel)


class Tiling(NamedTuple):
    """Programs that have `own` units each, of `rows` of the weights by `pairs` pairs of an expert; a ring of `stages` buffers of `lines`
    times 128 bytes of each of the rows."""

    programs: int
    own: int
    pairs: int
    rows: int
    lines: int
    stages: int


@cache
def choose_tilings(num_experts: int, hidden_size: int, size: int, pairs: int) -> tuple[Tiling, Tiling] | None:
    """Return both products' work, or None: sizes that cannot be cut into equal parts for about as many programs as there are
    multiprocessors, or that do not fit in a program's memory.

    As measured on an H200, whole layers of Qwen3-30B-A3B in a captured chain, us: by 16 pairs 128, 64 and 32 tokens take 164.8, 157.6 and
    144.3 in buffers of 128 rows and two lines, 166.6, 159.7 and 148.0 of 64 and two, all numbers the same; on another day 128 tokens 180.2
    of 128 and one, for 175.1 of 64 and two; 256 tokens by 32 pairs 206.5 of 64 and two, 220.0 of 128 and one."""
    if not MIN_PAIRS <= pairs <= MOST_PAIRS:
        return None
    for rows in (FEW_PAIRS_ROWS, ROWS) if pairs == MIN_PAIRS else (ROWS,):
        first = _cut(num_experts, size, hidden_size, pairs, rows, LINES, is_gated=True)
        second = _cut(num_experts, hidden_size, size, pairs, rows, LINES, is_gated=False)
        if first is not None and second is not None:
            return first, second
    return None


def _cut(
    num_experts: int, out_features: int, in_features: int, pairs: int, rows: int, lines: int, *, is_gated: bool
) -> Tiling | None:  # fmt: skip
    unit = rows // 2 if is_gated else rows
    if out_features % unit or in_features % (LINE * lines):
        return None
    units = num_experts * (out_features // unit)
    own = next(own for own in range(1, units + 1) if units % own == 0 and units // own <= PROGRAMS)
    held = in_features * pairs * 2
    scratch = pairs * rows * (2 if is_gated else 4)
    stages = min((_MEMORY - held - scratch) // (rows * LINE * lines), in_features // (LINE * lines) * own)
    if units // own < MIN_PROGRAMS or stages * lines < MIN_LINES or stages < MIN_STAGES:
        return None
    return Tiling(units // own, own, pairs, rows, lines, stages)


def _described(weight: Tensor, tiling: Tiling, *, is_gated: bool) -> TensorDescriptor:
    """Return boxes of `lines` times 128 bytes of `rows` rows of all experts' weights [E, N, WIDTH]."""
    num_experts, num_rows, width = weight.shape
    if is_gated:
        half, rows = num_rows // 2, [tiling.rows // 16, 2, 8]
        shape, strides = [(num_experts * num_rows - half) // 8, 2, 8], [8 * width, half * width, width]
    else:
        shape, strides, rows = [num_experts * num_rows], [width], [tiling.rows]
    layout = gl.NVMMASharedLayout(LINE, 8, len(rows) + 2)
    box = [tiling.lines, *rows, LINE]
    return TensorDescriptor(weight, [width // LINE, *shape, LINE], [LINE, *strides, 1], box, layout)


def experts_product(
    x: Tensor, weight: Tensor, weight_scale: Tensor, share: Tensor, out: Tensor, order: Tensor, counts: Tensor, top_k: int,
    tiling: Tiling, activation: str | None = None,
) -> None:  # fmt: skip
    """Write each pair's product with its expert's weight to its row of out: activation(x @ gate.T) * (x @ up.T), or share * (x @ w.T).

    x             [T, WIDTH] or [pairs, WIDTH]  fp16 or bf16, rows at multiples of 16 bytes: pair p's is row p // top_k
    weight        [E, N, WIDTH]  float8_e4m3fn, contiguous; with an activation gate's rows, then up's; weight_scale [E, N, 1] float32
    share         [pairs] float32, read without an activation
    out           [pairs, N or N / 2]  written for the pairs that there are
    order         [E, T] int32, each expert's pairs; counts [E] int32, how many

    x is the sum of two numbers in e4m3, which loses next to nothing of it (`_split_rows`); sums in float32, by 256 numbers at a time on the
    device's 14 bits. Against float64 on an H200 both products are off by 0.0038 of a row's norm on average and by 0.0050 at most, and
    with weights that are converted to bfloat16 by 0.0038 and 0.0053: it is the result's rounding.
    """
    num_experts, _, width = weight.shape
    constants = {
        "E": num_experts, "SIZE": out.shape[1], "WIDTH": width, "K": top_k, "N": tiling.pairs, "ROWS": tiling.rows,
        "OWN": tiling.own, "STAGES": tiling.stages, "ACTIVATION": activation, "PDL": has_pdl(x.device),
    }  # fmt: skip
    _launch(
        (x.dtype, out.dtype, x.device, x.stride(0), alignment(x, share, out, order, counts), tiling.lines, *constants.values()),
        (tiling.programs,),
        (
            x, x.stride(0), _described(weight, tiling, is_gated=activation is not None), weight_scale, share, out, order, counts,
            order.shape[1],
        ),
        constants,
        num_warps=4, **launch_options(has_pdl(x.device)),
    )  # fmt: skip
