"""Lara Mini: of five layers two have the gated delta rule, two attention in a window, and one attention to all tokens without a rope;
experts behind each, and one that every token takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from torch import nn

from pelton.layers.norm import RMSNorm
from pelton.layers.rope import get_rope
from pelton.model.build import BuildConfig, HFConfig
from pelton.model.loading import LazyWeight
from pelton.ops.moe import RoutingSpec
from pelton.quantization.interface import LinearShard
from pelton_plugins.models.delta_net import GatedDeltaNet
from pelton_plugins.models.experts import GatedMLP, SparseMoe
from pelton_plugins.models.hybrid import Attention, HybridDecoder, Parts, head_dim_of, layer_kind
from pelton_plugins.models.moe import num_experts
from pelton_plugins.models.shares import Share
from pelton_plugins.models.stacked_experts import one_for_each_expert

_PATTERN = ("linear_attention", "sliding_attention", "linear_attention", "full_attention", "sliding_attention")


class LaraDeltaNet(GatedDeltaNet):
    """With one matrix: rows of q, k, v, the gate, and those that make b and a."""

    def projections(self, prefix: str, heads: Share, groups: Share, hidden_size: int) -> Sequence[LinearShard]:
        keys, values = groups.times(self.state_size), heads.times(self.head_dim)
        parts = [keys, keys, values, values, heads, heads]
        starts = [0, *accumulate(part.total for part in parts)]
        shards = [
            LinearShard(f"{prefix}.in_proj", starts[-1], hidden_size, (at + part.start, at + part.stop), (0, hidden_size))
            for at, part in zip(starts, parts, strict=False)
        ]  # fmt: skip
        q, k, v, gate, b, a = shards
        return [q, k, v, b, a, gate]

    def make_norm(self, config: BuildConfig, prefix: str) -> RMSNorm:
        return RMSNorm(self.head_dim, config=config, prefix=f"{prefix}.out_norm")


class LaraMiniForCausalLM(HybridDecoder):
    def make_layer(self, index: int, config: BuildConfig, prefix: str) -> nn.Module:
        hf, kind = config.hf, _kind(index, config.hf)
        norm = self.make_norm(config, f"{prefix}.input_layernorm")
        if kind == "linear_attention":
            mixer: nn.Module = LaraDeltaNet(norm, config=config, prefix=f"{prefix}.linear_attn")
        else:
            is_local, head_dim, attention = kind == "sliding_attention", head_dim_of(hf), f"{prefix}.self_attn"
            q_norm, k_norm = (RMSNorm(head_dim, config=config, prefix=f"{attention}.{one}_norm") for one in "qk")
            mixer = Attention(
                norm, head_dim=head_dim, rope=get_rope(config, head_dim) if is_local else None,
                sliding_window=hf.sliding_window if is_local else None, q_norm=q_norm, k_norm=k_norm,
                bias=bool(hf.get("attention_bias")), config=config, prefix=attention,
            )  # fmt: skip
        return Parts(mixer, self.make_experts(config, prefix))

    def make_experts(self, config: BuildConfig, prefix: str) -> nn.Module:
        hf, mlp, activation = config.hf, f"{prefix}.mlp", config.hf.get("hidden_act", "silu")
        shared = GatedMLP(
            hf.hidden_size, hf.shared_expert_intermediate_size, activation=activation, config=config,
            prefix=f"{mlp}.shared_expert",
        )  # fmt: skip
        routing = RoutingSpec(
            num_experts=num_experts(hf), top_k=hf.num_experts_per_tok, is_renormalized=bool(hf.get("norm_topk_prob", True))
        )  # fmt: skip
        return SparseMoe(
            hf.hidden_size, hf.moe_intermediate_size, routing=routing, activation=activation, shared=shared,
            norm=self.make_norm(config, f"{prefix}.post_attention_layernorm"), config=config, prefix=mlp,
        )  # fmt: skip

    def is_tied(self, hf: HFConfig) -> bool:
        return bool(hf.get("tie_word_embeddings", True))

    def load_weights(self, weights: Iterable[tuple[str, LazyWeight]]) -> set[str]:
        return super().load_weights(one_for_each_expert(weights, self.weights.expected()))


def _kind(index: int, hf: HFConfig) -> str:
    kind = layer_kind(index, hf, "linear_attention", "sliding_attention")
    return kind if kind is not None else _PATTERN[index % len(_PATTERN)]
