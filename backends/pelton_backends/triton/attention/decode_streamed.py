"""Decode attention with even shares: every program has as many chunks of keys as any other, whatever rows they are of.

A program goes through its chunks in one pipelined loop, over the ends of rows and heads: the copies of later chunks are under
way while a row's output is written and the next one's query is made. The wait for the kernels before is *within* that loop,
in its first turn: so the first chunks' copies (keys and values of earlier steps, with which no launch of this step overlaps)
begin before it. What they rest on, lengths and tables, may not be written then; it is looked at again after the wait, and
where it was otherwise all is done once more.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pelton_backends.triton.attention.decode_pieces import (
    NOTHING,
    block_of,
    copy_chunk,
    first_blocks,
    keys_of,
    merge_parts,
    one_chunk,
    start_row,
    store_output,
    store_part,
)
from pelton_backends.triton.runtime import let_next_start, wait_for_inputs


@triton.jit
def num_chunks(length, FUSED: tl.constexpr, WINDOW: tl.constexpr, N: tl.constexpr):
    """Chunks to attend to, one at least; 0 for a row that is left out (length 0)."""
    first_key, last_key = keys_of(length, FUSED, WINDOW)
    return tl.where(length > 0, tl.maximum((last_key + N - 1) // N - first_key // N, 1), 0)


@triton.jit
def shares_of(lengths, FUSED: tl.constexpr, WINDOW: tl.constexpr, NUM_KV_HEADS: tl.constexpr, N: tl.constexpr):
    """Each row's chunks over all its kv heads, where they end in the order of all; a program's share, its first and last."""
    chunks = num_chunks(lengths, FUSED, WINDOW, N) * NUM_KV_HEADS
    count = tl.sum(chunks, 0)
    share = (count + tl.num_programs(0) - 1) // tl.num_programs(0)
    first = tl.minimum(tl.program_id(0) * share, count)
    return chunks, tl.cumsum(chunks, 0), share, first, tl.minimum(first + share, count)


@triton.jit
def place_of(
    unit,
    lengths,
    chunks,
    ends,
    num_rows,
    FUSED: tl.constexpr,
    WINDOW: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A chunk's row, the row's length and chunks of one head, the head and the chunk's number; past all of them any row."""
    rows = tl.arange(0, ROWS)
    row = tl.minimum(tl.sum((ends <= unit).to(tl.int32), 0), num_rows - 1)
    length = tl.sum(tl.where(rows == row, lengths, 0), 0)
    row_chunks = tl.maximum(num_chunks(length, FUSED, WINDOW, N), 1)
    behind = unit - tl.sum(tl.where(rows == row, ends - chunks, 0), 0)
    head = behind // row_chunks
    return row, length, row_chunks, head, behind - head * row_chunks


