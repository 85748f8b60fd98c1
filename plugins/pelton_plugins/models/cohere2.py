"""Cohere 2 (Command R7B, Command A): attention and MLP side by side behind one layer norm; local layers turn neighbours of a head,
global ones nothing."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from pelton.layers.rope import Rope, get_rope
from pelton.model.build import BuildConfig
from pelton.model.loading import LazyWeight
from pelton_plugins.models.interleaved import Neighbours
from pelton_plugins.models.layer_norm import LayerNorm
from pelton_plugins.models.parallel import ParallelDecoderLayer
from pelton_plugins.models.qwen2 import window_of_layer
from pelton_plugins.models.stages import StagedDecoder

PATTERN = 4
"""Every so many layers one is global, where config.json does not say."""


def norm_of(config: BuildConfig, prefix: str) -> LayerNorm:
    return LayerNorm(config.hf.hidden_size, eps=config.hf.get("layer_norm_eps", 1e-5), config=config, prefix=prefix)


class Cohere2DecoderLayer(ParallelDecoderLayer):
    def __init__(self, index: int, *, config: BuildConfig, prefix: str) -> None:
        super().__init__(index, config=config, prefix=prefix)
        rope = self.rope(index, self.attn.head_dim, config)
        self.neighbours = None if rope is None else Neighbours(self.qkv_proj, self.attn.head_dim, rope, config)

    def heads(self, qkv: Tensor) -> Tensor:
        return qkv if self.neighbours is None else self.neighbours(qkv)

    def make_norm(self, config: BuildConfig, prefix: str) -> LayerNorm:
        return norm_of(config, prefix)

    def rope(self, index: int, head_dim: int, config: BuildConfig) -> Rope | None:
        return None if self.sliding_window(index, config) is None else get_rope(config, head_dim)

    def sliding_window(self, index: int, config: BuildConfig) -> int | None:
        hf = config.hf
        if hf.get("layer_types") is not None:
            return window_of_layer(index, config)
        window: int | None = hf.get("sliding_window")
        return window if (index + 1) % hf.get("sliding_window_pattern", PATTERN) else None


class Cohere2ForCausalLM(StagedDecoder):
    def __init__(self, *, config: BuildConfig, prefix: str = "") -> None:
        super().__init__(config=config)
        hf, model = config.hf, f"{prefix}model"
        is_tied = hf.get("tie_word_embeddings", True)
        self.embed_tokens = self.make_embedding(config, f"{model}.embed_tokens", is_tied=is_tied)
        self.layers = nn.ModuleList(
            Cohere2DecoderLayer(index, config=config, prefix=f"{model}.layers.{index}")
            for index in self.own_layers(config, f"{model}.layers")
        )
        self.norm = norm_of(config, f"{model}.norm")
        self.lm_head = self.make_head(config, f"{prefix}lm_head", norm=self.norm, is_tied=is_tied)
        self.logit_scale = float(hf.get("logit_scale", 0.0625))

    def compute_logits(self, hidden: tuple[Tensor, Tensor | None], rows: Tensor) -> Tensor:
        return super().compute_logits(hidden, rows) * self.logit_scale

    def load_weights(self, weights: Iterable[tuple[str, LazyWeight]]) -> set[str]:
        used = super().load_weights(weights)
        for layer in self.layers:
            assert isinstance(layer, Cohere2DecoderLayer)
            if layer.neighbours is not None:
                layer.neighbours.weights_loaded()
        return used
