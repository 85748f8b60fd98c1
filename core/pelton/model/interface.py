"""Interface of a model class: what the worker calls.

A model is a `torch.nn.Module` made as `Model(*, config, prefix="")`, where `config` is a
`pelton.model.build.BuildConfig`: dtype, device, parallel ranks, quantization, chosen ops and attention
backends, and `config.hf`, config.json's fields as attributes. Layers with a cache register themselves in
`config.cache_layers` (name -> `pelton.attention.cache_layer.CacheLayer`), from which the worker reads what they need of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from pelton.attention.metadata import ForwardBatch
from pelton.model.loading import LazyWeight

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

    from pelton.messages.request import PoolingParams


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
        misshapen weight. A model that has `weights_loaded()` is called back when its ops have prepared them."""
        ...


@dataclass(slots=True, kw_only=True)
class PooledRows:
    """The rows of a step whose requests pool. R = rows of the step, r = those that pool; arrays are the host's."""

    params: Sequence[PoolingParams]
    slots: npt.NDArray[np.int64]  # [r] row of every `BatchState` tensor
    starts: npt.NDArray[np.int64]  # [r] each one's first token among those of the step
    counts: npt.NDArray[np.int64]  # [r] its tokens in this step
    num_before: npt.NDArray[np.int64]  # [r] its tokens that earlier steps computed: 0 unless the prompt is cut
    is_last: npt.NDArray[np.bool_]  # [r] whether this step computes its last token
    last_tokens: Tensor  # [r] int64, index of its last token in the step
    query_start_loc: Tensor  # [R + 1] int32, where each row of the step begins
    has_adapters: bool = False  # some row of the step has one


@runtime_checkable
class PoolingModel(Protocol):
    """A model whose requests get a vector or scores in place of tokens. It may have no cache, and no `compute_logits`."""

    def forward(self, batch: ForwardBatch) -> Any:
        """See `CausalLM`."""
        ...

    def pool(self, hidden: Any, rows: PooledRows) -> Sequence[Tensor | None]:
        """Take what `forward` returned; give what each row of `rows` asked for, of any shape, None for one that is not at its
        end. Nothing here may wait for the device; a row whose numbers are not finite fails by itself."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, LazyWeight]]) -> set[str]:
        """See `CausalLM`."""
        ...
