"""`pelton plugins`, `collect-env` and their tables."""

from __future__ import annotations

import json

from pelton.cli.main import main
from pelton.cli.table import format_table
from pelton.plugins import load_plugins


def test_table_pads_columns_and_leaves_no_trailing_spaces():
    assert format_table(("a", "long name"), [("x", 1), ("wider", 22)]) == "A      LONG NAME\nx      1\nwider  22"
    assert format_table(("a",), []) == "A"


def test_plugins_lists_what_is_loaded_from_where_and_what_it_offers(capsys):
    assert main(["plugins", "--json"]) == 0
    listing = {record["name"]: record for record in json.loads(capsys.readouterr().out)}
    plugins = load_plugins()
    assert list(listing) == [plugin.name for plugin in [*plugins.loaded, *plugins.left_out]]
    core = listing["core"]
    assert (core["distribution"], core["module"], core["loaded"]) == ("pelton", "pelton.builtin", True)
    assert "pelton_fused_ops" in core["hooks"]
    schedulers = [entry for entry in listing["scheduler"]["entries"] if entry["hook"] == "pelton_schedulers"]
    assert schedulers[0]["name"] == "default" and schedulers[0]["status"] == "chosen"
    cpu = [entry for entry in listing["cpu"]["entries"] if entry["hook"] == "pelton_platforms"]
    assert cpu[0]["status"] == "chosen"
    policies = {
        entry["name"]: entry["status"]
        for entry in listing["scheduler"]["entries"]
        if entry["hook"] == "pelton_scheduling_policies"
    }
    assert policies == {"fair": "offered", "fcfs": "chosen", "priority": "offered"}


def test_plugins_says_the_same_to_people(capsys):
    assert main(["plugins"]) == 0
    text = capsys.readouterr().out
    assert "core  (pelton" in text and "KIND" in text
    assert any(line.split()[:2] == ["schedulers", "default"] for line in text.splitlines())


def test_every_built_in_plugin_passes_the_check(capsys):
    assert main(["plugins", "--check", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert {result["name"] for result in results} >= {"core", "cpu", "sdpa", "models", "server"}
    assert all(result["problems"] == [] for result in results)


def test_collect_env_hides_secrets_and_names_misspelt_variables(capsys, monkeypatch):
    monkeypatch.setenv("PELTON_API_KEY", "geheim")
    monkeypatch.setenv("PELTON_PLUGIN", "x")
    assert main(["collect-env"]) == 0
    text, warning = capsys.readouterr()
    assert "warning: Environment variable PELTON_PLUGIN is not read; did you mean PELTON_PLUGINS?" in warning
    assert "geheim" not in text and "(set, not shown)" in text
    assert "PELTON_PLUGIN is not read; did you mean PELTON_PLUGINS?" in text
    for word in ("pelton", "python", "torch", "memory", "cpu", "plugins"):
        assert any(line.split()[0] == word for line in text.splitlines())


def test_collect_env_as_json(capsys):
    assert main(["collect-env", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["msgspec"][0].isdigit()
