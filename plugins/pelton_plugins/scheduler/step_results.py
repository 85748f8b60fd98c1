"""Apply a step's result to the requests of its rows: tokens are appended, stops found, full blocks made findable.

Nearly all rows of nearly all steps bring a token that ends nothing, or several behind drafts: those take short ways.
"""

from __future__ import annotations

from pelton.errors import EngineError, RequestError
from pelton.kv_cache.hashing import BlockHasher
from pelton.kv_cache.interface import KVCacheManager
from pelton.messages.outputs import EngineOutput, FinishReason, LogprobColumns, PackedLogprobs
from pelton.messages.request import TensorData
from pelton.messages.step import ModelOutput, SchedulerOutput
from pelton.sampling.error_codes import ERROR_MESSAGES, NOTHING_ALLOWED
from pelton.scheduler.request import RequestStatus
from pelton_plugins.scheduler import grammars
from pelton_plugins.scheduler.allocations import Allocations
from pelton_plugins.scheduler.drafts import Drafts
from pelton_plugins.scheduler.kv_transfers import KVTransfers
from pelton_plugins.scheduler.request import RequestState
from pelton_plugins.scheduler.request_table import RequestTable
from pelton_plugins.scheduler.step import OpenStep

FINISHED = RequestStatus.FINISHED
ASKED_FOR = ERROR_MESSAGES[NOTHING_ALLOWED]
"""The row error that is the request's own doing: what was computed for it is right."""


