"""Environment variables: each a spelling of a setting, read in one file."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import pelton
from pelton import env
from pelton.errors import ConfigError


def test_plugin_names():
    assert env.plugin_names({}) is None
    assert env.plugin_names({"PELTON_PLUGINS": ""}) == []
    assert env.plugin_names({"PELTON_PLUGINS": " a, b ,"}) == ["a", "b"]
    with pytest.raises(ConfigError, match="'a b' is not a plugin name"):
        env.plugin_names({"PELTON_PLUGINS": "a b,c"})


def test_a_secret_is_not_shown_in_its_error():
    with pytest.raises(ConfigError) as caught:
        env.api_key({"PELTON_API_KEY": " geheim"})
    assert "geheim" not in str(caught.value) and "PELTON_API_KEY" in str(caught.value)


def test_dependent_launch():
    assert env.dependent_launch({}) and env.dependent_launch({"PELTON_DEPENDENT_LAUNCH": "1"})
    assert not env.dependent_launch({"PELTON_DEPENDENT_LAUNCH": "0"})
    with pytest.raises(ConfigError, match="PELTON_DEPENDENT_LAUNCH is 'off'; use 0 or 1"):
        env.dependent_launch({"PELTON_DEPENDENT_LAUNCH": "off"})


def test_a_misspelt_variable_is_pointed_out_and_a_container_platforms_one_is_not():
    assert env.misspelt({"PELTON_PLUGIN": "a"}) == [
        "Environment variable PELTON_PLUGIN is not read; did you mean PELTON_PLUGINS?"
    ]
    assert env.misspelt({"PELTON_PORT": "tcp://10.0.0.1:80", "PELTON_SERVICE_HOST": "10.0.0.1", "HOME": "/"}) == []


def test_only_one_file_of_core_reads_variables_of_pelton():
    """Any string PELTON_x in an expression outside env.py is a second reader, save in messages."""
    core = Path(pelton.__file__).parent
    for path in core.rglob("*.py"):
        if path.name == "env.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
            assert not (is_text and node.value in {v.name for v in env.VARIABLES}), f"{path}:{node.lineno}"
