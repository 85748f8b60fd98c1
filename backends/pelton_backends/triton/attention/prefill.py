"""Paged attention for rows with several new tokens: prompts, chunks of prompts, and rows behind a cached prefix.

The tile of queries holds BLOCK_M rows: the query heads of one kv head for BLOCK_M / group tokens, so that keys and values
are read once for the group. `attend_keys` is the loop over keys; `cascade.py` uses it as well.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from pelton_backends.triton.launch import Launcher, Variant, alignment
from pelton_backends.triton.runtime import (
    H200_MEMORY,
    INTERPRETED,
    dot,
    launch_options,
    shared_memory,
    wait_for_inputs,
)

if TYPE_CHECKING:
    from types import ModuleType

    from torch import Tensor

    from pelton_backends.triton.attention.prefill_hopper import HopperPrefill

LOG2E = 1.4426950408889634
_LOG2E: tl.constexpr = tl.constexpr(LOG2E)


@triton.jit
def soft_capped(x, cap):
    """cap tanh(x / cap), by one exponential."""
    return cap - 2.0 * cap / (1.0 + tl.exp2((2.0 * _LOG2E) * x / cap))


@triton.jit
def attend_keys(
    acc,
    denominator,
    highest,
    q,
    k_cache,
    v_cache,
    table,
    first,
    last,
    least,
    seq_len,
    q_position,
    slope,
    factor,
    soft_cap,
    window,
    k_block_stride,
    k_slot_stride,
    v_block_stride,
    v_slot_stride,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Keys first .. last - 1 of one kv head, BLOCK_N at a time, into the running softmax.

    `acc` [M, BLOCK_D], `denominator` [M] and `highest` [M] (base-2 logarithm) are float32 and returned; `q` [M, BLOCK_D].
    `k_cache`, `v_cache` point at the head; `table` at the row's blocks. `factor` is scale, times log2(e) unless there is a
    soft cap. Without MASKED every key of every block is seen by every query; with it keys from `seq_len` on are not read, nor,
    with WINDOW, those before `least`. WINDOW 2: a query sees its own aligned chunk of `window` keys.
    """
    n, d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    for start in range(first, last, BLOCK_N):
        position = start + n
        if BLOCK_SIZE % BLOCK_N == 0:
            block = tl.load(table + start // BLOCK_SIZE).to(tl.int64)
            k_row = block * k_block_stride + (start % BLOCK_SIZE + n) * k_slot_stride
            v_row = block * v_block_stride + (start % BLOCK_SIZE + n) * v_slot_stride
        else:
            if MASKED:
                blocks = tl.load(table + position // BLOCK_SIZE, position < seq_len, 0).to(tl.int64)
            else:
                blocks = tl.load(table + position // BLOCK_SIZE).to(tl.int64)
            k_row = blocks * k_block_stride + (position % BLOCK_SIZE) * k_slot_stride
            v_row = blocks * v_block_stride + (position % BLOCK_SIZE) * v_slot_stride
        k_at, v_at = k_cache + k_row[:, None] + d[None, :], v_cache + v_row[:, None] + d[None, :]
        if MASKED:
            # Slots past the sequence, and in blocks that a window has left, hold anything, NaN too, which a weight of 0 would
            # not silence.
            is_own = position < seq_len
            if WINDOW:
                is_own = is_own & (position >= least)
            is_written = is_own[:, None] & (d < D)[None, :]
            k = tl.load(k_at, is_written, 0.0)
        elif D != BLOCK_D:
            k = tl.load(k_at, (d < D)[None, :], 0.0)
        else:
            k = tl.load(k_at)
        scores = dot(q, tl.trans(k.to(q.dtype)), None)

        if SOFT_CAP:
            scores = soft_capped(scores * factor, soft_cap) * _LOG2E
        elif ALIBI:
            scores = scores * factor
        if ALIBI:
            scores += slope[:, None] * (position[None, :] - q_position[:, None]).to(tl.float32)
        if MASKED:
            is_seen = (position < seq_len)[None, :]
            if CAUSAL:
                is_seen = is_seen & (position[None, :] <= q_position[:, None])
            if WINDOW == 1:
                is_seen = is_seen & (q_position[:, None] - position[None, :] < window)
            if WINDOW == 2:
                is_seen = is_seen & (position[None, :] >= (q_position // window * window)[:, None])
            scores = tl.where(is_seen, scores, -float("inf"))

        if SOFT_CAP or ALIBI:
            now_highest = tl.maximum(highest, tl.max(scores, 1))
        else:
            now_highest = tl.maximum(highest, tl.max(scores, 1) * factor)
        if MASKED:
            finite = tl.where(now_highest == -float("inf"), 0.0, now_highest)  # a query that has seen no key yet
        else:
            finite = now_highest
        if SOFT_CAP or ALIBI:
            weights = tl.exp2(scores - finite[:, None])
        else:
            weights = tl.exp2(scores * factor - finite[:, None])
        shrink = tl.exp2(highest - finite)
        highest = now_highest
        denominator = denominator * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]

        if MASKED:
            v = tl.load(v_at, is_written, 0.0)
        elif D != BLOCK_D:
            v = tl.load(v_at, (d < D)[None, :], 0.0)
        else:
            v = tl.load(v_at)
        acc = dot(weights.to(q.dtype), v.to(q.dtype), acc)
    return acc, denominator, highest


@triton.jit(do_not_specialize=["table_stride", "first_row", "num_reqs"])
def prefill_kernel(
    query,
    k_cache,
    v_cache,
    output,
    query_start_loc,
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
    first_row,
    num_reqs,
    scale,
    soft_cap,
    window,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SINKS: tl.constexpr,
    ALIBI: tl.constexpr,
    SKIP_SINGLE: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program: one kv head, BLOCK_M // G tokens of one row.

    Row r owns programs query_start_loc[r] // BLOCK_Q + r and on: at least as many as it needs, found by bisection.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // G
    wait_for_inputs(PDL)
    kv_head = tl.program_id(0)
    # The last tokens of a row see most keys: they go first, and the launch ends with short programs.
    index = tl.num_programs(1) - 1 - tl.program_id(1) + tl.load(query_start_loc + first_row) // BLOCK_Q + first_row
    row, above = first_row, num_reqs
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
    if SKIP_SINGLE and query_len == 1:
        return
    seq_len = tl.load(seq_lens + row)

    m, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    token = first_token + m // G
    head = kv_head * G + m % G
    is_row = (m < BLOCK_Q * G) & (token < query_len)
    is_number = is_row[:, None] & (d < D)[None, :]
    place = (row_start + token).to(tl.int64)
    q = tl.load(query + (place * q_stride + head * D)[:, None] + d[None, :], is_number, 0.0)
    first_position = seq_len - query_len + first_token
    q_position = seq_len - query_len + token

    highest = tl.full([BLOCK_M], -float("inf"), tl.float32)
    denominator = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:  # a key without a value
        highest = tl.load(sinks + head, is_row, 0.0).to(tl.float32) * _LOG2E
        denominator += 1.0
    slope = highest
    if ALIBI:
        slope = tl.load(alibi_slopes + head, is_row, 0.0).to(tl.float32) * _LOG2E
    factor = scale if SOFT_CAP else scale * _LOG2E
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    # Keys [begin, low) and [high, end) are seen by some queries, [low, high) by all.
    last_position = tl.minimum(first_position + BLOCK_Q, seq_len) - 1
    if CAUSAL:
        end, high = last_position + 1, (first_position + 1) // BLOCK_N * BLOCK_N
    else:
        end, high = seq_len, seq_len // BLOCK_N * BLOCK_N
    begin = 0
    k_head, v_head = k_cache + kv_head * k_head_stride, v_cache + kv_head * v_head_stride
    table = block_table + row.to(tl.int64) * table_stride
    low = 0
    least = 0
    if WINDOW:
        seen_by_last = tl.maximum(last_position - window + 1, 0)
        least = tl.maximum(first_position - window + 1, 0)
        if WINDOW == 2:
            seen_by_last = last_position // window * window
            least = first_position // window * window
        begin = least // BLOCK_N * BLOCK_N
        low = (seen_by_last + BLOCK_N - 1) // BLOCK_N * BLOCK_N
        low = tl.minimum(low, (end + BLOCK_N - 1) // BLOCK_N * BLOCK_N)
        high = tl.maximum(high, low)
        acc, denominator, highest = attend_keys(
            acc, denominator, highest, q, k_head, v_head, table, begin, low, least, seq_len, q_position, slope, factor,
            soft_cap, window, k_block_stride, k_slot_stride, v_block_stride, v_slot_stride,
            D, BLOCK_D, BLOCK_N, BLOCK_SIZE, CAUSAL, WINDOW, SOFT_CAP, ALIBI, True,
        )  # fmt: skip
    acc, denominator, highest = attend_keys(
        acc, denominator, highest, q, k_head, v_head, table, low, high, least, seq_len, q_position, slope, factor,
        soft_cap, window, k_block_stride, k_slot_stride, v_block_stride, v_slot_stride,
        D, BLOCK_D, BLOCK_N, BLOCK_SIZE, CAUSAL, WINDOW, SOFT_CAP, ALIBI, False,
    )  # fmt: skip
    acc, denominator, highest = attend_keys(
        acc, denominator, highest, q, k_head, v_head, table, high, end, least, seq_len, q_position, slope, factor,
        soft_cap, window, k_block_stride, k_slot_stride, v_block_stride, v_slot_stride,
        D, BLOCK_D, BLOCK_N, BLOCK_SIZE, CAUSAL, WINDOW, SOFT_CAP, ALIBI, True,
    )  # fmt: skip

    acc = acc / tl.where(is_row, denominator, 1.0)[:, None]
    at = output + (place * output_stride + head * D)[:, None] + d[None, :]
    tl.store(at, acc.to(output.dtype.element_ty), is_number)


_launch = Launcher(prefill_kernel)

SHORT = 32  # rows of a tile that have no use for a larger one
LONG = 1024  # keys that are worth splitting


@cache
def _hopper(device: torch.device) -> ModuleType | None:
    """The kernel for compute capability 9.0, where the device has it."""
    if INTERPRETED or device.type != "cuda" or torch.version.hip is not None:  # AMD's gfx90a says 9.0 too
        return None
    if torch.cuda.get_device_capability(device) != (9, 0):
        return None
    from pelton_backends.triton.attention import prefill_hopper

    return prefill_hopper


class Tiles(NamedTuple):
    """Rows and keys of a tile, and how Triton builds the loop."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def choose_tiles(dtype: torch.dtype, head_dim: int, group: int, max_query_len: int, memory: int = H200_MEMORY) -> Tiles:
    """For an H200; with less `memory` (shared, bytes) only made to fit. Two heights, so that a start compiles two kernels: short
    rows, and the others.

    Of ten shapes in bfloat16 with 128 numbers a head, 128 x 128 in 8 warps and 3 stages was best or within 5 % at 2,048 to 32,768
    tokens in blocks of 16: 300 to 403 TFLOP/s. Four warps on 128 rows spill.
    """
    least = max(triton.next_power_of_2(group), 16)
    if INTERPRETED:
        return Tiles(max(32, least), 32, 4, 1)
    if dtype == torch.float32:  # FMA, no tensor cores
        return Tiles(max(32, least), 32, 4, 1)
    if max_query_len * group <= SHORT:
        return Tiles(max(32, least), 64, 4, 3 if head_dim <= 128 else 2)
    if head_dim <= 128:
        return Tiles(max(128, least), 128, 8, 3)
    if memory < 150_000:
        return Tiles(max(64, least), 32, 4, 2)
    return Tiles(max(128, least), 64, 8, 2)


def is_short(num_rows: int, max_seq_len: int) -> bool:
    """Return whether rows of so many queries (tokens times heads of a group) over so many keys are served by the kernel of this file
    wherever they are."""
    return num_rows <= SHORT and max_seq_len < LONG


def bind_hopper(
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    num_heads: int,
    dtype: torch.dtype,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    pdl: bool,
) -> HopperPrefill | None:
    """Return what serves all but short rows of such a layer better than the kernel of this file on the device; else None."""
    is_plain = soft_cap is None and alibi_slopes is None and (sliding_window is None or sliding_window > 0)
    module = _hopper(k_cache.device) if is_plain else None
    if module is None or not module.serves(k_cache, v_cache, num_heads=num_heads, dtype=dtype):
        return None
    bound: HopperPrefill = module.HopperPrefill(
        k_cache, v_cache, num_heads=num_heads, scale=scale, sliding_window=sliding_window, sinks=sinks, pdl=pdl
    )
    return bound


def prefill_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    output: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    *,
    num_reqs: int,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    causal: bool = True,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    skip_single: bool = False,
    first_row: int = 0,
    pdl: bool = False,
    tiles: Tiles | None = None,
) -> Tensor:
    """Attend from each row's new tokens to its whole sequence, which lies in the cache already.

    Math   output[t, h] = softmax(scores[t, h, :]) v[h // G],  scores = cap(scale q[t, h] k[h // G]) + slope_h (j - i) for the
           query at position i and the key at j, i = seq_len - query_len + (t - query_start_loc[r]); seen are j <= i (all
           with causal=False) and i - j < sliding_window (below 0: i // c = j // c with c = -sliding_window);
           cap(x) = soft_cap tanh(x / soft_cap); a sink adds exp(sink_h) to the softmax's denominator.
    Paper  Dao, FlashAttention-2 (arXiv:2307.08691); Kwon et al., PagedAttention (arXiv:2309.06180); Press et al., ALiBi
           (arXiv:2108.12409); Xiao et al., attention sinks (arXiv:2309.17453).

    T tokens, H heads, N kv heads, G = H / N, D head_dim, P blocks, S block_size, R rows, B blocks of the widest table
      query, output     [T, H, D]     float32, bfloat16, float16; strides (any, D, 1)
      k_cache, v_cache  [P, S, N, D]  that dtype, another float or fp8; strides (any, any, any, 1)
      query_start_loc   [R + 1]       int32; padding rows are empty
      seq_lens          [R]           int32, context plus new tokens
      block_table       [R, B]        int32; last axis contiguous
      sinks, alibi_slopes  [H]        any float

    Rows before `first_row` are left out, with `skip_single` those of one token too: their output stays as it is, as does
    that of padding. `max_query_len` and `max_seq_len` are bounds that choose tile and splits; the grid depends on them and on
    shapes alone.
    Scores, softmax and sums in float32; the weights are rounded to query's dtype before they meet the values. float32 is exact
    to 2e-5 of float64 (no TF32), float16 to 2e-3, bfloat16 to 1e-2.
    """
    attend = PrefillAttention(
        k_cache, v_cache, num_heads=query.shape[1], dtype=query.dtype, scale=scale, sliding_window=sliding_window,
        soft_cap=soft_cap, sinks=sinks, alibi_slopes=alibi_slopes, pdl=pdl,
    )  # fmt: skip
    attend(
        query, output, query_start_loc, seq_lens, block_table, num_reqs=num_reqs, first_row=first_row,
        max_query_len=max_query_len, max_seq_len=max_seq_len, causal=causal, skip_single=skip_single, tiles=tiles,
    )  # fmt: skip
    return output


class PrefillAttention:
    """`prefill_attention` over one layer's cache: what follows from the layer is found out once, a call adds the tensors and numbers
    of a step."""

    def __init__(
        self,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        num_heads: int,
        dtype: torch.dtype,
        scale: float,
        sliding_window: int | None,
        soft_cap: float | None,
        sinks: Tensor | None,
        alibi_slopes: Tensor | None,
        pdl: bool,
    ) -> None:
        _, block_size, self._num_kv_heads, head_dim = k_cache.shape
        self._group, self._head_dim, self._dtype = num_heads // self._num_kv_heads, head_dim, dtype
        self._memory = shared_memory(k_cache.device)
        self._hopper = bind_hopper(
            k_cache, v_cache, num_heads=num_heads, dtype=dtype, scale=scale, sliding_window=sliding_window,
            soft_cap=soft_cap, sinks=sinks, alibi_slopes=alibi_slopes, pdl=pdl,
        )  # fmt: skip
        self._caches, self._layer = (k_cache, v_cache), (sinks, alibi_slopes)
        self._cache_strides = (*k_cache.stride()[:3], *v_cache.stride()[:3])
        self._numbers = scale, soft_cap or 0.0, abs(sliding_window or 0)
        self._constants = {
            "G": self._group, "D": head_dim, "BLOCK_D": max(triton.next_power_of_2(head_dim), 16), "BLOCK_SIZE": block_size,
            "WINDOW": 0 if sliding_window is None else 1 if sliding_window > 0 else 2,
            "SOFT_CAP": soft_cap is not None, "SINKS": sinks is not None,
            "ALIBI": alibi_slopes is not None, "PDL": pdl,
        }  # fmt: skip
        self._key = (
            self._cache_strides, sliding_window, dtype, k_cache.dtype, k_cache.device.index,
            sinks is not None and sinks.dtype, alibi_slopes is not None and alibi_slopes.dtype,
            alignment(*self._caches, *self._layer),
        )  # fmt: skip
        self._options = launch_options(pdl)
        self._variants: dict[tuple[Tiles, bool, bool], Variant] = {}

    def __call__(
        self,
        query: Tensor,
        output: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        *,
        num_reqs: int,
        first_row: int,
        max_query_len: int,
        max_seq_len: int,
        causal: bool,
        skip_single: bool,
        tiles: Tiles | None = None,
    ) -> None:
        num_tokens, _, head_dim = query.shape
        assert query.stride(1) == head_dim and output.stride(1) == head_dim, "heads of a token lie side by side"
        if self._hopper is not None and tiles is None and not is_short(max_query_len * self._group, max_seq_len):
            self._hopper(
                query, output, query_start_loc, seq_lens, block_table, num_reqs=num_reqs, first_row=first_row,
                max_seq_len=max_seq_len, causal=causal, skip_single=skip_single,
            )  # fmt: skip
            return
        tiles = tiles or choose_tiles(self._dtype, head_dim, self._group, max_query_len, self._memory)
        variant = self._variants.get((tiles, causal, skip_single))
        if variant is None:
            variant = self._variants[tiles, causal, skip_single] = self._variant(tiles, causal, skip_single)
        # A row needs at most one program more than its share of the tokens.
        grid = (self._num_kv_heads, num_tokens // (tiles.block_m // self._group) + num_reqs - first_row)
        strides = query.stride(0), output.stride(0)
        arguments = (
            query, *self._caches, output, query_start_loc, seq_lens, block_table, *self._layer, *strides,
            block_table.stride(0), *self._cache_strides, first_row, num_reqs, *self._numbers,
        )  # fmt: skip
        variant((strides, alignment(query, output, query_start_loc, seq_lens, block_table)), grid, arguments)

    def _variant(self, tiles: Tiles, causal: bool, skip_single: bool) -> Variant:
        constants = {
            **self._constants, "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "CAUSAL": causal,
            "SKIP_SINGLE": skip_single,
        }  # fmt: skip
        return _launch.variant(
            self._key, constants, num_warps=tiles.num_warps, num_stages=tiles.num_stages, **self._options
        )
