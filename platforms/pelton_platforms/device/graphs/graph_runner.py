"""Captured steps of one runner: decode steps and short prompts whole, others in pieces around attention.

A decode step sends one block of columns, launches one graph and reads one result.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pelton.attention.interface import AttentionBackend
from pelton.attention.metadata import BatchDescriptor
from pelton.config.compilation import CUDAGraphMode
from pelton.graphs.recorder import Graph, GraphRecorder
from pelton.sampling.tails import Logits, Sample, Tail
from pelton.worker.inputs import InputBuffers
from pelton_platforms.device.graphs.captures import FullGraphs, PiecewiseGraphs, run_split_at_attention
from pelton_platforms.device.graphs.dispatcher import MAX_MIXED_TOKENS, GraphDispatcher
from pelton_platforms.device.graphs.graph_columns import Appends, GraphColumns
from pelton_platforms.device.steps.batch_state import BatchState
from pelton_platforms.device.steps.staging import StagingRing
from pelton_platforms.device.steps.step_program import StepInputs, StepProgram
from pelton_platforms.device.steps.step_shapes import padding_shape

if TYPE_CHECKING:
    from pelton_platforms.device.steps.step_plan import Ints, StepPlan

_PATIENCE = 8
"""Steps of a size that take a larger one's graph before they get their own."""
_PROMPT_PATIENCE = 1
"""Of a prompt's size, in pieces. Few others wait for such a capture: the step has one row."""


