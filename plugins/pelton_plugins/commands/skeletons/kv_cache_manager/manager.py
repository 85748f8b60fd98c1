"""Blocks of requests. `pelton.kv_cache.interface.KVCacheManager` has all methods of a whole manager."""

from __future__ import annotations

from typing import Self

from pelton.kv_cache.interface import BlockIds, CacheableRequest, KVManagerContext
from pelton_plugins.kv_cache.manager import PagedKVCacheManager
from pelton.metrics.plugin_metrics import PluginMetrics


class SkeletonManager(PagedKVCacheManager):
    """Counts lookups."""

    @classmethod
    def make(cls, context: KVManagerContext) -> Self:
        manager = super().make(context)
        manager.count_into(context.metrics)
        return manager

    def count_into(self, metrics: PluginMetrics) -> None:
        self._lookups = metrics.counter("skeleton_lookups", "Prompts looked up.")

    def lookup(self, request: CacheableRequest) -> tuple[BlockIds, int]:
        self._lookups.inc()
        return super().lookup(request)
