"""Drafts in a step: made by the device in front of it, and verified at its end.

A row of 1 + k tokens has 1 + k rows of logits. Each is sampled as if it were a request of its own, with the parameters and the
random number of the place behind its token: so all that samples one token a row serves drafts as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pelton.ops.interface import PrepareInputs, SampleNeeds, SampleTensors
from pelton.ops.interface import Sample as SampleOp
from pelton.ops.speculation import (
    LookupDrafts,
    LookupDraftsNeeds,
    LookupDraftsTensors,
    Verify,
    VerifyNeeds,
    VerifyTensors,
)
from pelton.sampling.tails import FULL, GREEDY, Variant
from pelton_platforms.device.steps.batch_state import BatchState

if TYPE_CHECKING:
    from pelton.ops.selector import OpSelector
    from pelton_platforms.device.steps.row_shares import RowShares

_MOST_ROWS = 512
"""Of logits that are sampled at once: what `sample` computes in grows with them."""


class StepDrafts:
    """Bound to one batch state."""

    def __init__(
        self,
        ops: OpSelector,
        state: BatchState,
        num_drafts: int,
        lookup: LookupDraftsNeeds | None,
        *,
        has_drafter: bool = False,
        prepare_inputs: PrepareInputs | None = None,
    ) -> None:
        """num_drafts: most of a row. lookup: how the device finds them; has_drafter: they are in place before the step; neither: the
        host makes them. prepare_inputs: the op that is called behind `make`; where it has a method `look_up_too(look_up, slots, num_draft,
        num_found)`, its next call looks drafts up as well, unless that returns False."""
        self.width = 1 + num_drafts
        self._ops, self._state = ops, state
        most = min(state.max_num_seqs, max(_MOST_ROWS // self.width, 1)) * self.width
        self._rows = BatchState(
            max_num_seqs=most, max_model_len=0, vocab_size=state.vocab_size, block_sizes=(), num_side_slots=0,
            device=state.device,
        )  # fmt: skip
        self._row = torch.arange(most, device=state.device)
        self._sampled = torch.zeros(state.max_num_seqs * self.width, 2, dtype=torch.int32, device=state.device)
        self._num_found = torch.zeros(state.max_num_seqs, dtype=torch.int64, device=state.device)
        self._sample: dict[Variant, SampleOp] = {}
        self._verify: Verify = ops.bind("verify", VerifyNeeds(num_drafts=num_drafts), VerifyTensors(state))
        for variant in (GREEDY, FULL):  # of captured steps, in which nothing may be allocated
            self.sample(variant)
        self._has_drafter = has_drafter
        self._look_up: LookupDrafts | None = None
        if lookup is not None:
            self._look_up = ops.bind("lookup_drafts", lookup, LookupDraftsTensors(state))
        self._look_up_too = getattr(prepare_inputs, "look_up_too", None)

    @property
    def are_made_here(self) -> bool:
        return self._look_up is not None or self._has_drafter

    def make(self, slots: Tensor, num_draft: Tensor) -> Tensor:
        """[R] int64: how many drafts each row has behind its known tokens, at most `num_draft`. The host, or a drafter, has placed its
        own."""
        if self._look_up is None:
            return num_draft
        found = self._num_found[: len(slots)]
        if self._look_up_too is None or not self._look_up_too(self._look_up, slots, num_draft, found):
            self._look_up(slots, num_draft, found)
        return found

    def verify(
        self, variant: Variant, logits: Tensor, slots: Tensor, num_draft: Tensor, result: Tensor,
        shared: RowShares | None = None,
    ) -> None:  # fmt: skip
        """logits [R (1 + k), V], which may be overwritten; variant: of sampling, without tables and masks. shared: logits are those
        of this rank's rows. See `Verify`."""
        verify_greedy = getattr(self._verify, "verify_greedy", None) if variant.is_greedy and shared is None else None
        if verify_greedy is not None and verify_greedy(slots, num_draft, logits, result):
            return
        sampled = self._sampled[: len(slots) * self.width]
        if shared is None:
            self._draw(variant, logits, slots, sampled)
        else:
            count = len(logits) // self.width
            own, brought = shared.own(len(slots), count), sampled.new_zeros(len(logits), 2)
            num_own = (own.stop - own.start) * self.width
            self._draw(variant, logits[:num_own], slots[own], brought[:num_own])
            sampled.copy_(shared.gather(brought, len(sampled)))
        self._verify(slots, num_draft, sampled, result)

    def _draw(self, variant: Variant, logits: Tensor, slots: Tensor, sampled: Tensor) -> None:
        """A token of each of the logits' rows, [len(slots) (1 + k)]."""
        rows, width, sample = self._rows, self.width, self.sample(variant)
        for start in range(0, len(logits), rows.max_num_seqs):
            # All of them as they are: what is known of a tensor (its rows' best tokens) is not known of its parts.
            part = logits if len(logits) <= rows.max_num_seqs else logits[start : start + rows.max_num_seqs]
            if not variant.is_greedy:
                self._state.lend(rows, slots[start // width : (start + len(part)) // width], width)
            sample(part, self._row[: len(part)], sampled[start : start + len(part)])

    def sample(self, variant: Variant) -> SampleOp:
        """The op for the rows of logits, each as a request of its own."""
        if variant not in self._sample:
            needs = SampleNeeds(
                vocab_size=self._state.vocab_size,
                max_num_seqs=self._rows.max_num_seqs,
                variant="greedy" if variant.is_greedy else "full",
            )
            self._sample[variant] = self._ops.bind("sample", needs, SampleTensors(self._rows))
        return self._sample[variant]
