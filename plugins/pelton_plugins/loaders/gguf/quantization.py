"""`--quantization gguf`: the blocks of a .gguf file stay packed in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pelton.errors import ConfigError
from pelton.ops.packed_blocks import KINDS, BlockKind
from pelton_plugins.loaders.gguf.blocks import KEPT_AS, read_kept
from pelton_plugins.loaders.gguf.file import GGUFFile
from pelton_plugins.loaders.gguf.loader import PLAIN_DTYPES, GGUFWeight, named
from pelton_plugins.weight_forms.blocks import BlockWeights

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.config import EngineConfig
    from pelton.model.loading import LazyWeight
    from pelton.model.resolved import ResolvedModel
    from pelton.quantization.interface import LinearShard


class GGUFBlocks(BlockWeights):
    """Each matrix in the kind that the file has it in, or near it (`blocks`); F32, F16 and BF16 ones in the model's dtype."""

    name: ClassVar[str] = "gguf"

    def __init__(self, config: EngineConfig, model: ResolvedModel) -> None:
        if model.weights_format != "gguf":
            raise ConfigError(
                f"quantization is 'gguf', and the weights of {model.name!r} are read as {model.weights_format!r}. "
                "Give a .gguf file, or use q8_0 or q4_1, which quantize any checkpoint."
            )
        file = GGUFFile(model.path)
        self._path = file.path
        self._tensors = {name: matrix for info in file.tensors.values() for name, matrix in named(info)}

    def kind(self, shard: LinearShard, *, is_vocabulary: bool) -> BlockKind | None:
        info = self._tensors.get(f"{shard.name}.weight")
        if info is None:  # loading says what is missing
            return None
        if info.quant_type.name in PLAIN_DTYPES:
            return None
        kept = KEPT_AS.get(info.quant_type.name)
        if kept is None:
            raise ConfigError(
                f"quantization is 'gguf', and {self._path} has {info.name} in {info.quant_type.name}; kept packed are "
                f"{', '.join(KEPT_AS)}. Leave quantization unset (weights are dequantized), or use q8_0 or q4_1, "
                "which quantize them anew."
            )
        return KINDS[kept]

    def read_blocks(self, weight: LazyWeight, kind: BlockKind, start: int, stop: int) -> Tensor:
        if not isinstance(weight, GGUFWeight):
            raise ConfigError(
                f"quantization is 'gguf', and the loader 'gguf' gives a {type(weight).__name__}, which has no blocks. "
                "Leave out the plugin that replaces the built-in loader, or use q8_0 or q4_1."
            )
        assert KEPT_AS[weight.quant_type.name] == kind.name
        return read_kept(weight, start, stop)
