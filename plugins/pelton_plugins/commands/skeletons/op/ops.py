"""An implementation of the op `gated`: activation(gate) * up. `pelton.ops.interface` has each op's needs and tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from pelton.config import EngineConfig
from pelton.config.plugin_settings import read_settings
from pelton.ops.interface import GatedNeeds, GatedTensors
from torch import Tensor
from torch.nn import functional

from pelton_skeleton.settings import SkeletonSettings


class SkeletonGated:
    """For silu alone."""

    handles: ClassVar[frozenset[str]] = frozenset()  # optional needs that it has read about; others are refused
    is_recordable: ClassVar[bool] = True  # torch's ops only: CPU graphs may record it

    def __init__(self, settings: SkeletonSettings) -> None:
        self.settings = settings

    @classmethod
    def configured(cls, config: EngineConfig) -> SkeletonGated:
        """One for each engine."""
        return cls(read_settings(config, "skeleton", SkeletonSettings))

    def token_range(self, needs: GatedNeeds) -> tuple[int, int | None]:
        return 0, self.settings.most_tokens

    def unsupported(self, needs: GatedNeeds) -> list[str]:
        return [] if needs.activation == "silu" else [f"activation {needs.activation}"]

    def bind(self, needs: GatedNeeds, tensors: GatedTensors) -> Callable[[Tensor], Tensor]:
        def gated(gate_up: Tensor) -> Tensor:
            """gate_up [T, 2 I] -> [T, I]"""
            gate, up = gate_up.chunk(2, dim=-1)
            return functional.silu(gate).mul_(up)

        return gated
