"""Layer norms: they fit wherever an `RMSNorm` does, and ops that know no layer norm are composed with one that does."""

from __future__ import annotations

import torch
from torch import nn

from pelton.layers.norm import RMSNorm
from pelton.model.build import BuildConfig
from pelton.ops.interface import NormSpec


class LayerNorm(RMSNorm):
    """(x - mean) / deviation * w, and with `bias` + b: the weight is [2, size] then. For layers that hand it to an op."""

    def __init__(self, size: int, *, config: BuildConfig, prefix: str, eps: float, bias: bool = False) -> None:
        nn.Module.__init__(self)
        self.spec = NormSpec(size=size, eps=eps, is_centered=True)
        shape = (2, size) if bias else (size,)
        self.weight = nn.Parameter(torch.empty(shape, dtype=config.dtype, device=config.device), requires_grad=False)
        config.weights.expect(f"{prefix}.weight", (size,), self.weight[0] if bias else self.weight)
        if bias:
            config.weights.expect(f"{prefix}.bias", (size,), self.weight[1])
