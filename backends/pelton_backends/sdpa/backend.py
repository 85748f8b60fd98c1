"""Paged attention in torch: gather the context, then scaled_dot_product_attention.

Decode rows (one token each) are one gather and one batched call over the longest context, or over the window;
the other rows are one call each. Lengths are read on the host, which costs nothing on a CPU, makes a GPU wait and rules out
graphs. Masked places are never read from a block's stale part: they point at the row's first key, which it sees.

Shapes: R rows, D head_dim, N key heads, G query heads a key head, L context tokens, S block_size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F

from pelton.attention.interface import AttentionBackend, AttentionNeeds, AttentionParams, BoundAttention, GraphSupport
from pelton.attention.metadata import BatchDescriptor, CommonMetadata
from pelton_backends.context_parts import kept_of, spread_refusals

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = ("float32", "bfloat16", "float16")
FP8_DTYPES = ("fp8", "fp8_e4m3", "fp8_e5m2")


Sight = tuple[int | None, int | None]
"""A layer's window and chunk size: see `AttentionNeeds`."""


def sight_of(layer: AttentionParams) -> Sight:
    return layer.needs.sliding_window, layer.needs.attention_chunk_size


def first_seen(position: Tensor, sight: Sight) -> Tensor:
    """The first token that a token at each position attends to."""
    window, size = sight
    if size is not None:
        return position // size * size
    return torch.zeros_like(position) if window is None else (position - window + 1).clamp(min=0)


@dataclass(slots=True)
class DecodePlan:
    """Where each decode row's context lies, of one `Sight`."""

    rows: Tensor  # [R L] int64 of the cache (see `cache_rows`), the row's first key where masked
    mask: Tensor  # [R, 1, 1, L] bool, True attends


@dataclass(slots=True)
class PrefillPlan:
    """One row with several tokens, of one `Sight`."""

    tokens: slice  # of the step
    rows: Tensor  # [L] int64 of the cache, from the first key that a token of the row attends to
    mask: Tensor | None  # [T of the row, L] bool; None: causal from the first key on


@dataclass(slots=True)
class SDPAMetadata:
    """One step of one group; plans are made once per window or chunk size and shared by the layers that have it."""

    common: CommonMetadata
    decodes: dict[Sight, DecodePlan] = field(default_factory=dict)
    prefills: dict[Sight, list[PrefillPlan]] = field(default_factory=dict)


class SDPABackend(AttentionBackend):
    """Handles decoder attention in float32, bfloat16 and float16, any block and head size, windows, chunks, soft caps and sinks."""

    name: ClassVar[str] = "sdpa"
    handles: ClassVar[frozenset[str]] = frozenset(
        {"sliding_window", "attention_chunk_size", "logit_soft_cap", "has_sinks", "decode_context_parallel"}
    )
    graph_support: ClassVar[GraphSupport] = GraphSupport.NEVER

    @classmethod
    def unsupported(cls, needs: AttentionNeeds, capability: tuple[int, int] | None = None) -> list[str]:
        reasons = []
        if needs.dtype not in DTYPES:
            reasons.append(f"dtype {needs.dtype}, only {', '.join(DTYPES)}")
        if needs.kv_dtype not in ("auto", *DTYPES, *FP8_DTYPES):
            reasons.append(f"kv dtype {needs.kv_dtype}, only auto, {', '.join(DTYPES + FP8_DTYPES)}")
        if needs.num_heads % needs.num_kv_heads:
            reasons.append(f"{needs.num_heads} heads are not a multiple of {needs.num_kv_heads} kv heads")
        return reasons + spread_refusals(needs)

    def build(self, common: CommonMetadata, key: BatchDescriptor | None = None) -> SDPAMetadata:
        return SDPAMetadata(common)

    def bind(self, layer: AttentionParams) -> BoundAttention:
        return SDPAAttention(layer)


class SDPAAttention(BoundAttention):
    """A layer's attention over its gathered context."""

    layer: AttentionParams

    def __call__(self, query: Tensor, metadata: SDPAMetadata, output: Tensor) -> None:
        self.attend_part(query, metadata, output, None)

    def attend_part(self, query: Tensor, metadata: SDPAMetadata, output: Tensor, lse: Tensor | None) -> None:
        layer, common, sight = self.layer, metadata.common, sight_of(self.layer)
        num_decodes = common.num_decode_rows
        if num_decodes:
            if sight not in metadata.decodes:
                metadata.decodes[sight] = plan_decode(common, layer)
            output[:num_decodes] = attend_decode(layer, query[:num_decodes], metadata.decodes[sight], lse)
        if num_decodes < common.num_reqs:
            if sight not in metadata.prefills:
                metadata.prefills[sight] = plan_prefill(common, layer)
            for plan in metadata.prefills[sight]:
                output[plan.tokens] = attend_prefill(layer, query[plan.tokens], plan, lse)


