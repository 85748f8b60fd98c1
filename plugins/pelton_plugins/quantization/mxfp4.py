"""Checkpoints that say mxfp4: their experts are in four bits, and every other matrix in the checkpoint's dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pelton.errors import ConfigError
from pelton.quantization.plain import PlainWeights

if TYPE_CHECKING:
    from pelton.config import EngineConfig
    from pelton.model.resolved import ResolvedModel


class Mxfp4Weights(PlainWeights):
    """Plain weights: a model with experts in mxfp4 keeps or decodes them itself."""

    name = "mxfp4"

    def __init__(self, config: EngineConfig, model: ResolvedModel) -> None:
        if (model.hf_config.get("quantization_config") or {}).get("quant_method") != self.name:
            raise ConfigError(
                "quantization is 'mxfp4', and config.json has no quantization_config of it: weights are not rounded to mxfp4 "
                "while they load. Leave quantization unset."
            )
