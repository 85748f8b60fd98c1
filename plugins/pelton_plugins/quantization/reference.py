"""The product with e4m3 weights in torch, on every device: what kernels are tested against, and slow."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F

from pelton.ops.interface import Linear, LinearNeeds, LinearTensors
from pelton_plugins.quantization.numbers import round_rows, row_scales

if TYPE_CHECKING:
    from torch import Tensor

FORMAT, BLOCKS_FORMAT = "fp8_e4m3", "fp8_blocks"
"""The latter: `weight` [out, in] float8_e4m3fn and `weight_scale` [out, in / G] float32, those of a row's blocks of G columns, G a power of
two from 16. `LinearSpec.inputs` says there that inputs may be rounded, where an op is faster so; without it they must not be."""
NUMBERS_AT_ONCE = 2**22
"""Of a weight, widened at once."""


class Fp8LinearReference:
    """Products and sums in float32, rounded once to the model's dtype, after the bias."""

    handles = frozenset(["weight_format", "has_bias", "inputs"])
    is_recordable = True

    @staticmethod
    def unsupported(needs: LinearNeeds) -> list[str]:
        spec = needs.linear
        reasons = []
        if spec.weight_format != FORMAT:
            reasons.append(f"weight format {spec.weight_format!r}, only {FORMAT!r}")
        if spec.inputs is not None and spec.inputs.dtype != "float8_e4m3fn":
            reasons.append(f"inputs rounded to {spec.inputs.dtype}, only float8_e4m3fn")
        return reasons

    @staticmethod
    def bind(needs: LinearNeeds, tensors: LinearTensors) -> Linear:
        weights, inputs = tensors.linear, needs.linear.inputs
        weight, scale, bias = weights.tensors["weight"], weights.tensors["weight_scale"], weights.bias
        step = max(NUMBERS_AT_ONCE // needs.linear.in_features, 1)

        def call(x: Tensor) -> Tensor:
            rows = x.float()
            input_scales = None
            if inputs is not None:
                is_dynamic = inputs.is_dynamic
                input_scales = (
                    row_scales(x, inputs.bound) if is_dynamic else weights.tensors["input_scale"].expand(x.shape[0])
                )
                rows = round_rows(x, input_scales).float()
            result = rows.new_empty(x.shape[0], weight.shape[0])
            for first in range(0, weight.shape[0], step):
                part = slice(first, first + step)
                result[:, part] = F.linear(rows, weight[part].float())
            result *= scale
            if input_scales is not None:
                result *= input_scales[:, None]
            if bias is not None:
                result += bias.float()
            return result.to(x.dtype)

        return call


class Fp8BlocksReference:
    """As `Fp8LinearReference` for "fp8_blocks": each row has a scale for every block of columns, and inputs are never rounded."""

    handles = frozenset(["weight_format", "has_bias", "inputs"])
    is_recordable = True

    @staticmethod
    def unsupported(needs: LinearNeeds) -> list[str]:
        found = needs.linear.weight_format
        return [] if found == BLOCKS_FORMAT else [f"weight format {found!r}, only {BLOCKS_FORMAT!r}"]

    @staticmethod
    def bind(needs: LinearNeeds, tensors: LinearTensors) -> Linear:
        weights, num_cols = tensors.linear, needs.linear.in_features
        weight, scale, bias = weights.tensors["weight"], weights.tensors["weight_scale"], weights.bias
        step, size = max(NUMBERS_AT_ONCE // num_cols, 1), num_cols // scale.shape[1]

        def call(x: Tensor) -> Tensor:
            rows = x.float()
            result = rows.new_empty(x.shape[0], weight.shape[0])
            for first in range(0, weight.shape[0], step):
                part = slice(first, first + step)
                result[:, part] = F.linear(rows, weight[part].float() * scale[part].repeat_interleave(size, 1))
            if bias is not None:
                result += bias.float()
            return result.to(x.dtype)

        return call
