"""The table: how it reads, what it refuses, how results gather, and a whole run."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest

from pelton.cli.main import main
from pelton_plugins.bench import offline
from pelton_plugins.bench.offline import greedy
from pelton_plugins.bench.record import number
from pelton_plugins.bench.table import command as table
from pelton_plugins.bench.table import long_context, peers, sampling_rows
from pelton_plugins.bench.table.command import SAMPLING, WORKLOADS, has_aim, merge, render, workloads_of
from pelton_plugins.bench.table.measure import measure_row, measure_rows
from pelton_plugins.bench.table.shapes import DENSE, SHAPES, write_shape
from pelton_plugins.bench.workloads import Workload, table_workloads

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
  the same, no kernel compiled yet    -        s             -        -        -              -        -             20.0     -
  decode, 1 x 8,000 cached            -        ms/token      -        -        -              0.491    -             0.850    -
  decode, 2 x 8,000 cached            -        ms/token      -        -        -              0.705    -             -        -
  decode, 8 x 8,000 cached            -        ms/token      -        -        -              1.99     -             -        -
  decode, 8 x 16,000 cached           -        ms/token      -        -        -              3.70     -             -        -
  decode, 1 x 32,000 cached           -        ms/token      -        -        -              1.13     -             1.60     -
  decode, 2 x 32,000 cached           -        ms/token      -        -        -              1.99     -             -        -
  decode, 4 x 32,000 cached           -        ms/token      -        -        -              3.70     -             -        -
  decode, 8 x 32,000 cached           -        ms/token      -        -        -              7.12     -             -        -
  first token of 8,000 cached         -        ms            -        -        -              -        -             -        -
  first token of 32,000 cached        -        ms            -        -        -              -        -             -        -
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


SAMPLED = {
    "kinds": {
        "greedy": {"out_tok_s": 32_000.0}, "top_k and top_p": {"out_tok_s": 30_000.0},
        "logprobs": {"out_tok_s": 22_400.0}, "top_p alone": {"out_tok_s": 24_320.0},
    },
    "device": "a device",
}  # fmt: skip
SAMPLED_GOLDEN = """\
  KIND OF REQUEST      256 ROWS, TOKENS/S  OF GREEDY  TARGET  REACHED
  greedy               32,000              100%       -       -
  top_k and top_p      30,000              94%        88%     yes
  logprobs             22,400              70%        88%     no
  logit_bias           -                   -          -       -
  penalties and top_p  -                   -          -       -
  all together         -                   -          -       -
  prompt_logprobs      -                   -          -       -
  top_p alone          24,320              76%        75%     yes"""


def test_requests_that_ask_for_more_are_shares_of_the_greedy_ones():
    shown = render({"m": {"sampling256": SAMPLED}}).split("\n\n")
    assert shown[0].startswith("m, a device\n") and shown[1] == SAMPLED_GOLDEN
    both = render({"m": {"sampling32": SAMPLED, "sampling256": SAMPLED}}, as_markdown=True)
    line = "| top_k and top_p | 30,000 | 94% | 92% | yes | 30,000 | 94% | 88% | yes |"
    assert line in both.splitlines()


def test_rows_over_long_contexts_say_what_the_engine_has_no_room_for():
    found = {"decode-1x8000": {"tpot_ms": 4.16, "ttft_ms": 8.86}, "decode-8x120000": {"no_room": "400,000 tokens"}}
    lines = render({"llama3.1-8b": found}).splitlines()
    cells = {line.split("  ")[1]: line.split() for line in lines if line.startswith("  ")}
    assert " ".join(cells["decode, 1 x 8,000 cached"][5:]) == "4.16 ms/token 5.20 - 1.25 3.74 90% 4.30 yes"
    assert " ".join(cells["first token of 8,000 cached"][5:9]) == "8.86 ms 17.9 -"
    assert " ".join(cells["decode, 8 x 120,000 cached"][5:8]) == "no room ms/token"
    assert "  decode-8x120000: 400,000 tokens" in lines


def test_without_results_the_table_has_targets_and_the_others_figures(capsys, tmp_path):
    assert main(["bench", "table", "--show", "--results", str(tmp_path / "none.json")]) == 0
    small, large, foot = capsys.readouterr().out.strip().split("\n\n")
    assert [table.splitlines()[0] for table in (small, large)] == [f"{name}, not measured yet" for name in DENSE]
    rows = [line.split() for line in small.splitlines()[2:]]
    assert len(rows) == len(peers.AIMS["qwen3-0.6b"]) and foot.startswith("vLLM 0.26.0")
    assert " ".join(rows[2]) == "batch32, 128 in, 256 out - out tokens/s 13,965 16,400 - 62,182 - 30,000 -"
    assert main(["bench", "table", "--show", "--models", "llama3.1-8b", "--markdown"]) == 0
    assert capsys.readouterr().out.startswith("llama3.1-8b, not measured yet:\n\n| row |")


@pytest.mark.parametrize(
    "value, text",
    [(0.28508, "0.285"), (9.96, "9.96"), (123.4, "123"), (36_100.4, "36,100"), (0, "0"), (None, "-"), (math.nan, "-")],
)
def test_figures_for_people(value, text):
    assert number(value) == text


def test_every_row_has_its_aims_in_both_dense_models():
    assert SHAPES.keys() == {name.partition(" ")[0] for name in peers.AIMS}
    names = [row.name for row in peers.ROWS]
    for model, aims in peers.AIMS.items():
        assert aims.keys() <= set(names)
        assert model not in DENSE or names[:8] == [*aims][:8]
        for row in peers.ROWS:
            aim = aims.get(row.name, peers.Aim())
            if aim.target is None:
                assert model not in DENSE or row.name not in names[:8]
                continue
            # A target is better than both others, and not better than the floor.
            best = peers.better_peer(row, aim)
            assert best is None or peers.times_better(row, aim.target, best) > 1
            assert aim.floor is None or peers.times_better(row, aim.target, aim.floor) < 1
            assert aim.stretch is None or peers.times_better(row, aim.stretch, aim.target) > 1


@pytest.mark.parametrize(
    "settings, name",
    [
        ({}, "llama3.1-8b"),
        ({"tensor_parallel_size": 1, "dtype": "bfloat16"}, "llama3.1-8b"),
        ({"tensor_parallel_size": 2}, "llama3.1-8b tp2"),
        ({"quantization": "fp8"}, "llama3.1-8b fp8"),
        (
            {"tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": True},
            "llama3.1-8b tp2 dp2 ep",
        ),
    ],
)
def test_ranks_and_weights_have_figures_of_their_own(settings, name):
    assert peers.variant("llama3.1-8b", settings) == name


def test_two_gpus_are_compared_with_two_gpus():
    measured = {"latency1": {"tpot_ms": 3.2, "device": "2 ranks"}}
    line = next(one for one in render({"llama3.1-8b tp2": measured}).splitlines() if "latency1" in one)
    assert line.split()[3:] == ["3.20", "ms/token", "3.47", "3.20", "1.00", "2.13", "67%", "2.55", "no"]


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


def test_rows_over_long_contexts_are_measured_with_their_prompts_cached(model, fake_flags, tmp_path, capfd):
    """The fake engine's cache holds 32,000 tokens, and the model takes 8,192."""
    results = tmp_path / "table.json"
    rows = "cached-8000,decode-2x8000,decode-8x8000,decode-1x32000"
    common = ["bench", "table", "--models", model, "--results", str(results), "--repeats", "1", *fake_flags]
    assert main([*common, "--rows", rows]) == 0
    found = json.loads(results.read_text())["tiny"]
    assert found.keys() == {"decode-1x8000", "decode-2x8000", "decode-8x8000", "decode-1x32000"}
    for name in ("decode-1x8000", "decode-2x8000"):
        one = found[name]
        assert one["num_cached_tokens"] == 7984 and one["settings"]["max_model_len"] == 8064
        seconds = one["all_seconds"][0] - one["all_ttft_seconds"][0]
        assert one["tpot_ms"] == pytest.approx(seconds / 63 * 1e3)
        assert one["ttft_ms"] == pytest.approx(one["all_ttft_seconds"][0] * 1e3)
    assert found["decode-8x8000"]["no_room"] == "the KV cache holds 31,984 tokens, this row needs 64,512"
    assert found["decode-1x32000"]["no_room"] == "the model takes 8,192 tokens"
    assert "no room" in capfd.readouterr().out


