"""The simulator: fitted step times, engines whose times can be worked out by hand, traces, and the command."""

from __future__ import annotations

import copy
import functools
import json
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from pelton.cli.main import main
from pelton.config import EngineConfig
from pelton.errors import ConfigError
from pelton.plugins import load_plugins
from pelton_plugins.bench.host import paced_executor
from pelton_plugins.bench.simulator import fleet
from pelton_plugins.bench.simulator.command import to_plain
from pelton_plugins.bench.simulator.engine import Figures, engine_maker
from pelton_plugins.bench.simulator.fleet import Clock, SimulatedServer
from pelton_plugins.bench.simulator.paths import Paths, calibrate
from pelton_plugins.bench.simulator.plot import main as draw
from pelton_plugins.bench.simulator.step_times import fit, least_squares
from pelton_plugins.bench.steps import COLUMNS, KIND
from pelton_plugins.bench.trace import TraceRequest, read_trace
from pelton_plugins.data_parallel.router import EngineLoad, LoadRouter

FACTS = {
    "model": "m", "vocab_size": 1000, "max_model_len": 4096, "max_num_seqs": 16, "max_num_batched_tokens": 512,
    "max_mixed_prefill_tokens": None, "num_blocks": 2000, "context_tokens": 0, "max_steps_in_flight": 2, "num_ranks": 1,
    "kv_cache_specs": {"layer": {"type": "FullAttentionSpec", "block_size": 16, "num_kv_heads": 1, "head_dim": 16, "dtype": "bfloat16"}},
}  # fmt: skip


def seconds(rows, context, prompts, tokens, pairs):
    """What a step takes on the device that is made up here."""
    return 0.004 + 1e-4 * rows + 1e-7 * context + (0.001 + 2e-5 * tokens + 1e-8 * pairs if prompts else 0)


def recorded(scatter: float = 0.0) -> list[list[float]]:
    rng, steps, now = random.Random(0), [], 100.0
    for _ in range(1200):
        rows, tokens = rng.randrange(1, 17), rng.choice([0, 0, rng.randrange(2, 500)])
        described = [rows, rows * rng.randrange(1000), int(tokens > 0), tokens, tokens * rng.randrange(1, 800)]
        now += (taken := seconds(*described) * rng.uniform(1 - scatter, 1 + scatter))
        steps.append([*described, taken, now - taken - 1e-4, now])
    return steps


@functools.cache
def fitted():
    """Step times of the device without scatter. A fit takes a third of a second; the random numbers are a copy's own."""
    return fit(recorded(), 600)


def read(path):
    return json.loads(Path(path).read_text())


def write_steps(path, **facts) -> str:
    told = {
        "kind": KIND,
        "engine": {**FACTS, **facts},
        "columns": COLUMNS,
        "steps": recorded(),
        "prompts": [],
        "device": "made up",
    }
    path.write_text(json.dumps(told))
    return str(path)


def simulate(requests, *, size=1, times=None, skips=True, overhead_s=0.0, paths=None, num_fronts=1, clock=None, **flat):
    config = EngineConfig.from_flat(
        **{"max_num_seqs": 16, "max_num_batched_tokens": 512, "data_parallel_size": size, **flat}
    )
    clock, figures, plugins, paths = clock or Clock(), Figures(), load_plugins(), paths or Paths()
    make = engine_maker(config, FACTS, plugins, times or copy.deepcopy(fitted()), clock, paths)

    def make_one(told):
        engine = make(told)
        if not skips:
            engine._skipper = None
        return engine

    server = SimulatedServer(config, plugins, make_one, figures, clock, paths, num_fronts)
    server.run(requests, FACTS["vocab_size"], overhead_s)
    return figures


