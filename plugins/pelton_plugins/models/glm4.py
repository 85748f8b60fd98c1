"""GLM-4 (0414), dense: norms before and after each sub-layer, half of a head turns, gate and up are one tensor."""

from __future__ import annotations

from typing import ClassVar

from pelton.layers.norm import RMSNorm
from pelton.model.build import BuildConfig
from pelton_plugins.models.interleaved import InterleavedDecoderLayer, InterleavedForCausalLM


class Glm4DecoderLayer(InterleavedDecoderLayer):
    merged_gate_up: ClassVar[str | None] = "gate_up_proj"

    def output_bias(self, config: BuildConfig) -> bool:
        return False

    @classmethod
    def post_norms(cls, config: BuildConfig, prefix: str) -> tuple[RMSNorm | None, RMSNorm | None]:
        size = config.hf.hidden_size
        return (
            RMSNorm(size, config=config, prefix=f"{prefix}.post_self_attn_layernorm"),
            RMSNorm(size, config=config, prefix=f"{prefix}.post_mlp_layernorm"),
        )


class Glm4ForCausalLM(InterleavedForCausalLM):
    layer_class = Glm4DecoderLayer
