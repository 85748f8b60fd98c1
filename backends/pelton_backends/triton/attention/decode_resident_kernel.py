"""The kernel of `decode_resident.py`, in Gluon: what one program does for its rows of one kv head.

W warps take keys of their own: 16 J each of a chunk, which cp.async brings to shared memory, BUFFERS chunks at a time. Keys are rows of
the products and heads their columns, so that a kv head's query heads, of all the row's tokens, are one tile of M = 8 columns, or 16.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

SHARE = 32
"""Numbers that a program reads before its first key: its first row, the first chunk of that, its last row, the chunk past the last of
that; of the first row and of the last one the first program and how many share it; the first row's keys; 7 of no use; the blocks of
the first 16 pieces of 16 tokens."""
FAN, LEVELS = 16, 3
"""Parts of a row that one program brings together, and how often at most."""
HEAD_DIM = 128
_SHARE, _FAN, _LEVELS, _D = gl.constexpr(SHARE), gl.constexpr(FAN), gl.constexpr(LEVELS), gl.constexpr(HEAD_DIM)
_LOG2E = gl.constexpr(1.4426950408889634)
_NOTHING = gl.constexpr(-1e30)  # a maximum before the first key: finite, so that differences are never NaN


@gluon.jit
def _issue(k_rows, v_rows, k_smem, v_smem, buffer, blocks, left, stride_block, J: gl.constexpr):
    """Start the copies of a chunk, whose pieces' blocks are `blocks` [W], J times: zeros from its key `left` on."""
    LAYOUT: gl.constexpr = k_rows.type.layout
    W: gl.constexpr = k_rows.shape[0]
    warp = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    local = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))), 0)
    for j in gl.static_range(J):
        place = gl.expand_dims(gl.expand_dims(blocks[j].to(gl.int64) * stride_block, 1), 2)
        is_key = gl.expand_dims(local < gl.expand_dims(left - (j * W + warp) * 16, 1), 2)
        async_copy.async_copy_global_to_shared(k_smem.index(buffer * J + j), k_rows + place, is_key)
        async_copy.async_copy_global_to_shared(v_smem.index(buffer * J + j), v_rows + place, is_key)


@gluon.jit
def _blocks_at(entries, left, J: gl.constexpr, W: gl.constexpr, LAYOUT: gl.constexpr):
    """Blocks of a chunk's pieces, of which `left` keys and more are of no use."""
    warp = gl.arange(0, W, LAYOUT)
    blocks = ()
    for j in gl.static_range(J):
        blocks += (gl.load(entries + j * W + warp, mask=(j * W + warp) * 16 < left, other=0),)
    return blocks


@gluon.jit
def _keys_of(row, query_start_loc, seq_lens, TOKENS: gl.constexpr):
    """Keys that a row has in the cache before this step's; -1: padding."""
    keys = gl.load(seq_lens + row) - 1
    if TOKENS > 1:
        num_tokens = gl.load(query_start_loc + row + 1) - gl.load(query_start_loc + row)
        keys = gl.where((keys >= 0) & (num_tokens > 0), keys + 1 - num_tokens, -1)
    return keys


