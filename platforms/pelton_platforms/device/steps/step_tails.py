"""Which tail gives the rows of a step what they ask for, by what the host knows of them."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from pelton.sampling.columns import RANDOM, SAMPLING_COLUMNS
from pelton.sampling.tails import FULL, GREEDY, Logits, Pool, Sample, Tail, Variant, Verify
from pelton.worker.batch_state import ALL_LOGPROBS, NO_LOGPROBS

if TYPE_CHECKING:
    from pelton_platforms.device.steps.batch_state import BatchState
    from pelton_platforms.device.steps.step_ops import StepOps
    from pelton_platforms.device.steps.step_plan import Ints, StepPlan

LOGITS = Logits()
_sample, _verify = cache(Sample), cache(Verify)  # a step makes no object that an earlier one has made


class TailChooser:
    """`LOGITS` where no variant of the `sample` op serves all rows: `StepSampler` does then."""

    def __init__(self, state: BatchState, ops: StepOps) -> None:
        self._state, self._ops = state, ops
        self.records_calls = False  # see `GraphRecorder.runs_calls`

    @property
    def op_suits_all(self) -> bool:
        """False: on a CPU `StepSampler` does better for random rows, as it runs only the filters that some row has."""
        return self._state.device.type != "cpu" or self._ops.skips_unused

    @property
    def variants(self) -> tuple[Variant, ...]:
        """Those that decode graphs end in. Others come with rows that ask for more than most do."""
        return (GREEDY, FULL) if self.op_suits_all or not self.records_calls else (GREEDY,)

    def variant(self, slots: Ints, *, has_masks: bool) -> Variant | None:
        """The least that gives rows of these slots one token each; None: none does."""
        host = self._state.host
        has_extras = bool(host.has_extras[slots].any())
        is_greedy = not (has_masks or has_extras or host.temperature[slots].any())
        if is_greedy:
            return GREEDY
        if FULL not in self.variants:
            return None
        if not has_extras:
            return Variant(has_mask=True) if has_masks else FULL
        if self._has_processors(slots):
            return None
        wanted = host.num_logprobs[slots]
        if (wanted == ALL_LOGPROBS).any() or wanted.max() > self._ops.num_logprobs:
            return None
        if (wanted == NO_LOGPROBS).all():
            return Variant(has_mask=True) if has_masks else FULL
        return Variant(has_mask=has_masks, has_logprobs=True, has_nuclei=self._has_nuclei(slots))

    def of_decode(self, slots: Ints, num_draft: Ints | None, *, has_masks: bool) -> Tail:
        """The tail of a captured step in which each row takes one token behind its last, or behind its drafts. `LOGITS` too while
        its masks have not come."""
        if num_draft is not None:
            return self._of_drafts(slots, num_draft, has_masks=has_masks)
        variant = None if has_masks else self.variant(slots, has_masks=False)
        return LOGITS if variant is None else _sample(variant)

    def of_left_logits(self, slots: Ints) -> Tail:
        """The tail of a captured step that has left its logits, its masks at hand."""
        variant = self.variant(slots, has_masks=True)
        return LOGITS if variant is None else Sample(variant, is_apart=True)

    def of_others(self, plan: StepPlan, *, has_masks: bool) -> Tail | None:
        """The tail of any other step, its masks at hand."""
        if len(plan.pooled_rows):
            return Pool()
        if not len(plan.sample_rows):
            return None
        if plan.has_drafts:
            if not self.op_suits_all:
                return LOGITS
            return self._of_drafts(plan.sample_slots, plan.num_draft, has_masks=has_masks)
        if self.op_suits_all:
            variant = self.variant(plan.sample_slots, has_masks=has_masks)
        else:
            is_plain = not (has_masks or len(plan.side_rows) or len(plan.logprob_rows))
            is_plain = is_plain and not self._has_processors(plan.sample_slots)
            variant = GREEDY if is_plain and not self._state.host.temperature[plan.sample_slots].any() else None
        return LOGITS if variant is None else _sample(variant)

    def _has_nuclei(self, slots: Ints) -> bool:
        """Return whether some row has a top_p without another filter. Asked where no graph is captured beforehand, so that what there are
        no rows for is left out of one more: five launches that would end at once."""
        state, host = self._state, self._state.host
        found = (host.temperature[slots] > 0) & (host.sampling["top_p"][slots] < 1)
        for column in SAMPLING_COLUMNS:
            if column.name not in (RANDOM, "top_p"):
                found &= host.sampling[column.name][slots] == column.neutral_value(state.vocab_size)
        return bool(found.any())

    def _has_processors(self, slots: Ints) -> bool:
        processors = self._state.host.processors
        return processors is not None and processors.are_used(slots)

    def _of_drafts(self, slots: Ints, num_draft: Ints, *, has_masks: bool) -> Tail:
        """`Verify` has neither side tables, masks nor logprobs."""
        drafts = self._ops.drafts
        if drafts is None or has_masks or num_draft.max() >= drafts.width:
            return LOGITS
        if (self._state.host.side_slots[slots] >= 0).any():
            return LOGITS
        variant = self.variant(slots, has_masks=False)
        return _verify(variant) if variant in (GREEDY, FULL) and variant is not None else LOGITS
