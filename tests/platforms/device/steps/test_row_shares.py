"""Ranks that sample a share of a step's rows each give what one device gives, all of it: tokens, logprobs, counts and errors."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest
import torch
from pelton_worker_fakes import VOCAB, Driver, make_runner

from pelton.config import CUDAGraphMode
from pelton.messages.step import GrammarMasks
from pelton.parallel.communicator import Communicator, CommunicatorContext, GroupContext
from pelton.sampling.logprobs import LogprobTensors, gather_logprobs
from pelton.testing.graphs import FakeGraphRecorder
from pelton_platforms.device.graphs.dispatcher import GraphDispatcher
from pelton_platforms.device.steps import row_shares
from pelton_platforms.device.steps.logit_shares import BestOfShares, LogitShares
from pelton_platforms.device.steps.row_shares import RowShares
from pelton_platforms.device.steps.step_tails import TailChooser

_GROUPS: dict[int, tuple[Barrier, list]] = {}


@torch.library.custom_op("pelton_tests::brought", mutates_args=())
def brought(tensor: torch.Tensor, group: int, rank: int) -> torch.Tensor:
    """What threads bring, [size, ...]: one op, which a captured step has again."""
    barrier, parts = _GROUPS[group]
    parts[rank] = tensor.clone()
    barrier.wait(60)
    found = torch.stack(parts)
    barrier.wait(60)
    return found


class Threads(Communicator):
    """The ranks are threads of this process. `swapped`, `gathered`: numbers of a row that went round."""

    def __init__(self, group: int, rank: int, size: int) -> None:
        super().__init__(CommunicatorContext(rank=rank, size=size, device=torch.device("cpu"), store=""))
        self.group, self.swapped, self.gathered = group, [], []

    def _all(self, tensor):
        return torch.ops.pelton_tests.brought(tensor.contiguous(), self.group, self.rank)

    def all_gather(self, tensor, dim=-1):
        self.gathered.append(tensor.shape[-1])
        return torch.cat(self._all(tensor).unbind(), dim)

    def swap(self, tensor):
        self.swapped.append(tensor.shape[-1])
        return self._all(tensor)[:, self.rank]

    def all_reduce(self, tensor): ...
    def reduce_scatter(self, tensor, dim=-1): ...
    def all_to_all(self, tensor, send_counts, recv_counts): ...
    def send(self, tensor, to): ...
    def recv(self, tensor, source): ...


def ranks_of(size: int):
    group = len(_GROUPS)
    _GROUPS[group] = Barrier(size), [None] * size
    return [Threads(group, rank, size) for rank in range(size)]


def share_out(runner, communicator) -> None:
    """The runner's model gives a share of the vocabulary, as a model of several ranks does."""
    shares = LogitShares(GroupContext(communicator))
    compute_logits, width = runner.model.compute_logits, -(-VOCAB // communicator.size)

    def compute(hidden, rows):
        logits = compute_logits(hidden, rows)
        logits = torch.cat([logits, logits.new_full((len(logits), communicator.size * width - VOCAB), 9e9)], dim=1)
        own = logits[:, communicator.rank * width : (communicator.rank + 1) * width]
        return shares.all_gather(own.contiguous())[:, :VOCAB]

    runner.model.compute_logits = compute
    runner.ops.shares = BestOfShares(shares, runner.state)
    runner.ops.row_shares = RowShares(shares, runner.state)


PROMPTS = [[5], [3, 1, 4, 1, 5, 9], list(range(10, 31)), [7, 7], [8, 9, 10], [1, 2], [30]]
PARAMS = [
    {"temperature": 0.9, "seed": 1},
    {"temperature": 1.3, "seed": 2, "top_k": 5, "logprobs": 3},
    {"temperature": 0.7, "seed": 3, "top_p": 0.8, "side_slot": 0, "presence_penalty": 0.7, "repetition_penalty": 1.2,
     "prompt_logprobs": 2},
    {"temperature": 0.0, "logprobs": 0},
    {"temperature": 1.0, "seed": 4, "min_p": 0.05, "side_slot": 1, "logit_bias": {4: 3.0, 39: 2.0}, "min_tokens": 3},
    {"temperature": 1.5, "seed": 5, "top_k": 9, "top_p": 0.9, "side_slot": 2, "frequency_penalty": 0.5, "logprobs": 30},
    {"temperature": 0.8, "seed": 6},
]  # fmt: skip


def bits(rows: list[list[int]]) -> bytes:
    words = np.zeros((len(rows), 2), dtype=np.int32)
    for row, allowed in enumerate(rows):
        for token in allowed:
            words[row, token // 32] |= np.int32(1) << np.int32(token % 32)
    return words.tobytes()


def run(runner, drafts: bool, everything: bool) -> list:
    """Prompts, decodes of different numbers of rows, masks, drafts: all that steps gave, and what the state holds then."""
    driver, found = Driver(runner), []
    params = [{**one, **({"logprobs": -1} if everything and at == 3 else {})} for at, one in enumerate(PARAMS)]
    requests = []
    for slot, (prompt, one) in enumerate(zip(PROMPTS, params, strict=True)):
        requests.append(driver.add(slot, prompt, **one))
        requests[-1].seed = one.get("seed", 0)
    rows = sorted(((one, len(one.token_ids)) for one in requests), key=lambda row: row[1])
    found.append(driver.step(rows))
    for count in (7, 7, 5, 2, 3, 1, 7):
        found.append(driver.step([(one, 1) for one in requests[:count]]))
    for masked in ([0, 3, 6], [1, 2]):
        rows = [(one, 1) for one in requests]
        output = driver.plan(rows, grammar_rows=masked)
        result = driver.runner.execute(output)
        assert result is None
        allowed = [[3, 33, 38], [], [1, 2, 4, 39]][: len(masked)]
        masks = GrammarMasks(step_id=output.step_id, bitmask=bits(allowed), num_masks=[1] * len(masked))
        found.append(driver.runner.sample(masks))
        driver.take(rows, None, found[-1])
        for one in requests:  # a row that failed has no token; its request would end
            one.token_ids += [0] * (one.num_computed + 1 - len(one.token_ids))
    if drafts:
        for own in ({1: [4, 5], 2: [7]}, {slot: [3, 4, 5] for slot in range(6)}):
            plain = [(one, 1) for one in requests if one.slot not in own]
            found.append(driver.step(plain + [(one, 1) for one in requests if one.slot in own], own))
    state = runner.state
    seen = [
        (one.token_ids, one.logprobs and {row: part.columns() for row, part in one.logprobs.items()}, one.row_errors,
         {row: part.columns() for row, part in one.prompt_logprobs.items()})
        for one in found
    ]  # fmt: skip
    return [seen, state.token_ids[:-1].tolist(), state.num_computed_tokens[:-1].tolist(), state.side.counts.tolist()]


def prepared(mode, *, drafts: bool = False):
    runner = make_runner(num_blocks=160)
    if drafts:
        runner.ops.use_drafts(3, None)
    return runner


def with_graphs(runner, mode):
    if mode is not None:
        runner.use_graphs(GraphDispatcher(mode, max_num_seqs=8, max_num_tokens=64), FakeGraphRecorder())
    return runner


CASES = [
    pytest.param(2, None, False, True, False, id="torch"),
    pytest.param(3, None, False, True, False, id="torch-of-three"),
    pytest.param(2, None, False, False, True, id="torch-all-logprobs"),
    pytest.param(2, CUDAGraphMode.FULL_DECODE_ONLY, False, True, False, id="torch-decode-graphs"),
    pytest.param(3, CUDAGraphMode.FULL, False, False, True, id="torch-graphs-all-logprobs"),
    pytest.param(2, None, True, True, False, id="op"),
    pytest.param(3, CUDAGraphMode.FULL_DECODE_ONLY, True, False, True, id="op-decode-graphs-of-three"),
    pytest.param(2, CUDAGraphMode.FULL, True, True, False, id="op-graphs"),
]


@pytest.mark.parametrize("size, mode, by_op, drafts, everything", CASES)
def test_rows_of_ranks_are_those_of_one_device(size, mode, by_op, drafts, everything, monkeypatch) -> None:
    """by_op: every row by the `sample` op, as on a GPU; else by torch ops that the host chooses, as on a CPU without C."""
    monkeypatch.setattr(TailChooser, "op_suits_all", property(lambda chooser: by_op))
    monkeypatch.setattr(row_shares, "LEAST_BYTES", 0)
    expected = run(with_graphs(prepared(mode, drafts=drafts), mode), drafts, everything)
    communicators = ranks_of(size)

    def rank(communicator):
        runner = prepared(mode, drafts=drafts)
        share_out(runner, communicator)
        return run(with_graphs(runner, mode), drafts, everything)

    with ThreadPoolExecutor(size) as threads:
        for found in threads.map(rank, communicators):
            assert found == expected
    width = -(-VOCAB // size)
    for one in communicators:  # shares are gathered in steps of fewer rows than ranks alone; captured ones run twice
        assert one.swapped.count(width) >= 6 and one.gathered.count(width) <= (size - 1) * (1 if mode is None else 2)


@pytest.mark.parametrize("size, num_rows", [(2, 2), (2, 7), (3, 4), (4, 5), (4, 9)])
def test_rows_have_an_owner_each(size: int, num_rows: int) -> None:
    """Of 5 rows on 4 ranks the first have 2 each, the third one, the last none."""
    shares = [RowShares(LogitShares(GroupContext(one)), make_runner().state) for one in ranks_of(size)]
    count = shares[0].count(num_rows)
    owned = [range(num_rows)[one.own(num_rows, count)] for one in shares]
    assert [row for rows in owned for row in rows] == list(range(num_rows))
    assert max(map(len, owned)) == count
    assert shares[0].count(12, unit=4) % 4 == 0


def test_logprobs_of_some_rows_come_together() -> None:
    """Of no row of the last rank any are wanted."""
    logits = torch.randn(7, 20, generator=torch.Generator().manual_seed(0))
    wanted, tokens = np.array([0, 1, 3]), torch.tensor([4, 19, 0])
    expected = gather_logprobs(logits[wanted], tokens, 3)

    def rank(communicator):
        shares = RowShares(LogitShares(GroupContext(communicator)), make_runner().state)
        rows, places = shares.places(wanted, 3)
        first = communicator.rank * 3
        own = torch.zeros(7, dtype=torch.int64)
        own[wanted] = tokens
        held = torch.cat([logits, torch.zeros(2, 20)])[first : first + 3]
        chosen = torch.cat([own, torch.zeros(2, dtype=torch.int64)])[first : first + 3]
        return shares.gather_logprobs(gather_logprobs(held[rows], chosen[rows], 3), torch.from_numpy(places))

    with ThreadPoolExecutor(3) as threads:
        for found in threads.map(rank, ranks_of(3)):
            assert isinstance(found, LogprobTensors)
            for mine, one in zip(found.tensors(), expected.tensors(), strict=True):
                assert torch.equal(mine, one)


@pytest.mark.parametrize("vocab_size, least", [(49_152, 11), (128_256, 5)])
def test_rows_are_shared_out_where_logits_are_many(vocab_size: int, least: int) -> None:
    runner = make_runner()
    runner.state.vocab_size = vocab_size
    pays = RowShares(LogitShares(GroupContext(ranks_of(2)[0])), runner.state).pay
    assert [pays(rows) for rows in (1, least - 1, least, 64)] == [False, False, True, True]
