"""The batch as it lives on the device: a row of every tensor for each running request, by slot.

The host sends what it decided, in columns; token values and the true count of computed tokens stay here, so that the
next step can be launched before this one's result was read. What the host must know to choose code paths, and knows
without asking (parameters, counts of a prompt), it keeps in arrays beside the tensors.

S = max_num_seqs. Row S belongs to no request: padding rows of a step point at it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pelton.messages.step import NewRequest
from pelton.sampling.columns import (
    FLOAT_COLUMNS,
    INTEGER_COLUMNS,
    RANDOM,
    SAMPLING_COLUMNS,
    host_columns,
)
from pelton.worker.batch_state import NO_LOGPROBS, BatchTensors
from pelton_platforms.device.steps.side_tables import SideTables
from pelton_platforms.device.steps.staging import StagingRing

if TYPE_CHECKING:
    from pelton.messages.request import PoolingParams
    from pelton_platforms.device.steps.logits_processors import StepProcessors
    from pelton_platforms.device.steps.step_adapters import StepAdapters


class BatchState(BatchTensors):
    """Written by `add` and `append_blocks` before a step, and by `advance` after it sampled."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        vocab_size: int,
        block_sizes: Sequence[int],
        num_side_slots: int,
        device: torch.device,
        max_draft_tokens: int = 0,
        num_lookahead_tokens: int = 256,
        num_parts: int = 3,
    ) -> None:
        """block_sizes: tokens a block of each KV group. num_lookahead_tokens: room in block tables beyond max_model_len."""
        rows = max_num_seqs + 1
        self.device = device
        self.max_num_seqs = max_num_seqs
        self.vocab_size = vocab_size
        self.padding_slot = max_num_seqs
        # The last column takes what must not be kept: tokens past max_model_len, rows that do not sample.
        self.token_ids = torch.zeros(rows, max_model_len + 1, dtype=torch.int32, device=device)
        width = -(-rows // 4) * 4  # every column starts at a multiple of 16 bytes
        self._integers = torch.zeros(6 + len(INTEGER_COLUMNS), width, dtype=torch.int64, device=device)
        (
            self.num_computed_tokens, self.num_prompt_tokens, self.seeds, self.side_slots, self.num_logprobs,
            self.adapter_slots, *integers,
        ) = self._integers[:, :rows]  # fmt: skip
        self.side_slots.fill_(-1)
        self.adapter_slots.fill_(-1)
        self.num_logprobs.fill_(NO_LOGPROBS)
        self._floats = torch.zeros(len(FLOAT_COLUMNS), width, device=device)
        tensors = dict(zip((*INTEGER_COLUMNS, *FLOAT_COLUMNS), (*integers, *self._floats[:, :rows]), strict=True))
        for column, tensor in tensors.items():
            tensor.fill_(column.neutral_value(vocab_size))
        self.sampling = {column.name: tensors[column] for column in SAMPLING_COLUMNS}
        self.block_sizes = tuple(block_sizes)
        self.block_tables = [
            torch.zeros(rows, -(-(max_model_len + num_lookahead_tokens) // size), dtype=torch.int32, device=device)
            for size in block_sizes
        ]
        self.draft_token_ids = torch.zeros(rows, max_draft_tokens, dtype=torch.int64, device=device)
        self.adapters: StepAdapters | None = None  # where adapters lie; None: no request has one
        self.side: SideTables = SideTables(num_side_slots, vocab_size, device, num_parts)
        self.host = HostColumns(rows, vocab_size)
        self._staging = StagingRing(num_parts, 1024, device)
        self._rows = torch.arange(rows, device=device)

    def advance(
        self, slots: Tensor, num_scheduled: Tensor, sample_slots: Tensor, num_rejected: Tensor, next_token_ids: Tensor
    ) -> None:
        """After a step: count what was computed, put each sampling row's token after its known ones.

        slots, num_scheduled [R]; sample_slots, num_rejected (drafts), next_token_ids [r], of the rows that sampled.
        """
        self.num_computed_tokens.index_add_(0, slots, num_scheduled)
        if sample_slots.numel():
            self.num_computed_tokens.index_add_(0, sample_slots, num_rejected, alpha=-1)
            place = self.num_computed_tokens[sample_slots].clamp(max=self.max_model_len)
            self.token_ids[sample_slots, place] = next_token_ids.to(torch.int32)

    def lend(self, rows: BatchState, slots: Tensor, width: int) -> None:
        """Let row `width` i + j of `rows` sample like the request of slots[i], at the place j tokens behind its next one. Without
        its tables."""
        count = len(slots) * width
        owners = slots.unsqueeze(-1).expand(-1, width).reshape(-1)
        rows._integers[:, :count] = self._integers.index_select(1, owners)
        rows._floats[:, :count] = self._floats.index_select(1, owners)
        rows.num_computed_tokens[:count].view(-1, width).add_(rows._rows[:width])
        rows.side_slots[:count].fill_(-1)

    def add(self, new: list[NewRequest]) -> None:
        """One scatter for the columns and one for each table, whatever the number of requests; long rows are copied one by one.
        A slot that was freed needed nothing: its new owner overwrites it."""
        slots = [request.slot for request in new]
        token_ids = [_token_ids(request) for request in new]
        flat = np.concatenate(token_ids)
        are_known = not len(flat) or (flat.min() >= 0 and flat.max() < self.vocab_size)
        for request in new:
            self.host.add(request, self._adapter_slot(request))
        if not are_known:
            for request, ids in zip(new, token_ids, strict=True):
                self.host.check(request, ids)
            token_ids = [ids.clip(0, self.vocab_size - 1) for ids in token_ids]
        with_side = [request for request in new if request.side_slot >= 0]
        if with_side:
            self.side.add(*with_side)
        host = self.host
        # In the order of `_integers` and `_floats`.
        integers = [
            [request.num_computed_tokens for request in new],
            [request.num_prompt_tokens for request in new],
            [request.seed for request in new],
            [request.side_slot for request in new],
            host.num_logprobs[slots].tolist(),
            host.adapter_slots[slots].tolist(),
            *[host.sampling[column.name][slots].tolist() for column in INTEGER_COLUMNS],
        ]
        floats = np.concatenate([host.sampling[column.name][slots] for column in FLOAT_COLUMNS]).astype(np.float64)
        cells = [_Cells(self.token_ids, slots, token_ids)]
        for group, table in enumerate(self.block_tables):
            block_ids = [request.block_ids[group] for request in new]
            cells.append(_Cells(table, slots, [np.fromiter(ids, np.int64, len(ids)) for ids in block_ids]))
        rows, own_integers, own_floats, *staged = self._staging.stage(
            [
                slots, list(chain.from_iterable(integers)), floats.view(np.int64),
                *chain.from_iterable(own.columns for own in cells),
            ]
        )  # fmt: skip
        self._integers.index_copy_(1, rows, own_integers.view(-1, len(new)))
        self._floats.index_copy_(1, rows, own_floats.view(torch.float64).float().view(-1, len(new)))
        columns = iter(staged)
        for own in cells:
            own.write(columns)

    def _adapter_slot(self, request: NewRequest) -> int:
        return -1 if self.adapters is None or request.adapter is None else self.adapters.slot_of(request.adapter)

    def append_blocks(self, appends: Sequence[tuple[int, int, int, list[int]]]) -> None:
        """One scatter a group."""
        by_group: list[tuple[list[int], list[int]]] = [([], []) for _ in self.block_tables]
        for group, slot, start, block_ids in appends:
            places, ids = by_group[group]
            first = slot * self.block_tables[group].shape[1] + start
            places.extend(range(first, first + len(block_ids)))
            ids.extend(block_ids)
        staged = iter(self._staging.stage([column for pair in by_group for column in pair]))
        for table, at, values in zip(self.block_tables, staged, staged, strict=True):
            table.view(-1)[at] = values.to(torch.int32)


def _token_ids(request: NewRequest) -> npt.NDArray[np.int64]:
    """Without a look at each number where they come packed: those of 120,000 tokens take milliseconds."""
    if request.packed_token_ids:
        return np.frombuffer(request.packed_token_ids, "<i8")
    return np.fromiter(request.token_ids, np.int64, len(request.token_ids))


_LONG = 2048
"""Values of a row that are copied by themselves: for fewer a launch costs more than their places do."""


class _Cells:
    """The first values of a table's new rows: its columns to be staged, and then written."""

    def __init__(self, table: Tensor, slots: Sequence[int], values: Sequence[npt.NDArray[np.int64]]) -> None:
        self._table = table
        self._long = [(slot, len(row)) for slot, row in zip(slots, values, strict=True) if len(row) >= _LONG]
        short = [(slot, row) for slot, row in zip(slots, values, strict=True) if len(row) < _LONG]
        counts = np.array([len(row) for _, row in short], dtype=np.int64)
        places = _places(np.array([slot for slot, _ in short], dtype=np.int64), counts, table.shape[1])
        flat = np.concatenate([row for _, row in short]) if short else places
        self.columns = [places, flat, *(row for row in values if len(row) >= _LONG)]

    def write(self, staged: Iterator[Tensor]) -> None:
        places, flat = next(staged), next(staged)
        if len(places):
            self._table.view(-1)[places] = flat.to(torch.int32)
        for slot, count in self._long:
            self._table[slot, :count] = next(staged)


def _places(slots: npt.NDArray[np.int64], counts: npt.NDArray[np.int64], width: int) -> npt.NDArray[np.int64]:
    """Flat indices of the first `counts` columns of the rows `slots`."""
    starts = slots * width - (counts.cumsum() - counts)
    return np.arange(int(counts.sum()), dtype=np.int64) + np.repeat(starts, counts)


class HostColumns:
    """The host's copy of facts about each slot, to choose code paths without asking the device."""

    def __init__(self, rows: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.sampling = host_columns(rows, vocab_size)
        self.temperature = self.sampling[RANDOM]  # 0 is greedy
        self.side_slots = np.full(rows, -1, dtype=np.int64)
        self.num_logprobs = np.full(rows, NO_LOGPROBS, dtype=np.int64)
        self.num_prompt_logprobs = np.full(rows, NO_LOGPROBS, dtype=np.int64)
        self.adapter_slots = np.full(rows, -1, dtype=np.int64)
        self.pooling: dict[int, PoolingParams] = {}  # by slot, of requests that pool
        self.processors: StepProcessors | None = None  # logits processors; None: no plugin offers one
        # Its tokens need more than temperature and filters: tables, logprobs, logits processors.
        self.has_extras = np.zeros(rows, dtype=bool)
        self.num_prompt_tokens = np.zeros(rows, dtype=np.int64)
        self.num_computed_tokens = np.zeros(rows, dtype=np.int64)  # upper bound; exact until something is sampled
        self.errors: dict[int, str] = {}  # by slot: what is wrong with the request itself

    def add(self, request: NewRequest, adapter_slot: int = -1) -> None:
        slot, params = request.slot, request.sampling_params
        self.adapter_slots[slot] = adapter_slot
        if request.pooling_params is not None:
            self.pooling[slot] = request.pooling_params  # nothing is sampled
        else:
            self.pooling.pop(slot, None)
            for column in SAMPLING_COLUMNS:
                self.sampling[column.name][slot] = column.read(params, self.vocab_size)
        self.side_slots[slot] = request.side_slot
        self.num_logprobs[slot] = NO_LOGPROBS if params.logprobs is None else params.logprobs
        self.num_prompt_logprobs[slot] = NO_LOGPROBS if params.prompt_logprobs is None else params.prompt_logprobs
        self.has_extras[slot] = request.side_slot >= 0 or params.logprobs is not None
        self.num_prompt_tokens[slot] = request.num_prompt_tokens
        self.num_computed_tokens[slot] = request.num_computed_tokens
        self.errors.pop(slot, None)
        if self.processors is not None and self.processors.add(request, self.errors):
            self.has_extras[slot] = True

    def check(self, request: NewRequest, token_ids: npt.NDArray[np.int64]) -> None:
        """Note a token id that is not in the vocabulary."""
        wrong = [token_id for token_id in (int(token_ids.min()), int(token_ids.max())) if not self._exists(token_id)]
        if wrong:
            self.errors[request.slot] = f"Token id {wrong[0]} is not in the vocabulary of {self.vocab_size}."

    def _exists(self, token_id: int) -> bool:
        return 0 <= token_id < self.vocab_size
