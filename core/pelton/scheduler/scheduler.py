"""The built-in scheduler: continuous batching with chunked prefill, preemption by recompute, and several steps open.

A request has tokens to reach and tokens computed; each step gives it some of the difference. Running requests first,
then waiting ones in policy order; a waiting request never preempts. See DESIGN section 3.
"""

from __future__ import annotations

import heapq
import logging
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from pelton.config import SchedulerConfig
from pelton.engine.messages import EngineEvent, EngineOutput, EventType, FinishReason, LogprobColumns
from pelton.errors import (
    DeadlineExceededError,
    EngineError,
    ErrorInfo,
    NotSupportedError,
    PeltonError,
    QueueFullError,
    RequestError,
)
from pelton.kv_cache.hashing import BlockHasher
from pelton.kv_cache.interface import BlockIds, KVCacheManager
from pelton.kv_transfer.interface import SchedulerConnector
from pelton.metrics.stats import SchedulerStats
from pelton.request import EngineRequest
from pelton.scheduler.interface import Scheduler
from pelton.scheduler.output import GrammarMasks, ModelOutput, NewRequest, SchedulerOutput
from pelton.scheduler.policy import FCFSPolicy, RequestQueue, SchedulingPolicy
from pelton.scheduler.request import RequestStatus, ScheduledRequest
from pelton.scheduler.slots import SlotPool
from pelton.scheduler.spoilt import BlockUse, spread
from pelton.scheduler.step import OpenStep, StepBuilder
from pelton.spec_decode.interface import DraftProposer
from pelton.structured.manager import GrammarSource

logger = logging.getLogger(__name__)

LEAST_ROWS_OF_A_PREFIX = 8
"""Of a decode step: fewer are not asked for a common prefix, reading it once would gain nothing."""
RUNNING = RequestStatus.RUNNING
FINISHED = RequestStatus.FINISHED
NO_ROOM = (
    "The KV cache has no more room for this request. Raise the cache's size (kv_cache_memory_bytes), or ask for less."
)


