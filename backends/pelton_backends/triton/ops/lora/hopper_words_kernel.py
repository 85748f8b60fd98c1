"""`hopper_split_k.py`'s kernel with adapters, without an activation: one launch for a product of few rows, A x, and B A x of each
row's adapter. Gate and up: `hopper_gated_kernel.py`.

The first programs multiply A of all adapters of the step with all rows, a share of the columns each, as others do with the weight.
They leave each row's own sums in words of 8 bytes: half number, half the step that it is of. To the others B is more columns of
the weight, those of x being A x where a row has the adapter, and zero: they come last through the ring of buffers. The words are
fetched while the last columns of the weight are on their way, and looked at some steps later: only where one is missing yet the
program waits (0.8 us a layer of Llama-3.1-8B with 32 rows and 8 adapters less than with a wait at once, H200). Programs start in
order, so those that others wait for run.

Adapters come in units: as many neighbouring slots as have 64 ranks together, a panel of a buffer. Their numbers are in `units`
(`pelton.lora.rows`); what lies past the last slot is copied as zeros. Loops are left to run where each round has other code to
fetch: unrolled, the kernel was five times as long as without adapters, which took 4 us a product in a chain of different ones (H200).
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
from pelton_backends.triton.ops.lora.hopper_gated_kernel import fetch_a, multiply_a


@gluon.jit
def fetch_b(source, units, unit, row, barrier, panels, at, PANELS: gl.constexpr):
    """B of a program's rows, of PANELS units from `unit` on."""
    for i in gl.static_range(PANELS):
        tma.async_copy_global_to_shared(source, [gl.load(units + unit + i), row, 0], barrier, panels.index(at + i))


