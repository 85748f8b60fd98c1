"""Mistral: Llama's shape, every layer with the same sliding window (or none)."""

from __future__ import annotations

from pelton.model.build import BuildConfig
from pelton_plugins.models.llama import LlamaDecoderLayer, LlamaForCausalLM


class MistralDecoderLayer(LlamaDecoderLayer):
    def sliding_window(self, index: int, config: BuildConfig) -> int | None:
        window: int | None = config.hf.get("sliding_window")
        return window


class MistralForCausalLM(LlamaForCausalLM):
    layer_class = MistralDecoderLayer
