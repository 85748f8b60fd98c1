"""Token ids to rows of the embedding matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from pelton.ops.interface import Embed, EmbedNeeds, EmbedTensors
from pelton.platform.compiling import launch
from pelton_backends.triton.runtime import has_pdl, launch_options, let_next_start, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = ("bfloat16", "float16", "float32")
BLOCK = 1024  # columns a program: a row of a large model is spread over several, a single token is latency bound


@triton.jit
def embed_kernel(
    input_ids, weight, out, num_rows, scale, H: tl.constexpr, BLOCK: tl.constexpr, HAS_SCALE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_inputs(PDL)  # in this order: see the exception in `runtime`
    let_next_start(PDL)
    row = tl.minimum(tl.maximum(tl.load(input_ids + token), 0), num_rows - 1)
    x = tl.load(weight + row * H + cols, mask=cols < H, other=0.0)
    if HAS_SCALE:
        x = (x.to(tl.float32) * scale).to(x.dtype)
    tl.store(out + token * H + cols, x, mask=cols < H)


def embed(input_ids: Tensor, weight: Tensor, scale: float | None, *, pdl: bool) -> Tensor:
    """Rows of the embedding matrix, scaled.

    Math   out[t] = weight[input_ids[t]] * scale  (float32 product, rounded once); ids outside are clamped to the matrix.

    T tokens, V rows, H columns
      input_ids  [T]     int64, contiguous
      weight     [V, H]  fp16, bf16 or fp32, contiguous
      returns    [T, H]  weight's dtype

    Bit-exact against `ReferenceEmbed`. One program a token and 1,024 columns.
    """
    num_tokens, hidden_size = input_ids.shape[0], weight.shape[1]
    out = torch.empty((num_tokens, hidden_size), dtype=weight.dtype, device=weight.device)
    if num_tokens:
        launch(
            embed_kernel, (num_tokens, triton.cdiv(hidden_size, BLOCK)),
            input_ids, weight, out, weight.shape[0], 1.0 if scale is None else scale, hidden_size, BLOCK,
            scale is not None, pdl, num_warps=4, **launch_options(pdl),
        )  # fmt: skip
    return out


class TritonEmbed:
    handles = frozenset(["scale", "tp_size", "weight_format"])

    @staticmethod
    def unsupported(needs: EmbedNeeds) -> list[str]:
        reasons = [] if needs.dtype in DTYPES else [f"dtype {needs.dtype}, only {', '.join(DTYPES)}"]
        if needs.weight_format != "plain":
            reasons.append(f"weight format {needs.weight_format!r}, only 'plain'")
        return reasons + (["a vocabulary split over ranks"] if needs.tp_size > 1 else [])

    @staticmethod
    def bind(needs: EmbedNeeds, tensors: EmbedTensors) -> Embed:
        weight, pdl = tensors.weight, has_pdl(tensors.weight.device)
        # As the model's dtype holds it, like the reference.
        scale = None if needs.scale is None else torch.tensor(needs.scale).to(weight.dtype).item()

        def call(input_ids: Tensor) -> Tensor:
            return embed(input_ids, weight, scale, pdl=pdl)

        return call
