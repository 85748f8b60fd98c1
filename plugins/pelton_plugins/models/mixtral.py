"""Mixtral: Mistral's attention, and experts in every layer."""

from __future__ import annotations

from pelton.model.build import BuildConfig
from pelton.ops.moe import RoutingSpec
from pelton_plugins.models.experts import ExpertNames, SparseMoe
from pelton_plugins.models.moe import MoeDecoderLayer, MoeForCausalLM, num_experts

_NAMES = ExpertNames(gate="w1", up="w3", down="w2")


class MixtralDecoderLayer(MoeDecoderLayer):
    def sliding_window(self, index: int, config: BuildConfig) -> int | None:
        return config.hf.get("sliding_window")

    def make_experts(self, config: BuildConfig, prefix: str) -> SparseMoe:
        hf = config.hf
        return SparseMoe(
            hf.hidden_size, hf.intermediate_size, activation=hf.get("hidden_act", "silu"),
            routing=RoutingSpec(num_experts=num_experts(hf), top_k=hf.num_experts_per_tok),
            norm=self.post_attention_layernorm, config=config, names=_NAMES,
            prefix=prefix.removesuffix("mlp") + "block_sparse_moe",
        )  # fmt: skip


class MixtralForCausalLM(MoeForCausalLM):
    layer_class = MixtralDecoderLayer
