"""Attention of many query heads over one paged head of latents, for decode and for prompts.

Each token of a step is a query of its own, whatever row it belongs to: it looks for its row among the starts, and reads its row's
context up to itself. So a step of any rows is one launch, and a captured one needs no more than its number of tokens.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from pelton.platform.compiling import launch
from pelton_backends.triton.runtime import (
    dot,
    has_pdl,
    launch_options,
    let_next_start,
    num_sms,
    shared_memory,
    wait_for_inputs,
)

if TYPE_CHECKING:
    from torch import Tensor

LOG2_E = 1.4426950408889634
_LN2 = tl.constexpr(0.6931471805599453)
HEADS, KEYS = 16, 32
"""Query heads and latents of one tile: the smallest that tensor cores take, and 32 KiB of latents of 512 numbers in bfloat16."""
WARPS = 4
PROGRAMS = 2
"""On a multiprocessor at a time: while one waits for its tile, the other computes."""
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
LEAST_KEYS = 256
"""Keys of a split: with fewer its merging costs more than it hides."""
FULL = 0.92
"""Share of the places for programs that is enough."""


@triton.jit
def _blocks_of(table, first, last_key, KEYS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Blocks of the keys [KEYS] from `first` on, a multiple of KEYS. They are read a tile ahead, so that a tile's copies begin with
    their addresses known: of what is read by way of what is read, Triton makes no copies in advance."""
    local = tl.arange(0, KEYS)
    if KEYS % BLOCK_SIZE == 0:
        place = first // BLOCK_SIZE + local // BLOCK_SIZE
    else:
        place = (first + local) // BLOCK_SIZE
    return tl.load(table + place, first + local < last_key, 0)


