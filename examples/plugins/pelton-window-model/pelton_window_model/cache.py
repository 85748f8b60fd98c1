"""A kind of KV cache: a sliding window whose blocks are given back several at a time."""

from __future__ import annotations

from dataclasses import dataclass

from pelton.kv_cache.spec import SlidingWindowSpec
from pelton_plugins.kv_cache.single_type import SlidingWindowManager


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchedWindowSpec(SlidingWindowSpec):
    """Need of a layer: pages as full attention has them, and the tokens of its window."""

    release_blocks: int

    def max_blocks(self, num_tokens: int, max_chunk_tokens: int | None = None) -> int:
        """As a window that is longer by the blocks which wait for the others."""
        longer = self.sliding_window + (self.release_blocks - 1) * self.block_size
        window = SlidingWindowSpec(
            block_size=self.block_size, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, dtype=self.dtype,
            sliding_window=longer,
        )  # fmt: skip
        return window.max_blocks(num_tokens, max_chunk_tokens)


class BatchedWindowManager(SlidingWindowManager):
    """Which blocks are held: the window, and those before it up to a multiple of `release_blocks`."""

    spec: BatchedWindowSpec

    @property
    def _stride(self) -> int:
        return self.spec.release_blocks * self.block_size

    def first_needed_token(self, num_computed_tokens: int) -> int:
        return super().first_needed_token(num_computed_tokens) // self._stride * self._stride

    def tokens_until_passed(self, place: int) -> int:
        released = -(-(place + 1) * self.block_size // self._stride) * self._stride
        return released + self.spec.sliding_window - 1


KIND = BatchedWindowSpec, BatchedWindowManager
"""What the entry loads."""
