"""ModelOpt's checkpoints: 8-bit floating point with a scale for each matrix and one for its inputs, or NVFP4, which is decoded."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, ClassVar

from pelton.errors import ConfigError
from pelton_plugins.quantization.fp4 import NVFP4, Fp4Weights
from pelton_plugins.quantization.fp8 import STATIC, StoredFp8
from pelton_plugins.quantization.module_names import is_part_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pelton.config import EngineConfig
    from pelton.model.resolved import ResolvedModel
    from pelton.ops.interface import InputRounding
    from pelton.quantization.interface import LinearShard, QuantizationMethod

NAME = "modelopt"
FP8, FP4 = "FP8", "NVFP4"


def make_modelopt(config: EngineConfig, model: ResolvedModel) -> QuantizationMethod:
    """Make the method that `quant_algo` means. What is left out is named with stars."""
    settings = model.hf_config.get("quantization_config") or {}
    if settings.get("quant_method") != NAME:
        raise ConfigError(
            "quantization is 'modelopt', and config.json has no quantization_config of it. Leave quantization unset, or use fp8."
        )
    settings = settings.get("quantization") or settings  # as hf_quant_config.json has it
    algorithm = settings.get("quant_algo")
    left_out = tuple(settings.get("ignore") or settings.get("exclude_modules") or ())
    if algorithm == FP8:
        return ModelOptFp8(left_out)
    if algorithm == FP4:
        return Fp4Weights(NAME, NVFP4, partial(is_part_of, modules=left_out))
    raise ConfigError(
        f"The checkpoint's quantization_config ({NAME}) has quant_algo {algorithm!r}; served are {FP8!r} and {FP4!r}. Take the "
        "checkpoint of the same model in one of those forms, or one that is not quantized."
    )


class ModelOptFp8(StoredFp8):
    """e4m3 weights with a scale for each matrix, and a fixed one for its inputs."""

    name: ClassVar[str] = NAME

    def __init__(self, left_out: Sequence[str]) -> None:
        self._left_out = left_out

    def inputs_of(self, shard: LinearShard) -> tuple[bool, InputRounding | None]:
        return not is_part_of(shard.name, self._left_out), STATIC
