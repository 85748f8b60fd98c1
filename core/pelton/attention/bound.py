"""A layer's attention as a backend has bound it, and what a backend may know of a layer for that."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.attention.interface import AttentionNeeds
    from pelton.ops.interface import QkNormRopeWriteKvNeeds, QkNormRopeWriteKvTensors


class AttentionParams(Protocol):
    """Facts of a layer that a backend may know: its constants, and the views of its cache. All of it stays as it is."""

    layer_name: str
    needs: AttentionNeeds
    num_heads: int  # of this rank
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None
    soft_cap: float | None
    sinks: Tensor | None  # [num_heads]
    alibi_slopes: Tensor | None  # [num_heads]
    k_cache: Tensor  # [num_blocks, block_size, num_kv_heads, head_dim], a view of the pool
    v_cache: Tensor
    write_needs: QkNormRopeWriteKvNeeds  # for backends whose kernel norms, rotates and writes as well
    write_tensors: QkNormRopeWriteKvTensors

    def qk_norm_rope_write_kv(self, qkv: Tensor, positions: Tensor, slot_mapping: Tensor) -> Tensor:
        """The layer's op of that name on its cache: [T, num_heads, head_dim]."""
        ...


class LatentParams(Protocol):
    """The same of a layer with `needs.is_mla`, whose query and output have `head_dim` and `latent_dim` numbers a head."""

    layer_name: str
    needs: AttentionNeeds
    num_heads: int
    head_dim: int
    latent_dim: int
    scale: float
    cache: Tensor  # [num_blocks, block_size, head_dim], a view of the pool
    chosen: Tensor | None  # with needs.is_sparse: [most tokens of a step, K] int32, filled by an indexer


class IndexerParams(Protocol):
    """The same of a layer that chooses for another one, `needs.attention_type` "indexer": token t the K tokens s of its row up to
    itself with the largest sum over heads of weights[t, head] relu(query[t, head] . key[s]), the earlier ones where scores are equal.
    The bound call's output is [T, K] int32: their numbers in the row, in any order, and -1 behind them where there are fewer."""

    layer_name: str
    needs: AttentionNeeds
    num_heads: int
    head_dim: int
    cache: Tensor  # [num_blocks, block_size, head_dim] of keys, a view of the pool
    weights: Tensor  # [most tokens of a step, num_heads] float32, at a fixed address


class BoundAttention(ABC):
    """The attention of one layer, as `AttentionBackend.bind` returns it. Captured and eager steps call the same object."""

    def __init__(self, layer: Any) -> None:
        """layer: `AttentionParams`, or `LatentParams` where the needs say `is_mla`."""
        self.layer = layer

    @abstractmethod
    def __call__(self, query: Tensor, metadata: Any, output: Tensor) -> object:
        """Attend, and fill `output`. The step's keys and values of *all* rows are in the cache already.

        query, output [T, num_heads, head_dim]; query may be a strided view of the product's rows. metadata: what `build` returned.
        Rows of padding tokens may hold anything afterwards but must not be read.
        """

    def attend_part(self, query: Tensor, metadata: Any, output: Tensor, lse: Tensor) -> object:
        """Attend to this rank's part of each row's tokens (`AttentionNeeds.decode_context_parallel`): as a call does, and fill `lse`
        [T, num_heads] float32 with the natural logarithm of each query's sum of exp(score). A query that sees nothing of the part
        gets zeros and -inf. Backends define it whose `handles` name that need."""
        raise NotImplementedError(f"{type(self).__qualname__} attends to whole rows.")

    def write_and_attend(
        self, qkv: Tensor, positions: Tensor, slot_mapping: Tensor, metadata: Any, output: Tensor
    ) -> object:
        """From the product's rows to attention's output: q/k norm, rope, write KV, attend.

        qkv [T, (num_heads + 2 * num_kv_heads) * head_dim], positions and slot_mapping [T] int64. The default calls the layer's
        `qk_norm_rope_write_kv` op, then the object itself. A backend that has one kernel for both overrides it. Steps captured in
        pieces hold the op, and call the object between them.

        All rows are written before any row reads: one may start with a block that another fills in this very step. Only in
        a step whose rows have one token each does no row read what another writes, and write and read may be fused.
        """
        return self(self.layer.qk_norm_rope_write_kv(qkv, positions, slot_mapping), metadata, output)
