"""Sparse attention over paged latents in torch, for CPU: an indexer's choice, and attention to the chosen tokens.

Rows are gathered as `mla.py` does it. While a call's rows have no more tokens than may be chosen, all are, and the attention is that
over all latents.

Shapes: R rows, T tokens of a row, L context tokens, J heads of the indexer, K tokens that may be chosen, H heads, D numbers of a
latent and its key's rotated part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from pelton.attention.interface import AttentionNeeds, BoundAttention, IndexerParams, LatentParams
from pelton_backends.latents import INDEXER, sinks_of, sparse_refusals
from pelton_backends.sdpa.backend import DTYPES
from pelton_backends.sdpa.mla import Gather, SDPAMLAAttention, SDPAMLABackend, SDPAMLAMetadata, with_sinks

if TYPE_CHECKING:
    from torch import Tensor

_NUMBERS = 1 << 21
"""Of chosen latents, which are gathered at a time: 8 MiB in float32. Each token has latents of its own."""


class SDPASparseBackend(SDPAMLABackend):
    """Handles latents and indexers of any size in float32, bfloat16 and float16."""

    name: ClassVar[str] = "sdpa_sparse"
    handles: ClassVar[frozenset[str]] = frozenset({"is_mla", "is_sparse", "attention_type", "has_sinks"})

    @classmethod
    def unsupported(cls, needs: AttentionNeeds, capability: tuple[int, int] | None = None) -> list[str]:
        return sparse_refusals(needs, DTYPES)

    def bind(self, layer: Any) -> BoundAttention:
        return SDPAIndexer(layer) if layer.needs.attention_type == INDEXER else SDPASparseAttention(layer)


class SDPAIndexer(BoundAttention):
    """An indexer's choice among a row's tokens."""

    layer: IndexerParams

    def __call__(self, query: Tensor, metadata: SDPAMLAMetadata, output: Tensor) -> None:
        """query [tokens, J, D of the indexer] -> output [tokens, K]"""
        for call in metadata.calls:
            rows, num_seen = call.slots.shape
            chosen = output[call.tokens].view(rows, -1, output.shape[1])
            if num_seen <= output.shape[1]:
                chosen[..., :num_seen] = torch.where(call.is_seen, torch.arange(num_seen), -1)
                chosen[..., num_seen:] = -1
            else:
                chosen.copy_(self._best(query, call, output.shape[1]))

    def _best(self, query: Tensor, call: Gather, top_k: int) -> Tensor:
        """The best tokens [R, T, K], in the order of the row; -1 behind them."""
        layer, (rows, num_seen) = self.layer, call.slots.shape
        keys = layer.cache.view(-1, layer.head_dim).index_select(0, call.slots.flatten()).view(rows, num_seen, -1)
        own = query[call.tokens].view(rows, -1, layer.num_heads, layer.head_dim).float()
        weights = layer.weights[call.tokens].view(rows, -1, layer.num_heads)
        heads = torch.einsum("rtjd,rld->rtjl", own, keys.float()).relu_()
        scores = torch.einsum("rtj,rtjl->rtl", weights, heads)
        scores = scores.nan_to_num_(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
        scores = scores.masked_fill_(~call.is_seen, -torch.inf)
        least = scores.topk(top_k, dim=-1).values[..., -1:]
        is_above, is_equal = scores > least, scores == least
        num_left = top_k - is_above.sum(dim=-1, keepdim=True)
        is_chosen = (is_above | (is_equal & (is_equal.cumsum(dim=-1) <= num_left))) & call.is_seen
        from_end = torch.where(is_chosen, torch.arange(num_seen, 0, -1), 0).topk(top_k, dim=-1).values
        return torch.where(from_end > 0, num_seen - from_end, -1)


class SDPASparseAttention(SDPAMLAAttention):
    """A layer's attention over the latents that were chosen for each token."""

    def __call__(self, query: Tensor, metadata: SDPAMLAMetadata, output: Tensor) -> None:
        """query [tokens, H, D] -> output [tokens, H, latent_dim]"""
        chosen = self.layer.chosen
        assert chosen is not None, "the layer's needs say is_sparse"
        for call in metadata.calls:
            if call.slots.shape[1] <= chosen.shape[1]:
                self.attend_to_all(query, call, output, sinks=sinks_of(self.layer))
            else:
                self._attend_to_chosen(query, call, chosen[call.tokens], output)

    def _attend_to_chosen(self, query: Tensor, call: Gather, chosen: Tensor, output: Tensor) -> None:
        layer: LatentParams = self.layer
        sinks = sinks_of(layer)
        latents, (num_tokens, top_k) = layer.cache.view(-1, layer.head_dim), chosen.shape
        most = max(_NUMBERS // (top_k * layer.head_dim), 1)
        for start in range(0, num_tokens, most):
            own = chosen[start : start + most]  # [tokens, K]
            some = slice(call.tokens.start + start, call.tokens.start + start + len(own))
            rows = torch.arange(start, start + len(own)) // (num_tokens // len(call.slots))
            is_there = own >= 0
            places = torch.where(is_there, own, own[:, :1]).long()  # masked ones repeat the first, which is there
            slots = call.slots[rows].gather(1, places)
            context = latents.index_select(0, slots.flatten()).view(*own.shape, -1).to(query.dtype)
            scores = torch.bmm(query[some], context.transpose(1, 2)).float() * layer.scale  # [tokens, H, K]
            scores = scores.masked_fill(~is_there[:, None], -torch.inf)
            softmax = scores.softmax(dim=-1) if sinks is None else with_sinks(scores, sinks)
            output[some] = torch.bmm(softmax.to(query.dtype), context[..., : layer.latent_dim])
