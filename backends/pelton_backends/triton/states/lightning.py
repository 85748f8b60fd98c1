"""Lightning attention, as the kernels of Mamba-2's states see it: x, B and C are values, keys and queries, and each token steps by 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pelton_backends.triton.states.convolved import RowStates
from pelton_backends.triton.states.scan import StateScan
from pelton_backends.triton.states.step import StateStep

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.attention.interface import AttentionNeeds
    from pelton_backends.sdpa.lightning import LightningParams
    from pelton_backends.triton.states.backend import StateMetadata


@dataclass(frozen=True, slots=True)
class _Facts:
    """Facts of a layer that those kernels read."""

    needs: AttentionNeeds
    num_heads: int
    num_groups: int
    head_dim: int
    state_size: int
    a_log: Tensor
    states: Tensor
    dt_bias: None = None
    d: None = None
    dt_limit: tuple[float, float] = (1.0, 1.0)


class Lightning(RowStates):
    """Layer whose query is [T, 3 H D + ...]: q, k and v before SiLU, and more that is not read."""

    layer: LightningParams

    def __init__(self, layer: LightningParams, *, pdl: bool) -> None:
        heads, dim = layer.num_heads, layer.head_dim
        facts = _Facts(layer.needs, heads, heads, dim, dim, layer.slopes.log(), layer.states)
        at = 2 * heads * dim, heads * dim, 0
        super().__init__(layer, step=StateStep(facts, at=at, pdl=pdl), scan=StateScan(facts, at=at, pdl=pdl))

    def __call__(self, query: Tensor, metadata: StateMetadata, output: Tensor) -> None:
        """query [T, 3 H D + ...] -> output [T, H D]; rows of padding are left as they are"""
        self.compute(query, query, metadata, output)
