"""Ling 3 (Bailing Hybrid): most layers have the delta rule with a bounded decay for each number of a key, the others attention over latents
whose heads gates multiply; an MLP or experts behind each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from pelton.errors import ConfigError
from pelton.layers.linear import RowParallelLinear
from pelton.layers.norm import RMSNorm
from pelton.layers.rope import get_rope
from pelton.model.build import BuildConfig, HFConfig
from pelton.model.loading import LazyWeight
from pelton.ops.moe import RoutingSpec
from pelton_plugins.models.deepseek import MLAAttention
from pelton_plugins.models.experts import SparseMoe
from pelton_plugins.models.hybrid import MLP, HybridDecoder, Parts, layer_kind, renamed
from pelton_plugins.models.moe import check_fields, shared_experts
from pelton_plugins.models.normed import NormedLinear, head_shard
from pelton_plugins.models.shares import Share, row_shard
from pelton_plugins.models.stacked_experts import one_for_each_expert
from pelton_plugins.models.state_layer import StateLayer

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.attention.metadata import ForwardBatch
    from pelton.quantization.interface import LinearShard

_NAMES = {
    "model.word_embeddings.": "model.embed_tokens.", ".attention.dense.": ".self_attn.o_proj.", ".attention.": ".self_attn.",
    ".gate.expert_bias": ".gate.e_score_correction_bias", ".self_attn.f_proj.": ".self_attn.forget_gate.f_proj.",
    ".self_attn.dt_bias": ".self_attn.forget_gate.dt_bias", ".self_attn.A_log": ".self_attn.forget_gate.A_log",
}  # fmt: skip
"""Names of tensors as released checkpoints have them, and as transformers' modules and layers here do."""


