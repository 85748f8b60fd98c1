"""Layers of encoders: layer norms, lookup tables, activations, products with one, and stacks of layers. Every rank holds all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pelton.errors import ConfigError
from pelton.layers.encoder import WholeLinear
from pelton.layers.linear import ACTIVATION_NAMES, LinearModule
from pelton.ops.interface import AddNorm, AddNormNeeds, AddNormTensors, Embed, Linear, NormSpec

if TYPE_CHECKING:
    from pelton.attention.metadata import ForwardBatch
    from pelton.layers.pooler import Pooler
    from pelton.model.build import BuildConfig
    from pelton.model.interface import PooledRows
    from pelton.model.loading import LazyWeight
    from pelton_plugins.models.encoder_attention import EncoderAttention


class EncoderModel(nn.Module):
    """A model of hidden states for vectors: a subclass makes `pooler` and computes the states."""

    pooler: Pooler

    def __init__(self, *, config: BuildConfig) -> None:
        super().__init__()
        self.weights = config.weights

    def pool(self, hidden: Tensor, rows: PooledRows) -> list[Tensor | None]:
        found: list[Tensor | None] = self.pooler(self, hidden, rows)
        return found

    def hidden_states(self, hidden: Tensor, rows: Tensor | None) -> Tensor:
        """Return the states [n, H] of the tokens `rows` [n], or of all."""
        return hidden if rows is None else hidden[rows]

    def load_weights(self, weights: Iterable[tuple[str, LazyWeight]]) -> set[str]:
        return self.weights.load(weights)


class LayerNorm(nn.Module):
    """(x - mean) / std * w + b; with a residual, of their sum. Float32 in and out, whatever the model's dtype: what lies between
    products is rounded nowhere else."""

    def __init__(self, size: int, *, config: BuildConfig, prefix: str, eps: float, bias: bool = True) -> None:
        super().__init__()
        shape = (2, size) if bias else (size,)
        self.weight = nn.Parameter(torch.empty(shape, dtype=torch.float32, device=config.device), requires_grad=False)
        config.weights.expect(f"{prefix}.weight", (size,), self.weight[0] if bias else self.weight)
        if bias:
            config.weights.expect(f"{prefix}.bias", (size,), self.weight[1])
        needs = AddNormNeeds(dtype="float32", norm=NormSpec(size=size, eps=eps, is_centered=True))
        self.add_norm: AddNorm = config.ops.bind("add_norm", needs, AddNormTensors(self.weight))

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """residual: may be overwritten."""
        return self.add_norm(x.float(), residual)[0]


class Table(nn.Module):
    """Rows that are added by index: positions, token types."""

    def __init__(self, num_rows: int, size: int, *, config: BuildConfig, prefix: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(config.empty(num_rows, size), requires_grad=False)
        config.weights.expect(f"{prefix}.weight", (num_rows, size), self.weight)

    def forward(self, index: Tensor) -> Tensor:
        return F.embedding(index, self.weight)


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
    "tanh": torch.tanh,
}
"""By config.json's names."""


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """Raises `ConfigError` for one that there is not."""
    if name not in ACTIVATIONS:
        raise ConfigError(f"The activation is {name!r}; encoders have {', '.join(ACTIVATIONS)}.")
    return ACTIVATIONS[name]


class ActivatedLinear(WholeLinear):
    """A product and its activation, which the op itself computes where it can."""

    def __init__(
        self, in_features: int, rows: Mapping[str, int], *, config: BuildConfig, bias: bool, activation_name: str
    ) -> None:
        """rows: as of `WholeLinear`. activation_name: of config.json."""
        super().__init__(in_features, rows, config=config, bias=bias)
        self.activation = activation(activation_name)
        take = getattr(self.bare, "take_activation", None)
        self.is_activated: bool = take is not None and take(ACTIVATION_NAMES.get(activation_name))

    def forward(self, x: Tensor) -> Tensor:
        is_adapted = self.adapter is not None and self.adapter.is_used
        product = super().forward(x)
        return product if self.is_activated and not is_adapted else self.activation(product)


class Embeddings(Protocol):
    """Interface of what stands before `EncoderLayers`."""

    parts: EmbeddingParts

    def position_ids(self, batch: ForwardBatch) -> Tensor:
        """[T] int64, rows of `parts.positions`"""
        ...

    def __call__(self, batch: ForwardBatch) -> Tensor:
        """[T, H] float32"""
        ...


class LayerParts(NamedTuple):
    """The bound ops of a layer that norms behind each sub-layer, in the order in which they run; `up` has its activation.

    None: the layer does something else there.
    """

    attention: EncoderAttention
    qkv: Linear | None
    out: Linear | None
    up: Linear | None
    down: Linear | None
    out_norm: AddNorm
    down_norm: AddNorm


class EmbeddingParts(NamedTuple):
    """Tables and norm before the first layer: a row of each is summed. H hidden size."""

    words: Embed
    positions: Tensor  # [*, H]
    types: Tensor  # [*, H]
    norm: AddNorm


class EncoderLayers(nn.ModuleList):
    """Layers with `parts` (`LayerParts`), one after the other; or as one call, where their attention backend has `bind_layers`:

    a function from the layers' parts and those of the embeddings to a callable `(hidden, metadata) -> hidden`, which may overwrite
    `hidden`, or None. The callable's `fits(metadata)` says for which steps. Where its `embeds` is true it computes embeddings too, of
    tokens of type 0: `embed(input_ids, positions, metadata) -> hidden`.
    """

    _whole: Any = None
    _is_bound = False

    def forward(self, embeddings: Embeddings, batch: ForwardBatch) -> Tensor:
        whole, metadata = None, None
        if batch.attention:  # not where memory is measured
            first: Any = self[0]
            metadata = batch.attention[first.attn.metadata_index]
            whole = self._whole_layers(embeddings, metadata)
        if whole is None:
            hidden = embeddings(batch)
            for layer in self:
                hidden = layer(hidden, batch)
            return hidden
        if whole.embeds and batch.token_types is None:
            found: Tensor = whole.embed(batch.input_ids, embeddings.position_ids(batch), metadata)
        else:
            found = whole(embeddings(batch), metadata)
        return found

    def _whole_layers(self, embeddings: Embeddings, metadata: Any) -> Any:
        """Bound by the first step, when every layer has its backend. None: this step's layers run one after the other."""
        if not self._is_bound:
            layers: list[Any] = list(self)
            backend, self._is_bound = layers[0].attn.backend, True
            bind = getattr(backend, "bind_layers", None)
            if bind is not None and all(layer.attn.backend is backend for layer in layers):
                self._whole = bind([layer.parts for layer in layers], embeddings.parts)
        return (
            self._whole if self._whole is not None and self._whole.fits(metadata) and not self._is_adapted() else None
        )

    def _is_adapted(self) -> bool:
        """Return whether some row of the step has an adapter."""
        adapters = (module.adapter for module in self[0].children() if isinstance(module, LinearModule))
        return any(adapter is not None and adapter.is_used for adapter in adapters)
