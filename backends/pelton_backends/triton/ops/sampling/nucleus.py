"""Sampling from a nucleus of many tokens, by many programs a row: top_p over a flat distribution.

n rows, V tokens in C chunks; the weight of a token is exp(l / temperature - its best). Looked for is the greatest t such that
the weights at or above t sum to what is needed.

`measure_kernel`, grid (n, C), twice: the sum of the weights at or above each of eight cuts, chunk by chunk. The first time
the cuts lie between the least and the greatest weight, the second time between the two where the sum passes what is needed;
evenly in the logarithm. That leaves an 81st of the range.
`gather_kernel`, grid (n, C): the weights of that range to `spare`, and of each chunk the sum of those above.
`finish_kernel`, grid (n): t by bisection over the gathered weights, then the token, as in a row without filters.

Rows that this does not settle (more than `SPARE` weights in the range, sums that rounding put beside it) stay marked in
`is_wide`: `wide_kernel` follows. In `finish_kernel` weights are whole numbers of 2^-40, so that the order in which programs
gather does not matter.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pelton_backends.triton.ops.sampling.pieces import GROUP, OK, finish_row, pick_chunk, pick_token, uniform
from pelton_backends.triton.runtime import let_next_start, wait_for_inputs

CUTS = 8
_CUTS = tl.constexpr(CUTS)
_UNIT = tl.constexpr(1099511627776.0)


@triton.jit
def _units(weights):
    return tl.floor(weights.to(tl.float64) * _UNIT + 0.5).to(tl.int64)


@triton.jit
def _bracket(facts, totals, row, PASSES: tl.constexpr):
    """Logarithms of two weights after so many passes: the lower one's sum is enough, the upper one's is not."""
    needed = _needed_units(facts, row)
    # A little more than everything: the least weight is at or above its end, the greatest below the other.
    low = tl.load(facts + row * 4 + 2).to(tl.float32) * 1.0001 - 1e-6
    high = tl.full([], 1e-6, tl.float32)
    for index in tl.static_range(PASSES):
        sums = tl.load(totals + (row * 2 + index) * _CUTS + tl.arange(0, _CUTS))
        num_enough = tl.sum((sums >= needed).to(tl.int32), 0).to(tl.float32)
        step = (high - low) / (_CUTS + 1)
        high = tl.where(num_enough == _CUTS, high, low + step * (num_enough + 1.0))
        low += step * num_enough
    return low, high


@triton.jit
def _needed_units(facts, row):
    return tl.ceil(tl.load(facts + row * 4 + 1) * _UNIT).to(tl.int64)


@triton.jit
def _weights(row_logits, place, warmth, top, V: tl.constexpr, DIVIDE: tl.constexpr):
    """Without DIVIDE the temperature is 1."""
    values = tl.load(row_logits + place, mask=place < V, other=-float("inf"))
    if DIVIDE:  # without the branch for rare operands that an exact division has: loads must not wait for each other
        inverse = tl.div_rn(1.0, warmth)
        share = values * inverse
        share = tl.fma(tl.fma(-share, warmth, values), inverse, share)
        values = tl.where(values > -float("inf"), share, values)
    return tl.exp(values - top)


@triton.jit
def _over(sums, weights, low, step, CUT: tl.constexpr):
    return sums + tl.where(weights >= tl.exp(low + step * (CUT + 1.0)), weights, 0.0)


@triton.jit
def _sums_above(
    row_logits, chunk, low, step, warmth, top,
    V: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, DIVIDE: tl.constexpr,
):  # fmt: skip
    """[CUTS]: of a chunk's weights at or above each cut."""
    place = chunk * TILE + tl.arange(0, WIDTH)
    zeros = tl.zeros([WIDTH], tl.float32)
    a, b, c, d, e, f, g, h = zeros, zeros, zeros, zeros, zeros, zeros, zeros, zeros
    for line in tl.static_range(TILE // WIDTH):
        weights = _weights(row_logits, place + line * WIDTH, warmth, top, V, DIVIDE)
        a, b = _over(a, weights, low, step, 0), _over(b, weights, low, step, 1)
        c, d = _over(c, weights, low, step, 2), _over(d, weights, low, step, 3)
        e, f = _over(e, weights, low, step, 4), _over(f, weights, low, step, 5)
        g, h = _over(g, weights, low, step, 6), _over(h, weights, low, step, 7)
    # One reduction over threads for all cuts: joined in pairs, so that the last of three axes counts by one.
    even = tl.join(tl.join(a, e), tl.join(c, g))
    odd = tl.join(tl.join(b, f), tl.join(d, h))
    return tl.reshape(tl.sum(tl.join(even, odd), 0), [_CUTS])


@triton.jit
def measure_kernel(
    logits,
    is_wide,
    facts,
    totals,
    row_stride,
    V: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    PASS: tl.constexpr,
    PDL: tl.constexpr,
):
    """totals [n, 2, CUTS] int64, of each pass, zeros before."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    low, high = _bracket(facts, totals, row, PASS)
    top, warmth = tl.load(facts + row * 4).to(tl.float32), tl.load(facts + row * 4 + 3).to(tl.float32)
    if tl.load(is_wide + row) == 1:
        row_logits = logits + row.to(tl.int64) * row_stride
        step = (high - low) / (_CUTS + 1)
        if warmth == 1.0:
            sums = _sums_above(row_logits, chunk, low, step, warmth, top, V, TILE, WIDTH, False)
        else:
            sums = _sums_above(row_logits, chunk, low, step, warmth, top, V, TILE, WIDTH, True)
        tl.atomic_add(totals + (row * 2 + PASS) * _CUTS + tl.arange(0, _CUTS), _units(sums), sem="relaxed")


@triton.jit
def _is_between(weights, least, most):
    return (weights >= least) & (weights < most) & (weights > 0)


@triton.jit
def _count(
    row_logits, place, least, most, warmth, top,
    V: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, DIVIDE: tl.constexpr,
):  # fmt: skip
    """Return by thread the sum of the weights above, and how many lie between."""
    above, count = tl.zeros([WIDTH], tl.float32), tl.zeros([WIDTH], tl.int32)
    for line in tl.static_range(TILE // WIDTH):
        weights = _weights(row_logits, place + line * WIDTH, warmth, top, V, DIVIDE)
        above += tl.where(weights >= most, weights, 0.0)
        count += _is_between(weights, least, most).to(tl.int32)
    return above, count


@triton.jit
def _write(
    row_logits, place, own_spare, at, least, most, warmth, top,
    V: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, SPARE: tl.constexpr, DIVIDE: tl.constexpr,
):  # fmt: skip
    for line in tl.static_range(TILE // WIDTH):
        weights = _weights(row_logits, place + line * WIDTH, warmth, top, V, DIVIDE)
        is_taken = _is_between(weights, least, most)
        tl.store(own_spare + at, weights.to(tl.int32, bitcast=True), mask=is_taken & (at < SPARE))
        at += is_taken.to(tl.int32)


@triton.jit
def gather_kernel(
    logits,
    is_wide,
    facts,
    totals,
    spare,
    num_spare,
    parts,
    chunk_sum,
    row_stride,
    V: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr,
    SPARE: tl.constexpr,
    PDL: tl.constexpr,
):
    """spare [n, SPARE] int32: bits of weights; num_spare [n] int32, zeros before; parts [n, 2, CHUNKS] int32: where a chunk's
    begin in it, and how many they are; chunk_sum [n, CHUNKS] float64, written: of the weights above."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    low, high = _bracket(facts, totals, row, 2)
    top, warmth = tl.load(facts + row * 4).to(tl.float32), tl.load(facts + row * 4 + 3).to(tl.float32)
    if tl.load(is_wide + row) == 1:
        row_logits = logits + row.to(tl.int64) * row_stride
        least, most = tl.exp(low), tl.exp(high)
        # One token a thread at a time, in any order within a chunk, and what is gathered computed twice: keeping it would
        # take registers, and lines of four tokens a thread would pass through shared memory to be stored.
        place = chunk * TILE + tl.arange(0, WIDTH)
        if warmth == 1.0:
            above, count = _count(row_logits, place, least, most, warmth, top, V, TILE, WIDTH, False)
        else:
            above, count = _count(row_logits, place, least, most, warmth, top, V, TILE, WIDTH, True)
        running = tl.cumsum(count, 0)
        num = tl.max(running, 0)
        first = tl.atomic_add(num_spare + row, num, sem="relaxed")
        tl.store(chunk_sum + row * CHUNKS + chunk, tl.sum(above, 0).to(tl.float64))
        tl.store(parts + row * (2 * CHUNKS) + chunk, first)
        tl.store(parts + row * (2 * CHUNKS) + CHUNKS + chunk, num)
        at = first + running - count
        own_spare = spare + row.to(tl.int64) * SPARE
        if warmth == 1.0:
            _write(row_logits, place, own_spare, at, least, most, warmth, top, V, TILE, WIDTH, SPARE, False)
        else:
            _write(row_logits, place, own_spare, at, least, most, warmth, top, V, TILE, WIDTH, SPARE, True)


@triton.jit
def _least_enough(bits, masses, whole, needed):
    """The greatest t at which the masses of the bits >= t sum to `needed`; all of them sum to `whole`, which is enough."""
    low = tl.min(tl.where(bits > 0, bits, 0x7FFFFFFF), 0).to(tl.int64)
    high = tl.max(bits, 0).to(tl.int64) + 1
    mass_high = tl.zeros([], tl.int64)
    turn = tl.zeros([], tl.int32)
    while high - low > 1:
        middle = low + (high - low) // 2
        if turn % 2 == 0:  # where it would be if the mass were spread evenly
            share = (whole - needed).to(tl.float32) / (whole - mass_high).to(tl.float32)
            middle = low + ((high - low).to(tl.float32) * share).to(tl.int64)
            middle = tl.minimum(tl.maximum(middle, low + 1), high - 1)
        found = tl.sum(tl.where(bits >= middle.to(tl.int32), masses, 0), 0)
        if found >= needed:
            low = middle
            whole = found
        else:
            high = middle
            mass_high = found
        turn += 1
    return low.to(tl.int32)


@triton.jit
def finish_kernel(
    logits,
    slots,
    result,
    seeds,
    is_wide,
    facts,
    spare,
    num_spare,
    parts,
    running,
    chunk_sum,
    token_ids,
    num_computed_tokens,
    side_slots,
    counts,
    touched,
    row_stride,
    token_stride,
    V: tl.constexpr,
    CHUNK_GROUPS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
    SPARE: tl.constexpr,
    PDL: tl.constexpr,
):
    """running [n, SPARE] int64: scratch. Leaves `num_spare` zero, and `is_wide` of the rows that it settles."""
    row = tl.program_id(0)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    if tl.load(is_wide + row) == 1:
        place, chunks = tl.arange(0, SPARE), tl.arange(0, CHUNKS_BLOCK)
        num = tl.load(num_spare + row)
        bits = tl.load(spare + row.to(tl.int64) * SPARE + place, mask=place < num, other=0)
        masses = _units(bits.to(tl.float32, bitcast=True))
        above = _units(tl.load(chunk_sum + row * CHUNKS + chunks, mask=chunks < CHUNKS, other=0.0))
        needed = _needed_units(facts, row) - tl.sum(above, 0)
        whole = tl.sum(masses, 0)
        tl.debug_barrier()
        tl.store(num_spare + row, 0)
        if (num <= SPARE) & (needed > 0) & (whole >= needed):
            least = _least_enough(bits, masses, whole, needed)
            own_running = running + row.to(tl.int64) * SPARE
            tl.store(own_running + place, tl.cumsum(tl.where(bits >= least, masses, 0), 0))
            tl.debug_barrier()
            first = tl.load(parts + row * (2 * CHUNKS) + chunks, mask=chunks < CHUNKS, other=0)
            count = tl.load(parts + row * (2 * CHUNKS) + CHUNKS + chunks, mask=chunks < CHUNKS, other=0)
            until = tl.load(own_running + first + count - 1, mask=count > 0, other=0)
            before = tl.load(own_running + first - 1, mask=(count > 0) & (first > 0), other=0)
            slot = tl.load(slots + row)
            number = uniform(tl.load(seeds + slot), tl.load(num_computed_tokens + slot) + 1)
            chunk, target = pick_chunk((above + until - before).to(tl.float64), number, CHUNKS_BLOCK)

            row_logits = logits + row.to(tl.int64) * row_stride
            top, warmth = tl.load(facts + row * 4).to(tl.float32), tl.load(facts + row * 4 + 3).to(tl.float32)
            group = chunk * CHUNK_GROUPS + tl.arange(0, CHUNK_GROUPS)
            weights = _weights(row_logits, group[:, None] * GROUP + tl.arange(0, GROUP)[None, :], warmth, top, V, True)
            kept = tl.where(weights.to(tl.int32, bitcast=True) >= least, weights, 0.0)
            token = tl.minimum(pick_token(kept, group, target / _UNIT, CHUNK_GROUPS, GROUP), V - 1)
            finish_row(
                row, slot, token, OK, result, token_ids, token_stride, num_computed_tokens, side_slots, counts, touched, V
            )  # fmt: skip
            tl.store(is_wide + row, 0)
