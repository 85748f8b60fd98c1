"""A LoRA resolver: adapters that a table in the settings names.

Offered here; nothing heavy is imported.
"""

from __future__ import annotations

from collections.abc import Sequence

from pelton import hookimpl
from pelton.entries import Entry, SettingsEntry

PELTON_API = ">=1,<2"
PELTON_CONFORMANCE = "pelton_skeleton.conformance"


@hookimpl
def pelton_lora_resolvers() -> Sequence[Entry]:
    return [Entry(name="skeleton", load="pelton_skeleton.resolver:SkeletonResolver", doc="--lora-resolvers skeleton")]


@hookimpl
def pelton_settings() -> Sequence[SettingsEntry]:
    return [SettingsEntry(name="skeleton", load="pelton_skeleton.resolver:SkeletonSettings")]
