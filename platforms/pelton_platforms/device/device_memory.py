"""How a device gets memory for parameters and caches, and weights into it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pelton_platforms.device.host_copy import cuda_copier
from pelton_platforms.device.large_pages import LargePages

if TYPE_CHECKING:
    from pelton.model.build import BuildConfig


def use_device_memory(build: BuildConfig) -> None:
    """Let the layers of `build` have what this kind of device offers. Before the first is made."""
    if build.device.type == "cpu":
        build.allocate = LargePages().zeros
    elif build.device.type == "cuda":
        build.weights.make_copier = cuda_copier
