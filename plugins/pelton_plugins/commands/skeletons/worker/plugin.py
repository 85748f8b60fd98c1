"""A worker: the built-in one, which counts its steps.

Offered here; nothing heavy is imported.
"""

from __future__ import annotations

from collections.abc import Sequence

from pelton import hookimpl
from pelton.entries import Entry

PELTON_API = ">=1,<2"
PELTON_CONFORMANCE = "pelton_skeleton.conformance"


@hookimpl
def pelton_workers(device_type: str) -> Sequence[Entry]:
    if device_type != "cpu":
        return []
    # Priority 5 leaves the built-in one (10) in its place; a platform may name this one by `worker_class`.
    return [Entry(name="skeleton", load="pelton_skeleton.worker:SkeletonWorker", priority=5)]
