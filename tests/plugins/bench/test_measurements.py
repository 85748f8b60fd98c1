"""Each measurement from the command line, over an executor without a model or a tiny model."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import ssl
import statistics
from pathlib import Path

import pelton_virtual_time
import pytest
from pelton_e2e import serving
from pelton_http import Answers, answering
from pelton_virtual_time import Clock

from pelton.cli.main import main
from pelton.sampling_params import SamplingParams
from pelton.testing.models import make_tiny_checkpoint
from pelton_plugins.bench import serve
from pelton_plugins.bench.http_target import HttpTarget
from pelton_plugins.bench.load import LoadArguments, measure
from pelton_plugins.bench.load import render as render_load
from pelton_plugins.bench.metrics import RequestTimes
from pelton_plugins.bench.table.targets import Target, TargetState


def read(path):
    return json.loads(path.read_text())


def test_latency_writes_what_vllms_command_writes(model, fake_flags, tmp_path, capsys):
    out = tmp_path / "latency.json"
    argv = [
        "--input-len",
        "16",
        "--output-len",
        "4",
        "--batch-size",
        "3",
        "--num-iters",
        "5",
        "--num-iters-warmup",
        "1",
    ]
    assert main(["bench", "latency", model, *argv, "--output-json", str(out), *fake_flags]) == 0
    result = read(out)
    assert len(result["latencies"]) == 5 and min(result["latencies"]) > 0
    assert result["avg_latency"] == pytest.approx(sum(result["latencies"]) / 5)
    assert [*result["percentiles"]] == ["10", "25", "50", "75", "90", "99"]
    assert result["percentiles"]["50"] == sorted(result["latencies"])[2]
    assert result["settings"]["enable_prefix_caching"] is False and result["device"] == "fake"
    assert result["std_latency"] == pytest.approx(statistics.pstdev(result["latencies"]))
    assert (result["n"], result["detokenize"]) == (1, True)
    assert capsys.readouterr().out.startswith("3 x (16 in, 4 out), text, 5 runs, fake\n  LATENCY    MS\n")


def test_latency_has_vllms_defaults():
    from pelton_plugins.bench.latency import LatencyArguments

    one = LatencyArguments()
    sizes = (one.input_len, one.output_len, one.batch_size, one.num_iters_warmup, one.num_iters)
    assert sizes == (32, 128, 8, 10, 30)


@pytest.fixture
def asked(monkeypatch):
    """(prompts, sampling parameters) of each call of `LLM.generate`."""
    from pelton import LLM

    calls, generate = [], LLM.generate

    def note(self, prompts, params, **options):
        calls.append((list(prompts), list(params)))
        return generate(self, prompts, params, **options)

    monkeypatch.setattr(LLM, "generate", note)
    return calls


def params_like_vllms(count, *, n=1, detokenize=True):
    return SamplingParams(n=n, temperature=1.0, max_tokens=count, ignore_eos=True, detokenize=detokenize)


def test_throughput_asks_what_vllms_command_asks(model, fake_flags, asked, tmp_path, capsys):
    out = tmp_path / "throughput.json"
    argv = [
        "bench",
        "throughput",
        model,
        "--num-prompts",
        "5",
        "--input-len",
        "16",
        "--output-json",
        str(out),
        *fake_flags,
    ]
    assert main(argv) == 0
    assert asked[-1][1] == [params_like_vllms(128)] * 5 and read(out)["detokenize"] is True
    assert capsys.readouterr().out.startswith("5 requests, 80 tokens in, 640 out, text, fake\n")
    assert main([*argv, "--n", "3", "--output-len", "4", "--disable-detokenize"]) == 0
    assert asked[-1][1] == [params_like_vllms(4, n=3, detokenize=False)] * 5
    result = read(out)
    assert (result["num_input_tokens"], result["num_output_tokens"], result["n"]) == (80, 60, 3)
    assert capsys.readouterr().out.startswith("5 requests, 80 tokens in, 60 out, no text, fake\n")


def test_latency_asks_what_vllms_command_asks(model, fake_flags, asked, capsys):
    argv = ["--batch-size", "2", "--input-len", "4", "--output-len", "3", "--num-iters", "1", "--num-iters-warmup", "0"]
    assert main(["bench", "latency", model, *argv, *fake_flags]) == 0
    assert [params for _, params in asked] == [[params_like_vllms(3)] * 2]
    assert main(["bench", "latency", model, *argv, "--n", "2", "--disable-detokenize", *fake_flags]) == 0
    assert asked[-1][1] == [params_like_vllms(3, n=2, detokenize=False)] * 2
    assert "\n2 x (4 in, 2 x 3 out), no text, 1 runs" in capsys.readouterr().out
    assert main(["bench", "latency", model, "--input-len", "8100", *fake_flags]) == 2
    assert "A request of 8100 tokens in and 128 out does not fit the model's 8192" in capsys.readouterr().err


def test_a_model_without_a_tokenizer_makes_no_text(model, fake_flags, asked, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(Path(model) / "config.json", bare)
    argv = ["--num-prompts", "2", "--input-len", "4", "--output-len", "3", *fake_flags]
    assert main(["bench", "throughput", str(bare), *argv]) == 0
    assert main(["bench", "throughput", model, *argv, "--skip-tokenizer-init"]) == 0
    assert asked[1][1] == asked[3][1] == [params_like_vllms(3, detokenize=False)] * 2


def test_throughput_of_random_lengths_behind_a_prefix(model, fake_flags, asked):
    argv = ["--dataset-name", "random", "--input-len", "20", "--output-len", "10", "--prefix-len", "8"]
    assert (
        main(["bench", "throughput", model, *argv, "--num-prompts", "60", "--random-range-ratio", "0.5", *fake_flags])
        == 0
    )
    prompts = [prompt["prompt_token_ids"] for prompt in asked[-1][0]]
    assert len({tuple(prompt[:8]) for prompt in prompts}) == 1 and len({tuple(prompt[:12]) for prompt in prompts}) == 60
    lengths, counts = [len(prompt) - 8 for prompt in prompts], [one.max_tokens for one in asked[-1][1]]
    assert (min(lengths), max(lengths)) == (10, 30) and (min(counts), max(counts)) == (5, 15)


def test_throughput_with_the_output_length_alone(model, fake_flags, asked):
    assert main(["bench", "throughput", model, "--num-prompts", "10", "--output-len", "7", *fake_flags]) == 0
    prompts, params = asked[-1]
    assert {one.max_tokens for one in params} == {7} and len({len(one["prompt_token_ids"]) for one in prompts}) > 3


def test_throughput_of_equal_and_of_random_lengths(model, fake_flags, tmp_path):
    out = tmp_path / "throughput.json"
    argv = ["--num-prompts", "20", "--input-len", "16", "--output-len", "4", "--output-json", str(out)]
    assert main(["bench", "throughput", model, *argv, *fake_flags]) == 0
    result = read(out)
    assert (result["num_requests"], result["num_input_tokens"], result["num_output_tokens"]) == (20, 320, 80)
    assert result["requests_per_second"] == pytest.approx(20 / result["elapsed_time"])
    assert result["tokens_per_second"] == pytest.approx(400 / result["elapsed_time"])
    argv = ["--num-prompts", "10", "--max-model-len", "200", "--output-json", str(out)]
    assert main(["bench", "throughput", model, *argv, *fake_flags]) == 0
    assert read(out)["total_num_tokens"] <= 2000


def test_throughput_of_a_sharegpt_file(model, fake_flags, asked, tmp_path, capsys):
    talk = [{"from": "human", "value": "a question"}, {"from": "gpt", "value": "an answer"}]
    data = [{"conversations": talk} for _ in range(4)]
    data += [{"conversations": talk[:1]}, {"conversations": [{"value": "abc"}, {"value": "too short a question"}]}]
    (tmp_path / "talks.json").write_text(json.dumps(data))
    out = tmp_path / "throughput.json"
    argv = ["bench", "throughput", model, "--dataset-path", str(tmp_path / "talks.json"), *fake_flags]
    assert main([*argv, "--num-prompts", "4", "--output-json", str(out)]) == 0
    result = read(out)  # a token is a byte
    assert (result["num_input_tokens"], result["num_output_tokens"]) == (4 * 10, 4 * 9)
    assert asked[-1] == (["a question"] * 4, [params_like_vllms(9)] * 4)  # text: tokenizing it counts
    assert main([*argv, "--num-prompts", "4", "--output-len", "2"]) == 0
    assert asked[-1][1] == [params_like_vllms(2)] * 4
    assert main([*argv, "--num-prompts", "5"]) == 2
    assert "has 4 usable conversations; --num-prompts asks for 5" in capsys.readouterr().err
    (tmp_path / "talks.json").write_text('{"not": "a list"}')
    assert main([*argv, "--num-prompts", "1"]) == 2
    assert "is not a ShareGPT file" in capsys.readouterr().err


def test_latency_of_a_tiny_model(model, tmp_path):
    out = tmp_path / "latency.json"
    argv = ["--output-tokens", "3", "--batch-size", "2", "--num-iters", "1", "--num-iters-warmup", "1", "--output-json"]
    engine = [
        "--load-format",
        "dummy",
        "--max-model-len",
        "64",
        "--kv-cache-memory-bytes",
        "4M",
        "--log-level",
        "error",
    ]
    assert main(["bench", "latency", model, *argv, str(out), *engine]) == 0
    result = read(out)
    assert result["device"] != "fake" and (result["input_len"], result["output_len"]) == (32, 3)


def test_serve_at_a_server(model, fake_flags, tmp_path, capsys):
    """Every token of every request has its time, whatever text it has."""
    out = tmp_path / "serve.json"
    with serving(model, *fake_flags, log=tmp_path / "log") as (url, _):
        argv = ["--input-len", "20", "--output-len", "6", "--vocab-size", "300", "--goodput", "e2el:60000"]
        rate = ["--num-prompts", "12", "--request-rate", "60", "--burstiness", "0.7", "--max-concurrency", "4"]
        assert main(["bench", "serve", "--url", url, *argv, *rate, "--output-json", str(out)]) == 0
        # The same server, loaded with aborts and looked at afterwards.
        argv = ["--saturation-concurrency", "4", "--max-total-len", "64", "--abort-fraction", "0.5"]
        loaded = load_of(tmp_path / "load.json", "--url", url, *argv)
    result = read(out)
    assert (result["completed"], result["failed"], result["good_completed"]) == (12, 0, 12)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (240, 72)
    for one in result["requests"]:
        times = one["token_times_s"]
        assert len(times) == 6 and times == sorted(times)
    assert result["ttft_ms"]["p50"] > 0 and "p99" in result["itl_ms"]
    assert "requests/s of goodput (e2el <= 60000 ms)" in capsys.readouterr().out
    assert loaded["num_aborted"] > 0 and loaded["num_completed"] > 0 and not loaded["errors"]
    checks = {check["name"]: check["ok"] for check in loaded["checks"]}
    assert checks["KV blocks held, share"]
    # This process is the client: its memory says nothing of the server's.
    assert "host memory growth, MiB" not in checks and [third["host_mib"] for third in loaded["thirds"]] == [None] * 3


def test_several_clients_share_the_requests_and_keep_to_their_times(model, fake_flags, tmp_path, capfd):
    trace, out = tmp_path / "trace.jsonl", tmp_path / "serve.json"
    lines = [{"timestamp": 100 * place, "input_length": 5 + place, "output_length": 3} for place in range(7)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    argv = ["--vocab-size", "300", "--client-processes", "3", "--output-json", str(out)]
    with serving(model, *fake_flags, log=tmp_path / "log") as (url, _):
        assert main(["bench", "serve", "--url", url, "--trace", str(trace), *argv]) == 0
        result = read(out)
        assert main(["bench", "serve", "--url", url, "--num-prompts", "2", "--output-len", "4", *argv]) == 0
        assert read(out)["completed"] == 2  # one client has none
        assert main(["bench", "serve", "--url", url, "--trace", str(tmp_path / "none"), *argv]) == 1
        told = capfd.readouterr().err
        assert "none, which cannot be read" in told and "A client's process failed; its message is above." in told
        assert "Traceback" not in told
    requests = result["requests"]
    assert [one["num_prompt_tokens"] for one in requests] == list(range(5, 12))
    assert all(len(one["token_times_s"]) == 3 for one in requests)
    sent = [one["sent_s"] - requests[0]["sent_s"] for one in requests]
    assert sent == pytest.approx([0.1 * place for place in range(7)], abs=0.09)
    assert result["duration_s"] >= sent[-1] + requests[-1]["token_times_s"][-1] - 0.01


def load_of(out, *argv):
    """What `bench load` writes; how long it has to take until enough requests are sent follows from the machine's speed."""
    for seconds in (1, 10, 100):
        timed = ["--duration-s", str(1.5 * seconds), "--saturation-s", str(0.6 * seconds), "--sample-s", "0.2"]
        bounds = ["--max-itl-growth", "1000", "--max-host-growth-mib", "1000"]
        assert main(["bench", "load", *argv, *timed, *bounds, "--output-json", str(out)]) == 0
        if (result := read(out))["num_sent"] >= 40:
            return result
    raise AssertionError(f"it sent {result['num_sent']} requests")


