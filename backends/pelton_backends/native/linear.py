"""The seams around products in C: one row, or (bfloat16 on AVX-512) any number; what is left goes to torch.

Weights are read where they lie, [out, in]: no packed copy is kept, and a tied head is as good as any matrix.
"""

from __future__ import annotations

from ctypes import byref
from typing import TYPE_CHECKING, Any

import torch

from pelton.ops import reference
from pelton.ops.interface import (
    AddNormGatedLinear,
    AddNormGatedLinearNeeds,
    AddNormGatedLinearTensors,
    AddNormLinear,
    AddNormLinearNeeds,
    AddNormLinearTensors,
    AddNormLogits,
    AddNormLogitsNeeds,
    AddNormLogitsTensors,
    Linear,
    LinearNeeds,
    LinearTensors,
    LinearWeights,
    NormSpec,
)
from pelton_backends.native import library
from pelton_backends.native.library import ACTIVATIONS, DTYPES, NO_ACTIVATION

if TYPE_CHECKING:
    from torch import Tensor


def refusals(needs: Any) -> list[str]:
    """Reasons that the seams share."""
    if needs.linear.weight_format != "plain":
        return [f"weight format {needs.linear.weight_format!r}, only 'plain'"]
    if needs.dtype not in DTYPES:
        return [f"dtype {needs.dtype}, only {', '.join(DTYPES)}"]
    if getattr(needs, "tp_size", 1) > 1:
        return [f"tp_size {needs.tp_size}, only 1"]
    activation = getattr(needs, "activation", "silu")
    if activation not in ACTIVATIONS:
        return [f"activation {activation!r}, only {', '.join(ACTIVATIONS)}"]
    why = library.reason_against()
    return [why] if why else []


