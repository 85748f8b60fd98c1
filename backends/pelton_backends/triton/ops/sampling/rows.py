"""Kernels of sampling: one pass over the logits, then one program a row that picks the token.

n rows of logits, V tokens, cut into groups of 32 tokens and chunks of `CHUNK_GROUPS` groups; C chunks, N groups a row.

`greedy_kernel`, grid (n, C): best of each chunk; a row's last program to arrive compares them and ends the row.

`scan_kernel`, grid (n, C): the one pass over the logits. Masks and side tables change them (`side.py`); of each chunk
it writes the key of the best logit and the sum of exp((l - best of the chunk) / temperature), for rows with filters also
the key of each group's best; for rows with logprobs the same of the logits before they were changed.

`pick_kernel`, grid (n): a row without filters finds its chunk by the running sum of the chunks, then its token in it. A row
with filters takes the tokens that may stay from the groups with the largest bests: t, such that at most `ROOM` groups
have a best >= t, is found by bisection over group keys, and then {l >= t} lies in these groups, is gathered, and cut
down to min_p, top_k and top_p by bisection over float keys: exact, in registers. When that set is too small to know the
threshold, the row is left to `nucleus.py` (a nucleus of more than a few hundred tokens), or to
`wide.wide_kernel` (a large top_k, several filters).

No sort, no value is read by the host, one number u = uniform(seed, position) decides: the token is the first whose running
sum (in token order) of the kept weights exceeds u times their total.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pelton_backends.triton.ops.sampling.best import token_of_best
from pelton_backends.triton.ops.sampling.logprobs import list_alternatives
from pelton_backends.triton.ops.sampling.pieces import (
    GROUP,
    INF_KEY,
    LOG2_E,
    LOWEST_KEY,
    MINUS_INF_KEY,
    NOT_FINITE,
    NOTHING_ALLOWED,
    OK,
    exp_sum,
    finish_row,
    group_keys,
    key_value,
    order_key,
    pick_chunk,
    pick_token,
    uniform,
)
from pelton_backends.triton.ops.sampling.side import change_values
from pelton_backends.triton.runtime import let_next_start, wait_for_inputs


@triton.jit
def greedy_kernel(
    logits,
    slots,
    result,
    best,
    arrived,
    token_ids,
    num_computed_tokens,
    side_slots,
    counts,
    touched,
    keys,
    row_stride,
    token_stride,
    padding_slot,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """best [n, CHUNKS] int64: key of the best logit, then the lowest token of that key; arrived [n] int32, zeros before and after.

    keys [n] int64: gets each row's, and its end is left to others; None: the row ends."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(logits + row.to(tl.int64) * row_stride + place, mask=place < V, other=-float("inf"))
    slot = tl.load(slots + row)
    if slot == padding_slot:
        if keys is None:  # noqa: SIM102
            if chunk == 0:
                tl.store(result + 2 * row, 0)
                tl.store(result + 2 * row + 1, 0)
    else:
        ordered = order_key(values)
        top = tl.max(ordered, 0)
        token = tl.min(tl.where(ordered == top, place, V), 0)
        packed = (top.to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)
        tl.store(best + row * CHUNKS + chunk, packed)
        if tl.atomic_add(arrived + row, 1, sem="acq_rel") == CHUNKS - 1:
            other = tl.arange(0, CHUNKS_BLOCK)
            found = tl.load(
                best + row * CHUNKS + other, mask=other < CHUNKS, other=-9223372036854775807, cache_modifier=".cg"
            )
            largest = tl.max(found, 0)
            if keys is not None:
                tl.store(keys + row, largest)
            else:
                token, code = token_of_best(largest, V)
                finish_row(
                    row, slot, token, code, result, token_ids, token_stride, num_computed_tokens, side_slots, counts, touched, V
                )  # fmt: skip
            tl.store(arrived + row, 0)


