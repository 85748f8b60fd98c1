"""Granite 4: layers of Mamba-2, some with attention, mostly without a rope; experts and an MLP that every token takes, or that MLP alone;
multipliers as Granite has."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from pelton.layers.rope import get_rope
from pelton.model.build import BuildConfig, HFConfig
from pelton.model.loading import LazyWeight
from pelton.ops.moe import RoutingSpec
from pelton_plugins.models.bamba import bamba_mixer, has_attention
from pelton_plugins.models.experts import ExpertNames, GatedMLP, SparseMoe
from pelton_plugins.models.hybrid import MLP, Attention, HybridDecoder, Parts, head_dim_of, renamed
from pelton_plugins.models.stacked_experts import one_for_each_expert

_EXPERTS = {
    f"block_sparse_moe.{old}.weight": f"block_sparse_moe.experts.{new}"
    for old, new in (("input_linear", "gate_up_proj"), ("output_linear", "down_proj"))
}
"""Stacked experts by the names that most models have."""
_NAMES = ExpertNames(router="router.layer")


class GraniteMoeHybridForCausalLM(HybridDecoder):
    def __init__(self, *, config: BuildConfig, prefix: str = "") -> None:
        super().__init__(config=config, prefix=prefix)
        self.logits_scaling = float(config.hf.get("logits_scaling", 1.0))

    def make_layer(self, index: int, config: BuildConfig, prefix: str) -> nn.Module:
        hf = config.hf
        norm = self.make_norm(config, f"{prefix}.input_layernorm")
        if has_attention(index, hf):
            head_dim = head_dim_of(hf)
            mixer: nn.Module = Attention(
                norm, head_dim=head_dim, rope=get_rope(config, head_dim) if hf.get("position_embedding_type") == "rope" else None,
                bias=bool(hf.get("attention_bias")), scale=float(hf.get("attention_multiplier", 1.0)), config=config,
                prefix=f"{prefix}.self_attn",
            )  # fmt: skip
        else:
            mixer = bamba_mixer(norm, config, f"{prefix}.mamba")
        return Parts(mixer, self.make_mlp(config, prefix), multiplier=float(hf.get("residual_multiplier", 1.0)))

    def make_mlp(self, config: BuildConfig, prefix: str) -> nn.Module:
        hf, shared = config.hf, f"{prefix}.shared_mlp"
        norm = self.make_norm(config, f"{prefix}.post_attention_layernorm")
        size, width, activation = hf.hidden_size, hf.shared_intermediate_size, hf.get("hidden_act", "silu")
        if not hf.get("num_local_experts"):
            return MLP(norm, width, merged="input_linear", down="output_linear", config=config, prefix=shared)
        always = GatedMLP(
            size, width, activation=activation, merged="input_linear", down="output_linear", config=config, prefix=shared
        )  # fmt: skip
        routing = RoutingSpec(num_experts=hf.num_local_experts, top_k=hf.num_experts_per_tok)
        return SparseMoe(
            size, hf.intermediate_size, routing=routing, activation=activation, norm=norm, config=config, shared=always,
            prefix=f"{prefix}.block_sparse_moe", names=_NAMES,
        )  # fmt: skip

    def compute_logits(self, hidden: tuple[Tensor, Tensor | None], rows: Tensor) -> Tensor:
        return super().compute_logits(hidden, rows) / self.logits_scaling

    def embedding_scale(self, hf: HFConfig) -> float | None:
        return float(hf.get("embedding_multiplier", 1.0))

    def load_weights(self, weights: Iterable[tuple[str, LazyWeight]]) -> set[str]:
        return super().load_weights(one_for_each_expert(renamed(weights, _EXPERTS), self.weights.expected()))
