"""Gemma 3, text: five layers with a window to one without, each kind with its own rope; norms before and after
each sub-layer; scaled embeddings; GeGLU.

The norm after a sub-layer is applied by the layer that reads its output: attention's by the MLP of the same layer,
the MLP's by the next layer, the last one's by the head.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from pelton.attention.metadata import ForwardBatch
from pelton.layers.attention import AttentionLayer
from pelton.layers.linear import MergedGateUp, QKVLinear, RowParallelLinear
from pelton.layers.norm import RMSNorm
from pelton.layers.rope import Rope, get_rope
from pelton.model.build import BuildConfig
from pelton_plugins.models.moe import check_fields
from pelton_plugins.models.stages import StagedDecoder


class Gemma3DecoderLayer(nn.Module):
    has_head_norms: ClassVar[bool] = True
    global_every: ClassVar[int] = 6
    """Layers without a window, where config.json does not say."""

    def __init__(self, index: int, *, previous_norm: RMSNorm | None, config: BuildConfig, prefix: str) -> None:
        """previous_norm: the norm after the MLP of the layer below; None for the first layer."""
        super().__init__()
        hf = config.hf
        hidden_size, num_heads, head_dim = hf.hidden_size, hf.num_attention_heads, hf.get("head_dim", 256)
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        bias = bool(hf.get("attention_bias"))
        is_local = is_local_layer(index, config, self.global_every)

        def norm(name: str, size: int = hidden_size) -> RMSNorm:
            return RMSNorm(size, unit_offset=True, config=config, prefix=f"{prefix}.{name}")

        self.input_layernorm = norm("input_layernorm")
        self.qkv_proj = QKVLinear(
            hidden_size, num_heads, hf.num_key_value_heads, head_dim,
            norm=self.input_layernorm, post_norm=previous_norm, bias=bias, config=config, prefix=attention,
        )  # fmt: skip
        self.q_norm = self.k_norm = None
        if self.has_head_norms:
            self.q_norm, self.k_norm = norm("self_attn.q_norm", head_dim), norm("self_attn.k_norm", head_dim)
        self.attn = AttentionLayer(
            self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads, head_dim,
            scale=hf.get("query_pre_attn_scalar", 256) ** -0.5, soft_cap=hf.get("attn_logit_softcapping"),
            rope=self.rope(is_local, head_dim, config), sliding_window=hf.sliding_window if is_local else None,
            q_norm=self.q_norm, k_norm=self.k_norm, config=config, prefix=f"{attention}.attn",
        )  # fmt: skip
        self.o_proj = RowParallelLinear(
            num_heads * head_dim, hidden_size, bias=bias, config=config, prefix=f"{attention}.o_proj"
        )
        self.post_attention_layernorm = norm("post_attention_layernorm")
        self.pre_feedforward_layernorm = norm("pre_feedforward_layernorm")
        self.gate_up_proj = MergedGateUp(
            hidden_size, hf.intermediate_size, activation=hf.get("hidden_activation", "gelu_pytorch_tanh"),
            norm=self.pre_feedforward_layernorm, post_norm=self.post_attention_layernorm, config=config, prefix=mlp,
        )  # fmt: skip
        self.down_proj = RowParallelLinear(hf.intermediate_size, hidden_size, config=config, prefix=f"{mlp}.down_proj")
        self.post_feedforward_layernorm = norm("post_feedforward_layernorm")

    def forward(self, hidden: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        qkv, residual = self.qkv_proj(hidden, residual)
        hidden = self.o_proj(self.attn(qkv, batch))
        activated, residual = self.gate_up_proj(hidden, residual)
        return self.down_proj(activated), residual

    def rope(self, is_local: bool, head_dim: int, config: BuildConfig) -> Rope:
        return rope_of_kind(is_local, head_dim, config)


class Gemma3ForCausalLM(StagedDecoder):
    layer_class = Gemma3DecoderLayer

    def __init__(self, *, config: BuildConfig, prefix: str = "") -> None:
        super().__init__(config=config)
        hf, is_tied = config.hf, bool(config.hf.get("tie_word_embeddings", True))
        check_fields(hf, use_bidirectional_attention=False)
        self.embed_tokens = self.make_embedding(
            config, f"{prefix}model.embed_tokens", is_tied=is_tied, scale=hf.hidden_size**0.5
        )
        own = self.own_layers(config, f"{prefix}model.layers")
        self.layers = nn.ModuleList()
        post_norm: RMSNorm | None = None
        if own.start:  # of the layer below, which is another stage's
            name = f"{prefix}model.layers.{own.start - 1}.post_feedforward_layernorm"
            post_norm = self.norm_below = RMSNorm(hf.hidden_size, unit_offset=True, config=config, prefix=name)
        for index in own:
            layer = self.layer_class(
                index, previous_norm=post_norm, config=config, prefix=f"{prefix}model.layers.{index}"
            )
            post_norm = layer.post_feedforward_layernorm
            self.layers.append(layer)
        self.norm = RMSNorm(hf.hidden_size, unit_offset=True, config=config, prefix=f"{prefix}model.norm")
        self.lm_head = self.make_head(
            config, f"{prefix}lm_head", norm=self.norm, is_tied=is_tied, post_norm=post_norm,
            soft_cap=hf.get("final_logit_softcapping"),
        )  # fmt: skip


def is_local_layer(index: int, config: BuildConfig, global_every: int) -> bool:
    """From `layer_types`, or from the older pattern: every n-th layer is global."""
    layer_types = config.hf.get("layer_types")
    if layer_types is not None:
        return bool(layer_types[index] == "sliding_attention")
    pattern: int = config.hf.get("sliding_window_pattern", global_every)
    return (index + 1) % pattern != 0


def rope_of_kind(is_local: bool, head_dim: int, config: BuildConfig) -> Rope:
    """Local layers never have the checkpoint's `rope_scaling`, which the older form of config.json means for global ones."""
    layer_type = "sliding_attention" if is_local else "full_attention"
    if is_local:
        theta = config.hf.get("rope_local_base_freq", 10_000.0)
        return get_rope(config, head_dim, layer_type=layer_type, theta=theta, only_layer_type=True)
    theta = config.hf.get("rope_theta", 1_000_000.0)
    return get_rope(config, head_dim, layer_type=layer_type, theta=theta)
