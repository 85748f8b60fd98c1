"""A platform: host memory as a device of its own.

Offered here; nothing heavy is imported.
"""

from __future__ import annotations

from collections.abc import Sequence

from pelton import hookimpl
from pelton.entries import PlatformEntry

PELTON_API = ">=1,<2"
PELTON_CONFORMANCE = "pelton_skeleton.conformance"


def is_here() -> str | None:
    """Return why the device is not here; None: it is. Look for the driver's files, and import nothing heavy."""
    return None


@hookimpl
def pelton_platforms() -> Sequence[PlatformEntry]:
    # Priority 1: `--device skeleton` takes it; a real device has more than the CPU's 10.
    return [PlatformEntry(name="skeleton", load="pelton_skeleton.platform:SkeletonPlatform", priority=1, probe=is_here)]
