"""Steps on one worker of this process, counted. `pelton.executor.interface.Executor` has all methods of a whole one."""

from __future__ import annotations

from pelton_plugins.executors.in_process import InProcessExecutor
from pelton.executor.interface import ExecutorContext, StepHandle
from pelton.messages.step import SchedulerOutput


class SkeletonExecutor(InProcessExecutor):
    """Counts steps; /metrics and `LLM.get_metrics()` show them."""

    def __init__(self, context: ExecutorContext) -> None:
        self._steps = context.metrics.counter("skeleton_steps", "Steps launched.")
        super().__init__(context)

    def execute(self, output: SchedulerOutput) -> StepHandle:
        self._steps.inc()
        return super().execute(output)
