"""`hopper_words_kernel.py`'s kernel where the programs that make A x would not run beside all of those of the weight: each program
first makes a share of A x, then goes on with its rows of the weight.

To the ring of buffers a program's columns of A are the first ones, those of the weight follow, and B's are last, so that bytes are on
their way all the while. Programs wait for words of one another: all of them run at once, or the kernel is not called.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pelton_backends.triton.ops.linear.hopper_split_k import add_stage, fetch, store_split
from pelton_backends.triton.ops.lora.hopper_gated_kernel import fetch_a
from pelton_backends.triton.ops.lora.hopper_words_kernel import fetch_b, leave_low, store_words, take_low, words_of


@gluon.jit
def _share_of(pid, turn, num_programs, NUM_PARTS: gl.constexpr, SHARES: gl.constexpr, UNITS: gl.constexpr):
    """First unit, part and share of the columns that a program makes A x of."""
    index = pid + turn * num_programs
    return index // (SHARES * NUM_PARTS) * UNITS, index // SHARES % NUM_PARTS, index % SHARES


@gluon.jit
def _fill(
    step, x, weight, a, b, units, pid, num_programs, num_low, row, first, weight_barriers, row_barriers, weights, rows, a_pieces,
    b_pieces, K: gl.constexpr, R: gl.constexpr, C: gl.constexpr, SPLIT: gl.constexpr, STAGES: gl.constexpr, RANK: gl.constexpr,
    NUM_PARTS: gl.constexpr, SHARES: gl.constexpr, HAS_WEIGHT: gl.constexpr, HAS_X: gl.constexpr, IS_LOW: gl.constexpr,
):  # fmt: skip
    """Let a step's numbers come: of A and x while step < num_low, of the weight and x, then of B."""
    PANELS: gl.constexpr = C // 64
    UNITS: gl.constexpr = R // 64
    SLOTS: gl.constexpr = 64 // RANK
    NUM_STEPS: gl.constexpr = (K + C * SPLIT - 1) // (C * SPLIT)
    LOW_STEPS: gl.constexpr = (K + C * SHARES - 1) // (C * SHARES)
    stage = step % STAGES
    if HAS_WEIGHT:
        mbarrier.expect(weight_barriers.index(stage), weight.block_type.nbytes)
    if IS_LOW and step < num_low:
        unit, part, share = _share_of(pid, step // LOW_STEPS, num_programs, NUM_PARTS, SHARES, UNITS)
        panel = (share * LOW_STEPS + step % LOW_STEPS) * PANELS
        if HAS_WEIGHT:
            fetch_a(
                a, units, unit, part * RANK, panel, weight_barriers.index(stage), a_pieces, stage * (PANELS * UNITS), PANELS, UNITS,
                SLOTS,
            )  # fmt: skip
        if HAS_X:
            mbarrier.expect(row_barriers.index(stage), x.block_type.nbytes)
            fetch(x, 0, panel, row_barriers.index(stage), rows.index(stage), False)
    elif step < num_low + NUM_STEPS:
        panel = first + (step - num_low) * PANELS
        if HAS_WEIGHT:
            fetch(weight, row, panel, weight_barriers.index(stage), weights.index(stage), False)
        if HAS_X:
            mbarrier.expect(row_barriers.index(stage), x.block_type.nbytes)
            fetch(x, 0, panel, row_barriers.index(stage), rows.index(stage), False)
    else:
        fetch_b(
            b, units, (step - num_low - NUM_STEPS) * PANELS, row, weight_barriers.index(stage), b_pieces, stage * PANELS, PANELS,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["num_tokens", "num_shares"])
def adapted_shared_kernel(
    x, weight, a, b, bias, out, partials, counters, units, num_units, token_slots, step_ptr, words, num_tokens, num_shares,
    N: gl.constexpr, K: gl.constexpr,
    M: gl.constexpr, R: gl.constexpr, C: gl.constexpr, SPLIT: gl.constexpr, STAGES: gl.constexpr,
    RANK: gl.constexpr, NUM_PARTS: gl.constexpr, SECOND: gl.constexpr, THIRD: gl.constexpr, SHARES: gl.constexpr,
):  # fmt: skip
    """As `hopper_words_kernel.adapted_words_kernel`, of one block of tokens; num_shares: of A x, of all units that there may be."""
    PANEL: gl.constexpr = 64
    PANELS: gl.constexpr = C // PANEL
    TILES: gl.constexpr = (N + R - 1) // R
    NUM_PROGRAMS: gl.constexpr = TILES * SPLIT
    UNITS: gl.constexpr = R // 64
    NUM_STEPS: gl.constexpr = (K + C * SPLIT - 1) // (C * SPLIT)
    LOW_STEPS: gl.constexpr = (K + C * SHARES - 1) // (C * SHARES)
    SLOTS: gl.constexpr = 64 // RANK
    gl.static_assert(NUM_STEPS >= STAGES, "every buffer is filled before B's turn")
    pid = gl.program_id(0)
    weights = gl.allocate_shared_memory(weight.dtype, [STAGES] + weight.block_type.shape, weight.layout)  # noqa: RUF005
    rows = gl.allocate_shared_memory(x.dtype, [STAGES] + x.block_type.shape, x.layout)  # noqa: RUF005
    low_buffer = gl.allocate_shared_memory(x.dtype, [PANELS, M, PANEL], gl.NVMMASharedLayout(128, 16, 2))
    weight_barriers = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    row_barriers = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(weight_barriers.index(i), count=1)
        mbarrier.init(row_barriers.index(i), count=1)
    a_pieces = weights._reinterpret(weights.dtype, [STAGES * PANELS * UNITS, SLOTS, RANK, PANEL], a.layout)
    b_pieces = weights._reinterpret(weights.dtype, [STAGES * PANELS] + b.block_type.shape, b.layout)  # noqa: RUF005
    # The step's rows and adapters: they are there before the wait, see `runtime`.
    this_step = gl.load(step_ptr)
    num_used = gl.load(num_units)
    tile = pid % TILES
    split = pid // TILES
    row = tile * R
    first = split * NUM_STEPS * PANELS
    # Shares of units that the step has: the first ones of all.
    num_own = gl.minimum(num_shares, (num_used + UNITS - 1) // UNITS * (SHARES * NUM_PARTS)) - pid
    num_turns = gl.where(num_own > 0, (num_own + NUM_PROGRAMS - 1) // NUM_PROGRAMS, 0)
    num_low = num_turns * LOW_STEPS
    ahead = gl.where(num_tokens > 0, STAGES, 0)  # known to no compiler: it does not unroll
    for step in range(ahead):
        _fill(
            step, x, weight, a, b, units, pid, NUM_PROGRAMS, num_low, row, first, weight_barriers, row_barriers, weights, rows,
            a_pieces, b_pieces, K, R, C, SPLIT, STAGES, RANK, NUM_PARTS, SHARES, True, False, True,
        )  # fmt: skip
    gdc_launch_dependents()
    count = num_used
    if SPLIT > 1:
        count = gl.where(split == 0, count, 0)
    end = num_low + NUM_STEPS + (count + PANELS - 1) // PANELS
    wide: gl.constexpr = gl.BlockedLayout([1, 1, 2], [1, 64 // RANK, RANK // 2], [1, gl.num_warps(), 1], [2, 1, 0])
    by_slot: gl.constexpr = gl.BlockedLayout(
        [1, 64 // RANK, 2], [64 // RANK, 1, RANK // 2], [gl.num_warps(), 1, 1], [2, 1, 0]
    )
    t = gl.arange(0, M, gl.SliceLayout(1, gl.SliceLayout(2, by_slot)))
    slot_of = gl.load(token_slots + t, mask=t < num_tokens, other=-1)
    tw = gl.arange(0, M, gl.SliceLayout(0, gl.SliceLayout(2, wide)))
    is_own = gl.load(token_slots + tw, mask=tw < num_tokens, other=-1) >= 0
    if SPLIT > 1:
        is_own = is_own & (split == 0)
    gdc_wait()
    for step in range(ahead):
        _fill(
            step, x, weight, a, b, units, pid, NUM_PROGRAMS, num_low, row, first, weight_barriers, row_barriers, weights, rows,
            a_pieces, b_pieces, K, R, C, SPLIT, STAGES, RANK, NUM_PARTS, SHARES, False, True, True,
        )  # fmt: skip

    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, M, 16])
    for turn in range(num_turns):
        low_total = warpgroup_mma_init(gl.zeros((R, M), gl.float32, layout))
        for step in range(turn * LOW_STEPS, (turn + 1) * LOW_STEPS):
            low_total = add_stage(
                low_total, step, weights, rows, weight_barriers, row_barriers, STAGES, PANELS, PANEL, R, M
            )  # fmt: skip
            low_total = warpgroup_mma_init(warpgroup_mma_wait(PANELS, deps=(low_total,)))
            if step > 0:
                gl.thread_barrier()
                _fill(
                    step + STAGES - 1, x, weight, a, b, units, pid, NUM_PROGRAMS, num_low, row, first, weight_barriers, row_barriers,
                    weights, rows, a_pieces, b_pieces, K, R, C, SPLIT, STAGES, RANK, NUM_PARTS, SHARES, True, True, True,
                )  # fmt: skip
        unit, part, share = _share_of(pid, turn, NUM_PROGRAMS, NUM_PARTS, SHARES, UNITS)
        store_words(
            warpgroup_mma_wait(0, deps=(low_total,)), words, units, unit, part, share, 0, token_slots, num_tokens, this_step, M, R, RANK,
            NUM_PARTS, SHARES,
        )  # fmt: skip

    total = warpgroup_mma_init(gl.zeros((R, M), gl.float32, layout))
    # A x is looked at while weights are on their way, and fetched before.
    LATE: gl.constexpr = NUM_STEPS - STAGES + 2 if STAGES > 2 else NUM_STEPS
    BEFORE: gl.constexpr = NUM_STEPS * 5 // 8 if NUM_STEPS * 5 // 8 < LATE else LATE
    LOOK: gl.constexpr = BEFORE - 4 if BEFORE > 4 else 0
    for turn in gl.static_range(3):
        for own_step in range(
            0 if turn == 0 else LOOK if turn == 1 else BEFORE,
            LOOK if turn == 0 else BEFORE if turn == 1 else NUM_STEPS,
        ):
            step = num_low + own_step
            total = add_stage(
                total, step, weights, rows, weight_barriers, row_barriers, STAGES, PANELS, PANEL, R, M
            )  # fmt: skip
            total = warpgroup_mma_init(warpgroup_mma_wait(PANELS, deps=(total,)))
            if (step > 0) & (step + STAGES - 1 < end):
                gl.thread_barrier()
                _fill(
                    step + STAGES - 1, x, weight, a, b, units, pid, NUM_PROGRAMS, num_low, row, first, weight_barriers, row_barriers,
                    weights, rows, a_pieces, b_pieces, K, R, C, SPLIT, STAGES, RANK, NUM_PARTS, SHARES, True, True, False,
                )  # fmt: skip
        if turn == 0:
            own_part = (row >= SECOND).to(gl.int32) + (row >= THIRD).to(gl.int32)
            place, mask = words_of(words, own_part, 0, is_own, M, RANK, NUM_PARTS, SHARES, wide)
            found = gl.load(place, mask=mask, other=0, volatile=True)
        else:
            total = warpgroup_mma_wait(0, deps=(total,))
        if turn == 1:
            low = take_low(found, place, mask, this_step)
            leave_low(low_buffer, low, slot_of, units, 0, PANELS, M, RANK, by_slot, x.dtype)
            fence_async_shared()
            gl.thread_barrier()
            total = warpgroup_mma_init(total)

    for step in range(num_low + NUM_STEPS, end):
        stage = step % STAGES
        later = step + STAGES - 1
        unit = (step - num_low - NUM_STEPS) * PANELS
        if later < end:
            gl.thread_barrier()
            mbarrier.expect(weight_barriers.index(later % STAGES), weight.block_type.nbytes)
            fetch_b(
                b, units, (later - num_low - NUM_STEPS) * PANELS, row, weight_barriers.index(later % STAGES), b_pieces,
                later % STAGES * PANELS, PANELS,
            )  # fmt: skip
        mbarrier.wait(weight_barriers.index(stage), (step // STAGES) & 1)
        if step > num_low + NUM_STEPS:
            gl.thread_barrier()  # every warp has read the rows of the adapters before
            leave_low(low_buffer, low, slot_of, units, unit, PANELS, M, RANK, by_slot, x.dtype)
            fence_async_shared()
            gl.thread_barrier()
        sums = warpgroup_mma_init(total)
        left = weights.index(stage).reshape((PANELS * R, PANEL))
        for i in gl.static_range(PANELS):
            sums = warpgroup_mma(left.slice(i * R, R), low_buffer.index(i).permute((1, 0)), sums, is_async=True)
        total = warpgroup_mma_wait(0, deps=(sums,))

    store_split(
        total, tile, split, partials, counters, None, None, bias, out, tile, 0, num_tokens, N, None, M, R, SPLIT, layout,
    )  # fmt: skip
