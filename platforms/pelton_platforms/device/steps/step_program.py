"""The step program, which every step runs: its inputs and drafts, the model's forward pass, logits, and the tail that its key names.

    block tables, drafts -> prepare_inputs, backend.build -> forward -> logits -> sample | verify | pool

Captured or not, decode, mixed or prompt, the steps differ in their key alone, and in where their columns lie: those of a captured
step at fixed addresses, with sizes from the key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from pelton.graphs.recordable import home
from pelton.layers.decoder import Decoder
from pelton.sampling.tails import GREEDY, Logits, Pool, Sample, Tail, Verify, only_best

if TYPE_CHECKING:
    from pelton.attention.interface import AttentionBackend
    from pelton.attention.metadata import BatchDescriptor, ForwardBatch
    from pelton.model.interface import CausalLM, PooledRows, PoolingModel
    from pelton.ops.interface import Sample as SampleOp
    from pelton.worker.inputs import StepShape
    from pelton.worker.step_kernel import StepKernel
    from pelton_platforms.device.steps.batch_state import BatchState
    from pelton_platforms.device.steps.step_ops import StepOps


@dataclass(slots=True, kw_only=True)
class StepInputs:
    """One step's columns on the device. R = rows, r = rows that sample, n = rows of logits."""

    shape: StepShape
    slots: Tensor  # [R] int64
    num_scheduled: Tensor  # [R] int64, drafts included
    sample_slots: Tensor  # [r] int64
    logit_tokens: Tensor  # [n] int64, index of the token whose output is the logits; 1 + k a row for `Verify`
    num_draft: Tensor | None = None  # [r] int64, at most; then those that were found
    num_unsampled: Tensor | None = None  # [R] int64, tokens that count before the row samples; None: there are none
    appends: Sequence[tuple[Tensor, Tensor]] = ()  # for each KV group places in its block table, flat, and block ids
    prefix_lens: Tensor | None = None  # [groups] int32, tokens of common prefixes
    pooled: PooledRows | None = None
    token_types: Tensor | None = None  # [T] int64, see `ForwardBatch`
    result: Tensor | None = None  # where the tail writes; None: memory of its own
    take: Callable[[], None] | None = None  # fills the columns and appends; None: the columns are there
    give: Callable[[Tensor], None] | None = None  # takes what the tail leaves to the host; None: it is copied
    is_fixed: bool = False  # all of them lie at fixed addresses, as a captured step reads them
    has_adapters: bool = False
    reads_others: bool = True  # hidden states of tokens that are not in `logit_tokens` may be read
    is_cut: bool = False  # filled in: `hidden` has rows for `logit_tokens` alone
    batch: ForwardBatch | None = None  # filled in where it is not fixed: what the forward pass took
    hidden: Any = None  # the same of what it gave


def _suits_kernel(key: BatchDescriptor, inputs: StepInputs) -> bool:
    """Return whether each row has one token, and its logits are asked for."""
    rows = inputs.shape.num_padded_reqs
    return (
        isinstance(key.tail, Logits | Sample)
        and inputs.shape.num_padded_tokens == rows == len(inputs.logit_tokens)
        and inputs.num_draft is None
        and not inputs.has_adapters
    )


