"""Attention through torch's FlexAttention over gathered blocks: compiled on GPUs, the plain form on CPUs.

Rows of one token are one call, all other rows another, each padded to its longest row. Lengths are read on the host, which rules
out graphs. Masked places point at a row's first key, so that no row reads what another wrote.

Shapes: R rows of a call, T its most tokens of a row, L its longest context, H heads, N key heads, D head_dim.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from pelton.attention.interface import AttentionBackend, AttentionNeeds, AttentionParams, BoundAttention, GraphSupport
from pelton.attention.metadata import BatchDescriptor, CommonMetadata
from pelton_backends.sdpa.backend import Sight, first_seen, sight_of

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(slots=True)
class Rows:
    """Rows of one call, under one window."""

    tokens: Tensor  # [R, T] int64 of the step; a row's last one behind its end
    targets: Tensor  # [tokens] int64 of the R T places those that are tokens, in the step's order from `first` on
    first: int  # token of the step
    slots: Tensor  # [R, L] int64: block * S + offset; the row's first key where there is none
    last_query: Tensor  # [R] int64: the last token's position
    first_key: Tensor  # [R] int64
    num_tokens: Tensor  # [R] int64
    mask: Any  # BlockMask


@dataclass(slots=True)
class FlexMetadata:
    """One step of one group; rows are gathered once for each window."""

    common: CommonMetadata
    calls: dict[Sight, list[Rows]] = field(default_factory=dict)


class FlexAttentionBackend(AttentionBackend):
    """Handles decoder attention in float32, bfloat16 and float16, any block size, windows, chunks, soft caps, sinks and ALiBi."""

    name: ClassVar[str] = "flex_attention"
    handles: ClassVar[frozenset[str]] = frozenset(
        {"sliding_window", "attention_chunk_size", "logit_soft_cap", "has_sinks", "has_alibi"}
    )
    graph_support: ClassVar[GraphSupport] = GraphSupport.NEVER

    @classmethod
    def unsupported(cls, needs: AttentionNeeds, capability: tuple[int, int] | None = None) -> list[str]:
        reasons = []
        if needs.dtype not in DTYPES:
            reasons.append(f"dtype {needs.dtype}, only {', '.join(DTYPES)}")
        if needs.kv_dtype not in ("auto", *DTYPES):
            reasons.append(f"kv dtype {needs.kv_dtype}, only auto, {', '.join(DTYPES)}")
        if needs.num_heads % needs.num_kv_heads:
            reasons.append(f"{needs.num_heads} heads are not a multiple of {needs.num_kv_heads} kv heads")
        return reasons

    @classmethod
    def builder_needs(cls, needs: AttentionNeeds) -> object:
        """Layers with and without a window share a step's metadata."""
        return needs.block_size

    def build(self, common: CommonMetadata, key: BatchDescriptor | None = None) -> FlexMetadata:
        return FlexMetadata(common)

    def bind(self, layer: AttentionParams) -> BoundAttention:
        return FlexAttention(layer)


class FlexAttention(BoundAttention):
    """A layer's attention over its gathered context."""

    layer: AttentionParams

    def __call__(self, query: Tensor, metadata: FlexMetadata, output: Tensor) -> None:
        layer, sight = self.layer, sight_of(self.layer)
        if sight not in metadata.calls:
            metadata.calls[sight] = plan(metadata.common, sight, layer.k_cache.shape[1])
        for rows in metadata.calls[sight]:
            shape = rows.slots.shape
            keys, values = (
                _gather(cache, rows.slots)
                .view(*shape, layer.num_kv_heads, layer.head_dim)
                .transpose(1, 2)
                .to(query.dtype)
                for cache in (layer.k_cache, layer.v_cache)
            )
            queries = query[rows.tokens].transpose(1, 2)  # [R, H, T, D]
            found, more = _flex(query.device.type)(
                queries, keys, values, score_mod=_score_mod(layer, rows), block_mask=rows.mask, scale=layer.scale,
                enable_gqa=layer.num_heads != layer.num_kv_heads, return_aux=AuxRequest(lse=True),
            )  # fmt: skip
            if layer.sinks is not None:  # one more logit, without a value
                found = found * torch.sigmoid(more.lse - layer.sinks.float()[:, None])[..., None].to(found.dtype)
            flat = found.transpose(1, 2).reshape(-1, layer.num_heads, layer.head_dim)
            output[rows.first : rows.first + len(rows.targets)] = flat[rows.targets]


