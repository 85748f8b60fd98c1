"""One device's share of the model. `pelton.worker.interface.Worker` has all methods of a whole worker."""

from __future__ import annotations

from pelton.messages.step import ModelOutput, SchedulerOutput
from pelton.worker.interface import WorkerContext
from pelton.worker.pending import PendingOutput
from pelton_platforms.device.worker import DeviceWorker


class SkeletonWorker(DeviceWorker):
    """Counts steps: `Executor.call("steps_run")` asks for the number."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._num_steps = 0

    def execute(self, output: SchedulerOutput) -> ModelOutput | PendingOutput | None:
        self._num_steps += 1
        return super().execute(output)

    def steps_run(self) -> int:
        return self._num_steps
