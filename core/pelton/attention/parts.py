"""Attention of a layer whose cache is spread over ranks, token by token (decode context parallelism).

Each rank has the same key heads and some query heads. The queries of all ranks are gathered, every rank attends with them to the
tokens that it keeps, and sends each rank the part for its heads; the parts are put together by their log-sum-exp. Which of the step's
keys and values a rank keeps is in its slots.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from pelton.attention.bound import BoundAttention
from pelton.errors import ConfigError, PluginError
from pelton.plugins import FIX_IT

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.attention.interface import AttentionBackend, AttentionNeeds
    from pelton.parallel.communicator import Communicator
    from pelton.parallel.context import ParallelContext

_NOTHING = -1e30
"""In place of the log-sum-exp of nothing, so that a row of padding, which sees nothing anywhere, is no NaN."""


def spread_needs(needs: AttentionNeeds, name: str, parallel: ParallelContext) -> AttentionNeeds:
    """Return what a layer asks of a backend where the ranks of `parallel.context` share its cache. Raises `ConfigError` if it is local."""
    group = parallel.context
    if group is None:
        return needs
    if needs.is_local:
        size, kind = (
            needs.sliding_window or needs.attention_chunk_size,
            "a window" if needs.sliding_window else "chunks",
        )
        raise ConfigError(
            f"decode_context_parallel_size is {group.size}, and {name} attends to {kind} of {size} tokens: what is "
            "kept does not grow with the context, so there is nothing to spread. Set it to 1."
        )
    return replace(
        needs, num_heads=needs.num_heads * group.size, decode_context_parallel=group.size, context_rank=group.rank
    )


def bind_layer(layer: Any, backend: AttentionBackend, parallel: ParallelContext) -> BoundAttention:
    """Return the attention of a layer with a cache: its backend's, or that over the ranks that share the cache."""
    bound = backend.bind(layer if parallel.context is None else _AllHeads(layer))
    if not isinstance(bound, BoundAttention):
        raise PluginError(f"bind of {type(backend)} gives {bound!r}, not a BoundAttention. {FIX_IT}")
    return bound if parallel.context is None else AttentionInParts(layer, bound, parallel.context)


class _AllHeads:
    """A layer as its backend knows it, with the query heads of all ranks."""

    def __init__(self, layer: Any) -> None:
        self._layer, self.num_heads = layer, layer.needs.num_heads

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


class AttentionInParts(BoundAttention):
    """A layer's attention over all ranks' tokens."""

    def __init__(self, layer: Any, part: BoundAttention, group: Communicator) -> None:
        super().__init__(layer)
        self._part, self._group = part, group

    def __call__(self, query: Tensor, metadata: Any, output: Tensor) -> None:
        num_tokens, num_heads, value_dim = output.shape
        ranks = self._group.size
        query = self._group.all_gather(query, dim=1)  # [T, ranks heads, D]
        found = torch.empty(*query.shape[:2], value_dim, dtype=output.dtype, device=output.device)
        lse = torch.empty(query.shape[:2], dtype=torch.float32, device=output.device)
        self._part.attend_part(query, metadata, found, lse)
        # For each rank its heads, and behind each head's numbers the logarithm.
        parts = torch.empty(ranks, num_tokens, num_heads, value_dim + 1, dtype=torch.float32, device=output.device)
        parts[..., :value_dim] = found.view(num_tokens, ranks, num_heads, value_dim).transpose(0, 1)
        parts[..., value_dim] = lse.view(num_tokens, ranks, num_heads).transpose(0, 1)
        parts = self._group.swap(parts)
        weights = parts[..., value_dim:].clamp(min=_NOTHING).softmax(dim=0)
        output.copy_((parts[..., :value_dim] * weights).sum(dim=0))
