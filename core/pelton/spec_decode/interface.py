"""The promise of a draft proposer that runs on the host: which tokens may come next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence


class DraftProposer(ABC):
    """Called by the scheduler between `update` and `schedule`, only for requests with no step pending."""

    max_draft_tokens: int

    @abstractmethod
    def propose(self, request_id: str, token_ids: Sequence[int]) -> list[int]:
        """Drafts that follow the known tokens; an empty list for none."""
