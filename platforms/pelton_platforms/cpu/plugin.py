"""Hook functions of the CPU platform."""

from __future__ import annotations

from collections.abc import Sequence

from pelton.entries import Entry, PlatformEntry
from pelton.hookspecs import hookimpl

PELTON_API = ">=1,<2"


def is_here() -> str | None:
    """A CPU is everywhere."""
    return None


@hookimpl
def pelton_platforms() -> Sequence[PlatformEntry]:
    return [
        PlatformEntry(
            name="cpu",
            load="pelton_platforms.cpu.platform:CPUPlatform",
            priority=10,
            probe=is_here,
            doc="the host's CPU",
        )
    ]


@hookimpl
def pelton_communicators(device_type: str) -> Sequence[Entry]:
    if device_type != "cpu":
        return []
    return [
        Entry(
            name="gloo",
            load="pelton_platforms.cpu.gloo:GlooCommunicator",
            doc="processes of this host, by torch's gloo",
        )
    ]
