"""Plugins change settings with a reason; an explicit setting wins."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pluggy
import pytest

from pelton import hookimpl, hookspecs
from pelton.config import CUDAGraphMode, EngineConfig
from pelton.config.adjust import adjust_config
from pelton.errors import PluginError
from pelton.plugins import LoadedPlugin, Plugins, register


def hook_that_returns(change):
    @hookimpl
    def pelton_config_adjustments(config):
        return change

    return pelton_config_adjustments


def plugins_with(**changes) -> Plugins:
    """One plugin a keyword, which returns that mapping."""
    manager = pluggy.PluginManager("pelton")
    manager.add_hookspecs(hookspecs)
    for name, change in changes.items():
        module = SimpleNamespace(PELTON_API=">=1,<2", pelton_config_adjustments=hook_that_returns(change))
        register(manager, module, name, name)
    return Plugins(manager, [LoadedPlugin(name, name, "1", name) for name in changes])


def test_applies_a_change_and_logs_its_reason(caplog):
    plugins = plugins_with(tune={"max_num_seqs": (8, "two cores"), "cudagraph_mode": ("FULL", "it can")})
    with caplog.at_level(logging.INFO, logger="pelton"):
        config, done = adjust_config(EngineConfig(), plugins)
    assert config.scheduler.max_num_seqs == 8
    assert config.compilation.cudagraph_mode is CUDAGraphMode.FULL
    assert [(a.plugin, a.name, a.is_applied) for a in done] == [
        ("tune", "cudagraph_mode", True),
        ("tune", "max_num_seqs", True),
    ]
    assert "max_num_seqs: None -> 8 (two cores; plugin tune)" in caplog.text


def test_the_given_config_is_not_written():
    config = EngineConfig()
    adjust_config(config, plugins_with(tune={"max_num_seqs": (8, "two cores")}))
    assert config == EngineConfig()


def test_an_explicit_setting_wins_and_that_is_said(caplog):
    config = EngineConfig.from_flat(max_num_seqs=3)
    with caplog.at_level(logging.INFO, logger="pelton"):
        adjusted, done = adjust_config(config, plugins_with(tune={"max_num_seqs": (8, "two cores")}), {"max_num_seqs"})
    assert adjusted == config
    assert [a.is_applied for a in done] == [False]
    assert "max_num_seqs: 3 stays, set explicitly; plugin tune wanted 8 (two cores)" in caplog.text


def test_two_plugins_that_disagree_are_an_error_unless_the_user_decided():
    plugins = plugins_with(a={"max_num_seqs": (8, "x")}, b={"max_num_seqs": (9, "y")})
    with pytest.raises(PluginError, match=r"disagree on max_num_seqs: 'a' wants 8 \(x\), 'b' wants 9 \(y\)"):
        adjust_config(EngineConfig(), plugins)
    config, _ = adjust_config(EngineConfig.from_flat(max_num_seqs=3), plugins, {"max_num_seqs"})
    assert config.scheduler.max_num_seqs == 3


def test_two_plugins_may_agree():
    config, done = adjust_config(EngineConfig(), plugins_with(a={"block_size": (32, "x")}, b={"block_size": (32, "y")}))
    assert config.kv_cache.block_size == 32
    assert [a.plugin for a in done] == ["a"]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"max_num_seq": (8, "x")}, r"'tune' adjusts 'max_num_seq': Unknown setting.*Did you mean 'max_num_seqs'"),
        ({"max_num_seqs": (0, "x")}, r"'tune' adjusts 'max_num_seqs': max_num_seqs is 0"),
        ({"max_num_seqs": 8}, r"return \(value, reason\)"),
        ({"max_num_seqs": (8, "")}, r"return \(value, reason\)"),
    ],
)
def test_a_bad_change_names_the_plugin(change, message):
    with pytest.raises(PluginError, match=message):
        adjust_config(EngineConfig(), plugins_with(tune=change))


def test_no_change_is_no_adjustment():
    assert adjust_config(EngineConfig(), plugins_with(a={}, b=None, c={"block_size": (16, "as it is")})) == (
        EngineConfig(),
        [],
    )
