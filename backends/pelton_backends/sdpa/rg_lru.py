"""The real-gated linear recurrent unit (RG-LRU) in torch, for CPU. De et al., Griffin (arXiv:2402.19427), section 2.4.

Each number e of a token has a state of one number, token t of a row:

    h_t = a_t h_{t-1} + sqrt(1 - a_t^2) g_t

with the decay a_t and the gated input g_t the layer's. A row's first state is g_t itself. Tokens of a row take turns. States are float32.

Shapes: T tokens of a step, E numbers of a token, L tokens of a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Protocol

import torch

from pelton.attention.interface import AttentionNeeds, BoundAttention
from pelton_backends.sdpa.state_rows import StateMetadata, StateRows, convolve

if TYPE_CHECKING:
    from torch import Tensor


class RgLruParams(Protocol):
    """Facts of a layer of this kind. Its query is [T, E + ...]: x, and more that is not read; its output [T, E]."""

    needs: AttentionNeeds
    conv_weight: Tensor  # [E, K]
    conv_bias: Tensor | None
    conv_states: Tensor  # [num_blocks, E, K - 1], a view of the pool
    states: Tensor  # [num_blocks, E] float32

    def gated(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, E], convolved -> the logarithm of the decay, and the gated input, both [T, E] float32."""
        ...


class RgLru(BoundAttention):
    """A layer's convolution and states."""

    layer: RgLruParams

    def __call__(self, query: Tensor, metadata: StateMetadata, output: Tensor) -> None:
        """query [T, E + ...] -> output [T, E]"""
        layer = self.layer
        decay, given = layer.gated(convolve(layer, query[:, : len(layer.conv_weight)], metadata))
        factor = torch.sqrt(-torch.expm1(2 * decay))
        for row in metadata.rows:
            if row.is_new:
                factor[row.tokens.start] = 1.0
        given, decay = given * factor, decay.exp()
        for row in metadata.rows:
            output[row.tokens] = scan(row.state(layer.states), decay[row.tokens], given[row.tokens]).to(output.dtype)


class RgLruBackend(StateRows):
    name: ClassVar[str] = "rg_lru"
    attention_type: ClassVar[str] = "rg_lru"
    computes: ClassVar[type[BoundAttention]] = RgLru


def scan(state: Tensor, decay: Tensor, given: Tensor) -> Tensor:
    """A row's tokens: state [E], changed in place, decay and given [L, E] -> the state behind each, [L, E]."""
    found = torch.empty_like(given)
    for token in range(len(given)):
        torch.addcmul(given[token], decay[token], state, out=found[token])
        state.copy_(found[token])
    return found
