"""The seams around products in C: one row, or (bfloat16 on AVX-512) any number; what is left goes to torch.

There a weight is brought into the kernels' order once it is loaded, in its own memory, unless another op reads it that does
not know this order. Elsewhere weights are read where they lie, [out, in].
"""

from __future__ import annotations

from ctypes import byref
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from pelton.errors import EngineError
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


PANELS = "pelton_native.panels"
"""The order of weights that csrc/linear_avx512.c reads."""


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
        self.run, self.prepare, self.pack = kernels.linear, kernels.prepare, kernels.pack
        self.weights, self.activation = weights, activation
        self.num_columns = weights.spec.out_features // (2 if activation else 1)
        self.result_dtype = torch.float32 if is_logits else getattr(torch, dtype)
        # Other CPUs and dtypes: oneDNN and MKL are better than plain C.
        self.has_rows = kernels.isa == "avx512" and dtype == "bfloat16" and weights.spec.in_features % 2 == 0
        self.kept = (norm, post_norm)  # the struct has their addresses
        self.op = library.Linear(
            weights.tensors["weight"].data_ptr(), _address(weights.bias),
            norm and norm[1].data_ptr(), post_norm and post_norm[1].data_ptr(),
            weights.spec.in_features, weights.spec.out_features, self.num_columns,
            norm[0].eps if norm else 0.0, post_norm[0].eps if post_norm else 0.0, soft_cap or 0.0,
            bool(norm and norm[0].unit_offset), bool(post_norm and post_norm[0].unit_offset),
            ACTIVATIONS[activation] if activation else NO_ACTIVATION, is_logits, DTYPES[dtype], False,
        )  # fmt: skip
        self.struct = byref(self.op)

    def weights_loaded(self) -> None:
        """From here on only the kernels can read the weight, where they have an order of their own for it."""
        followers = self.weights.followers.get(PANELS, [])
        if self.op.is_packed or len(followers) + 1 < self.weights.num_readers:
            return
        self.op.is_packed = not self.pack(self.struct, self.op.weight)
        if self.op.is_packed:
            for follow in followers:
                follow()

    def result(
        self, hidden: Tensor, residual: Tensor | None, residual_out: int | None, rows: Tensor | None = None
    ) -> Tensor:
        """Of the kernels' product, with all that belongs to it: of all rows, or of `rows`; residual' goes to an address."""
        num_rows = hidden.shape[0] if rows is None else rows.shape[0]
        output = torch.empty(num_rows, self.num_columns, dtype=self.result_dtype)
        failed = self.run(
            self.struct, hidden.data_ptr(), None if residual is None else residual.data_ptr(), residual_out,
            None if rows is None else rows.data_ptr(), num_rows, output.data_ptr(),
        )  # fmt: skip
        if failed:
            raise EngineError(
                f"A product of {num_rows} rows found no memory for its scratch space. Give the process more memory."
            )
        return output

    def normed(self, hidden: Tensor, residual: Tensor | None, residual_out: int | None, rows: Tensor | None) -> Tensor:
        """What a product by torch reads."""
        num_rows = hidden.shape[0] if rows is None else rows.shape[0]
        x = torch.empty(num_rows, hidden.shape[1], dtype=hidden.dtype)
        self.prepare(
            self.struct, hidden.data_ptr(), None if residual is None else residual.data_ptr(), residual_out,
            x.data_ptr(), None if rows is None else rows.data_ptr(), num_rows,
        )  # fmt: skip
        return x


class _AddNormProduct(_Product):
    def __call__(self, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(product, residual'): residual' takes the memory of `residual`, or of `hidden` before the first layer."""
        hidden = hidden.contiguous()
        residual = None if residual is None else residual.contiguous()
        total = hidden if residual is None else residual
        if self.has_rows or hidden.shape[0] == 1:
            return self.result(hidden, residual, total.data_ptr()), total
        product = reference.linear(self.normed(hidden, residual, total.data_ptr(), None), self.weights)
        return product if self.activation is None else reference.gated(product, self.activation), total


class _PlainProduct(_Product):
    def __call__(self, x: Tensor) -> Tensor:
        if self.has_rows or x.shape[0] == 1:
            return self.result(x.contiguous(), None, None)
        return reference.linear(x, self.weights)


class _Logits(_Product):
    def __init__(self, vocab_size: int, soft_cap: float | None, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named, is_logits=True, soft_cap=soft_cap)
        self.vocab_size, self.soft_cap = vocab_size, soft_cap

    def __call__(self, hidden: Tensor, residual: Tensor | None, rows: Tensor) -> Tensor:
        hidden, residual = hidden.contiguous(), None if residual is None else residual.contiguous()
        rows = rows.contiguous()
        if self.has_rows or rows.shape[0] == 1:
            return self.result(hidden, residual, None, rows)[:, : self.vocab_size]
        x = self.normed(hidden, residual, None, rows)
        logits = reference.linear(x, self.weights)[:, : self.vocab_size].float()
        return logits if self.soft_cap is None else self.soft_cap * torch.tanh(logits / self.soft_cap)


class NativeAddNormLinear:
    is_recordable: ClassVar[bool] = True

    @staticmethod
    def unsupported(needs: AddNormLinearNeeds) -> list[str]:
        return refusals(needs)

    @staticmethod
    def bind(needs: AddNormLinearNeeds, tensors: AddNormLinearTensors) -> AddNormLinear:
        return _AddNormProduct(
            needs.dtype, tensors.linear, (needs.norm, tensors.norm), _pair(needs.post_norm, tensors.post_norm)
        )


class NativeAddNormGatedLinear:
    is_recordable: ClassVar[bool] = True

    @staticmethod
    def unsupported(needs: AddNormGatedLinearNeeds) -> list[str]:
        return refusals(needs)

    @staticmethod
    def bind(needs: AddNormGatedLinearNeeds, tensors: AddNormGatedLinearTensors) -> AddNormGatedLinear:
        return _AddNormProduct(
            needs.dtype, tensors.linear, (needs.norm, tensors.norm), _pair(needs.post_norm, tensors.post_norm),
            needs.activation,
        )  # fmt: skip


class NativeLinear:
    is_recordable: ClassVar[bool] = True

    @staticmethod
    def unsupported(needs: LinearNeeds) -> list[str]:
        return refusals(needs)

    @staticmethod
    def bind(needs: LinearNeeds, tensors: LinearTensors) -> Linear:
        return _PlainProduct(needs.dtype, tensors.linear)


class NativeAddNormLogits:
    is_recordable: ClassVar[bool] = True

    @staticmethod
    def unsupported(needs: AddNormLogitsNeeds) -> list[str]:
        return refusals(needs)

    @staticmethod
    def bind(needs: AddNormLogitsNeeds, tensors: AddNormLogitsTensors) -> AddNormLogits:
        return _Logits(
            needs.vocab_size, needs.soft_cap, needs.dtype, tensors.linear, (needs.norm, tensors.norm),
            _pair(needs.post_norm, tensors.post_norm),
        )  # fmt: skip


def _pair(spec: NormSpec | None, weight: Tensor | None) -> tuple[NormSpec, Tensor] | None:
    return None if spec is None or weight is None else (spec, weight)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
