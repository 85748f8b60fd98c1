"""A stat logger: the number of finished requests, published and logged.

Offered here; nothing heavy is imported.
"""

from __future__ import annotations

from collections.abc import Sequence

from pelton import hookimpl
from pelton.entries import StatLoggerEntry

PELTON_API = ">=1,<2"
PELTON_CONFORMANCE = "pelton_skeleton.conformance"


@hookimpl
def pelton_stat_loggers() -> Sequence[StatLoggerEntry]:
    return [StatLoggerEntry(name="skeleton", load="pelton_skeleton.logger:SkeletonLogger", doc="finished requests")]
