"""Methods that quantize while a checkpoint loads: q8_0, and q4_0 and q4_1 with the vocabulary's matrices in q8_0."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pelton.ops.packed_blocks import KINDS, BlockKind
from pelton_plugins.weight_forms.block_writing import quantize
from pelton_plugins.weight_forms.blocks import BlockWeights

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.config import EngineConfig
    from pelton.model.loading import LazyWeight
    from pelton.model.resolved import ResolvedModel
    from pelton.quantization.interface import LinearShard


class QuantizedAtLoad(BlockWeights):
    """Every matrix in blocks of the class's name, rounded to nearest. Any checkpoint will do."""

    def __init__(self, config: EngineConfig, model: ResolvedModel) -> None:
        """Nothing to find out: the checkpoint's own form does not matter."""

    def kind(self, shard: LinearShard, *, is_vocabulary: bool) -> BlockKind | None:
        # Four bits there cost more than they save: the logits are products of this matrix alone.
        return KINDS["q8_0" if is_vocabulary else self.name]

    def read_blocks(self, weight: LazyWeight, kind: BlockKind, start: int, stop: int) -> Tensor:
        return quantize(weight.read(0, start, stop), kind)


class Q8Weights(QuantizedAtLoad):
    name: ClassVar[str] = "q8_0"


class Q40Weights(QuantizedAtLoad):
    name: ClassVar[str] = "q4_0"


class Q41Weights(QuantizedAtLoad):
    name: ClassVar[str] = "q4_1"
