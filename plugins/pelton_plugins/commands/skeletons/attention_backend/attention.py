"""Attention over the paged cache, a row at a time: gather the row's blocks, mask, softmax.

N kv heads, G query heads a kv head, D head_dim, L context tokens, T tokens of the row.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from pelton.attention.interface import AttentionBackend, AttentionNeeds, AttentionParams, BoundAttention
from pelton.attention.metadata import BatchDescriptor, CommonMetadata
from torch import Tensor


class SkeletonBackend(AttentionBackend):
    """Causal attention of decoders, in float32 inside."""

    name: ClassVar[str] = "skeleton"
    handles: ClassVar[frozenset[str]] = frozenset()  # optional needs that it has read about; others are refused

    @classmethod
    def unsupported(cls, needs: AttentionNeeds, capability: tuple[int, int] | None = None) -> list[str]:
        return [] if needs.kv_dtype in ("auto", needs.dtype) else [f"kv dtype {needs.kv_dtype}, only the model's own"]

    def build(self, common: CommonMetadata, key: BatchDescriptor | None = None) -> CommonMetadata:
        return common

    def bind(self, layer: AttentionParams) -> BoundAttention:
        return SkeletonAttention(layer)


class SkeletonAttention(BoundAttention):
    """One layer's attention."""

    layer: AttentionParams

    def __call__(self, query: Tensor, metadata: CommonMetadata, output: Tensor) -> None:
        starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
        for row in range(metadata.num_reqs):
            tokens = slice(starts[row], starts[row + 1])
            if tokens.start < tokens.stop:  # rows of padding have none
                output[tokens] = self._attend(query[tokens], metadata.block_table[row], lengths[row])

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
