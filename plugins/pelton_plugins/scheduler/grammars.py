"""Structured output in the step loop: a request waits for its grammar, its rows get masks, its tokens advance it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from pelton.errors import EngineError
from pelton.messages.outputs import FinishReason
from pelton.messages.step import GrammarMasks
from pelton.scheduler.request import RequestStatus
from pelton.structured.interface import Grammar, MaskFiller
from pelton_plugins.scheduler.request import RequestState
from pelton_plugins.scheduler.step import OpenStep

if TYPE_CHECKING:
    from pelton_plugins.scheduler.request_table import RequestTable

_ANY = -1
"""A word of a mask that allows its 32 tokens."""
_NUM_BUFFERS = 2
_LATE_S = 2e-3
"""A step waits so long for the masks of a grammar that is slow."""
_NUM_THREADS = 2
"""For masks of slow grammars."""
_SHORT_TOKENS = 64
"""Known tokens of a request that is computed again without a thought."""
_NEAR_TOKENS = 4
"""Tokens of a prompt behind the end of reasoning that leave it ended: templates add line breaks."""


class AfterReasoning(Grammar):
    """Allows everything until `end` has been sampled; from there on what `grammar` allows."""

    def __init__(self, grammar: Grammar, end: Sequence[int], prompt: Sequence[int]) -> None:
        self.grammar = grammar
        self._end = list(end)
        self._tail: list[int] = []  # of the tokens so far, as many as may begin the end
        self.is_over = _find(self._end, list(prompt[-len(self._end) - _NEAR_TOKENS :])) >= 0

    def begins_after(self, token_ids: Sequence[int]) -> int:
        """How many of the tokens that follow belong to the reasoning and its end; -1: all, and it does not end with them."""
        if self.is_over:
            return 0
        found = _find(self._end, [*self._tail, *token_ids])
        return -1 if found < 0 else found - len(self._tail)

    def accept(self, token_ids: Sequence[int]) -> bool:
        count = self.begins_after(token_ids)
        if count < 0:
            self._tail = [*self._tail, *token_ids][-len(self._end) :][-len(self._end) + 1 or len(self._end) :]
            return True
        self.is_over = True
        return count == len(token_ids) or self.grammar.accept(token_ids[count:])

    def validate(self, token_ids: Sequence[int]) -> int:
        count = self.begins_after(token_ids)
        return len(token_ids) if count < 0 else count + self.grammar.validate(token_ids[count:])

    def fill_bitmask(self, row: bytearray | memoryview, draft_token_ids: Sequence[int] = ()) -> None:
        count = self.begins_after(draft_token_ids)
        if count < 0:
            row[:] = b"\xff" * len(row)
        else:
            self.grammar.fill_bitmask(row, draft_token_ids[count:])

    def is_terminated(self) -> bool:
        return self.is_over and self.grammar.is_terminated()


def _find(part: list[int], tokens: list[int]) -> int:
    """Where the first occurrence of `part` ends in `tokens`; -1 without one."""
    size = len(part)
    return next((end for end in range(size, len(tokens) + 1) if tokens[end - size : end] == part), -1)


def is_compiled(request: RequestState) -> bool:
    """False while the grammar is being compiled; raises what is wrong with the constraint."""
    if request.grammar_job is not None:
        if not request.grammar_job.done():
            return False
        grammar = request.grammar_job.result()
        request.grammar_job = None
        if request.grammar is not None:  # a mask that was late: it is there
            request.late_masks = grammar
            return True
        constraint = request.request.sampling_params.structured_outputs
        if constraint is not None and isinstance(constraint.reasoning_end, list):
            grammar = AfterReasoning(grammar, constraint.reasoning_end, request.request.prompt_token_ids)
        request.grammar = grammar
    return True


class MaskMaker:
    """Makes the masks of steps, in memory that is used again."""

    def __init__(self, vocab_size: int) -> None:
        self._num_words = (vocab_size + 31) // 32
        self._buffers: list[Any] = []  # of this step and the one before, which may be on its way

    def make(self, step: OpenStep, table: RequestTable, room: Any = None) -> GrammarMasks:
        """Masks of the step's grammar rows; a request whose mask cannot be made ends. room: see `Executor.mask_room`."""
        output, num_words = step.output, self._num_words
        grammar_rows, slots = output.grammar_rows, output.slots
        if room is not None and not output.num_draft and room.shape[1] >= num_words:
            num_masks, bitmask = [1] * len(grammar_rows), room[:, :num_words]
            places = [slots[row] for row in grammar_rows]
        else:
            room = None
            num_masks = [1 + (output.num_draft[row] if output.num_draft else 0) for row in grammar_rows]
            places = [0, *accumulate(num_masks)]
            bitmask = self._take(places.pop())
        self._fill(step, table, places, num_masks, bitmask)
        view: Any = (
            b"" if room is not None else bitmask.data.cast("B")
        )  # no copy: it crosses to other processes as bytes do
        return GrammarMasks(step_id=output.step_id, bitmask=view, num_masks=num_masks, are_placed=room is not None)

    def _take(self, count: int) -> Any:
        """Memory for so many masks."""
        import numpy as np  # here: who only schedules does not load it

        if len(self._buffers) < _NUM_BUFFERS or len(self._buffers[0]) < count:
            found = np.empty((count, self._num_words), dtype="<i4")
            self._buffers = [*self._buffers[1 - _NUM_BUFFERS :], found]
        else:
            self._buffers.append(found := self._buffers.pop(0))
        return found[:count]

    def _fill(self, step: OpenStep, table: RequestTable, places: list[int], num_masks: list[int], bitmask: Any) -> None:
        started, step_id, requests = time.perf_counter(), step.output.step_id, step.requests
        known = None if table is None else table.mask_plan
        if known is not None:
            if known.holds(step, places):
                _fill(known.filler, known.rows, known.bare_rows, bitmask, table)
                return
            table.mask_plan = None
        by_filler, apart = dict[MaskFiller | None, list[_Row]](), list[tuple[_Row, Future[Any]]]()
        can_come_again = not step.output.num_draft
        for row, place, count in zip(step.output.grammar_rows, places, num_masks, strict=True):
            request = requests[row]
            is_seen = not request.is_finished and step_id > request.discard_through_step
            made = _masked(request, place, count) if is_seen else None
            can_come_again = can_come_again and made is not None and _is_over(request.grammar)
            if (
                made is None or count > 1 or made[0].is_slow
            ):  # all tokens are allowed where nobody looks at what is sampled
                bitmask[place : place + count] = _ANY
            if made is None or _takes_late_mask(request, place, count, bitmask):
                can_come_again = False
            elif made[0].is_slow:
                can_come_again = False
                apart.append((made, _threads().submit(_make_apart, *made[:3:2], bitmask.shape[1])))
            else:
                by_filler.setdefault(made[0].filler, []).append(made)
        for filler, rows in by_filler.items():
            plan = MaskPlan(filler, rows, places, step)
            if can_come_again and filler is not None and len(by_filler) == 1:
                table.mask_plan = plan
            _fill(filler, rows, plan.bare_rows, bitmask, table)
        for masked, job in apart:
            _take_apart(masked, job, bitmask, table, started + _LATE_S)
        if step.output.num_draft:
            for row, place, count in zip(step.output.grammar_rows, places, num_masks, strict=True):
                _open_ends(requests[row], bitmask[place : place + count])


