"""Hook functions of the device worker."""

from __future__ import annotations

from collections.abc import Sequence

from pelton.entries import Entry
from pelton.hookspecs import hookimpl

PELTON_API = ">=1,<2"


@hookimpl
def pelton_workers(device_type: str) -> Sequence[Entry]:
    return [Entry(name="device", load="pelton_platforms.device.worker:DeviceWorker", priority=10,
                  doc=f"torch on {device_type}, with the ops and attention that plugins offer")]  # fmt: skip
