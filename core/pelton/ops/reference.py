"""The arithmetic of the fused ops as small pure functions in torch: what every implementation has to give.

Rounding follows transformers' modules: norms are computed in float32 and rounded to the model's dtype, residuals are added in
the model's dtype, rotation and logits in float32. The ops made of these functions are the plugin `reference`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from pelton import moved
from pelton.ops.interface import NormSpec

if TYPE_CHECKING:
    from torch import Tensor
else:
    __getattr__ = moved.names_of(__name__)

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def rms_norm(x: Tensor, weight: Tensor, spec: NormSpec) -> Tensor:
    """Over the last axis, in float32; the result has x's dtype."""
    if spec.unit_offset:
        return F.rms_norm(x.float(), (spec.size,), 1.0 + weight.float(), spec.eps).to(x.dtype)
    return F.rms_norm(x.float(), (spec.size,), None, spec.eps).to(x.dtype) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first 2 F of each head's D numbers, pairs (i, i + F); x [T, heads, D], cos and sin [T, 1, F] float32."""
    half = cos.shape[-1]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    parts = [(first * cos - second * sin).to(x.dtype), (second * cos + first * sin).to(x.dtype)]
    if 2 * half < x.shape[-1]:
        parts.append(x[..., 2 * half :])
    return torch.cat(parts, dim=-1)


def write_kv(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """k_cache[slot // S, slot % S] = key[t], same for value; a slot of -1 leaves the cache as it is.

    key, value [T, N, D]; k_cache, v_cache [P, S, N, D] views; slot_mapping [T] int64. No host synchronisation: a row
    to skip writes back what the null block's first slot holds.
    """
    write_rows(key, k_cache, slot_mapping)
    write_rows(value, v_cache, slot_mapping)


def write_rows(rows: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """cache[slot // S, slot % S] = rows[t], as `write_kv`; rows [T, ...], cache [P, S, ...]."""
    block_size = cache.shape[1]
    is_kept = (slot_mapping >= 0).view(-1, *[1] * (rows.dim() - 1))
    slots = slot_mapping.clamp(min=0)
    blocks, offsets = slots // block_size, slots % block_size
    cache[blocks, offsets] = torch.where(is_kept, rows.to(cache.dtype), cache[blocks, offsets])
