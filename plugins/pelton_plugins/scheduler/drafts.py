"""Draft tokens: how many a row gets, who makes them, and what is taken back when some are rejected.

Either a proposer on the host makes them, or the workers do: then the host knows a number only, or their values a step later,
and steps overlap. Where drafts are seldom accepted they pause, and steps run as if there were no speculation: on the host for
each request; on the device for all together, as one row with drafts makes the step longer for every row.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from operator import attrgetter, index
from typing import TYPE_CHECKING

from pelton.errors import EngineError
from pelton.spec_decode.interface import DraftProposer
from pelton_plugins.scheduler.request import RequestState

if TYPE_CHECKING:
    from pelton.messages.step import ModelOutput, SchedulerOutput
    from pelton.metrics.stats import SchedulerStats
    from pelton.scheduler.interface import SchedulerContext

logger = logging.getLogger(__name__)

_ONLY_SAMPLES = attrgetter("only_samples")
_WEIGHT, _NO_MATCH_WEIGHT = 0.25, 0.1
"""Of a step's acceptance in a request's running mean, and of a step in which its proposer found nothing."""
_PAUSE_TOKENS, _NO_MATCH_PAUSE_TOKENS = 64, 4
"""Tokens without drafts after too many were rejected, and after the proposer found nothing."""
_AFTER_PAUSE = 1.3
"""A pause ends with this much of the least mean: one step that accepts nothing begins the next."""
_PAUSE_STEPS = 64
"""Steps without drafts after too many of those that the device made were rejected, or it found none."""


class Payoff:
    """Estimate of whether the device's drafts are worth their place in a step, from the share that was accepted lately."""

    def __init__(self, min_rate: float) -> None:
        self._min_rate = min_rate
        self._rate = 1.0
        self._resumes_at = 0  # step
        self._next_step = 0

    def is_on(self, step_id: int) -> bool:
        """Asked for every step, in order."""
        self._next_step = step_id + 1
        return step_id >= self._resumes_at

    def note(self, step_id: int, num_draft: int, num_accepted: int) -> bool:
        """A step's result. True: a pause begins. Steps that are open by then have their drafts, and say nothing more."""
        if not self._min_rate or step_id < self._resumes_at:
            return False
        self._rate += _WEIGHT * (num_accepted / num_draft - self._rate)
        if self._rate >= self._min_rate:
            return False
        self._rate = _AFTER_PAUSE * self._min_rate
        self._resumes_at = self._next_step + _PAUSE_STEPS
        return True


