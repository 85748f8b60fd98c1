"""Hook functions of the KV-cache manager."""

from __future__ import annotations

from collections.abc import Sequence

from pelton.entries import Entry
from pelton.hookspecs import hookimpl

PELTON_API = ">=1,<2"


@hookimpl
def pelton_kv_cache_managers() -> Sequence[Entry]:
    return [Entry(name="default", load="pelton_plugins.kv_cache.manager:PagedKVCacheManager.make", priority=10,
                  doc="paged blocks with a prefix cache")]  # fmt: skip