def test_an_engine_that_does_not_start_with_such_contexts_is_an_error_of_their_rows(model, fake_flags, tmp_path, capfd):
    results = tmp_path / "table.json"
    flags = [flag if flag != "2000" else "500" for flag in fake_flags]  # blocks of the KV cache
    common = ["bench", "table", "--models", model, "--results", str(results), "--repeats", "1", *flags]
    assert main([*common, "--rows", "decode-1x8000,decode-2x8000"]) == 1
    found = json.loads(results.read_text())["tiny"]
    assert found.keys() == {"decode-1x8000", "decode-2x8000"}
    assert all("ended with status" in row["error"] for row in found.values())


def test_long_prompts_begin_with_the_shorter_ones_and_rows_differ():
    source = long_context._Prompts(1000)
    short, long = source.of(long_context.Case(8000, 1)), source.of(long_context.Case(16_000, 3))
    assert [len(prompt) for prompt in long] == [16_000] * 3 and long[0][:8000] == short[0]
    assert len({tuple(prompt[:16]) for prompt in long}) == 3
    assert source.of(long_context.Case(8000, 2))[1] == long[1][:8000]


def test_sampled_rows_send_the_same_batch_in_every_kind(model):
    """With a model: the fake executor has no logits to sample from."""
    from pelton import LLM

    small = Workload("sampling3", [[5 + row] * 20 for row in range(3)], [4] * 3)
    with LLM(model=model, load_format="dummy", max_model_len=512, max_num_seqs=4, skip_tokenizer_init=True) as llm:
        kinds = sampling_rows.measure(llm, small, 1)["kinds"]
    assert [*kinds] == [*sampling_rows.KINDS]
    for one in kinds.values():
        assert one["out_tok_s"] == pytest.approx(3 * 4 / one["all_seconds"][0])


