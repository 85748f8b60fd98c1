"""The in-process executor keeps what every executor has to keep."""

from __future__ import annotations

from pelton.testing.executor import ExecutorConformance
from pelton_plugins.executors.in_process import InProcessExecutor


class TestInProcess(ExecutorConformance):
    executor_class = InProcessExecutor


class TestInProcessWithManySteps(ExecutorConformance):
    executor_class = InProcessExecutor
    settings = {"max_steps_in_flight": 5}  # noqa: RUF012
