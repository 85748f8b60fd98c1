"""Conformance of this package's KV-cache manager."""

from __future__ import annotations

from pelton.config import KVCacheConfig
from pelton.kv_cache.interface import KVCacheManager, KVManagerContext
from pelton.kv_cache.spec import KVCachePlan
from pelton.testing.kv_cache import KVCacheManagerConformance

from pelton_skeleton.manager import SkeletonManager


class TestSkeletonManager(KVCacheManagerConformance):
    def make_manager(
        self, plan: KVCachePlan, config: KVCacheConfig, max_model_len: int, max_num_batched_tokens: int
    ) -> KVCacheManager:
        return SkeletonManager.make(
            KVManagerContext(
                plan=plan, config=config, max_model_len=max_model_len, max_num_batched_tokens=max_num_batched_tokens
            )
        )
