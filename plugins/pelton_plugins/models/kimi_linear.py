"""Kimi Linear: most layers have the delta rule with a decay for each number of a key, the others attention over latents without a rope;
an MLP or experts behind each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from pelton.layers.linear import RowParallelLinear, ShardLinear
from pelton.layers.norm import RMSNorm
from pelton.layers.rope import Rope, RopeParameters, cos_sin_table
from pelton.model.build import BuildConfig, HFConfig
from pelton.model.loading import LazyWeight
from pelton.ops.moe import RoutingSpec
from pelton_plugins.models.deepseek import MLAAttention
from pelton_plugins.models.experts import ExpertNames, GatedMLP, SparseMoe
from pelton_plugins.models.hybrid import MLP, HybridDecoder, Parts, layer_kind, renamed
from pelton_plugins.models.normed import NormedLinear
from pelton_plugins.models.shares import Share, row_shard
from pelton_plugins.models.state_layer import StateLayer

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.attention.metadata import ForwardBatch

_NAMES = ExpertNames(gate="w1", up="w3", down="w2")


class KimiDeltaAttention(StateLayer):
    """Product, convolution, delta rule, norm of each head and its gate, product: T tokens, E = num_heads * head_dim, of this rank.

    Decays and gates come of `head_dim` numbers of a token. `DeltaParams` in `pelton_backends.sdpa.delta_rule` is all that a backend reads.
    """

    attention_type: ClassVar[str] = "key_delta_rule"
    max_beta = 1.0

    def __init__(self, norm: RMSNorm, *, config: BuildConfig, prefix: str) -> None:
        super().__init__(config=config, prefix=prefix)
        own, size, self.input_norm = _linear_fields(config.hf), config.hf.hidden_size, norm
        heads = Share.split(own["num_heads"], "num_heads of linear_attn_config", config)
        self.num_heads = self.num_groups = heads.count
        self.head_dim = self.state_size = own["head_dim"]
        inner, of_all = heads.times(self.head_dim), Share.whole(self.head_dim)
        self.inner = inner.count
        rows = {"q": inner, "k": inner, "v": inner, "b": heads, "f_a": of_all, "g_a": of_all}
        self.in_proj = NormedLinear(
            [row_shard(f"{prefix}.{name}_proj", part, size) for name, part in rows.items()], norm=norm, config=config
        )
        taps = {f"{name}_conv1d": [inner] for name in "qkv"}
        self.make_convolution(taps, own["short_conv_kernel_size"])
        self.f_b_proj, self.g_b_proj = (
            ShardLinear(row_shard(f"{prefix}.{name}_b_proj", inner, self.head_dim), config=config) for name in "fg"
        )
        self.dt_bias = self.parameter("dt_bias", inner, dtype=torch.float32)
        self.a_log = self.parameter("A_log", heads, kept=(1, 1, heads, 1), dtype=torch.float32)
        self.norm = RMSNorm(self.head_dim, config=config, prefix=f"{prefix}.o_norm")
        self.o_proj = RowParallelLinear(inner.total, size, config=config, prefix=f"{prefix}.o_proj")
        self.keep(
            self.conv_state(), ((heads.count, self.head_dim, self.head_dim), "float32"), num_heads=heads.count,
            num_groups=heads.count, head_dim=self.head_dim,
        )  # fmt: skip

    def forward(self, hidden: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        product, residual = self.in_proj(hidden, residual)
        front, decays, gate = product.split([3 * self.inner + self.num_heads, self.head_dim, self.head_dim], dim=-1)
        query = torch.cat([front, self.f_b_proj(decays.contiguous())], dim=-1)
        mixed = self.norm(self.mix(query, self.inner, batch).unflatten(-1, (-1, self.head_dim))).flatten(1)
        return self.o_proj(mixed * torch.sigmoid(self.g_b_proj(gate.contiguous()))), residual


class KimiLinearForCausalLM(HybridDecoder):
    def make_layer(self, index: int, config: BuildConfig, prefix: str) -> nn.Module:
        norm, attention = self.make_norm(config, f"{prefix}.input_layernorm"), f"{prefix}.self_attn"
        if _has_attention(index, config.hf):
            rope = _no_rope(config)
            mixer: nn.Module = MLAAttention(norm, choice=None, rope=rope, config=config, prefix=attention)
        else:
            mixer = KimiDeltaAttention(norm, config=config, prefix=attention)
        return Parts(mixer, self.make_mlp(index, config, f"{prefix}.mlp"))

    def make_mlp(self, index: int, config: BuildConfig, prefix: str) -> nn.Module:
        hf = config.hf
        norm = self.make_norm(config, f"{prefix.removesuffix('.mlp')}.post_attention_layernorm")
        types = hf.get("mlp_layer_types")
        if types[index] == "dense" if types is not None else index < hf.get("first_k_dense_replace", 1):
            return MLP(norm, hf.intermediate_size, config=config, prefix=prefix)
        width, activation = hf.moe_intermediate_size, hf.get("hidden_act", "silu")
        shared = GatedMLP(
            hf.hidden_size, width * hf.get("num_shared_experts", 1), activation=activation, config=config,
            prefix=f"{prefix}.shared_experts",
        )  # fmt: skip
        return SparseMoe(
            hf.hidden_size, width, routing=_routing(hf), activation=activation, norm=norm, names=_NAMES, shared=shared,
            config=config, prefix=prefix,
        )  # fmt: skip

    def load_weights(self, weights: Iterable[tuple[str, LazyWeight]]) -> set[str]:
        return super().load_weights(renamed(weights, {".block_sparse_moe.": ".mlp."}))


def _routing(hf: HFConfig) -> RoutingSpec:
    return RoutingSpec(
        num_experts=hf.num_experts, top_k=hf.num_experts_per_token, scoring="sigmoid",
        is_renormalized=bool(hf.get("moe_renormalize", True)), scale=float(hf.get("routed_scaling_factor", 1.0)),
        num_groups=hf.get("num_expert_group", 1), top_groups=hf.get("topk_group", 1), group_score="top2", has_correction=True,
    )  # fmt: skip


def _linear_fields(hf: HFConfig) -> dict[str, Any]:
    """Fields that a released checkpoint has in `linear_attn_config`, and transformers' own beside the others."""
    names = {
        "head_dim": "linear_head_dim",
        "num_heads": "linear_num_heads",
        "short_conv_kernel_size": "linear_conv_kernel_dim",
    }
    own = hf.get("linear_attn_config", {})
    return {name: own[name] if name in own else getattr(hf, other) for name, other in names.items()}


def _has_attention(index: int, hf: HFConfig) -> bool:
    """From `layer_types`, or from a list of layers that counts from 1."""
    kind = layer_kind(index, hf)
    if kind is not None:
        return kind == "full_attention"
    return index + 1 in hf.get("linear_attn_config", {}).get("full_attn_layers", ())


def _no_rope(config: BuildConfig) -> Rope:
    """A rope that turns nothing."""
    parameters = RopeParameters(
        rope_type="proportional", theta=1.0, rotary_dim=config.hf.qk_rope_head_dim, max_position_embeddings=1, share=0.0
    )
    if parameters not in config.ropes:
        config.ropes[parameters] = Rope(parameters, cos_sin_table(parameters, config.max_model_len).to(config.device))
    return config.ropes[parameters]
