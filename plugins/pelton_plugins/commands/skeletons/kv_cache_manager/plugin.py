"""A KV-cache manager: the built-in one, with a counter of lookups.

Offered here; nothing heavy is imported.
"""

from __future__ import annotations

from collections.abc import Sequence

from pelton import hookimpl
from pelton.entries import Entry

PELTON_API = ">=1,<2"
PELTON_CONFORMANCE = "pelton_skeleton.conformance"


@hookimpl
def pelton_kv_cache_managers() -> Sequence[Entry]:
    # Priority 5: below the built-in one, and named by `--kv-cache-manager skeleton`.
    return [Entry(name="skeleton", load="pelton_skeleton.manager:SkeletonManager.make", priority=5)]
