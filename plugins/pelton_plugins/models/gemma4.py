"""Gemma 4, text, dense: local and global layers with heads of their own sizes; the last layers read the keys and values of the
last layer of their kind that has some; each layer adds an input that an embedding of its own gives.

A layer returns the sum of all sub-layers so far, scaled, and no residual beside it. T tokens, H hidden size, E numbers of a
layer's own input.
"""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor, nn

from pelton.attention.metadata import ForwardBatch
from pelton.errors import ConfigError
from pelton.layers.attention import AttentionLayer
from pelton.layers.linear import MergedGateUp, RowParallelLinear, merged_shards, split_heads
from pelton.layers.norm import RMSNorm
from pelton.model.build import BuildConfig
from pelton.ops.reference import ACTIVATIONS, rms_norm
from pelton_plugins.models.gemma3 import rope_of_kind
from pelton_plugins.models.normed import NormedLinear
from pelton_plugins.models.own_inputs import OwnInputsDecoder, cache_source, num_joined, whole_matrix

_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "silu": "silu"}


class Gemma4Attention(nn.Module):
    def __init__(self, index: int, norm: RMSNorm, *, config: BuildConfig, prefix: str, model_prefix: str) -> None:
        super().__init__()
        hf = config.hf
        hidden_size, num_heads, bias = hf.hidden_size, hf.num_attention_heads, bool(hf.get("attention_bias"))
        self.head_dim = head_dim = _layer_field(config, index, "head_dim")
        num_kv_heads = _layer_field(config, index, "num_key_value_heads")
        source, parallel = cache_source(index, config), config.parallel
        shares = None if source is None else f"{model_prefix}.layers.{source}.self_attn.attn"
        self.q_norm = RMSNorm(head_dim, config=config, prefix=f"{prefix}.q_norm")
        self.k_norm = self.v_norm = None
        parallel.share(num_heads, "num_attention_heads")
        parallel.check_copies(num_kv_heads)
        heads = split_heads(num_heads, parallel.rank, parallel.size, "num_attention_heads")
        kv_heads = split_heads(num_kv_heads, parallel.rank, parallel.size, "num_key_value_heads")
        parts = [("q_proj", num_heads, heads)]
        if source is None:
            self.k_norm = RMSNorm(head_dim, config=config, prefix=f"{prefix}.k_norm")
            parts += [(name, num_kv_heads, kv_heads) for name in ("k_proj", "v_proj")]
        else:  # released checkpoints have these too, and nobody reads them
            config.weights.ignore(rf"{re.escape(prefix)}\.[kv]_(proj|norm)\..*")
        rows = [(name, count * head_dim, (own[0] * head_dim, own[1] * head_dim)) for name, count, own in parts]
        shards = merged_shards(prefix, None, rows, hidden_size)
        self.qkv_proj = NormedLinear(shards, norm=norm, bias=bias, is_summed=True, config=config)
        own_heads, own_kv_heads = heads[1] - heads[0], kv_heads[1] - kv_heads[0]
        self.num_values = 0 if source is not None else own_kv_heads * head_dim
        is_local = hf.layer_types[index] == "sliding_attention"
        self.attn = AttentionLayer(
            own_heads, own_kv_heads, head_dim, scale=1.0, rope=rope_of_kind(is_local, head_dim, config),
            sliding_window=hf.sliding_window if is_local else None,
            q_norm=self.q_norm, k_norm=self.k_norm, shares=shares, config=config, prefix=f"{prefix}.attn",
        )  # fmt: skip
        self.o_proj = RowParallelLinear(
            num_heads * head_dim, hidden_size, bias=bias, config=config, prefix=f"{prefix}.o_proj"
        )

    def forward(self, hidden: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """hidden [T, H], whole on every rank -> (this rank's part of the output, hidden)"""
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

        is_wide = hf.get("use_double_wide_mlp") and cache_source(index, config) is not None
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
        self.all_reduce = config.all_reduce(hidden_size)
        self.post_feedforward_layernorm = norm("post_feedforward_layernorm")
        self.layer_scalar = nn.Parameter(config.empty(1), requires_grad=False)
        config.weights.expect(f"{prefix}.layer_scalar", (1,), self.layer_scalar)
        input_size = hf.get("hidden_size_per_layer_input", 0)
        self.has_own_input = bool(input_size)
        if input_size:
            self.activation = ACTIVATIONS[_ACTIVATIONS[activation]]
            self.per_layer_input_gate = whole_matrix(
                hidden_size, input_size, config=config, prefix=f"{prefix}.per_layer_input_gate"
            )
            self.per_layer_projection = whole_matrix(
                input_size, hidden_size, config=config, prefix=f"{prefix}.per_layer_projection"
            )
            self.post_per_layer_input_norm = norm("post_per_layer_input_norm")

    def forward(self, hidden: Tensor, own_input: Tensor | None, batch: ForwardBatch) -> Tensor:
        """hidden [T, H], own_input [T, E] -> [T, H]"""
        attended, residual = self.self_attn(hidden, batch)
        activated, residual = self.gate_up_proj(attended, residual)
        output = self.down_proj(activated)
        if self.all_reduce is not None:
            output = self.all_reduce(output)
        hidden = residual + self.post_feedforward_layernorm(output)
        if own_input is not None and self.has_own_input:
            gate = self.activation(self.per_layer_input_gate(hidden)) * own_input
            hidden = hidden + self.post_per_layer_input_norm(self.per_layer_projection(gate))
        return hidden * self.layer_scalar


class Gemma4ForCausalLM(OwnInputsDecoder):
    def __init__(self, *, config: BuildConfig, prefix: str = "") -> None:
        super().__init__(config=config)
        hf, model = config.hf, f"{prefix}model"
        _check(config)
        self.make_inputs(config, model, hf.get("hidden_size_per_layer_input", 0))
        self.layers = nn.ModuleList(
            Gemma4DecoderLayer(index, config=config, prefix=f"{model}.layers.{index}", model_prefix=model)
            for index in self.own_layers(config, f"{model}.layers", num_joined=num_joined(config))
        )
        self.norm = RMSNorm(hf.hidden_size, config=config, prefix=f"{model}.norm")
        self.lm_head = self.make_head(
            config, f"{prefix}lm_head", norm=self.norm, is_tied=bool(hf.get("tie_word_embeddings", True)),
            soft_cap=hf.get("final_logit_softcapping"),
        )  # fmt: skip


def _layer_field(config: BuildConfig, index: int, name: str) -> Any:
    """Return the field for one layer: global layers may have heads of another size and number than local ones."""
    hf = config.hf
    own = (hf.get("per_layer_config") or {}).get(str(index), {})
    if name in own:
        return own[name]
    is_global = hf.layer_types[index] == "full_attention"
    other = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}[name]
    return (hf.get(other) if is_global else None) or getattr(hf, name)


def _check(config: BuildConfig) -> None:
    """Refuse what this file does not compute."""
    hf = config.hf
    for name in ("enable_moe_block", "attention_k_eq_v", "use_bidirectional_attention"):
        if hf.get(name):
            raise ConfigError(
                f"config.json has {name} {hf.get(name)!r}, which this version does not compute for Gemma 4. Use another checkpoint."
            )
