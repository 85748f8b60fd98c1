"""Paged prefill for compute capability 9.0: two warp groups compute, one warp copies pages with the tensor memory accelerator.

Serves what most prompts need (16-bit dtypes, a cache of the same dtype, heads of 64 or 128 numbers); `prefill.py` serves
the rest, and says in `prefill_attention` what both compute. The kernel is in `prefill_hopper_kernel.py`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from pelton_backends.triton.attention.prefill_hopper_kernel import PAGE, ROWS, hopper_prefill_kernel
from pelton_backends.triton.launch import Launcher, Variant, alignment
from pelton_backends.triton.runtime import launch_options, num_sms, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

BLOCK_N = 128
STAGES = 2


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
    """Address and shape of a tensor, for a descriptor; it keeps no pool alive."""

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


def serves(k_cache: Tensor, v_cache: Tensor, *, num_heads: int, dtype: torch.dtype) -> bool:
    """Return whether dtypes, sizes and strides are among those the kernel was written for."""
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    return (
        dtype in (torch.bfloat16, torch.float16)
        and k_cache.dtype == dtype == v_cache.dtype
        and head_dim in (64, 128)
        and block_size % PAGE == 0
        and num_heads // num_kv_heads <= ROWS
        and all(_is_rows(cache) for cache in (k_cache, v_cache))
    )


def _is_rows(cache: Tensor) -> bool:
    block_stride, slot_stride, head_stride, _ = cache.stride()
    fits = cache.shape[2] == 1 or head_stride % slot_stride == 0 or head_stride * cache.shape[2] <= slot_stride
    return fits and block_stride % slot_stride == 0 and slot_stride % 8 == 0 and cache.data_ptr() % 16 == 0


class HopperPrefill:
    """`prefill_attention` without soft cap and ALiBi, for layers of which `serves` says so: what follows from the layer is found out
    once, a call adds the tensors and numbers of a step.

    Paper  Shah et al., FlashAttention-3 (arXiv:2407.08608): a copying warp, and scores of one tile beside the sum over the last.

    Tiles of 2 x 64 rows and 128 keys, two stages: 160 KiB of shared memory and 240 registers a thread, one program on each
    multiprocessor of an H200. Keys and values come page by page (16 tokens) into the place the tile has for them. Where
    there would be fewer items than multiprocessors and sequences may be long, several share a tile's keys.

    Measured there, bfloat16, 128 numbers a head, causal, blocks of 16, TFLOP/s (in brackets torch's cuDNN backend on
    contiguous keys). 16 heads over 8: 2,048 tokens 439 (323), 8 x 2,048 497 (527), 8,192 625 (567). 32 over 8: 2,048 tokens
    444 (392), 16 x 1,024 398 (476), 8 x 2,048 515 (556), 8,192 566 (605), 16,384 574 (572). With a program an item 8 x 2,048
    took 9 % longer; with items taken one ahead 4 %, dealt out beforehand 16 %. Three stages, and letting the two groups take
    turns at the tensor cores, changed less than 2 %; norm and rotation of the query in here cost as much as they saved.
    Split, beside other jobs on the card: 64 tokens behind 8,000 took 104 us, with 8 shares of a tile's keys 25 us.
    """

    def __init__(
        self,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        num_heads: int,
        scale: float,
        sliding_window: int | None,
        sinks: Tensor | None,
        pdl: bool,
    ) -> None:
        _, block_size, self._num_kv_heads, self._head_dim = k_cache.shape
        self._num_heads = num_heads
        group = num_heads // self._num_kv_heads
        self._tokens_of_block = 2 * (ROWS // group)
        self._device, self._num_sms = k_cache.device, num_sms(k_cache.device)
        k_pages, k_block_rows, k_head_rows, k_head_columns = _page_rows(k_cache)
        v_pages, v_block_rows, v_head_rows, v_head_columns = _page_rows(v_cache)
        self._pages, self._sinks = (k_pages, v_pages), sinks
        self._page_strides = (
            k_block_rows, v_block_rows, k_head_rows, v_head_rows, k_head_columns, v_head_columns,
        )  # fmt: skip
        self._numbers = scale, sliding_window or 0, self._num_kv_heads
        self._constants = {
            "G": group, "D": self._head_dim, "BLOCK_N": BLOCK_N, "STAGES": STAGES, "BLOCK_SIZE": block_size,
            "WINDOW": sliding_window is not None, "SINKS": sinks is not None, "PDL": pdl,
        }  # fmt: skip
        self._key = (
            self._page_strides, sliding_window, k_cache.dtype, self._device.index, sinks is not None and sinks.dtype,
            alignment(sinks),
        )  # fmt: skip
        self._options = launch_options(pdl)
        self._counters = torch.zeros(2, dtype=torch.int32, device=self._device)
        """Items taken beyond each program's first one, and programs that take no more: zeros whenever no kernel runs."""
        self._variants: dict[tuple[bool, bool, bool], Variant] = {}

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
        max_seq_len: int,
        causal: bool,
        skip_single: bool,
    ) -> None:
        num_tokens, device = query.shape[0], self._device
        num_blocks = num_tokens // self._tokens_of_block + num_reqs - first_row
        num_items = self._num_kv_heads * num_blocks
        splits = 1 if skip_single else choose_splits(num_items, max_seq_len, self._num_sms)
        parts = logs = None
        if splits > 1:
            parts = torch.empty(splits, num_tokens, self._num_heads, self._head_dim, dtype=torch.float32, device=device)
            logs = torch.empty(splits, num_tokens, self._num_heads, dtype=torch.float32, device=device)
            num_items *= splits
        num_programs = min(num_items, self._num_sms)
        kind = causal, splits > 1, skip_single
        variant = self._variants.get(kind)
        if variant is None:
            constants = {**self._constants, **dict(zip(("CAUSAL", "SPLIT", "SKIP_SINGLE"), kind, strict=True))}
            variant = self._variants[kind] = _launch.variant(self._key, constants, num_warps=4, **self._options)
        strides = query.stride(0), output.stride(0)
        arguments = (
            query, *self._pages, output, parts, logs, query_start_loc, seq_lens, block_table, self._counters, self._sinks, num_tokens,
            *strides, block_table.stride(0), *self._page_strides, first_row, num_reqs, *self._numbers, num_blocks,
            splits,
        )  # fmt: skip
        key = strides, alignment(query, output, query_start_loc, seq_lens, block_table)
        variant(key, (num_programs,), arguments)
        if parts is not None and logs is not None:
            self._merge(parts, logs, output, query_start_loc, num_reqs=num_reqs, first_row=first_row)

    def _merge(
        self, parts: Tensor, logs: Tensor, output: Tensor, query_start_loc: Tensor, *, num_reqs: int, first_row: int
    ) -> None:
        num_heads, head_dim, num_tokens = self._num_heads, self._head_dim, output.shape[0]
        block_h = max(min(triton.next_power_of_2(num_heads), 512 // head_dim), 1)
        key = (
            num_heads,
            head_dim,
            output.stride(0),
            output.dtype,
            self._device.index,
            alignment(output, query_start_loc),
        )
        constants = {"H": num_heads, "BLOCK_H": block_h, "D": head_dim, "PDL": self._constants["PDL"]}
        arguments = (
            parts, logs, output, query_start_loc, num_tokens, first_row, num_reqs, len(parts), output.stride(0),
        )  # fmt: skip
        grid = (triton.cdiv(num_heads, block_h), num_tokens)
        _launch_merge(key, grid, arguments, constants, num_warps=1, **self._options)


def choose_splits(num_programs: int, max_seq_len: int, num_sms: int) -> int:
    """Programs that share a tile's keys: at least 512 keys each, and no more programs than multiprocessors."""
    return max(min(num_sms // num_programs, max_seq_len // 512, 16), 1)
