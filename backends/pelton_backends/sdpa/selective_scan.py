"""The selective scan of Mamba in torch, for CPU. Gu and Dao, Mamba (arXiv:2312.00752), section 3.

Each number e of a token has a state of its own S_e [N], token t of a row:

    S_e,t = exp(dt_e,t A_e) S_e,t-1 + dt_e,t x_e,t B_t    and    y_e,t = S_e,t . C_t + D_e x_e,t

A decay differs in every number of a state, so tokens cannot meet each other in products as Mamba-2's do, and a row takes them one by one:
its state stays in a core's cache. 1,024 tokens of E = 8,192 and N = 16 took one thread (AVX-512) 0.3 s, and 2.2 s in 32 chunks beside each
other, from nothing first and then from the right states. States are float32.

Shapes: T tokens of a step, E numbers of a token, N of a state, L tokens of a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Protocol

import torch
import torch.nn.functional as F

from pelton.attention.interface import AttentionNeeds, BoundAttention
from pelton_backends.sdpa.state_rows import StateMetadata, StateRows, convolve

if TYPE_CHECKING:
    from torch import Tensor


class ScanParams(Protocol):
    """Facts of a layer of this kind. Its query is [T, E + ...]: x, and more that is not read; its output [T, E]."""

    needs: AttentionNeeds
    conv_weight: Tensor  # [E, K]
    conv_bias: Tensor | None
    a_log: Tensor  # [E, N] float32
    d: Tensor  # [E] float32
    conv_states: Tensor  # [num_blocks, E, K - 1], a view of the pool
    states: Tensor  # [num_blocks, E, N] float32

    def selected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, E], convolved -> dt [T, E], B and C [T, N], all float32."""
        ...


class SelectiveScan(BoundAttention):
    """A layer's convolution and states."""

    layer: ScanParams

    def __call__(self, query: Tensor, metadata: StateMetadata, output: Tensor) -> None:
        """query [T, E + ...] -> output [T, E], not yet gated"""
        layer = self.layer
        x = F.silu(convolve(layer, query[:, : len(layer.conv_weight)], metadata))
        dt, b, c = layer.selected(x)
        rates, x = -layer.a_log.exp(), x.float()
        parts = dt, dt * x, b, c
        for row in metadata.rows:
            y = scan(row.state(layer.states), rates, *(part[row.tokens] for part in parts))
            output[row.tokens] = (y + layer.d * x[row.tokens]).to(output.dtype)


class SelectiveScanBackend(StateRows):
    name: ClassVar[str] = "selective_scan"
    attention_type: ClassVar[str] = "selective_scan"
    computes: ClassVar[type[BoundAttention]] = SelectiveScan


def scan(state: Tensor, rates: Tensor, dt: Tensor, given: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """A row's tokens: state [E, N], changed in place, rates [E, N], dt and given = dt x [L, E], b and c [L, N] -> y [L, E] without D x."""
    decay, parts = torch.empty_like(state), []
    for token in range(len(dt)):
        torch.mul(dt[token, :, None], rates, out=decay).exp_()
        state.mul_(decay).addcmul_(given[token, :, None], b[token])
        parts.append(state @ c[token])
    return torch.stack(parts)
