"""A decoder whose layers each get an input of their own, from an embedding beside the vocabulary's, and whose last layers read the keys
and values of earlier ones: Gemma 3n and 4.

Between layers every rank has the whole hidden states: the embeddings' parts are added up before the first layer, each layer adds up its
own sums, and of the ranks the first alone gives the head something. Small matrices are whole on each. The first stage makes the inputs
of all layers, and each stage hands on those of the layers behind it. T tokens, H hidden size, L layers, E numbers of a layer's input.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from pelton.attention.metadata import ForwardBatch
from pelton.errors import ConfigError
from pelton.layers.embedding import VocabEmbedding
from pelton.layers.linear import ShardLinear
from pelton.layers.norm import RMSNorm
from pelton.model.build import BuildConfig
from pelton_plugins.models.normed import whole_shard
from pelton_plugins.models.stages import StagedDecoder


class OwnInputsDecoder(StagedDecoder):
    """A subclass has the layers: each is called as `layer(x, own_input, batch)`, and has an `index`."""

    def make_inputs(self, config: BuildConfig, model: str, size: int) -> None:
        """Make the embeddings. size: E; 0 where layers have no inputs of their own."""
        hf, stages = config.hf, config.parallel.stages
        is_tied = bool(hf.get("tie_word_embeddings", True))
        self.embed_tokens = self.make_embedding(
            config, f"{model}.embed_tokens", is_tied=is_tied, scale=hf.hidden_size**0.5
        )
        self.num_layers, self.input_size = hf.num_hidden_layers, size
        self.gives_nothing = config.parallel.rank > 0
        parts = ("embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm")
        if stages is not None and stages.rank > 0:
            config.weights.ignore(rf"{re.escape(model)}\.({'|'.join(parts)})\..*")
            return
        all_inputs = self.num_layers * size
        self.all_reduce = config.all_reduce(hf.hidden_size + all_inputs)
        if not size:
            return
        num_ids = hf.vocab_size_per_layer_input
        self.num_own_ids = num_ids if num_ids < hf.vocab_size else None
        self.embed_tokens_per_layer = VocabEmbedding(
            num_ids, all_inputs, scale=size**0.5, config=config, prefix=f"{model}.embed_tokens_per_layer"
        )
        self.per_layer_model_projection = whole_matrix(
            hf.hidden_size, all_inputs, config=config, prefix=f"{model}.per_layer_model_projection"
        )
        self.per_layer_projection_norm = RMSNorm(size, config=config, prefix=f"{model}.per_layer_projection_norm")

    def entered(self, hidden: Tensor) -> Tensor:
        """Return what the first layer reads: [.., T, H] of the embedding [T, H]."""
        return hidden

    def left(self, x: Tensor) -> Tensor:
        """Return what the head reads, [T, H], of the last layer's result."""
        return x

    shape_before: tuple[int, ...] = ()
    """Dimensions of what layers give each other before T and H."""

    def forward(self, batch: ForwardBatch) -> tuple[Tensor, Tensor | None]:
        layers: list[Any] = list(self.layers)
        first, num_own = layers[0].index, len(layers)
        inputs: Tensor | None = None
        if self._stage == 0:
            hidden, inputs = self._embedded(batch.input_ids)
            x = self.entered(hidden)
        else:
            num_tokens, hidden_size = len(batch.input_ids), self._made_of[1]
            x = self._received(batch, *self.shape_before, num_tokens, hidden_size)
            if self.input_size:
                inputs = self._received(batch, num_tokens, self.num_layers - first, self.input_size)
        for layer in layers:
            x = layer(x, None if inputs is None else inputs[:, layer.index - first], batch)
        if self._stage < self._last:
            assert self._stages is not None
            self._stages.send(x.contiguous(), self._stage + 1)
            if inputs is not None:
                self._stages.send(inputs[:, num_own:].contiguous(), self._stage + 1)
            return x.reshape(-1, *x.shape[-2:])[0], None
        x = self.left(x)
        return x.zero_() if self.gives_nothing else x, None

    def _embedded(self, input_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """[T, H], and the inputs of all layers [T, L, E]: half of the token alone, half of its embedding."""
        hidden = self.embed_tokens(input_ids)
        if not self.input_size:
            return hidden if self.all_reduce is None else self.all_reduce(hidden), None
        known = input_ids if self.num_own_ids is None else torch.where(input_ids < self.num_own_ids, input_ids, 0)
        of_tokens = self.embed_tokens_per_layer(known)
        if self.all_reduce is not None:
            sizes = hidden.shape[1], of_tokens.shape[1]
            hidden, of_tokens = self.all_reduce(torch.cat([hidden, of_tokens], dim=1)).split(sizes, dim=1)
            hidden = hidden.contiguous()
        shape = (-1, self.input_size)
        projected = self.per_layer_model_projection(hidden) * hidden.shape[1] ** -0.5
        of_hidden = self.per_layer_projection_norm(projected.unflatten(1, shape))
        return hidden, (of_hidden + of_tokens.unflatten(1, shape)) * 2.0**-0.5


def whole_matrix(columns: int, rows: int, *, config: BuildConfig, prefix: str) -> ShardLinear:
    """A matrix that every rank has all of."""
    return ShardLinear(whole_shard(prefix, rows, columns), config=config)


def cache_source(index: int, config: BuildConfig) -> int | None:
    """Return the layer whose keys and values this one reads: the last of its kind before those that share. None: its own."""
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


def num_joined(config: BuildConfig) -> int:
    """Return how many layers, the last ones, have to be in one stage: those that share a cache, and what they share, stay together."""
    total = config.hf.num_hidden_layers
    sources = [source for index in range(total) if (source := cache_source(index, config)) is not None]
    return total - min(sources, default=total)
