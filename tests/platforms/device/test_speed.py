"""A step's budget from a measured speed."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from pelton_worker_fakes import make_worker

from pelton.testing.models import make_tiny_checkpoint
from pelton_platforms.device.speed import Speed, budget_note, context_tokens, fitting_tokens, measure_speed


class Device:
    """Computes a step in `floor_s`, or a token in `token_s` where that takes longer; other work slows the steps of `slowed`."""

    def __init__(self, floor_s, token_s, slowed=(), num_threads=2):
        self.floor_s, self.token_s, self.now, self.cpu_s, self.steps = floor_s, token_s, 0.0, 0.0, []
        self.slowed, self.num_threads = dict(slowed), num_threads

    def run(self, num_tokens):
        slowed = self.slowed.get(len(self.steps), 1)
        self.steps.append(num_tokens)
        seconds = max(self.floor_s, num_tokens * self.token_s)
        self.now += seconds * slowed
        self.cpu_s += seconds * self.num_threads

    def speed(self, most=2048, *, tells_cpu_s=True):
        return measure_speed(
            self.run, most, clock=lambda: self.now, cpu_clock=(lambda: self.cpu_s) if tells_cpu_s else None
        )


@pytest.mark.parametrize(
    "floor_s, token_s, steps",
    [
        pytest.param(0.001, 1e-5, [4, 32, 128], id="fast"),
        pytest.param(0.008, 5e-4, [4, 32, 128], id="usual"),
        pytest.param(0.1, 4e-3, [4, 32], id="a-large-model"),
        pytest.param(0.1, 1.0, [4], id="very-slow"),
    ],
)
def test_the_speed_of_many_tokens_is_found_in_little_time(floor_s, token_s, steps):
    device = Device(floor_s, token_s)
    assert device.speed() == (pytest.approx(1 / token_s, rel=0.01), False)
    assert device.steps == steps
    assert device.now < max(0.25, 4.1 * token_s)


@pytest.mark.parametrize(
    "slowed, steps, expected",
    [
        pytest.param({0: 40}, [4, 32, 128], Speed(2000, False), id="the-first-step-stands-still"),
        pytest.param({2: 9}, [4, 32, 128, 128], Speed(2000, False), id="a-step-that-is-held-up-is-tried-again"),
        pytest.param(
            dict.fromkeys(range(9), 5), [4, 32, 128], Speed(1000, True), id="all-steps-by-the-time-of-threads"
        ),
        pytest.param({1: 3, 2: 5, 3: 4, 4: 3}, [4, 32, 128], Speed(1000, True), id="most-steps"),
    ],
)
def test_steps_that_other_work_slows_do_not_count(slowed, steps, expected):
    device = Device(0.008, 5e-4, slowed)
    assert device.speed() == (pytest.approx(expected.tokens_s), expected.is_shared)
    assert device.steps == steps


def test_without_the_time_of_threads_steps_are_tried_three_times():
    device = Device(0.008, 5e-4, {2: 9, 3: 8, 4: 7})
    assert device.speed(tells_cpu_s=False) == (pytest.approx(2000), True)
    assert device.steps == [4, 32, 128, 128, 128]


def test_ranks_run_the_same_steps_whatever_each_measures():
    """Collectives lie in the steps: a rank that ran one more would wait for ever."""
    ran: list[list[int]] = [[], []]
    barrier = threading.Barrier(2)
    measured: dict[int, tuple[float, float]] = {}

    def measure(rank: int, factor: float) -> Speed:
        now = 0.0

        def run(num_tokens: int) -> None:
            nonlocal now
            ran[rank].append(num_tokens)
            now += (0.011 if num_tokens == 128 else 0.0001 * num_tokens) * factor

        def agree(*seconds: float) -> tuple[float, ...]:
            measured[rank] = seconds
            barrier.wait(60)
            found = tuple(max(both) for both in zip(*measured.values(), strict=True))
            barrier.wait(60)
            return found

        return measure_speed(run, 2048, clock=lambda: now, agree=agree)

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(measure, (0, 1), (1.0, 30.0)))
    assert found[0] == found[1]
    assert ran[0] == ran[1]


def test_the_start_table_tells_of_other_work():
    assert budget_note(1024, Speed(2048.0)) == (
        "max_num_batched_tokens 1024: 0.5 s a step at the measured 2048 tokens/s"
    )
    assert budget_note(512, Speed(800.0, is_shared=True)).endswith(
        "; other programs were using the cores: a start without them may choose more"
    )


def test_no_step_is_larger_than_the_buffers():
    device = Device(0.001, 1e-5)
    device.speed(most=50)
    assert device.steps == [4, 32]
    tiny = Device(0.001, 1e-5)
    tiny.speed(most=3)
    assert tiny.steps == [3]


@pytest.mark.parametrize(
    "speed, expected",
    [(1e6, 2048), (1500, 1024), (1463, 1024), (1460, 896), (950, 640), (130, 80), (1, 64), (0.001, 64)],
)
def test_budgets_are_quarters_of_powers_of_two_within_bounds(speed, expected):
    assert fitting_tokens(speed, 0.7, 64, 2048) == expected


def test_a_bound_wins_over_the_speed():
    assert fitting_tokens(10, 0.7, 200, 2048) == 200
    assert fitting_tokens(10, 0.7, 200, 100) == 100


@torch.inference_mode()
def test_a_worker_measures_its_model(tmp_path, monkeypatch):
    path = make_tiny_checkpoint(tmp_path / "llama", "llama")
    worker = make_worker(path, max_num_batched_tokens=2048)
    forward, sizes = worker.model.forward, []

    def slow(batch):
        sizes.append(batch.num_tokens)
        end = time.process_time() + batch.num_tokens * 1e-3
        while time.process_time() < end:
            pass
        return forward(batch)

    monkeypatch.setattr(worker.model, "forward", slow)
    fit = worker.fit_step()
    assert fit.num_tokens in (512, 640)  # 1,000 tokens a second at most, 732 at least
    assert fit.context_tokens == context_tokens(worker.model, worker.build.cache_layers.values())
    (note,) = [note for note in worker.report().notes if "max_num_batched_tokens" in note]
    assert note.startswith(f"max_num_batched_tokens {fit.num_tokens}: 0.") and " tokens/s" in note
    assert worker.report().phase_s["measure speed"] > 0
    assert set(sizes) == {4, 32, 128} and len(sizes) <= 9, "few steps, each again when it was held up"
    monkeypatch.setattr(type(worker.platform), "target_step_s", None)
    assert worker.fit_step() is None
    worker.shutdown()


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_context_costs_what_its_attention_has_of_operations(tmp_path, family):
    """Layers with a window read no more of a long context than of a short one."""
    worker = make_worker(make_tiny_checkpoint(tmp_path / family, family))
    layers = [layer for layer in worker.build.cache_layers.values() if layer.needs.sliding_window is None]
    assert 0 < len(layers) <= len(worker.build.cache_layers)
    weights = sum(
        tensor.numel() for name, tensor in worker.model.named_parameters() if tensor.ndim == 2 and "embed" not in name
    )
    attention = sum(4 * layer.needs.num_heads * layer.needs.head_dim for layer in layers)
    assert context_tokens(worker.model, worker.build.cache_layers.values()) == 2 * weights // attention
    worker.shutdown()
