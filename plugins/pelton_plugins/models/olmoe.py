"""OLMoE: queries and keys normed over all heads, values that may be clipped, and experts in every layer."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pelton.attention.metadata import ForwardBatch
from pelton.model.build import BuildConfig
from pelton.ops.moe import RoutingSpec
from pelton_plugins.models.experts import SparseMoe
from pelton_plugins.models.moe import JointlyNormedLayer, MoeForCausalLM, num_experts


class OlmoeDecoderLayer(JointlyNormedLayer):
    def __init__(self, index: int, *, config: BuildConfig, prefix: str, **fields: Any) -> None:
        super().__init__(index, config=config, prefix=prefix, **fields)
        self.limit: float | None = config.hf.get("clip_qkv")

    def attend(self, qkv: Tensor, batch: ForwardBatch) -> Tensor:
        if self.limit is None:
            return super().attend(qkv, batch)
        self.qk_norm(qkv)
        attended: Tensor = self.attn(qkv.clamp_(-self.limit, self.limit), batch)
        return attended

    def make_experts(self, config: BuildConfig, prefix: str) -> SparseMoe:
        hf = config.hf
        routing = RoutingSpec(
            num_experts=num_experts(hf), top_k=hf.num_experts_per_tok, is_renormalized=bool(hf.get("norm_topk_prob"))
        )
        return SparseMoe(
            hf.hidden_size, hf.intermediate_size, routing=routing, activation=hf.get("hidden_act", "silu"),
            norm=self.post_attention_layernorm, config=config, prefix=prefix,
        )  # fmt: skip


class OlmoeForCausalLM(MoeForCausalLM):
    layer_class = OlmoeDecoderLayer
