"""`hopper_split_k.py`'s kernel for gate and up with adapters: one launch for a product of few rows, A x, and B A x of each row's
adapter.

To the kernel adapters are more columns: B of the step's adapters beside the weight, and beside x's rows A x, which is zero where
a row has another adapter or none. The columns come last through the ring of buffers, both of them by the copy engine. Products
without an activation do it otherwise (`hopper_words_kernel.py`): what this saves where a program adds A x to gate and to up, the
longer way of A x through memory costs where programs are short. Measured on an H200 (8 adapters of rank 16 in 32 rows of
Llama-3.1-8B, us more than without): gate and up 4.7 (7.9 with words), QKV 3.1 (1.7), O 2.8 (2.4), down 3.8 (2.2).

The first programs make A x: A of all adapters of the step times all rows, a share of the columns each; the last one of a tile
adds the shares, leaves out what is of other adapters, rounds, and says in `done` that the tile is that of this step. The others,
whose weights stream meanwhile, look there when the first of these columns is due. Programs start in order, so those that others
wait for run.

Adapters come in units: as many neighbouring slots as have 64 ranks together, a panel of a buffer. Their numbers are in `units`
(`pelton.lora.rows`); what lies past the last is copied as zeros. Loops are left to run where each round has other code to
fetch: unrolled, the kernel was five times as long as without adapters, which took 4 us a product in a chain of different ones (H200).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pelton_backends.triton.ops.linear.hopper_split_k import add_stage, fetch, store_split

MAX_TOKENS = gl.constexpr(64)
"""Rows of a product, and of A x in memory."""


@gluon.jit
def _make_visible():
    """Numbers that this thread wrote, or has been told of, are there for the copy engine of any multiprocessor."""
    gl.inline_asm_elementwise(
        "fence.acq_rel.gpu; fence.proxy.async; mov.b32 $0, $1;", "=r,r,~{memory}", [0], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def fetch_a(
    source, units, unit, row, panel, barrier, pieces, at, PANELS: gl.constexpr, UNITS: gl.constexpr, SLOTS: gl.constexpr
):
    """PANELS panels of A's rows of one part, of UNITS units from `unit` on."""
    for u in gl.static_range(UNITS):
        slot = gl.load(units + unit + u) * SLOTS
        for i in gl.static_range(PANELS):
            tma.async_copy_global_to_shared(
                source, [slot, row, (panel + i) * 64], barrier, pieces.index(at + (i * UNITS + u))
            )


@gluon.jit
def multiply_a(
    x, a, weights, rows, weight_barriers, row_barriers, pieces, units, unit, part, first, token, ahead,
    K: gl.constexpr, M: gl.constexpr, R: gl.constexpr, C: gl.constexpr, STAGES: gl.constexpr, RANK: gl.constexpr,
    SHARES: gl.constexpr,
):  # fmt: skip
    """A of R / RANK adapters, whose first `ahead` buffers are on their way, times a share of the columns of M rows of x: [R, M]."""
    PANEL: gl.constexpr = 64
    PANELS: gl.constexpr = C // PANEL
    UNITS: gl.constexpr = R // 64
    SLOTS: gl.constexpr = 64 // RANK  # of a unit
    NUM_STEPS: gl.constexpr = (K + C * SHARES - 1) // (C * SHARES)
    NUM_BYTES: gl.constexpr = R * C * 2
    for buffer in range(ahead):
        fetch(x, token, first + buffer * PANELS, row_barriers.index(buffer), rows.index(buffer), False)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, M, 16])
    total = warpgroup_mma_init(gl.zeros((R, M), gl.float32, layout))
    for step in range(NUM_STEPS):
        total = add_stage(
            total, step, weights, rows, weight_barriers, row_barriers, STAGES, PANELS, PANEL, R, M
        )  # fmt: skip
        if NUM_STEPS > STAGES:
            total = warpgroup_mma_init(warpgroup_mma_wait(PANELS, deps=(total,)))
            free = (step + STAGES - 1) % STAGES
            later = step + STAGES - 1
            if (step > 0) & (later < NUM_STEPS):
                gl.thread_barrier()
                mbarrier.expect(weight_barriers.index(free), NUM_BYTES)
                mbarrier.expect(row_barriers.index(free), x.block_type.nbytes)
                fetch_a(
                    a, units, unit, part * RANK, first + later * PANELS, weight_barriers.index(free), pieces,
                    free * (PANELS * UNITS), PANELS, UNITS, SLOTS,
                )  # fmt: skip
                fetch(x, token, first + later * PANELS, row_barriers.index(free), rows.index(free), False)
    return warpgroup_mma_wait(0, deps=(total,))


