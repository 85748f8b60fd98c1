"""Interface of an attention backend.

A backend says as data what it offers; the selector (`selector.py`) takes the first entry that fits.
Needs are data too: a new capability is a new field of `AttentionNeeds` with a default, and a backend
whose `handles` lacks a field refuses every non-default value of it. So an old plugin keeps working
where it did and fails closed where it cannot.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from pelton.attention.metadata import BatchDescriptor, CommonMetadata
from pelton.attention.support import GraphSupport
from pelton.kv_cache.views import KVLayout

__all__ = ["AttentionBackend", "AttentionNeeds", "GraphSupport", "KVLayout"]

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from pelton.layers.attention import AttentionLayer


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionNeeds:
    """One layer's requirements. A new capability is a new field here, never a new method below."""

    # Every backend reads these.
    head_dim: int
    num_heads: int  # of this rank
    num_kv_heads: int  # of this rank
    block_size: int  # tokens
    dtype: str  # of query, key and value: float32, bfloat16, float16
    kv_dtype: str = "auto"  # "auto": as dtype
    # Optional: refused unless named in `handles`.
    sliding_window: int | None = None  # tokens; None attends to everything
    logit_soft_cap: float | None = None
    has_sinks: bool = False
    has_alibi: bool = False
    attention_type: str = "decoder"  # decoder, encoder, cross
    is_mla: bool = False  # keys are latents [head_dim] that all heads read, values their first `latent_dim` numbers
    is_sparse: bool = False
    has_mm_prefix: bool = False
    decode_context_parallel: int = 1
    latent_dim: int = 0  # with is_mla

    def optional(self) -> list[str]:
        """Names of the optional needs that differ from their defaults."""
        return [f.name for f in fields(self) if f.name in OPTIONAL_NEEDS and getattr(self, f.name) != f.default]


PHASES = frozenset(["decode", "prefill"])

OPTIONAL_NEEDS = frozenset(
    [
        "sliding_window",
        "logit_soft_cap",
        "has_sinks",
        "has_alibi",
        "attention_type",
        "is_mla",
        "is_sparse",
        "has_mm_prefix",
        "decode_context_parallel",
    ]
)


class AttentionBackend(ABC):
    """Lifecycle: `unsupported` before weights load; one instance for the layers of a KV group that have equal `builder_needs`;
    `build` once a step; `forward` once a layer, or what `bind_forward` gave for it."""

    group_id: int = 0
    """The KV group whose steps it describes; set when the pool is bound."""

    name: ClassVar[str]
    handles: ClassVar[frozenset[str]] = frozenset()  # optional needs this backend has read about
    graph_support: ClassVar[GraphSupport] = GraphSupport.NEVER
    phases: ClassVar[frozenset[str]] = PHASES  # what it serves: rows with one token of a batch, the others, or both

    @classmethod
    @abstractmethod
    def unsupported(cls, needs: AttentionNeeds, capability: tuple[int, int] | None = None) -> list[str]:
        """Say why this backend cannot serve `needs`; an empty list means it can. `handles` is checked by the selector."""

    @classmethod
    def kv_layout(cls, needs: AttentionNeeds) -> KVLayout:
        return KVLayout()

    @classmethod
    def builder_needs(cls, needs: AttentionNeeds) -> Hashable:
        """Return what `build` and `reserve` read of a layer's needs. Layers of a group for which it is equal share an instance, and
        with it each step's metadata."""
        return needs

    def __init__(
        self, needs: AttentionNeeds, device: torch.device, *, max_num_seqs: int, max_num_tokens: int, max_model_len: int
    ) -> None:
        """needs: of the first layer that it serves; the others' differ from them in what `builder_needs` leaves out."""
        self.needs = needs
        self.device = device
        self.max_num_seqs = max_num_seqs
        self.max_num_tokens = max_num_tokens
        self.max_model_len = max_model_len

    def uses_common_prefix(self, num_rows: int, prefix_len: int) -> bool:
        """Whether a decode step of `num_rows` that share their first `prefix_len` tokens is served better by reading these
        once. Asked before such a step: its graph has a key of its own."""
        return False

    def reserve(self, max_key: BatchDescriptor) -> None:  # noqa: B027
        """Allocate the fixed buffers that captured steps up to `max_key` write their metadata into."""

    @abstractmethod
    def build(self, common: CommonMetadata, key: BatchDescriptor | None = None) -> Any:
        """Describe one step of the group; with `key`, only into the reserved buffers, sizes taken from the key."""

    @abstractmethod
    def forward(self, layer: Any, query: Tensor, metadata: Any, output: Tensor) -> Tensor:
        """Attend. The step's keys and values of *all* rows are in `layer.k_cache` / `layer.v_cache` already.

        query, output [T, num_heads, head_dim]; k_cache, v_cache [num_blocks, block_size, num_kv_heads, head_dim] views.
        Rows of padding tokens may hold anything afterwards but must not be read. Returns `output`.
        What lies in the cache beyond a row's end (in its last block, and in blocks that its table still names), or behind its
        window, may be anything, NaN too: values at masked places are selected away, never multiplied. Only the null block is
        finite.
        """

    def forward_qkv(
        self, layer: AttentionLayer, qkv: Tensor, positions: Tensor, metadata: Any, output: Tensor
    ) -> Tensor:
        """From the product's rows to attention's output: q/k norm, rope, write KV, attend.

        qkv [T, (num_heads + 2 * num_kv_heads) * head_dim]. The default calls the layer's
        `qk_norm_rope_write_kv` seam, then `forward`; a backend that has one kernel for both overrides this. Steps captured
        in pieces hold the seam, and call `forward` between them.

        All rows are written before any row reads: one may start with a block that another fills in this very step. Only in
        a step whose rows have one token each does no row read what another writes, and write and read may be fused.
        """
        query = layer.qk_norm_rope_write_kv(qkv, positions, self.slot_mapping(metadata))
        return self.forward(layer, query, metadata, output)

    def bind_forward(self, layer: AttentionLayer, query: Tensor, output: Tensor) -> Callable[[Any], object]:
        """The attention between two captured pieces, which hold the layer's seam: `forward` on tensors that stay where they are,
        to be called with each step's metadata. Overridden by a backend whose call has parts that only they decide.

        Called once for each layer and captured size, between two recordings: launch nothing. query [T, num_heads, head_dim]
        holds nothing yet, and may be a strided view of the product's rows. The steps to come have any rows of T tokens, with
        padding. What is returned fills `output`; its result is not looked at.
        """
        return lambda metadata: self.forward(layer, query, metadata, output)

    @abstractmethod
    def slot_mapping(self, metadata: Any) -> Tensor:
        """[T] int64 of the step, from what `build` returned."""
