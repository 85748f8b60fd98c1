"""The columns of captured steps: int64 at fixed addresses, sent in one copy a step, or taken from pinned memory by a decode step itself.

A decode step's, of n rows with padding: [2 + 2 groups, n] slots, numbers of tokens (1, with drafts up to 1 + k, 0 for padding), and for
each KV group at most one block a row to append, as its place in the block table and its id; with drafts [n] their numbers and
[n (1 + k)] the tokens whose outputs become logits; with a common prefix [groups] its tokens. Any other step's: [2, n].
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from pelton.platform.compiling import compile_only
from pelton.sampling.tails import Sample, Verify
from pelton.worker.inputs import StepShape
from pelton_platforms.device.steps.step_program import StepInputs

if TYPE_CHECKING:
    import numpy.typing as npt

    from pelton.attention.metadata import BatchDescriptor
    from pelton.ops.interface import PrepareInputs
    from pelton.worker.inputs import InputBuffers
    from pelton_platforms.device.graphs.pinned_columns import PinnedColumns
    from pelton_platforms.device.steps.batch_state import BatchState
    from pelton_platforms.device.steps.staging import StagingRing
    from pelton_platforms.device.steps.step_plan import Ints

Appends = Sequence[tuple[int, int, int, list[int]]]


class GraphColumns:
    """Written by `stage_decode` and `stage_rows`, read by what `inputs` gives, which a capture holds on to."""

    def __init__(
        self,
        state: BatchState,
        buffers: InputBuffers,
        staging: StagingRing,
        prepare_inputs: PrepareInputs,
        *,
        most_rows: int,
        most_mixed_rows: int,
        query_len: int,
    ) -> None:
        """prepare_inputs: the op, whose `take` and `give` are used where it has them. most_rows: of a decode step. most_mixed_rows: of
        another. query_len: most tokens of a decode row, 1 + k."""
        self._state, self._buffers, self._staging = state, buffers, staging
        self._widths = [table.shape[1] for table in state.block_tables]
        self._num_columns = 2 + 2 * len(self._widths)
        most = max((self._num_columns + 1 + query_len) * most_rows + len(self._widths), 2 * most_mixed_rows)
        device = state.device
        self._columns = torch.zeros(most, dtype=torch.int64, device=device)
        self._pinned: PinnedColumns | None = None
        if hasattr(prepare_inputs, "take"):
            from pelton_platforms.device.graphs.pinned_columns import PinnedColumns  # others start without it

            self._pinned = PinnedColumns(prepare_inputs, staging.num_parts, most, device)
        self._sampled = torch.zeros(most_rows, 2, dtype=torch.int32, device=device)
        num_drafted = most_rows if query_len > 1 else 0
        self._verified = torch.zeros(num_drafted, 3 + query_len, dtype=torch.int32, device=device)

    def stage_decode(
        self,
        key: BatchDescriptor,
        slots: Ints,
        appends: Appends,
        num_draft: Ints | None,
        prefix_lens: Sequence[int],
        place: int = 0,
    ) -> bool:
        """False: more blocks are appended than there is room for, and nothing was sent. place: address of pinned memory to which the
        step gives its result, where `gives` says so; 0: none."""
        columns = self._decode_columns(key.num_reqs, slots, appends)
        if columns is None:
            return False
        values = columns.reshape(-1)
        if key.uniform_query_len > 1:
            values = np.concatenate([values, _with_drafts(columns, key, num_draft)])
        if key.has_common_prefix:
            values = np.concatenate([values, np.array(prefix_lens, dtype=np.int64)])
        if self._pinned is None or compile_only.get():
            self._staging.stage_into(self._columns[: values.size], values)
        else:
            self._pinned.write(values, place)
        return True

    def gives(self, key: BatchDescriptor) -> bool:
        """Return whether a decode step of `key` writes its result to pinned memory."""
        is_apart = isinstance(key.tail, Sample) and key.tail.is_apart
        return self._pinned is not None and not is_apart and isinstance(key.tail, Sample | Verify)

    def start_again(self) -> None:
        """A decode step has failed."""
        if self._pinned is not None:
            self._pinned.start_again()

    def stage_rows(self, key: BatchDescriptor, slots: Ints, num_scheduled: Ints) -> None:
        columns = np.zeros((2, key.num_reqs), dtype=np.int64)
        columns[0] = self._state.padding_slot
        columns[0, : len(slots)] = slots
        columns[1, : len(slots)] = num_scheduled
        self._staging.stage_into(self._columns[: columns.size], columns.reshape(-1))

    def inputs(self, key: BatchDescriptor) -> StepInputs:
        """Views of the columns of a step of `key`, whose sizes are the key's."""
        return self._decode_inputs(key) if key.uniform_query_len else self._row_inputs(key)

    def _decode_inputs(self, key: BatchDescriptor) -> StepInputs:
        size, query_len = key.num_reqs, key.uniform_query_len
        columns = self._columns[: self._num_columns * size].view(self._num_columns, size)
        inputs = StepInputs(
            shape=StepShape(
                num_reqs=size, num_tokens=key.num_tokens, num_decode_rows=size if query_len == 1 else 0,
                max_query_len=query_len, max_seq_len=self._state.max_model_len,
                num_padded_reqs=size, num_padded_tokens=key.num_tokens,
            ),
            slots=columns[0], num_scheduled=columns[1], sample_slots=columns[0],
            logit_tokens=self._buffers.token_index[:size], is_fixed=True, has_adapters=key.has_lora,
            appends=[
                (columns[place], _low_halves(columns[place + 1])) for place in range(2, self._num_columns, 2)
            ],
        )  # fmt: skip
        end = columns.numel()
        if query_len == 1:
            inputs.result = self._sampled[:size]
        else:
            inputs.result = self._verified[:size]
            inputs.num_draft = self._columns[end : end + size]
            inputs.logit_tokens = self._columns[end + size : end + size + key.num_tokens]
            end += size + key.num_tokens
        if key.has_common_prefix:
            inputs.prefix_lens = _low_halves(self._columns[end : end + len(self._widths)])
            end += len(self._widths)
        if self._pinned is not None:
            inputs.take = partial(self._pinned.take, self._columns[:end], size)
            inputs.give = self._pinned.give if self.gives(key) else None
        return inputs

    def _row_inputs(self, key: BatchDescriptor) -> StepInputs:
        rows = key.num_reqs
        columns = self._columns[: 2 * rows].view(2, rows)
        return StepInputs(
            shape=StepShape(
                num_reqs=rows, num_tokens=key.num_tokens, num_decode_rows=0, max_query_len=key.num_tokens,
                max_seq_len=key.num_tokens if key.is_prompt else self._state.max_model_len,
                num_padded_reqs=rows, num_padded_tokens=key.num_tokens,
            ),
            slots=columns[0], num_scheduled=columns[1], sample_slots=columns[0][:0],
            logit_tokens=self._buffers.token_index[:0], is_fixed=True, has_adapters=key.has_lora,
        )  # fmt: skip

    def _decode_columns(self, size: int, slots: Ints, appends: Appends) -> npt.NDArray[np.int64] | None:
        """[2 + 2 groups, size]; None: there are more blocks than places."""
        padding = self._state.padding_slot
        columns = np.zeros((self._num_columns, size), dtype=np.int64)
        columns[0] = padding
        columns[0, : len(slots)] = slots
        columns[1, : len(slots)] = 1
        counts = [0] * len(self._widths)
        for group, width in enumerate(self._widths):
            columns[2 + 2 * group] = padding * width
        for group, slot, start, block_ids in appends:
            first, width = counts[group], self._widths[group]
            last = counts[group] = first + len(block_ids)
            if last > size:
                return None
            columns[2 + 2 * group, first:last] = np.arange(slot * width + start, slot * width + start + len(block_ids))
            columns[3 + 2 * group, first:last] = block_ids
        return columns


def _low_halves(column: Tensor) -> Tensor:
    """The numbers as int32, in the same memory: little-endian."""
    return column.view(torch.int32)[::2]


def _with_drafts(columns: npt.NDArray[np.int64], key: BatchDescriptor, num_draft: Ints | None) -> npt.NDArray[np.int64]:
    """Adds drafts to the counts of `columns`; returns these, and which token's output each row of logits is of: 1 + k a row,
    the last one again where a row has fewer drafts."""
    drafted = np.zeros(key.num_reqs, dtype=np.int64)
    if num_draft is not None:
        drafted[: len(num_draft)] = num_draft
        columns[1] += drafted
    first = columns[1].cumsum() - columns[1]
    tokens = first[:, None] + np.minimum(np.arange(key.uniform_query_len), drafted[:, None])
    return np.concatenate([drafted, tokens.clip(max=key.num_tokens - 1).reshape(-1)])
