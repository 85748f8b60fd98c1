"""Attention over the paged cache, a row at a time: gather the row's blocks, mask, softmax.

N kv heads, G query heads a kv head, D head_dim, L context tokens, T tokens of the row.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from pelton.attention.interface import AttentionBackend, AttentionNeeds, AttentionParams, BoundAttention
from pelton.attention.metadata import BatchDescriptor, CommonMetadata
from pelton.config import EngineConfig
from pelton.config.plugin_settings import read_settings
from torch import Tensor

from pelton_skeleton.settings import SkeletonSettings


class SkeletonBackend(AttentionBackend):
    """Causal attention of decoders, in float32 inside."""

    name: ClassVar[str] = "skeleton"
    handles: ClassVar[frozenset[str]] = frozenset()  # optional needs that it has read about; others are refused
    settings: ClassVar[SkeletonSettings] = SkeletonSettings()

    @classmethod
    def configured(cls, config: EngineConfig) -> type[AttentionBackend]:
        """A class for each engine: two engines of one process may have other settings."""
        own = read_settings(config, "skeleton", SkeletonSettings)
        return type(cls.__name__, (cls,), {"settings": own})

    @classmethod
    def unsupported(cls, needs: AttentionNeeds, capability: tuple[int, int] | None = None) -> list[str]:
        return [] if needs.kv_dtype in ("auto", needs.dtype) else [f"kv dtype {needs.kv_dtype}, only the model's own"]

    def build(self, common: CommonMetadata, key: BatchDescriptor | None = None) -> CommonMetadata:
        return common

    def bind(self, layer: AttentionParams) -> BoundAttention:
        return SkeletonAttention(layer, most_scores=self.settings.scores_kib * 256)


class SkeletonAttention(BoundAttention):
    """One layer's attention."""

    layer: AttentionParams

    def __init__(self, layer: AttentionParams, most_scores: int) -> None:
        """most_scores: float32 numbers that may be there at once."""
        super().__init__(layer)
        self.most_scores = most_scores

    def __call__(self, query: Tensor, metadata: CommonMetadata, output: Tensor) -> None:
        starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
        for row in range(metadata.num_reqs):
            first, stop, length = starts[row], starts[row + 1], lengths[row]  # rows of padding have no tokens
            size = max(self.most_scores // (query.shape[1] * max(length, 1)), 1)
            for start in range(first, stop, size):
                end = min(start + size, stop)
                piece = self._attend(query[start:end], metadata.block_table[row], length - (stop - end))
                output[start:end] = piece

    def _attend(self, query: Tensor, table: Tensor, length: int) -> Tensor:
        """query [T, N G, D] -> the same shape; the last token is at position length - 1."""
        layer, block_size = self.layer, self.layer.k_cache.shape[1]
        num_tokens, num_heads, head_dim = query.shape
        position, context = torch.arange(length - num_tokens, length)[:, None], torch.arange(length)
        blocks, places = table[context // block_size].long(), context % block_size
        keys, values = layer.k_cache[blocks, places].float(), layer.v_cache[blocks, places].float()  # [L, N, D]
        grouped = query.view(num_tokens, layer.num_kv_heads, -1, head_dim).float()  # [T, N, G, D]
        scores = torch.einsum("tngd,lnd->tngl", grouped, keys) * layer.scale
        weights = scores.masked_fill((context > position)[:, None, None], -torch.inf).softmax(dim=-1)
        return torch.einsum("tngl,lnd->tngd", weights, values).reshape(num_tokens, num_heads, head_dim).to(query.dtype)
