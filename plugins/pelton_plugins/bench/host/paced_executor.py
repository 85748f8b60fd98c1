"""An executor without a device whose steps come at a set pace: an engine for measurements of everything around it."""

from __future__ import annotations

import time

from pelton.config.plugin_settings import read_settings
from pelton.executor.interface import ExecutorContext, StepHandle
from pelton.messages.report import DeviceReport
from pelton.messages.step import ModelOutput, SchedulerOutput
from pelton_plugins.bench.host.null_executor import NullExecutor
from pelton_plugins.bench.host.paced_settings import SETTINGS, PacedSettings


class _Due(StepHandle):
    def __init__(self, output: ModelOutput, due: float) -> None:
        self._output, self._due = output, due

    def ready(self) -> bool:
        return time.monotonic() >= self._due

    def result(self, timeout_s: float | None = None) -> ModelOutput:
        left = self._due - time.monotonic()
        if left > 0:
            if timeout_s is not None and timeout_s < left:
                time.sleep(timeout_s)
                raise TimeoutError
            time.sleep(left)
        return self._output


class PacedExecutor(NullExecutor):
    """Every row that samples gets the same token, `step_s` after its launch, or after the step before."""

    def __init__(self, context: ExecutorContext) -> None:
        super().__init__(context)
        self._step_s = read_settings(context.config, SETTINGS, PacedSettings).step_s
        self._last_due = 0.0

    def execute(self, output: SchedulerOutput) -> StepHandle:
        done = super().execute(output)
        self._last_due = max(self._last_due, time.monotonic()) + self._step_s
        return _Due(done.result(), self._last_due)

    def report(self) -> DeviceReport:
        return DeviceReport(device=f"no device: a step takes {1e3 * self._step_s:g} ms", platform="none")
