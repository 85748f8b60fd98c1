"""The pool is out of blocks: who gives way, who waits, and whose output is cut.

A running request takes from those ranked behind it; one that waits takes from nobody.
"""

from __future__ import annotations

from pelton.scheduler.holdings import Holdings
from pelton.scheduler.policy import SchedulingPolicy
from pelton.scheduler.request import ScheduledRequest
from pelton.scheduler.roster import Roster
from pelton.scheduler.step import OpenSteps, StepBuilder
from pelton.scheduler.transfers import Transfers


class Room:
    def __init__(
        self, policy: SchedulingPolicy, roster: Roster, holdings: Holdings, transfers: Transfers, steps: OpenSteps
    ) -> None:
        self._policy = policy
        self._roster = roster
        self._holdings = holdings
        self._transfers = transfers
        self._steps = steps

    def make_for_running(self, request: ScheduledRequest, index: int, step: StepBuilder) -> bool:
        """Preempt for `running[index]`. True: try again. False: it gets nothing in this step."""
        if self._comes_back():
            return False
        running = self._roster.running
        if len(running) > 1:
            victim = self._policy.victim(running[index:])
            self._roster.preempt(victim)
            step.has_preempted = True
            return victim is not request
        if self._release_idle_holder():
            return True
        if not self._roster.is_receiving() and request.last_step_id <= self._steps.retired:
            self._roster.end_without_room(request)
            self._roster.drop_finished_rows()
        return False

    def make_for_head(self, request: ScheduledRequest, step: StepBuilder) -> bool:
        """With nobody else to give any back, the head of the queue would wait for ever: end it. True: look again."""
        if self._roster.running or step.num_rows or len(self._steps) or self._comes_back():
            return False
        if self._release_idle_holder():
            return True
        if self._roster.is_receiving():
            return False
        self._roster.end_without_room(request)
        return True

    def _comes_back(self) -> bool:
        """Blocks come back without a victim."""
        return self._holdings.has_fenced or self._transfers.holds_blocks

    def _release_idle_holder(self) -> bool:
        """Take the blocks of a waiting request whose KV has arrived; True when there was one."""
        holder = next((request for request in self._roster.receiving() if request.is_remote_ready), None)
        if holder is None:
            return False
        self._roster.preempt(holder)
        return True
