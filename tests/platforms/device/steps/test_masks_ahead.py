"""Steps whose device waits for their masks, with a device that is this process: the thread that launches waits in its place."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pelton_worker_fakes import Driver, Running, make_worker

from pelton.errors import EngineError
from pelton.messages.step import GrammarMasks, ModelOutput
from pelton.testing.models import VOCAB_SIZE, make_tiny_checkpoint
from pelton_platforms.cuda.driver import stream_wait
from pelton_platforms.device.steps.masks import MaskPlaces
from pelton_platforms.device.steps.masks_ahead import MasksAhead, make_masks_ahead

NUM_WORDS = -(-VOCAB_SIZE // 32)


def wait(address: int, value: int) -> None:
    """What a stream does."""
    number, end = ctypes.c_int32.from_address(address), time.monotonic() + 90
    while number.value < value:
        assert time.monotonic() < end, "nobody brought the masks"
        time.sleep(1e-4)


@pytest.fixture
def device() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def masks(step_id: int, *rows: list[int], error: str = "") -> GrammarMasks:
    bitmask = np.array(rows, dtype="<i4").tobytes()
    return GrammarMasks(step_id=step_id, bitmask=bitmask, num_masks=[1] * len(rows), error=error)


def until(happens: Callable[[], bool]) -> None:
    end = time.monotonic() + 90
    while not happens():
        assert time.monotonic() < end
        time.sleep(1e-4)


def make_places() -> tuple[torch.Tensor, torch.Tensor, MasksAhead]:
    words, has_mask = torch.full((4, 2), 9, dtype=torch.int32), torch.ones(4, dtype=torch.bool)
    return words, has_mask, MasksAhead(MaskPlaces(words, has_mask), wait)


def test_two_steps_in_turn_get_their_own_masks(device: ThreadPoolExecutor) -> None:
    words, has_mask, ahead = make_places()
    seen: list[list[list[int]]] = []

    def step(step_id: int, slots: list[int]) -> None:
        ahead.open(step_id, np.array(slots))
        seen.append(words[slots].tolist())
        assert has_mask.tolist() == [slot in slots for slot in range(4)]

    steps = [device.submit(step, index, [2, 0] if index % 2 else [1, 2, 3]) for index in range(6)]
    for index in range(6):
        until(lambda index=index: index in ahead._awaited)  # type: ignore[misc]
        time.sleep(0.002)
        assert len(seen) == index, "it went on without its masks"
        ahead.bring(masks(index, *([index, row] for row in range(2 if index % 2 else 3))))
    for future in steps:
        future.result(90)
    assert seen == [[[index, row] for row in range(2 if index % 2 else 3)] for index in range(6)]
    assert not ahead.is_waiting
    ahead.settle()


@pytest.mark.parametrize(
    "wrong, error",
    [(masks(0, error="the grammar broke"), "the grammar broke"), (masks(0, [1, 2, 3]), "Placing the step's masks failed")],
    ids=["error", "another-size"],
)  # fmt: skip
def test_masks_that_are_wrong_let_the_device_go_on(device: ThreadPoolExecutor, wrong: GrammarMasks, error: str) -> None:
    _, _, ahead = make_places()
    opened = device.submit(ahead.open, 0, np.array([0, 1]))
    until(lambda: ahead.is_waiting)
    settled = threading.Thread(target=ahead.settle)
    settled.start()
    settled.join(0.01)
    assert settled.is_alive()
    ahead.bring(wrong)
    assert error in opened.result(90).error
    settled.join(90)
    assert not settled.is_alive()
    ahead.bring(wrong)  # nobody waits any more


def test_a_wait_that_fails_leaves_nothing_waiting() -> None:
    words, has_mask = torch.zeros(4, 2, dtype=torch.int32), torch.zeros(4, dtype=torch.bool)

    def refuse(address: int, value: int) -> None:
        raise RuntimeError("not here")

    places = MaskPlaces(words, has_mask)
    assert make_masks_ahead(places, refuse) is None and make_masks_ahead(places, None) is None
    ahead = MasksAhead(places, refuse)
    with pytest.raises(RuntimeError, match="not here"):
        ahead.open(0, np.array([0]))
    assert not ahead.is_waiting
    assert isinstance(make_masks_ahead(places, wait), MasksAhead)


@pytest.mark.parametrize("failure", [0, 801])
def test_the_driver_is_asked_for_a_wait_on_the_current_stream(failure: int) -> None:
    calls: list[tuple[Any, ...]] = []

    def call(*arguments: Any) -> int:
        calls.append(arguments)
        return failure

    library = SimpleNamespace(cuStreamWaitValue32_v2=call)
    found = stream_wait(lambda: 77, lambda name: library, "x86_64")
    assert found is not None
    if failure:
        with pytest.raises(RuntimeError, match="error 801"):
            found(4096, 3)
    else:
        found(4096, 3)
    assert calls == [(77, 4096, 3, 0)]
    assert stream_wait(lambda: 77, lambda name: library, "aarch64") is None
    assert stream_wait(lambda: 77, lambda name: SimpleNamespace(), "x86_64") is None


# Steps of a runner.


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_checkpoint(tmp_path_factory.mktemp("ahead") / "llama", "llama", head_dim=64))


class Steps:
    """Decode steps of three requests, two of them masked, on a thread in the device's place."""

    def __init__(self, checkpoint: str, device: ThreadPoolExecutor, *, is_ahead: bool) -> None:
        self.worker = device.submit(self._make, checkpoint).result()
        self.runner, self.device, self.is_ahead = self.worker.runner, device, is_ahead
        self.driver = Driver(self.runner)
        self.requests = [self.driver.add(slot, [7, 5, slot + 3], seed=slot, temperature=0.9) for slot in range(3)]
        self.chooser = np.random.default_rng(4)
        rows = [(request, 3) for request in self.requests]
        self.driver.take(rows, None, self.run(self.runner.execute, self.driver.plan(rows)))

    @staticmethod
    @torch.inference_mode()
    def _make(checkpoint: str) -> Any:
        return make_worker(checkpoint, device="cpu", cudagraph_mode="FULL")

    def run(self, call: Callable[..., Any], *arguments: Any) -> Any:
        return self.begin(call, *arguments).result(90)

    def begin(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        @torch.inference_mode()
        def work() -> Any:
            return call(*arguments)

        return self.device.submit(work)

    def step(self, error: str = "") -> bool:
        """Returns whether the device waited for its masks."""
        rows: list[tuple[Running, int]] = [(request, 1) for request in self.requests]
        step_id, allowed = self.driver.step_id, self.chooser.integers(0, 2**31, (2, NUM_WORDS)).tolist()
        brought = masks(step_id, *allowed, error=error)
        self.runner._stream_wait = wait if self.is_ahead else None
        launched = self.begin(self.runner.execute, self.driver.plan(rows, grammar_rows=[0, 2]))
        until(lambda: launched.done() or self.runner.awaits_masks)
        is_ahead: bool = self.runner.awaits_masks
        if is_ahead:
            assert not launched.done()
            self.runner.bring_masks(brought)
            result: ModelOutput = launched.result(90)
        else:
            assert launched.result(90) is None
            result = self.run(self.runner.sample, brought)
        self.driver.take(rows, None, result)
        for row, words in zip((0, 2), allowed, strict=True):
            token = result.token_ids[row][0]
            assert words[token // 32] >> (token % 32) & 1
        return is_ahead


def test_steps_that_wait_on_the_device_give_what_others_give(checkpoint: str, device: ThreadPoolExecutor) -> None:
    found = []
    for is_ahead in (False, True):
        steps = Steps(checkpoint, device, is_ahead=is_ahead)
        count = sum(steps.step() for _ in range(6))
        assert count == (5 if is_ahead else 0), "the first has its sampling captured"
        found.append([request.output for request in steps.requests])
        steps.worker.shutdown()
    assert found[0] == found[1] and all(len(tokens) == 7 for tokens in found[0])


def test_a_step_whose_masks_cannot_be_made_fails_and_the_next_goes_on(
    checkpoint: str, device: ThreadPoolExecutor
) -> None:
    steps = Steps(checkpoint, device, is_ahead=True)
    assert not steps.step() and steps.step()
    with pytest.raises(EngineError, match="the grammar broke"):
        steps.step(error="the grammar broke")
    assert not steps.runner.awaits_masks
    steps.run(steps.worker.check_device)
    assert steps.step()
    steps.worker.shutdown()
