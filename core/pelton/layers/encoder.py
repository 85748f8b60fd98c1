"""Layers of encoders: products with plain inputs, layer norms, lookup tables. Every rank holds all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pelton.errors import ConfigError
from pelton.layers.linear import LinearModule
from pelton.ops.interface import Linear, LinearNeeds, LinearTensors
from pelton.quantization.interface import LinearShard

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


class WholeLinear(LinearModule):
    """Matrices [rows, in_features] below each other, as one product (`linear`)."""

    def __init__(self, in_features: int, rows: Mapping[str, int], *, config: BuildConfig, bias: bool) -> None:
        """rows: by the name of each matrix in the checkpoint."""
        shards = [LinearShard(name, count, in_features, (0, count), (0, in_features)) for name, count in rows.items()]
        weights = config.quantization.create(config, shards, bias=bias)
        super().__init__(weights)
        self.dtype = config.dtype
        needs = LinearNeeds(dtype=config.dtype_name, linear=weights.spec)
        self.linear: Linear = config.ops.bind("linear", needs, LinearTensors(weights))

    def forward(self, x: Tensor) -> Tensor:
        """x is rounded to the model's dtype; the product has it."""
        return self.linear(x.to(self.dtype))


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
