"""Run a step: state, inputs, forward, sample, state again; one copy of columns in, one of tokens out.

    execute(output) -> apply -> plan -> prepare_inputs -> backend.build -> forward -> logits -> sample -> advance

With grammar rows `execute` ends at the logits and `sample` goes on from there. What a step needs is told by counts that
the host has; nothing before the tokens' copy waits for the device.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pelton.attention.interface import AttentionBackend
from pelton.attention.metadata import ForwardBatch
from pelton.engine.messages import LogprobColumns
from pelton.errors import EngineError
from pelton.model.interface import CausalLM
from pelton.sampling.logprobs import HostLogprobs, LogprobTensors, gather_logprobs
from pelton.sampling.metadata import SamplingMetadata, SideRows
from pelton.sampling.sampler import ERROR_MESSAGES, NOT_FINITE, sample, unpack_bitmask
from pelton.scheduler.output import GrammarMasks, ModelOutput, SchedulerOutput
from pelton.worker.batch_state import NO_LOGPROBS, BatchState
from pelton.worker.inputs import InputBuffers, prepare_inputs
from pelton.worker.kv_pool import KVPool
from pelton.worker.staging import StagingRing
from pelton.worker.step_plan import StepPlan, plan_drafts, plan_step

if TYPE_CHECKING:
    from pelton.kv_transfer.interface import WorkerConnector
    from pelton.worker.drafts import WorkerDraftProposer

_PROMPT_LOGPROB_ROWS = 256  # logits at once: a whole chunk's would be gigabytes with a large vocabulary


@dataclass(slots=True)
class _Columns:
    """What every step sends to the device, in one copy; all int64."""

    slots: Tensor  # [R]
    num_scheduled: Tensor  # [R]
    logit_tokens: Tensor  # [n]
    logit_slots: Tensor  # [n]
    sample_slots: Tensor  # [r]
    num_draft: Tensor  # [r]
    side_rows: Tensor  # [m], rows of logits that read side tables
    logprob_rows: Tensor  # rows of logits whose logprobs are wanted


@dataclass(slots=True)
class _Step:
    """One step between its forward pass and its result."""

    output: SchedulerOutput
    started: float
    plan: StepPlan
    columns: _Columns
    hidden: Any = None
    logits: Tensor | None = None  # [n, V]
    prompt_logprobs: dict[int, LogprobColumns] = field(default_factory=dict)


@dataclass(slots=True)
class _Sampled:
    """Of the rows that sampled, on the device."""

    token_ids: Tensor  # [r, 1 + K]
    num_accepted: Tensor  # [r]
    codes: Tensor  # [r]
    logprobs: LogprobTensors | None = None  # of `StepPlan.logprob_rows`
    draft_token_ids: Tensor | None = None  # [r, max_draft_tokens], for the next step


class ModelRunner:
    """One worker's model and batch. All calls come from the worker's thread, under inference mode."""

    def __init__(
        self,
        model: CausalLM,
        state: BatchState,
        buffers: InputBuffers,
        backends: Sequence[AttentionBackend],
        pool: KVPool,
        *,
        num_staging_parts: int = 3,
    ) -> None:
        self.model = model
        self.state = state
        self.buffers = buffers
        self.backends = list(backends)
        self.pool = pool
        self.connectors: dict[str, WorkerConnector] = {}
        self.draft_proposer: WorkerDraftProposer | None = None
        self._staging = StagingRing(num_staging_parts, 4096, state.device)
        self._pending: _Step | None = None

    def add_connector(self, name: str, connector: WorkerConnector) -> None:
        """Call `connector` around every step; `name` is its key in `SchedulerOutput.extensions`."""
        connector.register_kv_caches(self.pool.caches())
        self.connectors[name] = connector

    def execute(self, output: SchedulerOutput) -> ModelOutput | None:
        """Run a step; None when it has grammar rows: `sample` then gives the result."""
        if self._pending is not None:
            raise EngineError(
                f"Step {self._pending.output.step_id} still waits for its masks; bring them with sample()."
            )
        started = time.monotonic()
        self._apply(output)
        step = self._forward(output, started)
        if output.grammar_rows:
            self._pending = step
            return None
        return self._finish(step, None)

    def sample(self, masks: GrammarMasks) -> ModelOutput:
        """Finish the step that waits for its masks."""
        step, self._pending = self._pending, None
        if step is None or step.output.step_id != masks.step_id:
            waiting = "no step waits" if step is None else f"step {step.output.step_id} waits"
            raise EngineError(f"Masks came for step {masks.step_id}, but {waiting} for masks.")
        return self._finish(step, masks)

    # Before the forward pass.

    def _apply(self, output: SchedulerOutput) -> None:
        if output.block_copies:
            self.pool.copy_blocks(output.block_copies)
        if output.zero_block_ids:
            self.pool.zero_blocks(output.zero_block_ids)
        self.state.apply(output)

    def _forward(self, output: SchedulerOutput, started: float) -> _Step:
        plan = plan_step(output, self.state.host)
        columns = _Columns(
            *self._staging.stage(
                [
                    plan.slots, plan.num_scheduled, plan.logit_tokens, plan.logit_slots, plan.sample_slots,
                    plan.num_draft, plan.side_rows, plan.logprob_rows,
                ]
            )
        )  # fmt: skip
        step = _Step(output, started, plan, columns)
        if not output.slots:
            self._run_connectors(output, None)
            return step
        self._place_drafts(output, plan)
        groups = prepare_inputs(self.state, self.buffers, columns.slots, columns.num_scheduled, plan.shape)
        num_tokens = plan.shape.num_padded_tokens
        batch = ForwardBatch(
            input_ids=self.buffers.input_ids[:num_tokens],
            positions=self.buffers.positions[:num_tokens],
            attention=tuple(backend.build(common) for backend, common in zip(self.backends, groups, strict=True)),
            num_tokens=num_tokens,
        )
        step.hidden = self._run_connectors(output, batch)
        if len(plan.sample_rows):
            step.logits = self.model.compute_logits(step.hidden, columns.logit_tokens)
        step.prompt_logprobs = self._prompt_logprobs(step)
        return step

    def _run_connectors(self, output: SchedulerOutput, batch: ForwardBatch | None) -> Any:
        """The forward pass, with KV connectors' call points around it."""
        if not self.connectors:
            return None if batch is None else self.model.forward(batch)
        for name, metadata in output.extensions.items():
            if name in self.connectors:
                self.connectors[name].start_load(metadata)
        hidden = None if batch is None else self.model.forward(batch)
        for connector in self.connectors.values():
            connector.wait_for_save()
        return hidden

    def _place_drafts(self, output: SchedulerOutput, plan: StepPlan) -> None:
        """Drafts lie in `token_ids` after the known tokens, where inputs, bad words and the next step find them."""
        drafts = plan_drafts(output, plan)
        if drafts is None:
            return
        state = self.state
        slots, offsets, values, places = self._staging.stage(
            [drafts.slots, drafts.offsets, drafts.values, drafts.places]
        )
        if drafts.has_device_values:
            own = state.draft_token_ids[slots, places.clamp(max=max(state.draft_token_ids.shape[1] - 1, 0))]
            values = torch.where(values < 0, own, values)
        values = values.clamp(0, state.vocab_size - 1)
        place = (state.num_computed_tokens[slots] + offsets).clamp(max=state.max_model_len)
        state.token_ids[slots, place] = values.to(torch.int32)

    # From logits to the result.

    def _finish(self, step: _Step, masks: GrammarMasks | None) -> ModelOutput:
        columns, plan = step.columns, step.plan
        sampled = self._sample(step, masks) if step.logits is not None else None
        if sampled is None:
            none = columns.sample_slots
            self.state.advance(columns.slots, columns.num_scheduled, none, none, none)
        self.state.host.num_computed_tokens[plan.slots] += plan.num_scheduled
        result = ModelOutput(step_id=step.output.step_id, prompt_logprobs=step.prompt_logprobs)
        self._read_back(step, sampled, result)
        for connector in self.connectors.values():
            sending, receiving = connector.take_finished()
            result.finished_sending += sending
            result.finished_receiving += receiving
            result.invalid_block_ids += connector.take_invalid_block_ids()
        result.device_time_s = time.monotonic() - step.started
        return result

    def _sample(self, step: _Step, masks: GrammarMasks | None) -> _Sampled:
        assert step.logits is not None
        plan, columns, state = step.plan, step.columns, self.state
        metadata = self._sampling_metadata(plan, columns)
        raw = step.logits[columns.logprob_rows] if len(plan.logprob_rows) else None
        mask = self._grammar_mask(step, masks) if masks is not None else None
        token_ids, codes = sample(step.logits, metadata, mask)
        sampled = self._verify(plan, columns.logit_tokens, token_ids, codes)
        if raw is not None:
            sampled.logprobs = gather_logprobs(raw, token_ids[columns.logprob_rows], self._most_logprobs(plan))
        self._count_outputs(plan, metadata.side, token_ids, sampled.num_accepted)
        last = sampled.token_ids.gather(1, sampled.num_accepted.unsqueeze(-1)).squeeze(1)
        num_rejected = columns.num_draft - sampled.num_accepted
        state.advance(columns.slots, columns.num_scheduled, columns.sample_slots, num_rejected, last)
        if self.draft_proposer is not None:
            last_tokens = columns.logit_tokens[self._index(plan.logit_starts[:-1]) + sampled.num_accepted]
            drafts = self.draft_proposer.propose(state, columns.sample_slots, step.hidden, last_tokens)
            state.draft_token_ids[columns.sample_slots, : drafts.shape[1]] = drafts
            sampled.draft_token_ids = drafts
        return sampled

    def _sampling_metadata(self, plan: StepPlan, columns: _Columns) -> SamplingMetadata:
        state, host, on_host, slots = self.state, self.state.host, plan.logit_slots, columns.logit_slots
        positions = self.buffers.positions[columns.logit_tokens] + 1
        is_random = host.temperature[on_host] > 0
        top_k = host.top_k[on_host][is_random]
        top_k = top_k[top_k < state.vocab_size]
        return SamplingMetadata(
            seeds=state.seeds[slots],
            positions=positions,
            temperature=state.temperature[slots],
            top_k=state.top_k[slots],
            top_p=state.top_p[slots],
            min_p=state.min_p[slots],
            all_greedy=not is_random.any(),
            max_top_k=int(top_k.max(initial=0)),
            has_top_p=bool((host.top_p[on_host][is_random] < 1.0).any()),
            has_min_p=bool((host.min_p[on_host][is_random] > 0.0).any()),
            side=self._side_rows(plan, columns, positions) if len(plan.side_rows) else None,
        )

    def _side_rows(self, plan: StepPlan, columns: _Columns, positions: Tensor) -> SideRows:
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

    def _grammar_mask(self, step: _Step, masks: GrammarMasks) -> tuple[Tensor, Tensor]:
        plan, total = step.plan, sum(masks.num_masks)
        words = np.frombuffer(masks.bitmask, dtype="<i4").reshape(total, -1).copy()
        is_sampled = np.searchsorted(plan.sample_rows, step.output.grammar_rows)
        rows = [plan.logit_starts[i] + np.arange(count) for i, count in zip(is_sampled, masks.num_masks, strict=True)]
        allowed = unpack_bitmask(torch.from_numpy(words).to(self.state.device), self.state.vocab_size)
        return self._index(np.concatenate(rows)), allowed

    def _verify(self, plan: StepPlan, logit_tokens: Tensor, token_ids: Tensor, codes: Tensor) -> _Sampled:
        """Accept drafts while each equals what was sampled in its place: exact in law, and lossless for greedy rows."""
        if not plan.has_drafts:
            return _Sampled(token_ids.unsqueeze(-1), torch.zeros_like(token_ids), codes)
        grid, is_draft = plan.draft_grid()
        index = self._index(grid.ravel()).view(grid.shape)
        following = self.buffers.input_ids[(logit_tokens + 1).clamp(max=plan.shape.num_padded_tokens - 1)]
        is_equal = (token_ids == following)[index] & torch.from_numpy(is_draft).to(self.state.device)
        num_accepted = is_equal.long().cumprod(dim=1).sum(dim=1)
        is_taken = torch.arange(grid.shape[1], device=index.device) <= num_accepted.unsqueeze(-1)
        return _Sampled(token_ids[index], num_accepted, torch.where(is_taken, codes[index], 0).amax(dim=1))

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

    def _prompt_logprobs(self, step: _Step) -> dict[int, LogprobColumns]:
        """For rows that asked, every prompt position of this step whose next token is the prompt's too."""
        host, plan = self.state.host, step.plan
        found: dict[int, LogprobColumns] = {}
        for row in np.flatnonzero(host.num_prompt_logprobs[plan.slots] != NO_LOGPROBS).tolist():
            slot = int(plan.slots[row])
            first = int(host.num_computed_tokens[slot])
            count = min(int(plan.num_scheduled[row]), int(host.num_prompt_tokens[slot]) - 1 - first)
            if count <= 0:
                continue
            wanted, start = int(host.num_prompt_logprobs[slot]), int(plan.query_start_loc[row])
            parts = []
            for done in range(0, count, _PROMPT_LOGPROB_ROWS):
                stop = min(done + _PROMPT_LOGPROB_ROWS, count)
                rows = torch.arange(start + done, start + stop, device=self.state.device)
                following = self.state.token_ids[slot, first + done + 1 : first + stop + 1].long()
                logits = self.model.compute_logits(step.hidden, rows)
                parts.append(gather_logprobs(logits, following, wanted).to_host())
            found[row] = HostLogprobs.join(parts).columns(slice(None), wanted)
        return found

    # On the host.

    def _read_back(self, step: _Step, sampled: _Sampled | None, result: ModelOutput) -> None:
        """The one place that waits for the device."""
        plan, host = step.plan, self.state.host
        num_rows = len(plan.slots)
        result.token_ids = [[] for _ in range(num_rows)]
        if host.errors:
            result.row_errors = [
                (row, host.errors[slot]) for row, slot in enumerate(step.output.slots) if slot in host.errors
            ]
        wrong = {row for row, _ in result.row_errors}
        if sampled is None:
            return
        columns = torch.cat([sampled.token_ids, sampled.num_accepted[:, None], sampled.codes[:, None]], dim=1).tolist()
        logprobs = sampled.logprobs.to_host() if sampled.logprobs is not None else None
        for index, (row, (*token_ids, num_accepted, code)) in enumerate(
            zip(plan.sample_rows.tolist(), columns, strict=True)
        ):
            if code:
                if code == NOT_FINITE:
                    self._scrub(step.output.slots[row])
                if row not in wrong:
                    result.row_errors.append((row, ERROR_MESSAGES[code]))
                continue
            if row in wrong:
                continue
            result.token_ids[row] = token_ids[: num_accepted + 1]
            if logprobs is not None:
                wanted = int(host.num_logprobs[plan.sample_slots[index]])
                if wanted != NO_LOGPROBS:
                    first = int(np.searchsorted(plan.logprob_rows, plan.logit_starts[index]))
                    result.logprobs[row] = logprobs.columns(slice(first, first + num_accepted + 1), wanted)
        if sampled.draft_token_ids is not None:
            result.draft_token_ids = [[] for _ in range(num_rows)]
            for row, drafts in zip(plan.sample_rows.tolist(), sampled.draft_token_ids.tolist(), strict=True):
                result.draft_token_ids[row] = drafts

    def _scrub(self, slot: int) -> None:
        for group, table in enumerate(self.state.block_tables):
            self.pool.scrub(group, torch.unique(table[slot]).long())

    def _index(self, values: np.ndarray) -> Tensor:
        (staged,) = self._staging.stage([values])
        return staged
