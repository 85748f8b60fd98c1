"""Decode attention behind a prefix that all rows share: the prefix's keys and values are read once, not once a row.

First the prefix, for tiles of many rows' queries at once and in splits: every part leaves its result and the logarithm of its
softmax's denominator. Then what each row has behind it, merged with these parts; few rows are split there too, and merged last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from pelton.platform.compiling import launch
from pelton_backends.triton.attention.prefill import LOG2E, attend_keys
from pelton_backends.triton.runtime import (
    INTERPRETED,
    launch_options,
    let_next_start,
    num_sms,
    shared_memory,
    wait_for_inputs,
)

if TYPE_CHECKING:
    from torch import Tensor

_LOG2E = tl.constexpr(LOG2E)
MOST_SPLITS = 16
LEAST_ROWS, LEAST_PREFIX, LEAST_TOKENS = 8, 1024, 24_576


def pays(num_rows: int, prefix_len: int) -> bool:
    """Return whether a decode step gains by it. It replaces one launch that norms, rotates and writes as well, and finds the
    prefix in the L2 cache: measured on an H200 with 8 to 256 rows, prefixes of 256 to 8,000 tokens, 16 or 32 heads over 8."""
    return num_rows >= LEAST_ROWS and prefix_len >= LEAST_PREFIX and num_rows * prefix_len >= LEAST_TOKENS


@triton.jit
def _attend_part(
    query,
    k_head,
    v_head,
    seq_lens,
    alibi_slopes,
    table,
    row,
    head,
    is_row,
    first,
    last,
    q_stride,
    k_block_stride,
    k_slot_stride,
    v_block_stride,
    v_slot_stride,
    scale,
    soft_cap,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr,
):
    """Keys first .. last - 1 for the queries (row, head) [M], which see all of them; the running softmax's state."""
    d = tl.arange(0, BLOCK_D)
    is_number = is_row[:, None] & (d < D)[None, :]
    q = tl.load(query + (row.to(tl.int64) * q_stride + head * D)[:, None] + d[None, :], is_number, 0.0)
    q_position, slope = row, tl.zeros(row.shape, tl.float32)
    if ALIBI:
        q_position = tl.load(seq_lens + row, is_row, 1) - 1
        slope = tl.load(alibi_slopes + head, is_row, 0.0).to(tl.float32) * _LOG2E
    factor = scale if SOFT_CAP else scale * _LOG2E
    acc = tl.zeros([row.shape[0], BLOCK_D], tl.float32)
    denominator = tl.zeros(row.shape, tl.float32)
    highest = tl.full(row.shape, -float("inf"), tl.float32)
    whole = first + tl.maximum(last - first, 0) // BLOCK_N * BLOCK_N
    acc, denominator, highest = attend_keys(
        acc, denominator, highest, q, k_head, v_head, table, first, whole, 0, last, q_position, slope, factor,
        soft_cap, 0, k_block_stride, k_slot_stride, v_block_stride, v_slot_stride,
        D, BLOCK_D, BLOCK_N, BLOCK_SIZE, False, False, SOFT_CAP, ALIBI, False,
    )  # fmt: skip
    acc, denominator, highest = attend_keys(
        acc, denominator, highest, q, k_head, v_head, table, whole, last, 0, last, q_position, slope, factor,
        soft_cap, 0, k_block_stride, k_slot_stride, v_block_stride, v_slot_stride,
        D, BLOCK_D, BLOCK_N, BLOCK_SIZE, False, False, SOFT_CAP, ALIBI, True,
    )  # fmt: skip
    return acc, denominator, highest


@triton.jit
def store_part(parts, logs, part, num_rows, row, head, is_row, acc, denominator, highest, H, D: tl.constexpr):
    """parts [part, row, head, :] = the part's result, logs [part, row, head] = base-2 logarithm of its denominator; -inf and no
    result without keys. A NaN stays one."""
    d = tl.arange(0, acc.shape[1])
    at = (part * num_rows + row).to(tl.int64) * H + head
    has_keys = denominator != 0.0
    is_number = (is_row & has_keys)[:, None] & (d < D)[None, :]
    tl.store(parts + (at * D)[:, None] + d[None, :], acc / tl.where(has_keys, denominator, 1.0)[:, None], is_number)
    log = tl.where(has_keys, highest + tl.log2(tl.where(has_keys, denominator, 1.0)), -float("inf"))
    tl.store(logs + at, log, is_row)


