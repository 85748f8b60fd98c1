"""The linear seams for few rows, while a product costs what reading its weights costs: split-K tensor-core kernels.

`gemv` comes before these where it serves the number of rows; with more rows `large_batch` is as fast on an H200.
"""

from __future__ import annotations

from collections.abc import Callable
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
from pelton_backends.triton.ops.hopper_split_k import HopperProduct, can_multiply
from pelton_backends.triton.ops.large_batch import MAX_HIDDEN_SIZE, add_norm
from pelton_backends.triton.ops.pieces import ACTIVATIONS
from pelton_backends.triton.ops.split_k import SMALLEST_TILE, multiply

if TYPE_CHECKING:
    from torch import Tensor

MIN_TOKENS = 1
# Up to here a chain of a layer's four products was faster than `large_batch`'s on an H200: 33 against 37 us at 256 rows on
# Qwen3-0.6B's matrices, 138 against 144 us at 128 rows (240 against 200 at 256) on Llama-3.1-8B's.
MAX_TOKENS = 128
MAX_TOKENS_OF_SMALL = 256
SMALL_MATRIX = 8 * 2**20  # numbers
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
    is_small = needs.linear.in_features * needs.linear.out_features <= SMALL_MATRIX
    return MIN_TOKENS, MAX_TOKENS_OF_SMALL if is_small else MAX_TOKENS


def _product(weights: LinearWeights, activation: str | None = None) -> Callable[[Tensor], Tensor]:
    """x [T, K] -> x @ weight.T + bias, or activation(gate) * up of its halves."""
    weight, bias = weights.tensors["weight"], weights.bias
    # One a weight tile and block of tokens, for the last of its parts to be known; zeros whenever no kernel runs.
    num_counters = triton.cdiv(weights.spec.out_features, SMALLEST_TILE) * triton.cdiv(MAX_TOKENS_OF_SMALL, 16)
    counters = torch.zeros(num_counters, dtype=torch.int32, device=weight.device)
    if not can_multiply(weight):
        return lambda x: multiply(x, weight, bias, activation, counters)
    product = HopperProduct(weight, bias, activation, counters)
    return lambda x: product(x) if product.takes(x) else multiply(x, weight, bias, activation, counters)


class SmallBatchLinear:
    unsupported = staticmethod(_refusals)
    token_range = staticmethod(_token_range)

    @staticmethod
    def bind(needs: LinearNeeds, tensors: LinearTensors) -> Linear:
        return _product(tensors.linear)


class SmallBatchAddNormLinear:
    unsupported = staticmethod(_refusals)
    token_range = staticmethod(_token_range)

    @staticmethod
    def bind(needs: AddNormLinearNeeds, tensors: AddNormLinearTensors) -> AddNormLinear:
        product = _product(tensors.linear)

        def add_norm_linear(hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
            residual, rows = add_norm(hidden, residual, tensors.norm, needs.norm, tensors.post_norm, needs.post_norm)
            return product(rows), residual

        return add_norm_linear


class SmallBatchAddNormGatedLinear:
    unsupported = staticmethod(_refusals)
    token_range = staticmethod(_token_range)

    @staticmethod
    def bind(needs: AddNormGatedLinearNeeds, tensors: AddNormGatedLinearTensors) -> AddNormGatedLinear:
        product = _product(tensors.linear, needs.activation)

        def add_norm_gated_linear(hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
            residual, rows = add_norm(hidden, residual, tensors.norm, needs.norm, tensors.post_norm, needs.post_norm)
            return product(rows), residual

        return add_norm_gated_linear
