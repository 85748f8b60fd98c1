"""Products with packed blocks in C, for any number of rows, and rows of a packed embedding.

One call a fused op: norm, products of every part, bias and activation. Inputs are rounded to 16 bits in blocks of 32: less
than bfloat16 loses (docs/quantization.md).
"""

from __future__ import annotations

from ctypes import Structure, byref, c_float, c_int32, c_int64, c_void_p
from typing import Any, ClassVar

from pelton.ops.interface import Embed, EmbedNeeds, EmbedTensors, LinearWeights
from pelton.ops.packed_blocks import KINDS, kinds_of
from pelton_backends.native import library
from pelton_backends.native.embed import EmbeddingRows, scale_of
from pelton_backends.native.library import DTYPES
from pelton_backends.native.linear_ops import HANDLES, AddNormLinearOp, FusedOp, LinearOp, LogitsOp, Product, refusals

KIND_NUMBERS = {"q8_0": 0, "q4_0": 1, "q4_1": 2}
MOST_PARTS = 3


class Part(Structure):
    _fields_ = (("panels", c_void_p), ("num_rows", c_int64), ("kind", c_int32))


class Quant(Structure):
    _fields_ = (("op", library.Linear), ("parts", Part * MOST_PARTS), ("num_parts", c_int64))


class QuantEmbed(Structure):
    _fields_ = (("part", Part), ("hidden_size", c_int64), ("scale", c_float), ("dtype", c_int32))


class _BlocksProduct(Product):
    def __init__(self, needs: Any, tensors: Any) -> None:
        super().__init__(needs, tensors)
        parts = _parts(tensors.linear)
        self.struct = byref(Quant(self.op, (Part * MOST_PARTS)(*parts), len(parts)))
        self.run = library.kernels("quant", dtype=needs.dtype).quant


def _parts(weights: LinearWeights) -> list[Part]:
    kinds = kinds_of(weights.spec.weight_format) or []
    kinds = kinds * len(weights.spec.parts) if len(kinds) == 1 else kinds
    return [
        Part(panels.data_ptr(), num_rows, KIND_NUMBERS[kind.name])
        for panels, num_rows, kind in zip(weights.tensors.values(), weights.spec.parts, kinds, strict=True)
    ]


def _format_refusals(weight_format: str) -> list[str]:
    return [] if kinds_of(weight_format) else [f"weight format {weight_format!r}, only {', '.join(KINDS)}"]


class _Blocks(FusedOp):
    handles = HANDLES

    @staticmethod
    def unsupported(needs: Any) -> list[str]:
        reasons, parts = _format_refusals(needs.linear.weight_format), needs.linear.parts
        if not reasons and len(parts) > MOST_PARTS:
            reasons = [f"{len(parts)} parts, at most {MOST_PARTS}"]
        if not reasons and hasattr(needs, "activation") and (len(parts) != 2 or parts[0] != parts[1]):
            reasons = [f"parts {parts} of a gate and up, only two of one size"]
        return reasons or refusals(needs, "quant")

    @staticmethod
    def product(needs: Any, tensors: Any) -> Product:
        return _BlocksProduct(needs, tensors)


class QuantLinear(LinearOp, _Blocks):
    pass


class QuantAddNormLinear(AddNormLinearOp, _Blocks):
    """Also `add_norm_gated_linear`."""


class QuantAddNormLogits(LogitsOp, _Blocks):
    pass


class QuantEmbedding:
    handles = HANDLES
    is_recordable: ClassVar[bool] = True

    @staticmethod
    def unsupported(needs: EmbedNeeds) -> list[str]:
        if needs.tp_size > 1:
            return [f"tp_size {needs.tp_size}, only 1"]
        return _format_refusals(needs.weight_format) or refusals(needs, "quant")

    @staticmethod
    def bind(needs: EmbedNeeds, tensors: EmbedTensors) -> Embed:
        part = Part(tensors.weight.data_ptr(), needs.num_rows, KIND_NUMBERS[needs.weight_format])
        op = QuantEmbed(part, needs.hidden_size, scale_of(needs), DTYPES[needs.dtype])
        return EmbeddingRows(needs, tensors, library.kernels("quant", dtype=needs.dtype).quant_embed, op)
