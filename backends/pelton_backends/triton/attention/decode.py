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
def _prefetch(addresses):
    """Bring lines into L2. A hint: whatever the addresses were computed from may be stale, but they must be mapped."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [addresses.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _norm_weights(norm, dim, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr):
    """Of each number and of its partner in the rotation; may be read before `wait_for_inputs`."""
    own = tl.full([dim.shape[0]], 1.0, tl.float32)
    partners = own
    if norm is not None:
        own = tl.load(norm + dim, mask=dim < HEAD_DIM, other=0.0)
        partners = tl.load(norm + _partner(dim, ROTARY_DIM), mask=dim < HEAD_DIM, other=0.0)
    return own, partners


@triton.jit
def _partner(dim, ROTARY_DIM: tl.constexpr):
    HALF: tl.constexpr = ROTARY_DIM // 2
    return tl.where(dim < HALF, dim + HALF, tl.where(dim < ROTARY_DIM, dim - HALF, dim))


@triton.jit
def _norm_rope(
    heads,  # [M] pointers to each head's first number
    is_head,
    dim,
    angles,  # pointer to the position's row of cosines and sines
    own,
    partners,
    EPS: tl.constexpr,  # None: no norm
    UNIT_OFFSET: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
):
    """[M, D] in the dtype of `heads`, rounded as pelton.ops.reference rounds: after the norm, its weight, the rotation."""
    mask = is_head[:, None] & (dim < HEAD_DIM)[None, :]
    x = tl.load(heads[:, None] + dim[None, :], mask=mask, other=0.0)
    other = x
    if ROTARY_DIM > 0:
        other = tl.load(heads[:, None] + _partner(dim, ROTARY_DIM)[None, :], mask=mask, other=0.0)
    if EPS is not None:
        square = tl.sum(x.to(tl.float32) * x.to(tl.float32), 1) / HEAD_DIM
        rstd = (1.0 / tl.sqrt(square + EPS))[:, None]
        dtype: tl.constexpr = x.dtype
        x = normed(x.to(tl.float32), rstd, own[None, :], UNIT_OFFSET, dtype)
        if ROTARY_DIM > 0:
            other = normed(other.to(tl.float32), rstd, partners[None, :], UNIT_OFFSET, dtype)
    if ROTARY_DIM > 0:
        HALF: tl.constexpr = ROTARY_DIM // 2
        frequency = tl.where(dim < HALF, dim, dim - HALF)
        cos = tl.load(angles + frequency, mask=dim < ROTARY_DIM, other=1.0)
        sin = tl.load(angles + HALF + frequency, mask=dim < ROTARY_DIM, other=0.0)
        sin = tl.where(dim < HALF, -sin, sin)
        x = (x.to(tl.float32) * cos[None, :] + other.to(tl.float32) * sin[None, :]).to(x.dtype)
    return x


@triton.jit
def _logits(products, distance, slopes, scale, SOFT_CAP: tl.constexpr):
    """In base 2, [M, N]: q k scale, capped, with the ALiBi term; distance [N] is key minus query position, <= 0."""
    if SOFT_CAP is not None:
        # tanh(y) = 1 - 2 / (1 + e^2y), exact at both ends
        tanh = 1.0 - 2.0 / (1.0 + tl.exp2(products * (scale * (2.0 * LOG2E / SOFT_CAP))))
        logits = tanh * (SOFT_CAP * LOG2E)
    else:
        logits = products * (scale * LOG2E)
    if slopes is not None:
        logits += (slopes * LOG2E)[:, None] * distance.to(tl.float32)[None, :]
    return logits


@triton.jit
def _attend(
    query,  # [M, D]
    top,  # [M] running maximum
    total,  # [M] running sum
    sums,  # [M, D] running weighted values
    first_chunk,
    last_chunk,
    step,
    first_key,
    last_key,
    position,
    table,  # pointer to the row's block table
    keys,  # pointers to the kv head's numbers of token 0, block 0
    values,
    stride_block,
    stride_token,
    slopes,
    scale,
    SOFT_CAP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Chunks first_chunk, first_chunk + step, .. < last_chunk; of them the keys first_key <= key < last_key."""
    dim = tl.arange(0, query.shape[1])
    for chunk in tl.range(first_chunk, last_chunk, step, num_stages=STAGES):
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        is_seen = (token >= first_key) & (token < last_key)
        block = tl.load(table + token // BLOCK_SIZE, mask=is_seen, other=0).to(tl.int64)
        place = block * stride_block + (token % BLOCK_SIZE) * stride_token
        mask = is_seen[:, None] & (dim < HEAD_DIM)[None, :]
        key = tl.load(keys + place[:, None] + dim[None, :], mask=mask, other=0.0).to(query.dtype)
        products = dot(query, tl.trans(key), tl.zeros([query.shape[0], CHUNK], tl.float32))
        logits = _logits(products, token - position, slopes, scale, SOFT_CAP)
        logits = tl.where(is_seen[None, :], logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 1))
        weights = tl.exp2(logits - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        value = tl.load(values + place[:, None] + dim[None, :], mask=mask, other=0.0).to(query.dtype)
        sums = dot(weights.to(query.dtype), value, sums * shrink[:, None])
        top = new_top
    return top, total, sums


@triton.jit
def _begin(
    qkv,  # pointer to the token's row
    row_position,
    slot,
    is_owner,
    head,
    k_cache,
    v_cache,
    stride_block,
    stride_token,
    stride_head,
    cos_sin,
    q_own,
    q_partners,
    k_own,
    k_partners,
    slopes,
    scale,
    Q_EPS: tl.constexpr,
    K_EPS: tl.constexpr,
    Q_UNIT: tl.constexpr,
    K_UNIT: tl.constexpr,
    FUSED: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,
):
    """The query, and the softmax state before the first chunk. Fused, the owner's state has seen the new token, and the
    cache has it too; otherwise the state is empty."""
    dim = tl.arange(0, PADDED_DIM)
    member = tl.arange(0, M)
    is_member = member < GROUP
    heads = qkv + (head * GROUP + member) * HEAD_DIM
    top = tl.full([M], NOTHING, tl.float32)
    total = tl.zeros([M], tl.float32)
    sums = tl.zeros([M, PADDED_DIM], tl.float32)
    if not FUSED:
        query = tl.load(heads[:, None] + dim[None, :], mask=is_member[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
    else:
        angles = cos_sin
        if ROTARY_DIM > 0:
            angles = cos_sin + row_position * ROTARY_DIM
        query = _norm_rope(
            heads, is_member, dim, angles, q_own, q_partners, Q_EPS, Q_UNIT, HEAD_DIM, ROTARY_DIM
        )  # fmt: skip
        if is_owner:
            one = tl.arange(0, 1)
            key_row = qkv + (NUM_KV_HEADS * GROUP + head) * HEAD_DIM
            key = _norm_rope(
                key_row + one, one == 0, dim, angles, k_own, k_partners, K_EPS, K_UNIT, HEAD_DIM, ROTARY_DIM
            )  # fmt: skip
            value = tl.load(
                key_row + NUM_KV_HEADS * HEAD_DIM + one[:, None] + dim[None, :],
                mask=(dim < HEAD_DIM)[None, :],
                other=0.0,
            )
            key, value = key.to(k_cache.dtype.element_ty), value.to(v_cache.dtype.element_ty)
            place = (slot // BLOCK_SIZE) * stride_block + (slot % BLOCK_SIZE) * stride_token + head * stride_head
            kept = (dim < HEAD_DIM)[None, :] & (slot >= 0)
            tl.store(k_cache + place + dim[None, :], key, mask=kept)
            tl.store(v_cache + place + dim[None, :], value, mask=kept)
            products = tl.sum(query.to(tl.float32) * key.to(query.dtype).to(tl.float32), 1)
            top = tl.reshape(_logits(products[:, None], tl.zeros([1], tl.int32), slopes, scale, SOFT_CAP), [M])
            total = tl.full([M], 1.0, tl.float32)
            sums += value.to(query.dtype).to(tl.float32)
    return query, top, total, sums


@triton.jit
def _store_output(
    output,  # pointer to the row's first head of this kv head
    top,
    total,
    sums,
    sinks,  # pointer to the first head's
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,
):
    member = tl.arange(0, M)
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
    part, part_sums, part_stats, top, total, sums, HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr
):
    """Part number `part`: part_sums [parts, GROUP, HEAD_DIM], part_stats [parts, 2, GROUP] (top, total)."""
    member = tl.arange(0, M)
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
    PARTS: tl.constexpr,
):
    """Of parts that other programs wrote: read past L1. One head after the other, PARTS parts at a time."""
    dim = tl.arange(0, PADDED_DIM)
    for member in tl.static_range(GROUP):
        top = NOTHING
        total = 0.0
        if sinks is not None:
            top = tl.load(sinks + member).to(tl.float32) * LOG2E
            total = 1.0
        sums = tl.zeros([PADDED_DIM], tl.float32)
        for start in range(0, num_parts, PARTS):
            index = start + tl.arange(0, PARTS)
            is_part = index < num_parts
            part = tl.where(index == 0, first_part, other_parts + index * part_step).to(tl.int64)
            stats = part_stats + part * (2 * GROUP) + member
            tops = tl.load(stats, mask=is_part, other=NOTHING, cache_modifier=".cg")
            totals = tl.load(stats + GROUP, mask=is_part, other=0.0, cache_modifier=".cg")
            place = part_sums + part * (GROUP * HEAD_DIM) + member * HEAD_DIM
            rows = tl.load(
                place[:, None] + dim[None, :],
                mask=is_part[:, None] & (dim < HEAD_DIM)[None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            new_top = tl.maximum(top, tl.max(tops, 0))
            weights = tl.exp2(tops - new_top)
            shrink = tl.exp2(top - new_top)
            total = total * shrink + tl.sum(totals * weights, 0)
            sums = sums * shrink + tl.sum(rows * weights[:, None], 0)
            top = new_top
        result = (sums / total).to(output.dtype.element_ty)
        tl.store(output + member * HEAD_DIM + dim, result, mask=dim < HEAD_DIM)


@triton.jit
def decode_kernel(
    qkv,
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
    stride_qkv,
    stride_output,
    stride_table,
    stride_block,
    stride_token,
    stride_head,
    num_blocks,
    scale,
    Q_EPS: tl.constexpr,
    K_EPS: tl.constexpr,
    Q_UNIT: tl.constexpr,
    K_UNIT: tl.constexpr,
    FUSED: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLITS: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (split, kv head, row): every SPLITS-th chunk of the row. Arguments: see `decode_attention`."""
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    let_next_start(PDL)
    dim = tl.arange(0, PADDED_DIM)
    member = tl.arange(0, M)
    q_own, q_partners = _norm_weights(q_norm, dim, HEAD_DIM, ROTARY_DIM)
    k_own, k_partners = _norm_weights(k_norm, dim, HEAD_DIM, ROTARY_DIM)
    slopes = alibi_slopes
    if alibi_slopes is not None:
        slopes = tl.load(alibi_slopes + head * GROUP + member, mask=member < GROUP, other=0.0).to(tl.float32)
    table = block_table + row.to(tl.int64) * stride_table
    if PREFETCH and PDL:
        # Into L2 while the product before still runs. Tables may be those of the last step: then it was in vain, no more.
        stale = tl.load(seq_lens + row, volatile=True)
        token = split * CHUNK + tl.arange(0, CHUNK)
        if WINDOW > 0:
            token += (tl.maximum(stale - WINDOW, 0) // CHUNK) * CHUNK
        block = tl.load(table + token // BLOCK_SIZE, mask=token < stale, other=0, volatile=True)
        block = tl.minimum(tl.maximum(block, 0), num_blocks - 1).to(tl.int64)
        lines = block * stride_block + (token % BLOCK_SIZE) * stride_token + head * stride_head
        LINE: tl.constexpr = 1024 // k_cache.dtype.element_ty.primitive_bitwidth
        for line in tl.static_range((HEAD_DIM + LINE - 1) // LINE):
            _prefetch(k_cache + lines + line * LINE)
            _prefetch(v_cache + lines + line * LINE)
    wait_for_inputs(PDL)

    seq_len = tl.load(seq_lens + row)
    token_index = row
    position, slot = seq_len - 1, tl.full([], -1, tl.int64)
    row_position = position.to(tl.int64)
    if query_start_loc is not None:  # rows with another number of tokens belong to another kernel
        token_index = tl.load(query_start_loc + row)
        if tl.load(query_start_loc + row + 1) - token_index != 1:
            seq_len = 0
    if FUSED:
        row_position = tl.load(positions + row)
        slot = tl.load(slot_mapping + row)
    first_key = 0
    if WINDOW > 0:
        first_key = tl.maximum(seq_len - WINDOW, 0)
    last_key = seq_len
    if FUSED:
        last_key = seq_len - 1
    first_chunk, last_chunk = first_key // CHUNK, (last_key + CHUNK - 1) // CHUNK
    num_splits = tl.minimum(tl.maximum(last_chunk - first_chunk, 1), SPLITS)
    if (split >= num_splits) | (seq_len <= 0):
        return

    query, top, total, sums = _begin(
        qkv + token_index.to(tl.int64) * stride_qkv, row_position, slot, split == 0, head, k_cache, v_cache,
        stride_block, stride_token, stride_head, cos_sin, q_own, q_partners, k_own, k_partners, slopes, scale,
        Q_EPS, K_EPS, Q_UNIT, K_UNIT, FUSED, SOFT_CAP, BLOCK_SIZE, HEAD_DIM, PADDED_DIM, ROTARY_DIM, NUM_KV_HEADS,
        GROUP, M,
    )  # fmt: skip
    top, total, sums = _attend(
        query, top, total, sums, first_chunk + split, last_chunk, SPLITS, first_key, last_key, position, table,
        k_cache + head * stride_head, v_cache + head * stride_head, stride_block, stride_token, slopes, scale,
        SOFT_CAP, BLOCK_SIZE, HEAD_DIM, CHUNK, STAGES,
    )  # fmt: skip

    head_output = output + token_index.to(tl.int64) * stride_output + head * (GROUP * HEAD_DIM)
    head_sinks = sinks
    if sinks is not None:
        head_sinks = sinks + head * GROUP
    if num_splits == 1:
        _store_output(head_output, top, total, sums, head_sinks, HEAD_DIM, GROUP, M)
    else:
        pair = row * NUM_KV_HEADS + head
        _store_part(pair * SPLITS + split, part_sums, part_stats, top, total, sums, HEAD_DIM, GROUP, M)
        tl.debug_barrier()  # all threads' parts before the one thread's release
        arrived = tl.atomic_add(arrivals + pair, 1, sem="acq_rel", scope="gpu")
        if arrived == num_splits - 1:
            _merge_parts(
                head_output, pair * SPLITS, pair * SPLITS, 1, num_splits, part_sums, part_stats, head_sinks,
                HEAD_DIM, PADDED_DIM, GROUP, PARTS,
            )  # fmt: skip
            tl.store(arrivals + pair, 0)  # for the next launch


@triton.jit(do_not_specialize=["num_rows"])
def streamed_decode_kernel(
    qkv,
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
    stride_qkv,
    stride_output,
    stride_table,
    stride_block,
    stride_token,
    stride_head,
    num_rows,
    scale,
    Q_EPS: tl.constexpr,
    K_EPS: tl.constexpr,
    Q_UNIT: tl.constexpr,
    K_UNIT: tl.constexpr,
    FUSED: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    CHUNK: tl.constexpr,
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
    dim = tl.arange(0, PADDED_DIM)
    member = tl.arange(0, M)
    q_own, q_partners = _norm_weights(q_norm, dim, HEAD_DIM, ROTARY_DIM)
    k_own, k_partners = _norm_weights(k_norm, dim, HEAD_DIM, ROTARY_DIM)
    wait_for_inputs(PDL)

    rows = tl.arange(0, ROWS)
    lengths = tl.load(seq_lens + rows, mask=rows < num_rows, other=0)
    if query_start_loc is not None:
        starts = tl.load(query_start_loc + rows, mask=rows < num_rows, other=0)
        ends = tl.load(query_start_loc + rows + 1, mask=rows < num_rows, other=0)
        lengths = tl.where(ends - starts == 1, lengths, 0)
    last_keys = lengths
    if FUSED:
        last_keys = lengths - 1
    chunks = (last_keys + CHUNK - 1) // CHUNK
    if WINDOW > 0:
        chunks -= tl.maximum(lengths - WINDOW, 0) // CHUNK
    chunks = tl.where(lengths > 0, tl.maximum(chunks, 1), 0)
    ends_of_rows = tl.cumsum(chunks, 0) * NUM_KV_HEADS
    num_units = tl.sum(chunks, 0) * NUM_KV_HEADS
    share = (num_units + tl.num_programs(0) - 1) // tl.num_programs(0)
    unit = program * share
    last_unit = tl.minimum(unit + share, num_units)

    while unit < last_unit:
        row = tl.sum((ends_of_rows <= unit).to(tl.int32), 0)
        is_row = rows == row
        row_chunks = tl.sum(tl.where(is_row, chunks, 0), 0)
        row_unit = tl.sum(tl.where(is_row, ends_of_rows, 0), 0) - row_chunks * NUM_KV_HEADS
        head = (unit - row_unit) // row_chunks
        pair_unit = row_unit + head * row_chunks
        begin = unit - pair_unit
        end = tl.minimum(row_chunks, begin + last_unit - unit)
        unit += end - begin

        seq_len = tl.sum(tl.where(is_row, lengths, 0), 0)
        token_index = row
        position, slot = seq_len - 1, tl.full([], -1, tl.int64)
        row_position = position.to(tl.int64)
        if query_start_loc is not None:
            token_index = tl.load(query_start_loc + row)
        if FUSED:
            row_position = tl.load(positions + row)
            slot = tl.load(slot_mapping + row)
        first_key = 0
        if WINDOW > 0:
            first_key = tl.maximum(seq_len - WINDOW, 0)
        last_key = seq_len
        if FUSED:
            last_key = seq_len - 1
        first_chunk = first_key // CHUNK
        slopes = alibi_slopes
        if alibi_slopes is not None:
            slopes = tl.load(alibi_slopes + head * GROUP + member, mask=member < GROUP, other=0.0).to(tl.float32)
        query, top, total, sums = _begin(
            qkv + token_index.to(tl.int64) * stride_qkv, row_position, slot, begin == 0, head, k_cache, v_cache,
            stride_block, stride_token, stride_head, cos_sin, q_own, q_partners, k_own, k_partners, slopes, scale,
            Q_EPS, K_EPS, Q_UNIT, K_UNIT, FUSED, SOFT_CAP, BLOCK_SIZE, HEAD_DIM, PADDED_DIM, ROTARY_DIM, NUM_KV_HEADS,
            GROUP, M,
        )  # fmt: skip
        top, total, sums = _attend(
            query, top, total, sums, first_chunk + begin, first_chunk + end, 1, first_key, last_key, position,
            block_table + row.to(tl.int64) * stride_table, k_cache + head * stride_head, v_cache + head * stride_head,
            stride_block, stride_token, slopes, scale, SOFT_CAP, BLOCK_SIZE, HEAD_DIM, CHUNK, STAGES,
        )  # fmt: skip

        head_output = output + token_index.to(tl.int64) * stride_output + head * (GROUP * HEAD_DIM)
        head_sinks = sinks
        if sinks is not None:
            head_sinks = sinks + head * GROUP
        if end - begin == row_chunks:
            _store_output(head_output, top, total, sums, head_sinks, HEAD_DIM, GROUP, M)
        else:
            first_program = pair_unit // share
            num_parts = (pair_unit + row_chunks - 1) // share - first_program + 1
            part = program * 2 + (begin == 0).to(tl.int32)
            _store_part(part, part_sums, part_stats, top, total, sums, HEAD_DIM, GROUP, M)
            tl.debug_barrier()
            pair = row * NUM_KV_HEADS + head
            arrived = tl.atomic_add(arrivals + pair, 1, sem="acq_rel", scope="gpu")
            if arrived == num_parts - 1:
                _merge_parts(
                    head_output, first_program * 2 + 1, first_program * 2, 2, num_parts, part_sums, part_stats, head_sinks,
                    HEAD_DIM, PADDED_DIM, GROUP, PARTS,
                )  # fmt: skip
                tl.store(arrivals + pair, 0)


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """How one launch shares out its work; a function of shapes alone."""

    splits: int  # programs of a (row, kv head); 0: streamed
    programs: int  # of a streamed launch
    chunk: int
    parts: int  # merged at a time
    num_stages: int
    num_warps: int


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
    q_spec: NormSpec | None
    k_spec: NormSpec | None


STREAMED_PROGRAMS_PER_SM = 4
_SPLITS = ((1, 16), (2, 16), (4, 16), (8, 8), (16, 8), (32, 4))
"""(rows up to, programs of a (row, kv head)); more rows are streamed."""


@lru_cache(maxsize=4096)
def launch_shape(num_rows: int, num_kv_heads: int, max_seq_len: int, row_bytes: int, num_sms: int) -> LaunchShape:
    """row_bytes: of a padded head's numbers in the model's dtype."""
    chunk = 64 if row_bytes <= 256 else 32
    stages = 3
    for rows, splits in _SPLITS:
        if num_rows <= rows:
            splits = min(splits, -(-max_seq_len // chunk))
            return LaunchShape(splits, 0, chunk, triton.next_power_of_2(splits), stages, 4)
    return LaunchShape(0, STREAMED_PROGRAMS_PER_SM * num_sms, chunk, 16, stages, 4)


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
    q_spec, k_spec = (new.q_spec, new.k_spec) if new else (None, None)
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
        Q_EPS=q_spec.eps if q_spec else None,
        K_EPS=k_spec.eps if k_spec else None,
        Q_UNIT=q_spec.unit_offset if q_spec else False,
        K_UNIT=k_spec.unit_offset if k_spec else False,
        FUSED=new is not None,
        WINDOW=sliding_window or 0,
        SOFT_CAP=soft_cap,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        PADDED_DIM=padded_dim,
        ROTARY_DIM=new.rotary_dim if new else 0,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        M=max(16, triton.next_power_of_2(group)),
        CHUNK=shape.chunk,
        PARTS=shape.parts,
        STAGES=shape.num_stages,
        PDL=pdl,
        num_warps=shape.num_warps,
        **(
            {"ROWS": triton.next_power_of_2(num_rows)}
            if shape.splits == 0
            else {"SPLITS": shape.splits, "PREFETCH": True}
        ),
        **launch_options(pdl),
    )
