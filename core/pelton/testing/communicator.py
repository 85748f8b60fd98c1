"""Conformance of communicators: what any implementation has to keep, between real processes, run with pytest.

Subclass `CommunicatorConformance` in a test module and name what is tested:

    class TestMine(CommunicatorConformance):
        load = "my_package.communicator:MyCommunicator"

One process for each rank runs `python -m pelton.testing.communicator`; every test looks at what the ranks report.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from pelton.errors import EngineError
from pelton.parallel.communicator import Communicator, CommunicatorContext

Report = dict[str, list[str]]
"""Of one rank: what was wrong, by check."""
CHECKS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "swap", "send_and_recv", "send_ahead")
_START_S = 120.0
_MESSAGES_AHEAD = 8
"""That a rank has sent before the other one takes the first: stages have a message on its way for each step that is open."""
_GONE_AFTER_S = 3.0
"""Time limit of the ranks that lose one."""


class CommunicatorConformance:
    load: ClassVar[str]
    """module:class"""
    size: ClassVar[int] = 2
    device: ClassVar[str] = "cpu"
    _reports: ClassVar[list[Report]]
    _failure: ClassVar[str]

    @pytest.fixture
    def reports(self) -> list[Report]:
        """Return what each rank found: the ranks run once for a class."""
        cls = type(self)
        if "_failure" in vars(cls):
            pytest.fail(f"the ranks did not run: {cls._failure}")
        if "_reports" not in vars(cls):
            try:
                cls._reports = [json.loads(text) for text in self._run()]
            except Exception as error:
                cls._failure = str(error)
                raise
        return cls._reports

    @pytest.mark.parametrize("check", CHECKS)
    def test_collectives_give_what_is_written_of_them(self, reports: list[Report], check: str) -> None:
        for rank, report in enumerate(reports):
            assert check in report, f"rank {rank} ended before {check}"
            assert not report[check], f"rank {rank}: {report[check][0]}"

    def test_every_rank_gets_the_same_bits(self, reports: list[Report]) -> None:
        bits = [report["bits"] for report in reports]
        assert bits[0] and all(found == bits[0] for found in bits), "sums differ between ranks"

    def test_groups_of_one_rank_are_the_identity(self) -> None:
        communicator = self._alone()
        x = torch.arange(6.0, device=self.device).view(2, 3)
        assert torch.equal(communicator.all_reduce(x.clone()), x)
        assert torch.equal(communicator.all_gather(x), x) and torch.equal(communicator.reduce_scatter(x), x)
        assert torch.equal(communicator.all_to_all(x, [2], [2]), x)
        communicator.shutdown()

    def test_a_rank_that_is_gone_is_an_error(self, reports: list[Report]) -> None:
        for report in reports[:-1]:
            (said,) = report["left"]
            assert said.startswith("EngineError"), f"a rank that waits for one that is gone reports {said!r}"

    def _alone(self) -> Communicator:
        with tempfile.TemporaryDirectory() as folder:
            return _make(self.load, 0, 1, str(Path(folder) / "store"), self.device, "alone", 10.0)

    def _run(self) -> list[str]:
        """The last line that each rank prints."""
        with tempfile.TemporaryDirectory() as folder:
            arguments = [self.load, str(self.size), str(Path(folder) / "store"), self.device]
            environ = {**os.environ, "OMP_NUM_THREADS": "1"}
            ranks = [
                subprocess.Popen(
                    [sys.executable, "-m", "pelton.testing.communicator", str(rank), *arguments], stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT, text=True, env=environ,
                )
                for rank in range(self.size)
            ]  # fmt: skip
            try:
                late = self._wait(ranks)
            finally:
                for rank in ranks:
                    rank.kill()
            texts = [rank.communicate()[0].strip() for rank in ranks]
            failed = [number for number, rank in enumerate(ranks) if number not in late and rank.returncode != 0]
            for number in failed or late:
                status = ranks[number].returncode
                how = f"ended with status {status}" if failed else f"did not end within {_START_S:g} s"
                raise AssertionError(f"rank {number} {how}: {texts[number][-1500:]}")
        return [text.splitlines()[-1] for text in texts]

    def _wait(self, ranks: list[subprocess.Popen[str]]) -> list[int]:
        """Return who had not ended when the time was over, or when one failed, for which the others would wait."""
        deadline = time.monotonic() + _START_S
        while True:
            statuses = [rank.poll() for rank in ranks]
            running = [number for number, status in enumerate(statuses) if status is None]
            if not running or any(statuses) or time.monotonic() > deadline:
                return running
            time.sleep(0.02)


def _make(load: str, rank: int, size: int, store: str, device: str, group: str, timeout_s: float) -> Communicator:
    module, _, name = load.partition(":")
    made: Communicator = getattr(importlib.import_module(module), name)(
        CommunicatorContext(
            rank=rank, size=size, device=torch.device(device), store=store, group=group, timeout_s=timeout_s
        )
    )
    return made


class _Checks:
    """One rank's. Every rank can make what every other sends: it follows from (rank, shape, dtype)."""

    def __init__(self, communicator: Communicator, device: str) -> None:
        self.group, self.device = communicator, device
        self.rank, self.size = communicator.rank, communicator.size
        self.bits: list[str] = []

    def given(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        generator = torch.Generator().manual_seed(100 * rank + len(shape) + sum(shape))
        values = torch.randn(shape, generator=generator) if dtype.is_floating_point else torch.randint(0, 9, shape)
        return values.to(dtype).to(self.device) if dtype.is_floating_point else self._integers(rank, shape)

    def _integers(self, rank: int, shape: tuple[int, ...]) -> Tensor:
        count = torch.Size(shape).numel()
        return (torch.arange(count, device=self.device) * (rank + 1) + rank).view(shape)

    def everywhere(self, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
        return [self.given(rank, shape, dtype) for rank in range(self.size)]

    def all_reduce(self) -> Iterator[str]:
        for shape in ((1,), (3, 5), (2, 3, 64), (0, 4), (70_001,)):
            for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64):
                parts = self.everywhere(shape, dtype)
                exact = torch.stack([part.double() for part in parts]).sum(0)
                found = self.group.all_reduce(parts[self.rank].clone())
                yield from _differs(f"all_reduce {dtype} {shape}", found, exact.to(dtype))
                self.bits.append(_digest(found))

    def all_gather(self) -> Iterator[str]:
        for shape, dim in (((3,), -1), ((2, 3), 0), ((2, 3), -1), ((2, 3, 4), 1)):
            for dtype in (torch.float32, torch.bfloat16, torch.int64):
                parts = self.everywhere(shape, dtype)
                found = self.group.all_gather(parts[self.rank], dim)
                yield from _differs(f"all_gather {dtype} {shape} along {dim}", found, torch.cat(parts, dim), exact=True)

    def reduce_scatter(self) -> Iterator[str]:
        n = self.size
        for shape, dim in (((4 * n,), -1), ((2 * n, 3), 0), ((3, 2 * n), -1)):
            for dtype in (torch.float32, torch.bfloat16):
                parts = self.everywhere(shape, dtype)
                exact = torch.stack([part.double() for part in parts]).sum(0).chunk(n, dim)[self.rank].to(dtype)
                found = self.group.reduce_scatter(parts[self.rank].clone(), dim)
                yield from _differs(f"reduce_scatter {dtype} {shape} along {dim}", found, exact)

    def all_to_all(self) -> Iterator[str]:
        tables = [
            [[least + (source + target) % 3 for target in range(self.size)] for source in range(self.size)]
            for least in (0, 1, 3)
        ]
        nothing = [0] * self.size
        for counts in [*tables, [nothing, *tables[1][1:]], [nothing] * self.size]:
            parts = [self.given(rank, (sum(counts[rank]), 4), torch.float32) for rank in range(self.size)]
            received = [counts[source][self.rank] for source in range(self.size)]
            exact = torch.cat([torch.split(parts[rank], counts[rank])[self.rank] for rank in range(self.size)])
            found = self.group.all_to_all(parts[self.rank], counts[self.rank], received)
            yield from _differs(f"all_to_all with {counts}", found, exact, exact=True)

    def swap(self) -> Iterator[str]:
        for shape in ((1,), (3, 5), (170_001,)):
            for dtype in (torch.float32, torch.bfloat16):
                parts = self.everywhere((self.size, *shape), dtype)
                exact = torch.stack([part[self.rank] for part in parts])
                yield from _differs(f"swap {dtype} {shape}", self.group.swap(parts[self.rank]), exact, exact=True)

    def send_and_recv(self) -> Iterator[str]:
        """Around the ring: even ranks send first, so that nobody waits for somebody who waits."""
        if self.size < 2:
            return
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        for shape, dtype in (((5,), torch.float32), ((2, 3), torch.bfloat16), ((4,), torch.int64)):
            mine, expected = self.given(self.rank, shape, dtype), self.given(before, shape, dtype)
            found = torch.zeros_like(expected)
            steps: list[Callable[[], Any]] = [
                lambda mine=mine: self.group.send(mine, after),  # type: ignore[misc]
                lambda found=found: self.group.recv(found, before),  # type: ignore[misc]
            ]
            for step in steps if self.rank % 2 == 0 else reversed(steps):
                step()
            yield from _differs(f"recv of {dtype} {shape}", found, expected, exact=True)

    def send_ahead(self) -> Iterator[str]:
        """Around the ring, in both directions at once: every rank has sent all before it takes anything, as stages may."""
        if self.size < 2:
            return
        neighbours = {(self.rank + 1) % self.size, (self.rank - 1) % self.size}
        shapes = [(5,), (130, 3), (9, 4)] * 3
        for _ in range(3):  # places are used again
            for number, shape in enumerate(shapes[:_MESSAGES_AHEAD]):
                for other in neighbours:
                    self.group.send(self.given(self.rank, (number + 1, *shape), torch.float32), other)
            for number, shape in enumerate(shapes[:_MESSAGES_AHEAD]):
                for other in neighbours:
                    expected = self.given(other, (number + 1, *shape), torch.float32)
                    found = self.group.recv(torch.zeros_like(expected), other)
                    yield from _differs(
                        f"message {number} of {_MESSAGES_AHEAD} from {other}", found, expected, exact=True
                    )


def _differs(what: str, found: Tensor, expected: Tensor, *, exact: bool = False) -> Iterator[str]:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        yield f"{what} gives {found.dtype} {list(found.shape)}, not {expected.dtype} {list(expected.shape)}"
    elif exact or not found.dtype.is_floating_point:
        if not torch.equal(found, expected):
            yield f"{what} gives other values"
    elif found.numel():
        # A sum in another order is one rounding off at most, of a few terms in float32.
        step = torch.finfo(found.dtype).eps
        wrong = (found.double() - expected.double()).abs() > 2 * step * (expected.double().abs() + 1)
        if wrong.any():
            yield f"{what} is off by {(found.double() - expected.double()).abs().max():.1e}"


def _digest(tensor: Tensor) -> str:
    values = tensor.cpu().contiguous().view(torch.uint8).to(torch.int64)
    place = torch.arange(1, values.numel() + 1)
    return str(int((values.flatten() * place).sum()))


def _leave(load: str, rank: int, size: int, store: str, device: str) -> list[str]:
    """The last rank goes without a word; what the others are told."""
    communicator = _make(load, rank, size, store, device, "left", _GONE_AFTER_S)
    communicator.all_reduce(torch.ones(2, device=device))
    if rank == size - 1:
        return []
    try:
        for _ in range(2):  # a device that computes behind the host tells it with the next call
            communicator.all_reduce(torch.ones(2, device=device)).cpu()
        return ["nothing was raised"]
    except EngineError as error:
        return [f"EngineError: {error}"]


def main() -> int:
    rank, load, size, store, device = sys.argv[1:]
    checks = _Checks(_make(load, int(rank), int(size), store, device, "check", 60.0), device)
    report = {}
    for name in CHECKS:
        report[name] = list(getattr(checks, name)())
    checks.group.all_reduce(torch.ones(1, device=device))  # nobody leaves before all are done
    checks.group.shutdown()
    report["left"] = _leave(load, int(rank), int(size), store, device)
    print(json.dumps({**report, "bits": checks.bits}), flush=True)
    os._exit(0)  # as a process ends that is killed


if __name__ == "__main__":
    main()
