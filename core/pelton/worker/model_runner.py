"""Run a step: state, inputs, forward, sample, state again; one copy of columns in, one of tokens out.

    execute(output) -> add -> plan -> prepare_inputs -> backend.build -> forward -> logits -> sample -> advance

Three roads. A decode step is one captured graph where the device has graphs, with side tables and logprobs too. Any other
step prepares its inputs, runs the forward pass (captured, in pieces or eager) and ends in the `sample` seam; or in
`StepSampler` where rows ask for what no variant of the seam has: drafts, very many logprobs. With grammar rows `execute`
ends at the logits and `sample` goes on from there. What a step needs is told by counts that the host has; nothing here
waits for the device, the result is a `PendingOutput`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from pelton.attention.interface import AttentionBackend
from pelton.attention.metadata import BatchDescriptor
from pelton.config.compilation import CUDAGraphMode
from pelton.errors import EngineError
from pelton.graphs.captures import run_apart
from pelton.messages.step import GrammarMasks, ModelOutput, SchedulerOutput
from pelton.model.interface import CausalLM
from pelton.sampling.logprobs import LogprobTensors
from pelton.utils.staging import StagingRing, mask_column, mask_words
from pelton.worker.batch_state import ALL_LOGPROBS, NO_LOGPROBS, BatchState, SlotOwner
from pelton.worker.inputs import InputBuffers, StepShape, padding_shape
from pelton.worker.kv_pool import KVPool
from pelton.worker.pending import PendingOutput
from pelton.worker.readback import HostCopies, HostPool, StepOutput, prompt_tensors, read_back_all
from pelton.worker.step_graphs import LOGITS, StepGraphs
from pelton.worker.step_ops import FULL, GREEDY, LOGPROBS, MASKED, StepOps
from pelton.worker.step_plan import StepPlan, plan_drafts, plan_step
from pelton.worker.step_sampler import Step, StepColumns, StepSampler

if TYPE_CHECKING:
    import numpy.typing as npt

    from pelton.graphs.dispatcher import GraphDispatcher
    from pelton.graphs.recorder import GraphRecorder
    from pelton.kv_transfer.interface import WorkerConnector
    from pelton.worker.drafts import WorkerDraftProposer


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
    ) -> None:
        self.model = model
        self.state = state
        self.buffers = buffers
        self.backends = list(backends)
        self.pool = pool
        self.ops = ops
        self.connectors: dict[str, WorkerConnector] = {}
        self.graphs: StepGraphs | None = None
        self._staging = StagingRing(num_staging_parts, 4096, state.device)
        self._host_pool = HostPool()
        self._sampler = StepSampler(model, state, buffers, self._staging, ops)
        self._pending: Step | None = None
        self._to_scrub: list[SlotOwner] = []  # added to by whoever reads results

    @property
    def draft_proposer(self) -> WorkerDraftProposer | None:
        return self._sampler.draft_proposer

    @draft_proposer.setter
    def draft_proposer(self, proposer: WorkerDraftProposer | None) -> None:
        self._sampler.draft_proposer = proposer

    def add_connector(self, name: str, connector: WorkerConnector) -> None:
        """Call `connector` around every step; `name` is its key in `SchedulerOutput.extensions`."""
        connector.register_kv_caches(self.pool.caches(), self.pool.layout())
        self.connectors[name] = connector

    def use_graphs(self, dispatcher: GraphDispatcher, recorder: GraphRecorder) -> StepGraphs:
        """Capture and replay steps from now on."""
        self.graphs = StepGraphs(
            dispatcher, recorder, self.model, self.state, self.buffers, self.backends, self.ops, self._staging
        )
        return self.graphs

    def run_padding(self, shape: StepShape, variants: Sequence[str] = (), *, in_pieces: bool = False) -> None:
        """A step of nothing but padding, without a graph, and `variants` of sampling for one row. in_pieces: with the kernels of
        a step in pieces."""
        rows = shape.num_padded_reqs
        slots, scheduled = self._staging.stage([[self.state.padding_slot] * rows, [0] * rows])
        batch = self.ops.forward_batch(slots, scheduled, shape, self.backends)
        hidden = run_apart(self.model.forward, batch) if in_pieces else self.model.forward(batch)
        logits = self.model.compute_logits(hidden, self.buffers.token_index[:1])
        result = torch.zeros(1, 2, dtype=torch.int32, device=self.state.device)
        for variant in variants:
            self.ops.sample(variant)(logits, slots[:1], result)

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
            self.run_padding(shape, self.tail_variants)

    def execute(self, output: SchedulerOutput) -> ModelOutput | PendingOutput | None:
        """Launch a step; None when it has grammar rows: `sample` then gives the result."""
        if self._pending is not None:
            raise EngineError(
                f"Step {self._pending.output.step_id} still waits for its masks; bring them with sample()."
            )
        if self._to_scrub:
            self._scrub()
        if output.zero_block_ids:
            self.pool.zero_blocks(*self._staging.stage([output.zero_block_ids]))
        if output.new:
            self.state.add(output.new)
        for name, connector in self.connectors.items():
            if name in output.extensions:
                connector.start_load(output.extensions[name])
        step = self._decode(output)
        if step is None:
            if output.block_appends:
                self.state.append_blocks(output.block_appends)
            step = self._forward(output)
        for connector in self.connectors.values():
            connector.wait_for_save()
        if isinstance(step, StepOutput):
            return self._given(step)
        if output.grammar_rows:
            self._pending = step
            return None
        return self._finish(step, None)

    def sample(self, masks: GrammarMasks) -> ModelOutput | PendingOutput:
        """Finish the step that waits for its masks."""
        step, self._pending = self._pending, None
        if step is None or step.output.step_id != masks.step_id:
            waiting = "no step waits" if step is None else f"step {step.output.step_id} waits"
            raise EngineError(f"Masks came for step {masks.step_id}, but {waiting} for masks.")
        if masks.error:
            raise EngineError(masks.error)
        return self._finish(step, masks)

    # A decode step as one graph.

    def _decode(self, output: SchedulerOutput) -> StepOutput | Step | None:
        """The launched step, up to its logits where rows ask for more than a token; None when no graph serves it."""
        num_rows, num_draft = len(output.slots), sum(output.num_draft)
        if (
            self.graphs is None or not num_rows or output.total_num_scheduled_tokens != num_rows + num_draft
            or False in output.samples or self.draft_proposer is not None
        ):  # fmt: skip
            return None
        if num_draft:
            return self._decode_drafts(self.graphs, output)
        slots = np.asarray(output.slots, dtype=np.int64)
        tail = self._tail_variant(slots, bool(output.grammar_rows))
        is_whole = tail is not None and not output.grammar_rows
        prefix = output.common_prefix_blocks
        key = self.graphs.decode_key(
            num_rows, tail if is_whole and tail is not None else LOGITS,
            has_common_prefix=bool(prefix) and self.graphs.uses_common_prefix(num_rows, prefix),
        )  # fmt: skip
        if key is None:
            return None
        _, key = self.graphs.at_hand(CUDAGraphMode.FULL, key)
        found = self.graphs.decode(key, slots, output.block_appends, prefix)
        if found is None:
            self.state.append_blocks(output.block_appends)
            found = self.graphs.decode(key, slots, (), prefix)
        assert found is not None
        if is_whole and tail is not None:
            return self._decoded(output, slots, tail, found)
        plan = plan_step(output, self.state.host)
        return Step(output, plan, self._stage(plan), logits=found[:num_rows], tail=tail, num_padded_rows=len(found))

    def _decode_drafts(self, graphs: StepGraphs, output: SchedulerOutput) -> StepOutput | None:
        """The same for rows of which some have drafts."""
        slots, num_draft = (np.asarray(column, dtype=np.int64) for column in (output.slots, output.num_draft))
        variant = self._verified_variant(slots, num_draft, has_masks=bool(output.grammar_rows))
        if variant is None or self.ops.drafts is None:
            return None
        key = graphs.decode_key(len(slots), variant, self.ops.drafts.width)
        if key is None:
            return None
        _, key = graphs.at_hand(CUDAGraphMode.FULL, key)
        self._place_drafts(output, slots, 1 + num_draft)
        found = graphs.decode(key, slots, output.block_appends, num_draft=num_draft)
        if found is None:
            self.state.append_blocks(output.block_appends)
            found = graphs.decode(key, slots, (), num_draft=num_draft)
        assert found is not None
        self.state.host.num_computed_tokens[slots] += 1 + num_draft
        return self._verified(output, np.arange(len(slots)), found[: len(slots)])

    def _verified_variant(
        self, slots: npt.NDArray[np.int64], num_draft: npt.NDArray[np.int64], *, has_masks: bool
    ) -> str | None:
        """The variant of sampling, where `StepDrafts.verify` can end a step of these rows; None: `StepSampler` does."""
        drafts = self.ops.drafts
        if drafts is None or has_masks or num_draft.max() >= drafts.width:
            return None
        variant = self._tail_variant(slots, has_masks=False)
        has_side = (self.state.host.side_slots[slots] >= 0).any()
        return None if has_side or variant not in (GREEDY, FULL) else variant

    @property
    def tail_variants(self) -> tuple[str, ...]:
        """Variants of the `sample` op that decode graphs end in."""
        return (
            (GREEDY, FULL) if self._seam_suits_all or self.graphs is None or not self.graphs.runs_calls else (GREEDY,)
        )

    @property
    def _seam_suits_all(self) -> bool:
        """False: on a CPU `StepSampler` does better for random rows, as it runs only the filters that some row has."""
        return self.state.device.type != "cpu" or self.ops.skips_unused

    def _tail_variant(self, slots: npt.NDArray[np.int64], has_masks: bool) -> str | None:
        """The least variant of the `sample` seam that gives these rows what they ask for; None when none does."""
        host = self.state.host
        variant = FULL if has_masks or host.temperature[slots].any() else GREEDY
        if FULL not in self.tail_variants:
            return None if variant == FULL or host.has_extras[slots].any() else GREEDY
        if host.has_extras[slots].any():
            wanted = host.num_logprobs[slots]
            if (wanted == ALL_LOGPROBS).any() or wanted.max() > self.ops.num_logprobs:
                return None
            variant = FULL if (wanted == NO_LOGPROBS).all() else LOGPROBS
        return MASKED + variant if has_masks else variant

    def _decoded(
        self, output: SchedulerOutput, slots: npt.NDArray[np.int64], variant: str, result: Tensor
    ) -> StepOutput:
        """The result of a decode step that one graph, or two, have queued."""
        num_rows = len(slots)
        self.state.host.num_computed_tokens[slots] += 1
        return self._sampled(output, np.arange(num_rows), slots, variant, result[:num_rows])

    def _sample_masked(self, step: Step, masks: GrammarMasks) -> StepOutput:
        """The second graph of a decode step with grammar rows, whose masks are here now."""
        assert self.graphs is not None and step.tail is not None
        self._place_masks(step, masks)
        result = self.graphs.tail(step.num_padded_rows, step.tail)
        return self._decoded(step.output, step.plan.slots, step.tail, result)

    def _place_masks(self, step: Step, masks: GrammarMasks) -> None:
        """Where variants with masks read them."""
        words, has_mask = self.ops.mask
        slots = step.plan.slots[np.asarray(step.output.grammar_rows)]
        index, given = self._staging.stage([slots, mask_column(masks.bitmask, len(slots), words.shape[1])])
        words[index] = mask_words(given, len(slots), words.shape[1])
        has_mask.zero_()
        has_mask.index_fill_(0, index, True)  # `has_mask[index] = True` waits for the device

    # Any other step.

    def _forward(self, output: SchedulerOutput) -> Step:
        plan = plan_step(output, self.state.host)
        mode, key = self._place(plan)
        columns = self._stage(plan)
        step = Step(output, plan, columns)
        if not output.slots:
            return step
        logit_tokens = columns.logit_tokens
        if plan.has_drafts:
            self._place_drafts(output, plan.slots, plan.num_scheduled)
            if self._seam_suits_all and len(plan.sample_rows):
                step.verified = self._verified_variant(
                    plan.sample_slots, plan.num_draft, has_masks=bool(output.grammar_rows)
                )
            drafts = self.ops.drafts
            if drafts is not None and drafts.are_made_here:
                step.num_draft = drafts.make(columns.sample_slots, columns.num_draft)
            if drafts is not None and step.verified is not None:
                (logit_tokens,) = self._staging.stage([plan.verified_tokens(drafts.width)])
        if self.graphs is not None and mode is CUDAGraphMode.FULL:
            step.hidden = self.graphs.mixed(key, plan.slots, plan.num_scheduled)
        else:
            batch = self.ops.forward_batch(columns.slots, columns.num_scheduled, plan.shape, self.backends)
            step.hidden = self.model.forward(batch) if self.graphs is None else self.graphs.forward(mode, key, batch)
        if len(plan.sample_rows):
            step.logits = self.model.compute_logits(step.hidden, logit_tokens)
        step.prompt_logprobs = self._sampler.prompt_logprobs(step)
        return step

    def _place(self, plan: StepPlan) -> tuple[CUDAGraphMode, BatchDescriptor]:
        """The mode and key of a step that is no decode graph; its tokens padded to the key's."""
        shape = plan.shape
        if self.graphs is None:
            return CUDAGraphMode.NONE, BatchDescriptor(shape.num_tokens, shape.num_reqs)
        is_prompt = shape.num_reqs == 1 and shape.max_seq_len == shape.num_tokens > 1
        mode, key = self.graphs.dispatcher.dispatch(shape.num_tokens, shape.num_reqs, is_prompt=is_prompt)
        if mode is not CUDAGraphMode.NONE:
            mode, key = self.graphs.at_hand(mode, key)
            shape.num_padded_tokens = key.num_tokens
        return mode, key

    def _stage(self, plan: StepPlan) -> StepColumns:
        return StepColumns(
            *self._staging.stage(
                [
                    plan.slots, plan.num_scheduled, plan.logit_tokens, plan.logit_slots, plan.sample_slots,
                    plan.num_draft, plan.side_rows, plan.logprob_rows, plan.num_unsampled,
                ]
            )
        )  # fmt: skip

    def _place_drafts(
        self, output: SchedulerOutput, slots: npt.NDArray[np.int64], num_scheduled: npt.NDArray[np.int64]
    ) -> None:
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

    # From logits to the result.

    def _finish(self, step: Step, masks: GrammarMasks | None) -> ModelOutput | PendingOutput:
        output, plan, host = step.output, step.plan, self.state.host
        if masks is not None and step.tail is not None:
            return self._given(self._sample_masked(step, masks))
        variant = self._seam_variant(plan, masks)
        if step.verified is not None:
            launched = self._verify(step, step.verified)
        elif variant is not None:
            launched = self._finish_by_seam(step, variant, masks)
        else:
            assert step.logits is not None
            sampled = self._sampler.sample(step, masks)
            copies, fields = read_back_all(step, sampled, host.num_logprobs, self._host_pool)
            launched = self._plain_output(output, plan.sample_rows, copies)
            for name, value in fields.items():
                setattr(launched, name, value)
        host.num_computed_tokens[plan.slots] += plan.num_scheduled
        launched.prompt_logprobs = step.prompt_logprobs
        return self._given(launched)

    def _seam_variant(self, plan: StepPlan, masks: GrammarMasks | None) -> str | None:
        """The variant of the `sample` op that finishes a step that is no decode graph; None: `StepSampler` does."""
        if plan.has_drafts or self.draft_proposer is not None:
            return None
        slots, host = plan.sample_slots, self.state.host
        if self._seam_suits_all:
            return self._tail_variant(slots, masks is not None)
        is_plain = masks is None and not len(plan.side_rows) and not len(plan.logprob_rows)
        return GREEDY if is_plain and not host.temperature[slots].any() else None

    def _verify(self, step: Step, variant: str) -> StepOutput:
        """Count what is neither sampled nor a draft, then verify the drafts."""
        plan, columns, state, drafts = step.plan, step.columns, self.state, self.ops.drafts
        assert drafts is not None and step.logits is not None
        state.num_computed_tokens.index_add_(0, columns.slots, columns.num_unsampled)
        num_draft = columns.num_draft if step.num_draft is None else step.num_draft
        result = torch.zeros(len(plan.sample_rows), 3 + drafts.width, dtype=torch.int32, device=state.device)
        drafts.verify(variant, step.logits, columns.sample_slots, num_draft, result)
        return self._verified(step.output, plan.sample_rows, result, prompt_tensors(step))

    def _verified(
        self,
        output: SchedulerOutput,
        sample_rows: npt.NDArray[np.int64],
        result: Tensor,
        prompts: Sequence[Tensor] = (),
    ) -> StepOutput:
        """Read what `Verify` has left for the rows that sampled."""
        launched = self._plain_output(output, sample_rows, self._copies([result, *prompts]))
        launched.is_plain, launched.is_verified = False, True
        return launched

    def _finish_by_seam(self, step: Step, variant: str, masks: GrammarMasks | None) -> StepOutput:
        """Count what is not sampled, then the seam counts one more for each row that samples."""
        plan, columns, state, prompts = step.plan, step.columns, self.state, prompt_tensors(step)
        state.num_computed_tokens.index_add_(0, columns.slots, columns.num_unsampled)
        if step.logits is None:
            return self._plain_output(step.output, plan.sample_rows, self._copies(prompts))
        if masks is not None:
            self._place_masks(step, masks)
        result = torch.zeros(len(plan.sample_rows), 2, dtype=torch.int32, device=state.device)
        self.ops.sample(variant)(step.logits, columns.sample_slots, result)
        return self._sampled(step.output, plan.sample_rows, plan.sample_slots, variant, result, prompts)

    def _sampled(
        self,
        output: SchedulerOutput,
        sample_rows: npt.NDArray[np.int64],
        slots: npt.NDArray[np.int64],
        variant: str,
        result: Tensor,
        prompts: Sequence[Tensor] = (),
    ) -> StepOutput:
        """Read what `variant` has left for the rows that sampled, whose slots these are. prompts: logprobs of the step's prompts."""
        copies, has_logprobs, num_rows = [result], variant.endswith(LOGPROBS), len(slots)
        if has_logprobs:
            copies += self.ops.logprobs.part(0, num_rows).tensors()
        launched = self._plain_output(output, sample_rows, self._copies([*copies, *prompts]))
        if has_logprobs:
            launched.has_logprobs, launched.num_logprobs = True, self.state.host.num_logprobs[slots]
        return launched

    def _copies(self, tensors: list[Tensor]) -> HostCopies:
        return HostCopies(tensors, self._host_pool, self.state.device)

    def _plain_output(
        self, output: SchedulerOutput, sample_rows: npt.NDArray[np.int64], copies: HostCopies
    ) -> StepOutput:
        errors = self.state.host.errors
        return StepOutput(
            output=ModelOutput(step_id=output.step_id),
            num_rows=len(output.slots),
            sample_rows=sample_rows,
            slots=output.slots,
            owners=self.state.host.owners,
            copies=copies,
            errors={row: errors[slot] for row, slot in enumerate(output.slots) if slot in errors} if errors else {},
            scrub=self._to_scrub.append,
        )

    def _given(self, launched: StepOutput) -> ModelOutput | PendingOutput:
        """On a CPU the step is done."""
        for connector in self.connectors.values():
            sending, receiving = connector.take_finished()
            launched.output.finished_sending += sending
            launched.output.finished_receiving += receiving
            launched.output.invalid_block_ids += connector.take_invalid_block_ids()
        if self.state.device.type != "cpu":
            return launched
        result = launched.result()
        if self._to_scrub:
            self._scrub()
        return result

    def _scrub(self) -> None:
        """Clean the blocks of requests that failed, before anything of the step that may hand them on."""
        owners = set[SlotOwner]()
        while self._to_scrub:  # one by one: who reads results may add to it meanwhile
            owners.add(self._to_scrub.pop())
        for owner in owners:
            for group, blocks in enumerate(self.state.blocks_of(owner)):
                self.pool.scrub(group, torch.unique(blocks).long())