@triton.jit(do_not_specialize=["num_blocks", "num_rows"])
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
    stride_head,
    num_blocks,
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
    M: tl.constexpr,
    MEMBERS: tl.constexpr,
    N: tl.constexpr,
    STRIDE_TOKEN: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    IS_EARLY: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Chunks are numbered row by row, within a row kv head by kv head; program p has the p-th equal share of them.

    A share may begin and end within a (row, kv head): such a part goes to place 0 of the program if it continues what the program
    before began, to place 1 if it begins what the next will continue. So the parts of one (row, kv head) are at
    2 p + 1, 2 (p + 1), 2 (p + 2), .. of its first program p. Arguments: see `decode_attention`.
    """
    let_next_start(PDL)
    rows = tl.arange(0, ROWS)
    if not IS_EARLY:
        wait_for_inputs(PDL)
    lengths = tl.load(seq_lens + rows, mask=rows < num_rows, other=0, cache_modifier=".cg")
    if query_start_loc is not None:
        starts = tl.load(query_start_loc + rows, mask=rows < num_rows, other=0)
        stops = tl.load(query_start_loc + rows + 1, mask=rows < num_rows, other=0)
        lengths = tl.where(stops - starts == 1, lengths, 0)

    chunks, ends, share, first_unit, last_unit = shares_of(lengths, FUSED, WINDOW, NUM_KV_HEADS, N)
    unit = first_unit
    is_first = True
    while is_first | (unit < last_unit):
        row, length, row_chunks, head, begin = place_of(unit, lengths, chunks, ends, num_rows, FUSED, WINDOW, N, ROWS)
        end = tl.minimum(row_chunks, begin + last_unit - unit)
        first_key, last_key = keys_of(length, FUSED, WINDOW)
        keys, values = k_cache + head * stride_head, v_cache + head * stride_head
        token_index = row
        if query_start_loc is not None:
            token_index = tl.load(query_start_loc + row)
        slopes = alibi_slopes
        if alibi_slopes is not None:
            member = tl.minimum(tl.arange(0, M), GROUP - 1)
            slopes = tl.load(alibi_slopes + head * GROUP + member).to(tl.float32)[None, :]
        block = block_of(block_table, row, begin, length, stride_table, FUSED, WINDOW, BLOCK_SIZE, N)
        x = tl.zeros([M, PADDED_DIM], query.dtype.element_ty)
        top = tl.full([M], NOTHING, tl.float32)
        total = tl.zeros([N, M], tl.float32)
        sums = tl.zeros([PADDED_DIM, M], tl.float32)
        is_right = True
        early = lengths
        if IS_EARLY:
            early = first_blocks(block_table, row, begin, 1, length, stride_table, FUSED, WINDOW, BLOCK_SIZE, N, 8)
        for chunk in tl.range(begin, end, num_stages=STAGES):
            start = (first_key // N + chunk) * N
            token = start + tl.arange(0, N)
            last_seen = last_key
            if IS_EARLY:
                last_seen = tl.where((block >= 0) & (block < num_blocks), last_key, 0)
            key, value, is_seen = copy_chunk(
                keys, values, block, start, token, first_key, last_seen, stride_block, STRIDE_TOKEN, WINDOW, BLOCK_SIZE,
                HEAD_DIM, PADDED_DIM,
            )  # fmt: skip
            block = block_of(block_table, row, chunk + 1, length, stride_table, FUSED, WINDOW, BLOCK_SIZE, N)
            if chunk == begin:
                if IS_EARLY:  # noqa: SIM102 a constant condition leaves the other out
                    if is_first:
                        wait_for_inputs(PDL)
                        true_lengths = tl.load(seq_lens + rows, mask=rows < num_rows, other=0, cache_modifier=".cg")
                        now = first_blocks(
                            block_table, row, begin, 1, length, stride_table, FUSED, WINDOW, BLOCK_SIZE, N, 8
                        )
                        num_wrong = tl.sum((true_lengths != lengths).to(tl.int32), 0)
                        num_wrong += tl.sum((now != early).to(tl.int32), 0)
                        is_right = num_wrong == 0
                x, top, total, sums = start_row(
                    query + token_index.to(tl.int64) * stride_query, positions, slot_mapping, cos_sin, q_norm, k_norm,
                    row, head, begin == 0, k_cache, v_cache, alibi_slopes, stride_block, STRIDE_TOKEN, stride_head,
                    scale, EPS, UNIT_OFFSET, FUSED, SOFT_CAP, BLOCK_SIZE, HEAD_DIM, PADDED_DIM, ROTARY_DIM,
                    NUM_KV_HEADS, GROUP, M, N,
                )  # fmt: skip
            top, total, sums = one_chunk(
                tl.trans(x), top, total, sums, key, value, is_seen, token - (length - 1), slopes, scale, SOFT_CAP
            )
        if IS_EARLY:  # noqa: SIM102 as above
            if is_first & (begin >= end):
                wait_for_inputs(PDL)
        total = tl.sum(total, 0)
        if is_right & (begin < end):
            if end - begin == row_chunks:
                head_output = output + token_index.to(tl.int64) * stride_output + head * (GROUP * HEAD_DIM)
                head_sinks = sinks
                if sinks is not None:
                    head_sinks = sinks + head * GROUP
                store_output(head_output, top, total, sums, head_sinks, HEAD_DIM, GROUP)
            else:
                place = tl.program_id(0) * 2 + (begin == 0).to(tl.int32)
                store_part(place, part_sums, part_stats, top, total, sums, HEAD_DIM, GROUP)
        unit += tl.maximum(end - begin, 0)
        if IS_EARLY:  # noqa: SIM102 as above
            if is_first & ((begin >= end) | (is_right == 0)):
                lengths = tl.load(seq_lens + rows, mask=rows < num_rows, other=0, cache_modifier=".cg")
                chunks, ends, share, first_unit, last_unit = shares_of(lengths, FUSED, WINDOW, NUM_KV_HEADS, N)
                unit = first_unit
        is_first = False

    tl.debug_barrier()  # all threads' parts before the one thread's release
    for side in range(2):  # the (row, kv head) that the share begins with, and that it ends with
        unit = tl.where(side == 0, first_unit, tl.maximum(last_unit - 1, 0))
        row, length, row_chunks, head, chunk = place_of(unit, lengths, chunks, ends, num_rows, FUSED, WINDOW, N, ROWS)
        begin = unit - chunk
        is_shared = (begin < first_unit) | (begin + row_chunks > last_unit)
        if is_shared & ((side == 0) | (begin > first_unit)) & (first_unit < last_unit):
            pair = row * NUM_KV_HEADS + head
            first_program = begin // share
            num_parts = (begin + row_chunks - 1) // share - first_program + 1
            arrived = tl.atomic_add(arrivals + pair, 1, sem="acq_rel", scope="gpu")
            if arrived == num_parts - 1:
                token_index = row
                if query_start_loc is not None:
                    token_index = tl.load(query_start_loc + row)
                head_output = output + token_index.to(tl.int64) * stride_output + head * (GROUP * HEAD_DIM)
                head_sinks = sinks
                if sinks is not None:
                    head_sinks = sinks + head * GROUP
                merge_parts(
                    head_output, first_program * 2 + 1, first_program * 2, 2, num_parts, part_sums, part_stats,
                    head_sinks, HEAD_DIM, PADDED_DIM, GROUP, MEMBERS, PARTS,
                )  # fmt: skip
                tl.store(arrivals + pair, 0)  # for the next launch
