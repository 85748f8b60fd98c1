"""A client of several engines (data parallelism): requests go to them in turn.

Offered here; nothing heavy is imported.
"""

from __future__ import annotations

from collections.abc import Sequence

from pelton import hookimpl
from pelton.entries import Entry

PELTON_API = ">=1.2,<2"
PELTON_CONFORMANCE = "pelton_skeleton.conformance"


@hookimpl
def pelton_engine_clients() -> Sequence[Entry]:
    # Used where --data-parallel-routing names it.
    return [Entry(name="skeleton", load="pelton_skeleton.client:SkeletonClient", doc="requests in turn")]