@gluon.jit
def _next_blocks(
    row, chunk, keys, end, next_keys, last_row, end_chunk, block_table, query_start_loc, seq_lens, stride_table, TOKENS: gl.constexpr,
    J: gl.constexpr, C: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Where the copies go on: at this chunk of the row, or with a row behind it, and the blocks there, under way until they are asked
    for. next_keys: of the row behind this one, so that no length is waited for."""
    while (chunk >= end) & (row < last_row):
        row += 1
        chunk = row * 0
        keys = next_keys
        end = gl.maximum(keys + C - 1, 0) // C
        if row == last_row:
            end = gl.minimum(end, end_chunk)
        next_keys = _keys_of(gl.minimum(row + 1, last_row), query_start_loc, seq_lens, TOKENS)
    entries = block_table + row.to(gl.int64) * stride_table + chunk * (C // 16)
    blocks = _blocks_at(entries, gl.where(chunk < end, keys - chunk * C, 0), J, C // (16 * J), LAYOUT)
    return row, chunk, keys, end, next_keys, blocks


@gluon.jit
def _normed(x, weight, rstd, UNIT_OFFSET: gl.constexpr, dtype: gl.constexpr):
    """`ops.pieces.normed` of float32, as float32 again."""
    x = x * rstd
    if UNIT_OFFSET:
        x = x * (1.0 + weight.to(gl.float32))
    else:
        x = x.to(dtype).to(gl.float32) * weight.to(gl.float32)
    return x.to(dtype).to(gl.float32)


@gluon.jit
def _partner_of(dim, ROTARY_DIM: gl.constexpr):
    HALF: gl.constexpr = ROTARY_DIM // 2
    return gl.where(dim < HALF, dim + HALF, gl.where(dim < ROTARY_DIM, dim - HALF, dim))


@gluon.jit
def _angles(cos_sin, position, dim, ROTARY_DIM: gl.constexpr):
    """Cosine and signed sine of numbers `dim` of a head at positions that broadcast with it."""
    HALF: gl.constexpr = ROTARY_DIM // 2
    at = position * ROTARY_DIM + gl.where(dim < HALF, dim, dim - HALF)
    is_rotated = (dim < ROTARY_DIM) & (at >= 0)
    cos, sin = (
        gl.load(cos_sin + at, mask=is_rotated, other=1.0),
        gl.load(cos_sin + HALF + at, mask=is_rotated, other=0.0),
    )
    return cos, gl.where(dim < HALF, -sin, sin)


@gluon.jit
def _slot_and_angles(slot_mapping, cos_sin, row, position, ROTARY_DIM: gl.constexpr, HEADS: gl.constexpr):
    """Slot, cosine and sine of a row with one token."""
    slot = gl.load(slot_mapping + row)
    cos, sin = slot, slot
    if ROTARY_DIM > 0:
        cos, sin = _angles(cos_sin, position, gl.arange(0, _D, gl.SliceLayout(0, HEADS)), ROTARY_DIM)
    return slot, cos, sin


@gluon.jit
def _numbers_of_token(
    query, row, stride_query, head, ROTARY_DIM: gl.constexpr, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, M: gl.constexpr,
    MMA: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    """Query heads, new key and new value of a row with one token, with each number's partner of the rotation."""
    member = gl.arange(0, M, gl.SliceLayout(1, HEADS))
    dim = gl.arange(0, _D, gl.SliceLayout(0, HEADS))
    wide = gl.arange(0, _D, gl.SliceLayout(1, gl.SliceLayout(0, MMA)))
    token = query + row.to(gl.int64) * stride_query
    rows = token + gl.expand_dims((head * GROUP + gl.minimum(member, GROUP - 1)) * _D, 1)
    key_row = token + (NUM_KV_HEADS * GROUP + head) * _D
    own, own_key = gl.load(rows + gl.expand_dims(dim, 0)), gl.load(key_row + dim)
    value = gl.load(key_row + NUM_KV_HEADS * _D + wide)
    other, other_key = own, own_key
    if ROTARY_DIM > 0:
        partner = _partner_of(dim, ROTARY_DIM)
        other, other_key = gl.load(rows + gl.expand_dims(partner, 0)), gl.load(key_row + partner)
    return own, other, own_key, other_key, value


@gluon.jit
def _one_token(
    place, numbers, keys, values, is_owner, norms, x_smem, stride_block, scale, MMA: gl.constexpr, EPS: gl.constexpr,
    UNIT_OFFSET: gl.constexpr, BLOCK_SIZE: gl.constexpr, ROTARY_DIM: gl.constexpr, M: gl.constexpr, W: gl.constexpr,
    HEADS: gl.constexpr,
):  # fmt: skip
    """Query heads and the new token of a row with one; place, numbers: of `_slot_and_angles` and `_numbers_of_token`; keys, values: the kv
    head's.

    Returns the queries as the products' right side, and maximum, sum and weighted values of the new token: the first warp's of the owner,
    else of nothing."""
    COLUMNS: gl.constexpr = gl.SliceLayout(0, MMA)
    TOP: gl.constexpr = gl.SliceLayout(1, MMA)
    dtype: gl.constexpr = x_smem.dtype
    dim = gl.arange(0, _D, gl.SliceLayout(0, HEADS))
    wide = gl.arange(0, _D, gl.SliceLayout(1, COLUMNS))
    slot, cos, sin = place
    own, other, own_key, other_key, value = numbers
    at = (slot // BLOCK_SIZE) * stride_block + (slot % BLOCK_SIZE) * _D
    x, key = own.to(gl.float32), own_key.to(gl.float32)
    other, other_key = other.to(gl.float32), other_key.to(gl.float32)
    if EPS is not None:
        q_own, k_own, q_other, k_other = norms
        rstd = gl.expand_dims(1.0 / gl.sqrt(gl.sum(x * x, 1) / _D + EPS), 1)
        key_rstd = 1.0 / gl.sqrt(gl.sum(key * key, 0) / _D + EPS)
        x = _normed(x, gl.expand_dims(q_own, 0), rstd, UNIT_OFFSET, dtype)
        key = _normed(key, k_own, key_rstd, UNIT_OFFSET, dtype)
        if ROTARY_DIM > 0:
            other = _normed(other, gl.expand_dims(q_other, 0), rstd, UNIT_OFFSET, dtype)
            other_key = _normed(other_key, k_other, key_rstd, UNIT_OFFSET, dtype)
    if ROTARY_DIM > 0:
        x = x * gl.expand_dims(cos, 0) + other * gl.expand_dims(sin, 0)
        key = key * cos + other_key * sin
    query, new_key = x.to(dtype), key.to(dtype)
    x_smem.store(query)
    if is_owner & (slot >= 0):
        gl.store(keys + at + dim, new_key)
        gl.store(values + at + wide, value)
    products = gl.sum(query.to(gl.float32) * gl.expand_dims(new_key.to(gl.float32), 0), 1) * (scale * _LOG2E)
    logit = gl.expand_dims(gl.convert_layout(products, gl.SliceLayout(0, TOP)), 0)
    is_mine = gl.expand_dims(is_owner & (gl.arange(0, W, gl.SliceLayout(1, TOP)) == 0), 1)
    top = gl.where(is_mine, logit, _NOTHING)
    total = gl.where(is_mine & (logit == logit), 1.0, 0.0)
    sums = gl.expand_dims(total, 1) * gl.expand_dims(gl.expand_dims(value.to(gl.float32), 1), 0)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    tile = gl.expand_dims(x_smem.permute([1, 0]).load(gl.SliceLayout(0, RIGHT)), 0)
    tile, _ = gl.broadcast(tile, gl.zeros([W, _D, M], dtype, RIGHT))
    return tile, top, total, sums


@gluon.jit
def _some_tokens(
    query, keys, values, first_token, query_len, head, is_owner, slot_mapping, cos, sin, norms, x_smem, stride_query,
    stride_block, scale, MMA: gl.constexpr, EPS: gl.constexpr, UNIT_OFFSET: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    ROTARY_DIM: gl.constexpr, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, M: gl.constexpr, W: gl.constexpr,
    HEADS: gl.constexpr,
):  # fmt: skip
    """The same of a row with several tokens, whose queries and new keys are rows of one tile [2 M, D]: query head g of token t is row
    t GROUP + g, token t's key row M + t. What lies behind the row's last token computes with it, and is not seen or stored."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    OWN: gl.constexpr = 16 - M  # where the keys begin in 16 rows that a product can begin with
    dtype: gl.constexpr = x_smem.dtype
    member = gl.arange(0, 2 * M, gl.SliceLayout(1, HEADS))
    dim = gl.arange(0, _D, gl.SliceLayout(0, HEADS))
    partner = _partner_of(dim, ROTARY_DIM)
    is_query = member < M
    last_token = query_len - 1
    token = first_token + gl.minimum(gl.where(is_query, member // GROUP, member - M), last_token)
    at_head = gl.where(is_query, head * GROUP + member % GROUP, NUM_KV_HEADS * GROUP + head)
    rows = gl.expand_dims(query + token.to(gl.int64) * stride_query + at_head * _D, 1)
    number = gl.arange(0, 16, gl.SliceLayout(1, HEADS))
    is_new = (number >= OWN) & (number - OWN < query_len)
    new_token = first_token + gl.maximum(number - OWN, 0)
    value_head = (NUM_KV_HEADS * (GROUP + 1) + head) * _D
    new_rows = gl.expand_dims(query + new_token.to(gl.int64) * stride_query + value_head, 1)
    x = gl.load(rows + gl.expand_dims(dim, 0)).to(gl.float32)
    new_value = gl.load(new_rows + gl.expand_dims(dim, 0), mask=gl.expand_dims(is_new, 1), other=0.0)
    slot, value_slot = gl.load(slot_mapping + token), gl.load(slot_mapping + new_token, mask=is_new, other=-1)
    other = x
    if ROTARY_DIM > 0:
        other = gl.load(rows + gl.expand_dims(partner, 0)).to(gl.float32)
    if EPS is not None:
        q_own, k_own, q_other, k_other = norms
        which = gl.expand_dims(is_query, 1)
        rstd = gl.expand_dims(1.0 / gl.sqrt(gl.sum(x * x, 1) / _D + EPS), 1)
        weight = gl.where(which, gl.expand_dims(q_own, 0), gl.expand_dims(k_own, 0))
        x = _normed(x, weight, rstd, UNIT_OFFSET, dtype)
        if ROTARY_DIM > 0:
            weight = gl.where(which, gl.expand_dims(q_other, 0), gl.expand_dims(k_other, 0))
            other = _normed(other, weight, rstd, UNIT_OFFSET, dtype)
    if ROTARY_DIM > 0:
        x = x * cos + other * sin
    made = x.to(dtype)
    x_smem.store(made)
    is_kept = is_owner & (member >= M) & (member - M < query_len) & (slot >= 0)
    at = gl.expand_dims((slot // BLOCK_SIZE) * stride_block + (slot % BLOCK_SIZE) * _D, 1) + gl.expand_dims(dim, 0)
    gl.store(keys + at, made, mask=gl.expand_dims(is_kept, 1))
    at = gl.expand_dims((value_slot // BLOCK_SIZE) * stride_block + (value_slot % BLOCK_SIZE) * _D, 1) + gl.expand_dims(
        dim, 0
    )
    gl.store(values + at, new_value, mask=gl.expand_dims(is_owner & is_new & (value_slot >= 0), 1))
    tile = gl.expand_dims(x_smem.slice(0, M, 0).permute([1, 0]).load(gl.SliceLayout(0, RIGHT)), 0)
    tile, _ = gl.broadcast(tile, gl.zeros([W, _D, M], dtype, RIGHT))
    left = gl.expand_dims(x_smem.slice(M - OWN, 16, 0).load(gl.SliceLayout(0, LEFT)), 0)
    left, _ = gl.broadcast(left, gl.zeros([W, 16, _D], dtype, LEFT))
    logits = mma_v2(left, tile, gl.zeros([W, 16, M], gl.float32, MMA)) * (scale * _LOG2E)
    warp = gl.expand_dims(gl.expand_dims(gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, MMA))), 1), 2)
    own = gl.expand_dims(gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, MMA))) - OWN, 0), 2)
    column = gl.expand_dims(gl.expand_dims(gl.arange(0, M, gl.SliceLayout(0, gl.SliceLayout(1, MMA))), 0), 1)
    is_seen = is_owner & (warp == 0) & (own >= 0) & (own <= gl.minimum(column // GROUP, last_token))
    logits = gl.where(is_seen, logits, float("-inf"))
    top = gl.maximum(gl.max(logits, 1), _NOTHING)
    weights = gl.exp2(logits - gl.expand_dims(top, 1))
    total = gl.sum(weights, 1)
    x_smem.slice(M - OWN, 16, 0).store(new_value)  # its keys have been read
    left = gl.expand_dims(x_smem.slice(M - OWN, 16, 0).permute([1, 0]).load(gl.SliceLayout(0, LEFT)), 0)
    left, _ = gl.broadcast(left, gl.zeros([W, _D, 16], dtype, LEFT))
    sums = mma_v2(left, gl.convert_layout(weights.to(dtype), RIGHT), gl.zeros([W, _D, M], gl.float32, MMA))
    return tile, top, total, sums


@gluon.jit
def _add_warps(top, total, sums, memory, LAYOUT: gl.constexpr):
    """Maximum, sum and weighted values of all warps: [W, M] and [W, D, M] -> [M] and [M, D]. memory: [W, M, D], None of one warp."""
    best = gl.max(top, 0)
    shrink = gl.exp2(top - gl.expand_dims(best, 0))
    total = gl.sum(total * shrink, 0)
    sums = sums * gl.expand_dims(shrink, 1)
    if memory is None:
        found = gl.permute(gl.sum(sums, 0), (1, 0))
    else:
        gl.thread_barrier()  # what lay there has been read
        memory.permute([0, 2, 1]).store(sums)
        found = gl.sum(memory.load(LAYOUT.parent), 0)
    OF_HEAD: gl.constexpr = gl.SliceLayout(1, found.type.layout)
    return gl.convert_layout(best, OF_HEAD), gl.convert_layout(total, OF_HEAD), found


@gluon.jit
def _store_output(output, stride_output, num_members, total, sums, GROUP: gl.constexpr):
    """output: the row's first head of this kv head."""
    member = gl.expand_dims(gl.arange(0, sums.shape[0], gl.SliceLayout(1, sums.type.layout)), 1)
    dim = gl.expand_dims(gl.arange(0, _D, gl.SliceLayout(0, sums.type.layout)), 0)
    at = (member // GROUP).to(gl.int64) * stride_output + member % GROUP * _D + dim
    result = (sums / gl.expand_dims(total, 1)).to(output.dtype.element_ty)
    gl.store(output + at, result, mask=(member < num_members) & (dim >= 0), eviction_policy="evict_last")


@gluon.jit
def _store_part(top, total, sums, slot, part_sums, part_stats):
    """Leave a part in its place, before whatever this program releases next."""
    M: gl.constexpr = sums.shape[0]
    number = slot.to(gl.int64)
    member = gl.arange(0, M, gl.SliceLayout(1, sums.type.layout))
    dim = gl.arange(0, _D, gl.SliceLayout(0, sums.type.layout))
    gl.store(part_stats + number * (2 * M) + member, top)
    gl.store(part_stats + number * (2 * M) + M + member, total)
    gl.store(part_sums + number * (M * _D) + gl.expand_dims(member * _D, 1) + gl.expand_dims(dim, 0), sums)
    gl.thread_barrier()  # all threads' parts before the one thread's release


@gluon.jit
def _place_of(number, first_place):
    """Where part `number` of a row lies: place 2 p + 1 of its first program p, then 2 (p + 1), 2 (p + 2), .. of those after it. So a
    program has two places: for a row that others have begun, and for one that others go on with."""
    return first_place + 2 * number + gl.where(number == 0, 1, 0)


@gluon.jit
def _merge(
    output, stride_output, num_members, index, num_parts, first_place, part_sums, part_stats, arrivals, M: gl.constexpr,
    GROUP: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Bring a row's parts together, this program's among them: FAN neighbours by the one that comes last, FAN of these again, until one
    is left, which is the output."""
    member = gl.arange(0, M, gl.SliceLayout(1, LAYOUT))
    dim = gl.arange(0, _D, gl.SliceLayout(0, LAYOUT))
    inside = gl.expand_dims(member * _D, 1) + gl.expand_dims(dim, 0)
    level, step = gl.to_tensor(0), gl.to_tensor(1)
    is_last = num_parts > 1
    while is_last:
        first = index // _FAN * _FAN
        slot = _place_of(first * step, first_place)
        is_root = num_parts <= _FAN
        size = gl.minimum(num_parts - first, _FAN)
        counter = arrivals + slot * _LEVELS + level
        is_last = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == size - 1
        if is_last:
            gl.thread_barrier()
            top = gl.full([M], _NOTHING, gl.float32, gl.SliceLayout(1, LAYOUT))
            total = gl.zeros([M], gl.float32, gl.SliceLayout(1, LAYOUT))
            sums = gl.zeros([M, _D], gl.float32, LAYOUT)
            for start in range(0, size, 4):
                tops, totals, rows = (), (), ()
                new_top = top
                for i in gl.static_range(4):
                    part = _place_of((first + start + i) * step, first_place).to(gl.int64)
                    is_part = (member >= 0) & (start + i < size)
                    stats = part_stats + part * (2 * M) + member
                    found = gl.load(stats, mask=is_part, other=_NOTHING, cache_modifier=".cg")
                    new_top = gl.maximum(new_top, found)
                    tops += (found,)
                    totals += (gl.load(stats + M, mask=is_part, other=0.0, cache_modifier=".cg"),)
                    at = part_sums + part * (M * _D) + inside
                    is_number = gl.expand_dims(is_part, 1) & (inside >= 0)
                    rows += (gl.load(at, mask=is_number, other=0.0, cache_modifier=".cg"),)
                shrink = gl.exp2(top - new_top)
                total, sums = total * shrink, sums * gl.expand_dims(shrink, 1)
                for i in gl.static_range(4):
                    weight = gl.exp2(tops[i] - new_top)
                    total += totals[i] * weight
                    sums += rows[i] * gl.expand_dims(weight, 1)
                top = new_top
            gl.store(counter, 0)  # for the next launch
            if is_root:
                _store_output(output, stride_output, num_members, total, sums, GROUP)
            else:
                gl.thread_barrier()  # it goes where part `first` was read
                _store_part(top, total, sums, slot, part_sums, part_stats)
        is_last = is_last & (num_parts > _FAN)
        index, num_parts = first // _FAN, (num_parts + _FAN - 1) // _FAN
        step *= _FAN
        level += 1


@gluon.jit
def resident_decode_kernel(
    query, positions, slot_mapping, k_cache, v_cache, output, query_start_loc, seq_lens, block_table, shares, cos_sin, q_norm, k_norm,
    part_sums, part_stats, arrivals, stride_query, stride_output, stride_table, stride_block, stride_head, scale, EPS: gl.constexpr,
    UNIT_OFFSET: gl.constexpr, BLOCK_SIZE: gl.constexpr, ROTARY_DIM: gl.constexpr, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr,
    TOKENS: gl.constexpr, M: gl.constexpr, W: gl.constexpr, J: gl.constexpr, BUFFERS: gl.constexpr, IS_EARLY: gl.constexpr,
    IS_AHEAD: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Arguments: see `ResidentDecode`. A program is a kv head and a share of all rows' chunks, which `deal_resident` has written.

    IS_EARLY: shares, lengths, table, positions and slots are there before the wait (see `runtime`), and keys and values are of earlier
    steps, so that the first copies are under way by then. IS_AHEAD: programs have several rows with one token, and read what a row's
    start needs while the row before is attended to.
    """
    C: gl.constexpr = 16 * J * W
    KEYS: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 2, 16], [W, 1, 1], [2, 1, 0])
    OF_WARP: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, KEYS))
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    HEADS: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [W, 1], [1, 0])
    FOUND: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([W, 1, 4], [1, 1, 32], [1, W, 1], [2, 1, 0]))  # [M, D]
    dtype: gl.constexpr = query.dtype.element_ty
    head, program = gl.program_id(0), gl.program_id(1)
    if PDL:
        gdc_launch_dependents()
        if not IS_EARLY:
            gdc_wait()
    k_smem = gl.allocate_shared_memory(dtype, [BUFFERS * J, W, 16, _D], SHARED)
    v_smem = gl.allocate_shared_memory(dtype, [BUFFERS * J, W, 16, _D], SHARED)
    X_ROWS: gl.constexpr = M if TOKENS == 1 else 2 * M
    X_LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    memory = None
    if W > 1:  # the warps' sums, at a row's end, lie where its queries do at its beginning
        memory = gl.allocate_shared_memory(gl.float32, [W, M, _D], gl.SwizzledSharedLayout(4, 1, 8, [2, 1, 0]))
        x_smem = memory._reinterpret(dtype, [W * M * (32 // dtype.primitive_bitwidth), _D], X_LAYOUT).slice(
            0, X_ROWS, 0
        )
    else:
        x_smem = gl.allocate_shared_memory(dtype, [X_ROWS, _D], X_LAYOUT)
    share = shares + program * _SHARE
    # All of it at once: the first blocks wait for no length.
    warp = gl.arange(0, W, OF_WARP)
    blocks = ()
    for j in gl.static_range(J):
        blocks += (gl.load(share + 16 + j * W + warp),)
    first_row, first_chunk = gl.load(share), gl.load(share + 1)
    last_row, end_chunk = gl.load(share + 2), gl.load(share + 3)
    last_key = gl.load(share + 8)
    if last_row < first_row:  # nothing to do
        if (
            PDL and program == 0
        ):  # one waits all the same: whoever waits for this launch may rely on those before it too
            gdc_wait()
        return
    keys, values = k_cache + head * stride_head, v_cache + head * stride_head
    local = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, KEYS)))
    number = gl.arange(0, _D, gl.SliceLayout(0, gl.SliceLayout(1, KEYS)))
    inside = gl.expand_dims(gl.expand_dims(warp * 0, 1) + gl.expand_dims(local * _D, 0), 2)
    inside = inside + gl.expand_dims(gl.expand_dims(number, 0), 1)
    k_rows, v_rows = keys + inside, values + inside
    # Copies run BUFFERS chunks ahead, over the rows' ends.
    copy_row, copied, copy_keys = first_row, first_chunk, last_key
    copy_end = gl.maximum(last_key + C - 1, 0) // C
    if last_row == first_row:
        copy_end = gl.minimum(copy_end, end_chunk)
    next_keys = _keys_of(gl.minimum(first_row + 1, last_row), query_start_loc, seq_lens, TOKENS)
    if copied >= copy_end:
        copy_row, copied, copy_keys, copy_end, next_keys, blocks = _next_blocks(
            copy_row, copied, copy_keys, copy_end, next_keys, last_row, end_chunk, block_table, query_start_loc, seq_lens, stride_table,
            TOKENS, J, C, OF_WARP,
        )  # fmt: skip
    for s in range(BUFFERS):
        if copied < copy_end:
            _issue(k_rows, v_rows, k_smem, v_smem, s, blocks, copy_keys - copied * C, stride_block, J)
            copy_row, copied, copy_keys, copy_end, next_keys, blocks = _next_blocks(
                copy_row, copied + 1, copy_keys, copy_end, next_keys, last_row, end_chunk, block_table, query_start_loc, seq_lens,
                stride_table, TOKENS, J, C, OF_WARP,
            )  # fmt: skip
        async_copy.commit_group()
    dim = gl.arange(0, _D, gl.SliceLayout(0, HEADS))
    partner = _partner_of(dim, ROTARY_DIM)
    norms = 0
    if EPS is not None:
        norms = gl.load(q_norm + dim), gl.load(k_norm + dim), gl.load(q_norm + partner), gl.load(k_norm + partner)
    within = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, MMA)))
    of_warp = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, MMA)))
    place_of = gl.expand_dims(gl.expand_dims(of_warp * 16, 1) + gl.expand_dims(within, 0), 2)
    buffer = gl.to_tensor(0)
    place, numbers, next_position = 0, 0, first_row.to(gl.int64)
    if IS_AHEAD:
        if ROTARY_DIM > 0:
            next_position = gl.load(positions + first_row)
        place = _slot_and_angles(slot_mapping, cos_sin, first_row, next_position, ROTARY_DIM, HEADS)
        if ROTARY_DIM > 0:
            next_position = gl.load(positions + gl.minimum(first_row + 1, last_row))
        if PDL:
            gdc_wait()
        numbers = _numbers_of_token(
            query, first_row, stride_query, head, ROTARY_DIM, NUM_KV_HEADS, GROUP, M, MMA, HEADS
        )
    for row in range(first_row, last_row + 1):
        begin = gl.where(row == first_row, first_chunk, 0)
        end = gl.maximum(last_key + C - 1, 0) // C
        if row == last_row:
            end = gl.minimum(end, end_chunk)
        first_token, query_len = row, gl.to_tensor(1)
        cos, sin = 0, 0
        if TOKENS > 1:
            first_token = gl.load(query_start_loc + row)
            query_len = gl.load(query_start_loc + row + 1) - first_token
            if ROTARY_DIM > 0:
                of_row = gl.arange(0, 2 * M, gl.SliceLayout(1, HEADS))
                of_row = gl.minimum(gl.where(of_row < M, of_row // GROUP, of_row - M), gl.maximum(query_len - 1, 0))
                position = gl.expand_dims(gl.load(positions + first_token + of_row), 1)
                cos, sin = _angles(cos_sin, position, gl.expand_dims(dim, 0), ROTARY_DIM)
        elif not IS_AHEAD:
            position = first_row.to(gl.int64)
            if ROTARY_DIM > 0:
                position = gl.load(positions + row)
            place_now = _slot_and_angles(slot_mapping, cos_sin, row, position, ROTARY_DIM, HEADS)
        next_key = last_key
        if IS_AHEAD:
            place_now, numbers_now = place, numbers
            if row < last_row:  # what the next row's start reads comes while this one's keys do
                place = _slot_and_angles(slot_mapping, cos_sin, row + 1, next_position, ROTARY_DIM, HEADS)
                numbers = _numbers_of_token(
                    query, row + 1, stride_query, head, ROTARY_DIM, NUM_KV_HEADS, GROUP, M, MMA, HEADS
                )
                next_key = _keys_of(row + 1, query_start_loc, seq_lens, TOKENS)
                if ROTARY_DIM > 0:
                    next_position = gl.load(positions + gl.minimum(row + 2, last_row))
        else:
            if PDL:
                gdc_wait()
            if TOKENS == 1:
                numbers_now = _numbers_of_token(
                    query, row, stride_query, head, ROTARY_DIM, NUM_KV_HEADS, GROUP, M, MMA, HEADS
                )
        if last_key >= 0:
            is_owner = begin == 0
            if TOKENS == 1:
                tile, top, total, sums = _one_token(
                    place_now, numbers_now, keys, values, is_owner, norms, x_smem, stride_block, scale, MMA, EPS, UNIT_OFFSET, BLOCK_SIZE,
                    ROTARY_DIM, M, W, HEADS,
                )  # fmt: skip
            else:
                tile, top, total, sums = _some_tokens(
                    query, keys, values, first_token, query_len, head, is_owner, slot_mapping, cos, sin, norms, x_smem, stride_query,
                    stride_block, scale, MMA, EPS, UNIT_OFFSET, BLOCK_SIZE, ROTARY_DIM, NUM_KV_HEADS, GROUP, M, W, HEADS,
                )  # fmt: skip
            for i in range(begin, end):
                async_copy.wait_group(BUFFERS - 1)
                gl.thread_barrier()
                found = ()
                new_top = top
                for j in gl.static_range(J):
                    products = mma_v2(
                        k_smem.index(buffer * J + j).load(LEFT), tile, gl.zeros([W, 16, M], gl.float32, MMA)
                    )
                    is_key = i * C + j * (16 * W) + place_of < last_key
                    products = gl.where(is_key, products * (scale * _LOG2E), float("-inf"))
                    new_top = gl.maximum(new_top, gl.max(products, 1))
                    found += (products,)
                shrink = gl.exp2(top - new_top)
                total = total * shrink
                sums = sums * gl.expand_dims(shrink, 1)
                for j in gl.static_range(J):
                    weights = gl.exp2(found[j] - gl.expand_dims(new_top, 1))
                    total = total + gl.sum(weights, 1)
                    value = v_smem.index(buffer * J + j).permute([0, 2, 1]).load(LEFT)
                    sums = mma_v2(value, gl.convert_layout(weights.to(dtype), RIGHT), sums)
                top = new_top
                gl.thread_barrier()
                if copied < copy_end:
                    _issue(k_rows, v_rows, k_smem, v_smem, buffer, blocks, copy_keys - copied * C, stride_block, J)
                    copy_row, copied, copy_keys, copy_end, next_keys, blocks = _next_blocks(
                        copy_row, copied + 1, copy_keys, copy_end, next_keys, last_row, end_chunk, block_table, query_start_loc, seq_lens,
                        stride_table, TOKENS, J, C, OF_WARP,
                    )  # fmt: skip
                async_copy.commit_group()
                buffer = gl.where(buffer == BUFFERS - 1, 0, buffer + 1)
            of_ends = gl.where(row == first_row, 4, 6)
            first_program, num_parts = gl.load(share + of_ends), gl.load(share + of_ends + 1)
            if (row != first_row) & (row != last_row):
                num_parts = 1
            to = output + first_token.to(gl.int64) * stride_output + head * (GROUP * _D)
            best, all_total, all_sums = _add_warps(top, total, sums, memory, FOUND)
            if num_parts == 1:
                _store_output(to, stride_output, query_len * GROUP, all_total, all_sums, GROUP)
            else:
                first_place = head * (2 * gl.num_programs(1)) + 2 * first_program
                index = program - first_program
                _store_part(best, all_total, all_sums, _place_of(index, first_place), part_sums, part_stats)
                _merge(
                    to, stride_output, query_len * GROUP, index, num_parts, first_place, part_sums, part_stats, arrivals, M, GROUP, FOUND,
                )  # fmt: skip
        if row < last_row:
            gl.thread_barrier()  # the warps' sums have been read
            if IS_AHEAD:
                last_key = next_key
            else:
                last_key = _keys_of(row + 1, query_start_loc, seq_lens, TOKENS)
