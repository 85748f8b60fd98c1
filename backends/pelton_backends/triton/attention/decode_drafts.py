"""Attention of rows with a few query tokens, a known one and its drafts, over the paged cache: one launch, whatever the lengths.

The query heads of one kv head, for all tokens of a row, are the columns of one tile: keys and values are read once for all of
them, so drafts cost what their products and the step's other rows cost. Keys are shared out as in `decode.py`: each row has
as many programs, and the last one to finish a (row, kv head) merges their parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from pelton_backends.triton.attention.decode import PROGRAMS_PER_SM, chunks_of_row, padded, share_of_row
from pelton_backends.triton.attention.decode_pieces import (
    NOTHING,
    blocks_of,
    load_chunk,
    merge_parts,
    scaled_logits,
    store_part,
)
from pelton_backends.triton.launch import Launcher, alignment
from pelton_backends.triton.runtime import dot, launch_options, let_next_start, num_sms, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

_KEYS = 32  # of a chunk
_LEAST = 2  # chunks of a split
_MOST_SPLITS = 64


@triton.jit
def drafts_kernel(
    query,
    k_cache,
    v_cache,
    output,
    query_start_loc,
    seq_lens,
    block_table,
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
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    SPLITS: tl.constexpr,
    LEAST: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (kv heads, rows, SPLITS): of s splits in use, each takes every s-th chunk of the row. M columns, of which
    TOKENS * GROUP are used: token t's head g is column t * GROUP + g. Arguments: see `drafts_attention`."""
    ALL: tl.constexpr = TOKENS * GROUP
    SPAN: tl.constexpr = WINDOW + TOKENS - 1 if WINDOW > 0 else 0  # keys that some token of the row may see
    head, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    seq_len = tl.load(seq_lens + row)
    first_token = tl.load(query_start_loc + row)
    query_len = tl.load(query_start_loc + row + 1) - first_token
    num_splits = share_of_row(seq_len, False, SPAN, N, SPLITS, LEAST)
    if (split >= num_splits) | (query_len <= 0):
        return
    first_key, last_key, first_chunk, last_chunk = chunks_of_row(seq_len, False, SPAN, N)
    if WINDOW > 0:  # of a row with fewer tokens
        first_key = tl.maximum(seq_len - query_len + 1 - WINDOW, 0)
    member, dim = tl.arange(0, M), tl.arange(0, PADDED_DIM)
    # What lies behind the row's last token, or the last used column, computes with it, and is not stored.
    token = tl.minimum(member // GROUP, query_len - 1)
    rows = query + (first_token + token).to(tl.int64) * stride_query + (head * GROUP + member % GROUP) * HEAD_DIM
    x = tl.load(rows[:, None] + dim[None, :], mask=(dim < HEAD_DIM)[None, :], other=0.0)
    tile = tl.trans(x)
    position = seq_len - query_len + token
    local = tl.arange(0, N)
    table = block_table + row.to(tl.int64) * stride_table
    keys, values = k_cache + head * stride_head, v_cache + head * stride_head
    top = tl.full([M], NOTHING, tl.float32)
    total = tl.zeros([M], tl.float32)
    sums = tl.zeros([PADDED_DIM, M], tl.float32)
    block = blocks_of(table, (first_chunk + split) * N + local, stride_table, BLOCK_SIZE)
    for i in tl.range(first_chunk + split, last_chunk, num_splits, num_stages=STAGES):
        place = i * N + local
        this_block = block
        block = blocks_of(table, place + num_splits * N, stride_table, BLOCK_SIZE)
        is_read = (place >= first_key) & (place < last_key)
        key, value = load_chunk(
            keys, values, this_block, place, is_read, stride_block, stride_token, BLOCK_SIZE, HEAD_DIM, PADDED_DIM
        )
        products = dot(key.to(tile.dtype), tile, tl.zeros([N, M], tl.float32))
        logits = scaled_logits(products, place[:, None], None, scale, SOFT_CAP)
        is_seen = place[:, None] <= position[None, :]
        if WINDOW > 0:
            is_seen = is_seen & (position[None, :] - place[:, None] < WINDOW)
        logits = tl.where(is_seen, logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 0))
        weights = tl.exp2(logits - new_top[None, :])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 0)
        sums = dot(value.to(tile.dtype), weights.to(tile.dtype), sums * shrink[None, :])
        top = new_top

    first = output + first_token.to(tl.int64) * stride_output + head * (GROUP * HEAD_DIM)
    at = first + (member // GROUP).to(tl.int64) * stride_output + (member % GROUP) * HEAD_DIM
    is_stored = (member < ALL) & (member // GROUP < query_len)
    is_number = is_stored[None, :] & (dim < HEAD_DIM)[:, None]
    if num_splits == 1:
        tl.store(at[None, :] + dim[:, None], (sums / total[None, :]).to(output.dtype.element_ty), mask=is_number)
    else:
        pair = row * NUM_KV_HEADS + head
        first_part = pair * SPLITS
        store_part(top, total, sums, first_part + split, part_sums, part_stats, HEAD_DIM, ALL, False)
        if tl.atomic_add(arrivals + pair, 1, sem="acq_rel", scope="gpu") == num_splits - 1:
            tl.store(arrivals + pair, 0)  # for the next launch
            _, merged_total, merged = merge_parts(
                first_part, first_part, 1, num_splits, tl.full([M], NOTHING, tl.float32), tl.zeros([M], tl.float32),
                part_sums, part_stats, HEAD_DIM, PADDED_DIM, ALL, M, PARTS,
            )  # fmt: skip
            result = (merged / merged_total[:, None]).to(output.dtype.element_ty)
            tl.store(at[:, None] + dim[None, :], result, mask=is_stored[:, None] & (dim < HEAD_DIM)[None, :])


_launch = Launcher(drafts_kernel)


@dataclass(slots=True)
class DraftParts:
    """Where programs leave partial results; shared by all launches of one stream. `arrivals` is zero between launches."""

    sums: Tensor  # [places, TOKENS * GROUP * HEAD_DIM] float32
    stats: Tensor  # [places, 2 * TOKENS * GROUP] float32
    arrivals: Tensor  # [pairs] int32

    @staticmethod
    def allocate(
        device: torch.device, *, max_rows: int, num_heads: int, num_kv_heads: int, head_dim: int, num_tokens: int
    ) -> DraftParts:
        columns, places = num_heads // num_kv_heads * num_tokens, 2 * PROGRAMS_PER_SM * num_sms(device)
        return DraftParts(
            torch.empty(places, columns * head_dim, dtype=torch.float32, device=device),
            torch.empty(places, 2 * columns, dtype=torch.float32, device=device),
            torch.zeros(max_rows * num_kv_heads, dtype=torch.int32, device=device),
        )


def choose_splits(num_pairs: int, max_seq_len: int, num_places: int) -> int:
    """Programs of a row and kv head, a power of two: a kernel is compiled for each number. Their parts fit into the places."""
    most = min(num_places // num_pairs, _MOST_SPLITS, -(-max_seq_len // (_KEYS * _LEAST)))
    return 1 << max(most.bit_length() - 1, 0)


def drafts_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    output: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    parts: DraftParts,
    *,
    num_rows: int,
    num_tokens: int,
    max_seq_len: int,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    pdl: bool = False,
) -> None:
    """Attend from the last tokens of each row, at most `num_tokens` and maybe none, to the row up to each of them.

    Math, papers, shapes and strides as for `prefill_attention`; causal, without sinks and ALiBi. Keys and values of the row's own
    tokens are in the cache. Products accumulate in float32 (float32 models: no TF32), softmax is float32, its weights are rounded
    to the query's dtype. Nothing outside a row's keys is read into a sum, so other slots may hold NaN. No host synchronisation; the
    grid follows from `num_rows`, `max_seq_len` (an upper bound) and shapes alone.
    """
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    group, padded_dim = output.shape[1] // num_kv_heads, padded(head_dim)
    columns = max(triton.next_power_of_2(group * num_tokens), 8)
    splits = choose_splits(num_rows * num_kv_heads, max_seq_len, len(parts.sums))
    constants = {
        "WINDOW": sliding_window or 0, "SOFT_CAP": soft_cap, "BLOCK_SIZE": block_size, "HEAD_DIM": head_dim,
        "PADDED_DIM": padded_dim, "NUM_KV_HEADS": num_kv_heads, "GROUP": group, "TOKENS": num_tokens, "M": columns,
        "N": _KEYS, "SPLITS": splits, "LEAST": _LEAST, "PARTS": max(2, min(16, 4096 // (columns * padded_dim))),
        "STAGES": 2, "PDL": pdl,
    }  # fmt: skip
    strides = (query.stride(0), output.stride(0), block_table.stride(0), *k_cache.stride()[:3])
    arguments = (
        query, k_cache, v_cache, output, query_start_loc, seq_lens, block_table, parts.sums, parts.stats, parts.arrivals,
        *strides, scale,
    )  # fmt: skip
    key = *constants.values(), *strides, query.dtype, k_cache.dtype, query.device, alignment(*arguments[:10])
    num_warps = 1 if columns * padded_dim <= 2048 else 2 if columns * padded_dim <= 4096 else 4
    _launch(key, (num_kv_heads, num_rows, splits), arguments, constants, num_warps=num_warps, **launch_options(pdl))
