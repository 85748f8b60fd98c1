"""Wrappers capture and replay; a tape behaves as a captured graph does."""

from __future__ import annotations

import pytest
import torch

from pelton.config.compilation import CUDAGraphMode
from pelton.graphs.captures import FullGraphs, PieceGraphs
from pelton.graphs.recorder import Graph
from pelton.testing.graphs import TapeRecorder

NONE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.FULL


def test_wrapper_calls_captures_and_replays() -> None:
    recorder, source, calls = TapeRecorder(), torch.zeros(3), []
    graphs = FullGraphs(recorder)

    def step() -> torch.Tensor:
        calls.append(1)
        return source * 2 + 1

    source.fill_(1)
    assert graphs.run(NONE, "key", step).tolist() == [3.0] * 3  # another mode: a plain call
    assert not recorder.tapes
    assert graphs.run(FULL, "key", step).tolist() == [3.0] * 3  # unknown: runs, and is captured
    assert len(recorder.tapes) == 1 and len(calls) == 3
    source.fill_(5)
    first = graphs.run(FULL, "key", step)
    assert first.tolist() == [11.0] * 3 and len(calls) == 3  # known: replayed, the function is not called
    source.fill_(6)
    assert graphs.run(FULL, "key", step) is first and first.tolist() == [13.0] * 3  # on the same addresses
    graphs.run(FULL, "other", step)
    assert len(recorder.tapes) == 2 and len(graphs) == 2 and "other" in graphs


def test_a_capture_changes_nothing() -> None:
    state = torch.zeros(2)
    graphs = FullGraphs(TapeRecorder())
    graphs.run(FULL, 1, lambda: state.add_(1))
    assert state.tolist() == [1.0, 1.0]  # once, by the plain call
    graphs.run(FULL, 1, lambda: state.add_(1))
    assert state.tolist() == [2.0, 2.0]


def test_a_capture_that_fails_leaves_its_steps_eager(caplog: pytest.LogCaptureFixture) -> None:
    recorder, values = TapeRecorder(), torch.ones(2)
    graphs = FullGraphs(recorder)
    for _ in range(2):  # the step itself is done: only its capture fails, and is tried once
        assert graphs.run(FULL, 1, lambda: torch.zeros(int(values.sum()))).tolist() == [0.0, 0.0]
        assert caplog.text.count("Capturing the step 1 failed") == 1
    assert graphs.run(FULL, 2, lambda: values + 1).tolist() == [2.0, 2.0]
    assert 1 not in graphs and 2 in graphs


class FailsOnce(TapeRecorder):
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
@pytest.mark.parametrize("in_pieces", [False, True])
def test_a_recorder_that_fails_is_left_and_records_again(name: str, in_pieces: bool) -> None:
    recorder, values = FailsOnce(name), torch.ones(2)
    if in_pieces:
        pieces = PieceGraphs(recorder)
        results = [pieces.run(CUDAGraphMode.PIECEWISE, key, lambda _: values + 1, None) for key in (1, 1, 2, 2)]  # type: ignore[arg-type]
    else:
        full = FullGraphs(recorder)
        results = [full.run(FULL, key, lambda: values + 1) for key in (1, 1, 2, 2)]
    assert [result.tolist() for result in results] == [[2.0, 2.0]] * 4
    assert recorder.num_aborts == 1
    assert [tape.num_replays for tape in recorder.tapes] == [1]
