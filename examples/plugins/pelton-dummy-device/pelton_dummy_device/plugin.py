"""Offers the platform, its attention backend and its communicator. Nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Sequence

from pelton import hookimpl
from pelton.entries import BackendEntry, Entry, PlatformEntry

PELTON_API = ">=1.2,<2"
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


@hookimpl
def pelton_communicators(device_type: str) -> Sequence[Entry]:
    if device_type != DEVICE_TYPE:
        return []
    return [
        Entry(
            name="dummy_sockets",
            load="pelton_dummy_device.communicator:SocketCommunicator",
            priority=10,
            doc="a socket for each pair of ranks",
        )
    ]
