"""A layer of Mamba-2, as its kernels see it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pelton_backends.triton.states.convolved import ConvolvedStates
from pelton_backends.triton.states.scan import StateScan
from pelton_backends.triton.states.step import StateStep

if TYPE_CHECKING:
    from pelton_backends.sdpa.state_space import StateParams


class StateSpace(ConvolvedStates):
    """Layer of Mamba-2, whose query is [T, E + E + 2 G N + H]: a gate that is not read, x, B and C, dt."""

    layer: StateParams

    def __init__(self, layer: StateParams, *, pdl: bool) -> None:
        step, scan = StateStep(layer, pdl=pdl), StateScan(layer, pdl=pdl)
        super().__init__(layer, first=layer.num_heads * layer.head_dim, step=step, scan=scan, pdl=pdl)
