"""A decoder with a sliding window on every layer, whose cache is of this package's own kind,
and whose sub-layers' outputs are scaled by an op of its own.

config.json names the architecture `WindowForCausalLM`, its `sliding_window` and `residual_multiplier` (1.0);
the weights have Llama's names, without `model.` in front. T tokens of the step, H hidden size.
"""

from __future__ import annotations

from torch import Tensor, nn

from pelton.attention.metadata import ForwardBatch
from pelton.kv_cache.spec import KVCacheSpec
from pelton.layers.attention import AttentionLayer
from pelton.layers.decoder import Decoder
from pelton.layers.embedding import LMHead, VocabEmbedding
from pelton.layers.linear import MergedGateUp, QKVLinear, RowParallelLinear
from pelton.layers.norm import RMSNorm
from pelton.layers.rope import get_rope
from pelton.model.build import BuildConfig
from pelton_window_model.cache import BatchedWindowSpec
from pelton_window_model.ops import BranchScale, BranchScaleNeeds, BranchScaleTensors
from pelton_window_model.settings import WindowModelSettings


class WindowAttention(AttentionLayer):
    """Attention over the last `sliding_window` tokens."""

    def __init__(self, *args: int, config: BuildConfig, **options: object) -> None:
        super().__init__(*args, config=config, **options)  # type: ignore[arg-type]
        self.release_blocks = config.plugin_settings("window_model", WindowModelSettings).release_blocks

    def cache_spec(self) -> KVCacheSpec:
        assert self.sliding_window is not None
        return BatchedWindowSpec(
            block_size=self.block_size, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, dtype=self.kv_dtype,
            sliding_window=self.sliding_window, release_blocks=self.release_blocks,
        )  # fmt: skip


class WindowBlock(nn.Module):
    """Attention, then a gated MLP. Each sub-layer's norm is part of the product that reads it."""

    def __init__(self, *, config: BuildConfig, prefix: str) -> None:
        super().__init__()
        hf = config.hf
        size, num_heads, inner = hf.hidden_size, hf.num_attention_heads, hf.intermediate_size
        head_dim = hf.get("head_dim", size // num_heads)
        self.attn_norm = RMSNorm(size, config=config, prefix=f"{prefix}.input_layernorm")
        self.qkv = QKVLinear(
            size, num_heads, hf.num_key_value_heads, head_dim, norm=self.attn_norm, bias=False, config=config,
            prefix=f"{prefix}.self_attn",
        )  # fmt: skip
        self.attn = WindowAttention(
            self.qkv.num_heads, self.qkv.num_kv_heads, head_dim, rope=get_rope(config, head_dim),
            sliding_window=hf.sliding_window, config=config, prefix=f"{prefix}.self_attn",
        )  # fmt: skip
        self.out = RowParallelLinear(
            num_heads * head_dim, size, bias=False, config=config, prefix=f"{prefix}.self_attn.o_proj"
        )
        self.mlp_norm = RMSNorm(size, config=config, prefix=f"{prefix}.post_attention_layernorm")
        self.gate_up = MergedGateUp(
            size, inner, activation="silu", norm=self.mlp_norm, bias=False, config=config, prefix=f"{prefix}.mlp"
        )
        self.down = RowParallelLinear(inner, size, bias=False, config=config, prefix=f"{prefix}.mlp.down_proj")
        needs = BranchScaleNeeds(dtype=config.dtype_name, size=size, scale=hf.get("residual_multiplier", 1.0))
        self.scale: BranchScale = config.ops.bind("branch_scale", needs, BranchScaleTensors(config.device))

    def forward(self, hidden: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """(the last sub-layer's output, residual), each [T, H]; who reads them adds them."""
        qkv, residual = self.qkv(hidden, residual)
        gated, residual = self.gate_up(self.scale(self.out(self.attn(qkv, batch))), residual)
        return self.scale(self.down(gated)), residual


class WindowForCausalLM(Decoder):
    """Parts of the model; `Decoder` runs them."""

    def __init__(self, *, config: BuildConfig, prefix: str = "") -> None:
        super().__init__(config=config)
        hf = config.hf
        self.embed_tokens = VocabEmbedding(hf.vocab_size, hf.hidden_size, config=config, prefix=f"{prefix}embed_tokens")
        self.layers = nn.ModuleList(
            WindowBlock(config=config, prefix=f"{prefix}layers.{index}") for index in range(hf.num_hidden_layers)
        )
        self.norm = RMSNorm(hf.hidden_size, config=config, prefix=f"{prefix}norm")
        self.lm_head = LMHead(
            norm=self.norm, embedding=self.embed_tokens, tied=True, config=config, prefix=f"{prefix}lm_head"
        )
