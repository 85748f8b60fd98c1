"""dots.llm1: Qwen3's attention, dense layers first, then experts as DeepSeek-V3's, with shared ones beside them."""

from __future__ import annotations

from pelton.layers.norm import RMSNorm
from pelton.model.build import BuildConfig
from pelton_plugins.models.glm4_moe import Glm4MoeDecoderLayer
from pelton_plugins.models.moe import MoeForCausalLM
from pelton_plugins.models.qwen2 import window_of_layer
from pelton_plugins.models.qwen3 import head_norms


class Dots1DecoderLayer(Glm4MoeDecoderLayer):
    def output_bias(self, config: BuildConfig) -> bool:
        return bool(config.hf.get("attention_bias"))

    def query_key_norms(self, head_dim: int, config: BuildConfig, prefix: str) -> tuple[RMSNorm | None, RMSNorm | None]:
        return head_norms(head_dim, config, prefix)

    def sliding_window(self, index: int, config: BuildConfig) -> int | None:
        """From `layer_types`; without them the layers from `max_window_layers` on have it."""
        hf = config.hf
        if hf.get("layer_types") is not None:
            return window_of_layer(index, config)
        window: int | None = hf.get("sliding_window")
        return window if index >= hf.get("max_window_layers", 62) else None


class Dots1ForCausalLM(MoeForCausalLM):
    layer_class = Dots1DecoderLayer
