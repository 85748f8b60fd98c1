"""`pelton bench states` on tiny layers."""

from __future__ import annotations

import json

import pytest

from pelton.errors import ConfigError
from pelton_plugins.bench import states

TINY = ["--num-heads", "4", "--head-dim", "8", "--num-groups", "2", "--state-size", "6"]


def test_times_rows_of_one_token_and_prompts(tmp_path, capsys):
    file = tmp_path / "states.json"
    argv = [
        *TINY,
        "--rows",
        "1",
        "3",
        "--query-lens",
        "1",
        "70",
        "--replays",
        "1",
        "--dtype",
        "float32",
        "--device",
        "cpu",
    ]
    assert states.run([*argv, "--output-json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert result["backends"] == ["state_space"] and not result["is_captured"]
    assert [(line["query_len"], line["rows"]) for line in result["lines"]] == [(1, 1), (1, 3), (70, 1), (70, 3)]
    assert [line["state_bytes"] for line in result["lines"]] == [768, 2304, 768, 2304]
    first, header, *rows = capsys.readouterr().out.splitlines()
    assert first.endswith("float32, 4 heads, state_space") and header.split()[0] == "ROWS"
    line = result["lines"][-1]
    assert float(rows[-1].split()[-2].replace(",", "")) == pytest.approx(210 / line["layer_s"], rel=0.01)


@pytest.mark.parametrize("kind, backend", [(kind, "state_space" if kind == "state" else kind) for kind in states.KINDS])
def test_times_layers_of_each_kind(kind, backend, tmp_path):
    file = tmp_path / "states.json"
    argv = [*TINY, "--kind", kind, "--rows", "2", "--query-lens", "3", "--replays", "1", "--dtype", "float32"]
    assert states.run([*argv, "--device", "cpu", "--output-json", str(file)]) == 0
    result = json.loads(file.read_text())
    numbers = {"selective_scan": 4 * 8 * 6, "lightning": 4 * 8 * 8}.get(kind, 4 * 8 * 6)
    assert result["backends"] == [backend] and result["lines"][0]["state_bytes"] == 2 * 4 * numbers


@pytest.mark.parametrize(
    "given, message",
    [
        ({"kind": "mamba"}, "kind is 'mamba'; use state, delta_rule, key_delta_rule, selective_scan, lightning"),
        ({"num_heads": 0}, "num_heads is 0"),
        (
            {"num_heads": 3, "num_groups": 2},
            "num_heads is 3 and num_groups 2; give a number of heads that the groups divide",
        ),
    ],
)
def test_sizes_that_make_no_layer(given, message):
    with pytest.raises(ConfigError, match=message):
        states.StatesArguments(**given)
