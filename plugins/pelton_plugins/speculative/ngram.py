"""N-gram drafts (prompt lookup decoding): what followed the same tokens earlier in a request's own text.

The longest n-gram at the end of the text that occurs earlier wins, from `prompt_lookup_max` tokens down to
`prompt_lookup_min`; of several places the latest that has all drafts behind it. Method: Saxena, "Prompt Lookup
Decoding", 2023; the same idea is in Yang et al., "Inference with Reference" (arXiv:2304.04487).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pelton.ops.speculation import LookupDraftsNeeds
from pelton.spec_decode.interface import DraftProposer, ProposerContext

_FIRST_CAPACITY = 256


class NgramProposer(DraftProposer):
    """Keeps each request's tokens as an array, so that a look-up is a few comparisons of whole arrays."""

    def __init__(self, context: ProposerContext) -> None:
        config = context.config
        self.max_draft_tokens = config.num_speculative_tokens
        self.longest, self.shortest = config.prompt_lookup_max, config.prompt_lookup_min
        self.lookup = LookupDraftsNeeds(num_drafts=self.max_draft_tokens, longest=self.longest, shortest=self.shortest)
        self._texts: dict[str, _Text] = {}

    def propose(self, request_id: str, token_ids: Sequence[int]) -> list[int]:
        text = self._texts.get(request_id)
        if text is None:
            text = self._texts[request_id] = _Text()
        return propose(text.extend(token_ids), self.longest, self.shortest, self.max_draft_tokens)

    def finished(self, request_id: str) -> None:
        self._texts.pop(request_id, None)


class _Text:
    """Known tokens of one request; grows in place."""

    __slots__ = ("_memory", "_size")

    def __init__(self) -> None:
        self._memory = np.empty(_FIRST_CAPACITY, dtype=np.int32)
        self._size = 0

    def extend(self, token_ids: Sequence[int]) -> np.ndarray:
        """[len(token_ids)] int32: the tokens, of which only the new ones are copied."""
        size = len(token_ids)
        if size > len(self._memory):
            larger = np.empty(max(size, 2 * len(self._memory)), dtype=np.int32)
            larger[: self._size] = self._memory[: self._size]
            self._memory = larger
        self._memory[self._size : size] = token_ids[self._size :]
        self._size = size
        return self._memory[:size]


def propose(text: np.ndarray, longest: int, shortest: int, count: int) -> list[int]:
    """Return up to `count` drafts behind `text` [n] int32; an empty list when no n-gram of its end occurs earlier."""
    size, best = len(text), None
    # Places whose token equals the last one; of these the places whose n-gram matches further, token by token.
    places = np.flatnonzero(text[: size - 1] == text[size - 1])
    for length in range(1, min(longest, size - 1) + 1):
        if length > 1:
            places = places[places >= length - 1]
            places = places[text[places - (length - 1)] == text[size - length]]
        if not len(places):
            break
        if length >= shortest:
            best = places
    if best is None:
        return []
    complete = best[best + count < size]
    first = 1 + int(complete[-1] if len(complete) else best[0])
    return text[first : first + count].tolist()  # type: ignore[no-any-return]
