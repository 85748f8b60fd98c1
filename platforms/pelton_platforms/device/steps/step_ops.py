"""The ops that a step calls itself, around the model's: its inputs, and what the rows that sample ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pelton.attention.interface import AttentionBackend
from pelton.attention.metadata import NO_CACHE, BatchDescriptor, ForwardBatch
from pelton.ops.interface import (
    Logprobs,
    LogprobsNeeds,
    LogprobsTensors,
    PrepareInputs,
    PrepareInputsNeeds,
    PrepareInputsTensors,
    SampleNeeds,
    SampleTensors,
)
from pelton.ops.interface import Sample as SampleOp
from pelton.ops.selector import OpSelector
from pelton.ops.speculation import LookupDraftsNeeds
from pelton.sampling.logprobs import LogprobTensors
from pelton.sampling.tails import FULL, GREEDY, Sample, Tail, Variant, Verify
from pelton.worker.inputs import InputBuffers, StepShape
from pelton_platforms.device.steps.batch_state import BatchState
from pelton_platforms.device.steps.packed_logprobs import PackedResults
from pelton_platforms.device.steps.reference_step import ReferencePrepareInputs
from pelton_platforms.device.steps.step_adapters import StepAdapters
from pelton_platforms.device.steps.step_shapes import uncached_metadata

if TYPE_CHECKING:
    from pelton.parallel.communicator import Communicator
    from pelton_platforms.device.steps.logit_shares import BestOfShares
    from pelton_platforms.device.steps.row_shares import RowShares
    from pelton_platforms.device.steps.step_drafts import StepDrafts

NUM_LOGPROBS = 20
"""Alternatives a row that the op can give; rows that want more take `StepSampler`."""

PROMPT_LOGPROB_ROWS = 256
"""Positions of prompts whose logits are there at once: a whole step's would be gigabytes with a large vocabulary."""


