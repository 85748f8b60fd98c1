"""The seams around products with packed blocks in C, for any number of rows, and rows of a packed embedding.

One call a seam: norm, products of every part, bias and activation. Inputs are rounded to 16 bits in blocks of 32: less
than bfloat16 loses (docs/quantization.md).
"""

from __future__ import annotations

from ctypes import Structure, byref, c_float, c_int32, c_int64, c_void_p
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from pelton.errors import EngineError
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
    Embed,
    EmbedNeeds,
    EmbedTensors,
    Linear,
    LinearNeeds,
    LinearTensors,
    LinearWeights,
    NormSpec,
)
from pelton.quantization.blocks import KINDS, kinds_of
from pelton_backends.native import library
from pelton_backends.native.library import ACTIVATIONS, DTYPES, NO_ACTIVATION

if TYPE_CHECKING:
    from torch import Tensor

KIND_NUMBERS = {"q8_0": 0, "q4_0": 1, "q4_1": 2}
MOST_PARTS = 3


class Part(Structure):
    _fields_ = (("panels", c_void_p), ("num_rows", c_int64), ("kind", c_int32))


class Quant(Structure):
    _fields_ = (("op", library.Linear), ("parts", Part * MOST_PARTS), ("num_parts", c_int64))


class QuantEmbed(Structure):
    _fields_ = (("part", Part), ("hidden_size", c_int64), ("scale", c_float), ("dtype", c_int32))


def refusals(needs: Any) -> list[str]:
    """Reasons that the seams share."""
    spec = needs.linear
    reasons = _format_refusals(needs, spec.weight_format)
    if not reasons and len(spec.parts) > MOST_PARTS:
        reasons = [f"{len(spec.parts)} parts, at most {MOST_PARTS}"]
    activation = getattr(needs, "activation", "silu")
    if activation not in ACTIVATIONS:
        reasons.append(f"activation {activation!r}, only {', '.join(ACTIVATIONS)}")
    return reasons or _build_refusals()


def _format_refusals(needs: Any, weight_format: str) -> list[str]:
    if not kinds_of(weight_format):
        return [f"weight format {weight_format!r}, only {', '.join(KINDS)}"]
    if needs.dtype not in DTYPES:
        return [f"dtype {needs.dtype}, only {', '.join(DTYPES)}"]
    if getattr(needs, "tp_size", 1) > 1:
        return [f"tp_size {needs.tp_size}, only 1"]
    return []


def _build_refusals() -> list[str]:
    why = library.reason_against()
    return [why] if why else []


