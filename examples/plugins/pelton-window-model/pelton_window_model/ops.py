"""An op of this package's own: what a sub-layer adds to the residual stream, times a constant.

Its layers bind `branch_scale` as they bind Pelton's ops; any package may offer a kernel for it. T tokens, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from pelton.ops.interface import FusedOp


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchScaleNeeds:
    """Needs that an implementation may refuse."""

    dtype: str
    size: int  # H
    scale: float


@dataclass(slots=True)
class BranchScaleTensors:
    """Tensors that it is bound to: nothing but a place."""

    device: torch.device


class BranchScale(Protocol):
    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [T, H] -> scale * hidden; hidden may be overwritten."""
        ...


class ReferenceBranchScale:
    """On every device; others are compared with it."""

    is_recordable: ClassVar[bool] = True

    @staticmethod
    def unsupported(needs: BranchScaleNeeds) -> list[str]:
        return []

    @staticmethod
    def bind(needs: BranchScaleNeeds, tensors: BranchScaleTensors) -> BranchScale:
        return lambda hidden: hidden * needs.scale


class InPlaceBranchScale:
    """Without memory for the result."""

    is_recordable: ClassVar[bool] = True  # torch's ops only

    @staticmethod
    def unsupported(needs: BranchScaleNeeds) -> list[str]:
        return [] if needs.dtype in ("float32", "bfloat16") else [f"dtype {needs.dtype}"]

    @staticmethod
    def bind(needs: BranchScaleNeeds, tensors: BranchScaleTensors) -> BranchScale:
        return lambda hidden: hidden.mul_(needs.scale)


BRANCH_SCALE = FusedOp(
    name="branch_scale",
    needs=BranchScaleNeeds,
    tensors=BranchScaleTensors,
    reference="pelton_window_model.ops:ReferenceBranchScale",
)
