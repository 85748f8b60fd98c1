"""Attention of many query heads over the latents that an indexer has chosen for each token, for decode and for prompts.

As `latent.py`, whose splits and merging it shares, but that a token reads K latents of its row at most, wherever they lie.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from pelton.platform.compiling import launch
from pelton_backends.triton.attention import latent
from pelton_backends.triton.attention.indexer import keys_of, row_of
from pelton_backends.triton.runtime import dot, has_pdl, launch_options, let_next_start, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

_LOG2E = tl.constexpr(latent.LOG2_E)


@triton.jit
def _slots_of(chosen, table, first, last_key, KEYS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Blocks of the chosen tokens [KEYS] from number `first` on, and places in them. They are read a tile ahead, as in `latent.py`."""
    number = first + tl.arange(0, KEYS)
    place = tl.load(chosen + number, number < last_key, 0)
    return tl.load(table + place // BLOCK_SIZE), place % BLOCK_SIZE


@triton.jit
def sparse_latent_kernel(
    query, cache, chosen, sinks, output, sums, stats, query_start_loc, seq_lens, block_table, num_reqs, stride_query,
    stride_block, stride_chosen, stride_output, stride_table, scale,
    NUM_HEADS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, BLOCK_SIZE: tl.constexpr, TOP_K: tl.constexpr,
    PADDED_LATENT: tl.constexpr, PADDED_ROPE: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr,
    SEARCHES: tl.constexpr, SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program for `HEADS` heads, a token, and a split of its chosen latents."""
    first_head, token, split = tl.program_id(0) * HEADS, tl.program_id(1), tl.program_id(2)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    if token >= tl.load(query_start_loc + num_reqs):  # padding
        return
    row = row_of(token, query_start_loc, num_reqs, SEARCHES)
    num_keys = tl.minimum(keys_of(token, row, query_start_loc, seq_lens), TOP_K)
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
    if SINKS:  # a key without a value, of the first split
        top = tl.where(split == 0, tl.load(sinks + head, in_heads, 0.0).to(tl.float32) * _LOG2E, top)
        total = tl.where(split == 0, 1.0, total)
    found = tl.zeros([HEADS, PADDED_LATENT], tl.float32)
    numbers, table = chosen + token.to(tl.int64) * stride_chosen, block_table + row.to(tl.int64) * stride_table
    block, inside = _slots_of(numbers, table, first_key, last_key, KEYS, BLOCK_SIZE)
    local = tl.arange(0, KEYS)
    for first in range(first_key, last_key, KEYS):
        is_key = first + local < last_key
        at = cache + block.to(tl.int64) * stride_block + inside * (LATENT + ROPE)
        is_latent, is_turned = is_key[:, None], is_key[:, None]
        if LATENT < PADDED_LATENT:
            is_latent = is_latent & in_latent[None, :]
        if ROPE < PADDED_ROPE:
            is_turned = is_turned & in_rope[None, :]
        # Places that are masked are not read: they hold zeros here, whatever the cache has there.
        keys = tl.load(at[:, None] + dim[None, :], is_latent, 0.0).to(q_latent.dtype)
        turned_keys = tl.load(at[:, None] + LATENT + turned[None, :], is_turned, 0.0).to(q_latent.dtype)
        block, inside = _slots_of(numbers, table, first + KEYS, last_key, KEYS, BLOCK_SIZE)
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
        tl.store(to, (found / total[:, None]).to(output.dtype.element_ty), is_stored)
    else:
        part = (token.to(tl.int64) * NUM_HEADS + head) * SPLITS + split
        tl.store(sums + part[:, None] * LATENT + dim[None, :], found, is_stored)
        tl.store(stats + part * 2, top, in_heads)
        tl.store(stats + part * 2 + 1, total, in_heads)


def sparse_latent_attention(
    query: Tensor, cache: Tensor, chosen: Tensor, output: Tensor, query_start_loc: Tensor, seq_lens: Tensor,
    block_table: Tensor, *, scale: float, latent_dim: int, max_seq_len: int, sinks: Tensor | None = None,
) -> None:  # fmt: skip
    """output[t, h] = sum over the chosen tokens j of softmax_j(scale query[t, h] . c_j) c_j[: latent_dim], c_j latents of t's row.

    With `sinks` softmax_j has one more term in its denominator, exp(sinks[h]).

    Paper  DeepSeek-AI, DeepSeek-V3.2-Exp (2025), section 1.

    As `latent_attention`, and
      chosen  [T, K] int32, contiguous but for the first axis: of each token its first min(K, position + 1) are numbers of tokens of
              its row, all different
      sinks   [H], any float dtype
    Sums in float32, without TF32; weights are rounded to the query's dtype before they meet the latents.
    """
    num_tokens, num_heads, head_dim = query.shape
    if num_tokens == 0:
        return
    splits = latent.num_splits(num_tokens, num_heads, min(max_seq_len, chosen.shape[1]), query.device)
    sums = stats = output
    if splits > 1:
        sums = torch.empty(num_tokens, num_heads, splits, latent_dim, dtype=torch.float32, device=query.device)
        stats = torch.empty(num_tokens, num_heads, splits, 2, dtype=torch.float32, device=query.device)
    num_reqs, pdl = seq_lens.shape[0], has_pdl(query.device)
    launch(
        sparse_latent_kernel, (triton.cdiv(num_heads, latent.HEADS), num_tokens, splits),
        query, cache, chosen, chosen if sinks is None else sinks, output, sums, stats, query_start_loc, seq_lens, block_table,
        num_reqs, query.stride(0), cache.stride(0), chosen.stride(0), output.stride(0), block_table.stride(0), scale * latent.LOG2_E,
        NUM_HEADS=num_heads, LATENT=latent_dim, ROPE=head_dim - latent_dim, BLOCK_SIZE=cache.shape[1],
        TOP_K=chosen.shape[1], PADDED_LATENT=max(triton.next_power_of_2(latent_dim), 16),
        PADDED_ROPE=max(triton.next_power_of_2(head_dim - latent_dim), 16), HEADS=latent.HEADS, KEYS=latent.KEYS,
        SPLITS=splits, SEARCHES=num_reqs.bit_length() + 1, SINKS=sinks is not None, PDL=pdl, num_warps=latent.WARPS,
        num_stages=latent.stages_of(query, head_dim), **launch_options(pdl),
    )  # fmt: skip
    if splits > 1:
        latent.merge_parts(sums, stats, output, query_start_loc, num_reqs)