_Row = tuple[Grammar, int, Sequence[int], RequestState]
"""A grammar, the place of its first mask, the drafts behind it, whose it is."""


class Rows(list[Any]):
    """Rows for a filler, which may keep a weak reference to them."""

    __slots__ = ("__weakref__",)


class MaskPlan:
    """Rows of a step that get their masks from one filler. It holds for the next step where its rows are the same: nearly always. The table
    drops it when a request of it ends, whose grammar is to be used again, or leaves the running."""

    def __init__(self, filler: MaskFiller | None, rows: list[_Row], places: list[int], step: OpenStep) -> None:
        self.filler, self.rows = filler, rows
        self.bare_rows = Rows(row[:3] for row in rows)
        self._places, self._requests, self._grammar_rows = places, step.requests, step.output.grammar_rows

    def holds(self, step: OpenStep, places: list[int]) -> bool:
        output = step.output
        return (
            not output.num_draft
            and step.requests == self._requests
            and output.grammar_rows == self._grammar_rows
            and places == self._places
        )


def _masked(request: RequestState, place: int, count: int) -> _Row | None:
    """The masks of a row that its grammar makes; None while all of them allow everything."""
    grammar, drafts = request.grammar, request.drafts[: count - 1] if count > 1 else ()
    if not isinstance(grammar, AfterReasoning):
        return grammar, place, drafts, request
    skipped = grammar.begins_after(drafts)
    return None if skipped < 0 else (grammar.grammar, place + skipped, drafts[skipped:], request)


def _is_over(grammar: Grammar) -> bool:
    """Return whether the grammar's masks are its own from now on."""
    return not isinstance(grammar, AfterReasoning) or grammar.is_over


