"""The in-process executor keeps what every executor has to keep."""

from __future__ import annotations

from pelton.executor.in_process import InProcessExecutor
from pelton.testing.executor import ExecutorConformance


class TestInProcess(ExecutorConformance):
    executor_class = InProcessExecutor


class TestInProcessWithManySteps(ExecutorConformance):
    executor_class = InProcessExecutor
    settings = {"max_steps_in_flight": 5}  # noqa: RUF012
