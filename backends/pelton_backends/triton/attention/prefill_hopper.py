"""Paged prefill for compute capability 9.0: two warp groups compute, one warp copies pages with the tensor memory accelerator.

Written in Gluon, which places layouts, barriers and the copies that Triton's own pipeliner leaves to pointer loads. Serves what
most prompts need (16-bit dtypes, a cache of the same dtype, heads of 64 or 128 numbers); `prefill.py` serves the rest, and
says in `prefill_attention` what both compute.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from pelton_backends.triton.launch import Launcher, alignment
from pelton_backends.triton.runtime import launch_options, num_sms, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

_LOG2E = gl.constexpr(1.4426950408889634)
PAGE = 16  # tokens a copy; blocks are multiples of it
_PAGE = gl.constexpr(PAGE)
ROWS = 64  # of a warp group
_ROWS = gl.constexpr(ROWS)
BLOCK_N = 128
STAGES = 2


@gluon.jit
def _copy_pages(
    k_pages, v_pages, k_smem, v_smem, k_ready, k_free, v_ready, v_free, table, first_block, num_blocks, seq_len,
    k_block_rows, v_block_rows, k_row, v_row, k_column, v_column,
    BLOCK_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The copying warp: keys and values of `num_blocks` tiles, the last tile first."""
    PAGES: gl.constexpr = BLOCK_N // _PAGE
    PANELS: gl.constexpr = D // 64
    BYTES: gl.constexpr = BLOCK_N * D * 2
    last_page = (seq_len - 1) // _PAGE  # the table says nothing of what lies behind
    for i in range(num_blocks):
        tile = first_block + num_blocks - 1 - i
        stage, phase = i % STAGES, (i // STAGES) & 1
        # Table entries first: their way from memory passes while the stage is still in use.
        blocks = ()
        for p in gl.static_range(PAGES):
            page = gl.minimum(tile * PAGES + p, last_page)
            blocks = blocks + (gl.load(table + page * _PAGE // BLOCK_SIZE),)  # noqa: RUF005  Gluon unpacks no tuple
        mbarrier.wait(k_free.index(stage), phase ^ 1)
        mbarrier.expect(k_ready.index(stage), BYTES)
        for p in gl.static_range(PAGES):
            page = gl.minimum(tile * PAGES + p, last_page)
            row = blocks[p] * k_block_rows + page * _PAGE % BLOCK_SIZE + k_row
            for panel in gl.static_range(PANELS):
                place = k_smem.index((stage * PANELS + panel) * PAGES + p)
                tma.async_copy_global_to_shared(k_pages, [row, k_column + panel * 64], k_ready.index(stage), place)
        mbarrier.wait(v_free.index(stage), phase ^ 1)
        mbarrier.expect(v_ready.index(stage), BYTES)
        for p in gl.static_range(PAGES):
            page = gl.minimum(tile * PAGES + p, last_page)
            row = blocks[p] * v_block_rows + page * _PAGE % BLOCK_SIZE + v_row
            for panel in gl.static_range(PANELS):
                place = v_smem.index((stage * PANELS + panel) * PAGES + p)
                tma.async_copy_global_to_shared(v_pages, [row, v_column + panel * 64], v_ready.index(stage), place)


@gluon.jit
def _weights(
    scores, highest, denominator, tile, q_position, seq_len, factor, window,
    BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, MASKED: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """One tile's scores -> softmax weights, and the running maximum, sum and factor for what was summed before."""
    if MASKED:
        position = tile * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, LAYOUT))
        is_seen = gl.expand_dims(position < seq_len, 0)
        if CAUSAL:
            is_seen = is_seen & (gl.expand_dims(position, 0) <= gl.expand_dims(q_position, 1))
        if WINDOW:
            is_seen = is_seen & (gl.expand_dims(q_position, 1) - gl.expand_dims(position, 0) < window)
        scores = gl.where(is_seen, scores, -float("inf"))
    now_highest = gl.maximum(highest, gl.max(scores, 1) * factor)
    finite = now_highest
    if MASKED:
        finite = gl.where(now_highest == -float("inf"), 0.0, now_highest)  # a query that has seen no key yet
    weights = gl.exp2(scores * factor - gl.expand_dims(finite, 1))
    shrink = gl.exp2(highest - finite)
    return weights, now_highest, denominator * shrink + gl.sum(weights, 1), shrink


@gluon.jit
def _step(
    i, acc, weights, highest, denominator, q_smem, k_tiles, v_tiles, k_ready, k_free, v_ready, v_free,
    last_tile, q_position, seq_len, factor, window,
    BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    MASKED: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Scores of tile i and the sum over tile i - 1 run together on the tensor cores; then the weights of tile i, beside the sum."""
    stage, phase = i % STAGES, (i // STAGES) & 1
    before, before_phase = (i - 1) % STAGES, ((i - 1) // STAGES) & 1
    mbarrier.wait(k_ready.index(stage), phase)
    nothing = gl.zeros([_ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    scores = warpgroup_mma(q_smem, k_tiles.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
    mbarrier.wait(v_ready.index(before), before_phase)
    acc = warpgroup_mma(weights, v_tiles.index(before), acc, is_async=True)
    scores = warpgroup_mma_wait(1, [scores])
    gl.thread_barrier()
    mbarrier.arrive(k_free.index(stage), count=1)
    now_weights, highest, denominator, shrink = _weights(
        scores, highest, denominator, last_tile - i, q_position, seq_len, factor, window,
        BLOCK_N, CAUSAL, WINDOW, MASKED, S_LAYOUT,
    )  # fmt: skip
    acc = warpgroup_mma_wait(0, [acc])
    gl.thread_barrier()
    mbarrier.arrive(v_free.index(before), count=1)
    shrink = gl.convert_layout(shrink, gl.SliceLayout(1, O_LAYOUT), assert_trivial=True)
    acc = acc * gl.expand_dims(shrink, 1)
    weights = gl.convert_layout(now_weights.to(q_smem.dtype), gl.DotOperandLayout(0, O_LAYOUT, 2), assert_trivial=True)
    return acc, weights, highest, denominator


@gluon.jit
def _attend(
    GROUP_INDEX: gl.constexpr, query, output, parts, logs, sinks, q_smem, k_smem, v_smem, k_ready, k_free, v_ready, v_free,
    row_start, query_len, seq_len, first_token, kv_head, num_heads, split, num_tokens, first_tile, num_tiles,
    q_stride, output_stride, factor, window,
    G: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr, SINKS: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """A computing warp group: 64 // G tokens."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    dtype: gl.constexpr = query.dtype.element_ty
    TOKENS: gl.constexpr = _ROWS // G
    token_begin = first_token + GROUP_INDEX * TOKENS

    m = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, COPY))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, COPY))
    token = token_begin + m // G
    is_row = (m < TOKENS * G) & (token < query_len)
    place = (row_start + token).to(gl.int64)
    head_column = (kv_head * G + m % G) * D
    q_at = gl.expand_dims(place * q_stride + head_column, 1) + gl.expand_dims(d, 0)
    is_number = gl.expand_dims(is_row, 1) & (gl.expand_dims(d, 0) < D)
    q_smem.store(gl.load(query + q_at, is_number, 0.0))
    fence_async_shared()
    gl.thread_barrier()

    k_tiles = k_smem._reinterpret(dtype, [STAGES, BLOCK_N, D], TILE)
    v_tiles = v_smem._reinterpret(dtype, [STAGES, BLOCK_N, D], TILE)
    s_row = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, S_LAYOUT))
    first_position = seq_len - query_len + token_begin
    q_position = first_position + s_row // G
    last_tile = first_tile + num_tiles - 1
    # Tiles before `whole`, counted from the last, hold keys that some query does not see.
    if CAUSAL:
        whole = last_tile + 1 - (first_position + 1) // BLOCK_N
    else:
        whole = last_tile + 1 - seq_len // BLOCK_N
    whole = gl.minimum(gl.maximum(whole, 1), num_tiles)
    windowed = num_tiles
    if WINDOW:  # and so do those from `windowed` on
        last_position = gl.minimum(first_position + TOKENS, seq_len) - 1
        low = gl.maximum(last_position - window + BLOCK_N, 0) // BLOCK_N
        windowed = gl.minimum(gl.maximum(last_tile + 1 - low, whole), num_tiles)

    highest = gl.full([_ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
    denominator = gl.zeros([_ROWS], gl.float32, gl.SliceLayout(1, S_LAYOUT))
    if SINKS:  # the first share has it
        sink = gl.load(sinks + kv_head * G + s_row % G).to(gl.float32) * _LOG2E
        highest = gl.where(split == 0, sink, highest)
        denominator = gl.where(split == 0, 1.0, denominator)
    acc = gl.zeros([_ROWS, D], gl.float32, O_LAYOUT)

    mbarrier.wait(k_ready.index(0), 0)
    nothing = gl.zeros([_ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    scores = warpgroup_mma(q_smem, k_tiles.index(0).permute((1, 0)), nothing, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, [scores])
    gl.thread_barrier()
    mbarrier.arrive(k_free.index(0), count=1)
    weights, highest, denominator, _ = _weights(
        scores, highest, denominator, last_tile, q_position, seq_len, factor, window,
        BLOCK_N, CAUSAL, WINDOW, True, S_LAYOUT,
    )  # fmt: skip
    weights = gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, O_LAYOUT, 2), assert_trivial=True)
    if (last_tile + 1) * BLOCK_N > seq_len:
        # Slots past the sequence hold anything, NaN too, which a weight of 0 would not silence. Both warp groups write zeros.
        mbarrier.wait(v_ready.index(0), 0)
        position = last_tile * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, COPY))
        values = v_tiles.index(0).load(COPY)
        v_tiles.index(0).store(gl.where(gl.expand_dims(position < seq_len, 1), values, gl.zeros_like(values)))
        fence_async_shared()
        gl.thread_barrier()

    for i in range(1, whole):
        acc, weights, highest, denominator = _step(
            i, acc, weights, highest, denominator, q_smem, k_tiles, v_tiles, k_ready, k_free, v_ready, v_free, last_tile,
            q_position, seq_len, factor, window, BLOCK_N, D, STAGES, CAUSAL, WINDOW, True, S_LAYOUT, O_LAYOUT,
        )  # fmt: skip
    for i in range(whole, windowed):
        acc, weights, highest, denominator = _step(
            i, acc, weights, highest, denominator, q_smem, k_tiles, v_tiles, k_ready, k_free, v_ready, v_free, last_tile,
            q_position, seq_len, factor, window, BLOCK_N, D, STAGES, CAUSAL, WINDOW, False, S_LAYOUT, O_LAYOUT,
        )  # fmt: skip
    if WINDOW:
        for i in range(windowed, num_tiles):
            acc, weights, highest, denominator = _step(
                i, acc, weights, highest, denominator, q_smem, k_tiles, v_tiles, k_ready, k_free, v_ready, v_free,
                last_tile, q_position, seq_len, factor, window, BLOCK_N, D, STAGES, CAUSAL, WINDOW, True, S_LAYOUT, O_LAYOUT,
            )  # fmt: skip
    before = num_tiles - 1
    mbarrier.wait(v_ready.index(before % STAGES), (before // STAGES) & 1)
    acc = warpgroup_mma(weights, v_tiles.index(before % STAGES), acc, is_async=True)
    acc = warpgroup_mma_wait(0, [acc])

    if SPLIT:
        token = token_begin + s_row // G
        is_row = (s_row < TOKENS * G) & (token < query_len)
        at = (split * num_tokens + row_start + token).to(gl.int64) * num_heads + kv_head * G + s_row % G
        gl.store(logs + at, highest + gl.log2(denominator), is_row)  # -inf without keys
        o_row = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, O_LAYOUT))
        token = token_begin + o_row // G
        is_row = (o_row < TOKENS * G) & (token < query_len)
        at = (split * num_tokens + row_start + token).to(gl.int64) * num_heads + kv_head * G + o_row % G
        column = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, O_LAYOUT)), 0)
        denominator = gl.where(denominator == 0.0, 1.0, denominator)
        denominator = gl.convert_layout(denominator, gl.SliceLayout(1, O_LAYOUT), assert_trivial=True)
        part_at = gl.expand_dims(at * D, 1) + column
        gl.store(parts + part_at, acc / gl.expand_dims(denominator, 1), gl.expand_dims(is_row, 1) & (column < D))
    else:
        denominator = gl.where(denominator == 0.0, 1.0, denominator)
        denominator = gl.convert_layout(denominator, gl.SliceLayout(1, O_LAYOUT), assert_trivial=True)
        q_smem.store((acc / gl.expand_dims(denominator, 1)).to(dtype))
        out_at = gl.expand_dims(place * output_stride + head_column, 1) + gl.expand_dims(d, 0)
        gl.store(output + out_at, q_smem.load(COPY), is_number)