@pytest.fixture
def plain_server():
    """(url, bodies that it was sent) of an OpenAI-compatible server that tells no more of its model than the name."""
    bodies = []

    class Model(Answers):
        def do_GET(self):
            self.answer(b'{"object":"list","data":[{"id":"m","object":"model"}]}')

        def do_POST(self):
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.answer(b'data: {"choices":[{"text":"a","finish_reason":null}]}\n\n' * 3 + b"data: [DONE]\n\n")

    with answering(Model) as url:
        yield url, bodies


@pytest.mark.parametrize("output_len", [3, 6000])
def test_serve_sends_any_length_to_a_server_that_tells_no_max_model_len(plain_server, output_len):
    url, bodies = plain_server
    argv = ["--url", url, "--num-prompts", "2", "--output-len", str(output_len)]
    assert main(["bench", "serve", *argv, "--input-len", "5000"]) == 0
    sent = [(body["model"], len(body["prompt"]), body["max_tokens"]) for body in bodies]
    assert sent == [("m", 5000, output_len)] * 2
    assert main(["bench", "serve", *argv]) == 0
    assert all(8 <= len(body["prompt"]) <= 2000 and body["max_tokens"] == output_len for body in bodies[2:])


async def test_the_systems_certificates_are_read_once(monkeypatch):
    """That takes some 65 ms, which would count as the server's."""
    made, contexts = [], []

    async def refuse(host, port, *, ssl, limit):
        contexts.append(ssl)
        raise ConnectionRefusedError

    monkeypatch.setattr(ssl, "create_default_context", lambda: made.append(object()) or made[-1])
    monkeypatch.setattr(asyncio, "open_connection", refuse)
    target = HttpTarget("https://here.example", model="m")
    for _ in range(3):
        await target.request([1], 1, None, RequestTimes())
    assert target.port == 443 and contexts == made * 3
    await HttpTarget("http://here.example", model="m").request([1], 1, None, RequestTimes())
    assert contexts[3:] == [None] and len(made) == 1