class Drafts:
    def __init__(self, context: SchedulerContext) -> None:
        self._proposer = context.proposer
        self._has_failed = False  # which is told once
        self._num_on_device = context.num_draft_tokens
        self._vocab_size = context.vocab_size
        self._min_rate = context.min_acceptance_rate
        self._payoff = Payoff(context.min_acceptance_rate)
        self.is_on = False  # in the step that is being made
        self.are_told = False  # a result has brought some

    def begin(self, step_id: int, running: Iterable[RequestState]) -> None:
        """Decide whether rows of this step may have drafts. Those that the device makes need rows that do no more than sample:
        what else they ask for is not captured with drafts."""
        if self._proposer is not None or not self._num_on_device:
            self.is_on = self._proposer is not None or self.are_told
            return
        self.is_on = self._payoff.is_on(step_id) and all(map(_ONLY_SAMPLES, running))

    @property
    def is_told_each(self) -> bool:
        """Return whether the host knows drafts of each request, and settles them one by one."""
        return self._proposer is not None or self.are_told

    @property
    def num_untold(self) -> int:
        """Return how many drafts each row may have that the device makes and the host never sees; 0: `for_row` has to be asked."""
        return self._num_on_device if self.is_on and not self.is_told_each else 0

    def must_wait(self, request: RequestState) -> bool:
        """The host makes the request's next input, and needs the values of tokens that are pending."""
        return self._proposer is not None and request.num_pending > 0 and not self._is_paused(request)

    def for_row(self, request: RequestState, budget: int) -> tuple[int, list[int] | None]:
        """Return the number of drafts in this step, and their values when the host made them."""
        # Besides the token that is sampled for sure.
        most = min(request.max_total_tokens - request.num_tokens_with_pending, budget) - 1
        if most <= 0 or request.num_tokens_with_pending <= request.num_prompt_tokens:
            return 0, None
        if self._proposer is None and (request.num_pending > 0 or not request.drafts):
            # The device made them, and the host has not seen them: a grammar's masks would need their values.
            return (0 if request.grammar is not None else min(self._num_on_device, most)), None
        if self._proposer is not None:
            request.drafts = [] if self._is_paused(request) else self._propose(self._proposer, request)
        if request.grammar is not None:
            del request.drafts[request.grammar.validate(request.drafts) :]
        del request.drafts[most:]
        return len(request.drafts), None if self._proposer is None else list(request.drafts)

    def take_in(self, output: SchedulerOutput, result: ModelOutput, stats: SchedulerStats) -> None:
        """A step's result, before its rows are settled."""
        self.are_told = self.are_told or bool(result.draft_token_ids)
        if not output.num_draft or self._proposer is not None:
            return
        num_accepted = sum(max(len(tokens) - 1, 0) for tokens in result.token_ids)
        stats.spec_num_pauses += self._payoff.note(output.step_id, sum(output.num_draft), num_accepted)

    def settle(
        self, request: RequestState, num_draft: int, num_made: int, tokens: list[int], stats: SchedulerStats
    ) -> None:
        """Take back what was counted as computed for drafts that were rejected. num_made: of the `num_draft` scheduled ones.
        Raises `EngineError` for too many tokens."""
        num_accepted = len(tokens) - 1
        if not 0 <= num_accepted <= num_draft:
            raise EngineError(f"{len(tokens)} tokens came back for a row with {num_draft} drafts.")
        request.num_computed_tokens -= num_draft - num_accepted
        if num_made:
            stats.count_drafts(num_made, num_accepted)
        if self._proposer is None:
            return
        request.draft_rate += _WEIGHT * (num_accepted / num_draft - request.draft_rate)
        if request.draft_rate < self._min_rate:
            request.no_drafts_until = request.num_tokens_with_pending + _PAUSE_TOKENS
            request.draft_rate = _AFTER_PAUSE * self._min_rate
            stats.spec_num_pauses += 1

    def forget(self, request: RequestState) -> None:
        """The request ended."""
        if self._proposer is None:
            return
        try:
            self._proposer.finished(request.request_id)
        except Exception:
            logger.exception("The draft proposer failed at the end of %s.", request.request_id)

    def _is_paused(self, request: RequestState) -> bool:
        return request.num_tokens_with_pending < request.no_drafts_until

    def _propose(self, proposer: DraftProposer, request: RequestState) -> list[int]:
        try:
            proposed = proposer.propose(request.request_id, request.token_ids)
            drafts = [index(token) for token in proposed[: proposer.max_draft_tokens]]
        except Exception:
            if not self._has_failed:
                self._has_failed = True
                made_by = f"{type(proposer).__module__}:{type(proposer).__qualname__}"
                logger.exception(
                    "The draft proposer %s gives no list of token ids; %s goes on without drafts. Later failures are not shown.",
                    made_by, request.request_id,
                )  # fmt: skip
            return []
        bad = next((i for i, token in enumerate(drafts) if not 0 <= token < self._vocab_size), len(drafts))
        if not drafts and self._min_rate:
            request.draft_rate -= _NO_MATCH_WEIGHT * request.draft_rate
            if request.draft_rate < self._min_rate:
                request.no_drafts_until = request.num_tokens_with_pending + _NO_MATCH_PAUSE_TOKENS
        return drafts[:bad]
