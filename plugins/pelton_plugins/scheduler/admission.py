"""Admit waiting requests in policy order, while the step has budget and every gate is open."""

from __future__ import annotations

from collections.abc import Sequence

from pelton.kv_cache.hashing import BlockHasher
from pelton.kv_cache.interface import BlockIds
from pelton.messages.step import NewRequest
from pelton.scheduler.gates import Gate, Verdict
from pelton_plugins.scheduler.allocations import is_cached_later
from pelton_plugins.scheduler.kv_transfers import KVTransfers
from pelton_plugins.scheduler.request import RequestState
from pelton_plugins.scheduler.row_parts import RowParts
from pelton_plugins.scheduler.step import StepBuilder
from pelton_plugins.scheduler.step_results import StepResults


class Admission:
    def __init__(
        self,
        parts: RowParts,
        transfers: KVTransfers,
        gates: Sequence[Gate],
        results: StepResults,
        *,
        hasher: BlockHasher | None,
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> None:
        self._parts, self._kv, self._table, self._allocations = parts, parts.kv, parts.table, parts.allocations
        self._transfers = transfers
        self._gates = tuple(gates)
        self._results = results
        self._hasher = hasher
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens

    def requeue_deferred(self) -> None:
        """Put the deferred requests back in the queue that no gate holds any more."""
        for request in list(self._table.deferred.values()):
            try:
                is_open = all(gate.may_open(request) for gate in self._gates)
            except Exception as error:
                self._table.fail(request, error, "admitting")
                continue
            if is_open:
                self._table.requeue(request)

    def admit(self, step: StepBuilder) -> None:
        """Take requests from the head of the queue while the step has budget. The first that does not fit ends it."""
        table = self._table
        while step.takes_prompts and self._allocations.slots.num_free and len(table.running) < self._max_num_seqs:
            request = table.waiting.peek()
            if request is None:
                return
            try:
                verdict = self._ask_gates(request)
                if verdict is Verdict.DEFER:
                    table.defer(request)
                elif verdict is Verdict.WAIT or not self._admit(request, step):
                    return
            except Exception as error:
                # Blocks that it got for a step that it will not be in are not to be found.
                self._kv.evict(block for ids in self._kv.block_ids(request.request_id) for block in ids)
                table.fail(request, error, "admitting")
                table.drop_finished_rows()

    def _ask_gates(self, request: RequestState) -> Verdict:
        """The first verdict that is not OPEN, or OPEN."""
        for gate in self._gates:
            verdict = gate.check(request, self._table.running)
            if verdict is not Verdict.OPEN:
                return verdict
        return Verdict.OPEN

    def _admit(self, request: RequestState, step: StepBuilder) -> bool:
        """Run the head of the queue in this step. False: it does not fit, and nobody passes it.

        True without a row when it has to wait for its KV, or when it ended.
        """
        cached: BlockIds | None = None
        num_local = num_external = 0
        hasher, is_late = self._hasher, False
        request.pack()
        if hasher is not None:  # not when it came: those behind it are hashed while this step runs
            # Masks that are late take a request's blocks away at once, and it has to find them again.
            is_late = (
                step.hashes_late
                and len(request.block_hashes) <= 1
                and len(request.token_ids)
                >= 2 * hasher.block_size
                > 2  # of one token a first share may fill a block: see `may_wait`
                and request.grammar is None
            )
            request.extend_hashes(hasher, only_first=is_late)
        if not request.is_remote_ready:
            if hasher is not None and not request.skip_prefix_lookup:
                cached, num_local = self._kv.lookup(request)
                if (num_local and is_late) or not self._results.late.isdisjoint(request.block_hashes[:1]):
                    is_late = False  # there is more to find
                    self._results.cache_filled()
                    request.extend_hashes(hasher)
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
        num_new = self._first_share(request, start, step)
        if not num_new:
            return False
        delay_caching = is_late or num_external > 0 or is_cached_later(num_new)
        new_ids = self._kv.allocate(
            request, num_new, cached_blocks=cached, num_cached_tokens=num_local,
            num_external_tokens=num_external, delay_caching=delay_caching,
        )  # fmt: skip
        if new_ids is None:
            return self._parts.preemption.make_room_for_head(request, step)
        copies = self._kv.take_copies()
        self._count_found(request, start, num_external)
        self._table.run(request)
        block_ids = self._kv.block_ids(request.request_id)
        self._allocations.start(request, block_ids, start + num_new, copies, is_cached_now=not delay_caching)
        if num_external:
            self._transfers.bring(request, block_ids, num_external)
        step.copies += copies
        step.new.append(_describe(request, block_ids))
        step.take_row(request, num_new)
        if is_late:
            self._results.filled.append(request)
            self._results.late.add(request.block_hashes[0])
        else:
            request.take_packed()
        return True

    def _first_share(self, request: RequestState, start: int, step: StepBuilder) -> int:
        """Tokens of a request's first step, behind `start` that are there; 0 when it has to wait for a step with more room."""
        num_new = len(request.token_ids) - start
        # One that was preempted may have outgrown a whole step, and is then cut even without chunked prefill.
        if not self._parts.config.enable_chunked_prefill and num_new <= self._max_num_batched_tokens:
            return num_new if num_new <= step.budget else 0
        num_first = min(self._parts.share(request, start, num_new), step.budget)
        if num_first == num_new and step.takes_short(num_new, start):
            return num_new
        return max(min(num_first, step.prefill_room(start)), 0)

    def _count_found(self, request: RequestState, start: int, num_external: int) -> None:
        """The first `start` tokens need not be computed: some were found here, some a connector brings."""
        num_local = start - num_external - request.connector_tokens
        request.num_computed_tokens = start
        request.num_found_tokens = num_local
        request.connector_tokens += num_external
        if request.num_cached_tokens < 0 and self._transfers.may_bring(request):
            self._table.stats.external_prefix_cache_queries += request.num_prompt_tokens - num_local
            self._table.stats.external_prefix_cache_hits += request.connector_tokens
        if request.num_cached_tokens < 0 and self._hasher is not None and not request.skip_prefix_lookup:
            stats = self._table.stats
            stats.prefix_cache_requests += 1
            stats.prefix_cache_queries += request.num_prompt_tokens
            stats.prefix_cache_hits += num_local


def _describe(request: RequestState, block_ids: BlockIds) -> NewRequest:
    original = request.request
    return NewRequest(
        request_id=request.request_id,
        slot=request.slot,
        # Not ours, which grows while the worker reads; a long prompt is not copied.
        token_ids=list(request.token_ids) if request.num_output_tokens else original.prompt_token_ids,
        packed_token_ids=request.packed_token_ids,
        num_prompt_tokens=request.num_prompt_tokens,
        sampling_params=original.sampling_params,
        pooling_params=original.pooling_params,
        eos_token_ids=original.eos_token_ids,
        bad_words_token_ids=original.bad_words_token_ids,
        seed=original.seed,
        block_ids=[list(ids) for ids in block_ids],
        num_computed_tokens=request.num_computed_tokens,
        side_slot=request.side_slot,
        adapter=original.adapter,
        multi_modal_items=original.multi_modal_items,
        prompt_embeds=original.prompt_embeds,
    )
