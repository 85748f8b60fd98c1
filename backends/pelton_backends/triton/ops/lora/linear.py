"""Adapters: what low-rank matrices add to the rows of a product, for any mix of adapters and rows without one.

Two kernels a product, over tiles of rows that use one slot (`pelton.lora.rows`), so that a matrix is read once for all of them.
The first multiplies with A of all parts: the input dimension is split over programs, whose sums lie beside each other until the
second adds them, always in one order. The second multiplies with B, adds the base product and, for gate and up, applies the
activation. In large steps a kernel between them adds the sums: the second one then is bound by the base product's bytes, for which
many small programs are better than few that have much to do.

A norm in front costs nothing: A norm(x) = A (x * w) / rms(x), so the first kernel sums x^2 beside its products.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from pelton.lora.op import Lora, LoraNeeds, LoraTensors
from pelton.lora.rows import LARGE_TILE, SMALL_TILE, SPAN, UNITS_PAST, AdapterRowTensors, tile_rows
from pelton.platform.compiling import launch
from pelton_backends.triton.launch import Launcher, alignment
from pelton_backends.triton.ops.pieces import ACTIVATIONS, activated, empty_rows
from pelton_backends.triton.runtime import dot, has_pdl, launch_options, let_next_start, shared_memory, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = ("bfloat16", "float16", "float32")
_BLOCK_K = 256
_BLOCK_N = {False: 128, True: 128}  # of a small step's program, of a large one's
_WARPS = {False: 4, True: 8}
_GATED_BLOCK_N, _GATED_WARPS = {False: 128, True: 64}, {False: 4, True: 8}
_MOST_TILE = 16384  # numbers of A
_MOST_TOGETHER = 128  # ranks of all parts, that one program takes
_SPLIT_COLUMNS = 256  # of the input, that one program takes in a small step
_MOST_SPLITS = 16
_SCRATCH = 40 << 10  # bytes of shared memory
_LARGE_STEP, _LARGE_SPLITS = 512, 4  # tokens; shares of the input
_SUMMED = 16  # rows of a program that adds them


@triton.jit
def _tile(order_ptr, tile_first_ptr, tile_end_ptr, tile, M: tl.constexpr):
    """Tokens of a tile, and which of its M places have one."""
    places = tl.load(tile_first_ptr + tile) + tl.arange(0, M)
    mask = places < tl.load(tile_end_ptr + tile)
    return tl.load(order_ptr + places, mask=mask, other=0).to(tl.int64), mask


@triton.jit
def _shrink_kernel(
    x_ptr, a_ptr, norm_ptr, order_ptr, tile_slot_ptr, tile_first_ptr, tile_end_ptr, low_ptr, squares_ptr,
    x_stride, slot_stride,
    K: tl.constexpr, ALL_RANKS: tl.constexpr, RANKS: tl.constexpr, SPLITS: tl.constexpr, M: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_NORM: tl.constexpr, UNIT_OFFSET: tl.constexpr, IN_FLOAT32: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """RANKS of A's rows, of one part or all of them, times one share of the columns of a tile's rows."""
    BLOCK_R: tl.constexpr = triton.next_power_of_2(RANKS)
    tile, split, first = tl.program_id(0), tl.program_id(1), tl.program_id(2) * RANKS
    let_next_start(PDL)
    wait_for_inputs(PDL)
    slot = tl.load(tile_slot_ptr + tile).to(tl.int64)
    if slot < 0:
        return
    tokens, mask = _tile(order_ptr, tile_first_ptr, tile_end_ptr, tile, M)
    ranks, columns = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_K)
    a = a_ptr + slot * slot_stride + (first + ranks[:, None]) * K
    SHARE: tl.constexpr = (K + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K) * BLOCK_K
    sums = tl.zeros([M, BLOCK_R], tl.float32)
    squares = tl.zeros([M], tl.float32)
    for start in range(0, SHARE, BLOCK_K):
        k = split * SHARE + start + columns
        x = tl.load(x_ptr + tokens[:, None] * x_stride + k[None, :], mask=mask[:, None] & (k < K)[None, :], other=0.0)
        weight = tl.load(a + k[None, :], mask=(ranks < RANKS)[:, None] & (k < K)[None, :], other=0.0)
        if HAS_NORM:
            norm = tl.load(norm_ptr + k, mask=k < K, other=0.0).to(tl.float32)
            wide = x.to(tl.float32)
            squares += tl.sum(wide * wide, axis=1)
            if UNIT_OFFSET:
                norm += 1.0
            wide = wide * norm[None, :]
            x = wide if IN_FLOAT32 else wide.to(x.dtype)
        if IN_FLOAT32:
            weight = weight.to(tl.float32)
        sums = dot(x, tl.trans(weight), sums)
    place = (tokens * SPLITS + split) * ALL_RANKS + first
    tl.store(low_ptr + place[:, None] + ranks[None, :], sums, mask=mask[:, None] & (ranks < RANKS)[None, :])
    if HAS_NORM and first == 0:
        tl.store(squares_ptr + tokens * SPLITS + split, squares, mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def _sum_kernel(
    low_ptr, squares_ptr, token_slots_ptr, sum_ptr, num_tokens, eps,
    K: tl.constexpr, RANKS: tl.constexpr, SPLITS: tl.constexpr, M: tl.constexpr, HAS_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A norm(x) of all parts, of M rows that have an adapter."""
    tokens = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    mask = tl.load(token_slots_ptr + tokens, mask=tokens < num_tokens, other=-1) >= 0
    BLOCK_R: tl.constexpr = triton.next_power_of_2(RANKS)
    ranks = tl.arange(0, BLOCK_R)
    is_sum = mask[:, None] & (ranks < RANKS)[None, :]
    sums = tl.zeros([M, BLOCK_R], tl.float32)
    squares = tl.zeros([M], tl.float32)
    for split in tl.static_range(SPLITS):
        place = tokens * SPLITS + split
        sums += tl.load(low_ptr + place[:, None] * RANKS + ranks[None, :], mask=is_sum, other=0.0)
        if HAS_NORM:
            squares += tl.load(squares_ptr + place, mask=mask, other=0.0)
    if HAS_NORM:
        sums = sums / tl.sqrt_rn(squares / K + eps)[:, None]
    tl.store(sum_ptr + tokens[:, None] * RANKS + ranks[None, :], sums, mask=is_sum)


