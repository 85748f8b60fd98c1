"""Quark's checkpoints in 8-bit floating point: a scale for each matrix or row; inputs with a scale of their own, or one for each token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pelton.errors import ConfigError
from pelton_plugins.quantization.fp8 import DYNAMIC, STATIC, StoredFp8
from pelton_plugins.quantization.module_names import is_part_of

if TYPE_CHECKING:
    from pelton.config import EngineConfig
    from pelton.model.resolved import ResolvedModel
    from pelton.ops.interface import InputRounding
    from pelton.quantization.interface import LinearShard

FP8 = "fp8_e4m3"
INPUTS = {("per_tensor", False): STATIC, ("per_channel", True): DYNAMIC, ("per_token", True): DYNAMIC}
"""By qscheme and is_dynamic."""
ADVICE = "Take a checkpoint of that form, or one that is not quantized."


class QuarkFp8(StoredFp8):
    """All matrices alike, but for those that are left out."""

    name: ClassVar[str] = "quark"

    def __init__(self, config: EngineConfig, model: ResolvedModel) -> None:
        settings = model.hf_config.get("quantization_config") or {}
        if settings.get("quant_method") != self.name:
            raise ConfigError(
                "quantization is 'quark', and config.json has no quantization_config of it. Leave quantization unset, or use fp8."
            )
        whole = settings.get("global_quant_config") or {}
        self._inputs = _read(whole, "global_quant_config")
        for field in ("layer_quant_config", "layer_type_quant_config"):
            for pattern, own in (settings.get(field) or {}).items():
                if _kinds(own) != _kinds(whole):
                    raise ConfigError(
                        f"config.json's quantization_config ({self.name}) has {pattern!r} in {field}, which differs from "
                        f"global_quant_config; served are checkpoints whose matrices are alike. {ADVICE}"
                    )
        self._left_out = tuple(settings.get("exclude") or ())

    def inputs_of(self, shard: LinearShard) -> tuple[bool, InputRounding | None]:
        return not is_part_of(shard.name, self._left_out), self._inputs


def _kinds(settings: Mapping[str, Any]) -> list[Any]:
    """Return (dtype, qscheme, is_dynamic) of the weights and of the inputs."""
    found = []
    for name in ("weight", "input_tensors"):
        spec = settings.get(name)
        is_one = isinstance(spec, Mapping)
        found.append((spec.get("dtype"), spec.get("qscheme"), bool(spec.get("is_dynamic"))) if is_one else spec)
    return found


def _read(settings: Mapping[str, Any], where: str) -> InputRounding | None:
    """Return how inputs are rounded."""
    weight, inputs = _kinds(settings)
    if weight not in [(FP8, scheme, False) for scheme in ("per_tensor", "per_channel")]:
        raise ConfigError(
            f"config.json's quantization_config (quark) has {where}.weight {weight!r} (dtype, qscheme, is_dynamic); served is {FP8!r}, "
            f"per_tensor or per_channel, not dynamic. {ADVICE}"
        )
    if inputs is None:
        return None
    if not isinstance(inputs, tuple) or inputs[0] != FP8 or inputs[1:] not in INPUTS:
        raise ConfigError(
            f"config.json's quantization_config (quark) has {where}.input_tensors {inputs!r} (dtype, qscheme, is_dynamic); served is "
            f"{FP8!r}, per_tensor and not dynamic, or per_channel and dynamic. {ADVICE}"
        )
    return INPUTS[inputs[1:]]