def test_serve_without_a_server_says_so(capsys):
    assert main(["bench", "serve", "--url", "http://127.0.0.1:9", "--num-prompts", "1"]) == 1
    assert "http://127.0.0.1:9 cannot be reached" in capsys.readouterr().err


def test_load_of_an_engine_of_its_own(model, fake_flags, tmp_path, capsys):
    argv = [
        "--max-total-len",
        "48",
        "--abort-fraction",
        "0.3",
        "--load-fraction",
        "0.5",
        "--saturation-concurrency",
        "8",
    ]
    result = load_of(tmp_path / "load.json", model, *argv, *fake_flags)
    assert result["num_sent"] == result["num_completed"] + result["num_aborted"]
    assert result["num_aborted"] > 0 and result["device"] == "fake"
    assert result["requests_per_s"] == pytest.approx(result["saturation"]["requests_per_s"] / 2)
    assert len(result["thirds"]) == 3 and all(third["host_mib"] > 0 for third in result["thirds"])
    assert "host memory growth, MiB" in {check["name"] for check in result["checks"]}
    assert "ok  requests failed" in capsys.readouterr().out


class BadTarget(Target):
    """An engine that fails some requests, gets slower, and keeps blocks."""

    vocab_size, max_model_len, max_num_seqs = 1000, 128, 4

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.num_requests = 0
        self.was_settled = self.is_closed = False

    async def start(self) -> None:
        pass

    async def request(self, prompt, num_tokens, stop_after, times) -> None:
        self.num_requests += 1
        await asyncio.sleep(0.002)
        times.num_prompt_tokens = len(prompt)
        gap = 1e-6 * (self.num_requests if self.fault == "slows" else 1)
        num = max(num_tokens - 1, 1) if self.fault == "cuts" else num_tokens
        times.tokens = [0.001 + gap * index for index in range(num)]
        times.was_aborted = stop_after is not None
        if (self.fault == "fails" and self.num_requests % 5 == 0) or (self.fault == "dies" and self.was_settled):
            times.error = "the device fell over"
        if self.fault in ("raises", "hangs") and self.was_settled:
            fault, self.fault = self.fault, ""
            await asyncio.sleep(0 if fault == "raises" else 600)
            raise RuntimeError("nobody expects this")

    async def state(self) -> TargetState:
        self.was_settled = True
        return TargetState(0.25 if self.fault == "leaks" else 0.0, 0)

    async def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize(
    "fault, broken",
    [
        ("", set()),
        ("fails", {"requests failed"}),
        ("raises", {"requests failed"}),
        ("hangs", {"requests that never ended"}),
        ("leaks", {"KV blocks held, share"}),
        ("slows", {"p99 ITL, last third over first"}),
        ("cuts", {"requests with too few tokens"}),
        ("hides its memory", {"device memory growth, MiB"}),
    ],
)
def test_load_sees_what_is_wrong(fault, broken, monkeypatch):
    from pelton_plugins.bench import load

    monkeypatch.setattr(load, "time", Clock)
    settle = load.settle
    monkeypatch.setattr(load, "settle", lambda target: settle(target, 0.05))
    monkeypatch.setattr(load, "DRAIN_S", 0.5)
    target = BadTarget(fault)
    if fault == "hides its memory":
        target.device = "cuda: with no tool to ask"
    arguments = LoadArguments(
        duration_s=0.6, saturation_s=0.1, saturation_concurrency=4, load_fraction=0.5, sample_s=0.1, max_total_len=64,
        abort_fraction=0.2, max_host_growth_mib=1000,
    )  # fmt: skip
    result = pelton_virtual_time.run(measure(target, arguments))
    assert {check["name"] for check in result["checks"] if not check["ok"]} == broken
    assert result["num_sent"] > 20 and target.is_closed
    if "requests failed" in broken:
        assert result["errors"].keys() <= {"the device fell over", "RuntimeError: nobody expects this"}
        assert sum(result["errors"].values()) + result["num_completed"] + result["num_aborted"] == result["num_sent"]


