"""Greedy tokens from shares of the logits are those of all logits, with equal values, and numbers that are none."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from pelton_worker_fakes import VOCAB, Driver, make_runner, oracle_greedy

from pelton.config import CUDAGraphMode
from pelton.ops.interface import SampleNeeds, SampleTensors
from pelton.parallel.context import ParallelContext
from pelton.testing.graphs import FakeGraphRecorder
from pelton_platforms.device.graphs.dispatcher import GraphDispatcher
from pelton_platforms.device.steps import logit_shares
from pelton_platforms.device.steps.batch_state import BatchState
from pelton_platforms.device.steps.logit_shares import BestOfShares, LogitShares
from pelton_platforms.device.steps.reference_step import ReferenceSample

ROWS = 12


class Ranks(ParallelContext):
    """One of several threads that gather what each brings."""

    def __init__(self, rank: int, size: int, brought: list, barrier: Barrier) -> None:
        super().__init__(rank, size)
        self._brought, self._barrier = brought, barrier

    def all_gather(self, tensor, dim=-1):
        self._brought[self.rank] = tensor
        self._barrier.wait(90)
        found = torch.cat(self._brought, dim)
        self._barrier.wait(90)
        return found


def make_state(vocab_size: int) -> BatchState:
    return BatchState(
        max_num_seqs=ROWS, max_model_len=8, vocab_size=vocab_size, block_sizes=[4], num_side_slots=0, device=torch.device("cpu"),
    )  # fmt: skip


def taken(state, sample, logits):
    slots = torch.arange(len(logits))
    slots[-1] = state.padding_slot
    state.num_computed_tokens[:ROWS] = torch.arange(ROWS) % 7
    result = torch.full((len(logits), 2), 9, dtype=torch.int32)
    sample(logits, slots, result)
    return result, state.token_ids.clone(), state.num_computed_tokens.clone()


@pytest.mark.parametrize("size, vocab_size", [(2, 10), (2, 11), (3, 100), (4, 100), (4, 5)])
def test_shares_give_what_all_logits_give(size: int, vocab_size: int) -> None:
    """Of 5 tokens on 4 ranks the last rank has none."""
    logits = torch.randint(-3, 4, (ROWS, vocab_size), generator=torch.Generator().manual_seed(vocab_size)).float()
    logits[0] = 2.5  # all equal
    logits[1] = -torch.inf
    logits[2, vocab_size - 1] = torch.nan
    logits[3, 0] = torch.inf
    logits[4] = -1e30
    logits[4, vocab_size - 1] = -1e29
    logits[5, :2] = torch.tensor([0.0, -0.0])
    logits[5, 2:] = -0.0
    state = make_state(vocab_size)
    sample = ReferenceSample.bind(
        SampleNeeds(vocab_size=vocab_size, max_num_seqs=ROWS, variant="greedy"), SampleTensors(state)
    )
    expected = taken(state, sample, logits.clone())

    width = -(-vocab_size // size)
    padded = torch.cat([logits, torch.full((ROWS, size * width - vocab_size), 7.0)], dim=1)  # larger than any token's
    brought, barrier = [None] * size, Barrier(size)

    def rank(number: int):
        shares = LogitShares(Ranks(number, size, brought, barrier))
        mine = padded[:, number * width : (number + 1) * width].contiguous()
        own = make_state(vocab_size)
        best = BestOfShares(shares, own)
        with best.kept():
            assert shares.all_gather(mine) is mine
        assert torch.equal(shares.all_gather(mine), padded) or padded.isnan().any()
        return taken(own, best, mine)

    with ThreadPoolExecutor(size) as threads:
        for found in threads.map(rank, range(size)):
            codes = expected[0][:, 1]
            assert torch.equal(found[0][:, 1], codes)
            assert torch.equal(found[0][codes == 0], expected[0][codes == 0])
            assert torch.equal(found[2], expected[2])
            fine = (codes == 0).nonzero().flatten()
            assert torch.equal(found[1][fine], expected[1][fine])


@pytest.mark.parametrize("vocab_size, least", [(49_152, 11), (128_256, 5)])
def test_shares_are_taken_where_logits_are_many(vocab_size: int, least: int) -> None:
    """A rank's share of so many rows has 1 MiB."""
    state = BatchState(
        max_num_seqs=1, max_model_len=8, vocab_size=vocab_size, block_sizes=[4], num_side_slots=0, device=torch.device("cpu"),
    )  # fmt: skip
    best = BestOfShares(LogitShares(Ranks(0, 2, [None] * 2, Barrier(2))), state)
    assert [best.pay(rows) for rows in (1, least - 1, least, 64)] == [False, False, True, True]


