"""Needs of layers in small blocks, and plans of a pool for them."""

from __future__ import annotations

from collections.abc import Sequence

from pelton.kv_cache.planner import plan_kv_cache
from pelton.kv_cache.spec import (
    ChunkedLocalSpec,
    FullAttentionSpec,
    KVCachePlan,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

BLOCK_SIZE = 4


def full_spec(block_size: int = BLOCK_SIZE, *, num_kv_heads: int = 1) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_size, num_kv_heads=num_kv_heads, head_dim=8, dtype="float32")


def window_spec(window: int, block_size: int = BLOCK_SIZE, *, num_kv_heads: int = 1) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=block_size, num_kv_heads=num_kv_heads, head_dim=8, dtype="float32", sliding_window=window
    )


def chunked_spec(chunk: int, block_size: int = BLOCK_SIZE) -> ChunkedLocalSpec:
    return ChunkedLocalSpec(
        block_size=block_size, num_kv_heads=1, head_dim=8, dtype="float32", attention_chunk_size=chunk
    )


def state_spec(block_size: int = BLOCK_SIZE) -> MambaSpec:
    """As large as a block of `full_spec(block_size)`."""
    return MambaSpec(block_size=block_size, state_bytes=full_spec(block_size).page_size_bytes)


def make_plan(specs: Sequence[KVCacheSpec], num_blocks: int, max_model_len: int = 1) -> KVCachePlan:
    """A layer of each spec, and so a group; `num_blocks` with the null block."""
    layers = {f"layer.{i}": spec for i, spec in enumerate(specs)}
    return plan_kv_cache(layers, 0, num_blocks_override=num_blocks, max_model_len=max_model_len)


LAYER_KINDS: dict[str, tuple[KVCacheSpec, ...]] = {
    "full": (full_spec(),),
    "window": (window_spec(6),),
    "window-of-one": (window_spec(1),),
    "full+window": (full_spec(), window_spec(6)),
    "full+2-equal-windows": (full_spec(), window_spec(9), window_spec(9)),
    "full+2-windows": (full_spec(), window_spec(5), window_spec(11)),
    "2-windows": (window_spec(5), window_spec(11)),
    "full+chunked": (full_spec(), chunked_spec(6)),
    "full+window-of-other-size": (full_spec(num_kv_heads=2), window_spec(9)),  # blocks of 4 and of 8 tokens
}
STATE_KINDS: dict[str, tuple[KVCacheSpec, ...]] = {
    "state": (state_spec(),),
    "full+state": (full_spec(), state_spec()),
    "full+2-equal-states": (full_spec(), state_spec(), state_spec()),
    "full+window+state": (full_spec(), window_spec(6), state_spec()),
}
"""Such layers take no drafts."""