class StepOps:
    """Bound to one batch state and its buffers; the variants of sampling when first asked for."""

    def __init__(self, ops: OpSelector, state: BatchState, buffers: InputBuffers) -> None:
        self._ops, self._state, self._buffers = ops, state, buffers
        self._sample: dict[Variant, SampleOp] = {}
        self._logprobs: LogprobTensors | None = None
        self._packed: PackedResults | None = None
        self._prompt_logprobs: Logprobs | None = None
        self._mask: tuple[Tensor, Tensor] | None = None
        self.drafts: StepDrafts | None = None
        self.context: Communicator | None = None  # ranks that share the KV cache, token by token; None: each keeps all
        self.shares: BestOfShares | None = None  # for greedy rows; None: this rank has all logits
        self.row_shares: RowShares | None = None  # for all others
        self._adapters: StepAdapters | None = None
        needs = PrepareInputsNeeds(
            max_num_tokens=buffers.max_num_tokens,
            max_num_seqs=state.max_num_seqs,
            block_sizes=state.block_sizes,
            max_model_len=state.max_model_len,
        )
        tensors = PrepareInputsTensors(state, buffers)
        self.prepare_inputs: PrepareInputs = (
            ops.bind("prepare_inputs", needs, tensors)
            if state.block_sizes
            else ReferencePrepareInputs.bind(needs, tensors)  # kernels fill block tables, of which there are none
        )
        self.sample(GREEDY)
        self.sample(FULL)

    def use_drafts(
        self, num_drafts: int, lookup: LookupDraftsNeeds | None = None, *, has_drafter: bool = False
    ) -> None:
        """Rows may have up to `num_drafts` drafts; lookup, has_drafter: see `StepDrafts`."""
        from pelton_platforms.device.steps.step_drafts import StepDrafts

        self.drafts = StepDrafts(
            self._ops, self._state, num_drafts, lookup, has_drafter=has_drafter, prepare_inputs=self.prepare_inputs
        )

    @property
    def adapters(self) -> StepAdapters | None:
        """Set: rows may have adapters."""
        return self._adapters

    @adapters.setter
    def adapters(self, adapters: StepAdapters | None) -> None:
        self._adapters = self._state.adapters = adapters

    def forward_batch(
        self,
        slots: Tensor,
        num_scheduled: Tensor,
        shape: StepShape,
        backends: Sequence[AttentionBackend],
        key: BatchDescriptor | None = None,
        prefix_lens: Tensor | None = None,
        has_adapters: bool = False,
    ) -> ForwardBatch:
        """Prepare a step's inputs and describe it to `backends`, one a set of metadata. slots, num_scheduled [R] int64; key: of the
        step when it is captured; prefix_lens [groups] int32: where such a step finds its common prefixes, in tokens."""
        groups = self.prepare_inputs(slots, num_scheduled, shape)
        if self.context is not None:
            for common in groups:
                keep_own(common.slot_mapping, self.context)
        if prefix_lens is not None:
            for group, common in enumerate(groups):
                common.common_prefix = prefix_lens[group : group + 1]
        adapter = None
        if self._adapters is not None:
            adapter = self._adapters.prepare(slots, shape, self._buffers, is_used=has_adapters)
        num_tokens = shape.num_padded_tokens
        return ForwardBatch(
            input_ids=self._buffers.input_ids[:num_tokens],
            positions=self._buffers.positions[:num_tokens],
            attention=tuple(
                backend.build(
                    groups[backend.group_id]
                    if backend.group_id != NO_CACHE
                    else uncached_metadata(self._buffers, shape),
                    key,
                )
                for backend in backends
            ),
            num_tokens=num_tokens,
            adapter=adapter,
            slot_mappings=tuple(common.slot_mapping for common in groups),
            groups=tuple(groups),
        )

    def shared_rows(self, num_rows: int) -> RowShares | None:
        """Return who shares so many rows of logits out to the ranks; None: each samples all of them."""
        return self.row_shares if self.row_shares is not None and self.row_shares.pay(num_rows) else None

    def sample(self, variant: Variant) -> SampleOp:
        """The op for rows that want no more than `variant`; greedy for no parameters at all."""
        if variant not in self._sample:
            needs = SampleNeeds(
                vocab_size=self._state.vocab_size, max_num_seqs=self._state.max_num_seqs,
                variant="greedy" if variant.is_greedy else "full", has_mask=variant.has_mask,
                num_logprobs=self.num_logprobs if variant.has_logprobs else 0, has_nuclei=variant.has_nuclei,
            )  # fmt: skip
            tensors = SampleTensors(
                self._state,
                mask=self.mask if variant.has_mask else None,
                logprobs=self.logprobs if variant.has_logprobs else None,
            )
            self._sample[variant] = self._ops.bind("sample", needs, tensors)
        return self._sample[variant]

    @property
    def skips_unused(self) -> bool:
        """See `Sample`."""
        return bool(getattr(self.sample(FULL), "skips_unused", False))

    @property
    def num_logprobs(self) -> int:
        return min(NUM_LOGPROBS, self._state.vocab_size)

    @property
    def logprobs(self) -> LogprobTensors:
        """Filled by variants with logprobs, by row of the step."""
        if self._logprobs is None:
            size = self._state.max_num_seqs, self.num_logprobs, self._state.device
            if self._state.device.type == "cpu":  # where nothing is copied
                self._logprobs = LogprobTensors.make(*size)
            else:
                self._packed = PackedResults(*size)
                self._logprobs = self._packed.logprobs
        return self._logprobs

    @property
    def packed(self) -> PackedResults | None:
        """Where tokens and logprobs of a step lie side by side; None: the device is the host."""
        return self._packed if self.logprobs is not None else None

    def given(self, tail: Tail, result: Tensor) -> Tensor:
        """Return what the host reads of `result` [n, ...], with logprobs of these rows where the tail has them. Contiguous."""
        if isinstance(tail, Sample) and tail.variant.has_logprobs and self.packed is not None:
            return self.packed.words(len(result))
        return result

    def num_result_bytes(self, key: BatchDescriptor) -> int:
        """Return the size of what a decode step of `key` gives."""
        tail, rows = key.tail, key.num_reqs
        if isinstance(tail, Verify):
            return rows * (2 + 1 + key.uniform_query_len) * 4
        if isinstance(tail, Sample) and tail.variant.has_logprobs and self.packed is not None:
            return self.packed.words(rows).nbytes
        return rows * 2 * 4

    @property
    def prompt_logprobs(self) -> Logprobs:
        """Prompt logprobs of at most `PROMPT_LOGPROB_ROWS` positions, with `num_logprobs` alternatives."""
        if self._prompt_logprobs is None:
            needs = LogprobsNeeds(
                vocab_size=self._state.vocab_size, max_rows=PROMPT_LOGPROB_ROWS, num_logprobs=self.num_logprobs
            )
            self._prompt_logprobs = self._ops.bind("logprobs", needs, LogprobsTensors(self._state.device))
        return self._prompt_logprobs

    @property
    def mask(self) -> tuple[Tensor, Tensor]:
        """Read by variants with masks, by slot: words [S + 1, ceil(V / 32)] int32, whether there is one [S + 1] bool."""
        if self._mask is None:
            rows, num_words, device = self._state.max_num_seqs + 1, -(-self._state.vocab_size // 32), self._state.device
            self._mask = (
                torch.zeros(rows, num_words, dtype=torch.int32, device=device),
                torch.zeros(rows, dtype=torch.bool, device=device),
            )
        return self._mask


def keep_own(slots: Tensor, context: Communicator) -> None:
    """From slots in blocks that the ranks of `context` share, token by token, to those in this rank's part of each.

    slots [T] int64, in place. A block's tokens go round the ranks, so that slot s of N ranks is slot s // N of rank s % N. Others'
    tokens go to the null block, which nobody reads: padding alone has -1, and layers of experts look for that.
    """
    is_own = slots % context.size == context.rank
    slots.copy_(torch.where(is_own, slots // context.size, slots.clamp(max=0)))
