"""Hook functions of the executors."""

from __future__ import annotations

from collections.abc import Sequence

from pelton.entries import Entry, ExecutorEntry, SettingsEntry
from pelton.hookspecs import hookimpl

PELTON_API = ">=1,<2"


@hookimpl
def pelton_settings() -> Sequence[SettingsEntry]:
    return [
        SettingsEntry(
            name="ray",
            load="pelton_plugins.executors.ray_cluster.settings:RaySettings",
            doc="where ranks run in a Ray cluster",
        )
    ]


@hookimpl
def pelton_expert_placements() -> Sequence[Entry]:
    return [
        Entry(
            name="default", load="pelton_plugins.executors.shared_experts.even_load:EvenLoad", priority=10,
            doc="the most loaded expert first, to the rank with the least",
        )
    ]  # fmt: skip


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
            runs_several=True, ahead="pelton_plugins.executors.multiproc.processes:RanksAhead",
            doc="a process for each rank of one host",
        ),
        ExecutorEntry(
            name="ray", load="pelton_plugins.executors.ray_cluster.executor:RayExecutor", priority=-5, runs_several=True,
            doc="ranks as actors of a Ray cluster, on one host or several (the extra ray)",
        ),
    ]  # fmt: skip
