"""The linear ops for few rows, while a product costs little more than reading its weights.

`gemv` comes before these where it serves the number of rows, `large_batch` behind them. Which kernel multiplies goes by the
number of rows and the size of the matrix, as measured on an H200: the same call always takes the same one.
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
from pelton_backends.triton.ops.linear.cublaslt import LibraryProduct
from pelton_backends.triton.ops.linear.gemv import HANDLES, most_rows
from pelton_backends.triton.ops.linear.hopper_mid_batch import MidBatchProduct
from pelton_backends.triton.ops.linear.hopper_split_k import (
    HopperProduct,
    can_multiply,
    choose_tiling_beside_attention,
)
from pelton_backends.triton.ops.linear.large_batch import bind_add_norm, gated, takes_unsummed
from pelton_backends.triton.ops.linear.mid_batch_tilings import SMALL_MATRIX, choose_mid_batch_tiling
from pelton_backends.triton.ops.linear.refusals import product_refusals
from pelton_backends.triton.ops.linear.split_k import SMALLEST_TILE, multiply
from pelton_backends.triton.ops.pieces import empty_rows
from pelton_backends.triton.runtime import attention_starts_early

if TYPE_CHECKING:
    from torch import Tensor

MIN_TOKENS = 1
MAX_TOKENS = 256
MAX_TOKENS_OF_LARGE = 128
DTYPES = ("bfloat16", "float16")  # of float32 tensor cores would round the inputs


def refusals(needs: Any) -> list[str]:
    return product_refusals(needs, ("plain",), DTYPES)


def _token_range(needs: Any) -> tuple[int, int | None]:
    return MIN_TOKENS, MAX_TOKENS


def prefers_library(num_tokens: int, weight: Tensor) -> bool:
    """Where cuBLAS, with an activation and `gated` behind it, was faster on an H200 than `HopperProduct`."""
    return num_tokens > MAX_TOKENS_OF_LARGE and weight.numel() > SMALL_MATRIX


def product_of(weights: LinearWeights, activation: str | None = None) -> Callable[[Tensor], Tensor]:
    """x [T, K] -> x @ weight.T + bias, or activation(gate) * up of its halves."""
    weight, bias = weights.tensors["weight"], weights.bias
    sizes = (*weight.shape, activation is not None)
    # One a weight tile and block of tokens, for the last of its parts to be known; zeros whenever no kernel runs.
    num_counters = triton.cdiv(weight.shape[0], SMALLEST_TILE) * triton.cdiv(MAX_TOKENS, 16)
    counters = torch.zeros(num_counters, dtype=torch.int32, device=weight.device)
    is_for_hopper = can_multiply(weight)
    few = HopperProduct(weight, bias, activation, counters)
    more = MidBatchProduct(weight, bias, activation, counters)
    library = LibraryProduct(weight)

    def product(x: Tensor) -> Tensor:
        is_readable = is_for_hopper and few.takes(x)
        if is_readable and attention_starts_early.get():
            beside = choose_tiling_beside_attention(x.shape[0], *sizes)
            if beside is not None:
                return few(x, beside)
        tiling = choose_mid_batch_tiling(x.shape[0], *sizes) if is_readable else None
        if tiling is not None:
            return more(x, tiling)
        if prefers_library(x.shape[0], weight):
            out = empty_rows(x.shape[0], weight.shape[0], x)
            rows = library(x, out) if bias is None else torch.addmm(bias, x, weight.T, out=out)
            return rows if activation is None else gated(rows, activation)
        return few(x) if is_readable else multiply(x, weight, bias, activation, counters)

    return product


class SmallBatchLinear:
    handles = HANDLES
    unsupported = staticmethod(refusals)
    token_range = staticmethod(_token_range)

    @staticmethod
    def bind(needs: LinearNeeds, tensors: LinearTensors) -> Linear:
        return product_of(tensors.linear)


class SmallBatchAddNormLinear:
    handles = HANDLES
    unsupported = staticmethod(refusals)
    token_range = staticmethod(_token_range)

    @staticmethod
    def bind(needs: AddNormLinearNeeds, tensors: AddNormLinearTensors) -> AddNormLinear:
        norm, product = bind_add_norm(needs, tensors), product_of(tensors.linear)

        def add_norm_linear(hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
            rows, residual = norm(hidden, residual)
            return product(rows), residual

        add_norm_linear.takes_unsummed = takes_unsummed(needs)  # type: ignore[attr-defined]
        return add_norm_linear


class SmallBatchAddNormGatedLinear:
    handles = HANDLES

    @staticmethod
    def unsupported(needs: AddNormGatedLinearNeeds) -> list[str]:
        return product_refusals(needs, ("plain",), DTYPES, sums_over_ranks=True)

    @staticmethod
    def token_range(needs: AddNormGatedLinearNeeds) -> tuple[int, int | None]:
        """With several ranks, whose few rows `linear` and `gated` serve."""
        return (MIN_TOKENS if needs.tp_size == 1 else most_rows(needs.linear, needs.dtype) + 1), MAX_TOKENS

    @staticmethod
    def bind(needs: AddNormGatedLinearNeeds, tensors: AddNormGatedLinearTensors) -> AddNormGatedLinear:
        norm, product = bind_add_norm(needs, tensors), product_of(tensors.linear, needs.activation)

        def add_norm_gated_linear(hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
            rows, residual = norm(hidden, residual)
            return product(rows), residual

        return add_norm_gated_linear
