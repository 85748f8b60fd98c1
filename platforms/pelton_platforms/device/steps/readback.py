"""A step's result on its way to the host: copies that are queued behind the step, and read by the thread that waits for it.

What the result needs of the batch's host columns is taken when the step is launched: by the time it is read, later steps
may have given its slots to others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pelton.errors import EngineError
from pelton.messages.request import TensorData
from pelton.messages.step import ModelOutput, SchedulerOutput
from pelton.sampling.error_codes import ERROR_MESSAGES, NOT_FINITE
from pelton.sampling.logprobs import HostLogprobs
from pelton.sampling.tails import Logits, Pool, Sample, Tail, Verify
from pelton.worker.batch_state import NO_LOGPROBS
from pelton.worker.pending import PendingOutput
from pelton_platforms.device.steps.batch_state import BatchState
from pelton_platforms.device.steps.packed_logprobs import PackedResults
from pelton_platforms.device.steps.step_plan import Ints

if TYPE_CHECKING:
    from pelton.attention.metadata import BatchDescriptor
    from pelton_platforms.device.steps.masks_ahead import Awaited
    from pelton_platforms.device.steps.step_ops import StepOps
    from pelton_platforms.device.steps.step_sampler import PromptLogprobs

_LEAST_BYTES = 4096
_ALIGNMENT = 16


class HostPool:
    """Pinned memory for results. It is used again and never freed while steps run: torch marks a pinned block that is freed by
    an event on the streams that wrote it, and such an event in the middle of a capture spoils it and the block. The
    worker's thread takes a buffer; the thread that reads the result returns it."""

    def __init__(self, *, is_pinned: bool = True) -> None:
        self._is_pinned = is_pinned
        self._free: dict[int, list[Tensor]] = {}
        self._all: list[Tensor] = []

    def take(self, num_bytes: int) -> Tensor:
        """At least `num_bytes` of them."""
        size = 1 << max(num_bytes - 1, _LEAST_BYTES - 1).bit_length()
        free = self._free.setdefault(size, [])
        if free:
            return free.pop()
        self._all.append(torch.empty(size, dtype=torch.uint8, pin_memory=self._is_pinned))
        return self._all[-1]

    def give(self, memory: Tensor) -> None:
        self._free[memory.numel()].append(memory)


