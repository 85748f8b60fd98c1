"""Rows of experts whose sums are left to their only reader: it adds them up, adds the residual and norms them in one kernel.

Without it the sums go through memory, and one kernel more waits for another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from pelton_backends.triton.launch import Launcher, alignment
from pelton_backends.triton.ops.pieces import Norm, empty_rows, kept_policy, normed, store_rounded, store_split_row
from pelton_backends.triton.runtime import has_pdl, launch_options, let_next_start, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.ops.interface import NormSpec


class UnsummedRows:
    """Rows of k experts for each of T tokens, in place of their sums [T, H]; read once.

    pairs    [at least T k, H]    of a two-byte dtype or float32
    experts  [T, k] int32         num_held or more: this rank has no such pair
    places   [T, k] int32         each pair's row, which `shares` [T, k] float32 weighs; None: pair p is row p, weighted
    counts   [num_held, count_stride]  is zeros once they are read; int32
    """

    def __init__(
        self, pairs: Tensor, experts: Tensor, places: Tensor | None, shares: Tensor | None, counts: Tensor | None,
        *, num_held: int, count_stride: int, is_whole: bool,
    ) -> None:  # fmt: skip
        """is_whole: this rank has all pairs of a token, or none of them, which is padding."""
        self.shape = torch.Size((experts.shape[0], pairs.shape[1]))
        self.num_held, self.count_stride, self.is_whole = num_held, count_stride, is_whole
        self._tensors: tuple[Tensor | None, ...] | None = (pairs, experts, shares, places, counts)

    def take(self) -> tuple[Tensor | None, ...]:
        """Return pairs, experts, shares, places and counts, which are not held any longer: in prompts they are large."""
        assert self._tensors is not None, "read before"
        tensors, self._tensors = self._tensors, None
        return tensors


@triton.jit
def sum_of_pairs(
    pair_ptr, expert_ptr, share_ptr, place_ptr, row, columns, mask,
    H: tl.constexpr, E: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """The sum over a token's pairs [BLOCK] float32, which is zeros for padding. place: where each pair's row is, and share its weight;
    without them pairs lie by their number, weighted already. IS_WHOLE: as in `UnsummedRows`."""
    is_token = tl.load(expert_ptr + row * K) < E
    result = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(K):
        pair = row * K + j
        if not IS_WHOLE:
            is_token = tl.load(expert_ptr + pair) < E
        if place_ptr is None:
            if IS_WHOLE:  # read before it is known whether this is padding, whose numbers may be any
                part = tl.load(pair_ptr + pair * H + columns, mask=mask, other=0.0).to(tl.float32)
                result += tl.where(is_token, part, 0.0)
            else:
                result += tl.load(pair_ptr + pair * H + columns, mask=mask & is_token, other=0.0).to(tl.float32)
        else:
            place = tl.load(place_ptr + pair, mask=is_token, other=0).to(tl.int64)
            share = tl.load(share_ptr + pair)
            result += share * tl.load(pair_ptr + place * H + columns, mask=mask & is_token, other=0.0).to(tl.float32)
    return result


@triton.jit
def clear_counts(count_ptr, is_first, E: tl.constexpr, EB: tl.constexpr, STRIDE: tl.constexpr):
    """Make counts [E], STRIDE numbers apart, zeros again for the next call, in the first program."""
    if count_ptr is not None:
        bins = tl.arange(0, EB)
        tl.store(count_ptr + bins * STRIDE, tl.zeros((EB,), tl.int32), mask=(bins < E) & is_first)


@triton.jit
def sum_add_norm_kernel(
    pair_ptr, expert_ptr, share_ptr, place_ptr, count_ptr, residual_ptr, norm_ptr, out_ptr, scales_ptr, input_scale_ptr, residual_stride,
    eps, H: tl.constexpr, BLOCK: tl.constexpr, E: tl.constexpr, EB: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr,
    IS_WHOLE: tl.constexpr, UNIT_OFFSET: tl.constexpr, IS_SPLIT: tl.constexpr, BOUND: tl.constexpr, KEPT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token a program: `combine_kernel` and `large_batch.add_norm`, with their roundings. Rows with scales are rounded or split."""
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    mask = columns < H
    dtype: tl.constexpr = residual_ptr.dtype.element_ty
    norm = tl.load(norm_ptr + columns, mask=mask, other=0.0)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    residuals = residual_ptr + row * residual_stride + columns
    residual = tl.load(residuals, mask=mask, other=0.0).to(tl.float32)
    x = sum_of_pairs(pair_ptr, expert_ptr, share_ptr, place_ptr, row, columns, mask, H, E, K, BLOCK, IS_WHOLE)
    clear_counts(count_ptr, tl.program_id(0) == 0, E, EB, STRIDE)
    x = (x.to(dtype).to(tl.float32) + residual).to(dtype).to(tl.float32)
    tl.store(residuals, x.to(dtype), mask=mask, eviction_policy=KEPT)
    inverse_rms = 1.0 / tl.sqrt_rn(tl.sum(x * x) / H + eps)
    x = normed(x, inverse_rms, norm, UNIT_OFFSET, dtype)
    if scales_ptr is None:
        tl.store(out_ptr + row * H + columns, x, mask=mask, eviction_policy=KEPT)
    elif IS_SPLIT:
        store_split_row(x, out_ptr, scales_ptr, row, H, BLOCK, KEPT)
    else:
        store_rounded(x, out_ptr, scales_ptr, input_scale_ptr, row, H, BLOCK, BOUND, KEPT)


