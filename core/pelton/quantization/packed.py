"""The common part of quantization methods with blocks: one packed tensor for each part of a merged matrix."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch

from pelton.errors import ConfigError
from pelton.ops.interface import LinearSpec, LinearWeights
from pelton.ops.packed_blocks import BLOCK, PANEL_ROWS, BlockKind, pack, panels_shape, weight_format
from pelton.quantization.interface import LinearShard
from pelton.quantization.plain import PlainWeights, make_bias

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
        if config.parallel.size > 1:
            raise ConfigError(
                f"tensor_parallel_size is {config.parallel.size}; quantization {self.name!r} serves 1. "
                "Leave quantization unset."
            )
        found = [self.kind(shard, is_vocabulary=is_vocabulary) for shard in shards]
        kinds = [kind for kind in found if kind is not None]
        if not kinds:
            return PlainWeights().create(config, shards, bias=bias, is_vocabulary=is_vocabulary)
        if len(kinds) < len(found):
            plain = shards[found.index(None)].name
            raise ConfigError(
                f"quantization is {self.name!r}, and {plain} is not quantized, though other parts of its merged matrix "
                "are. Leave quantization unset."
            )
        num_cols = shards[0].num_cols
        if num_cols % BLOCK:
            raise ConfigError(
                f"quantization is {self.name!r}, and {shards[0].name} has {num_cols} columns; "
                f"blocks take a multiple of {BLOCK}. Leave quantization unset."
            )
        tensors = {}
        for index, (shard, kind) in enumerate(zip(shards, kinds, strict=True)):
            panels = config.empty(*panels_shape(kind, shard.num_rows, num_cols), dtype=torch.uint8)
            tensors[f"part{index}"] = panels
            config.weights.expect(
                f"{shard.name}.weight", (shard.num_rows, num_cols), panels, fill=partial(self._fill, kind)
            )
        parts = tuple(shard.num_rows for shard in shards)
        spec = LinearSpec(
            in_features=num_cols,
            out_features=sum(parts),
            weight_format=weight_format(kinds),
            has_bias=bias,
            parts=parts,
        )
        return LinearWeights(spec, tensors, make_bias(config, shards) if bias else None)

    def _fill(self, kind: BlockKind, weight: LazyWeight, panels: Tensor) -> None:
        num_rows, num_cols = weight.shape
        step = max(NUMBERS_AT_ONCE // num_cols // PANEL_ROWS, 1) * PANEL_ROWS
        for start in range(0, num_rows, step):
            stop = min(start + step, num_rows)
            target = panels[start // PANEL_ROWS : -(-stop // PANEL_ROWS)]
            packed = torch.empty(target.shape, dtype=torch.uint8)
            pack(self.read_blocks(weight, kind, start, stop), kind, packed)
            target.copy_(packed)
