"""Interface of an attention backend.

A backend says as data what it offers; the selector (`selector.py`) takes the first entry that fits. Needs are data too: a new capability
is a new field of `AttentionNeeds` with a default, and a backend whose `handles` lacks a field refuses every non-default value of it. So
an old plugin keeps working where it did and fails closed where it cannot.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from pelton.attention.bound import AttentionParams, BoundAttention, IndexerParams, LatentParams
from pelton.attention.metadata import BatchDescriptor, CommonMetadata
from pelton.attention.old_methods import OldMethods, bind_old
from pelton.attention.support import GraphSupport
from pelton.kv_cache.views import KVLayout

__all__ = [
    "AttentionBackend", "AttentionNeeds", "AttentionParams", "BoundAttention", "GraphSupport", "IndexerParams", "KVLayout",
    "LatentParams",
]  # fmt: skip

if TYPE_CHECKING:
    import torch

    from pelton.config import EngineConfig


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
    attention_chunk_size: int | None = None  # tokens; a token attends to those before it in its own aligned chunk
    logit_soft_cap: float | None = None
    has_sinks: bool = False
    has_alibi: bool = False
    attention_type: str = "decoder"  # decoder, encoder, cross, indexer, state, and other kinds of states
    is_mla: bool = False  # keys are latents [head_dim] that all heads read, values their first `latent_dim` numbers
    is_sparse: bool = False  # each token attends to those that an indexer chooses for it
    has_mm_prefix: bool = False
    decode_context_parallel: int = 1
    """N: ranks that each keep a part of every row's tokens, rank r those numbered r, r + N, ... Then `num_heads` are those of all of
    them, blocks of a table have `block_size` tokens in this rank's cache, and steps are described by whole rows' lengths. The layer
    calls `BoundAttention.attend_part`."""
    context_rank: int = 0  # r
    latent_dim: int = 0  # with is_mla

    @property
    def is_local(self) -> bool:
        """Tokens do not attend to all before them."""
        return self.sliding_window is not None or self.attention_chunk_size is not None

    def optional(self) -> list[str]:
        """Names of the optional needs that differ from their defaults."""
        return [f.name for f in fields(self) if f.name in OPTIONAL_NEEDS and getattr(self, f.name) != f.default]


PHASES = frozenset(["decode", "prefill"])

OPTIONAL_NEEDS = frozenset([
    "sliding_window", "attention_chunk_size", "logit_soft_cap", "has_sinks", "has_alibi", "attention_type", "is_mla", "is_sparse",
    "has_mm_prefix", "decode_context_parallel",
])  # fmt: skip


class AttentionBackend(OldMethods, ABC):
    """Lifecycle: `configured` once, and `unsupported`, before weights load; one instance for the layers of a KV group that have equal
    `builder_needs`; `bind` once a layer, when the pool is there; `build` once a step; then what `bind` returned, once a layer.

    A cache holds what others left there: beyond a row's end (in its last block, and in blocks that its table still names),
    behind its window, in the null block. It may be anything, NaN and infinity too. A backend selects the values at such places
    away and never multiplies them: 0 * NaN is NaN. What a row's own tokens wrote is read as it is, and NaN there reaches that row.
    """

    group_id: int = 0
    """The KV group whose steps it describes; set when the pool is bound."""

    name: ClassVar[str]
    handles: ClassVar[frozenset[str]] = frozenset()  # optional needs this backend has read about
    graph_support: ClassVar[GraphSupport] = GraphSupport.NEVER
    phases: ClassVar[frozenset[str]] = PHASES  # what it serves: rows with one token of a batch, the others, or both
    needs_zeroed_blocks: bool = False
    """True for a backend that multiplies what lies in the rest of a row's blocks by 0, and so cannot have NaN there: blocks are
    zeroed when requests get them, a launch a step. What its class says counts, or what each instance says."""

    @classmethod
    @abstractmethod
    def unsupported(cls, needs: AttentionNeeds, capability: tuple[int, int] | None = None) -> list[str]:
        """Say why this backend cannot serve `needs`; an empty list means it can. `handles` is checked by the selector."""

    @classmethod
    def configured(cls, config: EngineConfig) -> type[AttentionBackend]:
        """Return the class that serves one engine: a subclass where settings of your own (`read_settings`) are to reach it, never
        this class with something written into it. Called once, before anything else is asked."""
        return cls

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
        """Return whether a decode step of `num_rows` that share their first `prefix_len` tokens is served better by reading these
        once. Asked before such a step: its graph has a key of its own."""
        return False

    def reserve(self, max_key: BatchDescriptor) -> None:
        """Allocate the fixed buffers that captured steps up to `max_key` write their metadata into."""

    @abstractmethod
    def build(self, common: CommonMetadata, key: BatchDescriptor | None = None) -> Any:
        """Describe one step of the group; with `key`, only into the reserved buffers, sizes taken from the key."""

    def bind(self, layer: Any) -> BoundAttention:
        """Return the attention of a layer that this instance serves, with all that is the same in every step found out.

        layer: `AttentionParams`, or `LatentParams` where the needs say `is_mla`. Called once for each layer, when it has its views
        of the cache. Every backend defines it; the default is for those that still define `forward`.
        """
        return bind_old(self, layer)
