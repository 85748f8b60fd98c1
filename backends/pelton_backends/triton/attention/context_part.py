"""Attention to a rank's part of each row's tokens, with its log-sum-exp: decode context parallelism.

Of D ranks, rank r keeps tokens r, r + D, ... of every row, side by side: its key j is the row's token j D + r. A query sees those that are
not behind it. One kernel serves rows of one token and of many; where rows are few, several programs share what a tile of queries sees,
and a second launch merges what they found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from pelton.attention.interface import AttentionParams, BoundAttention
from pelton.platform.compiling import launch
from pelton_backends.triton.attention.cascade import merge_parts, store_part
from pelton_backends.triton.attention.prefill import LOG2E, attend_keys, choose_tiles
from pelton_backends.triton.runtime import launch_options, let_next_start, num_sms, shared_memory, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

    from pelton_backends.triton.backend import TritonMetadata

_LOG2E, _LN2 = tl.constexpr(LOG2E), tl.constexpr(0.6931471805599453)
MOST_SPLITS = 32
LEAST_KEYS = 256
"""Keys of a split: with fewer its merging costs more than it hides, as measured for latents (`latent.py`)."""


@triton.jit
def kept_of(num_tokens, rank, RANKS: tl.constexpr):
    """How many of a row's first `num_tokens` are kept by this rank."""
    return (num_tokens + (RANKS - 1) - rank) // RANKS


@triton.jit
def store_result(output, lse, at, head, is_head, acc, denominator, highest, stride, H, D: tl.constexpr):
    """The mean of what was seen and its natural log-sum-exp, for tokens `at` [M] or one; zeros and -inf where nothing was seen."""
    d = tl.arange(0, acc.shape[1])
    is_seen = denominator != 0.0  # a NaN stays one
    acc = tl.where(is_seen[:, None], acc / tl.where(is_seen, denominator, 1.0)[:, None], 0.0)
    log = tl.where(is_seen, (highest + tl.log2(tl.where(is_seen, denominator, 1.0))) * _LN2, -float("inf"))
    to = output + (at * stride + head * D)[:, None] + d[None, :]
    tl.store(to, acc.to(output.dtype.element_ty), is_head[:, None] & (d < D)[None, :])
    tl.store(lse + at * H + head, log, is_head)


