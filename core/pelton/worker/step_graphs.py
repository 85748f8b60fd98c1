"""Captured steps of one runner: decode steps and short prompts whole, others in pieces around attention.

A decode step sends one block of columns, launches one graph and reads one result: for each of its n rows the slot, the
number of tokens (1, with drafts up to 1 + k, or 0 for a padding row) and, for each KV group, at most one block to append.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pelton.attention.interface import AttentionBackend
from pelton.attention.metadata import BatchDescriptor, ForwardBatch
from pelton.config.compilation import CUDAGraphMode
from pelton.graphs.captures import FullGraphs, PieceGraphs, run_apart
from pelton.graphs.dispatcher import MAX_MIXED_TOKENS, GraphDispatcher
from pelton.graphs.recorder import Graph, GraphRecorder
from pelton.model.interface import CausalLM
from pelton.utils.staging import StagingRing
from pelton.worker.batch_state import BatchState
from pelton.worker.inputs import InputBuffers, StepShape, padding_shape
from pelton.worker.step_ops import GREEDY, StepOps

if TYPE_CHECKING:
    import numpy.typing as npt

LOGITS = ""
"""Sampling variant of a decode graph that ends at the logits."""
_TAIL = "tail of "
"""Before the variant of a graph that begins there."""
_PATIENCE = 8
"""Steps of a size that take a larger one's graph before they get their own."""
_PROMPT_PATIENCE = 1
"""Of a prompt's size, in pieces. Few others wait for such a capture: the step has one row."""