@triton.jit
def merge_parts(
    acc, denominator, highest, parts, logs, num_parts, num_rows, row, head, is_head, H, D: tl.constexpr
):  # fmt: skip
    """Add parts 0 .. num_parts - 1 of one row to the running state."""
    d = tl.arange(0, acc.shape[1])
    for part in range(num_parts):
        at = (part * num_rows + row).to(tl.int64) * H + head
        log = tl.load(logs + at, is_head, 0.0)
        is_number = (is_head & (log > -float("inf")))[:, None] & (d < D)[None, :]
        numbers = tl.load(parts + (at * D)[:, None] + d[None, :], is_number, 0.0)
        now_highest = tl.maximum(highest, log)
        finite = tl.where(now_highest == -float("inf"), 0.0, now_highest)
        shrink, weight = tl.exp2(highest - finite), tl.exp2(log - finite)
        acc = acc * shrink[:, None] + numbers * weight[:, None]
        denominator = denominator * shrink + weight
        highest = now_highest
    return acc, denominator, highest


@triton.jit
def _store_output(
    output, sinks, row, head, is_head, acc, denominator, highest, stride, D: tl.constexpr, SINKS: tl.constexpr
):
    if SINKS:  # one more term of the denominator
        sink = tl.load(sinks + head, is_head, 0.0).to(tl.float32) * _LOG2E
        now_highest = tl.maximum(highest, sink)
        shrink = tl.exp2(highest - now_highest)
        acc = acc * shrink[:, None]
        denominator = denominator * shrink + tl.exp2(sink - now_highest)
    d = tl.arange(0, acc.shape[1])
    acc = acc / tl.where(is_head, denominator, 1.0)[:, None]
    at = output + row.to(tl.int64) * stride + (head * D)[:, None] + d[None, :]
    tl.store(at, acc.to(output.dtype.element_ty), is_head[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=["num_rows", "prefix_len", "tiles", "splits"])
def cascade_prefix_kernel(
    query,
    k_cache,
    v_cache,
    parts,
    logs,
    seq_lens,
    block_table,
    alibi_slopes,
    q_stride,
    k_block_stride,
    k_slot_stride,
    k_head_stride,
    v_block_stride,
    v_slot_stride,
    v_head_stride,
    num_rows,
    prefix_len,
    tiles,
    splits,
    scale,
    soft_cap,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr,
    ON_DEVICE: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program: one kv head, BLOCK_M // G rows, one of `splits` parts of the prefix."""
    wait_for_inputs(PDL)
    let_next_start(PDL)
    if ON_DEVICE:
        prefix_len = tl.load(prefix_len)
    kv_head, split, tile = tl.program_id(0), tl.program_id(1) // tiles, tl.program_id(1) % tiles
    m = tl.arange(0, BLOCK_M)
    row, head = tile * (BLOCK_M // G) + m // G, kv_head * G + m % G
    is_row = (m < BLOCK_M // G * G) & (row < num_rows)
    part_len = tl.cdiv(tl.cdiv(prefix_len, splits), BLOCK_N) * BLOCK_N
    first = split * part_len
    last = tl.minimum(first + part_len, prefix_len)
    acc, denominator, highest = _attend_part(
        query, k_cache + kv_head * k_head_stride, v_cache + kv_head * v_head_stride, seq_lens, alibi_slopes, block_table,
        row, head, is_row, first, last, q_stride, k_block_stride, k_slot_stride, v_block_stride, v_slot_stride,
        scale, soft_cap, D, BLOCK_D, BLOCK_N, BLOCK_SIZE, SOFT_CAP, ALIBI,
    )  # fmt: skip
    store_part(parts, logs, split, num_rows, row, head, is_row, acc, denominator, highest, H, D)


@triton.jit(do_not_specialize=["table_stride", "num_rows", "prefix_len", "prefix_parts", "splits"])
def cascade_rest_kernel(
    query,
    k_cache,
    v_cache,
    parts,
    logs,
    output,
    seq_lens,
    block_table,
    sinks,
    alibi_slopes,
    q_stride,
    output_stride,
    table_stride,
    k_block_stride,
    k_slot_stride,
    k_head_stride,
    v_block_stride,
    v_slot_stride,
    v_head_stride,
    num_rows,
    prefix_len,
    prefix_parts,
    splits,
    scale,
    soft_cap,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SINKS: tl.constexpr,
    ALIBI: tl.constexpr,
    MERGE: tl.constexpr,
    ON_DEVICE: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program: one kv head and row, one of `splits` parts of what lies behind the prefix; with MERGE all of it, and the
    prefix's parts are added at once."""
    wait_for_inputs(PDL)
    let_next_start(PDL)
    if ON_DEVICE:
        prefix_len = tl.load(prefix_len)
    kv_head, split, row = tl.program_id(0), tl.program_id(1) // num_rows, tl.program_id(1) % num_rows
    seq_len = tl.load(seq_lens + row)
    if seq_len == 0:  # padding
        return
    g = tl.arange(0, BLOCK_G)
    rows, head, is_head = row + g * 0, kv_head * G + g, g < G
    # Equal shares of the row's own length, in whole tiles of keys.
    part_len = tl.cdiv(tl.cdiv(seq_len - prefix_len, splits), BLOCK_N) * BLOCK_N
    first = prefix_len + split * part_len
    last = tl.minimum(first + part_len, seq_len)
    acc, denominator, highest = _attend_part(
        query, k_cache + kv_head * k_head_stride, v_cache + kv_head * v_head_stride, seq_lens, alibi_slopes,
        block_table + row.to(tl.int64) * table_stride, rows, head, is_head, first, last, q_stride,
        k_block_stride, k_slot_stride, v_block_stride, v_slot_stride,
        scale, soft_cap, D, BLOCK_D, BLOCK_N, BLOCK_SIZE, SOFT_CAP, ALIBI,
    )  # fmt: skip
    if MERGE:
        acc, denominator, highest = merge_parts(
            acc, denominator, highest, parts, logs, prefix_parts, num_rows, row, head, is_head, H, D
        )
        _store_output(output, sinks, row, head, is_head, acc, denominator, highest, output_stride, D, SINKS)
    else:
        part = prefix_parts + split
        store_part(parts, logs, part, num_rows, rows, head, is_head, acc, denominator, highest, H, D)


@triton.jit(do_not_specialize=["num_rows", "num_parts"])
def cascade_merge_kernel(
    parts,
    logs,
    output,
    seq_lens,
    sinks,
    output_stride,
    num_rows,
    num_parts,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SINKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row and kv head a program: the parts' mean, weighted by 2^log. Padding rows are left as they are."""
    wait_for_inputs(PDL)
    kv_head, row = tl.program_id(0), tl.program_id(1)
    if tl.load(seq_lens + row) == 0:
        return
    g = tl.arange(0, BLOCK_G)
    head, is_head = kv_head * G + g, g < G
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    denominator = tl.zeros([BLOCK_G], tl.float32)
    highest = tl.full([BLOCK_G], -float("inf"), tl.float32)
    acc, denominator, highest = merge_parts(
        acc, denominator, highest, parts, logs, num_parts, num_rows, row, head, is_head, H, D
    )
    _store_output(output, sinks, row, head, is_head, acc, denominator, highest, output_stride, D, SINKS)


def cascade_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    output: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    *,
    num_rows: int,
    prefix_len: int | Tensor,
    max_seq_len: int,
    scale: float,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """Attend from rows of one token, whose first `prefix_len` keys lie in the blocks that row 0's table starts with.

    Math   As `prefill_attention` with one query a row: o = sum_p 2^(l_p) o_p / sum_p 2^(l_p) over parts p of the keys, with
           l_p the base-2 logarithm of part p's sum of exponentials; a sink is one more term of the denominator.
    Paper  Juravsky et al., Hydragen (arXiv:2402.05099); Ye et al., FlashInfer (arXiv:2501.01005), section 3.

    R = num_rows; H heads, N kv heads, D head_dim, P blocks, S block_size, B blocks of the widest table
      query, output     [R.., H, D]   row r is token r; float32, bfloat16, float16; strides (any, D, 1)
      k_cache, v_cache  [P, S, N, D]  that dtype, another float or fp8; strides (any, any, any, 1)
      seq_lens          [R..]         int32; at least prefix_len, or 0 for padding, whose output stays as it is
      block_table       [R.., B]      int32; last axis contiguous
      prefix_len        a multiple of S, on the host; or [1] int32 on the device, which may be 0, for captured graphs: the
                        number of splits then follows from R alone
      max_seq_len       a bound; chooses the number of splits

    Parts and their merge in float32; tolerances as `prefill_attention`.
    """
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, block_size = k_cache.shape[2], k_cache.shape[1]
    group = num_heads // num_kv_heads
    assert query.stride(1) == head_dim and output.stride(1) == head_dim, "heads of a token lie side by side"
    if not (is_on_device := isinstance(prefix_len, torch.Tensor)):
        assert prefix_len % block_size == 0, f"prefix_len is {prefix_len}; expected a multiple of {block_size}"
    block_m, block_n, num_warps, num_stages = _prefix_tiles(query.dtype, group, head_dim, shared_memory(query.device))
    rest_n, rest_warps, rest_stages = _rest_tiles(query.dtype)
    places = 2 * num_sms(query.device)  # the prefix's programs that run at once
    tiles = triton.cdiv(num_rows, block_m // group)
    prefix_splits = min(places // (tiles * num_kv_heads), MOST_SPLITS)
    splits = min(2 * places // (num_rows * num_kv_heads), MOST_SPLITS)
    if not is_on_device:
        prefix_splits = min(prefix_splits, prefix_len // (2 * block_n))
        splits = min(splits, (max_seq_len - prefix_len) // (4 * rest_n))
    prefix_splits, splits = max(prefix_splits, 1), max(splits, 1)
    is_merged = splits == 1
    num_parts = prefix_splits + (0 if is_merged else splits)
    parts = torch.empty(num_parts, num_rows, num_heads, head_dim, dtype=torch.float32, device=query.device)
    logs = torch.empty(num_parts, num_rows, num_heads, dtype=torch.float32, device=query.device)
    strides = (*k_cache.stride()[:3], *v_cache.stride()[:3])
    shared = {
        "H": num_heads, "G": group, "D": head_dim, "BLOCK_D": max(triton.next_power_of_2(head_dim), 16), "PDL": pdl,
        **launch_options(pdl),
    }  # fmt: skip
    options = {
        "BLOCK_SIZE": block_size, "SOFT_CAP": soft_cap is not None, "ALIBI": alibi_slopes is not None,
        "ON_DEVICE": is_on_device, **shared,
    }  # fmt: skip
    launch(
        cascade_prefix_kernel, (num_kv_heads, tiles * prefix_splits),
        query, k_cache, v_cache, parts, logs, seq_lens, block_table, alibi_slopes, query.stride(0), *strides,
        num_rows, prefix_len, tiles, prefix_splits, scale, soft_cap or 0.0,
        BLOCK_M=block_m, BLOCK_N=block_n, num_warps=num_warps, num_stages=num_stages, **options,
    )  # fmt: skip
    launch(
        cascade_rest_kernel, (num_kv_heads, num_rows * splits),
        query, k_cache, v_cache, parts, logs, output, seq_lens, block_table, sinks, alibi_slopes, query.stride(0),
        output.stride(0), block_table.stride(0), *strides, num_rows, prefix_len, prefix_splits, splits, scale,
        soft_cap or 0.0, SINKS=sinks is not None, MERGE=is_merged, BLOCK_G=max(triton.next_power_of_2(group), 16),
        BLOCK_N=rest_n, num_warps=rest_warps, num_stages=rest_stages, **options,
    )  # fmt: skip
    if not is_merged:
        launch(
            cascade_merge_kernel, (num_kv_heads, num_rows),
            parts, logs, output, seq_lens, sinks, output.stride(0), num_rows, num_parts,
            BLOCK_G=triton.next_power_of_2(group), SINKS=sinks is not None, num_warps=1 if group * head_dim <= 256 else 4,
            **shared,
        )  # fmt: skip
    return output


def _prefix_tiles(dtype: torch.dtype, group: int, head_dim: int, memory: int) -> tuple[int, int, int, int]:
    """BLOCK_M, BLOCK_N, warps, stages. 64 rows leave room for two programs on a multiprocessor of an H200; with less `memory`
    (shared, bytes) they are only made to fit."""
    least = max(triton.next_power_of_2(group), 16)
    if INTERPRETED or dtype == torch.float32:
        return max(least, 32), 32, 4, 1
    return max(least, 64), 32 if head_dim > 128 and memory < 110_000 else 64, 4, 2


def _rest_tiles(dtype: torch.dtype) -> tuple[int, int, int]:
    """BLOCK_N, warps, stages: the best or nearly of six at 32 to 256 rows of about 256 tokens on an H200."""
    if INTERPRETED or dtype == torch.float32:
        return 32, 4, 1
    return 64, 4, 2
