"""From an architecture's name to a class that can be made."""

import sys
from types import ModuleType

import pytest
import torch

from pelton.entries import ModelEntry
from pelton.errors import ConfigError, PluginError
from pelton.model.registry import build_model, find_model, load_model_class

MODULE = "test_registry_models"


class Right:
    def __init__(self, *, config, prefix=""):
        pass

    def forward(self, batch): ...
    def compute_logits(self, hidden, rows): ...
    def load_weights(self, weights): ...


class Positional(Right):
    def __init__(self, config, prefix=""):
        pass


class WithMore(Right):
    def __init__(self, *, config, prefix="", cache_config=None):
        pass


class WithoutPrefix(Right):
    def __init__(self, *, config):
        pass


class WithoutLogits(Right):
    compute_logits = None


@pytest.fixture(autouse=True)
def module(monkeypatch):
    monkeypatch.setitem(sys.modules, MODULE, ModuleType(MODULE))


def entry(name, *architectures, priority=50, model=Right):
    setattr(sys.modules[MODULE], name, model)
    return ModelEntry(name=name, load=f"{MODULE}:{name}", architectures=architectures, priority=priority)


def test_finds_the_model_by_architecture_whatever_the_install_order():
    entries = [entry("a", "AForCausalLM"), entry("b", "BForCausalLM", "BModel"), entry("mine", "BModel", priority=60)]
    assert find_model(entries, "AForCausalLM").name == "a"
    assert find_model(entries, "BModel").name == "mine" == find_model(reversed(entries), "BModel").name


def test_an_unknown_architecture_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"architecture 'CModel'\. There is: AForCausalLM, BModel\."):
        find_model([entry("b", "BModel"), entry("a", "AForCausalLM")], "CModel")


def test_a_class_with_the_right_signature_is_taken():
    assert load_model_class(entry("right", "X")) is Right


@pytest.mark.parametrize("model", [Positional, WithMore, WithoutPrefix])
def test_another_signature_is_refused_with_the_right_one(model):
    with pytest.raises(
        PluginError, match=r"is made with \(.*models must have __init__\(self, \*, config: BuildConfig, "
    ):
        load_model_class(entry("wrong", "X", model=model))


def test_a_class_without_a_method_is_refused_by_its_name():
    with pytest.raises(PluginError, match="has no compute_logits"):
        load_model_class(entry("wrong", "X", model=WithoutLogits))


class Failing(Right):
    error: Exception

    def __init__(self, *, config, prefix=""):
        raise self.error


class Offers:
    def __init__(self, *entries):
        self._entries = entries

    def entries(self, hook):
        return list(self._entries)


def test_a_class_that_cannot_be_made_is_named():
    failing = type("Failing", (Failing,), {"error": ZeroDivisionError("by head_dim 0")})
    with pytest.raises(
        PluginError,
        match=rf"^Model 'mine' \({MODULE}:mine\) fails: ZeroDivisionError: by head_dim 0\. Check the values",
    ) as caught:
        build_model(None, "X", Offers(entry("mine", "X", model=failing)))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(
    "error", [ConfigError("hidden_act is 'x'"), torch.OutOfMemoryError("full"), MemoryError("full")], ids=repr
)
def test_errors_that_are_not_the_models_stay_what_they_are(error):
    failing = type("Failing", (Failing,), {"error": error})
    with pytest.raises(type(error)) as caught:
        build_model(None, "X", Offers(entry("mine", "X", model=failing)))
    assert caught.value is error
