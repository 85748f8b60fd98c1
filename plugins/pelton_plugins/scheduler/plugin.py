"""Hook functions of the scheduler and its policies."""

from __future__ import annotations

from collections.abc import Sequence

from pelton.entries import Entry, SettingsEntry
from pelton.hookspecs import hookimpl

PELTON_API = ">=1,<2"
_PACKAGE = "pelton_plugins.scheduler"


@hookimpl
def pelton_schedulers() -> Sequence[Entry]:
    return [Entry(name="default", load=f"{_PACKAGE}.scheduler:DefaultScheduler", priority=10,
                  doc="continuous batching with chunked prefill")]  # fmt: skip


@hookimpl
def pelton_scheduling_policies() -> Sequence[Entry]:
    return [
        Entry(name="fcfs", load=f"{_PACKAGE}.policies:FCFSPolicy", priority=10, doc="first come, first served"),
        Entry(
            name="fair",
            load=f"{_PACKAGE}.fair_policy:FairPolicy",
            priority=10,
            doc="who got fewest tokens of those that wait",
        ),
        Entry(name="priority", load=f"{_PACKAGE}.policies:PriorityPolicy", priority=10, doc="lower value first"),
    ]


@hookimpl
def pelton_settings() -> Sequence[SettingsEntry]:
    return [SettingsEntry(name="fair", load=f"{_PACKAGE}.fair_policy:FairSettings", doc="shares of tenants")]
