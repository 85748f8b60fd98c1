"""Gemma 4, text, dense: local and global layers with heads of their own sizes; the last layers read the keys and values of the
last layer of their kind that has some; each layer adds an input that an embedding of its own gives.

A layer returns the sum of all sub-layers so far, scaled, and no residual beside it. T tokens, H hidden size, E numbers of a
layer's own input.
"""

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
from pelton.ops.reference import ACTIVATIONS, rms_norm
from pelton_plugins.models.normed import NormedLinear, head_shard

_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "silu": "silu"}


class Gemma4Attention(nn.Module):
    def __init__(self, index: int, norm: RMSNorm, *, config: BuildConfig, prefix: str, model_prefix: str) -> None:
        super().__init__()
        hf = config.hf
        hidden_size, num_heads, bias = hf.hidden_size, hf.num_attention_heads, bool(hf.get("attention_bias"))
        self.head_dim = head_dim = _layer_field(config, index, "head_dim")
        num_kv_heads = _layer_field(config, index, "num_key_value_heads")
        source = _source(index, config)
        shares = None if source is None else f"{model_prefix}.layers.{source}.self_attn.attn"
        self.q_norm = RMSNorm(head_dim, config=config, prefix=f"{prefix}.q_norm")
        self.k_norm = self.v_norm = None
        self.qkv_proj: QKVLinear | NormedLinear
        if source is None:
            self.k_norm = RMSNorm(head_dim, config=config, prefix=f"{prefix}.k_norm")
            self.qkv_proj = QKVLinear(
                hidden_size, num_heads, num_kv_heads, head_dim, norm=norm, bias=bias, config=config, prefix=prefix
            )
        else:
            shard = head_shard(f"{prefix}.q_proj", num_heads, head_dim, hidden_size, config)
            self.qkv_proj = NormedLinear([shard], norm=norm, bias=bias, config=config)
        self.num_values = 0 if source is not None else num_kv_heads * head_dim
        layer_type = hf.layer_types[index]
        self.attn = AttentionLayer(
            num_heads, num_kv_heads, head_dim, scale=1.0, rope=get_rope(config, head_dim, layer_type=layer_type),
            sliding_window=hf.sliding_window if layer_type == "sliding_attention" else None,
            q_norm=self.q_norm, k_norm=self.k_norm, shares=shares, config=config, prefix=f"{prefix}.attn",
        )  # fmt: skip
        self.o_proj = RowParallelLinear(
            num_heads * head_dim, hidden_size, bias=bias, config=config, prefix=f"{prefix}.o_proj"
        )

    def forward(self, hidden: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        qkv, residual = self.qkv_proj(hidden, None)
        if self.num_values:  # values are normed as well, without a weight
            values = qkv[:, -self.num_values :].unflatten(1, (-1, self.head_dim))
            values.copy_(rms_norm(values, values.new_ones(self.head_dim), self.q_norm.spec))
        return self.o_proj(self.attn(qkv, batch)), residual


class Gemma4DecoderLayer(nn.Module):
    def __init__(self, index: int, *, config: BuildConfig, prefix: str, model_prefix: str) -> None:
        super().__init__()
        hf = config.hf
        hidden_size, mlp = hf.hidden_size, f"{prefix}.mlp"
        self.index = index

        def norm(name: str) -> RMSNorm:
            return RMSNorm(hidden_size, config=config, prefix=f"{prefix}.{name}")

        is_wide = hf.get("use_double_wide_mlp") and _source(index, config) is not None
        width, activation = hf.intermediate_size * (2 if is_wide else 1), hf.get("hidden_activation")
        self.input_layernorm = norm("input_layernorm")
        self.self_attn = Gemma4Attention(
            index, self.input_layernorm, config=config, prefix=f"{prefix}.self_attn", model_prefix=model_prefix
        )
        self.post_attention_layernorm = norm("post_attention_layernorm")
        self.pre_feedforward_layernorm = norm("pre_feedforward_layernorm")
        self.gate_up_proj = MergedGateUp(
            hidden_size, width, activation=activation, norm=self.pre_feedforward_layernorm,
            post_norm=self.post_attention_layernorm, config=config, prefix=mlp,
        )  # fmt: skip
        self.down_proj = RowParallelLinear(width, hidden_size, config=config, prefix=f"{mlp}.down_proj")
        self.post_feedforward_layernorm = norm("post_feedforward_layernorm")
        self.layer_scalar = nn.Parameter(config.empty(1), requires_grad=False)
        config.weights.expect(f"{prefix}.layer_scalar", (1,), self.layer_scalar)
        input_size = hf.get("hidden_size_per_layer_input", 0)
        self.has_own_input = bool(input_size)
        if input_size:
            self.activation = ACTIVATIONS[_ACTIVATIONS[activation]]
            self.per_layer_input_gate = RowParallelLinear(
                hidden_size, input_size, config=config, prefix=f"{prefix}.per_layer_input_gate"
            )
            self.per_layer_projection = RowParallelLinear(
                input_size, hidden_size, config=config, prefix=f"{prefix}.per_layer_projection"
            )
            self.post_per_layer_input_norm = norm("post_per_layer_input_norm")

    def forward(self, hidden: Tensor, own_input: Tensor | None, batch: ForwardBatch) -> Tensor:
        """hidden [T, H], own_input [T, E] -> [T, H]"""
        attended, residual = self.self_attn(hidden, batch)
        activated, residual = self.gate_up_proj(attended, residual)
        hidden = residual + self.post_feedforward_layernorm(self.down_proj(activated))
        if own_input is not None and self.has_own_input:
            gate = self.activation(self.per_layer_input_gate(hidden)) * own_input
            hidden = hidden + self.post_per_layer_input_norm(self.per_layer_projection(gate))
        return hidden * self.layer_scalar


class Gemma4ForCausalLM(Decoder):
    def __init__(self, *, config: BuildConfig, prefix: str = "") -> None:
        super().__init__(config=config)
        hf, model = config.hf, f"{prefix}model"
        _check(config)
        self.embed_tokens = VocabEmbedding(
            hf.vocab_size, hf.hidden_size, scale=hf.hidden_size**0.5, config=config, prefix=f"{model}.embed_tokens"
        )
        self.input_size = hf.get("hidden_size_per_layer_input", 0)
        if self.input_size:
            all_inputs = hf.num_hidden_layers * self.input_size
            self.embed_tokens_per_layer = VocabEmbedding(
                hf.vocab_size_per_layer_input, all_inputs, scale=self.input_size**0.5,
                config=config, prefix=f"{model}.embed_tokens_per_layer",
            )  # fmt: skip
            self.per_layer_model_projection = RowParallelLinear(
                hf.hidden_size, all_inputs, config=config, prefix=f"{model}.per_layer_model_projection"
            )
            self.per_layer_projection_norm = RMSNorm(
                self.input_size, config=config, prefix=f"{model}.per_layer_projection_norm"
            )
        self.layers = nn.ModuleList(
            Gemma4DecoderLayer(index, config=config, prefix=f"{model}.layers.{index}", model_prefix=model)
            for index in range(hf.num_hidden_layers)
        )
        self.norm = RMSNorm(hf.hidden_size, config=config, prefix=f"{model}.norm")
        self.lm_head = LMHead(
            norm=self.norm, embedding=self.embed_tokens, tied=hf.get("tie_word_embeddings", True),
            soft_cap=hf.get("final_logit_softcapping"), config=config, prefix=f"{prefix}lm_head",
        )  # fmt: skip

    def forward(self, batch: ForwardBatch) -> tuple[Tensor, Tensor | None]:
        hidden = self.embed_tokens(batch.input_ids)
        inputs = self._own_inputs(batch.input_ids, hidden) if self.input_size else None
        for layer in self.layers:
            assert isinstance(layer, Gemma4DecoderLayer)
            hidden = layer(hidden, None if inputs is None else inputs[:, layer.index], batch)
        return hidden, None

    def _own_inputs(self, input_ids: Tensor, hidden: Tensor) -> Tensor:
        """[T, layers, E]: half of the token alone, half of its embedding."""
        shape = (-1, self.input_size)
        projected = self.per_layer_model_projection(hidden) * hidden.shape[1] ** -0.5
        of_hidden = self.per_layer_projection_norm(projected.unflatten(1, shape))
        return (of_hidden + self.embed_tokens_per_layer(input_ids).unflatten(1, shape)) * 2.0**-0.5


def _layer_field(config: BuildConfig, index: int, name: str) -> Any:
    """Return the field for one layer: global layers may have heads of another size and number than local ones."""
    hf = config.hf
    own = (hf.get("per_layer_config") or {}).get(str(index), {})
    if name in own:
        return own[name]
    is_global = hf.layer_types[index] == "full_attention"
    other = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}[name]
    return (hf.get(other) if is_global else None) or getattr(hf, name)


def _source(index: int, config: BuildConfig) -> int | None:
    """The layer whose keys and values this one reads: the last of its kind before those that share. None: its own."""
    hf = config.hf
    num_own = hf.num_hidden_layers - hf.get("num_kv_shared_layers", 0)
    if index < num_own:
        return None
    sources = [other for other in range(num_own) if hf.layer_types[other] == hf.layer_types[index]]
    if not sources:
        raise ConfigError(
            f"Layer {index} shares keys and values (num_kv_shared_layers), and no layer before layer {num_own} is of its kind, "
            f"{hf.layer_types[index]}. Check config.json's layer_types."
        )
    return sources[-1]


def _check(config: BuildConfig) -> None:
    """Refuse what this file does not compute."""
    hf = config.hf
    for name in ("enable_moe_block", "attention_k_eq_v", "use_bidirectional_attention"):
        if hf.get(name):
            raise ConfigError(
                f"config.json has {name} {hf.get(name)!r}, which this version does not compute for Gemma 4. Use another checkpoint."
            )
    if config.parallel.size > 1:
        raise ConfigError("Gemma 4 runs on one rank in this version: set tensor_parallel_size to 1.")
