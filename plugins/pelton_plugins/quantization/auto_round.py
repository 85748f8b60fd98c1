"""AutoRound's checkpoints: integers as GPTQ's or AWQ's have them, with what differs from one matrix to another in `extra_config`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from pelton.errors import ConfigError
from pelton_plugins.quantization.awq import AWQWeights
from pelton_plugins.quantization.gptq import GPTQWeights

if TYPE_CHECKING:
    from pelton.config import EngineConfig
    from pelton.model.resolved import ResolvedModel
    from pelton.quantization.interface import QuantizationMethod

NAME = "auto-round"
ADVICE = "Take a checkpoint of that kind, or one that is not quantized."
WHOLE_BITS = 16
"""A matrix with as many bits is not quantized."""


def make_auto_round(config: EngineConfig, model: ResolvedModel) -> QuantizationMethod:
    """Make the method that reads the layout which the checkpoint names."""
    settings = model.hf_config.get("quantization_config") or {}
    if settings.get("quant_method") not in (NAME, f"intel/{NAME}"):
        raise ConfigError(
            f"quantization is {NAME!r}, and config.json has no quantization_config of it: weights are not quantized by AutoRound while "
            "they load. Leave quantization unset, or use q8_0 or q4_1."
        )
    kind = settings.get("data_type", "int")
    if kind != "int":
        raise ConfigError(
            f"config.json's quantization_config ({NAME}) has data_type {kind!r}; served is 'int'. {ADVICE}"
        )
    layout = str(settings.get("packing_format") or settings.get("backend") or "auto_round:auto_gptq")
    own = {name: found for name, found in (settings.get("extra_config") or {}).items() if isinstance(found, dict)}
    kept = [name for name, found in own.items() if (found.get("bits") or 0) >= WHOLE_BITS]
    others = {name: found for name, found in own.items() if name not in kept and _differs(found, settings)}
    if "gptq" in layout:
        rules = {f"-:{_pattern(name)}": {} for name in kept}
        rules |= {f"+:{_pattern(name)}": found for name, found in others.items()}
        has_head = (own.get("lm_head", {}).get("bits") or WHOLE_BITS) < WHOLE_BITS
        return GPTQWeights({**settings, "desc_act": False, "dynamic": rules, "lm_head": has_head})
    if "awq" in layout:
        if others:
            raise ConfigError(
                f"config.json's quantization_config ({NAME}) has {next(iter(others))!r} in extra_config, which differs from the other "
                f"matrices; served in {layout!r} are matrices of one kind, and some with {WHOLE_BITS} bits. {ADVICE}"
            )
        left_out = [*(settings.get("modules_to_not_convert") or ()), *(f"re:{_pattern(name)}" for name in kept)]
        return AWQWeights({**settings, "zero_point": True, "modules_to_not_convert": left_out})
    raise ConfigError(
        f"config.json's quantization_config ({NAME}) has packing_format {layout!r}; served are 'auto_round:auto_gptq' and "
        f"'auto_round:auto_awq'. {ADVICE}"
    )


def _differs(found: dict[str, Any], settings: dict[str, Any]) -> bool:
    return any(found.get(field, settings.get(field)) != settings.get(field) for field in ("bits", "group_size", "sym"))


def _pattern(name: str) -> str:
    """`extra_config` has names, and in newer checkpoints regular expressions, which fit anywhere in a name."""
    if not any(character in name for character in "*+?^$()[]{}|\\"):
        return f"{re.escape(name)}$"
    return f".*(?:{name})"
