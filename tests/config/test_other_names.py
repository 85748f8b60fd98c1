"""Settings by vLLM's names: translated, accepted where they ask for nothing, or refused with what to do instead."""

from __future__ import annotations

import re
from typing import Any

import pytest

from pelton import hookspecs
from pelton.config import EngineConfig
from pelton.config.engine import FIELD_HOME, SECTIONS, explicit_names
from pelton.config.other_names import OtherName, other_names
from pelton.errors import ConfigError
from pelton_plugins.bench.latency import LatencyArguments
from pelton_plugins.server.config import ServerConfig

NAMES = other_names()
OURS = {
    *FIELD_HOME,
    *ServerConfig.__struct_fields__,
    *LatencyArguments.__struct_fields__,
    "plugin_config",
    *(f"{section}_config" for section in SECTIONS),
}
OTHER_WORDS = {
    "logits_processor_args",
    "rope_theta",
    "rope_scaling",
    "sliding_window",
    "shared_storage",
    "huggingface_hub",
}
"""What texts name beside settings and hooks: a field of requests, some of config.json, a connector and a package."""


def known_in(name: str) -> set[str]:
    section = name.partition(".")[0]
    return set(SECTIONS[section].__struct_fields__) if "." in name else OURS


@pytest.mark.parametrize("name", NAMES)
def test_each_is_another_name_or_says_what_to_do(name: str) -> None:
    other = NAMES[name]
    assert name.rpartition(".")[2] not in known_in(name), "it is a setting here"
    assert bool(other.here) != bool(other.instead)
    assert not other.here or other.here.removeprefix("!") in known_in(name)
    assert not (other.here and other.accepts)
    assert not other.instead.endswith(".")
    hooks = set(re.findall(r"pelton_\w+", other.instead))
    assert all(hasattr(hookspecs, hook) for hook in hooks)
    named = set(re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", other.instead)) - hooks
    assert named <= OURS | OTHER_WORDS


def given(name: str, value: Any) -> dict[str, Any]:
    section, dot, field = name.partition(".")
    return {f"{section}_config": {field: value}} if dot else {name: value}


@pytest.mark.parametrize("name", [name for name, other in NAMES.items() if other.instead])
def test_what_asks_for_nothing_is_accepted_and_all_else_refused_by_name(name: str) -> None:
    for value in (None, *NAMES[name].accepts):
        assert EngineConfig.from_flat(**given(name, value)) == EngineConfig()
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_flat(**given(name, "something else"))
    assert str(caught.value) == f"{name} is 'something else'; Pelton has no such setting: {NAMES[name].instead}."


@pytest.mark.parametrize(
    "flat, section, field, value",
    [
        ({"guided_decoding_backend": "outlines"}, "structured_outputs", "backend", "outlines"),
        ({"guided_decoding_disable_any_whitespace": True}, "structured_outputs", "disable_any_whitespace", True),
        ({"pooler_config": {"pooling_type": "MEAN", "normalize": False}}, "pooling", "pooling_type", "mean"),
        ({"override_pooler_config": {"seq_pooling_type": "CLS"}}, "pooling", "pooling_type", "cls"),
        ({"compilation_config": {"mode": 3, "cudagraph_mode": "PIECEWISE"}}, "compilation", "cudagraph_mode", "PIECEWISE"),
        ({"dtype": "half"}, "model", "dtype", "float16"),
        ({"dtype": "float"}, "model", "dtype", "float32"),
    ],
)  # fmt: skip
def test_another_name_sets_the_setting(flat: dict[str, Any], section: str, field: str, value: Any) -> None:
    assert getattr(getattr(EngineConfig.from_flat(**flat), section), field) == value


def test_a_setting_by_both_names_is_given_twice() -> None:
    with pytest.raises(ConfigError, match=r"structured_outputs\.backend is given twice"):
        EngineConfig.from_flat(guided_decoding_backend="outlines", structured_outputs_backend="llguidance")
    with pytest.raises(ConfigError, match=r"pooling\.runner is given twice"):
        EngineConfig.from_flat(pooler_config={"runner": "pooling"}, pooling_config={"runner": "pooling"})


def test_what_was_given_goes_by_the_names_here() -> None:
    flat = {"guided_decoding_backend": "outlines", "compilation_config": {"mode": 3, "level": 1}, "swap_space": 0}
    assert explicit_names(flat) == {"structured_outputs_backend", "optimization_level"}


def test_a_name_of_nobody_is_unknown() -> None:
    with pytest.raises(ConfigError, match=r"Unknown setting 'swap_spaces'"):
        EngineConfig.from_flat(swap_spaces=4)
    with pytest.raises(ConfigError, match=r"Unknown setting compilation\.modes"):
        EngineConfig.from_flat(compilation_config={"modes": 3})


def test_opposites_are_turned() -> None:
    assert OtherName(here="!access_log") == NAMES["disable_uvicorn_access_log"]
