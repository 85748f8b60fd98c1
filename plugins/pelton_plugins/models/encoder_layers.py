"""Layers of encoders: layer norms, lookup tables, activations. Every rank holds all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pelton.errors import ConfigError

if TYPE_CHECKING:
    from pelton.model.build import BuildConfig


class LayerNorm(nn.Module):
    """(x - mean) / std * w + b; with a residual, of their sum. Float32 in and out, whatever the model's dtype: what lies between
    products is rounded nowhere else."""

    def __init__(self, size: int, *, config: BuildConfig, prefix: str, eps: float, bias: bool = True) -> None:
        super().__init__()
        self.size, self.eps = size, eps
        self.weight = nn.Parameter(torch.empty(size, dtype=torch.float32, device=config.device), requires_grad=False)
        config.weights.expect(f"{prefix}.weight", (size,), self.weight)
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = nn.Parameter(torch.empty(size, dtype=torch.float32, device=config.device), requires_grad=False)
            config.weights.expect(f"{prefix}.bias", (size,), self.bias)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        x = x.float() if residual is None else x.float() + residual
        return F.layer_norm(x, (self.size,), self.weight, self.bias, self.eps)


class Table(nn.Module):
    """Rows that are added by index: positions, token types."""

    def __init__(self, num_rows: int, size: int, *, config: BuildConfig, prefix: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(config.empty(num_rows, size), requires_grad=False)
        config.weights.expect(f"{prefix}.weight", (num_rows, size), self.weight)

    def forward(self, index: Tensor) -> Tensor:
        return F.embedding(index, self.weight)


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
    "tanh": torch.tanh,
}
"""By config.json's names."""


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """Raises `ConfigError` for one that there is not."""
    if name not in ACTIVATIONS:
        raise ConfigError(f"The activation is {name!r}; encoders have {', '.join(ACTIVATIONS)}.")
    return ACTIVATIONS[name]
