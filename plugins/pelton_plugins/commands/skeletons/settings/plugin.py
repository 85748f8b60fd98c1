"""Settings of a plugin's own, checked at the start, and put to use in each worker.

Offered here; nothing heavy is imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pelton import hookimpl
from pelton.config import EngineConfig
from pelton.config.plugin_settings import read_settings
from pelton.entries import SettingsEntry

PELTON_API = ">=1,<2"
PELTON_CONFORMANCE = "pelton_skeleton.conformance"


@hookimpl
def pelton_settings() -> Sequence[SettingsEntry]:
    return [SettingsEntry(name="skeleton", load="pelton_skeleton.settings:SkeletonSettings")]


@hookimpl
def pelton_worker_settings(config: EngineConfig, device_type: str) -> Mapping[str, str]:
    """Called in each worker before anything is asked for backends and ops. Returns rows of the start table."""
    from pelton_skeleton.settings import SkeletonSettings

    return {"skeleton weight": str(read_settings(config, "skeleton", SkeletonSettings).weight)}
