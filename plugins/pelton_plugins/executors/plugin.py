"""Hook functions of the executors."""

from __future__ import annotations

from collections.abc import Sequence

from pelton.entries import Entry
from pelton.hookspecs import hookimpl

PELTON_API = ">=1,<2"


@hookimpl
def pelton_executors() -> Sequence[Entry]:
    return [Entry(name="in_process", load="pelton_plugins.executors.in_process:InProcessExecutor", priority=10,
                  doc="one worker on a thread of the engine's process")]  # fmt: skip
