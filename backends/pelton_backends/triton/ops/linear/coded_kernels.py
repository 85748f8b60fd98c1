"""Kernels of products with weights in codes of a table.

Shapes   K = in_features, N = out_features, G = columns with one scale.
Weights  `codes` [N, K / 2] uint8: 32 columns in 16 bytes, byte b has column b below column 16 + b. `scales` [N, K / G] float32. A weight is
         table[code] * scale (`tables`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from pelton_backends.triton.ops.linear.split_k import store_result
from pelton_backends.triton.ops.linear.tables import table_pair
from pelton_backends.triton.runtime import dot, let_next_start, wait_for_inputs

HALF: tl.constexpr = tl.constexpr(16)
"""Bytes of 32 columns of 4 bits."""


@triton.jit
def _column(lane):
    """The lower column that a byte has."""
    return lane // HALF * (2 * HALF) + lane % HALF


@triton.jit
def _load_codes(codes, rows, is_row, k, lane, is_in, K: tl.constexpr):
    """[R, bytes], zeros outside."""
    place = codes + rows.to(tl.int64)[:, None] * (K // 2) + k // 2 + lane[None, :]
    return tl.load(place, mask=is_row[:, None] & is_in[None, :], other=0, eviction_policy="evict_first")


@triton.jit
def _load_words(scales, rows, is_row, k, K: tl.constexpr, G: tl.constexpr, BK: tl.constexpr):
    """Load the scales of BK columns [R, BK / G], zeros outside."""
    group = k // G + tl.arange(0, BK // G)
    place = scales + rows.to(tl.int64)[:, None] * (K // G) + group[None, :]
    return tl.load(place, mask=is_row[:, None] & (group < K // G)[None, :], other=0)


@triton.jit
def _spread(factors, R: tl.constexpr, GROUPS: tl.constexpr, OWN: tl.constexpr):
    """[R, GROUPS] -> [R, GROUPS OWN]"""
    return tl.reshape(tl.broadcast_to(factors[:, :, None], (R, GROUPS, OWN)), (R, GROUPS * OWN))


@triton.jit
def one_coded_row_kernel(
    x, codes, scales, bias, out, partials, counters, N: tl.constexpr, K: tl.constexpr, G: tl.constexpr, FORMAT: tl.constexpr,
    R: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [1, N] = x [1, K] weight^T + bias, products and sums in float32. A program has R rows by a SPLIT-th of K, BK columns at a time;
    partials [N / R, SPLIT, R] float32 and counters [N / R] int32, zeros: the last program of a tile sums its parts, in order."""
    OWN: tl.constexpr = G // 2
    STEPS: tl.constexpr = ((K + BK - 1) // BK + SPLIT - 1) // SPLIT
    rows = tl.program_id(0) * R + tl.arange(0, R)
    is_row = rows < N
    lane = tl.arange(0, BK // 2)
    column = _column(lane)
    total = tl.zeros((R, BK // G), tl.float32)
    let_next_start(PDL)
    start = tl.program_id(1) * (STEPS * BK)
    packed = _load_codes(codes, rows, is_row, start, lane, start + column < K, K)
    words = _load_words(scales, rows, is_row, start, K, G, BK)
    wait_for_inputs(PDL)
    for step in tl.static_range(STEPS):
        k = start + step * BK
        if step > 0:
            packed = _load_codes(codes, rows, is_row, k, lane, k + column < K, K)
            words = _load_words(scales, rows, is_row, k, K, G, BK)
        y = tl.load(x + k + column, mask=k + column < K, other=0.0).to(tl.float32)[None, :]
        upper = tl.load(x + k + column + HALF, mask=k + column < K, other=0.0).to(tl.float32)[None, :]
        first, second = table_pair(packed, FORMAT == "nf4")
        total += tl.sum(tl.reshape(first * y + second * upper, (R, BK // G, OWN)), axis=2) * words
    result = tl.sum(total, axis=1)
    if SPLIT > 1:
        cells = partials + tl.program_id(0) * (SPLIT * R) + tl.arange(0, R)
        tl.store(cells + tl.program_id(1) * R, result)
        tl.debug_barrier()  # all threads' stores come before the one thread's increment, which releases them
        counter = counters + tl.program_id(0)
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == SPLIT - 1:
            tl.store(counter, 0)
            result = tl.load(cells, cache_modifier=".cg")
            for i in tl.static_range(1, SPLIT):
                result += tl.load(cells + i * R, cache_modifier=".cg")
            if bias is not None:
                result += tl.load(bias + rows, mask=is_row, other=0.0).to(tl.float32)
            tl.store(out + rows, result.to(out.dtype.element_ty), mask=is_row)
    else:
        if bias is not None:
            result += tl.load(bias + rows, mask=is_row, other=0.0).to(tl.float32)
        tl.store(out + rows, result.to(out.dtype.element_ty), mask=is_row)


@triton.jit(do_not_specialize=["num_tokens"])
def coded_rows_kernel(
    x, codes, scales, bias, out, partials, counters, num_tokens, stride, N: tl.constexpr, K: tl.constexpr, G: tl.constexpr,
    FORMAT: tl.constexpr, M: tl.constexpr, R: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """R rows of the weight by a SPLIT-th of K, for M rows of x: weights are unpacked in registers, and rounded to x's dtype."""
    dtype: tl.constexpr = x.dtype.element_ty
    tile = tl.program_id(0)
    part = tl.program_id(1)
    slot = (tile * tl.num_programs(2) + tl.program_id(2)) * SPLIT  # of the first part
    STEPS: tl.constexpr = (K + BK - 1) // BK
    EACH: tl.constexpr = (STEPS + SPLIT - 1) // SPLIT
    rows = tile * R + tl.arange(0, R)
    is_row = rows < N
    lane = tl.arange(0, BK // 2)
    column = _column(lane)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    tokens = tl.program_id(2) * M + tl.arange(0, M)
    x_tile = x + tl.minimum(tokens, num_tokens - 1).to(tl.int64)[None, :] * stride + column[:, None]
    total = tl.zeros((R, M), dtype=tl.float32)
    for step in tl.range(part * EACH, tl.minimum(part * EACH + EACH, STEPS), num_stages=STAGES):
        k = step * BK
        is_in = k + column < K
        packed = _load_codes(codes, rows, is_row, k, lane, is_in, K)
        words = _load_words(scales, rows, is_row, k, K, G, BK)
        y = tl.load(x_tile + k, mask=is_in[:, None], other=0.0)
        scale = _spread(words, R, BK // G, G // 2)
        upper = tl.load(x_tile + k + HALF, mask=is_in[:, None], other=0.0)
        first, second = table_pair(packed, FORMAT == "nf4")
        total = dot((first * scale).to(dtype), y, total)
        total = dot((second * scale).to(dtype), upper, total)
    rows = tl.minimum(rows, N - 1)
    if SPLIT > 1:
        cells = tl.arange(0, R)[:, None] * M + tl.arange(0, M)[None, :]
        tl.store(partials + (slot + part) * (R * M) + cells, total)
        tl.debug_barrier()  # all threads' stores come before the one thread's increment, which releases them
        if tl.atomic_add(counters + slot // SPLIT, 1, sem="acq_rel", scope="gpu") == SPLIT - 1:
            tl.store(counters + slot // SPLIT, 0)
            # In the order of the parts, whichever came last: the same bits each time.
            total = tl.load(partials + slot * (R * M) + cells, cache_modifier=".cg")
            for i in tl.static_range(1, SPLIT):
                total += tl.load(partials + (slot + i) * (R * M) + cells, cache_modifier=".cg")
            store_result(total, None, None, bias, out, rows, tile, tokens, num_tokens, N, None, M, R)
    else:
        store_result(total, None, None, bias, out, rows, tile, tokens, num_tokens, N, None, M, R)


@triton.jit
def decode_rows_kernel(
    codes, scales, out, N: tl.constexpr, K: tl.constexpr, G: tl.constexpr, FORMAT: tl.constexpr, R: tl.constexpr, BK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out [N, K], R rows by BK columns a program."""
    dtype: tl.constexpr = out.dtype.element_ty
    rows = tl.program_id(0) * R + tl.arange(0, R)
    is_row, k = rows < N, tl.program_id(1) * BK
    lane = tl.arange(0, BK // 2)
    column = k + _column(lane)
    mask = is_row[:, None] & (column < K)[None, :]
    let_next_start(PDL)
    wait_for_inputs(PDL)
    packed = _load_codes(codes, rows, is_row, k, lane, column < K, K)
    words = _load_words(scales, rows, is_row, k, K, G, BK)
    place = out + rows.to(tl.int64)[:, None] * K + column[None, :]
    scale = _spread(words, R, BK // G, G // 2)
    first, second = table_pair(packed, FORMAT == "nf4")
    tl.store(place, (first * scale).to(dtype), mask=mask)
    tl.store(place + HALF, (second * scale).to(dtype), mask=mask)
