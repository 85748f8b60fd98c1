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

from pelton_backends.triton.ops.sampling_pieces import GROUP, OK, finish_row, pick_chunk, pick_token, uniform
from pelton_backends.triton.ops.sampling_rows import row_start
from pelton_backends.triton.runtime import let_next_start, wait_for_inputs

CUTS = 8
_CUTS = tl.constexpr(CUTS)
_UNIT = tl.constexpr(1099511627776.0)


@triton.jit
def _narrowed(sums, low, high, needed, CHUNKS: tl.constexpr, CHUNKS_BLOCK: tl.constexpr):
    """The part of (low, high), between two of its cuts, where the sum passes `needed`. sums [CUTS, CHUNKS] float64, of a row."""
    cut, chunk = tl.arange(0, _CUTS)[:, None], tl.arange(0, CHUNKS_BLOCK)[None, :]
    totals = tl.sum(tl.load(sums + cut * CHUNKS + chunk, mask=chunk < CHUNKS, other=0.0), 1)
    num_enough = tl.sum((totals >= needed).to(tl.int32), 0).to(tl.float32)
    step = (high - low) / (_CUTS + 1)
    return low + step * num_enough, tl.where(num_enough == _CUTS, high, low + step * (num_enough + 1.0))


@triton.jit
def _bracket(facts, sums, row, PASSES: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_BLOCK: tl.constexpr):
    """Logarithms of two weights after so many passes: the lower one's sum is enough, the upper one's is not."""
    needed = tl.load(facts + row * 3 + 1)
    # A little more than everything: the least weight is at or above its end, the greatest below the other.
    low = tl.load(facts + row * 3 + 2).to(tl.float32) * 1.0001 - 1e-6
    high = tl.full([], 1e-6, tl.float32)
    for index in tl.static_range(PASSES):
        own = sums + (row.to(tl.int64) * 2 + index) * (_CUTS * CHUNKS)
        low, high = _narrowed(own, low, high, needed, CHUNKS, CHUNKS_BLOCK)
    return low, high


@triton.jit
def _weights(row_logits, place, warmth, top, V: tl.constexpr):
    """As in `pick_kernel`."""
    values = tl.load(row_logits + place, mask=place < V, other=-float("inf"))
    if warmth != 1.0:  # an exact division takes longer than all the rest
        values = tl.div_rn(values, warmth)
    return tl.exp(values - top)


