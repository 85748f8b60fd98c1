"""Stages of the decode kernels: the query, chunks of keys, and the parts that several programs made of one row.

M: heads of a kv head and its key, padded to a power of two, 8 at least (what a tensor core's tile has); N: keys of a chunk, a
divisor of a block's; D: head_dim, padded.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pelton_backends.triton.ops.pieces import normed
from pelton_backends.triton.runtime import dot

LOG2E = tl.constexpr(1.4426950408889634)
NOTHING = tl.constexpr(-1e30)
"""The running maximum before the first key: finite, so that differences are never NaN."""


@triton.jit
def partner_of(dim, ROTARY_DIM: tl.constexpr):
    """The number that number `dim` of a head is rotated with; itself where there is no rotation."""
    HALF: tl.constexpr = ROTARY_DIM // 2
    return tl.where(dim < HALF, dim + HALF, tl.where(dim < ROTARY_DIM, dim - HALF, dim))


@triton.jit
def angles_at(cos_sin, position, dim, ROTARY_DIM: tl.constexpr, M: tl.constexpr):
    """Cosine and signed sine of each of a head's numbers at a position, [M, D] with equal rows: in the heads' layout."""
    HALF: tl.constexpr = ROTARY_DIM // 2
    frequency = tl.where(dim < HALF, dim, dim - HALF)[None, :] + tl.zeros([M, 1], tl.int32)
    is_rotated = (dim < ROTARY_DIM)[None, :]
    row = cos_sin + position * ROTARY_DIM
    cos = tl.load(row + frequency, mask=is_rotated, other=1.0)
    sin = tl.load(row + HALF + frequency, mask=is_rotated, other=0.0)
    return cos, tl.where((dim < HALF)[None, :], -sin, sin)


@triton.jit
def load_heads(
    query,  # pointer to the token's row
    head,
    dim,
    FUSED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,
):
    """Of one kv head: its query heads and, from row GROUP on, its key [M, D]; the same with partners; its value [D]."""
    member = tl.arange(0, M)
    mask = (dim < HEAD_DIM)[None, :]
    if FUSED:
        heads = tl.where(member < GROUP, head * GROUP + member, NUM_KV_HEADS * GROUP + head)
        rows = query + (heads * HEAD_DIM)[:, None]
        x = tl.load(rows + dim[None, :], mask=mask, other=0.0)
        other = x
        if ROTARY_DIM > 0:
            other = tl.load(rows + partner_of(dim, ROTARY_DIM)[None, :], mask=mask, other=0.0)
        value = tl.load(query + (NUM_KV_HEADS * (GROUP + 1) + head) * HEAD_DIM + dim, mask=dim < HEAD_DIM, other=0.0)
    else:
        heads = head * GROUP + tl.minimum(member, GROUP - 1)
        x = tl.load(query + (heads * HEAD_DIM)[:, None] + dim[None, :], mask=mask, other=0.0)
        other, value = x, x
    return x, other, value


@triton.jit
def norm_rope(
    x,  # [M, D]
    other,  # [M, D] each number's partner
    cos,
    sin,
    own,  # [M, D] norm weights, None: no norm
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
def norm_weights(q_norm, k_norm, dim, HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr):
    """[M, D]: the query's for the first GROUP rows, the key's after them. May be read before `wait_for_inputs`."""
    is_query = (tl.arange(0, M) < GROUP)[:, None]
    mask = (dim < HEAD_DIM)[None, :]
    return tl.load(tl.where(is_query, q_norm, k_norm) + dim[None, :], mask=mask, other=0.0)


@triton.jit
def scaled_logits(products, distance, slopes, scale, SOFT_CAP: tl.constexpr):
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
def keys_of(length, FUSED: tl.constexpr, WINDOW: tl.constexpr):
    """First key of a row that is in the cache and seen, and the one past the last."""
    first_key = length * 0
    if WINDOW > 0:
        first_key = tl.maximum(length - WINDOW, 0)
    last_key = length
    if FUSED:
        last_key = length - 1
    return first_key, last_key


@triton.jit
def block_of(
    block_table, row, chunk, length, stride_table, FUSED: tl.constexpr, WINDOW: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """The block of each key of a row's chunk, past L1: the table may not be written yet. Within the table's row in any case."""
    first_key, _ = keys_of(length, FUSED, WINDOW)
    entry = ((first_key // N + chunk) * N + tl.arange(0, N)) // BLOCK_SIZE
    table = block_table + row.to(tl.int64) * stride_table
    return tl.load(table + tl.minimum(entry, stride_table - 1), cache_modifier=".cg")


@triton.jit
def copy_chunk(
    keys,
    values,
    block,  # [N]: the same one
    start,
    token,  # start + [N]
    first_key,
    last_key,
    stride_block,
    STRIDE_TOKEN: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    """Keys [N, D] and values [D, N] of a chunk that lies within one block, and which of its keys are seen; 0 elsewhere."""
    dim, local = tl.arange(0, PADDED_DIM), tl.arange(0, token.shape[0])
    is_seen = token < last_key
    if WINDOW > 0:
        is_seen = is_seen & (token >= first_key)
    place = block.to(tl.int64) * stride_block + start % BLOCK_SIZE * STRIDE_TOKEN
    key_mask, value_mask = is_seen[:, None], is_seen[None, :]
    if HEAD_DIM < PADDED_DIM:
        key_mask = key_mask & (dim < HEAD_DIM)[None, :]
        value_mask = value_mask & (dim < HEAD_DIM)[:, None]
    keys += place[:, None] + (local[:, None] * STRIDE_TOKEN + dim[None, :])
    values += place[None, :] + (local[None, :] * STRIDE_TOKEN + dim[:, None])
    return tl.load(keys, mask=key_mask, other=0.0), tl.load(values, mask=value_mask, other=0.0), is_seen


@triton.jit
def first_blocks(
    block_table, row, chunk, step, length, stride_table, FUSED: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, N: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Of COUNT chunks from a row's chunk on, in steps. Read as `block_of` does: nobody sees an older value after a newer."""
    first_key, _ = keys_of(length, FUSED, WINDOW)
    entry = (first_key // N + chunk + tl.arange(0, COUNT) * step) * N // BLOCK_SIZE
    table = block_table + row.to(tl.int64) * stride_table
    return tl.load(table + tl.minimum(entry, stride_table - 1), cache_modifier=".cg")


@triton.jit
def start_row(
    query,  # pointer to the token's row
    positions,
    slot_mapping,
    cos_sin,
    q_norm,
    k_norm,
    row,
    head,
    is_owner,
    k_cache,
    v_cache,
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
    ROTARY_DIM: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    """Query heads [M, D] of a (row, kv head) and the running softmax before its first key: maximum, sum, weighted values.

    Fused, the owner of the new token writes it to the cache, and its softmax has seen it.
    """
    dim = tl.arange(0, PADDED_DIM)
    own, partners = q_norm, q_norm
    if q_norm is not None:
        own = norm_weights(q_norm, k_norm, dim, HEAD_DIM, GROUP, M)
        partners = norm_weights(q_norm, k_norm, partner_of(dim, ROTARY_DIM), HEAD_DIM, GROUP, M)
    x, other, new_value = load_heads(query, head, dim, FUSED, HEAD_DIM, ROTARY_DIM, NUM_KV_HEADS, GROUP, M)
    slot = tl.full([], -1, tl.int64)
    cos, sin = x, x
    if FUSED:
        slot = tl.load(slot_mapping + row)
        if ROTARY_DIM > 0:
            cos, sin = angles_at(cos_sin, tl.load(positions + row), dim, ROTARY_DIM, M)
    if not is_owner:
        slot = tl.full([], -1, tl.int64)
    x, new_value, new_logit = make_query(
        x, other, new_value, cos, sin, slot, head, k_cache, v_cache, own, partners, alibi_slopes, stride_block,
        stride_token, stride_head, scale, EPS, UNIT_OFFSET, FUSED, SOFT_CAP, BLOCK_SIZE, HEAD_DIM, PADDED_DIM, GROUP, M,
        ROTARY_DIM,
    )  # fmt: skip
    top = tl.full([M], NOTHING, tl.float32)
    total = tl.zeros([N, M], tl.float32)
    sums = tl.zeros([PADDED_DIM, M], tl.float32)
    if FUSED:
        top = tl.where(is_owner, new_logit, NOTHING)
        weight = tl.where(is_owner, 1.0, 0.0)
        total += tl.where(tl.arange(0, N) == 0, weight, 0.0)[:, None]
        sums += (weight * new_value.to(x.dtype).to(tl.float32))[:, None]
    return x, top, total, sums


@triton.jit
def one_chunk(tile, top, total, sums, key, value, is_seen, distance, slopes, scale, SOFT_CAP: tl.constexpr):
    """The running softmax takes N keys. Keys are rows of the products, heads are columns: tile [D, M], sums [D, M].

    total [N, M]: every place of a chunk has a sum of its own, for the threads not to have to meet in each.
    """
    products = dot(key.to(tile.dtype), tile, tl.zeros([key.shape[0], tile.shape[1]], tl.float32))
    logits = scaled_logits(products, distance[:, None], slopes, scale, SOFT_CAP)
    logits = tl.where(is_seen[:, None], logits, float("-inf"))
    new_top = tl.maximum(top, tl.max(logits, 0))
    weights = tl.exp2(logits - new_top[None, :])
    shrink = tl.exp2(top - new_top)
    total = total * shrink[None, :] + weights
    sums = dot(value.to(tile.dtype), weights.to(tile.dtype), sums * shrink[None, :])
    return new_top, total, sums


@triton.jit
def make_query(
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
    M: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
):
    """The heads [M, D] as the products want them; fused, the new token's logits [M] and its value as the cache holds it."""
    dim = tl.arange(0, PADDED_DIM)
    member = tl.arange(0, M)
    new_logit = tl.zeros([M], tl.float32)
    if FUSED:
        x = norm_rope(x, other, cos, sin, own, partners, EPS, UNIT_OFFSET, HEAD_DIM, ROTARY_DIM)
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
        new_logit = scaled_logits(products, tl.zeros([M], tl.int32), slopes, scale, SOFT_CAP)
    return x, new_value, new_logit


@triton.jit
def store_output(
    output,  # pointer to the row's first head of this kv head
    top,
    total,
    sums,
    sinks,  # pointer to the first head's
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
):
    member = tl.arange(0, sums.shape[1])
    dim = tl.arange(0, sums.shape[0])
    if sinks is not None:
        sink = tl.load(sinks + member, mask=member < GROUP, other=0.0).to(tl.float32) * LOG2E
        new_top = tl.maximum(top, sink)
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.exp2(sink - new_top)
        sums = sums * shrink[None, :]
    result = sums / total[None, :]
    mask = (member < GROUP)[None, :] & (dim < HEAD_DIM)[:, None]
    tl.store(output + member[None, :] * HEAD_DIM + dim[:, None], result.to(output.dtype.element_ty), mask=mask)


@triton.jit
def store_part(part, part_sums, part_stats, top, total, sums, HEAD_DIM: tl.constexpr, GROUP: tl.constexpr):
    """Part number `part`: part_sums [parts, GROUP, HEAD_DIM], part_stats [parts, 2, GROUP] (top, total)."""
    member = tl.arange(0, sums.shape[1])
    dim = tl.arange(0, sums.shape[0])
    is_member = member < GROUP
    part = part.to(tl.int64)
    stats = part_stats + part * (2 * GROUP) + member
    tl.store(stats, top, mask=is_member)
    tl.store(stats + GROUP, total, mask=is_member)
    place = part_sums + part * (GROUP * HEAD_DIM) + member[None, :] * HEAD_DIM + dim[:, None]
    tl.store(place, sums, mask=is_member[None, :] & (dim < HEAD_DIM)[:, None])


@triton.jit
def merge_parts(
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
