"""Layers with the gated delta rule, as their kernels see them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pelton_backends.triton.states.convolved import ConvolvedStates
from pelton_backends.triton.states.delta_scan import DeltaScan
from pelton_backends.triton.states.delta_step import DeltaStep
from pelton_backends.triton.states.key_delta_scan import KeyDeltaScan

if TYPE_CHECKING:
    from pelton_backends.sdpa.delta_rule import DeltaParams


class DeltaRule(ConvolvedStates):
    """One decay for each head: chunk by chunk, but in float32."""

    layer: DeltaParams

    def __init__(self, layer: DeltaParams, *, pdl: bool) -> None:
        step = DeltaStep(layer, pdl=pdl)
        scan = step.scan if layer.needs.dtype == "float32" else DeltaScan(layer, pdl=pdl)
        super().__init__(layer, first=0, step=step, scan=scan, pdl=pdl)


class KeyDeltaRule(ConvolvedStates):
    """One decay for each number of a key: chunk by chunk, but in float32."""

    layer: DeltaParams

    def __init__(self, layer: DeltaParams, *, pdl: bool) -> None:
        step = DeltaStep(layer, pdl=pdl)
        scan = step.scan if layer.needs.dtype == "float32" else KeyDeltaScan(layer, pdl=pdl)
        super().__init__(layer, first=0, step=step, scan=scan, pdl=pdl)