@pytest.mark.parametrize("is_client_late", [True, False])
def test_load_tells_a_late_client_from_an_engine_that_stands_still(is_client_late, monkeypatch):
    """For 0.2 s nothing goes on: in the client, which then sends late, or in the engine, whose requests wait on."""
    from pelton_plugins.bench import load

    monkeypatch.setattr(load, "time", Clock)

    class Halting(BadTarget):
        has_halted = False

        async def request(self, prompt, num_tokens, stop_after, times) -> None:
            began = Clock.perf_counter()
            if self.was_settled and not self.has_halted:
                self.has_halted, self.until = True, Clock.perf_counter() + 0.2
                if is_client_late:
                    Clock.sleep(0.2)
                    began = Clock.perf_counter()
            elif not self.was_settled:
                await asyncio.sleep(0.002)
            if self.was_settled and not is_client_late:
                await asyncio.sleep(max(self.until - Clock.perf_counter(), 0.0))
            times.tokens = [Clock.perf_counter() - began + 0.001 * index for index in range(num_tokens)]

    arguments = LoadArguments(
        duration_s=1.5, saturation_s=0.1, saturation_concurrency=1, load_fraction=0.5, sample_s=0.1, max_total_len=64,
        abort_fraction=0.0, max_host_growth_mib=1000,
    )  # fmt: skip
    result = pelton_virtual_time.run(measure(Halting(), arguments))
    first = result["thirds"][0]
    late, waited = first["sent_late_ms"]["max"], first["ttft_ms"]["max"]
    assert (late > 150 > waited) if is_client_late else (waited > 150 > late)
    assert "SENT LATE P99" in render_load(result | {"device": "none"})


