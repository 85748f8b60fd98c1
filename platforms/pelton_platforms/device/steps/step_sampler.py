"""From a step's logits to its tokens, with everything a request may ask for: masks, side tables, drafts, logprobs.

Torch ops chosen by what the host knows of the rows; nothing here waits for the device but prompt logprobs with more
alternatives than the ops give. What the `sample` op can do is left to it (`step_tails.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pelton.messages.step import GrammarMasks, SchedulerOutput
from pelton.model.interface import CausalLM
from pelton.sampling.columns import active_columns
from pelton.sampling.logprobs import HostLogprobs, LogprobTensors, gather_logprobs
from pelton.sampling.tails import Logits, Tail
from pelton.worker.batch_state import NO_LOGPROBS
from pelton.worker.inputs import InputBuffers
from pelton_platforms.device.sampling.metadata import SamplingMetadata, SideRows
from pelton_platforms.device.sampling.sampler import sample, unpack_bitmask
from pelton_platforms.device.steps.batch_state import BatchState
from pelton_platforms.device.steps.row_shares import RowShares
from pelton_platforms.device.steps.staging import StagingRing, mask_column, mask_words
from pelton_platforms.device.steps.step_ops import PROMPT_LOGPROB_ROWS, StepOps
from pelton_platforms.device.steps.step_plan import StepPlan, ramp
from pelton_platforms.device.steps.step_program import StepInputs


@dataclass(slots=True)
class StepColumns:
    """The columns that every such step sends to the device, in one copy; all int64."""

    slots: Tensor  # [R]
    num_scheduled: Tensor  # [R]
    logit_tokens: Tensor  # [n]
    logit_slots: Tensor  # [n]
    sample_slots: Tensor  # [r]
    num_draft: Tensor  # [r]
    side_rows: Tensor  # [m], rows of logits that read side tables
    logprob_rows: Tensor  # rows of logits whose logprobs are wanted
    num_unsampled: Tensor  # [R], tokens of the row that are counted before it samples


PromptPart = tuple[int, int, int, int]
"""Row of the step, its first and end position among those of the step, alternatives that it wants."""


@dataclass(slots=True)
class PromptLogprobs:
    """Prompt logprobs of all rows of a step that want them."""

    parts: list[PromptPart]
    tensors: LogprobTensors | None = None  # on the device; None: there is no position, or all is on the host
    on_host: list[HostLogprobs] | None = None  # by part


@dataclass(slots=True)
class Step:
    """One step between its launch and its result."""

    output: SchedulerOutput
    plan: StepPlan
    columns: StepColumns
    inputs: StepInputs
    tail: Tail | None = None  # that has been run
    given: Any = None  # what it gave
    num_padded_logits: int = 0  # rows of logits with padding; 0: there is none
    prompt_logprobs: PromptLogprobs | None = None

    @property
    def logits(self) -> Tensor:
        """[n, V], or of this rank's rows: see `RowShares`."""
        assert isinstance(self.tail, Logits)
        logits: Tensor = self.given
        return logits


@dataclass(slots=True)
class Sampled:
    """Results of the rows that sampled, on the device."""

    token_ids: Tensor  # [r, 1 + K]
    num_accepted: Tensor  # [r]
    codes: Tensor  # [r]
    first_logprob: np.ndarray  # [r], into the rows of `logprobs`
    logprobs: LogprobTensors | None = None  # of `StepPlan.logprob_rows`

    def tensors(self) -> list[Tensor]:
        """In the order of the fields."""
        logprobs = [] if self.logprobs is None else self.logprobs.tensors()
        return [self.token_ids, self.num_accepted, self.codes, *logprobs]


