"""An implementation of the op `gated`: activation(gate) * up. `pelton.ops.interface` has each op's needs and tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from pelton.ops.interface import GatedNeeds, GatedTensors
from torch import Tensor
from torch.nn import functional


class SkeletonGated:
    """For silu alone."""

    handles: ClassVar[frozenset[str]] = frozenset()  # optional needs that it has read about; others are refused
    is_recordable: ClassVar[bool] = True  # torch's ops only: CPU graphs may record it

    @staticmethod
    def unsupported(needs: GatedNeeds) -> list[str]:
        return [] if needs.activation == "silu" else [f"activation {needs.activation}"]

    @staticmethod
    def bind(needs: GatedNeeds, tensors: GatedTensors) -> Callable[[Tensor], Tensor]:
        def gated(gate_up: Tensor) -> Tensor:
            """gate_up [T, 2 I] -> [T, I]"""
            gate, up = gate_up.chunk(2, dim=-1)
            return functional.silu(gate).mul_(up)

        return gated
