"""Draft tokens: how many a row gets, whose they are, and what is taken back when some are rejected.

The host makes them (a proposer here), or the workers do: then the host knows a number only, or their values a step later.
"""

from __future__ import annotations

import logging

from pelton.errors import EngineError
from pelton.scheduler.request import ScheduledRequest
from pelton.spec_decode.interface import DraftProposer

logger = logging.getLogger(__name__)


class Drafts:
    """num_on_device: drafts per step that the workers make, known to the host as a number only; 0 for none."""

    def __init__(self, proposer: DraftProposer | None, num_on_device: int, vocab_size: int) -> None:
        self.is_on = proposer is not None or num_on_device > 0  # or a result has brought some
        self._proposer = proposer
        self._num_on_device = num_on_device
        self._vocab_size = vocab_size

    def must_wait(self, request: ScheduledRequest) -> bool:
        """The host makes the request's next input, and needs the values of tokens that are pending."""
        return self._proposer is not None and request.num_pending > 0

    def for_row(self, request: ScheduledRequest, budget: int) -> tuple[int, list[int] | None]:
        """Number of drafts in this step, and their values when the host made them."""
        # Besides the token that is sampled for sure.
        room = min(request.max_total_tokens - request.num_tokens_with_pending, budget) - 1
        if room <= 0 or request.num_tokens_with_pending <= request.num_prompt_tokens:
            return 0, None
        if self._proposer is None and (request.num_pending > 0 or not request.drafts):
            # The device made them, and the host has not seen them: a grammar's masks would need their values.
            return (0 if request.grammar is not None else min(self._num_on_device, room)), None
        if self._proposer is not None:
            request.drafts = self._propose(self._proposer, request)
        if request.grammar is not None:
            del request.drafts[request.grammar.validate(request.drafts) :]
        del request.drafts[room:]
        return len(request.drafts), None if self._proposer is None else list(request.drafts)

    def _propose(self, proposer: DraftProposer, request: ScheduledRequest) -> list[int]:
        try:
            drafts = proposer.propose(request.request_id, request.token_ids)
        except Exception:
            logger.exception("The draft proposer failed for %s; it goes on without drafts.", request.request_id)
            return []
        drafts = drafts[: proposer.max_draft_tokens]
        bad = next((i for i, token in enumerate(drafts) if not 0 <= token < self._vocab_size), len(drafts))
        return drafts[:bad]

    @staticmethod
    def settle(request: ScheduledRequest, num_draft: int, tokens: list[int]) -> int:
        """Take back what was counted as computed for drafts that were rejected; how many were accepted."""
        num_accepted = len(tokens) - 1
        if not 0 <= num_accepted <= num_draft:
            raise EngineError(f"{len(tokens)} tokens came back for a row with {num_draft} drafts.")
        request.num_computed_tokens -= num_draft - num_accepted
        return num_accepted
