"""Attention of rows with one query token over the paged cache: one launch, whatever the lengths.

Three stages of one kernel, so that a decode layer has no kernel but this between its QKV and O products:
  1. query (and, fused, key and value) of the step: RMS norm, rotation, the cache's new entry;
  2. flash attention over chunks of the context, the work of one kv head shared out to several programs;
  3. the last program to finish a (row, kv head) merges their partial results.

`decode_kernel` gives each row and kv head programs of its own: all rows equally many, or, where rows are few, as `decode_shares.py`
deals them out once a step by the rows' lengths, so that one row of 120,000 tokens has them all. Nothing to look up, or little, so
the shortest way for few rows. `streamed_decode_kernel`, in a file of its own, deals all chunks of all rows evenly to a fixed
number of programs: for many rows, and for lengths that differ. All are memory bound.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from pelton_backends.triton.attention.decode_pieces import (
    angles_at,
    attend,
    blocks_of,
    finish,
    load_chunk,
    load_heads,
    make_query,
    norm_weights,
    partner_of,
)
from pelton_backends.triton.attention.decode_shares import (
    SHARE,
    LaunchShape,
    PartBuffers,
    chunks_of_row,
    cuts_of,
    deal_rows,
    launch_shape,
    padded,
    row_bytes,
    share_at,
    share_of_row,
)
from pelton_backends.triton.attention.decode_streamed import streamed_decode_kernel
from pelton_backends.triton.launch import Launcher, Variant, alignment
from pelton_backends.triton.runtime import launch_options, let_next_start, num_sms, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.ops.interface import NormSpec


@triton.jit
def decode_kernel(
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
    SPLITS: tl.constexpr,
    LEAST: tl.constexpr,
    PARTS: tl.constexpr,
    IS_EARLY: tl.constexpr,
    CUTS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend with s splits of a row, each of which takes every s-th chunk. Arguments: see `decode_attention`.

    A program is a (kv head, row, split), and a row uses as many splits as leave each LEAST chunks or more, SPLITS at most; or,
    with `shares`, it is one of a kv head's SPLITS programs, which all rows share by their lengths. A kv head of many query heads counts
    as CUTS of them, see `cuts_of`.

    IS_EARLY: lengths, tables, shares, positions and slots are there before the wait (see `runtime`), and keys and values are
    of earlier steps, so that only the query is not: programs without work end at once, the others load their first chunk.
    """
    head, place = tl.program_id(0), tl.program_id(1)
    if CUTS > 1:
        k_cache += (head // CUTS - head) * stride_head
        v_cache += (head // CUTS - head) * stride_head
    let_next_start(PDL)
    local, dim = tl.arange(0, N), tl.arange(0, PADDED_DIM)
    own, partners = q_norm, q_norm
    if not IS_EARLY:
        if q_norm is not None:
            own = norm_weights(q_norm, k_norm, dim, HEAD_DIM, GROUP, Q)
            partners = norm_weights(q_norm, k_norm, partner_of(dim, ROTARY_DIM), HEAD_DIM, GROUP, Q)
        wait_for_inputs(PDL)
    if shares is not None:
        row, seq_len, first_split, num_splits = share_at(shares, place)
        split = place - first_split
        # Beside the rest: after the row it would be one more way to memory and back.
        block = tl.load(shares + place * SHARE + 4 + local // 16, cache_modifier=".cg")
    else:
        row, split, first_split = place, tl.program_id(2), 0
        seq_len = tl.load(seq_lens + row, cache_modifier=".cg")
        if WINDOW == 0:
            block = blocks_of(
                block_table + row.to(tl.int64) * stride_table, split * N + local, stride_table, BLOCK_SIZE
            )
    token_index = row
    if query_start_loc is not None:
        token_index = tl.load(query_start_loc + row)
        if shares is None:  # noqa: SIM102 rows with another number of tokens belong to another kernel
            if tl.load(query_start_loc + row + 1) - token_index != 1:
                seq_len = 0
    if shares is None:
        num_splits = share_of_row(seq_len, FUSED, WINDOW, N, SPLITS, LEAST)
    is_idle = split >= num_splits
    if IS_EARLY:  # one waits all the same: whoever waits for this launch may rely on those before it too
        if is_idle & (place + tl.program_id(2) > 0):
            return
    elif is_idle:
        return

    first_key, last_key, first_chunk, last_chunk = chunks_of_row(seq_len, FUSED, WINDOW, N)
    table = block_table + row.to(tl.int64) * stride_table
    token = (first_chunk + split) * N + local
    if shares is None and WINDOW != 0:
        block = blocks_of(table, token, stride_table, BLOCK_SIZE)
    next_block = blocks_of(table, token + num_splits * N, stride_table, BLOCK_SIZE)
    if IS_EARLY and q_norm is not None:
        own = norm_weights(q_norm, k_norm, dim, HEAD_DIM, GROUP, Q)
        partners = norm_weights(q_norm, k_norm, partner_of(dim, ROTARY_DIM), HEAD_DIM, GROUP, Q)
    key, value, cos, sin = own, own, own, own
    if IS_EARLY:
        key, value = load_chunk(
            k_cache + head * stride_head, v_cache + head * stride_head, block, token, (token >= first_key) & (token < last_key),
            stride_block, stride_token, BLOCK_SIZE, HEAD_DIM, PADDED_DIM,
        )  # fmt: skip
    else:
        x, other, new_value = load_heads(
            query + token_index.to(tl.int64) * stride_query, head, dim, FUSED, HEAD_DIM, ROTARY_DIM, NUM_KV_HEADS, GROUP, Q,
            CUTS,
        )  # fmt: skip
    slot, position, guess = tl.full([], -1, tl.int64), tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    if FUSED:
        slot = tl.load(slot_mapping + row, cache_modifier=".cg")
        if ROTARY_DIM > 0:
            position = tl.load(positions + row, cache_modifier=".cg")
            guess = tl.maximum(seq_len - 1, 0).to(tl.int64)
            cos, sin = angles_at(cos_sin, guess, dim, ROTARY_DIM, Q)
    if IS_EARLY:
        wait_for_inputs(PDL)
        if is_idle:
            return
        x, other, new_value = load_heads(
            query + token_index.to(tl.int64) * stride_query, head, dim, FUSED, HEAD_DIM, ROTARY_DIM, NUM_KV_HEADS, GROUP, Q,
            CUTS,
        )  # fmt: skip
    # Where a row's position is its number of keys, its angles are under way with the rest.
    if FUSED and ROTARY_DIM > 0:  # noqa: SIM102 a constant condition leaves the other out
        if position != guess:
            cos, sin = angles_at(cos_sin, position, dim, ROTARY_DIM, Q)
    if (split > 0) | (head % CUTS > 0):
        slot = tl.full([], -1, tl.int64)
    x, new_value, new_logit = make_query(
        x, other, new_value, cos, sin, slot, head, k_cache, v_cache, own, partners, alibi_slopes, stride_block,
        stride_token, stride_head, scale, EPS, UNIT_OFFSET, FUSED, SOFT_CAP, BLOCK_SIZE, HEAD_DIM, PADDED_DIM, GROUP, Q,
        ROTARY_DIM,
    )  # fmt: skip
    top, total, sums = attend(
        x, new_value, new_logit, split == 0, head, first_chunk + split, last_chunk, num_splits, first_key, last_key,
        seq_len - 1, key, value, block, next_block, table, k_cache, v_cache, alibi_slopes, stride_table, stride_block,
        stride_token, stride_head, scale, FUSED, SOFT_CAP, BLOCK_SIZE, HEAD_DIM, PADDED_DIM, GROUP, Q, M, N, IS_EARLY, STAGES,
    )  # fmt: skip

    first_part = (row * NUM_KV_HEADS + head) * SPLITS
    if shares is not None:
        first_part = head * SPLITS + first_split
    finish(
        output + token_index.to(tl.int64) * stride_output, 0, GROUP, top, total, sums, head, split, num_splits, first_part,
        first_part, part_sums, part_stats, arrivals, sinks, HEAD_DIM, PADDED_DIM, GROUP, GROUP, MEMBERS, PARTS, 1, False,
    )  # fmt: skip


_launch, _launch_streamed = map(Launcher, (decode_kernel, streamed_decode_kernel))
STREAMED_START = 4
"""Chunks' worth of time that the start of a pair costs a program: at 64 rows of 100 to 1024 tokens 0 gives 45.1 us, 2 43.2,
4 42.3, 8 41.9, 14 42.6 (three stages; with two, 4 gives 41.6 and 8 42.4)."""


@dataclass(frozen=True, slots=True)
class NormRope:
    """Constants of what a fused launch does to QKV's rows: the same in every step."""

    rotary_dim: int
    cos_sin: Tensor | None = None  # [max_model_len, rotary_dim] float32
    q_norm: Tensor | None = None  # [D]
    k_norm: Tensor | None = None
    norm_spec: NormSpec | None = None  # of both norms


@dataclass(frozen=True, slots=True)
class NewTokens:
    """Tensors that a fused launch needs to make query, key and value of the step from QKV's rows."""

    positions: Tensor  # [T] int64
    slot_mapping: Tensor  # [T] int64, -1: the cache is left as it is
    norm_rope: NormRope


def decode_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    output: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    parts: PartBuffers,
    *,
    num_rows: int,
    max_seq_len: int,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    new: NewTokens | None = None,
    pdl: bool = False,
    shape: LaunchShape | None = None,
    is_settled: bool = False,
) -> None:
    """Attend from one token per row to the row's context, into `output`.

    Math   with L = seq_lens[r], t = L - 1 and, over keys max(0, L - window) <= j <= t of the row,
             x_j = cap(scale q k_j) + slope (j - t),  cap(y) = soft_cap tanh(y / soft_cap) or y
             o = sum_j e^x_j v_j / (sum_j e^x_j + e^sink)
    Papers Milakov, Gimelshein, Online normalizer calculation for softmax (arXiv:1805.02867); Dao et al., Flash-Decoding (2023);
           Osama et al., Stream-K (arXiv:2301.03598), for the even shares.

    R rows, T tokens, H heads, N kv heads, D head_dim, P blocks, S block_size
      query            [T, H, D], strides (any, D, 1); with `new`: [T, (H + 2 N) D], strides (any, 1); fp16, bf16, fp32
      k_cache, v_cache [P, S, N, D] views of equal strides (any, any, any, 1); dtype of query, or bf16, fp8 e4m3, fp8 e5m2
      output           [T, H, D], strides (any, D, 1)
      seq_lens         [R] int32; 0: a row of padding, whose output is left as it is
      block_table      [R, B] int32, strides (any, 1)
      sinks, alibi_slopes [H]
    Row r's token is r, or with `query_start_loc` [R + 1] int32 its token query_start_loc[r]; rows that have another number of
    tokens than one are left out there.
    With `new`, query is the product's rows: norm, rotation and the cache's new entry are done here (rounded as in
    pelton.ops.reference), and each row's last token comes from registers; else the cache holds it already.

    Products accumulate in float32 (float32 models: no TF32), softmax is float32, its weights are rounded to the query's dtype for
    the product with V. Nothing outside a row's keys is read into the sum, so other blocks may hold NaN.
    No host synchronisation; grid and buffers follow from `num_rows`, `max_seq_len` (an upper bound) and strides alone.

    is_settled: rows are dealt out already where `shape` says so, and a kernel since has waited for all that wrote the step's
    lengths, tables, positions and slots, so that with `pdl` they may be read early (see `runtime`).
    """
    bound = DecodeAttention(
        k_cache, v_cache, parts, num_heads=output.shape[1], dtype=query.dtype, scale=scale, sliding_window=sliding_window,
        soft_cap=soft_cap, sinks=sinks, alibi_slopes=alibi_slopes, norm_rope=new.norm_rope if new else None, pdl=pdl,
    )  # fmt: skip
    shape = shape or bound.shape_of(num_rows, max_seq_len)
    if pdl and not is_settled:
        shape = replace(shape, is_early=False)
    if shape.is_dealt and not is_settled:
        deal_rows(
            seq_lens, block_table, parts, shape, num_rows=num_rows, block_size=k_cache.shape[1],
            sliding_window=sliding_window, query_start_loc=query_start_loc, pdl=pdl,
        )  # fmt: skip
    bound(
        query, output, seq_lens, block_table, shape, num_rows=num_rows, query_start_loc=query_start_loc,
        positions=new.positions if new else None, slot_mapping=new.slot_mapping if new else None,
    )  # fmt: skip


class DecodeAttention:
    """`decode_attention` over one layer's cache: what follows from the layer, and from a launch's shape, is found out once; a call
    adds the tensors and numbers of a step."""

    def __init__(
        self,
        k_cache: Tensor,
        v_cache: Tensor,
        parts: PartBuffers,
        *,
        num_heads: int,
        dtype: torch.dtype,
        scale: float,
        sliding_window: int | None,
        soft_cap: float | None,
        sinks: Tensor | None,
        alibi_slopes: Tensor | None,
        norm_rope: NormRope | None,
        pdl: bool,
    ) -> None:
        """norm_rope: the launch is fused, and its query QKV's rows."""
        _, block_size, self._num_kv_heads, head_dim = k_cache.shape
        self._num_sms, self._is_fused = num_sms(k_cache.device), norm_rope is not None
        self._scale, self._shares = scale, parts.shares
        padded_dim = padded(head_dim)
        self._row_bytes = row_bytes(head_dim, dtype)
        self._group = num_heads // self._num_kv_heads
        self._cuts = cuts_of(self._group, self._row_bytes)
        group = self._group // self._cuts
        made = norm_rope or NormRope(rotary_dim=0)
        spec = made.norm_spec
        heads_of_tile, members = triton.next_power_of_2(group + 1), triton.next_power_of_2(group)
        self._constants = {
            "EPS": spec.eps if spec else None,
            "UNIT_OFFSET": spec.unit_offset if spec else False,
            "FUSED": self._is_fused,
            "WINDOW": sliding_window or 0,
            "SOFT_CAP": soft_cap,
            "BLOCK_SIZE": block_size,
            "HEAD_DIM": head_dim,
            "PADDED_DIM": padded_dim,
            "ROTARY_DIM": made.rotary_dim,
            "NUM_KV_HEADS": self._num_kv_heads * self._cuts,
            "CUTS": self._cuts,
            "GROUP": group,
            "Q": heads_of_tile,
            "M": max(heads_of_tile, 8),
            "MEMBERS": members,
            "PARTS": max(2, min(16, 4096 // (members * padded_dim))),
            "PDL": pdl,
        }
        self._caches = k_cache, v_cache
        self._last = (
            made.cos_sin, made.q_norm, made.k_norm, sinks, alibi_slopes, parts.sums, parts.stats, parts.arrivals,
        )  # fmt: skip
        self._cache_strides = k_cache.stride()[:3]
        self._key = (
            dtype, k_cache.dtype, k_cache.device, self._cache_strides,
            None if sinks is None else sinks.dtype, None if alibi_slopes is None else alibi_slopes.dtype,
            alignment(*self._caches, *self._last),
        )  # fmt: skip
        self._options = launch_options(pdl)
        self._variants: dict[tuple[LaunchShape, int], Variant] = {}

    def shape_of(self, num_rows: int, max_seq_len: int) -> LaunchShape:
        return launch_shape(num_rows, self._num_kv_heads, self._group, max_seq_len, self._row_bytes, self._num_sms)

    def __call__(
        self,
        query: Tensor,
        output: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        shape: LaunchShape,
        *,
        num_rows: int,
        query_start_loc: Tensor | None = None,
        positions: Tensor | None = None,
        slot_mapping: Tensor | None = None,
    ) -> None:
        """For a dealt shape `deal_rows` has dealt this step's rows. positions, slot_mapping: of a fused launch."""
        num_kv_heads = self._num_kv_heads * self._cuts
        is_streamed, power = shape.splits == 0, (num_rows - 1).bit_length()
        variant = self._variants.get((shape, power))
        if variant is None:
            variant = self._variants[shape, power] = self._variant(shape, 1 << power)
        strides = query.stride(0), output.stride(0), block_table.stride(0)
        key = (
            strides, query_start_loc is None,
            alignment(query, positions, slot_mapping, output, query_start_loc, seq_lens, block_table),
        )  # fmt: skip
        shares = () if is_streamed else (self._shares if shape.is_dealt else None,)
        arguments = (
            query, positions, slot_mapping, *self._caches, output, query_start_loc, seq_lens, block_table, *shares, *self._last,
            *strides, *self._cache_strides, *((num_rows,) if is_streamed else ()), self._scale,
        )  # fmt: skip
        if is_streamed:
            grid: tuple[int, ...] = (shape.programs // self._cuts, self._cuts)
        else:
            grid = (num_kv_heads, shape.splits) if shape.is_dealt else (num_kv_heads, num_rows, shape.splits)
        variant(key, grid, arguments)

    def _variant(self, shape: LaunchShape, most_rows: int) -> Variant:
        constants = {**self._constants, "N": shape.keys, "STAGES": shape.num_stages}
        if shape.splits == 0:
            launch, own = _launch_streamed, {"ROWS": most_rows, "START": STREAMED_START}
        else:
            is_early = shape.is_early and self._is_fused
            launch, own = _launch, {"SPLITS": shape.splits, "LEAST": shape.least, "IS_EARLY": is_early}
        constants |= own
        return launch.variant((self._key, shape.is_dealt), constants, num_warps=1, **self._options)
