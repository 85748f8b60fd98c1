"""The parts of a scheduler that both sources of rows work on: running requests and waiting ones."""

from __future__ import annotations

from dataclasses import dataclass

from pelton.config import SchedulerConfig
from pelton.kv_cache.interface import KVCacheManager
from pelton.scheduler.policy import SchedulingPolicy
from pelton_plugins.scheduler.allocations import Allocations
from pelton_plugins.scheduler.preemption import Preemption
from pelton_plugins.scheduler.request import RequestState
from pelton_plugins.scheduler.request_table import RequestTable


@dataclass(frozen=True, slots=True, kw_only=True)
class RowParts:
    config: SchedulerConfig
    policy: SchedulingPolicy
    kv: KVCacheManager
    table: RequestTable
    allocations: Allocations
    preemption: Preemption

    def share(self, request: RequestState, start: int, num_new: int) -> int:
        """Cap one request's new tokens, behind `start` others, by the threshold, the policy and the states that the prefix cache keeps."""
        threshold = self.config.long_prefill_token_threshold
        if threshold and self.config.enable_chunked_prefill:
            num_new = min(num_new, threshold)
        num_new = max(min(self.policy.max_new_tokens(request, num_new), num_new), 1)
        return (
            self.kv.chunk_end(request, start, start + num_new) - start
            if self.config.enable_chunked_prefill
            else num_new
        )