class StepProgram:
    """One worker's steps. Nothing in it asks the device anything."""

    def __init__(
        self, model: CausalLM | PoolingModel, state: BatchState, backends: Sequence[AttentionBackend], ops: StepOps
    ) -> None:
        self.model = model
        self.ops = ops
        self._state, self._backends = state, list(backends)
        can_cut = getattr(model, "can_forward_tokens", False)
        self._forward_tokens = cast("Any", model).forward_tokens if can_cut else None
        self._keeps_adapters: bool = getattr(model, "keeps_adapters", False)
        self.kernel: StepKernel | None = None  # computes decode steps; None: the model's layers do
        self.most_left_rows = 0  # of captured steps that end at the logits
        self._logits: Tensor | None = None  # [most_left_rows, V]: where all of those leave them
        self.keeps_hidden = False  # such a step ends before the logits, for who reads them may not need all
        self._hidden: Any = None  # [most_left_rows, ...], what the model's forward pass gave

    @property
    def has_left_logits(self) -> bool:
        """Return whether there is memory for the logits of captured steps: the first such step makes it."""
        return self._logits is not None or self._hidden is not None

    def run(self, key: BatchDescriptor, inputs: StepInputs, forward: Callable[[StepInputs], Any] | None = None) -> Any:
        """Return what the key's tail gives: hidden states without one, [n, V] logits, [r, 2] tokens and codes, [r, 4 + k] what
        `Verify` says, or a list of what the model has pooled. forward: in place of `self.forward`, by graphs."""
        tail = key.tail
        if isinstance(tail, Sample) and tail.is_apart:
            sample = self.ops.sample(tail.variant)
            reading = sample.reading(inputs.sample_slots) if hasattr(sample, "reading") else nullcontext()
            with reading:
                logits = self.left_logits(inputs.logit_tokens, key.num_reqs)
            return self.end(tail, logits, inputs)
        self._begin(inputs)
        if inputs.num_draft is not None and self.ops.drafts is not None:
            inputs.num_draft = self.ops.drafts.make(inputs.sample_slots, inputs.num_draft)
        if self.kernel is not None and forward is None and _suits_kernel(key, inputs):
            logits = self.kernel(self.batch(key, inputs))
            return self._end_logits(key, inputs, logits)
        hidden = self.forward(key, inputs) if forward is None else forward(inputs)
        if not inputs.is_fixed:
            inputs.hidden = hidden
        if tail is None:
            return hidden
        if isinstance(tail, Pool):
            assert inputs.pooled is not None
            return cast("PoolingModel", self.model).pool(hidden, inputs.pooled)
        if (
            self.keeps_hidden
            and inputs.is_fixed
            and isinstance(tail, Logits)
            and self._keep_hidden(hidden, key.num_reqs)
        ):
            return None
        num_rows = len(inputs.logit_tokens)
        if tail == Sample(GREEDY):
            shares = self.ops.shares
            with nullcontext() if shares is None or not shares.pay(num_rows) else shares.kept():
                logits = self._compute_logits(key, inputs, hidden, num_rows)
        elif (shared := self.ops.shared_rows(num_rows)) is not None:
            unit = self.ops.drafts.width if isinstance(tail, Verify) and self.ops.drafts is not None else 1
            compute = partial(self._compute_logits, key, inputs, hidden, shared.count(num_rows, unit))
            logits = shared.logits(num_rows, compute, unit)
        else:
            logits = self._compute_logits(key, inputs, hidden, num_rows)
        return self._end_logits(key, inputs, logits)

    def _compute_logits(self, key: BatchDescriptor, inputs: StepInputs, hidden: Any, num_rows: int) -> Tensor:
        """Return [num_rows, V], the rows that this rank gets; their memory may stay unwritten where `only_best` says so."""
        token = only_best.set(self._takes_best(key.tail, num_rows))
        try:
            return self._logits_of(key, inputs, hidden, num_rows)
        finally:
            only_best.reset(token)

    def _takes_best(self, tail: Tail | None, num_rows: int) -> bool:
        """Return whether the tail reads each row's best token alone, and the model hands on the head's logits as they are."""
        shares = self.ops.shares
        if shares is not None and (tail != Sample(GREEDY) or shares.op is None or not shares.pay(num_rows)):
            return False  # the best of this rank is not that of all
        if tail == Sample(GREEDY):
            op = self.ops.sample(GREEDY)
        elif tail == Verify(GREEDY) and self.ops.drafts is not None:
            op = self.ops.drafts.sample(GREEDY)
        else:
            return False
        compute = getattr(self.model, "compute_logits", None)
        return bool(getattr(op, "takes_best", False)) and getattr(compute, "__func__", None) is Decoder.compute_logits

    def _logits_of(self, key: BatchDescriptor, inputs: StepInputs, hidden: Any, num_rows: int) -> Tensor:
        """Where they are to stay, `_keep` has no copy to make on a device whose recorder can do that."""
        model = cast("CausalLM", self.model)
        if inputs.is_cut:
            return model.compute_logits(hidden, torch.arange(len(inputs.logit_tokens), device=self._state.device))
        if self._logits is None or not (inputs.is_fixed and isinstance(key.tail, Logits)):
            return model.compute_logits(hidden, inputs.logit_tokens)
        token = home.set(self._logits[:num_rows])
        try:
            return model.compute_logits(hidden, inputs.logit_tokens)
        finally:
            home.reset(token)

    def _end_logits(self, key: BatchDescriptor, inputs: StepInputs, logits: Tensor) -> Any:
        tail = key.tail
        assert tail is not None
        if isinstance(tail, Logits):
            return self._keep(logits) if inputs.is_fixed else logits
        return self.end(tail, logits, inputs)

    def batch(self, key: BatchDescriptor, inputs: StepInputs) -> ForwardBatch:
        """Prepare the inputs of the forward pass."""
        batch = self.ops.forward_batch(
            inputs.slots, inputs.num_scheduled, inputs.shape, self._backends, key if inputs.is_fixed else None,
            inputs.prefix_lens, inputs.has_adapters,
        )  # fmt: skip
        batch.token_types = inputs.token_types
        if not inputs.is_fixed:
            inputs.batch = batch
        return batch

    def forward(self, key: BatchDescriptor, inputs: StepInputs) -> Any:
        batch = self.batch(key, inputs)
        reads_others = inputs.reads_others or (inputs.has_adapters and not self._keeps_adapters)
        if reads_others or self._forward_tokens is None or 2 * len(inputs.logit_tokens) > batch.num_tokens:
            return self.model.forward(batch)
        inputs.is_cut = True
        return self._forward_tokens(batch, inputs.logit_tokens)

    def count(self, inputs: StepInputs) -> None:
        """Count the tokens of the step that nothing is sampled behind."""
        if inputs.num_unsampled is not None:
            self._state.num_computed_tokens.index_add_(0, inputs.slots, inputs.num_unsampled)

    def end(self, tail: Tail, logits: Tensor, inputs: StepInputs) -> Tensor:
        """From the logits, or this rank's share of greedy rows' or of the rows, to the tokens of the rows that sample, and the state
        that follows. logits may be overwritten."""
        result = self._sampled(tail, logits, inputs)
        if inputs.give is not None:
            inputs.give(self.ops.given(tail, result))
        return result

    def _sampled(self, tail: Tail, logits: Tensor, inputs: StepInputs) -> Tensor:
        self.count(inputs)
        rows, result, device = len(inputs.sample_slots), inputs.result, self._state.device
        if isinstance(tail, Verify):
            drafts, num_draft = self.ops.drafts, inputs.num_draft
            assert drafts is not None and num_draft is not None
            if result is None:
                result = torch.zeros(rows, 3 + drafts.width, dtype=torch.int32, device=device)
            shared = self.ops.shared_rows(rows * drafts.width)
            drafts.verify(tail.variant, logits, inputs.sample_slots, num_draft, result, shared)
            return result
        assert isinstance(tail, Sample)
        packed = self.ops.packed if tail.variant.has_logprobs else None
        if packed is not None:
            result = packed.result[:rows]
        elif result is None:
            result = torch.zeros(rows, 2, dtype=torch.int32, device=device)
        sample: SampleOp | None = self.ops.shares
        if sample is None or logits.shape[1] == self._state.vocab_size:
            sample = self.ops.sample(tail.variant)
        shared = None if tail.variant == GREEDY and not tail.is_apart else self.ops.shared_rows(rows)
        if shared is None:
            sample(logits, inputs.sample_slots, result)
        else:
            shared.sample(
                sample, logits, inputs.sample_slots, result, self.ops.logprobs if tail.variant.has_logprobs else None
            )
        return result

    def _begin(self, inputs: StepInputs) -> None:
        """Have the columns in place, and appended blocks in their tables."""
        if inputs.take is not None:
            inputs.take()
            return
        for table, (places, ids) in zip(self._state.block_tables, inputs.appends, strict=False):
            table.view(-1).scatter_(0, places, ids)

    def left_logits(self, rows: Tensor, num_padded: int) -> Tensor:
        """Return [n, V], of the last captured step that ended at its logits, or before them; or of this rank's rows, see `RowShares`.
        rows: 0 .. n - 1; num_padded: of that step."""
        if self._hidden is None:
            assert self._logits is not None, "a step has left its logits"
            shared = self.ops.shared_rows(num_padded)
            return self._logits[: len(rows) if shared is None else shared.count(num_padded)]
        hidden = tree_map_only(Tensor, lambda one: one[: len(rows)], self._hidden)
        return cast("CausalLM", self.model).compute_logits(hidden, rows)

    def _keep_hidden(self, hidden: Any, num_rows: int) -> bool:
        """False where it is not of one row for each token."""
        parts = [one for one in tree_leaves(hidden) if isinstance(one, Tensor)]
        if not parts or any(len(one) != num_rows for one in parts):
            return False
        if self._hidden is None:
            self._hidden = tree_map_only(Tensor, lambda one: one.new_empty(self.most_left_rows, *one.shape[1:]), hidden)
        kept = [one for one in tree_leaves(self._hidden) if isinstance(one, Tensor)]
        for place, one in zip(kept, parts, strict=True):
            place[:num_rows].copy_(one)
        return True

    def _keep(self, logits: Tensor) -> Tensor:
        """Where the tail finds them: a graph's own memory is free to the next one, which the tail is."""
        if self._logits is None:
            self._logits = logits.new_empty(self.most_left_rows, logits.shape[1])
        kept = self._logits[: len(logits)]
        return logits if logits.data_ptr() == kept.data_ptr() else kept.copy_(logits)