def test_load_of_an_engine_that_is_gone_ends_early(monkeypatch, capsys):
    from pelton_plugins.bench import load

    monkeypatch.setattr(load, "time", Clock)
    monkeypatch.setattr(load, "GIVE_UP_AFTER", 20)
    arguments = LoadArguments(
        duration_s=600, saturation_s=0.1, saturation_concurrency=2, load_fraction=0.5, max_host_growth_mib=1000
    )
    result = pelton_virtual_time.run(measure(BadTarget("dies"), arguments))
    assert result["duration_s"] < 60 and not result["checks"][0]["ok"]
    assert "requests failed: the load ends" in capsys.readouterr().err


def test_sending_keeps_to_the_times_and_the_concurrency(monkeypatch):
    monkeypatch.setattr(serve, "time", Clock)

    class Counting(BadTarget):
        in_flight = most = 0

        async def request(self, prompt, num_tokens, stop_after, times) -> None:
            self.in_flight += 1
            self.most = max(self.most, self.in_flight)
            await asyncio.sleep(0.02)
            self.in_flight -= 1
            times.tokens = [0.02]

    async def sent(*given, **more):
        return await serve.send(*given, **more), Clock.perf_counter()

    target, requests = Counting(), [([1], 1)] * 6
    done, took_s = pelton_virtual_time.run(sent(target, requests, [0.0] * 5 + [0.3]))
    assert target.most == 5 and took_s == pytest.approx(0.32)
    assert all(times.tokens for times in done)
    target = Counting()
    _, took_s = pelton_virtual_time.run(sent(target, requests, [0.0] * 6, max_concurrency=2))
    assert target.most == 2 and took_s == pytest.approx(0.06)