@gluon.jit(do_not_specialize=["num_tokens", "table_stride", "first_row", "num_reqs"])
def hopper_prefill_kernel(
    query, k_pages, v_pages, output, parts, logs, query_start_loc, seq_lens, block_table, sinks, num_tokens,
    q_stride, output_stride, table_stride,
    k_block_rows, v_block_rows, k_head_rows, v_head_rows, k_head_columns, v_head_columns, first_row, num_reqs, scale, window,
    G: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SINKS: gl.constexpr, SPLIT: gl.constexpr, SKIP_SINGLE: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """A program: one kv head, 2 (64 // G) tokens of one row, with SPLIT one share of their keys; rows are found as in
    `prefill.py`."""
    BLOCK_Q: gl.constexpr = 2 * (_ROWS // G)
    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    kv_head = gl.program_id(0)
    index = gl.num_programs(1) - 1 - gl.program_id(1) + gl.load(query_start_loc + first_row) // BLOCK_Q + first_row
    row, above = first_row, num_reqs
    while above - row > 1:
        middle = (row + above) // 2
        if gl.load(query_start_loc + middle) // BLOCK_Q + middle <= index:
            row = middle
        else:
            above = middle
    row_start = gl.load(query_start_loc + row)
    query_len = gl.load(query_start_loc + row + 1) - row_start
    first_token = (index - (row_start // BLOCK_Q + row)) * BLOCK_Q
    if first_token >= query_len:
        return
    if SKIP_SINGLE and query_len == 1:
        return
    seq_len = gl.load(seq_lens + row)
    first_position = seq_len - query_len + first_token
    if CAUSAL:
        end = gl.minimum(first_position + BLOCK_Q, seq_len)
    else:
        end = seq_len
    first_tile = 0
    if WINDOW:
        first_tile = gl.maximum(first_position - window + 1, 0) // BLOCK_N
    num_tiles = (end + BLOCK_N - 1) // BLOCK_N - first_tile
    split = gl.program_id(2)
    num_heads = gl.num_programs(0) * G
    if SPLIT:
        share = (num_tiles + gl.num_programs(2) - 1) // gl.num_programs(2)
        first_tile += split * share
        num_tiles = gl.minimum(num_tiles - split * share, share)
        if num_tiles <= 0:
            m = gl.arange(0, 2 * _ROWS, layout=gl.BlockedLayout([1], [32], [4], [0]))
            token = first_token + m // G
            at = (split * num_tokens + row_start + token).to(gl.int64) * num_heads + kv_head * G + m % G
            gl.store(logs + at, float("-inf"), (m < BLOCK_Q * G) & (token < query_len))
            return
    factor = scale * _LOG2E
    table = block_table + row.to(gl.int64) * table_stride

    dtype: gl.constexpr = query.dtype.element_ty
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    PIECES: gl.constexpr = STAGES * (D // 64) * (BLOCK_N // _PAGE)
    q0 = gl.allocate_shared_memory(dtype, [_ROWS, D], TILE)
    q1 = gl.allocate_shared_memory(dtype, [_ROWS, D], TILE)
    # A tile of NVMMASharedLayout is its 64-column panels one after the other, and 16 rows of a panel lie together: a page
    # goes to where the tile wants it.
    k_smem = gl.allocate_shared_memory(dtype, [PIECES, _PAGE, 64], TILE)
    v_smem = gl.allocate_shared_memory(dtype, [PIECES, _PAGE, 64], TILE)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(stage), count=1)
        mbarrier.init(v_ready.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=2)
        mbarrier.init(v_free.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_attend, (
                gl.constexpr(0), query, output, parts, logs, sinks, q0, k_smem, v_smem, k_ready, k_free, v_ready, v_free, row_start,
                query_len, seq_len, first_token, kv_head, num_heads, split, num_tokens, first_tile, num_tiles,
                q_stride, output_stride, factor, window, G, D, BLOCK_N, STAGES, CAUSAL, WINDOW, SINKS, SPLIT,
            )),
            (_attend, (
                gl.constexpr(1), query, output, parts, logs, sinks, q1, k_smem, v_smem, k_ready, k_free, v_ready, v_free, row_start,
                query_len, seq_len, first_token, kv_head, num_heads, split, num_tokens, first_tile, num_tiles,
                q_stride, output_stride, factor, window, G, D, BLOCK_N, STAGES, CAUSAL, WINDOW, SINKS, SPLIT,
            )),
            (_copy_pages, (
                k_pages, v_pages, k_smem, v_smem, k_ready, k_free, v_ready, v_free, table, first_tile, num_tiles,
                seq_len, k_block_rows, v_block_rows, kv_head * k_head_rows, kv_head * v_head_rows,
                kv_head * k_head_columns, kv_head * v_head_columns, BLOCK_SIZE, BLOCK_N, D, STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens", "first_row", "num_reqs", "num_parts"])
def merge_splits_kernel(
    parts, logs, output, query_start_loc, num_tokens, first_row, num_reqs, num_parts, output_stride,
    H: tl.constexpr, BLOCK_H: tl.constexpr, D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program: BLOCK_H heads of one token, the mean of the splits' results, weighted by 2^log."""
    wait_for_inputs(PDL)
    token = tl.program_id(1)
    if token < tl.load(query_start_loc + first_row) or token >= tl.load(query_start_loc + num_reqs):
        return
    head, d = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, D)
    is_head = head < H
    highest = tl.full([BLOCK_H], -float("inf"), tl.float32)
    denominator = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, D], tl.float32)
    for part in range(num_parts):
        at = (part * num_tokens + token).to(tl.int64) * H + head
        log = tl.load(logs + at, is_head, 0.0)
        # A split without keys has left no result.
        result = tl.load(parts + (at * D)[:, None] + d[None, :], (is_head & (log > -float("inf")))[:, None], 0.0)
        now_highest = tl.maximum(highest, log)
        finite = tl.where(now_highest == -float("inf"), 0.0, now_highest)
        shrink, weight = tl.exp2(highest - finite), tl.exp2(log - finite)
        acc = acc * shrink[:, None] + result * weight[:, None]
        denominator = denominator * shrink + weight
        highest = now_highest
    at = output + token.to(tl.int64) * output_stride + (head * D)[:, None] + d[None, :]
    tl.store(at, (acc / denominator[:, None]).to(output.dtype.element_ty), is_head[:, None])


_launch_merge = Launcher(merge_splits_kernel)
_launch = Launcher(hopper_prefill_kernel)


class _Memory(NamedTuple):
    """What a descriptor needs of a tensor; it keeps no pool alive."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


@lru_cache(maxsize=512)
def _pages(address: int, dtype: torch.dtype, num_rows: int, width: int) -> TensorDescriptor:
    """A pool as rows of one slot: copies take 16 rows of 64 columns."""
    tile = gl.NVMMASharedLayout(128, 16, rank=2)
    return TensorDescriptor(_Memory(address, dtype), [num_rows, width], [width, 1], [PAGE, 64], tile)


def _page_rows(cache: Tensor) -> tuple[TensorDescriptor, int, int, int]:
    """The descriptor; rows from block to block and from head to head, columns from head to head."""
    num_blocks, block_size, num_kv_heads, _ = cache.shape
    block_stride, slot_stride, head_stride, _ = cache.stride()
    block_rows, (head_rows, head_columns) = block_stride // slot_stride, divmod(head_stride, slot_stride)
    num_rows = (num_blocks - 1) * block_rows + (num_kv_heads - 1) * head_rows + block_size
    return _pages(cache.data_ptr(), cache.dtype, num_rows, slot_stride), block_rows, head_rows, head_columns


def serves(query: Tensor, k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether dtypes, sizes and strides are among those the kernel was written for."""
    dtype, head_dim, num_kv_heads = query.dtype, query.shape[2], k_cache.shape[2]
    return (
        dtype in (torch.bfloat16, torch.float16)
        and k_cache.dtype == dtype == v_cache.dtype
        and head_dim in (64, 128)
        and k_cache.shape[1] % PAGE == 0
        and query.shape[1] // num_kv_heads <= ROWS
        and query.stride(0) % 8 == 0
        and all(_is_rows(cache) for cache in (k_cache, v_cache))
    )


def _is_rows(cache: Tensor) -> bool:
    block_stride, slot_stride, head_stride, _ = cache.stride()
    fits = cache.shape[2] == 1 or head_stride % slot_stride == 0 or head_stride * cache.shape[2] <= slot_stride
    return fits and block_stride % slot_stride == 0 and slot_stride % 8 == 0 and cache.data_ptr() % 16 == 0


def hopper_prefill(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    output: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    *,
    num_reqs: int,
    first_row: int,
    scale: float,
    causal: bool,
    sliding_window: int | None,
    sinks: Tensor | None,
    max_seq_len: int,
    skip_single: bool,
    pdl: bool,
    stages: int = STAGES,
) -> None:
    """`prefill_attention` without soft cap and ALiBi, where `serves` says so.

    Paper  Shah et al., FlashAttention-3 (arXiv:2407.08608): a copying warp, and scores of one tile beside the sum over the last.

    Tiles of 2 x 64 rows and 128 keys, two stages: 160 KiB of shared memory and 240 registers a thread, one program on a
    multiprocessor of an H200. Keys and values come page by page (16 tokens) into the place the tile has for them. Where the
    launch would leave multiprocessors without work and sequences may be long, several programs share a tile's keys.

    Measured there, bfloat16, 16 heads over 8 of 128 numbers, causal, blocks of 16, TFLOP/s (in brackets torch's cuDNN backend on
    contiguous keys): 2,048 tokens 450 (324), 8 x 2,048 464 (529), 8,192 612 (574), 16,384 595 (640), 32,768 580 (614). Three
    stages, and letting the two groups take turns at the tensor cores, changed less than 2 %.
    Split, beside other jobs on the card: 64 tokens behind 8,000 took 104 us, with 8 programs to a tile 25 us.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = k_cache.shape[2]
    group = num_heads // num_kv_heads
    k_pages, k_block_rows, k_head_rows, k_head_columns = _page_rows(k_cache)
    v_pages, v_block_rows, v_head_rows, v_head_columns = _page_rows(v_cache)
    num_blocks = num_tokens // (2 * (ROWS // group)) + num_reqs - first_row
    splits = 1 if skip_single else choose_splits(num_kv_heads * num_blocks, max_seq_len, num_sms(query.device))
    parts = logs = None
    if splits > 1:
        parts = torch.empty(splits, num_tokens, num_heads, head_dim, dtype=torch.float32, device=query.device)
        logs = torch.empty(splits, num_tokens, num_heads, dtype=torch.float32, device=query.device)
    grid = (num_kv_heads, num_blocks, splits)
    constants = {
        "G": group, "D": head_dim, "BLOCK_N": BLOCK_N, "STAGES": stages, "BLOCK_SIZE": k_cache.shape[1], "CAUSAL": causal,
        "WINDOW": sliding_window is not None, "SINKS": sinks is not None, "SPLIT": splits > 1,
        "SKIP_SINGLE": skip_single, "PDL": pdl,
    }  # fmt: skip
    strides = (
        query.stride(0), output.stride(0), block_table.stride(0), k_block_rows, v_block_rows, k_head_rows, v_head_rows,
        k_head_columns, v_head_columns,
    )  # fmt: skip
    key = (
        *constants.values(), *strides[:2], *strides[3:], sliding_window, query.dtype, query.device.index,
        sinks is not None and sinks.dtype, alignment(query, output, query_start_loc, seq_lens, block_table, sinks),
    )  # fmt: skip
    arguments = (
        query, k_pages, v_pages, output, parts, logs, query_start_loc, seq_lens, block_table, sinks,
        num_tokens, *strides, first_row, num_reqs, scale, sliding_window or 0,
    )  # fmt: skip
    options = launch_options(pdl)
    _launch(key, grid, arguments, constants, num_warps=4, **options)
    if splits > 1:
        block_h = max(min(triton.next_power_of_2(num_heads), 512 // head_dim), 1)
        key = (
            num_heads,
            head_dim,
            output.stride(0),
            output.dtype,
            query.device.index,
            alignment(output, query_start_loc),
        )
        constants = {"H": num_heads, "BLOCK_H": block_h, "D": head_dim, "PDL": pdl}
        arguments = (
            parts, logs, output, query_start_loc, num_tokens, first_row, num_reqs, splits, output.stride(0),
        )  # fmt: skip
        grid = (triton.cdiv(num_heads, block_h), num_tokens)
        _launch_merge(key, grid, arguments, constants, num_warps=1, **options)


def choose_splits(num_programs: int, max_seq_len: int, num_sms: int) -> int:
    """Programs that share a tile's keys: at least 512 keys each, and no more programs than multiprocessors."""
    return max(min(num_sms // num_programs, max_seq_len // 512, 16), 1)
