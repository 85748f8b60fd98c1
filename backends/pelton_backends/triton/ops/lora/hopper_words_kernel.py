"""`hopper_split_k.py`'s kernel with adapters, without an activation: one launch for a product of few rows, A x, and B A x of each
row's adapter. Gate and up: `hopper_gated_kernel.py`.

A of all adapters of the step is multiplied with all rows in shares of the columns. The first programs do nothing else, as many shares
in turn as leave A x early enough; where the multiprocessors that the weight leaves free are too few for all, the weight's programs,
from the last one on, each make one or a few behind their first weights (`hopper.deal_shares`). Each row's own sums are left in
words of 8 bytes: half number, half the step that it is of.

To a program B is more columns of the weight, those of x being A x where a row has the adapter, and zero: they come last through the
ring of buffers. The words are fetched while the last columns of the weight are on their way, and looked at some steps later: only
where one is missing yet the program waits. Programs start in order, so those that others wait for run; where the weight's programs
wait for one another, all of them run at once.

Adapters come in units: as many neighbouring slots as have 64 ranks together, a panel of a buffer, for A as rows, for B as columns.
Their numbers are in `units` (`pelton.lora.rows`); what lies past the last slot is copied as zeros. Loops are left to run where each
round has other code to fetch: unrolled, the kernel was five times as long as without adapters, which took 4 us a product in a chain of
different ones (H200).
"""

from __future__ import annotations

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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pelton_backends.triton.ops.linear.hopper_split_k import add_stage, fetch, store_split
from pelton_backends.triton.ops.lora.hopper_gated_kernel import fetch_a


@gluon.jit
def _fetch_b(source, units, unit, row, barrier, panels, at, PANELS: gl.constexpr):
    """B of a program's rows, of PANELS units from `unit` on."""
    for i in gl.static_range(PANELS):
        tma.async_copy_global_to_shared(source, [gl.load(units + unit + i), row, 0], barrier, panels.index(at + i))


