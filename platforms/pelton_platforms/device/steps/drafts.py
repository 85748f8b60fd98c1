"""Interface of a draft proposer that runs on the worker, beside the model: drafts never pass through the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.worker.batch_state import BatchTensors


class WorkerDraftProposer(Protocol):
    """Called once a step, after sampling. `ModelRunner.draft_proposer` holds it."""

    max_draft_tokens: int

    def propose(self, state: BatchTensors, slots: Tensor, hidden: Any, last_tokens: Tensor) -> Tensor:
        """[r, max_draft_tokens] int64: what may follow each row's last token; every row has as many.

        slots [r] of the rows that sampled: `state.token_ids[slot, : state.num_computed_tokens[slot] + 1]` is known.
        hidden: what the model's forward returned; last_tokens [r]: index in it of the last token that was accepted.
        """
        ...
