"""Bamba: most layers are Mamba-2's, some have attention with half of each head turned; a gated MLP follows each."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from pelton.attention.metadata import ForwardBatch
from pelton.errors import ConfigError
from pelton.layers.attention import AttentionLayer
from pelton.layers.decoder import Decoder
from pelton.layers.embedding import LMHead, VocabEmbedding
from pelton.layers.linear import MergedGateUp, QKVLinear, RowParallelLinear
from pelton.layers.norm import RMSNorm
from pelton.layers.rope import get_rope
from pelton.model.build import BuildConfig
from pelton_plugins.models.state_space import Mamba2Mixer, dt_limit


class BambaAttention(nn.Module):
    def __init__(self, norm: RMSNorm, *, config: BuildConfig, prefix: str) -> None:
        super().__init__()
        hf = config.hf
        size, num_heads, bias = hf.hidden_size, hf.num_attention_heads, bool(hf.get("attention_bias"))
        head_dim = hf.get("head_dim", size // num_heads)
        self.qkv_proj = QKVLinear(
            size, num_heads, hf.num_key_value_heads, head_dim, norm=norm, bias=bias, config=config, prefix=prefix
        )
        self.attn = AttentionLayer(
            self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads, head_dim, rope=get_rope(config, head_dim), config=config,
            prefix=f"{prefix}.attn",
        )  # fmt: skip
        self.o_proj = RowParallelLinear(num_heads * head_dim, size, bias=bias, config=config, prefix=f"{prefix}.o_proj")

    def forward(self, hidden: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        qkv, residual = self.qkv_proj(hidden, residual)
        return self.o_proj(self.attn(qkv, batch)), residual


class BambaDecoderLayer(nn.Module):
    def __init__(self, index: int, *, config: BuildConfig, prefix: str) -> None:
        super().__init__()
        hf = config.hf
        self.input_layernorm = RMSNorm(hf.hidden_size, config=config, prefix=f"{prefix}.input_layernorm")
        if _has_attention(index, config):
            self.mixer: Any = BambaAttention(self.input_layernorm, config=config, prefix=f"{prefix}.self_attn")
        else:
            self.mixer = Mamba2Mixer(
                num_heads=hf.mamba_n_heads, head_dim=_head_dim(config), state_size=hf.mamba_d_state,
                num_groups=hf.mamba_n_groups, conv_kernel=hf.mamba_d_conv, norm=self.input_layernorm,
                has_conv_bias=bool(hf.get("mamba_conv_bias", True)), has_bias=bool(hf.get("mamba_proj_bias")),
                dt_limit=dt_limit(config), config=config, prefix=f"{prefix}.mamba",
            )  # fmt: skip
        self.pre_ff_layernorm = RMSNorm(hf.hidden_size, config=config, prefix=f"{prefix}.pre_ff_layernorm")
        mlp, bias = f"{prefix}.feed_forward", bool(hf.get("mlp_bias"))
        self.gate_up_proj = MergedGateUp(
            hf.hidden_size, hf.intermediate_size, activation=hf.get("hidden_act", "silu"), norm=self.pre_ff_layernorm,
            bias=bias, config=config, prefix=mlp,
        )  # fmt: skip
        self.down_proj = RowParallelLinear(
            hf.intermediate_size, hf.hidden_size, bias=bias, config=config, prefix=f"{mlp}.down_proj"
        )

    def forward(self, hidden: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        activated, residual = self.gate_up_proj(*self.mixer(hidden, residual, batch))
        return self.down_proj(activated), residual


class BambaForCausalLM(Decoder):
    def __init__(self, *, config: BuildConfig, prefix: str = "") -> None:
        super().__init__(config=config)
        hf = config.hf
        self.embed_tokens = VocabEmbedding(
            hf.vocab_size, hf.hidden_size, config=config, prefix=f"{prefix}model.embed_tokens"
        )
        self.layers = nn.ModuleList(
            BambaDecoderLayer(index, config=config, prefix=f"{prefix}model.layers.{index}")
            for index in range(hf.num_hidden_layers)
        )
        self.norm = RMSNorm(hf.hidden_size, config=config, prefix=f"{prefix}model.final_layernorm")
        self.lm_head = LMHead(
            norm=self.norm, embedding=self.embed_tokens, tied=bool(hf.get("tie_word_embeddings")), config=config,
            prefix=f"{prefix}lm_head",
        )  # fmt: skip


def _has_attention(index: int, config: BuildConfig) -> bool:
    """From `layer_types`, or from the older list of layers."""
    types = config.hf.get("layer_types")
    if types is not None:
        return bool(types[index] in ("full_attention", "attention"))
    return index in (config.hf.get("attn_layer_indices") or ())


def _head_dim(config: BuildConfig) -> int:
    hf = config.hf
    inner, found = int(hf.mamba_expand * hf.hidden_size), hf.mamba_d_head
    size = inner // hf.mamba_n_heads if found == "auto" else int(found)
    if size * hf.mamba_n_heads != inner:
        raise ConfigError(
            f"mamba_n_heads is {hf.mamba_n_heads} and mamba_d_head {found}, which do not make {inner} numbers (mamba_expand times "
            "hidden_size). Fix config.json."
        )
    return size
