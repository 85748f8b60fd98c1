"""Hook functions of the device worker, and the torch references of the ops around its forward pass."""

from __future__ import annotations

from collections.abc import Sequence

from pelton.entries import Entry, OpEntry
from pelton.hookspecs import hookimpl

PELTON_API = ">=1,<2"


@hookimpl
def pelton_workers(device_type: str) -> Sequence[Entry]:
    return [Entry(name="device", load="pelton_platforms.device.worker:DeviceWorker", priority=10,
                  doc=f"torch on {device_type}, with the ops and attention that plugins offer")]  # fmt: skip


@hookimpl
def pelton_ops() -> Sequence[OpEntry]:
    ops = (("prepare_inputs", "PrepareInputs"), ("sample", "Sample"), ("logprobs", "Logprobs"))
    return [OpEntry(name=f"reference.{op}", op=op, load=f"pelton_platforms.device.steps.reference_step:Reference{name}",
                    priority=10, doc="plain torch") for op, name in ops]  # fmt: skip