class BailingDeltaAttention(StateLayer):
    """Product, convolution, delta rule, norm of each head and its gate, product: T tokens, E = num_heads * head_dim, of this rank.

    With `kda_safe_gate` a decay's logarithm is bound * sigmoid(exp(A) (f + dt_bias)). Backends compute -exp(A) softplus(f + dt_bias): they
    get numbers that softplus turns into the bounded one, and an A and dt_bias of zeros. `DeltaParams` in `pelton_backends.sdpa.delta_rule`
    is all that a backend reads.
    """

    attention_type: ClassVar[str] = "key_delta_rule"
    max_beta = 1.0

    def __init__(self, norm: RMSNorm, *, config: BuildConfig, prefix: str) -> None:
        super().__init__(config=config, prefix=prefix)
        hf, size, self.input_norm = config.hf, config.hf.hidden_size, norm
        heads = Share.split(hf.num_attention_heads, "num_attention_heads", config)
        self.num_heads = self.num_groups = heads.count
        self.head_dim = self.state_size = int(hf.get("linear_head_dim", hf.get("head_dim", 128)))
        inner = heads.times(self.head_dim)
        self.inner = inner.count
        rows = {"q": inner, "k": inner, "v": inner, "b": heads, "forget_gate.f": inner, "g": inner}
        self.in_proj = NormedLinear(
            [row_shard(f"{prefix}.{name}_proj", part, size) for name, part in rows.items()], norm=norm, config=config
        )
        self.make_convolution({f"{name}_conv1d": [inner] for name in "qkv"}, hf.get("short_conv_kernel_size", 4))
        self.dt_bias = self.parameter("forget_gate.dt_bias", inner, dtype=torch.float32)
        self.a_log = self.parameter("forget_gate.A_log", heads, dtype=torch.float32)
        self.bound: float | None = None
        if hf.get("kda_safe_gate", True):
            self.bound = float(hf.get("kda_lower_bound", -5.0))
            if self.bound >= 0:
                raise ConfigError(f"kda_lower_bound is {self.bound}; a decay's logarithm is below 0. Fix config.json.")
            self.own_bias, self.own_rates = self.dt_bias, self.a_log
            self.dt_bias, self.a_log = (
                nn.Parameter(torch.zeros_like(own), requires_grad=False) for own in (self.dt_bias, self.a_log)
            )
        self.norm = RMSNorm(self.head_dim, config=config, prefix=f"{prefix}.o_norm")
        self.o_proj = RowParallelLinear(inner.total, size, config=config, prefix=f"{prefix}.o_proj")
        self.keep(
            self.conv_state(), ((heads.count, self.head_dim, self.head_dim), "float32"), num_heads=heads.count,
            num_groups=heads.count, head_dim=self.head_dim,
        )  # fmt: skip

    def forward(self, hidden: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        product, residual = self.in_proj(hidden, residual)
        if self.bound is not None:
            decays = product[:, -2 * self.inner : -self.inner]
            decays.copy_(self._unbounded(decays))
        mixed = self.norm(self.mix(product, self.inner, batch).unflatten(-1, (-1, self.head_dim))).flatten(1)
        return self.o_proj(mixed * torch.sigmoid(product[:, -self.inner :])), residual

    def _unbounded(self, f: Tensor) -> Tensor:
        """[T, E] -> [T, E] float32: numbers whose softplus is minus the bounded decay's logarithm."""
        rates = self.own_rates.exp().repeat_interleave(self.head_dim)
        fallen = -self.bound * torch.sigmoid(rates * (f.float() + self.own_bias))  # type: ignore[operator]
        return (fallen.expm1().log()).clamp(min=-80.0)


class BailingLatentAttention(MLAAttention):
    def gate_shards(self, config: BuildConfig, prefix: str) -> list[LinearShard]:
        hf = config.hf
        return [head_shard(f"{prefix}.g_proj", hf.num_attention_heads, 1, hf.hidden_size, config)]


class BailingHybridForCausalLM(HybridDecoder):
    def make_layer(self, index: int, config: BuildConfig, prefix: str) -> nn.Module:
        hf, attention = config.hf, f"{prefix}.self_attn"
        norm = self.make_norm(config, f"{prefix}.input_layernorm")
        if _has_attention(index, hf):
            check_fields(hf, attention_bias=False, rope_interleave=True)
            rope = get_rope(config, hf.qk_rope_head_dim)
            if rope.rotary_dim != hf.qk_rope_head_dim:
                raise ConfigError(
                    f"partial_rotary_factor is {rope.rotary_dim / hf.qk_rope_head_dim}; this model has 1.0: all of qk_rope_head_dim turns. "
                    "Use another checkpoint."
                )
            mixer: nn.Module = BailingLatentAttention(norm, choice=None, rope=rope, config=config, prefix=attention)
        else:
            mixer = BailingDeltaAttention(norm, config=config, prefix=attention)
        return Parts(mixer, self.make_mlp(index, config, f"{prefix}.mlp"))

    def make_mlp(self, index: int, config: BuildConfig, prefix: str) -> nn.Module:
        hf, types = config.hf, config.hf.get("mlp_layer_types")
        norm = self.make_norm(config, f"{prefix.removesuffix('.mlp')}.post_attention_layernorm")
        if types[index] == "dense" if types is not None else index < hf.get("first_k_dense_replace", 2):
            return MLP(norm, hf.intermediate_size, config=config, prefix=prefix)
        return SparseMoe(
            hf.hidden_size, hf.moe_intermediate_size, routing=_routing(hf), activation=hf.get("hidden_act", "silu"), norm=norm,
            shared=shared_experts(config, prefix, _field(hf, "num_shared_experts", "n_shared_experts", 1)),
            config=config, prefix=prefix,
        )  # fmt: skip

    def load_weights(self, weights: Iterable[tuple[str, LazyWeight]]) -> set[str]:
        return super().load_weights(one_for_each_expert(renamed(weights, _NAMES), self.weights.expected()))


def _routing(hf: HFConfig) -> RoutingSpec:
    return RoutingSpec(
        num_experts=_field(hf, "num_experts", "num_local_experts"), top_k=_field(hf, "num_experts_per_token", "num_experts_per_tok"),
        scoring="sigmoid", is_renormalized=bool(_field(hf, "moe_renormalize", "norm_topk_prob", True)),
        scale=float(hf.get("routed_scaling_factor", 2.5)), num_groups=_field(hf, "num_expert_group", "n_group"),
        top_groups=hf.topk_group, group_score="top2", has_correction=True,
    )  # fmt: skip


def _field(hf: HFConfig, name: str, other: str, default: Any = None) -> Any:
    """A field by the name that transformers writes, or by that of its relatives."""
    found = hf.get(name, hf.get(other, default))
    return getattr(hf, other) if found is None else found


def _has_attention(index: int, hf: HFConfig) -> bool:
    """From `layer_types`, or the last of each group."""
    kind = layer_kind(index, hf)
    return kind == "full_attention" if kind is not None else (index + 1) % hf.get("layer_group_size", 6) == 0
