"""Offers the platform and its attention backend. Nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Sequence

from pelton import hookimpl
from pelton.entries import BackendEntry, PlatformEntry

PELTON_API = ">=1,<2"
DEVICE_TYPE = "dummy"


def is_here() -> str | None:
    """A real device would look for its driver, and say what is missing."""
    return None


@hookimpl
def pelton_platforms() -> Sequence[PlatformEntry]:
    # Priority 1: chosen by `--device dummy` only, since the CPU is always there.
    return [
        PlatformEntry(
            name="dummy",
            load="pelton_dummy_device.platform:DummyPlatform",
            priority=1,
            probe=is_here,
            doc="CPU tensors behind a platform of their own",
        )
    ]


@hookimpl
def pelton_attention_backends(device_type: str) -> Sequence[BackendEntry]:
    if device_type != DEVICE_TYPE:
        return []
    return [
        BackendEntry(
            name="dummy_loop",
            load="pelton_dummy_device.attention:LoopBackend",
            priority=10,
            device_types=(DEVICE_TYPE,),
            doc="softmax attention, a row at a time",
        )
    ]
