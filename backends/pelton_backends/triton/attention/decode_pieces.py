"""Stages of the decode kernels: the query, chunks of keys, and the parts that several programs made of one row.

Q: heads of a kv head and its key, padded to a power of two; M: Q, or 8 where Q is less; N keys of a chunk; D padded head_dim.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pelton_backends.triton.ops.pieces import normed, to_cache
from pelton_backends.triton.runtime import dot

LOG2E = tl.constexpr(1.4426950408889634)
NOTHING = tl.constexpr(-1e30)
"""The running maximum before the first key: finite, so that differences are never NaN."""
FAN, LEVELS = tl.constexpr(16), tl.constexpr(3)
"""Parts that one program merges, and how often parts are merged at most: 4,096 parts."""


@triton.jit
def partner_of(dim, ROTARY_DIM: tl.constexpr):
    """The number that number `dim` of a head is rotated with; itself where there is no rotation."""
    HALF: tl.constexpr = ROTARY_DIM // 2
    return tl.where(dim < HALF, dim + HALF, tl.where(dim < ROTARY_DIM, dim - HALF, dim))


@triton.jit
def angles_at(cos_sin, position, dim, ROTARY_DIM: tl.constexpr, Q: tl.constexpr):
    """Cosine and signed sine of each of a head's numbers at a position, [Q, D] with equal rows: in the heads' layout."""
    HALF: tl.constexpr = ROTARY_DIM // 2
    frequency = tl.where(dim < HALF, dim, dim - HALF)[None, :] + tl.zeros([Q, 1], tl.int32)
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
    Q: tl.constexpr,
    CUTS: tl.constexpr = 1,
):
    """Load the numbers of one kv head: its query heads and, from row GROUP on, its key [Q, D]; the same with partners; its value [D].
    CUTS of the kv heads are one and the same, with GROUP of its query heads each."""
    member = tl.arange(0, Q)
    mask = (dim < HEAD_DIM)[None, :]
    if FUSED:
        heads = tl.where(member < GROUP, head * GROUP + member, NUM_KV_HEADS * GROUP + head // CUTS)
        rows = query + (heads * HEAD_DIM)[:, None]
        x = tl.load(rows + dim[None, :], mask=mask, other=0.0)
        other = x
        if ROTARY_DIM > 0:
            other = tl.load(rows + partner_of(dim, ROTARY_DIM)[None, :], mask=mask, other=0.0)
        number = NUM_KV_HEADS * GROUP + (NUM_KV_HEADS + head) // CUTS
        value = tl.load(query + number * HEAD_DIM + dim, mask=dim < HEAD_DIM, other=0.0)
    else:
        heads = head * GROUP + tl.minimum(member, GROUP - 1)
        x = tl.load(query + (heads * HEAD_DIM)[:, None] + dim[None, :], mask=mask, other=0.0)
        other, value = x, x
    return x, other, value


@triton.jit
def norm_rope(
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
def norm_weights(q_norm, k_norm, dim, HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, Q: tl.constexpr):
    """[Q, D]: the query's for the first GROUP rows, the key's after them. May be read before `wait_for_inputs`."""
    is_query = (tl.arange(0, Q) < GROUP)[:, None]
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
def blocks_of(table, token, stride_table, BLOCK_SIZE: tl.constexpr):
    """The block of each token; within the row of the table, whether or not the row's request goes so far."""
    return tl.load(table + token // BLOCK_SIZE, mask=token < stride_table * BLOCK_SIZE, other=0)


@triton.jit
def load_chunk(
    keys,
    values,
    block,
    token,
    is_seen,
    stride_block,
    stride_token,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    """Keys [N, D] and values [D, N] of a kv head; 0 where nothing is seen."""
    dim = tl.arange(0, PADDED_DIM)
    place = block.to(tl.int64) * stride_block + (token % BLOCK_SIZE) * stride_token
    key_mask, value_mask = is_seen[:, None], is_seen[None, :]
    if HEAD_DIM < PADDED_DIM:
        key_mask = key_mask & (dim < HEAD_DIM)[None, :]
        value_mask = value_mask & (dim < HEAD_DIM)[:, None]
    key = tl.load(keys + place[:, None] + dim[None, :], mask=key_mask, other=0.0)
    value = tl.load(values + place[None, :] + dim[:, None], mask=value_mask, other=0.0)
    return key, value


@triton.jit
def one_chunk(tile, top, total, sums, key, value, is_seen, distance, slopes, scale, SOFT_CAP: tl.constexpr):
    """The running softmax takes N keys. Keys are rows of the products, heads are columns: tile [D, M], sums [D, M]."""
    products = dot(key.to(tile.dtype), tile, tl.zeros([key.shape[0], tile.shape[1]], tl.float32))
    logits = scaled_logits(products, distance[:, None], slopes, scale, SOFT_CAP)
    logits = tl.where(is_seen[:, None], logits, float("-inf"))
    new_top = tl.maximum(top, tl.max(logits, 0))
    weights = tl.exp2(logits - new_top[None, :])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(weights, 0)
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
    Q: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
):
    """The heads [Q, D] as the products want them; fused, the new token's logits [Q] and its value as the cache holds it."""
    dim = tl.arange(0, PADDED_DIM)
    member = tl.arange(0, Q)
    new_logit = tl.zeros([Q], tl.float32)
    if FUSED:
        x = norm_rope(x, other, cos, sin, own, partners, EPS, UNIT_OFFSET, HEAD_DIM, ROTARY_DIM)
        new_key = tl.sum(tl.where((member == GROUP)[:, None], x.to(tl.float32), 0.0), 0).to(x.dtype)
        new_key = to_cache(new_key, k_cache.dtype.element_ty)
        new_value = to_cache(new_value, v_cache.dtype.element_ty)
        if slot >= 0:
            place = (slot // BLOCK_SIZE) * stride_block + (slot % BLOCK_SIZE) * stride_token + head * stride_head
            tl.store(k_cache + place + dim, new_key, mask=dim < HEAD_DIM)
            tl.store(v_cache + place + dim, new_value, mask=dim < HEAD_DIM)
        products = tl.sum(x.to(tl.float32) * new_key.to(x.dtype).to(tl.float32)[None, :], 1)
        slopes = alibi_slopes
        if alibi_slopes is not None:
            slopes = tl.load(alibi_slopes + head * GROUP + tl.minimum(member, GROUP - 1)).to(tl.float32)
        new_logit = scaled_logits(products, tl.zeros([Q], tl.int32), slopes, scale, SOFT_CAP)
    return x, new_value, new_logit


@triton.jit
def attend(
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
    early_key,  # the first chunk's, if IS_EARLY
    early_value,
    block,  # [N] of the first chunk
    next_block,  # of the next one, if IS_EARLY
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
    N: tl.constexpr,
    IS_EARLY: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Chunks `chunk`, chunk + step, .. < last_chunk of one (row, kv head): of them the keys first_key <= key < last_key.

    Returns maximum, sum and weighted values [M], [M], [D, M] in float32; columns from GROUP on are of no use. Fused, the owner of
    the new token has seen it too. The M columns are the Q heads over and over: a tensor core's tile has 8 at least.
    """
    local = tl.arange(0, N)
    keys, values = k_cache + head * stride_head, v_cache + head * stride_head
    slopes = alibi_slopes
    if alibi_slopes is not None:
        slopes = tl.load(alibi_slopes + head * GROUP + tl.minimum(tl.arange(0, M) % Q, GROUP - 1)).to(tl.float32)
        slopes = slopes[None, :]
    tile = tl.trans(tl.reshape(tl.broadcast_to(x[None, :, :], [M // Q, Q, PADDED_DIM]), [M, PADDED_DIM]))
    top = tl.full([M], NOTHING, tl.float32)
    total = tl.zeros([M], tl.float32)
    sums = tl.zeros([PADDED_DIM, M], tl.float32)
    if IS_EARLY:
        token = chunk * N + local
        is_seen = (token >= first_key) & (token < last_key)
        top, total, sums = one_chunk(
            tile, top, total, sums, early_key, early_value, is_seen, token - position, slopes, scale, SOFT_CAP
        )
        chunk += step
        block = next_block
    for i in tl.range(chunk, last_chunk, step, num_stages=STAGES):
        token = i * N + local
        is_seen = (token >= first_key) & (token < last_key)
        this_block = block
        block = blocks_of(table, token + step * N, stride_table, BLOCK_SIZE)
        key, value = load_chunk(
            keys, values, this_block, token, is_seen, stride_block, stride_token, BLOCK_SIZE, HEAD_DIM, PADDED_DIM
        )
        top, total, sums = one_chunk(
            tile, top, total, sums, key, value, is_seen, token - position, slopes, scale, SOFT_CAP
        )
    if FUSED:
        logit = tl.reshape(tl.broadcast_to(new_logit[None, :], [M // Q, Q]), [M])
        logit = tl.where(is_owner, logit, NOTHING)
        new_top = tl.maximum(top, logit)
        weight = tl.where(is_owner, tl.exp2(logit - new_top), 0.0)
        shrink = tl.exp2(top - new_top)
        total = total * shrink + weight
        sums = sums * shrink[None, :] + weight[None, :] * new_value.to(x.dtype).to(tl.float32)[:, None]
        top = new_top
    return top, total, sums


@triton.jit
def places_of(member, stride_token, HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr):
    """Where a kv head's results begin, after the row's first: HEADS a token."""
    if HEADS == GROUP:
        place = member * HEAD_DIM
    else:
        place = (member // HEADS).to(tl.int64) * stride_token + (member % HEADS) * HEAD_DIM
    return place


@triton.jit
def store_output(
    output,  # pointer to the row's first head of this kv head
    stride_token,
    num_members,
    top,
    total,
    sums,
    sinks,  # pointer to the first head's
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
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
    mask = (member < num_members)[None, :] & (dim < HEAD_DIM)[:, None]
    place = places_of(member, stride_token, HEAD_DIM, GROUP, HEADS)
    tl.store(output + place[None, :] + dim[:, None], result.to(output.dtype.element_ty), mask=mask)


@triton.jit
def store_part(
    top,
    total,
    sums,  # [D, heads], or [heads, D] if IS_MERGED
    part,
    part_sums,
    part_stats,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    IS_MERGED: tl.constexpr,
):
    """Leave a partial result in its place, before whatever this program releases next."""
    member = tl.arange(0, top.shape[0])
    number = part.to(tl.int64)
    stats = part_stats + number * (2 * GROUP) + member
    tl.store(stats, top, mask=member < GROUP)
    tl.store(stats + GROUP, total, mask=member < GROUP)
    place = part_sums + number * (GROUP * HEAD_DIM)
    if IS_MERGED:
        dim = tl.arange(0, sums.shape[1])[None, :]
        member = member[:, None]
    else:
        dim = tl.arange(0, sums.shape[0])[:, None]
        member = member[None, :]
    tl.store(place + member * HEAD_DIM + dim, sums, mask=(member < GROUP) & (dim < HEAD_DIM))
    tl.debug_barrier()  # all threads' parts before the one thread's release


@triton.jit
def merge_parts(
    first_part,  # number of part 0
    other_parts,  # part i > 0 is number other_parts + i * part_step
    part_step,
    num_parts,
    top,  # [MEMBERS]: where the sum begins
    total,
    part_sums,
    part_stats,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,  # power of two, GROUP or more
    PARTS: tl.constexpr,
):
    """The sum of parts that other programs wrote: read past L1. PARTS parts at a time."""
    member = tl.arange(0, MEMBERS)
    dim = tl.arange(0, PADDED_DIM)
    is_member = member < GROUP
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
    return top, total, sums


@triton.jit
def merge_tiles(
    first_part,
    other_parts,
    part_step,
    num_parts,
    top,
    total,
    part_sums,
    part_stats,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """`merge_parts` for several warps: each part is a tile of its own. An axis of parts would be shared out to the warps, and summed
    by way of shared memory."""
    member = tl.arange(0, MEMBERS)
    dim = tl.arange(0, PADDED_DIM)
    sums = tl.zeros([MEMBERS, PADDED_DIM], tl.float32)
    for start in range(0, num_parts, PARTS):
        tops, totals, rows = (), (), ()
        for i in tl.static_range(PARTS):
            part = tl.where(start + i == 0, first_part, other_parts + (start + i) * part_step).to(tl.int64)
            is_part = (member < GROUP) & (start + i < num_parts)
            stats = part_stats + part * (2 * GROUP) + member
            tops += (tl.load(stats, mask=is_part, other=NOTHING, cache_modifier=".cg"),)
            totals += (tl.load(stats + GROUP, mask=is_part, other=0.0, cache_modifier=".cg"),)
            place = part_sums + part * (GROUP * HEAD_DIM) + member * HEAD_DIM
            is_number = is_part[:, None] & (dim < HEAD_DIM)[None, :]
            rows += (tl.load(place[:, None] + dim[None, :], mask=is_number, other=0.0, cache_modifier=".cg"),)
        new_top = top
        for i in tl.static_range(PARTS):
            new_top = tl.maximum(new_top, tops[i])
        shrink = tl.exp2(top - new_top)
        total, sums = total * shrink, sums * shrink[:, None]
        for i in tl.static_range(PARTS):
            weight = tl.exp2(tops[i] - new_top)
            total += totals[i] * weight
            sums += rows[i] * weight[:, None]
        top = new_top
    return top, total, sums


@triton.jit
def finish(
    output,  # pointer to the row's first head
    stride_token,  # of output
    num_members,  # that are stored, GROUP at most
    top,
    total,
    sums,
    head,
    index,  # of this part among the pair's
    num_parts,
    first_part,  # numbers of the pair's parts, as `merge_parts` counts them
    other_parts,
    part_sums,  # [parts, GROUP, HEAD_DIM]
    part_stats,  # [parts, 2, GROUP]: top, total
    arrivals,  # [parts, LEVELS]
    sinks,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    GROUP: tl.constexpr,  # columns: HEADS of each token
    HEADS: tl.constexpr,
    MEMBERS: tl.constexpr,
    PARTS: tl.constexpr,
    PART_STEP: tl.constexpr,
    BY_TILES: tl.constexpr,  # of several warps
):
    """The output of a (row, kv head): from its only part, or, of several, merged by those whose parts arrive last.

    FAN neighbours are merged by the last of them, FAN of these again, until one is left: one program that merged all parts of a
    long row would take as long as the rest.
    """
    output += head * (HEADS * HEAD_DIM)
    if sinks is not None:
        sinks += head * GROUP
    if num_parts == 1:
        store_output(output, stride_token, num_members, top, total, sums, sinks, HEAD_DIM, GROUP, HEADS)
    else:
        member, dim = tl.arange(0, MEMBERS), tl.arange(0, PADDED_DIM)
        is_member = member < GROUP
        part = tl.where(index == 0, first_part, other_parts + index * PART_STEP)
        store_part(top, total, sums, part, part_sums, part_stats, HEAD_DIM, GROUP, False)
        level, part_step = tl.full([], 0, tl.int32), tl.full([], PART_STEP, tl.int32)
        is_last = num_parts > 1
        while is_last:
            first = index // FAN * FAN
            part = tl.where(first == 0, first_part, other_parts + first * part_step)
            is_root = num_parts <= FAN
            size = tl.minimum(num_parts - first, FAN)
            counter = arrivals + part * LEVELS + level
            is_last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == size - 1
            if is_last:
                merged_top = tl.full([MEMBERS], NOTHING, tl.float32)
                merged_total = tl.zeros([MEMBERS], tl.float32)
                if sinks is not None:
                    sink = tl.load(sinks + member, mask=is_member, other=0.0).to(tl.float32) * LOG2E
                    merged_top = tl.where(is_root, sink, merged_top)
                    merged_total = tl.where(is_root, 1.0, merged_total)
                if BY_TILES:
                    merged_top, merged_total, merged = merge_tiles(
                        part, other_parts + first * part_step, part_step, size, merged_top, merged_total, part_sums,
                        part_stats, HEAD_DIM, PADDED_DIM, GROUP, MEMBERS, PARTS,
                    )  # fmt: skip
                else:
                    merged_top, merged_total, merged = merge_parts(
                        part, other_parts + first * part_step, part_step, size, merged_top, merged_total, part_sums,
                        part_stats, HEAD_DIM, PADDED_DIM, GROUP, MEMBERS, PARTS,
                    )  # fmt: skip
                tl.store(counter, 0)  # for the next launch
                if is_root:
                    result = (merged / merged_total[:, None]).to(output.dtype.element_ty)
                    mask = (member < num_members)[:, None] & (dim < HEAD_DIM)[None, :]
                    place = places_of(member, stride_token, HEAD_DIM, GROUP, HEADS)
                    tl.store(output + place[:, None] + dim[None, :], result, mask=mask)
                else:
                    tl.debug_barrier()  # it goes where part `first` was read
                    store_part(merged_top, merged_total, merged, part, part_sums, part_stats, HEAD_DIM, GROUP, True)
            is_last = is_last & (is_root == 0)
            index, num_parts, part_step = first // FAN, (num_parts + FAN - 1) // FAN, part_step * FAN
            level += 1
