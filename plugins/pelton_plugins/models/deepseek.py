"""DeepSeek V2, V3 and V3.2, GLM-5: attention over latents (MLA), with or without a latent of the query; dense layers, then experts.

V3.2's and GLM-5's attention is sparse: an indexer chooses the tokens that each token attends to.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pelton.attention.metadata import ForwardBatch
from pelton.errors import ConfigError
from pelton.layers.linear import MergedGateUp, RowParallelLinear
from pelton.layers.norm import RMSNorm
from pelton.layers.rope import Rope, get_rope
from pelton.model.build import BuildConfig, HFConfig
from pelton.model.loading import LazyWeight
from pelton.ops.moe import RoutingSpec
from pelton.quantization.interface import LinearShard
from pelton_plugins.models.experts import SparseMoe
from pelton_plugins.models.indexer import Choice, Indexer, Window
from pelton_plugins.models.latent_attention import MLALayer
from pelton_plugins.models.mla import HeadsLinear, LatentUp
from pelton_plugins.models.moe import grouped_routing, num_experts, shared_experts
from pelton_plugins.models.normed import BareLinear, NormedLinear, head_shard, whole_shard
from pelton_plugins.models.parallel import AddedNorm
from pelton_plugins.models.stacked_experts import one_for_each_expert
from pelton_plugins.models.stages import StagedDecoder


class MLAAttention(nn.Module):
    """Down to latents, up to queries, attention over the latents, and the output product."""

    latent_eps: ClassVar[float | None] = 1e-6
    """Of the latents' norms; None: `rms_norm_eps`, which the others have."""
    scales_by_rope: ClassVar[bool] = True
    """Yarn's scale, where it has one, is that of scores too."""

    def __init__(
        self,
        norm: RMSNorm,
        *,
        choice: Choice | Window | None,
        config: BuildConfig,
        prefix: str,
        rope: Rope | None = None,
        has_indexer: bool = True,
    ) -> None:
        """rope: config.json's when None. has_indexer: with a choice, whether it is made here; else in a layer before."""
        super().__init__()
        hf = config.hf
        hidden_size, num_heads, query_rank = hf.hidden_size, hf.num_attention_heads, hf.get("q_lora_rank")
        nope_dim, rope_dim, value_dim = hf.qk_nope_head_dim, hf.qk_rope_head_dim, hf.v_head_dim
        head_dim, bias = nope_dim + rope_dim, bool(hf.get("attention_bias"))
        if bias and not query_rank:
            raise ConfigError(
                "config.json has attention_bias and no q_lora_rank: then the latent has a bias and the query none, which this "
                "model's merged matrix cannot hold. Use another checkpoint."
            )
        latent = whole_shard(f"{prefix}.kv_a_proj_with_mqa", hf.kv_lora_rank + rope_dim, hidden_size)
        if query_rank:
            query = whole_shard(f"{prefix}.q_a_proj", query_rank, hidden_size)
            self.q_a_layernorm = self.make_latent_norm(query_rank, config, f"{prefix}.q_a_layernorm")
            self.q_b_proj = self.make_query_product(config, f"{prefix}.q_b_proj")
        else:
            query = head_shard(f"{prefix}.q_proj", num_heads, head_dim, hidden_size, config)
        self.has_query_latent = bool(query_rank)
        rope = rope or get_rope(config, rope_dim)
        self.indexer: Indexer | None = None
        shards = [query, latent, *self.gate_shards(config, prefix)]
        if choice is None or not has_indexer:
            self.down: Any = NormedLinear(shards, norm=norm, bias=bias, config=config)
            if choice is not None:  # what a checkpoint may have here all the same
                config.weights.ignore(rf"{re.escape(prefix)}\.indexer\..*")
        else:
            self.add_norm = self.make_add_norm(norm, config, prefix)
            self.down = BareLinear(shards, bias=bias, config=config)
            assert isinstance(choice, Choice), "a window has no indexer"
            self.indexer = self.make_indexer(choice, rope, config, f"{prefix}.indexer")
        self.kv_a_layernorm = self.make_latent_norm(hf.kv_lora_rank, config, f"{prefix}.kv_a_layernorm")
        self.up = LatentUp(
            hf.kv_lora_rank, num_heads, nope_dim + value_dim, config=config, prefix=f"{prefix}.kv_b_proj"
        )
        self.attn = MLALayer(
            self.up.by_head, latent_dim=hf.kv_lora_rank, rope_dim=rope_dim, nope_dim=nope_dim, value_dim=value_dim,
            kv_norm=self.kv_a_layernorm, rope=rope, scale=head_dim**-0.5 * (scale_of(rope) ** 2 if self.scales_by_rope else 1.0),
            is_interleaved=bool(hf.get("rope_interleave", True)), config=config, prefix=f"{prefix}.attn",
            chosen=None if choice is None else choice.tokens, sinks=self.sinks(config, prefix), key_norm=self.key_norm(config, prefix),
        )  # fmt: skip
        self.o_proj = RowParallelLinear(
            num_heads * value_dim, hidden_size, bias=bias, config=config, prefix=f"{prefix}.o_proj"
        )

    def forward(self, hidden: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        if self.indexer is None:
            product, residual = self.down(hidden, residual)
        else:
            hidden, residual = self.add_norm(hidden, residual)
            product = self.down(hidden)
        query, latent, *gates = product.split(self.down.sizes, dim=-1)
        gate = gates[0] if gates else None
        if self.has_query_latent:
            query_latent = self.q_a_layernorm(query)
            if self.indexer is not None:
                self.indexer(hidden, query_latent, batch)
            query, gate = self.queries(query, query_latent, gate)
        attended = self.attn(query, latent, batch)
        if gate is not None:
            attended = gated(attended, gate, self.attn.num_heads)
        return self.o_proj(attended), residual

    def queries(self, compressed: Tensor, query_latent: Tensor, gate: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return queries [T, H (N + R)] of the latent, which is `compressed` normed; and the gate, if any, as it is or of these too."""
        return self.q_b_proj(query_latent), gate

    def make_query_product(self, config: BuildConfig, prefix: str) -> HeadsLinear:
        hf = config.hf
        head_dim = hf.qk_nope_head_dim + hf.qk_rope_head_dim
        return HeadsLinear(hf.q_lora_rank, hf.num_attention_heads, head_dim, config=config, prefix=prefix)

    def make_add_norm(self, norm: RMSNorm, config: BuildConfig, prefix: str) -> AddedNorm:
        """Make the norm of what attention and indexer read. prefix: of the attention."""
        return AddedNorm(norm, config=config)

    def make_indexer(self, choice: Choice, rope: Rope, config: BuildConfig, prefix: str) -> Indexer:
        return Indexer(choice, rope=rope, config=config, prefix=prefix)

    def gate_shards(self, config: BuildConfig, prefix: str) -> list[LinearShard]:
        """Return the matrix, if any, from what the attention reads to gates of its output: a gate for each number, or for each head."""
        return []

    def sinks(self, config: BuildConfig, prefix: str) -> Tensor | None:
        return None

    def make_latent_norm(self, size: int, config: BuildConfig, prefix: str) -> nn.Module:
        return RMSNorm(size, eps=self.latent_eps, config=config, prefix=prefix)

    def key_norm(self, config: BuildConfig, prefix: str) -> nn.Module | None:
        """Make the norm, if any, of the part of the key that turns."""
        return None


def gated(attended: Tensor, gate: Tensor, num_heads: int) -> Tensor:
    """attended [T, H V] times the sigmoid of gate, [T, H V] or [T, H]."""
    shape = (num_heads, -1)
    result = attended.unflatten(1, shape) * torch.sigmoid(gate.unflatten(1, shape).float()).to(attended.dtype)
    return result.flatten(1)


class DeepseekDecoderLayer(nn.Module):
    """V2's layers and V3's differ in how experts are chosen."""

    attention_class: ClassVar[type[MLAAttention]] = MLAAttention

    def __init__(self, index: int, *, choice: Choice | None, config: BuildConfig, prefix: str) -> None:
        super().__init__()
        hf, mlp, has_experts = config.hf, f"{prefix}.mlp", _has_experts(config.hf, index)
        self.input_layernorm = RMSNorm(hf.hidden_size, config=config, prefix=f"{prefix}.input_layernorm")
        self.self_attn = self.make_attention(index, choice, config, f"{prefix}.self_attn")
        self.post_attention_layernorm = RMSNorm(
            hf.hidden_size, config=config, prefix=f"{prefix}.post_attention_layernorm"
        )
        self.experts = self.make_experts(config, mlp) if has_experts else None
        if has_experts:
            return
        bias = bool(hf.get("mlp_bias"))
        self.gate_up_proj = MergedGateUp(
            hf.hidden_size, hf.intermediate_size, activation=hf.get("hidden_act", "silu"),
            norm=self.post_attention_layernorm, bias=bias, config=config, prefix=mlp,
        )  # fmt: skip
        self.down_proj = RowParallelLinear(
            hf.intermediate_size, hf.hidden_size, bias=bias, config=config, prefix=f"{mlp}.down_proj"
        )

    def forward(self, hidden: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        hidden, residual = self.self_attn(hidden, residual, batch)
        if self.experts is not None:
            result: tuple[Tensor, Tensor] = self.experts(hidden, residual, batch)
            return result
        activated, residual = self.gate_up_proj(hidden, residual)
        return self.down_proj(activated), residual

    def make_attention(self, index: int, choice: Choice | None, config: BuildConfig, prefix: str) -> nn.Module:
        """Make what is called as `(hidden, residual, batch)`, and reads `input_layernorm`."""
        return self.attention_class(
            self.input_layernorm, choice=choice, has_indexer=choice is not None and index in choice.indexers,
            config=config, prefix=prefix,
        )  # fmt: skip

    def make_experts(self, config: BuildConfig, prefix: str) -> SparseMoe:
        hf = config.hf
        return SparseMoe(
            hf.hidden_size, hf.moe_intermediate_size, routing=_routing(config), activation=hf.get("hidden_act", "silu"),
            norm=self.post_attention_layernorm, config=config, prefix=prefix, shared=shared_experts(config, prefix),
        )  # fmt: skip


def _routing(config: BuildConfig) -> RoutingSpec:
    hf = config.hf
    if hf.get("model_type") in ("deepseek_v3", "deepseek_v32") or hf.get("topk_method") == "noaux_tc":
        return grouped_routing(hf)
    method = hf.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise ConfigError(f"topk_method is {method!r}; this model has greedy, group_limited_greedy and noaux_tc.")
    is_grouped = method == "group_limited_greedy"
    return RoutingSpec(
        num_experts=num_experts(hf), top_k=hf.num_experts_per_tok, is_renormalized=False,
        scale=hf.get("routed_scaling_factor", 1.0), num_groups=hf.n_group if is_grouped else 1,
        top_groups=hf.topk_group if is_grouped else 1,
    )  # fmt: skip


class DeepseekForCausalLM(StagedDecoder):
    layer_class: ClassVar[type[DeepseekDecoderLayer]] = DeepseekDecoderLayer

    def __init__(self, *, config: BuildConfig, prefix: str = "") -> None:
        super().__init__(config=config)
        hf = config.hf
        layers = self.own_layers(config, f"{prefix}model.layers")
        choice = self.make_choice(config, layers)
        is_tied = bool(hf.get("tie_word_embeddings"))
        self.embed_tokens = self.make_embedding(config, f"{prefix}model.embed_tokens", is_tied=is_tied)
        self.layers = nn.ModuleList(
            self.layer_class(index, choice=choice, config=config, prefix=f"{prefix}model.layers.{index}")
            for index in layers
        )
        self.norm = RMSNorm(hf.hidden_size, config=config, prefix=f"{prefix}model.norm")
        self.lm_head = self.make_head(
            config, f"{prefix}lm_head", norm=self.norm, is_tied=is_tied, soft_cap=hf.get("final_logit_softcapping")
        )

    def make_choice(self, config: BuildConfig, layers: range) -> Choice | None:
        """Return where indexers of this stage's layers leave their choice; None where each token attends to all before it."""
        return None

    def load_weights(self, weights: Iterable[tuple[str, LazyWeight]]) -> set[str]:
        return super().load_weights(one_for_each_expert(weights, self.weights.expected()))


class DeepseekV32ForCausalLM(DeepseekForCausalLM):
    def make_choice(self, config: BuildConfig, layers: range) -> Choice | None:
        return Choice(config, layers)


def _has_experts(hf: HFConfig, index: int) -> bool:
    types = hf.get("mlp_layer_types")
    if types is not None:
        return bool(types[index] == "sparse")
    return bool(hf.get("n_routed_experts")) and index >= hf.get("first_k_dense_replace", 0)


def scale_of(rope: Rope) -> float:
    """Yarn's, once for the query and once for the key; 1 without it. Peng et al., YaRN (arXiv:2309.00071), section 3.4."""
    parameters = rope.parameters
    if parameters.rope_type == "default" or not parameters.mscale_all_dim or parameters.factor <= 1:
        return 1.0
    return 0.1 * parameters.mscale_all_dim * math.log(parameters.factor) + 1.0