@triton.jit
def measure_kernel(
    logits,
    changed,
    is_changed,
    slots,
    temperature,
    is_wide,
    facts,
    sums,
    row_stride,
    V: tl.constexpr,
    CHUNK_GROUPS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
    MAY_CHANGE: tl.constexpr,
    PASS: tl.constexpr,
    PDL: tl.constexpr,
):
    """sums [n, 2, CUTS, CHUNKS] float64, of each pass."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    if tl.load(is_wide + row) == 1:
        row_logits = row_start(logits, changed, is_changed, row, row_stride, MAY_CHANGE)
        warmth, top = tl.load(temperature + tl.load(slots + row)), tl.load(facts + row * 3).to(tl.float32)
        place = chunk * (CHUNK_GROUPS * GROUP) + tl.arange(0, CHUNK_GROUPS * GROUP)
        weights = _weights(row_logits, place, warmth, top, V)
        low, high = _bracket(facts, sums, row, PASS, CHUNKS, CHUNKS_BLOCK)
        step = (high - low) / (_CUTS + 1)
        own = sums + (row.to(tl.int64) * 2 + PASS) * (_CUTS * CHUNKS) + chunk
        for index in tl.static_range(_CUTS):
            cut = tl.exp(low + step * (index + 1.0))
            above = tl.sum(tl.where(weights >= cut, weights, 0.0), 0)
            tl.store(own + index * CHUNKS, above.to(tl.float64))


@triton.jit
def gather_kernel(
    logits,
    changed,
    is_changed,
    slots,
    temperature,
    is_wide,
    facts,
    sums,
    spare,
    num_spare,
    parts,
    chunk_sum,
    row_stride,
    V: tl.constexpr,
    CHUNK_GROUPS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
    SPARE: tl.constexpr,
    MAY_CHANGE: tl.constexpr,
    PDL: tl.constexpr,
):
    """spare [n, SPARE] int32: bits of weights; num_spare [n] int32, zeros before; parts [n, 2, CHUNKS] int32: where a chunk's
    begin in it, and how many they are; chunk_sum [n, CHUNKS] float64, written: of the weights above."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    if tl.load(is_wide + row) == 1:
        row_logits = row_start(logits, changed, is_changed, row, row_stride, MAY_CHANGE)
        warmth, top = tl.load(temperature + tl.load(slots + row)), tl.load(facts + row * 3).to(tl.float32)
        place = chunk * (CHUNK_GROUPS * GROUP) + tl.arange(0, CHUNK_GROUPS * GROUP)
        weights = _weights(row_logits, place, warmth, top, V)
        low, high = _bracket(facts, sums, row, 2, CHUNKS, CHUNKS_BLOCK)
        least, most = tl.exp(low), tl.exp(high)
        above = tl.sum(tl.where(weights >= most, weights, 0.0), 0)
        tl.store(chunk_sum + row * CHUNKS + chunk, above.to(tl.float64))
        is_taken = (weights >= least) & (weights < most) & (weights > 0)
        count = tl.sum(is_taken.to(tl.int32), 0)
        first = tl.atomic_add(num_spare + row, count, sem="relaxed")
        tl.store(parts + row * (2 * CHUNKS) + chunk, first)
        tl.store(parts + row * (2 * CHUNKS) + CHUNKS + chunk, count)
        at = first + tl.cumsum(is_taken.to(tl.int32), 0) - 1
        bits = weights.to(tl.int32, bitcast=True)
        tl.store(spare + row.to(tl.int64) * SPARE + at, bits, mask=is_taken & (at < SPARE))


@triton.jit
def _units(weights):
    return tl.floor(weights.to(tl.float64) * _UNIT + 0.5).to(tl.int64)


@triton.jit
def finish_kernel(
    logits,
    changed,
    is_changed,
    slots,
    result,
    temperature,
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
    MAY_CHANGE: tl.constexpr,
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
        needed = tl.ceil(tl.load(facts + row * 3 + 1) * _UNIT).to(tl.int64) - tl.sum(above, 0)
        tl.debug_barrier()
        tl.store(num_spare + row, 0)
        if (num <= SPARE) & (needed > 0) & (tl.sum(masses, 0) >= needed):
            low = tl.min(tl.where(bits > 0, bits, 0x7FFFFFFF), 0).to(tl.int64)
            high = tl.max(bits, 0).to(tl.int64) + 1
            while high - low > 1:
                middle = low + (high - low) // 2
                if tl.sum(tl.where(bits >= middle.to(tl.int32), masses, 0), 0) >= needed:
                    low = middle
                else:
                    high = middle
            least = low.to(tl.int32)
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

            row_logits = row_start(logits, changed, is_changed, row, row_stride, MAY_CHANGE)
            warmth, top = tl.load(temperature + slot), tl.load(facts + row * 3).to(tl.float32)
            group = chunk * CHUNK_GROUPS + tl.arange(0, CHUNK_GROUPS)
            weights = _weights(row_logits, group[:, None] * GROUP + tl.arange(0, GROUP)[None, :], warmth, top, V)
            kept = tl.where(weights.to(tl.int32, bitcast=True) >= least, weights, 0.0)
            token = tl.minimum(pick_token(kept, group, target / _UNIT, CHUNK_GROUPS, GROUP), V - 1)
            finish_row(
                row,
                slot,
                token,
                OK,
                result,
                token_ids,
                token_stride,
                num_computed_tokens,
                side_slots,
                counts,
                touched,
                V,
            )
            tl.store(is_wide + row, 0)
