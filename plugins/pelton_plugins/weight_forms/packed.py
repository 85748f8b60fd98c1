"""The common part of quantization methods with blocks: one packed tensor for each part of a merged matrix."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch

from pelton.errors import ConfigError
from pelton.ops.interface import LinearSpec, LinearWeights
from pelton.ops.packed_blocks import BLOCK, PANEL_ROWS, BlockKind, panels_shape, weight_format
from pelton.quantization.interface import LinearShard
from pelton.quantization.plain import PlainWeights, make_bias
from pelton_plugins.weight_forms.block_writing import pack

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.model.build import BuildConfig
    from pelton.model.loading import LazyWeight

NUMBERS_AT_ONCE = 2**20
"""While weights are packed: little is held beside the result."""


class PackedWeights(ABC):
    """A `QuantizationMethod` whose weights lie in `pelton.ops.packed_blocks`."""

    name: ClassVar[str]

    @abstractmethod
    def kind(self, shard: LinearShard, *, is_vocabulary: bool) -> BlockKind | None:
        """How the matrix is kept; None: in the model's dtype."""

    @abstractmethod
    def read_blocks(self, weight: LazyWeight, kind: BlockKind, start: int, stop: int) -> Tensor:
        """Rows [start, stop) as blocks [stop - start, bytes] uint8."""

    def create(
        self, config: BuildConfig, shards: Sequence[LinearShard], *, bias: bool, is_vocabulary: bool = False
    ) -> LinearWeights:
        kinds = self.kinds(config, shards, is_vocabulary=is_vocabulary)
        if not kinds:
            return PlainWeights().create(config, shards, bias=bias, is_vocabulary=is_vocabulary)
        num_cols, tensors = shards[0].cols[1] - shards[0].cols[0], {}
        parts = tuple(shard.rows[1] - shard.rows[0] + shard.padding for shard in shards)
        for index, (shard, kind, num_rows) in enumerate(zip(shards, kinds, parts, strict=True)):
            panels = tensors[f"part{index}"] = config.empty(*panels_shape(kind, num_rows, num_cols), dtype=torch.uint8)
            shape = (shard.num_rows, shard.num_cols)
            config.weights.expect(f"{shard.name}.weight", shape, panels, fill=partial(self._fill, kind, shard))
        vector = make_bias(config, shards) if bias else None
        spec = LinearSpec(
            in_features=num_cols,
            out_features=sum(parts),
            weight_format=weight_format(kinds),
            has_bias=vector is not None,
            parts=parts,
        )
        return LinearWeights(spec, tensors, vector)

    def kinds(self, config: BuildConfig, shards: Sequence[LinearShard], *, is_vocabulary: bool) -> list[BlockKind]:
        """The kind of each part; none where the matrix is kept in the model's dtype."""
        found = [self.kind(shard, is_vocabulary=is_vocabulary) for shard in shards]
        kinds = [kind for kind in found if kind is not None]
        if kinds and len(kinds) < len(found):
            raise ConfigError(
                f"quantization is {self.name!r}, and {shards[found.index(None)].name} is not quantized, though other parts of its merged "
                "matrix are. Leave quantization unset."
            )
        first_col, last_col = shards[0].cols
        if kinds and (first_col % BLOCK or last_col % BLOCK):
            share = "" if config.parallel.size == 1 else f" of which this rank has [{first_col}, {last_col})"
            raise ConfigError(
                f"quantization is {self.name!r}, and {shards[0].name} has {shards[0].num_cols} columns{share}; "
                f"blocks take a multiple of {BLOCK}. Leave quantization unset."
            )
        return kinds

    def _fill(self, kind: BlockKind, shard: LinearShard, weight: LazyWeight, panels: Tensor) -> None:
        """This rank's rows and columns; zeros for padding behind them."""
        (first, last), (left, right) = shard.rows, (col // BLOCK * kind.block_bytes for col in shard.cols)
        panels[-(-(last - first) // PANEL_ROWS) :].zero_()
        step = max(NUMBERS_AT_ONCE // shard.num_cols // PANEL_ROWS, 1) * PANEL_ROWS
        for start in range(first, last, step):
            stop = min(start + step, last)
            target = panels[(start - first) // PANEL_ROWS : -(-(stop - first) // PANEL_ROWS)]
            packed = torch.empty(target.shape, dtype=torch.uint8)
            pack(self.read_blocks(weight, kind, start, stop)[:, left:right], kind, packed)
            target.copy_(packed)
