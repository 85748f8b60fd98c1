"""Runners of a pipeline's stages: the last one samples and tells the others, who go on with the next step meanwhile.

A stage before the last ends a step at its hidden states, which its model has sent on. What was sampled it takes from the last one when a
step comes that needs it: so as many steps run at once as there are stages. All else, the choice of graphs too, is as in one device: the
tensors that stages send to each other have the same shapes on both sides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pelton.errors import EngineError
from pelton.messages.step import GrammarMasks, ModelOutput, SchedulerOutput
from pelton.sampling.tails import Logits, Pool, Tail, Verify
from pelton.worker.pending import PendingOutput
from pelton_platforms.device.steps.model_runner import LeftLogits, ModelRunner
from pelton_platforms.device.steps.readback import HostCopies, Readback, StepOutput
from pelton_platforms.device.steps.step_program import StepInputs, StepProgram
from pelton_platforms.device.steps.step_sampler import PromptLogprobs, Step, StepSampler

if TYPE_CHECKING:
    from pelton.attention.metadata import BatchDescriptor
    from pelton.parallel.communicator import Communicator
    from pelton_platforms.device.steps.step_plan import Ints

_FAILED = -1
_NONE: Ints = np.zeros(0, dtype=np.int64)


def stage_runner(stages: Communicator | None, max_awaited: int) -> Callable[..., ModelRunner]:
    """Return what makes the runner of this rank's stage. max_awaited: more than steps are open."""
    if stages is None or stages.size == 1:
        return ModelRunner
    if stages.rank == stages.size - 1:
        return partial(LastStageRunner, stages)
    return partial(StageRunner, stages, max_awaited)


def _message(num_rows: int, device: torch.device) -> Tensor:
    """Make room for what the last stage sends of a step that samples: [1 + S, 2] int32. Row 0: the step's number and 0 or `_FAILED`, each
    other one a sampling row's last token and how many drafts were accepted before it."""
    return torch.zeros(1 + num_rows, 2, dtype=torch.int32, device=device)


