"""The table: how it reads, what it refuses, how results gather, and a whole run."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest

from pelton.cli.main import main
from pelton_plugins.bench import peers
from pelton_plugins.bench.measure import measure_row
from pelton_plugins.bench.offline import greedy
from pelton_plugins.bench.record import number
from pelton_plugins.bench.shapes import SHAPES, write_shape
from pelton_plugins.bench.table import WORKLOADS, merge, render, workloads_of
from pelton_plugins.bench.workloads import table_workloads

RESULTS = {
    "qwen3-0.6b": {
        "latency1": {"tpot_ms": 0.785, "ttft_ms": 4.15, "device": "a device"},
        "batch32": {"out_tok_s": 36_100.4},
        "prefill": {"error": "EngineError: no room"},
        "start": {"start_s": 21.8},
        "shared-prefix": {"total_tok_s": 512_345.6},
    }
}
GOLDEN = """\
qwen3-0.6b, a device
  ROW                                 PELTON   UNIT          VLLM     SGLANG   X BETTER PEER  FLOOR    OF THE FLOOR  TARGET   REACHED
  latency1, one request               0.785    ms/token      1.66     1.57     2.00           0.285    36%           0.800    yes
  time to first token, 128 in         4.15     ms            8.30     9.10     2.00           -        -             4.00     no
  batch32, 128 in, 256 out            36,100   out tokens/s  13,965   16,400   2.20           62,182   58%           30,000   stretch
  batch128, 128 in, 256 out           -        out tokens/s  33,994   37,470   -              104,301  -             60,000   -
  nano256, lengths 100..1024          -        out tokens/s  24,584   24,075   -              38,612   -             29,500   -
  sharegpt, 1,000 requests            -        out tokens/s  24,826   26,488   -              66,949   -             40,000   -
  prefill, 64 x 2,048 in              failed   tokens/s      346,102  377,196  -              704,748  -             420,000  -
  import and engine ready             21.8     s             43.6     48.7     2.00           -        -             8.00     no
  shared-prefix, 64 x (2,000 shared)  512,346  tokens/s      -        -        -              -        -             -        -
  prefill: EngineError: no room