class HostCopies:
    """Tensors of `device` copied to pinned memory behind the current stream's work; on a CPU the tensors themselves.
    Without a tensor too, they are there when that work is done."""

    def __init__(
        self, tensors: Sequence[Tensor], pool: HostPool, device: torch.device, room: Tensor | None = None
    ) -> None:
        """room: memory of `pool` to which that work brings the only tensor itself."""
        self._event: torch.Event | None = None
        self._arrays: list[np.ndarray] | None = None
        self._pool, self._memory = pool, room
        self._copies = list(tensors)
        if room is not None:
            (tensor,) = tensors
            self._copies = [room[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)]
        if device.type == "cpu":
            self._arrays = [copy.numpy() for copy in self._copies]
            if room is not None:
                self._arrays = [array.copy() for array in self._arrays]
                pool.give(room)
            return
        if tensors and room is None:
            self._memory, self._copies = self._queue(tensors)
        self._event = torch.Event(device)
        self._event.record()

    def _queue(self, tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The memory that they are copied to, and each one's part of it."""
        ends = list(accumulate(-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors))
        memory = self._pool.take(ends[-1])
        copies = [
            memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for tensor, start in zip(tensors, [0, *ends], strict=False)
        ]
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        return memory, copies

    def ready(self) -> bool:
        return self._event is None or self._event.query()

    def arrays(self) -> list[np.ndarray]:
        """Waits."""
        if self._arrays is None:
            assert self._event is not None
            self._event.synchronize()
            self._arrays = [copy.numpy().copy() for copy in self._copies]
            if self._memory is not None:
                self._pool.give(self._memory)
        return self._arrays


@dataclass(slots=True, kw_only=True)
class StepOutput(PendingOutput):
    """One step's result. r = rows that sample, or pool."""

    output: ModelOutput  # filled in by `result`
    num_rows: int
    rows: Ints  # [r]
    # What the tail gave: tokens and codes [r, 2], then logprobs, or both packed; what `Verify` left; a tensor of each row that was pooled;
    # after `Logits` tokens [r, 1 + K], accepted [r], codes [r], then logprobs. At the end what `prompt_logprobs` has
    # on the device.
    tail: Tail | None
    copies: HostCopies
    prompt_logprobs: PromptLogprobs | None = None
    packed: PackedResults | None = None  # tokens and logprobs came as one
    errors: dict[int, str] = field(default_factory=dict)  # by row: what was wrong with the request itself
    has_logprobs: bool = False
    num_logprobs: Ints | None = None  # [r]
    first_logprob: Ints | None = None  # [r], into the rows of logprobs; row by row after `Sample`
    awaited: Awaited | None = None

    def ready(self) -> bool:
        return self.copies.ready()

    def result(self) -> ModelOutput:
        output = self.output
        arrays = self.copies.arrays()
        if self.awaited is not None and self.awaited.error:
            raise EngineError(self.awaited.error)
        output.row_errors = list(self.errors.items())
        if self.prompt_logprobs is not None:
            arrays = self._take_prompts(self.prompt_logprobs, arrays)
        if isinstance(self.tail, Sample):
            self._take_sampled(*arrays)
            return output
        output.token_ids = [[] for _ in range(self.num_rows)]
        if isinstance(self.tail, Verify):
            self._take_verified(*arrays)
        elif isinstance(self.tail, Pool):
            self._take_pooled(arrays)
        elif self.tail is not None:
            self._take_all(arrays)
        return output

    def _take_prompts(self, prompts: PromptLogprobs, arrays: list[np.ndarray]) -> list[np.ndarray]:
        """Return the arrays without those of the prompts, which come last."""
        parts = prompts.parts
        if prompts.on_host is not None:
            found = [host.packed(slice(None), part[3]) for host, part in zip(prompts.on_host, parts, strict=True)]
        elif prompts.tensors is not None:
            host, arrays = HostLogprobs(*arrays[-3:]), arrays[:-3]
            found = [host.packed(slice(start, stop), wanted) for _, start, stop, wanted in parts]
        else:
            found = []
        self.output.prompt_logprobs = dict(zip([part[0] for part in parts], found, strict=True))
        return arrays

    def _take_sampled(self, columns: np.ndarray, *parts: np.ndarray) -> None:
        """Take one token for each row that samples."""
        logprobs = HostLogprobs(*parts) if parts else None
        if self.packed is not None:
            columns, logprobs = self.packed.on_host(columns, len(self.rows))
        output, tokens = self.output, columns[:, 0].tolist()
        rows, good = self.rows, np.ones(len(tokens), dtype=bool)
        if len(tokens) == self.num_rows and not self.errors and not columns[:, 1].any():
            output.token_ids = [[token] for token in tokens]
        else:
            output.token_ids = [[] for _ in range(self.num_rows)]
            for index, row in enumerate(rows.tolist()):
                good[index] = self._is_good(row, int(columns[index, 1]))
                if good[index]:
                    output.token_ids[row] = [tokens[index]]
        if logprobs is not None:
            assert self.num_logprobs is not None
            wanting = np.flatnonzero(good & (self.num_logprobs != NO_LOGPROBS))
            found = logprobs.by_position(wanting, self.num_logprobs[wanting])
            output.logprobs = dict(zip(rows[wanting].tolist(), found, strict=True))

    def _take_verified(self, columns: np.ndarray) -> None:
        """Take, for each row that samples, its accepted drafts and one more token."""
        output, rows = self.output, self.rows.tolist()
        if len(rows) == self.num_rows and not self.errors and not columns[:, 1].any():
            found = columns.tolist()
            output.num_draft = [row[2] for row in found]
            output.token_ids = [row[3 : 4 + row[0]] for row in found]
            return
        output.num_draft = [0] * self.num_rows
        for row, (accepted, code, drafted, *tokens) in zip(rows, columns.tolist(), strict=True):
            output.num_draft[row] = drafted
            if self._is_good(row, code):
                output.token_ids[row] = tokens[: accepted + 1]

    def _take_pooled(self, arrays: list[np.ndarray]) -> None:
        """Take a tensor of each row that was pooled; those of one shape came as one."""
        if len(arrays) == 1:
            numbers = arrays[0].astype("<f4", copy=False)
            parts, are_finite = list(numbers), np.isfinite(numbers).reshape(len(numbers), -1).all(axis=1).tolist()
        else:
            parts = [values.astype("<f4", copy=False) for values in arrays]
            are_finite = [bool(np.isfinite(values).all()) for values in parts]
        for row, values, is_finite in zip(self.rows.tolist(), parts, are_finite, strict=True):
            if self._is_good(row, 0 if is_finite else NOT_FINITE):
                self.output.pooled[row] = TensorData(values.tobytes(), "float32", values.shape)

    def _take_all(self, arrays: list[np.ndarray]) -> None:
        output = self.output
        token_ids, num_accepted, codes = (array.tolist() for array in arrays[:3])
        logprobs = HostLogprobs(*arrays[3:6]) if self.has_logprobs else None
        for index, row in enumerate(self.rows.tolist()):
            count = num_accepted[index] + 1
            if self._is_good(row, codes[index]):
                output.token_ids[row] = token_ids[index][:count]
                if logprobs is not None:
                    self._take_logprobs(logprobs, index, row, count)

    def _take_logprobs(self, logprobs: HostLogprobs, index: int, row: int, count: int) -> None:
        assert self.num_logprobs is not None and self.first_logprob is not None
        wanted, first = int(self.num_logprobs[index]), int(self.first_logprob[index])
        if wanted != NO_LOGPROBS:
            self.output.logprobs[row] = logprobs.packed(slice(first, first + count), wanted)

    def _is_good(self, row: int, code: int) -> bool:
        if code and row not in self.errors:
            self.output.row_errors.append((row, ERROR_MESSAGES[code]))
        return not code and row not in self.errors


class Readback:
    """Queues the copies of steps' results, or has room where steps write them."""

    def __init__(self, state: BatchState, ops: StepOps) -> None:
        self._state, self._ops = state, ops
        self._pool = HostPool(is_pinned=state.device.type != "cpu")

    def room(self, key: BatchDescriptor) -> Tensor | None:
        """Pinned memory for the result of a captured decode step of `key`, which writes it there itself."""
        return self._pool.take(self._ops.num_result_bytes(key))

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
        """Queue the copy of what the tail gave for `rows` [r] of these slots; after `Logits` not these are given, but what
        `StepSampler` made of them. room: where the step writes it; nothing is copied."""
        host, tensors, packed = self._state.host, list[Tensor](), None
        has_logprobs = isinstance(tail, Sample) and tail.variant.has_logprobs
        if isinstance(tail, Pool):
            is_there = [tensor is not None for tensor in given]
            rows, tensors = rows[is_there], [tensor.float() for tensor in given if tensor is not None]
            if len({tensor.shape for tensor in tensors}) == 1:
                tensors = [torch.stack(tensors)]  # one copy in place of one for each row
        elif has_logprobs and isinstance(tail, Sample):
            packed = self._ops.packed
            tensors = (
                [given, *self._ops.logprobs.part(0, len(rows)).tensors()]
                if packed is None
                else [packed.words(len(rows))]
            )
        elif isinstance(tail, Sample | Verify):
            tensors.append(given)
        elif tail is not None:
            tensors, has_logprobs = given.tensors(), given.logprobs is not None
        if prompt_logprobs is not None and prompt_logprobs.tensors is not None:
            tensors += prompt_logprobs.tensors.tensors()
        errors = host.errors
        return StepOutput(
            output=ModelOutput(step_id=output.step_id),
            num_rows=len(output.slots),
            rows=rows,
            tail=tail,
            copies=HostCopies(tensors, self._pool, self._state.device, room),
            prompt_logprobs=prompt_logprobs,
            errors={row: errors[slot] for row, slot in enumerate(output.slots) if slot in errors} if errors else {},
            packed=packed,
            has_logprobs=has_logprobs,
            num_logprobs=host.num_logprobs[slots] if has_logprobs else None,
            first_logprob=given.first_logprob if isinstance(tail, Logits) else None,
        )
