"""A x of few rows: what a product that adds its adapters itself reads (`gemv.py`).

One kernel before the product, and hardly a wait: a program fetches its share of A before its inputs exist, by the slots as they
are then; it looks again afterwards. The product's weights are on their way all the while. Shares of the columns are added by the
product, always in one order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from pelton.lora.op import LoraNeeds, LoraTensors
from pelton.lora.rows import SMALL_TILE
from pelton_backends.triton.launch import Launcher, alignment
from pelton_backends.triton.ops.lora.linear import sort_rows
from pelton_backends.triton.runtime import dot, has_pdl, launch_options, let_next_start, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

MAX_RANK = 64  # more would not fit into the registers of a product's programs
MOST_PARTS = 3


@triton.jit
def _share_of_a(a_ptr, slot, slot_stride, k, part, K: tl.constexpr, R: tl.constexpr):
    """Columns k [W, 1, C] of a part's A: [W, R, C]; zeros without a slot."""
    ranks = tl.arange(0, R)[None, :, None]
    rows = a_ptr + slot.to(tl.int64) * slot_stride + (part * R + ranks) * K
    return tl.load(rows + k, mask=(k < K) & (slot >= 0), other=0.0)


@triton.jit
def shrink_few_kernel(
    x_ptr, residual_ptr, norm_ptr, a_ptr, order_ptr, tile_slot_ptr, tile_first_ptr, tile_end_ptr, low_ptr, squares_ptr,
    x_stride, residual_stride, slot_stride,
    K: tl.constexpr, PARTS: tl.constexpr, R: tl.constexpr, SPLITS: tl.constexpr, STEPS: tl.constexpr,
    W: tl.constexpr, C: tl.constexpr, M: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_NORM: tl.constexpr,
    UNIT_OFFSET: tl.constexpr, IN_FLOAT32: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One part of A times STEPS blocks of W C columns of a tile's M rows. low [T, SPLITS, PARTS, R]; squares [T, SPLITS].

    Each of W warps multiplies its own C columns: the rows and ranks alone are too few for more than one.
    """
    tile, split, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    columns = tl.arange(0, W)[:, None, None] * C + tl.arange(0, C)[None, None, :]
    first = split * (STEPS * W * C) + columns
    let_next_start(PDL)
    early = tl.load(tile_slot_ptr + tile, cache_modifier=".cg")
    shares = ()
    for i in tl.static_range(STEPS):
        shares += (_share_of_a(a_ptr, early, slot_stride, first + i * (W * C), part, K, R),)
    wait_for_inputs(PDL)
    slot = tl.load(tile_slot_ptr + tile, cache_modifier=".cg")
    if slot < 0:
        return
    places = tl.load(tile_first_ptr + tile) + tl.arange(0, M)
    mask = places < tl.load(tile_end_ptr + tile)
    tokens = tl.load(order_ptr + places, mask=mask, other=0).to(tl.int64)
    dtype = a_ptr.dtype.element_ty
    sums = tl.zeros([W, M, R], tl.float32)
    squares = tl.zeros([M], tl.float32)
    for i in tl.static_range(STEPS):
        share = shares[i]
        k = first + i * (W * C)
        if slot != early:  # this step's slots came after the first look
            share = _share_of_a(a_ptr, slot, slot_stride, k, part, K, R)
        inside = mask[None, :, None] & (k < K)
        x = tl.load(x_ptr + tokens[None, :, None] * x_stride + k, mask=inside, other=0.0)
        if HAS_RESIDUAL:
            old = tl.load(residual_ptr + tokens[None, :, None] * residual_stride + k, mask=inside, other=0.0)
            x = (x.to(tl.float32) + old.to(tl.float32)).to(dtype)
        if HAS_NORM:
            wide = x.to(tl.float32)
            squares += tl.sum(tl.sum(wide * wide, axis=2), axis=0)
            weight = tl.load(norm_ptr + k, mask=k < K, other=0.0).to(tl.float32)
            if UNIT_OFFSET:
                weight += 1.0
            wide = wide * weight
            x = wide if IN_FLOAT32 else wide.to(dtype)
        if IN_FLOAT32:
            share = share.to(tl.float32)
        if M == 1:
            sums += tl.sum(x.to(tl.float32) * share.to(tl.float32), axis=2)[:, None, :]
        else:
            sums = dot(x, tl.permute(share, (0, 2, 1)), sums)
    place = ((tokens * SPLITS + split) * PARTS + part) * R
    tl.store(low_ptr + place[:, None] + tl.arange(0, R)[None, :], tl.sum(sums, axis=0), mask=mask[:, None])
    if HAS_NORM and part == 0:
        tl.store(squares_ptr + tokens * SPLITS + split, squares, mask=mask)


_launch = Launcher(shrink_few_kernel)


class Low(NamedTuple):
    """A x, before its shares are added."""

    sums: Tensor  # [T, splits, parts, R] float32; undefined for rows without an adapter
    squares: Tensor  # [T, splits] float32, of x where it is still to be normed
    splits: int


class Shrink:
    """A x of one product's rows."""

    def __init__(self, needs: LoraNeeds, tensors: LoraTensors) -> None:
        self.needs, self.tensors, self.rows = needs, tensors, tensors.rows
        self.device = tensors.a.device
        self.pdl = has_pdl(self.device)
        self.rows.sort = sort_rows

    def __call__(self, x: Tensor, residual: Tensor | None = None, norm: Tensor | None = None) -> Low:
        """x [T, K]; with a residual of [post-normed] x + residual; with `norm` of the rows times its weight, not yet divided."""
        needs, tensors, rows = self.needs, self.tensors, self.rows
        num_tokens, size = x.shape
        splits, steps, warps, columns, m = sizes_of(num_tokens, size, needs.rank)
        num_parts = len(needs.parts)
        sums = torch.empty(num_tokens * splits * num_parts * needs.rank, dtype=torch.float32, device=self.device)
        squares = torch.empty(num_tokens * splits if norm is not None else 1, dtype=torch.float32, device=self.device)
        residual_stride = 0 if residual is None else residual.stride(0)
        key = (
            needs, self.device, m, splits, x.stride(0), residual_stride, residual is None, norm is None, tensors.a.stride(0),
            alignment(x, residual, norm, tensors.a),
        )  # fmt: skip
        _launch(
            key, (1 if num_tokens == 1 else rows.num_tiles(num_tokens), splits, num_parts),
            (
                x, residual, norm, tensors.a, rows.order, rows.tile_slot, rows.tile_first, rows.tile_end, sums, squares,
                x.stride(0), residual_stride, tensors.a.stride(0),
            ),
            {
                "K": size, "PARTS": num_parts, "R": needs.rank, "SPLITS": splits, "STEPS": steps, "W": warps,
                "C": columns, "M": m, "IN_FLOAT32": norm is not None and needs.dtype == "float16",
                "HAS_RESIDUAL": residual is not None, "HAS_NORM": norm is not None,
                "UNIT_OFFSET": needs.norm is not None and needs.norm.unit_offset, "PDL": self.pdl,
            },
            num_warps=warps, **launch_options(self.pdl),
        )  # fmt: skip
        return Low(sums, squares, splits)


def sizes_of(num_tokens: int, size: int, rank: int) -> tuple[int, int, int, int, int]:
    """(shares of the columns, blocks of a share, warps, columns of a warp's block, rows of a tile)."""
    numbers, warps, most, rows = (8192, 4, 32, 1) if num_tokens == 1 else (16384, 8, 8, SMALL_TILE)
    block = max(min(numbers // rank, triton.next_power_of_2(size)), 16 * warps)
    steps = triton.cdiv(triton.cdiv(size, block), most)
    return triton.cdiv(size, block * steps), steps, warps, block // warps, rows


def reasons_against(needs: LoraNeeds) -> list[str]:
    """Why a product cannot add these adapters itself."""
    reasons = [f"rank {needs.rank}, at most {MAX_RANK}"] if needs.rank > MAX_RANK else []
    return reasons + ([f"{len(needs.parts)} parts, at most {MOST_PARTS}"] if len(needs.parts) > MOST_PARTS else [])
