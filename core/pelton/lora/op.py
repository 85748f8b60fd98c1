"""The fused ops of adapters: what low-rank matrices add to the rows of one product, and products with it.

`lora` comes behind the product and before the activation, so that a base op of any kind (weight format, fused norm) stays as it
is. `lora_linear`, `lora_add_norm_linear` and `lora_add_norm_gated_linear` are the base op and `lora` in one: kernels that add both
at once are offered for them; where none fits they are composed.
A row without an adapter is left alone, to the bit. T tokens, P parts of a merged matrix, R rank, S slots.

Paper: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021 (arXiv:2106.09685).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pelton.ops.interface import (
    AddNormGatedLinearNeeds,
    AddNormGatedLinearTensors,
    AddNormLinearNeeds,
    AddNormLinearTensors,
    FusedOp,
    LinearNeeds,
    LinearTensors,
    NormSpec,
    optional,
)

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.lora.rows import AdapterRowTensors
    from pelton.ops.interface import LinearWeights


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
    b: Tensor  # [S, R, sum of parts]: B transposed, with the adapter's scale in it; any strides, one of the last two 1
    rows: AdapterRowTensors
    norm: Tensor | None = None  # [in]


class Lora(Protocol):
    def __call__(self, x: Tensor, output: Tensor) -> Tensor:
        """output[t] += B[s] (A[s] norm(x[t])) for each part, s = rows.token_slots[t]; rows with s = -1 stay as they are.

        x [T, in]; output [T, sum of parts], the base product of the same rows, may be overwritten. Returns it, or with an
        activation activation(gate) * up of *all* rows [T, sum of parts / 2]. Sums are float32; A x may be rounded to the
        dtype before it meets B; the sum with the output is rounded once, and then as `Gated` says.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedNeeds:
    """A product whose rows may have adapters."""

    base: LinearNeeds | AddNormLinearNeeds | AddNormGatedLinearNeeds
    adapter: LoraNeeds


@dataclass(slots=True)
class AdaptedTensors:
    base: LinearTensors | AddNormLinearTensors | AddNormGatedLinearTensors
    adapter: LoraTensors

    @property
    def linear(self) -> LinearWeights:
        """Weights of the base product: all ops that read them have to agree on their order."""
        return self.base.linear


LORA = FusedOp(name="lora", needs=LoraNeeds, tensors=LoraTensors)
# Called as the base op is. Rows without an adapter have the base op's numbers, to the bit where both take the same kernel.
LORA_LINEAR = FusedOp(name="lora_linear", needs=AdaptedNeeds, tensors=AdaptedTensors)
LORA_ADD_NORM_LINEAR = FusedOp(name="lora_add_norm_linear", needs=AdaptedNeeds, tensors=AdaptedTensors)
LORA_ADD_NORM_GATED_LINEAR = FusedOp(name="lora_add_norm_gated_linear", needs=AdaptedNeeds, tensors=AdaptedTensors)
