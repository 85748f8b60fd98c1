"""The built-in scheduler runs the suite that plugin authors run."""

from __future__ import annotations

from pelton.scheduler.scheduler import DefaultScheduler
from pelton.testing.scheduler import SchedulerConformance


class TestDefaultScheduler(SchedulerConformance):
    def make_scheduler(self, context):
        return DefaultScheduler(context)
