"""Kernels that choose experts: the router's product, and each token's experts with their weights.

T tokens, H hidden size, E experts, K experts a token; a pair is a token and one of its experts, number t K + j.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pelton_backends.triton.ops.pieces import normed
from pelton_backends.triton.runtime import dot, let_next_start, wait_for_inputs


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
def normed_few_logits_kernel(
    hidden_ptr, residual_ptr, norm_ptr, router_ptr, x_ptr, sum_ptr, logits_ptr, hidden_stride, residual_stride,
    EPS: tl.constexpr, UNIT_OFFSET: tl.constexpr, E: tl.constexpr, H: tl.constexpr, HB: tl.constexpr, R: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """As `few_logits_kernel`, of a row that every program makes itself: x = norm(hidden + residual). The first R experts' program stores
    it [T, H], and the sum; not where the residual was, which others may not have read yet. residual may be None: then so is sum."""
    rows, token = tl.program_id(0) * R + tl.arange(0, R), tl.program_id(1).to(tl.int64)
    lane = tl.arange(0, HB)
    mask = lane < H
    dtype = x_ptr.dtype.element_ty
    router = tl.load(
        router_ptr + rows[:, None] * H + lane[None, :], mask=(rows < E)[:, None] & mask[None, :], other=0.0
    )
    norm = tl.load(norm_ptr + lane, mask=mask, other=0.0)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    is_stored = mask & (tl.program_id(0) == 0)
    x = tl.load(hidden_ptr + token * hidden_stride + lane, mask=mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        x += tl.load(residual_ptr + token * residual_stride + lane, mask=mask, other=0.0).to(tl.float32)
        x = x.to(dtype).to(tl.float32)
        tl.store(sum_ptr + token * H + lane, x.to(dtype), mask=is_stored)
    inverse_rms = 1.0 / tl.sqrt_rn(tl.sum(x * x) / H + EPS)
    result = normed(x, inverse_rms, norm, UNIT_OFFSET, dtype)
    tl.store(x_ptr + token * H + lane, result, mask=is_stored)
    logits = tl.sum(router.to(tl.float32) * result.to(tl.float32)[None, :], axis=1)
    tl.store(logits_ptr + token * E + rows, logits, mask=rows < E)


@triton.jit(do_not_specialize=["num_tokens"])
def normed_logits_kernel(
    hidden_ptr, residual_ptr, norm_ptr, router_ptr, x_ptr, sum_ptr, logits_ptr, num_tokens, hidden_stride, residual_stride,
    EPS: tl.constexpr, UNIT_OFFSET: tl.constexpr, E: tl.constexpr, H: tl.constexpr, HB: tl.constexpr, R: tl.constexpr,
    T: tl.constexpr, W: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The same for T tokens and R experts a program, on tensor cores: each of W warps multiplies a part of the columns."""
    rows, tokens = tl.program_id(0) * R + tl.arange(0, R), tl.program_id(1) * T + tl.arange(0, T)
    lane = tl.arange(0, HB)
    mask, is_token = lane < H, tokens < num_tokens
    dtype = x_ptr.dtype.element_ty
    router = tl.load(
        router_ptr + rows[:, None] * H + lane[None, :], mask=(rows < E)[:, None] & mask[None, :], other=0.0
    )
    norm = tl.load(norm_ptr + lane, mask=mask, other=0.0)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    is_read = is_token[:, None] & mask[None, :]
    is_stored = is_read & (tl.program_id(0) == 0)
    place = tokens.to(tl.int64)[:, None]
    x = tl.load(hidden_ptr + place * hidden_stride + lane[None, :], mask=is_read, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        x += tl.load(residual_ptr + place * residual_stride + lane[None, :], mask=is_read, other=0.0).to(tl.float32)
        x = x.to(dtype).to(tl.float32)
        tl.store(sum_ptr + place * H + lane[None, :], x.to(dtype), mask=is_stored, eviction_policy="evict_last")
    inverse_rms = 1.0 / tl.sqrt_rn(tl.sum(x * x, axis=1) / H + EPS)
    result = normed(x, inverse_rms[:, None], norm[None, :], UNIT_OFFSET, dtype)
    tl.store(x_ptr + place * H + lane[None, :], result, mask=is_stored, eviction_policy="evict_last")
    left = tl.permute(tl.reshape(router, (R, W, HB // W)), (1, 0, 2))
    right = tl.permute(tl.reshape(result, (T, W, HB // W)), (1, 2, 0))
    logits = tl.sum(dot(left, right, tl.zeros((W, R, T), tl.float32)), axis=0)
    target = logits_ptr + tokens[None, :] * E + rows[:, None]
    tl.store(target, logits, mask=(rows < E)[:, None] & is_token[None, :], eviction_policy="evict_last")


@triton.jit
def _scores(logits_ptr, bias_ptr, correction_ptr, row, places, mask, E: tl.constexpr, IS_SIGMOID: tl.constexpr):
    """Scores of a token's experts, and by what they are chosen; -inf where `mask` is not. row may be [T, 1], and the others [T, E]."""
    logits = tl.load(logits_ptr + row * E + places, mask=mask, other=float("-inf"))
    if bias_ptr is not None:
        logits += tl.load(bias_ptr + places, mask=mask, other=0.0).to(tl.float32)
    if IS_SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    elif row.type.is_block():
        exponentials = tl.exp(logits - tl.max(logits, axis=1, keep_dims=True))
        scores = exponentials / tl.sum(exponentials, axis=1, keep_dims=True)
    else:
        exponentials = tl.exp(logits - tl.max(logits))
        scores = exponentials / tl.sum(exponentials)
    choice = scores
    if correction_ptr is not None:
        choice += tl.load(correction_ptr + places, mask=mask, other=0.0)
    return scores, tl.where(mask, choice, float("-inf"))


@triton.jit
def _keys(values):
    """Return whole numbers in the order of `values`: of 32 bits a device finds the largest in one instruction, of 64 in many."""
    bits = values.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value_of(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _store_choice(
    experts, weights, row, column, slot, copies_ptr, expert_ptr, weight_ptr, load_ptr, count_ptr, rank_ptr, order_ptr, capacity,
    K: tl.constexpr, SCALE: tl.constexpr, FIRST: tl.constexpr, HELD: tl.constexpr, IS_WHOLE: tl.constexpr, WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
):  # fmt: skip
    """Store a token's experts and weights [KB], and count its pairs. row and slot may be [T, 1], and the others [T, KB]."""
    is_column = column < K
    if row.type.is_block():
        is_column = is_column & (row < capacity)
    if copies_ptr is not None:
        own = copies_ptr + experts * WIDTH
        turn = (row % tl.load(own, mask=is_column, other=1)).to(tl.int32)
        experts = tl.load(own + 1 + turn, mask=is_column, other=0)
    is_pair = is_column & (slot >= 0)
    if not IS_WHOLE:
        is_pair = is_pair & (experts >= FIRST) & (experts < FIRST + HELD)
    experts = tl.where(is_pair, experts - FIRST, HELD)
    pairs = row * K + column
    tl.store(expert_ptr + pairs, experts, mask=is_column)
    tl.store(weight_ptr + pairs, weights * SCALE, mask=is_column)
    if load_ptr is not None:
        tl.atomic_add(load_ptr + FIRST + experts, is_pair.to(tl.int64), mask=is_pair, sem="relaxed")
    if count_ptr is not None:
        ranks = tl.atomic_add(count_ptr + experts * STRIDE, is_pair.to(tl.int32), mask=is_pair, sem="relaxed")
        if rank_ptr is not None:
            tl.store(rank_ptr + pairs, ranks, mask=is_pair)
        if order_ptr is not None:
            # Counts that an interrupted call left would lead out of bounds.
            target = order_ptr + experts.to(tl.int64) * capacity + ranks
            tl.store(target, pairs.to(tl.int32), mask=is_pair & (ranks < capacity))


@triton.jit(do_not_specialize=["capacity"])
def route_kernel(
    logits_ptr, bias_ptr, correction_ptr, copies_ptr, slot_ptr, expert_ptr, weight_ptr, load_ptr, count_ptr, rank_ptr, order_ptr,
    capacity,
    E: tl.constexpr, K: tl.constexpr, KB: tl.constexpr, GROUPS: tl.constexpr, GB: tl.constexpr, SIZE: tl.constexpr,
    SB: tl.constexpr, TOP_GROUPS: tl.constexpr, IS_TOP2: tl.constexpr, IS_SIGMOID: tl.constexpr, IS_RENORMALIZED: tl.constexpr,
    SCALE: tl.constexpr, FIRST: tl.constexpr, HELD: tl.constexpr, IS_WHOLE: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One token a program: its K experts and their weights. Scores lie by group, [GB, SB] of which GROUPS and SIZE are used.
    Of E experts those from FIRST on are kept, HELD of them, and numbered from 0; a pair of any other has number HELD.
    copies [E, WIDTH]: where experts have several places, as `MoeTensors.copies`; then places count in place of experts.

    load [E]: tokens given to each of those so far, by its number among all, added to; count [HELD, STRIDE]: an expert's pairs so far,
    added to; rank [T, K]: a pair's place among its expert's, in whatever order they come; order [HELD, capacity]: the pairs there.
    capacity: at least as many as there are programs."""
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
    keys = _keys(choice)
    for j in tl.static_range(K):
        best = tl.max(tl.max(keys, axis=1), axis=0)
        # Of equal ones the first.
        found = tl.min(tl.min(tl.where(keys == best, places, GB * SIZE + SB), axis=1), axis=0)
        weight = _value_of(best)
        if correction_ptr is not None:
            weight = tl.sum(tl.sum(tl.where((places == found) & mask, scores, 0.0), axis=1), axis=0)
        experts = tl.where(column == j, tl.minimum(found, E - 1), experts)
        weights = tl.where(column == j, weight, weights)
        keys = tl.where(places == found, -0x80000000, keys)
    if IS_RENORMALIZED:
        weights = weights / (tl.sum(weights, axis=0) + 1e-20)
    _store_choice(
        experts, weights, row, column, slot, copies_ptr, expert_ptr, weight_ptr, load_ptr, count_ptr, rank_ptr, order_ptr, capacity,
        K, SCALE, FIRST, HELD, IS_WHOLE, WIDTH, STRIDE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"])
def route_many_kernel(
    logits_ptr, bias_ptr, correction_ptr, copies_ptr, slot_ptr, expert_ptr, weight_ptr, load_ptr, count_ptr, rank_ptr, order_ptr,
    num_tokens,
    E: tl.constexpr, EB: tl.constexpr, K: tl.constexpr, KB: tl.constexpr, IS_SIGMOID: tl.constexpr, IS_RENORMALIZED: tl.constexpr,
    SCALE: tl.constexpr, FIRST: tl.constexpr, HELD: tl.constexpr, IS_WHOLE: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr,
    T: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """T tokens a program: as `route_kernel`, of experts without groups."""
    row = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)[:, None]
    place = tl.arange(0, EB)[None, :]
    mask = (row < num_tokens) & (place < E)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    slot = tl.load(slot_ptr + row, mask=row < num_tokens, other=-1)
    scores, choice = _scores(logits_ptr, bias_ptr, correction_ptr, row, place, mask, E, IS_SIGMOID)
    column = tl.arange(0, KB)[None, :]
    experts = tl.full((T, KB), E, tl.int32)
    weights = tl.zeros((T, KB), tl.float32)
    keys = _keys(choice)
    for j in tl.static_range(K):
        best = tl.max(keys, axis=1, keep_dims=True)
        found = tl.min(tl.where(keys == best, place, EB), axis=1, keep_dims=True)  # of equal ones the first
        weight = _value_of(best)
        if correction_ptr is not None:
            weight = tl.sum(tl.where((place == found) & mask, scores, 0.0), axis=1, keep_dims=True)
        experts = tl.where(column == j, tl.minimum(found, E - 1), experts)
        weights = tl.where(column == j, weight, weights)
        keys = tl.where(place == found, -0x80000000, keys)
    if IS_RENORMALIZED:
        weights = weights / (tl.sum(weights, axis=1, keep_dims=True) + 1e-20)
    _store_choice(
        experts, weights, row, column, slot, copies_ptr, expert_ptr, weight_ptr, load_ptr, count_ptr, rank_ptr, order_ptr, num_tokens,
        K, SCALE, FIRST, HELD, IS_WHOLE, WIDTH, STRIDE,
    )  # fmt: skip
