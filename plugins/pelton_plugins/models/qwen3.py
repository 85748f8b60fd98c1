"""Qwen3: Llama's shape with norms on each head's query and key."""

from __future__ import annotations

from pelton.layers.norm import RMSNorm
from pelton.model.build import BuildConfig
from pelton_plugins.models.llama import LlamaDecoderLayer, LlamaForCausalLM
from pelton_plugins.models.qwen2 import window_of_layer


def head_norms(head_dim: int, config: BuildConfig, prefix: str) -> tuple[RMSNorm, RMSNorm]:
    """Norms of each head's query and key."""
    return (
        RMSNorm(head_dim, config=config, prefix=f"{prefix}.q_norm"),
        RMSNorm(head_dim, config=config, prefix=f"{prefix}.k_norm"),
    )


class Qwen3DecoderLayer(LlamaDecoderLayer):
    def sliding_window(self, index: int, config: BuildConfig) -> int | None:
        return window_of_layer(index, config)

    def query_key_norms(self, head_dim: int, config: BuildConfig, prefix: str) -> tuple[RMSNorm | None, RMSNorm | None]:
        return head_norms(head_dim, config, prefix)


class Qwen3ForCausalLM(LlamaForCausalLM):
    layer_class = Qwen3DecoderLayer