class StepSampler:
    """Reads and advances the batch state."""

    def __init__(
        self, model: CausalLM, state: BatchState, buffers: InputBuffers, staging: StagingRing, ops: StepOps
    ) -> None:
        self.model = model
        self._ops = ops
        self.state = state
        self.buffers = buffers
        self._staging = staging

    def sample(self, step: Step, masks: GrammarMasks | None) -> Sampled:
        plan, columns, state = step.plan, step.columns, self.state
        metadata = self._sampling_metadata(plan, columns)
        process = self._processing(plan, columns, metadata.positions)
        most = self._most_logprobs(plan) if len(plan.logprob_rows) else 0
        num_rows = step.num_padded_logits or len(plan.logit_tokens)
        shared, logits, logprobs = self._ops.shared_rows(num_rows), step.logits, None
        if shared is not None and (process is not None or most < 0):
            # What processors raise ends a request on every rank, and all logprobs are as many words as the logits.
            logits, shared = shared.gather(logits, len(plan.logit_tokens)), None
        own = slice(0, len(plan.logit_tokens)) if shared is None else shared.own(len(plan.logit_tokens), len(logits))
        mask = self._grammar_mask(step, masks, own) if masks is not None else None
        if shared is None:
            raw = logits[columns.logprob_rows] if len(plan.logprob_rows) else None
            token_ids, codes = sample(logits, metadata, mask, process)
            if raw is not None:
                logprobs = gather_logprobs(raw, token_ids[columns.logprob_rows], most)
        else:
            part = self._part_of(metadata, plan, own)
            token_ids, codes, logprobs = self._sample_own(shared, plan, logits, part, mask, most)
        sampled = self._verify(plan, columns.logit_tokens, token_ids, codes)
        sampled.logprobs = logprobs
        self._count_outputs(plan, metadata.side, token_ids, sampled.num_accepted)
        last = sampled.token_ids.gather(1, sampled.num_accepted.unsqueeze(-1)).squeeze(1)
        num_rejected = columns.num_draft - sampled.num_accepted
        state.advance(columns.slots, columns.num_scheduled, columns.sample_slots, num_rejected, last)
        return sampled

    def _sample_own(
        self, shared: RowShares, plan: StepPlan, logits: Tensor, metadata: SamplingMetadata,
        mask: tuple[Tensor, Tensor] | None, most: int,
    ) -> tuple[Tensor, Tensor, LogprobTensors | None]:  # fmt: skip
        """Token ids and codes [n] of all rows, and the logprobs that are wanted. logits [m, V], metadata, mask: of this rank's rows."""
        num_rows, count, num_own = len(plan.logit_tokens), len(logits), len(metadata.seeds)
        found = torch.zeros(count, 2, dtype=torch.int64, device=logits.device)
        raw = logits.clone() if len(plan.logprob_rows) else None
        if num_own:
            found[:num_own] = torch.stack(sample(logits[:num_own], metadata, mask), dim=1)
        logprobs = None
        if raw is not None:
            rows, places = shared.places(plan.logprob_rows, count)
            index, place = self._staging.stage([rows, places])
            mine = gather_logprobs(raw[index], found[index, 0], most)
            logprobs = shared.gather_logprobs(mine, place)
        found = shared.gather(found, num_rows)
        return found[:, 0], found[:, 1], logprobs

    @staticmethod
    def _part_of(metadata: SamplingMetadata, plan: StepPlan, own: slice) -> SamplingMetadata:
        """The metadata of some rows of logits."""
        side = metadata.side
        if side is not None:
            first, last = np.searchsorted(plan.side_rows, (own.start, own.stop)).tolist()
            part = slice(first, last)
            drafts: tuple[Tensor | None, Tensor | None] = (None, None)
            if side.draft_rows is not None and side.draft_token_ids is not None:
                start, stop = np.searchsorted(plan.drafts_before(plan.side_rows)[0], (first, last)).tolist()
                drafts = side.draft_rows[start:stop] - first, side.draft_token_ids[start:stop]
            side = replace(
                side, rows=side.rows[part] - own.start, side_slots=side.side_slots[part], slots=side.slots[part],
                positions=side.positions[part], num_prompt_tokens=side.num_prompt_tokens[part], draft_rows=drafts[0],
                draft_token_ids=drafts[1],
            )  # fmt: skip
        return replace(
            metadata, seeds=metadata.seeds[own], positions=metadata.positions[own],
            columns={name: column[own] for name, column in metadata.columns.items()}, side=side,
        )  # fmt: skip

    def _sampling_metadata(self, plan: StepPlan, columns: StepColumns) -> SamplingMetadata:
        state, slots = self.state, columns.logit_slots
        positions = self.buffers.positions[columns.logit_tokens] + 1
        active, max_top_k = active_columns(state.host.sampling, plan.logit_slots, state.vocab_size)
        return SamplingMetadata(
            seeds=state.seeds[slots],
            positions=positions,
            columns={name: column[slots] for name, column in state.sampling.items()},
            active=active,
            max_top_k=max_top_k,
            side=self._side_rows(plan, columns, positions) if len(plan.side_rows) else None,
        )

    def _processing(self, plan: StepPlan, columns: StepColumns, positions: Tensor) -> Callable[[Tensor], Tensor] | None:
        """Return what logits processors do with the step's logits; None where no row has one."""
        state = self.state
        processors = state.host.processors
        if processors is None or not processors.are_used(plan.logit_slots):
            return None
        return lambda logits: processors.process(
            logits, plan.logit_slots, columns.logit_slots, positions, state.token_ids, self._staging, state.host.errors
        )

    def _side_rows(self, plan: StepPlan, columns: StepColumns, positions: Tensor) -> SideRows:
        state, tables, rows = self.state, self.state.side, columns.side_rows
        used = state.host.side_slots[plan.logit_slots[plan.side_rows]]
        slots = columns.logit_slots[rows]
        side = SideRows(
            tables=tables,
            rows=rows,
            side_slots=state.side_slots[slots],
            slots=slots,
            positions=positions[rows],
            num_prompt_tokens=state.num_prompt_tokens[slots],
            token_ids=state.token_ids,
            has_penalties=bool(tables.has_penalties[used].any()),
            has_bias=bool(tables.has_bias[used].any()),
            has_banned=bool(tables.has_banned[used].any()),
            has_min_tokens=bool(tables.has_min_tokens[used].any()),
            has_bad_words=bool(tables.has_bad_words[used].any()),
        )
        if plan.has_drafts and side.has_penalties:
            draft_rows, draft_tokens = self._staging.stage(plan.drafts_before(plan.side_rows))
            side.draft_rows, side.draft_token_ids = draft_rows, self.buffers.input_ids[draft_tokens]
        return side

    def _grammar_mask(self, step: Step, masks: GrammarMasks, own: slice) -> tuple[Tensor, Tensor]:
        """Masks of some rows of logits, which are counted from the first of these."""
        plan, total = step.plan, sum(masks.num_masks)
        num_words = -(-self.state.vocab_size // 32)
        is_sampled = np.searchsorted(plan.sample_rows, step.output.grammar_rows)
        rows = [plan.logit_starts[i] + np.arange(count) for i, count in zip(is_sampled, masks.num_masks, strict=True)]
        places = np.concatenate(rows)
        first, last = np.searchsorted(places, (own.start, own.stop)).tolist()
        index, given = self._staging.stage(
            [places[first:last] - own.start, mask_column(masks.bitmask, total, num_words)]
        )
        return index, unpack_bitmask(mask_words(given, total, num_words)[first:last], self.state.vocab_size)

    def _verify(self, plan: StepPlan, logit_tokens: Tensor, token_ids: Tensor, codes: Tensor) -> Sampled:
        """Accept drafts while each equals what was sampled in its place: exact in law, and lossless for greedy rows."""
        first_logprob = np.searchsorted(plan.logprob_rows, plan.logit_starts[:-1])
        if not plan.has_drafts:
            return Sampled(token_ids.unsqueeze(-1), torch.zeros_like(token_ids), codes, first_logprob)
        grid, is_draft = plan.draft_grid()
        index, drafted = (staged.view(grid.shape) for staged in self._staging.stage([grid.ravel(), is_draft.ravel()]))
        following = self.buffers.input_ids[(logit_tokens + 1).clamp(max=plan.shape.num_padded_tokens - 1)]
        is_equal = (token_ids == following)[index] & drafted.bool()
        num_accepted = is_equal.long().cumprod(dim=1).sum(dim=1)
        is_taken = torch.arange(grid.shape[1], device=index.device) <= num_accepted.unsqueeze(-1)
        code = torch.where(is_taken, codes[index], 0).amax(dim=1)
        return Sampled(token_ids[index], num_accepted, code, first_logprob)

    def _count_outputs(self, plan: StepPlan, side: SideRows | None, token_ids: Tensor, num_accepted: Tensor) -> None:
        if side is None or not side.has_penalties:
            return
        if not plan.has_drafts:
            weights = torch.ones_like(side.side_slots, dtype=torch.int32)
        else:
            counts = np.diff(plan.logit_starts)
            owners = np.repeat(np.arange(len(counts)), counts)
            places = np.arange(len(owners)) - plan.logit_starts[owners]
            owner, place = self._staging.stage([owners, places])
            weights = (place <= num_accepted[owner])[side.rows].to(torch.int32)
        side.tables.count(side.side_slots, token_ids[side.rows], weights)

    def _most_logprobs(self, plan: StepPlan) -> int:
        wanted = self.state.host.num_logprobs[plan.logit_slots[plan.logprob_rows]]
        return -1 if (wanted < 0).any() else int(wanted.max())

    def reads_hidden(self, plan: StepPlan) -> bool:
        """Return whether hidden states of other tokens than `StepPlan.logit_tokens` are read: for prompt logprobs."""
        wanted = self.state.host.num_prompt_logprobs[plan.slots]
        return bool((wanted != NO_LOGPROBS).any())

    def prompt_logprobs(self, step: Step) -> PromptLogprobs | None:
        """Launched, for rows that asked: every prompt position of this step whose next token is the prompt's too."""
        host, plan, state = self.state.host, step.plan, self.state
        rows = np.flatnonzero(host.num_prompt_logprobs[plan.slots] != NO_LOGPROBS)
        if not len(rows):
            return None
        slots = plan.slots[rows]
        wanted, first = host.num_prompt_logprobs[slots], host.num_computed_tokens[slots]
        counts = np.minimum(plan.num_scheduled[rows], host.num_prompt_tokens[slots] - 1 - first).clip(min=0)
        places = ramp(counts)
        tokens = np.repeat(plan.query_start_loc[rows], counts) + places
        following = np.repeat(slots * state.token_ids.shape[1] + first + 1, counts) + places
        index, following_places = self._staging.stage([tokens, following])
        chosen = state.token_ids.view(-1)[following_places].long()
        ends = counts.cumsum()
        found = PromptLogprobs(
            [
                (row, end - count, end, most)
                for row, count, end, most in zip(
                    rows.tolist(), counts.tolist(), ends.tolist(), wanted.tolist(), strict=True
                )
                if count
            ]
        )
        total = int(ends[-1])
        if wanted.min() < 0 or wanted.max() > self._ops.num_logprobs:
            found.on_host = self._wide_prompt_logprobs(step.inputs.hidden, index, chosen, found.parts)
        elif total:
            found.tensors = LogprobTensors.make(total, self._ops.num_logprobs, state.device)
            for start in range(0, total, PROMPT_LOGPROB_ROWS):
                stop = min(start + PROMPT_LOGPROB_ROWS, total)
                compute = partial(self.model.compute_logits, step.inputs.hidden, index[start:stop])
                own, part = chosen[start:stop], found.tensors.part(start, stop)
                shared = self._ops.shared_rows(stop - start)
                if shared is None:
                    self._ops.prompt_logprobs(compute(), own, part)
                else:
                    shared.prompt_logprobs(self._ops.prompt_logprobs, compute, own, part)
        return found

    def _wide_prompt_logprobs(
        self, hidden: Any, index: Tensor, chosen: Tensor, parts: Sequence[PromptPart]
    ) -> list[HostLogprobs]:
        """Prompt logprobs of each part, with more alternatives than the op has: they go to the host piece by piece, which waits."""
        found = []
        for _, first, end, most in parts:
            pieces = []
            for start in range(first, end, PROMPT_LOGPROB_ROWS):
                stop = min(start + PROMPT_LOGPROB_ROWS, end)
                logits = self.model.compute_logits(hidden, index[start:stop])
                pieces.append(gather_logprobs(logits, chosen[start:stop], most).to_host())
            found.append(HostLogprobs.join(pieces))
        return found

    def _index(self, values: np.ndarray) -> Tensor:
        (staged,) = self._staging.stage([values])
        return staged
