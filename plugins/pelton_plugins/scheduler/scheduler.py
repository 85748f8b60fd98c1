"""The built-in scheduler: continuous batching with chunked prefill, preemption by recompute, and several steps open.

A request has tokens to reach and tokens computed; each step gives it some of the difference. Running requests first,
then waiting ones in policy order; a waiting request never preempts. See DESIGN section 3.

This file is the outline. Each idea has a file of its own: `request_checks` (which requests are refused), `request_table`
(where each request is), `running` and `admission` (which requests get a row), `gates` (what a waiting request needs first),
`preemption` (which request gives up its blocks), `allocations` (blocks and slots), `step_results` (what a result changes).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from pelton.errors import DeadlineExceededError, EngineDeadError, EngineError, ErrorInfo, RequestError
from pelton.logging import get_logger
from pelton.messages.outputs import EngineOutput, FinishReason
from pelton.messages.request import EngineRequest
from pelton.messages.step import GrammarMasks, ModelOutput, SchedulerOutput
from pelton.metrics.stats import SchedulerStats
from pelton.scheduler.gates import Gate
from pelton.scheduler.interface import Scheduler, SchedulerContext
from pelton.scheduler.policy import SchedulingPolicy
from pelton.scheduler.request import RequestStatus
from pelton_plugins.scheduler import grammars
from pelton_plugins.scheduler.adapters import AdapterSlotGate, AdapterSlots
from pelton_plugins.scheduler.admission import Admission
from pelton_plugins.scheduler.allocations import Allocations
from pelton_plugins.scheduler.common_prefix import CommonPrefix
from pelton_plugins.scheduler.deadlines import Deadlines
from pelton_plugins.scheduler.drafts import Drafts
from pelton_plugins.scheduler.gates import (
    AdapterGate,
    GrammarGate,
    InFlightGate,
    PolicyGate,
    RemoteKVGate,
    SideSlotGate,
)
from pelton_plugins.scheduler.kv_transfers import KVTransfers
from pelton_plugins.scheduler.policies import FCFSPolicy
from pelton_plugins.scheduler.preemption import Preemption
from pelton_plugins.scheduler.request import RequestState
from pelton_plugins.scheduler.request_checks import AdmissionLimits
from pelton_plugins.scheduler.request_table import RequestTable, last_output
from pelton_plugins.scheduler.row_parts import RowParts
from pelton_plugins.scheduler.running import RunningRows
from pelton_plugins.scheduler.skipping import StepSkipper
from pelton_plugins.scheduler.sleeping import Rest
from pelton_plugins.scheduler.stages import make_stage_shares
from pelton_plugins.scheduler.step import OpenStep, OpenSteps, StepBuilder
from pelton_plugins.scheduler.step_results import StepResults

logger = get_logger(__name__)


class DefaultScheduler(Scheduler):
    """Continuous batching. See `Scheduler` for the life cycle."""

    def __init__(self, context: SchedulerContext) -> None:
        kv_manager, block_sizes, hasher = context.kv_manager, context.block_sizes, context.hasher
        self.config = config = context.config
        self.kv = kv_manager
        self._rest = Rest(self)
        self.max_model_len = context.max_model_len
        self.max_num_seqs = context.max_num_seqs
        self.max_num_batched_tokens = context.max_num_batched_tokens
        self.vocab_size = context.vocab_size
        self.max_steps_in_flight = context.max_steps_in_flight
        self._is_ordered = context.steps_are_ordered
        self._grammar_source = context.grammar_source
        self._context_tokens = context.context_tokens
        self._clock = context.clock
        self._num_arrivals = 0

        policy = context.policy or FCFSPolicy()
        self._steps = OpenSteps()
        self._common_prefix = CommonPrefix(kv_manager)
        self._masks = grammars.MaskMaker(context.vocab_size)
        self._limits = AdmissionLimits(
            config=config,
            kv=kv_manager,
            max_model_len=context.max_model_len,
            max_num_batched_tokens=context.max_num_batched_tokens,
            has_grammars=context.grammar_source is not None,
            has_adapters=context.adapter_is_ready is not None or context.adapters is not None,
            has_connector=context.connector is not None,
            is_pooling=context.is_pooling,
            takes_prompt_embeds=context.engine_config is not None and context.engine_config.model.enable_prompt_embeds,
        )
        kv_manager.hands_copies = context.steps_are_ordered  # nobody holds what is copied
        self._allocations = Allocations(
            kv_manager,
            self._steps,
            block_sizes=block_sizes,
            hash_block_size=hasher.block_size if hasher else 0,
            num_slots=context.max_num_seqs,
            num_side_slots=config.num_side_slots(context.max_num_seqs),
            steps_are_ordered=context.steps_are_ordered,
        )
        named = None if context.engine_config is None else context.engine_config.kv_transfer.kv_connector
        self._transfers = KVTransfers(context.connector, kv_manager, num_groups=len(block_sizes), named=named)
        drafts = Drafts(context)
        self._table = RequestTable(policy, self._allocations, self._transfers, drafts, context.clock)
        self._deadlines = Deadlines(self._table.requests)
        self.adapters = self._adapters = None if context.adapters is None else AdapterSlots(context.adapters)
        if self._adapters is not None:
            self._adapters.running = self._table.running
        preemption = Preemption(policy, self._table, self._allocations, self._transfers, self._steps)
        parts = RowParts(
            config=config,
            policy=policy,
            kv=kv_manager,
            table=self._table,
            allocations=self._allocations,
            preemption=preemption,
        )
        shares = make_stage_shares(context, self._steps, self._table)
        self._running = RunningRows(parts, drafts, shares)
        self._results = StepResults(
            kv_manager,
            self._table,
            self._allocations,
            drafts,
            self._transfers,
            hasher=hasher,
            steps_are_ordered=context.steps_are_ordered,
        )
        self._admission = Admission(
            parts,
            self._transfers,
            [*self._built_in_gates(context, policy), *context.gates],
            self._results,
            hasher=hasher,
            max_num_seqs=context.max_num_seqs,
            max_num_batched_tokens=context.max_num_batched_tokens,
        )
        # Behind an only step its result comes first.
        self._may_hash_late = (
            kv_manager.hits_have_first_block and context.connector is None and context.max_steps_in_flight > 1
        )
        specials = (context.proposer, context.num_draft_tokens, context.connector, context.adapters)
        is_plain = context.steps_are_ordered and shares is None and not any(specials)
        self.skipper = StepSkipper(  # for simulators
            kv_manager, self._table, self._allocations, self._steps, self._results, is_plain=is_plain
        )

    def _built_in_gates(self, context: SchedulerContext, policy: SchedulingPolicy) -> list[Gate]:
        gates: list[Gate] = [InFlightGate(self._steps)]
        if context.connector is not None:
            gates.append(RemoteKVGate())
        if context.grammar_source is not None:
            gates.append(GrammarGate())
        if self._adapters is not None:
            gates.append(AdapterSlotGate(self._adapters))
        elif context.adapter_is_ready is not None:
            gates.append(AdapterGate(context.adapter_is_ready))
        gates.append(SideSlotGate(self._allocations.side_slots))
        return [*gates, PolicyGate(policy)] if _holds_some_back(policy) else gates

    # Requests in and out.

    def add_request(self, request: EngineRequest) -> None:
        request_id, table = request.request_id, self._table
        self._rest.check()
        if request_id in table.requests:
            raise RequestError("request_id is in use by an unfinished request", param="request_id", value=request_id)
        if self._transfers.holds(request_id) or self._allocations.is_fenced(request_id):
            raise RequestError("request_id is still being released", param="request_id", value=request_id)
        self._limits.check(request, table.num_queued_reqs, table.num_queued_tokens)
        self._transfers.check(request)
        now = self._clock()
        record = RequestState(request, self._num_arrivals, max_model_len=self.max_model_len, now=now)
        constraint = request.sampling_params.structured_outputs
        if constraint is not None:
            assert self._grammar_source is not None  # the check has refused it
            record.grammar_job = self._grammar_source.submit(constraint)
        self._num_arrivals += 1
        if request.adapter is not None and self._adapters is not None:
            self._adapters.prefetch(request.adapter)
        table.add(record, now)
        self._deadlines.add(record)

    def finish_requests(self, request_ids: Iterable[str], reason: FinishReason, error: ErrorInfo | None = None) -> None:
        self._results.cache_filled()
        for request_id in request_ids:
            request = self._table.requests.get(request_id)
            if request is None:
                continue
            if reason is FinishReason.STOP:
                self._table.finish(request)
            else:
                self._table.end(request, reason, error)
        self._table.drop_finished_rows()

    def expire(self, now: float) -> None:
        self._results.cache_filled()
        for request in self._deadlines.take_passed(now):
            limit = request.request.timeout_s
            error = DeadlineExceededError(f"The request's time limit of {limit} s passed.")
            self._table.end(request, FinishReason.ERROR, error.to_info())
        self._table.drop_finished_rows()

    def next_deadline(self) -> float | None:
        return self._deadlines.next()

    def take_outputs(self) -> list[EngineOutput]:
        return self._table.take_outputs()

    def has_unfinished_requests(self) -> bool:
        # While a connector reads or writes blocks, steps have to go on to hear of its end.
        return bool(self._table.requests) or self._transfers.holds_blocks

    def rest(self, call: Callable[..., Any], method: str, *args: Any) -> bool:
        return self._rest.call(call, method, *args)

    def reset_prefix_cache(self) -> bool:
        return self.kv.reset_prefix_cache()

    def take_stats(self) -> SchedulerStats:
        stats = self._table.take_stats()
        stats.kv_cache_usage = self.kv.usage
        if self._adapters is not None:
            stats.running_adapters, stats.waiting_adapters = self._table.count_adapters()
        stats.sleep_level = self._rest.level
        stats.kv_fetch_reqs = self._transfers.count_fetches(self._table)
        stats.kv_block_lifetimes_s, stats.kv_block_idle_s, stats.kv_block_reuse_gaps_s = self.kv.take_residency()
        if self._grammar_source is not None:
            stats.grammar_compile_s = self._grammar_source.take_compile_times()
        return stats

    # One step.

    def schedule(self) -> SchedulerOutput | None:
        steps, table = self._steps, self._table
        if len(steps):  # while one runs
            steps.forget_taken()
        if len(steps) >= self.max_steps_in_flight:
            return None
        if self._results.filled and not self._results.may_wait():
            self._results.cache_filled()
        if self._adapters is not None:
            self._adapters.begin_step()
        if table.deferred:
            self._admission.requeue_deferred()
        step = StepBuilder(
            steps.next_id, self.max_num_batched_tokens, is_ordered=self._is_ordered, context_tokens=self._context_tokens
        )
        step.hashes_late = self._may_hash_late and not steps
        opened: OpenStep | None = None
        try:
            if table.running:
                self._running.serve(step)
            else:
                self._running.expect_burst(step.step_id)
            if not step.has_preempted and table.waiting:
                self._admission.admit(step)
            if not step.num_rows and not self._transfers.wants_bare_step(table, len(steps)):
                return None
            opened = self._open(step)
            self._common_prefix.note(opened)
            self._transfers.describe(opened, table)  # last, and never raises: a connector tells each thing once
        except Exception as error:
            # What its rows should compute is findable already: it fails as a step that was handed out.
            failed = (opened or self._open(step)).output
            info = EngineError(f"Internal error in the scheduler: {type(error).__name__}: {error}").to_info()
            num_rows = len(failed.slots)
            table.outputs += self.update_failed(failed, info)
            if not num_rows or isinstance(error, EngineDeadError):
                raise  # nobody is ended by it: the next step would fail too
            logger.exception("Making step %d failed; its %d requests end.", failed.step_id, num_rows)
            return None
        stats, output = table.stats, opened.output
        if self._adapters is not None:
            self._adapters.describe(output)
        stats.num_steps += 1
        stats.num_scheduled_tokens += output.total_num_scheduled_tokens
        return output

    def _open(self, step: StepBuilder) -> OpenStep:
        opened = step.build(self._allocations.slots.take_freed(), has_grammars=self._table.num_grammars > 0)
        self._steps.add(opened)
        return opened

    def grammar_masks(self, output: SchedulerOutput, room: Any = None) -> GrammarMasks | None:
        if not output.grammar_rows:
            return None
        masks = self._masks.make(self._steps.find(output), self._table, room)
        self._table.drop_finished_rows()
        return masks

    def update(self, output: SchedulerOutput, result: ModelOutput) -> list[EngineOutput]:
        if self._results.filled:
            self._results.cache_filled()
        step = self._steps.oldest(output)
        if len(result.token_ids) != len(step.requests) or result.step_id != output.step_id:
            raise EngineError(
                f"Step {output.step_id} with {len(step.requests)} rows came back as step {result.step_id} with "
                f"{len(result.token_ids)} rows."
            )
        self._steps.take(step)
        if result.invalid_block_ids:
            self._recompute_readers(result.invalid_block_ids, skip_connector=True)
        self._steps.retire()
        try:
            self._results.take_in(step, result)
        finally:  # of what came or went elsewhere no later result tells
            self._transfers.take_in(result, self._table, self._allocations)
        self._table.drop_finished_rows()
        self._allocations.retire()
        return step.outputs

    def update_failed(self, output: SchedulerOutput, error: ErrorInfo) -> list[EngineOutput]:
        step = self._steps.find(output)
        self._steps.take(step)
        self._allocations.slots.tell_again(output.freed_slots)  # the workers may not have heard
        if self._adapters is not None:
            self._adapters.tell_again(output)
        invalid = self._allocations.invalid
        bad = invalid.given_up_under(output.step_id)
        outputs = step.outputs  # some may have got theirs, their last too, before `update` failed
        for request in step.requests:
            if request.is_finished:
                continue
            before = self._steps.computed_before(request, output.step_id)
            bad |= invalid.blocks_from(request, before)
            self._table.finish(request)
            outputs.append(last_output(request, FinishReason.ERROR, error))
        self._table.drop_finished_rows()
        self._recompute_readers(bad)
        self._steps.retire()
        self._allocations.retire()
        return outputs

    def _recompute_readers(self, block_ids: Iterable[int], *, skip_connector: bool = False) -> None:
        """Start again every request that reads one of these blocks; what open steps bring for it is void."""
        table = self._table
        for use in self._allocations.invalid.evict_readers(block_ids, [*table.running, *table.receiving()]):
            request = use.request
            request.discard_through_step = max(request.discard_through_step, use.last_step_id)
            if request.skip_prefix_lookup:  # prompt logprobs, not sent yet: all are made again
                request.prompt_logprobs = []
                request.discard_logprobs_through_step = request.discard_through_step
            request.skip_connector = request.skip_connector or skip_connector
            if request.is_receiving:
                request.restarts = True  # its blocks are being written to
            elif request.status in (RequestStatus.RUNNING, RequestStatus.RECEIVING):
                table.preempt(request)


def _holds_some_back(policy: SchedulingPolicy) -> bool:
    """Return whether the policy has an answer of its own to one of the questions of `PolicyGate`."""
    plain = SchedulingPolicy.holds_back, SchedulingPolicy.admits
    return (getattr(policy.holds_back, "__func__", None), getattr(policy.admits, "__func__", None)) != plain
