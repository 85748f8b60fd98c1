"""ERNIE 4.5, dense: Llama's shape, neighbours of a head turn."""

from __future__ import annotations

from pelton.model.build import BuildConfig
from pelton_plugins.models.interleaved import InterleavedDecoderLayer, InterleavedForCausalLM


class Ernie4_5DecoderLayer(InterleavedDecoderLayer):
    def qkv_bias(self, config: BuildConfig) -> bool:
        return bool(config.hf.get("use_bias"))

    def output_bias(self, config: BuildConfig) -> bool:
        return bool(config.hf.get("use_bias"))

    def mlp_bias(self, config: BuildConfig) -> bool:
        return bool(config.hf.get("use_bias"))


class Ernie4_5ForCausalLM(InterleavedForCausalLM):
    layer_class = Ernie4_5DecoderLayer
