"""Conformance of workers: what any implementation has to keep under an executor, run with pytest.

Subclass `WorkerConformance` in a test module and set `worker_class`.
"""

from __future__ import annotations

from typing import ClassVar

from pelton.entries import Entry
from pelton.executor.interface import Executor, ExecutorContext
from pelton.hookspecs import hookimpl
from pelton.plugins import Plugins, register
from pelton.testing.executor import ExecutorConformance
from pelton.worker.interface import Worker


class _Offer:
    """A plugin that puts one worker before all others."""

    PELTON_API = ">=1,<2"

    def __init__(self, worker_class: type[Worker]) -> None:
        self.entry = Entry(
            name="under_test", load=f"{worker_class.__module__}:{worker_class.__qualname__}", priority=10_000
        )

    @hookimpl
    def pelton_workers(self, device_type: str) -> list[Entry]:
        return [self.entry]


class WorkerConformance(ExecutorConformance):
    """The tests of executors, over the best one with this worker."""

    worker_class: ClassVar[type[Worker]]

    def plugins(self) -> Plugins:
        plugins = super().plugins()
        register(plugins.manager, _Offer(self.worker_class), "worker_under_test", "the suite")
        return plugins

    def make_executor(self, context: ExecutorContext) -> Executor:
        made: Executor = context.plugins.entries("pelton_executors")[0].resolve()(context)
        return made
