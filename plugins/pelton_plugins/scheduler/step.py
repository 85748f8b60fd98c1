"""A step under construction, and the steps that are open: what `schedule` leaves for `update`."""

from __future__ import annotations

from collections import deque

from pelton.messages.outputs import EngineOutput
from pelton.messages.step import NewRequest, SchedulerOutput
from pelton_plugins.scheduler.request import RequestState

LEAST_CHUNK_TOKENS = 16
"""Fewer would read the weights too often, whatever the context costs."""


class OpenStep:
    """A step that was handed out, with the requests of its rows: `update` never asks the slot table."""

    __slots__ = ("output", "outputs", "requests")

    def __init__(self, output: SchedulerOutput, requests: list[RequestState]) -> None:
        self.output = output
        self.requests = requests
        self.outputs: list[EngineOutput] = []  # of what was taken in of its result so far


class OpenSteps:
    """Steps whose result has not come, oldest first, and the one that is being taken in."""

    def __init__(self) -> None:
        self.next_id = 0
        self.retired = -1  # every step up to this one is over
        self._open: deque[OpenStep] = deque()
        self._taken: OpenStep | None = None

    def __len__(self) -> int:
        return len(self._open)

    def rows(self) -> list[tuple[int, int, bool]]:
        """Rows of each open step, most tokens of one of them, and whether all of them sample."""
        return [(len(step.requests), step.output.max_query_len, all(step.output.samples)) for step in self._open]

    def add(self, step: OpenStep) -> None:
        self._open.append(step)
        self.next_id += 1

    def oldest(self, output: SchedulerOutput) -> OpenStep:
        step = self._open[0]
        assert step.output is output, "results come back in step order"
        return step

    def find(self, output: SchedulerOutput) -> OpenStep:
        """It is open, or the last that was taken."""
        for step in (*self._open, self._taken):
            if step is not None and step.output is output:
                return step
        raise AssertionError("a step gets masks, and fails once, while it is open or in its update")

    def take(self, step: OpenStep) -> None:
        """Take a step whose result is here; `computed_before` knows it until `retire`."""
        if step is not self._taken:
            self._open.remove(step)
            self._taken = step

    def forget_taken(self) -> None:
        """Let go of the step that was taken last, when its update is over: a long prompt takes its time to be freed."""
        self._taken = None

    def retire(self) -> None:
        self.retired = (self._open[0].output.step_id if self._open else self.next_id) - 1

    def computed_before(self, request: RequestState, step_id: int) -> int:
        """Tokens of the request that were computed when this step, which is open or just came in, began."""
        count = request.num_computed_tokens
        for step in (self._taken, *self._open):
            if step is not None and step.output.step_id >= step_id and request in step.requests:
                count -= step.output.num_scheduled[step.requests.index(request)]
        # What a connector brings may come with that step, and be lost with it.
        return max(min(count, request.num_found_tokens) if request.connector_tokens else count, 0)


