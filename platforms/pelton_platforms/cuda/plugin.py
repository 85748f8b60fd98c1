"""Hook functions of the CUDA platform."""

from __future__ import annotations

from collections.abc import Sequence

from pelton.entries import PlatformEntry
from pelton.hookspecs import hookimpl
from pelton_platforms.cuda.driver import why_not_here

PELTON_API = ">=1,<2"


@hookimpl
def pelton_platforms() -> Sequence[PlatformEntry]:
    return [
        PlatformEntry(
            name="cuda",
            load="pelton_platforms.cuda.platform:CUDAPlatform",
            priority=50,
            probe=why_not_here,
            doc="NVIDIA GPUs",
        )
    ]