vLLM 0.26.0, SGLang 0.5.17 and the floor: NVIDIA H200, 2026-11-21. x better peer: above 1 is better, in time as in rate."""


def test_the_table_reads_like_this():
    assert render(RESULTS) == GOLDEN


def test_the_table_for_a_page():
    dated = {name: {**row, "date": "2026-11-21T08:00:00Z"} for name, row in RESULTS["qwen3-0.6b"].items()}
    lines = render({"qwen3-0.6b": dated}, as_markdown=True).splitlines()
    assert lines[0] == "qwen3-0.6b, a device, 2026-11-21:" and lines[1] == ""
    assert lines[2].startswith("| row | pelton | unit | vLLM | SGLang |") and lines[3] == "|" + " --- |" * 10
    assert lines[4] == "| latency1, one request | 0.785 | ms/token | 1.66 | 1.57 | 2.00 | 0.285 | 36% | 0.800 | yes |"


def test_without_results_the_table_has_targets_and_the_others_figures(capsys, tmp_path):
    assert main(["bench", "table", "--show", "--results", str(tmp_path / "none.json")]) == 0
    small, large, foot = capsys.readouterr().out.strip().split("\n\n")
    assert [table.splitlines()[0] for table in (small, large)] == [f"{name}, not measured yet" for name in SHAPES]
    rows = [line.split() for line in small.splitlines()[2:]]
    assert len(rows) == 8 and foot.startswith("vLLM 0.26.0")
    assert " ".join(rows[2]) == "batch32, 128 in, 256 out - out tokens/s 13,965 16,400 - 62,182 - 30,000 -"
    assert main(["bench", "table", "--show", "--models", "llama3.1-8b", "--markdown"]) == 0
    assert capsys.readouterr().out.startswith("llama3.1-8b, not measured yet:\n\n| row |")


@pytest.mark.parametrize(
    "value, text",
    [(0.28508, "0.285"), (9.96, "9.96"), (123.4, "123"), (36_100.4, "36,100"), (0, "0"), (None, "-"), (math.nan, "-")],
)
def test_figures_for_people(value, text):
    assert number(value) == text


def test_every_row_has_its_aims_in_both_models():
    assert SHAPES.keys() == peers.AIMS.keys()
    names = [row.name for row in peers.ROWS]
    for aims in peers.AIMS.values():
        assert [*aims] == names[:8]
        for row in peers.ROWS[:8]:
            aim, best = aims[row.name], peers.better_peer(row, aims[row.name])
            # A target is better than both others, and not better than the floor.
            assert peers.times_better(row, aim.target, best) > 1
            assert aim.floor is None or peers.times_better(row, aim.target, aim.floor) < 1
            assert aim.stretch is None or peers.times_better(row, aim.stretch, aim.target) > 1


def test_a_rate_is_better_when_higher_and_a_time_when_lower():
    rate, span = (next(row for row in peers.ROWS if row.is_time is kind) for kind in (False, True))
    assert peers.times_better(rate, 20.0, 10.0) == 2.0 and peers.times_better(span, 20.0, 10.0) == 0.5


def test_results_gather_and_a_failed_row_keeps_the_older_figure():
    results = {}
    merge(results, "m", {"row": "batch32", "out_tok_s": 5.0})
    merge(results, "m", {"row": "batch32", "error": "boom"})
    assert results == {"m": {"batch32": {"out_tok_s": 5.0, "last_error": "boom"}}}
    merge(results, "m", {"row": "batch32", "out_tok_s": 6.0})
    merge(results, "m", {"row": "prefill", "error": "boom"})
    merge(results, "n", {"row": "prefill", "total_tok_s": 1.0})
    assert results == {
        "m": {"batch32": {"out_tok_s": 6.0}, "prefill": {"error": "boom"}},
        "n": {"prefill": {"total_tok_s": 1.0}},
    }


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_folders_that_resolve(name, tmp_path):
    from pelton.config import EngineConfig
    from pelton.model.resolve import resolve_model
    from pelton.plugins import load_plugins

    path = write_shape(name, tmp_path)
    config = EngineConfig.from_flat(model=str(path), load_format="dummy", max_model_len=8192, skip_tokenizer_init=True)
    model = resolve_model(config, load_plugins())
    assert model.architecture == SHAPES[name]["architectures"][0] and model.dtype == "bfloat16"
    assert model.vocab_size == SHAPES[name]["vocab_size"] and model.max_model_len == 8192


def test_a_run_measures_the_rows_and_gathers_them(model, fake_flags, tmp_path, capfd):
    """Two rows in one run with a start, a further row in another; each engine in a process of its own."""
    results = tmp_path / "table.json"
    common = ["bench", "table", "--models", model, "--results", str(results), "--repeats", "1", *fake_flags]
    assert main([*common, "--rows", "latency1,start"]) == 0
    out, err = capfd.readouterr()
    assert "first start" in err and "latency1 done" in err
    assert out.startswith("tiny, fake\n")
    assert main([*common, "--rows", "batch32"]) == 0
    found = json.loads(results.read_text())["tiny"]
    assert [*found] == ["start", "latency1", "batch32"]
    assert found["start"]["start_s"] == pytest.approx(found["start"]["import_s"] + found["start"]["init_s"])
    assert found["latency1"]["ttft_ms"] > 0 and found["latency1"]["tpot_ms"] > 0
    one = found["batch32"]
    assert one["out_tok_s"] == pytest.approx(8192 / one["seconds"])
    assert one["total_tok_s"] == pytest.approx((4096 + 8192) / one["seconds"])
    assert one["device"] == "fake" and one["versions"]["pelton"] and one["date"].endswith("Z")
    assert one["settings"]["distributed_executor_backend"] == "fake_engine" and one["settings"]["max_model_len"] == 8192
    capfd.readouterr()
    assert main(["bench", "table", "--show", "--results", str(results)]) == 0
    shown = capfd.readouterr().out
    assert number(one["out_tok_s"], 5) in shown and number(found["latency1"]["tpot_ms"]) in shown


def test_a_row_that_fails_is_told_and_the_others_go_on(model, fake_flags, tmp_path, capfd):
    results = tmp_path / "table.json"
    flags = [*fake_flags, "--repeats", "1", "--max-model-len", "300"]  # latency1 needs 384
    assert main(["bench", "table", "--models", model, "--rows", "latency1", "--results", str(results), *flags]) == 1
    found = json.loads(results.read_text())["tiny"]["latency1"]
    assert "error" in found and "seconds" not in found
    assert "failed" in capfd.readouterr().out


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--rows", "batch33"], "--rows has 'batch33'; the rows are latency1, ttft, batch32,"),
        (["--repeats", "0"], "repeats is 0; use at least 1."),
        (["--models", "gpt5"], "--models has 'gpt5'; use qwen3-0.6b, llama3.1-8b, or a folder with a config.json."),
        (["--model", "x"], "The table's models are named by --models"),
        (["--results", "bad.json"], "--results bad.json holds no results of this command"),
    ],
)
def test_mistakes_are_named_before_anything_starts(argv, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.json").write_text("[1]")
    assert main(["bench", "table", *argv]) == 2
    assert message in capsys.readouterr().err


def test_every_row_can_be_measured_by_its_own_name():
    assert [*WORKLOADS] == [row.name for row in peers.ROWS]
    runs = [
        "latency1",
        "batch32",
        "batch128",
        "nano256",
        "sharegpt",
        "prefill",
        "start",
        "shared-prefix",
        "long-prompt",
    ]
    assert workloads_of([*WORKLOADS]) == runs
    assert workloads_of(["ttft"]) == workloads_of(["ttft", "latency1"]) == ["latency1"]


def test_the_tables_requests_are_greedy_and_make_no_text():
    """As the script that measured the other engines asks."""
    from pelton import SamplingParams

    asked = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False) for count in (3, 4)]
    assert greedy([3, 4]) == asked
    calls = []

    class Recorder:
        """Answers like an engine that makes all tokens at once."""

        def generate(self, prompts, params, *, use_tqdm):
            calls.append((prompts, params, use_tqdm))
            return [
                SimpleNamespace(
                    error=None, prompt_token_ids=prompt["prompt_token_ids"],
                    outputs=[SimpleNamespace(token_ids=[5] * one.max_tokens)],
                )
                for prompt, one in zip(prompts, params, strict=True)
            ]  # fmt: skip

        def num_preemptions(self):
            return 7 * len(calls)

    row = table_workloads(151_936)["batch32"]
    measured = measure_row(Recorder(), row, 2)
    assert measured["out_tok_s"] > 0
    assert measured["num_preemptions"] == 14, "those of the first repeat do not count"
    assert len(calls) == 3
    for repeat, (prompts, params, use_tqdm) in enumerate(calls):
        assert prompts == [{"prompt_token_ids": prompt} for prompt in row.fresh(repeat)]
        assert params == greedy([256] * 32) and use_tqdm is False
