"""The Triton backend of multi-head latent attention: a kernel for rows of one token and of many, and another one for Hopper."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from pelton.attention.interface import AttentionBackend, AttentionNeeds, BoundAttention, GraphSupport, LatentParams
from pelton.attention.metadata import BatchDescriptor, CommonMetadata
from pelton_backends.latents import latent_refusals
from pelton_backends.triton.attention.latent import latent_attention
from pelton_backends.triton.attention.latent_hopper import HopperLatent

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = ("float16", "bfloat16", "float32")
MAX_LATENT, MAX_ROPE = 512, 128
"""Numbers: what one tile of the kernel holds."""


def size_refusals(needs: AttentionNeeds, capability: tuple[int, int] | None) -> list[str]:
    """Return why kernels over latents cannot serve `needs` on a device of this capability."""
    reasons = []
    if needs.is_mla and not (needs.latent_dim <= MAX_LATENT and needs.head_dim - needs.latent_dim <= MAX_ROPE):
        reasons.append(
            f"latents of {needs.latent_dim} + {needs.head_dim - needs.latent_dim} numbers, only up to {MAX_LATENT} + {MAX_ROPE}"
        )
    if capability is not None and capability < (8, 0):
        reasons.append(f"compute capability {capability[0]}.{capability[1]}, only 8.0 and later")
    return reasons


class TritonMLABackend(AttentionBackend):
    """Latents of up to 512 numbers with a rotated part of up to 128, any number of heads, any block size."""

    name: ClassVar[str] = "triton_mla"
    handles: ClassVar[frozenset[str]] = frozenset({"is_mla", "decode_context_parallel"})
    graph_support: ClassVar[GraphSupport] = GraphSupport.ALWAYS

    @classmethod
    def unsupported(cls, needs: AttentionNeeds, capability: tuple[int, int] | None = None) -> list[str]:
        return latent_refusals(needs, DTYPES) + size_refusals(needs, capability)

    def build(self, common: CommonMetadata, key: BatchDescriptor | None = None) -> CommonMetadata:
        return common

    def bind(self, layer: LatentParams) -> BoundAttention:
        return TritonMLAAttention(layer)


class TritonMLAAttention(BoundAttention):
    """A layer's attention by the kernels over latents."""

    layer: LatentParams

    def __init__(self, layer: LatentParams) -> None:
        super().__init__(layer)
        self._hopper: HopperLatent | None = None
        dtype: torch.dtype = getattr(torch, layer.needs.dtype)
        is_whole = layer.needs.decode_context_parallel == 1
        if is_whole and HopperLatent.serves(layer.cache, latent_dim=layer.latent_dim, dtype=dtype):
            self._hopper = HopperLatent(layer.cache, num_heads=layer.num_heads, scale=layer.scale)

    def __call__(self, query: Tensor, metadata: CommonMetadata, output: Tensor) -> None:
        """query [T, H, latent + rope] -> output [T, H, latent]"""
        layer = self.layer
        if self._hopper is not None and self._hopper.takes(query):
            self._hopper(
                query, output, metadata.query_start_loc, metadata.seq_lens, metadata.block_table,
                max_seq_len=metadata.max_seq_len,
            )  # fmt: skip
            return
        latent_attention(
            query, layer.cache, output, metadata.query_start_loc, metadata.seq_lens, metadata.block_table,
            scale=layer.scale, latent_dim=layer.latent_dim, max_seq_len=metadata.max_seq_len,
        )  # fmt: skip

    def attend_part(self, query: Tensor, metadata: CommonMetadata, output: Tensor, lse: Tensor) -> None:
        layer = self.layer
        latent_attention(
            query, layer.cache, output, metadata.query_start_loc, metadata.seq_lens, metadata.block_table,
            scale=layer.scale, latent_dim=layer.latent_dim, max_seq_len=metadata.max_seq_len, lse=lse,
            num_ranks=layer.needs.decode_context_parallel, rank=layer.needs.context_rank,
        )  # fmt: skip
