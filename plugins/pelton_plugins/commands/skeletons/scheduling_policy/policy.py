"""The order of requests. `SchedulingPolicy` has admission, victims of preemption and shares of a step besides."""

from __future__ import annotations

from typing import Any

from pelton.scheduler.policy import SchedulingPolicy
from pelton.scheduler.request import ScheduledRequest


class SkeletonPolicy(SchedulingPolicy):
    """Short prompts first; ties by arrival."""

    def rank(self, request: ScheduledRequest) -> tuple[Any, ...]:
        return (request.num_prompt_tokens, request.arrival)