class _Product:
    """One seam bound to the parts of one matrix."""

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
        self.run = library.kernels().quant
        spec = weights.spec
        self.num_columns = spec.out_features // (2 if activation else 1)
        self.dtype = torch.float32 if is_logits else getattr(torch, dtype)
        self.kept = (weights, norm, post_norm)  # the struct has their addresses
        op = library.Linear(
            bias=None if weights.bias is None else weights.bias.data_ptr(),
            in_features=spec.in_features, out_features=spec.out_features, output_stride=self.num_columns,
            soft_cap=soft_cap or 0.0, activation=ACTIVATIONS[activation] if activation else NO_ACTIVATION,
            is_logits=is_logits, dtype=DTYPES[dtype],
        )  # fmt: skip
        if norm:
            op.norm, op.eps, op.unit_offset = norm[1].data_ptr(), norm[0].eps, norm[0].unit_offset
        if post_norm:
            op.post_norm, op.post_eps = post_norm[1].data_ptr(), post_norm[0].eps
            op.post_unit_offset = post_norm[0].unit_offset
        parts = _parts(weights)
        self.op = Quant(op, (Part * MOST_PARTS)(*parts), len(parts))
        self.struct = byref(self.op)

    def __call__(
        self,
        hidden: Tensor,
        residual: Tensor | None = None,
        residual_out: int | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Of all rows, or of `rows`; residual' goes to an address, which may be that of either."""
        num_rows = hidden.shape[0] if rows is None else rows.shape[0]
        output = torch.empty(num_rows, self.num_columns, dtype=self.dtype)
        failed = self.run(
            self.struct, hidden.data_ptr(), None if residual is None else residual.data_ptr(), residual_out,
            None if rows is None else rows.data_ptr(), num_rows, output.data_ptr(),
        )  # fmt: skip
        if failed:
            raise EngineError("A product found no memory for its inputs. Give the process more memory.")
        return output

    def add_norm(self, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(product, residual'): residual' takes the memory of `residual`, or of `hidden` before the first layer."""
        hidden = hidden.contiguous()
        residual = None if residual is None else residual.contiguous()
        total = hidden if residual is None else residual
        return self(hidden, residual, total.data_ptr()), total


def _parts(weights: LinearWeights) -> list[Part]:
    kinds = kinds_of(weights.spec.weight_format) or []
    kinds = kinds * len(weights.spec.parts) if len(kinds) == 1 else kinds
    return [
        Part(panels.data_ptr(), num_rows, KIND_NUMBERS[kind.name])
        for panels, num_rows, kind in zip(weights.tensors.values(), weights.spec.parts, kinds, strict=True)
    ]


class QuantAddNormLinear:
    is_recordable: ClassVar[bool] = True

    @staticmethod
    def unsupported(needs: AddNormLinearNeeds) -> list[str]:
        return refusals(needs)

    @staticmethod
    def bind(needs: AddNormLinearNeeds, tensors: AddNormLinearTensors) -> AddNormLinear:
        return _Product(
            needs.dtype, tensors.linear, (needs.norm, tensors.norm), _pair(needs.post_norm, tensors.post_norm)
        ).add_norm


class QuantAddNormGatedLinear:
    is_recordable: ClassVar[bool] = True

    @staticmethod
    def unsupported(needs: AddNormGatedLinearNeeds) -> list[str]:
        return refusals(needs)

    @staticmethod
    def bind(needs: AddNormGatedLinearNeeds, tensors: AddNormGatedLinearTensors) -> AddNormGatedLinear:
        return _Product(
            needs.dtype, tensors.linear, (needs.norm, tensors.norm), _pair(needs.post_norm, tensors.post_norm),
            needs.activation,
        ).add_norm  # fmt: skip


class QuantLinear:
    is_recordable: ClassVar[bool] = True

    @staticmethod
    def unsupported(needs: LinearNeeds) -> list[str]:
        return refusals(needs)

    @staticmethod
    def bind(needs: LinearNeeds, tensors: LinearTensors) -> Linear:
        product = _Product(needs.dtype, tensors.linear)

        def linear(x: Tensor) -> Tensor:
            return product(x.contiguous())

        return linear


class QuantAddNormLogits:
    is_recordable: ClassVar[bool] = True

    @staticmethod
    def unsupported(needs: AddNormLogitsNeeds) -> list[str]:
        return refusals(needs)

    @staticmethod
    def bind(needs: AddNormLogitsNeeds, tensors: AddNormLogitsTensors) -> AddNormLogits:
        product = _Product(
            needs.dtype, tensors.linear, (needs.norm, tensors.norm), _pair(needs.post_norm, tensors.post_norm),
            is_logits=True, soft_cap=needs.soft_cap,
        )  # fmt: skip

        def add_norm_logits(hidden: Tensor, residual: Tensor | None, rows: Tensor) -> Tensor:
            residual = None if residual is None else residual.contiguous()
            return product(hidden.contiguous(), residual, None, rows.contiguous())[:, : needs.vocab_size]

        return add_norm_logits


class QuantEmbedding:
    is_recordable: ClassVar[bool] = True

    @staticmethod
    def unsupported(needs: EmbedNeeds) -> list[str]:
        return _format_refusals(needs, needs.weight_format) or _build_refusals()

    @staticmethod
    def bind(needs: EmbedNeeds, tensors: EmbedTensors) -> Embed:
        run, dtype, panels = library.kernels().quant_embed, getattr(torch, needs.dtype), tensors.weight
        # As the model's dtype holds it, like the reference.
        scale = 1.0 if needs.scale is None else torch.tensor(needs.scale).to(dtype).item()
        part = Part(panels.data_ptr(), needs.num_rows, KIND_NUMBERS[needs.weight_format])
        struct = byref(QuantEmbed(part, needs.hidden_size, scale, DTYPES[needs.dtype]))

        def embed(input_ids: Tensor) -> Tensor:
            input_ids = input_ids.contiguous()
            output = torch.empty(input_ids.shape[0], needs.hidden_size, dtype=dtype)
            run(struct, input_ids.data_ptr(), input_ids.shape[0], output.data_ptr())
            return output

        return embed


def _pair(spec: NormSpec | None, weight: Tensor | None) -> tuple[NormSpec, Tensor] | None:
    return None if spec is None or weight is None else (spec, weight)
