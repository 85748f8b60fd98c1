"""The longest prefix that every kind of layer finds in the cache.

`NoPrefixCache` finds nothing, `UnitaryCoordinator` asks the only manager, `HybridCoordinator` makes several agree.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

from pelton.kv_cache.interface import BlockIds
from pelton_plugins.kv_cache.single_type import SingleTypeManager


class Coordinator(ABC):
    caches_blocks = True
    """False: no block is ever made findable."""

    def __init__(self, managers: Sequence[SingleTypeManager]) -> None:
        self.managers = managers
        self.num_groups = sum(len(manager.group_ids) for manager in managers)
        self.alignment = math.lcm(*(manager.block_size for manager in managers))
        """Every hit is a multiple of so many tokens."""
        self.num_shared = 0
        """Tokens of the last look-up that layers which keep every token have found, whatever the others had."""

    @abstractmethod
    def longest_hit(self, block_hashes: Sequence[bytes], max_tokens: int) -> tuple[BlockIds, int]:
        """(a table per group, tokens) of the longest cached prefix of at most `max_tokens`; the tables are the caller's."""


class NoPrefixCache(Coordinator):
    """Prefix caching is off, or a layer's state cannot be found again."""

    caches_blocks = False

    def longest_hit(self, block_hashes: Sequence[bytes], max_tokens: int) -> tuple[BlockIds, int]:
        return tuple([] for _ in range(self.num_groups)), 0


class UnitaryCoordinator(Coordinator):
    """All groups have the same spec: nothing to agree on."""

    def longest_hit(self, block_hashes: Sequence[bytes], max_tokens: int) -> tuple[BlockIds, int]:
        manager = self.managers[0]
        tables, num_tokens = manager.longest_hit(block_hashes, max_tokens, manager.block_size)
        return tuple(tables), num_tokens


class HybridCoordinator(Coordinator):
    """Several kinds of layers: the longest length that is a hit for each of them.

    Each kind in turn answers with its longest hit within what the ones before left, until all gave the same length.
    Full attention comes first and once: every shorter prefix of its hit is one too. A window's is not, so with two
    windows each may have to answer again. Lengths only fall, and 0 is a hit for all, so this ends.
    """

    def __init__(self, managers: Sequence[SingleTypeManager]) -> None:
        super().__init__(managers)
        self._in_order = sorted(managers, key=lambda manager: not manager.hits_are_prefixes)

    def longest_hit(self, block_hashes: Sequence[bytes], max_tokens: int) -> tuple[BlockIds, int]:
        hits: dict[SingleTypeManager, tuple[list[list[int]], int]] = {}
        length = max_tokens // self.alignment * self.alignment
        agreed = False
        while not agreed:
            agreed = True
            for manager in self._in_order:
                known = hits.get(manager)
                if known is not None and (known[1] == length or manager.hits_are_prefixes):
                    continue
                hits[manager] = manager.longest_hit(block_hashes, length, self.alignment)
                if hits[manager][1] < length:
                    length = hits[manager][1]
                    agreed = False
        self.num_shared = min((hits[manager][1] for manager in hits if manager.hits_are_prefixes), default=0)
        tables: list[list[int]] = [[] for _ in range(self.num_groups)]
        for manager, (found, _) in hits.items():
            num_places = length // manager.block_size
            for group_id, table in zip(manager.group_ids, found, strict=True):
                tables[group_id] = table[:num_places]
        return tuple(tables), length


def make_coordinator(managers: Sequence[SingleTypeManager], *, enable_prefix_caching: bool) -> Coordinator:
    if not enable_prefix_caching or not managers or not all(manager.supports_prefix_cache for manager in managers):
        return NoPrefixCache(managers)
    return UnitaryCoordinator(managers) if len(managers) == 1 else HybridCoordinator(managers)
