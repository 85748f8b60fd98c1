"""The rows of running requests: a token each, or a chunk of a prompt, or drafts; first served is who ranks first.

Nearly all rows of nearly all steps are a token whose block has room, or needs one more, or a token and drafts that the device makes:
those take short ways.
"""

from __future__ import annotations

from itertools import islice

from pelton_plugins.scheduler.allocations import is_cached_later
from pelton_plugins.scheduler.drafts import Drafts
from pelton_plugins.scheduler.request import RequestState
from pelton_plugins.scheduler.row_parts import RowParts
from pelton_plugins.scheduler.stages import StageShares
from pelton_plugins.scheduler.step import StepBuilder

_BURST_STEPS, _FEW_WAITING = 32, 2
"""A burst: more than two requests that wait, no later than 32 steps after nothing ran, with no more tokens than 32 full steps compute.
Every step has a cost of its own, and those with few rows waste most: a burst decodes together soon, behind few large steps. Under a
load that lasts there is always a next prompt, and large steps would be most of the time between two tokens."""


class RunningRows:
    def __init__(self, parts: RowParts, drafts: Drafts, shares: StageShares | None = None) -> None:
        """shares: of a pipeline's steps; None: each running request has a row in each step."""
        self._parts, self._kv, self._table, self._allocations = parts, parts.kv, parts.table, parts.allocations
        self._drafts, self._shares = drafts, shares
        self._burst_end = 0  # the step from which on no burst is left
        block_sizes = parts.allocations.block_sizes
        self._block_size = block_sizes[0] if block_sizes else 0  # asked with one group only

    def expect_burst(self, step_id: int) -> None:
        """Nothing runs before this step: whoever comes now holds up nobody who has been reading for long."""
        self._burst_end = step_id + _BURST_STEPS

    def _is_burst(self, step: StepBuilder) -> bool:
        table = self._table
        return (
            step.step_id < self._burst_end
            and table.num_queued_reqs > _FEW_WAITING
            and table.num_queued_tokens <= _BURST_STEPS * step.budget
        )

    def serve(self, step: StepBuilder) -> None:
        """Give each running request its tokens, in rank order; preempt from the end when blocks run out."""
        running = self._table.running
        config = self._parts.config
        num_mixed = config.max_mixed_prefill_tokens
        if num_mixed and config.enable_chunked_prefill and any(request.is_in_decode for request in running):
            step.bound_prefill(num_mixed, step.budget if self._is_burst(step) else num_mixed // 2)
        self._drafts.begin(step.step_id, running)
        is_plain = step.is_ordered and not self._drafts.is_on
        shares = self._shares
        num_draft = self._drafts.num_untold if step.is_ordered and shares is None else 0
        if shares is not None:
            shares.begin(step)
        step_id, ones, max_seq_len = step.step_id, step.ones, 0
        index = 0
        while index < len(running) and step.budget > 0:
            first, num_ones = index, len(ones)
            # A token whose block has room: nearly all rows of nearly all steps.
            for request in islice(running, first, first + step.budget) if is_plain and shares is None else ():
                reach = request.num_tokens_with_pending
                if reach >= request.fast_decode_until:
                    break
                request.num_computed_tokens = reach
                request.num_tokens_with_pending = reach + 1
                request.last_step_id = step_id
                ones.append(request)
                if reach > max_seq_len:
                    max_seq_len = reach
            num_plain = len(ones) - num_ones
            step.ones_samples += [True] * num_plain
            step.budget -= num_plain
            index += num_plain + (self._serve_drafted(first, num_draft, step) if num_draft else 0)
            if index == len(running) or step.budget <= 0:
                break
            request = running[index]
            if request.num_tokens_with_pending >= request.max_total_tokens:  # its last token is in flight
                index += 1
                continue
            if shares is not None and (
                shares.holds_back(request) or (is_plain and self._serve_in_block(request, step))
            ):
                index += 1
                continue
            num_appends, num_copies = len(step.appends), len(step.copies)
            try:
                if request.fast_decode_until and (
                    (is_plain and self._serve_with_new_block(request, step))
                    or (num_draft and self._serve_drafted_with_new_block(request, num_draft, step))
                ):
                    index += 1
                    continue
                is_served = self._serve(request, index, step)
            except Exception as error:
                if step.has_row(request):
                    raise  # what comes behind its row is not its own
                self._fail(request, error, step, num_appends, num_copies)
                is_served = False
            # One that was preempted, or ended, has left its place to the next.
            index += is_served or (index < len(running) and running[index] is request)
        step.max_seq_len = max(step.max_seq_len, max_seq_len)

    def _serve_drafted(self, first: int, num_draft: int, step: StepBuilder) -> int:
        """Give a token and `num_draft` drafts to each request from the `first` on, as far as blocks have room for them and none comes to
        its end; return to how many."""
        width, many, step_id, longest = 1 + num_draft, step.many, step.step_id, step.max_seq_len
        num_before = len(many)
        for request in islice(self._table.running, first, first + step.budget // width):
            last = request.num_tokens_with_pending + num_draft
            if last >= request.fast_decode_until:
                break
            request.num_computed_tokens = last
            request.num_tokens_with_pending = last + 1
            request.num_unconfirmed_tokens += num_draft
            request.last_step_id = step_id
            many.append(request)
            if last > longest:
                longest = last
        count = len(many) - num_before
        step.many_tokens += [width] * count
        step.many_samples += [True] * count
        step.many_num_draft += [num_draft] * count
        step.many_draft_ids += [[] for _ in range(count)]
        step.budget -= width * count
        step.max_seq_len = longest
        return count

    def _fail(
        self, request: RequestState, error: Exception, step: StepBuilder, num_appends: int, num_copies: int
    ) -> None:
        """The request ends alone: it is not in the step, and what was allocated for its row is not to be found."""
        slot = request.slot
        step.appends[num_appends:] = [append for append in step.appends[num_appends:] if append[1] != slot]
        del step.copies[num_copies:]
        self._kv.evict(block for ids in self._kv.block_ids(request.request_id) for block in ids)
        self._kv.evict(block for _, block in request.kept_states)
        self._table.fail(request, error, "scheduling")
        self._table.drop_finished_rows()

    @staticmethod
    def _serve_in_block(request: RequestState, step: StepBuilder) -> bool:
        """The fast path of `serve` for one row. False, and nothing done, where its block has no room."""
        reach = request.num_tokens_with_pending
        if reach >= request.fast_decode_until:
            return False
        request.num_computed_tokens = reach
        request.num_tokens_with_pending = reach + 1
        request.last_step_id = step.step_id
        step.ones.append(request)
        step.ones_samples.append(True)
        step.budget -= 1
        step.max_seq_len = max(step.max_seq_len, reach)
        return True

    def _serve_with_new_block(self, request: RequestState, step: StepBuilder) -> bool:
        """Fast path of `_serve` for a decode row that needs one new block. False, and nothing done, when there is none."""
        if not self._grow(request, 0, step):
            return False
        reach = request.num_tokens_with_pending
        request.num_computed_tokens = reach
        request.num_tokens_with_pending = reach + 1
        request.plan_decode()
        request.last_step_id = step.step_id
        step.ones.append(request)
        step.ones_samples.append(True)
        step.budget -= 1
        step.max_seq_len = max(step.max_seq_len, reach)
        return True

    def _serve_drafted_with_new_block(self, request: RequestState, num_draft: int, step: StepBuilder) -> bool:
        """The same for a row with drafts that the device makes, of a request that does not come to its end with them."""
        last = request.num_tokens_with_pending + num_draft
        if last >= request.max_total_tokens or step.budget <= num_draft or not self._grow(request, num_draft, step):
            return False
        step.take_row(request, 1, num_draft)
        return True

    def _grow(self, request: RequestState, num_draft: int, step: StepBuilder) -> bool:
        """Take blocks for a token and drafts behind those computed. False, and nothing done, when there are none."""
        new_ids = self._kv.allocate(request, 1, num_lookahead_tokens=num_draft, delay_caching=is_cached_later(1))
        if new_ids is None:
            return False
        if len(new_ids) == 1 and len(new_ids[0]) == 1:
            table = request.tables[0]
            step.appends.append((0, request.slot, len(table), new_ids[0]))
            table.append(new_ids[0][0])
            request.capacity += self._block_size
        else:
            self._allocations.append(request, new_ids, 1, num_draft, step)
        return True

    def _serve(self, request: RequestState, index: int, step: StepBuilder) -> bool:
        """A running request's row, where drafts, chunks or blocks have to be thought of. False: none in this step."""
        num_new = request.num_tokens_with_pending - request.num_computed_tokens
        drafts: list[int] | None = None
        num_draft = 0
        if num_new > 1:
            # Every running request behind this one still gets its token in this step.
            left = max(step.budget - (len(self._table.running) - index - 1), 1)
            num_new = min(self._parts.share(request, request.num_computed_tokens, num_new), left)
            num_new = min(num_new, step.prefill_room(request.num_computed_tokens))
            if num_new <= 0:
                return False
        elif self._drafts.is_on:
            if self._drafts.must_wait(request):
                return False
            num_draft, drafts = self._drafts.for_row(request, step.budget)
        while not self._allocations.grow(request, num_new, num_draft, step):
            if not self._parts.preemption.make_room_for_running(request, index, step):
                return False
        step.take_row(request, num_new, num_draft, drafts)
        return True
