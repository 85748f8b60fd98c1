"""SmolLM3: Llama's shape, with layers that do not rotate queries and keys."""

from __future__ import annotations

from pelton.layers.rope import Rope, get_rope
from pelton.model.build import BuildConfig
from pelton_plugins.models.llama import LlamaDecoderLayer, LlamaForCausalLM
from pelton_plugins.models.qwen2 import window_of_layer


class SmolLM3DecoderLayer(LlamaDecoderLayer):
    def rope(self, index: int, head_dim: int, config: BuildConfig) -> Rope | None:
        """Every n-th layer has none; `no_rope_layers` has a 1 for each that has one."""
        hf = config.hf
        rotates = hf.get("no_rope_layers")
        is_rotated = rotates[index] if rotates else (index + 1) % hf.get("no_rope_layer_interval", 4)
        return get_rope(config, head_dim) if is_rotated else None

    def sliding_window(self, index: int, config: BuildConfig) -> int | None:
        return window_of_layer(index, config) if config.hf.get("use_sliding_window") else None


class SmolLM3ForCausalLM(LlamaForCausalLM):
    layer_class = SmolLM3DecoderLayer
