"""The examples of docs/structured_output.md run, and its constraints compile."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest

from pelton.sampling_params import CONSTRAINTS
from pelton.structured.interface import StructuredOutputContext
from pelton.testing.models import EOS_ID, VOCAB_SIZE, make_tiny_checkpoint, make_tiny_tokenizer
from pelton_plugins.structured_output.auto import AutoBackend
from pelton_plugins.structured_output.structural_tags import _PARTS

PAGE = (Path(__file__).resolve().parents[2] / "docs/structured_output.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_first_example_says_positive_or_negative(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiny_checkpoint(tmp_path / "tiny", "llama")
    monkeypatch.setenv("PELTON_LOG_LEVEL", "error")
    (tmp_path / "example.py").write_text(EXAMPLES[0].replace('"smollm2"', repr(str(model))))
    runpy.run_path(str(tmp_path / "example.py"))
    said = [line for line in capsys.readouterr().out.splitlines() if line in ("Positive", "Negative")]
    assert len(said) == 2


def test_the_constraints_compile_and_every_kind_is_named(tmp_path: Path) -> None:
    path = make_tiny_tokenizer(tmp_path / "tokenizer")
    backend = AutoBackend(
        StructuredOutputContext(tokenizer_path=str(path), vocab_size=VOCAB_SIZE, eos_token_ids=[EOS_ID])
    )
    found: dict = {}
    exec(compile(EXAMPLES[1], "structured_output.md", "exec"), found)  # noqa: S102
    for constraint in found["constraints"]:
        backend.compile(constraint)
    assert all(f"`{name}`" in PAGE for name in (*CONSTRAINTS, *_PARTS))
    body = re.search(r"-d '(\{.*?\})'\n```", PAGE, re.DOTALL)
    assert body is not None and json.loads(body[1])["response_format"]["type"] == "json_schema"
