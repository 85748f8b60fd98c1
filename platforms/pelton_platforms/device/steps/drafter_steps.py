"""A drafter in the steps of a runner: it follows each step's tokens, and makes the drafts of the next in front of it.

In front of a step its block tables have room for the drafts, and a draft's keys and values lie where those of its token will: what is
written for one that is rejected is overwritten, as the model's own is. R = rows with drafts, r = rows that sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pelton.attention.interface import AttentionBackend
from pelton.spec_decode.drafter import Drafter, DraftPass
from pelton.worker.inputs import InputBuffers, StepShape
from pelton_platforms.device.steps.batch_state import BatchState
from pelton_platforms.device.steps.staging import StagingRing
from pelton_platforms.device.steps.step_ops import StepOps

if TYPE_CHECKING:
    from pelton.attention.metadata import ForwardBatch
    from pelton_platforms.device.steps.step_plan import Ints, StepPlan
    from pelton_platforms.device.steps.step_sampler import StepColumns


class DrafterSteps:
    """Bound to one batch state."""

    def __init__(
        self,
        drafter: Drafter,
        state: BatchState,
        buffers: InputBuffers,
        backends: Sequence[AttentionBackend],
        ops: StepOps,
        staging: StagingRing,
    ) -> None:
        self.drafter = drafter
        self._state, self._buffers, self._backends = state, buffers, list(backends)
        self._ops, self._staging = ops, staging
        self._memory: Tensor | None = None  # [S + 1, ...], what the drafter left of each request

    def draft(self, plan: StepPlan) -> None:
        """Put the drafts of a step that is about to run behind its rows' known tokens."""
        order = np.argsort(-plan.num_draft, kind="stable")
        num_draft = plan.num_draft[order]
        num_draft = num_draft[num_draft > 0]
        slots, ones = self._staging.stage([plan.sample_slots[order[: len(num_draft)]], np.ones_like(num_draft)])
        computed = self._state.num_computed_tokens
        before = computed[slots]
        try:
            memory = None if self._memory is None else self._memory[slots]
            self.drafter.draft(_Rows(self, slots, ones, num_draft, plan.shape.max_seq_len, memory))
        finally:
            computed[slots] = before

    def follow(self, plan: StepPlan, columns: StepColumns, batch: ForwardBatch, hidden: Any) -> None:
        """Let the drafter take in a step that has sampled."""
        num_rows = len(plan.slots)
        starts = self._buffers.query_start_loc[: num_rows + 1].long()
        token = self._buffers.token_index[: batch.num_tokens]
        row = torch.searchsorted(starts[1:], token, right=True).clamp(max=num_rows - 1)
        following = self._tokens(columns.slots[row], batch.positions + 1)
        # A row's first position is what was computed before it; the last that counts lies before what is computed now.
        (sampling,) = self._staging.stage([plan.sample_rows])
        first = starts[sampling]
        last = first + self._state.num_computed_tokens[columns.sample_slots] - 1 - batch.positions[first]
        step = DraftPass(batch=batch, following=following, hidden=hidden, last=last)
        memory = self.drafter.follow(step)
        if memory is None or not len(memory):
            return
        if self._memory is None:
            self._memory = memory.new_zeros(self._state.max_num_seqs + 1, *memory.shape[1:])
        self._memory[columns.sample_slots] = memory

    def warm_up(self, batch: ForwardBatch, hidden: Any) -> None:
        """Follow a step of nothing but padding, and draft for one such row: libraries load and kernels are compiled."""
        state, last = self._state, self._buffers.token_index[:1]
        memory = self.drafter.follow(DraftPass(batch=batch, following=batch.input_ids, hidden=hidden, last=last))
        slots, nothing = self._staging.stage([[state.padding_slot], [0]])
        num_draft = np.array([self.drafter.num_drafts])
        self.drafter.draft(_Rows(self, slots, nothing, num_draft, state.max_model_len, memory))

    def place(self, slots: Tensor, offset: int, token_ids: Tensor) -> None:
        """Put token `offset` behind the last known one of rows that have had no pass since."""
        state = self._state
        places = (state.num_computed_tokens[slots] + offset).clamp(max=state.max_model_len)
        state.token_ids[slots, places] = token_ids.clamp(0, state.vocab_size - 1).to(torch.int32)

    def one_token(self, slots: Tensor, ones: Tensor, max_seq_len: int) -> DraftPass:
        """Describe one token of each of these rows to the drafter; the rows have one computed token more then."""
        count = len(slots)
        shape = StepShape(
            num_reqs=count, num_tokens=count, num_decode_rows=count, max_query_len=1, max_seq_len=max_seq_len,
            num_padded_reqs=count, num_padded_tokens=count,
        )  # fmt: skip
        batch = self._ops.forward_batch(slots, ones, shape, self._backends)
        self._state.num_computed_tokens.index_add_(0, slots, ones)
        following = self._tokens(slots, batch.positions + 1)
        return DraftPass(batch=batch, following=following, last=self._buffers.token_index[:count])

    def _tokens(self, slots: Tensor, places: Tensor) -> Tensor:
        return self._state.token_ids[slots, places.clamp(max=self._state.max_model_len)].long()


class _Rows:
    """`DraftRows` of one step."""

    def __init__(
        self,
        steps: DrafterSteps,
        slots: Tensor,
        ones: Tensor,
        num_draft: Ints,
        max_seq_len: int,
        memory: Tensor | None,
    ) -> None:
        """slots, ones [R] int64; num_draft [R], from most to least."""
        self.most = int(num_draft[0])
        self.memory = memory
        self._steps, self._slots, self._ones, self._max_seq_len = steps, slots, ones, max_seq_len
        self._num_draft = num_draft
        self._num_placed = self._num_passes = 0

    def place(self, token_ids: Tensor) -> None:
        # Each pass has moved the rows' ends by one.
        self._num_placed += 1
        count = min(len(token_ids), int((self._num_draft >= self._num_placed).sum()))
        self._steps.place(self._slots[:count], self._num_placed - self._num_passes, token_ids[:count])

    def step(self) -> DraftPass:
        count = int((self._num_draft > self._num_placed).sum())
        assert count, "a drafter makes no more than `most` drafts"
        self._num_passes += 1
        return self._steps.one_token(self._slots[:count], self._ones[:count], self._max_seq_len)
