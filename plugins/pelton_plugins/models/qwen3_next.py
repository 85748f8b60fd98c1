"""Qwen3-Next and Qwen3.5: of four layers three have the gated delta rule, and one has attention whose output a gate multiplies; an MLP or
experts behind each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Tensor, nn

from pelton.attention.metadata import ForwardBatch
from pelton.layers.attention import AttentionLayer
from pelton.layers.linear import RowParallelLinear
from pelton.layers.norm import RMSNorm
from pelton.layers.rope import get_rope
from pelton.model.build import BuildConfig, HFConfig
from pelton.model.loading import LazyWeight
from pelton_plugins.models.delta_net import GatedDeltaNet, GroupedDeltaNet
from pelton_plugins.models.hybrid import MLP, HybridDecoder, Parts, layer_kind
from pelton_plugins.models.normed import NormedLinear
from pelton_plugins.models.qwen2_moe import qwen_experts
from pelton_plugins.models.shares import Share, row_shard, shards_by_group
from pelton_plugins.models.stacked_experts import one_for_each_expert


class ZeroCentredNorm(RMSNorm):
    """x / rms(x) * (1 + w)"""

    def __init__(self, size: int, *, config: BuildConfig, prefix: str) -> None:
        super().__init__(size, unit_offset=True, config=config, prefix=prefix)


class GatedAttention(nn.Module):
    """Attention with norms of queries and keys, a rope on a part of each head, and a gate for each number of its output."""

    def __init__(self, norm: RMSNorm, *, config: BuildConfig, prefix: str) -> None:
        super().__init__()
        hf, self.input_norm = config.hf, norm
        size, num_heads, num_kv_heads = hf.hidden_size, hf.num_attention_heads, hf.num_key_value_heads
        head_dim, bias = hf.get("head_dim", 256), bool(hf.get("attention_bias"))
        config.parallel.check_copies(num_kv_heads)
        heads = Share.split(num_heads, "num_attention_heads", config)
        kv_heads = Share.copied(num_kv_heads, "num_key_value_heads", config)
        of_head = Share.whole(head_dim)
        query, gate = shards_by_group(f"{prefix}.q_proj", heads, [of_head, of_head], size)
        keys, values = (row_shard(f"{prefix}.{name}_proj", kv_heads.times(head_dim), size) for name in "kv")
        self.qkv_gate_proj = NormedLinear([*query, keys, values, *gate], norm=norm, bias=bias, config=config)
        self.q_norm, self.k_norm = (
            ZeroCentredNorm(head_dim, config=config, prefix=f"{prefix}.{one}_norm") for one in "qk"
        )
        self.attn = AttentionLayer(
            heads.count, kv_heads.count, head_dim, rope=get_rope(config, head_dim), q_norm=self.q_norm, k_norm=self.k_norm,
            config=config, prefix=f"{prefix}.attn",
        )  # fmt: skip
        self.o_proj = RowParallelLinear(num_heads * head_dim, size, bias=bias, config=config, prefix=f"{prefix}.o_proj")
        self.inner = heads.count * head_dim

    def forward(self, hidden: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        product, residual = self.qkv_gate_proj(hidden, residual)
        attended = self.attn(product[:, : -self.inner].contiguous(), batch)
        return self.o_proj(attended * torch.sigmoid(product[:, -self.inner :])), residual


class Qwen3NextForCausalLM(HybridDecoder):
    delta_net: ClassVar[type[GatedDeltaNet]] = GroupedDeltaNet

    def __init__(self, *, config: BuildConfig, prefix: str = "") -> None:
        super().__init__(config=config, prefix=prefix)
        config.weights.ignore(r"mtp\..*")  # it predicts further tokens, and nobody reads it

    def make_layer(self, index: int, config: BuildConfig, prefix: str) -> nn.Module:
        norm = self.make_norm(config, f"{prefix}.input_layernorm")
        if _has_attention(index, config.hf):
            mixer: nn.Module = GatedAttention(norm, config=config, prefix=f"{prefix}.self_attn")
        else:
            mixer = self.delta_net(norm, config=config, prefix=f"{prefix}.linear_attn")
        norm = self.make_norm(config, f"{prefix}.post_attention_layernorm")
        if _has_experts(index, config.hf):
            is_renormalized = bool(config.hf.get("norm_topk_prob", True))
            return Parts(mixer, qwen_experts(norm, config, f"{prefix}.mlp", is_renormalized=is_renormalized))
        return Parts(mixer, MLP(norm, config.hf.intermediate_size, config=config, prefix=f"{prefix}.mlp"))

    def make_norm(self, config: BuildConfig, prefix: str) -> RMSNorm:
        return ZeroCentredNorm(config.hf.hidden_size, config=config, prefix=prefix)

    def load_weights(self, weights: Iterable[tuple[str, LazyWeight]]) -> set[str]:
        return super().load_weights(one_for_each_expert(weights, self.weights.expected()))


class Qwen3_5ForCausalLM(Qwen3NextForCausalLM):
    """Qwen3.5, dense or with experts."""

    delta_net: ClassVar[type[GatedDeltaNet]] = GatedDeltaNet


def _has_attention(index: int, hf: HFConfig) -> bool:
    """From `layer_types`, or every n-th."""
    kind = layer_kind(index, hf)
    if kind is not None:
        return kind == "full_attention"
    return (index + 1) % int(hf.get("full_attention_interval", 4)) == 0


def _has_experts(index: int, hf: HFConfig) -> bool:
    if not hf.get("num_experts") or index in hf.get("mlp_only_layers", ()):
        return False
    return (index + 1) % int(hf.get("decoder_sparse_step", 1)) == 0