@triton.jit
def _low(
    low_ptr, squares_ptr, tokens, mask, part, eps, K: tl.constexpr, PARTS: tl.constexpr, R: tl.constexpr,
    SPLITS: tl.constexpr, HAS_NORM: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """A norm(x) of a tile's rows and one part [M, R]."""
    ranks = tl.arange(0, R)
    sums = tl.zeros([M, R], tl.float32)
    squares = tl.zeros([M], tl.float32)
    for split in tl.static_range(SPLITS):
        place = (tokens * SPLITS + split) * PARTS + part
        sums += tl.load(low_ptr + place[:, None] * R + ranks[None, :], mask=mask[:, None], other=0.0)
        if HAS_NORM:
            squares += tl.load(squares_ptr + tokens * SPLITS + split, mask=mask, other=0.0)
    if HAS_NORM:
        sums = sums / tl.sqrt_rn(squares / K + eps)[:, None]
    return sums


@triton.jit
def _expand_kernel(
    low_ptr, squares_ptr, b_ptr, out_ptr, chunk_ptr, order_ptr, tile_slot_ptr, tile_first_ptr, tile_end_ptr,
    slot_stride, rank_stride, column_stride, eps,
    N: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, R: tl.constexpr, SPLITS: tl.constexpr, M: tl.constexpr,
    BLOCK_N: tl.constexpr, ALIGNED: tl.constexpr, HAS_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_N columns of one part, added to the tile's rows of `out`."""
    chunk, tile = tl.program_id(0), tl.program_id(1)  # neighbours have neighbouring columns of the same rows
    part = tl.load(chunk_ptr + 3 * chunk)
    first = tl.multiple_of(tl.load(chunk_ptr + 3 * chunk + 1), ALIGNED)
    end = tl.multiple_of(tl.load(chunk_ptr + 3 * chunk + 2), ALIGNED)  # else no mask allows for loads of 16 bytes
    let_next_start(PDL)
    wait_for_inputs(PDL)
    slot = tl.load(tile_slot_ptr + tile).to(tl.int64)
    if slot < 0:
        return
    tokens, mask = _tile(order_ptr, tile_first_ptr, tile_end_ptr, tile, M)
    n = first + tl.arange(0, BLOCK_N)
    is_place = mask[:, None] & (n < end)[None, :]
    out = out_ptr + tokens[:, None] * N + n[None, :]
    base = tl.load(out, mask=is_place, other=0.0)
    b = b_ptr + slot * slot_stride + tl.arange(0, R)[:, None] * rank_stride + n[None, :] * column_stride
    weight = tl.load(b, mask=(n < end)[None, :], other=0.0)
    low = _low(low_ptr, squares_ptr, tokens, mask, part, eps, K, PARTS, R, SPLITS, HAS_NORM, M)
    total = dot(low.to(weight.dtype), weight, base.to(tl.float32))
    tl.store(out, total.to(base.dtype), mask=is_place)


@triton.jit
def _expand_gated_kernel(
    low_ptr, squares_ptr, b_ptr, gate_up_ptr, out_ptr, order_ptr, tile_slot_ptr, tile_first_ptr, tile_end_ptr,
    slot_stride, rank_stride, column_stride, eps,
    N: tl.constexpr, K: tl.constexpr, R: tl.constexpr, SPLITS: tl.constexpr, M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_NORM: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_N columns of gate and the same of up, N each; tiles without an adapter have their activation alone."""
    tile, n = tl.program_id(1), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    slot = tl.load(tile_slot_ptr + tile).to(tl.int64)
    tokens, mask = _tile(order_ptr, tile_first_ptr, tile_end_ptr, tile, M)
    is_place = mask[:, None] & (n < N)[None, :]
    rows = gate_up_ptr + tokens[:, None] * (2 * N) + n[None, :]
    gate = tl.load(rows, mask=is_place, other=0.0).to(tl.float32)
    up = tl.load(rows + N, mask=is_place, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    if slot >= 0:
        b = b_ptr + slot * slot_stride + tl.arange(0, R)[:, None] * rank_stride + n[None, :] * column_stride
        weight = tl.load(b, mask=(n < N)[None, :], other=0.0)
        weight_up = tl.load(b + N * column_stride, mask=(n < N)[None, :], other=0.0)
        low = _low(low_ptr, squares_ptr, tokens, mask, 0, eps, K, 2, R, SPLITS, HAS_NORM, M)
        gate = dot(low.to(dtype), weight, gate).to(dtype).to(tl.float32)
        low = _low(low_ptr, squares_ptr, tokens, mask, 1, eps, K, 2, R, SPLITS, HAS_NORM, M)
        up = dot(low.to(dtype), weight_up, up).to(dtype).to(tl.float32)
    out = out_ptr + tokens[:, None] * N + n[None, :]
    tl.store(out, activated(gate, up, ACTIVATION, dtype), mask=is_place)


@triton.jit(do_not_specialize=["num_tokens", "num_tiles"])
def _sort_kernel(
    slots_ptr, order_ptr, tile_slot_ptr, tile_first_ptr, tile_end_ptr, token_tile_ptr, num_used_ptr, step_ptr,
    units_ptr, num_units_ptr,
    num_tokens, num_tiles,
    NUM_SLOTS: tl.constexpr, T: tl.constexpr, TILES: tl.constexpr, M: tl.constexpr, UNIT: tl.constexpr,
    PAST: tl.constexpr,
):  # fmt: skip
    """Tokens by slot, into tiles of M: each token's place is the number of tokens before it, counted by all pairs."""
    t = tl.arange(0, T)
    slot = tl.load(slots_ptr + t, mask=t < num_tokens, other=0)
    group = tl.where(t < num_tokens, tl.where(slot < 0, NUM_SLOTS, slot), NUM_SLOTS + 1)
    rows, columns = group[:, None], group[None, :]
    is_before = columns < rows
    is_own = columns == rows
    start = tl.sum(is_before.to(tl.int32), axis=1)  # of the token's group
    count = tl.sum(is_own.to(tl.int32), axis=1)
    place = tl.sum((is_own & (t[None, :] < t[:, None])).to(tl.int32), axis=1)  # within it
    place_of_column = tl.sum((is_own & (t[:, None] < t[None, :])).to(tl.int32), axis=0)
    begins = (place_of_column % M == 0) & (t < num_tokens)
    tile = tl.sum((is_before & begins[None, :]).to(tl.int32), axis=1) + place // M
    is_token = t < num_tokens
    tl.store(step_ptr, tl.load(step_ptr) + 1)
    tl.store(order_ptr + start + place, t, mask=is_token)
    tl.store(token_tile_ptr + t, tile, mask=is_token)
    tl.store(num_used_ptr, tl.sum((begins & (group < NUM_SLOTS)).to(tl.int32), axis=0))
    is_first = is_token & (place % M == 0)
    first = start + place
    tl.store(tile_first_ptr + tile, first, mask=is_first)
    tl.store(tile_end_ptr + tile, tl.minimum(first + M, start + count), mask=is_first)
    tl.store(tile_slot_ptr + tile, tl.where(group < NUM_SLOTS, group, -1), mask=is_first)
    # Units of neighbouring slots: the first token of each is that of its first slot.
    unit = tl.where(group < NUM_SLOTS, group // UNIT, NUM_SLOTS)
    is_smaller = unit[None, :] < unit[:, None]
    is_same = unit[None, :] == unit[:, None]
    earlier = tl.sum((is_same & is_before).to(tl.int32), axis=1)
    earlier_of_column = tl.sum((is_same & (rows < columns)).to(tl.int32), axis=0)
    begins_unit = (place_of_column == 0) & (earlier_of_column == 0) & is_token & (group < NUM_SLOTS)
    number = tl.sum((is_smaller & begins_unit[None, :]).to(tl.int32), axis=1)
    num_units = tl.sum(begins_unit.to(tl.int32), axis=0)
    tl.store(units_ptr + number, unit, mask=(place == 0) & (earlier == 0) & is_token & (group < NUM_SLOTS))
    tl.store(num_units_ptr, num_units)
    past = tl.arange(0, PAST)
    tl.store(units_ptr + num_units + past, NUM_SLOTS, mask=past >= 0)
    used = tl.sum(begins.to(tl.int32), axis=0)
    rest = tl.arange(0, TILES)
    is_rest = (rest >= used) & (rest < num_tiles)
    tl.store(tile_first_ptr + rest, 0, mask=is_rest)
    tl.store(tile_end_ptr + rest, 0, mask=is_rest)
    tl.store(tile_slot_ptr + rest, -1, mask=is_rest)


_FEW_PAIRED, _MOST_PAIRED = 16, 128  # tokens: one program compares all pairs


@triton.jit(do_not_specialize=["num_tokens"])
def _list_kernel(slots_ptr, span_slots_ptr, num_span_slots_ptr, num_tokens, SPAN: tl.constexpr):
    """The slots of one span, each once, in the order of their first rows."""
    span, t = tl.program_id(0), tl.arange(0, triton.next_power_of_2(SPAN))
    token = span * SPAN + t
    slot = tl.load(slots_ptr + token, mask=(t < SPAN) & (token < num_tokens), other=-1)
    is_repeated = (slot[:, None] == slot[None, :]) & (t[None, :] < t[:, None])
    is_first = (slot >= 0) & (tl.sum(is_repeated.to(tl.int32), axis=1) == 0)
    place = tl.cumsum(is_first.to(tl.int32), axis=0) - 1
    tl.store(span_slots_ptr + span * SPAN + place, slot, mask=is_first)
    tl.store(num_span_slots_ptr + span, tl.sum(is_first.to(tl.int32), axis=0))


def sort_rows(rows: AdapterRowTensors, num_tokens: int) -> bool:
    """`AdapterRowTensors.sort` in one kernel, of few tokens: torch's dozen took 61 us for one (H200, in a graph). Of many, the slots of
    spans alone."""
    if num_tokens > _MOST_PAIRED:
        launch(
            _list_kernel, (triton.cdiv(num_tokens, SPAN),), rows.token_slots, rows.span_slots, rows.num_span_slots, num_tokens,
            SPAN, num_warps=8,
        )  # fmt: skip
        return False
    num_tiles = rows.num_tiles(num_tokens)
    launch(
        _sort_kernel, (1,),
        rows.token_slots, rows.order, rows.tile_slot, rows.tile_first, rows.tile_end, rows.token_tile, rows.num_used,
        rows.step, rows.units, rows.num_units, num_tokens, num_tiles,
        rows.num_slots, max(triton.next_power_of_2(num_tokens), _FEW_PAIRED),
        triton.next_power_of_2(rows.num_tiles(_MOST_PAIRED)), tile_rows(num_tokens), rows.unit_slots,
        UNITS_PAST, num_warps=8,
    )  # fmt: skip
    return True


_shrink, _sum = Launcher(_shrink_kernel), Launcher(_sum_kernel)
_expand, _expand_gated = Launcher(_expand_kernel), Launcher(_expand_gated_kernel)


def num_splits(num_tokens: int, size: int) -> int:
    """Shares of the input's columns: a small step has few tiles."""
    most = _LARGE_SPLITS if num_tokens >= _LARGE_STEP else _MOST_SPLITS
    return max(1, min(most, triton.cdiv(size, _SPLIT_COLUMNS)))


def block_columns(rows: int, ranks: int, element_size: int, memory: int) -> int:
    """Columns of A and x that the first kernel multiplies at once: two blocks of both lie in shared memory."""
    found = min(_BLOCK_K, _MOST_TILE // max(ranks, 2 * rows))  # rows are normed in registers
    while found > 16 and 2 * (rows + ranks) * found * element_size > memory - _SCRATCH:
        found //= 2
    return found


def block_width(rows: int, rank: int, element_size: int, memory: int, *, is_gated: bool) -> int:
    """Columns of B that the last kernel multiplies at once: two blocks of them lie in shared memory beside A x."""
    found = (_GATED_BLOCK_N if is_gated else _BLOCK_N)[rows == LARGE_TILE]
    while found > 16 and (rows + 2 * found) * rank * element_size > memory - _SCRATCH:
        found //= 2
    return found


class Low(NamedTuple):
    """A x of a step's rows, before B."""

    sums: Tensor  # [T, splits, ranks] float32, or [T, ranks] of the dtype where they are added; undefined for rows without an adapter
    squares: Tensor  # [T, splits] float32, of x where it is still to be normed
    splits: int
    is_added: bool
    """Of all shares, and divided by x's root mean square."""


class RowsTimesA:
    """A x of one product's rows, in tiles of rows that share an adapter."""

    def __init__(self, needs: LoraNeeds, tensors: LoraTensors) -> None:
        self._needs, self._tensors, self._rows = needs, tensors, tensors.rows
        self._device = tensors.a.device
        self._pdl, self._memory = has_pdl(self._device), shared_memory(self._device)
        self._ranks = len(needs.parts) * needs.rank
        self._together = self._ranks if self._ranks <= _MOST_TOGETHER else needs.rank
        # A residual times the norm's weight may leave float16's range.
        self._in_float32 = needs.norm is not None and needs.dtype == "float16"
        self._rows.sort = sort_rows

    def __call__(self, x: Tensor) -> Low:
        needs, tensors, rows, pdl = self._needs, self._tensors, self._rows, self._pdl
        num_tokens, size, has_norm, ranks = x.shape[0], needs.in_features, needs.norm is not None, self._ranks
        splits, block_m, num_tiles = num_splits(num_tokens, size), tile_rows(num_tokens), rows.num_tiles(num_tokens)
        low = torch.empty(num_tokens * splits * ranks, dtype=torch.float32, device=self._device)
        squares = torch.empty(num_tokens * splits if has_norm else 1, dtype=torch.float32, device=self._device)
        key = (needs, pdl, splits, block_m, self._device, x.stride(0), tensors.a.stride(0), alignment(x, tensors.a))
        shrunk_size = 4 if self._in_float32 else tensors.a.element_size()
        block_ranks = triton.next_power_of_2(self._together)
        _shrink(
            key, (num_tiles, splits, ranks // self._together),
            (
                x, tensors.a, tensors.norm, rows.order, rows.tile_slot, rows.tile_first, rows.tile_end, low, squares, x.stride(0),
                tensors.a.stride(0),
            ),
            {
                "K": size, "ALL_RANKS": ranks, "RANKS": self._together, "SPLITS": splits, "M": block_m,
                "BLOCK_K": block_columns(block_m, block_ranks, shrunk_size, self._memory), "HAS_NORM": has_norm,
                "UNIT_OFFSET": needs.norm is not None and needs.norm.unit_offset, "IN_FLOAT32": self._in_float32, "PDL": pdl,
            },
            num_warps=4, **launch_options(pdl),
        )  # fmt: skip
        if num_tokens < _LARGE_STEP:
            return Low(low, squares, splits, is_added=False)
        sums = torch.empty(num_tokens * ranks, dtype=tensors.a.dtype, device=self._device)
        _sum(
            key, (triton.cdiv(num_tokens, _SUMMED),),
            (low, squares, rows.token_slots, sums, num_tokens, 0.0 if needs.norm is None else needs.norm.eps),
            {"K": size, "RANKS": ranks, "SPLITS": splits, "M": _SUMMED, "HAS_NORM": has_norm, "PDL": pdl},
            num_warps=4, **launch_options(pdl),
        )  # fmt: skip
        return Low(sums, sums, 1, is_added=True)


class TritonLora:
    """See `pelton.lora.op.Lora`. Sums are float32; A norm(x) is rounded to the dtype before it meets B."""

    handles = frozenset(["norm", "activation", "unit_offset"])

    @staticmethod
    def unsupported(needs: LoraNeeds) -> list[str]:
        reasons = [] if needs.dtype in DTYPES else [f"dtype {needs.dtype}, only {', '.join(DTYPES)}"]
        if needs.activation is not None and needs.activation not in ACTIVATIONS:
            reasons.append(f"activation {needs.activation!r}")
        return reasons

    @staticmethod
    def bind(needs: LoraNeeds, tensors: LoraTensors) -> Lora:
        return _bind_expand(needs, tensors, RowsTimesA(needs, tensors))


def _bind_expand(needs: LoraNeeds, tensors: LoraTensors, shrink: RowsTimesA) -> Lora:
    rows, rank = tensors.rows, needs.rank
    columns, num_parts, activation = sum(needs.parts), len(needs.parts), needs.activation
    device, norm = tensors.a.device, needs.norm
    pdl = has_pdl(device)
    element_size, memory = tensors.a.element_size(), shared_memory(device)
    # Of a small step and of a large one: columns of a program, and the programs' columns.
    widths = {
        large: block_width(
            LARGE_TILE if large else SMALL_TILE, rank, element_size, memory, is_gated=activation is not None
        )
        for large in (False, True)
    }
    chunks = {
        large: torch.tensor(_chunks(needs.parts, width), dtype=torch.int32).to(device)
        for large, width in widths.items()
    }
    eps = 0.0 if norm is None else norm.eps
    tiles = (rows.order, rows.tile_slot, rows.tile_first, rows.tile_end)

    def lora(x: Tensor, output: Tensor) -> Tensor:
        num_tokens = x.shape[0]
        result = output if activation is None else empty_rows(num_tokens, columns // 2, output)
        if not num_tokens:
            return result
        output = output.contiguous()
        low, squares, splits, is_added = shrink(x)
        is_large, block_m, num_tiles = num_tokens >= _LARGE_STEP, tile_rows(num_tokens), rows.num_tiles(num_tokens)
        # One kernel for products that differ in K alone, where it is not asked for.
        sizes = {
            "K": 1 if is_added else needs.in_features, "R": rank, "SPLITS": splits, "M": block_m,
            "HAS_NORM": norm is not None and not is_added, "PDL": pdl, "BLOCK_N": widths[is_large],
        }  # fmt: skip
        key = (needs, pdl, splits, block_m, device, tensors.b.stride(), alignment(output, tensors.b))
        factors = (low, squares, tensors.b)
        if activation is None:
            _expand(
                key, (len(chunks[is_large]), num_tiles),
                (*factors, output, chunks[is_large], *tiles, *tensors.b.stride(), eps),
                {**sizes, "N": columns, "PARTS": num_parts, "ALIGNED": math.gcd(16, *needs.parts)},
                num_warps=_WARPS[is_large], **launch_options(pdl),
            )  # fmt: skip
            return output
        _expand_gated(
            key, (triton.cdiv(columns // 2, widths[is_large]), num_tiles),
            (*factors, output, result, *tiles, *tensors.b.stride(), eps),
            {**sizes, "N": columns // 2, "ACTIVATION": activation},
            num_warps=_GATED_WARPS[is_large], **launch_options(pdl),
        )  # fmt: skip
        return result

    return lora


def _chunks(parts: tuple[int, ...], width: int) -> list[tuple[int, int, int]]:
    """(part, first column, end of the part's columns) of each program's columns."""
    found, start = [], 0
    for part, size in enumerate(parts):
        found += [(part, first, start + size) for first in range(start, start + size, width)]
        start += size
    return found