def test_a_paced_step_takes_its_time_from_its_launch_on_or_from_the_step_before(monkeypatch):
    """A rest before it makes it no shorter: the simulator is held against engines over this executor."""
    now = [100.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(paced_executor, "time", clock)
    config = EngineConfig.from_flat(plugin_config={"paced_executor": {"step_s": 0.01}})
    executor = paced_executor.PacedExecutor(SimpleNamespace(config=config))
    handles = [executor.execute(SimpleNamespace(step_id=step, samples=[True])) for step in range(2)]
    for due in (100.01, 100.02):
        assert not handles[0].ready()
        handles.pop(0).result()
        assert now[0] == pytest.approx(due)
    now[0] = 100.025
    executor.execute(SimpleNamespace(step_id=2, samples=[True])).result()
    assert now[0] == pytest.approx(100.035)


def test_least_squares_finds_the_weights_and_none_below_0():
    rng = np.random.default_rng(0)
    terms, weights = rng.random((200, 8)), np.array([0, 1, 0, 2, 0.5, 0, 3, 0])
    assert least_squares(terms, terms @ weights) == pytest.approx(weights, abs=1e-6)
    found = least_squares(terms, terms @ (weights - 0.5))
    assert (found >= 0).all()
    for place in np.nonzero(found)[0]:  # no weight that is there is better larger or smaller
        for change in (-1e-3, 1e-3):
            other = found.copy()
            other[place] += change
            wanted = terms @ (weights - 0.5)
            assert np.linalg.norm(terms @ other - wanted) >= np.linalg.norm(terms @ found - wanted)


def test_fitted_times_are_those_of_the_device_and_scatter_as_it_does():
    times = fit(recorded(scatter=0.2), 600)
    for described in ([3, 900, 0, 0, 0], [16, 8000, 0, 0, 0], [4, 1000, 1, 300, 90_000]):
        mean = times.decode(*described[:2]) if not described[2] else times.mixed(*described)
        assert mean == pytest.approx(seconds(*described), rel=0.03)
    drawn = [times.draw(1.0, 3, is_decode=True)[0] for _ in range(3000)]
    assert sum(drawn) / len(drawn) == pytest.approx(1, abs=0.02) and max(drawn) > 1.15 and min(drawn) < 0.85


def test_steps_that_something_else_held_up_are_left_out():
    """A size that is met for the first time is captured, or compiled for: every 50th step with prompts takes five times as long here."""
    plain, steps = fit(recorded(), 600), recorded()
    for row in [row for row in steps if row[2]][::50]:
        row[5] *= 5
    held = fit(steps, 600)
    described = [4, 1000, 1, 300, 90_000]
    assert held.mixed(*described) == pytest.approx(plain.mixed(*described), rel=0.02)
    assert max(held.draw(1.0, 304, is_decode=False)[0] for _ in range(2000)) < 1.2


def test_a_step_after_a_rest_takes_longer_by_as_much_as_measured():
    steps = recorded()
    for place in range(50, 1200, 3):  # the device waited 1 ms, and began 2 ms late
        steps[place][5] += 0.002
        steps[place][6] = steps[place - 1][7] + 0.001
    times = fit(steps, 600)
    plain, late = (times.draw(0.01, 3, is_decode=True, is_first=is_first)[0] for is_first in (False, True))
    assert late - plain == pytest.approx(0.002, rel=0.1)


def serve_record(path, requests) -> str:
    """What `bench serve` writes of (sent, tokens of the prompt, times of tokens by the same clock)."""
    told = [
        {"num_prompt_tokens": size, "sent_s": sent, "token_times_s": [time - sent for time in times], "error": None}
        for sent, size, times in requests
    ]
    path.write_text(json.dumps({"output_throughput": 1.0, "ttft_ms": {"p50": 1.0}, "requests": told}))
    return str(path)


def server_at_work(path, *, to_engine=0.003, back=0.002, num=60):
    """Steps of 10 ms without end, requests that come at any time, and what their clients see. Gives (steps, prompts, record)."""
    rng = random.Random(2)
    steps = [[2, 100, 1, 50 + k % 7, 1000, 0.01, 100 + 0.01 * k - 0.001, 100.01 + 0.01 * k] for k in range(40 * num)]
    for step in steps[::2]:
        step[2:5] = 0, 0, 0
    prompts, requests = [], []
    for number in range(num):
        sent = 101 + 0.3 * number + rng.random() * 0.1
        step = next(k for k, row in enumerate(steps) if row[6] >= sent + to_engine)
        prompts.append((steps[step][6], 40 + number))
        requests.append(
            (sent, 40 + number, [steps[step + later][7] + back + 0.001 * (later == 0) for later in range(12)])
        )
    return steps, prompts, serve_record(path, requests)


def test_ways_between_client_and_engine_are_found(tmp_path):
    steps, prompts, record = server_at_work(tmp_path / "serve.json")
    found = calibrate([{"steps": steps, "prompts": prompts}], [record], random.Random(0))
    drawn = [found.paths.to_engine(3) for _ in range(50)]
    assert sum(drawn) / 50 == pytest.approx(0.003, abs=0.0005)
    assert found.paths.first_token(3) == pytest.approx(0.003, abs=1e-6)
    assert np.nanmedian(found.outs) == pytest.approx(0.002, abs=1e-6)
    assert 1000 < len(found.used) < len(steps)  # those of the run alone
    figures = simulate([TraceRequest(5.0, 100, 11)], paths=found.paths)
    first = seconds(0, 0, 1, 100, 100 * 50)
    assert figures.ttft.histogram().percentile(50) == pytest.approx(first + 0.006, rel=0.05)


def test_steps_of_several_engines_are_laid_beside_one_run(tmp_path):
    """Most requests are those of one engine; the other's count too, where its steps are given."""
    steps, prompts, record = server_at_work(tmp_path / "serve.json")
    one, other = ({"steps": steps, "prompts": share} for share in (prompts[:50], prompts[50:]))
    both = calibrate([one, other], [record], random.Random(0), 2)
    alone = calibrate([one], [record], random.Random(0), 2)
    assert len(both.used) == 2 * len(alone.used) and len(both.outs) == 2 * len(steps)
    assert len(both.paths.first) == 60 and len(alone.paths.first) == 50
    assert np.nanmedian(both.outs) == pytest.approx(0.002, abs=1e-6)
    with pytest.raises(ConfigError, match="whose requests are not among those"):
        calibrate([other], [record], random.Random(0), 2)


def test_a_run_at_another_server_is_refused(tmp_path):
    steps, prompts, _ = server_at_work(tmp_path / "serve.json")
    record = serve_record(tmp_path / "other.json", [(500.0, 40, [500.1, 500.2])])
    with pytest.raises(ConfigError, match=r"other\.json, whose requests are not among those"):
        calibrate([{"steps": steps, "prompts": prompts}], [record], random.Random(0))


def test_a_picture_of_several_loads(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    rows = [["request throughput", 9.0, 10.0], ["time to first token p50", 20.0, 10.0]]
    path = tmp_path / "results.json"
    path.write_text(json.dumps([["low", rows], ["high", rows]]))
    assert draw([str(tmp_path / "out.png"), str(path)]) == 0
    assert 1000 < (tmp_path / "out.png").stat().st_size < 100_000
    path.write_text("{}")
    assert draw([str(tmp_path / "out.png"), str(path)]) == 1
    assert "has no comparison" in capsys.readouterr().err


def test_one_request_takes_its_prompt_and_its_tokens():
    figures = simulate([TraceRequest(5.0, 100, 11)])
    first = seconds(0, 0, 1, 100, 100 * 50)
    later = sum(seconds(1, 100 + place, 0, 0, 0) for place in range(10))
    told = figures.ttft.histogram().percentile(50), figures.e2e.histogram().percentile(50)
    assert told == pytest.approx((first, first + later), rel=0.02)
    assert figures.counts["completed"] == 1 and figures.counts["output_tokens"] == 11
    later = simulate([TraceRequest(5.0, 100, 11)], overhead_s=0.5)
    assert later.ttft.histogram().percentile(50) == pytest.approx(first + 0.5, rel=0.02)


def busy_trace(num=150, rate=8.0):
    rng, now = random.Random(3), 0.0
    for _ in range(num):
        now += rng.expovariate(rate)
        yield TraceRequest(now, rng.randrange(5, 700), rng.randrange(1, 120))


def test_skipped_steps_change_no_figure():
    # Equal steps, whatever is in them: to the bin of a histogram nothing may differ.
    steps = [[*row[:5], 0.005 if not row[2] else 0.011, *row[6:]] for row in recorded()]
    found = [to_plain(simulate(busy_trace(), size=2, times=fit(steps, 600), skips=skips)) for skips in (False, True)]
    assert found[1]["counts"].pop("events") < 0.7 * found[0]["counts"].pop("events")
    assert found[0]["counts"] == found[1]["counts"] and found[0]["counts"]["completed"] == 150
    assert found[0]["last_s"] == pytest.approx(found[1]["last_s"])
    for name in ("ttft", "itl", "e2e"):
        one, other = ({int(k): v for k, v in part["times"][name].items()} for part in found)
        assert sum(one.values()) == sum(other.values())
        shares = [
            [counts.get(bin_, 0) + counts.get(bin_ + 1, 0) for bin_ in sorted({*one, *other})]
            for counts in (one, other)
        ]
        assert shares[0] == pytest.approx(shares[1], abs=3)


def test_beginnings_that_a_trace_shares_are_found_in_the_cache(tmp_path):
    lines = [
        {"timestamp": 1000 * i, "input_length": 1100, "output_length": 4, "hash_ids": [7, 8, 100 + i]} for i in range(4)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    trace = read_trace(str(path), rate_scale=2.0)
    assert [one.arrival_s for one in trace] == [0, 0.5, 1, 1.5]
    prompts = [one.tokens(number, 1000) for number, one in enumerate(trace)]
    assert all(len(prompt) == 1100 and prompt[:1024] == prompts[0][:1024] for prompt in prompts)
    assert len({tuple(prompt[1024:]) for prompt in prompts}) == 4
    counts = simulate(trace).counts
    assert counts["prefix_queries"] == 4400 and counts["prefix_hits"] == 3 * 1024


@pytest.mark.parametrize("routing", ["load", "prefix"])
def test_engines_share_the_requests(routing):
    one, two = (
        simulate([TraceRequest(0.0, 64, 100)] * 32, size=size, data_parallel_routing=routing) for size in (1, 2)
    )
    assert two.counts["completed"] == 32
    assert two.last_s < 0.65 * one.last_s  # 16 at once and 16 behind them, or all at once


def test_an_api_process_knows_how_many_requests_engines_have_and_is_told_what_these_do():
    front = fleet._Front(0, LoadRouter(EngineConfig(), 2), EngineLoad, 2)
    engines = [SimpleNamespace(num_in_flight=3, num_of_front={}), SimpleNamespace(num_in_flight=5, num_of_front={0: 2})]
    assert front.route(None, engines) == 0  # as far as it knows all wait
    front.tell(0, (2, 1))
    front.tell(1, (0, 5))
    assert [front.route(None, engines) for _ in range(2)] == [1, 0]  # 9 and 5, then 9 and 9
    engines[1].num_in_flight, engines[1].num_of_front = 0, {}  # those of all processes have ended
    assert front.route(None, engines) == 1


@pytest.mark.parametrize("num_fronts", [1, 2])
def test_several_api_processes_are_told_now_and_then(monkeypatch, num_fronts):
    told, tell, clock = [], fleet._Front.tell, Clock()

    def note(front, place, load):
        told.append(clock.now)
        tell(front, place, load)

    monkeypatch.setattr(fleet._Front, "tell", note)
    simulate(busy_trace(20), size=2, num_fronts=num_fronts, clock=clock)
    times = np.unique(told)
    _, counts = np.unique(times // fleet.LOADS_INTERVAL_S, return_counts=True)
    assert len(times) > 10 and (counts.max() > 4 if num_fronts == 1 else counts.max() == 1)


def test_the_command_compares_with_what_was_measured(tmp_path, capsys):
    steps = write_steps(tmp_path / "steps.json")
    argv = [
        "simulate",
        "--step-times",
        steps,
        "--num-prompts",
        "30",
        "--request-rate",
        "6",
        "-dp",
        "2",
        "--num-servers",
        "3",
    ]
    outs = [str(tmp_path / f"{count}.json") for count in (1, 2)]
    assert main([*argv, "--num-processes", "1", "--output-json", outs[0]]) == 0
    capsys.readouterr()
    assert main([*argv, "--num-processes", "2", "--output-json", outs[1], "--compare", outs[0]]) == 0
    table = capsys.readouterr().out
    one, two = map(read, outs)
    assert one["completed"] == 30 and one["num_devices"] == 6
    for name in ("ttft_ms", "itl_ms", "output_throughput", "num_steps"):
        assert one[name] == two[name]
    assert "RATIO" in table and table.count("1.00") >= 14


def test_bad_files_are_refused_in_one_line(tmp_path, capsys):
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 0, "input_length": 5, "output_length": 1}\n{"timestamp": 0, "input_length": 0, "output_length": 1}\n'
    )
    steps = write_steps(tmp_path / "steps.json")
    assert main(["simulate", "--step-times", steps, "--trace", str(path)]) != 0
    assert "line 2" in (told := capsys.readouterr().err) and "input_length is 0" in told and told.count("\n") == 1
    assert main(["simulate"]) != 0
    assert "step_times is not given" in capsys.readouterr().err
    path.write_text("{}")
    assert main(["simulate", "--step-times", str(path)]) != 0
    assert "pelton bench steps" in capsys.readouterr().err


def test_bench_steps_writes_what_the_simulator_reads(model, fake_flags, tmp_path, capsys):
    out = str(tmp_path / "steps.json")
    argv = ["--seconds", "1", "--concurrency", "2", "8", "--median-output-len", "6", "--output-json", out, *fake_flags]
    assert main(["bench", "steps", model, *argv]) == 0
    assert main(["simulate", "--step-times", out, "--num-prompts", "20", "--request-rate", "100"]) == 0
    assert "20 requests" in capsys.readouterr().out


def test_an_executor_records_the_steps_of_an_engine(model, fake_flags, tmp_path):
    out = str(tmp_path / "steps.json")
    flags = [*fake_flags, "--plugin-config", json.dumps({"recorded": {"path": out}})]
    place = flags.index("--distributed-executor-backend")
    flags[place + 1] = "recorded"
    assert (
        main(["bench", "latency", model, "--output-len", "8", "--num-iters", "2", "--num-iters-warmup", "0", *flags])
        == 0
    )
    told = read(out)
    assert told["engine"]["max_num_seqs"] == 64 and len(told["steps"]) == 16
    assert told["steps"][0][2:4] == [8, 256] and all(row[0] == 8 and row[5] > 0 for row in told["steps"][1:8])