class GraphRunner:
    """Decides with the dispatcher, captures with the platform's recorder what the program runs."""

    def __init__(
        self,
        dispatcher: GraphDispatcher,
        recorder: GraphRecorder,
        program: StepProgram,
        state: BatchState,
        buffers: InputBuffers,
        backends: Sequence[AttentionBackend],
        staging: StagingRing,
    ) -> None:
        self.dispatcher = dispatcher
        self.program = program
        self.full = FullGraphs(recorder)
        self.pieces = PiecewiseGraphs(recorder)
        self._recorder = recorder
        self._room: Graph | None = None
        self._state, self._backends, self._staging = state, list(backends), staging
        most, query_len = dispatcher.most_decode_rows, dispatcher.decode_query_len
        most_mixed = min(max(dispatcher.mixed_sizes, default=0), state.max_num_seqs)
        program.most_left_rows = most
        program.keeps_hidden = recorder.runs_calls and program.ops.shares is None
        self._columns = GraphColumns(
            state,
            buffers,
            staging,
            program.ops.prepare_inputs,
            most_rows=most,
            most_mixed_rows=most_mixed,
            query_len=query_len,
        )
        self._side_layout = state.side.layout_version
        self._decode_keys: dict[tuple[int, Tail, int, bool, bool], BatchDescriptor | None] = {}
        self._apart_keys: dict[tuple[int, Tail], tuple[CUDAGraphMode, BatchDescriptor]] = {}
        self._num_asked: Counter[BatchDescriptor] = Counter()  # of keys whose graphs were not captured
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

    # Decode steps.

    def decode_key(
        self,
        num_rows: int,
        tail: Tail,
        query_len: int = 1,
        common_prefix_blocks: Sequence[int] = (),
        *,
        has_lora: bool = False,
    ) -> BatchDescriptor | None:
        """The key of a decode step with at most `query_len` tokens a row; None when it is not captured whole."""
        if self._side_layout != self._state.side.layout_version:
            self._side_tables_moved()
        has_prefix = (
            query_len == 1 and bool(common_prefix_blocks) and self.uses_common_prefix(num_rows, common_prefix_blocks)
        )
        asked = (num_rows, tail, query_len, has_prefix, has_lora)
        if asked not in self._decode_keys:
            self._decode_keys[asked] = self._find_decode_key(*asked)
        key = self._decode_keys[asked]
        return None if key is None else self.at_hand(CUDAGraphMode.FULL, key)[1]

    def _find_decode_key(
        self, num_rows: int, tail: Tail, query_len: int, has_prefix: bool, has_lora: bool
    ) -> BatchDescriptor | None:
        mode, key = self.dispatcher.dispatch(num_rows * query_len, num_rows, query_len, has_lora=has_lora, tail=tail)
        if mode is not CUDAGraphMode.FULL or key.uniform_query_len != query_len:
            return None
        return replace(self._at_place(key), has_common_prefix=has_prefix)

    def uses_common_prefix(self, num_rows: int, common_prefix_blocks: Sequence[int]) -> bool:
        """Return whether some group's backend reads so long a common prefix once."""
        return any(self._prefix_lens(num_rows, common_prefix_blocks))

    def _prefix_lens(self, num_rows: int, common_prefix_blocks: Sequence[int]) -> list[int]:
        """Per group, in tokens; 0 where none of its backends wants it."""
        sizes = self._state.block_sizes
        lengths = [count * size for count, size in zip(common_prefix_blocks, sizes, strict=True)]
        wanted = {
            backend.group_id for backend in self._backends
            if backend.group_id >= 0 and lengths[backend.group_id]
            and backend.uses_common_prefix(num_rows, lengths[backend.group_id])
        }  # fmt: skip
        return [length if group in wanted else 0 for group, length in enumerate(lengths)]

    def decode(
        self,
        key: BatchDescriptor,
        slots: Ints,
        appends: Appends,
        num_draft: Ints | None = None,
        common_prefix_blocks: Sequence[int] = (),
        *,
        room: Tensor | None = None,
        mode: CUDAGraphMode = CUDAGraphMode.FULL,
    ) -> Tensor | None:
        """Run a decode step of `key`; what its tail gives, with padding. Logits stay until the next such step, see
        `StepProgram.left_logits`. Rows beyond `slots` are padding. room: pinned memory for the result, where the step `gives` it. With
        mode NONE nothing is captured."""
        prefix_lens: Sequence[int] = ()
        if key.has_common_prefix:
            prefix_lens = self._prefix_lens(len(slots), common_prefix_blocks or [0] * len(self._state.block_tables))
        place = 0 if room is None else room.data_ptr()
        if not self._columns.stage_decode(key, slots, appends, num_draft, prefix_lens, place):
            self._state.append_blocks(appends)
            self._columns.stage_decode(key, slots, (), num_draft, prefix_lens, place)
        if isinstance(key.tail, Logits) and self._recorder.runs_calls and not self.program.has_left_logits:
            mode = CUDAGraphMode.NONE  # makes their memory: not in that which all recorded steps compute in
        try:
            found: Tensor | None = self.full.run(mode, key, partial(self._run, key))
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the device's: the first one says why
                self._columns.start_again()
            raise
        return found

    def gives(self, key: BatchDescriptor) -> bool:
        """Return whether a decode step of `key` writes its result to pinned memory, for which it wants `room`."""
        return self._columns.gives(key)

    def sample_apart(self, num_rows: int, tail: Sample) -> Tensor:
        """Sample from the logits that `decode` left, of `num_rows` with padding: result [n, 2]."""
        mode, key = self._apart_key(num_rows, tail)
        found: Tensor = self.full.run(mode, key, partial(self._run, key))
        return found

    def _apart_key(self, num_rows: int, tail: Sample) -> tuple[CUDAGraphMode, BatchDescriptor]:
        if (num_rows, tail) not in self._apart_keys:
            mode, key = self.dispatcher.dispatch(num_rows, num_rows, 1, tail=tail)
            self._apart_keys[num_rows, tail] = mode, self._at_place(key)
        return self._apart_keys[num_rows, tail]

    def replays_apart(self, num_rows: int, tail: Sample) -> bool:
        """Return whether `sample_apart` has nothing to compile or capture."""
        mode, key = self._apart_key(num_rows, tail)
        return mode is CUDAGraphMode.FULL and key in self.full

    def _run(self, key: BatchDescriptor) -> Any:
        """The call that is captured."""
        return self.program.run(key, self._columns.inputs(key))

    # Any other step.

    def place(self, plan: StepPlan, *, has_lora: bool = False) -> tuple[CUDAGraphMode, BatchDescriptor]:
        """The mode and key of a step that is not a decode graph; the plan's tokens are padded to the key's."""
        shape = plan.shape
        is_prompt = shape.num_reqs == 1 and shape.max_seq_len == shape.num_tokens > 1
        mode, key = self.dispatcher.dispatch(shape.num_tokens, shape.num_reqs, is_prompt=is_prompt, has_lora=has_lora)
        if mode is not CUDAGraphMode.NONE:
            mode, key = self.at_hand(mode, key)
            shape.num_padded_tokens = key.num_tokens
        return mode, key

    def forward(self, mode: CUDAGraphMode, key: BatchDescriptor, plan: StepPlan, inputs: StepInputs) -> Any:
        """The forward pass of a step of any rows, in the part of it that the mode captures: what the model gives."""
        if mode is CUDAGraphMode.FULL:
            return self._rows(mode, key, plan.slots, plan.num_scheduled)
        if mode is CUDAGraphMode.NONE:
            return self.program.forward(key, inputs)
        batch = self.program.batch(key, inputs)
        return self.pieces.run(mode, key, self.program.model.forward, batch)

    def _rows(self, mode: CUDAGraphMode, key: BatchDescriptor, slots: Ints, num_scheduled: Ints) -> Any:
        self._columns.stage_rows(key, slots, num_scheduled)
        return self.full.run(mode, key, partial(self._run, key))

    # Before there are requests.

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
        return self._at_place(key) in (self.full if mode is CUDAGraphMode.FULL else self.pieces)

    def warm_up(self, mode: CUDAGraphMode, key: BatchDescriptor, *, captures: bool = True) -> None:
        """Run and capture a step of nothing but padding, or only run it."""
        key = self._at_place(key)
        nothing, run_mode = np.zeros(0, dtype=np.int64), mode if captures else CUDAGraphMode.NONE
        if mode is CUDAGraphMode.FULL:
            if key.uniform_query_len:
                self.decode(key, nothing, (), mode=run_mode)
            else:
                self._rows(run_mode, key, nothing, nothing)
            return
        slots, scheduled = self._staging.stage([[self._state.padding_slot], [0]])
        shape = padding_shape(key.num_tokens, max_seq_len=key.num_tokens)
        inputs = StepInputs(
            shape=shape, slots=slots, num_scheduled=scheduled, sample_slots=slots[:0], logit_tokens=slots[:0],
            has_adapters=key.has_lora,
        )  # fmt: skip
        batch, forward = self.program.batch(key, inputs), self.program.model.forward
        run = partial(self.pieces.run, mode, key, forward) if captures else partial(run_split_at_attention, forward)
        run(batch)

    def _at_place(self, key: BatchDescriptor) -> BatchDescriptor:
        """The key where the side tables lie now: a step whose tail reads them is captured anew when they have moved."""
        if not self._side_layout or key.tail is None or not key.tail.reads_side_tables:
            return key
        return replace(key, side_layout=self._side_layout)

    def _side_tables_moved(self) -> None:
        """Free the graphs that read them where they were, once none is running. They move a few times in an engine's life."""
        self._side_layout = self._state.side.layout_version
        self._decode_keys.clear()
        self._apart_keys.clear()
        if self._state.device.type != "cpu":
            done = torch.Event(self._state.device)
            done.record()
            done.synchronize()
        self.full.discard(lambda key: self._at_place(key) != key)