def test_host_counts_every_stage(tmp_path, capsys):
    out = tmp_path / "host.json"
    assert main(["bench", "host", "--num-seqs", "32", "--num-steps", "40", "--output-json", str(out)]) == 0
    result = read(out)
    assert result["num_steps"] == 40 and result["num_seqs"] == 32
    stages = result["stages_us"]
    assert stages.keys() >= {"schedule", "execute", "update", "output", "front end"}
    assert all(0 < stages[name]["p50"] <= stages[name]["p99"] for name in ("schedule", "execute", "update", "output"))
    # A step's host work is that of its stages, of which none is larger.
    assert max(stages[name]["p50"] for name in ("schedule", "update")) < result["step_us"]["p50"] < 20_000
    assert "a step, without the front end" in capsys.readouterr().out


def test_host_with_a_model(model, tmp_path, capsys):
    out = tmp_path / "host.json"
    engine = ["--load-format", "dummy", "--kv-cache-memory-bytes", "4M", "--log-level", "error"]
    argv = ["--num-seqs", "4", "--num-steps", "5", "--input-len", "8", "--output-json", str(out)]
    assert main(["bench", "host", model, *argv, *engine]) == 0
    assert read(out)["stages_us"]["wait"]["p50"] > 0
    assert "(wait for the device)" in capsys.readouterr().out


