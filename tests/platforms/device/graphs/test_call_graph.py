"""A call graph replays what ran while it was recorded, in memory that all call graphs share."""

import ctypes

import pytest
import torch

from pelton.config import CUDAGraphMode
from pelton.errors import EngineError
from pelton.graphs.recordable import home, launch
from pelton.testing.graphs import FakeGraphRecorder
from pelton_platforms.device.graphs.call_graph import CallGraphRecorder
from pelton_platforms.device.graphs.captures import FullGraphs


def record(recorder, call):
    recorder.begin()
    result = call()
    return recorder.end(), result


def move(target, source, num_bytes):
    ctypes.memmove(target, source, num_bytes)


def test_torch_ops_and_launches_are_played_in_their_order():
    x, y = torch.arange(4.0), torch.zeros(4)

    def call():
        middle = (x * 2)[1:] + 1
        launch(move, y.data_ptr(), middle.data_ptr(), 12)
        y[3] = 7.0
        return y + x

    graph, result = record(CallGraphRecorder(), call)
    assert result.tolist() == [3.0, 6.0, 9.0, 10.0]
    x += 10
    graph.replay()
    assert y.tolist() == [23.0, 25.0, 27.0, 7.0] and result.tolist() == [33.0, 36.0, 39.0, 20.0]


@pytest.mark.parametrize("inference", [True, False])
def test_ops_that_may_view_are_played_where_they_copy(inference):
    x = torch.arange(6.0).view(2, 3)
    with torch.inference_mode(inference):
        graph, results = record(
            CallGraphRecorder(),
            lambda: [x.to(torch.bfloat16), x.t().reshape(6), x.t().contiguous(), x.reshape(3, 2), x.float()],
        )
        x += 1
        graph.replay()
    for result in results:
        assert sorted(result.flatten().tolist()) == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert results[1].tolist() == [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]


def test_a_replay_makes_no_tensor_anew():
    x = torch.ones(8)
    graph, result = record(CallGraphRecorder(), lambda: torch.empty(8).copy_(x))
    address = result.data_ptr()
    x.fill_(3.0)
    graph.replay()
    assert result.data_ptr() == address and result.tolist() == [3.0] * 8


def test_an_empty_tensor_is_made_where_its_result_is_to_stay():
    """The first of its shape and dtype alone: the second would lie on top of it."""
    place, x = torch.zeros(8), torch.ones(8)

    def call():
        token = home.set(place)
        try:
            return [torch.empty(4), torch.empty(8, dtype=torch.int32), torch.empty(8).copy_(x), torch.empty(8).copy_(x)]
        finally:
            home.reset(token)

    graph, results = record(CallGraphRecorder(), call)
    assert [one.data_ptr() == place.data_ptr() for one in results] == [False, False, True, False]
    x.fill_(3.0)
    graph.replay()
    assert place.tolist() == [3.0] * 8 and home.get() is None


def test_tensors_of_one_graph_lie_where_those_of_another_were():
    recorder = CallGraphRecorder()

    def call():
        scratch = torch.empty(100, 3)
        return scratch.data_ptr()

    (_, first), (_, second) = record(recorder, call), record(recorder, call)
    assert first == second


def test_a_result_that_is_kept_is_nobody_elses():
    recorder = CallGraphRecorder()
    x = torch.full((5,), 2.0)
    one, kept = record(recorder, lambda: x + 1)
    two, other = record(recorder, lambda: x + 2)
    one.replay(), two.replay()
    assert kept.tolist() == [3.0] * 5 and other.tolist() == [4.0] * 5


@pytest.mark.parametrize("shape, order", [((3, 5), (1, 0)), ((2, 3, 4), (2, 0, 1)), ((4,), (0,)), ((0, 3), (1, 0))])
def test_results_keep_shape_and_strides(shape, order):
    x = torch.randn(shape)
    graph, result = record(CallGraphRecorder(), lambda: x.permute(order) * 1)
    expected = x.permute(order) * 1
    assert result.stride() == expected.stride()
    x.add_(1)
    graph.replay()
    assert torch.equal(result, x.permute(order))


def test_what_was_viewed_is_read_where_it_lies():
    x = torch.arange(6)
    view = x[2:4]
    graph, result = record(CallGraphRecorder(), lambda: view.view(2, 1).expand(2, 3) + 0)
    x += 1
    graph.replay()
    assert result.tolist() == [[3] * 3, [4] * 3]


def test_a_launch_outside_of_a_recording_is_a_call():
    target, source = torch.zeros(2), torch.ones(2)
    launch(move, target.data_ptr(), source.data_ptr(), 8)
    assert target.tolist() == [1.0, 1.0]


