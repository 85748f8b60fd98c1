"""Attention of rows with one query token over the paged cache: one launch, whatever the lengths.

Three stages of one kernel, so that a decode layer has no kernel but this between its QKV and O products:
  1. query (and, fused, key and value) of the step: RMS norm, rotation, the cache's new entry;
  2. flash attention over chunks of the context, the work of one kv head shared out to several programs;
  3. the last program to finish a (row, kv head) merges their partial results.

`decode_kernel` gives every (row, kv head) the same number of programs: nothing to look up, so the shortest way for few
rows. `streamed_decode_kernel` deals all chunks of all rows evenly to a fixed number of programs: for many rows, and for
lengths that differ. Both are memory bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from pelton_backends.triton.ops.pieces import normed
from pelton_backends.triton.runtime import dot, launch_options, let_next_start, num_sms, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.ops.interface import NormSpec

LOG2E = tl.constexpr(1.4426950408889634)
NOTHING = tl.constexpr(-1e30)
"""The running maximum before the first key: finite, so that differences are never NaN."""


@triton.jit
def _partner(dim, ROTARY_DIM: tl.constexpr):
    """The number that number `dim` of a head is rotated with; itself where there is no rotation."""
    HALF: tl.constexpr = ROTARY_DIM // 2
    return tl.where(dim < HALF, dim + HALF, tl.where(dim < ROTARY_DIM, dim - HALF, dim))


@triton.jit
def _angles(cos_sin, position, dim, ROTARY_DIM: tl.constexpr, Q: tl.constexpr):
    """Cosine and signed sine of each of a head's numbers at a position, [Q, D] with equal rows: in the heads' layout."""
    HALF: tl.constexpr = ROTARY_DIM // 2
    frequency = tl.where(dim < HALF, dim, dim - HALF)[None, :] + tl.zeros([Q, 1], tl.int32)
    is_rotated = (dim < ROTARY_DIM)[None, :]
    row = cos_sin + position * ROTARY_DIM
    cos = tl.load(row + frequency, mask=is_rotated, other=1.0)
    sin = tl.load(row + HALF + frequency, mask=is_rotated, other=0.0)
    return cos, tl.where((dim < HALF)[None, :], -sin, sin)


@triton.jit
def _load_heads(
    query,  # pointer to the token's row
    head,
    dim,
    FUSED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    Q: tl.constexpr,
):
    """Of one kv head: its query heads and, from row GROUP on, its key [Q, D]; the same with partners; its value [D]."""
    member = tl.arange(0, Q)
    mask = (dim < HEAD_DIM)[None, :]
    if FUSED:
        heads = tl.where(member < GROUP, head * GROUP + member, NUM_KV_HEADS * GROUP + head)
        rows = query + (heads * HEAD_DIM)[:, None]
        x = tl.load(rows + dim[None, :], mask=mask, other=0.0)
        other = x
        if ROTARY_DIM > 0:
            other = tl.load(rows + _partner(dim, ROTARY_DIM)[None, :], mask=mask, other=0.0)
        value = tl.load(query + (NUM_KV_HEADS * (GROUP + 1) + head) * HEAD_DIM + dim, mask=dim < HEAD_DIM, other=0.0)
    else:
        heads = head * GROUP + tl.minimum(member, GROUP - 1)
        x = tl.load(query + (heads * HEAD_DIM)[:, None] + dim[None, :], mask=mask, other=0.0)
        other, value = x, x
    return x, other, value


@triton.jit
def _norm_rope(
    x,  # [Q, D]
    other,  # [Q, D] each number's partner
    cos,
    sin,
    own,  # [Q, D] norm weights, None: no norm
    partners,
    EPS: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
):
    """Rounded as pelton.ops.reference rounds: after the norm, its weight, the rotation."""
    dtype: tl.constexpr = x.dtype
    if own is not None:
        square = tl.sum(x.to(tl.float32) * x.to(tl.float32), 1) / HEAD_DIM
        rstd = (1.0 / tl.sqrt(square + EPS))[:, None]
        x = normed(x.to(tl.float32), rstd, own, UNIT_OFFSET, dtype)
        if ROTARY_DIM > 0:
            other = normed(other.to(tl.float32), rstd, partners, UNIT_OFFSET, dtype)
    if ROTARY_DIM > 0:
        x = (x.to(tl.float32) * cos + other.to(tl.float32) * sin).to(dtype)
    return x


@triton.jit
def _norm_weights(q_norm, k_norm, dim, HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, Q: tl.constexpr):
    """[Q, D]: the query's for the first GROUP rows, the key's after them. May be read before `wait_for_inputs`."""
    is_query = (tl.arange(0, Q) < GROUP)[:, None]
    mask = (dim < HEAD_DIM)[None, :]
    return tl.load(tl.where(is_query, q_norm, k_norm) + dim[None, :], mask=mask, other=0.0)


@triton.jit
def _logits(products, distance, slopes, scale, SOFT_CAP: tl.constexpr):
    """In base 2: scale q k, capped, with the ALiBi term. `slopes` and `distance` (key minus query position) broadcast."""
    if SOFT_CAP is not None:
        # tanh(y) = 1 - 2 / (1 + e^2y), exact at both ends
        tanh = 1.0 - 2.0 / (1.0 + tl.exp2(products * (scale * (2.0 * LOG2E / SOFT_CAP))))
        logits = tanh * (SOFT_CAP * LOG2E)
    else:
        logits = products * (scale * LOG2E)
    if slopes is not None:
        logits += slopes * (distance.to(tl.float32) * LOG2E)
    return logits


@triton.jit
def _blocks(table, token, stride_table, BLOCK_SIZE: tl.constexpr):
    """The block of each token; within the row of the table, whether or not the row's request goes so far."""
    return tl.load(table + token // BLOCK_SIZE, mask=token < stride_table * BLOCK_SIZE, other=0)


@triton.jit
def _load_chunk(
    cache,
    block,
    token,
    is_seen,
    stride_block,
    stride_token,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    """[W, N, D] of a kv head's numbers; 0 where nothing is seen."""
    dim = tl.arange(0, PADDED_DIM)
    place = block.to(tl.int64) * stride_block + (token % BLOCK_SIZE) * stride_token
    mask = is_seen[:, :, None]
    if HEAD_DIM < PADDED_DIM:
        mask = mask & (dim < HEAD_DIM)[None, None, :]
    return tl.load(cache + place[:, :, None] + dim[None, None, :], mask=mask, other=0.0)


@triton.jit
def _one_chunk(query, top, total, sums, key, value, is_seen, distance, slopes, scale, SOFT_CAP: tl.constexpr):
    """The running softmax of each warp takes its N keys: query [W, M, D], key and value [W, N, D]."""
    zeros = tl.zeros([query.shape[0], query.shape[1], key.shape[1]], tl.float32)
    products = dot(query, tl.trans(key.to(query.dtype), 0, 2, 1), zeros)
    logits = _logits(products, distance[:, None, :], slopes, scale, SOFT_CAP)
    logits = tl.where(is_seen[:, None, :], logits, float("-inf"))
    new_top = tl.maximum(top, tl.max(logits, 2))
    weights = tl.exp2(logits - new_top[:, :, None])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(weights, 2)
    sums = dot(weights.to(query.dtype), value.to(query.dtype), sums * shrink[:, :, None])
    return new_top, total, sums


@triton.jit
def _make_query(
    x,
    other,
    new_value,
    cos,
    sin,
    slot,  # -1: the cache is left as it is
    head,
    k_cache,
    v_cache,
    own,
    partners,
    alibi_slopes,
    stride_block,
    stride_token,
    stride_head,
    scale,
    EPS: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    FUSED: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    Q: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
):
    """The heads [Q, D] as the products want them; fused, the new token's logits [Q] and its value as the cache holds it."""
    dim = tl.arange(0, PADDED_DIM)
    member = tl.arange(0, Q)
    new_logit = tl.zeros([Q], tl.float32)
    if FUSED:
        x = _norm_rope(x, other, cos, sin, own, partners, EPS, UNIT_OFFSET, HEAD_DIM, ROTARY_DIM)
        new_key = tl.sum(tl.where((member == GROUP)[:, None], x.to(tl.float32), 0.0), 0).to(x.dtype)
        new_key = new_key.to(k_cache.dtype.element_ty)
        new_value = new_value.to(v_cache.dtype.element_ty)
        if slot >= 0:
            place = (slot // BLOCK_SIZE) * stride_block + (slot % BLOCK_SIZE) * stride_token + head * stride_head
            tl.store(k_cache + place + dim, new_key, mask=dim < HEAD_DIM)
            tl.store(v_cache + place + dim, new_value, mask=dim < HEAD_DIM)
        products = tl.sum(x.to(tl.float32) * new_key.to(x.dtype).to(tl.float32)[None, :], 1)
        slopes = alibi_slopes
        if alibi_slopes is not None:
            slopes = tl.load(alibi_slopes + head * GROUP + tl.minimum(member, GROUP - 1)).to(tl.float32)
        new_logit = _logits(products, tl.zeros([Q], tl.int32), slopes, scale, SOFT_CAP)
    return x, new_value, new_logit


@triton.jit
def _attend(
    x,
    new_value,
    new_logit,
    is_owner,
    head,
    chunk,  # the first
    last_chunk,
    step,
    first_key,
    last_key,
    position,
    early_key,  # the first chunk's, if is_loaded
    early_value,
    is_loaded,
    block,  # [W, N] of the first chunk
    table,
    k_cache,
    v_cache,
    alibi_slopes,
    stride_table,
    stride_block,
    stride_token,
    stride_head,
    scale,
    FUSED: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    Q: tl.constexpr,
    M: tl.constexpr,
    W: tl.constexpr,
    N: tl.constexpr,
    PEEL: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Chunks `chunk`, chunk + step, .. < last_chunk of one (row, kv head): of them the keys first_key <= key < last_key.

    Returns maximum, sum and weighted values [Q], [Q], [Q, D]; rows from GROUP on are of no use. Fused, the owner of the new token
    has seen it too, and has put it into the cache.

    Each of the W warps has N keys of a chunk and a softmax of its own, so that warps meet only for loads and at the end. A tile of
    queries has M rows, the Q heads over and over: a tensor core's tile is larger than a group of heads.
    """
    local = tl.arange(0, W)[:, None] * N + tl.arange(0, N)[None, :]
    keys, values = k_cache + head * stride_head, v_cache + head * stride_head
    slopes = alibi_slopes
    if alibi_slopes is not None:
        slopes = tl.load(alibi_slopes + head * GROUP + tl.minimum(tl.arange(0, M) % Q, GROUP - 1)).to(tl.float32)
        slopes = slopes[None, :, None]
    tile = tl.broadcast_to(x[None, None, :, :], [W, M // Q, Q, PADDED_DIM])
    tile = tl.reshape(tile, [W, M, PADDED_DIM])

    top = tl.full([W, M], NOTHING, tl.float32)
    total = tl.zeros([W, M], tl.float32)
    sums = tl.zeros([W, M, PADDED_DIM], tl.float32)
    if PEEL:
        if is_loaded:
            token = chunk * (W * N) + local
            is_seen = (token >= first_key) & (token < last_key)
            top, total, sums = _one_chunk(
                tile, top, total, sums, early_key, early_value, is_seen, token - position, slopes, scale, SOFT_CAP
            )  # fmt: skip
            chunk += step
            block = _blocks(table, chunk * (W * N) + local, stride_table, BLOCK_SIZE)
    for i in tl.range(chunk, last_chunk, step, num_stages=STAGES):
        token = i * (W * N) + local
        is_seen = (token >= first_key) & (token < last_key)
        this_block = block
        block = _blocks(table, token + step * (W * N), stride_table, BLOCK_SIZE)
        key = _load_chunk(
            keys, this_block, token, is_seen, stride_block, stride_token, BLOCK_SIZE, HEAD_DIM, PADDED_DIM
        )  # fmt: skip
        value = _load_chunk(
            values, this_block, token, is_seen, stride_block, stride_token, BLOCK_SIZE, HEAD_DIM, PADDED_DIM
        )  # fmt: skip
        top, total, sums = _one_chunk(
            tile, top, total, sums, key, value, is_seen, token - position, slopes, scale, SOFT_CAP
        )

    # The warps' results, of the first Q rows of the tile
    one_top = tl.max(top, 0)
    shrink = tl.exp2(top - one_top[None, :])
    total = tl.sum(total * shrink, 0)
    sums = tl.sum(sums * shrink[:, :, None], 0)
    if M > Q:
        is_first = (tl.arange(0, M // Q) == 0)[:, None]
        one_top = tl.max(tl.where(is_first, tl.reshape(one_top, [M // Q, Q]), float("-inf")), 0)
        total = tl.sum(tl.where(is_first, tl.reshape(total, [M // Q, Q]), 0.0), 0)
        sums = tl.sum(tl.where(is_first[:, :, None], tl.reshape(sums, [M // Q, Q, PADDED_DIM]), 0.0), 0)
    if FUSED:
        new_logit = tl.where(is_owner, new_logit, NOTHING)
        new_top = tl.maximum(one_top, new_logit)
        weight = tl.where(is_owner, tl.exp2(new_logit - new_top), 0.0)
        shrink = tl.exp2(one_top - new_top)
        total = total * shrink + weight
        sums = sums * shrink[:, None] + weight[:, None] * new_value.to(x.dtype).to(tl.float32)[None, :]
        one_top = new_top
    return one_top, total, sums


@triton.jit
def _store_output(
    output,  # pointer to the row's first head of this kv head
    top,
    total,
    sums,
    sinks,  # pointer to the first head's
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    Q: tl.constexpr,
):
    member = tl.arange(0, Q)
    dim = tl.arange(0, sums.shape[1])
    if sinks is not None:
        sink = tl.load(sinks + member, mask=member < GROUP, other=0.0).to(tl.float32) * LOG2E
        new_top = tl.maximum(top, sink)
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.exp2(sink - new_top)
        sums = sums * shrink[:, None]
    result = sums / total[:, None]
    mask = (member < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    tl.store(output + member[:, None] * HEAD_DIM + dim[None, :], result.to(output.dtype.element_ty), mask=mask)


@triton.jit
def _store_part(
    part, part_sums, part_stats, top, total, sums, HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, Q: tl.constexpr
):
    """Part number `part`: part_sums [parts, GROUP, HEAD_DIM], part_stats [parts, 2, GROUP] (top, total)."""
    member = tl.arange(0, Q)
    dim = tl.arange(0, sums.shape[1])
    is_member = member < GROUP
    part = part.to(tl.int64)
    stats = part_stats + part * (2 * GROUP) + member
    tl.store(stats, top, mask=is_member)
    tl.store(stats + GROUP, total, mask=is_member)
    place = part_sums + part * (GROUP * HEAD_DIM) + member[:, None] * HEAD_DIM + dim[None, :]
    tl.store(place, sums, mask=is_member[:, None] & (dim < HEAD_DIM)[None, :])


@triton.jit
def _merge_parts(
    output,
    first_part,  # number of part 0
    other_parts,  # part i > 0 is number other_parts + i * part_step
    part_step,
    num_parts,
    part_sums,
    part_stats,
    sinks,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,  # power of two, GROUP or more
    PARTS: tl.constexpr,
):
    """Of parts that other programs wrote: read past L1. PARTS parts at a time."""
    member = tl.arange(0, MEMBERS)
    dim = tl.arange(0, PADDED_DIM)
    is_member = member < GROUP
    top = tl.full([MEMBERS], NOTHING, tl.float32)
    total = tl.zeros([MEMBERS], tl.float32)
    if sinks is not None:
        top = tl.load(sinks + member, mask=is_member, other=0.0).to(tl.float32) * LOG2E
        total += 1.0
    sums = tl.zeros([MEMBERS, PADDED_DIM], tl.float32)
    for start in range(0, num_parts, PARTS):
        index = start + tl.arange(0, PARTS)
        part = tl.where(index == 0, first_part, other_parts + index * part_step).to(tl.int64)
        is_part = (index < num_parts)[:, None] & is_member[None, :]
        stats = part_stats + part[:, None] * (2 * GROUP) + member[None, :]
        tops = tl.load(stats, mask=is_part, other=NOTHING, cache_modifier=".cg")
        totals = tl.load(stats + GROUP, mask=is_part, other=0.0, cache_modifier=".cg")
        place = part_sums + part[:, None] * (GROUP * HEAD_DIM) + member[None, :] * HEAD_DIM
        rows = tl.load(
            place[:, :, None] + dim[None, None, :],
            mask=is_part[:, :, None] & (dim < HEAD_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_top = tl.maximum(top, tl.max(tops, 0))
        weights = tl.exp2(tops - new_top[None, :])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(totals * weights, 0)
        sums = sums * shrink[:, None] + tl.sum(rows * weights[:, :, None], 0)
        top = new_top
    result = (sums / total[:, None]).to(output.dtype.element_ty)
    mask = is_member[:, None] & (dim < HEAD_DIM)[None, :]
    tl.store(output + member[:, None] * HEAD_DIM + dim[None, :], result, mask=mask)


@triton.jit
def decode_kernel(
    query,
    positions,
    slot_mapping,
    k_cache,
    v_cache,
    output,
    query_start_loc,
    seq_lens,
    block_table,
    cos_sin,
    q_norm,
    k_norm,
    sinks,
    alibi_slopes,
    part_sums,
    part_stats,
    arrivals,
    stride_query,
    stride_output,
    stride_table,
    stride_block,
    stride_token,
    stride_head,
    num_blocks,
    scale,
    EPS: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    FUSED: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    Q: tl.constexpr,
    M: tl.constexpr,
    MEMBERS: tl.constexpr,
    W: tl.constexpr,
    N: tl.constexpr,
    SPLITS: tl.constexpr,
    LEAST: tl.constexpr,
    PARTS: tl.constexpr,
    PEEL: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (split, kv head, row): with s splits in use, every s-th chunk of the row. Arguments: see `decode_attention`.

    A row uses as many splits as leave each LEAST chunks or more, SPLITS at most.
    """
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    let_next_start(PDL)
    CHUNK: tl.constexpr = W * N
    dim = tl.arange(0, PADDED_DIM)
    own, partners = q_norm, q_norm
    if q_norm is not None:
        own = _norm_weights(q_norm, k_norm, dim, HEAD_DIM, GROUP, Q)
        partners = _norm_weights(q_norm, k_norm, _partner(dim, ROTARY_DIM), HEAD_DIM, GROUP, Q)
    table = block_table + row.to(tl.int64) * stride_table
    local = tl.arange(0, W)[:, None] * N + tl.arange(0, N)[None, :]
    keys, values = k_cache + head * stride_head, v_cache + head * stride_head
    # Before the kernels before have finished: keys and values are of earlier steps, with which no launch of this step overlaps;
    # lengths, tables and positions may not be written yet, so what rests on them is used only if they are the same later.
    key, value, cos, sin = own, own, own, own
    early_length, early_position, early_block = 0, 0, 0
    if PEEL:
        early_length = tl.load(seq_lens + row, cache_modifier=".cg")
        early_chunk = split
        if WINDOW > 0:
            early_chunk += tl.maximum(early_length - WINDOW, 0) // CHUNK
        token = early_chunk * CHUNK + local
        is_seen = token < early_length
        if FUSED:
            is_seen = token < early_length - 1
        is_entry = token < stride_table * BLOCK_SIZE
        early_block = tl.load(table + token // BLOCK_SIZE, mask=is_entry, other=0, cache_modifier=".cg")
        is_seen = is_seen & (early_block >= 0) & (early_block < num_blocks)
        key = _load_chunk(
            keys, early_block, token, is_seen, stride_block, stride_token, BLOCK_SIZE, HEAD_DIM, PADDED_DIM
        )  # fmt: skip
        value = _load_chunk(
            values, early_block, token, is_seen, stride_block, stride_token, BLOCK_SIZE, HEAD_DIM, PADDED_DIM
        )  # fmt: skip
        if FUSED and ROTARY_DIM > 0:
            early_position = tl.maximum(early_length - 1, 0).to(tl.int64)
            cos, sin = _angles(cos_sin, early_position, dim, ROTARY_DIM, Q)
    wait_for_inputs(PDL)

    seq_len = tl.load(seq_lens + row)
    block = _blocks(table, split * CHUNK + local, stride_table, BLOCK_SIZE)
    token_index = row
    slot = tl.full([], -1, tl.int64)
    row_position = slot
    if FUSED:
        row_position = tl.load(positions + row)
        slot = tl.load(slot_mapping + row)
    if query_start_loc is not None:  # rows with another number of tokens belong to another kernel
        token_index = tl.load(query_start_loc + row)
        if tl.load(query_start_loc + row + 1) - token_index != 1:
            seq_len = 0
    x, other, new_value = _load_heads(
        query + token_index.to(tl.int64) * stride_query, head, dim, FUSED, HEAD_DIM, ROTARY_DIM, NUM_KV_HEADS, GROUP, Q
    )  # fmt: skip
    last_key = seq_len
    if FUSED:
        last_key = seq_len - 1
        if ROTARY_DIM > 0:
            if PEEL:
                if row_position != early_position:
                    cos, sin = _angles(cos_sin, row_position, dim, ROTARY_DIM, Q)
            else:
                cos, sin = _angles(cos_sin, row_position, dim, ROTARY_DIM, Q)
    first_key = 0
    first_chunk = 0
    if WINDOW > 0:
        first_key = tl.maximum(seq_len - WINDOW, 0)
        first_chunk = first_key // CHUNK
        block = _blocks(table, (first_chunk + split) * CHUNK + local, stride_table, BLOCK_SIZE)
    last_chunk = (last_key + CHUNK - 1) // CHUNK
    num_splits = tl.minimum(tl.maximum((last_chunk - first_chunk + LEAST - 1) // LEAST, 1), SPLITS)
    if (split > 0) | (seq_len <= 0):
        slot = tl.full([], -1, tl.int64)
    # Programs that turn out to have nothing to do make a query too: a way out before would put its loads behind the length's.
    x, new_value, new_logit = _make_query(
        x, other, new_value, cos, sin, slot, head, k_cache, v_cache, own, partners, alibi_slopes, stride_block,
        stride_token, stride_head, scale, EPS, UNIT_OFFSET, FUSED, SOFT_CAP, BLOCK_SIZE, HEAD_DIM, PADDED_DIM, GROUP, Q,
        ROTARY_DIM,
    )  # fmt: skip
    if (split >= num_splits) | (seq_len <= 0):
        return
    is_loaded = seq_len == early_length
    if PEEL:
        # is_seen left out what no table of this pool can name; such an entry differs from the true one
        is_same = (block == early_block) | ((first_chunk + split) * CHUNK + local >= last_key)
        is_loaded = is_loaded & (tl.min(tl.min(is_same.to(tl.int32), 1), 0) > 0)

    top, total, sums = _attend(
        x, new_value, new_logit, split == 0, head, first_chunk + split, last_chunk, num_splits, first_key, last_key,
        seq_len - 1, key, value, is_loaded, block, table, k_cache, v_cache, alibi_slopes, stride_table, stride_block,
        stride_token, stride_head, scale, FUSED, SOFT_CAP, BLOCK_SIZE, HEAD_DIM, PADDED_DIM, GROUP, Q, M, W, N, PEEL,
        STAGES,
    )  # fmt: skip

    head_output = output + token_index.to(tl.int64) * stride_output + head * (GROUP * HEAD_DIM)
    head_sinks = sinks
    if sinks is not None:
        head_sinks = sinks + head * GROUP
    if num_splits == 1:
        _store_output(head_output, top, total, sums, head_sinks, HEAD_DIM, GROUP, Q)
    else:
        pair = row * NUM_KV_HEADS + head
        _store_part(pair * SPLITS + split, part_sums, part_stats, top, total, sums, HEAD_DIM, GROUP, Q)
        tl.debug_barrier()  # all threads' parts before the one thread's release
        arrived = tl.atomic_add(arrivals + pair, 1, sem="acq_rel", scope="gpu")
        if arrived == num_splits - 1:
            _merge_parts(
                head_output, pair * SPLITS, pair * SPLITS, 1, num_splits, part_sums, part_stats, head_sinks,
                HEAD_DIM, PADDED_DIM, GROUP, MEMBERS, PARTS,
            )  # fmt: skip
            tl.store(arrivals + pair, 0)  # for the next launch


@triton.jit
def _num_chunks(length, FUSED: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """Chunks to attend to, one at least; 0 for a row that is left out (length 0)."""
    last_key = length
    if FUSED:
        last_key = length - 1
    chunks = (last_key + CHUNK - 1) // CHUNK
    if WINDOW > 0:
        chunks -= tl.maximum(length - WINDOW, 0) // CHUNK
    return tl.where(length > 0, tl.maximum(chunks, 1), 0)


@triton.jit(do_not_specialize=["num_rows"])
def streamed_decode_kernel(
    query,
    positions,
    slot_mapping,
    k_cache,
    v_cache,
    output,
    query_start_loc,
    seq_lens,
    block_table,
    cos_sin,
    q_norm,
    k_norm,
    sinks,
    alibi_slopes,
    part_sums,
    part_stats,
    arrivals,
    stride_query,
    stride_output,
    stride_table,
    stride_block,
    stride_token,
    stride_head,
    num_rows,
    scale,
    EPS: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    FUSED: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    Q: tl.constexpr,
    M: tl.constexpr,
    MEMBERS: tl.constexpr,
    W: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Chunks are numbered row by row, within a row kv head by kv head; program p has the p-th equal share of them.

    A share may begin and end within a (row, kv head): such a part goes to place 0 of the program if it continues what the program
    before began, to place 1 if it begins what the next will continue. So the parts of one (row, kv head) are at
    2 p + 1, 2 (p + 1), 2 (p + 2), .. of its first program p.
    """
    program = tl.program_id(0)
    let_next_start(PDL)
    CHUNK: tl.constexpr = W * N
    dim = tl.arange(0, PADDED_DIM)
    own, partners = q_norm, q_norm
    if q_norm is not None:
        own = _norm_weights(q_norm, k_norm, dim, HEAD_DIM, GROUP, Q)
        partners = _norm_weights(q_norm, k_norm, _partner(dim, ROTARY_DIM), HEAD_DIM, GROUP, Q)
    local = tl.arange(0, W)[:, None] * N + tl.arange(0, N)[None, :]
    wait_for_inputs(PDL)

    rows = tl.arange(0, ROWS)
    lengths = tl.load(seq_lens + rows, mask=rows < num_rows, other=0)
    if query_start_loc is not None:
        starts = tl.load(query_start_loc + rows, mask=rows < num_rows, other=0)
        ends = tl.load(query_start_loc + rows + 1, mask=rows < num_rows, other=0)
        lengths = tl.where(ends - starts == 1, lengths, 0)
    chunks = _num_chunks(lengths, FUSED, WINDOW, CHUNK) * NUM_KV_HEADS
    ends_of_rows = tl.cumsum(chunks, 0)
    num_units = tl.sum(chunks, 0)
    share = (num_units + tl.num_programs(0) - 1) // tl.num_programs(0)
    unit = program * share
    last_unit = tl.minimum(unit + share, num_units)
    row = tl.sum((ends_of_rows <= unit).to(tl.int32), 0)
    row_unit = tl.sum(tl.where(rows == row, ends_of_rows - chunks, 0), 0)  # number of the row's first chunk

    while unit < last_unit:
        seq_len = tl.load(seq_lens + row)
        token_index = row
        if query_start_loc is not None:
            token_index = tl.load(query_start_loc + row)
            if tl.load(query_start_loc + row + 1) - token_index != 1:
                seq_len = 0
        row_chunks = _num_chunks(seq_len, FUSED, WINDOW, CHUNK)
        if row_chunks > 0:
            table = block_table + row.to(tl.int64) * stride_table
            head = (unit - row_unit) // row_chunks
            pair_unit = row_unit + head * row_chunks
            begin = unit - pair_unit
            end = tl.minimum(row_chunks, begin + last_unit - unit)
            unit += end - begin
            slot = tl.full([], -1, tl.int64)
            row_position = slot
            last_key = seq_len
            if FUSED:
                row_position = tl.load(positions + row)
                slot = tl.load(slot_mapping + row)
                last_key = seq_len - 1
            first_key = 0
            first_chunk = begin
            if WINDOW > 0:
                first_key = tl.maximum(seq_len - WINDOW, 0)
                first_chunk += first_key // CHUNK
            block = _blocks(table, first_chunk * CHUNK + local, stride_table, BLOCK_SIZE)
            x, other, new_value = _load_heads(
                query + token_index.to(tl.int64) * stride_query, head, dim, FUSED, HEAD_DIM, ROTARY_DIM, NUM_KV_HEADS,
                GROUP, Q,
            )  # fmt: skip
            cos, sin = x, x
            if FUSED and ROTARY_DIM > 0:
                cos, sin = _angles(cos_sin, row_position, dim, ROTARY_DIM, Q)
            if begin > 0:
                slot = tl.full([], -1, tl.int64)
            x, new_value, new_logit = _make_query(
                x, other, new_value, cos, sin, slot, head, k_cache, v_cache, own, partners, alibi_slopes, stride_block,
                stride_token, stride_head, scale, EPS, UNIT_OFFSET, FUSED, SOFT_CAP, BLOCK_SIZE, HEAD_DIM, PADDED_DIM,
                GROUP, Q, ROTARY_DIM,
            )  # fmt: skip
            top, total, sums = _attend(
                x, new_value, new_logit, begin == 0, head, first_chunk, first_chunk + end - begin, 1, first_key, last_key,
                seq_len - 1, x, x, False, block, table, k_cache, v_cache, alibi_slopes, stride_table, stride_block,
                stride_token, stride_head, scale, FUSED, SOFT_CAP, BLOCK_SIZE, HEAD_DIM, PADDED_DIM, GROUP, Q, M, W, N,
                False, STAGES,
            )  # fmt: skip

            head_output = output + token_index.to(tl.int64) * stride_output + head * (GROUP * HEAD_DIM)
            head_sinks = sinks
            if sinks is not None:
                head_sinks = sinks + head * GROUP
            if end - begin == row_chunks:
                _store_output(head_output, top, total, sums, head_sinks, HEAD_DIM, GROUP, Q)
            else:
                first_program = pair_unit // share
                num_parts = (pair_unit + row_chunks - 1) // share - first_program + 1
                part = program * 2 + (begin == 0).to(tl.int32)
                _store_part(part, part_sums, part_stats, top, total, sums, HEAD_DIM, GROUP, Q)
                tl.debug_barrier()
                pair = row * NUM_KV_HEADS + head
                arrived = tl.atomic_add(arrivals + pair, 1, sem="acq_rel", scope="gpu")
                if arrived == num_parts - 1:
                    _merge_parts(
                        head_output, first_program * 2 + 1, first_program * 2, 2, num_parts, part_sums, part_stats,
                        head_sinks, HEAD_DIM, PADDED_DIM, GROUP, MEMBERS, PARTS,
                    )  # fmt: skip
                    tl.store(arrivals + pair, 0)
        if unit >= row_unit + row_chunks * NUM_KV_HEADS:
            row_unit += row_chunks * NUM_KV_HEADS
            row += 1


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """How one launch shares out its work; a function of shapes alone."""

    splits: int  # programs of a (row, kv head); 0: streamed
    programs: int  # of a streamed launch
    keys: int  # of a warp in one chunk
    num_warps: int
    num_stages: int
    least: int = 1  # chunks of a split
    is_peeled: bool = False


@dataclass(slots=True)
class PartBuffers:
    """Where programs leave partial results; shared by all launches of one stream. `arrivals` is zero between launches."""

    sums: Tensor  # [places, GROUP * HEAD_DIM] float32
    stats: Tensor  # [places, 2 * GROUP] float32
    arrivals: Tensor  # [max rows * num_kv_heads] int32

    @staticmethod
    def allocate(
        device: torch.device, *, max_rows: int, num_heads: int, num_kv_heads: int, head_dim: int
    ) -> PartBuffers:
        group = num_heads // num_kv_heads
        places = max(
            2 * STREAMED_PROGRAMS_PER_SM * num_sms(device), *(rows * num_kv_heads * splits for rows, splits in _SPLITS)
        )
        return PartBuffers(
            torch.empty(places, group * head_dim, dtype=torch.float32, device=device),
            torch.empty(places, 2 * group, dtype=torch.float32, device=device),
            torch.zeros(max_rows * num_kv_heads, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True, slots=True)
class NewTokens:
    """What a fused launch needs to make query, key and value of the step from QKV's rows."""

    positions: Tensor  # [T] int64
    slot_mapping: Tensor  # [T] int64, -1: the cache is left as it is
    rotary_dim: int
    cos_sin: Tensor | None  # [max_model_len, rotary_dim] float32
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None
    norm_spec: NormSpec | None  # of both norms


STREAMED_PROGRAMS_PER_SM = 2
_SPLITS = ((1, 16), (2, 16), (4, 8), (8, 8), (16, 4), (32, 2))
"""(rows up to, programs of a (row, kv head)); more rows have one each."""


@lru_cache(maxsize=4096)
def launch_shape(num_rows: int, num_kv_heads: int, max_seq_len: int, row_bytes: int, num_sms: int) -> LaunchShape:
    """row_bytes: of a padded head's numbers in the model's dtype."""
    for rows, splits in _SPLITS:
        if num_rows <= rows:
            splits = min(splits, -(-max_seq_len // 64))
            return LaunchShape(splits, 0, 16, 4, 2, is_peeled=num_rows <= 16)
    return LaunchShape(1, 0, 16, 4, 3)


def decode_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    output: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    parts: PartBuffers,
    *,
    num_rows: int,
    max_seq_len: int,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    new: NewTokens | None = None,
    pdl: bool = False,
    shape: LaunchShape | None = None,
) -> None:
    """Attend from one token per row to the row's context, into `output`.

    Math   with L = seq_lens[r], t = L - 1 and, over keys max(0, L - window) <= j <= t of the row,
             x_j = cap(scale q k_j) + slope (j - t),  cap(y) = soft_cap tanh(y / soft_cap) or y
             o = sum_j e^x_j v_j / (sum_j e^x_j + e^sink)
    Papers Milakov, Gimelshein, Online normalizer calculation for softmax (arXiv:1805.02867); Dao et al., Flash-Decoding (2023);
           Osama et al., Stream-K (arXiv:2301.03598), for the even shares.

    R rows, T tokens, H heads, N kv heads, D head_dim, P blocks, S block_size
      query            [T, H, D], strides (any, D, 1); with `new`: [T, (H + 2 N) D], strides (any, 1); fp16, bf16, fp32
      k_cache, v_cache [P, S, N, D] views of equal strides (any, any, any, 1); dtype of query, or bf16, fp8 e4m3, fp8 e5m2
      output           [T, H, D], strides (any, D, 1)
      seq_lens         [R] int32; 0: a row of padding, whose output is left as it is
      block_table      [R, B] int32, strides (any, 1)
      sinks, alibi_slopes [H]
    Row r's token is r, or with `query_start_loc` [R + 1] int32 its token query_start_loc[r]; rows that have another number of
    tokens than one are left out there.
    With `new`, query is the product's rows: norm, rotation and the cache's new entry are done here (rounded as in
    pelton.ops.reference), and each row's last token comes from registers; else the cache holds it already.

    Products accumulate in float32 (float32 models: no TF32), softmax is float32, its weights are rounded to the query's dtype for
    the product with V. Nothing outside a row's keys is read into the sum, so other blocks may hold NaN.
    No host synchronisation; grid and buffers follow from `num_rows`, `max_seq_len` (an upper bound) and strides alone.
    """
    num_blocks, block_size, num_kv_heads, head_dim = k_cache.shape
    num_heads = output.shape[1]
    group = num_heads // num_kv_heads
    padded_dim = max(16, triton.next_power_of_2(head_dim))
    if shape is None:
        shape = launch_shape(
            num_rows, num_kv_heads, max_seq_len, padded_dim * output.element_size(), num_sms(output.device)
        )
    spec = new.norm_spec if new else None
    heads_of_tile = triton.next_power_of_2(group + 1)
    members = triton.next_power_of_2(group)
    kernel = streamed_decode_kernel if shape.splits == 0 else decode_kernel
    kernel[(shape.programs,) if shape.splits == 0 else (shape.splits, num_kv_heads, num_rows)](
        query,
        new.positions if new else None,
        new.slot_mapping if new else None,
        k_cache,
        v_cache,
        output,
        query_start_loc,
        seq_lens,
        block_table,
        new.cos_sin if new else None,
        new.q_norm if new else None,
        new.k_norm if new else None,
        sinks,
        alibi_slopes,
        parts.sums,
        parts.stats,
        parts.arrivals,
        query.stride(0),
        output.stride(0),
        block_table.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        num_rows if shape.splits == 0 else num_blocks,
        scale,
        EPS=spec.eps if spec else None,
        UNIT_OFFSET=spec.unit_offset if spec else False,
        FUSED=new is not None,
        WINDOW=sliding_window or 0,
        SOFT_CAP=soft_cap,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        PADDED_DIM=padded_dim,
        ROTARY_DIM=new.rotary_dim if new else 0,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        Q=heads_of_tile,
        M=max(heads_of_tile, 8),
        MEMBERS=members,
        W=shape.num_warps,
        N=shape.keys,
        PARTS=max(2, min(16, 8192 // (members * padded_dim))),
        STAGES=shape.num_stages,
        PDL=pdl,
        num_warps=shape.num_warps,
        **(
            {"ROWS": triton.next_power_of_2(num_rows)}
            if shape.splits == 0
            else {"SPLITS": shape.splits, "LEAST": shape.least, "PEEL": shape.is_peeled}
        ),
        **launch_options(pdl),
    )
