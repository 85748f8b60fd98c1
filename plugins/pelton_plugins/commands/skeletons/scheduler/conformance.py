"""Conformance of this package's scheduler."""

from __future__ import annotations

from pelton.scheduler.interface import Scheduler, SchedulerContext
from pelton.testing.scheduler import SchedulerConformance

from pelton_skeleton.scheduler import SkeletonScheduler


class TestSkeletonScheduler(SchedulerConformance):
    def make_scheduler(self, context: SchedulerContext) -> Scheduler:
        return SkeletonScheduler(context)
