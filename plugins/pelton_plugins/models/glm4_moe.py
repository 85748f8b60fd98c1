"""GLM-4-MoE: dense layers first, then experts chosen as DeepSeek-V3's are, with shared ones beside them."""

from __future__ import annotations

from pelton.layers.norm import RMSNorm
from pelton.model.build import BuildConfig, HFConfig
from pelton_plugins.models.experts import SparseMoe
from pelton_plugins.models.moe import MoeDecoderLayer, MoeForCausalLM, grouped_routing, shared_experts
from pelton_plugins.models.qwen3 import head_norms


class Glm4MoeDecoderLayer(MoeDecoderLayer):
    def output_bias(self, config: BuildConfig) -> bool:
        return False

    def query_key_norms(self, head_dim: int, config: BuildConfig, prefix: str) -> tuple[RMSNorm | None, RMSNorm | None]:
        return head_norms(head_dim, config, prefix) if config.hf.get("use_qk_norm") else (None, None)

    def has_experts(self, index: int, hf: HFConfig) -> bool:
        return bool(index >= hf.get("first_k_dense_replace", 0))

    def make_experts(self, config: BuildConfig, prefix: str) -> SparseMoe:
        hf = config.hf
        return SparseMoe(
            hf.hidden_size, hf.moe_intermediate_size, routing=grouped_routing(hf), activation=hf.get("hidden_act", "silu"),
            norm=self.post_attention_layernorm, config=config, prefix=prefix, shared=shared_experts(config, prefix),
        )  # fmt: skip


class Glm4MoeForCausalLM(MoeForCausalLM):
    layer_class = Glm4MoeDecoderLayer
