"""Seed-OSS: Llama's shape with biases on q, k and v, and one of its own for attention's output."""

from __future__ import annotations

from pelton.model.build import BuildConfig
from pelton_plugins.models.llama import LlamaDecoderLayer, LlamaForCausalLM


class SeedOssDecoderLayer(LlamaDecoderLayer):
    def qkv_bias(self, config: BuildConfig) -> bool:
        return bool(config.hf.get("attention_bias", True))

    def output_bias(self, config: BuildConfig) -> bool:
        return bool(config.hf.get("attention_out_bias"))


class SeedOssForCausalLM(LlamaForCausalLM):
    layer_class = SeedOssDecoderLayer
