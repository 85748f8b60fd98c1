"""Columns in pinned memory: steps take them in the order in which they were written, and none is overwritten before that."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
import torch

from pelton_platforms.device.graphs import pinned_columns
from pelton_platforms.device.graphs.pinned_columns import PinnedColumns


class LateDevice:
    """Runs what is launched when somebody waits for it, or as much of it as it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.queue: deque[Any] = deque()
        self.seen: list[tuple[int, list[int]]] = []  # addresses and columns, as steps took them
        self.type = "late"
        self.num_waits = 0
        device = self

        class Event:
            def __init__(self, given: LateDevice) -> None:
                assert given is device

            def record(self) -> None:
                self.behind = len(device.queue)

            def synchronize(self) -> None:
                device.num_waits += 1
                device.run(self.behind)

        zeros = torch.zeros
        monkeypatch.setattr(pinned_columns.torch, "Event", Event)
        monkeypatch.setattr(
            pinned_columns.torch,
            "zeros",
            lambda *shape, dtype, pin_memory=False, device=None: zeros(*shape, dtype=dtype),
        )

    def run(self, count: int) -> None:
        for _ in range(count):
            self.queue.popleft()()

    def take(self, parts, turn, taken, place, columns, num_rows) -> None:
        def work() -> None:
            part = parts[int(turn) % len(parts)]
            place[0] = part[0]
            columns.copy_(part[2 : 2 + len(columns)])
            turn.add_(1)
            taken.copy_(turn)
            self.seen.append((int(place), columns.tolist()))

        self.queue.append(work)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> LateDevice:
    return LateDevice(monkeypatch)


def test_a_part_is_written_again_only_when_a_step_has_taken_it(device):
    columns, numbers = PinnedColumns(device, 3, 4, device), torch.zeros(4, dtype=torch.int64)
    for step in range(20):
        columns.write(np.full(4, step), 100 + step)
        columns.take(numbers, 1)
        if step % 5 == 0:
            device.run(len(device.queue) // 2)
    device.run(len(device.queue))
    assert device.seen == [(100 + step, [step] * 4) for step in range(20)]
    assert 0 < device.num_waits < 20, "the host waits where all parts are under way, and nowhere else"


def test_steps_that_keep_up_are_never_waited_for(device):
    columns, numbers = PinnedColumns(device, 3, 4, device), torch.zeros(2, dtype=torch.int64)
    for step in range(12):
        columns.write(np.array([step, -step]), step)
        columns.take(numbers, 1)
        if len(device.queue) == 3:
            device.run(1)
    assert device.num_waits == 0 and device.seen[9] == (9, [9, -9])


@pytest.mark.parametrize("was_taken", [True, False])
def test_after_a_step_that_failed_the_next_takes_its_own(device, was_taken):
    """Whether it failed before it had its columns or behind that."""
    columns, numbers = PinnedColumns(device, 3, 4, device), torch.zeros(1, dtype=torch.int64)
    for step in range(4):
        columns.write(np.array([step]), step)
        if step == 2 and not was_taken:
            columns.start_again()
            continue
        columns.take(numbers, 1)
        if step == 2:
            columns.start_again()
    device.run(len(device.queue))
    assert device.seen[-1] == (3, [3]) and len(device.seen) == 3 + was_taken