def test_host_ends_when_a_step_fails(model, fake_flags, capsys):
    """Rather than wait for steps that never come."""
    argv = ["--num-seqs", "4", "--num-steps", "40", "--plugin-config.fake_engine.fail_at_step", "20"]
    assert main(["bench", "host", model, *argv, *fake_flags[:4], "--num-gpu-blocks-override", "2000"]) == 1
    assert (
        "A step failed: The step that ran this request failed: FakeDeviceError: as the script says"
        in capsys.readouterr().err
    )


def test_chain_has_room_for_its_rows(model, tmp_path):
    """More than a platform runs at once by default."""
    out, small = tmp_path / "chain.json", tmp_path / "tiny"
    small.mkdir()
    config = json.loads((Path(model) / "config.json").read_text()) | {"vocab_size": 64}
    (small / "config.json").write_text(json.dumps(config))
    argv = ["--batch-sizes", "70", "--context-len", "4", "--replays", "1", "--max-num-seqs", "8", "--no-compare"]
    argv += ["--bandwidth-gb-s", "10", "--output-json", str(out)]
    assert main(["bench", "chain", "--models", str(small), *argv]) == 0
    assert {row["batch"] for row in read(out)["models"]["tiny"]["rows"]} == {70}


def test_chain_times_every_seam(model, tmp_path, capfd):
    out = tmp_path / "chain.json"
    argv = [
        "--models",
        model,
        "--batch-sizes",
        "1",
        "3",
        "--context-len",
        "20",
        "--replays",
        "1",
        "--output-json",
        str(out),
    ]
    assert main(["bench", "chain", *argv]) == 0
    found = read(out)["models"]["tiny"]
    layer = ["qkv", "attention", "o", "gate_up", "down", "a layer, in the chain"]
    parts = [*layer, "inputs", "logits", "sample, greedy", "the whole step"]
    assert [(row["batch"], row["part"]) for row in found["rows"]] == [(n, part) for n in (1, 3) for part in parts]
    by_part = {row["part"]: row for row in found["rows"] if row["batch"] == 3}
    # float32, hidden 8, one head of 8, intermediate 8: bytes of the weights, and of 20 tokens of K and V for 3 rows.
    assert by_part["qkv"]["bytes"] == 24 * 8 * 4 and by_part["gate_up"]["bytes"] == 16 * 8 * 4
    assert by_part["attention"]["bytes"] == 3 * 20 * 2 * 8 * 4
    assert by_part["logits"]["bytes"] == 49_000 * 8 * 4
    layer_bytes = sum(by_part[part]["bytes"] for part in layer[:5])
    assert by_part["a layer, in the chain"]["bytes"] == layer_bytes
    assert by_part["the whole step"]["bytes"] == layer_bytes + 49_000 * 8 * 4
    assert all(row["us"] > 0 for row in found["rows"]) and found["bandwidth_gb_s"] > 0
    assert "tiny, 1 layers, context 20" in capfd.readouterr().out


def test_chain_times_rows_with_drafts_beside_the_same_without(model, tmp_path, capfd):
    out = tmp_path / "chain.json"
    argv = ["--batch-sizes", "2", "--num-drafts", "3", "--context-len", "20", "--replays", "1", "--no-compare"]
    assert main(["bench", "chain", "--models", model, *argv, "--bandwidth-gb-s", "10", "--output-json", str(out)]) == 0
    rows = [row for row in read(out)["models"]["tiny"]["rows"] if row["part"] in ("attention", "the whole step")]
    assert [(row["batch"], row["query_len"], row["part"]) for row in rows] == [
        (2, query_len, part) for query_len in (1, 4) for part in ("attention", "the whole step")
    ]
    assert {row["bytes"] for row in rows if row["part"] == "attention"} == {2 * 20 * 2 * 8 * 4}, "keys are read once"
    assert "2 x 4" in capfd.readouterr().out


