"""An indexer's choice: the tokens of a row that score best, for each token of a step.

Two kernels. The first scores a part of a token's context by a program, and writes a row of scores for each token; the second finds the
K-th best of a row by its bits, eight at a time, and writes the tokens in the order of the row. As in `latent.py` each token looks for
its row itself, so that a captured step needs no more than its number of tokens. Rows that have no more tokens than may be chosen are
not scored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from pelton.platform.compiling import launch
from pelton_backends.triton.runtime import dot, has_pdl, launch_options, let_next_start, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

KEYS = 64
"""Of a tile: with 64 heads of 128 numbers in bfloat16 two tiles and the queries take 48 KiB."""
SPAN = 512
"""Keys of a program, after which another one scores: a context of 8,000 is 16 programs."""
TILE = 2048
"""Scores that a program of the second kernel looks at together."""
SCORES = 1 << 24
"""Numbers that are written at a time, 64 MiB; steps with more are computed in parts of their tokens."""
_BINS = tl.constexpr(256)
_SIGN = tl.constexpr(-2147483648)


@triton.jit
def row_of(token, query_start_loc, num_reqs, SEARCHES: tl.constexpr):
    """The last row that starts at or before the token, and is not empty."""
    low, high = 0, num_reqs
    for _ in range(SEARCHES):
        middle = (low + high) // 2
        is_before = tl.load(query_start_loc + tl.minimum(middle, num_reqs)) <= token
        low = tl.where(is_before & (middle < high), middle, low)
        high = tl.where(is_before, high, middle)
    return low


@triton.jit
def keys_of(token, row, query_start_loc, seq_lens):
    """How many tokens of its row a token sees: those up to itself."""
    start, end = tl.load(query_start_loc + row), tl.load(query_start_loc + row + 1)
    return tl.load(seq_lens + row) - (end - start) + (token - start) + 1


@triton.jit
def index_scores_kernel(
    query, weights, cache, scores, query_start_loc, seq_lens, block_table, num_reqs, first_token, stride_query,
    stride_weights, stride_block, stride_scores, stride_table,
    NUM_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TOP_K: tl.constexpr, PADDED_HEADS: tl.constexpr,
    PADDED_DIM: tl.constexpr, KEYS: tl.constexpr, SPAN: tl.constexpr, SEARCHES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program for a token and `SPAN` keys of its row."""
    token, first_key = first_token + tl.program_id(0), tl.program_id(1) * SPAN
    let_next_start(PDL)
    wait_for_inputs(PDL)
    if token >= tl.load(query_start_loc + num_reqs):  # padding
        return
    row = row_of(token, query_start_loc, num_reqs, SEARCHES)
    num_keys = keys_of(token, row, query_start_loc, seq_lens)
    if num_keys <= TOP_K:
        return
    last_key = tl.minimum(first_key + SPAN, num_keys)
    head, dim, local = tl.arange(0, PADDED_HEADS), tl.arange(0, PADDED_DIM), tl.arange(0, KEYS)
    is_head, is_dim = head < NUM_HEADS, dim < DIM
    own = query + token.to(tl.int64) * stride_query + head[:, None] * DIM + dim[None, :]
    q = tl.load(own, is_head[:, None] & is_dim[None, :], 0.0)
    weight = tl.load(weights + token.to(tl.int64) * stride_weights + head, is_head, 0.0)
    table = block_table + row.to(tl.int64) * stride_table
    to = scores + tl.program_id(0).to(tl.int64) * stride_scores
    for first in range(first_key, last_key, KEYS):
        place = first + local
        is_key = place < last_key
        block = tl.load(table + place // BLOCK_SIZE, is_key, 0)
        at = cache + block.to(tl.int64) * stride_block + (place % BLOCK_SIZE) * DIM
        # Places that are masked are not read: they hold zeros here, whatever the cache has there.
        keys = tl.load(at[:, None] + dim[None, :], is_key[:, None] & is_dim[None, :], 0.0).to(q.dtype)
        products = dot(q, tl.trans(keys), tl.zeros([PADDED_HEADS, KEYS], tl.float32))
        products = tl.where(products < 0.0, 0.0, products)
        score = tl.sum(products * weight[:, None], axis=0)
        # NaN is taken before all others, as torch does; -0 is 0, since the order below is that of bits.
        score = tl.where(score != score, float("inf"), tl.where(score == 0.0, 0.0, score))
        tl.store(to + place, score, is_key)


@triton.jit
def _ordered(score):
    """Bits of float32 numbers as unsigned integers in the same order."""
    bits = score.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | _SIGN)).to(tl.uint32, bitcast=True)


