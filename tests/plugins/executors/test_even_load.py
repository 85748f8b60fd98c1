"""The policy that places experts by default."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch

from pelton import hookimpl
from pelton.config import EngineConfig
from pelton.entries import Entry
from pelton.metrics.plugin_metrics import PluginMetrics
from pelton.testing.expert_placement import ExpertPlacementConformance
from pelton.testing.plugins import plugins_of
from pelton_plugins.executors import plugin as executors
from pelton_plugins.executors.one_rank import OneRank
from pelton_plugins.executors.shared_experts.balancer import ExpertBalancer
from pelton_plugins.executors.shared_experts.even_load import EvenLoad


class TestConformance(ExpertPlacementConformance):
    policy_class = EvenLoad


class Wrong(EvenLoad):
    """A plugin's, that loses an expert."""

    def place(self, load: Sequence[int], placement: Sequence[int], sizes: Sequence[int], group_size: int) -> list[int]:
        new = super().place(load, placement, sizes, group_size)
        return [new[1], *new[1:]]


class Plugin:
    PELTON_API = ">=1,<2"

    @hookimpl
    def pelton_expert_placements(self) -> list[Entry]:
        return [Entry(name="wrong", load=f"{__name__}:Wrong", doc="loses an expert")]


class Layer:
    """A layer of four experts on two ranks."""

    def __init__(self) -> None:
        self.placement, self.places, self.group_size = [0, 1, 2, 3], [range(2), range(2, 4)], 4
        self.expert_load = torch.zeros(4, dtype=torch.int64)

    def place_experts(self, placement: list[int], ranks: OneRank) -> None:
        self.placement = placement


@pytest.mark.parametrize("policy", ["default", "wrong"])
def test_a_policy_is_asked_every_so_many_steps(policy: str, caplog: pytest.LogCaptureFixture) -> None:
    """Of the last steps alone; what a wrong one says is logged, and nothing moves."""
    ranks, layer = OneRank(), Layer()
    ranks.size = 2
    plugins = plugins_of(Plugin(), executors)
    config = EngineConfig.from_flat(eplb_config={"step_interval": 5, "window_size": 2, "policy": policy})
    context = SimpleNamespace(config=config, plugins=plugins, metrics=PluginMetrics())
    worker = SimpleNamespace(model=SimpleNamespace(named_modules=lambda: [("layer", layer)]))
    balancer = ExpertBalancer(context, worker, ranks)  # type: ignore[arg-type]
    for step in range(5):
        assert layer.placement == [0, 1, 2, 3]
        layer.expert_load += torch.tensor([9, 9, 0, 0]) if step >= 3 else torch.tensor([0, 0, 5, 5])
        balancer.after_step()
    assert sorted(layer.placement) == [0, 1, 2, 3]
    halves = {frozenset(layer.placement[:2]), frozenset(layer.placement[2:])}
    assert (frozenset([0, 1]) in halves) == (policy == "wrong")
    assert balancer.told()["balance"] == [0.5]
    assert ("answers wrongly" in caplog.text) == (policy == "wrong")


def ranks(load: list[int], placement: list[int]) -> list[int]:
    half = len(placement) // 2
    return [sum(load[expert] for expert in placement[:half]), sum(load[expert] for expert in placement[half:])]


def test_a_skewed_load_becomes_even_and_few_experts_move() -> None:
    load = [90, 80, 70, 60, 1, 2, 3, 4]
    new = EvenLoad().place(load, range(8), (4, 4), 8)
    assert max(ranks(load, new)) <= 156
    assert EvenLoad().place(load, new, (4, 4), 8) == new, "an even load stays"
    assert EvenLoad().place([100] * 8, [3, 1, 2, 0, 4, 5, 6, 7], (4, 4), 8) == [3, 1, 2, 0, 4, 5, 6, 7]


def test_groups_move_whole_or_within() -> None:
    load = [50, 50, 40, 40, 1, 1, 2, 2]
    new = EvenLoad().place(load, range(8), (4, 4), 2)
    assert max(ranks(load, new)) <= 102
    assert {expert // 2 for expert in new[:2]} in ({0}, {1}, {2}, {3})
    within = EvenLoad().place([9, 1, 8, 1, 1, 1], range(6), (3, 3), 6)
    assert {0, 2} - set(within[:3]) and {0, 2} - set(within[3:])


def test_the_most_loaded_experts_get_copies_on_different_ranks() -> None:
    load, before = [120, 40, 1, 1, 1, 1], [0, 1, 2, 3, 4, 5, 0, 1]
    new = EvenLoad().place(load, before, (4, 4), 8)
    assert 0 in new[:4] and 0 in new[4:] and 1 in new[:4] and 1 in new[4:] and set(new) == set(range(6))
    assert EvenLoad().place(load, new, (4, 4), 8) == new, "an even load stays"
    moved = EvenLoad().place([1, 1, 1, 1, 90, 1], new, (4, 4), 8)
    assert 4 in moved[:4] and 4 in moved[4:]
