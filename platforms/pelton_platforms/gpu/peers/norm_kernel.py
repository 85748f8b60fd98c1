"""A kernel that sums rows over ranks through peers' memory, adds the residual and norms: one launch where a sum, a load and a norm were.

As in `kernels.py` each word of 4 bytes travels with the number of its call, so there is no barrier. Program p of one rank talks to
program p of the others alone, a row at a time, through places of its own: one for each source, one for a sum that another rank has
made, each twice, used in turn. A call ends when a rank has what all others brought to it, and it brings nothing to the next one
before: who writes the next call but one knows that all have read this one.

One shot: every rank sends its row to all others, and adds up what came. Two shots: row r is added up by rank r modulo ranks, which sends
the sum to all others. Then each rank sends and takes two rows' worth in place of one for each other rank.

Many rows go by kernels of their own, for which what goes over the link counts: a row travels as it is, with one flag behind it.
Between two ranks in one shot, and so do the `AHEAD` rows after it before the first one's partner is there; between more in two, some
rows of each rank at once. Of rows that the product before has sent on its way (`RowsToSend`, two ranks) half are there for each rank to
add up, where they lie; it sends their sums.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pelton_platforms.gpu.peers.kernels import _high, _low, _memory_of, _packed

SLOTS = 2
PROGRAMS = 128
"""Rows at once. All programs of a launch run at once: each waits for its partners."""
MOST_WORDS = 8192
"""Of a row, which one program holds."""
AHEAD = 2
"""Rows that a program of `sum_add_norm_many_kernel` sends before it needs the first of the other rank's. It has twice as many places: who
sends its row r has read row r - AHEAD of the other's, which the other sent when it had read this one's row r - 2 AHEAD."""
TURNS = 2
"""Of rows that a program of `sum_add_norm_shared_kernel` has places for, used in turn. Who brings the rows of turn t + 1 has the sums of
turn t - 1: so their owners have read what came for turn t - 1, whose places are taken again. Who sends sums of turn t has what all
brought for it, which they did when they had the sums of turn t - 2."""
MOST_REGISTERS = 128
"""Of a thread of that kernel, so that as many programs as there are run at once."""


def programs_of_many(num_multiprocessors: int, row_words: int) -> tuple[int, int]:
    """-> (the most programs of a launch, warps of each): 512 threads a multiprocessor at most, which have MOST_REGISTERS each."""
    num_warps = min(max(triton.next_power_of_2(row_words) // 512, 1), 16)
    return num_multiprocessors * min(16 // num_warps, 4), num_warps


@triton.jit
def _wire(words, call):
    return (call.to(tl.int64) << 32) | (words.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def _wait_row(place, inside, call, failed, limit):
    """The words there, once all carry the number of the call; after `limit` looks `failed` is set, and they are whatever is there."""
    found = tl.load(place, inside, 0, volatile=True)
    looks = 0
    while (tl.min((((found >> 32).to(tl.int32) == call) | ~inside).to(tl.int32)) == 0) & (looks < limit):
        found = tl.load(place, inside, 0, volatile=True)
        looks += 1
    if looks >= limit:
        tl.store(failed, 1)
    return found.to(tl.int32)


@triton.jit
def _rounded(x, DTYPE: tl.constexpr):
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def _inverse_rms(low, high, inside, eps, NUMBERS: tl.constexpr, DTYPE: tl.constexpr):
    squares = tl.where(inside, low * low, 0.0)
    if tl.float32 != DTYPE:
        squares += tl.where(inside, high * high, 0.0)
    return 1.0 / tl.sqrt_rn(tl.sum(squares) / NUMBERS + eps)


@triton.jit
def _normed(x, inverse_rms, weight, UNIT_OFFSET: tl.constexpr, DTYPE: tl.constexpr):
    """Rounded before the product with the weight, with UNIT_OFFSET only behind it."""
    x = x * inverse_rms
    if UNIT_OFFSET:
        return x * (1.0 + weight)
    return _rounded(x, DTYPE) * weight


@triton.jit
def _finish(
    total, normed, at, found, before, post_weight, weight, inside, eps, post_eps, NUMBERS: tl.constexpr, DTYPE: tl.constexpr,
    UNIT_OFFSET: tl.constexpr, POST_UNIT_OFFSET: tl.constexpr,
):  # fmt: skip
    """Store residual' and its normed row at `at`, as words. found: the sum; before: of the residual; it and post_weight may be None."""
    low = _low(found, DTYPE)
    high = low
    if tl.float32 != DTYPE:
        high = _high(found, DTYPE)
    if post_weight is not None:
        post = _inverse_rms(low, high, inside, post_eps, NUMBERS, DTYPE)
        low = _rounded(_normed(low, post, _low(post_weight, DTYPE), POST_UNIT_OFFSET, DTYPE), DTYPE)
        if tl.float32 != DTYPE:
            high = _rounded(_normed(high, post, _high(post_weight, DTYPE), POST_UNIT_OFFSET, DTYPE), DTYPE)
    if before is not None:
        low = _rounded(low + _low(before, DTYPE), DTYPE)
        if tl.float32 != DTYPE:
            high = _rounded(high + _high(before, DTYPE), DTYPE)
    inverse = _inverse_rms(low, high, inside, eps, NUMBERS, DTYPE)
    normed_low = _normed(low, inverse, _low(weight, DTYPE), UNIT_OFFSET, DTYPE)
    normed_high = normed_low
    if tl.float32 != DTYPE:
        normed_high = _normed(high, inverse, _high(weight, DTYPE), UNIT_OFFSET, DTYPE)
    tl.store(total + at, _packed(low, high, DTYPE), inside)
    tl.store(normed + at, _packed(normed_low, normed_high, DTYPE), inside)