@triton.jit
def choose_kernel(
    scores, chosen, query_start_loc, seq_lens, num_reqs, first_token, stride_scores, stride_chosen,
    TOP_K: tl.constexpr, TILE: tl.constexpr, SEARCHES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a token. `wanted` of the tokens whose bits begin as the K-th best one's are chosen: at last, of those that score
    alike, so many from the front of the row."""
    token = first_token + tl.program_id(0)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    if token >= tl.load(query_start_loc + num_reqs):
        return
    num_keys = keys_of(token, row_of(token, query_start_loc, num_reqs, SEARCHES), query_start_loc, seq_lens)
    own, to = scores + tl.program_id(0).to(tl.int64) * stride_scores, chosen + token.to(tl.int64) * stride_chosen
    local = tl.arange(0, TILE)
    if num_keys <= TOP_K:
        for first in range(0, TOP_K, TILE):
            place = first + local
            tl.store(to + place, tl.where(place < num_keys, place, -1), place < TOP_K)
        return
    bins = tl.arange(0, _BINS)
    wanted, begin = TOP_K, tl.full([], 0, tl.uint32)
    for step in tl.static_range(4):
        counts = tl.zeros([_BINS], tl.int32)
        for first in range(0, num_keys, TILE):
            is_key = first + local < num_keys
            key = _ordered(tl.load(own + first + local, is_key, 0.0))
            if step > 0:
                is_key = is_key & ((key >> (32 - 8 * step)) == begin)
            counts += tl.histogram(((key >> (24 - 8 * step)) & 255).to(tl.int32), _BINS, mask=is_key)
        # The largest digit that, with those above it, as many have as are wanted.
        at_least = tl.cumsum(counts, axis=0, reverse=True)
        digit = tl.max(tl.where(at_least >= wanted, bins, 0), axis=0)
        wanted -= tl.sum(tl.where(bins > digit, counts, 0), axis=0)
        begin = (begin << 8) | digit.to(tl.uint32)
    num_chosen, num_equal = 0, 0
    for first in range(0, num_keys, TILE):
        place = first + local
        is_key = place < num_keys
        key = _ordered(tl.load(own + place, is_key, 0.0))
        is_equal = is_key & (key == begin)
        number = num_equal + tl.cumsum(is_equal.to(tl.int32), axis=0)
        is_chosen = is_key & ((key > begin) | (is_equal & (number <= wanted)))
        behind = num_chosen + tl.cumsum(is_chosen.to(tl.int32), axis=0) - 1
        tl.store(to + behind, place, is_chosen)
        num_equal += tl.sum(is_equal.to(tl.int32), axis=0)
        num_chosen += tl.sum(is_chosen.to(tl.int32), axis=0)


def choose_tokens(
    query: Tensor, weights: Tensor, cache: Tensor, chosen: Tensor, query_start_loc: Tensor, seq_lens: Tensor,
    block_table: Tensor, *, max_seq_len: int,
) -> None:  # fmt: skip
    """chosen[t] = the K tokens s of t's row, s <= t, with the largest sum_j weights[t, j] max(query[t, j] . k_s, 0), in their order;
    the earlier ones where scores are equal; all, and -1 behind them, where there are no more than K.

    Paper  DeepSeek-AI, DeepSeek-V3.2-Exp (2025), section 1.

    T tokens, J heads, D numbers of each, P blocks, S block_size, R rows
      query            [T, J, D]    float32, bfloat16, float16; contiguous but for the first axis
      weights          [T, J]       float32, as contiguous
      cache            [P, S, D]    a float dtype; contiguous but for the first axis
      chosen           [T, K]       int32, as contiguous; tokens of padding are left as they are
      query_start_loc  [R + 1] int32, seq_lens [R] int32, block_table [R, B] int32

    Products and sums in float32, without TF32. A token reads its row's keys once and its scores five times, from the second-level
    cache.
    """
    num_tokens, num_heads, dim = query.shape
    if num_tokens == 0:
        return
    num_reqs, top_k, pdl = seq_lens.shape[0], chosen.shape[1], has_pdl(query.device)
    searches, is_scored = num_reqs.bit_length() + 1, max_seq_len > top_k
    most = max(SCORES // max_seq_len, 1) if is_scored else num_tokens
    some = min(most, num_tokens)
    scores = torch.empty(some if is_scored else 0, max_seq_len, dtype=torch.float32, device=query.device)
    for first in range(0, num_tokens, some):
        count = min(some, num_tokens - first)
        if is_scored:
            launch(
                index_scores_kernel, (count, triton.cdiv(max_seq_len, SPAN)),
                query, weights, cache, scores, query_start_loc, seq_lens, block_table, num_reqs, first, query.stride(0),
                weights.stride(0), cache.stride(0), scores.stride(0), block_table.stride(0),
                NUM_HEADS=num_heads, DIM=dim, BLOCK_SIZE=cache.shape[1], TOP_K=top_k,
                PADDED_HEADS=max(triton.next_power_of_2(num_heads), 16), PADDED_DIM=max(triton.next_power_of_2(dim), 16),
                KEYS=KEYS, SPAN=SPAN, SEARCHES=searches, PDL=pdl, num_warps=4, num_stages=2, **launch_options(pdl),
            )  # fmt: skip
        launch(
            choose_kernel, (count,), scores, chosen, query_start_loc, seq_lens, num_reqs, first, scores.stride(0),
            chosen.stride(0), TOP_K=top_k, TILE=TILE, SEARCHES=searches, PDL=pdl, num_warps=8, **launch_options(pdl),
        )  # fmt: skip
