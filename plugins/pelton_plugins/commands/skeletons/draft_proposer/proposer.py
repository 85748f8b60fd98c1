"""Drafts from the text so far: the tokens that followed the last token where it stood before."""

from __future__ import annotations

from collections.abc import Sequence

from pelton.spec_decode.interface import DraftProposer, ProposerContext


class SkeletonProposer(DraftProposer):
    """Reads a request's tokens backwards, as far as `WINDOW`: it runs between two steps and must not block."""

    WINDOW = 512

    def __init__(self, context: ProposerContext) -> None:
        self.max_draft_tokens = context.config.num_speculative_tokens

    def propose(self, request_id: str, token_ids: Sequence[int]) -> list[int]:
        last = len(token_ids) - 1
        for place in range(last - 1, max(last - self.WINDOW, -1), -1):
            if token_ids[place] == token_ids[last]:
                return list(token_ids[place + 1 : place + 1 + self.max_draft_tokens])
        return []