class _Product:
    """One seam bound to one matrix: the kernels' struct, and who computes more than one row."""

    def __init__(
        self,
        dtype: str,
        weights: LinearWeights,
        norm: tuple[NormSpec, Tensor] | None = None,
        post_norm: tuple[NormSpec, Tensor] | None = None,
        activation: str | None = None,
        *,
        is_logits: bool = False,
        soft_cap: float | None = None,
    ) -> None:
        kernels = library.kernels()
        self.run_row, self.run_rows, self.prepare = kernels.linear_row, kernels.linear_rows, kernels.prepare
        self.weights, self.activation, self.has_norm = weights, activation, norm is not None
        self.num_columns = weights.spec.out_features // (2 if activation else 1)
        self.dtype, self.result_dtype = getattr(torch, dtype), torch.float32 if is_logits else getattr(torch, dtype)
        # Other CPUs and dtypes: oneDNN and MKL are better than plain C.
        self.has_rows = kernels.isa == "avx512" and dtype == "bfloat16" and weights.spec.in_features % 2 == 0
        self.kept = (norm, post_norm)  # the struct has their addresses
        self.op = library.Linear(
            weights.tensors["weight"].data_ptr(), _address(weights.bias),
            norm and norm[1].data_ptr(), post_norm and post_norm[1].data_ptr(),
            weights.spec.in_features, weights.spec.out_features, self.num_columns,
            norm[0].eps if norm else 0.0, post_norm[0].eps if post_norm else 0.0, soft_cap or 0.0,
            bool(norm and norm[0].unit_offset), bool(post_norm and post_norm[0].unit_offset),
            ACTIVATIONS[activation] if activation else NO_ACTIVATION, is_logits, DTYPES[dtype],
        )  # fmt: skip
        self.struct = byref(self.op)

    def row(self, hidden: Tensor, residual: Tensor | None, residual_out: int | None) -> Tensor:
        """Of one row; addresses may be equal."""
        output = torch.empty(1, self.num_columns, dtype=self.result_dtype)
        self.run_row(
            self.struct, hidden.data_ptr(), None if residual is None else residual.data_ptr(), residual_out,
            output.data_ptr(),
        )  # fmt: skip
        return output

    def normed(self, hidden: Tensor, residual: Tensor | None, residual_out: int | None, rows: Tensor | None) -> Tensor:
        """norm(residual') of all rows, or of `rows`; residual' goes to an address."""
        num_rows = hidden.shape[0] if rows is None else rows.shape[0]
        x = torch.empty(num_rows, hidden.shape[1], dtype=hidden.dtype)
        self.prepare(
            self.struct, hidden.data_ptr(), None if residual is None else residual.data_ptr(), residual_out,
            x.data_ptr(), None if rows is None else rows.data_ptr(), num_rows,
        )  # fmt: skip
        return x

    def product(self, x: Tensor) -> Tensor:
        """Of any number of rows that have their norm behind them."""
        num_rows = x.shape[0]
        if self.has_rows and num_rows > 1:
            output = torch.empty(num_rows, self.num_columns, dtype=self.result_dtype)
            if not self.run_rows(self.struct, x.data_ptr(), num_rows, output.data_ptr()):
                return output
        result = reference.linear(x, self.weights)
        return result if self.activation is None else reference.gated(result, self.activation)

    def add_norm(self, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(product, residual'): residual' takes the memory of `residual`, or of `hidden` before the first layer."""
        hidden = hidden.contiguous()
        residual = None if residual is None else residual.contiguous()
        total = hidden if residual is None else residual
        if hidden.shape[0] == 1:
            return self.row(hidden, residual, total.data_ptr()), total
        return self.product(self.normed(hidden, residual, total.data_ptr(), None)), total


class NativeAddNormLinear:
    @staticmethod
    def unsupported(needs: AddNormLinearNeeds) -> list[str]:
        return refusals(needs)

    @staticmethod
    def bind(needs: AddNormLinearNeeds, tensors: AddNormLinearTensors) -> AddNormLinear:
        return _Product(
            needs.dtype, tensors.linear, (needs.norm, tensors.norm), _pair(needs.post_norm, tensors.post_norm)
        ).add_norm


class NativeAddNormGatedLinear:
    @staticmethod
    def unsupported(needs: AddNormGatedLinearNeeds) -> list[str]:
        return refusals(needs)

    @staticmethod
    def bind(needs: AddNormGatedLinearNeeds, tensors: AddNormGatedLinearTensors) -> AddNormGatedLinear:
        return _Product(
            needs.dtype, tensors.linear, (needs.norm, tensors.norm), _pair(needs.post_norm, tensors.post_norm),
            needs.activation,
        ).add_norm  # fmt: skip


class NativeLinear:
    @staticmethod
    def unsupported(needs: LinearNeeds) -> list[str]:
        return refusals(needs)

    @staticmethod
    def bind(needs: LinearNeeds, tensors: LinearTensors) -> Linear:
        bound = _Product(needs.dtype, tensors.linear)

        def linear(x: Tensor) -> Tensor:
            x = x.contiguous()
            return bound.row(x, None, None) if x.shape[0] == 1 else bound.product(x)

        return linear


class NativeAddNormLogits:
    @staticmethod
    def unsupported(needs: AddNormLogitsNeeds) -> list[str]:
        return refusals(needs)

    @staticmethod
    def bind(needs: AddNormLogitsNeeds, tensors: AddNormLogitsTensors) -> AddNormLogits:
        bound = _Product(
            needs.dtype, tensors.linear, (needs.norm, tensors.norm), _pair(needs.post_norm, tensors.post_norm),
            is_logits=True, soft_cap=needs.soft_cap,
        )  # fmt: skip
        vocab_size, soft_cap = needs.vocab_size, needs.soft_cap

        def add_norm_logits(hidden: Tensor, residual: Tensor | None, rows: Tensor) -> Tensor:
            hidden, residual = hidden.contiguous(), None if residual is None else residual.contiguous()
            if rows.shape[0] == 1:
                row = int(rows[0])
                logits = bound.row(hidden[row], None if residual is None else residual[row], None)
                return logits[:, :vocab_size]
            x = bound.normed(hidden, residual, None, rows.contiguous())
            if bound.has_rows and rows.shape[0] > 1:
                return bound.product(x)[:, :vocab_size]
            logits = reference.linear(x, tensors.linear)[:, :vocab_size].float()
            return logits if soft_cap is None else soft_cap * torch.tanh(logits / soft_cap)

        return add_norm_logits


def _pair(spec: NormSpec | None, weight: Tensor | None) -> tuple[NormSpec, Tensor] | None:
    return None if spec is None or weight is None else (spec, weight)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
