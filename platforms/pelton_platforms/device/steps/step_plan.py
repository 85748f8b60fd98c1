"""One step's columns as the host lays them out: which tokens belong to which row, which need logits.

Counts only, no token value: so it can be made while the step before still runs. Vectorised over rows.
R = rows, r = rows that sample, n = rows of logits (1 + drafts for each row that samples), d = drafts, p = rows that pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from pelton.messages.step import SchedulerOutput
from pelton.worker.batch_state import NO_LOGPROBS
from pelton.worker.inputs import StepShape
from pelton_platforms.device.steps.batch_state import HostColumns

Ints = npt.NDArray[np.int64]
_NONE: Ints = np.zeros(0, dtype=np.int64)


@dataclass(slots=True, kw_only=True)
class StepPlan:
    slots: Ints  # [R]
    num_scheduled: Ints  # [R]
    query_start_loc: Ints  # [R + 1]
    sample_rows: Ints  # [r]
    sample_slots: Ints  # [r]
    num_draft: Ints  # [r]
    logit_starts: Ints  # [r + 1], into the n rows of logits
    logit_tokens: Ints  # [n], index of the token whose output is the logits
    logit_slots: Ints  # [n]
    side_rows: Ints  # [m], rows of logits that read side tables
    logprob_rows: Ints  # rows of logits whose logprobs are wanted
    num_unsampled: Ints  # [R], num_scheduled less drafts, less one where the row samples
    pooled_rows: Ints  # [p], which sample nothing
    is_pooled_last: npt.NDArray[np.bool_]  # [p], the step computes the row's last token
    shape: StepShape

    @property
    def has_drafts(self) -> bool:
        return bool(self.num_draft.any())

    def draft_grid(self) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """[r, 1 + most drafts]: each row's logits, its last one repeated; and where a draft is verified."""
        place = np.arange(int(self.num_draft.max()) + 1)
        num_draft = self.num_draft[:, None]
        return self.logit_starts[:-1, None] + np.minimum(place, num_draft), place < num_draft

    def verified_tokens(self, width: int) -> Ints:
        """[r width]: the tokens of `logit_tokens`, each row's last one again up to `width`."""
        rows = self.logit_starts[:-1, None] + np.minimum(np.arange(width), self.num_draft[:, None])
        tokens: Ints = self.logit_tokens[rows.reshape(-1)]
        return tokens

    def drafts_before(self, logit_rows: Ints) -> tuple[Ints, Ints]:
        """Pairs (index into `logit_rows`, token of the step): the drafts that this row takes as output so far."""
        starts = np.repeat(self.logit_starts[:-1], np.diff(self.logit_starts))[logit_rows]
        counts = logit_rows - starts
        index = np.repeat(np.arange(len(logit_rows)), counts)
        return index, self.logit_tokens[np.repeat(starts, counts) + ramp(counts)] + 1


def plan_step(output: SchedulerOutput, host: HostColumns) -> StepPlan:
    """From the scheduler's columns."""
    slots, num_scheduled = _ints(output.slots), _ints(output.num_scheduled)
    query_start_loc = np.concatenate([[0], num_scheduled.cumsum()])
    samples, pooled_rows = np.asarray(output.samples, dtype=bool), _NONE
    is_pooled_last = samples[:0]
    if host.pooling:
        pooled_rows = np.flatnonzero([slot in host.pooling for slot in output.slots])
        is_pooled_last, samples = samples[pooled_rows], samples.copy()
        samples[pooled_rows] = False
    sample_rows = np.flatnonzero(samples)
    all_drafts = _ints(output.num_draft) if output.num_draft else np.zeros(len(slots), dtype=np.int64)
    num_draft = all_drafts[sample_rows]
    num_logits = num_draft + 1
    logit_starts = np.concatenate([[0], num_logits.cumsum()])
    first_tokens = query_start_loc[sample_rows + 1] - num_logits
    logit_tokens = np.repeat(first_tokens, num_logits) + ramp(num_logits)
    logit_slots = np.repeat(slots[sample_rows], num_logits)
    has_many = num_scheduled != 1
    num_reqs, num_tokens = len(slots), int(query_start_loc[-1])
    longest = int((host.num_computed_tokens[slots] + num_scheduled).max(initial=0))
    return StepPlan(
        slots=slots,
        num_scheduled=num_scheduled,
        query_start_loc=query_start_loc,
        sample_rows=sample_rows,
        sample_slots=slots[sample_rows],
        num_draft=num_draft,
        logit_starts=logit_starts,
        logit_tokens=logit_tokens,
        logit_slots=logit_slots,
        side_rows=np.flatnonzero(host.side_slots[logit_slots] >= 0),
        logprob_rows=np.flatnonzero(host.num_logprobs[logit_slots] != NO_LOGPROBS),
        num_unsampled=num_scheduled - all_drafts - samples,
        pooled_rows=pooled_rows,
        is_pooled_last=is_pooled_last,
        shape=StepShape(
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            num_decode_rows=int(has_many.argmax()) if has_many.any() else num_reqs,
            max_query_len=int(num_scheduled.max(initial=0)),
            max_seq_len=output.max_seq_len or longest,
            num_padded_reqs=num_reqs,
            num_padded_tokens=num_tokens,
            common_prefix_blocks=tuple(output.common_prefix_blocks),
        ),
    )


@dataclass(slots=True, kw_only=True)
class DraftColumns:
    """Where this step's drafts go in `token_ids`, and where their values come from."""

    slots: Ints  # [d]
    offsets: Ints  # [d], from the row's computed tokens
    values: Ints  # [d]; -1: in the state's `draft_token_ids`, at `places`
    places: Ints  # [d], index among the row's drafts

    @property
    def has_device_values(self) -> bool:
        return bool((self.values < 0).any())


def plan_drafts(output: SchedulerOutput, slots: Ints, num_scheduled: Ints) -> DraftColumns | None:
    """None when no row has a draft. slots, num_scheduled [R]: of the step's rows."""
    if not output.num_draft:
        return None
    num_draft = _ints(output.num_draft)
    places = ramp(num_draft)
    offsets = np.repeat(num_scheduled - num_draft, num_draft) + places
    values = np.full(len(places), -1, dtype=np.int64)
    if output.draft_token_ids:
        has_values = _ints([len(ids) for ids in output.draft_token_ids]) > 0
        values[np.repeat(has_values, num_draft)] = _ints(list(chain.from_iterable(output.draft_token_ids)))
    return DraftColumns(slots=np.repeat(slots, num_draft), offsets=offsets, values=values, places=places)


def ramp(counts: Ints) -> Ints:
    """[3, 0, 2] -> [0, 1, 2, 0, 1]"""
    ends = counts.cumsum()
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)


def _ints(values: list[int]) -> Ints:
    return np.asarray(values, dtype=np.int64)
