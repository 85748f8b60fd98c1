"""Which drafter a worker makes, and what it is refused beside."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pelton import hookimpl
from pelton.config import EngineConfig
from pelton.entries import Entry
from pelton.errors import ConfigError, PluginError
from pelton.spec_decode.drafter import Drafter
from pelton.testing.plugins import plugins_of
from pelton_platforms.device.drafters import find_drafter, make_drafter
from pelton_plugins.speculative import plugin


class Nothing(Drafter):
    def __init__(self, context: Any) -> None:
        super().__init__()
        self.num_drafts = context.config.num_speculative_tokens

    def load_weights(self) -> None: ...

    def draft(self, rows: Any) -> None: ...


class OnRanks(Nothing):
    runs_on_ranks = True


class Broken(Nothing):
    def __init__(self, context: Any) -> None:
        raise IndexError("no such layer")


@hookimpl
def pelton_draft_proposers() -> list[Entry]:
    return [Entry(name=name.lower(), load=f"own_drafters:{name}") for name in ("Nothing", "OnRanks", "Broken")]


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Settings to a model that is made."""
    module: Any = ModuleType("own_drafters")
    vars(module).update(Nothing=Nothing, OnRanks=OnRanks, Broken=Broken, pelton_draft_proposers=pelton_draft_proposers)
    module.PELTON_API = ">=1,<2"
    monkeypatch.setitem(sys.modules, "own_drafters", module)

    def make(**settings: Any) -> Any:
        return SimpleNamespace(
            config=EngineConfig.from_flat(**settings), plugins=plugins_of(module, plugin), build=None, model=None, choices={},
            info=SimpleNamespace(is_pooling=settings.get("runner") == "pooling"),
        )  # fmt: skip

    return make


def test_it_is_made_and_named_at_the_start(loaded: Any) -> None:
    one = loaded(speculative_method="nothing", num_speculative_tokens=2)
    assert isinstance(make_drafter(one), Nothing)
    assert one.choices == {"drafts": "nothing, up to 2 a row"}


def test_proposers_of_the_host_are_none(loaded: Any) -> None:
    one = loaded(speculative_method="ngram")
    assert make_drafter(one) is None and find_drafter(loaded().config, one.plugins) is None


@pytest.mark.parametrize(
    "settings, message",
    [
        (
            {"speculative_method": "nothing", "tensor_parallel_size": 2},
            "tensor_parallel_size is 2, and .* 'nothing' does not run",
        ),
        (
            {"speculative_method": "onranks", "pipeline_parallel_size": 2},
            "pipeline_parallel_size is 2, and .* 'onranks'",
        ),
        ({"speculative_method": "nothing", "runner": "pooling"}, "the model is run to pool"),
        (
            {"speculative_method": "nothing", "step_kernel": "one"},
            "step_kernel is 'one', which leaves a drafter no hidden",
        ),
        ({"speculative_method": "eagle9"}, "speculative_config.method is 'eagle9'; available: .*medusa"),
    ],
)
def test_what_does_not_go_together_is_one_line(loaded: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_drafter(loaded(**settings))


def test_ranks_are_taken_by_those_that_say_so(loaded: Any) -> None:
    assert isinstance(make_drafter(loaded(speculative_method="onranks", tensor_parallel_size=2)), OnRanks)


def test_one_that_cannot_be_made_names_its_plugin(loaded: Any) -> None:
    with pytest.raises(PluginError, match=r"'broken' .*IndexError: no such layer"):
        make_drafter(loaded(speculative_method="broken"))