@gluon.jit
def store_words(
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
def _low_program(
    pid, x, a, weights, rows, weight_barriers, row_barriers, units, token_slots, num_units, words, this_step, num_tokens,
    num_blocks, K: gl.constexpr, M: gl.constexpr, R: gl.constexpr, C: gl.constexpr, STAGES: gl.constexpr, RANK: gl.constexpr,
    NUM_PARTS: gl.constexpr, SHARES: gl.constexpr,
):  # fmt: skip
    """One part's A of R / RANK adapters times one share of the columns of M rows of x."""
    PANEL: gl.constexpr = 64
    PANELS: gl.constexpr = C // PANEL
    UNITS: gl.constexpr = R // 64
    SLOTS: gl.constexpr = 64 // RANK  # of a unit
    NUM_STEPS: gl.constexpr = (K + C * SHARES - 1) // (C * SHARES)
    AHEAD: gl.constexpr = NUM_STEPS if NUM_STEPS < STAGES else STAGES
    NUM_BYTES: gl.constexpr = R * C * 2
    share = pid % SHARES
    part = pid // SHARES % NUM_PARTS
    rest = pid // (SHARES * NUM_PARTS)
    token = rest % num_blocks * M
    unit = rest // num_blocks * UNITS
    if unit < gl.load(num_units):
        first = share * (NUM_STEPS * PANELS)
        pieces = weights._reinterpret(weights.dtype, [STAGES * PANELS * UNITS, SLOTS, RANK, PANEL], a.layout)
        ahead = gl.where(num_tokens > 0, AHEAD, 0)  # known to no compiler: it does not unroll
        for buffer in range(ahead):
            mbarrier.expect(weight_barriers.index(buffer), NUM_BYTES)
            mbarrier.expect(row_barriers.index(buffer), x.block_type.nbytes)
            fetch_a(
                a, units, unit, part * RANK, first + buffer * PANELS, weight_barriers.index(buffer), pieces, buffer * (PANELS * UNITS),
                PANELS, UNITS, SLOTS,
            )  # fmt: skip
        gdc_launch_dependents()
        gdc_wait()
        total = multiply_a(
            x, a, weights, rows, weight_barriers, row_barriers, pieces, units, unit, part, first, token, ahead, K, M, R, C, STAGES, RANK,
            SHARES,
        )  # fmt: skip

        store_words(
            total, words, units, unit, part, share, token, token_slots, num_tokens, this_step, M, R, RANK, NUM_PARTS, SHARES
        )  # fmt: skip


@gluon.jit
def words_of(
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
def take_low(found, place, mask, this_step):
    """A x, as soon as it is there: [M, RANK] float32; zeros for rows without an adapter. found: the words as they were."""
    while _num_missing(found, mask, this_step) > 0:
        found = gl.load(place, mask=mask, other=0, volatile=True)
    return gl.sum(found.to(gl.int32).to(gl.float32, bitcast=True), axis=0)


@gluon.jit
def leave_low(
    buffer, low, slot_of, units, unit, PANELS: gl.constexpr, M: gl.constexpr, RANK: gl.constexpr, layout: gl.constexpr,
    dtype: gl.constexpr,
):  # fmt: skip
    """A panel [M, 64] for each of PANELS units: of the rows of x that B's columns meet. low [M, RANK], slot_of [M]."""
    SLOTS: gl.constexpr = 64 // RANK
    low = gl.convert_layout(low, gl.SliceLayout(1, layout))[:, None, :]
    own = gl.arange(0, SLOTS, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :]
    for i in gl.static_range(PANELS):
        is_own = (slot_of[:, None] == own + gl.load(units + unit + i) * SLOTS)[:, :, None]
        buffer.index(i).store(gl.reshape(gl.where(is_own, low, 0.0).to(dtype), (M, 64)))


@gluon.jit(do_not_specialize=["num_tokens", "num_blocks", "low_programs"])
def adapted_words_kernel(
    x, weight, a, b, bias, out, partials, counters, units, num_units, token_slots, step_ptr, words, num_tokens, num_blocks,
    low_programs,
    N: gl.constexpr, K: gl.constexpr,
    M: gl.constexpr, R: gl.constexpr, C: gl.constexpr, SPLIT: gl.constexpr, STAGES: gl.constexpr,
    RANK: gl.constexpr, NUM_PARTS: gl.constexpr, SECOND: gl.constexpr, THIRD: gl.constexpr, SHARES: gl.constexpr,
):  # fmt: skip
    """As `hopper_split_k.multiply_kernel` without an activation; low_programs of the programs make A x."""
    PANEL: gl.constexpr = 64
    PANELS: gl.constexpr = C // PANEL
    TILES: gl.constexpr = (N + R - 1) // R
    NUM_STEPS: gl.constexpr = (K + C * SPLIT - 1) // (C * SPLIT)
    gl.static_assert(NUM_STEPS >= STAGES, "every buffer is filled before B's turn")
    pid = gl.program_id(0)
    weights = gl.allocate_shared_memory(weight.dtype, [STAGES] + weight.block_type.shape, weight.layout)  # noqa: RUF005
    rows = gl.allocate_shared_memory(x.dtype, [STAGES] + x.block_type.shape, x.layout)  # noqa: RUF005
    weight_barriers = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    row_barriers = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(weight_barriers.index(i), count=1)
        mbarrier.init(row_barriers.index(i), count=1)
    this_step = gl.load(step_ptr)
    if pid < low_programs:
        _low_program(
            pid, x, a, weights, rows, weight_barriers, row_barriers, units, token_slots, num_units, words, this_step,
            num_tokens, num_blocks, K, M, R, C, STAGES, RANK, NUM_PARTS, SHARES,
        )  # fmt: skip
    else:
        # Here, so that it lies where the other programs have what they need to store A x: 8 KB less, and a program of attention fits
        # beside (a layer of Llama-3.1-8B with 32 rows and 8 adapters takes 1.1 us less, H200).
        low_buffer = gl.allocate_shared_memory(x.dtype, [PANELS, M, PANEL], gl.NVMMASharedLayout(128, 16, 2))
        pid -= low_programs
        tile = pid % TILES
        split = pid // TILES % SPLIT
        block = pid // (TILES * SPLIT)
        token = block * M
        row = tile * R
        first = split * NUM_STEPS * PANELS
        ahead = gl.where(num_tokens > 0, STAGES, 0)
        for buffer in range(ahead):
            mbarrier.expect(weight_barriers.index(buffer), weight.block_type.nbytes)
            mbarrier.expect(row_barriers.index(buffer), x.block_type.nbytes)
            fetch(weight, row, first + buffer * PANELS, weight_barriers.index(buffer), weights.index(buffer), False)
        gdc_launch_dependents()
        # The step's rows and adapters: they are there before the wait, see `runtime`.
        count = gl.load(num_units)
        if SPLIT > 1:
            count = gl.where(split == 0, count, 0)
        end = NUM_STEPS + (count + PANELS - 1) // PANELS
        wide: gl.constexpr = gl.BlockedLayout([1, 1, 2], [1, 64 // RANK, RANK // 2], [1, gl.num_warps(), 1], [2, 1, 0])
        by_slot: gl.constexpr = gl.BlockedLayout(
            [1, 64 // RANK, 2], [64 // RANK, 1, RANK // 2], [gl.num_warps(), 1, 1], [2, 1, 0]
        )
        t = token + gl.arange(0, M, gl.SliceLayout(1, gl.SliceLayout(2, by_slot)))
        slot_of = gl.load(token_slots + t, mask=t < num_tokens, other=-1)
        tw = token + gl.arange(0, M, gl.SliceLayout(0, gl.SliceLayout(2, wide)))
        is_own = gl.load(token_slots + tw, mask=tw < num_tokens, other=-1) >= 0
        if SPLIT > 1:
            is_own = is_own & (split == 0)
        b_pieces = weights._reinterpret(weights.dtype, [STAGES * PANELS] + b.block_type.shape, b.layout)  # noqa: RUF005
        gdc_wait()
        for buffer in range(ahead):
            fetch(x, token, first + buffer * PANELS, row_barriers.index(buffer), rows.index(buffer), False)

        layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, M, 16])
        total = warpgroup_mma_init(gl.zeros((R, M), gl.float32, layout))
        # A x is looked at while weights are on their way, and fetched before: halfway where it was begun early, else when all of
        # them are.
        LATE: gl.constexpr = NUM_STEPS - STAGES + 2 if STAGES > 2 else NUM_STEPS
        IS_SOON: gl.constexpr = NUM_STEPS >= 2 * ((K + C * SHARES - 1) // (C * SHARES))
        BEFORE: gl.constexpr = NUM_STEPS * 5 // 8 if IS_SOON and NUM_STEPS * 5 // 8 < LATE else LATE
        LOOK: gl.constexpr = BEFORE - 4 if BEFORE > 4 else 0
        NO_B_YET: gl.constexpr = BEFORE + STAGES - 1 <= NUM_STEPS
        for turn in gl.static_range(3):
            for step in range(
                0 if turn == 0 else LOOK if turn == 1 else BEFORE,
                LOOK if turn == 0 else BEFORE if turn == 1 else NUM_STEPS,
            ):
                total = add_stage(
                    total, step, weights, rows, weight_barriers, row_barriers, STAGES, PANELS, PANEL, R, M
                )  # fmt: skip
                total = warpgroup_mma_init(warpgroup_mma_wait(PANELS, deps=(total,)))
                free = (step + STAGES - 1) % STAGES
                later = step + STAGES - 1
                if (step > 0) & (later < end):
                    gl.thread_barrier()
                    mbarrier.expect(weight_barriers.index(free), weight.block_type.nbytes)
                    if (turn < 2 and NO_B_YET) or later < NUM_STEPS:
                        mbarrier.expect(row_barriers.index(free), x.block_type.nbytes)
                        fetch(
                            weight,
                            row,
                            first + later * PANELS,
                            weight_barriers.index(free),
                            weights.index(free),
                            False,
                        )
                        fetch(x, token, first + later * PANELS, row_barriers.index(free), rows.index(free), False)
                    else:
                        fetch_b(
                            b, units, (later - NUM_STEPS) * PANELS, row, weight_barriers.index(free), b_pieces, free * PANELS,
                            PANELS,
                        )  # fmt: skip
            if turn == 0:
                own_part = (row >= SECOND).to(gl.int32) + (row >= THIRD).to(gl.int32)
                place, mask = words_of(words, own_part, token, is_own, M, RANK, NUM_PARTS, SHARES, wide)
                found = gl.load(place, mask=mask, other=0, volatile=True)
            else:
                total = warpgroup_mma_wait(0, deps=(total,))
            if turn == 1:
                low = take_low(found, place, mask, this_step)
                leave_low(low_buffer, low, slot_of, units, 0, PANELS, M, RANK, by_slot, x.dtype)
                fence_async_shared()
                gl.thread_barrier()
                total = warpgroup_mma_init(total)

        for step in range(NUM_STEPS, end):
            stage = step % STAGES
            free = (step + STAGES - 1) % STAGES
            later = step + STAGES - 1
            unit = (step - NUM_STEPS) * PANELS
            if later < end:
                gl.thread_barrier()
                mbarrier.expect(weight_barriers.index(free), weight.block_type.nbytes)
                fetch_b(
                    b, units, (later - NUM_STEPS) * PANELS, row, weight_barriers.index(free), b_pieces, free * PANELS, PANELS,
                )  # fmt: skip
            mbarrier.wait(weight_barriers.index(stage), (step // STAGES) & 1)
            if step > NUM_STEPS:
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
            total, tile * num_blocks + block, split, partials, counters, None, None, bias, out, tile, token, num_tokens, N, None, M,
            R, SPLIT, layout,
        )  # fmt: skip
