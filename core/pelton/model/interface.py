"""Interface of a model class: what the worker calls.

A model is a `torch.nn.Module` made as `Model(*, config, prefix="")`, where `config` is a
`pelton.model.build.BuildConfig`: dtype, device, parallel ranks, quantization, chosen ops and attention
backends, and `config.hf`, config.json's fields as attributes. Layers with a cache register themselves in
`config.cache_layers` (name -> `pelton.attention.cache_layer.CacheLayer`), from which the worker reads what they need of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from pelton.attention.metadata import ForwardBatch
from pelton.model.loading import LazyWeight

if TYPE_CHECKING:
    from torch import Tensor


@runtime_checkable
class CausalLM(Protocol):
    """T = tokens of the step (padded), n = rows that need logits, V = vocabulary. `pelton.layers.decoder.Decoder` has these
    for models that are a chain of layers."""

    def forward(self, batch: ForwardBatch) -> Any:
        """Final hidden states, opaque to the caller (usually (last sub-layer's output, residual), each [T, hidden]); the
        last add and norm are part of `compute_logits`."""
        ...

    def compute_logits(self, hidden: Any, rows: Tensor) -> Tensor:
        """Take what `forward` returned, and token indices `rows` [n] int64 -> logits [n, V] float32."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, LazyWeight]]) -> set[str]:
        """Copy what this rank keeps; returns the checkpoint names that were used. Raises `ConfigError` naming a missing or
        misshapen weight."""
        ...
