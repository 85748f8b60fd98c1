"""Products of some tokens' experts on Hopper, while reading the weights is most of their cost; weights in e4m3 are not converted.

A program has the same part of the weights in any step, of about one expert: its buffers fill before the experts are chosen, and the tokens
of an expert come to it once, of weights in e4m3 as sums of two numbers in e4m3. The weights are the left operand, the pairs of one expert
the right one. Pairs beyond the first 16 or 32 are tiles of their own, first for the multiprocessors that have no expert.

One warp copies, and two warp groups take turns, so that one stores while the other multiplies. Results are kept in L2, from which the
weights that stream by would push them: that costs more than writing them. Choosing and adding up are left to `experts`.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pelton_backends.triton.launch import Launcher, alignment
from pelton_backends.triton.ops.linear.hopper_matmul import activated_tile
from pelton_backends.triton.runtime import has_pdl, launch_options, num_sms

if TYPE_CHECKING:
    from torch import Tensor

LINE = 128  # bytes of a row: the widest swizzle of shared memory
PROGRAMS, MIN_PROGRAMS = 132, 96  # multiprocessors of an H200, and so many of them that are worth it
MIN_STAGES, MIN_LINES = 3, 4  # of a ring
MIN_PAIRS, MOST_PAIRS = 16, 32  # of one expert, whose rows a program holds beside its buffers
BLOCK_ROWS, BLOCK_COLUMNS = 64, LINE  # of e4m3's blocks that have a scale; rows may be a multiple
ROWS, LINES = 128, (2, 1)
"""Rows of the weights in a buffer, and how many times 128 bytes of each: as many as fit."""
_MEMORY = 227 * 1024 - 512  # bytes of shared memory, less barriers and padding
_LINE, _ROWS = gl.constexpr(LINE), gl.constexpr(ROWS)
_HALF_ROWS = gl.constexpr(ROWS // 2)
_SPLIT_ROWS = gl.constexpr(8)  # whose numbers registers hold at once
_REGISTERS, _COPYING = gl.constexpr(232), gl.constexpr(40)


@gluon.constexpr_function
def _next_power_of_2(count):
    return 1 << (count - 1).bit_length()


@gluon.jit
def _counts(count_ptr, capacity, E: gl.constexpr, WARPS: gl.constexpr):
    """Return the numbers of all experts, and how many pairs each has."""
    BINS: gl.constexpr = _next_power_of_2(E)
    LAYOUT: gl.constexpr = gl.BlockedLayout([max(BINS // (32 * WARPS), 1)], [32], [WARPS], [0])
    bins = gl.arange(0, BINS, LAYOUT)
    return bins, gl.minimum(gl.load(count_ptr + bins, mask=bins < E, other=0), capacity)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _piece(
    turn, bins, counts, OWN: gl.constexpr, UNITS: gl.constexpr, N: gl.constexpr, OWNERS: gl.constexpr
):  # fmt: skip
    """Return the unit of a program's turn, of its own ones and then of further tiles: expert, its first pair, place among its weights.

    Programs beyond the first OWNERS have no own ones: the first units of further tiles are theirs, as many as others have own ones."""
    program, programs = gl.program_id(0), gl.num_programs(0)
    unit = program * OWN + turn
    expert, start = unit // UNITS, unit * 0
    if (turn >= OWN) | (program >= OWNERS):
        others = programs - OWNERS
        unit = gl.where(turn < OWN, program - OWNERS + turn * others, others * OWN + program + (turn - OWN) * programs)
        tile = unit // UNITS
        further = gl.maximum((counts + N - 1) // N - 1, 0)  # tiles beyond an expert's first
        ends = gl.associative_scan(further, 0, _add)
        expert = gl.sum((ends <= tile).to(gl.int32), 0)
        start = (tile - gl.sum(gl.where(bins == expert, ends - further, 0), 0) + 1) * N
    return expert, start, unit % UNITS


@gluon.jit
def _plan(bins, counts, OWN: gl.constexpr, UNITS: gl.constexpr, N: gl.constexpr, OWNERS: gl.constexpr):
    """Return a bit for each of the few experts of a program's own units that has pairs, and how many turns the program has."""
    program, programs = gl.program_id(0), gl.num_programs(0)
    bit = bins - program * OWN // UNITS
    is_own = (bit >= 0) & (bit < OWN // UNITS + 2) & (counts > 0)
    present = gl.sum(gl.where(is_own, 1 << gl.where(is_own, bit, 0), 0), 0)
    units = gl.sum(gl.maximum((counts + N - 1) // N - 1, 0), 0) * UNITS
    others = programs - OWNERS
    num_turns = OWN + gl.maximum(units - others * OWN - program + programs - 1, 0) // programs
    if program >= OWNERS:
        early = gl.maximum(units - (program - OWNERS) + others - 1, 0) // others
        num_turns = gl.where(early < OWN, early, num_turns)
    return present, num_turns


@gluon.jit
def _next_turn(turn, present, OWN: gl.constexpr, UNITS: gl.constexpr, FORCED: gl.constexpr, OWNERS: gl.constexpr):
    """Return the next turn: of own units all of the first FORCED, and others whose expert has a bit in `present`."""
    turn += 1
    first = gl.program_id(0) * OWN
    is_idle = (turn >= FORCED) & (turn < OWN) & (gl.program_id(0) < OWNERS)
    while is_idle:
        expert = (first + turn) // UNITS
        is_idle = (present >> (expert - first // UNITS)) & 1 == 0
        turn = gl.where(is_idle, gl.minimum((expert + 1) * UNITS - first, OWN), turn)
        is_idle = is_idle & (turn < OWN)
    return turn


@gluon.jit
def _fetch(
    weight, expert, column, step, barrier, buffers, stage, SIZE: gl.constexpr, IS_GATED: gl.constexpr
):  # fmt: skip
    """Fetch a buffer: lines of ROWS rows of an expert's weights; of gate and up eight rows of one, the same eight of the other, ..."""
    mbarrier.expect(barrier, weight.block_type.nbytes)
    line = step * weight.block_type.shape[0]
    if IS_GATED:
        eight = (expert * (2 * SIZE) + column * _HALF_ROWS) // 8
        tma.async_copy_global_to_shared(weight, [line, eight, 0, 0, 0], barrier, buffers.index(stage))
    else:
        tma.async_copy_global_to_shared(
            weight, [line, expert * SIZE + column * _ROWS, 0], barrier, buffers.index(stage)
        )


@gluon.jit
def _pairs_at(order, start, capacity, places):
    """Return an expert's pairs; behind those that there are any number, so that nobody waits for the count first."""
    return gl.load(order + start + places, mask=start + places < capacity, other=0)


@gluon.jit
def _copy_rows(
    x, x_stride, order, start, count, capacity, rows, GROUP: gl.constexpr, N: gl.constexpr, K: gl.constexpr,
    NUM_LINES: gl.constexpr, WAITS: gl.constexpr,
):  # fmt: skip
    """Copy a warp group's half of the numbers of each row of x to `rows` [NUM_LINES, N, 64]."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    HALF: gl.constexpr = NUM_LINES // 2
    places = gl.arange(0, N, gl.SliceLayout(1, LAYOUT))
    pairs, is_pair = _pairs_at(order, start, capacity, places), start + places < count
    lane = gl.arange(0, rows.shape[2], gl.SliceLayout(0, LAYOUT))
    cells = x + ((pairs // K) * x_stride)[:, None] + lane[None, :]
    if WAITS:
        gdc_wait()
    for k in gl.static_range(GROUP * HALF, GROUP * HALF + HALF):
        async_copy.async_copy_global_to_shared(rows.index(k), cells + k * rows.shape[2], mask=is_pair[:, None])
    async_copy.commit_group()
    async_copy.wait_group(0)


@gluon.jit
def _split_rows(
    x, x_stride, order, start, count, capacity, rows, inverse, GROUP: gl.constexpr, N: gl.constexpr, K: gl.constexpr,
    NUM_LINES: gl.constexpr, WAITS: gl.constexpr,
):  # fmt: skip
    """Write a warp group's half of the rows of x times a power of two, as sums of two numbers in e4m3, to `rows` [NUM_LINES, 2 N, 128],
    and one by the power to `inverse`.

    The first has four of a number's eight bits, the second the rest: nothing is lost down to 2^-16 of the row's largest number. A row that
    has an infinite number becomes NaN."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    HALF: gl.constexpr = N // 2
    for first in gl.static_range(GROUP * HALF, GROUP * HALF + HALF, _SPLIT_ROWS):
        places = first + gl.arange(0, _SPLIT_ROWS, gl.SliceLayout(1, LAYOUT))
        pairs, is_pair = _pairs_at(order, start, capacity, places), start + places < count
        lane = gl.arange(0, rows.shape[2], gl.SliceLayout(0, LAYOUT))
        cells = x + ((pairs // K) * x_stride)[:, None] + lane[None, :]
        if WAITS:
            gdc_wait()
        pieces = ()
        for k in gl.static_range(NUM_LINES):
            pieces += (gl.load(cells + k * rows.shape[2], mask=is_pair[:, None], other=0.0),)
        most = gl.abs(pieces[0].to(gl.float32))
        for k in gl.static_range(1, NUM_LINES):
            most = gl.maximum(most, gl.abs(pieces[k].to(gl.float32)))
        exponent = gl.max(most, 1).to(gl.int32, bitcast=True) >> 23
        power = gl.where(exponent == 255, 0x7FC00000, gl.minimum(261 - exponent, 253) << 23)
        scale = power.to(gl.float32, bitcast=True)  # the largest becomes 128 to 256
        inverse.slice(first, _SPLIT_ROWS).store((gl.maximum(exponent - 7, 1) << 23).to(gl.float32, bitcast=True))
        for k in gl.static_range(NUM_LINES):
            number = pieces[k].to(gl.float32) * scale[:, None]
            high = number.to(gl.float8e4nv)
            rows.index(k).slice(first, _SPLIT_ROWS).store(high)
            rows.index(k).slice(N + first, _SPLIT_ROWS).store((number - high.to(gl.float32)).to(gl.float8e4nv))


@gluon.jit
def _scale_of(weight_scale, expert, column, SIZE: gl.constexpr, IS_GATED: gl.constexpr, layout: gl.constexpr):
    """Return the scales of a unit's rows, in their order in a buffer."""
    row = gl.arange(0, _ROWS, layout)
    if IS_GATED:
        place = expert * (2 * SIZE) + column * _HALF_ROWS + row // 16 * 8 + row % 8 + row // 8 % 2 * SIZE
    else:
        place = expert * SIZE + column * _ROWS + row
    return gl.load(weight_scale + place)


@gluon.jit
def _block_scales_of(weight_scale, expert, column, SIZE: gl.constexpr, BLOCKS: gl.constexpr, IS_GATED: gl.constexpr):
    """Return where the scales of a unit's rows begin: of gate's and of up's, or of its first half and of its second."""
    if IS_GATED:
        first = expert * (2 * SIZE) + column * _HALF_ROWS
        second = first + SIZE
    else:
        first = expert * SIZE + column * _ROWS
        second = first + _HALF_ROWS
    return weight_scale + first * BLOCKS, weight_scale + second * BLOCKS


@gluon.jit
def _store(
    total, share, own_order, start, count, capacity, out, column, SIZE: gl.constexpr, ACTIVATION: gl.constexpr
):  # fmt: skip
    """Store the activation of a unit's sums [_ROWS, N] float32, or those times the pairs' weights; out [pairs, SIZE].

    They stay in L2 for the kernel behind. As measured on an H200, 128 tokens of Qwen3-30B-A3B's experts in e4m3, us: 171 where weights
    may push them out, 164 where they stay."""
    N: gl.constexpr = total.shape[1]
    dtype: gl.constexpr = out.dtype.element_ty
    COLUMNS: gl.constexpr = _ROWS if ACTIVATION is None else _HALF_ROWS
    if ACTIVATION is None:
        result = (total * share[None, :]).to(dtype)
    else:
        gate, up = gl.split(gl.permute(gl.reshape(total, (_ROWS // 16, 2, 8, N)), (0, 2, 3, 1)))
        gate, up = gl.reshape(gate, (COLUMNS, N)), gl.reshape(up, (COLUMNS, N))
        result = activated_tile(gate.to(dtype).to(gl.float32), up.to(dtype).to(gl.float32), ACTIVATION, dtype)
    places = gl.arange(0, N, gl.SliceLayout(0, result.type.layout))
    pairs, is_pair = _pairs_at(own_order, start, capacity, places), start + places < count
    columns = column * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(1, result.type.layout))
    cells = out + (pairs * SIZE)[None, :] + columns[:, None]
    gl.store(cells, result, mask=is_pair[None, :], eviction_policy="evict_last")


@gluon.jit
def _copy(
    weight, count_ptr, capacity, buffers, ready, free,
    E: gl.constexpr, SIZE: gl.constexpr, N: gl.constexpr, OWN: gl.constexpr, OWNERS: gl.constexpr, UNITS: gl.constexpr,
    STEPS: gl.constexpr, STAGES: gl.constexpr, FORCED: gl.constexpr, IS_GATED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The copying warp, as far ahead as there are buffers, the first of which are filled before the experts are chosen."""
    turn, first_step, now = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
    is_owner = gl.program_id(0) < OWNERS
    if is_owner:
        for i in gl.static_range(STAGES):
            unit = gl.program_id(0) * OWN + i // STEPS
            _fetch(weight, unit // UNITS, unit % UNITS, i % STEPS, ready.index(i), buffers, i, SIZE, IS_GATED)
        turn, first_step, now = gl.to_tensor(STAGES // STEPS), gl.to_tensor(STAGES % STEPS), gl.to_tensor(STAGES)
    if PDL and IS_GATED:
        gdc_wait()
        gdc_launch_dependents()  # the second product reads the choice before it waits for this launch
    bins, counts = _counts(count_ptr, capacity, E, 1)
    present, num_turns = _plan(bins, counts, OWN, UNITS, N, OWNERS)
    if is_owner & (first_step == 0):
        turn = _next_turn(turn - 1, present, OWN, UNITS, FORCED, OWNERS)
    while turn < num_turns:
        expert, _, column = _piece(turn, bins, counts, OWN, UNITS, N, OWNERS)
        for step in range(first_step, STEPS):
            stage = now % STAGES
            mbarrier.wait(free.index(stage), ((now // STAGES) & 1) ^ 1)
            _fetch(weight, expert, column, step, ready.index(stage), buffers, stage, SIZE, IS_GATED)
            now += 1
        first_step = gl.to_tensor(0)
        turn = _next_turn(turn, present, OWN, UNITS, FORCED, OWNERS)


@gluon.jit
def _meet(met, meetings):
    """Wait until both warp groups are here, for the `meetings`-th time."""
    gl.thread_barrier()
    mbarrier.arrive(met, count=1)
    mbarrier.wait(met, meetings & 1)


@gluon.jit
def _sums(
    lines, rows, ready, free, now, COLUMNS: gl.constexpr, STEPS: gl.constexpr, LINES: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Return a unit's rows of the weights, in the buffers from number `now` on, times the rows of x: [_ROWS, COLUMNS] float32."""
    IS_SPLIT: gl.constexpr = lines.dtype.primitive_bitwidth == 8
    INNER: gl.constexpr = 256 // lines.dtype.primitive_bitwidth
    ACROSS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, INNER])
    sums = gl.zeros((_ROWS, COLUMNS), gl.float32, ACROSS)
    total = warpgroup_mma_init(gl.zeros((_ROWS, COLUMNS), gl.float32, ACROSS))
    for step in range(STEPS):
        stage = (now + step) % STAGES
        mbarrier.wait(ready.index(stage), ((now + step) // STAGES) & 1)
        for i in gl.static_range(LINES):
            right = rows.index(step * LINES + i).permute((1, 0))
            total = warpgroup_mma(
                lines.index(stage * LINES + i), right, total, use_acc=(not IS_SPLIT) | (i > 0), is_async=True
            )
        part = warpgroup_mma_wait(0, deps=(total,))
        gl.thread_barrier()  # every warp's product of that buffer is done
        mbarrier.arrive(free.index(stage), count=1)
        if IS_SPLIT:  # few numbers at a time: within a sum of e4m3's products the device keeps 14 bits
            sums += part
        total = warpgroup_mma_init(part)
    return sums if IS_SPLIT else warpgroup_mma_wait(0, deps=(total,))


@gluon.jit
def _block_sums(
    lines, rows, first_scales, second_scales, ready, free, now, N: gl.constexpr, STEPS: gl.constexpr, LINES: gl.constexpr,
    STAGES: gl.constexpr, IS_GATED: gl.constexpr,
):  # fmt: skip
    """As `_sums` of weights in e4m3, each line's sums times its block's scale, both numbers of x added: [_ROWS, N] float32."""
    ACROSS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * N, 32])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 32])
    row = gl.arange(0, _ROWS, gl.SliceLayout(1, SUMS))
    is_first = row // 8 % 2 == 0 if IS_GATED else row < _HALF_ROWS
    sums = gl.zeros((_ROWS, N), gl.float32, SUMS)
    for step in range(STEPS):
        stage = (now + step) % STAGES
        scales = ()
        for i in gl.static_range(LINES):
            line = step * LINES + i
            scales += (gl.where(is_first, gl.load(first_scales + line), gl.load(second_scales + line)),)
        mbarrier.wait(ready.index(stage), ((now + step) // STAGES) & 1)
        parts = ()
        for i in gl.static_range(LINES):
            total = warpgroup_mma_init(gl.zeros((_ROWS, 2 * N), gl.float32, ACROSS))
            right = rows.index(step * LINES + i).permute((1, 0))
            parts += (warpgroup_mma(lines.index(stage * LINES + i), right, total, use_acc=False, is_async=True),)
        parts = warpgroup_mma_wait(0, deps=parts)
        gl.thread_barrier()  # every warp's product of that buffer is done
        mbarrier.arrive(free.index(stage), count=1)
        for i in gl.static_range(LINES):
            part = parts[i] if LINES > 1 else parts
            high, low = gl.split(gl.permute(gl.reshape(part, (_ROWS, 2, N)), (0, 2, 1)))
            sums += gl.convert_layout(high + low, SUMS, assert_trivial=True) * scales[i][:, None]
    return sums


@gluon.jit
def _multiply(
    GROUP: gl.constexpr, x, x_stride, weight_scale, share, out, order, count_ptr, capacity, lines, rows, inverse, ready, free, met, passed,
    E: gl.constexpr, SIZE: gl.constexpr, K: gl.constexpr, N: gl.constexpr, OWN: gl.constexpr, OWNERS: gl.constexpr,
    UNITS: gl.constexpr, STEPS: gl.constexpr, LINES: gl.constexpr, STAGES: gl.constexpr, FORCED: gl.constexpr,
    BLOCKS: gl.constexpr, ACTIVATION: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """A warp group: every second unit, and half of what is to be brought of rows of x."""
    IS_GATED: gl.constexpr = ACTIVATION is not None
    IS_SPLIT: gl.constexpr = lines.dtype.primitive_bitwidth == 8
    # Sums of N pairs: those of 2 N columns, the second N of them added to the first, have it too.
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 256 // lines.dtype.primitive_bitwidth])
    WAITS: gl.constexpr = PDL and not IS_GATED
    if PDL and IS_GATED:
        gdc_wait()
    bins, counts = _counts(count_ptr, capacity, E, 4)
    now, held, turn, meetings, number, count = 0, -1, 0, 0, 0, 0
    present, num_turns = 0, 1  # until it is known, behind the first rows
    if (gl.program_id(0) >= OWNERS) | (not IS_GATED):
        present, num_turns = _plan(bins, counts, OWN, UNITS, N, OWNERS)
    places = gl.arange(0, N, gl.SliceLayout(0, SUMS))
    weights = places.to(gl.float32)  # of the pairs that are held
    while turn < num_turns:
        expert, start, column = _piece(turn, bins, counts, OWN, UNITS, N, OWNERS)
        own_order = order + expert.to(gl.int64) * capacity
        if held != expert * capacity + start:
            count = gl.minimum(gl.load(count_ptr + expert), capacity)
            if held >= 0:
                _meet(met, meetings)  # nobody multiplies the last rows any more
                meetings += 1
            if not IS_GATED:
                pairs = _pairs_at(own_order, start, capacity, places)
                weights = gl.load(share + pairs, mask=start + places < count, other=0.0)
            if IS_SPLIT:
                _split_rows(
                    x, x_stride, own_order, start, count, capacity, rows, inverse, GROUP, N, K, STEPS * LINES, WAITS
                )
            else:
                _copy_rows(x, x_stride, own_order, start, count, capacity, rows, GROUP, N, K, STEPS * LINES, WAITS)
            held = expert * capacity + start
            if IS_GATED:  # noqa: SIM102
                if turn == 0:
                    present, num_turns = _plan(bins, counts, OWN, UNITS, N, OWNERS)
            fence_async_shared()
            _meet(met, meetings)
            meetings += 1
        if number % 2 == GROUP:
            if number > 0:
                # A wait for a buffer tells one filling from the next alone: all of the unit before must have been seen.
                mbarrier.wait(passed.index(1 - GROUP), (number // 2 + 1 + GROUP) & 1)
            if BLOCKS > 1:
                first, second = _block_scales_of(weight_scale, expert, column, SIZE, BLOCKS, IS_GATED)
                result = _block_sums(lines, rows, first, second, ready, free, now, N, STEPS, LINES, STAGES, IS_GATED)
                mbarrier.arrive(passed.index(GROUP), count=1)
                result = result * inverse.load(gl.SliceLayout(0, SUMS))[None, :]
            else:
                if IS_SPLIT:  # asked for before the sums, behind which it would be waited for
                    scale = _scale_of(weight_scale, expert, column, SIZE, IS_GATED, gl.SliceLayout(1, SUMS))
                result = _sums(lines, rows, ready, free, now, 2 * N if IS_SPLIT else N, STEPS, LINES, STAGES)
                mbarrier.arrive(passed.index(GROUP), count=1)
                if IS_SPLIT:
                    high, low = gl.split(gl.permute(gl.reshape(result, (_ROWS, 2, N)), (0, 2, 1)))
                    result = gl.convert_layout(high + low, SUMS, assert_trivial=True) * scale[:, None]
                    result = result * inverse.load(gl.SliceLayout(0, SUMS))[None, :]
            _store(result, weights, own_order, start, count, capacity, out, column, SIZE, ACTIVATION)
        now += STEPS
        number += 1
        turn = _next_turn(turn, present, OWN, UNITS, FORCED, OWNERS)


@gluon.jit(do_not_specialize=["capacity"])
def streamed_kernel(
    x, x_stride, weight, weight_scale, share, out, order, count_ptr, capacity,
    E: gl.constexpr, SIZE: gl.constexpr, WIDTH: gl.constexpr, K: gl.constexpr, N: gl.constexpr, OWNERS: gl.constexpr,
    OWN: gl.constexpr, STAGES: gl.constexpr, BLOCKS: gl.constexpr, ACTIVATION: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Compute a program's OWN units, which are 128 rows of an expert's weights by N of its pairs, and its share of further tiles' units.
    The first of its own are computed whether the expert has a pair or not: their weights are on their way before that is known. BLOCKS:
    scales of a row of the weights.

    With an activation the choice of experts is there once the launch waits; without one before: x alone is of the launch before it."""
    IS_GATED: gl.constexpr = ACTIVATION is not None
    BITS: gl.constexpr = weight.dtype.primitive_bitwidth
    COLUMNS: gl.constexpr = _LINE * 8 // BITS
    LINES: gl.constexpr = weight.block_type.shape[0]
    STEPS: gl.constexpr = WIDTH // (COLUMNS * LINES)
    UNITS: gl.constexpr = SIZE // (_HALF_ROWS if IS_GATED else _ROWS)
    FORCED: gl.constexpr = (STAGES + STEPS - 1) // STEPS  # units whose weights are on their way, or some of them
    gl.static_assert(STAGES <= STEPS * OWN, "a program's own units fill all buffers")
    gl.static_assert(OWN // UNITS < 30, "a bit for each expert of a program")
    FLAT: gl.constexpr = gl.NVMMASharedLayout(128, BITS, 2)
    buffers = gl.allocate_shared_memory(weight.dtype, [STAGES] + weight.block_type.shape, weight.layout)  # noqa: RUF005
    lines = buffers._reinterpret(weight.dtype, [STAGES * LINES, _ROWS, COLUMNS], FLAT)
    rows = gl.allocate_shared_memory(weight.dtype, [STEPS * LINES, 2 * N if BITS == 8 else N, COLUMNS], FLAT)
    inverse = gl.allocate_shared_memory(gl.float32, [N], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    met = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    passed = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(passed.index(i), count=1)
    mbarrier.init(met, count=2)
    fence_async_shared()
    if PDL and not IS_GATED:
        gdc_launch_dependents()
    gl.warp_specialize(
        [
            (_multiply, (
                gl.constexpr(0), x, x_stride, weight_scale, share, out, order, count_ptr, capacity, lines, rows, inverse, ready, free,
                met, passed, E, SIZE, K, N, OWN, OWNERS, UNITS, STEPS, LINES, STAGES, FORCED, BLOCKS, ACTIVATION, PDL,
            )),
            (_multiply, (
                gl.constexpr(1), x, x_stride, weight_scale, share, out, order, count_ptr, capacity, lines, rows, inverse, ready, free,
                met, passed, E, SIZE, K, N, OWN, OWNERS, UNITS, STEPS, LINES, STAGES, FORCED, BLOCKS, ACTIVATION, PDL,
            )),
            (_copy, (
                weight, count_ptr, capacity, buffers, ready, free, E, SIZE, N, OWN, OWNERS, UNITS, STEPS, STAGES, FORCED,
                gl.constexpr(IS_GATED), PDL,
            )),
        ],
        [4, 1],
        [_REGISTERS, _COPYING],
    )  # fmt: skip


_launch = Launcher(streamed_kernel)


class Tiling(NamedTuple):
    """Programs that have `own` units each, of 128 rows of the weights by `pairs` pairs of an expert; a ring of `stages` buffers of `lines`
    times 128 bytes of each of the rows."""

    programs: int
    own: int
    pairs: int
    lines: int
    stages: int


def takes_blocks(columns: int, rows: int) -> bool:
    """Return whether a scale for each block of so many columns, the same for so many rows, is what a unit's rows have."""
    return columns == BLOCK_COLUMNS and rows % BLOCK_ROWS == 0


@cache
def choose_tilings(
    num_experts: int, hidden_size: int, size: int, pairs: int, itemsize: int = 1
) -> tuple[Tiling, Tiling] | None:  # fmt: skip
    """Return both products' work, or None: sizes that cannot be cut into equal parts for about as many programs as there are
    multiprocessors, or that do not fit in a program's memory.

    As measured on an H200, whole layers of Qwen3-30B-A3B in e4m3 in a captured chain, us, beside one warp group that copies and multiplies:
    128 tokens 159.8 (175.7); where both groups multiply half of each buffer, 163.6, 64 tokens 154.8 (161.4), 32 143.5 (148.6) and 256
    199.5 (206.9)."""
    if not MIN_PAIRS <= pairs <= MOST_PAIRS:
        return None
    first = _cut(num_experts, size, hidden_size, pairs, itemsize, is_gated=True)
    second = _cut(num_experts, hidden_size, size, pairs, itemsize, is_gated=False)
    return None if first is None or second is None else (first, second)


def _cut(
    num_experts: int, out_features: int, in_features: int, pairs: int, itemsize: int, *, is_gated: bool
) -> Tiling | None:
    unit = ROWS // 2 if is_gated else ROWS
    for lines in LINES:
        column = LINE * lines // itemsize
        if out_features % unit or in_features % column or (in_features // LINE * itemsize) % 2:
            continue
        units = num_experts * (out_features // unit)
        own = next(own for own in range(1, units + 1) if units % own == 0 and units // own <= PROGRAMS)
        held = in_features * pairs * 2
        stages = min((_MEMORY - held) // (ROWS * LINE * lines), in_features // column * own)
        if units // own >= MIN_PROGRAMS and stages * lines >= MIN_LINES and stages >= MIN_STAGES:
            return Tiling(units // own, own, pairs, lines, stages)
    return None


def _described(weight: Tensor, tiling: Tiling, *, is_gated: bool) -> TensorDescriptor:
    """Return boxes of `lines` times 128 bytes of 128 rows of all experts' weights [E, N, WIDTH]."""
    num_experts, num_rows, width = weight.shape
    columns = LINE // weight.element_size()
    if is_gated:
        half, rows = num_rows // 2, [ROWS // 16, 2, 8]
        shape, strides = [(num_experts * num_rows - half) // 8, 2, 8], [8 * width, half * width, width]
    else:
        shape, strides, rows = [num_experts * num_rows], [width], [ROWS]
    layout = gl.NVMMASharedLayout(LINE, 8 * weight.element_size(), len(rows) + 2)
    box = [tiling.lines, *rows, columns]
    return TensorDescriptor(weight, [width // columns, *shape, columns], [columns, *strides, 1], box, layout)


def experts_product(
    x: Tensor, weight: Tensor, weight_scale: Tensor | None, share: Tensor, out: Tensor, order: Tensor, counts: Tensor, top_k: int,
    tiling: Tiling, activation: str | None = None,
) -> None:  # fmt: skip
    """Write each pair's product with its expert's weight to its row of out: activation(x @ gate.T) * (x @ up.T), or share * (x @ w.T).

    x             [T, WIDTH] or [pairs, WIDTH]  fp16 or bf16, rows at multiples of 16 bytes: pair p's is row p // top_k
    weight        [E, N, WIDTH]  float8_e4m3fn, contiguous; with an activation gate's rows, then up's; weight_scale [E, N, 1] float32,
                  or [E, N, WIDTH / BLOCK_COLUMNS], the same for each BLOCK_ROWS rows of gate, of up and of down. Or the dtype of x,
                  without scales
    share         [pairs] float32, read without an activation
    out           [pairs, N or N / 2]  written for the pairs that there are
    order         [E, T] int32, each expert's pairs; counts [E] int32, how many

    Of weights in e4m3 x is the sum of two numbers in e4m3, which loses next to nothing of it (`_split_rows`); sums in float32, by 256
    numbers at a time on the device's 14 bits. Against float64 on an H200 both products are off by 0.0038 of a row's norm on average and
    by 0.0050 at most, and with weights that are converted to bfloat16 by 0.0038 and 0.0053: it is the result's rounding.
    """
    num_experts, _, width = weight.shape
    programs = max(tiling.programs, min(num_sms(x.device), PROGRAMS))
    constants = {
        "E": num_experts, "SIZE": out.shape[1], "WIDTH": width, "K": top_k, "N": tiling.pairs, "OWNERS": tiling.programs,
        "OWN": tiling.own, "STAGES": tiling.stages, "BLOCKS": 1 if weight_scale is None else weight_scale.shape[2],
        "ACTIVATION": activation, "PDL": has_pdl(x.device),
    }  # fmt: skip
    _launch(
        (x.dtype, weight.dtype, out.dtype, x.device, x.stride(0), alignment(x, weight, share, out, order, counts), tiling.lines,
         *constants.values()),
        (programs,),
        (
            x, x.stride(0), _described(weight, tiling, is_gated=activation is not None), weight_scale, share, out, order, counts,
            order.shape[1],
        ),
        constants,
        num_warps=4, **launch_options(has_pdl(x.device)),
    )  # fmt: skip