def cache_rows(cache: Tensor) -> Tensor:
    """The cache as rows of one token's N D numbers: token `offset` of `block` is row block * stride + offset.

    The stride is `block_stride(cache)`; rows between belong to the other half of each page. Gathering rows of this view is
    five times as fast as indexing with (block, offset) pairs (torch 2.13, 2 threads, 16 rows of 224 tokens).
    """
    num_blocks, block_size, num_kv_heads, head_dim = cache.shape
    num_rows = (num_blocks - 1) * block_stride(cache) + block_size
    return cache.as_strided((num_rows, num_kv_heads * head_dim), (cache.stride(1), 1), cache.storage_offset())


def take_rows(cache: Tensor, rows: Tensor) -> Tensor:
    """Gather tokens' numbers [rows, N D], in the cache's dtype; torch gathers no 8-bit floats, but their bytes."""
    if cache.element_size() == 1:
        return cache_rows(cache.view(torch.uint8)).index_select(0, rows).view(cache.dtype)
    return cache_rows(cache).index_select(0, rows)


def block_stride(cache: Tensor) -> int:
    return cache.stride(0) // cache.stride(1)


def plan_decode(common: CommonMetadata, layer: AttentionParams) -> DecodePlan:
    """Contexts are aligned at their start (first key that is attended to), padded to the longest."""
    block_size = layer.k_cache.shape[1]
    lengths = kept_of(layer.needs, common.seq_lens[: common.num_decode_rows].long())
    starts = first_seen((lengths - 1).clamp(min=0), sight_of(layer))
    longest = max(int((lengths - starts).max()), 1)
    position = starts[:, None] + torch.arange(longest, device=starts.device)
    is_context = position < lengths[:, None]
    position = torch.where(is_context, position, starts[:, None])
    blocks = common.block_table[: common.num_decode_rows].gather(1, position // block_size).long()
    rows = blocks * block_stride(layer.k_cache) + position % block_size
    if layer.needs.decode_context_parallel == 1:
        is_context[:, 0] = True  # a padding row attends to what is in the null block, and nobody reads what it gets
    return DecodePlan(rows.flatten(), is_context[:, None, None, :])


def attend_decode(layer: AttentionParams, query: Tensor, plan: DecodePlan, lse: Tensor | None = None) -> Tensor:
    """query [R, N G, D] -> [R, N G, D]; lse: see `BoundAttention.attend_part`. The G heads of a key head are its G queries, so
    no key is repeated."""
    num_rows, num_heads, head_dim = query.shape
    shape = (num_rows, -1, layer.num_kv_heads, head_dim)
    keys, values = (
        take_rows(cache, plan.rows).view(shape).transpose(1, 2).to(query.dtype)  # [R, N, L, D]
        for cache in (layer.k_cache, layer.v_cache)
    )
    grouped = query.view(num_rows, layer.num_kv_heads, -1, head_dim)  # [R, N, G, D]
    if lse is not None:
        result, logs = attend_some(grouped, keys, values, plan.mask, layer.scale, layer.soft_cap)
        lse[:num_rows] = logs.reshape(num_rows, num_heads)
        return result.reshape(num_rows, num_heads, head_dim)
    sinks = None if layer.sinks is None else layer.sinks.view(layer.num_kv_heads, -1, 1)
    result = attend(grouped, keys, values, plan.mask, layer.scale, layer.soft_cap, sinks)
    return result.reshape(num_rows, num_heads, head_dim)


def plan_prefill(common: CommonMetadata, layer: AttentionParams) -> list[PrefillPlan]:
    sight, block_size, stride = sight_of(layer), layer.k_cache.shape[1], block_stride(layer.k_cache)
    starts = common.query_start_loc.tolist()
    lengths = common.seq_lens.tolist()
    plans = []
    for row in range(common.num_decode_rows, common.num_reqs):
        num_tokens, length = starts[row + 1] - starts[row], lengths[row]
        if num_tokens == 0:
            continue  # padding
        first_query = length - num_tokens
        first_key = int(first_seen(torch.tensor(first_query), sight))
        ranks, rank = layer.needs.decode_context_parallel, layer.needs.context_rank
        keys = torch.arange(first_key if ranks == 1 else rank, length, ranks)
        position = (keys if ranks == 1 else keys // ranks).to(common.block_table.device)
        rows = common.block_table[row][position // block_size].long() * stride + position % block_size
        mask = _prefill_mask(first_query, keys, length, sight, common.causal)
        mask = None if mask is None else mask.to(position.device)
        plans.append(PrefillPlan(slice(starts[row], starts[row + 1]), rows, mask))
    return plans


def _prefill_mask(first_query: int, keys: Tensor, length: int, sight: Sight, causal: bool) -> Tensor | None:
    """keys: their places in the row. [queries, keys] bool, or None when the plain causal triangle says it all."""
    queries = torch.arange(first_query, length)[:, None]
    firsts = first_seen(queries, sight)
    is_square = len(keys) == len(queries) and (not len(keys) or int(keys[0]) == first_query)
    if causal and is_square and (not len(keys) or int(firsts[-1]) <= first_query):
        return None
    mask = keys <= queries if causal else torch.ones(len(queries), len(keys), dtype=torch.bool)
    return mask & (keys >= firsts)


def attend_prefill(layer: AttentionParams, query: Tensor, plan: PrefillPlan, lse: Tensor | None = None) -> Tensor:
    """query [T, N G, D] of one row -> [T, N G, D]; lse: of the step."""
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = layer.num_kv_heads
    group = num_heads // num_kv_heads
    keys, values = (
        take_rows(cache, plan.rows)
        .view(-1, num_kv_heads, 1, head_dim)
        .permute(1, 2, 0, 3)
        .to(query.dtype)
        .expand(-1, group, -1, -1)  # [N, G, L, D], the G copies without memory
        for cache in (layer.k_cache, layer.v_cache)
    )
    grouped = query.view(num_tokens, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)  # [N, G, T, D]
    if lse is not None:
        result, logs = attend_some(grouped, keys, values, plan.mask, layer.scale, layer.soft_cap)
        lse[plan.tokens] = logs.permute(2, 0, 1).reshape(num_tokens, num_heads)
        return result.permute(2, 0, 1, 3).reshape(num_tokens, num_heads, head_dim)
    sinks = None if layer.sinks is None else layer.sinks.view(num_kv_heads, group, 1, 1)
    result = attend(grouped, keys, values, plan.mask, layer.scale, layer.soft_cap, sinks)
    return result.permute(2, 0, 1, 3).reshape(num_tokens, num_heads, head_dim)


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    soft_cap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """[..., T, D] against [..., L, D]; mask True attends, None is causal with T = L. Every row attends to something.

    sinks: logits that have no value, as they broadcast over scores [..., T, 1]."""
    if soft_cap is None and sinks is None:
        return F.scaled_dot_product_attention(query, keys, values, mask, is_causal=mask is None, scale=scale)
    scores = _scores(query, keys, mask, scale, soft_cap)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().expand(*scores.shape[:-1], 1)], dim=-1)
    weights = scores.softmax(dim=-1)[..., : keys.shape[-2]]
    return (weights @ values.float()).to(query.dtype)


def attend_some(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, soft_cap: float | None
) -> tuple[Tensor, Tensor]:
    """The same, and the log-sum-exp of each row's scores [..., T]: zeros and -inf for a row that attends to nothing."""
    scores = _scores(query, keys, mask, scale, soft_cap)
    weights = scores.softmax(dim=-1)
    logs = log_sum_exp(scores, weights)
    result = (weights @ values.float()).masked_fill((logs == -torch.inf).unsqueeze(-1), 0.0)
    return result.to(query.dtype), logs


def _scores(query: Tensor, keys: Tensor, mask: Tensor | None, scale: float, soft_cap: float | None) -> Tensor:
    """Return what is attended to, in float32 [..., T, L], -inf where the mask forbids it."""
    if mask is None:
        mask = torch.ones(query.shape[-2], keys.shape[-2], dtype=torch.bool, device=query.device).tril()
    scores = (query.float() @ keys.float().transpose(-1, -2)) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    return scores.masked_fill(~mask, -torch.inf)


def log_sum_exp(scores: Tensor, softmax: Tensor) -> Tensor:
    """Return it of the last axis, from a softmax that is there: the highest score less the logarithm of its weight; -inf of no scores."""
    if scores.shape[-1] == 0:
        return scores.new_full(scores.shape[:-1], -torch.inf)
    highest, place = scores.max(dim=-1)
    logs = highest - softmax.gather(-1, place.unsqueeze(-1)).squeeze(-1).log()
    return torch.where(highest == -torch.inf, highest, logs)
