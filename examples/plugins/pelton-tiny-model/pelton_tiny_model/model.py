"""A decoder of its own shape, built from Pelton's layers: no other model's code is used.

config.json names the architecture `TinyForCausalLM`. Weights have Llama's names, without `model.` in front.
T tokens of the step, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from pelton.attention.layer import AttentionLayer
from pelton.attention.metadata import ForwardBatch
from pelton.layers.embedding import LMHead, VocabEmbedding
from pelton.layers.linear import MergedGateUp, QKVLinear, RowParallelLinear
from pelton.layers.norm import RMSNorm
from pelton.layers.rope import get_rope
from pelton.model.build import BuildConfig
from pelton.model.loading import LazyWeight


class TinyBlock(nn.Module):
    """Attention, then a gated MLP. Each sub-layer's norm is part of the product that reads it."""

    def __init__(self, *, config: BuildConfig, prefix: str) -> None:
        super().__init__()
        hf = config.hf
        size, num_heads = hf.hidden_size, hf.num_attention_heads
        head_dim = size // num_heads
        self.attn_norm = RMSNorm(size, config=config, prefix=f"{prefix}.attn_norm")
        self.qkv = QKVLinear(
            size,
            num_heads,
            hf.num_key_value_heads,
            head_dim,
            norm=self.attn_norm,
            bias=False,
            config=config,
            prefix=prefix,
        )
        self.attn = AttentionLayer(
            self.qkv.num_heads,
            self.qkv.num_kv_heads,
            head_dim,
            rope=get_rope(config, head_dim),
            config=config,
            prefix=prefix,
        )
        self.out = RowParallelLinear(num_heads * head_dim, size, bias=False, config=config, prefix=f"{prefix}.o_proj")
        self.mlp_norm = RMSNorm(size, config=config, prefix=f"{prefix}.mlp_norm")
        self.gate_up = MergedGateUp(
            size, hf.intermediate_size, activation="silu", norm=self.mlp_norm, bias=False, config=config, prefix=prefix
        )
        self.down = RowParallelLinear(
            hf.intermediate_size, size, bias=False, config=config, prefix=f"{prefix}.down_proj"
        )

    def forward(self, hidden: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """(the last sub-layer's output, residual), each [T, H]; who reads them adds them."""
        qkv, residual = self.qkv(hidden, residual)
        gated, residual = self.gate_up(self.out(self.attn(qkv, batch)), residual)
        return self.down(gated), residual


class TinyForCausalLM(nn.Module):
    """What `pelton.model.interface.CausalLM` asks for: forward, compute_logits, load_weights."""

    def __init__(self, *, config: BuildConfig, prefix: str = "") -> None:
        super().__init__()
        hf = config.hf
        self.weights = config.weights
        self.embed = VocabEmbedding(hf.vocab_size, hf.hidden_size, config=config, prefix=f"{prefix}embed_tokens")
        self.blocks = nn.ModuleList(
            TinyBlock(config=config, prefix=f"{prefix}blocks.{index}") for index in range(hf.num_hidden_layers)
        )
        self.norm = RMSNorm(hf.hidden_size, config=config, prefix=f"{prefix}norm")
        self.head = LMHead(norm=self.norm, embedding=self.embed, tied=True, config=config, prefix=f"{prefix}lm_head")

    def forward(self, batch: ForwardBatch) -> tuple[Tensor, Tensor | None]:
        hidden, residual = self.embed(batch.input_ids), None
        for block in self.blocks:
            hidden, residual = block(hidden, residual, batch)
        return hidden, residual

    def compute_logits(self, hidden: tuple[Tensor, Tensor | None], rows: Tensor) -> Tensor:
        logits: Tensor = self.head(*hidden, rows)
        return logits

    def load_weights(self, weights: Iterable[tuple[str, LazyWeight]]) -> set[str]:
        return self.weights.load(weights)
