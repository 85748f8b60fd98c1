"""`--quantization skeleton`: every matrix in blocks of 32 int8 numbers with one scale, but the vocabulary's.

A form of your own has a `LinearSpec.weight_format` of its own, and an op `linear` that reads it (`pelton_ops`).
"""

from __future__ import annotations

from typing import ClassVar

from pelton.config import EngineConfig
from pelton.model.loading import LazyWeight
from pelton.model.resolved import ResolvedModel
from pelton.ops.packed_blocks import KINDS, BlockKind
from pelton.quantization.interface import LinearShard
from pelton_plugins.weight_forms.block_writing import quantize
from pelton_plugins.weight_forms.packed import PackedWeights
from torch import Tensor


class SkeletonWeights(PackedWeights):
    """Made once per worker, before the model."""

    name: ClassVar[str] = "skeleton"

    def __init__(self, config: EngineConfig, model: ResolvedModel) -> None:
        """`model.hf_config` says what a checkpoint's own `quantization_config` holds; none is needed here."""

    def kind(self, shard: LinearShard, *, is_vocabulary: bool) -> BlockKind | None:
        return None if is_vocabulary else KINDS["q8_0"]

    def read_blocks(self, weight: LazyWeight, kind: BlockKind, start: int, stop: int) -> Tensor:
        return quantize(weight.read(0, start, stop), kind)