class LastStageRunner(ModelRunner):
    def __init__(self, stages: Communicator, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._stages = stages
        self._readback = _TellingReadback(self.state, self.ops, self._tell)
        self._told_id = -1
        self._rows = _message(self.state.max_num_seqs, self.state.device)

    def sample(self, masks: GrammarMasks) -> ModelOutput | PendingOutput:
        output = None if self._pending is None else self._pending.output
        try:
            return super().sample(masks)
        except Exception as error:
            if output is not None:
                self._tell_failure(output, error)
            raise

    def _end(self, output: SchedulerOutput, step: StepOutput | LeftLogits | Step) -> ModelOutput | PendingOutput | None:
        try:
            return super()._end(output, step)
        except Exception as error:
            self._tell_failure(output, error)
            raise

    def _tell(self, step_id: int, tokens: Tensor, num_accepted: Tensor | None) -> None:
        """tokens, num_accepted [r]"""
        rows, count = self._rows, len(tokens)
        rows[0, 0], rows[0, 1] = step_id, 0
        rows[1 : 1 + count, 0] = tokens
        rows[1 : 1 + count, 1] = 0 if num_accepted is None else num_accepted
        self._send(step_id)

    def _tell_failure(self, output: SchedulerOutput, error: Exception) -> None:
        """The other stages have done their part, and go on."""
        error.others_go_on = True  # type: ignore[attr-defined]
        if True in output.samples and self._told_id < output.step_id:
            self._rows[0, 0], self._rows[0, 1] = output.step_id, _FAILED
            self._send(output.step_id)

    def _send(self, step_id: int) -> None:
        self._told_id = step_id
        for stage in range(self._stages.rank):
            self._stages.send(self._rows, stage)


class _TellingReadback(Readback):
    def __init__(self, state: Any, ops: Any, tell: Callable[[int, Tensor, Tensor | None], None]) -> None:
        super().__init__(state, ops)
        self._tell = tell

    def queue(
        self,
        output: SchedulerOutput,
        tail: Tail | None,
        given: Any,
        rows: Ints,
        slots: Ints,
        prompt_logprobs: PromptLogprobs | None = None,
        room: Tensor | None = None,
    ) -> StepOutput:
        if len(rows) and tail is not None and not isinstance(tail, Pool):
            self._tell(output.step_id, *_last_tokens(tail, given))
        return super().queue(output, tail, given, rows, slots, prompt_logprobs, room)


def _last_tokens(tail: Tail, given: Any) -> tuple[Tensor, Tensor | None]:
    """Return the last token of each row [r], and how many drafts come before it."""
    if isinstance(tail, Logits):
        return given.token_ids.gather(1, given.num_accepted.unsqueeze(-1)).squeeze(1), given.num_accepted
    if isinstance(tail, Verify):
        num_accepted = given[:, 0]
        return given[:, 3:].gather(1, num_accepted.long().unsqueeze(-1)).squeeze(1), num_accepted
    return given[:, 0], None


@dataclass(slots=True)
class _Awaited:
    """A step whose tokens are still to be taken from the last stage."""

    step_id: int
    slots: Ints  # [r]
    num_draft: Ints  # [r]


class StageRunner(ModelRunner):
    """The runner of a stage before the last: nothing is sampled, and a step's result is empty."""

    def __init__(self, stages: Communicator, max_awaited: int, *args: Any, **named: Any) -> None:
        """max_awaited: steps whose tokens may stay with the last stage while no request needs them."""
        super().__init__(*args, **named)
        self._stages, self._max_awaited = stages, max_awaited
        self._program = _StageProgram(self.model, self.state, self.backends, self.ops)
        self._sampler = _NoSampler(self.model, self.state, self.buffers, self._staging, self.ops)
        self._awaited: deque[_Awaited] = deque()
        self._num_awaited = np.zeros(self.state.max_num_seqs + 1, dtype=np.int64)  # by slot, steps in `_awaited`
        self._rows = _message(self.state.max_num_seqs, self.state.device)
        self._readback = _StageReadback(self.state, self.ops, self._await)

    def execute(self, output: SchedulerOutput) -> ModelOutput | PendingOutput | None:
        slots = output.slots + [request.slot for request in output.new]
        while self._awaited and (len(self._awaited) > self._max_awaited or self._num_awaited[slots].any()):
            self._take_oldest()
        return super().execute(output)

    def bring_masks(self, masks: GrammarMasks) -> None: ...

    def _end(self, output: SchedulerOutput, step: StepOutput | LeftLogits | Step) -> ModelOutput | PendingOutput | None:
        if isinstance(step, LeftLogits):
            slots = step.slots
            self.state.host.num_computed_tokens[slots] += 1
            step = self._readback.queue(output, None, None, np.arange(len(slots)), slots)
        elif isinstance(step, Step):
            plan = step.plan
            self.state.host.num_computed_tokens[plan.slots] += plan.num_scheduled
            step = self._readback.queue(output, None, None, plan.sample_rows, plan.sample_slots)
        return self._given(step)

    def _await(self, output: SchedulerOutput, rows: Ints, slots: Ints) -> None:
        """A step is launched: its tokens count as computed, and rows of these slots [r] sample."""
        state = self.state
        where, counts = self._staging.stage([output.slots, output.num_scheduled])
        state.num_computed_tokens.index_add_(0, where, counts)
        if len(rows):
            num_draft = np.asarray(output.num_draft, dtype=np.int64)[rows] if output.num_draft else np.zeros_like(rows)
            self._num_awaited[slots] += 1
            self._awaited.append(_Awaited(output.step_id, slots, num_draft))

    def _take_oldest(self) -> None:
        awaited, rows, state = self._awaited.popleft(), self._rows, self.state
        self._num_awaited[awaited.slots] -= 1
        while True:  # past steps that failed before this stage had done its part
            self._stages.recv(rows, self._stages.size - 1)
            step_id, outcome = rows[0].tolist()
            if step_id >= awaited.step_id:
                break
        if step_id != awaited.step_id:
            raise EngineError(f"The last stage tells of step {step_id} before it told of step {awaited.step_id}.")
        if outcome == _FAILED:
            return
        nothing, slots, num_draft = self._staging.stage([_NONE, awaited.slots, awaited.num_draft])
        told = rows[1 : 1 + len(awaited.slots)].long()
        state.advance(nothing, nothing, slots, num_draft - told[:, 1], told[:, 0])


class _StageReadback(Readback):
    def room(self, key: BatchDescriptor) -> Tensor | None:
        return None

    def __init__(self, state: Any, ops: Any, note: Callable[[SchedulerOutput, Ints, Ints], None]) -> None:
        super().__init__(state, ops)
        self._note = note

    def queue(
        self,
        output: SchedulerOutput,
        tail: Tail | None,
        given: Any,
        rows: Ints,
        slots: Ints,
        prompt_logprobs: PromptLogprobs | None = None,
        room: Tensor | None = None,
    ) -> StepOutput:
        self._note(output, rows, slots)
        return StepOutput(
            output=ModelOutput(step_id=output.step_id), num_rows=len(output.slots), rows=_NONE, tail=None,
            copies=HostCopies([], self._pool, self._state.device),
        )  # fmt: skip


class _StageProgram(StepProgram):
    """Whatever the tail, a step ends at its hidden states."""

    has_left_logits = True

    def run(self, key: BatchDescriptor, inputs: StepInputs, forward: Callable[[StepInputs], Any] | None = None) -> Any:
        self._begin(inputs)
        if inputs.num_draft is not None and self.ops.drafts is not None:
            inputs.num_draft = self.ops.drafts.make(inputs.sample_slots, inputs.num_draft)
        return self.forward(key, inputs) if forward is None else forward(inputs)


class _NoSampler(StepSampler):
    def prompt_logprobs(self, step: Step) -> PromptLogprobs | None:
        return None
