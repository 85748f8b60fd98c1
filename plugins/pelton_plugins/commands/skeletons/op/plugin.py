"""A fused op's implementation: the gated activation, without memory for the result.

Offered here; nothing heavy is imported.
"""

from __future__ import annotations

from collections.abc import Sequence

from pelton import hookimpl
from pelton.entries import OpEntry, SettingsEntry

PELTON_API = ">=1,<2"
PELTON_CONFORMANCE = "pelton_skeleton.conformance"


@hookimpl
def pelton_ops(device_type: str) -> Sequence[OpEntry]:
    if device_type != "cpu":
        return []
    # Priority 5 is below torch's references: 100 is for vendor-tuned kernels, 50 for portable ones.
    return [OpEntry(name="skeleton.gated", op="gated", load="pelton_skeleton.ops:SkeletonGated", priority=5)]


@hookimpl
def pelton_settings() -> Sequence[SettingsEntry]:
    return [SettingsEntry(name="skeleton", load="pelton_skeleton.settings:SkeletonSettings")]
