"""The two ops of speculation: drafts found in a request's own text, and the end of a step that verifies drafts.

Both are made for capture: nothing is asked of the device, and the work follows from shapes alone. R = rows, K = most drafts of
a row. Method: Saxena, "Prompt Lookup Decoding", 2023; a draft is a proposal that is certain (a point mass), so that keeping it
while it equals the token which is sampled in its place is rejection sampling (Leviathan et al., arXiv:2211.17192).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.worker.batch_state import BatchTensors


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupDraftsNeeds:
    num_drafts: int  # K
    longest: int  # tokens of the end of a text that are looked up earlier in it, at most
    shortest: int  # at least


@dataclass(slots=True)
class LookupDraftsTensors:
    state: BatchTensors


class LookupDrafts(Protocol):
    def __call__(self, slots: Tensor, num_draft: Tensor, num_found: Tensor) -> None:
        """Put up to `num_draft` drafts behind each row's known tokens, in `state.token_ids`.

        slots, num_draft [R] int64, 0 drafts for rows that get none; num_found [R] int64, written: how many there are. The text
        of a row with drafts is token_ids[slot, : n], n = num_computed_tokens[slot] + 1. The longest n-gram at its end that
        occurs earlier wins; of several places the latest that has K tokens behind it, else the first.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyNeeds:
    num_drafts: int  # K


@dataclass(slots=True)
class VerifyTensors:
    state: BatchTensors


class Verify(Protocol):
    def __call__(self, slots: Tensor, num_draft: Tensor, sampled: Tensor, result: Tensor) -> None:
        """Keep drafts while each equals the token sampled in its place, and advance the state.

        slots, num_draft [R] int64; sampled [R (1 + K), 2] int32: for each row (token id, error code) behind its last known
        token and behind each of its drafts, which lie in `state.token_ids` from place num_computed_tokens[slot] + 1 on. Of
        its first a drafts that are equal: token_ids gets sampled token a behind them, and num_computed_tokens[slot] += 1 + a.
        result [R, 4 + K] int32, written: a, the largest code of the first 1 + a, num_draft, and 1 + K tokens, of which the
        first 1 + a count. A row whose slot is `state.padding_slot` does nothing and gets zeros.
        Optional: a method `verify_greedy(slots, num_draft, logits, result)` that does the same from logits [R (1 + K), V] of rows that
        take their best tokens, or returns False and does nothing.
        """
        ...
