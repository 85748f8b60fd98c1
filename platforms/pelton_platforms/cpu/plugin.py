"""Hook functions of the CPU platform."""

from __future__ import annotations

import os
from collections.abc import Sequence

from pelton.entries import Entry, PlatformEntry
from pelton.hookspecs import hookimpl

PELTON_API = ">=1,<2"


def is_here() -> str | None:
    """A CPU is everywhere."""
    return None


def is_x86_linux() -> bool:
    """Return whether memory orders its writes as `shared` needs it, and there is some to share."""
    return os.path.isdir("/dev/shm") and os.uname().machine in ("x86_64", "AMD64")


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
    gloo = Entry(
        name="gloo",
        load="pelton_platforms.cpu.gloo:GlooCommunicator",
        doc="processes of this host, by torch's gloo",
    )
    shared = Entry(
        name="shared",
        load="pelton_platforms.cpu.shared:SharedMemoryCommunicator",
        priority=60,
        doc="processes of this host, by memory that they share",
    )
    return [shared, gloo] if is_x86_linux() else [gloo]
