"""Ranks of engines that share their experts, as threads of this process: where they meet, how they step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from pelton.errors import EngineError
from pelton_plugins.executors.in_process import WorkerThread
from pelton_plugins.executors.one_rank import OneRank
from pelton_plugins.executors.shared_experts.exchange import EngineExchange
from pelton_plugins.executors.shared_experts.lock_step import LockStep
from pelton_plugins.executors.shared_experts.meeting import meet

NUM_LAYERS = 3


class Threads(OneRank):
    """A communicator of threads."""

    def __init__(self, rank: int, size: int, shared: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self._shared, self._barrier = rank, size, shared, barrier

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        self._shared[self.rank] = tensor.clone()
        self._barrier.wait(60)
        found = torch.cat(self._shared, dim)
        self._barrier.wait(60)
        return found

    def reduce_scatter(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return self.all_gather(tensor.unsqueeze(0), 0).sum(0).chunk(self.size, dim)[self.rank]


class Engine:
    """A rank with its thread. Its layers add up what all bring; `fails_at` ends its steps in a layer."""

    def __init__(self, rank: int, sizes: tuple[int, int], groups: list[Any], folder: Path) -> None:
        num_engines, engine_size = sizes
        engine, place = divmod(rank, engine_size)
        self.thread = WorkerThread(f"rank {rank}")
        self.exchange = EngineExchange(Threads(engine, num_engines, *groups[place]))
        self.lock_step = LockStep(
            Threads(rank, num_engines * engine_size, *groups[-1]), self.exchange, self.thread.submit, folder=folder,
            device=torch.device("cpu"),
        )  # fmt: skip
        for _ in range(NUM_LAYERS):
            self.exchange.add_layer(lambda: self.layer(torch.zeros(0, 2)))

    def layer(self, x: torch.Tensor) -> torch.Tensor:
        return self.exchange.scatter(self.exchange.gather(x), len(x))

    def step(self, step_id: int, x: torch.Tensor, fails_at: int = -1) -> Future[torch.Tensor]:
        def forward() -> torch.Tensor:
            y = x
            for layer in range(NUM_LAYERS):
                if layer == fails_at:
                    raise ValueError("this step fails")
                y = self.layer(y)
            return y

        self.lock_step.add()
        return self.thread.submit(lambda: self.lock_step.run(step_id, len(x), forward))


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[int, int], list[Engine]]]:
    """From numbers of engines and of ranks of each."""
    made: list[Engine] = []

    def build(num_engines: int, engine_size: int) -> list[Engine]:
        size = num_engines * engine_size
        groups = [([None] * num_engines, threading.Barrier(num_engines)) for _ in range(engine_size)]
        groups.append(([None] * size, threading.Barrier(size)))
        made.extend(Engine(rank, (num_engines, engine_size), groups, tmp_path) for rank in range(size))
        return made

    yield build
    for engine in made:
        engine.lock_step.close()
        engine.thread.close(1.0)


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_idle_engines_step_along_and_sleep_between_waves(make: Callable[[int, int], list[Engine]]) -> None:
    first, second, third = make(3, 1)
    x = torch.arange(6.0).view(3, 2)
    for step_id in range(20):
        assert torch.equal(first.step(step_id, x).result(60), x * 3**NUM_LAYERS)
    engines = (first, second, third)
    wait_until(lambda: not any(engine.lock_step._is_in_wave for engine in engines))
    counts = [engine.lock_step.counts() for engine in (first, second, third)]
    assert counts[0]["steps"] == counts[1]["dummy_steps"] == counts[2]["dummy_steps"] == 20
    time.sleep(0.05)
    assert [engine.lock_step.counts() for engine in (first, second, third)] == counts
    futures = [engine.step(0, x[:count]) for count, engine in enumerate((first, second, third))]
    for count, future in enumerate(futures):
        assert future.result(60).shape == (count, 2)


def test_steps_of_all_at_any_time(make: Callable[[int, int], list[Engine]]) -> None:
    """Each gets its own tokens back, whatever the others bring, and jobs that are no steps find their turn."""
    engines = make(2, 1)

    def drive(engine: Engine) -> None:
        generator = torch.Generator().manual_seed(engine.exchange.rank)
        for step_id in range(150):
            x = torch.rand(int(torch.randint(1, 5, (), generator=generator)), 2, generator=generator)
            found = engine.step(step_id, x)
            assert engine.thread.submit(lambda: "turn").result(60) == "turn"
            assert found.result(60).shape == x.shape
            if step_id % 10 == 0:
                time.sleep(float(torch.rand((), generator=generator)) * 0.01)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(drive, engines))
    assert [engine.lock_step.counts()["steps"] for engine in engines] == [150, 150]


def test_ranks_of_one_engine_run_a_step_once_all_have_it(make: Callable[[int, int], list[Engine]]) -> None:
    ranks = make(2, 2)
    x = torch.ones(2, 2)
    early = ranks[0].step(0, x)
    time.sleep(0.05)
    assert not early.done()
    others = ranks[3].step(0, x), ranks[2].step(0, x)
    late = ranks[1].step(0, x)
    for future in (early, late, *others):
        assert future.result(60).shape == x.shape
    assert all(rank.lock_step.counts()["steps"] == 1 for rank in ranks)


def test_a_step_that_fails_leaves_the_others_theirs(make: Callable[[int, int], list[Engine]]) -> None:
    """Its engine still enters the layers that are left."""
    first, second = make(2, 1)
    x = torch.ones(2, 2)
    failed, other = first.step(0, x, fails_at=1), second.step(0, x)
    assert other.result(60).shape == x.shape
    with pytest.raises(ValueError, match="this step fails"):
        failed.result(60)
    assert first.step(1, x).result(60).shape == x.shape


def test_more_tokens_than_were_announced(make: Callable[[int, int], list[Engine]]) -> None:
    first, _ = make(2, 1)
    first.lock_step.add()
    too_many = first.thread.submit(lambda: first.lock_step.run(0, 1, lambda: first.layer(torch.ones(2, 2))))
    with pytest.raises(EngineError, match="entered with 2 tokens; this step has 1"):
        too_many.result(60)


def test_processes_meet_those_that_are_there_now(tmp_path: Path) -> None:
    def all_meet(ranks: range) -> list[str]:
        with ThreadPoolExecutor(len(ranks)) as pool:
            return list(pool.map(lambda rank: meet(tmp_path / "group", rank, 3, 60), ranks))

    (first,) = set(all_meet(range(3)))
    with pytest.raises(EngineError, match=r"Ranks \[0, 2\] of the 3 that share experts did not come within 0.2 s"):
        meet(tmp_path / "group", 1, 3, 0.2)
    (second,) = set(all_meet(range(3)))
    assert first != second
    (tmp_path / "theirs").mkdir(mode=0o755)
    with pytest.raises(EngineError, match="belongs to somebody else"):
        meet(tmp_path / "theirs", 0, 1, 1)
