"""`pelton bench structured` on a few schemas: what passes is counted, what does not is named, steps with masks are timed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pelton.errors import ConfigError
from pelton.testing.models import make_tiny_checkpoint
from pelton_plugins.bench.structured import command as structured

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a"]}


def sample(schema: dict, right: list, wrong: list) -> dict:
    tests = [{"data": data, "valid": True} for data in right] + [{"data": data, "valid": False} for data in wrong]
    return {"name": json.dumps(schema)[:40], "schema": schema, "tests": tests}


SAMPLES = [
    sample(OBJECT, [{"a": 1, "b": "x"}, {"b": "x", "a": 1}], [{"a": "x"}, {"b": "x"}]),
    sample({"not": {"required": ["a"]}, "type": "object"}, [{"b": 1}], [{"a": 1}]),
    sample({"type": "array", "contains": {"const": 1}}, [[1]], [[2]]),
    sample({"enum": ["x", 1]}, ["x", 1], ["y", 2]),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "llama"))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("schemas") / "schemas.jsonl"
    path.write_text("\n".join(map(json.dumps, SAMPLES)))
    return str(path)


def test_schemas_that_pass_are_counted(model: str, file: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "result.json"
    argv = [file, "--model", model, "--vocabularies", "0", "1000", "--failures", "--output-json", str(out)]
    assert structured.run(argv) == 1, "half of these schemas is not 88 %"
    own, alone, wide, _ = json.loads(out.read_text())["runs"]
    assert own["counts"] == {
        "passing": 2, "refused": 1, "valid": 5, "invalid": 5, "right in another order": 1,
    }  # fmt: skip
    assert alone["counts"]["refused"] == 2, "llguidance has no `not`"
    assert wide["counts"] == own["counts"] and wide["vocab_size"] == 1000
    printed = capsys.readouterr().out
    assert "llguidance alone" in printed and "/contains cannot be enforced" in printed


@pytest.mark.parametrize(
    "data, written",
    [
        ({"c": 1, "a": {"z": 1, "y": [{"b": 1, "a": 2}]}}, '{"a": {"y": [{"a": 2, "b": 1}], "z": 1}, "c": 1}'),
        ([{"b": 1}, {"b": 2, "a": 1}], '[{"b": 1}, {"a": 1, "b": 2}]'),
        ({"b": 1, "x": 2}, '{"b": 1, "x": 2}'),
        ("text", '"text"'),
    ],
    ids=["nested", "array", "in-no-order", "scalar"],
)
def test_the_order_of_properties_is_the_one_that_may_be_written(data, written):
    """Here names may follow in their alphabet's order alone, and none is x."""

    def begins(text: str) -> bool:
        return written.startswith(text) and '"x"' not in text

    assert json.dumps(structured.in_taken_order(data, begins)) == written


def test_what_masks_add_to_a_step_is_measured(model: str, file: str, capsys: pytest.CaptureFixture) -> None:
    argv = [file, "--model", model, "--rows", "2", "--output-len", "8", "--repeats", "2", "--max-model-len", "64"]
    assert structured.run([*argv, "--log-level", "error"]) == 0
    header, line = capsys.readouterr().out.strip().splitlines()
    assert "WITH MASKS" in header and line.split()[0] == "2"


def test_a_file_of_another_form_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"prompt": 1}')
    for path, words in ((str(tmp_path / "x.jsonl"), "without schema"), (str(tmp_path / "none"), "cannot be read")):
        with pytest.raises(ConfigError, match=words):
            structured.read_samples(path, None)
