"""Multi-head latent attention over paged latents in torch, for CPU: gather the context, then two products.

Decode rows (one token each) are one gather and one batched call over the longest context; the other rows are one call each.
Masked places are never read from a block's stale part: they point at the row's first token, which all of it sees.

Shapes: R rows, H heads, D numbers of a latent and its key's rotated part, L context tokens, T tokens of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from pelton.attention.interface import AttentionBackend, AttentionNeeds, BoundAttention, GraphSupport, LatentParams
from pelton.attention.metadata import BatchDescriptor, CommonMetadata
from pelton_backends.latents import latent_refusals
from pelton_backends.sdpa.backend import DTYPES, log_sum_exp

if TYPE_CHECKING:
    from torch import Tensor


_SCORES, _LEAST_TOKENS = 1 << 20, 16
"""A call's scores stay in the processor's cache where it has so few, and tokens of a long prompt read no more context than they see; below
so many tokens it is the context that is read too often."""


@dataclass(slots=True)
class Gather:
    """Rows of one call: their tokens, and where the contexts lie."""

    tokens: slice  # of the step
    slots: Tensor  # [R, L] int64, the row's first where masked
    is_seen: Tensor  # [R, T of a row, L] bool


@dataclass(slots=True)
class SDPAMLAMetadata:
    """One step of one group; every layer makes the same calls."""

    common: CommonMetadata
    calls: list[Gather]


class SDPAMLABackend(AttentionBackend):
    """Handles latents of any size in float32, bfloat16 and float16."""

    name: ClassVar[str] = "sdpa_mla"
    handles: ClassVar[frozenset[str]] = frozenset({"is_mla", "decode_context_parallel"})
    graph_support: ClassVar[GraphSupport] = GraphSupport.NEVER

    @classmethod
    def unsupported(cls, needs: AttentionNeeds, capability: tuple[int, int] | None = None) -> list[str]:
        return latent_refusals(needs, DTYPES)

    def build(self, common: CommonMetadata, key: BatchDescriptor | None = None) -> SDPAMLAMetadata:
        starts, lengths = common.query_start_loc.tolist(), common.seq_lens.tolist()
        count = common.num_decode_rows
        calls = []
        if count:
            calls.append(self._gather(common.block_table[:count], [max(length, 1) for length in lengths[:count]], 1, 0))
        for row in range(count, common.num_reqs):
            num_tokens = starts[row + 1] - starts[row]
            first, table = lengths[row] - num_tokens, common.block_table[row : row + 1]
            most = max(_SCORES // (self.needs.num_heads * max(lengths[row], 1)), _LEAST_TOKENS)
            for start in range(0, num_tokens, most):  # none of padding
                count = min(most, num_tokens - start)
                calls.append(self._gather(table, [first + start + count], count, starts[row] + start))
        return SDPAMLAMetadata(common, calls)

    def _gather(self, table: Tensor, lengths: list[int], num_tokens: int, first_token: int) -> Gather:
        """Gather the latents of rows that have `num_tokens` tokens each, from `first_token` on."""
        size, length = self.needs.block_size, torch.tensor(lengths)[:, None]
        ranks, rank = self.needs.decode_context_parallel, self.needs.context_rank
        token = torch.arange(rank, max(max(lengths), rank + 1), ranks).expand(
            len(lengths), -1
        )  # those that are kept here
        is_context = token < length
        place = torch.where(is_context, token // ranks, 0)
        blocks = table.gather(1, place // size).long()
        slots = blocks * size + place % size
        position = length - num_tokens + torch.arange(num_tokens)  # [R, T]
        is_seen = is_context[:, None] & (token[:, None] <= position[:, :, None])
        return Gather(slice(first_token, first_token + num_tokens * len(lengths)), slots, is_seen)

    def bind(self, layer: LatentParams) -> BoundAttention:
        return SDPAMLAAttention(layer)


class SDPAMLAAttention(BoundAttention):
    """A layer's attention over its gathered latents."""

    layer: LatentParams

    def __call__(self, query: Tensor, metadata: SDPAMLAMetadata, output: Tensor) -> None:
        """query [tokens, H, D] -> output [tokens, H, latent_dim]"""
        self.attend_part(query, metadata, output, None)

    def attend_part(self, query: Tensor, metadata: SDPAMLAMetadata, output: Tensor, lse: Tensor | None) -> None:
        for call in metadata.calls:
            self.attend_to_all(query, call, output, lse)

    def attend_to_all(
        self, query: Tensor, call: Gather, output: Tensor, lse: Tensor | None = None, sinks: Tensor | None = None
    ) -> None:
        """Attend with the tokens of one call to all that they see. sinks [H]: see `with_sinks`."""
        layer = self.layer
        latents = layer.cache.view(-1, layer.head_dim)
        rows, num_seen = call.slots.shape
        context = latents.index_select(0, call.slots.flatten()).view(rows, num_seen, -1).to(query.dtype)  # [R, L, D]
        own = query[call.tokens].view(rows, -1, layer.num_heads, layer.head_dim)  # [R, T, H, D]
        scores = torch.einsum("rthd,rld->rthl", own, context).float() * layer.scale
        scores = scores.masked_fill(~call.is_seen[:, :, None], -torch.inf)
        softmax = scores.softmax(dim=-1) if sinks is None else with_sinks(scores, sinks)
        weights = softmax.to(query.dtype)
        attended = torch.einsum("rthl,rld->rthd", weights, context[..., : layer.latent_dim])
        if lse is not None:  # of what is kept here a row may see nothing
            logs = log_sum_exp(scores, softmax)
            lse[call.tokens] = logs.view(-1, layer.num_heads)
            attended = attended.masked_fill((logs == -torch.inf).unsqueeze(-1), 0.0)
        output[call.tokens] = attended.reshape(-1, layer.num_heads, layer.latent_dim)


def with_sinks(scores: Tensor, sinks: Tensor) -> Tensor:
    """Softmax of scores [..., H, L] over L and a further one for each head, whose own weight is left out."""
    more = sinks.float()[:, None].expand(*scores.shape[:-1], 1)
    return torch.cat([scores, more], dim=-1).softmax(dim=-1)[..., :-1]
