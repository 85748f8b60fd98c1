"""The built-in manager keeps what every KV-cache manager has to keep."""

from __future__ import annotations

from pelton.testing.kv_cache import KVCacheManagerConformance
from pelton_plugins.kv_cache.manager import PagedKVCacheManager


class TestPagedKVCacheManager(KVCacheManagerConformance):
    def make_manager(self, plan, config, max_model_len, max_num_batched_tokens):
        return PagedKVCacheManager(
            plan, config, max_model_len=max_model_len, max_num_batched_tokens=max_num_batched_tokens
        )
