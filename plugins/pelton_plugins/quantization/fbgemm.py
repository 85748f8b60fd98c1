"""FBGEMM's checkpoints: e4m3 weights with a scale for each row, inputs with one for each token up to a bound."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from pelton.ops.interface import InputRounding, LinearWeights
from pelton_plugins.quantization.fp8 import StoredFp8
from pelton_plugins.quantization.module_names import is_part_of

if TYPE_CHECKING:
    from pelton.config import EngineConfig
    from pelton.model.build import BuildConfig
    from pelton.model.resolved import ResolvedModel
    from pelton.quantization.interface import LinearShard


class FBGEMMWeights(StoredFp8):
    name: ClassVar[str] = "fbgemm_fp8"

    def __init__(self, config: EngineConfig, model: ResolvedModel) -> None:
        settings = model.hf_config.get("quantization_config") or {}
        self._inputs = InputRounding(dtype="float8_e4m3fn", bound=settings.get("activation_scale_ub"))
        self._left_out = tuple(settings.get("modules_to_not_convert") or ())

    def inputs_of(self, shard: LinearShard) -> tuple[bool, InputRounding | None]:
        return not is_part_of(shard.name, self._left_out), self._inputs

    def create(
        self, config: BuildConfig, shards: Sequence[LinearShard], *, bias: bool, is_vocabulary: bool = False
    ) -> LinearWeights:
        config.weights.ignore(r".*\.input_scale_ub")  # the bound again, for each matrix
        return super().create(config, shards, bias=bias, is_vocabulary=is_vocabulary)