_launch = Launcher(sum_add_norm_kernel)


def sum_add_norm(
    hidden: UnsummedRows, residual: Tensor, norm: Norm, out: Tensor, scales: Tensor | None = None,
    input_scale: Tensor | None = None, bound: float | None = None,
) -> None:  # fmt: skip
    """Write `large_batch.add_norm` of the sums: the normed rows to out [T, H], and the new residual where the old one was.

    residual [T, H], strides (any, 1), of out's dtype; or out is float8_e4m3fn, and scales [T] float32 is given what its rows are divided
    by: see `fp8.rounded` for those, `input_scale` and `bound`, and `hopper_blocks.split_rows` for out [T, 2 H].
    """
    num_tokens, size = hidden.shape
    pairs, experts, shares, places, counts = hidden.take()
    assert pairs is not None and experts is not None
    block, pdl = triton.next_power_of_2(size), has_pdl(out.device)
    constants = {
        "H": size, "BLOCK": block, "E": hidden.num_held, "EB": triton.next_power_of_2(hidden.num_held), "K": experts.shape[1],
        "STRIDE": hidden.count_stride, "IS_WHOLE": hidden.is_whole, "UNIT_OFFSET": norm.unit_offset, "IS_SPLIT": out.shape[1] > size,
        "BOUND": bound, "KEPT": kept_policy(num_tokens), "PDL": pdl,
    }  # fmt: skip
    optional = places, counts, scales, input_scale
    _launch(
        (
            pairs.dtype, residual.dtype, norm.weight.dtype, out.device, residual.stride(0), *(tensor is None for tensor in optional),
            alignment(pairs, residual, norm.weight, input_scale), *constants.values(),
        ),
        (num_tokens,),
        (
            pairs, experts, shares, places, counts, residual, norm.weight, out, scales, input_scale, residual.stride(0), norm.eps,
        ),
        constants, num_warps=min(max(block // 256, 1), 16), **launch_options(pdl),
    )  # fmt: skip


def sum_add_norm_rows(hidden: UnsummedRows, residual: Tensor, norm: Tensor, spec: NormSpec) -> Tensor:
    """Return the normed rows; the new residual is in the old one's memory."""
    rows = empty_rows(*hidden.shape, residual)
    sum_add_norm(hidden, residual, Norm(norm, spec.eps, spec.unit_offset), rows)
    return rows


def sum_add_norm_rounded(
    hidden: UnsummedRows, residual: Tensor, norm: Norm, input_scale: Tensor | None, bound: float | None
) -> tuple[Tensor, Tensor]:
    """Return the normed rows in float8_e4m3fn, and their scales; the new residual is in the old one's memory."""
    rows = empty_rows(*hidden.shape, residual, torch.float8_e4m3fn)
    scales = torch.empty(hidden.shape[0], dtype=torch.float32, device=residual.device)
    sum_add_norm(hidden, residual, norm, rows, scales, input_scale, bound)
    return rows, scales


def sum_add_norm_split(hidden: UnsummedRows, residual: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """Return the normed rows as sums of two numbers in e4m3 [T, 2 H], and one by their powers; the new residual as above."""
    num_tokens, size = hidden.shape
    rows = empty_rows(num_tokens, 2 * size, residual, torch.float8_e4m3fn)
    inverse = torch.empty(num_tokens, dtype=torch.float32, device=residual.device)
    sum_add_norm(hidden, residual, norm, rows, inverse)
    return rows, inverse