@triton.jit(do_not_specialize=["num_rows"])
def sum_add_norm_kernel(
    given, residual, total, normed, norm, post_norm, addresses, calls, failed, num_rows, limit, eps, post_eps,
    NUMBERS: tl.constexpr, ROW: tl.constexpr, BLOCK: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr,
    SLOTS: tl.constexpr, TWO_SHOT: tl.constexpr, DTYPE: tl.constexpr, UNIT_OFFSET: tl.constexpr,
    POST_UNIT_OFFSET: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """residual' = post_norm(sum over ranks of given) + residual, to total; its normed rows to normed.

    given, residual, total, normed [num_rows, ROW] int32: rows of NUMBERS numbers of DTYPE as words; residual may be None, total may be
    residual or given. norm, post_norm [ROW], the latter may be None. addresses [SIZE] int64, of the ranks' memory; calls [PROGRAMS]
    int32. Sums in float32, in order of rank; they, post-normed rows, residual' and normed rows are rounded to DTYPE."""
    program = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    inside = lane < ROW
    weight = tl.load(norm + lane, inside, 0)
    post_weight = None
    if post_norm is not None:
        post_weight = tl.load(post_norm + lane, inside, 0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()  # who follows waits for the end all the same
    own = _memory_of(addresses, RANK)
    call = tl.load(calls + program)
    for row in range(program, num_rows, tl.num_programs(0)):
        at = row * ROW + lane  # less than 2 MiB in all
        words = tl.load(given + at, inside, 0)
        call += 1
        wire = _wire(words, call)
        places = (program * SLOTS + (call & (SLOTS - 1))) * (SIZE + 1) * BLOCK + lane
        owner = row % SIZE
        if TWO_SHOT:
            if owner != RANK:
                tl.store(_memory_of(addresses, owner) + places + RANK * BLOCK, wire, inside)
        else:
            for rank in tl.static_range(SIZE):
                if rank != RANK:
                    tl.store(_memory_of(addresses, rank) + places + RANK * BLOCK, wire, inside)
        before = None
        if residual is not None:  # under way while the others' rows are
            before = tl.load(residual + at, inside, 0)
        if (owner == RANK) | (not TWO_SHOT):
            low = tl.zeros([BLOCK], tl.float32)
            high = tl.zeros([BLOCK], tl.float32)
            for rank in tl.static_range(SIZE):
                if rank == RANK:
                    theirs = words
                else:
                    theirs = _wait_row(own + places + rank * BLOCK, inside, call, failed, limit)
                low += _low(theirs, DTYPE)
                if tl.float32 != DTYPE:
                    high += _high(theirs, DTYPE)
            found = _packed(low, high, DTYPE)
            if TWO_SHOT:
                for rank in tl.static_range(SIZE):
                    if rank != RANK:
                        tl.store(_memory_of(addresses, rank) + places + SIZE * BLOCK, _wire(found, call), inside)
        else:
            found = _wait_row(own + places + SIZE * BLOCK, inside, call, failed, limit)
        _finish(
            total, normed, at, found, before, post_weight, weight, inside, eps, post_eps, NUMBERS, DTYPE, UNIT_OFFSET,
            POST_UNIT_OFFSET,
        )  # fmt: skip
    tl.store(calls + program, call)


@triton.jit
def _sum_of_two(one, other, DTYPE: tl.constexpr):
    """Words; either way round the same."""
    low = _low(one, DTYPE) + _low(other, DTYPE)
    high = low
    if tl.float32 != DTYPE:
        high = _high(one, DTYPE) + _high(other, DTYPE)
    return _packed(low, high, DTYPE)


@triton.jit
def _wait_flag(flag, call, failed, limit):
    found = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    looks = 0
    while (found != call) & (looks < limit):
        found = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        looks += 1
    if looks >= limit:
        tl.store(failed, 1)


@triton.jit
def _rows_of(addresses, rank):
    return tl.multiple_of(tl.load(addresses + rank).to(tl.pointer_type(tl.int32)), 16)


@triton.jit(do_not_specialize=["num_rows"])
def sum_add_norm_many_kernel(
    given, residual, total, normed, norm, post_norm, addresses, calls, failed, num_rows, limit, eps, post_eps,
    NUMBERS: tl.constexpr, ROW: tl.constexpr, BLOCK: tl.constexpr, RANK: tl.constexpr, PROGRAMS: tl.constexpr,
    AHEAD: tl.constexpr, DTYPE: tl.constexpr, UNIT_OFFSET: tl.constexpr, POST_UNIT_OFFSET: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `sum_add_norm_kernel`, between two ranks, whose memory has [PROGRAMS, 2 AHEAD, BLOCK] words for rows and [PROGRAMS, 2 AHEAD] flags
    of 4 bytes behind them."""
    program, step = tl.program_id(0), tl.num_programs(0)
    lane = tl.arange(0, BLOCK)
    inside = lane < ROW
    weight = tl.load(norm + lane, inside, 0)
    post_weight = None
    if post_norm is not None:
        post_weight = tl.load(post_norm + lane, inside, 0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()  # who follows waits for the end all the same
    PLACES: tl.constexpr = 2 * AHEAD
    mine, theirs = _rows_of(addresses, RANK), _rows_of(addresses, 1 - RANK)
    flags = PROGRAMS * PLACES * BLOCK
    call = tl.load(calls + program)
    for ahead in range(AHEAD):
        row = program + ahead * step
        if row < num_rows:
            place = program * PLACES + ((call + 1 + ahead) & (PLACES - 1))
            tl.store(theirs + place * BLOCK + lane, tl.load(given + row * ROW + lane, inside, 0), inside)
    tl.debug_barrier()
    for ahead in range(AHEAD):
        if program + ahead * step < num_rows:
            place = program * PLACES + ((call + 1 + ahead) & (PLACES - 1))
            tl.atomic_xchg(theirs + flags + place, call + 1 + ahead, sem="release", scope="sys")
    for row in range(program, num_rows, step):
        call += 1
        at = row * ROW + lane
        before = None
        if residual is not None:  # under way while the other's row is
            before = tl.load(residual + at, inside, 0)
        words = tl.load(given + at, inside, 0)
        place = program * PLACES + (call & (PLACES - 1))
        _wait_flag(mine + flags + place, call, failed, limit)
        came = tl.load(mine + place * BLOCK + lane, inside, 0, volatile=True)
        later, place = row + AHEAD * step, program * PLACES + ((call + AHEAD) & (PLACES - 1))
        if later < num_rows:
            tl.store(theirs + place * BLOCK + lane, tl.load(given + later * ROW + lane, inside, 0), inside)
        _finish(
            total, normed, at, _sum_of_two(words, came, DTYPE), before, post_weight, weight, inside, eps, post_eps, NUMBERS, DTYPE,
            UNIT_OFFSET, POST_UNIT_OFFSET,
        )  # fmt: skip
        if later < num_rows:  # the row that is on its way since is there by now: the flag's fence need not wait long
            tl.debug_barrier()
            tl.atomic_xchg(theirs + flags + place, call + AHEAD, sem="release", scope="sys")
    tl.store(calls + program, call)


@triton.jit
def _bring(
    given, addresses, group, place, call, num_rows, flags, lane, inside, ROW: tl.constexpr, BLOCK: tl.constexpr,
    RANK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Send each owner its row of a group."""
    if group * SIZE < num_rows:
        for rank in tl.static_range(SIZE):
            if rank != RANK:
                row = group * SIZE + rank
                if row < num_rows:
                    theirs = _rows_of(addresses, rank) + (place + RANK) * BLOCK
                    tl.store(theirs + lane, tl.load(given + row * ROW + lane, inside, 0), inside)
        tl.debug_barrier()
        for rank in tl.static_range(SIZE):
            if (rank != RANK) & (group * SIZE + rank < num_rows):
                tl.atomic_xchg(_rows_of(addresses, rank) + flags + place + RANK, call, sem="release", scope="sys")


@triton.jit(do_not_specialize=["num_rows"])
def sum_add_norm_shared_kernel(
    given, residual, total, normed, norm, post_norm, addresses, calls, failed, num_rows, limit, eps, post_eps,
    NUMBERS: tl.constexpr, ROW: tl.constexpr, BLOCK: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr,
    PROGRAMS: tl.constexpr, TURNS: tl.constexpr, DTYPE: tl.constexpr, UNIT_OFFSET: tl.constexpr,
    POST_UNIT_OFFSET: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `sum_add_norm_kernel`, in two shots: a program has groups of SIZE rows, in each of which every rank adds up one.

    A rank's memory has [PROGRAMS, TURNS, 2 SIZE, BLOCK] words, what came from each rank and then the sums of each, and as many flags of 4
    bytes [PROGRAMS, TURNS, 2 SIZE] behind them."""
    program, step = tl.program_id(0), tl.num_programs(0)
    lane = tl.arange(0, BLOCK)
    inside = lane < ROW
    weight = tl.load(norm + lane, inside, 0)
    post_weight = None
    if post_norm is not None:
        post_weight = tl.load(post_norm + lane, inside, 0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()  # who follows waits for the end all the same
    mine = _rows_of(addresses, RANK)
    flags = PROGRAMS * TURNS * 2 * SIZE * BLOCK
    call = tl.load(calls + program)
    place = (program * TURNS + ((call + 1) & (TURNS - 1))) * 2 * SIZE
    _bring(given, addresses, program, place, call + 1, num_rows, flags, lane, inside, ROW, BLOCK, RANK, SIZE)
    for group in range(program, tl.cdiv(num_rows, SIZE), step):
        call += 1
        place = (program * TURNS + (call & (TURNS - 1))) * 2 * SIZE
        later = (program * TURNS + ((call + 1) & (TURNS - 1))) * 2 * SIZE
        own = group * SIZE + RANK
        if own < num_rows:
            at = own * ROW + lane
            before = None
            if residual is not None:  # under way while the others' rows are
                before = tl.load(residual + at, inside, 0)
            low = tl.zeros([BLOCK], tl.float32)
            high = tl.zeros([BLOCK], tl.float32)
            for rank in tl.static_range(SIZE):
                if rank == RANK:
                    words = tl.load(given + at, inside, 0)
                else:
                    _wait_flag(mine + flags + place + rank, call, failed, limit)
                    words = tl.load(mine + (place + rank) * BLOCK + lane, inside, 0, volatile=True)
                low += _low(words, DTYPE)
                if tl.float32 != DTYPE:
                    high += _high(words, DTYPE)
            found = _packed(low, high, DTYPE)
            for rank in tl.static_range(SIZE):
                if rank != RANK:
                    tl.store(_rows_of(addresses, rank) + (place + SIZE + RANK) * BLOCK + lane, found, inside)
            tl.debug_barrier()
            for rank in tl.static_range(SIZE):
                if rank != RANK:
                    flag = _rows_of(addresses, rank) + flags + place + SIZE + RANK
                    tl.atomic_xchg(flag, call, sem="release", scope="sys")
            _finish(
                total, normed, at, found, before, post_weight, weight, inside, eps, post_eps, NUMBERS, DTYPE, UNIT_OFFSET,
                POST_UNIT_OFFSET,
            )  # fmt: skip
        _bring(given, addresses, group + step, later, call + 1, num_rows, flags, lane, inside, ROW, BLOCK, RANK, SIZE)
        for rank in tl.static_range(SIZE):
            if rank != RANK:
                row = group * SIZE + rank
                if row < num_rows:
                    at = row * ROW + lane
                    before = None
                    if residual is not None:
                        before = tl.load(residual + at, inside, 0)
                    _wait_flag(mine + flags + place + SIZE + rank, call, failed, limit)
                    found = tl.load(mine + (place + SIZE + rank) * BLOCK + lane, inside, 0, volatile=True)
                    _finish(
                        total, normed, at, found, before, post_weight, weight, inside, eps, post_eps, NUMBERS, DTYPE, UNIT_OFFSET,
                        POST_UNIT_OFFSET,
                    )  # fmt: skip
    tl.store(calls + program, call)


@triton.jit(do_not_specialize=["num_rows"])
def sum_sent_add_norm_kernel(
    given, residual, total, normed, norm, post_norm, came, counts, flags, their_rows, their_flags, calls, failed, num_rows, limit,
    parts, eps, post_eps, most_rows, NUMBERS: tl.constexpr, ROW: tl.constexpr, BLOCK: tl.constexpr, COUNTS: tl.constexpr,
    RANK: tl.constexpr, TURN: tl.constexpr, DTYPE: tl.constexpr, UNIT_OFFSET: tl.constexpr, POST_UNIT_OFFSET: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """As `sum_add_norm_kernel`, for rows that two ranks have sent each other, `TURN` to each in turn. A program adds up one, sends the sum,
    and takes one that the other has added up.

    came, their_rows [2, most_rows, ROW] int32, of calls of even number and of odd ones: rows to add up, and sums; counts [2, COUNTS] int32:
    `parts` for 64 rows that are all there; flags, their_flags [most_rows] int32: the call of the sum that is there; calls [1] int32: so
    far, the one in question too. Programs start in the order of their numbers, so what one waits for is never behind what waits."""
    program = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    inside = lane < ROW
    weight = tl.load(norm + lane, inside, 0)
    post_weight = None
    if post_norm is not None:
        post_weight = tl.load(post_norm + lane, inside, 0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()  # who follows waits for the end all the same
    call = tl.load(calls)
    parity = (call - 1) & 1
    place = parity.to(tl.int64) * most_rows * ROW
    pair = program // TURN * 2 * TURN + program % TURN
    own, other = pair + RANK * TURN, pair + (1 - RANK) * TURN
    if own < num_rows:
        at = own * ROW + lane
        before = None
        if residual is not None:
            before = tl.load(residual + at, inside, 0)
        words = tl.load(given + at, inside, 0)
        _wait_flag(counts + parity * COUNTS + own // 64, parts, failed, limit)
        theirs = tl.load(came + place + at, inside, 0, volatile=True)
        found = _sum_of_two(words, theirs, DTYPE)
        tl.store(their_rows + place + at, found, inside)
        tl.debug_barrier()
        tl.atomic_xchg(their_flags + own, call, sem="release", scope="sys")
        _finish(
            total, normed, at, found, before, post_weight, weight, inside, eps, post_eps, NUMBERS, DTYPE, UNIT_OFFSET,
            POST_UNIT_OFFSET,
        )  # fmt: skip
    if other < num_rows:
        at = other * ROW + lane
        before = None
        if residual is not None:  # under way while the sum is
            before = tl.load(residual + at, inside, 0)
        _wait_flag(flags + other, call, failed, limit)
        found = tl.load(came + place + at, inside, 0, volatile=True)
        _finish(
            total, normed, at, found, before, post_weight, weight, inside, eps, post_eps, NUMBERS, DTYPE, UNIT_OFFSET,
            POST_UNIT_OFFSET,
        )  # fmt: skip


def memory_words(size: int, row_words: int) -> int:
    """Words of 8 bytes that a rank's memory has."""
    return PROGRAMS * SLOTS * (size + 1) * triton.next_power_of_2(row_words)


def memory_words_of_many(num_programs: int, row_words: int, size: int) -> int:
    places = 2 * AHEAD if size == 2 else 2 * TURNS * size
    return num_programs * (places // 2) * (triton.next_power_of_2(row_words) + 1)
