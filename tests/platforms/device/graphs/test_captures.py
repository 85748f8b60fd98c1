"""Wrappers capture and replay; a fake graph behaves as a captured graph does."""

from __future__ import annotations

import ctypes
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pelton.attention.metadata import ForwardBatch
from pelton.config.compilation import CUDAGraphMode
from pelton.graphs.recorder import Graph
from pelton.testing.graphs import FakeGraphRecorder
from pelton_platforms.device.graphs.captures import FullGraphs, PiecewiseGraphs

NONE, FULL, PIECEWISE = CUDAGraphMode.NONE, CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE


def test_wrapper_calls_captures_and_replays() -> None:
    recorder, source, calls = FakeGraphRecorder(), torch.zeros(3), []
    graphs = FullGraphs(recorder)

    def step() -> torch.Tensor:
        calls.append(1)
        return source * 2 + 1

    source.fill_(1)
    assert graphs.run(NONE, "key", step).tolist() == [3.0] * 3  # another mode: a plain call
    assert not recorder.graphs
    assert graphs.run(FULL, "key", step).tolist() == [3.0] * 3  # unknown: runs, and is captured
    assert len(recorder.graphs) == 1 and len(calls) == 3
    source.fill_(5)
    first = graphs.run(FULL, "key", step)
    assert first.tolist() == [11.0] * 3 and len(calls) == 3  # known: replayed, the function is not called
    source.fill_(6)
    assert graphs.run(FULL, "key", step) is first and first.tolist() == [13.0] * 3  # on the same addresses
    graphs.run(FULL, "other", step)
    assert len(recorder.graphs) == 2 and len(graphs) == 2 and "other" in graphs


def test_a_capture_changes_nothing() -> None:
    state = torch.zeros(2)
    graphs = FullGraphs(FakeGraphRecorder())
    graphs.run(FULL, 1, lambda: state.add_(1))
    assert state.tolist() == [1.0, 1.0]  # once, by the plain call
    graphs.run(FULL, 1, lambda: state.add_(1))
    assert state.tolist() == [2.0, 2.0]


def test_a_capture_that_fails_leaves_its_steps_eager(caplog: pytest.LogCaptureFixture) -> None:
    recorder, values = FakeGraphRecorder(), torch.ones(2)
    graphs = FullGraphs(recorder)
    for _ in range(2):  # the step itself is done: only its capture fails, and is tried once
        assert graphs.run(FULL, 1, lambda: torch.zeros(int(values.sum()))).tolist() == [0.0, 0.0]
        assert caplog.text.count("Capturing the step 1 failed") == 1
    assert graphs.run(FULL, 2, lambda: values + 1).tolist() == [2.0, 2.0]
    assert 1 not in graphs and 2 in graphs


