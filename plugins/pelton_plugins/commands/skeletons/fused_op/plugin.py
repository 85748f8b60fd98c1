"""A fused op of its own, which its layers bind, with a reference and an implementation.

Offered here; nothing heavy is imported.
"""

from __future__ import annotations

from collections.abc import Sequence

from pelton import hookimpl
from pelton.entries import Entry, OpEntry

PELTON_API = ">=1,<2"
PELTON_CONFORMANCE = "pelton_skeleton.conformance"


@hookimpl
def pelton_fused_ops() -> Sequence[Entry]:
    return [Entry(name="skeleton_scale", load="pelton_skeleton.ops:SKELETON_SCALE", doc="hidden states, scaled")]


@hookimpl
def pelton_ops(device_type: str) -> Sequence[OpEntry]:
    if device_type != "cpu":
        return []
    return [OpEntry(name="in_place.skeleton_scale", op="skeleton_scale", load="pelton_skeleton.ops:InPlaceScale")]