@triton.jit(do_not_specialize=["table_stride", "num_reqs", "num_tokens", "rank"])
def context_part_kernel(
    query,
    k_cache,
    v_cache,
    output,
    lse,
    parts,
    logs,
    query_start_loc,
    seq_lens,
    block_table,
    q_stride,
    output_stride,
    table_stride,
    k_block_stride,
    k_slot_stride,
    k_head_stride,
    v_block_stride,
    v_slot_stride,
    v_head_stride,
    num_reqs,
    num_tokens,
    rank,
    scale,
    soft_cap,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    RANKS: tl.constexpr,
    SPLITS: tl.constexpr,
    CAUSAL: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program: one kv head, BLOCK_M // G tokens of one row, one of SPLITS parts of the keys that they see.

    Row r owns places query_start_loc[r] // BLOCK_Q + r and on of axis 1: at least as many as it needs, found by bisection."""
    BLOCK_Q: tl.constexpr = BLOCK_M // G
    wait_for_inputs(PDL)
    let_next_start(PDL)
    kv_head, split = tl.program_id(0), tl.program_id(2)
    index = tl.num_programs(1) - 1 - tl.program_id(1)
    row, above = num_reqs * 0, num_reqs
    while above - row > 1:
        middle = (row + above) // 2
        if tl.load(query_start_loc + middle) // BLOCK_Q + middle <= index:
            row = middle
        else:
            above = middle
    row_start = tl.load(query_start_loc + row)
    query_len = tl.load(query_start_loc + row + 1) - row_start
    first_token = (index - (row_start // BLOCK_Q + row)) * BLOCK_Q
    if first_token >= query_len:
        return
    seq_len = tl.load(seq_lens + row)

    m, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    token = first_token + m // G
    head = kv_head * G + m % G
    is_row = (m < BLOCK_Q * G) & (token < query_len)
    place = (row_start + token).to(tl.int64)
    q = tl.load(query + (place * q_stride + head * D)[:, None] + d[None, :], is_row[:, None] & (d < D)[None, :], 0.0)
    # Positions as numbers of this rank's keys: a query sees those up to its own.
    num_keys = kept_of(seq_len, rank, RANKS)
    first_position = seq_len - query_len + first_token
    last_position = tl.minimum(first_position + BLOCK_Q, seq_len) - 1
    q_position = kept_of(seq_len - query_len + token + 1, rank, RANKS) - 1
    if CAUSAL:
        end, high = kept_of(last_position + 1, rank, RANKS), kept_of(first_position + 1, rank, RANKS)
    else:
        end, high = num_keys, num_keys
    part_len = tl.cdiv(tl.cdiv(end, SPLITS), BLOCK_N) * BLOCK_N
    first = split * part_len
    last = tl.minimum(first + part_len, end)
    whole = first + tl.maximum(tl.minimum(last, high) - first, 0) // BLOCK_N * BLOCK_N  # seen by all up to here

    highest = tl.full([BLOCK_M], -float("inf"), tl.float32)
    denominator = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    factor = scale if SOFT_CAP else scale * _LOG2E
    k_head, v_head = k_cache + kv_head * k_head_stride, v_cache + kv_head * v_head_stride
    table = block_table + row.to(tl.int64) * table_stride
    acc, denominator, highest = attend_keys(
        acc, denominator, highest, q, k_head, v_head, table, first, whole, 0, num_keys, q_position, highest, factor,
        soft_cap, 0, k_block_stride, k_slot_stride, v_block_stride, v_slot_stride,
        D, BLOCK_D, BLOCK_N, BLOCK_SIZE, CAUSAL, 0, SOFT_CAP, False, False,
    )  # fmt: skip
    acc, denominator, highest = attend_keys(
        acc, denominator, highest, q, k_head, v_head, table, whole, last, 0, num_keys, q_position, highest, factor,
        soft_cap, 0, k_block_stride, k_slot_stride, v_block_stride, v_slot_stride,
        D, BLOCK_D, BLOCK_N, BLOCK_SIZE, CAUSAL, 0, SOFT_CAP, False, True,
    )  # fmt: skip
    if SPLITS == 1:
        store_result(output, lse, place, head, is_row, acc, denominator, highest, output_stride, H, D)
    else:
        store_part(parts, logs, split, num_tokens, row_start + token, head, is_row, acc, denominator, highest, H, D)


@triton.jit(do_not_specialize=["num_tokens"])
def merge_context_kernel(
    parts, logs, output, lse, output_stride, num_tokens, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token and kv head a program. Of padding it makes something of what is there."""
    wait_for_inputs(PDL)
    let_next_start(PDL)
    kv_head, token = tl.program_id(0), tl.program_id(1)
    g = tl.arange(0, BLOCK_G)
    head, is_head = kv_head * G + g, g < G
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    denominator = tl.zeros([BLOCK_G], tl.float32)
    highest = tl.full([BLOCK_G], -float("inf"), tl.float32)
    acc, denominator, highest = merge_parts(
        acc, denominator, highest, parts, logs, SPLITS, num_tokens, token, head, is_head, H, D
    )
    at = token.to(tl.int64) + tl.zeros([BLOCK_G], tl.int64)
    store_result(output, lse, at, head, is_head, acc, denominator, highest, output_stride, H, D)


def context_part_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    output: Tensor,
    lse: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    *,
    num_reqs: int,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    num_ranks: int,
    rank: int,
    causal: bool = True,
    soft_cap: float | None = None,
    pdl: bool = False,
) -> None:
    """Attend from each row's new tokens to the tokens of the row that this rank keeps, which lie in the cache already.

    Math   with x_j = cap(scale q k_j) over the keys j that a query sees, of tokens j D + r up to its own (all with causal=False):
           output = sum_j e^x_j v_j / sum_j e^x_j,  lse = log sum_j e^x_j; zeros and -inf where there is none
    Paper  Milakov, Gimelshein, Online normalizer calculation for softmax (arXiv:1805.02867); Dao et al., Flash-Decoding (2023)

    T tokens, H heads, N kv heads, D head_dim, P blocks, S block_size, R rows, B blocks of the widest table
      query, output     [T, H, D]     float32, bfloat16, float16; strides (any, D, 1)
      lse               [T, H]        float32, contiguous
      k_cache, v_cache  [P, S, N, D]  that dtype, another float or fp8; strides (any, any, any, 1)
      query_start_loc   [R + 1]       int32; padding rows are empty
      seq_lens          [R]           int32, context plus new tokens, of all ranks
      block_table       [R, B]        int32, of blocks that have S of this rank's tokens each; last axis contiguous

    Sums in float32, weights rounded to query's dtype before they meet the values; tolerances as `prefill_attention`. Grid and
    buffers follow from shapes and the bounds `max_query_len` and `max_seq_len` alone. Oracle: the suite of backends puts the
    parts of all ranks together and compares with float64.
    """
    num_tokens, num_heads, head_dim = query.shape
    assert query.stride(1) == head_dim and output.stride(1) == head_dim, "heads of a token lie side by side"
    num_kv_heads, block_size = k_cache.shape[2], k_cache.shape[1]
    group = num_heads // num_kv_heads
    tiles = choose_tiles(query.dtype, head_dim, group, max_query_len, shared_memory(query.device))
    places = num_tokens // (tiles.block_m // group) + num_reqs
    splits = num_splits(num_kv_heads * places, -(-max_seq_len // num_ranks), query.device)
    parts = logs = lse
    if splits > 1:
        parts = torch.empty(splits, num_tokens, num_heads, head_dim, dtype=torch.float32, device=query.device)
        logs = torch.empty(splits, num_tokens, num_heads, dtype=torch.float32, device=query.device)
    shared = {
        "H": num_heads, "G": group, "D": head_dim, "BLOCK_D": max(triton.next_power_of_2(head_dim), 16), "SPLITS": splits,
        "PDL": pdl, **launch_options(pdl),
    }  # fmt: skip
    launch(
        context_part_kernel, (num_kv_heads, places, splits),
        query, k_cache, v_cache, output, lse, parts, logs, query_start_loc, seq_lens, block_table, query.stride(0),
        output.stride(0), block_table.stride(0), *k_cache.stride()[:3], *v_cache.stride()[:3], num_reqs, num_tokens, rank,
        scale, soft_cap or 0.0, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_SIZE=block_size, RANKS=num_ranks,
        CAUSAL=causal, SOFT_CAP=soft_cap is not None, num_warps=tiles.num_warps, num_stages=tiles.num_stages, **shared,
    )  # fmt: skip
    if splits > 1:
        launch(
            merge_context_kernel, (num_kv_heads, num_tokens),
            parts, logs, output, lse, output.stride(0), num_tokens, BLOCK_G=triton.next_power_of_2(group),
            num_warps=1 if group * head_dim <= 256 else 4, **shared,
        )  # fmt: skip


def num_splits(programs: int, max_keys: int, device: torch.device) -> int:
    """How many programs share what a tile sees: as many as fill the device twice; a power of two, since a kernel is compiled for each."""
    most = min(2 * num_sms(device) // programs, max_keys // LEAST_KEYS, MOST_SPLITS)
    return 1 << (max(most, 1).bit_length() - 1)


class TritonPartAttention(BoundAttention):
    """A layer's attention to this rank's part of each row's tokens."""

    layer: AttentionParams

    def __init__(self, layer: AttentionParams, pdl: bool) -> None:
        super().__init__(layer)
        self._pdl = pdl

    def __call__(self, query: Tensor, metadata: TritonMetadata, output: Tensor) -> None:
        raise NotImplementedError("This rank keeps a part of each row's tokens; `attend_part` attends to them.")

    def attend_part(self, query: Tensor, metadata: TritonMetadata, output: Tensor, lse: Tensor) -> None:
        layer, common = self.layer, metadata.common
        context_part_attention(
            query, layer.k_cache, layer.v_cache, output, lse, common.query_start_loc, common.seq_lens, common.block_table,
            num_reqs=common.num_reqs, max_query_len=common.max_query_len, max_seq_len=common.max_seq_len,
            scale=layer.scale, num_ranks=layer.needs.decode_context_parallel, rank=layer.needs.context_rank,
            causal=common.causal, soft_cap=layer.soft_cap, pdl=self._pdl,
        )  # fmt: skip
