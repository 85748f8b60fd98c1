"""Where every unfinished request is, and its moves: queued, deferred, running, preempted, finished.

Whose turn it is to move is decided elsewhere.
"""

from __future__ import annotations

import logging
from bisect import insort
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from pelton.errors import EngineError, ErrorInfo, PeltonError
from pelton.messages.outputs import EngineEvent, EngineOutput, EventType, FinishReason
from pelton.metrics.stats import SchedulerStats
from pelton.scheduler.policy import SchedulingPolicy
from pelton.scheduler.request import RequestStatus
from pelton_plugins.scheduler.allocations import Allocations
from pelton_plugins.scheduler.drafts import Drafts
from pelton_plugins.scheduler.kv_transfers import KVTransfers
from pelton_plugins.scheduler.queue import RequestQueue
from pelton_plugins.scheduler.request import RequestState
from pelton_plugins.scheduler.tenant_queue import TenantQueue

if TYPE_CHECKING:
    from pelton_plugins.scheduler.grammars import MaskPlan

logger = logging.getLogger(__name__)

NO_ROOM = (
    "The KV cache has no more room for this request. Raise the cache's size (kv_cache_memory_bytes), or ask for less."
)


class RequestTable:
    """A request is in one of `running`, `waiting` and `deferred`."""

    def __init__(
        self,
        policy: SchedulingPolicy,
        allocations: Allocations,
        transfers: KVTransfers,
        drafts: Drafts,
        clock: Callable[[], float],
    ) -> None:
        self.requests: dict[str, RequestState] = {}
        self.running: list[RequestState] = []  # in rank order
        self.waiting = TenantQueue(policy, self.running) if policy.shares else RequestQueue(policy)
        self.deferred: dict[str, RequestState] = {}  # waiting, and not to be asked before something happened
        self.num_queued_reqs = 0  # waiting and never scheduled
        self.num_queued_tokens = 0
        self.num_grammars = 0
        self.mask_plan: MaskPlan | None = None
        self.outputs: list[EngineOutput] = []  # of requests that ended outside a step's result
        self.stats = SchedulerStats()
        self._policy = policy
        self._has_shares = policy.shares
        self._tells_ends = type(policy).ended is not SchedulingPolicy.ended
        self._allocations = allocations
        self._transfers = transfers
        self._drafts = drafts
        self._clock = clock
        self._has_finished_rows = False  # in `running`

    def add(self, request: RequestState, now: float) -> None:
        """Raises `EngineError`, and it was never here, where the policy fails."""
        self.waiting.push(request)
        self.num_queued_reqs += 1
        self.num_queued_tokens += request.num_prompt_tokens
        self.num_grammars += request.request.sampling_params.structured_outputs is not None
        request.events.append(EngineEvent(EventType.QUEUED, now))
        self.requests[request.request_id] = request

    def defer(self, request: RequestState) -> None:
        """Take it out of the queue until something happened."""
        self.waiting.remove(request)
        self.deferred[request.request_id] = request

    def requeue(self, request: RequestState) -> None:
        """It is worth asking again."""
        del self.deferred[request.request_id]
        self.waiting.push(request)

    def run(self, request: RequestState) -> None:
        """From the queue to its place among the running; what it need not compute is counted already."""
        self.waiting.remove(request)
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = request.num_computed_tokens
            request.num_external_tokens = request.connector_tokens
            self.num_queued_reqs -= 1
            self.num_queued_tokens -= request.num_prompt_tokens
            if self._has_shares:
                self._policy.started(request)
        request.status = RequestStatus.RUNNING
        request.is_remote_ready = False
        request.slot = self._allocations.slots.take()
        if request.needs_side_slot:
            request.side_slot = self._allocations.side_slots.take()
        request.events.append(EngineEvent(EventType.SCHEDULED, self._clock()))
        running, rank = self.running, self._policy.rank
        if not running or rank(running[-1]) < rank(request):  # who came last mostly comes last
            running.append(request)
        else:
            insort(running, request, key=rank)

    def preempt(self, request: RequestState) -> None:
        """Give up blocks and slot; a token in flight is kept when it arrives."""
        self.mask_plan = None
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            request.events.append(EngineEvent(EventType.PREEMPTED, self._clock()))
            self.stats.num_preemptions += 1
        else:
            self.deferred.pop(request.request_id, None)
            self.waiting.remove(request)
        self._allocations.release(request)
        request.status = RequestStatus.PREEMPTED if request.num_cached_tokens >= 0 else RequestStatus.WAITING
        request.forget_computed()
        self.waiting.push(request)

    # KV that a request waits for.

    def receiving(self) -> list[RequestState]:
        """Those that hold blocks for KV which a connector brings, or has brought."""
        return [request for request in self.requests.values() if request.status is RequestStatus.RECEIVING]

    def is_receiving(self) -> bool:
        """True while a waiting request holds blocks that are being filled."""
        return any(request.is_receiving for request in self.deferred.values())

    # Ends. The caller calls `drop_finished_rows` before the next step.

    def finish(self, request: RequestState) -> None:
        """The one way out."""
        if self._tells_ends:
            self._tell_policy(request)
        if request.status is RequestStatus.RUNNING:
            self._has_finished_rows = True
        else:
            self.waiting.remove(request)
            self.deferred.pop(request.request_id, None)
        if request.num_cached_tokens < 0:
            self.num_queued_reqs -= 1
            self.num_queued_tokens -= request.num_prompt_tokens
        if request.request.sampling_params.structured_outputs is not None:
            self.num_grammars -= 1
            self.mask_plan = None
            if request.grammar_job is not None:
                request.grammar_job.cancel()
        del self.requests[request.request_id]
        self._drafts.forget(request)
        self._allocations.release(request, keeps_blocks=self._transfers.keeps(request))
        request.status = RequestStatus.FINISHED
        request.leave_fast_paths()

    def _tell_policy(self, request: RequestState) -> None:
        try:
            self._policy.ended(request)
        except Exception:
            logger.exception("The scheduling policy failed at the end of %s.", request.request_id)

    def end(self, request: RequestState, reason: FinishReason, error: ErrorInfo | None = None) -> None:
        """Finish it outside a step's result, and tell."""
        self.finish(request)
        self.outputs.append(last_output(request, reason, error))

    def fail(self, request: RequestState, error: Exception, doing: str) -> None:
        """End it with what went wrong while `doing`; no more than its first error is told."""
        if not request.is_finished:
            self.end(request, FinishReason.ERROR, _as_pelton_error(error, doing).to_info())

    def end_at_full_cache(self, request: RequestState) -> None:
        """The whole pool is too small for what the request has become: its output is cut here."""
        logger.warning("%s ends at %d tokens: %s", request.request_id, request.num_tokens, NO_ROOM)
        if request.num_output_tokens:
            self.end(request, FinishReason.LENGTH)
        else:
            self.end(request, FinishReason.ERROR, EngineError(NO_ROOM).to_info())

    def drop_finished_rows(self) -> None:
        if self._has_finished_rows:
            self._has_finished_rows = False
            self.running[:] = [request for request in self.running if not request.is_finished]

    # What is told.

    def take_outputs(self) -> list[EngineOutput]:
        outputs, self.outputs = self.outputs, []
        return outputs

    def count_adapters(self) -> tuple[dict[str, int], dict[str, int]]:
        """Requests by the name of their adapter: running, waiting."""
        running, waiting = Counter[str](), Counter[str]()
        for request in self.requests.values():
            if request.request.adapter is not None:
                is_running = request.status is RequestStatus.RUNNING
                (running if is_running else waiting)[request.request.adapter.name] += 1
        return dict(running), dict(waiting)

    def take_stats(self) -> SchedulerStats:
        stats, self.stats = self.stats, SchedulerStats()
        stats.num_running_reqs = len(self.running)
        stats.num_waiting_reqs = len(self.waiting) + len(self.deferred)
        stats.num_deferred_reqs = len(self.deferred)
        return stats


def last_output(request: RequestState, reason: FinishReason, error: ErrorInfo | None = None) -> EngineOutput:
    """The output of a request that ends outside a step's result."""
    return EngineOutput(
        request.request_id, finish_reason=reason, events=request.events,
        num_cached_tokens=max(request.num_cached_tokens, 0), error=error,
        kv_transfer_params=request.kv_transfer_params,
    )  # fmt: skip


def _as_pelton_error(error: Exception, doing: str) -> PeltonError:
    """An error that may be told to the client; others are logged in full and named in one line."""
    if isinstance(error, PeltonError):
        return error
    logger.error("An exception while %s a request.", doing, exc_info=error)
    return EngineError(f"Internal error while {doing} the request: {type(error).__name__}: {error}")
