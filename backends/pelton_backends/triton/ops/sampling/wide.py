"""Sampling a row whose filters keep more tokens than other kernels have room for: several passes by one program.

A threshold is the greatest t such that a measure of the tokens at or above t reaches what is needed: their number for
top_k, by logit; the sum of their weights for top_p, by weight. Each pass measures at eight cuts, spread evenly, until the
bracket holds at most `SPARE` tokens; these are gathered, and the threshold is found among them by bisection: exact. One
more pass sums the kept weights of each chunk, and the token is picked as in a row without filters.

Tokens 40 temperatures below the best (weight under 5e-18 of its) count as dropped. Sums are float64 over float32 weights.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pelton_backends.triton.ops.sampling.pieces import (
    GROUP,
    LOWEST_KEY,
    MINUS_INF_KEY,
    OK,
    finish_row,
    key_value,
    order_key,
    pick_chunk,
    pick_token,
    uniform,
)
from pelton_backends.triton.runtime import let_next_start, wait_for_inputs

_CUTS = tl.constexpr(8)
_STEPS = tl.constexpr(4)  # loads in flight
_DEPTH = tl.constexpr(40.0)


@triton.jit
def _weights(keys, warmth, top):
    """Return the weights of tokens by key, as in `pick_kernel`."""
    return tl.exp(tl.div_rn(key_value(keys), warmth) - top)


@triton.jit
def _load(row_logits, place, floor, BY_MASS: tl.constexpr, warmth, top, V: tl.constexpr):
    """(keys, measures) of tokens: logits' keys, each 1; or weights' keys and weights. Below `floor`: LOWEST_KEY, 0."""
    keys = order_key(tl.load(row_logits + place, mask=place < V, other=-float("inf")))
    is_kept = (keys >= floor) & (keys > MINUS_INF_KEY)
    measures = is_kept.to(tl.float32)
    if BY_MASS:
        measures = tl.where(is_kept, _weights(keys, warmth, top), 0.0)
        keys = order_key(measures)
    return tl.where(is_kept, keys, LOWEST_KEY), measures


@triton.jit
def _measure(row_logits, cuts, floor, BY_MASS: tl.constexpr, warmth, top, V: tl.constexpr, LANES: tl.constexpr):
    """cuts [8] int64 keys -> (count, sum of measures) [8] of the tokens with a key at or above each."""
    lane = tl.arange(0, LANES)[:, None]
    count = tl.zeros([LANES, _CUTS], tl.int32)
    total = tl.zeros([LANES, _CUTS], tl.float64)
    for start in range(0, V, LANES * _STEPS):
        part = tl.zeros([LANES, _CUTS], tl.float32)
        for step in tl.static_range(_STEPS):
            keys, measures = _load(row_logits, start + step * LANES + lane, floor, BY_MASS, warmth, top, V)
            is_above = keys.to(tl.int64) >= cuts[None, :]
            count += is_above.to(tl.int32)
            part += tl.where(is_above, measures, 0.0)
        total += part.to(tl.float64)
    return tl.sum(count, 0), tl.sum(total, 0)


@triton.jit
def _gather(
    row_logits, spare_keys, low, high, floor, BY_MASS: tl.constexpr, warmth, top, V: tl.constexpr, LANES: tl.constexpr
):
    """Keys in [low, high) to `spare_keys`, in the order of tokens; how many."""
    written = tl.zeros([], tl.int32)
    for start in range(0, V, LANES):
        keys, _ = _load(row_logits, start + tl.arange(0, LANES), floor, BY_MASS, warmth, top, V)
        is_taken = (keys.to(tl.int64) >= low) & (keys.to(tl.int64) < high)
        at = written + tl.cumsum(is_taken.to(tl.int32), 0) - 1
        tl.store(spare_keys + at, keys, mask=is_taken)
        written += tl.sum(is_taken.to(tl.int32), 0)
    tl.debug_barrier()
    return written


@triton.jit
def _threshold(
    row_logits, spare_keys, least, best, needed, floor, BY_MASS: tl.constexpr, warmth, top,
    V: tl.constexpr, LANES: tl.constexpr, SPARE: tl.constexpr,
):  # fmt: skip
    """The greatest key t in [least, best] at and above which tokens measure `needed` or more; `least` where none is."""
    low, high = least.to(tl.int64), best.to(tl.int64) + 1
    ramp = tl.arange(0, _CUTS)
    count_low = tl.full([], V, tl.int32)
    count_high = tl.zeros([], tl.int32)
    above = tl.zeros([], tl.float64)  # what {key >= high} measures
    turn = tl.zeros([], tl.int32)
    while (high - low > 1) & (count_low - count_high > SPARE):
        cuts = low + (high - low) * (ramp + 1) // (_CUTS + 1)  # even in a weight's key is even in its logit
        if (turn < 3) & (not BY_MASS):
            low_value, high_value = key_value(low.to(tl.int32)), key_value((high - 1).to(tl.int32))
            values = low_value + (high_value - low_value) * ((ramp + 1).to(tl.float32) / (_CUTS + 1))
            cuts = tl.minimum(tl.maximum(order_key(values).to(tl.int64), low), high - 1)
        counts, totals = _measure(row_logits, cuts, floor, BY_MASS, warmth, top, V, LANES)
        is_enough = totals >= needed
        # The highest cut that is enough is the new low, the lowest that is not the new high.
        low = tl.maximum(low, tl.max(tl.where(is_enough, cuts, low), 0))
        high = tl.minimum(high, tl.min(tl.where(is_enough, high, cuts), 0))
        count_low = tl.minimum(count_low, tl.min(tl.where(is_enough, counts, V), 0))
        count_high = tl.maximum(count_high, tl.max(tl.where(is_enough, 0, counts), 0))
        above = tl.maximum(above, tl.max(tl.where(is_enough, 0.0, totals), 0))
        turn += 1
    if high - low > 1:
        num_keys = _gather(row_logits, spare_keys, low, high, floor, BY_MASS, warmth, top, V, LANES)
        place = tl.arange(0, SPARE)
        keys = tl.load(spare_keys + place, mask=place < num_keys, other=LOWEST_KEY)
        measures = tl.full([SPARE], 1.0, tl.float64)
        if BY_MASS:
            measures = key_value(keys).to(tl.float64)
        while high - low > 1:
            middle = low + (high - low) // 2
            is_above = keys.to(tl.int64) >= middle
            if above + tl.sum(tl.where(is_above, measures, 0.0), 0) >= needed:
                low = middle
            else:
                high = middle
        tl.debug_barrier()
    return low.to(tl.int32)


@triton.jit
def _kept_weights(row_logits, place, floor, least_weight, warmth, top, V: tl.constexpr):
    keys, weights = _load(row_logits, place, floor, True, warmth, top, V)
    return tl.where(keys >= least_weight, weights, 0.0)


@triton.jit
def wide_kernel(
    logits,
    slots,
    result,
    temperature,
    top_k,
    top_p,
    min_p,
    seeds,
    chunk_best,
    spare,
    is_wide,
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
    LANES: tl.constexpr,
    SPARE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (n), after `pick_kernel`; spare [n, SPARE] int32: scratch. Rows with is_wide 0 are done."""
    row = tl.program_id(0)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    if tl.load(is_wide + row) != 0:
        slot = tl.load(slots + row)
        row_logits = logits + row.to(tl.int64) * row_stride
        own_spare = spare + row.to(tl.int64) * SPARE
        chunks = tl.arange(0, CHUNKS_BLOCK)
        best = tl.max(tl.load(chunk_best + row * CHUNKS + chunks, mask=chunks < CHUNKS, other=LOWEST_KEY), 0)
        warmth, least_p = tl.load(temperature + slot), tl.load(min_p + slot)
        most_p, most_k = tl.load(top_p + slot), tl.load(top_k + slot)
        top = tl.div_rn(key_value(best), warmth)
        floor = order_key((top - _DEPTH) * warmth)
        if least_p > 0:
            # The lowest key that min_p keeps, with the very comparison of the filter; division keeps the order.
            least = top + tl.log(least_p)
            low, high = tl.full([], MINUS_INF_KEY, tl.int64), best.to(tl.int64)
            while high - low > 1:
                middle = low + (high - low) // 2
                if tl.div_rn(key_value(middle.to(tl.int32)), warmth) >= least:
                    high = middle
                else:
                    low = middle
            floor = tl.maximum(floor, high.to(tl.int32))
        if most_k < V:
            needed = most_k.to(tl.float64)
            floor = _threshold(row_logits, own_spare, floor, best, needed, floor, False, warmth, top, V, LANES, SPARE)
        least_weight = tl.zeros([], tl.int32)
        if most_p < 1.0:
            _, totals = _measure(row_logits, tl.zeros([_CUTS], tl.int64), floor, True, warmth, top, V, LANES)
            needed = most_p.to(tl.float64) * tl.max(totals, 0)
            one = tl.full([], 0x3F800000, tl.int32)  # the best token's weight
            least_weight = _threshold(
                row_logits, own_spare, least_weight, one, needed, floor, True, warmth, top, V, LANES, SPARE
            )

        group, lane = tl.arange(0, CHUNK_GROUPS), tl.arange(0, GROUP)
        within = group[:, None] * GROUP + lane[None, :]
        sums = tl.zeros([CHUNKS_BLOCK], tl.float64)
        for chunk in range(0, CHUNKS):
            place = chunk * (CHUNK_GROUPS * GROUP) + within
            kept = _kept_weights(row_logits, place, floor, least_weight, warmth, top, V)
            sums = tl.where(chunks == chunk, tl.sum(tl.sum(kept, 1).to(tl.float64), 0), sums)
        number = uniform(tl.load(seeds + slot), tl.load(num_computed_tokens + slot) + 1)
        chosen, target = pick_chunk(sums, number, CHUNKS_BLOCK)
        place = chosen * (CHUNK_GROUPS * GROUP) + within
        kept = _kept_weights(row_logits, place, floor, least_weight, warmth, top, V)
        token = tl.minimum(pick_token(kept, chosen * CHUNK_GROUPS + group, target, CHUNK_GROUPS, GROUP), V - 1)
        finish_row(
            row, slot, token, OK, result, token_ids, token_stride, num_computed_tokens, side_slots, counts, touched, V
        )  # fmt: skip
