"""Attention of rows with a few query tokens, a known one and its drafts, over the paged cache: one launch, whatever the lengths.

The query heads of one kv head, for all tokens of a row, are the columns of one tile: keys and values are read once for all of
them, so drafts cost what their products and the step's other rows cost. As in `decode.py`, norm, rotation and the cache's new
entries are made here, keys are shared out to programs by the rows' lengths, and those whose parts arrive last merge them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from pelton_backends.triton.attention.decode import NewTokens, NormRope
from pelton_backends.triton.attention.decode_pieces import (
    LEVELS,
    NOTHING,
    blocks_of,
    finish,
    load_chunk,
    norm_rope,
    partner_of,
    scaled_logits,
)
from pelton_backends.triton.attention.decode_shares import (
    FEW_PAIRS,
    PROGRAMS_PER_SM,
    SHARE,
    LaunchShape,
    chunk_behind_new,
    padded,
    share_at,
    share_of_row,
)
from pelton_backends.triton.launch import Launcher, alignment
from pelton_backends.triton.ops.pieces import to_cache
from pelton_backends.triton.runtime import dot, launch_options, let_next_start, num_sms, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

_KEYS = 32  # of a chunk
_LEAST = 2  # chunks of a split
_NUMBERS_MERGED = 2048  # of parts, that a warp holds at a time


@triton.jit
def angles_of(cos_sin, position, dim, ROTARY_DIM: tl.constexpr):
    """Cosine and signed sine of each of a head's numbers at positions [R]: [R, D]."""
    HALF: tl.constexpr = ROTARY_DIM // 2
    row = cos_sin + (position * ROTARY_DIM)[:, None] + tl.where(dim < HALF, dim, dim - HALF)[None, :]
    is_rotated = (dim < ROTARY_DIM)[None, :]
    cos = tl.load(row, mask=is_rotated, other=1.0)
    sin = tl.load(row + HALF, mask=is_rotated, other=0.0)
    return cos, tl.where((dim < HALF)[None, :], -sin, sin)


@triton.jit
def load_rows(
    heads,  # [R] pointers
    is_loaded,
    FUSED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
):
    """Heads [R, D] and, fused, the same with partners."""
    dim = tl.arange(0, PADDED_DIM)
    mask = (dim < HEAD_DIM)[None, :] & is_loaded
    x = tl.load(heads[:, None] + dim[None, :], mask=mask, other=0.0)
    other = x
    if FUSED and ROTARY_DIM > 0:
        other = tl.load(heads[:, None] + partner_of(dim, ROTARY_DIM)[None, :], mask=mask, other=0.0)
    return x, other


@triton.jit
def load_weights(weight, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr):
    """A norm's weights [1, D], and the same with partners. May be read before `wait_for_inputs`."""
    dim = tl.arange(0, PADDED_DIM)
    own = tl.load(weight + dim, mask=dim < HEAD_DIM, other=0.0)[None, :]
    partners = tl.load(weight + partner_of(dim, ROTARY_DIM), mask=dim < HEAD_DIM, other=0.0)[None, :]
    return own, partners


@triton.jit
def one_chunk(
    tile,
    top,
    total,
    sums,
    key,
    value,
    place,  # [N] of the keys
    position,  # [M]
    is_key,  # [N]
    scale,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):
    """The running softmax takes N keys: of each column those up to its position, within its window."""
    products = dot(key.to(tile.dtype), tile, tl.zeros([key.shape[0], tile.shape[1]], tl.float32))
    logits = scaled_logits(products, place[:, None], None, scale, SOFT_CAP)
    is_seen = is_key[:, None] & (place[:, None] <= position[None, :])
    if WINDOW > 0:
        is_seen = is_seen & (position[None, :] - place[:, None] < WINDOW)
    logits = tl.where(is_seen, logits, float("-inf"))
    new_top = tl.maximum(top, tl.max(logits, 0))
    weights = tl.exp2(logits - new_top[None, :])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(weights, 0)
    sums = dot(value.to(tile.dtype), weights.to(tile.dtype), sums * shrink[None, :])
    return new_top, total, sums


