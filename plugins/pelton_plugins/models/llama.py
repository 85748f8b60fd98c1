"""Llama: the shape that most decoders have. Copy this file to add a model of your own.

A sub-layer returns its bare output; the residual is added by the layer that reads it next. T tokens, H hidden size.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from pelton.attention.metadata import ForwardBatch
from pelton.layers.attention import AttentionLayer
from pelton.layers.linear import MergedGateUp, QKVLinear, RowParallelLinear
from pelton.layers.norm import RMSNorm
from pelton.layers.rope import Rope, get_rope
from pelton.model.build import BuildConfig, HFConfig
from pelton_plugins.models.stages import StagedDecoder


class LlamaDecoderLayer(nn.Module):
    """Norm, attention, norm, MLP: five kernels in decode. Models of this shape override what follows `forward`."""

    merged_qkv: ClassVar[str | None] = None
    """Name of the checkpoint's tensor that has q, k and v below each other, where one has."""
    merged_gate_up: ClassVar[str | None] = None

    def __init__(self, index: int, *, config: BuildConfig, prefix: str, previous_norm: RMSNorm | None = None) -> None:
        """previous_norm: the norm behind the MLP of the layer below, where layers have one (`post_norms`)."""
        super().__init__()
        hf = config.hf
        hidden_size, num_heads = hf.hidden_size, hf.num_attention_heads
        head_dim = hf.get("head_dim", hidden_size // num_heads)
        attention = f"{prefix}.self_attn"

        self.input_layernorm = RMSNorm(hidden_size, config=config, prefix=f"{prefix}.input_layernorm")
        self.qkv_proj = QKVLinear(
            hidden_size, num_heads, hf.get("num_key_value_heads", num_heads), head_dim,
            norm=self.input_layernorm, post_norm=previous_norm, bias=self.qkv_bias(config), merged=self.merged_qkv,
            config=config, prefix=attention,
        )  # fmt: skip
        self.q_norm, self.k_norm = self.query_key_norms(head_dim, config, attention)
        self.attn = AttentionLayer(
            self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads, head_dim,
            rope=self.rope(index, head_dim, config), scale=self.attention_scale(config),
            sliding_window=self.sliding_window(index, config),
            attention_chunk_size=self.attention_chunk_size(index, config),
            q_norm=self.q_norm, k_norm=self.k_norm, sinks=self.sinks(config, attention), config=config,
            prefix=f"{attention}.attn",
        )  # fmt: skip
        self.o_proj = RowParallelLinear(
            num_heads * head_dim,
            hidden_size,
            bias=self.output_bias(config),
            config=config,
            prefix=f"{attention}.o_proj",
            ends_sub_layer=True,
        )
        self.post_attention_layernorm = RMSNorm(hidden_size, config=config, prefix=f"{prefix}.post_attention_layernorm")
        self.attention_post_norm, self.mlp_post_norm = self.post_norms(config, prefix)
        self.make_mlp(index, config, f"{prefix}.mlp")

    def forward(self, hidden: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """(last sub-layer's output, residual), each [T, H] -> the same after this layer."""
        qkv, residual = self.qkv_proj(hidden, residual)
        hidden = self.o_proj(self.attend(qkv, batch))
        activated, residual = self.gate_up_proj(hidden, residual)
        return self.down_proj(activated), residual

    def forward_tokens(
        self, hidden: Tensor, residual: Tensor | None, batch: ForwardBatch, tokens: Tensor
    ) -> tuple[Tensor, Tensor]:
        """`forward`, of whose result only these tokens are wanted: [n] int64 -> each [n, H]. The others' keys and values are written."""
        qkv, residual = self.qkv_proj(hidden, residual)
        attended, residual = self.attend(qkv, batch).index_select(0, tokens), residual.index_select(0, tokens)
        if not len(tokens):
            return residual, residual
        keep_adapters(batch, tokens)
        activated, residual = self.gate_up_proj(self.o_proj(attended), residual)
        return self.down_proj(activated), residual

    # What models of this shape differ in.

    def attend(self, qkv: Tensor, batch: ForwardBatch) -> Tensor:
        """Return attention's output of these rows, after what a model does to them first."""
        attended: Tensor = self.attn(qkv, batch)
        return attended

    def qkv_bias(self, config: BuildConfig) -> bool:
        return bool(config.hf.get("attention_bias"))

    def output_bias(self, config: BuildConfig) -> bool:
        return bool(config.hf.get("attention_bias"))

    def mlp_bias(self, config: BuildConfig) -> bool:
        return bool(config.hf.get("mlp_bias"))

    def sliding_window(self, index: int, config: BuildConfig) -> int | None:
        return None

    def attention_chunk_size(self, index: int, config: BuildConfig) -> int | None:
        return None

    def rope(self, index: int, head_dim: int, config: BuildConfig) -> Rope | None:
        return get_rope(config, head_dim)

    def attention_scale(self, config: BuildConfig) -> float | None:
        """Return what logits of attention are multiplied by; None: 1 / sqrt(head_dim)."""
        return None

    @classmethod
    def post_norms(cls, config: BuildConfig, prefix: str) -> tuple[RMSNorm | None, RMSNorm | None]:
        """Return norms of what attention and the MLP give, before it is added to the residual."""
        return None, None

    def sinks(self, config: BuildConfig, prefix: str) -> Tensor | None:
        """Logits [num_heads] of a key without a value, of this rank's heads (`self.qkv_proj.num_heads`)."""
        return None

    def make_mlp(self, index: int, config: BuildConfig, prefix: str) -> None:
        hf, bias = config.hf, self.mlp_bias(config)
        self.gate_up_proj = MergedGateUp(
            hf.hidden_size, hf.intermediate_size, activation=hf.get("hidden_act", "silu"),
            norm=self.post_attention_layernorm, post_norm=self.attention_post_norm, bias=bias,
            merged=self.merged_gate_up, config=config, prefix=prefix,
        )  # fmt: skip
        read_next = getattr(self.o_proj.linear, "read_next", None)
        if read_next is not None:
            read_next(dict(self.gate_up_proj.named_parameters()))
        self.down_proj = RowParallelLinear(
            hf.intermediate_size, hf.hidden_size, bias=bias, config=config, prefix=f"{prefix}.down_proj",
            ends_sub_layer=True,
        )  # fmt: skip

    def query_key_norms(self, head_dim: int, config: BuildConfig, prefix: str) -> tuple[RMSNorm | None, RMSNorm | None]:
        return None, None


class LlamaForCausalLM(StagedDecoder):
    """`layer_class` is all that a model of the same shape replaces."""

    layer_class: type[LlamaDecoderLayer] = LlamaDecoderLayer

    def __init__(self, *, config: BuildConfig, prefix: str = "") -> None:
        super().__init__(config=config)
        hf, is_tied = config.hf, bool(config.hf.get("tie_word_embeddings"))
        scale = self.embedding_scale(hf)
        self.embed_tokens = self.make_embedding(config, f"{prefix}model.embed_tokens", is_tied=is_tied, scale=scale)
        self.layers = nn.ModuleList()
        own = self.own_layers(config, f"{prefix}model.layers")
        post_norm: RMSNorm | None = None
        if own.start:  # of the layer below, which is another stage's
            _, post_norm = self.norms_below = self.layer_class.post_norms(
                config, f"{prefix}model.layers.{own.start - 1}"
            )
        for index in own:
            below = {} if post_norm is None else {"previous_norm": post_norm}
            layer = self.layer_class(index, config=config, prefix=f"{prefix}model.layers.{index}", **below)
            post_norm = layer.mlp_post_norm
            self.layers.append(layer)
        self.norm = RMSNorm(hf.hidden_size, config=config, prefix=f"{prefix}model.norm")
        self.lm_head = self.make_head(config, f"{prefix}lm_head", norm=self.norm, is_tied=is_tied, post_norm=post_norm)

    def embedding_scale(self, hf: HFConfig) -> float | None:
        return None

    @property
    def can_forward_tokens(self) -> bool:
        own = type(self), type(self.layers[-1])
        return own[0].forward is LlamaForCausalLM.forward and own[1].forward is LlamaDecoderLayer.forward

    @property
    def keeps_adapters(self) -> bool:
        """Return whether `forward_tokens` tells adapters which rows are left, as a layer of somebody else's may not."""
        return getattr(type(self.layers[-1]), "forward_tokens", None) is LlamaDecoderLayer.forward_tokens


def keep_adapters(batch: ForwardBatch, tokens: Tensor) -> None:
    """Tell the products that follow which adapters the rows have that are left."""
    if batch.adapter is not None and batch.adapter.is_used:
        batch.adapter.place(batch.adapter.token_slots[tokens])
