"""A scheduler. `pelton.scheduler.interface.Scheduler` has all methods of a whole one; an order of requests alone is a policy."""

from __future__ import annotations

from pelton.messages.step import SchedulerOutput
from pelton.scheduler.interface import SchedulerContext
from pelton_plugins.scheduler.scheduler import DefaultScheduler


class SkeletonScheduler(DefaultScheduler):
    """Counts the tokens that it schedules."""

    def __init__(self, context: SchedulerContext) -> None:
        super().__init__(context)
        self._tokens = context.metrics.counter("skeleton_tokens", "Tokens scheduled.")

    def schedule(self) -> SchedulerOutput | None:
        output = super().schedule()
        if output is not None:
            self._tokens.inc(output.total_num_scheduled_tokens)
        return output