def test_a_sampled_row_is_measured_by_its_name(monkeypatch, capsys):
    monkeypatch.setattr(sampling_rows, "measure", lambda llm, workload, repeats: {"kinds": len(workload.prompts)})
    engine = SimpleNamespace(llm_engine=SimpleNamespace(model=SimpleNamespace(vocab_size=5000)))
    monkeypatch.setattr(offline, "run_batch", lambda *args: None)
    measure_rows(engine, ["sampling256"], None)
    assert json.loads(capsys.readouterr().out) == {"row": "sampling256", "kinds": 256}


def test_the_kinds_of_requests_are_valid_and_seeds_differ():
    for kind in sampling_rows.KINDS:
        made = sampling_rows.params_of(kind, [3, 4])
        assert [one.max_tokens for one in made] == [3, 4] and all(one.ignore_eos for one in made)
        assert [one.seed for one in made] == ([0, 1] if kind == "all together" else [None, None])
        assert (sampling_rows.target(kind, 32) is None) == (kind == "greedy")
    assert sampling_rows.target("logprobs", 1) is None and sampling_rows.target("logprobs", 256) == 0.88
    assert sampling_rows.target("prompt_logprobs", 256) == sampling_rows.target("top_p alone", 1) == 0.75


def test_no_kind_of_request_lives_off_another_kinds_prefix_cache():
    batch = table_workloads(151_936)["sampling256"]
    firsts = [prompt[0] for repeat in range(3 * len(sampling_rows.KINDS)) for prompt in batch.fresh(repeat)]
    assert len(set(firsts)) == len(firsts)


def test_rows_without_an_aim_are_measured_when_they_are_asked_for():
    assert has_aim("qwen3-0.6b", "sampling32") and not has_aim("llama3.1-8b", "sampling32")
    assert has_aim("some/folder", "decode-1x120000") and not has_aim("qwen3-0.6b", "decode-1x120000")


def test_a_first_start_has_caches_of_its_own(model, fake_flags, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "/usual")
    results, seen = tmp_path / "table.json", []
    lines = table.lines_of

    def record(job, environ=None):
        seen.append(environ)
        return lines(job, environ)

    monkeypatch.setattr(table, "lines_of", record)
    flags = ["--models", model, "--results", str(results), "--rows", "first-start", *fake_flags]
    assert main(["bench", "table", *flags]) == 0
    assert json.loads(results.read_text())["tiny"]["first-start"]["start_s"] > 0
    assert "TRITON_CACHE_DIR" not in seen[0] and seen[0]["XDG_CACHE_HOME"].endswith("tiny-cache")


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
        (
            ["--models", "gpt5"],
            "--models has 'gpt5'; use qwen3-0.6b, llama3.1-8b, qwen3-30b-a3b, gpt-oss-20b, deepseek-v3.2-4l, llama3.1-70b, llama3.1-8b-w4, "
            "or a folder with a config.json.",
        ),
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
    assert [*WORKLOADS] == [*(row.name for row in peers.ROWS), *SAMPLING]
    cases = [case.name for case in long_context.CASES]
    runs = [
        "latency1", "batch32", "batch128", "nano256", "sharegpt", "prefill", "start", "first-start", *cases,
        "shared-prefix", "long-prompt", "sharegpt-2000", "sharegpt-4000", *SAMPLING,
    ]  # fmt: skip
    assert workloads_of([*WORKLOADS]) == runs
    assert workloads_of(["long-context", "sampling"]) == [*cases, *SAMPLING]
    assert workloads_of(["cached-8000"]) == ["decode-1x8000"]
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
