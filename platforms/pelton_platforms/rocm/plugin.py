"""Hook functions of the ROCm platform."""

from __future__ import annotations

from collections.abc import Sequence

from pelton.entries import PlatformEntry
from pelton.hookspecs import hookimpl
from pelton_platforms.rocm.driver import why_not_here

PELTON_API = ">=1,<2"


@hookimpl
def pelton_platforms() -> Sequence[PlatformEntry]:
    return [
        PlatformEntry(
            name="rocm",
            load="pelton_platforms.rocm.platform:RocmPlatform",
            priority=50,
            probe=why_not_here,
            doc="AMD GPUs (not tried on hardware)",
        )
    ]
