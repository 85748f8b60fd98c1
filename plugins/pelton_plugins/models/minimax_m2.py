"""MiniMax-M2: queries and keys normed over all heads, of which a part turns, and experts by sigmoid scores and a correction."""

from __future__ import annotations

from dataclasses import replace

from pelton.layers.rope import Rope, get_rope
from pelton.model.build import BuildConfig, HFConfig
from pelton_plugins.models.experts import ExpertNames, SparseMoe
from pelton_plugins.models.moe import JointlyNormedLayer, MoeForCausalLM, check_fields, grouped_routing

_NAMES = ExpertNames(gate="w1", up="w3", down="w2", correction="e_score_correction_bias")


class MiniMaxM2DecoderLayer(JointlyNormedLayer):
    def rope(self, index: int, head_dim: int, config: BuildConfig) -> Rope | None:
        """Released checkpoints have `rotary_dim` where others have `partial_rotary_factor`, which wins."""
        hf = config.hf
        if (turned := hf.get("rotary_dim")) is not None and hf.get("partial_rotary_factor") is None:
            fields = {name: hf.get(name) for name in hf}
            config = replace(config, hf=HFConfig({**fields, "partial_rotary_factor": turned / head_dim}))
        return get_rope(config, head_dim)

    def make_experts(self, config: BuildConfig, prefix: str) -> SparseMoe:
        hf = config.hf
        return SparseMoe(
            hf.hidden_size, hf.intermediate_size, routing=grouped_routing(hf), activation=hf.get("hidden_act", "silu"),
            norm=self.post_attention_layernorm, config=config, names=_NAMES,
            prefix=prefix.removesuffix("mlp") + "block_sparse_moe",
        )  # fmt: skip


class MiniMaxM2ForCausalLM(MoeForCausalLM):
    layer_class = MiniMaxM2DecoderLayer

    def __init__(self, *, config: BuildConfig, prefix: str = "") -> None:
        check_fields(
            config.hf, scoring_func="sigmoid", use_routing_bias=True, use_qk_norm=True, qk_norm_type="per_layer",
            shared_intermediate_size=0, attn_type_list=[1] * config.hf.num_hidden_layers,
        )  # fmt: skip
        super().__init__(config=config, prefix=prefix)
