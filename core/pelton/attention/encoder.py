"""Interface of attention without a cache: in both directions, over one step's own tokens, each prompt whole in its step.

A layer registers itself in `config.cacheless_layers`; the worker binds it to a backend whose `group_id` is `NO_CACHE`.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Protocol

from pelton.attention.interface import AttentionBackend, AttentionNeeds

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.attention.selector import Selection

ENCODER = "encoder"
"""`AttentionNeeds.attention_type` of these layers."""


class EncoderParams(Protocol):
    """Facts of such a layer that a backend may know. All of it stays as it is."""

    num_heads: int
    num_kv_heads: int
    scale: float
    sliding_window: int | None
    """How many places away a token sees, on either side; None: all."""


class EncoderBackend(AttentionBackend):
    """A backend for layers without a cache: `build` once a step, `attend` once a layer."""

    @abstractmethod
    def attend(
        self, layer: EncoderParams, query: Tensor, key: Tensor, value: Tensor, metadata: Any, output: Tensor
    ) -> Tensor:
        """Attend within each row. query, output [T, num_heads, head_dim]; key, value [T, num_kv_heads, head_dim]; returns `output`.

        Rows of padding tokens may hold anything afterwards.
        """


class CachelessLayer(Protocol):
    """An attention layer without a cache, as the worker sees it."""

    layer_name: str
    needs: AttentionNeeds
    selection: Selection  # of the backend that describes steps to it

    def bind_backend(self, metadata_index: int, backend: AttentionBackend) -> None:
        """In a step, `ForwardBatch.attention[metadata_index]` is what `backend` built for it."""
        ...