class FailsOnce(FakeGraphRecorder):
    """One of its calls raises, as a device's does when a capture was invalidated without anybody's notice."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name, self.num_aborts = name, 0

    def begin(self) -> None:
        self._fail("begin")
        super().begin()

    def end(self) -> Graph:
        self._fail("end")
        return super().end()

    def abort(self) -> None:
        self.num_aborts += 1
        super().abort()

    def _fail(self, name: str) -> None:
        if self._name == name:
            self._name = ""
            raise RuntimeError(f"{name} failed")


@pytest.mark.parametrize("name", ["begin", "end"])
@pytest.mark.parametrize("piecewise", [False, True])
def test_a_recorder_that_fails_is_left_and_records_again(name: str, piecewise: bool) -> None:
    recorder, values = FailsOnce(name), torch.ones(2)
    if piecewise:
        pieces, batch = PiecewiseGraphs(recorder), ForwardBatch(values, values, attention=(), num_tokens=2)
        results = [pieces.run(PIECEWISE, key, lambda _: values + 1, batch) for key in (1, 1, 2, 2)]
    else:
        full = FullGraphs(recorder)
        results = [full.run(FULL, key, lambda: values + 1) for key in (1, 1, 2, 2)]
    assert [result.tolist() for result in results] == [[2.0, 2.0]] * 4
    assert recorder.num_aborts == 1
    assert [graph.num_replays for graph in recorder.graphs] == [1]


class BorrowingRecorder(FakeGraphRecorder):
    """As a device's: what it hands on keeps no memory. Here the graphs keep it, as a device's pool does."""

    def unowned(self, tensor: Tensor) -> Tensor:
        memory = (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())
        return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)


def doubled(query: Tensor, metadata: float, output: Tensor) -> None:
    """The attention of `TwoLayers`."""
    output.copy_(2 * query + metadata)


class TwoLayers:
    """x -> 2 (x + 1) + metadata, twice; remembers every tensor that it made."""

    def __init__(self) -> None:
        self.made: list[weakref.ref[Tensor]] = []
        self.layer: Any = SimpleNamespace(metadata_index=1, attend=doubled)
        self.x = torch.zeros(3)
        self.batch = ForwardBatch(self.x, self.x, attention=(None, 3.0), num_tokens=3)

    def __call__(self, batch: Any = None) -> tuple[Tensor, None]:
        hidden, cut = self.x, None if batch is None else batch.cut
        for _ in range(2):
            query, output = hidden + 1, torch.empty(3)
            self.made += [weakref.ref(query), weakref.ref(output)]
            if cut is not None:
                cut(self.layer, query, output)
            else:
                self.layer.attend(query, self.batch.attention[1], output)
            hidden = output * 1
        self.made.append(weakref.ref(hidden))
        return hidden, None


@pytest.mark.parametrize("piecewise", [False, True])
def test_captures_keep_no_memory_of_what_they_hand_on(piecewise: bool) -> None:
    """Else every layer's rows, of every size, have memory of their own: gigabytes."""
    recorder, step = BorrowingRecorder(), TwoLayers()
    graphs: Any = PiecewiseGraphs(recorder) if piecewise else FullGraphs(recorder)

    def run() -> Tensor:
        hidden, nothing = (
            graphs.run(PIECEWISE, 1, step, step.batch) if piecewise else graphs.run(FULL, 1, lambda: step())
        )
        assert nothing is None
        return hidden

    for value in (0.0, 1.0, 5.0):
        step.x.fill_(value)
        metadata = 3 + value if piecewise else 3.0  # between pieces each step has its own
        step.batch.attention = (None, metadata)
        assert run().tolist() == [4 * (value + 1) + 3 * metadata + 2] * 3
    assert len(recorder.graphs) == (3 if piecewise else 1) and all(graph.num_replays == 2 for graph in recorder.graphs)
    for graph in recorder.graphs:
        graph.ops.clear()  # the pool is gone: who still has one of its tensors owns it
    assert len(step.made) == 10 and not [tensor for tensor in step.made if tensor() is not None]


def test_graphs_that_nobody_will_replay_are_freed() -> None:
    recorder = FakeGraphRecorder()
    graphs = FullGraphs(recorder)
    values = torch.ones(2)
    for key in ("old", "new"):
        graphs.run(FULL, key, lambda: values + 1)
    old, new = (weakref.ref(graph) for graph in recorder.graphs)
    recorder.graphs.clear()
    graphs.discard(lambda key: key == "old")
    assert old() is None and new() is not None
    assert "old" not in graphs and graphs.run(FULL, "new", lambda: values).tolist() == [2.0, 2.0]


def test_a_size_that_could_not_be_captured_is_called_as_a_step_without_graphs_is() -> None:
    pieces, roads, batch = PiecewiseGraphs(FailsOnce("begin")), [], TwoLayers().batch
    for _ in range(3):
        pieces.run(PIECEWISE, 1, lambda given: roads.append(given.cut), batch)
    assert roads[0] is not None and roads[1:] == [None, None]
