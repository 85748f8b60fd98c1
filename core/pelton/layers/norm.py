"""A norm's weight and its spec; the norm itself is computed by the fused op that reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from pelton.ops.interface import NormSpec
from pelton.ops.reference import rms_norm

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.model.build import BuildConfig


class RMSNorm(nn.Module):
    """x / rms(x) * w, or * (1 + w) with `unit_offset` (Gemma). Hand it to the layer that follows it."""

    def __init__(
        self, size: int, *, config: BuildConfig, prefix: str, eps: float | None = None, unit_offset: bool = False
    ) -> None:
        super().__init__()
        self.spec = NormSpec(
            size=size, eps=config.hf.get("rms_norm_eps", 1e-6) if eps is None else eps, unit_offset=unit_offset
        )
        self.weight = nn.Parameter(torch.empty(size, dtype=config.dtype, device=config.device), requires_grad=False)
        config.weights.expect(f"{prefix}.weight", (size,), self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """For model authors' own layers; the built-in ones hand the weight to a fused op instead."""
        return rms_norm(x, self.weight, self.spec)
