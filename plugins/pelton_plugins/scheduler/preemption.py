"""Preemption: which request gives its blocks up, waits or is cut when the pool has no free block.

A running request takes blocks from requests that are ranked behind it; a waiting one takes none.
"""

from __future__ import annotations

from typing import cast

from pelton.scheduler.policy import SchedulingPolicy
from pelton_plugins.scheduler.allocations import Allocations
from pelton_plugins.scheduler.kv_transfers import KVTransfers
from pelton_plugins.scheduler.request import RequestState
from pelton_plugins.scheduler.request_table import RequestTable
from pelton_plugins.scheduler.step import OpenSteps, StepBuilder


class Preemption:
    def __init__(
        self,
        policy: SchedulingPolicy,
        table: RequestTable,
        allocations: Allocations,
        transfers: KVTransfers,
        steps: OpenSteps,
    ) -> None:
        self._policy = policy
        self._table = table
        self._allocations = allocations
        self._transfers = transfers
        self._steps = steps

    def make_room_for_running(self, request: RequestState, index: int, step: StepBuilder) -> bool:
        """Preempt for `running[index]`. True: try again. False: it gets nothing in this step."""
        if self._comes_back():
            return False
        running = self._table.running
        if len(running) > 1:
            victim = cast("RequestState", self._policy.victim(running[index:]))  # one of them
            self._table.preempt(victim)
            step.has_preempted = True
            return victim is not request
        if self._release_idle_holder():
            return True
        if not self._table.is_receiving() and request.last_step_id <= self._steps.retired:
            self._table.end_at_full_cache(request)
            self._table.drop_finished_rows()
        return False

    def make_room_for_head(self, request: RequestState, step: StepBuilder) -> bool:
        """End the head of the queue where no other request could free blocks for it, so that it would wait for ever. True: look again."""
        if self._table.running or step.num_rows or len(self._steps) or self._comes_back():
            return False
        if self._release_idle_holder():
            return True
        if self._table.is_receiving():
            return False
        self._table.end_at_full_cache(request)
        return True

    def _comes_back(self) -> bool:
        """Blocks come back without a victim."""
        return self._allocations.has_fenced or self._transfers.holds_blocks

    def _release_idle_holder(self) -> bool:
        """Take the blocks of a waiting request whose KV has arrived; True when there was one."""
        holder = next((request for request in self._table.receiving() if request.is_remote_ready), None)
        if holder is None:
            return False
        self._table.preempt(holder)
        return True
