"""Interface of a quantization method: what holds the numbers of a matrix, and how a checkpoint fills it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from pelton.ops.interface import LinearWeights

if TYPE_CHECKING:
    from pelton.model.build import BuildConfig


@dataclass(frozen=True, slots=True)
class LinearShard:
    """This rank's part of one checkpoint matrix [num_rows, num_cols]: rows [rows), columns [cols)."""

    name: str  # in the checkpoint, without ".weight"
    num_rows: int
    num_cols: int
    rows: tuple[int, int]
    cols: tuple[int, int]
    padding: int = 0  # rows of zeros behind them


@runtime_checkable
class QuantizationMethod(Protocol):
    """Allocates a matrix's tensors in its own format and tells `config.weights` how to fill them."""

    name: str

    def create(
        self, config: BuildConfig, shards: Sequence[LinearShard], *, bias: bool, is_vocabulary: bool = False
    ) -> LinearWeights:
        """Shards lie below each other; all have the same columns. With column shards only rank 0 holds the bias.
        is_vocabulary: the one shard is an embedding or an output head, or both."""
        ...
