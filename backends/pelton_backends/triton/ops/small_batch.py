"""The linear seams for 9 rows and more, while a product costs what reading its weights costs: split-K tensor-core kernels.

Fewer rows are `gemv`'s, more are `large_batch`'s; `MAX_TOKENS` is where that one becomes as fast on an H200.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton

from pelton.ops.interface import (
    AddNormGatedLinear,
    AddNormGatedLinearNeeds,
    AddNormGatedLinearTensors,
    AddNormLinear,
    AddNormLinearNeeds,
    AddNormLinearTensors,
    Linear,
    LinearNeeds,
    LinearTensors,
    LinearWeights,
)
from pelton_backends.triton.ops.large_batch import MAX_HIDDEN_SIZE, add_norm
from pelton_backends.triton.ops.pieces import ACTIVATIONS
from pelton_backends.triton.ops.split_k import SMALLEST_TILE, multiply

if TYPE_CHECKING:
    from torch import Tensor

MIN_TOKENS = 9
MAX_TOKENS = 128
DTYPES = ("bfloat16", "float16")


def _refusals(needs: Any) -> list[str]:
    reasons = []
    if needs.dtype not in DTYPES:
        reasons.append(f"dtype {needs.dtype}, only {', '.join(DTYPES)}: tensor cores would round float32's inputs")
    if needs.linear.weight_format != "plain":
        reasons.append(f"weight format {needs.linear.weight_format!r}, only 'plain'")
    if getattr(needs, "tp_size", 1) > 1:
        reasons.append(f"tp_size {needs.tp_size}: the sum over ranks is not fused")
    if hasattr(needs, "norm") and needs.norm.size > MAX_HIDDEN_SIZE:
        reasons.append(f"hidden size {needs.norm.size}, at most {MAX_HIDDEN_SIZE}")
    if hasattr(needs, "activation") and needs.activation not in ACTIVATIONS:
        reasons.append(f"activation {needs.activation!r}")
    return reasons


def _token_range(needs: Any) -> tuple[int, int | None]:
    return MIN_TOKENS, MAX_TOKENS


def _counters(weights: LinearWeights) -> Tensor:
    """One a weight tile, for the last of its parts to be known; zeros whenever no kernel runs."""
    num_tiles = triton.cdiv(weights.spec.out_features, SMALLEST_TILE) * triton.cdiv(MAX_TOKENS, SMALLEST_TILE)
    return torch.zeros(num_tiles, dtype=torch.int32, device=weights.tensors["weight"].device)


class SmallBatchLinear:
    unsupported = staticmethod(_refusals)
    token_range = staticmethod(_token_range)

    @staticmethod
    def bind(needs: LinearNeeds, tensors: LinearTensors) -> Linear:
        weight, bias, counters = tensors.linear.tensors["weight"], tensors.linear.bias, _counters(tensors.linear)

        def linear(x: Tensor) -> Tensor:
            return multiply(x, weight, bias, None, counters)

        return linear


class SmallBatchAddNormLinear:
    unsupported = staticmethod(_refusals)
    token_range = staticmethod(_token_range)

    @staticmethod
    def bind(needs: AddNormLinearNeeds, tensors: AddNormLinearTensors) -> AddNormLinear:
        weight, bias, counters = tensors.linear.tensors["weight"], tensors.linear.bias, _counters(tensors.linear)

        def add_norm_linear(hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
            residual, rows = add_norm(hidden, residual, tensors.norm, needs.norm, tensors.post_norm, needs.post_norm)
            return multiply(rows, weight, bias, None, counters), residual

        return add_norm_linear


class SmallBatchAddNormGatedLinear:
    unsupported = staticmethod(_refusals)
    token_range = staticmethod(_token_range)

    @staticmethod
    def bind(needs: AddNormGatedLinearNeeds, tensors: AddNormGatedLinearTensors) -> AddNormGatedLinear:
        weight, bias, counters = tensors.linear.tensors["weight"], tensors.linear.bias, _counters(tensors.linear)

        def add_norm_gated_linear(hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
            residual, rows = add_norm(hidden, residual, tensors.norm, needs.norm, tensors.post_norm, needs.post_norm)
            return multiply(rows, weight, bias, needs.activation, counters), residual

        return add_norm_gated_linear
