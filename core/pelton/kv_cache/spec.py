"""What one layer needs of the KV cache, as data. Pure Python: no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Self

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSpec(ABC):
    """One layer's need. Layers with equal specs may share a group."""

    block_size: int  # tokens a block

    @property
    @abstractmethod
    def page_size_bytes(self) -> int:
        """Bytes of one block of one layer."""

    def with_block_size(self, block_size: int) -> Self:
        return replace(self, block_size=block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class FullAttentionSpec(KVCacheSpec):
    """Every token attends to all before it: blocks held = ceil(tokens / block_size)."""

    num_kv_heads: int
    head_dim: int
    dtype: str  # a key of DTYPE_BYTES

    @property
    def page_size_bytes(self) -> int:
        return 2 * self.block_size * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindowSpec(FullAttentionSpec):
    """A token attends to itself and the `sliding_window - 1` tokens before it."""

    sliding_window: int  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaSpec(KVCacheSpec):
    """A recurrent state of fixed size; the planner raises attention block sizes until a page holds it."""

    state_bytes: int
    page_size_padded: int | None = None

    @property
    def page_size_bytes(self) -> int:
        return self.page_size_padded or self.state_bytes


@dataclass(frozen=True, slots=True)
class KVCacheTensor:
    """One buffer of the pool, shared by one layer of each group."""

    size_bytes: int
    shared_by: tuple[str, ...]  # layer names; at most one of each group


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers that share one block table."""

    layer_names: tuple[str, ...]
    spec: KVCacheSpec
    num_padding_layers: int = 0  # places of the group that no layer fills


@dataclass(frozen=True, slots=True)
class KVCachePlan:
    """The planner's result: block 0 is the null block."""

    num_blocks: int
    tensors: tuple[KVCacheTensor, ...]
    groups: tuple[KVCacheGroup, ...]

    @property
    def bytes_per_block(self) -> int:
        return sum(t.size_bytes for t in self.tensors) // max(self.num_blocks, 1)
