"""Qwen2 and Qwen2.5: Llama's shape with biases on q, k and v, and a window on the upper layers of some."""

from __future__ import annotations

from pelton.model.build import BuildConfig
from pelton_plugins.models.llama import LlamaDecoderLayer, LlamaForCausalLM


def window_of_layer(index: int, config: BuildConfig) -> int | None:
    """From `layer_types`, or from the older `use_sliding_window` and `max_window_layers`."""
    hf = config.hf
    window: int | None = hf.get("sliding_window")
    layer_types = hf.get("layer_types")
    if layer_types is not None:
        return window if layer_types[index] == "sliding_attention" else None
    return window if hf.get("use_sliding_window") and index >= hf.get("max_window_layers", 28) else None


class Qwen2DecoderLayer(LlamaDecoderLayer):
    def qkv_bias(self, config: BuildConfig) -> bool:
        return True

    def output_bias(self, config: BuildConfig) -> bool:
        return False

    def sliding_window(self, index: int, config: BuildConfig) -> int | None:
        return window_of_layer(index, config)


class Qwen2ForCausalLM(LlamaForCausalLM):
    layer_class = Qwen2DecoderLayer
