"""Attention of many query heads over one paged head of latents, for decode and for prompts.

Each token of a step is a query of its own, whatever row it belongs to: it looks for its row among the starts, and reads its row's
context up to itself. So a step of any rows is one launch, and a captured one needs no more than its number of tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from pelton_backends.triton.launch import launch
from pelton_backends.triton.runtime import dot, num_sms

if TYPE_CHECKING:
    from torch import Tensor

LOG2_E = 1.4426950408889634
HEADS, KEYS = 16, 32
"""Query heads and latents of one tile: the smallest that tensor cores take, and 32 KiB of latents of 512 numbers in bfloat16."""
MAX_SPLITS = 16
LEAST_KEYS = 256
"""Keys of a split: with fewer its merging costs more than it hides."""


@triton.jit
def latent_attention_kernel(
    query, cache, output, sums, stats, query_start_loc, seq_lens, block_table, num_reqs, stride_query, stride_block,
    stride_output, stride_table, scale,
    NUM_HEADS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, BLOCK_SIZE: tl.constexpr, PADDED_LATENT: tl.constexpr,
    PADDED_ROPE: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr, SEARCHES: tl.constexpr,
):  # fmt: skip
    """One program a token, `HEADS` heads and a split of the token's context."""
    token, first_head, split = tl.program_id(0), tl.program_id(1) * HEADS, tl.program_id(2)
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
    for first in range(first_key, last_key, KEYS):
        place = first + tl.arange(0, KEYS)
        is_key = place < last_key
        block = tl.load(block_table + row.to(tl.int64) * stride_table + place // BLOCK_SIZE, is_key, 0).to(tl.int64)
        latent = cache + block * stride_block + (place % BLOCK_SIZE) * (LATENT + ROPE)
        # Places that are masked are not read: they hold zeros here, whatever the cache has there.
        keys = tl.load(latent[:, None] + dim[None, :], is_key[:, None] & in_latent[None, :], 0.0).to(q_latent.dtype)
        turned_keys = tl.load(
            latent[:, None] + LATENT + turned[None, :], is_key[:, None] & in_rope[None, :], 0.0
        ).to(q_latent.dtype)  # fmt: skip
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


@triton.jit
def merge_kernel(
    sums, stats, output, query_start_loc, num_reqs, stride_output,
    NUM_HEADS: tl.constexpr, LATENT: tl.constexpr, PADDED_LATENT: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """One program a token and head. The first split is never empty; others may be, with a maximum of minus infinity."""
    token, head = tl.program_id(0), tl.program_id(1)
    if token >= tl.load(query_start_loc + num_reqs):
        return
    part = (token.to(tl.int64) * NUM_HEADS + head) * SPLITS + tl.arange(0, SPLITS)
    dim = tl.arange(0, PADDED_LATENT)
    tops, totals = tl.load(stats + part * 2), tl.load(stats + part * 2 + 1)
    weights = tl.exp2(tops - tl.max(tops, axis=0))
    found = tl.load(sums + part[:, None] * LATENT + dim[None, :], (dim < LATENT)[None, :] & (weights > 0)[:, None], 0.0)
    result = tl.sum(found * weights[:, None], axis=0) / tl.sum(totals * weights, axis=0)
    to = output + token.to(tl.int64) * stride_output + head * LATENT + dim
    tl.store(to, result.to(output.dtype.element_ty), dim < LATENT)


def num_splits(num_tokens: int, num_heads: int, max_seq_len: int, device: torch.device) -> int:
    """Parts of each context that programs share, a power of two: as many as fill the device, for steps of few tokens."""
    programs = num_tokens * -(-num_heads // HEADS)
    splits = 1
    while splits < MAX_SPLITS and programs * splits < num_sms(device) and max_seq_len > LEAST_KEYS * splits:
        splits *= 2
    return splits


def latent_attention(
    query: Tensor, cache: Tensor, output: Tensor, query_start_loc: Tensor, seq_lens: Tensor, block_table: Tensor, *,
    scale: float, latent_dim: int, max_seq_len: int,
) -> None:  # fmt: skip
    """output[t, h] = sum over j <= position of t of softmax_j(scale query[t, h] . c_j) c_j[: latent_dim], c_j latents of t's row.

    Paper  DeepSeek-AI, DeepSeek-V2 (arXiv:2405.04434), section 2.1; splits as in Dao et al., Flash-Decoding.

    T tokens, H heads, D = latent_dim + rope, P blocks, S block_size, R rows
      query            [T, H, D]            float32, bfloat16, float16; contiguous but for the first axis
      cache            [P, S, D]            a float dtype; contiguous but for the first axis
      output           [T, H, latent_dim]   dtype of query, as contiguous; tokens of padding are left as they are
      query_start_loc  [R + 1] int32, seq_lens [R] int32, block_table [R, B] int32

    Sums in float32, without TF32; weights are rounded to the query's dtype before they meet the latents. Every token reads its
    whole context again: prompts are bound by the second-level cache.
    """
    num_tokens, num_heads, head_dim = query.shape
    if num_tokens == 0:
        return
    splits = num_splits(num_tokens, num_heads, max_seq_len, query.device)
    sums = stats = output
    if splits > 1:
        sums = torch.empty(num_tokens, num_heads, splits, latent_dim, dtype=torch.float32, device=query.device)
        stats = torch.empty(num_tokens, num_heads, splits, 2, dtype=torch.float32, device=query.device)
    num_reqs, padded = seq_lens.shape[0], triton.next_power_of_2(latent_dim)
    launch(
        latent_attention_kernel, (num_tokens, triton.cdiv(num_heads, HEADS), splits),
        query, cache, output, sums, stats, query_start_loc, seq_lens, block_table, num_reqs, query.stride(0),
        cache.stride(0), output.stride(0), block_table.stride(0), scale * LOG2_E,
        NUM_HEADS=num_heads, LATENT=latent_dim, ROPE=head_dim - latent_dim, BLOCK_SIZE=cache.shape[1],
        PADDED_LATENT=max(padded, 16), PADDED_ROPE=max(triton.next_power_of_2(head_dim - latent_dim), 16), HEADS=HEADS,
        KEYS=KEYS, SPLITS=splits, SEARCHES=num_reqs.bit_length() + 1, num_warps=8, num_stages=2,
    )  # fmt: skip
    if splits > 1:
        launch(
            merge_kernel, (num_tokens, num_heads), sums, stats, output, query_start_loc, num_reqs, output.stride(0),
            NUM_HEADS=num_heads, LATENT=latent_dim, PADDED_LATENT=padded, SPLITS=splits, num_warps=4,
        )  # fmt: skip
