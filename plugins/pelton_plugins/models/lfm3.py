"""LFM3: half of the layers are LFM2's short convolutions, the others have attention, in a window or to all tokens, and a gate for each
head; norms before and behind each sub-layer.

The norm behind a sub-layer is applied by the layer that reads its output, as in Gemma 3.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from pelton.attention.metadata import ForwardBatch
from pelton.layers.attention import AttentionLayer
from pelton.layers.linear import RowParallelLinear
from pelton.layers.norm import RMSNorm
from pelton.layers.rope import get_rope
from pelton.model.build import BuildConfig, HFConfig
from pelton.model.loading import LazyWeight
from pelton_plugins.models.hybrid import MLP, head_dim_of, layer_kind, renamed
from pelton_plugins.models.lfm2 import ShortConvMixer
from pelton_plugins.models.moe import check_fields
from pelton_plugins.models.normed import NormedLinear
from pelton_plugins.models.shares import Share, row_shard
from pelton_plugins.models.stages import StagedDecoder


class Lfm3Attention(nn.Module):
    """Attention with norms of queries and keys, a rope of the layer's kind, and a gate for each head of its output."""

    def __init__(
        self, kind: str, norm: RMSNorm, post_norm: RMSNorm | None, *, config: BuildConfig, prefix: str
    ) -> None:
        super().__init__()
        hf, self.input_norm = config.hf, norm
        size, num_heads, num_kv_heads, head_dim = (
            hf.hidden_size,
            hf.num_attention_heads,
            hf.num_key_value_heads,
            head_dim_of(hf),
        )
        has_gate, bias = bool(hf.get("use_attention_gate", True)), bool(hf.get("attention_bias"))
        if has_gate:  # rows without a bias below those that have one
            check_fields(hf, attention_bias=False)
        config.parallel.check_copies(num_kv_heads)
        heads = Share.split(num_heads, "num_attention_heads", config)
        kv_heads = Share.copied(num_kv_heads, "num_key_value_heads", config)
        rows = {"q": heads.times(head_dim), "k": kv_heads.times(head_dim), "v": kv_heads.times(head_dim)}
        if has_gate:
            rows["g"] = heads
        shards = [row_shard(f"{prefix}.{name}_proj", own, size) for name, own in rows.items()]
        self.qkv_gate_proj = NormedLinear(shards, norm=norm, post_norm=post_norm, bias=bias, config=config)
        self.q_norm, self.k_norm = (_norm(config, f"{prefix}.{one}_norm", head_dim) for one in "qk")
        self.attn = AttentionLayer(
            heads.count, kv_heads.count, head_dim, rope=get_rope(config, head_dim, layer_type=kind),
            sliding_window=hf.sliding_window if kind == "sliding_attention" else None, q_norm=self.q_norm, k_norm=self.k_norm,
            config=config, prefix=f"{prefix}.attn",
        )  # fmt: skip
        self.o_proj = RowParallelLinear(num_heads * head_dim, size, bias=bias, config=config, prefix=f"{prefix}.o_proj")
        self.num_gates = heads.count if has_gate else 0

    def forward(self, hidden: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        product, residual = self.qkv_gate_proj(hidden, residual)
        if not self.num_gates:
            return self.o_proj(self.attn(product, batch)), residual
        attended = self.attn(product[:, : -self.num_gates].contiguous(), batch).unflatten(1, (self.num_gates, -1))
        gates = torch.sigmoid(product[:, -self.num_gates :])
        return self.o_proj((attended * gates[..., None]).flatten(1)), residual


class Lfm3DecoderLayer(nn.Module):
    def __init__(self, index: int, *, previous_norm: RMSNorm | None, config: BuildConfig, prefix: str) -> None:
        """previous_norm: the norm behind the MLP of the layer below; None for the first layer, and without such norms."""
        super().__init__()
        kind, norm = _kind(index, config.hf), _norm(config, f"{prefix}.operator_norm")
        if kind == "conv":
            self.mixer: nn.Module = ShortConvMixer(
                norm, post_norm=previous_norm, taps=7, config=config, prefix=f"{prefix}.conv"
            )
        else:
            self.mixer = Lfm3Attention(kind, norm, previous_norm, config=config, prefix=f"{prefix}.self_attn")
        self.post_operator_norm = _post_norm(config, f"{prefix}.post_operator_norm")
        self.mlp = MLP(
            _norm(config, f"{prefix}.ffn_norm"), config.hf.intermediate_size, names=("w1", "w3"), down="w2",
            post_norm=self.post_operator_norm, config=config, prefix=f"{prefix}.feed_forward",
        )  # fmt: skip
        self.post_ffn_norm = _post_norm(config, f"{prefix}.post_ffn_norm")

    def forward(self, hidden: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        hidden, residual = self.mixer(hidden, residual, batch)
        hidden, residual = self.mlp(hidden, residual, batch)
        return hidden, residual


class Lfm3ForCausalLM(StagedDecoder):
    def __init__(self, *, config: BuildConfig, prefix: str = "") -> None:
        super().__init__(config=config)
        model, is_tied = f"{prefix}model", bool(config.hf.get("tie_word_embeddings", True))
        self.embed_tokens = self.make_embedding(config, f"{model}.embed_tokens", is_tied=is_tied)
        own = self.own_layers(config, f"{model}.layers")
        self.layers = nn.ModuleList()
        post_norm: RMSNorm | None = None
        if own.start:  # of the layer below, which is another stage's
            post_norm = self.norm_below = _post_norm(config, f"{model}.layers.{own.start - 1}.post_ffn_norm")
        for index in own:
            layer = Lfm3DecoderLayer(index, previous_norm=post_norm, config=config, prefix=f"{model}.layers.{index}")
            post_norm = layer.post_ffn_norm
            self.layers.append(layer)
        self.norm = _norm(config, f"{model}.embedding_norm")
        self.lm_head = self.make_head(config, f"{prefix}lm_head", norm=self.norm, post_norm=post_norm, is_tied=is_tied)

    def load_weights(self, weights: Iterable[tuple[str, LazyWeight]]) -> set[str]:
        """A gate has the released checkpoints' name, or that of transformers' module."""
        return super().load_weights(renamed(weights, {".self_attn.gate_proj.": ".self_attn.g_proj."}))


def _kind(index: int, hf: HFConfig) -> str:
    """From `layer_types`, or of four layers two with attention."""
    kind = layer_kind(index, hf, "conv", "sliding_attention")
    if kind is not None:
        return kind
    return "full_attention" if index % 4 == 2 else "sliding_attention" if index % 4 == 0 and index else "conv"


def _norm(config: BuildConfig, prefix: str, size: int | None = None) -> RMSNorm:
    """A norm of hidden states, or of heads of `size` numbers."""
    eps = float(config.hf.get("norm_eps", 1e-5))
    return RMSNorm(size or config.hf.hidden_size, eps=eps, config=config, prefix=prefix)


def _post_norm(config: BuildConfig, prefix: str) -> RMSNorm | None:
    return _norm(config, prefix) if config.hf.get("use_sandwich_norm", True) else None
