"""A sliding window whose last block that was left is kept. A layer asks for it by `cache_spec()`."""

from __future__ import annotations

from dataclasses import dataclass

from pelton_plugins.kv_cache.single_type import SlidingWindowManager
from pelton.kv_cache.spec import SlidingWindowSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class SkeletonSpec(SlidingWindowSpec):
    """Need of a layer: pages as full attention has them, and the tokens of its window."""

    def max_blocks(self, num_tokens: int, max_chunk_tokens: int | None = None) -> int:
        """As a window that is a block longer."""
        longer = SlidingWindowSpec(
            block_size=self.block_size, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, dtype=self.dtype,
            sliding_window=self.sliding_window + self.block_size,
        )  # fmt: skip
        return longer.max_blocks(num_tokens, max_chunk_tokens)


class SkeletonCacheManager(SlidingWindowManager):
    """Which blocks are held: those of the window, and one before."""

    spec: SkeletonSpec

    def first_needed_token(self, num_computed_tokens: int) -> int:
        return max(super().first_needed_token(num_computed_tokens) - self.spec.block_size, 0)

    def tokens_until_passed(self, place: int) -> int:
        return super().tokens_until_passed(place) + self.spec.block_size


KIND = SkeletonSpec, SkeletonCacheManager
"""What the entry loads."""
