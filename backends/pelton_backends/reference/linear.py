"""The product of a linear layer in plain torch, for weights of every form."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from pelton.ops.packed_blocks import dense

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.ops.interface import LinearWeights

SLICE_NUMBERS = 1 << 20
"""Of a weight, widened at once: they stay in the last cache."""

_ONEDNN = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}


def linear(x: Tensor, weights: LinearWeights) -> Tensor:
    """With blocks: dequantized for each call, into the input's dtype."""
    is_plain = weights.spec.weight_format == "plain"
    weight = weights.tensors["weight"] if is_plain else dense(weights).to(x.dtype)
    if x.device.type == "cpu" and x.dtype in _ONEDNN and x.shape[0] > 1 and not _has_fast_products(x.dtype):
        return _linear_by_float32(x, weight, weights.bias)
    return F.linear(x, weight, weights.bias)


@functools.cache
def _has_fast_products(dtype: torch.dtype) -> bool:
    """Return whether oneDNN multiplies it on this CPU. Otherwise torch does, unblocked: 4 to 7 GFLOP/s where float32 has 60."""
    try:
        return bool(getattr(torch.ops.mkldnn, _ONEDNN[dtype])())
    except (AttributeError, RuntimeError):  # a torch without oneDNN
        return False


def _linear_by_float32(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    wide, result = x.float(), x.new_empty(x.shape[0], weight.shape[0])
    step = max(SLICE_NUMBERS // weight.shape[1], 1)
    for first in range(0, weight.shape[0], step):
        rows = slice(first, first + step)
        part_of_bias = None if bias is None else bias[rows].float()
        result[:, rows] = F.linear(wide, weight[rows].float(), part_of_bias)
    return result
