"""One step under construction, and one step that is open: what `schedule` leaves for `update`."""

from __future__ import annotations

from pelton.scheduler.output import NewRequest, SchedulerOutput
from pelton.scheduler.request import ScheduledRequest


class OpenStep:
    """A step that was handed out, with the requests of its rows: `update` never asks the slot table."""

    __slots__ = ("output", "requests")

    def __init__(self, output: SchedulerOutput, requests: list[ScheduledRequest]) -> None:
        self.output = output
        self.requests = requests


class StepBuilder:
    """Columns of one step. Rows with one token are kept apart, so that they come first without a sort."""

    __slots__ = (
        "appends", "budget", "has_preempted", "many", "many_draft_ids", "many_num_draft", "many_samples", "many_tokens",
        "max_seq_len", "new", "ones", "ones_samples", "step_id",
    )  # fmt: skip

    def __init__(self, step_id: int, budget: int) -> None:
        self.step_id = step_id
        self.budget = budget
        self.has_preempted = False
        self.max_seq_len = 0
        self.ones: list[ScheduledRequest] = []
        self.ones_samples: list[bool] = []
        self.many: list[ScheduledRequest] = []
        self.many_tokens: list[int] = []  # drafts included
        self.many_samples: list[bool] = []
        self.many_num_draft: list[int] = []
        self.many_draft_ids: list[list[int]] = []  # values that the host made
        self.new: list[NewRequest] = []
        self.appends: list[tuple[int, int, int, list[int]]] = []

    @property
    def num_rows(self) -> int:
        return len(self.ones) + len(self.many)

    def add_row(
        self, request: ScheduledRequest, num_new: int, samples: bool, num_draft: int, host_drafts: list[int] | None
    ) -> None:
        """A row of `num_new` known or pending tokens and `num_draft` drafts; `host_drafts` are their values if sent."""
        total = num_new + num_draft
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
