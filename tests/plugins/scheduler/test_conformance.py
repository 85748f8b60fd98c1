"""The built-in scheduler runs the suite that plugin authors run."""

from __future__ import annotations

from pelton.testing.scheduler import SchedulerConformance
from pelton_plugins.scheduler.scheduler import DefaultScheduler


class TestDefaultScheduler(SchedulerConformance):
    def make_scheduler(self, context):
        return DefaultScheduler(context)
