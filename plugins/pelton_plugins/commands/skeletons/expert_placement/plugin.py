"""A placement of experts: loaded ones in turns.

Offered here; nothing heavy is imported.
"""

from __future__ import annotations

from collections.abc import Sequence

from pelton import hookimpl
from pelton.entries import Entry

PELTON_API = ">=1,<2"
PELTON_CONFORMANCE = "pelton_skeleton.conformance"


@hookimpl
def pelton_expert_placements() -> Sequence[Entry]:
    return [
        Entry(name="skeleton", load="pelton_skeleton.placement:SkeletonPlacement", doc="--eplb-config.policy skeleton")
    ]
