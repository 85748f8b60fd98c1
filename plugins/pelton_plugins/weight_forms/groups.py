"""Weights of 4 or 8 bits in groups of columns with a scale and a zero point or minimum each: how they lie in memory, and their product
in torch.

    weight [out, in] = (code - zero point) * scale        of the row and of the group of columns: formats of FORMATS
    weight [out, in] = code * scale + minimum             formats of MINIMA

codes    [out, ceil(in / 128) 4 bits] int32. 128 columns of a row are 16 words of four bits a column, and of 8 bits 16 more with the
         upper half. Word 4 t + 2 u + v has, at bits 4 p and 4 p + 16, columns 32 p + 16 u + 8 v + 2 t and the one behind it: what one
         thread wants for an instruction of tensor cores that multiplies 16 rows by 16 columns.
scales   [out, in / group] int32: a float32 whose last 8 bits are replaced by the zero point. Scales of 16 bits lose nothing.
         With minima: a float16 scale in the upper half, a float16 minimum in the lower one.
order    [in] int32, where the checkpoint's columns were quantized out of order: column c of the weight is multiplied with column
         order[c] of the inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from pelton_plugins.weight_forms.tables import TABLES, dequantize_table

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.ops.interface import Embed, EmbedNeeds, EmbedTensors, Linear, LinearNeeds, LinearTensors, LinearWeights

FORMATS = {4: "int4_grouped", 8: "int8_grouped"}
MINIMA = {4: "int4_minima", 8: "int8_minima"}
BITS = {name: bits for names in (FORMATS, MINIMA) for bits, name in names.items()}
READ = (*BITS, *TABLES)
"""Formats that the ops of torch read."""
BLOCK = 128  # columns
SMALLEST_GROUP = 32
LARGEST_ZERO = 255


def codes_shape(num_rows: int, num_cols: int, bits: int) -> tuple[int, int]:
    return num_rows, -(-num_cols // BLOCK) * 4 * bits


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """[n, in] integers from 0 to 2^bits - 1 -> words [n, ceil(in / 128) 4 bits] int32"""
    padded = F.pad(codes.to(torch.int64), (0, -codes.shape[1] % BLOCK))
    places = padded.view(codes.shape[0], -1, 4, 2, 2, 4, 2)  # p u v t b
    words = places.permute(0, 1, 5, 3, 4, 6, 2).reshape(codes.shape[0], -1, 16, 8)  # word: t u v; code: b p
    shifts = torch.arange(8, device=codes.device) * 4
    halves = [(((words >> half) & 15) << shifts).sum(-1) for half in range(0, bits, 4)]
    return _wrapped(torch.stack(halves, 2)).flatten(1)


def unpack_codes(words: Tensor, num_cols: int, bits: int) -> Tensor:
    """[n, in] int32"""
    shifts = torch.arange(8, device=words.device, dtype=torch.int32) * 4
    halves = (words.view(words.shape[0], -1, bits // 4, 16, 1) >> shifts) & 15
    codes = halves[:, :, 0] if bits == 4 else halves[:, :, 0] + (halves[:, :, 1] << 4)
    places = codes.view(words.shape[0], -1, 4, 2, 2, 2, 4)  # t u v b p
    return places.permute(0, 1, 6, 3, 4, 2, 5).flatten(1)[:, :num_cols]


def pack_scales(scales: Tensor, zeros: Tensor) -> Tensor:
    """scales [n, groups] of any floating type, zeros the same shape, 0 to 255 -> int32"""
    bits = scales.float().view(torch.int32).to(torch.int64)
    rounded = (bits + 0x80) & ~0xFF
    return _wrapped(rounded | zeros.to(torch.int64))


def pack_minima(scales: Tensor, minima: Tensor) -> Tensor:
    """scales, minima [n, groups] float16 -> int32"""
    high, low = (part.contiguous().view(torch.int16).to(torch.int64) & 0xFFFF for part in (scales, minima))
    return _wrapped(high << 16 | low)


def unpack_minima(words: Tensor) -> tuple[Tensor, Tensor]:
    """(scales, minima), both float32."""
    return (words >> 16).to(torch.int16).view(torch.float16).float(), words.to(torch.int16).view(torch.float16).float()


def unpack_scales(words: Tensor) -> tuple[Tensor, Tensor]:
    """(scales, zeros), both float32."""
    return (words & ~0xFF).view(torch.float32), (words & 0xFF).float()


def dequantize(weights: LinearWeights, rows: slice | Tensor = slice(None)) -> Tensor:
    """These rows [n, in] in float32, columns in the order of the codes."""
    spec = weights.spec
    if spec.weight_format in TABLES:
        return dequantize_table(weights.tensors["codes"][rows], weights.tensors["scales"][rows], spec.weight_format)
    codes = unpack_codes(weights.tensors["codes"][rows], spec.in_features, BITS[spec.weight_format]).float()
    words = weights.tensors["scales"][rows]
    if spec.weight_format in MINIMA.values():
        scales, minima = unpack_minima(words)
        return (codes.view(*scales.shape, -1) * scales[..., None] + minima[..., None]).flatten(1)
    scales, zeros = unpack_scales(words)
    groups = codes.view(*scales.shape, -1)
    return ((groups - zeros[..., None]) * scales[..., None]).flatten(1)


def _wrapped(words: Tensor) -> Tensor:
    """The low 32 bits of int64 as int32."""
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


NUMBERS_AT_ONCE = 2**22
"""Of a weight, dequantized at once."""


class GroupedLinearReference:
    """Dequantized for each product, products and sums in float32, rounded once to the model's dtype, after the bias."""

    handles = frozenset(["weight_format", "has_bias", "is_ordered"])
    is_recordable = True

    @staticmethod
    def unsupported(needs: LinearNeeds) -> list[str]:
        if needs.linear.weight_format in READ:
            return []
        return [f"weight format {needs.linear.weight_format!r}, only {', '.join(READ)}"]

    @staticmethod
    def bind(needs: LinearNeeds, tensors: LinearTensors) -> Linear:
        weights = tensors.linear
        step = max(NUMBERS_AT_ONCE // needs.linear.in_features, 1)

        def call(x: Tensor) -> Tensor:
            order = weights.tensors.get("order")
            rows = (x if order is None else x.index_select(1, order)).float()
            result = rows.new_empty(x.shape[0], needs.linear.out_features)
            for first in range(0, needs.linear.out_features, step):
                part = slice(first, first + step)
                result[:, part] = F.linear(rows, dequantize(weights, part))
            if weights.bias is not None:
                result += weights.bias.float()
            return result.to(x.dtype)

        return call


class GroupedEmbedReference:
    """Rows of an embedding in groups."""

    handles = frozenset(["scale", "tp_size", "weight_format"])
    is_recordable = True

    @staticmethod
    def unsupported(needs: EmbedNeeds) -> list[str]:
        return [] if needs.weight_format in READ else [f"weight format {needs.weight_format!r}, only {', '.join(READ)}"]

    @staticmethod
    def bind(needs: EmbedNeeds, tensors: EmbedTensors) -> Embed:
        weights, dtype, first_row = tensors.linear, getattr(torch, needs.dtype), tensors.first_row
        assert weights is not None
        scale = None if needs.scale is None else torch.tensor(needs.scale).to(dtype).item()

        def call(input_ids: Tensor) -> Tensor:
            local = input_ids - first_row
            hidden = dequantize(weights, local.clamp(0, needs.num_rows - 1)).to(dtype)
            hidden = hidden if scale is None else hidden * scale
            if needs.tp_size == 1:
                return hidden
            return hidden * ((local >= 0) & (local < needs.num_rows))[:, None]

        return call