@gluon.jit
def _store_words(
    total, words, units, unit, part, share, token, token_slots, num_tokens, this_step,
    M: gl.constexpr, R: gl.constexpr, RANK: gl.constexpr, NUM_PARTS: gl.constexpr, SHARES: gl.constexpr,
):  # fmt: skip
    """Leave A x of a share [R, M], each row's of its own adapter."""
    own: gl.constexpr = gl.BlockedLayout([2, 1], [8, 4], [gl.num_warps(), 1], [0, 1])
    value = gl.convert_layout(total, own)
    r = gl.arange(0, R, gl.SliceLayout(1, own))
    t = token + gl.arange(0, M, gl.SliceLayout(0, own))
    slot_of = gl.load(token_slots + t, mask=t < num_tokens, other=-1)
    slot = gl.load(units + unit + r // 64) * (64 // RANK) + r % 64 // RANK
    word = (this_step.to(gl.int64) << 32) | (value.to(gl.int32, bitcast=True).to(gl.int64) & 0xFFFFFFFF)
    place = ((t * NUM_PARTS + part) * SHARES + share)[None, :] * RANK + (r % RANK)[:, None]
    gl.store(words + place, word, mask=slot_of[None, :] == slot[:, None])


@gluon.jit
def _words_of(
    words, part, token, is_own, M: gl.constexpr, RANK: gl.constexpr, NUM_PARTS: gl.constexpr, SHARES: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Where A x of M rows and one part is: [SHARES, M, RANK]; and of which rows it is wanted."""
    shares = gl.arange(0, SHARES, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    t = token + gl.arange(0, M, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    r = gl.arange(0, RANK, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    place = words + ((t * NUM_PARTS + part) * SHARES + shares) * RANK + r
    return place, is_own[None, :, None] & (shares >= 0) & (r >= 0)


@gluon.jit
def _num_missing(found, mask, this_step):
    missing = (mask & ((found >> 32) != this_step)).to(gl.int32)
    return gl.sum(gl.sum(gl.sum(missing, axis=0), axis=1), axis=0)


@gluon.jit
def _take_low(found, place, mask, this_step):
    """A x, as soon as it is there: [M, RANK] float32; zeros for rows without an adapter. found: the words as they were."""
    while _num_missing(found, mask, this_step) > 0:
        found = gl.load(place, mask=mask, other=0, volatile=True)
    return gl.sum(found.to(gl.int32).to(gl.float32, bitcast=True), axis=0)


@gluon.jit
def _leave_low(
    buffer, low, slot_of, units, unit, PANELS: gl.constexpr, M: gl.constexpr, RANK: gl.constexpr, layout: gl.constexpr,
    dtype: gl.constexpr,
):  # fmt: skip
    """A panel [M, 64] for each of PANELS units, below each other: the rows of x that B's columns meet. low [M, RANK], slot_of [M]."""
    SLOTS: gl.constexpr = 64 // RANK
    low = gl.convert_layout(low, gl.SliceLayout(1, layout))[:, None, :]
    own = gl.arange(0, SLOTS, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :]
    for i in gl.static_range(PANELS):
        is_own = (slot_of[:, None] == own + gl.load(units + unit + i) * SLOTS)[:, :, None]
        buffer.slice(i * M, M).store(gl.reshape(gl.where(is_own, low, 0.0).to(dtype), (M, 64)))


@gluon.jit
def _refill_b(
    step, weights_end, weight, b, units, row, weight_barriers, b_pieces, STAGES: gl.constexpr, PANELS: gl.constexpr
):
    stage = step % STAGES
    mbarrier.expect(weight_barriers.index(stage), weight.block_type.nbytes)
    _fetch_b(
        b, units, (step - weights_end) * PANELS, row, weight_barriers.index(stage), b_pieces, stage * PANELS, PANELS
    )


@gluon.jit
def _add_b(
    total,
    step,
    weights,
    weight_barriers,
    buffer,
    STAGES: gl.constexpr,
    PANELS: gl.constexpr,
    R: gl.constexpr,
    M: gl.constexpr,
):
    """Begin the products of B, as soon as a step's buffer is filled, with A x in `buffer` [PANELS M, 64]."""
    stage = step % STAGES
    mbarrier.wait(weight_barriers.index(stage), (step // STAGES) & 1)
    left = weights.index(stage).reshape((PANELS * R, 64))
    for i in gl.static_range(PANELS):
        total = warpgroup_mma(left.slice(i * R, R), buffer.slice(i * M, M).permute((1, 0)), total, is_async=True)
    return total


@gluon.jit
def _share_of(
    pid, turn, num_alone, num_turns, num_programs, num_blocks,
    NUM_PARTS: gl.constexpr, SHARES: gl.constexpr, UNITS: gl.constexpr, IS_SHARED: gl.constexpr,
):  # fmt: skip
    """First unit, block of tokens, part and share of the columns that a program makes A x of in its turn, and the share's number."""
    index = pid
    if IS_SHARED:
        own = num_alone * num_turns + num_alone + num_programs - 1 - pid + turn * num_programs
        index = gl.where(pid < num_alone, pid + turn * num_alone, own)
    unit = index // (SHARES * NUM_PARTS)
    block = 0
    if not IS_SHARED:
        block = unit % num_blocks
        unit = unit // num_blocks
    return unit * UNITS, block, index // SHARES % NUM_PARTS, index % SHARES, index


@gluon.jit
def _num_turns_of(
    pid, num_used, num_shares, num_alone, num_turns, num_programs, num_blocks,
    NUM_PARTS: gl.constexpr, SHARES: gl.constexpr, UNITS: gl.constexpr, IS_SHARED: gl.constexpr,
):  # fmt: skip
    """How many shares a program makes. Those of units that the step has are the first of all."""
    unit, _, _, _, index = _share_of(
        pid, 0, num_alone, num_turns, num_programs, num_blocks, NUM_PARTS, SHARES, UNITS, IS_SHARED
    )
    if IS_SHARED:
        num_there = gl.minimum(num_shares, (num_used + UNITS - 1) // UNITS * (SHARES * NUM_PARTS))
        between = gl.where(pid < num_alone, num_alone, num_programs)
        found = (gl.maximum(num_there - index, 0) + between - 1) // between
        found = gl.where(pid < num_alone, gl.minimum(found, num_turns), found)
    else:
        found = (unit < num_used).to(gl.int32)
    return found


@gluon.jit
def _fetch_low(
    step, stage, x, a, units, pid, num_alone, num_turns, num_programs, num_blocks, weight_barriers, row_barriers, rows, a_pieces,
    K: gl.constexpr, M: gl.constexpr, R: gl.constexpr, C: gl.constexpr, RANK: gl.constexpr, NUM_PARTS: gl.constexpr,
    SHARES: gl.constexpr, IS_SHARED: gl.constexpr, HAS_A: gl.constexpr, HAS_X: gl.constexpr,
):  # fmt: skip
    """Let the columns of a step of the program's shares come, and those of x."""
    PANELS: gl.constexpr = C // 64
    UNITS: gl.constexpr = R // 64
    LOW_STEPS: gl.constexpr = (K + C * SHARES - 1) // (C * SHARES)
    turn = 0
    if IS_SHARED:
        turn = step // LOW_STEPS
    unit, block, part, share, _ = _share_of(
        pid, turn, num_alone, num_turns, num_programs, num_blocks, NUM_PARTS, SHARES, UNITS, IS_SHARED
    )
    panel = (share * LOW_STEPS + step - turn * LOW_STEPS) * PANELS
    if HAS_A:
        mbarrier.expect(weight_barriers.index(stage), R * C * 2)
        fetch_a(
            a, units, unit, part * RANK, panel, weight_barriers.index(stage), a_pieces, stage * (PANELS * UNITS), PANELS, UNITS, 64 // RANK
        )  # fmt: skip
    if HAS_X:
        mbarrier.expect(row_barriers.index(stage), x.block_type.nbytes)
        fetch(x, block * M, panel, row_barriers.index(stage), rows.index(stage), False)


@gluon.jit
def _fetch_weight(stage, x, weight, row, panel, token, weight_barriers, row_barriers, weights, rows):
    mbarrier.expect(weight_barriers.index(stage), weight.block_type.nbytes)
    mbarrier.expect(row_barriers.index(stage), x.block_type.nbytes)
    fetch(weight, row, panel, weight_barriers.index(stage), weights.index(stage), False)
    fetch(x, token, panel, row_barriers.index(stage), rows.index(stage), False)


@gluon.jit
def _make_shares(
    before, own_turns, has_weight, x, weight, a, units, words, token_slots, this_step, pid, num_alone, num_turns, num_programs, num_blocks,
    num_tokens, row, first, token, weight_barriers, row_barriers, weights, rows, a_pieces,
    K: gl.constexpr, M: gl.constexpr, R: gl.constexpr, C: gl.constexpr, STAGES: gl.constexpr, RANK: gl.constexpr,
    NUM_PARTS: gl.constexpr, SHARES: gl.constexpr, IS_SHARED: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """A x of a program's shares, whose steps are those from `before` on; has_weight: steps of the weight follow."""
    PANEL: gl.constexpr = 64
    PANELS: gl.constexpr = C // PANEL
    LOW_STEPS: gl.constexpr = (K + C * SHARES - 1) // (C * SHARES)
    num_low = own_turns * LOW_STEPS
    for turn in range(own_turns):
        total = warpgroup_mma_init(gl.zeros((R, M), gl.float32, layout))
        for low_step in range(turn * LOW_STEPS, (turn + 1) * LOW_STEPS):
            step = before + low_step
            total = add_stage(
                total, step, weights, rows, weight_barriers, row_barriers, STAGES, PANELS, PANEL, R, M
            )  # fmt: skip
            total = warpgroup_mma_init(warpgroup_mma_wait(PANELS, deps=(total,)))
            later = low_step + STAGES - 1
            if (step > 0) & (has_weight | (later < num_low)):
                gl.thread_barrier()
                if later < num_low:
                    _fetch_low(
                        later, (before + later) % STAGES, x, a, units, pid, num_alone, num_turns, num_programs, num_blocks,
                        weight_barriers, row_barriers, rows, a_pieces, K, M, R, C, RANK, NUM_PARTS, SHARES, IS_SHARED, True, True,
                    )  # fmt: skip
                elif IS_SHARED:
                    _fetch_weight(
                        (before + later) % STAGES, x, weight, row, first + (before + later - num_low) * PANELS, token, weight_barriers,
                        row_barriers, weights, rows,
                    )  # fmt: skip
        unit, block, part, share, _ = _share_of(
            pid, turn, num_alone, num_turns, num_programs, num_blocks, NUM_PARTS, SHARES, R // 64, IS_SHARED
        )
        _store_words(
            warpgroup_mma_wait(0, deps=(total,)), words, units, unit, part, share, block * M, token_slots, num_tokens, this_step, M, R,
            RANK, NUM_PARTS, SHARES,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["num_tokens", "num_blocks", "num_shares", "num_alone", "num_turns"])
def adapted_words_kernel(
    x, weight, a, b, bias, out, partials, counters, units, num_units, token_slots, step_ptr, words, num_tokens, num_blocks, num_shares,
    num_alone, num_turns,
    N: gl.constexpr, K: gl.constexpr,
    M: gl.constexpr, R: gl.constexpr, C: gl.constexpr, SPLIT: gl.constexpr, STAGES: gl.constexpr,
    RANK: gl.constexpr, NUM_PARTS: gl.constexpr, SECOND: gl.constexpr, THIRD: gl.constexpr, SHARES: gl.constexpr,
    IS_SHARED: gl.constexpr, HAS_MORE: gl.constexpr,
):  # fmt: skip
    """As `hopper_split_k.multiply_kernel` without an activation. num_shares: of A x, of all units that there may be; the first num_alone
    programs make num_turns of them each, or fewer, and where it IS_SHARED the weight's programs the rest.
    HAS_MORE: adapters than fill a buffer with B, perhaps."""
    PANEL: gl.constexpr = 64
    PANELS: gl.constexpr = C // PANEL
    TILES: gl.constexpr = (N + R - 1) // R
    UNITS: gl.constexpr = R // 64
    NUM_STEPS: gl.constexpr = (K + C * SPLIT - 1) // (C * SPLIT)
    LOW_STEPS: gl.constexpr = (K + C * SHARES - 1) // (C * SHARES)
    SLOTS: gl.constexpr = 64 // RANK  # of a unit
    gl.static_assert(NUM_STEPS >= STAGES, "every buffer is filled before B's turn")
    gl.static_assert(not IS_SHARED or NUM_STEPS >= 2 * STAGES, "weights follow A in every buffer")
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, M, 16])
    pid = gl.program_id(0)
    weights = gl.allocate_shared_memory(weight.dtype, [STAGES] + weight.block_type.shape, weight.layout)  # noqa: RUF005
    rows = gl.allocate_shared_memory(x.dtype, [STAGES] + x.block_type.shape, x.layout)  # noqa: RUF005
    low_buffer = gl.allocate_shared_memory(x.dtype, [PANELS * M, PANEL], gl.NVMMASharedLayout(128, 16, 2))
    weight_barriers = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    row_barriers = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(weight_barriers.index(i), count=1)
        mbarrier.init(row_barriers.index(i), count=1)
    a_pieces = weights._reinterpret(weights.dtype, [STAGES * PANELS * UNITS, SLOTS, RANK, PANEL], a.layout)
    this_step = gl.load(step_ptr)
    num_programs = TILES * SPLIT * num_blocks
    own = gl.maximum(pid - num_alone, 0)
    tile = own % TILES
    split = own // TILES % SPLIT
    block = own // (TILES * SPLIT)
    token = block * M
    row = tile * R
    first = split * NUM_STEPS * PANELS
    own_turns = 0
    before = 0
    total = gl.zeros((R, M), gl.float32, layout)
    # What is read before the wait, of the step's rows and adapters, is there: see `runtime`.
    if pid < num_alone:
        num_used = gl.load(num_units)
        own_turns = _num_turns_of(
            pid,
            num_used,
            num_shares,
            num_alone,
            num_turns,
            num_programs,
            num_blocks,
            NUM_PARTS,
            SHARES,
            UNITS,
            IS_SHARED,
        )
        ahead = gl.minimum(own_turns * LOW_STEPS, STAGES)
        for step in range(ahead):
            _fetch_low(
                step, step, x, a, units, pid, num_alone, num_turns, num_programs, num_blocks, weight_barriers, row_barriers, rows,
                a_pieces, K, M, R, C, RANK, NUM_PARTS, SHARES, IS_SHARED, True, False,
            )  # fmt: skip
        gdc_launch_dependents()
        gdc_wait()
        for step in range(ahead):
            _fetch_low(
                step, step, x, a, units, pid, num_alone, num_turns, num_programs, num_blocks, weight_barriers, row_barriers, rows,
                a_pieces, K, M, R, C, RANK, NUM_PARTS, SHARES, IS_SHARED, False, True,
            )  # fmt: skip
    else:
        ahead = gl.where(num_tokens > 0, STAGES, 0)  # known to no compiler: it does not unroll
        # The weight's first, for which no number has to be known.
        for step in range(ahead):
            mbarrier.expect(weight_barriers.index(step), weight.block_type.nbytes)
            mbarrier.expect(row_barriers.index(step), x.block_type.nbytes)
            fetch(weight, row, first + step * PANELS, weight_barriers.index(step), weights.index(step), False)
        gdc_launch_dependents()
        num_used = gl.load(num_units)
        gdc_wait()
        for step in range(ahead):
            fetch(x, token, first + step * PANELS, row_barriers.index(step), rows.index(step), False)
        if IS_SHARED:  # A's come behind the first buffers
            before += STAGES
            own_turns = _num_turns_of(
                pid,
                num_used,
                num_shares,
                num_alone,
                num_turns,
                num_programs,
                num_blocks,
                NUM_PARTS,
                SHARES,
                UNITS,
                IS_SHARED,
            )
            sums = warpgroup_mma_init(total)
            for step in range(ahead):
                sums = add_stage(
                    sums, step, weights, rows, weight_barriers, row_barriers, STAGES, PANELS, PANEL, R, M
                )  # fmt: skip
                sums = warpgroup_mma_init(warpgroup_mma_wait(PANELS, deps=(sums,)))
                later = step - 1
                if step > 0:
                    gl.thread_barrier()
                    if later < own_turns * LOW_STEPS:
                        _fetch_low(
                            later, later, x, a, units, pid, num_alone, num_turns, num_programs, num_blocks, weight_barriers,
                            row_barriers, rows, a_pieces, K, M, R, C, RANK, NUM_PARTS, SHARES, IS_SHARED, True, True,
                        )  # fmt: skip
                    else:
                        _fetch_weight(
                            later, x, weight, row, first + (STAGES + later - own_turns * LOW_STEPS) * PANELS, token, weight_barriers,
                            row_barriers, weights, rows,
                        )  # fmt: skip
            total = warpgroup_mma_wait(0, deps=(sums,))
    num_low = own_turns * LOW_STEPS
    _make_shares(
        before, own_turns, pid >= num_alone, x, weight, a, units, words, token_slots, this_step, pid, num_alone, num_turns,
        num_programs, num_blocks, num_tokens, row, first, token, weight_barriers, row_barriers, weights, rows, a_pieces,
        K, M, R, C, STAGES, RANK, NUM_PARTS, SHARES, IS_SHARED, layout,
    )  # fmt: skip

    if pid >= num_alone:
        count = num_used
        if SPLIT > 1:
            count = gl.where(split == 0, num_used, 0)
        weights_end = num_low + NUM_STEPS
        end = weights_end + (count + PANELS - 1) // PANELS
        b_pieces = weights._reinterpret(weights.dtype, [STAGES * PANELS] + b.block_type.shape, b.layout)  # noqa: RUF005
        wide: gl.constexpr = gl.BlockedLayout([1, 1, 2], [1, 64 // RANK, RANK // 2], [1, gl.num_warps(), 1], [2, 1, 0])
        by_slot: gl.constexpr = gl.BlockedLayout(
            [1, SLOTS, 2], [SLOTS, 1, RANK // 2], [gl.num_warps(), 1, 1], [2, 1, 0]
        )
        t = token + gl.arange(0, M, gl.SliceLayout(1, gl.SliceLayout(2, by_slot)))
        slot_of = gl.load(token_slots + t, mask=t < num_tokens, other=-1)
        tw = token + gl.arange(0, M, gl.SliceLayout(0, gl.SliceLayout(2, wide)))
        is_own = gl.load(token_slots + tw, mask=tw < num_tokens, other=-1) >= 0
        if SPLIT > 1:
            is_own = is_own & (split == 0)
        total = warpgroup_mma_init(total)
        # A x is looked at while the last weights are on their way, and fetched before.
        START: gl.constexpr = STAGES if IS_SHARED else 0
        LATE: gl.constexpr = NUM_STEPS - STAGES + 1  # until then no buffer is B's
        WANTED: gl.constexpr = NUM_STEPS * 7 // 8 if IS_SHARED else NUM_STEPS * 5 // 8
        BEFORE: gl.constexpr = WANTED if WANTED < LATE else LATE
        LOOK: gl.constexpr = BEFORE - 4 if BEFORE > START + 4 else START
        for phase in gl.static_range(3):
            for own_step in range(
                START if phase == 0 else LOOK if phase == 1 else BEFORE,
                LOOK if phase == 0 else BEFORE if phase == 1 else NUM_STEPS,
            ):
                step = num_low + own_step
                total = add_stage(
                    total, step, weights, rows, weight_barriers, row_barriers, STAGES, PANELS, PANEL, R, M
                )  # fmt: skip
                total = warpgroup_mma_init(warpgroup_mma_wait(PANELS, deps=(total,)))
                later = step + STAGES - 1
                if (step > 0) & (later < end):
                    gl.thread_barrier()
                    if phase < 2 or later < weights_end:
                        _fetch_weight(
                            later % STAGES, x, weight, row, first + (later - num_low) * PANELS, token, weight_barriers, row_barriers,
                            weights, rows,
                        )  # fmt: skip
                    else:
                        _refill_b(later, weights_end, weight, b, units, row, weight_barriers, b_pieces, STAGES, PANELS)
            if phase == 0:
                own_part = (row >= SECOND).to(gl.int32) + (row >= THIRD).to(gl.int32)
                place, mask = _words_of(words, own_part, token, is_own, M, RANK, NUM_PARTS, SHARES, wide)
                found = gl.load(place, mask=mask, other=0, volatile=True)
            else:
                total = warpgroup_mma_wait(0, deps=(total,))
            if phase == 1:
                low = _take_low(found, place, mask, this_step)
                _leave_low(low_buffer, low, slot_of, units, 0, PANELS, M, RANK, by_slot, x.dtype)
                fence_async_shared()
                gl.thread_barrier()
                total = warpgroup_mma_init(total)

        if weights_end < end:
            if HAS_MORE and weights_end + STAGES - 1 < end:
                gl.thread_barrier()
                _refill_b(
                    weights_end + STAGES - 1,
                    weights_end,
                    weight,
                    b,
                    units,
                    row,
                    weight_barriers,
                    b_pieces,
                    STAGES,
                    PANELS,
                )
            total = _add_b(
                warpgroup_mma_init(total), weights_end, weights, weight_barriers, low_buffer, STAGES, PANELS, R, M
            )
            total = warpgroup_mma_wait(0, deps=(total,))
        # More adapters than fill a buffer: their rows of x lie where those of x have been.
        for begin in range(weights_end + 1, end if HAS_MORE else weights_end, STAGES):
            last = gl.minimum(begin + STAGES, end)
            gl.thread_barrier()  # every warp has read what was there
            for step in range(begin, last):
                buffer = rows.index(step % STAGES).reshape((PANELS * M, PANEL))
                _leave_low(
                    buffer, low, slot_of, units, (step - weights_end) * PANELS, PANELS, M, RANK, by_slot, x.dtype
                )
            fence_async_shared()
            gl.thread_barrier()
            sums = warpgroup_mma_init(total)
            for step in range(begin, last):
                buffer = rows.index(step % STAGES).reshape((PANELS * M, PANEL))
                sums = _add_b(sums, step, weights, weight_barriers, buffer, STAGES, PANELS, R, M)
                sums = warpgroup_mma_init(warpgroup_mma_wait(PANELS, deps=(sums,)))
                if step + STAGES - 1 < end:
                    gl.thread_barrier()
                    _refill_b(
                        step + STAGES - 1, weights_end, weight, b, units, row, weight_barriers, b_pieces, STAGES, PANELS
                    )
            total = warpgroup_mma_wait(0, deps=(sums,))

        store_split(
            total, tile * num_blocks + block, split, partials, counters, None, None, bias, out, tile, token, num_tokens, N, None, M,
            R, SPLIT, layout,
        )  # fmt: skip
