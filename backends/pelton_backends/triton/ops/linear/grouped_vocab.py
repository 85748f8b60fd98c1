"""The vocabulary's two ends in groups of 4 or 8 bits: rows of the embedding, and logits, which are float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from pelton.ops.interface import (
    AddNormLogits,
    AddNormLogitsNeeds,
    AddNormLogitsTensors,
    Embed,
    EmbedNeeds,
    EmbedTensors,
)
from pelton.platform.compiling import launch
from pelton_backends.triton.ops.linear.gemv import HANDLES, inner_contiguous
from pelton_backends.triton.ops.linear.grouped import DTYPES, FORMATS, MAX_TOKENS, GroupedMatrix
from pelton_backends.triton.ops.linear.grouped_kernels import scale_of
from pelton_backends.triton.ops.linear.refusals import logits_refusals
from pelton_backends.triton.ops.logits import RowNorms, capped
from pelton_backends.triton.runtime import has_pdl, launch_options, let_next_start, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

COLUMNS = 1024  # a program


@triton.jit
def embed_kernel(
    input_ids, codes, scales, out, num_rows, factor, H: tl.constexpr, G: tl.constexpr, B: tl.constexpr, MINIMA: tl.constexpr,
    HAS_SCALE: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """COLUMNS columns of one token a program; codes and scales as `grouped_kernels` has them. Ids outside are clamped."""
    BLOCKS: tl.constexpr = (H + 127) // 128
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_in = columns < H
    wait_for_inputs(PDL)  # in this order: see the exception in `runtime`
    let_next_start(PDL)
    row = tl.minimum(tl.maximum(tl.load(input_ids + token), 0), num_rows - 1)
    c = columns % 128
    shift = c // 32 * 4 + c % 2 * 16
    place = codes + row * (BLOCKS * 4 * B) + columns // 128 * (4 * B) + c % 8 // 2 * 4 + c % 32 // 16 * 2 + c % 16 // 8
    code = (tl.load(place, mask=is_in, other=0) >> shift) & 15
    if B == 8:
        code += ((tl.load(place + 16, mask=is_in, other=0) >> shift) & 15) * 16
    scale, other = scale_of(tl.load(scales + row * (H // G) + columns // G, mask=is_in, other=0), MINIMA)
    x = code.to(tl.float32) * scale + other if MINIMA else (code.to(tl.float32) - other) * scale
    x = x.to(out.dtype.element_ty)
    if HAS_SCALE:
        x = (x.to(tl.float32) * factor).to(x.dtype)
    tl.store(out + token * H + columns, x, mask=is_in)


class GroupedEmbed:
    handles = frozenset(["scale", "weight_format"])

    @staticmethod
    def unsupported(needs: EmbedNeeds) -> list[str]:
        reasons = [] if needs.dtype in DTYPES else [f"dtype {needs.dtype}, only {', '.join(DTYPES)}"]
        if needs.weight_format not in FORMATS:
            reasons.append(f"weight format {needs.weight_format!r}, only {', '.join(FORMATS)}")
        return reasons

    @staticmethod
    def bind(needs: EmbedNeeds, tensors: EmbedTensors) -> Embed:
        assert tensors.linear is not None
        codes, scales = tensors.linear.tensors["codes"], tensors.linear.tensors["scales"]
        hidden, dtype, pdl = needs.hidden_size, getattr(torch, needs.dtype), has_pdl(codes.device)
        # As the model's dtype holds it, like the reference.
        factor = 1.0 if needs.scale is None else torch.tensor(needs.scale).to(dtype).item()
        form = {
            "H": hidden, "G": hidden // scales.shape[1], "B": FORMATS[needs.weight_format],
            "MINIMA": needs.weight_format.endswith("_minima"), "HAS_SCALE": needs.scale is not None,
        }  # fmt: skip

        def call(input_ids: Tensor) -> Tensor:
            out = torch.empty((input_ids.shape[0], hidden), dtype=dtype, device=codes.device)
            if input_ids.shape[0]:
                launch(
                    embed_kernel, (input_ids.shape[0], triton.cdiv(hidden, COLUMNS)),
                    input_ids, codes, scales, out, codes.shape[0], factor, **form, COLUMNS=COLUMNS, PDL=pdl, num_warps=4,
                    **launch_options(pdl),
                )  # fmt: skip
            return out

        return call


class GroupedAddNormLogits:
    """See `AddNormLogits`. One row streams the matrix, more go through tensor cores, `MAX_TOKENS` at a time."""

    handles = HANDLES | {"soft_cap", "is_ordered"}

    @staticmethod
    def unsupported(needs: AddNormLogitsNeeds) -> list[str]:
        return logits_refusals(needs, FORMATS, DTYPES)

    @staticmethod
    def bind(needs: AddNormLogitsNeeds, tensors: AddNormLogitsTensors) -> AddNormLogits:
        head, matrix = RowNorms(needs, tensors), GroupedMatrix(tensors.linear, needs.dtype)

        def product(x: Tensor) -> Tensor:
            if x.shape[0] == 1:
                return matrix.multiply_one(x, torch.float32)
            parts = [matrix(part, out_dtype=torch.float32) for part in x.split(MAX_TOKENS)]
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        def call(hidden: Tensor, residual: Tensor | None, rows: Tensor) -> Tensor:
            if rows.shape[0] == 0:
                return torch.empty((0, head.vocab_size), dtype=torch.float32, device=hidden.device)
            hidden = inner_contiguous(hidden)
            residual = None if residual is None else inner_contiguous(residual)
            return capped(product(head.normed(hidden, residual, rows))[:, : head.vocab_size], head.soft_cap)

        return call
