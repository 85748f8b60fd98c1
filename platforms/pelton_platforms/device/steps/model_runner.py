"""Run a step: state, inputs, forward, tail, state again; one block of columns in, one of tokens out.

    execute(output) -> add -> plan -> StepProgram.run(key) -> readback

A step's key says all that steps differ in. Decode steps, with drafts too, are one captured graph where the device has graphs; of
others the forward pass is captured, whole or in pieces, or nothing is. Rows that ask for what no variant of the `sample` op
has, very many logprobs say, leave their logits to `StepSampler`. With grammar rows `execute` ends at the logits and `sample`
goes on from there. What a step needs follows from counts that the host has; nothing here waits for the device, the result is a
`PendingOutput`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pelton.attention.interface import AttentionBackend
from pelton.attention.metadata import BatchDescriptor
from pelton.config.compilation import CUDAGraphMode
from pelton.errors import EngineError, PluginError
from pelton.messages.step import GrammarMasks, ModelOutput, SchedulerOutput
from pelton.model.interface import CausalLM, PooledRows
from pelton.plugins import FIX_IT
from pelton.sampling.logprobs import LogprobTensors
from pelton.sampling.tails import Logits, Pool, Sample, Tail, Variant, Verify
from pelton.worker.inputs import InputBuffers, StepShape
from pelton.worker.pending import PendingOutput
from pelton_platforms.device.graphs.captures import run_split_at_attention
from pelton_platforms.device.graphs.graph_runner import GraphRunner
from pelton_platforms.device.kv_pool import KVPool, copies_at_once, handed_blocks
from pelton_platforms.device.steps.batch_state import BatchState
from pelton_platforms.device.steps.masks import MaskPlaces
from pelton_platforms.device.steps.masks_ahead import MasksAhead, StreamWait, make_masks_ahead
from pelton_platforms.device.steps.readback import Readback, StepOutput
from pelton_platforms.device.steps.staging import StagingRing
from pelton_platforms.device.steps.step_ops import StepOps
from pelton_platforms.device.steps.step_plan import Ints, StepPlan, plan_drafts, plan_step
from pelton_platforms.device.steps.step_program import StepInputs, StepProgram
from pelton_platforms.device.steps.step_sampler import Step, StepColumns, StepSampler
from pelton_platforms.device.steps.step_shapes import padding_shape
from pelton_platforms.device.steps.step_tails import TailChooser

if TYPE_CHECKING:
    from pelton.graphs.recorder import GraphRecorder
    from pelton.kv_transfer.interface import WorkerConnector
    from pelton.spec_decode.drafter import Drafter
    from pelton.worker.step_kernel import StepKernel
    from pelton_platforms.device.cache_scales import CalculatedScales
    from pelton_platforms.device.graphs.dispatcher import GraphDispatcher
    from pelton_platforms.device.steps.drafter_steps import DrafterSteps
    from pelton_platforms.device.steps.prompt_embeds import PromptEmbeds


@dataclass(slots=True)
class LeftLogits:
    """A captured decode step that has left its logits: nothing is planned before it is known that the tail needs more."""

    output: SchedulerOutput
    slots: Ints  # [R]
    num_padded_rows: int
    has_lora: bool


class ModelRunner:
    """One worker's model and batch. All calls come from the worker's thread, under inference mode."""

    def __init__(
        self,
        model: CausalLM,
        state: BatchState,
        buffers: InputBuffers,
        backends: Sequence[AttentionBackend],
        pool: KVPool,
        ops: StepOps,
        *,
        num_staging_parts: int = 3,
        stream_wait: StreamWait | None = None,
    ) -> None:
        """stream_wait: see `Platform.stream_wait`; without it steps with grammar rows wait on the host for their masks."""
        self.model = model
        self.state = state
        self.buffers = buffers
        self.backends = list(backends)
        self.pool = pool
        self.ops = ops
        self.connectors: dict[str, WorkerConnector] = {}
        self.prompt_embeds: PromptEmbeds | None = None  # None: no prompt is given as embeddings
        self.cache_scales: CalculatedScales | None = None
        self.graphs: GraphRunner | None = None
        self.drafter: DrafterSteps | None = None
        self.tails = TailChooser(state, ops)
        self._program = StepProgram(model, state, backends, ops)
        self._staging = StagingRing(num_staging_parts, 4096, state.device)
        self._zeroes_blocks = any(backend.needs_zeroed_blocks for backend in self.backends)
        self._readback = Readback(state, ops)
        self._sampler = StepSampler(model, state, buffers, self._staging, ops)
        self._mask_places: MaskPlaces | None = None
        self._stream_wait = stream_wait
        self._masks_ahead: MasksAhead | None = None
        self._pending: Step | LeftLogits | None = None

    @property
    def step_kernel(self) -> StepKernel | None:
        """Computes decode steps in place of the model's layers."""
        return self._program.kernel

    @step_kernel.setter
    def step_kernel(self, kernel: StepKernel | None) -> None:
        self._program.kernel = kernel

    def add_connector(self, name: str, connector: WorkerConnector) -> None:
        """Call `connector` around every step; `name` is its key in `SchedulerOutput.extensions`."""
        connector.register_kv_caches(self.pool.caches(), self.pool.layout())
        self.connectors[name] = connector

    def use_drafter(self, drafter: Drafter) -> None:
        """Have `drafter` make the drafts. No whole step is captured then."""
        from pelton_platforms.device.steps.drafter_steps import DrafterSteps

        self.drafter = DrafterSteps(drafter, self.state, self.buffers, self.backends, self.ops, self._staging)

    def use_graphs(self, dispatcher: GraphDispatcher, recorder: GraphRecorder) -> GraphRunner:
        """Capture and replay steps from now on."""
        self.graphs = GraphRunner(
            dispatcher, recorder, self._program, self.state, self.buffers, self.backends, self._staging
        )
        self.tails.records_calls = recorder.runs_calls
        return self.graphs

    def run_padding(
        self, shape: StepShape, variants: Sequence[Variant] = (), *, piecewise: bool = False, has_adapters: bool = False
    ) -> None:
        """A step of nothing but padding, without a graph, and `variants` of sampling for one row. piecewise: with the kernels of
        a step in pieces; has_adapters: with those of a step that has adapters."""
        rows = shape.num_padded_reqs
        slots, scheduled = self._staging.stage([[self.state.padding_slot] * rows, [0] * rows])
        batch = self.ops.forward_batch(slots, scheduled, shape, self.backends, has_adapters=has_adapters)
        hidden = run_split_at_attention(self.model.forward, batch) if piecewise else self.model.forward(batch)
        if self.drafter is not None:
            self.drafter.warm_up(batch, hidden)
        if not hasattr(self.model, "compute_logits"):
            return
        logits = self.model.compute_logits(hidden, self.buffers.token_index[:1])
        self._check_logits(logits)
        result = torch.zeros(1, 2, dtype=torch.int32, device=self.state.device)
        for variant in variants:
            self.ops.sample(variant)(logits, slots[:1], result)

    def _check_logits(self, logits: Tensor) -> None:
        """Raise `PluginError` for what kernels cannot read as one row of float32."""
        method = f"{type(self.model).__module__}:{type(self.model).__qualname__}.compute_logits"
        if not isinstance(logits, torch.Tensor):
            raise PluginError(f"{method} gives {logits!r}; it has to give a tensor. {FIX_IT}")
        if logits.shape != (1, self.state.vocab_size):
            raise PluginError(
                f"{method} gives {list(logits.shape)} for one row; it has to be [1, {self.state.vocab_size}], a number for each "
                f"token of the vocabulary. {FIX_IT}"
            )
        if logits.dtype != torch.float32:
            raise PluginError(f"{method} gives {logits.dtype}; it has to be torch.float32. {FIX_IT}")

    def run_prompt_logprobs(self) -> None:
        """Logprobs of a prompt's one position, of nothing but zeros."""
        device = self.state.device
        logits = torch.zeros(1, self.state.vocab_size, device=device)
        target = LogprobTensors.make(1, self.ops.num_logprobs, device)
        self.ops.prompt_logprobs(logits, torch.zeros(1, dtype=torch.int64, device=device), target)

    def warm_up(self, num_tokens: int) -> None:
        """A prompt's step of `num_tokens` and a decode step: kernels, attention's for either kind of rows too, are compiled and
        libraries choose theirs."""
        for shape in (padding_shape(num_tokens, num_tokens), padding_shape(1, self.state.max_model_len)):
            self.run_padding(shape, self.tails.variants)

    def execute(self, output: SchedulerOutput) -> ModelOutput | PendingOutput | None:
        """Launch a step. None when it has grammar rows, and the device does not wait for their masks: `sample` then gives the result."""
        if self._pending is not None:
            raise EngineError(
                f"Step {self._pending.output.step_id} still waits for its masks; bring them with sample()."
            )
        for sources, targets in copies_at_once(output.block_copies):
            self.pool.copy_blocks(*self._staging.stage([sources, targets]))
        if self._zeroes_blocks and (block_ids := handed_blocks(output, self.state.block_sizes)):
            self.pool.zero_blocks(*self._staging.stage([block_ids]))
        if output.new:
            self._settle()
            self.state.add(output.new)
        if self.prompt_embeds is not None:
            self.prompt_embeds.update(output)
        for name, connector in self.connectors.items():
            if name in output.extensions:
                connector.start_load(output.extensions[name])
        step: StepOutput | LeftLogits | Step
        if self.cache_scales is not None and self.cache_scales.is_due and output.slots:
            with self.cache_scales.measured():
                step = self._run(output, is_eager=True)
        else:
            step = self._decode(output) or self._run(output)
        for connector in self.connectors.values():
            connector.wait_for_save()
        return self._end(output, step)

    def sample(self, masks: GrammarMasks) -> ModelOutput | PendingOutput:
        """Finish the step that waits for its masks."""
        step, self._pending = self._pending, None
        if step is None or step.output.step_id != masks.step_id:
            waiting = "no step waits" if step is None else f"step {step.output.step_id} waits"
            raise EngineError(f"Masks came for step {masks.step_id}, but {waiting} for masks.")
        if masks.error:
            raise EngineError(masks.error)
        return self._finish_left(step, masks) if isinstance(step, LeftLogits) else self._finish(step, masks)

    def bring_masks(self, masks: GrammarMasks) -> None:
        """Masks that a launched step waits for on the device. From any thread."""
        assert self._masks_ahead is not None, "a step waits for masks"
        self._masks_ahead.bring(masks)

    def mask_room(self, step_id: int) -> Any:
        """See `Executor.mask_room`: of a step that was launched past its masks, or on a CPU. From any thread."""
        if self._masks_ahead is not None:
            return self._masks_ahead.room(step_id)
        return None if self._mask_places is None else self._mask_places.room()

    @property
    def awaits_masks(self) -> bool:
        """True while the device waits for masks: who waits for the device now may wait without end."""
        return self._masks_ahead is not None and self._masks_ahead.is_waiting

    def _settle(self) -> None:
        if self._masks_ahead is not None:
            self._masks_ahead.settle()

    # A decode step as one graph.

    def _decode(self, output: SchedulerOutput) -> StepOutput | LeftLogits | None:
        """The launched step, up to its logits where rows ask for more than its tail gives; None when no graph serves it."""
        num_rows, total_draft, graphs = len(output.slots), sum(output.num_draft), self.graphs
        if (
            graphs is None or not num_rows or output.total_num_scheduled_tokens != num_rows + total_draft
            or False in output.samples or self.state.host.pooling
            or (self.prompt_embeds is not None and self.prompt_embeds.are_read(output.slots))
        ):  # fmt: skip
            return None
        slots, has_masks = np.asarray(output.slots, dtype=np.int64), bool(output.grammar_rows)
        num_draft = np.asarray(output.num_draft, dtype=np.int64) if total_draft else None
        tail = self.tails.of_decode(slots, num_draft, has_masks=has_masks)
        prefix, has_lora, width = output.common_prefix_blocks, self._has_adapters(slots), 1
        if num_draft is not None:
            if isinstance(tail, Logits) or self.ops.drafts is None:
                return None  # kept are the logits of one token a row
            width = self.ops.drafts.width
            if graphs.runs_calls and total_draft != num_rows * (width - 1):
                return None  # where the device is this process, padding takes as long as tokens do
        key = graphs.decode_key(num_rows, tail, width, prefix, has_lora=has_lora)
        if key is None:
            return None
        num_scheduled: Ints | int = 1
        if num_draft is not None:
            num_scheduled = 1 + num_draft
            self._place_drafts(output, slots, num_scheduled)
        if key not in graphs.full:
            self._settle()
        room = self._readback.room(key) if graphs.gives(key) else None
        found = graphs.decode(key, slots, output.block_appends, num_draft, prefix, room=room)
        if isinstance(tail, Logits):
            left = LeftLogits(output, slots, key.num_reqs, has_lora)
            return (self._sample_ahead(left) if has_masks else None) or left
        assert found is not None
        self.state.host.num_computed_tokens[slots] += num_scheduled
        return self._readback.queue(output, tail, found[:num_rows], np.arange(num_rows), slots, room=room)

    def _planned(self, left: LeftLogits) -> Step:
        """The same as a step of any rows."""
        plan, tail = plan_step(left.output, self.state.host), Logits()
        columns = self._stage(plan)
        inputs = self._inputs(plan, columns, tail, has_lora=left.has_lora)
        rows = left.num_padded_rows
        logits = self._program.left_logits(self.buffers.token_index[: len(left.slots)], rows)
        return Step(left.output, plan, columns, inputs, tail, logits, num_padded_logits=rows)

    def _sample_ahead(self, left: LeftLogits) -> StepOutput | None:
        """Sample behind masks that are still to come, where nothing has to be compiled or captured for it and the device can wait."""
        tail, slots, graphs = self.tails.of_left_logits(left.slots), left.slots, self.graphs
        if self._stream_wait is None or not isinstance(tail, Sample):
            return None
        assert graphs is not None
        if not graphs.replays_apart(left.num_padded_rows, tail):
            return None
        if self._masks_ahead is None:
            self._masks_ahead = make_masks_ahead(self._places(), self._stream_wait)
            if self._masks_ahead is None:
                self._stream_wait = None
                return None
        awaited = self._masks_ahead.open(left.output.step_id, slots[left.output.grammar_rows])
        try:
            launched = self._sample_left(left, tail)
        except BaseException:
            self._masks_ahead.give_up(left.output.step_id, "The step failed before it had its masks.")
            raise
        launched.awaited = awaited
        return launched

    def _sample_left(self, left: LeftLogits, tail: Sample) -> StepOutput:
        slots = left.slots
        assert self.graphs is not None
        given = self.graphs.sample_apart(left.num_padded_rows, tail)[: len(slots)]
        self.state.host.num_computed_tokens[slots] += 1
        return self._readback.queue(left.output, tail, given, np.arange(len(slots)), slots)

    def _finish_left(self, left: LeftLogits, masks: GrammarMasks) -> ModelOutput | PendingOutput:
        """Sample from the logits, by a second graph where one serves all rows."""
        tail, slots = self.tails.of_left_logits(left.slots), left.slots
        if isinstance(tail, Logits):
            return self._finish(self._planned(left), masks)
        assert isinstance(tail, Sample)
        self._place_masks(left.output, slots, masks)
        return self._given(self._sample_left(left, tail))

    # Any other step.

    def _run(self, output: SchedulerOutput, *, is_eager: bool = False) -> Step:
        self._settle()
        if output.block_appends:
            self.state.append_blocks(output.block_appends)
        plan = plan_step(output, self.state.host)
        has_lora = self._has_adapters(plan.slots)
        embeds = (
            self.prompt_embeds if self.prompt_embeds is not None and self.prompt_embeds.are_read(output.slots) else None
        )
        graphs = self.graphs if embeds is None and not is_eager else None
        mode, key = self._place(plan, graphs, has_lora=has_lora)
        columns, tail = self._stage(plan), Logits() if output.grammar_rows else self._tail(plan, has_masks=False)
        inputs = self._inputs(plan, columns, tail, has_lora=has_lora)
        step = Step(output, plan, columns, inputs, tail)
        if not output.slots:
            return step
        drafter = self.drafter
        if plan.has_drafts and drafter is not None:
            drafter.draft(plan)
        elif plan.has_drafts:
            self._place_drafts(output, plan.slots, plan.num_scheduled)
        inputs.reads_others = isinstance(tail, Pool) or self._sampler.reads_hidden(plan)
        inputs.reads_others |= drafter is not None and drafter.drafter.reads_hidden
        forward = None if graphs is None else partial(graphs.forward, mode, key, plan)
        if embeds is not None:
            with embeds.placed(plan, self.state.host, self._staging):
                step.given = self._program.run(replace(key, tail=tail), inputs, partial(self._program.forward, key))
        else:
            step.given = self._program.run(replace(key, tail=tail), inputs, forward)
        step.prompt_logprobs = self._sampler.prompt_logprobs(step)
        return step

    def _tail(self, plan: StepPlan, *, has_masks: bool) -> Tail | None:
        return self.tails.of_others(plan, has_masks=has_masks)

    @staticmethod
    def _place(plan: StepPlan, graphs: GraphRunner | None, *, has_lora: bool) -> tuple[CUDAGraphMode, BatchDescriptor]:
        """The mode and key of a step that is not a decode graph; its tokens padded to the key's."""
        if graphs is None:
            return CUDAGraphMode.NONE, BatchDescriptor(plan.shape.num_tokens, plan.shape.num_reqs, has_lora=has_lora)
        return graphs.place(plan, has_lora=has_lora)

    def _has_adapters(self, slots: Ints) -> bool:
        return self.ops.adapters is not None and bool((self.state.host.adapter_slots[slots] >= 0).any())

    def _inputs(self, plan: StepPlan, columns: StepColumns, tail: Tail | None, *, has_lora: bool = False) -> StepInputs:
        logit_tokens, pooled = columns.logit_tokens, None
        if isinstance(tail, Verify):
            assert self.ops.drafts is not None
            (logit_tokens,) = self._staging.stage([plan.verified_tokens(self.ops.drafts.width)])
        elif isinstance(tail, Pool):
            pooled = self._pooled_rows(plan, has_lora)
        return StepInputs(
            shape=plan.shape, slots=columns.slots, num_scheduled=columns.num_scheduled,
            sample_slots=columns.sample_slots, logit_tokens=logit_tokens,
            num_draft=columns.num_draft if plan.has_drafts else None, num_unsampled=columns.num_unsampled,
            pooled=pooled, has_adapters=has_lora,
            token_types=None if pooled is None else self._token_types(pooled, plan.shape.num_padded_tokens),
        )  # fmt: skip

    def _pooled_rows(self, plan: StepPlan, has_lora: bool) -> PooledRows:
        host, rows, starts = self.state.host, plan.pooled_rows, plan.query_start_loc
        (last_tokens,) = self._staging.stage([starts[rows + 1] - 1])
        return PooledRows(
            params=[host.pooling[slot] for slot in plan.slots[rows].tolist()],
            slots=plan.slots[rows],
            starts=starts[rows],
            counts=plan.num_scheduled[rows],
            num_before=host.num_computed_tokens[plan.slots[rows]],
            is_last=plan.is_pooled_last,
            last_tokens=last_tokens,
            query_start_loc=self.buffers.query_start_loc[: plan.shape.num_padded_reqs + 1],
            has_adapters=has_lora,
        )

    def _token_types(self, rows: PooledRows, num_tokens: int) -> Tensor | None:
        """1 for tokens of second texts, where a row has one."""
        starts = [params.second_text_start for params in rows.params]
        if all(start is None for start in starts):
            return None
        types = np.zeros(num_tokens, dtype=np.int64)
        for row, start in enumerate(starts):
            if start is not None:
                first, count = int(rows.starts[row]), int(rows.counts[row])
                types[first + min(max(start - int(rows.num_before[row]), 0), count) : first + count] = 1
        (staged,) = self._staging.stage([types])
        return staged

    def _stage(self, plan: StepPlan) -> StepColumns:
        return StepColumns(
            *self._staging.stage(
                [
                    plan.slots, plan.num_scheduled, plan.logit_tokens, plan.logit_slots, plan.sample_slots,
                    plan.num_draft, plan.side_rows, plan.logprob_rows, plan.num_unsampled,
                ]
            )
        )  # fmt: skip

    def _place_drafts(self, output: SchedulerOutput, slots: Ints, num_scheduled: Ints) -> None:
        """Drafts lie in `token_ids` after the known tokens, where inputs, bad words and the next step find them."""
        made_here = self.ops.drafts is not None and self.ops.drafts.are_made_here
        drafts = None if made_here and not output.draft_token_ids else plan_drafts(output, slots, num_scheduled)
        if drafts is None:
            return
        state = self.state
        rows, offsets, values, places = self._staging.stage(
            [drafts.slots, drafts.offsets, drafts.values, drafts.places]
        )
        if drafts.has_device_values:
            own = state.draft_token_ids[rows, places.clamp(max=max(state.draft_token_ids.shape[1] - 1, 0))]
            values = torch.where(values < 0, own, values)
        values = values.clamp(0, state.vocab_size - 1)
        place = (state.num_computed_tokens[rows] + offsets).clamp(max=state.max_model_len)
        state.token_ids[rows, place] = values.to(torch.int32)

    # From the tail to the result.

    def _end(self, output: SchedulerOutput, step: StepOutput | LeftLogits | Step) -> ModelOutput | PendingOutput | None:
        if isinstance(step, StepOutput):
            return self._given(step)
        if output.grammar_rows:
            self._pending = step
            return None
        return self._finish(self._planned(step) if isinstance(step, LeftLogits) else step, None)

    def _finish(self, step: Step, masks: GrammarMasks | None) -> ModelOutput | PendingOutput:
        output, plan, inputs, tail, given = step.output, step.plan, step.inputs, step.tail, step.given
        if masks is not None:
            tail = self._tail(plan, has_masks=True)
            if isinstance(tail, Sample):
                self._place_masks(output, plan.slots, masks)
                given = self._program.end(tail, step.logits, inputs)
        if tail is None or isinstance(tail, Pool):
            self._program.count(inputs)
        elif isinstance(tail, Logits):
            given = self._sampler.sample(step, self._as_bytes(output, plan.slots, masks))
        self.state.host.num_computed_tokens[plan.slots] += plan.num_scheduled
        rows = plan.pooled_rows if isinstance(tail, Pool) else plan.sample_rows
        queued = self._readback.queue(output, tail, given, rows, plan.slots[rows], step.prompt_logprobs)
        if self.drafter is not None and inputs.batch is not None:
            self.drafter.follow(plan, step.columns, inputs.batch, inputs.hidden)
        return self._given(queued)

    def _place_masks(self, output: SchedulerOutput, slots: Ints, masks: GrammarMasks) -> None:
        """Where variants with masks read them. slots [R]"""
        slots = slots[output.grammar_rows]
        if masks.are_placed:
            self._places().flag(slots)
        else:
            self._places().place(slots, masks.bitmask)

    def _as_bytes(self, output: SchedulerOutput, slots: Ints, masks: GrammarMasks | None) -> GrammarMasks | None:
        """Masks that were placed as what else would have brought them: who reads them elsewhere."""
        if masks is None or not masks.are_placed:
            return masks
        words = self._places().room()[slots[output.grammar_rows]]
        return GrammarMasks(step_id=masks.step_id, bitmask=words.tobytes(), num_masks=masks.num_masks)

    def _places(self) -> MaskPlaces:
        if self._mask_places is None:
            self._mask_places = MaskPlaces(*self.ops.mask)
        return self._mask_places

    def _given(self, launched: StepOutput) -> ModelOutput | PendingOutput:
        """On a CPU the step is done."""
        if self.connectors:
            from pelton_platforms.device.steps.connector_news import take_news  # most starts do not need it

            for name, connector in self.connectors.items():
                take_news(name, connector, launched.output)
        if self.state.device.type != "cpu":
            return launched
        return launched.result()
