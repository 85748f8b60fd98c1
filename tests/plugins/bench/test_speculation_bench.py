"""`pelton bench speculation` on a tiny model: texts go on as its loader says, drafts are counted, ids compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pelton_forked import ForkingPopen

from pelton import LLM, SamplingParams
from pelton.errors import ConfigError
from pelton.testing.models import make_tiny_checkpoint
from pelton_plugins.bench import speculation
from pelton_plugins.bench.host.cycle_loader import following

VOCAB = 256
SETTINGS = {
    "load_format": "cycle", "skip_tokenizer_init": True, "max_model_len": 128, "kv_cache_memory_bytes": 2**22, "device": "cpu",
    "log_level": "error",
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = make_tiny_checkpoint(
        tmp_path_factory.mktemp("cycle"), "llama", with_tokenizer=False, vocab_size=VOCAB, tie_word_embeddings=False
    )
    return str(path)


def test_every_token_has_one_before_it() -> None:
    assert sorted(following(token_id, VOCAB) for token_id in range(VOCAB)) == list(range(VOCAB))
    assert [following(token_id, VOCAB) for token_id in (0, 7, 63, 64, 255)] == [1, 0, 56, 65, 64]


def test_texts_go_on_as_the_loader_says(model: str) -> None:
    with LLM(model, **SETTINGS) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        outputs = llm.generate(
            [{"prompt_token_ids": [5, token_id]} for token_id in (3, 70, 250)], params, use_tqdm=False
        )
    for token_id, output in zip((3, 70, 250), outputs, strict=True):
        expected = []
        for _ in range(12):
            token_id = following(token_id, VOCAB)
            expected.append(token_id)
        assert list(output.outputs[0].token_ids) == expected


def test_drafts_are_all_right_where_texts_go_round_and_all_wrong_where_they_mislead(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_prompt = speculation._prompt

    def prompt(case: str, draw: Any, arguments: Any, size: int, first: int) -> list[int]:
        """As the command's, of fewer tokens that are never come back to."""
        if case == "repeats":
            return [i % 8 for i in range(arguments.input_len)]
        if case == "never repeats":
            return [draw(first, first + 100) for _ in range(arguments.input_len)]
        return make_prompt(case, draw, arguments, 4096 + size - arguments.output_len, first)

    monkeypatch.setattr(speculation, "_prompt", prompt)
    arguments = {"rows": [2], "input_len": 16, "output_len": 24, "repeats": 1}
    found: dict[str, Any] = {}
    for count in (0, 3):
        own = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}} if count else {}
        job = {"settings": {"model": model, **SETTINGS, **own}, "arguments": arguments}
        lines = json.loads(json.dumps(list(speculation.measure(job))))
        found[str(count)] = {f"{one.pop('case')}, {one['rows']}": one for one in lines}
    repeats, never = found["3"]["repeats, 2"], found["3"]["never repeats, 2"]
    assert repeats["num_accepted_tokens"] == repeats["num_draft_tokens"] > 0 and repeats["tokens_a_step"] > 2
    assert never["num_accepted_tokens"] == 0 and never["tokens_a_step"] == 1
    misleads = found["3"]["misleads, 2"]
    assert misleads["num_accepted_tokens"] == 0 and misleads["num_draft_tokens"] > 0
    assert {name: one["ids"] for name, one in found["3"].items()} == {
        name: one["ids"] for name, one in found["0"].items()
    }
    table = speculation.render({"engines": found, "ids_are_equal": True})
    assert "never repeats" in table and "The ids are those without drafts." in table


def test_engines_that_start_at_once_measure_in_turn_and_a_text_that_is_none_is_refused(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculation, "Popen", ForkingPopen)
    settings = ["--kv-cache-memory-bytes", str(2**22), "--device", "cpu", "--log-level", "error"]
    short = ["--rows", "1", "--drafts", "2", "--input-len", "16", "--output-len", "8", "--repeats", "1"]
    result = tmp_path / "result.json"
    arguments = ["--models", model, *short, "--texts", "repeats", *settings, "--output-json", str(result)]
    assert speculation.run(arguments) == 0
    engines = json.loads(result.read_text())["models"][model]["engines"]
    assert {count: list(rows) for count, rows in engines.items()} == {"0": ["repeats, 1"], "2": ["repeats, 1"]}
    with pytest.raises(ConfigError, match="--texts is 'often'; use any of 'repeats', 'never repeats', 'misleads'"):
        speculation.run(["--texts", "often"])
