"""EmbeddingGemma: Gemma 3's layers, in which tokens see those behind them, too."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pelton.attention.metadata import ForwardBatch
from pelton.errors import ConfigError
from pelton.layers.embedding import VocabEmbedding
from pelton.layers.encoder import WholeLinear
from pelton.layers.norm import RMSNorm
from pelton.layers.pooler import Pooler
from pelton.model.build import BuildConfig
from pelton.ops.interface import AddNorm, AddNormNeeds, AddNormTensors, NormSpec
from pelton_plugins.models.encoder_attention import EncoderAttention
from pelton_plugins.models.encoder_layers import EncoderModel, activation
from pelton_plugins.models.gemma3 import Gemma3DecoderLayer, is_local_layer, rope_of_kind
from pelton_plugins.models.moe import check_fields


class WideNorm(nn.Module):
    """Gemma's norm, x / rms(x) * (1 + w), float32 in and out, whatever the model's dtype."""

    def __init__(self, size: int, *, config: BuildConfig, prefix: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=torch.float32, device=config.device), requires_grad=False)
        config.weights.expect(f"{prefix}.weight", (size,), self.weight)
        spec = NormSpec(size=size, eps=config.hf.get("rms_norm_eps", 1e-6), unit_offset=True)
        needs = AddNormNeeds(dtype="float32", norm=spec)
        self.add_norm: AddNorm = config.ops.bind("add_norm", needs, AddNormTensors(self.weight))

    def forward(self, x: Tensor) -> Tensor:
        return self.add_norm(x.float(), None)[0]


class Gemma3EncoderLayer(nn.Module):
    def __init__(self, index: int, *, config: BuildConfig, prefix: str) -> None:
        super().__init__()
        hf, attention = config.hf, f"{prefix}.self_attn"
        size, inner = hf.hidden_size, hf.intermediate_size
        heads, kv_heads, head_dim = hf.num_attention_heads, hf.num_key_value_heads, hf.get("head_dim", 256)
        self.num_normed, self.head_dim = heads + kv_heads, head_dim
        has_window = is_local_layer(index, config, Gemma3DecoderLayer.global_every)
        bias = bool(hf.get("attention_bias"))
        self.input_norm = WideNorm(size, config=config, prefix=f"{prefix}.input_layernorm")
        rows = {
            f"{attention}.{name}_proj": count * head_dim
            for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        }
        self.qkv = WholeLinear(size, rows, config=config, bias=bias)
        self.q_norm, self.k_norm = (
            RMSNorm(head_dim, unit_offset=True, config=config, prefix=f"{attention}.{name}_norm") for name in "qk"
        )
        # transformers halves the window of a model that sees both ways, and counts the token itself.
        self.attn = EncoderAttention(
            heads, head_dim, num_kv_heads=kv_heads, scale=hf.get("query_pre_attn_scalar", 256) ** -0.5,
            rope=rope_of_kind(has_window, head_dim, config), sliding_window=hf.sliding_window // 2 if has_window else None,
            config=config, prefix=f"{attention}.attn",
        )  # fmt: skip
        self.out = WholeLinear(heads * head_dim, {f"{attention}.o_proj": size}, config=config, bias=bias)
        self.attention_norm = WideNorm(size, config=config, prefix=f"{prefix}.post_attention_layernorm")
        self.mlp_norm = WideNorm(size, config=config, prefix=f"{prefix}.pre_feedforward_layernorm")
        names = {f"{prefix}.mlp.{name}_proj": inner for name in ("gate", "up")}
        self.gate_up = WholeLinear(size, names, config=config, bias=False)
        self.activation = activation(hf.get("hidden_activation", "gelu_pytorch_tanh"))
        self.down = WholeLinear(inner, {f"{prefix}.mlp.down_proj": size}, config=config, bias=False)
        self.output_norm = WideNorm(size, config=config, prefix=f"{prefix}.post_feedforward_layernorm")

    def forward(self, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """hidden [T, H] float32"""
        qkv = self._normed_heads(self.qkv(self.input_norm(hidden)))
        hidden = hidden + self.attention_norm(self.out(self.attn(qkv, batch)))
        gate, up = self.gate_up(self.mlp_norm(hidden)).chunk(2, dim=-1)
        return hidden + self.output_norm(self.down(self.activation(gate) * up))

    def _normed_heads(self, qkv: Tensor) -> Tensor:
        heads = qkv.view(qkv.shape[0], -1, self.head_dim)
        num_queries = self.attn.num_heads
        query, key, value = heads.split(
            [num_queries, self.num_normed - num_queries, heads.shape[1] - self.num_normed], dim=1
        )
        return torch.cat([self.q_norm(query), self.k_norm(key), value], dim=1).flatten(1)


class Gemma3TextModel(EncoderModel):
    """Hidden states for vectors."""

    def __init__(self, *, config: BuildConfig, prefix: str = "") -> None:
        super().__init__(config=config)
        hf = config.hf
        if not hf.get("use_bidirectional_attention"):
            raise ConfigError(
                f"use_bidirectional_attention is {hf.get('use_bidirectional_attention')!r}; of Gemma 3 without a head EmbeddingGemma is "
                "served, which has true. Use a checkpoint of Gemma3ForCausalLM for vectors by tokens that see those before them alone."
            )
        check_fields(hf, attn_logit_softcapping=None)
        self.word = VocabEmbedding(
            hf.vocab_size, hf.hidden_size, config=config, prefix=f"{prefix}embed_tokens", scale=hf.hidden_size**0.5
        )
        self.layers = nn.ModuleList(
            Gemma3EncoderLayer(index, config=config, prefix=f"{prefix}layers.{index}")
            for index in range(hf.num_hidden_layers)
        )
        self.norm = WideNorm(hf.hidden_size, config=config, prefix=f"{prefix}norm")
        self.pooler = Pooler(config=config)

    def forward(self, batch: ForwardBatch) -> Tensor:
        hidden: Tensor = self.word(batch.input_ids).float()
        for layer in self.layers:
            hidden = layer(hidden, batch)
        return hidden

    def hidden_states(self, hidden: Tensor, rows: Tensor | None) -> Tensor:
        states: Tensor = self.norm(hidden if rows is None else hidden[rows])
        return states
