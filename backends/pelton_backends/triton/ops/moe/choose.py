"""Kernels that choose experts: the router's product, and each token's experts with their weights.

T tokens, H hidden size, E experts, K experts a token; a pair is a token and one of its experts, number t K + j.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pelton_backends.triton.runtime import let_next_start, wait_for_inputs


@triton.jit
def few_logits_kernel(
    x_ptr, router_ptr, logits_ptr, x_stride,
    E: tl.constexpr, H: tl.constexpr, R: tl.constexpr, BK: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """R experts' logits of one token a program, float32; the router's first AHEAD pieces are on their way before the wait."""
    rows, token = tl.program_id(0) * R + tl.arange(0, R), tl.program_id(1).to(tl.int64)
    lane = tl.arange(0, BK)
    starts = router_ptr + rows[:, None] * H + lane[None, :]
    is_row = (rows < E)[:, None]
    let_next_start(PDL)
    pieces = ()
    for i in tl.static_range(AHEAD):
        pieces += (tl.load(starts + i * BK, mask=is_row & (i * BK + lane < H)[None, :], other=0.0),)
    wait_for_inputs(PDL)
    total = tl.zeros((R, BK), tl.float32)
    for i in tl.static_range(AHEAD):
        x = tl.load(x_ptr + token * x_stride + i * BK + lane, mask=i * BK + lane < H, other=0.0).to(tl.float32)
        total += pieces[i].to(tl.float32) * x[None, :]
    for k in range(AHEAD * BK, H, BK):
        x = tl.load(x_ptr + token * x_stride + k + lane, mask=k + lane < H, other=0.0).to(tl.float32)
        total += tl.load(starts + k, mask=is_row & (k + lane < H)[None, :], other=0.0).to(tl.float32) * x[None, :]
    tl.store(logits_ptr + token * E + rows, tl.sum(total, axis=1), mask=rows < E)


@triton.jit
def _scores(logits_ptr, bias_ptr, correction_ptr, row, places, mask, E: tl.constexpr, IS_SIGMOID: tl.constexpr):
    """Scores of a token's experts, and by what they are chosen; -inf where `mask` is not."""
    logits = tl.load(logits_ptr + row * E + places, mask=mask, other=float("-inf"))
    if bias_ptr is not None:
        logits += tl.load(bias_ptr + places, mask=mask, other=0.0).to(tl.float32)
    if IS_SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        exponentials = tl.exp(logits - tl.max(logits))
        scores = exponentials / tl.sum(exponentials)
    choice = scores
    if correction_ptr is not None:
        choice += tl.load(correction_ptr + places, mask=mask, other=0.0)
    return scores, tl.where(mask, choice, float("-inf"))


@triton.jit
def _keys(values, places, LAST: tl.constexpr):
    """A whole number for each value that says how good it is and, of equal ones, which comes first: a choice is one maximum."""
    bits = values.to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32) | (LAST - places)


@triton.jit
def _value_of(key):
    high = (key >> 32).to(tl.int32)
    return (high ^ ((high >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def route_kernel(
    logits_ptr, bias_ptr, correction_ptr, slot_ptr, expert_ptr, weight_ptr, load_ptr, count_ptr, rank_ptr,
    E: tl.constexpr, K: tl.constexpr, KB: tl.constexpr, GROUPS: tl.constexpr, GB: tl.constexpr, SIZE: tl.constexpr,
    SB: tl.constexpr, TOP_GROUPS: tl.constexpr, IS_TOP2: tl.constexpr, IS_SIGMOID: tl.constexpr, IS_RENORMALIZED: tl.constexpr,
    SCALE: tl.constexpr, FIRST: tl.constexpr, HELD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token a program: its K experts and their weights. Scores lie by group, [GB, SB] of which GROUPS and SIZE are used.
    Of E experts those from FIRST on are kept, HELD of them, and numbered from 0; a pair of any other has number HELD.

    load [E]: tokens given to each of those so far, by its number among all, added to; count [HELD]: an expert's pairs so far, added
    to; rank [T, K]: a pair's place among its expert's, in whatever order they come."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GB)[:, None]
    inside = tl.arange(0, SB)[None, :]
    places = group * SIZE + inside
    mask = (group < GROUPS) & (inside < SIZE)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    slot = tl.load(slot_ptr + row)
    scores, choice = _scores(logits_ptr, bias_ptr, correction_ptr, row, places, mask, E, IS_SIGMOID)
    if GROUPS > 1:
        worth = tl.max(choice, axis=1)
        if IS_TOP2:
            first = tl.min(tl.where(choice == worth[:, None], places, E), axis=1)
            worth += tl.max(tl.where(places == first[:, None], float("-inf"), choice), axis=1)
        number = tl.arange(0, GB)
        worth = tl.where(number < GROUPS, worth, float("-inf"))
        others = tl.reshape(worth, (1, GB))
        is_before = (others > worth[:, None]) | ((others == worth[:, None]) & (number[None, :] < number[:, None]))
        rank = tl.sum(is_before.to(tl.int32), axis=1)
        choice = tl.where(rank[:, None] < TOP_GROUPS, choice, float("-inf"))
    column = tl.arange(0, KB)
    experts = tl.full((KB,), E, tl.int32)
    weights = tl.zeros((KB,), tl.float32)
    keys = _keys(choice, places, GB * SIZE + SB)
    for j in tl.static_range(K):
        best = tl.max(tl.max(keys, axis=1), axis=0)
        found = GB * SIZE + SB - (best & 0xFFFFFFFF).to(tl.int32)
        weight = _value_of(best)
        if correction_ptr is not None:
            weight = tl.sum(tl.sum(tl.where((places == found) & mask, scores, 0.0), axis=1), axis=0)
        experts = tl.where(column == j, tl.minimum(found, E - 1), experts)
        weights = tl.where(column == j, weight, weights)
        keys = tl.where(keys == best, -0x8000000000000000, keys)
    if IS_RENORMALIZED:
        weights = weights / (tl.sum(weights, axis=0) + 1e-20)
    is_pair = (column < K) & (slot >= 0)
    if HELD < E:
        is_pair = is_pair & (experts >= FIRST) & (experts < FIRST + HELD)
    experts = tl.where(is_pair, experts - FIRST, HELD)
    pairs = row * K + column
    tl.store(expert_ptr + pairs, experts, mask=column < K)
    tl.store(weight_ptr + pairs, weights * SCALE, mask=column < K)
    if load_ptr is not None:
        tl.atomic_add(load_ptr + FIRST + experts, is_pair.to(tl.int64), mask=is_pair, sem="relaxed")
    if count_ptr is not None:
        ranks = tl.atomic_add(count_ptr + experts, is_pair.to(tl.int32), mask=is_pair, sem="relaxed")
        tl.store(rank_ptr + pairs, ranks, mask=is_pair)
