"""dots3-note, text: layers with DeepSeek V3.2's indexer, with a sliding window, or neither, each kind with heads and latents of its own
sizes. Latents are normed and scaled, the part of a key that turns is normed, and each head's output has a gate.

A window is a choice of the last tokens: its layers attend as those with an indexer do, and keep all tokens.
"""

from __future__ import annotations

import re
from dataclasses import replace

import torch
from torch import Tensor, nn

from pelton.attention.metadata import ForwardBatch
from pelton.errors import ConfigError
from pelton.layers.norm import RMSNorm
from pelton.layers.rope import get_rope
from pelton.model.build import BuildConfig, HFConfig
from pelton.quantization.interface import LinearShard
from pelton_plugins.models.deepseek import DeepseekDecoderLayer, DeepseekV32ForCausalLM, MLAAttention
from pelton_plugins.models.experts import GatedMLP, SparseMoe
from pelton_plugins.models.indexer import Choice, Window
from pelton_plugins.models.moe import check_fields, grouped_routing
from pelton_plugins.models.normed import head_shard

_KINDS = ("indexed_attention", "sliding_attention", "full_attention")


class WindowedChoice(Choice):
    """A step's choice of indexers, and beside it that of windows."""

    def __init__(self, config: BuildConfig, layers: range) -> None:
        indexers = (index for index, kind in enumerate(config.hf.layer_types) if kind == "indexed_attention")
        super().__init__(config, layers, indexers=frozenset(indexers))
        has_window = any(config.hf.layer_types[index] == "sliding_attention" for index in layers)
        self.window = Window(config, config.hf.sliding_window) if has_window else None


class ScaledNorm(RMSNorm):
    """An RMS norm times the root of what part of the hidden size its size is."""

    def __init__(self, size: int, *, config: BuildConfig, prefix: str) -> None:
        super().__init__(size, config=config, prefix=prefix)
        self.factor = (config.hf.hidden_size / size) ** 0.5

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor


class Dots3NoteAttention(MLAAttention):
    scales_by_rope = False

    def make_latent_norm(self, size: int, config: BuildConfig, prefix: str) -> nn.Module:
        return ScaledNorm(size, config=config, prefix=prefix)

    def key_norm(self, config: BuildConfig, prefix: str) -> nn.Module:
        return RMSNorm(config.hf.qk_rope_head_dim, config=config, prefix=f"{prefix}.k_rope_only_layernorm")

    def gate_shards(self, config: BuildConfig, prefix: str) -> list[LinearShard]:
        return [head_shard(f"{prefix}.g_proj", config.hf.num_attention_heads, 1, config.hf.hidden_size, config)]


class Dots3NoteDecoderLayer(DeepseekDecoderLayer):
    def make_attention(self, index: int, choice: Choice | None, config: BuildConfig, prefix: str) -> nn.Module:
        assert isinstance(choice, WindowedChoice), "make_choice makes it"
        kind, own = config.hf.layer_types[index], replace(config, hf=layer_fields(index, config.hf))
        rope = get_rope(own, own.hf.head_dim, layer_type=kind)
        if rope.rotary_dim != own.hf.qk_rope_head_dim:
            raise ConfigError(
                f"rope_parameters turn {rope.rotary_dim} numbers of layer {index} ({kind}), whose qk_rope_head_dim is "
                f"{own.hf.qk_rope_head_dim}: give {kind} a partial_rotary_factor of qk_rope_head_dim / head_dim."
            )
        chosen = {"indexed_attention": choice, "sliding_attention": choice.window, "full_attention": None}[kind]
        return Dots3NoteAttention(
            self.input_layernorm, choice=chosen, rope=rope, has_indexer=index in choice.indexers, config=own, prefix=prefix
        )  # fmt: skip

    def make_experts(self, config: BuildConfig, prefix: str) -> SparseMoe:
        hf = config.hf
        activation = hf.get("hidden_act", "silu")
        shared = GatedMLP(
            hf.hidden_size, hf.get("shared_experts_intermediate_size", 1536) * hf.get("n_shared_experts", 1), activation=activation,
            config=config, prefix=f"{prefix}.shared_experts",
        )  # fmt: skip
        return SparseMoe(
            hf.hidden_size, hf.moe_intermediate_size, routing=grouped_routing(hf), activation=activation,
            norm=self.post_attention_layernorm, config=config, prefix=prefix, shared=shared, router_dtype=torch.float32,
        )  # fmt: skip


class Dots3NoteForCausalLM(DeepseekV32ForCausalLM):
    layer_class = Dots3NoteDecoderLayer
    window: Window | None = None

    def __init__(self, *, config: BuildConfig, prefix: str = "") -> None:
        check_fields(
            config.hf, attention_bias=False, mlp_bias=False, rope_interleave=True, indexer_rope_interleave=True
        )
        _check_kinds(config.hf)
        super().__init__(config=config, prefix=prefix)
        behind = config.hf.num_hidden_layers  # layers that predict further tokens
        config.weights.ignore(rf"{re.escape(prefix)}model\.(mtp|layers\.{behind})\..*")

    def make_choice(self, config: BuildConfig, layers: range) -> Choice:
        choice = WindowedChoice(config, layers)
        self.window = choice.window
        return choice

    def forward(self, batch: ForwardBatch) -> tuple[Tensor, Tensor | None]:
        if self.window is not None:
            self.window.choose(batch.positions)
        return super().forward(batch)


def layer_fields(index: int, hf: HFConfig) -> HFConfig:
    """Return config.json's fields as they are of one layer."""
    own = (hf.get("per_layer_config") or {}).get(str(index), {})
    return HFConfig({**{name: hf.get(name) for name in hf}, **own})


def _check_kinds(hf: HFConfig) -> None:
    """Refuse fields by the names of the first release, which transformers rewrites."""
    kinds, own = hf.get("layer_types"), hf.get("per_layer_config") or {}
    if kinds is None or len(kinds) < hf.num_hidden_layers or not {*kinds} <= {*_KINDS}:
        raise ConfigError(
            f"layer_types is {kinds!r}; expected {', '.join(_KINDS)} for each of {hf.num_hidden_layers} layers, as transformers "
            "writes them."
        )
    for name in ("use_dsa", "use_sliding_window", "sliding_window_size", "swa_head_dim", "swa_rope_theta"):
        if hf.get(name) is not None:
            raise ConfigError(
                f"config.json has {name}, which transformers replaces by layer_types, per_layer_config and rope_parameters. Give these: "
                "load the config with transformers, and save it."
            )
    ropes, window = hf.get("rope_parameters") or {}, hf.get("sliding_window")
    for index, kind in enumerate(kinds):
        if not isinstance(ropes.get(kind), dict):
            raise ConfigError(f"rope_parameters is {ropes!r}; expected one set for {kind}, as transformers writes it.")
        if own.get(str(index), {}).get("sliding_window", window) != window:
            raise ConfigError(
                f"per_layer_config has another sliding_window for layer {index}; this model has one for all, {window}. Use another "
                "checkpoint."
            )
