"""Lightning attention in torch, for CPU: linear attention in which each head forgets at a pace of its own. Qin et al., Lightning
Attention-2 (arXiv:2401.04658).

For head h with state S [D, D]:  S_t = exp(-s_h) S_{t-1} + k_t v_t^T  and  o_t = S_t^T q_t: Mamba-2's states with steps of 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Protocol

import torch.nn.functional as F

from pelton.attention.interface import AttentionNeeds, BoundAttention
from pelton_backends.sdpa.state_rows import StateMetadata, StateRows
from pelton_backends.sdpa.state_space import scan

if TYPE_CHECKING:
    from torch import Tensor


class LightningParams(Protocol):
    """Facts of a layer of this kind. Its query is [T, 3 H D + ...]: q, k and v, and more that is not read; its output [T, H D]."""

    needs: AttentionNeeds
    num_heads: int  # H
    head_dim: int  # D
    slopes: Tensor  # [H] float32
    states: Tensor  # [num_blocks, H, D, D] float32: of each number of a value those of a key


class Lightning(BoundAttention):
    """A layer's states."""

    layer: LightningParams

    def __call__(self, query: Tensor, metadata: StateMetadata, output: Tensor) -> None:
        layer = self.layer
        inner = layer.num_heads * layer.head_dim
        parts = F.silu(query[:, : 3 * inner]).float().split(inner, dim=-1)
        q, k, v = (part.unflatten(-1, (layer.num_heads, -1)) for part in parts)
        steps, a_log = q.new_ones(q.shape[:2]), layer.slopes.log()
        for row in metadata.rows:
            own = row.tokens
            found = scan(row.state(layer.states), v[own], steps[own], k[own], q[own], a_log)
            output[own] = found.flatten(1).to(output.dtype)


class LightningBackend(StateRows):
    name: ClassVar[str] = "lightning"
    attention_type: ClassVar[str] = "lightning"
    computes: ClassVar[type[BoundAttention]] = Lightning
