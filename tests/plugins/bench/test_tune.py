"""`pelton bench tune`: which rates are tried, which combination wins, and what a server that does not start says."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from pelton.cli.main import main
from pelton.errors import ConfigError
from pelton_plugins.bench.tune import Trial, TuneArguments, best_of, read_choices, search
from pelton_plugins.flags import Parsed, parse_flags


def queue(rate: float) -> Trial:
    """A server of 40 requests a second whose latency grows by 10 ms with each that is sent in a second."""
    given = min(rate, 40.0)
    figures = {"failed": 0, "request_throughput": given, "output_throughput": 8 * given}
    return Trial(rate, {**figures, "e2el_ms": {"p99": 100 + 10 * given}})


@pytest.mark.parametrize(
    ("bound_ms", "rates"),
    [
        pytest.param(500, [math.inf], id="all-at-once-is-within"),
        pytest.param(499, [math.inf, 20, 30, 35, 37.5, 38.75], id="nearly"),
        pytest.param(300, [math.inf, 20, 30, 25, 22.5, 21.25], id="half"),
        pytest.param(120, [math.inf, 20, 10, 5, 2.5, 1.25], id="few"),
        pytest.param(50, [math.inf, 20, 10, 5, 2.5, 1.25], id="none"),
    ],
)
def test_rates_go_half_way_between_what_was_within_and_what_was_not(bound_ms: float, rates: list[float]) -> None:
    arguments = TuneArguments(max_e2el_ms=bound_ms)
    trials = search(queue, arguments)
    assert [trial.rate for trial in trials] == rates
    within = [trial.rate for trial in trials if trial.is_within(arguments)]
    assert within == [rate for rate in rates if 100 + 10 * min(rate, 40) <= bound_ms]
    assert len(search(queue, TuneArguments(max_e2el_ms=bound_ms, num_rates=0))) == 1


def test_a_request_that_failed_is_not_within() -> None:
    trial = Trial(1.0, {**queue(1.0).figures, "failed": 1})
    assert queue(1.0).is_within(TuneArguments()) and not trial.is_within(TuneArguments())


def test_the_most_throughput_within_the_bound_wins() -> None:
    def combination(name: str, *trials: tuple[float, bool]) -> dict[str, Any]:
        records = [{"output_throughput": tokens, "is_within": is_within} for tokens, is_within in trials]
        return {"settings": {"max_num_seqs": name}, "trials": records}

    found = best_of([combination("a", (900, False), (500, True)), combination("b", (700, False), (600, True))])
    assert found is not None and found["settings"] == {"max_num_seqs": "b"}
    assert found["trial"]["output_throughput"] == 600
    assert best_of([combination("a", (900, False)), combination("b")]) is None


def parse(*argv: str) -> Parsed:
    return parse_flags(argv, [TuneArguments], environ={})


def choices(*argv: str) -> dict[str, list[Any]]:
    parsed = parse(*argv)
    return read_choices(parsed.structs["TuneArguments"].tune, parsed)


def test_values_are_read_as_the_settings_own() -> None:
    tried = choices("--tune", "max-num-seqs:2,1k", "async_scheduling:true,false", "attention_backend:sdpa")
    assert tried == {"max_num_seqs": [2, 1000], "async_scheduling": [True, False], "attention_backend": ["sdpa"]}
    assert choices() == {"max_num_seqs": [128, 256], "max_num_batched_tokens": [512, 1024, 2048, 4096]}
    assert list(choices("--max-num-seqs", "8")) == ["max_num_batched_tokens"]  # it is fixed


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--tune", "max_num_seqs"], "--tune is 'max_num_seqs'; use a setting and its values"),
        (["--tune", "max_num_seqs:1,,2"], "use a setting and its values"),
        (["--tune", "max_num_seq:1"], r"no setting of the engine\. Did you mean 'max_num_seqs'"),
        (["--tune", "max_num_seqs:one"], "--tune max_num_seqs is 'one'; expected a whole number"),
        (["--tune", "max_num_seqs:1", "max_num_seqs:2"], "twice"),
        (["--tune", "max_num_seqs:1", "--max-num-seqs", "2"], "--max-num-seqs and --tune both set max_num_seqs"),
        (["--max-e2el-ms", "0"], r"max_e2el_ms is 0\.0; use milliseconds above 0"),
        (["--percentile", "0"], r"percentile is 0\.0"),
        (["--num-prompts", "0"], "num_prompts is 0; use at least 1"),
    ],
)
def test_mistakes(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choices(*argv)


@pytest.mark.parametrize(("bound_ms", "status"), [("600000", 0), ("0.001", 1)])
def test_servers_with_each_combination(
    model: str, fake_flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], bound_ms: str, status: int
) -> None:
    out = tmp_path / "tune.json"
    argv = ["--tune", "stream_interval:0,2", "--max-e2el-ms", bound_ms, "--num-rates", "1", "--num-prompts", "6"]
    sizes = ["--input-len", "20", "--output-len", "5", "--vocab-size", "300", "--output-json", str(out)]
    assert main(["bench", "tune", model, *argv, *sizes, *fake_flags]) == status
    said, result = capsys.readouterr().out, json.loads(out.read_text())
    refused, tried = result["combinations"]
    assert refused["settings"] == {"stream_interval": 0} and not refused["trials"]
    assert "stream_interval is 0" in refused["error"] and "--stream-interval 0: the server ended" in said
    assert [trial["rate"] is None for trial in tried["trials"]] == ([True] if status == 0 else [True, False])
    assert all(trial["completed"] == 6 and trial["total_output_tokens"] == 30 for trial in tried["trials"])
    if status == 0:
        assert result["best"]["settings"] == {"stream_interval": 2}
        assert "Best: --stream-interval 2, whatever the rate" in said
    else:
        assert result["best"] is None
        assert "No combination keeps p99 of the end-to-end latency within 0.001 ms." in said