@triton.jit
def scan_kernel(
    logits,
    raw_logits,
    is_raw_group,
    is_changed,
    slots,
    temperature,
    top_k,
    top_p,
    min_p,
    num_logprobs,
    side_slots,
    features,
    touched,
    banned,
    stop_ids,
    bias,
    counts,
    in_prompt,
    presence,
    frequency,
    repetition,
    min_tokens,
    word_prefix,
    word_length,
    word_last,
    num_prompt_tokens,
    num_computed_tokens,
    token_ids,
    mask,
    has_mask,
    chunk_best,
    chunk_least,
    chunk_sum,
    group_best,
    raw_best,
    raw_sum,
    raw_group_best,
    row_stride,
    token_stride,
    mask_stride,
    V: tl.constexpr,
    GROUPS: tl.constexpr,
    CHUNK_GROUPS: tl.constexpr,
    CHUNKS: tl.constexpr,
    LISTED: tl.constexpr,
    HAS_SIDE: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_LOGPROBS: tl.constexpr,
    WORDS: tl.constexpr,
    LENGTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """chunk_best [n, CHUNKS] int32 keys; chunk_least float32: the least finite logit; chunk_sum float64: both of rows without
    top_k and min_p; group_best [n, GROUPS] int32 keys: all of the logits as masks and side tables change them, in place.
    raw_best: of the logits before, for rows with a mask or side tables (is_changed [n] int32, with logprobs), else as
    chunk_best. For rows with logprobs raw_sum (at temperature 1) and raw_group_best, of the logits before; groups that are
    changed are kept in `raw_logits`, and is_raw_group [n, GROUPS] int8 says which."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    slot = tl.load(slots + row)
    first_group = chunk * CHUNK_GROUPS
    group = first_group + tl.arange(0, CHUNK_GROUPS)
    lane = tl.arange(0, GROUP)
    place = group[:, None] * GROUP + lane[None, :]
    start = row.to(tl.int64) * row_stride
    values = tl.load(logits + start + place, mask=place < V, other=-float("inf"))
    # All that is found by slot is fetched at once: a program waits longer for such loads than for its logits. A padding
    # row's slot asks for nothing.
    warmth, least_p = tl.load(temperature + slot), tl.load(min_p + slot)
    most_p, most_k = tl.load(top_p + slot), tl.load(top_k + slot)
    side_slot = tl.full([], -1, tl.int64)
    if HAS_SIDE:
        side_slot = tl.load(side_slots + slot)
    is_masked = tl.full([], 0, tl.int1)
    if HAS_MASK:
        is_masked = tl.load(has_mask + slot) != 0
    has_logprobs = tl.full([], 0, tl.int1)
    if HAS_LOGPROBS:
        has_logprobs = tl.load(num_logprobs + slot) >= 0

    at = row * CHUNKS + chunk
    groups_at = row.to(tl.int64) * GROUPS + group
    keys = group_keys(values)
    raw = tl.max(keys, 0)
    if has_logprobs:
        tl.store(raw_sum + at, exp_sum(values, raw, LOG2_E))
        tl.store(raw_group_best + groups_at, keys, mask=group < GROUPS)
    if HAS_SIDE or HAS_MASK:
        is_other = (side_slot >= 0) | is_masked
        if HAS_LOGPROBS:
            tl.store(is_changed + row, is_other.to(tl.int32), mask=chunk == 0)
        if is_other:
            is_listed = tl.zeros([CHUNK_GROUPS], tl.int1)
            if HAS_SIDE:
                own_touched = touched + tl.maximum(side_slot, 0) * GROUPS
                is_listed = tl.load(own_touched + group, mask=(group < GROUPS) & (side_slot >= 0), other=0) != 0
            if has_logprobs:
                tl.store(is_raw_group + groups_at, (is_listed | is_masked).to(tl.int8), mask=group < GROUPS)
            if HAS_MASK:  # noqa: SIM102, a constant: what is behind it is not compiled
                if is_masked:
                    if has_logprobs:
                        tl.store(raw_logits + start + place, values, mask=place < V)
                    word = place // 32  # tokens beyond the words are not allowed
                    bits = tl.load(mask + slot * mask_stride + word, mask=word < mask_stride, other=0)
                    values = tl.where(((bits >> (place % 32)) & 1) != 0, values, -float("inf"))
                    tl.store(logits + start + place, values, mask=place < V)
            if HAS_SIDE:
                running = tl.cumsum(is_listed.to(tl.int32), 0)
                num_listed = tl.max(running, 0)
                tl.debug_barrier()
                uses = tl.load(features + tl.maximum(side_slot, 0))
                for first in range(0, num_listed, LISTED):
                    # The place of the n-th listed group: as many groups have fewer of them up to and with themselves.
                    wanted = first + tl.arange(0, LISTED)
                    own = first_group + tl.sum((running[:, None] <= wanted[None, :]).to(tl.int32), 0)
                    own_place = own[:, None] * GROUP + lane[None, :]
                    is_inside = (wanted < num_listed)[:, None] & (own_place < V)
                    old = tl.load(logits + start + own_place, mask=is_inside, other=-float("inf"))
                    if has_logprobs & ~is_masked:
                        tl.store(raw_logits + start + own_place, old, mask=is_inside)
                    changed = change_values(
                        old, own_place, is_inside, slot, side_slot, uses, banned, stop_ids, bias, counts, in_prompt,
                        presence, frequency, repetition, min_tokens, word_prefix, word_length, word_last,
                        num_prompt_tokens, num_computed_tokens, token_ids, token_stride, V, WORDS, LENGTH,
                    )  # fmt: skip
                    tl.store(logits + start + own_place, changed, mask=is_inside)
                tl.debug_barrier()
                # Fetched again, all of them: registers that held them through the loop would halve the programs at a time.
                values = tl.load(logits + start + place, mask=place < V, other=-float("inf"))
            keys = group_keys(values)
    best = tl.max(keys, 0)
    tl.store(chunk_best + at, best)
    if HAS_SIDE or HAS_MASK or HAS_LOGPROBS:
        tl.store(raw_best + at, raw)
    if warmth > 0:
        is_bounded = (most_k < V) | (least_p > 0.0)  # then sums of all weights tell nothing
        if not is_bounded:
            tl.store(chunk_sum + at, exp_sum(values, best, LOG2_E / warmth))
        if (most_p < 1.0) & (is_bounded == 0):
            finite = tl.where(values > -float("inf"), values, float("inf"))
            tl.store(chunk_least + at, tl.min(tl.min(finite, 1), 0))
        if (most_p < 1.0) | is_bounded:
            tl.store(group_best + groups_at, keys, mask=group < GROUPS)


@triton.jit
def _between(low, high, low_count, high_count, wanted, turn):
    """A key in (low, high): where `wanted` would be if counts fell exponentially, every other turn the middle."""
    middle = low + (high - low) // 2
    if (turn % 2 == 0) & (high_count < wanted) & (low_count > wanted):
        share = tl.log(low_count / wanted) / tl.log(low_count / tl.maximum(high_count, 0.5))
        middle = low + ((high - low).to(tl.float32) * share).to(tl.int64)
    return tl.minimum(tl.maximum(middle, low + 1), high - 1)


@triton.jit
def _room_threshold(keys, least, best, wanted, room):
    """keys of groups -> (t, groups at or above it): at most `room`, and where that can be, `wanted` at least; t >= `least`."""
    lowest = tl.min(tl.where(keys > LOWEST_KEY, keys, best), 0)
    count = tl.sum((keys >= least).to(tl.int32), 0)
    low, high = least.to(tl.int64), best.to(tl.int64) + 1
    above = tl.zeros([], tl.int32)
    if count <= room:
        high = low
        above = count
    else:
        low = tl.maximum(low, lowest.to(tl.int64))
    turn = tl.zeros([], tl.int32)
    middle_of_room = (wanted + room).to(tl.float32) / 2
    while (high - low > 1) & (above < wanted):
        middle = _between(low, high, count.to(tl.float32), above.to(tl.float32), middle_of_room, turn)
        found = tl.sum((keys >= middle.to(tl.int32)).to(tl.int32), 0)
        if found > room:
            low = middle
            count = found
        else:
            high = middle
            above = found
        turn += 1
    return high.to(tl.int32), above


@triton.jit
def _kth_key(keys, wanted, count, lowest, highest):
    """The greatest t at which `wanted` of the keys are >= t; `count` of them are >= lowest, none is > highest."""
    low, high = lowest.to(tl.int64), highest.to(tl.int64) + 1
    above = tl.zeros([], tl.int32)
    turn = tl.zeros([], tl.int32)
    while (high - low > 1) & (count > wanted):
        middle = _between(low, high, count.to(tl.float32), above.to(tl.float32), wanted.to(tl.float32) + 0.5, turn)
        found = tl.sum((keys >= middle.to(tl.int32)).to(tl.int32), 0)
        if found >= wanted:
            low = middle
            count = found
        else:
            high = middle
            above = found
        turn += 1
    return low.to(tl.int32)


@triton.jit
def _nucleus_key(keys, needed):
    """keys: bits of weights >= 0. The greatest t at which the weights >= t sum to `needed`; all of them do."""
    highest = tl.max(keys, 0)
    low, high = tl.min(tl.where(keys > 0, keys, highest), 0), highest + 1
    while high - low > 1:  # both ends go on to the next weight that there is
        middle = low + (high - low) // 2
        above = tl.where(keys >= middle, keys, 0)
        if tl.sum(above.to(tl.float32, bitcast=True), 0) >= needed:
            low = tl.min(tl.where(above > 0, above, highest), 0)
        else:
            high = tl.max(tl.where(keys >= middle, 0, keys), 0) + 1
    return low


@triton.jit
def _keys_of_part(scratch, start, num, PART: tl.constexpr):
    index = start + tl.arange(0, PART)
    packed = tl.load(scratch + index, mask=index < num, other=-9223372036854775807)
    return (packed >> 32).to(tl.int32)


@triton.jit
def _token_of_few(
    threshold, count, has_all, least, top, warmth, most_k, most_p, number, row_logits, group_ids, scratch,
    V: tl.constexpr, GROUPS: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """Go on as `pick_kernel`, with a top_k of FEW or less: (whether it was settled, the token). What may stay lies in `count` groups, FEW
    at most, and is gathered once more, so that a thread has one token. Not settled where equal ones are more.
    group_ids [FEW] int32, scratch [FEW] int64."""
    PART: tl.constexpr = FEW if FEW < 32 else 32
    token = tl.zeros([], tl.int32)
    slot, lane = tl.arange(0, FEW), tl.arange(0, GROUP)
    ids = tl.load(group_ids + slot, mask=slot < count, other=GROUPS)
    place = ids[:, None] * GROUP + lane[None, :]
    values = tl.load(row_logits + place, mask=place < V, other=-float("inf"))
    scaled = tl.div_rn(values, warmth)
    own_keys = order_key(values)
    is_kept = (own_keys >= threshold) & (own_keys > MINUS_INF_KEY) & (scaled >= least)
    own_keys = tl.where(is_kept, order_key(scaled), LOWEST_KEY)
    lowest = tl.full([], MINUS_INF_KEY, tl.int32)
    cut, num = _room_threshold(
        tl.reshape(own_keys, [FEW * GROUP], can_reorder=True), lowest, order_key(top), most_k.to(tl.int32), FEW
    )
    is_settled = (num >= most_k) | (has_all & (cut == lowest))
    if is_settled:
        is_in = own_keys >= cut
        inside = tl.sum(is_in.to(tl.int32), 1)
        first = tl.cumsum(inside, 0) - inside
        at = first[:, None] + tl.cumsum(is_in.to(tl.int32), 1) - 1
        packed = (own_keys.to(tl.int64) << 32) | (slot[:, None] * GROUP + lane[None, :]).to(tl.int64)
        tl.store(scratch + at, packed, mask=is_in)
        tl.debug_barrier()
        packed = tl.load(scratch + slot, mask=slot < num, other=-9223372036854775807)
        few = (packed >> 32).to(tl.int32)  # the lowest key where there is none
        # Each against each, a part at a time: to halve a range until the border is found takes some eight rounds of all threads.
        above = tl.zeros([PART, FEW], tl.int32)
        for start in tl.static_range(0, FEW, PART):
            other = _keys_of_part(scratch, start, num, PART)
            above += (other[:, None] > few[None, :]).to(tl.int32)
        is_top = (slot < num) & (tl.sum(above, 0) < most_k)
        cut = tl.min(tl.where(is_top, few, 0x7FFFFFFF), 0)
        weights = tl.where(few >= cut, tl.exp(key_value(few) - top), 0.0)
        if most_p < 1.0:
            needed = (most_p.to(tl.float64) * tl.sum(weights.to(tl.float64), 0)).to(tl.float32)
            heavier = tl.zeros([PART, FEW], tl.float32)
            for start in tl.static_range(0, FEW, PART):
                other = _keys_of_part(scratch, start, num, PART)
                weight = tl.where(other >= cut, tl.exp(key_value(other) - top), 0.0)
                # By weights: exp makes some logits equal, and ties are kept.
                heavier += tl.where(weight[:, None] > weights[None, :], weight[:, None], 0.0)
            weights = tl.where(tl.sum(heavier, 0) < needed, weights, 0.0)
        running = tl.cumsum(weights.to(tl.float64), 0)
        chosen = tl.sum((running <= number * tl.max(running, 0)).to(tl.int32), 0)
        chosen = tl.minimum(chosen, tl.max(tl.where(weights > 0, slot, 0), 0))
        found = tl.sum(tl.where(slot == chosen, (packed & 0x7FFFFFFF).to(tl.int32), 0), 0)
        token = tl.load(group_ids + found // GROUP) * GROUP + found % GROUP
    return is_settled, token


@triton.jit
def pick_kernel(
    logits,
    slots,
    result,
    temperature,
    top_k,
    top_p,
    min_p,
    seeds,
    chunk_best,
    chunk_least,
    raw_best,
    chunk_sum,
    group_best,
    group_ids,
    few,
    is_wide,
    facts,
    totals,
    token_ids,
    num_computed_tokens,
    side_slots,
    counts,
    touched,
    num_logprobs,
    raw_logits,
    is_raw_group,
    is_changed,
    raw_sum,
    raw_group_best,
    logprob_ids,
    logprobs,
    row_stride,
    token_stride,
    ids_stride,
    values_stride,
    padding_slot,
    V: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    CHUNK_GROUPS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
    ROOM: tl.constexpr,
    FEW: tl.constexpr,
    CUTS: tl.constexpr,
    NUM_LOGPROBS: tl.constexpr,
    MAY_CHANGE: tl.constexpr,
    PDL: tl.constexpr,
):
    """With NUM_LOGPROBS, not negative, n programs more: each lists the alternatives of a row, beside the one that picks its token.
    group_ids [n, ROOM] int32, few [n, FEW] int64: scratch. is_wide [n] int32: 1 for a row with a nucleus and no other filter that is
    left to `nucleus.py`, 2 for a row left to `wide_kernel`. Of rows with 1: facts [n, 4] float64: the best logit over the
    temperature, what weights have to sum to, the logarithm of the least weight, the temperature; totals [n, 2, CUTS] zeros."""
    row = tl.program_id(0)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    if NUM_LOGPROBS >= 0:
        num_rows = tl.num_programs(0) // 2
        if row >= num_rows:
            other = row - num_rows
            listed_slot = tl.load(slots + other)
            wanted = tl.where(listed_slot == padding_slot, 0, tl.load(num_logprobs + listed_slot))
            if wanted > 0:
                list_alternatives(
                    other, wanted, logits, raw_logits, is_raw_group, is_changed, raw_best, raw_sum, raw_group_best,
                    logprob_ids, logprobs, row_stride, ids_stride, values_stride, V, GROUPS, GROUPS_BLOCK, CHUNKS,
                    CHUNKS_BLOCK, NUM_LOGPROBS, MAY_CHANGE,
                )  # fmt: skip
            return
    # What does not need the slot is fetched beside it, what does in one go after it: the loads are most of a row's time.
    groups = tl.arange(0, GROUPS_BLOCK)
    keys = tl.load(group_best + row.to(tl.int64) * GROUPS + groups, mask=groups < GROUPS, other=LOWEST_KEY)
    chunks = tl.arange(0, CHUNKS_BLOCK)
    bests = tl.load(chunk_best + row * CHUNKS + chunks, mask=chunks < CHUNKS, other=LOWEST_KEY)
    sums = tl.load(chunk_sum + row * CHUNKS + chunks, mask=chunks < CHUNKS, other=0.0)
    slot = tl.load(slots + row)
    if slot == padding_slot:
        tl.store(result + 2 * row, 0)
        tl.store(result + 2 * row + 1, 0)
        tl.store(is_wide + row, 0)
    else:
        row_logits = logits + row.to(tl.int64) * row_stride
        best = tl.max(bests, 0)
        code = tl.where((best >= INF_KEY) | (best <= MINUS_INF_KEY), NOT_FINITE, OK)
        if MAY_CHANGE:
            raw = tl.max(tl.load(raw_best + row * CHUNKS + chunks, mask=chunks < CHUNKS, other=LOWEST_KEY), 0)
            is_raw_bad = (raw >= INF_KEY) | (raw <= MINUS_INF_KEY)
            code = tl.where(is_raw_bad, NOT_FINITE, tl.where(code == OK, OK, NOTHING_ALLOWED))
        warmth = tl.load(temperature + slot)
        is_random = (warmth > 0) & (code == OK)
        warmth = tl.where(is_random, warmth, 1.0)
        number = uniform(tl.load(seeds + slot), tl.load(num_computed_tokens + slot) + 1)
        least_p, most_p, most_k = tl.load(min_p + slot), tl.load(top_p + slot), tl.load(top_k + slot)
        is_filtered = is_random & ((most_k < V) | (most_p < 1.0) | (least_p > 0.0))
        top = tl.div_rn(key_value(best), warmth)
        scale = tl.exp(tl.where(bests <= MINUS_INF_KEY, -float("inf"), tl.div_rn(key_value(bests), warmth) - top))
        sums = tl.where(is_random, sums * scale, (bests == best).to(tl.float64))
        # A nucleus of so many of the best token's weight has more tokens than the room's groups tell of: to look would be for nothing.
        is_nucleus = is_filtered & (most_k >= V) & (least_p <= 0)
        needed_sum = tl.sum(sums, 0) * most_p.to(tl.float64)
        is_hopeless = is_nucleus & (needed_sum > 2 * ROOM)
        if is_nucleus:
            leasts = tl.load(chunk_least + row * CHUNKS + chunks, mask=chunks < CHUNKS, other=float("inf"))
            tl.store(facts + row * 4, top.to(tl.float64))
            tl.store(facts + row * 4 + 1, needed_sum)
            tl.store(facts + row * 4 + 2, (tl.div_rn(tl.min(leasts, 0), warmth) - top).to(tl.float64))
            tl.store(facts + row * 4 + 3, warmth.to(tl.float64))
            tl.store(totals + row * (2 * CUTS) + tl.arange(0, 2 * CUTS), tl.zeros([2 * CUTS], tl.int64))
        if is_hopeless:
            tl.store(is_wide + row, 1)
        else:
            is_known = tl.full([], 1, tl.int1)
            token = tl.zeros([], tl.int32)
            is_few = tl.full([], 0, tl.int1)
            slot_of_group = tl.arange(0, ROOM)
            threshold = tl.full([], MINUS_INF_KEY, tl.int32)
            least_key = threshold
            least = top
            count = tl.zeros([], tl.int32)
            if is_filtered:
                # Below what min_p keeps, by more than the rounding of products and logarithm: the filter itself follows.
                least = tl.where(least_p > 0, top + tl.log(least_p), -float("inf"))
                margin = 1e-5 * (tl.abs(least) + tl.abs(top))
                least_key = tl.where(least_p > 0, order_key((least - margin) * warmth), MINUS_INF_KEY)
                least_key = tl.maximum(
                    least_key, MINUS_INF_KEY + 1
                )  # groups that a mask leaves nothing of take no room
                # As many groups as a small top_k has tokens have all of these.
                is_small = most_k <= FEW
                wanted = tl.where(most_k < V, tl.minimum(tl.maximum(most_k, ROOM * 5 // 8), ROOM), ROOM * 5 // 8)
                wanted = tl.where(is_small, most_k, wanted).to(tl.int32)
                threshold, count = _room_threshold(keys, least_key, best, wanted, tl.where(is_small, FEW, ROOM))
                is_taken = keys >= threshold
                tl.store(group_ids + row * ROOM + tl.cumsum(is_taken.to(tl.int32), 0) - 1, groups, mask=is_taken)
                tl.debug_barrier()
                if is_small:
                    is_few, token = _token_of_few(
                        threshold, count, threshold <= least_key, least, top, warmth, most_k, most_p, number, row_logits,
                        group_ids + row * ROOM, few + row * FEW, V, GROUPS, FEW,
                    )  # fmt: skip
            if not is_few:
                if is_filtered:
                    ids = tl.load(group_ids + row * ROOM + slot_of_group, mask=slot_of_group < count, other=GROUPS)
                    target = number
                else:
                    chunk, target = pick_chunk(sums, tl.where(is_random, number, 0.0), CHUNKS_BLOCK)
                    ids = tl.where(slot_of_group < CHUNK_GROUPS, chunk * CHUNK_GROUPS + slot_of_group, GROUPS)
                place = ids[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
                values = tl.load(row_logits + place, mask=place < V, other=-float("inf"))
                own_keys = order_key(values)
                scaled = tl.div_rn(values, warmth)
                is_kept = own_keys >= tl.where(is_random, threshold, best)
                if is_filtered:
                    is_kept = is_kept & (own_keys > MINUS_INF_KEY) & (scaled >= least)
                own_keys = tl.where(is_kept, order_key(scaled), LOWEST_KEY)
                has_all = threshold <= least_key
                if is_filtered & (most_k < V):
                    kept_keys = tl.reshape(own_keys, [ROOM * GROUP], can_reorder=True)
                    highest = order_key(top)
                    lowest = tl.min(tl.where(kept_keys > LOWEST_KEY, kept_keys, highest), 0)
                    num_kept = tl.sum((kept_keys > LOWEST_KEY).to(tl.int32), 0)
                    if num_kept >= most_k:
                        lowest = _kth_key(kept_keys, most_k.to(tl.int32), num_kept, lowest, highest)
                        has_all = tl.full([], 1, tl.int1)
                    own_keys = tl.where(own_keys >= lowest, own_keys, LOWEST_KEY)
                weights = tl.where(is_random, tl.exp(key_value(own_keys) - top), 1.0)
                weights = tl.where(own_keys > LOWEST_KEY, weights, 0.0)
                if is_filtered:
                    is_known = has_all
                    if most_p < 1.0:
                        # By weights: exp makes some logits equal, and ties are kept.
                        mass = tl.sum(tl.sum(weights, 1).to(tl.float64), 0)
                        # Without top_k and min_p the nucleus may be known although not every token is.
                        needed = tl.where(has_all, most_p.to(tl.float64) * mass, needed_sum).to(tl.float32)
                        is_known = has_all | (is_nucleus & (mass >= needed))
                        if is_known:
                            bits = weights.to(tl.int32, bitcast=True)
                            least_bits = _nucleus_key(tl.reshape(bits, [ROOM * GROUP], can_reorder=True), needed)
                            weights = tl.where(bits >= least_bits, weights, 0.0)
                    target = number * tl.sum(tl.sum(weights, 1).to(tl.float64), 0)
                if is_known:
                    token = pick_token(weights, ids, target, ROOM, GROUP)
            tl.store(is_wide + row, tl.where(is_known, 0, tl.where(is_nucleus, 1, 2)))
            if is_known:
                token = tl.minimum(token, V - 1)
                finish_row(
                    row, slot, token, code, result, token_ids, token_stride, num_computed_tokens, side_slots, counts, touched, V
                )  # fmt: skip