def test_a_call_that_fails_ends_the_replay():
    answers = iter([0, 1])
    graph, _ = record(CallGraphRecorder(), lambda: launch(lambda: next(answers)))
    with pytest.raises(EngineError, match="no memory"):
        graph.replay()


def test_a_step_that_reads_on_the_host_runs_and_is_not_captured(caplog):
    graphs, calls = FullGraphs(CallGraphRecorder()), []

    def step():
        calls.append(1)
        return int(torch.ones(3).sum())

    assert [graphs.run(CUDAGraphMode.FULL, "key", step) for _ in range(3)] == [3, 3, 3]
    assert len(calls) == 3 and len(graphs) == 0
    assert sum("reads values on the host" in str(record.exc_info) for record in caplog.records) == 1


@pytest.mark.parametrize("recorder", [CallGraphRecorder, FakeGraphRecorder])
@pytest.mark.parametrize(
    "read",
    [
        pytest.param(lambda x: torch.unique(x), id="unique"),
        pytest.param(lambda x: x[x > 1], id="mask"),
        pytest.param(lambda x: x * 2 if torch.equal(x, torch.ones(3)) else x * 3, id="equal"),
        pytest.param(lambda x: torch.arange(3).repeat_interleave(x.long()), id="repeats"),
        pytest.param(lambda x: torch.bincount(x.long()), id="counts"),
        pytest.param(lambda x: torch.where(x > 1)[0], id="places"),
        pytest.param(lambda x: x * int(x.sum()), id="number"),
    ],
)
@pytest.mark.parametrize("inference", [True, False])
def test_what_depends_on_values_is_not_captured(recorder, read, inference):
    """A replay would take the way of the first step's values, or fail."""
    with torch.inference_mode(inference):
        graphs, x = FullGraphs(recorder()), torch.ones(3)
        graphs.run(CUDAGraphMode.FULL, "key", lambda: read(x))
        x.copy_(torch.tensor([1.0, 2.0, 3.0]))
        assert torch.equal(graphs.run(CUDAGraphMode.FULL, "key", lambda: read(x)), read(x))
        assert "key" not in graphs


def test_repeats_of_a_known_length_are_captured():
    with torch.inference_mode():
        graphs, x = FullGraphs(CallGraphRecorder()), torch.tensor([1, 1, 1])
        for values in ([1, 1, 1], [1, 0, 2]):
            x.copy_(torch.tensor(values))
            got = graphs.run(CUDAGraphMode.FULL, "key", lambda: torch.arange(3).repeat_interleave(x, output_size=3) + 0)
        assert got.tolist() == [0, 2, 2] and "key" in graphs


def test_a_step_that_raises_leaves_the_recorder_ready():
    graphs = FullGraphs(CallGraphRecorder())
    with pytest.raises(ZeroDivisionError):
        graphs.run(CUDAGraphMode.FULL, "bad", lambda: 1 // 0)
    x = torch.ones(2)
    assert graphs.run(CUDAGraphMode.FULL, "good", lambda: x + 1).tolist() == [2.0, 2.0]
    x += 1
    assert graphs.run(CUDAGraphMode.FULL, "good", lambda: x + 1).tolist() == [3.0, 3.0] and "good" in graphs


def test_the_first_run_of_a_key_runs_once():
    graphs, total = FullGraphs(CallGraphRecorder()), torch.zeros(1)
    for _ in range(3):
        graphs.run(CUDAGraphMode.FULL, "key", lambda: total.add_(1))
    assert total.item() == 3.0


def test_graphs_of_many_sizes_share_their_memory():
    recorder, x = CallGraphRecorder(), torch.ones(1)
    graphs = []
    for rows in range(1, 65):
        result = torch.zeros(rows)

        def call(rows=rows, result=result):
            logits = torch.empty(rows, 40_000)
            logits.copy_(x.expand(rows, 40_000))
            result.copy_((logits + 1)[:, -1])

        graphs.append((record(recorder, call)[0], result))
    most = 64 * 40_000 * 4
    assert 2 * most <= recorder._arena.num_bytes <= 8 * most  # 64 graphs, each with memory of its own, would take 65
    x.fill_(5.0)
    for graph, result in reversed(graphs):
        graph.replay()
        assert (result == 6.0).all()


def test_memory_of_a_weak_reference_is_handed_on_when_its_owner_is_gone():
    arena = CallGraphRecorder()._arena
    owner = arena.like(torch.empty(3, 40))
    weak, place = arena.weak_ref(owner[1:]), owner.data_ptr()
    assert weak.shape == (2, 40) and weak.data_ptr() == place + 40 * 4
    del owner
    assert arena.like(torch.empty(3, 40)).data_ptr() == place
    other = torch.empty(5)
    assert arena.weak_ref(other) is other
