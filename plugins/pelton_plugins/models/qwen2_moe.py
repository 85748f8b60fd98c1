"""Qwen2-MoE: Qwen2's attention, experts in most layers, and one expert beside them that every token takes by a gate."""

from __future__ import annotations

from pelton.layers.norm import RMSNorm
from pelton.model.build import BuildConfig, HFConfig
from pelton.ops.moe import RoutingSpec
from pelton_plugins.models.experts import GatedMLP, SparseMoe
from pelton_plugins.models.moe import MoeDecoderLayer, MoeForCausalLM, num_experts
from pelton_plugins.models.qwen2 import window_of_layer


class QwenMoeDecoderLayer(MoeDecoderLayer):
    """Layers of Qwen2 and Qwen3: some have experts, which are chosen in one way."""

    def sliding_window(self, index: int, config: BuildConfig) -> int | None:
        return window_of_layer(index, config)

    def has_experts(self, index: int, hf: HFConfig) -> bool:
        is_dense = index in hf.get("mlp_only_layers", ())
        return not is_dense and num_experts(hf) > 0 and (index + 1) % hf.get("decoder_sparse_step", 1) == 0

    def make_experts(self, config: BuildConfig, prefix: str) -> SparseMoe:
        is_renormalized = bool(config.hf.get("norm_topk_prob"))
        return qwen_experts(self.post_attention_layernorm, config, prefix, is_renormalized=is_renormalized)


def qwen_experts(norm: RMSNorm, config: BuildConfig, prefix: str, *, is_renormalized: bool) -> SparseMoe:
    """Experts by softmax scores, and where the model has one, an expert that every token takes by a gate."""
    hf, activation = config.hf, config.hf.get("hidden_act", "silu")
    shared = None
    if width := hf.get("shared_expert_intermediate_size"):
        shared = GatedMLP(hf.hidden_size, width, activation=activation, config=config, prefix=f"{prefix}.shared_expert")
    routing = RoutingSpec(num_experts=num_experts(hf), top_k=hf.num_experts_per_tok, is_renormalized=is_renormalized)
    return SparseMoe(
        hf.hidden_size, hf.moe_intermediate_size, routing=routing, activation=activation, norm=norm, config=config,
        prefix=prefix, shared=shared, shared_gate="shared_expert_gate" if shared is not None else None,
    )  # fmt: skip


class Qwen2MoeDecoderLayer(QwenMoeDecoderLayer):
    def qkv_bias(self, config: BuildConfig) -> bool:
        return bool(config.hf.get("qkv_bias", True))

    def output_bias(self, config: BuildConfig) -> bool:
        return False


class Qwen2MoeForCausalLM(MoeForCausalLM):
    layer_class = Qwen2MoeDecoderLayer
