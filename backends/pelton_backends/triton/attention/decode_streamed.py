"""Decode attention whose work is dealt evenly to a fixed number of programs, whatever the lengths of the rows.

A pair is one row and one kv head. All pairs lie on a line, row by row, each as START empty places and then its chunks of N
keys; program p of P has the p-th share of the line. The empty places are what a program loses when it goes from one pair to
the next: its copies have all arrived before the next pair's begin, and under load that takes as long as some chunks do.

  pair         a             b                    c
  line     ....aaaaaaaaa ....bbbbbbbbbbbbbbbbb ....ccccc      . START places, each letter a chunk
  program  0000000000011 1111111111222222222222 23333333

The kernel's stages are those of `decode_kernel`, see `pelton_backends.triton.attention.decode`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pelton_backends.triton.attention.decode_pieces import (
    angles_at,
    attend,
    blocks_of,
    finish,
    load_heads,
    make_query,
    norm_weights,
    partner_of,
)
from pelton_backends.triton.attention.decode_shares import first_seen
from pelton_backends.triton.runtime import let_next_start, wait_for_inputs


@triton.jit
def chunks_of(length, FUSED: tl.constexpr, WINDOW: tl.constexpr, N: tl.constexpr):
    """Chunks that a row of this length attends to, one at least."""
    last_key = length
    if FUSED:
        last_key = length - 1
    chunks = (last_key + N - 1) // N
    if WINDOW != 0:
        chunks -= first_seen(length, WINDOW) // N
    return tl.maximum(chunks, 1)


@triton.jit
def lay_out(
    lengths,  # [ROWS]; 0: left out
    num_programs,
    FUSED: tl.constexpr,
    WINDOW: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    N: tl.constexpr,
    START: tl.constexpr,
):
    """Where each row begins and ends on the line [ROWS], how long the line is, and a program's share of it."""
    places = tl.where(lengths > 0, (START + chunks_of(lengths, FUSED, WINDOW, N)) * NUM_KV_HEADS, 0)
    ends = tl.cumsum(places, 0)
    length = tl.sum(places, 0)
    return ends - places, ends, length, tl.maximum((length + num_programs - 1) // num_programs, 1)


@triton.jit
def piece_at(
    place,
    program,
    share,
    lengths,
    row_begins,
    row_ends,
    FUSED: tl.constexpr,
    WINDOW: tl.constexpr,
    N: tl.constexpr,
    START: tl.constexpr,
):
    """Return the program's part of the pair at this place of the line: its chunks begin <= c < end, maybe none.

    A pair that several programs share has `num_parts` parts, of first_program and those after it. If the first of them begins in
    the empty places, they cost it nothing, since every program begins somewhere: all the pair's cuts move up, so that its
    programs end at the same time.

    Returns row, kv head, the row's length, begin, end, first_program, num_parts, the place after the pair.
    """
    rows = tl.arange(0, lengths.shape[0])
    row = tl.sum((row_ends <= place).to(tl.int32), 0)
    is_row = rows == row
    length = tl.sum(tl.where(is_row, lengths, 0), 0)
    row_begin = tl.sum(tl.where(is_row, row_begins, 0), 0)
    row_chunks = chunks_of(length, FUSED, WINDOW, N)
    head = (place - row_begin) // (START + row_chunks)
    first_place = row_begin + head * (START + row_chunks) + START  # of the pair's chunks
    first_program = first_place // share
    num_parts = (first_place + row_chunks - 1) // share - first_program + 1
    part = program - first_program  # -1: the share ends within the empty places
    unpaid = first_place - first_program * share
    unpaid = tl.where(unpaid <= START, unpaid, 0)
    begin = program * share - first_place + unpaid * (num_parts - part) // num_parts
    end = (program + 1) * share - first_place + unpaid * (num_parts - part - 1) // num_parts
    begin = tl.where(part <= 0, 0, tl.minimum(begin, row_chunks - 1))
    end = tl.where(part == num_parts - 1, row_chunks, tl.minimum(end, row_chunks - 1))
    end = tl.where(part < 0, 0, end)
    return row, head, length, begin, end, first_program, num_parts, first_place + row_chunks


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
    N: tl.constexpr,
    ROWS: tl.constexpr,
    START: tl.constexpr,
    PARTS: tl.constexpr,
    CUTS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Arguments: see `decode_attention`.

    A kv head of many query heads is cut (`cuts_of`): CUTS programs have the same share of the line, at the same time, for GROUP of its
    query heads each, so that one of them finds what another has read in the second-level cache.

    A part of a pair goes to place 0 of the program if it continues what the program before began, to place 1 if it begins what
    the next will continue. So the parts of one pair are at 2 p + 1, 2 (p + 1), 2 (p + 2), .. of its first program p.
    """
    program = tl.program_id(0)
    first_part = tl.program_id(1) * (2 * tl.num_programs(0))
    let_next_start(PDL)
    dim = tl.arange(0, PADDED_DIM)
    own, partners = q_norm, q_norm
    if q_norm is not None:
        own = norm_weights(q_norm, k_norm, dim, HEAD_DIM, GROUP, Q)
        partners = norm_weights(q_norm, k_norm, partner_of(dim, ROTARY_DIM), HEAD_DIM, GROUP, Q)
    local = tl.arange(0, N)
    wait_for_inputs(PDL)

    rows = tl.arange(0, ROWS)
    lengths = tl.load(seq_lens + rows, mask=rows < num_rows, other=0)
    if query_start_loc is not None:  # rows with another number of tokens belong to another kernel
        starts = tl.load(query_start_loc + rows, mask=rows < num_rows, other=0)
        ends = tl.load(query_start_loc + rows + 1, mask=rows < num_rows, other=0)
        lengths = tl.where(ends - starts == 1, lengths, 0)
    row_begins, row_ends, line, share = lay_out(
        lengths, tl.num_programs(0), FUSED, WINDOW, NUM_KV_HEADS // CUTS, N, START
    )  # fmt: skip
    place = program * share
    last_place = tl.minimum(place + share, line)

    while place < last_place:
        row, head, seq_len, begin, end, first_program, num_parts, place = piece_at(
            place, program, share, lengths, row_begins, row_ends, FUSED, WINDOW, N, START
        )
        key_head = head
        head = head * CUTS + tl.program_id(1)
        keys, values = k_cache + (key_head - head) * stride_head, v_cache + (key_head - head) * stride_head
        # Loads come before the question whether there is work: 2 % faster, and a program asks in vain at its end only.
        token_index = row
        if query_start_loc is not None:
            token_index = tl.load(query_start_loc + row)
        table = block_table + row.to(tl.int64) * stride_table
        first_key = 0
        first_chunk = begin
        if WINDOW != 0:
            first_key = first_seen(seq_len, WINDOW)
            first_chunk += first_key // N
        block = blocks_of(table, first_chunk * N + local, stride_table, BLOCK_SIZE)
        x, other, new_value = load_heads(
            query + token_index.to(tl.int64) * stride_query, head, dim, FUSED, HEAD_DIM, ROTARY_DIM, NUM_KV_HEADS, GROUP, Q,
            CUTS,
        )  # fmt: skip
        slot = tl.full([], -1, tl.int64)
        last_key = seq_len
        cos, sin = x, x
        if FUSED:
            slot = tl.load(slot_mapping + row)
            last_key = seq_len - 1
            if ROTARY_DIM > 0:
                row_position = tl.load(positions + row)
                cos, sin = angles_at(cos_sin, (seq_len - 1).to(tl.int64), dim, ROTARY_DIM, Q)
                if row_position != seq_len - 1:
                    cos, sin = angles_at(cos_sin, row_position, dim, ROTARY_DIM, Q)
        if (begin > 0) | (tl.program_id(1) > 0):
            slot = tl.full([], -1, tl.int64)
        if begin < end:
            x, cached_value, new_logit = make_query(
                x, other, new_value, cos, sin, slot, head, keys, values, own, partners, alibi_slopes, stride_block,
                stride_token, stride_head, scale, EPS, UNIT_OFFSET, FUSED, SOFT_CAP, BLOCK_SIZE, HEAD_DIM, PADDED_DIM,
                GROUP, Q, ROTARY_DIM,
            )  # fmt: skip
            top, total, sums = attend(
                x, cached_value, new_logit, begin == 0, head, first_chunk, first_chunk + end - begin, 1, first_key, last_key,
                seq_len - 1, x, x, block, block, table, keys, values, alibi_slopes, stride_table, stride_block,
                stride_token, stride_head, scale, FUSED, SOFT_CAP, BLOCK_SIZE, HEAD_DIM, PADDED_DIM, GROUP, Q, M, N,
                False, STAGES,
            )  # fmt: skip

            finish(
                output + token_index.to(tl.int64) * stride_output, 0, GROUP, top, total, sums, head, program - first_program,
                num_parts, first_part + first_program * 2 + 1, first_part + first_program * 2, part_sums, part_stats, arrivals,
                sinks, HEAD_DIM, PADDED_DIM, GROUP, GROUP, MEMBERS, PARTS, 2, False,
            )  # fmt: skip
