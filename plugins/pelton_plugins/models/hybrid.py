"""Decoders whose layers are not all alike: parts that each read a norm, put together as a model's pattern says.

A part is called as a layer is, `part(hidden, residual, batch)`, and returns its bare output and the residual (`pelton.layers.decoder`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

from torch import Tensor, nn

from pelton.attention.metadata import ForwardBatch
from pelton.errors import ConfigError
from pelton.layers.attention import AttentionLayer
from pelton.layers.linear import MergedGateUp, QKVLinear, RowParallelLinear
from pelton.layers.norm import RMSNorm
from pelton.layers.rope import Rope
from pelton.model.build import BuildConfig, HFConfig
from pelton.model.loading import LazyWeight
from pelton_plugins.models.stages import StagedDecoder


class Parts(nn.Module):
    """A layer: its parts one after another. multiplier: of what each gives, before it is added to the residual."""

    def __init__(self, *parts: nn.Module, multiplier: float = 1.0) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.multiplier = multiplier

    def forward(self, hidden: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor | None]:
        for part in self.parts:
            hidden, residual = part(hidden, residual, batch)
            if self.multiplier != 1.0:
                hidden = hidden * self.multiplier
        return hidden, residual


class Attention(nn.Module):
    """Full attention over keys and values."""

    def __init__(
        self,
        norm: RMSNorm,
        *,
        head_dim: int,
        rope: Rope | None,
        config: BuildConfig,
        prefix: str,
        bias: bool = False,
        scale: float | None = None,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
        output: str = "o_proj",
        output_bias: bool | None = None,
        sliding_window: int | None = None,
    ) -> None:
        """output: the checkpoint's name of the last product; output_bias: as of the first when None. scale, sliding_window: as in
        `AttentionLayer`."""
        super().__init__()
        self.input_norm, self.q_norm, self.k_norm = norm, q_norm, k_norm
        size, num_heads = config.hf.hidden_size, config.hf.num_attention_heads
        num_kv_heads = config.hf.get("num_key_value_heads", num_heads)
        self.qkv_proj = QKVLinear(
            size, num_heads, num_kv_heads, head_dim, norm=norm, bias=bias, config=config, prefix=prefix
        )
        self.attn = AttentionLayer(
            self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads, head_dim, rope=rope, scale=scale,
            sliding_window=sliding_window, q_norm=q_norm, k_norm=k_norm, config=config, prefix=f"{prefix}.attn",
        )  # fmt: skip
        self.o_proj = RowParallelLinear(
            num_heads * head_dim,
            size,
            bias=bias if output_bias is None else output_bias,
            config=config,
            prefix=f"{prefix}.{output}",
        )

    def forward(self, hidden: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        qkv, residual = self.qkv_proj(hidden, residual)
        return self.o_proj(self.attn(qkv, batch)), residual


class MLP(nn.Module):
    """A gated MLP."""

    def __init__(
        self,
        norm: RMSNorm,
        width: int,
        *,
        config: BuildConfig,
        prefix: str,
        bias: bool = False,
        merged: str | None = None,
        names: tuple[str, str] = ("gate_proj", "up_proj"),
        down: str = "down_proj",
        post_norm: RMSNorm | None = None,
        activation: str | None = None,
    ) -> None:
        """merged: the checkpoint's tensor with gate and up, where it is one; names: of both, where they are two; down: of the last one.
        post_norm: of the sub-layer before, where it has one. activation: config.json's hidden_act when None."""
        super().__init__()
        hf, self.input_norm = config.hf, norm
        self.gate_up_proj = MergedGateUp(
            hf.hidden_size, width, activation=activation or hf.get("hidden_act", "silu"), norm=norm, post_norm=post_norm,
            bias=bias, merged=merged, names=names, config=config, prefix=prefix,
        )  # fmt: skip
        self.down_proj = RowParallelLinear(width, hf.hidden_size, bias=bias, config=config, prefix=f"{prefix}.{down}")

    def forward(self, hidden: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        activated, residual = self.gate_up_proj(hidden, residual)
        return self.down_proj(activated), residual


class HybridDecoder(StagedDecoder):
    """A subclass says what its layers are."""

    embedding_name: ClassVar[str] = "model.embed_tokens"
    layers_name: ClassVar[str] = "model.layers"
    norm_name: ClassVar[str] = "model.norm"

    def __init__(self, *, config: BuildConfig, prefix: str = "") -> None:
        super().__init__(config=config)
        hf, layers = config.hf, prefix + self.layers_name
        is_tied = self.is_tied(hf)
        self.embed_tokens = self.make_embedding(
            config, prefix + self.embedding_name, is_tied=is_tied, scale=self.embedding_scale(hf)
        )
        self.layers = nn.ModuleList(
            self.make_layer(index, config, f"{layers}.{index}")
            for index in self.own_layers(config, layers, total=self.num_layers(hf))
        )
        self.norm = self.make_norm(config, prefix + self.norm_name)
        self.lm_head = self.make_head(
            config, f"{prefix}lm_head", norm=self.norm, is_tied=is_tied, soft_cap=self.soft_cap(hf)
        )

    def make_layer(self, index: int, config: BuildConfig, prefix: str) -> nn.Module:
        raise NotImplementedError

    def make_norm(self, config: BuildConfig, prefix: str) -> RMSNorm:
        """A norm of hidden states."""
        return RMSNorm(config.hf.hidden_size, config=config, prefix=prefix)

    def num_layers(self, hf: HFConfig) -> int:
        return int(hf.num_hidden_layers)

    def is_tied(self, hf: HFConfig) -> bool:
        """Return whether the head is the embedding's matrix."""
        return bool(hf.get("tie_word_embeddings"))

    def embedding_scale(self, hf: HFConfig) -> float | None:
        return None

    def soft_cap(self, hf: HFConfig) -> float | None:
        """Largest logit there can be, which they are bent to; None without one."""
        return None


_OLD_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}


def layer_kind(index: int, hf: HFConfig, *others: str) -> str | None:
    """Return what config.json's `layer_types` says of a layer, by transformers' newer names; None without the field. others: kinds that the
    model has instead of linear_attention."""
    kinds, known = hf.get("layer_types"), ("full_attention", *(others or ("linear_attention",)))
    if kinds is None:
        return None
    if len(kinds) != hf.num_hidden_layers:
        raise ConfigError(
            f"layer_types has {len(kinds)} entries; expected one for each of {hf.num_hidden_layers} layers (num_hidden_layers). Fix "
            "config.json."
        )
    kind = _OLD_KINDS.get(kinds[index], kinds[index])
    if kind not in known:
        raise ConfigError(
            f"Layer {index} is {kind!r} in layer_types; this model has {', '.join(known)}. Fix config.json."
        )
    return str(kind)


def head_dim_of(hf: HFConfig) -> int:
    """Numbers of a head of attention."""
    return int(hf.get("head_dim", hf.hidden_size // hf.num_attention_heads))


def renamed(weights: Iterable[tuple[str, LazyWeight]], names: Mapping[str, str]) -> Iterator[tuple[str, LazyWeight]]:
    """Tensors of a checkpoint with some parts of their names replaced by those that layers here have."""
    for name, weight in weights:
        for old, new in names.items():
            name = name.replace(old, new)
        yield name, weight
