"""ModelOpt's checkpoints in 8-bit floating point: a scale for each matrix, and one for its inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pelton.errors import ConfigError
from pelton_plugins.quantization.fp8 import STATIC, StoredFp8
from pelton_plugins.quantization.module_names import is_part_of

if TYPE_CHECKING:
    from pelton.config import EngineConfig
    from pelton.model.resolved import ResolvedModel
    from pelton.ops.interface import InputRounding
    from pelton.quantization.interface import LinearShard

SERVED = "FP8"


class ModelOptFp8(StoredFp8):
    """A method whose configuration names what it leaves out with stars."""

    name: ClassVar[str] = "modelopt"

    def __init__(self, config: EngineConfig, model: ResolvedModel) -> None:
        settings = model.hf_config.get("quantization_config") or {}
        if settings.get("quant_method") != self.name:
            raise ConfigError(
                "quantization is 'modelopt', and config.json has no quantization_config of it. Leave quantization unset, or use fp8."
            )
        settings = settings.get("quantization") or settings  # as hf_quant_config.json has it
        algorithm = settings.get("quant_algo")
        if algorithm != SERVED:
            raise ConfigError(
                f"The checkpoint's quantization_config ({self.name}) has quant_algo {algorithm!r}; served is {SERVED!r}. Take the "
                "checkpoint of the same model in that form, or one that is not quantized."
            )
        self._left_out = tuple(settings.get("ignore") or settings.get("exclude_modules") or ())

    def inputs_of(self, shard: LinearShard) -> tuple[bool, InputRounding | None]:
        return not is_part_of(shard.name, self._left_out), STATIC
