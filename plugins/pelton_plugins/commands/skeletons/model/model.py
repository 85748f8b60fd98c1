"""A decoder: attention and a gated MLP, with norms before them. T tokens of the step, H hidden size."""

from __future__ import annotations

from pelton.attention.metadata import ForwardBatch
from pelton.layers.attention import AttentionLayer
from pelton.layers.decoder import Decoder
from pelton.layers.embedding import LMHead, VocabEmbedding
from pelton.layers.linear import MergedGateUp, QKVLinear, RowParallelLinear
from pelton.layers.norm import RMSNorm
from pelton.layers.rope import get_rope
from pelton.model.build import BuildConfig
from torch import Tensor, nn


class SkeletonBlock(nn.Module):
    """One layer. Each sub-layer's norm is part of the product that reads it; `prefix` is its name in the checkpoint."""

    def __init__(self, *, config: BuildConfig, prefix: str) -> None:
        super().__init__()
        hf = config.hf
        size, num_heads, inner = hf.hidden_size, hf.num_attention_heads, hf.intermediate_size
        head_dim = size // num_heads
        self.attn_norm = RMSNorm(size, config=config, prefix=f"{prefix}.input_layernorm")
        self.qkv = QKVLinear(
            size, num_heads, hf.num_key_value_heads, head_dim, norm=self.attn_norm, config=config,
            prefix=f"{prefix}.self_attn",
        )  # fmt: skip
        self.attn = AttentionLayer(
            self.qkv.num_heads, self.qkv.num_kv_heads, head_dim, rope=get_rope(config, head_dim), config=config,
            prefix=f"{prefix}.self_attn",
        )  # fmt: skip
        self.out = RowParallelLinear(
            num_heads * head_dim, size, bias=False, config=config, prefix=f"{prefix}.self_attn.o_proj"
        )
        self.mlp_norm = RMSNorm(size, config=config, prefix=f"{prefix}.post_attention_layernorm")
        self.gate_up = MergedGateUp(
            size, inner, activation="silu", norm=self.mlp_norm, bias=False, config=config, prefix=f"{prefix}.mlp"
        )
        self.down = RowParallelLinear(inner, size, bias=False, config=config, prefix=f"{prefix}.mlp.down_proj")

    def forward(self, hidden: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """(the last sub-layer's output, residual), each [T, H]; who reads them adds them."""
        qkv, residual = self.qkv(hidden, residual)
        gated, residual = self.gate_up(self.out(self.attn(qkv, batch)), residual)
        return self.down(gated), residual


class SkeletonForCausalLM(Decoder):
    """Parts of the model; `Decoder` runs them."""

    def __init__(self, *, config: BuildConfig, prefix: str = "") -> None:
        super().__init__(config=config)
        hf = config.hf
        self.embed_tokens = VocabEmbedding(
            hf.vocab_size, hf.hidden_size, config=config, prefix=f"{prefix}model.embed_tokens"
        )
        self.layers = nn.ModuleList(
            SkeletonBlock(config=config, prefix=f"{prefix}model.layers.{index}")
            for index in range(hf.num_hidden_layers)
        )
        self.norm = RMSNorm(hf.hidden_size, config=config, prefix=f"{prefix}model.norm")
        self.lm_head = LMHead(
            norm=self.norm, embedding=self.embed_tokens, tied=True, config=config, prefix=f"{prefix}lm_head"
        )