class StepResults:
    """hasher: None switches prefix caching off."""

    def __init__(
        self,
        kv: KVCacheManager,
        table: RequestTable,
        allocations: Allocations,
        drafts: Drafts,
        transfers: KVTransfers,
        *,
        hasher: BlockHasher | None,
        steps_are_ordered: bool,
    ) -> None:
        self._kv = kv
        self._table = table
        self._allocations = allocations
        self._drafts = drafts
        self._transfers = transfers
        self._hasher = hasher
        self._hash_block_size = allocations.hash_block_size
        self._is_ordered = steps_are_ordered
        self.filled: list[RequestState] = []  # with full blocks that are not cached yet
        self.late: set[bytes] = set()  # hashes of the first blocks of those that the last step has admitted

    def take_in(self, step: OpenStep, result: ModelOutput) -> None:
        """Enter the outputs of all rows with the step. The caller drops rows that finished."""
        outputs = step.outputs
        errors = dict(result.row_errors)
        self._drafts.take_in(step.output, result, self._table.stats)
        has_extras = bool(errors or result.prompt_logprobs or step.output.num_draft or self._drafts.are_told)
        logprobs = result.logprobs
        is_plain = self._is_ordered and not has_extras
        if step.output.grammar_rows:
            self._take_in_masked(step, result, errors, is_plain=is_plain)
            return
        if step.output.num_draft and self._is_ordered and not (errors or result.prompt_logprobs or logprobs):
            self._take_in_drafted(step, result)
            return
        is_bare = is_plain and not logprobs
        make, tell = EngineOutput, outputs.append
        for row, request, tokens in zip(range(len(step.requests)), step.requests, result.token_ids, strict=True):
            if is_plain and len(tokens) == 1 and (token := tokens[0]) not in request.stop_ids:
                # A token that ends nothing: nearly all rows of nearly all steps.
                known = request.token_ids
                columns = None if is_bare else logprobs.get(row)
                if columns is None and len(known) < request.next_event_len:
                    known.append(token)
                    tell(make(request.request_id, tokens))
                    continue
                ends_nothing = request.next_event_len > 0 and len(known) + 1 < request.max_total_tokens
                if ends_nothing and not isinstance(columns, LogprobColumns):
                    known.append(token)
                    if len(known) > request.next_event_len:  # it fills a block
                        self.cache_and_plan(request, is_plain=True)
                    tell(make(request.request_id, tokens, None, None, columns))
                    continue
            self._settle(step, result, row, request, errors)

    def _take_in_masked(self, step: OpenStep, result: ModelOutput, errors: dict[int, str], *, is_plain: bool) -> None:
        """The rows of a step with grammars: nearly all of them bring a token that the mask allowed, and that ends nothing. Blocks that
        are full are left to `cache_filled`: the next masks come first."""
        logprobs, tell = result.logprobs, step.outputs.append
        for row, request, tokens in zip(range(len(step.requests)), step.requests, result.token_ids, strict=True):
            known, grammar = request.token_ids, request.grammar
            if (
                is_plain
                and len(tokens) == 1
                and tokens[0] not in request.stop_ids
                and (
                    (num_known := len(known)) < request.next_event_len
                    or (request.next_event_len > 0 and num_known + 1 < request.max_total_tokens)
                )
                and row not in logprobs
                and (
                    grammar is None
                    or (request.eos_ids and num_known + 1 >= request.min_tokens and self._accepts(request, tokens))
                )
            ):
                known.append(tokens[0])
                if num_known + 1 > request.next_event_len:
                    self.filled.append(request)
                tell(EngineOutput(request.request_id, tokens))
            else:
                self._settle(step, result, row, request, errors)

    def _take_in_drafted(self, step: OpenStep, result: ModelOutput) -> None:
        """The rows of a step with drafts, and without logprobs and errors: nearly all of them bring tokens that end nothing."""
        scheduled, tell, are_told = step.output.num_draft, step.outputs.append, self._drafts.is_told_each
        made = result.num_draft or scheduled
        num_rows, num_made = [0] * (1 + max(scheduled)), [0] * (1 + max(scheduled))  # by how many were accepted
        for row, request, tokens in zip(range(len(step.requests)), step.requests, result.token_ids, strict=True):
            num_draft, known = scheduled[row], request.token_ids
            if (
                num_draft
                and request.next_event_len > 0
                and not are_told
                and 0 < len(tokens) <= 1 + num_draft
                and len(known) + len(tokens) < request.max_total_tokens
                and request.stop_ids.isdisjoint(tokens)
            ):
                num_accepted = len(tokens) - 1
                if made[row]:
                    num_rows[num_accepted] += 1
                    num_made[num_accepted] += made[row]
                request.num_computed_tokens -= num_draft - num_accepted
                request.num_tokens_with_pending -= num_draft - num_accepted
                request.num_unconfirmed_tokens -= num_draft
                known += tokens
                if len(known) > request.next_event_len:  # they fill a block
                    self.cache_and_plan(request, is_plain=True)
                tell(EngineOutput(request.request_id, tokens))
            else:
                self._settle(step, result, row, request, {})
        for num_accepted, count in enumerate(num_rows):
            if count:
                self._table.stats.count_drafts(num_made[num_accepted], num_accepted, count)

    def may_wait(self) -> bool:
        """Return whether `filled` may wait until the open step's result is taken in: prompts that end in it. Its launch needs the
        interpreter now, and whoever finds the first block of one of them has all cached.

        Not where a prompt goes on: its last token may be a row of the next step alone, which fills a block while another that has found
        it reads (`is_cached_later`), or its blocks may cost another one its own, which could not be found again yet."""
        running = self._table.running
        if not self.late or self._kv.num_free_blocks < 2 * len(running):
            return False
        return all(one.is_in_decode for one in running) and all(one.num_pending for one in self.filled)

    def cache_filled(self) -> None:
        """Cache the full blocks that the last step has left. Before the next step is scheduled, but for `may_wait`, or taken in."""
        filled, self.filled = self.filled, []
        self.late.clear()
        for request in filled:
            if request.status is RequestStatus.RUNNING:
                self.cache_and_plan(request, is_plain=request.has_valid_output)
            request.take_packed()

    def _accepts(self, request: RequestState, tokens: list[int]) -> bool:
        """Take in a token that is no end; a request whose grammar fails ends alone, and is settled as one that is over."""
        try:
            is_allowed: bool = request.grammar.accept(tokens)
            return is_allowed
        except Exception as error:
            self._table.fail(request, error, "advancing the grammar of")
            return False

    def _settle(
        self, step: OpenStep, result: ModelOutput, row: int, request: RequestState, errors: dict[int, str]
    ) -> None:
        """Take in one row the long way; a request whose result is wrong ends."""
        if request.status is FINISHED:
            if errors.get(row, ASKED_FOR) != ASKED_FOR:  # its blocks were given up, and are findable
                self._allocations.invalid.evict(request, result.step_id, 0)
            return
        try:
            told = self._take_row(step.output, result, row, request, errors.get(row))
        except Exception as error:
            request.has_valid_output = False
            # NaN may come from a block that it found: all who find that block after it would fail too.
            is_corrupted = errors.get(row, ASKED_FOR) != ASKED_FOR
            self._table.stats.num_corrupted_reqs += is_corrupted
            num_trusted = 0 if is_corrupted else request.num_found_tokens
            self._allocations.invalid.evict(request, result.step_id, num_trusted)
            self._table.fail(request, error, "computing")
        else:
            if told is not None:
                step.outputs.append(told)

    def _take_row(
        self, output: SchedulerOutput, result: ModelOutput, row: int, request: RequestState, failure: str | None
    ) -> EngineOutput | None:
        """Take in one row, whatever it brings. Raises what ends the request."""
        samples, tokens = output.samples[row], result.token_ids[row]
        num_draft = output.num_draft[row] if output.num_draft else 0
        if output.step_id <= request.discard_through_step:
            if samples:
                request.num_tokens_with_pending -= 1 + num_draft
            return None
        if failure is not None:
            raise RequestError(failure) if failure == ASKED_FOR else EngineError(failure)
        if request.status is RequestStatus.RUNNING:
            if samples and not request.has_valid_output:
                request.has_valid_output = True
                self._transfers.note_valid(request)
            if num_draft:
                num_made = result.num_draft[row] if result.num_draft else num_draft
                self._drafts.settle(request, num_draft, num_made, tokens, self._table.stats)
            request.num_unconfirmed_tokens -= num_draft if self._is_ordered else output.num_scheduled[row]
        columns = result.prompt_logprobs.get(row)
        if (
            columns is not None
            and request.skip_prefix_lookup
            and output.step_id > request.discard_logprobs_through_step
        ):
            request.prompt_logprobs.append(_packed(columns))
        if request.pools:
            return self._take_pooled(request, result.pooled.get(row)) if samples else None
        reason: FinishReason | None = None
        stop_reason: int | None = None
        if samples:
            tokens, reason, stop_reason = _append(request, tokens, num_draft)
            has_drafts = bool(result.draft_token_ids) and not request.num_pending
            request.drafts = result.draft_token_ids[row] if has_drafts else []
        is_running = request.status is RequestStatus.RUNNING
        self.cache_and_plan(request, is_plain=samples and is_running)
        if not samples:
            return None
        if reason is None and not request.events and row not in result.logprobs:
            return EngineOutput(request.request_id, tokens)
        told = _full_output(request, tokens, reason, stop_reason, result.logprobs.get(row))
        if reason is not None:
            self._table.finish(request)
            told.kv_transfer_params = request.kv_transfer_params
        return told

    def _take_pooled(self, request: RequestState, pooled: TensorData | None) -> EngineOutput:
        """The end of a request that pools."""
        if pooled is None:
            raise EngineError("No result came back for a row that pools.")
        self.cache_and_plan(request, is_plain=False)
        told = EngineOutput(request.request_id, [], FinishReason.STOP, pooled=pooled)
        told.events, request.events = request.events, []
        told.num_cached_tokens, told.num_external_tokens = (
            max(request.num_cached_tokens, 0),
            request.num_external_tokens,
        )
        self._table.finish(request)
        told.kv_transfer_params = request.kv_transfer_params
        return told

    def cache_and_plan(self, request: RequestState, *, is_plain: bool) -> None:
        """Cache the blocks that became full, of sampled tokens and of what arrived from elsewhere. Then plan the next event."""
        if self._hasher is not None:
            size, num_known = self._hash_block_size, len(request.token_ids)
            if num_known >= (len(request.block_hashes) + 1) * size:
                request.extend_hashes(self._hasher)
            num_full = min(request.num_computed_tokens, num_known) // size
            if num_full > request.num_cached_blocks:
                request.num_cached_blocks = num_full
                self._kv.cache_blocks(request, num_full * size)
        request.plan_next_event(self._hash_block_size, is_plain=is_plain)


