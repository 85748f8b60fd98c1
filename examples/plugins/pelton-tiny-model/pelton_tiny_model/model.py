"""A decoder of its own shape, built from Pelton's layers: no other model's code is used.

config.json names the architecture `TinyForCausalLM`. Weights have Llama's names, without `model.` in front.
T tokens of the step, H hidden size.
"""

from __future__ import annotations

from torch import Tensor, nn

from pelton.attention.metadata import ForwardBatch
from pelton.layers.attention import AttentionLayer
from pelton.layers.decoder import Decoder
from pelton.layers.embedding import LMHead, VocabEmbedding
from pelton.layers.linear import MergedGateUp, QKVLinear, RowParallelLinear
from pelton.layers.norm import RMSNorm
from pelton.layers.rope import get_rope
from pelton.model.build import BuildConfig


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


class TinyForCausalLM(Decoder):
    """Parts of the model; `Decoder` runs them. A model that is not a chain of layers has the methods of
    `pelton.model.interface.CausalLM` itself."""

    def __init__(self, *, config: BuildConfig, prefix: str = "") -> None:
        super().__init__(config=config)
        hf = config.hf
        self.embed_tokens = VocabEmbedding(hf.vocab_size, hf.hidden_size, config=config, prefix=f"{prefix}embed_tokens")
        self.layers = nn.ModuleList(
            TinyBlock(config=config, prefix=f"{prefix}blocks.{index}") for index in range(hf.num_hidden_layers)
        )
        self.norm = RMSNorm(hf.hidden_size, config=config, prefix=f"{prefix}norm")
        self.lm_head = LMHead(
            norm=self.norm, embedding=self.embed_tokens, tied=True, config=config, prefix=f"{prefix}lm_head"
        )