@triton.jit
def drafts_kernel(
    query,
    positions,
    slot_mapping,
    k_cache,
    v_cache,
    output,
    query_start_loc,
    seq_lens,
    block_table,
    shares,
    cos_sin,
    q_norm,
    k_norm,
    part_sums,
    part_stats,
    arrivals,
    stride_query,
    stride_output,
    stride_table,
    stride_block,
    stride_token,
    stride_head,
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
    TOKENS: tl.constexpr,
    NEW: tl.constexpr,
    M: tl.constexpr,
    MEMBERS: tl.constexpr,
    N: tl.constexpr,
    SPLITS: tl.constexpr,
    LEAST: tl.constexpr,
    PARTS: tl.constexpr,
    IS_EARLY: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend with s splits of a row, each of which takes every s-th chunk. M columns, of which TOKENS * GROUP are used: token t's
    head g is column t * GROUP + g. Arguments: see `drafts_attention`; programs, shares and IS_EARLY: see `decode_kernel`.

    Fused, the row's first split writes its tokens' keys and values to the cache, and takes them itself from where they are made: they
    are dealt out to it as a chunk, before the others.
    """
    SPAN: tl.constexpr = WINDOW + TOKENS - 1 if WINDOW > 0 else 0  # keys that some token of the row may see
    head, program = tl.program_id(0), tl.program_id(1)
    let_next_start(PDL)
    if not IS_EARLY:
        wait_for_inputs(PDL)
    local, dim, member = tl.arange(0, N), tl.arange(0, PADDED_DIM), tl.arange(0, M)
    if shares is not None:
        row, seq_len, first_split, num_splits = share_at(shares, program)
        split = program - first_split
        block = tl.load(shares + program * SHARE + 4 + local // 16, cache_modifier=".cg")
    else:
        row, split, first_split = program, tl.program_id(2), 0
        seq_len = tl.load(seq_lens + row, cache_modifier=".cg")
        num_splits = share_of_row(seq_len, False, SPAN, N, SPLITS, LEAST)
    first_token = tl.load(query_start_loc + row, cache_modifier=".cg")
    query_len = tl.load(query_start_loc + row + 1, cache_modifier=".cg") - first_token
    is_idle = (split >= num_splits) | (query_len <= 0)
    if IS_EARLY:  # one waits all the same: whoever waits for this launch may rely on those before it too
        if is_idle & (program + tl.program_id(2) > 0):
            return
    elif is_idle:
        return

    first_key, last_key, first_chunk = 0, seq_len, 0
    if FUSED:
        last_key = seq_len - query_len
    if WINDOW > 0:
        first_key = tl.maximum(seq_len - query_len + 1 - WINDOW, 0)
        first_chunk = tl.maximum(seq_len - SPAN, 0) // N
    last_chunk = (last_key + N - 1) // N
    table = block_table + row.to(tl.int64) * stride_table
    keys, values = k_cache + head * stride_head, v_cache + head * stride_head
    chunk = first_chunk + chunk_behind_new(split, num_splits)
    place = chunk * N + local
    if shares is None:
        block = blocks_of(table, place, stride_table, BLOCK_SIZE)
    q_own, q_partners, k_own, k_partners = q_norm, q_norm, k_norm, k_norm
    if q_norm is not None:
        q_own, q_partners = load_weights(q_norm, HEAD_DIM, PADDED_DIM, ROTARY_DIM)
        k_own, k_partners = load_weights(k_norm, HEAD_DIM, PADDED_DIM, ROTARY_DIM)
    # What lies behind the row's last token, or the last used column, computes with it, and is not stored.
    last_token = tl.maximum(query_len - 1, 0)
    token = tl.minimum(member // GROUP, last_token)
    position = seq_len - query_len + token
    rows = first_token + token.to(tl.int64)
    cos, sin, new_cos, new_sin = q_norm, q_norm, q_norm, q_norm
    if FUSED:
        AGAIN: tl.constexpr = (
            16 // NEW if NEW < 16 else 1
        )  # a tensor core's tile has 16 keys: they are there over and over
        own, again = tl.arange(0, NEW), tl.arange(0, AGAIN * NEW)
        own_rows = first_token + tl.minimum(own, last_token).to(tl.int64)
        new_rows = first_token + tl.minimum(again, last_token).to(tl.int64)
        is_busy = is_idle == 0
        key_slot = tl.load(slot_mapping + own_rows, mask=is_busy & (own_rows >= 0), other=-1, cache_modifier=".cg")
        value_slot = tl.load(slot_mapping + new_rows, mask=is_busy & (new_rows >= 0), other=-1, cache_modifier=".cg")
        if ROTARY_DIM > 0:
            row_position = tl.load(positions + rows, mask=is_busy & (rows >= 0), other=0, cache_modifier=".cg")
            cos, sin = angles_of(cos_sin, row_position, dim, ROTARY_DIM)
            new_position = tl.load(positions + own_rows, mask=is_busy & (own_rows >= 0), other=0, cache_modifier=".cg")
            new_cos, new_sin = angles_of(cos_sin, new_position, dim, ROTARY_DIM)
    if IS_EARLY:
        next_block = blocks_of(table, place + num_splits * N, stride_table, BLOCK_SIZE)
        is_key = (place >= first_key) & (place < last_key)
        key, value = load_chunk(
            keys, values, block, place, is_key, stride_block, stride_token, BLOCK_SIZE, HEAD_DIM, PADDED_DIM
        )
        wait_for_inputs(PDL)
        if is_idle:
            return
    x, other = load_rows(
        query + rows * stride_query + (head * GROUP + member % GROUP) * HEAD_DIM, True, FUSED, HEAD_DIM, PADDED_DIM,
        ROTARY_DIM,
    )  # fmt: skip
    top = tl.full([M], NOTHING, tl.float32)
    total = tl.zeros([M], tl.float32)
    sums = tl.zeros([PADDED_DIM, M], tl.float32)
    if FUSED:
        is_new = (again < query_len) & (split == 0)
        is_number = is_new[None, :] & (dim < HEAD_DIM)[:, None]
        new_heads = query + (NUM_KV_HEADS * GROUP + head) * HEAD_DIM
        new_key, new_other = load_rows(
            new_heads + own_rows * stride_query, split == 0, FUSED, HEAD_DIM, PADDED_DIM, ROTARY_DIM
        )
        new_values = new_heads + NUM_KV_HEADS * HEAD_DIM + new_rows * stride_query
        new_value = tl.load(new_values[None, :] + dim[:, None], mask=is_number, other=0.0)
        x = norm_rope(x, other, cos, sin, q_own, q_partners, EPS, UNIT_OFFSET, HEAD_DIM, ROTARY_DIM)
    tile = tl.trans(x)
    if FUSED:  # noqa: SIM102 a constant condition leaves the other out
        if split == 0:
            made_key = norm_rope(
                new_key, new_other, new_cos, new_sin, k_own, k_partners, EPS, UNIT_OFFSET, HEAD_DIM, ROTARY_DIM
            )
            made_key = to_cache(made_key, k_cache.dtype.element_ty)
            made_value = to_cache(new_value, v_cache.dtype.element_ty)
            key_place = (key_slot // BLOCK_SIZE) * stride_block + (key_slot % BLOCK_SIZE) * stride_token
            value_place = (value_slot // BLOCK_SIZE) * stride_block + (value_slot % BLOCK_SIZE) * stride_token
            is_kept = ((own < query_len) & (key_slot >= 0))[:, None] & (dim < HEAD_DIM)[None, :]
            tl.store(keys + key_place[:, None] + dim[None, :], made_key, mask=is_kept)
            tl.store(
                values + value_place[None, :] + dim[:, None], made_value, mask=is_number & (value_slot >= 0)[None, :]
            )
            often = tl.reshape(
                tl.broadcast_to(made_key[None, :, :], [AGAIN, NEW, PADDED_DIM]), [AGAIN * NEW, PADDED_DIM]
            )
            top, total, sums = one_chunk(
                tile, top, total, sums, often, made_value, seq_len - query_len + again, position, is_new, scale, WINDOW,
                SOFT_CAP,
            )  # fmt: skip
    if IS_EARLY:
        top, total, sums = one_chunk(
            tile, top, total, sums, key, value, place, position, is_key, scale, WINDOW, SOFT_CAP
        )
        chunk += num_splits
        block = next_block
    for i in tl.range(chunk, last_chunk, num_splits, num_stages=STAGES):
        place = i * N + local
        this_block = block
        block = blocks_of(table, place + num_splits * N, stride_table, BLOCK_SIZE)
        is_key = (place >= first_key) & (place < last_key)
        key, value = load_chunk(
            keys, values, this_block, place, is_key, stride_block, stride_token, BLOCK_SIZE, HEAD_DIM, PADDED_DIM
        )
        top, total, sums = one_chunk(
            tile, top, total, sums, key, value, place, position, is_key, scale, WINDOW, SOFT_CAP
        )

    first_part = (row * NUM_KV_HEADS + head) * SPLITS
    if shares is not None:
        first_part = head * SPLITS + first_split
    finish(
        output + first_token.to(tl.int64) * stride_output, stride_output, query_len * GROUP, top, total, sums, head, split,
        num_splits, first_part, first_part, part_sums, part_stats, arrivals, None, HEAD_DIM, PADDED_DIM, TOKENS * GROUP, GROUP,
        MEMBERS, PARTS, 1, True,
    )  # fmt: skip


_launch = Launcher(drafts_kernel)


@dataclass(slots=True)
class DraftParts:
    """Where programs leave partial results; shared by all launches of one stream. `arrivals` is zero between launches."""

    sums: Tensor  # [places, TOKENS * GROUP * HEAD_DIM] float32
    stats: Tensor  # [places, 2 * TOKENS * GROUP] float32
    arrivals: Tensor  # [places, LEVELS] int32
    shares: Tensor  # [places, SHARE] int32, of `deal_rows`

    @staticmethod
    def allocate(
        device: torch.device, *, max_rows: int, num_heads: int, num_kv_heads: int, head_dim: int, num_tokens: int
    ) -> DraftParts:
        columns = num_heads // num_kv_heads * num_tokens
        places = max(2 * max(PROGRAMS_PER_SM * num_sms(device), 2 * FEW_PAIRS), max_rows * num_kv_heads)
        return DraftParts(
            torch.empty(places, columns * head_dim, dtype=torch.float32, device=device),
            torch.empty(places, 2 * columns, dtype=torch.float32, device=device),
            torch.zeros(places, LEVELS.value, dtype=torch.int32, device=device),
            torch.zeros(places, SHARE.value, dtype=torch.int32, device=device),
        )


def drafts_shape(
    num_rows: int, num_kv_heads: int, group: int, num_tokens: int, max_seq_len: int, row_bytes: int, num_sms: int
) -> LaunchShape:
    """As `launch_shape`: few rows share all programs that run at once, more rows have as many each, a power of two.

    A program that has to wait for another's registers loads nothing early: 32 rows of 250 tokens and 3 drafts would take 1,024
    programs of 2 warps and 168 registers, of which 792 run at once.
    """
    columns = tile_columns(group, num_tokens)
    num_pairs, programs = num_rows * num_kv_heads, (6 if columns == 8 else 4 if columns == 16 else 2) * num_sms
    is_early, most = row_bytes <= 256, -(-max_seq_len // (_KEYS * _LEAST))
    if num_pairs <= FEW_PAIRS:
        most_rows = triton.next_power_of_2(num_rows)  # a kernel is compiled for each number of splits
        splits = min(max(programs // num_kv_heads, 2 * most_rows), most_rows * most)
        return LaunchShape(splits, 0, _KEYS, 2, least=_LEAST, is_early=is_early, is_dealt=num_rows > 1)
    splits = 1 << max(min(2 * PROGRAMS_PER_SM * num_sms // num_pairs, most).bit_length() - 1, 0)
    return LaunchShape(splits, 0, _KEYS, 2, least=_LEAST, is_early=is_early)


def tile_columns(group: int, num_tokens: int) -> int:
    """Query heads of a kv head and a row's tokens in the kernel's tile: a tensor core's has 8 at least."""
    return int(max(triton.next_power_of_2(group * num_tokens), 8))


def span(num_tokens: int, sliding_window: int | None) -> int | None:
    """Keys that some token of a row with drafts may see: the window that rows are dealt out with."""
    return sliding_window + num_tokens - 1 if sliding_window else None


def drafts_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    output: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    parts: DraftParts,
    shape: LaunchShape,
    *,
    num_rows: int,
    num_tokens: int,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    new: NewTokens | None = None,
    pdl: bool = False,
) -> None:
    """Attend from the last tokens of each row, at most `num_tokens` and maybe none, to the row up to each of them.

    Math, papers, shapes and strides as for `prefill_attention`; causal, without sinks and ALiBi. With `new`, query is QKV's rows
    and norm, rotation and the cache's new entries are made here, as in `decode_attention`; else keys and values of the row's own
    tokens are in the cache. Products accumulate in float32 (float32 models: no TF32), softmax is float32, its weights are rounded
    to the query's dtype. Nothing outside a row's keys is read into a sum, so other slots may hold NaN. No host synchronisation; the
    grid follows from `shape`. For a dealt one `deal_rows` has dealt the rows, `new_first`, with `span` for a window; an early one is
    for steps whose inputs are settled (`decode_attention`).
    """
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    group, padded_dim = output.shape[1] // num_kv_heads, padded(head_dim)
    columns, members = tile_columns(group, num_tokens), triton.next_power_of_2(group * num_tokens)
    num_warps = 2 if columns * padded_dim <= 2048 else 4
    made = new.norm_rope if new else NormRope(0)
    spec = made.norm_spec
    constants = {
        "EPS": spec.eps if spec else None, "UNIT_OFFSET": spec.unit_offset if spec else False, "FUSED": new is not None,
        "WINDOW": sliding_window or 0, "SOFT_CAP": soft_cap, "BLOCK_SIZE": block_size, "HEAD_DIM": head_dim,
        "PADDED_DIM": padded_dim, "ROTARY_DIM": made.rotary_dim, "NUM_KV_HEADS": num_kv_heads, "GROUP": group,
        "TOKENS": num_tokens, "NEW": triton.next_power_of_2(num_tokens), "M": columns, "MEMBERS": members, "N": shape.keys,
        "SPLITS": shape.splits, "LEAST": shape.least, "PARTS": max(2, min(16, _NUMBERS_MERGED * num_warps // (members * padded_dim))),
        "IS_EARLY": shape.is_early and new is not None, "STAGES": shape.num_stages, "PDL": pdl,
    }  # fmt: skip
    strides = (query.stride(0), output.stride(0), block_table.stride(0), *k_cache.stride()[:3])
    arguments = (
        query, new.positions if new else None, new.slot_mapping if new else None, k_cache, v_cache, output, query_start_loc,
        seq_lens, block_table, parts.shares if shape.is_dealt else None, made.cos_sin, made.q_norm, made.k_norm, parts.sums,
        parts.stats, parts.arrivals, *strides, scale,
    )  # fmt: skip
    key = (
        *constants.values(),
        *strides,
        query.dtype,
        k_cache.dtype,
        query.device,
        shape.is_dealt,
        alignment(*arguments[:16]),
    )
    grid = (num_kv_heads, shape.splits) if shape.is_dealt else (num_kv_heads, num_rows, shape.splits)
    _launch(key, grid, arguments, constants, num_warps=num_warps, **launch_options(pdl))
