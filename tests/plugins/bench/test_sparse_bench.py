"""`pelton bench sparse` on tiny layers."""

from __future__ import annotations

import json

import pytest

from pelton.errors import ConfigError
from pelton_plugins.bench import sparse

TINY = [
    "--num-heads",
    "2",
    "--latent-dim",
    "16",
    "--rope-dim",
    "8",
    "--index-heads",
    "4",
    "--index-dim",
    "8",
    "--index-topk",
    "16",
]


@pytest.mark.parametrize("query_len", [1, 20])
def test_times_the_choice_and_attention_with_and_without_it(tmp_path, capsys, query_len):
    file = tmp_path / "sparse.json"
    argv = [*TINY, "--contexts", "20", "70", "--rows", "1", "3", "--query-len", str(query_len), "--replays", "1"]
    assert sparse.run([*argv, "--dtype", "float32", "--device", "cpu", "--output-json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert result["backends"] == ["sdpa_sparse", "sdpa_mla"] and not result["is_captured"]
    assert [(line["context"], line["rows"]) for line in result["lines"]] == [(20, 1), (20, 3), (70, 1), (70, 3)]
    assert all(min(line["choose_s"], line["attend_s"], line["all_s"]) > 0 for line in result["lines"])
    first, header, *rows = capsys.readouterr().out.splitlines()
    assert "float32, 2 heads, sdpa_sparse, sdpa_mla" in first and header.split()[:2] == ["ROWS", "CONTEXT"]
    line = result["lines"][-1]
    ratio = line["all_s"] / (line["choose_s"] + line["attend_s"])
    assert rows[-1].split()[:2] == ["3", "70"] and float(rows[-1].split()[-1]) == pytest.approx(ratio, rel=0.01)


def test_a_context_has_the_tokens_of_the_step():
    with pytest.raises(ConfigError, match="query_len is 30, and contexts has 20"):
        sparse.SparseArguments(contexts=[50, 20], query_len=30)
