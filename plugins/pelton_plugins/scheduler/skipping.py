"""Skip steps in which every running request decodes and nothing else happens: for simulators, which need not see each of them.

The state afterwards is that of as many calls of `schedule` and `update`, but for which of the free blocks each request got.
"""

from __future__ import annotations

from pelton.kv_cache.interface import KVCacheManager
from pelton_plugins.scheduler.allocations import Allocations
from pelton_plugins.scheduler.request_table import RequestTable
from pelton_plugins.scheduler.step import OpenSteps, StepBuilder
from pelton_plugins.scheduler.step_results import StepResults


class StepSkipper:
    """is_plain: False where drafts, connectors, adapters or unordered steps make every step a different one."""

    def __init__(
        self, kv: KVCacheManager, table: RequestTable, allocations: Allocations, steps: OpenSteps, results: StepResults,
        *, is_plain: bool,
    ) -> None:  # fmt: skip
        self._kv, self._table, self._allocations, self._steps, self._results = kv, table, allocations, steps, results
        self._is_plain = is_plain

    def most(self, most: int) -> int:
        """Return how many steps may be skipped now, at most `most`: no request ends in them, and blocks suffice for all."""
        table, running = self._table, self._table.running
        if not (self._is_plain and running) or table.waiting or table.deferred or table.num_grammars:
            return 0
        if not all(self._serves_all(output_rows) for output_rows in self._steps.rows()):
            return 0
        first_open = self._steps.next_id - len(self._steps)
        for request in running:
            if not request.is_in_decode or request.discard_through_step >= first_open or not request.only_samples:
                return 0
            most = min(most, request.max_total_tokens - request.num_tokens_with_pending)
        return most if most > 0 and self._has_room(most) else 0

    def _serves_all(self, rows: tuple[int, int, bool]) -> bool:
        num_rows, most_tokens, samples = rows
        return num_rows == len(self._table.running) and most_tokens == 1 and samples

    def _has_room(self, count: int) -> bool:
        needed = sum(
            -(-max(request.num_computed_tokens + count - request.capacity, 0) // size)
            for size in self._allocations.block_sizes
            for request in self._table.running
        )
        return needed <= self._kv.num_free_blocks

    def skip(self, count: int, token: int) -> None:
        """Take `count` steps, at most what `most` said, that give each running request this token."""
        step = StepBuilder(self._steps.next_id, 0, is_ordered=True)
        for request in self._table.running:
            reach = request.num_computed_tokens + count
            if reach > request.capacity:
                new_ids = self._kv.allocate(request, count, delay_caching=True)
                assert new_ids is not None, "`most` has counted the free blocks"
                self._allocations.append(request, new_ids, count, 0, step)
            request.num_computed_tokens = reach
            request.num_tokens_with_pending += count
            request.plan_decode()
            request.own_token_ids().extend([token] * count)
            self._results.cache_and_plan(request, is_plain=True)
        self._table.stats.num_steps += count
        self._table.stats.num_scheduled_tokens += count * len(self._table.running)