class StepBuilder:
    """Columns of one step. Rows with one token are kept apart, so that they come first without a sort."""

    __slots__ = (
        "appends", "budget", "context_tokens", "copies", "has_preempted", "hashes_late", "is_ordered", "many",
        "many_draft_ids", "many_num_draft", "many_samples", "many_tokens", "max_seq_len", "most_short", "new", "ones",
        "ones_samples", "prefill_budget", "short_budget", "step_id",
    )  # fmt: skip

    def __init__(self, step_id: int, budget: int, *, is_ordered: bool, context_tokens: int = 0) -> None:
        """context_tokens: see `SchedulerContext`."""
        self.step_id = step_id
        self.context_tokens = context_tokens
        self.budget = budget
        self.prefill_budget = budget  # of it, for rows with more than one token; in tokens without context
        self.short_budget = self.most_short = 0  # beyond it, see `bound_prefill`; in the same tokens
        self.is_ordered = is_ordered
        self.has_preempted = False
        # The device waits for it: of a prompt whose first block is not cached, the others are hashed when the step is launched.
        self.hashes_late = False
        self.max_seq_len = 0
        self.ones: list[RequestState] = []
        self.ones_samples: list[bool] = []
        self.many: list[RequestState] = []
        self.many_tokens: list[int] = []  # drafts included
        self.many_samples: list[bool] = []
        self.many_num_draft: list[int] = []
        self.many_draft_ids: list[list[int]] = []  # values that the host made
        self.new: list[NewRequest] = []
        self.appends: list[tuple[int, int, int, list[int]]] = []
        self.copies: list[tuple[int, int]] = []  # of blocks

    @property
    def num_rows(self) -> int:
        return len(self.ones) + len(self.many)

    def has_row(self, request: RequestState) -> bool:
        """Return whether the request's row was the last to be taken."""
        return any(rows and rows[-1] is request for rows in (self.ones, self.many))

    def bound_prefill(self, num_tokens: int, most_short: int) -> None:
        """Take few prompt tokens, for rows that decode are in the step. A waiting request of which no more than `most_short` are left
        comes beyond that: it gets its first token in this step, and is a row of all steps that follow."""
        self.short_budget, self.most_short = self.prefill_budget, most_short
        self.prefill_budget = num_tokens

    @property
    def takes_prompts(self) -> bool:
        return self.budget > 0 and (self.prefill_budget > 0 or self.short_budget > 0)

    def takes_short(self, num_new: int, start: int) -> bool:
        """Return whether the last `num_new` tokens of a prompt, behind `start` others, fit whatever `prefill_room` says."""
        return self._cost(num_new, start) <= min(self.most_short, self.short_budget)

    def _cost(self, num_new: int, start: int) -> int:
        """A chunk in tokens without context."""
        return num_new + (num_new * start // self.context_tokens if self.context_tokens else 0)

    def prefill_room(self, start: int) -> int:
        """Most tokens of a prompt behind `start` others."""
        budget, context = self.prefill_budget, self.context_tokens
        if not context or budget <= 0:
            return budget
        return max(budget * context // (context + start), min(budget, LEAST_CHUNK_TOKENS))

    def take_row(
        self, request: RequestState, num_new: int, num_draft: int = 0, host_drafts: list[int] | None = None
    ) -> None:
        """Enter a row of `num_new` known or pending tokens and `num_draft` drafts; `host_drafts` are their values if sent.
        Its tokens count as computed and, where it samples, as pending."""
        total = num_new + num_draft
        samples = request.num_computed_tokens + num_new == request.num_tokens_with_pending
        if num_new > 1 or not samples:  # of a prompt; one token of many too
            cost = self._cost(num_new, request.num_computed_tokens)
            self.prefill_budget -= cost
            self.short_budget -= cost
        request.num_computed_tokens += total
        request.num_unconfirmed_tokens += num_draft if self.is_ordered else total
        if samples:
            request.num_tokens_with_pending += 1 + num_draft
            request.plan_decode()  # read only where nothing drafts and steps are ordered
        request.last_step_id = self.step_id
        self.budget -= total
        if request.num_computed_tokens > self.max_seq_len:
            self.max_seq_len = request.num_computed_tokens
        if total == 1:
            self.ones.append(request)
            self.ones_samples.append(samples)
            return
        self.many.append(request)
        self.many_tokens.append(total)
        self.many_samples.append(samples)
        self.many_num_draft.append(num_draft)
        self.many_draft_ids.append(host_drafts or [])

    def build(self, freed_slots: list[int], *, has_grammars: bool) -> OpenStep:
        """Join the columns."""
        num_ones = len(self.ones)
        requests = self.ones + self.many
        samples = self.ones_samples + self.many_samples
        output = SchedulerOutput(
            step_id=self.step_id,
            new=self.new,
            slots=[request.slot for request in requests],
            num_scheduled=[1] * num_ones + self.many_tokens,
            samples=samples,
            block_appends=self.appends,
            block_copies=self.copies,
            freed_slots=freed_slots,
            max_query_len=max(self.many_tokens) if self.many else min(num_ones, 1),
            max_seq_len=self.max_seq_len,
            total_num_scheduled_tokens=num_ones + sum(self.many_tokens),
        )
        if any(self.many_num_draft):
            output.num_draft = [0] * num_ones + self.many_num_draft
        if any(self.many_draft_ids):
            empty: list[list[int]] = [[] for _ in range(num_ones)]
            output.draft_token_ids = empty + self.many_draft_ids
        if has_grammars:
            output.grammar_rows = [
                row for row, request in enumerate(requests) if request.grammar is not None and samples[row]
            ]
        return OpenStep(output, requests)