@gluon.jit
def _fetch_adapters(
    b,
    low,
    units,
    count,
    unit,
    row,
    token,
    b_barrier,
    low_barrier,
    b_pieces,
    low_pieces,
    at,
    UNITS: gl.constexpr,
    MOST: gl.constexpr,
):
    """B of a program's rows and A x of its tokens, of UNITS units from `unit` on, for gate and for up."""
    for u in gl.static_range(UNITS):
        tma.async_copy_global_to_shared(b, [gl.load(units + unit + u), row, 0, 0], b_barrier, b_pieces.index(at + u))
        for side in gl.static_range(2):
            place = gl.where(unit + u < count, side * MOST + unit + u, 2 * MOST)  # past the last: zeros
            tma.async_copy_global_to_shared(
                low, [place, token, 0], low_barrier, low_pieces.index(at + (side * UNITS + u))
            )


@gluon.jit
def _low_program(
    pid, x, a, weights, rows, weight_barriers, row_barriers, units, token_slots, num_units, low, low_sums, counters, done,
    this_step, num_tokens, num_blocks,
    K: gl.constexpr, M: gl.constexpr, R: gl.constexpr, C: gl.constexpr, STAGES: gl.constexpr, RANK: gl.constexpr,
    SHARES: gl.constexpr, MOST: gl.constexpr,
):  # fmt: skip
    """Gate's or up's A of R / RANK adapters times one share of the columns of M rows of x."""
    PANEL: gl.constexpr = 64
    PANELS: gl.constexpr = C // PANEL
    UNITS: gl.constexpr = R // 64
    SLOTS: gl.constexpr = 64 // RANK  # of a unit
    NUM_STEPS: gl.constexpr = (K + C * SHARES - 1) // (C * SHARES)
    AHEAD: gl.constexpr = NUM_STEPS if NUM_STEPS < STAGES else STAGES
    NUM_BYTES: gl.constexpr = R * C * 2
    share = pid % SHARES
    part = pid // SHARES % 2
    rest = pid // (SHARES * 2)
    block = rest % num_blocks
    token = block * M
    tile = rest // num_blocks
    unit = tile * UNITS
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
        own: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, gl.num_warps()], [0, 1])
        r = gl.arange(0, R, gl.SliceLayout(1, own))
        t = token + gl.arange(0, M, gl.SliceLayout(0, own))
        slot_of = gl.load(token_slots + t, mask=t < num_tokens, other=-1)
        slot = gl.load(units + unit + r // 64) * SLOTS + r % 64 // RANK
        gdc_wait()
        total = multiply_a(
            x, a, weights, rows, weight_barriers, row_barriers, pieces, units, unit, part, first, token, ahead, K, M, R, C, STAGES, RANK,
            SHARES,
        )  # fmt: skip
        value = gl.convert_layout(total, own)

        place = (tile * num_blocks + block) * 2 + part
        is_last = place >= 0
        if SHARES > 1:
            cells = low_sums + place * (SHARES * R * M) + (t - token)[None, :] * R + r[:, None]
            gl.store(cells + share * (R * M), value)
            gl.thread_barrier()  # all threads' stores come before the one thread's increment, which releases them
            is_last = gl.atomic_add(counters + place, 1, sem="acq_rel", scope="gpu") == SHARES - 1
            if is_last:
                gl.store(counters + place, 0)
                value = gl.load(cells, cache_modifier=".cg")
                for i in gl.static_range(1, SHARES):
                    value += gl.load(cells + i * (R * M), cache_modifier=".cg")
        if is_last:
            kept = gl.where(slot_of[None, :] == slot[:, None], value, 0.0).to(low.dtype.element_ty)
            at = ((part * MOST + unit + r // 64)[:, None] * MAX_TOKENS + t[None, :]) * 64 + (r % 64)[:, None]
            gl.store(low + at, kept)
            _make_visible()
            gl.thread_barrier()
            gl.atomic_xchg(done + place, this_step, sem="release", scope="gpu")


@gluon.jit
def _wait_for_low(done, block, num_blocks, count, this_step, UNITS: gl.constexpr, TILES: gl.constexpr):
    """Until A x of gate, up and all adapters is that of this step. TILES of UNITS units there are at most."""
    layout: gl.constexpr = gl.BlockedLayout([(TILES + 31) // 32, 2], [32, 1], [gl.num_warps(), 1], [1, 0])
    tile = gl.arange(0, TILES, gl.SliceLayout(1, layout))[:, None]
    side = gl.arange(0, 2, gl.SliceLayout(0, layout))[None, :]
    mask = (tile * UNITS < count) & (side >= 0)
    place = done + (tile * num_blocks + block) * 2 + side
    num_missing = this_step * 0 + 1
    while num_missing > 0:
        found = gl.load(place, mask=mask, other=0, volatile=True)
        missing = (mask & (found != this_step)).to(gl.int32)
        num_missing = gl.sum(gl.sum(missing, axis=1), axis=0)
    _make_visible()


@gluon.jit(do_not_specialize=["num_tokens", "num_blocks", "low_programs"])
def adapted_gated_kernel(
    x, weight, a, b, low_rows, bias, out, partials, counters, units, num_units, token_slots, step_ptr, low, low_sums,
    low_counters, done, num_tokens, num_blocks, low_programs,
    N: gl.constexpr, K: gl.constexpr, ACTIVATION: gl.constexpr,
    M: gl.constexpr, R: gl.constexpr, C: gl.constexpr, SPLIT: gl.constexpr, STAGES: gl.constexpr,
    RANK: gl.constexpr, SHARES: gl.constexpr,
    MOST: gl.constexpr, LOW_TILES: gl.constexpr,
):  # fmt: skip
    """As `hopper_split_k.multiply_kernel`; low_programs of the programs make A x. MOST units, in at most LOW_TILES tiles."""
    PANEL: gl.constexpr = 64
    PANELS: gl.constexpr = C // PANEL
    TILES: gl.constexpr = (N + R - 1) // R
    NUM_STEPS: gl.constexpr = (K + C * SPLIT - 1) // (C * SPLIT)
    AHEAD: gl.constexpr = NUM_STEPS if NUM_STEPS < STAGES else STAGES
    UNITS: gl.constexpr = PANELS // 2  # of a buffer, which has A x of both
    gl.static_assert(UNITS > 0, "a buffer has A x of gate and of up")
    gl.static_assert(STAGES >= 2, "a buffer is filled anew while another is read")
    gl.static_assert(NUM_STEPS + 1 >= STAGES, "at most one buffer is not the weight's before it is an adapter's")
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
            pid, x, a, weights, rows, weight_barriers, row_barriers, units, token_slots, num_units, low, low_sums, low_counters,
            done, this_step, num_tokens, num_blocks, K, M, R, C, STAGES, RANK, SHARES, MOST,
        )  # fmt: skip
    else:
        pid -= low_programs
        tile = pid % TILES
        split = pid // TILES % SPLIT
        block = pid // (TILES * SPLIT)
        token = block * M
        row = tile * (R // 2)
        first = split * NUM_STEPS * PANELS
        ahead = gl.where(num_tokens > 0, AHEAD, 0)  # known to no compiler: it does not unroll
        for buffer in range(ahead):
            mbarrier.expect(weight_barriers.index(buffer), weight.block_type.nbytes)
            mbarrier.expect(row_barriers.index(buffer), x.block_type.nbytes)
            fetch(weight, row, first + buffer * PANELS, weight_barriers.index(buffer), weights.index(buffer), True)
        gdc_launch_dependents()
        # The step's rows and adapters: they are there before the wait, see `runtime`.
        count = gl.load(num_units)
        if SPLIT > 1:
            count = gl.where(split == 0, count, 0)
        end = NUM_STEPS + (count + UNITS - 1) // UNITS
        b_pieces = weights._reinterpret(weights.dtype, [STAGES * PANELS] + b.block_type.shape, b.layout)  # noqa: RUF005
        low_pieces = rows._reinterpret(rows.dtype, [STAGES * PANELS] + low_rows.block_type.shape, low_rows.layout)  # noqa: RUF005
        gdc_wait()
        for buffer in range(ahead):
            fetch(x, token, first + buffer * PANELS, row_barriers.index(buffer), rows.index(buffer), False)

        layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, M, 16])
        total = warpgroup_mma_init(gl.zeros((R, M), gl.float32, layout))
        for step in range(NUM_STEPS):
            total = add_stage(
                total, step, weights, rows, weight_barriers, row_barriers, STAGES, PANELS, PANEL, R, M
            )  # fmt: skip
            total = warpgroup_mma_init(warpgroup_mma_wait(PANELS, deps=(total,)))
            free = (step + STAGES - 1) % STAGES
            later = step + STAGES - 1
            if (later >= AHEAD) & (later < end):
                gl.thread_barrier()
                mbarrier.expect(row_barriers.index(free), x.block_type.nbytes)
                if later < NUM_STEPS:
                    mbarrier.expect(weight_barriers.index(free), weight.block_type.nbytes)
                    fetch(weight, row, first + later * PANELS, weight_barriers.index(free), weights.index(free), True)
                    fetch(x, token, first + later * PANELS, row_barriers.index(free), rows.index(free), False)
                else:
                    mbarrier.expect(weight_barriers.index(free), weight.block_type.nbytes // 2)
                    if later == NUM_STEPS:
                        _wait_for_low(done, block, num_blocks, count, this_step, R // 64, LOW_TILES)
                    _fetch_adapters(
                        b, low_rows, units, count, (later - NUM_STEPS) * UNITS, row, token, weight_barriers.index(free),
                        row_barriers.index(free), b_pieces, low_pieces, free * PANELS, UNITS, MOST,
                    )  # fmt: skip
        total = warpgroup_mma_wait(0, deps=(total,))

        if count > 0:
            sums = warpgroup_mma_init(total)
            other = warpgroup_mma_init(total)  # with up's A x, where `sums` has gate's
            for step in range(NUM_STEPS, end):
                stage = step % STAGES
                phase = (step // STAGES) & 1
                free = (step + STAGES - 1) % STAGES
                later = step + STAGES - 1
                mbarrier.wait(weight_barriers.index(stage), phase)
                mbarrier.wait(row_barriers.index(stage), phase)
                b_panels = weights.index(stage).reshape((PANELS * R, PANEL))
                low_panels = rows.index(stage).reshape((PANELS * M, PANEL))
                for u in gl.static_range(UNITS):
                    left = b_panels.slice(u * R, R)
                    gate, up = low_panels.slice(u * M, M), low_panels.slice((UNITS + u) * M, M)
                    sums = warpgroup_mma(left, gate.permute((1, 0)), sums, is_async=True)
                    other = warpgroup_mma(left, up.permute((1, 0)), other, is_async=True)
                one, two = warpgroup_mma_wait(2 * UNITS, deps=(sums, other))
                sums, other = warpgroup_mma_init(one), warpgroup_mma_init(two)
                if later < end:
                    gl.thread_barrier()
                    mbarrier.expect(row_barriers.index(free), x.block_type.nbytes)
                    mbarrier.expect(weight_barriers.index(free), weight.block_type.nbytes // 2)
                    _fetch_adapters(
                        b, low_rows, units, count, (later - NUM_STEPS) * UNITS, row, token, weight_barriers.index(free),
                        row_barriers.index(free), b_pieces, low_pieces, free * PANELS, UNITS, MOST,
                    )  # fmt: skip
            total, other = warpgroup_mma_wait(0, deps=(sums, other))
            is_up = (gl.arange(0, R, gl.SliceLayout(1, layout)) % 2 == 1)[:, None]
            total = gl.where(is_up, other, total)

        store_split(
            total, tile * num_blocks + block, split, partials, counters, None, None, bias, out, tile, token, num_tokens, N, ACTIVATION, M,
            R, SPLIT, layout,
        )  # fmt: skip
