"""Waiting requests come in: in policy order, while the step has room, and when all that they need is there."""

from __future__ import annotations

from collections.abc import Callable

from pelton.config import SchedulerConfig
from pelton.kv_cache.hashing import BlockHasher
from pelton.kv_cache.interface import BlockIds, KVCacheManager
from pelton.scheduler.allocations import Allocations, is_cached_later
from pelton.scheduler.grammars import is_compiled
from pelton.scheduler.kv_transfers import KVTransfers
from pelton.scheduler.output import NewRequest
from pelton.scheduler.policy import SchedulingPolicy
from pelton.scheduler.preemption import Preemption
from pelton.scheduler.request import RequestStatus, ScheduledRequest
from pelton.scheduler.request_table import RequestTable
from pelton.scheduler.running import share
from pelton.scheduler.step import OpenSteps, StepBuilder


class Admission:
    def __init__(
        self,
        config: SchedulerConfig,
        policy: SchedulingPolicy,
        kv: KVCacheManager,
        table: RequestTable,
        allocations: Allocations,
        transfers: KVTransfers,
        preemption: Preemption,
        steps: OpenSteps,
        *,
        hasher: BlockHasher | None,
        adapter_is_ready: Callable[[int], bool] | None,
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> None:
        self._config = config
        self._policy = policy
        self._kv = kv
        self._table = table
        self._allocations = allocations
        self._transfers = transfers
        self._preemption = preemption
        self._steps = steps
        self._hasher = hasher
        self._adapter_is_ready = adapter_is_ready
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens

    def requeue_deferred(self) -> None:
        """Put back in the queue what may have become ready."""
        for request in list(self._table.deferred.values()):
            if self._may_be_ready(request):
                self._table.requeue(request)

    def admit(self, step: StepBuilder) -> None:
        """Take requests from the head of the queue while the step has room; the head that does not fit ends it."""
        table = self._table
        while step.budget > 0 and self._allocations.slots.num_free and len(table.running) < self._max_num_seqs:
            request = table.waiting.peek()
            # A preempted request whose token is in flight keeps its place: it comes back in a step or two.
            if request is None or request.last_step_id > self._steps.retired:
                return
            try:
                if not self._is_ready(request):
                    table.defer(request)
                elif not self._policy.admits(request, table.running) or not self._admit(request, step):
                    return
            except Exception as error:
                # Blocks that it got for a step that it will not be in are not to be found.
                self._kv.evict(block for ids in self._kv.block_ids(request.request_id) for block in ids)
                table.fail(request, error, "admitting")
                table.drop_finished_rows()

    def _may_be_ready(self, request: ScheduledRequest) -> bool:
        if request.status is RequestStatus.RECEIVING:
            return request.is_remote_ready
        if request.grammar_job is not None and not request.grammar_job.done():
            return False
        return self._has_side_slot(request)

    def _is_ready(self, request: ScheduledRequest) -> bool:
        """False while a grammar, an adapter or a side slot is missing."""
        if not is_compiled(request):
            return False
        adapter_id = request.request.adapter_id
        if adapter_id and self._adapter_is_ready is not None and not self._adapter_is_ready(adapter_id):
            return False
        return self._has_side_slot(request)

    def _has_side_slot(self, request: ScheduledRequest) -> bool:
        return not request.request.sampling_params.needs_side_slot or self._allocations.side_slots.num_free > 0

    def _admit(self, request: ScheduledRequest, step: StepBuilder) -> bool:
        """Run the head of the queue in this step. False: it does not fit, and nobody passes it.

        True without a row when it has to wait for its KV, or when it ended.
        """
        cached: BlockIds | None = None
        num_local = num_external = 0
        if self._hasher is not None:  # not when it came: those behind it are hashed while this step runs
            request.extend_hashes(self._hasher)
        if not request.is_remote_ready:
            if self._hasher is not None and not request.skip_prefix_lookup:
                cached, num_local = self._kv.lookup(request)
            matched, is_later = self._transfers.num_external_tokens(request, num_local)
            if matched is None:
                self._table.defer(request)
                return True
            num_external = matched
            if num_external and is_later:
                if not self._transfers.bring_later(request, cached, num_local, num_external, step):
                    return False
                self._table.defer(request)
                return True
        start = request.num_computed_tokens + num_local + num_external
        num_new = self._first_share(request, len(request.token_ids) - start, step)
        if not num_new:
            return False
        delay_caching = num_external > 0 or is_cached_later(num_new)
        new_ids = self._kv.allocate(
            request, num_new, cached_blocks=cached, num_cached_tokens=num_local,
            num_external_tokens=num_external, delay_caching=delay_caching,
        )  # fmt: skip
        if new_ids is None:
            return self._preemption.make_room_for_head(request, step)
        step.first_blocks += new_ids
        self._count_found(request, start, num_external)
        self._table.run(request)
        block_ids = self._kv.block_ids(request.request_id)
        self._allocations.start(request, block_ids, start + num_new, is_cached_now=not delay_caching)
        if num_external:
            self._transfers.bring(request, block_ids, num_external)
        step.new.append(_describe(request, block_ids))
        step.take_row(request, num_new)
        return True

    def _first_share(self, request: ScheduledRequest, num_new: int, step: StepBuilder) -> int:
        """Tokens of a request's first step; 0 when it has to wait for a step with more room."""
        # One that was preempted may have outgrown a whole step, and is then cut even without chunked prefill.
        if not self._config.enable_chunked_prefill and num_new <= self._max_num_batched_tokens:
            return num_new if num_new <= step.budget else 0
        return min(share(request, num_new, self._config, self._policy), step.budget)

    def _count_found(self, request: ScheduledRequest, start: int, num_external: int) -> None:
        """The first `start` tokens need not be computed: some were found here, some a connector brings."""
        num_local = start - num_external - request.connector_tokens
        request.num_computed_tokens = start
        request.num_found_tokens = num_local
        request.connector_tokens += num_external
        if request.num_cached_tokens < 0 and self._hasher is not None and not request.skip_prefix_lookup:
            stats = self._table.stats
            stats.prefix_cache_requests += 1
            stats.prefix_cache_queries += request.num_prompt_tokens
            stats.prefix_cache_hits += num_local


def _describe(request: ScheduledRequest, block_ids: BlockIds) -> NewRequest:
    original = request.request
    return NewRequest(
        request_id=request.request_id,
        slot=request.slot,
        token_ids=list(request.token_ids),  # the worker's own: ours grows while it reads
        num_prompt_tokens=request.num_prompt_tokens,
        sampling_params=original.sampling_params,
        eos_token_ids=original.eos_token_ids,
        bad_words_token_ids=original.bad_words_token_ids,
        seed=original.seed,
        block_ids=[list(ids) for ids in block_ids],
        num_computed_tokens=request.num_computed_tokens,
        side_slot=request.side_slot,
        adapter_id=original.adapter_id,
    )
