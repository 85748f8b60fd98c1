"""Log-probabilities of sampled tokens and of the likeliest alternatives, from raw logits.

Math   lse = log sum_t exp(l_t);  logprobs[0] = l_token - lse, rank = 1 + |{t: l_t > l_token}|; then the `NUM` largest l_t - lse
       with their tokens, equal ones by lower token first: `pelton.sampling.logprobs.gather_logprobs`.

n rows, V tokens, C chunks of `CHUNK_GROUPS` groups of 32 tokens
  logits  [n, V]  float32, raw;  result [n, 2] int32: (token, code), of the step
  logprob_ids, logprobs [>= n, 1 + NUM] int64, float32; ranks [>= n] int64: contiguous, written for rows that are no padding

Ids and ranks are exact; logprobs within 1e-5 (sums of float32 exponentials, in float64). Two launches: one pass over the logits,
then one program a row that takes the best of the group bests, `NUM` times: about 1 us each on an H200, no sort.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pelton_backends.triton.ops.sampling_pieces import GROUP, LOWEST_KEY, MINUS_INF_KEY, key_value, order_key
from pelton_backends.triton.runtime import let_next_start, wait_for_inputs


@triton.jit
def logprob_scan_kernel(
    logits,
    slots,
    result,
    chunk_best,
    chunk_sum,
    chunk_above,
    group_best,
    row_stride,
    padding_slot,
    V: tl.constexpr,
    GROUPS: tl.constexpr,
    CHUNK_GROUPS: tl.constexpr,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (n, C). chunk_best [n, C] int32 keys, chunk_sum float64, chunk_above int32: tokens above the sampled one."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    if tl.load(slots + row) != padding_slot:
        row_logits = logits + row.to(tl.int64) * row_stride
        own = order_key(tl.load(row_logits + tl.load(result + 2 * row)))
        group = chunk * CHUNK_GROUPS + tl.arange(0, CHUNK_GROUPS)
        place = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        values = tl.load(row_logits + place, mask=place < V, other=-float("inf"))
        keys = order_key(values)
        bests = tl.max(keys, 1)
        best = tl.max(bests, 0)
        top = tl.where(best <= MINUS_INF_KEY, 0.0, key_value(best))
        total = tl.sum(tl.sum(tl.exp(values - top), 1).to(tl.float64), 0)
        at = row * CHUNKS + chunk
        tl.store(chunk_best + at, best)
        tl.store(chunk_sum + at, total)
        tl.store(chunk_above + at, tl.sum(tl.sum((keys > own).to(tl.int32), 1), 0))
        tl.store(group_best + row.to(tl.int64) * GROUPS + group, bests, mask=group < GROUPS)


@triton.jit
def logprob_pick_kernel(
    logits,
    slots,
    result,
    chunk_best,
    chunk_sum,
    chunk_above,
    group_best,
    logprob_ids,
    logprobs,
    ranks,
    row_stride,
    padding_slot,
    V: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
    NUM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (n)."""
    row = tl.program_id(0)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    if tl.load(slots + row) != padding_slot:
        row_logits = logits + row.to(tl.int64) * row_stride
        chunks = tl.arange(0, CHUNKS_BLOCK)
        at = row * CHUNKS + chunks
        bests = key_value(tl.load(chunk_best + at, mask=chunks < CHUNKS, other=MINUS_INF_KEY))
        sums = tl.load(chunk_sum + at, mask=chunks < CHUNKS, other=0.0)
        top = tl.max(bests, 0)
        total = tl.sum(sums * tl.exp(bests - top), 0)
        normalizer = (top.to(tl.float64) + tl.log(total)).to(tl.float32)
        above = tl.sum(tl.load(chunk_above + at, mask=chunks < CHUNKS, other=0), 0)
        token = tl.load(result + 2 * row)
        first = row * (1 + NUM)
        tl.store(ranks + row, (above + 1).to(tl.int64))
        tl.store(logprob_ids + first, token.to(tl.int64))
        tl.store(logprobs + first, tl.load(row_logits + token) - normalizer)

        groups, lane = tl.arange(0, GROUPS_BLOCK), tl.arange(0, GROUP)
        keys = tl.load(group_best + row.to(tl.int64) * GROUPS + groups, mask=groups < GROUPS, other=LOWEST_KEY)
        last_key = tl.full([], 0x7FFFFFFF, tl.int32)
        last = tl.full([], -1, tl.int32)
        for index in range(NUM):
            best = tl.max(keys, 0)
            group = tl.min(tl.where(keys == best, groups, GROUPS_BLOCK), 0)
            place = group * GROUP + lane
            own = order_key(tl.load(row_logits + place, mask=place < V, other=-float("inf")))
            after = tl.where(best == last_key, last, -1)  # equal ones were taken from the left
            last = tl.min(tl.where((own == best) & (place > after), place, V - 1), 0)
            last_key = best
            left = tl.where((own < best) | ((own == best) & (place > last)), own, LOWEST_KEY)
            keys = tl.where(groups == group, tl.max(left, 0), keys)
            tl.store(logprob_ids + first + 1 + index, last.to(tl.int64))
            tl.store(logprobs + first + 1 + index, key_value(best) - normalizer)