def test_an_op_with_keys_of_its_own_is_asked_for_them() -> None:
    """Whatever the number of rows: it takes less than to gather logits. Of 11 tokens the second of two ranks has five."""
    asked = []

    class Op:
        def share_keys(self, logits, slots, count):
            asked.append((logits.shape, count))
            return torch.arange(len(slots)) + 10

        def end_shares(self, keys, width, slots, result):
            asked.append((keys.tolist(), width))
            result.fill_(3)

    class Second(ParallelContext):
        def all_gather(self, tensor, dim=-1):
            return torch.cat([tensor - 10, tensor], dim)

    best = BestOfShares(LogitShares(Second(1, 2)), make_state(11), Op())
    assert best.pay(1)
    result = torch.zeros(2, 2, dtype=torch.int32)
    best(torch.zeros(2, 6), torch.arange(2), result)
    assert asked == [((2, 6), 5), ([[0, 1], [10, 11]], 6)]
    assert (result == 3).all()


class FirstOfTwo(ParallelContext):
    """The other rank's part of what is gathered is made of the last step's logits."""

    def __init__(self) -> None:
        super().__init__(0, 2)
        self.logits = torch.zeros(0)
        self.gathered: list[int] = []  # numbers of a row

    def all_gather(self, tensor, dim=-1):
        self.gathered.append(tensor.shape[1])
        width = -(-VOCAB // 2)
        theirs = self.logits[:, width:]
        if tensor.dtype == torch.int32:
            best, place = theirs.max(dim=-1)
            theirs = torch.stack([best.view(torch.int32), (place + width).int()], dim=1)
        return torch.cat([tensor, theirs], dim)


@pytest.mark.parametrize("mode", [None, CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL])
def test_greedy_steps_gather_no_logits_and_others_do(
    mode: CUDAGraphMode | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logit_shares, "LEAST_BYTES", 0)
    ranks = FirstOfTwo()
    shares = LogitShares(ranks)
    runner = make_runner()
    compute_logits = runner.model.compute_logits

    def compute(hidden, rows):
        ranks.logits = compute_logits(hidden, rows)
        return shares.all_gather(ranks.logits[:, : -(-VOCAB // 2)].contiguous())[:, :VOCAB]

    runner.model.compute_logits = compute
    runner.ops.shares = BestOfShares(shares, runner.state)
    if mode is not None:
        runner.use_graphs(GraphDispatcher(mode, max_num_seqs=8, max_num_tokens=64), FakeGraphRecorder())
    ranks.gathered.clear()
    driver = Driver(runner)
    prompts = [[5], [3, 1, 4, 1, 5, 9], list(range(10, 31))]
    requests = [driver.add(slot, prompt) for slot, prompt in enumerate(prompts)]
    driver.step([(request, len(request.token_ids)) for request in requests])
    driver.decode(requests, 5)
    assert [request.output for request in requests] == [oracle_greedy(prompt, 6) for prompt in prompts]
    if mode is None:
        assert set(ranks.gathered) == {2}
    ranks.gathered.clear()
    hot = driver.add(3, [5, 6], temperature=0.8, seed=1)
    driver.step([(hot, 2)])
    assert -(-VOCAB // 2) in ranks.gathered
