"""An attention backend: plain torch on the CPU, a row at a time.

Offered here; nothing heavy is imported.
"""

from __future__ import annotations

from collections.abc import Sequence

from pelton import hookimpl
from pelton.entries import BackendEntry, SettingsEntry

PELTON_API = ">=1,<2"
PELTON_CONFORMANCE = "pelton_skeleton.conformance"


@hookimpl
def pelton_attention_backends(device_type: str) -> Sequence[BackendEntry]:
    if device_type != "cpu":
        return []
    # Priority 5: named by `--attention-backend skeleton`. 100 is for vendor-tuned kernels, 50 for portable ones.
    return [
        BackendEntry(
            name="skeleton", load="pelton_skeleton.attention:SkeletonBackend", priority=5, device_types=("cpu",)
        )
    ]


@hookimpl
def pelton_settings() -> Sequence[SettingsEntry]:
    return [SettingsEntry(name="skeleton", load="pelton_skeleton.settings:SkeletonSettings")]