class DefaultScheduler(Scheduler):
    """See `Scheduler` for the life cycle.

    max_model_len, max_num_seqs, max_num_batched_tokens: resolved values; `config` may leave them open.
    block_sizes: tokens a block, per KV group.
    hasher: None switches prefix caching off.
    steps_are_ordered: the executor's word that a later step may reuse what an open one still touches.
    num_draft_tokens: drafts per step that the workers make on the device, known to the host as a number only; 0 for none.
    adapter_is_ready: asked for requests with an adapter; those that wait are looked at again in each step.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv_manager: KVCacheManager,
        *,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        block_sizes: Sequence[int],
        vocab_size: int,
        hasher: BlockHasher | None = None,
        policy: SchedulingPolicy | None = None,
        steps_are_ordered: bool = True,
        max_steps_in_flight: int = 1,
        num_draft_tokens: int = 0,
        grammar_source: GrammarSource | None = None,
        proposer: DraftProposer | None = None,
        connector: SchedulerConnector | None = None,
        adapter_is_ready: Callable[[int], bool] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.kv = kv_manager
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.vocab_size = vocab_size
        self.max_steps_in_flight = max_steps_in_flight
        self._block_sizes = tuple(block_sizes)
        self._hasher = hasher
        self._hash_block_size = hasher.block_size if hasher else 0
        self._policy = policy or FCFSPolicy()
        self._is_ordered = steps_are_ordered
        self._num_draft_tokens = num_draft_tokens
        self._grammar_source = grammar_source
        self._proposer = proposer
        self._connector = connector
        self._adapter_is_ready = adapter_is_ready
        self._clock = clock
        self._may_draft = proposer is not None or num_draft_tokens > 0

        self._requests: dict[str, ScheduledRequest] = {}
        self._running: list[ScheduledRequest] = []  # in rank order
        self._waiting = RequestQueue(self._policy)
        self._deferred: dict[str, ScheduledRequest] = {}  # waiting, and not to be asked before something happened
        self._open: deque[OpenStep] = deque()
        self._updating: OpenStep | None = None
        self._slots = SlotPool(max_num_seqs)
        self._side_slots = SlotPool(config.max_side_table_seqs)
        self._fenced: list[tuple[int, str, int, int]] = []  # (step, request id or "", slot, side slot)
        self._left: list[BlockUse] = []  # blocks given up while a step that uses them is open
        self._sending: dict[str, int] = {}  # finished, with its last step; a connector still reads the blocks
        self._abandoned: set[str] = set()  # finished; a connector still writes their blocks
        self._deadlines: list[tuple[float, int, ScheduledRequest]] = []
        self._outputs: list[EngineOutput] = []
        self._stats = SchedulerStats()
        self._next_step_id = 0
        self._prefix_slots: list[int] = []  # rows of the decode step that `_prefix_blocks` was found for
        self._prefix_blocks: list[int] = []
        self._retired = -1
        self._num_arrivals = 0
        self._num_queued_reqs = 0  # waiting and never scheduled
        self._num_queued_tokens = 0
        self._num_grammars = 0
        self._has_finished_rows = False  # in `_running`
        self._needs_bare_step = False  # a connector has something to tell although no row runs

    # Requests in and out.

    def add_request(self, request: EngineRequest) -> None:
        self._check_admission(request)
        now = self._clock()
        record = ScheduledRequest(request, self._num_arrivals, max_model_len=self.max_model_len, now=now)
        constraint = request.sampling_params.structured_outputs
        if constraint is not None:
            assert self._grammar_source is not None  # `_check_admission` has refused it
            record.grammar_job = self._grammar_source.submit(constraint)
            self._num_grammars += 1
        self._num_arrivals += 1
        self._num_queued_reqs += 1
        self._num_queued_tokens += record.num_prompt_tokens
        record.events.append(EngineEvent(EventType.QUEUED, now))
        self._requests[record.request_id] = record
        self._waiting.push(record)
        if record.deadline is not None:
            heapq.heappush(self._deadlines, (record.deadline, record.arrival, record))

    def _check_admission(self, request: EngineRequest) -> None:
        """Refuse what can never run, and what may not wait now."""
        request_id, num_prompt = request.request_id, len(request.prompt_token_ids)
        if request_id in self._requests:
            raise RequestError("request_id is in use by an unfinished request", param="request_id", value=request_id)
        if request_id in self._sending or request_id in self._abandoned or self._is_fenced(request_id):
            raise RequestError("request_id is still being released", param="request_id", value=request_id)
        if not num_prompt:
            raise RequestError("The prompt is empty; give at least one token.", param="prompt")
        if num_prompt >= self.max_model_len:
            raise RequestError(
                f"The prompt has {num_prompt} tokens; at most {self.max_model_len - 1} fit the context of "
                f"{self.max_model_len} with one token to generate.",
                param="prompt",
            )
        if not self.config.enable_chunked_prefill and num_prompt > self.max_num_batched_tokens:
            raise RequestError(
                f"The prompt has {num_prompt} tokens; without chunked prefill at most {self.max_num_batched_tokens} "
                "(max_num_batched_tokens) can run.",
                param="prompt",
            )
        needed = self.kv.max_blocks_needed(num_prompt + 1)
        if needed > self.kv.num_usable_blocks:
            raise RequestError(
                f"The prompt has {num_prompt} tokens and needs {needed} blocks of KV cache; there are "
                f"{self.kv.num_usable_blocks}. Shorten it, or raise kv_cache_memory_bytes.",
                param="prompt",
            )
        if request.sampling_params.structured_outputs is not None and self._grammar_source is None:
            raise NotSupportedError(
                "structured_outputs needs a structured-output backend, and no plugin offers one here.",
                param="structured_outputs",
            )
        if request.adapter_id and self._adapter_is_ready is None:
            raise NotSupportedError("This engine serves no adapters.", param="adapter_id", value=request.adapter_id)
        limit = self.config.max_num_queued_reqs
        if limit is not None and self._num_queued_reqs >= limit:
            raise QueueFullError(f"{self._num_queued_reqs} requests wait already; at most {limit}. Try again later.")
        limit = self.config.max_num_queued_tokens
        if limit is not None and self._num_queued_tokens + num_prompt > limit:
            raise QueueFullError(
                f"{self._num_queued_tokens} prompt tokens wait already and this request has {num_prompt}; at most {limit}. "
                "Try again later."
            )

    def finish_requests(self, request_ids: Iterable[str], reason: FinishReason, error: ErrorInfo | None = None) -> None:
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is None:
                continue
            self._finish(request)
            if reason is not FinishReason.STOP:
                self._outputs.append(self._last_output(request, reason, error))
        self._drop_finished_rows()

    def expire(self, now: float) -> None:
        while self._deadlines and (self._deadlines[0][0] <= now or self._deadlines[0][2].is_finished):
            request = heapq.heappop(self._deadlines)[2]
            if not request.is_finished:
                limit = request.request.timeout_s
                self._end(request, DeadlineExceededError(f"The request's time limit of {limit} s passed."))
        self._drop_finished_rows()

    def next_deadline(self) -> float | None:
        while self._deadlines and self._deadlines[0][2].is_finished:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def take_outputs(self) -> list[EngineOutput]:
        outputs, self._outputs = self._outputs, []
        return outputs

    def has_unfinished_requests(self) -> bool:
        # While a connector reads or writes blocks, steps have to go on to hear of its end.
        return bool(self._requests or self._sending or self._abandoned)

    def reset_prefix_cache(self) -> bool:
        return self.kv.reset_prefix_cache()

    def take_stats(self) -> SchedulerStats:
        stats, self._stats = self._stats, SchedulerStats()
        stats.num_running_reqs = len(self._running)
        stats.num_waiting_reqs = len(self._waiting) + len(self._deferred)
        stats.num_deferred_reqs = len(self._deferred)
        stats.kv_cache_usage = self.kv.usage
        stats.kv_block_lifetimes_s, stats.kv_block_idle_s, stats.kv_block_reuse_gaps_s = self.kv.take_residency()
        if self._grammar_source is not None:
            stats.grammar_compile_s = self._grammar_source.take_compile_times()
        return stats

    # One step.

    def schedule(self) -> SchedulerOutput | None:
        if len(self._open) >= self.max_steps_in_flight:
            return None
        if self._deferred:
            self._requeue_deferred()
        step = StepBuilder(self._next_step_id, self.max_num_batched_tokens)
        if self._running:
            self._serve_running(step)
        if not step.has_preempted and self._waiting:
            self._admit_waiting(step)
        if not step.num_rows and not self._wants_bare_step():
            return None
        opened = step.build(self._slots.take_freed(), has_grammars=self._num_grammars > 0)
        output = opened.output
        self._open.append(opened)
        self._next_step_id += 1
        if self._connector is not None:
            self._add_connector_metadata(opened)
        if output.new:
            self._prefix_slots = []
        elif len(output.slots) == output.total_num_scheduled_tokens >= LEAST_ROWS_OF_A_PREFIX:
            output.common_prefix_blocks = self._common_prefix(opened)
        self._stats.num_steps += 1
        self._stats.num_scheduled_tokens += output.total_num_scheduled_tokens
        return output

    def _common_prefix(self, opened: OpenStep) -> list[int]:
        """Per group, the leading blocks that all rows of a decode step share; found again when the rows change."""
        if opened.output.slots != self._prefix_slots:
            self._prefix_slots = opened.output.slots
            counts = self.kv.num_common_prefix_blocks([request.request_id for request in opened.requests])
            self._prefix_blocks = counts if any(counts) else []
        return self._prefix_blocks

    def _serve_running(self, step: StepBuilder) -> None:
        """Give each running request its tokens, in rank order; preempt from the end when blocks run out."""
        running = self._running
        is_plain = self._is_ordered and not self._may_draft
        step_id, ones, max_seq_len = step.step_id, step.ones, 0
        index = 0
        while index < len(running) and step.budget > 0:
            first, num_ones = index, len(ones)
            # A token whose block has room: nearly all rows of nearly all steps.
            for request in islice(running, first, first + step.budget) if is_plain else ():
                reach = request.num_reach
                if reach >= request.plain_until:
                    break
                request.num_computed_tokens = reach
                request.num_reach = reach + 1
                request.last_step_id = step_id
                ones.append(request)
                if reach > max_seq_len:
                    max_seq_len = reach
            num_plain = len(ones) - num_ones
            step.ones_samples += [True] * num_plain
            step.budget -= num_plain
            index += num_plain
            if index == len(running) or step.budget <= 0:
                break
            request = running[index]
            if request.num_reach >= request.max_total_tokens:  # its last token is in flight
                index += 1
                continue
            if is_plain and request.plain_until and self._serve_with_new_block(request, step):
                index += 1
                continue
            is_served = self._serve(request, index, step)
            # One that was preempted, or ended, has left its place to the next.
            index += is_served or (index < len(running) and running[index] is request)
        step.max_seq_len = max(step.max_seq_len, max_seq_len)

    def _serve_with_new_block(self, request: ScheduledRequest, step: StepBuilder) -> bool:
        """The row of a request in decode whose last block is full: `_serve` without what such a row has none of. False,
        and nothing done, when there is no block."""
        new_ids = self.kv.allocate(request, 1)
        if new_ids is None:
            return False
        reach = request.num_reach
        if len(new_ids) == 1 and len(new_ids[0]) == 1:
            table = request.tables[0]
            step.appends.append((0, request.slot, len(table), new_ids[0]))
            table.append(new_ids[0][0])
            request.capacity += self._block_sizes[0]
            if self._hasher is not None:
                request.num_cached_blocks = min(reach, len(request.token_ids)) // self._hash_block_size
        else:
            self._note_appended(request, new_ids, 1, 0, step)
        request.num_computed_tokens = reach
        request.num_reach = reach + 1
        request.plain_until = min(request.capacity + 1, request.max_total_tokens)
        request.last_step_id = step.step_id
        step.ones.append(request)
        step.ones_samples.append(True)
        step.budget -= 1
        step.max_seq_len = max(step.max_seq_len, reach)
        return True

    def _serve(self, request: ScheduledRequest, index: int, step: StepBuilder) -> bool:
        """A running request's row, where drafts, chunks or blocks have to be thought of. False: none in this step."""
        num_new = request.num_reach - request.num_computed_tokens
        drafts: list[int] | None = None
        num_draft = 0
        if num_new > 1:
            # Every running request behind this one still gets its token in this step.
            left = max(step.budget - (len(self._running) - index - 1), 1)
            num_new = min(self._share(request, num_new), left)
        elif self._may_draft:
            if self._proposer is not None and request.num_pending:
                return False  # the host makes its next input, and needs the values
            num_draft, drafts = self._drafts_for(request, step.budget)
        if not self._make_room(request, num_new, num_draft, index, step):
            return False
        self._take_row(step, request, num_new, num_draft, drafts)
        return True

    def _take_row(
        self, step: StepBuilder, request: ScheduledRequest, num_new: int, num_draft: int, drafts: list[int] | None
    ) -> None:
        """Enter the row and count its tokens as computed and, where it samples, as pending."""
        samples = request.num_computed_tokens + num_new == request.num_reach
        request.num_computed_tokens += num_new + num_draft
        request.num_unconfirmed_tokens += num_draft if self._is_ordered else num_new + num_draft
        if samples:
            request.num_reach += 1 + num_draft
            # Read where nothing drafts and steps are ordered only: one token more to compute, and room for it.
            request.plain_until = min(request.capacity + 1, request.max_total_tokens)
        request.last_step_id = step.step_id
        self._stats.spec_num_draft_tokens += num_draft
        step.add_row(request, num_new, samples, num_draft, drafts)

    def _share(self, request: ScheduledRequest, num_new: int) -> int:
        """Cap one request's new tokens by the threshold and the policy."""
        threshold = self.config.long_prefill_token_threshold
        if threshold and self.config.enable_chunked_prefill:
            num_new = min(num_new, threshold)
        return max(min(self._policy.max_new_tokens(request, num_new), num_new), 1)

    def _drafts_for(self, request: ScheduledRequest, budget: int) -> tuple[int, list[int] | None]:
        """Number of drafts in this step, and their values when the host made them."""
        # Besides the token that is sampled for sure.
        room = min(request.max_total_tokens - request.num_reach, budget) - 1
        if room <= 0 or request.num_reach <= request.num_prompt_tokens:
            return 0, None
        is_on_device = self._proposer is None and (request.num_pending > 0 or not request.drafts)
        if is_on_device:
            # The device made them, and the host has not seen them: a grammar's masks would need their values.
            return (0 if request.grammar is not None else min(self._num_draft_tokens, room)), None
        is_host_made = self._proposer is not None
        if is_host_made:
            request.drafts = self._propose(request)
        if request.grammar is not None:
            del request.drafts[request.grammar.validate(request.drafts) :]
        del request.drafts[room:]
        return len(request.drafts), list(request.drafts) if is_host_made else None

    def _propose(self, request: ScheduledRequest) -> list[int]:
        assert self._proposer is not None
        try:
            drafts = self._proposer.propose(request.request_id, request.token_ids)
        except Exception:
            logger.exception("The draft proposer failed for %s; it goes on without drafts.", request.request_id)
            return []
        drafts = drafts[: self._proposer.max_draft_tokens]
        bad = next((i for i, token in enumerate(drafts) if not 0 <= token < self.vocab_size), len(drafts))
        return drafts[:bad]

    def _make_room(
        self, request: ScheduledRequest, num_new: int, num_draft: int, index: int, step: StepBuilder
    ) -> bool:
        """Blocks for a running request, at the cost of those ranked behind it. False: not in this step."""
        while True:
            new_ids = self.kv.allocate(request, num_new, num_lookahead_tokens=num_draft)
            if new_ids is not None:
                self._note_appended(request, new_ids, num_new, num_draft, step)
                return True
            if self._fenced or self._sending or self._abandoned:
                return False  # blocks come back without a victim
            candidates = self._running[index:]
            if len(self._running) == 1:
                if self._release_idle_holder():
                    continue
                if self._is_receiving():
                    return False
                if request.last_step_id <= self._retired:
                    self._end_without_room(request)
                    self._drop_finished_rows()
                return False
            victim = self._policy.victim(candidates)
            self._preempt(victim)
            step.has_preempted = True
            if victim is request:
                return False

    def _note_appended(
        self, request: ScheduledRequest, new_ids: BlockIds, num_new: int, num_draft: int, step: StepBuilder
    ) -> None:
        for group, ids in enumerate(new_ids):
            if ids:
                table = request.tables[group]
                step.appends.append((group, request.slot, len(table), list(ids)))
                table += ids
        self._note_capacity(request, request.num_computed_tokens + num_new + num_draft)
        self._note_cached(request, request.num_computed_tokens + num_new)

    def _note_capacity(self, request: ScheduledRequest, num_tokens: int) -> None:
        """Each group has blocks for `num_tokens`, rounded up to its block size."""
        if len(self._block_sizes) == 1:
            size = self._block_sizes[0]
            request.capacity = -(-num_tokens // size) * size
        else:
            request.capacity = min(-(-num_tokens // size) * size for size in self._block_sizes)

    def _note_cached(self, request: ScheduledRequest, num_computed: int) -> None:
        """`allocate` has made the full blocks of known tokens findable."""
        if self._hasher is not None:
            request.num_cached_blocks = min(num_computed, len(request.token_ids)) // self._hash_block_size

    def _preempt(self, request: ScheduledRequest) -> None:
        """Give up blocks and slot; a token in flight is kept when it arrives."""
        if request.status is RUNNING:
            self._running.remove(request)
            request.events.append(EngineEvent(EventType.PREEMPTED, self._clock()))
            self._stats.num_preemptions += 1
        else:
            self._deferred.pop(request.request_id, None)
            self._waiting.remove(request)
        self._release(request)
        request.status = RequestStatus.PREEMPTED if request.num_cached_tokens >= 0 else RequestStatus.WAITING
        request.forget_computed()
        self._waiting.push(request)

    # Admission.

    def _requeue_deferred(self) -> None:
        """Put back in the queue what may have become ready."""
        for request in list(self._deferred.values()):
            if self._may_be_ready(request):
                del self._deferred[request.request_id]
                self._waiting.push(request)

    def _may_be_ready(self, request: ScheduledRequest) -> bool:
        if request.status is RequestStatus.RECEIVING:
            return request.is_remote_ready
        if request.grammar_job is not None and not request.grammar_job.done():
            return False
        return not (request.request.sampling_params.needs_side_slot and not self._side_slots.num_free)

    def _admit_waiting(self, step: StepBuilder) -> None:
        """Take requests from the head of the queue while the step has room; the head that does not fit ends it."""
        queue = self._waiting
        while step.budget > 0 and self._slots.num_free and len(self._running) < self.max_num_seqs:
            request = queue.peek()
            # A preempted request whose token is in flight keeps its place: it comes back in a step or two.
            if request is None or request.last_step_id > self._retired:
                return
            try:
                if not self._is_ready(request):
                    queue.remove(request)
                    self._deferred[request.request_id] = request
                elif not self._policy.admits(request, self._running) or not self._admit(request, step):
                    return
            except Exception as error:
                self._end(request, _as_pelton_error(error, "admitting"))
                self._drop_finished_rows()

    def _is_ready(self, request: ScheduledRequest) -> bool:
        """False while a grammar, an adapter or a side slot is missing."""
        if request.grammar_job is not None:
            if not request.grammar_job.done():
                return False
            request.grammar = request.grammar_job.result()
            request.grammar_job = None
        adapter_id = request.request.adapter_id
        if adapter_id and self._adapter_is_ready is not None and not self._adapter_is_ready(adapter_id):
            return False
        return not request.request.sampling_params.needs_side_slot or self._side_slots.num_free > 0

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
                cached, num_local = self.kv.lookup(request)
            if self._connector is not None and not request.skip_connector and not request.skip_prefix_lookup:
                matched, is_later = self._connector.num_matched_tokens(request.request, num_local)
                if matched is None:
                    self._waiting.remove(request)
                    self._deferred[request.request_id] = request
                    return True
                num_external = max(min(matched, len(request.token_ids) - 1 - num_local), 0)
                if num_external and is_later:
                    return self._start_receiving(request, cached, num_local, num_external)
        start = request.num_computed_tokens + num_local + num_external
        num_new = self._first_share(request, len(request.token_ids) - start, step)
        if not num_new:
            return False
        new_ids = self.kv.allocate(
            request, num_new, cached_blocks=cached, num_cached_tokens=num_local,
            num_external_tokens=num_external, delay_caching=num_external > 0,
        )  # fmt: skip
        if new_ids is None:
            return self._refuse_if_alone(request, step)
        self._start_running(request, start, num_external)
        block_ids = self.kv.block_ids(request.request_id)
        request.tables = [list(ids) for ids in block_ids]
        self._note_capacity(request, start + num_new)
        if not num_external:
            self._note_cached(request, start + num_new)
        elif self._connector is not None:
            self._connector.after_allocation(request.request, block_ids, num_external)
        step.new.append(self._describe(request, block_ids))
        self._take_row(step, request, num_new, 0, None)
        return True

    def _first_share(self, request: ScheduledRequest, num_new: int, step: StepBuilder) -> int:
        """Tokens of a request's first step; 0 when it has to wait for a step with more room."""
        # One that was preempted may have outgrown a whole step, and is then cut even without chunked prefill.
        if not self.config.enable_chunked_prefill and num_new <= self.max_num_batched_tokens:
            return num_new if num_new <= step.budget else 0
        return min(self._share(request, num_new), step.budget)

    def _start_running(self, request: ScheduledRequest, start: int, num_external: int) -> None:
        """Slots, status, event and the counts of a request that got its blocks."""
        is_first = request.num_cached_tokens < 0
        self._waiting.remove(request)
        num_local = start - num_external - request.connector_tokens
        request.num_computed_tokens = start
        request.num_found_tokens = num_local
        request.connector_tokens += num_external
        if is_first:
            self._num_queued_reqs -= 1
            self._num_queued_tokens -= request.num_prompt_tokens
            request.num_cached_tokens = start
            if self._hasher is not None and not request.skip_prefix_lookup:
                self._stats.prefix_cache_requests += 1
                self._stats.prefix_cache_queries += request.num_prompt_tokens
                self._stats.prefix_cache_hits += num_local
        request.status = RUNNING
        request.is_remote_ready = False
        request.slot = self._slots.take()
        if request.request.sampling_params.needs_side_slot:
            request.side_slot = self._side_slots.take()
        request.events.append(EngineEvent(EventType.SCHEDULED, self._clock()))
        insort(self._running, request, key=self._policy.rank)

    def _describe(self, request: ScheduledRequest, block_ids: BlockIds) -> NewRequest:
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

    def _refuse_if_alone(self, request: ScheduledRequest, step: StepBuilder) -> bool:
        """No blocks for the head of the queue. With nobody else to give any back it would wait for ever: end it."""
        is_alone = not (
            self._running or step.num_rows or self._open or self._fenced or self._sending or self._abandoned
        )
        if not is_alone:
            return False
        if self._release_idle_holder():
            return True  # look at the head again
        if self._is_receiving():
            return False
        self._end_without_room(request)
        return True

    def _end_without_room(self, request: ScheduledRequest) -> None:
        """The whole pool is too small for what the request has become: its output is cut here."""
        logger.warning("%s ends at %d tokens: %s", request.request_id, request.num_tokens, NO_ROOM)
        if request.num_output_tokens:
            self._finish(request)
            self._outputs.append(self._last_output(request, FinishReason.LENGTH))
        else:
            self._end(request, EngineError(NO_ROOM))

    # Results.

    def grammar_masks(self, output: SchedulerOutput) -> GrammarMasks | None:
        if not output.grammar_rows:
            return None
        step = next(opened for opened in self._open if opened.output is output)
        words = (self.vocab_size + 31) // 32
        bitmask = bytearray()
        num_masks = []
        for row in output.grammar_rows:
            request = step.requests[row]
            num_rows = 1 + (output.num_draft[row] if output.num_draft else 0)
            masks = bytearray(b"\xff" * (4 * words * num_rows))  # kept for a request that ended meanwhile
            if not request.is_finished and output.step_id > request.void_through:
                try:
                    for position in range(num_rows):
                        view = memoryview(masks)[4 * words * position : 4 * words * (position + 1)]
                        request.grammar.fill_bitmask(view, request.drafts[:position])
                except Exception as error:
                    self._end(request, _as_pelton_error(error, "making the grammar mask of"))
            bitmask += masks
            num_masks.append(num_rows)
        self._drop_finished_rows()
        return GrammarMasks(step_id=output.step_id, bitmask=bytes(bitmask), num_masks=num_masks)

    def update(self, output: SchedulerOutput, result: ModelOutput) -> list[EngineOutput]:
        step = self._open[0]
        assert step.output is output, "results come back in step order"
        if len(result.token_ids) != len(step.requests) or result.step_id != output.step_id:
            raise EngineError(
                f"Step {output.step_id} with {len(step.requests)} rows came back as step {result.step_id} with "
                f"{len(result.token_ids)} rows."
            )
        self._updating = self._open.popleft()
        if result.invalid_block_ids:
            self._recompute_holders(result.invalid_block_ids, skip_connector=True)
        self._note_retired()
        outputs: list[EngineOutput] = []
        errors = dict(result.row_errors)
        self._may_draft = self._may_draft or bool(result.draft_token_ids)
        has_extras = bool(errors or result.logprobs or result.prompt_logprobs or self._may_draft)
        is_plain = self._is_ordered and not has_extras
        for row, request, tokens in zip(range(len(step.requests)), step.requests, result.token_ids, strict=True):
            if is_plain and len(tokens) == 1 and tokens[0] not in request.stop_ids:
                # A token that ends nothing: nearly all rows of nearly all steps.
                known = request.token_ids
                if len(known) < request.look_at:
                    known.append(tokens[0])
                    outputs.append(EngineOutput(request.request_id, tokens))
                    continue
                if request.look_at and len(known) + 1 < request.max_total_tokens:  # it fills a block
                    known.append(tokens[0])
                    self._look_again(request)
                    outputs.append(EngineOutput(request.request_id, tokens))
                    continue
            if request.status is FINISHED:
                continue
            try:
                told = self._update_row(output, result, row, request, errors.get(row))
            except Exception as error:
                self.kv.evict(self._blocks_from(request, request.num_found_tokens))
                self._end(request, _as_pelton_error(error, "computing"))
            else:
                if told is not None:
                    outputs.append(told)
        self._drop_finished_rows()
        if self._fenced:
            self._pass_fences()
        if self._connector is not None:
            self._update_connector(result)
        return outputs

    def _update_row(
        self, output: SchedulerOutput, result: ModelOutput, row: int, request: ScheduledRequest, failure: str | None
    ) -> EngineOutput | None:
        """Take in one row, whatever it brings. Raises what ends the request."""
        samples, tokens = output.samples[row], result.token_ids[row]
        num_draft = output.num_draft[row] if output.num_draft else 0
        if output.step_id <= request.void_through:
            if samples:
                request.num_reach -= 1 + num_draft
            return None
        if failure is not None:
            raise EngineError(failure)
        if request.status is RUNNING:
            if num_draft:
                self._settle_drafts(request, num_draft, tokens)
            request.num_unconfirmed_tokens -= num_draft if self._is_ordered else output.num_scheduled[row]
        if row in result.prompt_logprobs:
            self._collect_prompt_logprobs(request, output.step_id, result.prompt_logprobs[row])
        reason: FinishReason | None = None
        stop_reason: int | None = None
        if samples:
            tokens, reason, stop_reason = self._append(request, tokens, num_draft)
            has_drafts = bool(result.draft_token_ids) and not request.num_pending
            request.drafts = result.draft_token_ids[row] if has_drafts else []
        self._look_again(request)
        if not samples or request.grammar is not None:
            request.look_at = 0
        if not samples:
            return None
        if reason is not None:
            self._finish(request)
        elif not request.events and row not in result.logprobs:
            return EngineOutput(request.request_id, tokens)
        return self._full_output(request, tokens, reason, stop_reason, result.logprobs.get(row))

    def _look_again(self, request: ScheduledRequest) -> None:
        """Make findable what became full: blocks of sampled tokens, and of what arrived from elsewhere. Then say when to
        look at the request again: with the token that ends it, or fills its next block."""
        look_at = request.max_total_tokens
        if self._hasher is not None:
            size, num_known = self._hash_block_size, len(request.token_ids)
            if num_known >= (len(request.block_hashes) + 1) * size:
                request.extend_hashes(self._hasher)
            num_full = min(request.num_computed_tokens, num_known) // size
            if num_full > request.num_cached_blocks:
                request.num_cached_blocks = num_full
                self.kv.cache_blocks(request, num_full * size)
            look_at = min(look_at, (request.num_cached_blocks + 1) * size)
        request.look_at = look_at - 1

    def _settle_drafts(self, request: ScheduledRequest, num_draft: int, tokens: list[int]) -> None:
        """Take back what was counted as computed for drafts that were rejected."""
        num_accepted = len(tokens) - 1
        if not 0 <= num_accepted <= num_draft:
            raise EngineError(f"{len(tokens)} tokens came back for a row with {num_draft} drafts.")
        request.num_computed_tokens -= num_draft - num_accepted
        self._stats.spec_num_accepted_tokens += num_accepted

    def _append(
        self, request: ScheduledRequest, tokens: list[int], num_draft: int
    ) -> tuple[list[int], FinishReason | None, int | None]:
        """Append a row's tokens up to the first that ends the request; returns those that count."""
        if not 1 <= len(tokens) <= 1 + num_draft:
            raise EngineError(f"{len(tokens)} tokens came back for a row with {num_draft} drafts.")
        request.num_reach -= 1 + num_draft - len(tokens)
        reason: FinishReason | None = None
        stop_reason: int | None = None
        for count, token in enumerate(tokens, 1):
            request.token_ids.append(token)
            if len(request.token_ids) >= request.max_total_tokens or token in request.stop_ids:
                reason, stop_reason = self._stop_of(request)
                if reason is not None:
                    tokens = tokens[:count]
                    break
        if request.grammar is not None:
            # EOS is no part of the constrained text.
            inside = tokens[:-1] if tokens[-1] in request.eos_ids and reason is FinishReason.STOP else tokens
            if inside and not request.grammar.accept(inside):
                raise EngineError(f"Tokens {inside} break the request's grammar.")
            if reason is None and not request.eos_ids and request.grammar.is_terminated():
                reason = FinishReason.STOP
        return tokens, reason, stop_reason

    def _stop_of(self, request: ScheduledRequest) -> tuple[FinishReason | None, int | None]:
        """Whether the last known token ends the request: EOS and stop ids before length, none before min_tokens."""
        token, count = request.token_ids[-1], len(request.token_ids)
        if token in request.stop_ids and count >= request.min_tokens:
            return FinishReason.STOP, None if token in request.eos_ids else token
        return (FinishReason.LENGTH if count >= request.max_total_tokens else None), None

    def _collect_prompt_logprobs(self, request: ScheduledRequest, step_id: int, columns: LogprobColumns) -> None:
        if request.skip_prefix_lookup and step_id > request.void_logprobs_through:
            request.add_prompt_logprobs(columns)

    def _full_output(
        self,
        request: ScheduledRequest,
        tokens: list[int],
        reason: FinishReason | None,
        stop_reason: int | None,
        logprobs: LogprobColumns | None,
    ) -> EngineOutput:
        """An output with all that is known: the first, the last, and those with logprobs."""
        if logprobs is not None and len(logprobs.token_ids) > len(tokens):
            count = len(tokens)
            logprobs = LogprobColumns(logprobs.token_ids[:count], logprobs.logprobs[:count], logprobs.ranks[:count])
        output = EngineOutput(request.request_id, tokens, reason, stop_reason, logprobs)
        if request.skip_prefix_lookup:  # prompt_logprobs, not sent yet
            output.prompt_logprobs = request.prompt_logprobs or LogprobColumns([], [], [])
            request.prompt_logprobs = None
            request.skip_prefix_lookup = False  # after a preemption they are not needed again
        output.events, request.events = request.events, []
        output.num_cached_tokens = max(request.num_cached_tokens, 0)
        return output

    def _last_output(
        self, request: ScheduledRequest, reason: FinishReason, error: ErrorInfo | None = None
    ) -> EngineOutput:
        """The output of a request that ends outside a step's result."""
        return EngineOutput(
            request.request_id, finish_reason=reason, events=request.events,
            num_cached_tokens=max(request.num_cached_tokens, 0), error=error,
        )  # fmt: skip

    def update_failed(self, output: SchedulerOutput, error: ErrorInfo) -> list[EngineOutput]:
        step = next((opened for opened in self._open if opened.output is output), self._updating)
        assert step is not None and step.output is output, "a step fails once, while it is open or in its update"
        if step in self._open:
            self._open.remove(step)
            self._updating = step
        self._slots.tell_again(output.freed_slots)  # the workers may not have heard
        requests = [request for request in step.requests if not request.is_finished]
        spoilt = set[int]()
        for use in self._left:
            if use.last_step_id >= output.step_id:
                spoilt |= use.blocks_from(use.num_computed_before, self._block_sizes)
        outputs = []
        for request in requests:
            spoilt |= self._blocks_from(request, self._computed_before(request, output.step_id))
            self._finish(request)
            outputs.append(self._last_output(request, FinishReason.ERROR, error))
        self._drop_finished_rows()
        self._recompute_holders(spoilt)
        self._note_retired()
        self._pass_fences()
        return outputs

    # Endings.

    def _end(self, request: ScheduledRequest, error: PeltonError) -> None:
        """End one request with an error, told by `take_outputs`."""
        if request.is_finished:
            return
        self._finish(request)
        self._outputs.append(self._last_output(request, FinishReason.ERROR, error.to_info()))

    def _finish(self, request: ScheduledRequest) -> None:
        """The one way out. The caller calls `_drop_finished_rows` before the next step."""
        if request.status is RUNNING:
            self._has_finished_rows = True
        else:
            self._waiting.remove(request)
            self._deferred.pop(request.request_id, None)
        if request.num_cached_tokens < 0:
            self._num_queued_reqs -= 1
            self._num_queued_tokens -= request.num_prompt_tokens
        if request.request.sampling_params.structured_outputs is not None:
            self._num_grammars -= 1
            if request.grammar_job is not None:
                request.grammar_job.cancel()
        del self._requests[request.request_id]
        self._release(request, is_over=True)
        request.status = FINISHED
        request.look_at = 0

    def _drop_finished_rows(self) -> None:
        if self._has_finished_rows:
            self._has_finished_rows = False
            self._running[:] = [request for request in self._running if request.status is not FINISHED]

    def _release(self, request: ScheduledRequest, *, is_over: bool = False) -> None:
        """Give back blocks and slots: at once, or when no open step can touch them."""
        request_id, slot, side_slot = request.request_id, request.slot, request.side_slot
        request.slot = request.side_slot = -1
        kv_id = request_id
        if is_over and self._connector is not None and self._connector_keeps(request):
            kv_id = ""
        self._note_left(request)
        if self._is_ordered or request.last_step_id <= self._retired:
            self._give_back(kv_id, slot, side_slot)
        else:
            self._fenced.append((request.last_step_id, kv_id, slot, side_slot))

    def _give_back(self, request_id: str, slot: int, side_slot: int) -> None:
        if request_id:
            self.kv.free(request_id)
        if slot >= 0:
            self._slots.give_back(slot)
        if side_slot >= 0:
            self._side_slots.give_back(side_slot)

    def _pass_fences(self) -> None:
        retired = self._retired
        passed = [entry for entry in self._fenced if entry[0] <= retired]
        if passed:
            self._fenced = [entry for entry in self._fenced if entry[0] > retired]
            for _, request_id, slot, side_slot in passed:
                self._give_back(request_id, slot, side_slot)

    def _note_retired(self) -> None:
        """Every step up to `_retired` is over."""
        self._retired = (self._open[0].output.step_id if self._open else self._next_step_id) - 1
        if self._left:
            self._left = [use for use in self._left if use.last_step_id > self._retired]

    def _is_fenced(self, request_id: str) -> bool:
        return any(entry[1] == request_id for entry in self._fenced)

    # Blocks whose content is not to be trusted.

    def _note_left(self, request: ScheduledRequest) -> None:
        if request.last_step_id > self._retired and request.tables:
            before = self._computed_before(request, self._retired + 1)
            self._left.append(BlockUse(request, request.last_step_id, request.tables, before))

    def _computed_before(self, request: ScheduledRequest, step_id: int) -> int:
        """Tokens that were computed when this step, which is open or just came in, began."""
        count = request.num_computed_tokens
        for step in (self._updating, *self._open):
            if step is not None and step.output.step_id >= step_id and request in step.requests:
                count -= step.output.num_scheduled[step.requests.index(request)]
        # What a connector brings may come with that step, and be lost with it.
        return max(min(count, request.num_found_tokens) if request.connector_tokens else count, 0)

    def _blocks_from(self, request: ScheduledRequest, num_tokens: int) -> set[int]:
        return BlockUse(request, request.last_step_id, request.tables).blocks_from(num_tokens, self._block_sizes)

    def _recompute_holders(self, block_ids: Iterable[int], *, skip_connector: bool = False) -> None:
        """Start again every request that reads one of these blocks; what open steps bring for it is void."""
        receiving = [request for request in self._requests.values() if request.status is RequestStatus.RECEIVING]
        uses = [BlockUse(request, request.last_step_id, request.tables) for request in [*self._running, *receiving]]
        bad, touched = spread(block_ids, [*self._left, *uses], self._block_sizes)
        self.kv.evict(bad)
        for use in touched:
            request = use.request
            request.void_through = max(request.void_through, use.last_step_id)
            request.skip_connector = request.skip_connector or skip_connector
            if request.status is RequestStatus.RECEIVING and not request.is_remote_ready:
                request.restarts = True  # its blocks are being written to
            elif request.status in (RUNNING, RequestStatus.RECEIVING):
                self._preempt(request)

    # KV that comes from, or goes to, somewhere else.

    def _start_receiving(
        self, request: ScheduledRequest, cached: BlockIds | None, num_local: int, num_external: int
    ) -> bool:
        """Blocks for tokens that arrive later; the request waits for them without blocking the queue."""
        assert self._connector is not None
        new_ids = self.kv.allocate(
            request, 0, cached_blocks=cached, num_cached_tokens=num_local,
            num_external_tokens=num_external, delay_caching=True,
        )  # fmt: skip
        if new_ids is None:
            return False
        self._waiting.remove(request)
        block_ids = self.kv.block_ids(request.request_id)
        request.status = RequestStatus.RECEIVING
        request.tables = [list(ids) for ids in block_ids]
        request.num_computed_tokens = num_local + num_external
        request.connector_tokens = num_external
        self._deferred[request.request_id] = request
        self._connector.after_allocation(request.request, block_ids, num_external)
        self._needs_bare_step = True
        return True

    def _update_connector(self, result: ModelOutput) -> None:
        assert self._connector is not None
        for request_id in result.finished_receiving:
            request = self._requests.get(request_id)
            if request_id in self._abandoned:
                self._abandoned.remove(request_id)
                self.kv.free(request_id)
            elif request is not None and request.status is RequestStatus.RECEIVING:
                request.is_remote_ready = True
                if request.restarts:
                    request.restarts = False
                    self._preempt(request)
                else:
                    self.kv.cache_blocks(request, request.num_computed_tokens)
        for request_id in result.finished_sending:
            last_step_id = self._sending.pop(request_id, None)
            if last_step_id is not None:
                self._fenced.append((-1 if self._is_ordered else last_step_id, request_id, -1, -1))
        self._pass_fences()
        self._connector.update(result)

    def _is_receiving(self) -> bool:
        """True while a waiting request holds blocks that are being filled."""
        return any(
            request.status is RequestStatus.RECEIVING and not request.is_remote_ready
            for request in self._deferred.values()
        )

    def _release_idle_holder(self) -> bool:
        """Take the blocks of a waiting request whose KV has arrived; True when there was one."""
        for request in self._requests.values():
            if request.status is RequestStatus.RECEIVING and request.is_remote_ready:
                self._preempt(request)
                return True
        return False

    def _connector_keeps(self, request: ScheduledRequest) -> bool:
        """Tell the connector that a request is over; True when it still reads or writes its blocks."""
        assert self._connector is not None
        request_id = request.request_id
        has_blocks = bool(request.tables)
        try:
            block_ids = self.kv.block_ids(request_id) if has_blocks else tuple([] for _ in self._block_sizes)
            is_sending = self._connector.request_finished(request_id, block_ids) and has_blocks
        except Exception:
            logger.exception("KV connector %s failed at the end of %s.", self._connector.name, request_id)
            is_sending = False
        if request.status is RequestStatus.RECEIVING and not request.is_remote_ready:
            self._abandoned.add(request_id)
            return True
        if is_sending:
            self._sending[request_id] = request.last_step_id
        return is_sending

    def _add_connector_metadata(self, opened: OpenStep) -> None:
        assert self._connector is not None
        self._needs_bare_step = False
        try:
            opened.output.extensions = {self._connector.name: self._connector.build_metadata(opened.output)}
        except Exception as error:  # without it the workers would compute on KV that is not there
            for request in opened.requests:
                self._end(request, _as_pelton_error(error, "describing the KV transfer of"))
            self._drop_finished_rows()

    def _wants_bare_step(self) -> bool:
        """A step without rows, so that a connector's workers are told and asked."""
        if self._connector is None:
            return False
        waits = self._sending or self._abandoned or self._is_receiving()
        return self._needs_bare_step or bool(waits and not self._open)


def _as_pelton_error(error: Exception, doing: str) -> PeltonError:
    """An error that may be told to the client; others are logged in full and named in one line."""
    if isinstance(error, PeltonError):
        return error
    logger.error("An exception while %s a request.", doing, exc_info=error)
    return EngineError(f"Internal error while {doing} the request: {type(error).__name__}: {error}")