@cache
def _flex(device_type: str) -> Callable[..., Any]:
    if device_type != "cpu":
        return torch.compile(flex_attention, dynamic=True)

    def plain(*arguments: Any, **named: Any) -> Any:
        # Without a stance torch traces it for each new shape, a second or two each time, only to run the same operations.
        with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*flex_attention called without torch.compile.*")
            return flex_attention(*arguments, **named)

    return plain


def _gather(cache: Tensor, slots: Tensor) -> Tensor:
    """cache [P, S, N, D] -> [R L, N, D]"""
    block_size = cache.shape[1]
    return cache[slots // block_size, slots % block_size].flatten(0, 1)


def _score_mod(layer: AttentionParams, rows: Rows) -> Callable[..., Tensor] | None:
    soft_cap, slopes = layer.soft_cap, layer.alibi_slopes
    if soft_cap is None and slopes is None:
        return None
    last_query, first_key, num_tokens = rows.last_query, rows.first_key, rows.num_tokens
    cap = last_query.new_full(
        (), soft_cap or 0.0, dtype=torch.float32
    )  # a number would be one of the host to the compiler

    def changed(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if soft_cap is not None:
            score = cap * torch.tanh(score / cap)
        if slopes is not None:
            position = last_query[row] - num_tokens[row] + 1 + query
            score = score + slopes[head] * (first_key[row] + key - position)
        return score

    return changed


def plan(common: CommonMetadata, sight: Sight, block_size: int) -> list[Rows]:
    """Rows with one token, then the others; those of padding are left out."""
    starts, lengths = common.query_start_loc.tolist(), common.seq_lens.tolist()
    rows = [row for row in range(common.num_reqs) if starts[row + 1] > starts[row]]
    decodes = [row for row in rows if row < common.num_decode_rows]
    others = [row for row in rows if row >= common.num_decode_rows]
    return [_rows(common, sight, block_size, starts, lengths, part) for part in (decodes, others) if part]


def _rows(
    common: CommonMetadata, sight: Sight, block_size: int, starts: list[int], lengths: list[int], rows: list[int]
) -> Rows:
    device = common.block_table.device
    start, count, length = (
        torch.tensor(numbers, device=device)
        for numbers in (
            [starts[row] for row in rows], [starts[row + 1] - starts[row] for row in rows], [lengths[row] for row in rows],
        )
    )  # fmt: skip
    first_key = first_seen(length - count, sight)
    most, longest = int(count.max()), int((length - first_key).max())
    place = torch.arange(most, device=device)
    tokens = start[:, None] + place.minimum(count[:, None] - 1)
    targets = (place < count[:, None]).flatten().nonzero().squeeze(-1)
    position = first_key[:, None] + torch.arange(longest, device=device)
    position = torch.where(position < length[:, None], position, first_key[:, None])
    table = common.block_table[torch.tensor(rows, device=device)]
    slots = table.gather(1, position // block_size).long() * block_size + position % block_size
    last, causal = length - 1, common.causal

    def seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        own = first_key[row] + key
        asked = last[row] - count[row] + 1 + query
        is_seen = own <= last[row]
        if causal:
            is_seen = is_seen & (own <= asked)
        return is_seen if sight == (None, None) else is_seen & (own >= first_seen(asked, sight))

    mask = create_block_mask(seen, len(rows), None, most, longest, device=str(device))
    return Rows(tokens, targets, starts[rows[0]], slots, last, first_key, count, mask)
