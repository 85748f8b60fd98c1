"""Is there an AMD device, and can the installed torch use it? Answered from files: nothing imports torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from pelton_platforms.gpu.torch_build import torch_built_with

_HIDING = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def torch_hip_version() -> str | None:
    """HIP version that the installed torch was built with, such as "6.4"; None for a build without HIP."""
    return torch_built_with("hip")


def why_not_here(
    root: Path = Path("/"),
    environ: Mapping[str, str] = os.environ,
    hip_version: Callable[[], str | None] = torch_hip_version,
) -> str | None:
    """The platform's probe: None when a device and its driver are here, and torch was built for them."""
    for name in _HIDING:
        visible = environ.get(name)
        if visible is not None and visible.split(",")[0].strip() in ("", "-1"):
            return f"{name} is {visible!r}, which hides every device"
    if not (root / "dev/kfd").exists():
        return "no AMD device (no /dev/kfd)"
    if hip_version() is None:
        return "an AMD device is here, but the installed torch was built without ROCm"
    return None