def test_chain_times_experts(tmp_path):
    path, out = make_tiny_checkpoint(tmp_path / "experts", "mixtral", with_tokenizer=False), tmp_path / "chain.json"
    argv = ["--batch-sizes", "3", "--context-len", "4", "--replays", "1", "--no-compare", "--bandwidth-gb-s", "10"]
    argv += ["--num-layers", "1", "--max-model-len", "512", "--output-json", str(out)]
    assert main(["bench", "chain", "--models", str(path), *argv]) == 0
    rows = {row["part"]: row for row in read(out)["models"]["experts"]["rows"]}
    assert list(rows)[:5] == ["qkv", "attention", "o", "experts", "a layer, in the chain"]
    expected = (1 - (2 / 3) ** 3) * 6 * 3 * 64 * 96 * 4  # two of six experts a token
    assert rows["experts"]["bytes"] == pytest.approx(expected, abs=1)


@pytest.mark.parametrize(
    "argv, message",
    [
        ([], None),
        (["latncy"], "Unknown measurement 'latncy'. Did you mean 'latency'? There are latency, throughput,"),
        (["latency", "--batch-size", "0"], "batch_size is 0; use at least 1."),
        (["latency", "--num-iters-warmup", "-1"], "num_iters_warmup is -1; use at least 0."),
        (["latency", "--n", "0"], "n is 0; use at least 1."),
        (["throughput", "--num-prompts", "0"], "num_prompts is 0; use at least 1."),
        (["throughput", "--output-len", "0"], "output_len is 0; use at least 1."),
        (["throughput", "--n", "-2"], "n is -2; use at least 1."),
        (["throughput", "--dataset-name", "sonnet"], "dataset_name is 'sonnet'; use sharegpt or random."),
        (["throughput", "--dataset-name", "random"], "give input_len, such as --input-len 512"),
        (["throughput", "--prefix-len", "4"], "give input_len, such as --input-len 512"),
        (["throughput", "--input-len", "5", "--dataset-path", "x"], "exclude each other; the file has its own prompts"),
        (
            ["throughput", "--input-len", "5", "--random-range-ratio", "1"],
            "random_range_ratio is 1.0; use a share under 1",
        ),
        (["serve", "--output-len", "0"], "output_len is 0; use at least 1."),
        (["serve", "--client-processes", "2", "--max-concurrency", "2"], "client_processes do not know"),
        (["serve", "--vocab-size", "10"], "vocab_size is 10; use at least 11."),
        (["serve", "--metric-percentiles", "101"], "metric_percentiles has 101.0; use numbers from 0 to 100."),
        (["load", "--saturation-concurrency", "0"], "saturation_concurrency is 0; use at least 1."),
        (["chain", "--num-layers", "0"], "num_layers is 0; use at least 1."),
        (["chain", "--bandwidth-gb-s", "0"], "bandwidth_gb_s is 0.0; use a positive number"),
        (["serve", "--goodput", "speed:1"], "--goodput is 'speed:1'"),
        (["serve", "--url", "http://"], "--url is 'http://'; use an address such as http://127.0.0.1:8000."),
        (["load", "--abort-fraction", "1"], "abort_fraction 1.0"),
        (["chain", "--batch-sizes", "0"], "use at least 1"),
        (["chain", "--batch-sizes", "[]"], "batch_sizes is empty; name one size at least"),
        (["chain", "--replays", "51"], "replays is 51; use at most 50."),
        (["host", "--num-steps", "0"], "use at least 1"),
    ],
)
def test_help_and_mistakes(argv, message, capsys):
    status = main(["bench", *argv])
    captured = capsys.readouterr()
    if message is None:
        assert status == 0 and "usage: pelton bench MEASUREMENT" in captured.out
    else:
        assert status == 2 and message in captured.err and captured.out == ""


def test_the_source_of_requests_cuts_the_share_it_should():
    from pelton_plugins.bench.load import _Source

    source = _Source(BadTarget(), LoadArguments(abort_fraction=0.25, max_total_len=64), random.Random(2))
    drawn = [source.next() for _ in range(4000)]
    cut = [(stop, count) for _, count, stop in drawn if stop is not None]
    assert len(cut) / len(drawn) == pytest.approx(0.25, abs=0.03)
    assert all(1 <= stop < count for stop, count in cut)
    assert all(len(prompt) + count <= 64 for prompt, count, _ in drawn)
