"""One layer's needs of the KV cache, as data. Pure Python: no torch."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self

from pelton.kv_cache.views import KVLayout, keys_and_values, state_views, token_rows

if TYPE_CHECKING:
    from torch import Tensor

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
IN_FLIGHT_TOKENS = 32
"""Tokens of open steps and drafts that a window may hold beyond one chunk: see `KVCacheSpec.max_blocks`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSpec(ABC):
    """One layer's need. Layers with equal specs share a group; so do those of kinds that are `block_tables_alike`."""

    has_fixed_page: ClassVar[bool] = False  # the page does not grow with block_size: a state, not tokens
    keeps_all_tokens: ClassVar[bool] = True  # False: blocks are given back while the request runs
    block_tables_alike: ClassVar[bool] = False
    """A block is held from its first token to the request's end, and found again, as full attention's is: such layers share
    one block table whatever their pages hold. A class says so for itself, not for its subclasses."""

    block_size: int  # tokens a block
    num_ranks: int = 1  # that share a block's tokens, each with a page of its own (decode context parallelism)

    @property
    def page_tokens(self) -> int:
        """Tokens of a block that one rank keeps."""
        return self.block_size // self.num_ranks

    @property
    @abstractmethod
    def page_size_bytes(self) -> int:
        """Bytes of one block of one layer."""

    def views(self, memory: Tensor, num_blocks: int, layout: KVLayout) -> tuple[Tensor, ...]:
        """Return the tensors that a layer is handed of its memory, [num_blocks * page_size_bytes] uint8. Without one of its
        own, a kind has the bytes of each page: [num_blocks, page_size_bytes]."""
        return (memory.view(num_blocks, self.page_size_bytes),)

    def with_block_size(self, block_size: int) -> Self:
        return replace(self, block_size=block_size)

    def with_page_size(self, page_size_bytes: int) -> Self:
        """Pad the page; only asked of specs with `has_fixed_page`."""
        raise NotImplementedError(f"{type(self).__name__} has no page padding")

    def without_window(self) -> KVCacheSpec:
        """The spec that keeps every token, for `disable_hybrid_kv_cache_manager`."""
        return self

    def max_blocks(self, num_tokens: int, max_chunk_tokens: int | None = None) -> int:
        """Upper bound of the blocks of one group that a request of `num_tokens` holds at once.

        max_chunk_tokens: most tokens that one step computes of it; None when not known (all of them).
        """
        return -(-num_tokens // self.block_size)

    def _max_blocks_of_span(self, needed_tokens: int, num_tokens: int, max_chunk_tokens: int | None) -> int:
        """A step holds the `needed_tokens` before it, its own, and those of open steps and drafts, at any alignment."""
        all_blocks = -(-num_tokens // self.block_size)
        if max_chunk_tokens is None:
            return all_blocks
        span = needed_tokens + max_chunk_tokens + IN_FLIGHT_TOKENS
        return min(all_blocks, (span + self.block_size - 2) // self.block_size + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class FullAttentionSpec(KVCacheSpec):
    """Every token attends to all before it: blocks held = ceil(tokens / block_size)."""

    block_tables_alike: ClassVar[bool] = True

    num_kv_heads: int
    head_dim: int
    dtype: str  # a key of DTYPE_BYTES

    def views(self, memory: Tensor, num_blocks: int, layout: KVLayout) -> tuple[Tensor, ...]:
        """Keys and values, each [num_blocks, block_size, num_kv_heads, head_dim]."""
        return keys_and_values(
            memory, num_blocks, self.page_tokens, self.num_kv_heads, self.head_dim, self.dtype, layout
        )

    @property
    def page_size_bytes(self) -> int:
        return 2 * self.page_tokens * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    def without_window(self) -> KVCacheSpec:
        if self.keeps_all_tokens:
            return self
        return FullAttentionSpec(
            block_size=self.block_size, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, dtype=self.dtype
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindowSpec(FullAttentionSpec):
    """A token attends to itself and the `sliding_window - 1` tokens before it."""

    keeps_all_tokens: ClassVar[bool] = False

    sliding_window: int  # tokens

    def max_blocks(self, num_tokens: int, max_chunk_tokens: int | None = None) -> int:
        return self._max_blocks_of_span(self.sliding_window - 1, num_tokens, max_chunk_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedLocalSpec(FullAttentionSpec):
    """A token attends to the tokens before it that lie in its own aligned chunk."""

    keeps_all_tokens: ClassVar[bool] = False

    attention_chunk_size: int  # tokens

    def max_blocks(self, num_tokens: int, max_chunk_tokens: int | None = None) -> int:
        return self._max_blocks_of_span(self.attention_chunk_size - 1, num_tokens, max_chunk_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class MLASpec(KVCacheSpec):
    """Multi-head latent attention: one latent vector a token (with its rotary part), no separate K and V."""

    block_tables_alike: ClassVar[bool] = True

    latent_dim: int  # kv_lora_rank + rope head_dim
    dtype: str

    def views(self, memory: Tensor, num_blocks: int, layout: KVLayout) -> tuple[Tensor, ...]:
        """The latents, [num_blocks, block_size, latent_dim]."""
        return (token_rows(memory, num_blocks, self.page_tokens, [self.latent_dim], self.dtype, layout),)

    @property
    def page_size_bytes(self) -> int:
        return self.page_tokens * self.latent_dim * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaSpec(KVCacheSpec):
    """A recurrent state of fixed size; the planner raises attention block sizes until a page holds it, and gives it theirs: the
    prefix cache may keep it where a block of tokens ends."""

    has_fixed_page: ClassVar[bool] = True
    keeps_all_tokens: ClassVar[bool] = False

    state_bytes: int
    page_size_padded: int | None = None
    states: tuple[tuple[tuple[int, ...], str], ...] = ()  # (shape, dtype) of each; none: the layer takes the bytes

    def views(self, memory: Tensor, num_blocks: int, layout: KVLayout) -> tuple[Tensor, ...]:
        """One tensor [num_blocks, *shape] for each state."""
        shapes = self.states or (((self.state_bytes,), "uint8"),)
        return state_views(memory, num_blocks, self.page_size_bytes, shapes)

    @property
    def page_size_bytes(self) -> int:
        return self.page_size_padded or self.state_bytes

    def with_page_size(self, page_size_bytes: int) -> Self:
        return replace(self, page_size_padded=page_size_bytes)

    def max_blocks(self, num_tokens: int, max_chunk_tokens: int | None = None) -> int:
        return 1 if num_tokens else 0


@dataclass(frozen=True, slots=True)
class KVCacheTensor:
    """One buffer of the pool, shared by one layer of each group."""

    size_bytes: int
    shared_by: tuple[str, ...]  # layer names; at most one of each group


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers that share one block table."""

    layer_names: tuple[str, ...]
    spec: KVCacheSpec  # whose kind decides which blocks are held
    num_padding_layers: int = 0  # places of the group that no layer fills
    layer_specs: tuple[KVCacheSpec, ...] = ()  # of each layer, where their pages differ; none: all have `spec`

    def spec_of(self, layer_name: str) -> KVCacheSpec:
        return self.layer_specs[self.layer_names.index(layer_name)] if self.layer_specs else self.spec


@dataclass(frozen=True, slots=True)
class KVCachePlan:
    """The planner's result: block 0 is the null block."""

    num_blocks: int
    tensors: tuple[KVCacheTensor, ...]
    groups: tuple[KVCacheGroup, ...]

    @property
    def bytes_per_block(self) -> int:
        return sum(t.size_bytes for t in self.tensors) // max(self.num_blocks, 1)

    @property
    def hash_block_size(self) -> int:
        """Tokens a block hash covers: what `block_hashes` of requests are made with. It divides every group's block size."""
        return math.gcd(*(g.spec.block_size for g in self.groups)) or 1

    @property
    def num_padding_layers(self) -> int:
        """Layer places that are paid for and not used: the price of an irregular ratio of layer kinds."""
        return sum(g.num_padding_layers for g in self.groups)

    def max_blocks_needed(self, num_tokens: int, max_chunk_tokens: int | None = None) -> int:
        """Upper bound of the blocks that a request of `num_tokens` holds at once, over all groups."""
        return sum(g.spec.max_blocks(num_tokens, max_chunk_tokens) for g in self.groups)
