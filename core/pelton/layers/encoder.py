"""Product of plain inputs, of encoders and pooling heads. Every rank holds all of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from pelton.layers.linear import LinearModule
from pelton.moved import names_of
from pelton.quantization.interface import LinearShard

if TYPE_CHECKING:
    from pelton.model.build import BuildConfig


class WholeLinear(LinearModule):
    """Matrices [rows, in_features] below each other, as one product (`linear`)."""

    def __init__(self, in_features: int, rows: Mapping[str, int], *, config: BuildConfig, bias: bool) -> None:
        """rows: by the name of each matrix in the checkpoint."""
        shards = [LinearShard(name, count, in_features, (0, count), (0, in_features)) for name, count in rows.items()]
        weights = config.create_weights(shards, bias=bias)
        super().__init__(weights)
        self.dtype = config.dtype
        self._bind_bare(config, shards, weights)

    def forward(self, x: Tensor) -> Tensor:
        """x is rounded to the model's dtype; the product has it."""
        return self._bare_product(x.to(self.dtype))


__getattr__ = names_of(__name__)
