"""Interface of a KV-cache manager: blocks for requests, and prefix lookup.

The scheduler alone calls it, on the engine core's thread. Pure Python over ints: no torch. Fences are
the scheduler's matter: it calls `free` only when no open step can touch the blocks. The built-in one is the plugin `kv_cache`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from pelton.config.kv_cache import KVCacheConfig
from pelton.kv_cache.spec import KVCachePlan, KVCacheSpec
from pelton.metrics.plugin_metrics import PluginMetrics

if TYPE_CHECKING:
    from pelton.config import EngineConfig

NULL_BLOCK = 0
"""Padding rows and places outside a window point at this block; it is never handed out, found or freed."""

BlockIds = tuple[list[int], ...]
"""Per KV group: block ids in table order; 0 (null) where a window has passed."""


class CacheableRequest(Protocol):
    """The part of a request that a manager reads; it writes none of it."""

    @property
    def request_id(self) -> str: ...

    @property
    def num_tokens(self) -> int:
        """Known on the host: prompt and output."""
        ...

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def num_computed_tokens(self) -> int:
        """Upper bound: tokens whose KV is, or will be after open steps, in the cache."""
        ...

    @property
    def num_confirmed_tokens(self) -> int:
        """Lower bound of the same (open drafts may be rejected): a window is left by these only."""
        ...

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """Chain hash of every full block of known tokens, but see `hits_have_first_block`; empty without prefix caching."""
        ...

    @property
    def skip_prefix_lookup(self) -> bool:
        """prompt_logprobs: every position must be computed."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class KVManagerContext:
    """Everything that a KV-cache manager is made from. A new feature is a new field with a default: old factories keep working."""

    plan: KVCachePlan
    config: KVCacheConfig
    max_model_len: int
    max_num_batched_tokens: int | None = None
    """Most tokens of one step."""
    extra_managers: Sequence[tuple[type[KVCacheSpec], type[Any]]] = ()
    """From the hook `pelton_kv_cache_specs`."""
    engine_config: EngineConfig | None = None
    """All settings, for `read_settings`; None in tests of a manager alone."""
    metrics: PluginMetrics = field(default_factory=PluginMetrics)
    """Counters of its own."""


class KVCacheManager(ABC):
    """A table per request and group; tables only grow.

    Order of calls for a request: `lookup` (waiting, not yet allocated) -> `allocate` in each step ->
    `cache_blocks` after tokens became known -> `free` once. After preemption (`free`) it starts again.
    """

    hits_have_first_block: bool = False
    """A hit has the request's first block. So where `lookup` finds nothing by the first of `block_hashes` alone, a scheduler may add the
    others behind `allocate`, before `cache_blocks`."""

    hands_copies: bool = False
    """Set by a scheduler that hands on what `take_copies` returns, and whose executor's steps are ordered: copies are of blocks that
    nobody holds. Without it nothing is found that would have to be copied, as states are."""

    def take_copies(self) -> list[tuple[int, int]]:
        """Return (source, target) of the blocks that the last `allocate` wants copied before its step: `SchedulerOutput.block_copies`.
        Call it behind each `allocate`; the order of all copies of a step is that of the calls."""
        return []

    def chunk_end(self, request: CacheableRequest, start: int, end: int) -> int:
        """Return where a step that computes the request's tokens from `start` on should end, at most `end`: a state is kept as a step
        has left it. Called for more than one token, before `allocate`, and behind `lookup` where the request holds no blocks."""
        return end

    @abstractmethod
    def lookup(self, request: CacheableRequest) -> tuple[BlockIds, int]:
        """Longest cached prefix: (block ids per group, tokens). At most num_tokens - 1 tokens: the last is always computed. Of a group of
        states it is the one block that `allocate` has copied.

        Takes no reference: call `allocate` with the result before any other allocation.
        """

    @abstractmethod
    def allocate(
        self,
        request: CacheableRequest,
        num_new_tokens: int,
        *,
        cached_blocks: BlockIds | None = None,
        num_cached_tokens: int = 0,
        num_external_tokens: int = 0,
        num_lookahead_tokens: int = 0,
        delay_caching: bool = False,
    ) -> BlockIds | None:
        """Make room for `num_new_tokens` after what is computed; None, and nothing changed, when blocks run out.

        cached_blocks, num_cached_tokens: from `lookup`, at the first allocation; they are taken (touched) here.
        num_external_tokens: tokens that a KV connector brings after the cached ones; they need blocks too.
        num_lookahead_tokens: room for draft tokens beyond the new ones; never cached.
        delay_caching: leave the new full blocks out of the index for now (KV comes from elsewhere).
        Returns the newly appended block ids per group, in table order (the cached ones not included; 0 for a place that a
        window has passed already). Read only: all calls that add nothing return the same empty lists.

        Full blocks of known tokens among the new ones become findable at once (DESIGN section 4); blocks that left a
        sliding window are freed.
        """

    @abstractmethod
    def cache_blocks(self, request: CacheableRequest, num_computed_tokens: int) -> None:
        """Make the full blocks of the first `num_computed_tokens` known tokens findable."""

    @abstractmethod
    def free(self, request_id: str) -> None:
        """Give back all blocks of a request, tail first. Unknown ids are not an error."""

    @abstractmethod
    def block_ids(self, request_id: str) -> BlockIds:
        """The whole table of a request, per group."""

    @abstractmethod
    def evict(self, block_ids: Iterable[int]) -> None:
        """Take blocks out of the prefix index; holders keep them, and must not expect them to become findable again.

        For blocks that were made findable before their KV was there: a step or a load failed, or a request gave up its
        place in a step that it was allocated for.
        """

    @abstractmethod
    def num_common_prefix_blocks(self, request_ids: Sequence[str]) -> list[int]:
        """Per group: leading blocks that all these requests share for as long as they run: 0 where blocks are let go, as
        windows do. Asked once for a set of requests, not at every step."""

    @abstractmethod
    def reset_prefix_cache(self) -> bool:
        """Empty the index; False, and nothing done, while any block is held."""

    @property
    @abstractmethod
    def usage(self) -> float:
        """Share of usable blocks that requests hold, 0 to 1."""

    @property
    @abstractmethod
    def num_free_blocks(self) -> int: ...

    @property
    @abstractmethod
    def num_usable_blocks(self) -> int:
        """Blocks of an empty pool (the null block not counted)."""

    @abstractmethod
    def max_blocks_needed(self, num_tokens: int) -> int:
        """Blocks that a request of `num_tokens` holds at most at once: one that needs more than the pool can never run."""

    @abstractmethod
    def take_residency(self) -> tuple[list[float], list[float], list[float]]:
        """Sampled (lifetimes, idle times before eviction, reuse gaps) in seconds since the last call."""