class StepGraphs:
    """Decides with the dispatcher, captures with the platform's recorder, runs with the model."""

    def __init__(
        self,
        dispatcher: GraphDispatcher,
        recorder: GraphRecorder,
        model: CausalLM,
        state: BatchState,
        buffers: InputBuffers,
        backends: Sequence[AttentionBackend],
        ops: StepOps,
        staging: StagingRing,
    ) -> None:
        self.dispatcher = dispatcher
        self.full = FullGraphs(recorder)
        self.pieces = PieceGraphs(recorder)
        self._recorder = recorder
        self._room: Graph | None = None
        self._model, self._state, self._buffers = model, state, buffers
        self._backends, self._ops, self._staging = list(backends), ops, staging
        device, most, query_len = state.device, dispatcher.most_decode_rows, dispatcher.decode_query_len
        num_groups = len(state.block_tables)
        self._num_columns = 2 + 2 * num_groups
        most_mixed = min(max(dispatcher.mixed_sizes, default=0), state.max_num_seqs)
        self._columns = torch.zeros(
            max((self._num_columns + 1 + query_len) * most + num_groups, 2 * most_mixed),
            dtype=torch.int64,
            device=device,
        )
        self._result = torch.zeros(most, 2, dtype=torch.int32, device=device)
        self._verified = torch.zeros(most if query_len > 1 else 0, 3 + query_len, dtype=torch.int32, device=device)
        self._logits: Tensor | None = None  # [most, V]: where every decode graph that ends at the logits leaves them
        self._side_version = state.side.layout_version
        self._num_asked: Counter[BatchDescriptor] = Counter()  # of keys whose graphs were not captured
        self._widths = [table.shape[1] for table in state.block_tables]
        largest = max(*chain.from_iterable(dispatcher.decode_sizes.values()), *dispatcher.mixed_sizes, 0, 0)
        if largest:
            for backend in self._backends:
                backend.reserve(BatchDescriptor(largest, max(most, most_mixed), query_len))

    @property
    def runs_calls(self) -> bool:
        """See `GraphRecorder.runs_calls`."""
        return self._recorder.runs_calls

    def at_hand(self, mode: CUDAGraphMode, key: BatchDescriptor) -> tuple[CUDAGraphMode, BatchDescriptor]:
        """Return the dispatched key, or that of a larger step, or of a prompt's pieces, while this graph is not captured and has seldom
        been asked for: a capture takes tens of milliseconds, and a server whose load rises would stop at every size on its
        way."""
        captured = self.full if mode is CUDAGraphMode.FULL else self.pieces
        if key in captured or mode is CUDAGraphMode.NONE or self._recorder.runs_calls:
            return mode, key
        self._num_asked[key] += 1
        is_due = self._num_asked[key] > (_PROMPT_PATIENCE if key.is_prompt else _PATIENCE)
        if key.is_prompt and (not is_due or self.full.is_refused(key)):
            return self.at_hand(*self.dispatcher.dispatch(key.num_tokens, 1, has_lora=key.has_lora))
        if is_due:
            return mode, key
        larger = self.dispatcher.stand_ins(key)
        is_large = key.num_tokens > MAX_MIXED_TOKENS and not key.uniform_query_len
        to_capture = larger[-1] if larger and not is_large else key  # padding of large pieces is not worth a capture
        return mode, next((other for other in larger if other in captured), to_capture)

    def decode_key(
        self, num_rows: int, variant: str, query_len: int = 1, *, has_common_prefix: bool = False
    ) -> BatchDescriptor | None:
        """The key of a decode step with at most `query_len` tokens a row; None when it is not captured whole."""
        if self._side_version != self._state.side.layout_version:
            self._side_tables_moved()
        mode, key = self.dispatcher.dispatch(
            num_rows * query_len, num_rows, query_len, sampling=self._at_place(variant)
        )
        if mode is not CUDAGraphMode.FULL or key.uniform_query_len != query_len:
            return None
        return replace(key, has_common_prefix=True) if has_common_prefix else key

    def uses_common_prefix(self, num_rows: int, common_prefix_blocks: Sequence[int]) -> bool:
        """Whether some group's backend reads so long a common prefix once."""
        return any(self._prefix_lens(num_rows, common_prefix_blocks))

    def _prefix_lens(self, num_rows: int, common_prefix_blocks: Sequence[int]) -> list[int]:
        """Per group, in tokens; 0 where none of its backends wants it."""
        sizes = self._state.block_sizes
        lengths = [count * size for count, size in zip(common_prefix_blocks, sizes, strict=True)]
        wanted = {
            backend.group_id for backend in self._backends
            if lengths[backend.group_id] and backend.uses_common_prefix(num_rows, lengths[backend.group_id])
        }  # fmt: skip
        return [length if group in wanted else 0 for group, length in enumerate(lengths)]

    def decode(
        self,
        key: BatchDescriptor,
        slots: npt.NDArray[np.int64],
        appends: Sequence[tuple[int, int, int, list[int]]],
        common_prefix_blocks: Sequence[int] = (),
        *,
        num_draft: npt.NDArray[np.int64] | None = None,
        mode: CUDAGraphMode = CUDAGraphMode.FULL,
    ) -> Tensor | None:
        """Run a decode step of `key`: result [n, 2], or logits [n, V] for the variant LOGITS, which stay until the next such
        step; with drafts the result of `Verify` [n, 3 + query_len]. Rows beyond `slots` are padding. With mode NONE nothing
        is captured.

        None when more blocks are appended than there is room for: the caller appends them first, and gives none.
        """
        columns = self._decode_columns(key.num_reqs, slots, appends)
        if columns is None:
            return None
        values = columns.reshape(-1)
        if key.uniform_query_len > 1:
            values = np.concatenate([values, _with_drafts(columns, key, num_draft)])
        if key.has_common_prefix:
            lengths = self._prefix_lens(len(slots), common_prefix_blocks or [0] * len(self._widths))
            values = np.concatenate([values, np.array(lengths, dtype=np.int64)])
        self._staging.stage_into(self._columns[: values.size], values)
        if key.sampling == LOGITS and self._logits is None and self._recorder.runs_calls:
            mode = CUDAGraphMode.NONE  # makes `_logits`: not in the memory that all recorded steps compute in
        return self.full.run(mode, key, lambda: self._decode(key))

    def tail(self, num_rows: int, variant: str) -> Tensor:
        """Sample from the logits that `decode` left, of `num_rows` with padding: result [n, 2]."""
        key, logits = self.decode_key(num_rows, variant), self._logits
        assert key is not None and logits is not None, "a decode step has left its logits"
        tail_key = replace(key, sampling=_TAIL + key.sampling)
        return self.full.run(CUDAGraphMode.FULL, tail_key, lambda: self._tail(key, logits[:num_rows]))

    def mixed(
        self,
        key: BatchDescriptor,
        slots: npt.NDArray[np.int64],
        num_scheduled: npt.NDArray[np.int64],
        *,
        mode: CUDAGraphMode = CUDAGraphMode.FULL,
    ) -> Any:
        """Inputs and forward pass of a step of any rows, or of one prompt, as one graph: what the model's forward returns."""
        columns = np.zeros((2, key.num_reqs), dtype=np.int64)
        columns[0] = self._state.padding_slot
        columns[0, : len(slots)] = slots
        columns[1, : len(slots)] = num_scheduled
        self._staging.stage_into(self._columns[: columns.size], columns.reshape(-1))
        return self.full.run(mode, key, lambda: self._mixed(key))

    def forward(self, mode: CUDAGraphMode, key: BatchDescriptor, batch: ForwardBatch) -> Any:
        """The model's forward pass, in pieces where `mode` says so."""
        return self.pieces.run(mode, key, self._model.forward, batch)

    def make_room(self, num_bytes: int) -> None:
        """Let all captures compute in one piece of memory. Without it each that is larger than those before takes another
        piece of the recorder's pool, and none is given back."""
        device = self._state.device
        self._recorder.begin()
        try:
            torch.empty(num_bytes, dtype=torch.uint8, device=device)[:1].zero_()
            self._room = self._recorder.end()
        except BaseException:
            self._recorder.abort()
            raise

    def has(self, mode: CUDAGraphMode, key: BatchDescriptor) -> bool:
        key = replace(key, sampling=self._at_place(key.sampling))
        return key in (self.full if mode is CUDAGraphMode.FULL else self.pieces)

    def warm_up(self, mode: CUDAGraphMode, key: BatchDescriptor, *, captures: bool = True) -> None:
        """Run and capture a step of nothing but padding, or only run it. `key.sampling` is a variant alone."""
        key = replace(key, sampling=self._at_place(key.sampling))
        nothing, run_mode = np.zeros(0, dtype=np.int64), mode if captures else CUDAGraphMode.NONE
        if mode is CUDAGraphMode.FULL:
            if key.uniform_query_len:
                self.decode(key, nothing, (), mode=run_mode)
            else:
                self.mixed(key, nothing, nothing, mode=run_mode)
            return
        slots, scheduled = self._staging.stage([[self._state.padding_slot], [0]])
        batch = self._batch(slots, scheduled, padding_shape(key.num_tokens, max_seq_len=key.num_tokens), None)
        if captures:
            self.forward(mode, key, batch)
        else:
            run_apart(self._model.forward, batch)

    def _at_place(self, variant: str) -> str:
        """The variant where the side tables lie now: one that reads them is captured anew when they have moved."""
        version = self._side_version
        return f"{variant}@{version}" if version and variant not in (LOGITS, GREEDY) else variant

    def _side_tables_moved(self) -> None:
        """Free the graphs that read them where they were, once none is running. They move a few times in an engine's life."""
        self._side_version = self._state.side.layout_version
        if self._state.device.type != "cpu":
            done = torch.Event(self._state.device)
            done.record()
            done.synchronize()
        self.full.discard(self._is_out_of_place)

    def _is_out_of_place(self, key: BatchDescriptor) -> bool:
        sampling = key.sampling.removeprefix(_TAIL)
        return sampling != self._at_place(sampling.partition("@")[0])

    def _decode_columns(
        self, size: int, slots: npt.NDArray[np.int64], appends: Sequence[tuple[int, int, int, list[int]]]
    ) -> npt.NDArray[np.int64] | None:
        """[2 + 2 groups, size]: slots, counts; for each group places in its block table, flat, and block ids."""
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

    def _decode(self, key: BatchDescriptor) -> Tensor:
        """The call that is captured. Its inputs lie in `_columns`."""
        size = key.num_reqs
        query_len, num_tokens = key.uniform_query_len, key.num_tokens
        columns = self._columns[: self._num_columns * size].view(self._num_columns, size)
        for group, table in enumerate(self._state.block_tables):
            ids = columns[3 + 2 * group].view(torch.int32)[::2]  # the low halves: little-endian
            table.view(-1).scatter_(0, columns[2 + 2 * group], ids)
        shape = StepShape(
            num_reqs=size, num_tokens=num_tokens, num_decode_rows=size if query_len == 1 else 0, max_query_len=query_len,
            max_seq_len=self._state.max_model_len, num_padded_reqs=size, num_padded_tokens=num_tokens,
        )  # fmt: skip
        if query_len > 1:
            return self._decode_drafts(key, columns, shape)
        batch = self._batch(columns[0], columns[1], shape, key)
        hidden = self._model.forward(batch)
        logits = self._model.compute_logits(hidden, self._buffers.token_index[:size])
        if key.sampling == LOGITS:
            return self._keep(logits)
        return self._tail(key, logits)

    def _decode_drafts(self, key: BatchDescriptor, columns: Tensor, shape: StepShape) -> Tensor:
        """Drafts that the device makes, the model's opinion of all tokens, and what is kept."""
        drafts, size, first = self._ops.drafts, key.num_reqs, columns.numel()
        assert drafts is not None
        num_draft = drafts.make(columns[0], self._columns[first : first + size])
        hidden = self._model.forward(self._batch(columns[0], columns[1], shape, key))
        logit_tokens = self._columns[first + size : first + size + key.num_tokens]
        result = self._verified[:size]
        variant, _, _ = key.sampling.partition("@")
        drafts.verify(variant, self._model.compute_logits(hidden, logit_tokens), columns[0], num_draft, result)
        return result

    def _keep(self, logits: Tensor) -> Tensor:
        """A copy where the tail finds them: a graph's own memory is free to the next one, which the tail is."""
        if self._logits is None:
            self._logits = logits.new_empty(len(self._result), logits.shape[1])
        return self._logits[: len(logits)].copy_(logits)

    def _tail(self, key: BatchDescriptor, logits: Tensor) -> Tensor:
        size = key.num_reqs
        result = self._result[:size]
        variant, _, _ = key.sampling.partition("@")
        self._ops.sample(variant)(logits, self._columns[:size], result)
        return result

    def _mixed(self, key: BatchDescriptor) -> Any:
        max_seq_len = key.num_tokens if key.is_prompt else self._state.max_model_len
        columns = self._columns[: 2 * key.num_reqs].view(2, key.num_reqs)
        shape = StepShape(
            num_reqs=key.num_reqs, num_tokens=key.num_tokens, num_decode_rows=0, max_query_len=key.num_tokens,
            max_seq_len=max_seq_len, num_padded_reqs=key.num_reqs, num_padded_tokens=key.num_tokens,
        )  # fmt: skip
        return self._model.forward(self._batch(columns[0], columns[1], shape, key))

    def _batch(self, slots: Tensor, scheduled: Tensor, shape: StepShape, key: BatchDescriptor | None) -> ForwardBatch:
        prefix_lens = None
        if key is not None and key.has_common_prefix:
            first = self._num_columns * key.num_reqs
            prefix_lens = self._columns[first : first + len(self._widths)].view(torch.int32)[::2]
        return self._ops.forward_batch(slots, scheduled, shape, self._backends, key, prefix_lens)


def _with_drafts(
    columns: npt.NDArray[np.int64], key: BatchDescriptor, num_draft: npt.NDArray[np.int64] | None
) -> npt.NDArray[np.int64]:
    """Adds drafts to the counts of `columns`; returns these, and which token's output each row of logits is of: 1 + k a row,
    the last one again where a row has fewer drafts."""
    drafted = np.zeros(key.num_reqs, dtype=np.int64)
    if num_draft is not None:
        drafted[: len(num_draft)] = num_draft
        columns[1] += drafted
    first = columns[1].cumsum() - columns[1]
    tokens = first[:, None] + np.minimum(np.arange(key.uniform_query_len), drafted[:, None])
    return np.concatenate([drafted, tokens.clip(max=key.num_tokens - 1).reshape(-1)])
