"""A kind of KV cache: a spec with the manager of its blocks.

Offered here; nothing heavy is imported.
"""

from __future__ import annotations

from collections.abc import Sequence

from pelton import hookimpl
from pelton.entries import Entry

PELTON_API = ">=1,<2"
PELTON_CONFORMANCE = "pelton_skeleton.conformance"


@hookimpl
def pelton_kv_cache_specs() -> Sequence[Entry]:
    return [Entry(name="skeleton", load="pelton_skeleton.cache:KIND", doc="a window that keeps one more block")]
