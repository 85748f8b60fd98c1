"""Hook functions of the executors."""

from __future__ import annotations

from collections.abc import Sequence

from pelton.entries import ExecutorEntry
from pelton.hookspecs import hookimpl

PELTON_API = ">=1,<2"


@hookimpl
def pelton_executors() -> Sequence[ExecutorEntry]:
    return [
        ExecutorEntry(
            name="in_process", aliases=("uni",), load="pelton_plugins.executors.in_process:InProcessExecutor", priority=10,
            imports=("torch",),
            doc="one worker on a thread of the engine's process",
        ),
        ExecutorEntry(
            name="multiproc", aliases=("mp",), load="pelton_plugins.executors.multiproc.executor:MultiProcExecutor", priority=10,
            runs_several=True, doc="a process for each rank of one host",
        ),
    ]  # fmt: skip
