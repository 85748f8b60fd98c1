"""compressed-tensors checkpoints whose matrices are 8-bit floating point ("float-quantized")."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pelton.errors import ConfigError
from pelton.ops.interface import InputRounding
from pelton_plugins.quantization.fp8 import DYNAMIC, STATIC, StoredFp8

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.config import EngineConfig
    from pelton.model.build import BuildConfig
    from pelton.model.resolved import ResolvedModel
    from pelton.quantization.interface import LinearShard

FORMATS = ("float-quantized", "naive-quantized")


class CompressedTensors(StoredFp8):
    """Matrices of any group of the configuration; what it ignores stays in the model's dtype."""

    name: ClassVar[str] = "compressed-tensors"

    def __init__(self, config: EngineConfig, model: ResolvedModel) -> None:
        settings = model.hf_config.get("quantization_config") or {}
        self._ignored = settings.get("ignore") or []
        self._groups: list[tuple[Sequence[str], InputRounding | None]] = []
        for name, group in (settings.get("config_groups") or {}).items():
            form = group.get("format") or settings.get("format")
            if form not in FORMATS:
                raise ConfigError(
                    f"config.json's quantization_config has the format {form!r} ({name}); served is {FORMATS[0]!r}, 8-bit "
                    "floating point. Take a checkpoint of that form, or one that is not quantized."
                )
            _check_weights(name, group.get("weights") or {})
            self._groups.append((group.get("targets") or ["Linear"], _rounding(name, group.get("input_activations"))))

    def inputs_of(self, shard: LinearShard) -> tuple[bool, InputRounding | None]:
        if not any(_names(pattern, shard.name) for pattern in self._ignored):
            for targets, inputs in self._groups:
                if any(target == "Linear" or _names(target, shard.name) for target in targets):
                    return True, inputs
        return False, None

    def expect(self, config: BuildConfig, shard: LinearShard, weight: Tensor, scale: Tensor) -> None:
        super().expect(config, shard, weight, scale)
        config.weights.ignore(r".*\.[kv]_scale")  # of a cache in fp8, which --kv-cache-dtype decides


def _names(pattern: str, name: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), name) is not None
    return pattern == name


def _check_weights(group: str, weights: Mapping[str, Any]) -> None:
    found = (weights.get("type"), weights.get("num_bits"), weights.get("strategy"), weights.get("symmetric", True))
    if found not in [("float", 8, strategy, True) for strategy in ("tensor", "channel")]:
        raise ConfigError(
            f"config.json's quantization_config has weights of type {found[0]!r}, {found[1]} bits, strategy {found[2]!r} ({group}); "
            "served is float, 8, tensor or channel, symmetric. Take a checkpoint of that form, or one that is not quantized."
        )


def _rounding(group: str, inputs: Mapping[str, Any] | None) -> InputRounding | None:
    if not inputs:
        return None
    found = (inputs.get("type"), inputs.get("num_bits"), inputs.get("strategy"), bool(inputs.get("dynamic")))
    known = {("float", 8, "token", True): DYNAMIC, ("float", 8, "tensor", False): STATIC}
    if found not in known:
        raise ConfigError(
            f"config.json's quantization_config rounds inputs to type {found[0]!r}, {found[1]} bits, strategy {found[2]!r}, "
            f"dynamic {found[3]} ({group}); served is float, 8, token and dynamic or tensor and not. Take a checkpoint of that form."
        )
    return known[found]
