"""Conformance of scheduling policies: what any implementation has to keep, run with pytest.

Subclass `SchedulingPolicyConformance` in a test module and set `policy_class`.
"""

from __future__ import annotations

import random
from typing import Any, ClassVar

import pytest

from pelton.scheduler.policy import SchedulingPolicy
from pelton.scheduler.request import ScheduledRequest
from pelton.testing.scheduler import Harness, make_request


class _Watched(SchedulingPolicy):
    """The policy under test; what it answers is checked and kept."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self.ranks: dict[str, tuple[Any, ...]] = {}
        self.ends: set[str] = set()

    def rank(self, request: ScheduledRequest) -> tuple[Any, ...]:
        rank = self._policy.rank(request)
        assert isinstance(rank, tuple), f"rank returns {rank!r}; it must return a tuple"
        before = self.ranks.setdefault(request.request_id, rank)
        assert before == rank, f"the rank of a request changes from {before} to {rank} while it lives"
        return rank

    def queue_rank(self, request: ScheduledRequest) -> tuple[Any, ...]:
        return self._policy.queue_rank(request)

    def admits(self, request: ScheduledRequest, running: Any) -> bool:
        return self._policy.admits(request, running)

    def holds_back(self, request: ScheduledRequest, running: Any) -> bool:
        return self._policy.holds_back(request, running)

    def ended(self, request: ScheduledRequest) -> None:
        assert request.request_id not in self.ends, "ended is called twice for a request"
        self.ends.add(request.request_id)
        self._policy.ended(request)

    def victim(self, candidates: Any) -> ScheduledRequest:
        victim = self._policy.victim(candidates)
        assert any(victim is one for one in candidates), "the victim is not one of the candidates"
        return victim

    def max_new_tokens(self, request: ScheduledRequest, num_tokens: int) -> int:
        most = self._policy.max_new_tokens(request, num_tokens)
        assert 1 <= most <= num_tokens, f"max_new_tokens is {most}; it must be 1 to {num_tokens}"
        return most


class SchedulingPolicyConformance:
    policy_class: ClassVar[type[SchedulingPolicy]]

    @pytest.mark.parametrize(
        "options", [{}, {"num_blocks": 14}, {"max_steps_in_flight": 2, "num_blocks": 20}],
        ids=["much-room", "little-room", "open-steps"],
    )  # fmt: skip
    def test_every_request_gets_its_tokens(self, options: dict[str, Any]) -> None:
        """Requests of many lengths and priorities, some added while others run: none waits for ever, none loses a token."""
        watched, chooser = _Watched(self.policy_class()), random.Random(1)
        harness = Harness(policy=watched, **options)
        for index in range(12):
            count, priority = chooser.choice((1, 3, 9, 17)), chooser.choice((0, 0, 1, 5))
            harness.add(make_request(f"r{index}", count, chooser.choice((1, 4, 11)), priority=priority))
            for _ in range(chooser.randrange(3)):
                harness.step()
        harness.run_and_check()
        assert len(set(watched.ranks.values())) == len(watched.ranks), "two requests have the same rank"

    def test_two_of_them_share_nothing(self) -> None:
        """An engine of the same process has a policy of its own."""
        first, second = self.policy_class(), self.policy_class()
        assert first is not second
        for policy in (first, second):
            harness = Harness(policy=_Watched(policy))
            for index in range(3):
                harness.add(make_request(f"r{index}", 5))
            harness.run_and_check()
