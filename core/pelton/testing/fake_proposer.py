"""A fake proposer of draft tokens, which knows the fake model."""

from __future__ import annotations

from collections.abc import Sequence

from pelton.spec_decode.interface import DraftProposer
from pelton.testing.fake_model import FakeModel, running_hashes


class FakeProposer(DraftProposer):
    """Proposes the fake model's own tokens, of which those from a place that the prefix decides are wrong."""

    def __init__(self, fake_model: FakeModel, max_draft_tokens: int = 3) -> None:
        self.max_draft_tokens = max_draft_tokens
        self.fake_model = fake_model

    def propose(self, request_id: str, token_ids: Sequence[int]) -> list[int]:
        value = running_hashes(token_ids)[-1]
        most = self.max_draft_tokens + 1
        return self.fake_model.draft(value, (value >> 5) % most, (value >> 9) % most)
