"""The fused op of adapters: what low-rank matrices add to the rows of one product.

It comes behind the product and before the activation, so that a base op of any kind (weight format, fused norm) stays as it is.
A row without an adapter is left alone, to the bit. T tokens, P parts of a merged matrix, R rank, S slots.

Paper: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021 (arXiv:2106.09685).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pelton.ops.interface import FusedOp, NormSpec, optional

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.lora.rows import AdapterRows


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraNeeds:
    dtype: str
    in_features: int
    parts: tuple[int, ...]
    """Rows of each matrix that was merged into the product; each has an A and a B of its own."""
    rank: int  # R: a power of two from 16, adapters of smaller ranks are filled up with zeros
    num_slots: int
    norm: NormSpec | None = optional(None)  # the rows are normed before they meet A
    activation: str | None = optional(None)  # of two equal parts, gate and up; silu, gelu, gelu_tanh


@dataclass(slots=True)
class LoraTensors:
    a: Tensor  # [S, P * R, in], the strides of a slot are any
    b: Tensor  # [S, R, sum of parts]: B transposed, with the adapter's scale in it; the strides of a slot are any
    rows: AdapterRows
    norm: Tensor | None = None  # [in]


class Lora(Protocol):
    def __call__(self, x: Tensor, output: Tensor) -> Tensor:
        """output[t] += B[s] (A[s] norm(x[t])) for each part, s = rows.token_slots[t]; rows with s = -1 stay as they are.

        x [T, in]; output [T, sum of parts], the base product of the same rows, may be overwritten. Returns it, or with an
        activation activation(gate) * up of *all* rows [T, sum of parts / 2]. Sums are float32; A x may be rounded to the
        dtype before it meets B; the sum with the output is rounded once, and then as `Gated` says.
        """
        ...


LORA = FusedOp(name="lora", needs=LoraNeeds, tensors=LoraTensors, reference="pelton.lora.reference:ReferenceLora")
