"""The op `skeleton_scale`: hidden states times a constant. Layers bind it with `config.ops.bind("skeleton_scale", needs, tensors)`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from pelton.ops.interface import FusedOp
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleNeeds:
    """Needs that an implementation may refuse."""

    dtype: str
    scale: float


@dataclass(slots=True)
class ScaleTensors:
    """Tensors that it is bound to: nothing but a place."""

    device: torch.device


class ReferenceScale:
    """On every device; others are compared with it."""

    is_recordable: ClassVar[bool] = True

    @staticmethod
    def unsupported(needs: ScaleNeeds) -> list[str]:
        return []

    @staticmethod
    def bind(needs: ScaleNeeds, tensors: ScaleTensors) -> Callable[[Tensor], Tensor]:
        return lambda hidden: hidden * needs.scale


class InPlaceScale:
    """Without memory for the result."""

    is_recordable: ClassVar[bool] = True

    @staticmethod
    def unsupported(needs: ScaleNeeds) -> list[str]:
        return [] if needs.dtype == "float32" else [f"dtype {needs.dtype}"]

    @staticmethod
    def bind(needs: ScaleNeeds, tensors: ScaleTensors) -> Callable[[Tensor], Tensor]:
        return lambda hidden: hidden.mul_(needs.scale)


SKELETON_SCALE = FusedOp(
    name="skeleton_scale", needs=ScaleNeeds, tensors=ScaleTensors, reference="pelton_skeleton.ops:ReferenceScale"
)
