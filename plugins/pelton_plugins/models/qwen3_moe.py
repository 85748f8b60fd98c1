"""Qwen3-MoE: Qwen3's attention, and experts in most layers."""

from __future__ import annotations

from pelton.layers.norm import RMSNorm
from pelton.model.build import BuildConfig
from pelton_plugins.models.moe import MoeForCausalLM
from pelton_plugins.models.qwen2_moe import QwenMoeDecoderLayer
from pelton_plugins.models.qwen3 import head_norms


class Qwen3MoeDecoderLayer(QwenMoeDecoderLayer):
    def query_key_norms(self, head_dim: int, config: BuildConfig, prefix: str) -> tuple[RMSNorm | None, RMSNorm | None]:
        return head_norms(head_dim, config, prefix)


class Qwen3MoeForCausalLM(MoeForCausalLM):
    layer_class = Qwen3MoeDecoderLayer