def _append(
    request: RequestState, tokens: list[int], num_draft: int
) -> tuple[list[int], FinishReason | None, int | None]:
    """Append a row's tokens up to the first that ends the request; returns those that count."""
    if not 1 <= len(tokens) <= 1 + num_draft:
        raise EngineError(f"{len(tokens)} tokens came back for a row with {num_draft} drafts.")
    request.num_tokens_with_pending -= 1 + num_draft - len(tokens)
    reason: FinishReason | None = None
    stop_reason: int | None = None
    known = request.own_token_ids()
    for count, token in enumerate(tokens, 1):
        known.append(token)
        if len(known) >= request.max_total_tokens or token in request.stop_ids:
            reason, stop_reason = _stop_of(request)
            if reason is not None:
                tokens = tokens[:count]
                break
    if request.grammar is not None:
        tokens, is_complete = grammars.advance(request, tokens, reason)
        if is_complete:
            reason, stop_reason = FinishReason.STOP, None
    return tokens, reason, stop_reason


def _stop_of(request: RequestState) -> tuple[FinishReason | None, int | None]:
    """Return the reason for which the last known token ends the request: EOS and stop ids before length, none before min_tokens."""
    token, count = request.token_ids[-1], len(request.token_ids)
    if token in request.stop_ids and count >= request.min_tokens:
        return FinishReason.STOP, None if token in request.eos_ids else token
    return (FinishReason.LENGTH if count >= request.max_total_tokens else None), None


def _full_output(
    request: RequestState,
    tokens: list[int],
    reason: FinishReason | None,
    stop_reason: int | None,
    logprobs: PackedLogprobs | LogprobColumns | None,
) -> EngineOutput:
    """An output with all that is known: the first, the last, and those with logprobs."""
    packed = None if logprobs is None else _packed(logprobs).head(len(tokens))
    output = EngineOutput(request.request_id, tokens, reason, stop_reason, packed)
    if request.skip_prefix_lookup:  # prompt_logprobs, not sent yet
        output.prompt_logprobs = PackedLogprobs.join(request.prompt_logprobs)
        request.prompt_logprobs = []
        request.skip_prefix_lookup = False  # after a preemption they are not needed again
    output.events, request.events = request.events, []
    output.num_cached_tokens, output.num_external_tokens = (
        max(request.num_cached_tokens, 0),
        request.num_external_tokens,
    )
    return output


def _packed(columns: PackedLogprobs | LogprobColumns) -> PackedLogprobs:
    return columns.packed() if isinstance(columns, LogprobColumns) else columns