@triton.jit
def latent_attention_kernel(
    query, cache, output, lse, sums, stats, query_start_loc, seq_lens, block_table, num_reqs, stride_query, stride_block,
    stride_output, stride_table, scale, rank,
    NUM_HEADS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, BLOCK_SIZE: tl.constexpr, PADDED_LATENT: tl.constexpr,
    PADDED_ROPE: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr, SEARCHES: tl.constexpr,
    RANKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program for `HEADS` heads, a token, and a split of the token's context. Heads of a token follow each other, so that one program
    finds in the second-level cache what another has read."""
    first_head, token, split = tl.program_id(0) * HEADS, tl.program_id(1), tl.program_id(2)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    if token >= tl.load(query_start_loc + num_reqs):  # padding
        return
    # The last row that starts at or before the token, and is not empty.
    low, high = 0, num_reqs
    for _ in range(SEARCHES):
        middle = (low + high) // 2
        is_before = tl.load(query_start_loc + tl.minimum(middle, num_reqs)) <= token
        low = tl.where(is_before & (middle < high), middle, low)
        high = tl.where(is_before, high, middle)
    row = low
    start, end = tl.load(query_start_loc + row), tl.load(query_start_loc + row + 1)
    num_keys = tl.load(seq_lens + row) - (end - start) + (token - start) + 1
    if RANKS > 1:
        num_keys = (num_keys + (RANKS - 1) - rank) // RANKS  # those of the tokens that are kept here
    per_split = tl.cdiv(tl.cdiv(num_keys, SPLITS), KEYS) * KEYS
    first_key = split * per_split
    last_key = tl.minimum(first_key + per_split, num_keys)

    head, dim, turned = first_head + tl.arange(0, HEADS), tl.arange(0, PADDED_LATENT), tl.arange(0, PADDED_ROPE)
    in_heads, in_latent, in_rope = head < NUM_HEADS, dim < LATENT, turned < ROPE
    own = query + token.to(tl.int64) * stride_query + head[:, None] * (LATENT + ROPE)
    q_latent = tl.load(own + dim[None, :], in_heads[:, None] & in_latent[None, :], 0.0)
    q_rope = tl.load(own + LATENT + turned[None, :], in_heads[:, None] & in_rope[None, :], 0.0)
    top = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    found = tl.zeros([HEADS, PADDED_LATENT], tl.float32)
    table = block_table + row.to(tl.int64) * stride_table
    block = _blocks_of(table, first_key, last_key, KEYS, BLOCK_SIZE)
    local = tl.arange(0, KEYS)
    for first in range(first_key, last_key, KEYS):
        is_key = first + local < last_key
        inside = local % BLOCK_SIZE
        if KEYS % BLOCK_SIZE != 0:
            inside = (first + local) % BLOCK_SIZE
        latent = cache + block.to(tl.int64) * stride_block + inside * (LATENT + ROPE)
        is_latent, is_turned = is_key[:, None], is_key[:, None]
        if LATENT < PADDED_LATENT:
            is_latent = is_latent & in_latent[None, :]
        if ROPE < PADDED_ROPE:
            is_turned = is_turned & in_rope[None, :]
        # Places that are masked are not read: they hold zeros here, whatever the cache has there.
        keys = tl.load(latent[:, None] + dim[None, :], is_latent, 0.0).to(q_latent.dtype)
        turned_keys = tl.load(latent[:, None] + LATENT + turned[None, :], is_turned, 0.0).to(q_latent.dtype)
        block = _blocks_of(table, first + KEYS, last_key, KEYS, BLOCK_SIZE)
        scores = dot(q_rope, tl.trans(turned_keys), dot(q_latent, tl.trans(keys), tl.zeros([HEADS, KEYS], tl.float32)))
        scores = tl.where(is_key[None, :], scores * scale, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, axis=1)
        found = dot(weights.to(q_latent.dtype), keys, found * shrink[:, None])
        top = new_top
    is_stored = in_heads[:, None] & in_latent[None, :]
    if SPLITS == 1:
        to = output + token.to(tl.int64) * stride_output + head[:, None] * LATENT + dim[None, :]
        if lse is not None:
            is_seen = total != 0.0  # a NaN stays one
            total = tl.where(is_seen, total, 1.0)
            log = tl.where(is_seen, (top + tl.log2(total)) * _LN2, float("-inf"))
            tl.store(lse + token.to(tl.int64) * NUM_HEADS + head, log, in_heads)
        tl.store(to, (found / total[:, None]).to(output.dtype.element_ty), is_stored)
    else:
        part = (token.to(tl.int64) * NUM_HEADS + head) * SPLITS + split
        tl.store(sums + part[:, None] * LATENT + dim[None, :], found, is_stored)
        tl.store(stats + part * 2, top, in_heads)
        tl.store(stats + part * 2 + 1, total, in_heads)


@triton.jit
def merge_kernel(
    sums, stats, output, lse, query_start_loc, num_reqs, stride_output,
    NUM_HEADS: tl.constexpr, LATENT: tl.constexpr, PADDED_LATENT: tl.constexpr, SPLITS: tl.constexpr,
    PADDED_SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a token and head. The first split is never empty, unless `lse` is asked for; others may be, with a maximum of minus
    infinity."""
    token, head = tl.program_id(0), tl.program_id(1)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    if token >= tl.load(query_start_loc + num_reqs):
        return
    split = tl.arange(0, PADDED_SPLITS)
    part = (token.to(tl.int64) * NUM_HEADS + head) * SPLITS + split
    dim = tl.arange(0, PADDED_LATENT)
    tops = tl.load(stats + part * 2, split < SPLITS, float("-inf"))
    totals = tl.load(stats + part * 2 + 1, split < SPLITS, 0.0)
    highest = tl.max(tops, axis=0)
    finite = highest
    if lse is not None:
        finite = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(tops - finite)
    found = tl.load(sums + part[:, None] * LATENT + dim[None, :], (dim < LATENT)[None, :] & (weights > 0)[:, None], 0.0)
    total = tl.sum(totals * weights, axis=0)
    if lse is not None:
        is_seen = total != 0.0
        total = tl.where(is_seen, total, 1.0)
        log = tl.where(is_seen, (finite + tl.log2(total)) * _LN2, float("-inf"))
        tl.store(lse + token.to(tl.int64) * NUM_HEADS + head, log)
    result = tl.sum(found * weights[:, None], axis=0) / total
    to = output + token.to(tl.int64) * stride_output + head * LATENT + dim
    tl.store(to, result.to(output.dtype.element_ty), dim < LATENT)


def num_splits(num_tokens: int, num_heads: int, max_seq_len: int, device: torch.device) -> int:
    """Parts of each context that programs share: as many as fill the device, for steps of few tokens."""
    return splits_to_fill(num_tokens * -(-num_heads // HEADS), PROGRAMS * num_sms(device), max_seq_len)


@cache
def splits_to_fill(programs: int, places: int, max_seq_len: int) -> int:
    """The least of `SPLITS` that occupies enough of `places`, or the one that occupies most."""
    if programs >= 2 * places:
        return 1

    def share(splits: int) -> float:
        """Return which part of the places that they occupy, until the last of them ends, the programs need."""
        return programs * splits / (-(-programs * splits // places) * places)

    fitting = [
        splits
        for splits in SPLITS
        if splits == 1 or (max_seq_len > LEAST_KEYS * (splits - 1) and programs * splits <= 2 * places)
    ]
    return next((splits for splits in fitting if share(splits) >= FULL), max(fitting, key=share))


def stages_of(query: Tensor, head_dim: int) -> int:
    """3 where a multiprocessor holds two tiles of latents, and the queries, for each of its programs; else 2, which hold one."""
    held = PROGRAMS * (2 * KEYS + HEADS) * head_dim * query.element_size()
    return 3 if held <= shared_memory(query.device) else 2


def latent_attention(
    query: Tensor, cache: Tensor, output: Tensor, query_start_loc: Tensor, seq_lens: Tensor, block_table: Tensor, *,
    scale: float, latent_dim: int, max_seq_len: int, lse: Tensor | None = None, num_ranks: int = 1, rank: int = 0,
) -> None:  # fmt: skip
    """output[t, h] = sum over j <= position of t of softmax_j(scale query[t, h] . c_j) c_j[: latent_dim], c_j latents of t's row.

    Paper  DeepSeek-AI, DeepSeek-V2 (arXiv:2405.04434), section 2.1; splits as in Dao et al., Flash-Decoding.

    T tokens, H heads, D = latent_dim + rope, P blocks, S block_size, R rows
      query            [T, H, D]            float32, bfloat16, float16; contiguous but for the first axis
      cache            [P, S, D]            a float dtype; contiguous but for the first axis
      output           [T, H, latent_dim]   dtype of query, as contiguous; tokens of padding are left as they are
      query_start_loc  [R + 1] int32, seq_lens [R] int32, block_table [R, B] int32
      lse              [T, H]               float32: the natural logarithm of each query's sum of exp(score)
    num_ranks, rank: the cache has tokens rank, rank + num_ranks, ... of each row; with `lse` alone, whose -inf says that a query sees
    none of them.

    Sums in float32, without TF32; weights are rounded to the query's dtype before they meet the latents. Every token reads its
    whole context again: prompts are bound by the second-level cache.
    """
    num_tokens, num_heads, head_dim = query.shape
    if num_tokens == 0:
        return
    splits = num_splits(num_tokens, num_heads, -(-max_seq_len // num_ranks), query.device)
    sums = stats = output
    if splits > 1:
        sums = torch.empty(num_tokens, num_heads, splits, latent_dim, dtype=torch.float32, device=query.device)
        stats = torch.empty(num_tokens, num_heads, splits, 2, dtype=torch.float32, device=query.device)
    num_reqs, padded, pdl = seq_lens.shape[0], triton.next_power_of_2(latent_dim), has_pdl(query.device)
    launch(
        latent_attention_kernel, (triton.cdiv(num_heads, HEADS), num_tokens, splits),
        query, cache, output, lse, sums, stats, query_start_loc, seq_lens, block_table, num_reqs, query.stride(0),
        cache.stride(0), output.stride(0), block_table.stride(0), scale * LOG2_E, rank,
        NUM_HEADS=num_heads, LATENT=latent_dim, ROPE=head_dim - latent_dim, BLOCK_SIZE=cache.shape[1],
        PADDED_LATENT=max(padded, 16), PADDED_ROPE=max(triton.next_power_of_2(head_dim - latent_dim), 16), HEADS=HEADS,
        KEYS=KEYS, SPLITS=splits, SEARCHES=num_reqs.bit_length() + 1, RANKS=num_ranks, PDL=pdl,
        num_warps=WARPS, num_stages=stages_of(query, head_dim), **launch_options(pdl),
    )  # fmt: skip
    if splits > 1:
        merge_parts(sums, stats, output, query_start_loc, num_reqs, lse)


def merge_parts(
    sums: Tensor, stats: Tensor, output: Tensor, query_start_loc: Tensor, num_reqs: int, lse: Tensor | None = None
) -> None:
    """Bring together the parts of each token's result: sums [T, H, parts, latent_dim], their maxima and totals [T, H, parts, 2]. The
    first is never empty, unless `lse` [T, H] is asked for."""
    num_tokens, num_heads, splits, latent_dim = sums.shape
    pdl = has_pdl(sums.device)
    launch(
            merge_kernel, (num_tokens, num_heads), sums, stats, output, lse, query_start_loc, num_reqs, output.stride(0),
            NUM_HEADS=num_heads, LATENT=latent_dim, PADDED_LATENT=triton.next_power_of_2(latent_dim), SPLITS=splits,
            PADDED_SPLITS=triton.next_power_of_2(splits), PDL=pdl, num_warps=4, **launch_options(pdl),
        )  # fmt: skip
