"""The orders in which requests are served: first come first served, and by priority."""

from __future__ import annotations

from typing import Any

from pelton.scheduler.policy import SchedulingPolicy
from pelton.scheduler.request import RequestStatus, ScheduledRequest


class FCFSPolicy(SchedulingPolicy):
    """First come, first served: the latest arrival is the victim."""

    def rank(self, request: ScheduledRequest) -> tuple[Any, ...]:
        return (request.arrival,)


class PriorityPolicy(SchedulingPolicy):
    """Lower `priority` first, ties by arrival: the highest value, latest arrival, is the victim.

    A preempted request goes to the front of its own priority only: one of lower value that waits still comes first.
    """

    def rank(self, request: ScheduledRequest) -> tuple[Any, ...]:
        return (request.request.priority, request.arrival)

    def queue_rank(self, request: ScheduledRequest) -> tuple[Any, ...]:
        return (request.request.priority, request.status is not RequestStatus.PREEMPTED, request.arrival)
