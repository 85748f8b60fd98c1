"""A step's budget from a measured speed."""

from __future__ import annotations

import time

import pytest
import torch
from pelton_worker_fakes import make_worker

from pelton.testing.models import make_tiny_checkpoint
from pelton_platforms.device.speed import context_tokens, fitting_tokens, measure_speed


class Device:
    """Computes a step in `floor_s`, or a token in `token_s` where that takes longer."""

    def __init__(self, floor_s, token_s):
        self.floor_s, self.token_s, self.now, self.steps = floor_s, token_s, 0.0, []

    def run(self, num_tokens):
        self.steps.append(num_tokens)
        self.now += max(self.floor_s, num_tokens * self.token_s)

    def speed(self, most=2048):
        return measure_speed(self.run, most, clock=lambda: self.now)


@pytest.mark.parametrize(
    "floor_s, token_s, steps",
    [
        pytest.param(0.001, 1e-5, [4, 32, 128], id="fast"),
        pytest.param(0.008, 5e-4, [4, 32, 128], id="usual"),
        pytest.param(0.05, 2e-3, [4, 32], id="a-large-model"),
        pytest.param(0.1, 1.0, [4], id="very-slow"),
    ],
)
def test_the_speed_of_many_tokens_is_found_in_little_time(floor_s, token_s, steps):
    device = Device(floor_s, token_s)
    assert device.speed() == pytest.approx(1 / token_s, rel=0.01)
    assert device.steps == steps
    assert device.now < max(0.15, 4.1 * token_s)


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
    forward = worker.model.forward

    def slow(batch):
        time.sleep(batch.num_tokens * 1e-3)
        return forward(batch)

    monkeypatch.setattr(worker.model, "forward", slow)
    fit = worker.fit_step()
    assert fit.num_tokens in (512, 640)  # 1,000 tokens a second at most, 732 at least
    assert fit.context_tokens == context_tokens(worker.model, worker.build.cache_layers.values())
    (note,) = [note for note in worker.report().notes if "max_num_batched_tokens" in note]
    assert note.startswith(f"max_num_batched_tokens {fit.num_tokens}: 0.") and note.endswith(" tokens/s")
    assert worker.report().phase_s["measure speed"] < 1.0
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
