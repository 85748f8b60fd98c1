"""Functions that kernels of several fused ops share, with the roundings of `pelton.ops.reference`."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


class Norm(NamedTuple):
    """One RMS norm."""

    weight: Tensor
    eps: float
    unit_offset: bool


@cache
def is_hopper(device: torch.device) -> bool:
    """Compute capability 9: what kernels for its copy engine, and figures taken on an H200, are for."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9


def empty_rows(num_rows: int, size: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """[num_rows, size] of `like`'s device, of `dtype` or `like`'s. Up to 256 rows the memory goes on to a power of two of rows: a kernel
    that reads tiles of rows may read on. The copy engine takes its time to fill in zeros: 186 us for a layer of Llama-3.1-8B
    with 80 rows on an H200, 136 us so."""
    held = max(triton.next_power_of_2(num_rows), 16) if num_rows <= 256 else num_rows
    return torch.empty((held, size), dtype=dtype or like.dtype, device=like.device)[:num_rows]


MOST_KEPT_ROWS = 256
"""Rows of a step whose products stream their weights: what is written for the next kernel says that it is to be evicted last, as do their
results. Weights streaming by probably pushed it out of L2 (8B, a layer: 123 us for 127 with 32 rows, 167 for 171 with 128)."""


def kept_policy(num_rows: int) -> str:
    """Eviction policy of what so many rows write for the next kernel."""
    return "evict_last" if num_rows <= MOST_KEPT_ROWS else ""


@triton.jit
def normed(x, inverse_rms, weight, UNIT_OFFSET: tl.constexpr, dtype: tl.constexpr):
    """x * inverse_rms * weight in `dtype`: x and inverse_rms float32, weight as it is stored (it broadcasts).

    Rounded before the product with the weight and after it; with UNIT_OFFSET (weight + 1) once, after it.
    """
    x = x * inverse_rms
    if UNIT_OFFSET:
        return (x * (1.0 + weight.to(tl.float32))).to(dtype)
    return (x.to(dtype).to(tl.float32) * weight.to(tl.float32)).to(dtype)


@triton.jit
def to_cache(x, dtype: tl.constexpr):
    """The cache's dtype; 8-bit formats saturate, and NaN stays what it is: a row that reads it fails."""
    if dtype == tl.float8e4nv:
        x = tl.clamp(x.to(tl.float32), -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    elif dtype == tl.float8e5:
        x = tl.clamp(x.to(tl.float32), -57344.0, 57344.0, propagate_nan=tl.PropagateNan.ALL)
    return x.to(dtype)


@triton.jit
def e4m3_scale(largest, BOUND: tl.constexpr):
    """Which makes the largest number 448; with BOUND, numbers beyond it saturate. Of zeros it is tiny, not zero."""
    if BOUND is not None:
        largest = tl.minimum(largest, BOUND)
    return tl.div_rn(tl.maximum(largest, 1e-30), 448.0)


@triton.jit
def store_rounded(
    x, out_ptr, scales_ptr, input_scale_ptr, row, SIZE: tl.constexpr, BLOCK: tl.constexpr, BOUND: tl.constexpr, KEPT: tl.constexpr
):  # fmt: skip
    """Store x [BLOCK], rounded to e4m3, as row `row` of out, and its scale. KEPT: their eviction policy."""
    x = x.to(tl.float32)
    columns = tl.arange(0, BLOCK)
    if input_scale_ptr is None:
        scale = e4m3_scale(tl.max(tl.abs(x)), BOUND)
    else:
        scale = tl.load(input_scale_ptr)
    tl.store(scales_ptr + row, scale, eviction_policy=KEPT)
    rounded = to_cache(x * tl.div_rn(1.0, scale), tl.float8e4nv)
    tl.store(out_ptr + row * SIZE + columns, rounded, mask=columns < SIZE, eviction_policy=KEPT)


@triton.jit
def sum_of_two_powers(largest):
    """Return the factors that rows have before their numbers become sums of two in e4m3, and one by each: powers of two, by which the
    rows' largest numbers become 128 to 256. NaN for a row that has an infinite number."""
    exponent = largest.to(tl.int32, bitcast=True) >> 23
    power = tl.where(exponent == 255, 0x7FC00000, tl.minimum(261 - exponent, 253) << 23)
    inverse = tl.maximum(exponent - 7, 1) << 23
    return power.to(tl.float32, bitcast=True), inverse.to(tl.float32, bitcast=True)


@triton.jit
def store_split_row(x, out_ptr, inverse_ptr, row, SIZE: tl.constexpr, BLOCK: tl.constexpr, KEPT: tl.constexpr):
    """Store x [BLOCK] times a power of two as first numbers and then second ones, and one by the power: see `moe.split`."""
    x = x.to(tl.float32)
    columns = tl.arange(0, BLOCK)
    power, inverse = sum_of_two_powers(tl.max(tl.abs(x)))
    x *= power
    high = x.to(tl.float8e4nv)
    target = out_ptr + row * (2 * SIZE) + columns
    tl.store(target, high, mask=columns < SIZE, eviction_policy=KEPT)
    tl.store(target + SIZE, (x - high.to(tl.float32)).to(tl.float8e4nv), mask=columns < SIZE, eviction_policy=KEPT)
    tl.store(inverse_ptr + row, inverse, eviction_policy=KEPT)


@triton.jit
def activated(gate, up, ACTIVATION: tl.constexpr, dtype: tl.constexpr):
    """activation(gate) * up in `dtype`; gate and up float32 that hold numbers of `dtype`. Rounded before the product
    and after it."""
    if ACTIVATION == "silu":
        active = gate / (1.0 + tl.exp(-gate))
    elif ACTIVATION == "gelu":
        active = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        tl.static_assert(ACTIVATION == "gelu_tanh", "an activation that no kernel knows")
        # (1 + tanh z) / 2 = 1 / (1 + exp(-2 z)), z = sqrt(2 / pi) (x + 0.044715 x^3)
        active = gate / (1.0 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))
    return (active.to(dtype).to(tl.float32) * up).to(dtype)
