"""`prepare_inputs` with `take` and `give` by torch's ops, as a device's kernels read and write pinned memory."""

from __future__ import annotations

import ctypes
from typing import Any

from torch import Tensor

from pelton.testing.graphs import FakeGraphRecorder
from pelton_platforms.device.steps.model_runner import ModelRunner
from pelton_platforms.device.steps.packed_logprobs import PackedResults


class PinnedPrepare:
    def __init__(self, runner: ModelRunner, recorder: FakeGraphRecorder) -> None:
        self.prepare, self.state, self.recorder = runner.ops.prepare_inputs, runner.state, recorder
        self.num_taken, self.num_given = 0, 0
        state, ops = runner.state, runner.ops
        ops._packed = PackedResults(state.max_num_seqs, ops.num_logprobs, state.device)  # as on every other device
        ops._logprobs = ops._packed.logprobs

    def __call__(self, *args: Any) -> Any:
        return self.prepare(*args)

    def take(
        self, parts: Tensor, turn: Tensor, taken: Tensor, place: Tensor, columns: Tensor, num_rows: int
    ) -> None:  # fmt: skip
        part = parts.index_select(0, turn % len(parts))[0]
        place.copy_(part[:1])
        columns.copy_(part[2 : 2 + len(columns)])
        for group, table in enumerate(self.state.block_tables):
            cells, ids = columns[(2 + 2 * group) * num_rows :][: 2 * num_rows].view(2, num_rows)
            table.view(-1).scatter_(0, cells, ids.int())
        turn.add_(1)
        taken.copy_(turn)
        self._launch(self._count_taken)

    def give(self, result: Tensor, place: Tensor) -> None:
        def write() -> None:
            if place.item():
                ctypes.memmove(place.item(), result.data_ptr(), result.nbytes)
                self.num_given += 1

        assert result.is_contiguous()
        self._launch(write)

    def _count_taken(self) -> None:
        self.num_taken += 1

    def _launch(self, call: Any) -> None:
        """Unlike `FakeGraphRecorder.launch` it does not run what is captured: what it writes would not be put back."""
        if self.recorder._mode is None:
            call()
        else:
            self.recorder._mode.graph.ops.append((call, (), {}, []))
