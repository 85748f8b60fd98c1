"""The Triton backend of sparse attention over latents: an indexer's choice, and attention to the chosen ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pelton.attention.interface import (
    AttentionBackend,
    AttentionNeeds,
    BoundAttention,
    GraphSupport,
    IndexerParams,
    LatentParams,
)
from pelton.attention.metadata import BatchDescriptor, CommonMetadata
from pelton_backends.latents import INDEXER, sinks_of, sparse_refusals
from pelton_backends.triton.attention.indexer import choose_tokens
from pelton_backends.triton.attention.sparse_latent import sparse_latent_attention
from pelton_backends.triton.mla import DTYPES, size_refusals

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch import Tensor

MAX_INDEX_HEADS, MAX_INDEX_DIM = 128, 256
"""What one tile of the kernel holds."""


class TritonSparseBackend(AttentionBackend):
    """Latents of up to 512 + 128 numbers, indexers of up to 128 heads of 256 numbers, any block size."""

    name: ClassVar[str] = "triton_sparse"
    handles: ClassVar[frozenset[str]] = frozenset({"is_mla", "is_sparse", "attention_type", "has_sinks"})
    graph_support: ClassVar[GraphSupport] = GraphSupport.ALWAYS

    @classmethod
    def unsupported(cls, needs: AttentionNeeds, capability: tuple[int, int] | None = None) -> list[str]:
        reasons = sparse_refusals(needs, DTYPES)
        if needs.attention_type != INDEXER:
            return reasons + size_refusals(needs, capability)
        if needs.num_heads > MAX_INDEX_HEADS or needs.head_dim > MAX_INDEX_DIM:
            reasons.append(
                f"an indexer of {needs.num_heads} heads of {needs.head_dim} numbers, only up to {MAX_INDEX_HEADS} of {MAX_INDEX_DIM}"
            )
        return reasons + size_refusals(needs, capability)

    @classmethod
    def builder_needs(cls, needs: AttentionNeeds) -> Hashable:
        return needs.block_size  # steps are described by what they have in common

    def build(self, common: CommonMetadata, key: BatchDescriptor | None = None) -> CommonMetadata:
        return common

    def bind(self, layer: Any) -> BoundAttention:
        return TritonIndexer(layer) if layer.needs.attention_type == INDEXER else TritonSparseAttention(layer)


class TritonIndexer(BoundAttention):
    """An indexer's choice among a row's tokens."""

    layer: IndexerParams

    def __call__(self, query: Tensor, metadata: CommonMetadata, output: Tensor) -> None:
        """query [T, J, D of the indexer] -> output [T, K]"""
        choose_tokens(
            query, self.layer.weights, self.layer.cache, output, metadata.query_start_loc, metadata.seq_lens,
            metadata.block_table, max_seq_len=metadata.max_seq_len,
        )  # fmt: skip


class TritonSparseAttention(BoundAttention):
    """A layer's attention over the latents that were chosen for each token."""

    layer: LatentParams

    def __call__(self, query: Tensor, metadata: CommonMetadata, output: Tensor) -> None:
        """query [T, H, latent + rope] -> output [T, H, latent]"""
        layer = self.layer
        assert layer.chosen is not None, "the layer's needs say is_sparse"
        sparse_latent_attention(
            query, layer.cache, layer.chosen, output, metadata.query_start_loc, metadata.seq_lens, metadata.block_table,
            scale=layer.scale, latent_dim=layer.latent_dim, max_seq_len=metadata.max_seq_len,
            sinks=sinks_of(layer),
        )  # fmt: skip
