"""Rows of a pipeline: which running requests come with a step, so that every stage has another step at work.

A request whose next token an open step samples waits until that step is through all stages, which is when as many steps came behind it.
Each step takes its share of those that decode, and leaves the others to the steps behind it. Chunks of one prompt follow each other in
the stages without a wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pelton_plugins.scheduler.request import RequestState

if TYPE_CHECKING:
    from pelton.scheduler.interface import SchedulerContext
    from pelton_plugins.scheduler.request_table import RequestTable
    from pelton_plugins.scheduler.step import OpenSteps, StepBuilder


class StageShares:
    """Asked for each running request that a step comes to."""

    def __init__(self, num_stages: int, steps: OpenSteps, table: RequestTable) -> None:
        self._num_stages = num_stages
        self._steps, self._table = steps, table
        self._through = -1  # what steps up to this one sample may be read by the next
        self._num_left = 0  # rows that decode, of this step

    def begin(self, step: StepBuilder) -> None:
        running = self._table.running
        self._num_left = -(-len(running) // self._num_stages)
        self._through = max(self._steps.retired, step.step_id - self._num_stages)
        if len(running) == 1 and len(self._steps) == 1 and not self._table.waiting:
            # Nobody else could use the stages meanwhile: its next step is made ready behind this one.
            self._through = step.step_id

    def holds_back(self, request: RequestState) -> bool:
        """Return whether it has no row in this step. False takes its part of the share."""
        if request.num_pending and request.last_step_id > self._through:
            return True
        if request.is_in_decode:
            self._num_left -= 1
            return self._num_left < 0
        return False


def make_stage_shares(context: SchedulerContext, steps: OpenSteps, table: RequestTable) -> StageShares | None:
    """None where one device has all layers, or one step is open at a time."""
    settings = context.engine_config
    num_stages = 1 if settings is None else settings.parallel.pipeline_parallel_size
    if num_stages == 1 or context.max_steps_in_flight == 1:
        return None
    return StageShares(num_stages, steps, table)