def _open_ends(request: RequestState, masks: Any) -> None:
    """Allow all tokens behind drafts that complete the text where EOS may not be sampled yet: what is sampled there is cut off."""
    for position in range(1, min(len(masks), request.min_tokens - len(request.token_ids))):
        others = masks[position].view("<u4").copy()
        for token_id in request.request.eos_token_ids:
            others[token_id >> 5] &= 0xFFFFFFFF ^ (1 << (token_id & 31))
        if not others.any():
            masks[position] = _ANY


def _takes_late_mask(request: RequestState, place: int, count: int, bitmask: Any) -> bool:
    """Enter the mask that was late, where it is of the request's state."""
    masks, request.late_masks = request.late_masks, None
    if masks is None or count + len(masks) > 2 or request.late_mask_at != len(request.token_ids):
        return False
    if not _is_over(request.grammar):  # it may be that behind drafts that end the reasoning
        return False
    bitmask[place] = masks[0]
    return True


def _fill(
    filler: MaskFiller | None,
    rows: list[_Row],
    bare_rows: Sequence[tuple[Grammar, int, Sequence[int]]],
    bitmask: Any,
    table: RequestTable,
) -> None:
    if filler is not None:
        try:
            late = filler.fill(bare_rows, bitmask)
        except Exception:  # of one of them: whose it is, the others' masks are not to suffer
            pass
        else:
            for index, job in late.items() if late else ():
                _leave_behind(rows[index], job, bitmask, table)
            return
    for grammar, place, drafts, request in rows:
        masks, started = bitmask[place : place + len(drafts) + 1], time.thread_time()
        try:
            _fill_row(grammar, drafts, masks)
        except Exception as error:
            masks.fill(_ANY)
            table.fail(request, error, "making the grammar mask of")
        else:
            if filler is None and time.thread_time() - started > _LATE_S:
                grammar.is_slow = True  # from now on on a thread


def _fill_row(grammar: Grammar, drafts: Sequence[int], masks: Any) -> None:
    for position in range(len(drafts) + 1):
        if position and grammar.validate(drafts[:position]) < position:
            break
        grammar.fill_bitmask(masks[position].data.cast("B"), drafts[:position])


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="pelton-masks")


def _make_apart(grammar: Grammar, drafts: Sequence[int], num_words: int) -> Any:
    """The masks of a row, on a thread of its own."""
    import numpy as np

    masks = np.full((1 + len(drafts), num_words), _ANY, dtype="<i4")
    _fill_row(grammar, drafts, masks)
    return masks


def _take_apart(row: _Row, job: Future[Any], bitmask: Any, table: RequestTable, deadline: float) -> None:
    """Enter masks that are made apart, which may be late."""
    _, place, drafts, request = row
    try:
        bitmask[place : place + 1 + len(drafts)] = job.result(max(deadline - time.perf_counter(), 0.0))
    except FutureTimeoutError:
        _leave_behind(row, job, bitmask, table)
    except Exception as error:
        table.fail(request, error, "making the grammar mask of")


def _leave_behind(row: _Row, job: Any, bitmask: Any, table: RequestTable) -> None:
    """Go on without a row whose masks are late. What open steps sample for it is discarded and it leaves the running: it comes back, with
    its blocks from the prefix cache, when they are there. Where it would have to compute too much again, they are waited for.

    job: like a future; its result are the masks [1 + drafts, words]."""
    _, place, drafts, request = row
    is_cached = len(request.block_hashes) > 0 or len(request.token_ids) < _SHORT_TOKENS
    if request.status is RequestStatus.RUNNING and is_cached:
        request.late_mask_at = len(request.token_ids)
        request.grammar_job = job
        request.discard_through_step = request.last_step_id
        table.preempt(request)
        return
    try:
        bitmask[place : place + 1 + len(drafts)] = job.result()
    except Exception as error:
        table.fail(request, error, "making the grammar mask of")


def advance(request: RequestState, tokens: list[int], reason: FinishReason | None) -> tuple[list[int], bool]:
    """Take in tokens of a constrained request. Returns those that count, and whether the text is complete and ends the request."""
    # EOS is not part of the constrained text.
    inside = tokens[:-1] if tokens[-1] in request.eos_ids and reason is FinishReason.STOP else tokens
    num_before = len(request.token_ids) - len(tokens)
    for count, token in enumerate(inside, 1):
        if not request.grammar.accept([token]):
            raise EngineError(f"Tokens {inside} break the request's grammar.")
        # Where EOS may not be sampled, nothing else may follow a text that is complete, and drafts may have been followed.
        may_end = request.eos_ids and num_before + count >= request.min_tokens
        is_last = count == len(tokens) and reason is not None
        if not may_end and not is_last and request.grammar.is_terminated():
            del request.token_ids[num_before + count :]
            return tokens[:count], True
    return tokens, False
