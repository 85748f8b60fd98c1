"""Steps whose rows pool, steps of models without any cache, and rows with adapters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from pelton_worker_fakes import Driver, Running, is_captured, make_runner, oracle_greedy

from pelton.attention.metadata import NO_CACHE
from pelton.builtin import pelton_fused_ops
from pelton.config import CUDAGraphMode
from pelton.messages.request import AdapterRef, PoolingParams
from pelton.messages.step import ModelOutput, SchedulerOutput
from pelton.model.interface import PooledRows, PoolingModel
from pelton.ops.selector import OpSelector
from pelton.testing.graphs import FakeGraphRecorder
from pelton.testing.plugins import references
from pelton.worker.inputs import InputBuffers, StepShape
from pelton_platforms.device.graphs.dispatcher import GraphDispatcher
from pelton_platforms.device.kv_pool import KVPool
from pelton_platforms.device.steps.batch_state import BatchState
from pelton_platforms.device.steps.model_runner import ModelRunner
from pelton_platforms.device.steps.step_ops import StepOps

VOCAB = 40


class SumModel:
    """A vector of each row: sum and number of its ids so far, and its last id. It has no cache, and no logits."""

    def __init__(self) -> None:
        self.seen: list[PooledRows] = []
        self.sums: dict[int, torch.Tensor] = {}

    def forward(self, batch: Any) -> torch.Tensor:
        (common,) = batch.attention
        assert common.block_table.shape == (common.num_reqs, 0) and not len(common.slot_mapping)
        starts = common.query_start_loc.long()
        assert is_captured() or (common.seq_lens.long() >= starts[1:] - starts[:-1]).all()
        return batch.input_ids.float()

    def pool(self, hidden: torch.Tensor, rows: PooledRows) -> Sequence[torch.Tensor | None]:
        self.seen.append(rows)
        pooled: list[torch.Tensor | None] = []
        for index, (slot, start, count) in enumerate(zip(rows.slots, rows.starts, rows.counts, strict=True)):
            before = self.sums[slot] if rows.num_before[index] else torch.zeros(())
            self.sums[slot] = before + hidden[start : start + count].sum()
            total = torch.tensor(float(rows.num_before[index] + count))
            vector = torch.stack([self.sums[slot], total, hidden[rows.last_tokens[index]]])
            if rows.params[index].dimensions:
                vector = vector[: rows.params[index].dimensions]
            if total == 7:
                vector = vector / 0
            pooled.append(vector if rows.is_last[index] else None)
        return pooled

    def load_weights(self, weights: Any) -> set[str]:
        return set()


class UncachedBackend:
    needs_zeroed_blocks = False
    group_id = NO_CACHE

    def reserve(self, max_key: Any) -> None:
        pass

    def build(self, common: Any, key: Any = None) -> Any:
        return common


def pooling_driver(mode: CUDAGraphMode) -> Driver:
    model = SumModel()
    assert isinstance(model, PoolingModel)
    state = BatchState(
        max_num_seqs=8, max_model_len=64, vocab_size=VOCAB, block_sizes=(), num_side_slots=0, device=torch.device("cpu")
    )
    buffers = InputBuffers(state, max_num_tokens=64)
    ops = StepOps(OpSelector(references(), pelton_fused_ops()), state, buffers)
    runner = ModelRunner(model, state, buffers, [UncachedBackend()], KVPool(1, []), ops)  # type: ignore[arg-type, list-item]
    if mode is not CUDAGraphMode.NONE:
        runner.use_graphs(GraphDispatcher(mode, max_num_seqs=8, max_num_tokens=64), FakeGraphRecorder())
    return Driver(runner)


def pool(driver: Driver, rows: list[tuple[Running, int]], params: list[PoolingParams]) -> ModelOutput:
    output = driver.plan(rows)
    for new, own in zip(output.new, params, strict=False):
        new.pooling_params = own
    result = driver.runner.execute(output)
    assert isinstance(result, ModelOutput)
    for request, count in rows:
        request.num_computed += count
    return result


def vectors(result: ModelOutput) -> dict[int, list[float]]:
    return {row: np.frombuffer(data.data, "<f4").tolist() for row, data in result.pooled.items()}


@pytest.mark.parametrize("mode", [CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL])
def test_rows_are_pooled_when_their_last_token_is_computed_without_any_cache(mode: CUDAGraphMode) -> None:
    driver = pooling_driver(mode)
    for _ in range(3):  # captured, then replayed
        requests = [driver.add(slot, ids) for slot, ids in enumerate([[5], [3, 4, 9], [1] * 10])]
        params = [PoolingParams(), PoolingParams(dimensions=2), PoolingParams()]
        result = pool(driver, [(requests[0], 1), (requests[1], 3), (requests[2], 6)], params)
        assert vectors(result) == {0: [5, 1, 5], 1: [16, 3]}
        assert result.pooled[0].shape == (3,) and result.token_ids == [[], [], []]
        assert vectors(pool(driver, [(requests[2], 4)], [])) == {0: [10, 10, 1]}
    assert driver.runner.state.num_computed_tokens[:3].tolist() == [1, 3, 10]
    if mode is not CUDAGraphMode.NONE:
        assert len(driver.runner.graphs.pieces) + len(driver.runner.graphs.full) > 0


def test_numbers_that_are_not_finite_fail_their_row_alone() -> None:
    driver = pooling_driver(CUDAGraphMode.NONE)
    requests = [driver.add(slot, ids) for slot, ids in enumerate([[5, 5], [2] * 7])]
    result = pool(driver, [(requests[0], 2), (requests[1], 7)], [PoolingParams(), PoolingParams()])
    assert vectors(result) == {0: [10, 2, 5]}
    ((row, message),) = result.row_errors
    assert row == 1 and "finite" in message


class Adapters:
    """Notes what it is asked; every adapter lies at ten times its id."""

    def __init__(self, state: BatchState) -> None:
        self.state = state
        self.calls: list[tuple[bool, list[int]]] = []

    def slot_of(self, adapter: AdapterRef) -> int:
        return 10 * adapter.id

    def prepare(self, slots: torch.Tensor, shape: StepShape, buffers: InputBuffers, *, is_used: bool) -> Any:
        if not is_captured():
            assert buffers.query_start_loc[shape.num_padded_reqs] <= shape.num_padded_tokens
            self.calls.append((is_used, self.state.adapter_slots[slots].tolist()))
        return "prepared" if is_used else None


def test_steps_with_adapters_have_graphs_of_their_own_and_find_each_rows_on_the_device() -> None:
    runner = make_runner(num_blocks=128)
    adapters = runner.ops.adapters = Adapters(runner.state)
    dispatcher = GraphDispatcher(CUDAGraphMode.FULL_DECODE_ONLY, max_num_seqs=8, max_num_tokens=64, sizes=[2])
    graphs, driver, given = runner.use_graphs(dispatcher, FakeGraphRecorder()), Driver(runner), []
    forward = runner.model.forward
    runner.model.forward = lambda batch: (given.append(batch.adapter), forward(batch))[1]  # type: ignore[method-assign]
    prompts = [[7, 9], [3, 1, 4]]
    requests = [driver.add(slot, prompt) for slot, prompt in enumerate(prompts)]
    rows = [(request, len(request.token_ids)) for request in requests]
    output: SchedulerOutput = driver.plan(rows)
    output.new[1].adapter = AdapterRef(id=3, name="x")
    driver.take(rows, None, runner.execute(output))  # type: ignore[arg-type]
    assert adapters.calls == [(True, [-1, 30])] and given == ["prepared"]
    driver.decode(requests, 2)
    driver.decode(requests[:1], 2)
    keys = [key.has_lora for key in graphs.full._captured]
    assert sorted(keys) == [False, True] and {is_used for is_used, _ in adapters.calls} == {False, True}
    assert [slots for is_used, slots in adapters.calls if not is_used] == [[-1, -1]], "run once, then captured"
    later = driver.add(1, [8])  # another request in that slot, without one
    driver.step([(requests[0], 1), (later, 1)])
    assert runner.state.adapter_slots[:2].tolist() == [-1, -1]
    assert [request.output for request in requests] == [oracle_greedy(prompts[0], 6), oracle_greedy(prompts[1], 3)]
