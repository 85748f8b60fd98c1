"""`pelton bench tune`: the settings, and the rate of requests, with the most throughput under a bound on the latency.

Every combination of the values to try gets a server of its own. All requests are sent at once first. Where that is too slow, rates below
its throughput follow, each half way between one that was within the bound and one that was not.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pelton.cli.table import format_table
from pelton.config.engine import did_you_mean
from pelton.errors import ConfigError, EngineError
from pelton_plugins.bench.arrivals import arrival_times
from pelton_plugins.bench.bounds import check_at_least
from pelton_plugins.bench.cpu.engines import free_port, running_server
from pelton_plugins.bench.http_target import HttpTarget
from pelton_plugins.bench.record import circumstances, flat_settings, number, write_json
from pelton_plugins.bench.serve import MIN_VOCAB_SIZE, figures, send
from pelton_plugins.bench.workloads import synthetic_requests
from pelton_plugins.flags import Parsed, parse_flags
from pelton_plugins.flags.table import make_flags

NUM_WARM_UP = 8
DOC = """Find the settings with the most throughput whose end-to-end latency keeps to a bound, and the rate of requests up to which
it does. Each combination of values gets a server of its own; flags of the engine hold for all of them.

  pelton bench tune MODEL --max-e2el-ms 500
  pelton bench tune MODEL --tune max_num_seqs:16,64 stream_interval:1,4 --input-len 1000 --output-len 100"""


class TuneArguments(msgspec.Struct, frozen=True, kw_only=True):
    """The bound, what is tried, and the requests."""

    max_e2el_ms: float = 500.0
    """Longest end-to-end latency, in milliseconds."""
    percentile: float = 99.0
    """Share of the requests that keep to it, in percent."""
    tune: list[str] = msgspec.field(
        default_factory=lambda: ["max_num_seqs:128,256", "max_num_batched_tokens:512,1024,2048,4096"]
    )
    """Settings and the values to try, as name:value,value."""
    num_rates: int = 5
    """Rates that are tried where all requests at once take too long."""
    num_prompts: int = 200
    """Requests at each rate."""
    input_len: int = 128
    """Tokens of each prompt."""
    output_len: int = 128
    """Tokens of each answer."""
    burstiness: float = 1.0
    """Shape of the Gamma intervals: 1 is a Poisson process, less comes in bursts, more is steadier."""
    max_concurrency: int | None = None
    """Requests in flight; those above wait at the client, and their clock starts when they are sent."""
    vocab_size: int = 10_000
    """Prompts are random token ids below this."""
    output_json: str | None = None
    """Write the result here, with every rate that was tried."""

    def __post_init__(self) -> None:
        check_at_least(
            self, num_rates=0, num_prompts=1, input_len=1, output_len=1, max_concurrency=1, vocab_size=MIN_VOCAB_SIZE
        )
        if not self.max_e2el_ms > 0:
            raise ConfigError(f"max_e2el_ms is {self.max_e2el_ms}; use milliseconds above 0, such as 500.")
        if not 0 < self.percentile <= 100:
            raise ConfigError(f"percentile is {self.percentile}; use a number above 0, up to 100.")


class Trial(NamedTuple):
    """One rate of requests at one server."""

    rate: float
    """Mean arrivals a second; infinite for all at once."""
    figures: dict[str, Any]
    """As `pelton bench serve` has them."""

    def e2el_ms(self, percentile: float) -> float:
        return float(self.figures["e2el_ms"][f"p{percentile:g}"])

    def is_within(self, arguments: TuneArguments) -> bool:
        return not self.figures["failed"] and self.e2el_ms(arguments.percentile) <= arguments.max_e2el_ms


def run(argv: list[str]) -> int:
    parsed = parse_flags(argv, [TuneArguments], program="pelton bench tune", doc=DOC)
    arguments: TuneArguments = parsed.structs["TuneArguments"]
    choices = read_choices(arguments.tune, parsed)
    given = {"model": parsed.config.model.model, **flat_settings(parsed)}
    combinations: list[dict[str, Any]] = []
    for values in itertools.product(*choices.values()):
        settings = dict(zip(choices, values, strict=True))
        print(f"{shown(settings)} ...", file=sys.stderr)
        combinations.append({"settings": settings, **_tried({**given, **settings}, arguments)})
    result: dict[str, Any] = {"combinations": combinations, "best": best_of(combinations)}
    result |= circumstances(_device(combinations), {**given, **msgspec.to_builtins(arguments)})
    print(render(result, arguments))
    write_json(arguments.output_json, result)
    return 0 if result["best"] is not None else 1


def read_choices(texts: Sequence[str], parsed: Parsed) -> dict[str, list[Any]]:
    """Values to try by the flat name of their setting. Raises `ConfigError`."""
    flags = {flag.flat: flag for flag in make_flags().values()}
    found: dict[str, list[Any]] = {}
    for text in texts:
        name, colon, values = text.partition(":")
        name = name.replace("-", "_")
        if not colon or not all(values.split(",")):
            raise ConfigError(f"--tune is {text!r}; use a setting and its values, such as max_num_seqs:64,128.")
        if name not in flags:
            raise ConfigError(f"--tune names {name!r}, which is no setting of the engine.{did_you_mean(name, flags)}")
        if name in found:
            raise ConfigError(f"--tune names {name!r} twice; give its values once.")
        if name in parsed.explicit:
            if "tune" in parsed.explicit:
                raise ConfigError(f"{flags[name].name} and --tune both set {name}; give it once.")
            continue  # one of those that are tried by default is fixed
        found[name] = [flags[name].read(value, f"--tune {name}") for value in values.split(",")]
    return found


def _tried(settings: Mapping[str, Any], arguments: TuneArguments) -> dict[str, Any]:
    """Rates at one server; the reason where it does not start, or its requests fail."""
    with tempfile.TemporaryDirectory() as folder:
        file, port = Path(folder) / "settings.json", free_port()
        file.write_text(json.dumps(settings))
        command = [
            sys.executable,
            "-m",
            "pelton",
            "serve",
            "--config",
            str(file),
            "--port",
            str(port),
            "--no-access-log",
        ]
        try:
            with running_server(command, port, Path(folder) / "log", {}) as server:
                trials = search(_measure_at(server.url, arguments), arguments)
        except (ConfigError, EngineError) as error:
            return {"trials": [], "error": str(error)}
    records = [{"rate": trial.rate, "is_within": trial.is_within(arguments), **trial.figures} for trial in trials]
    return {"trials": records, "error": None}


def _measure_at(url: str, arguments: TuneArguments) -> Callable[[float], Trial]:
    """Measure a rate at a server. Prompts are new each time: none is found in the prefix cache."""
    target = HttpTarget(url, vocab_size=arguments.vocab_size)
    serial = itertools.count()

    async def once(count: int, rate: float) -> tuple[Any, float]:
        if not target.max_model_len:
            await target.start()
        rng = random.Random(next(serial))
        requests = synthetic_requests(
            count, arguments.input_len, arguments.output_len, arguments.vocab_size, rng, max_tokens=target.max_model_len
        )
        arrivals = arrival_times(rate, arguments.burstiness, rng)
        began = time.perf_counter()
        done = await send(target, requests, arrivals, arguments.max_concurrency)
        return done, time.perf_counter() - began

    def measure(rate: float) -> Trial:
        done, seconds = asyncio.run(once(arguments.num_prompts, rate))
        found = Trial(rate, figures(done, seconds, {}, [50.0, arguments.percentile]))
        if found.figures["failed"] == len(done):
            raise EngineError(f"All requests failed: {found.figures['errors'][0]}")
        return found

    asyncio.run(once(min(NUM_WARM_UP, arguments.num_prompts), math.inf))
    return measure


def search(measure: Callable[[float], Trial], arguments: TuneArguments) -> list[Trial]:
    """All at once, and where that is too slow `num_rates` rates below what it gave."""
    trials = [measure(math.inf)]
    if trials[0].is_within(arguments):
        return trials
    low, high = 0.0, float(trials[0].figures["request_throughput"])
    for _ in range(arguments.num_rates):
        trials.append(measure((low + high) / 2))
        if trials[-1].is_within(arguments):
            low = trials[-1].rate
        else:
            high = trials[-1].rate
    return trials


def best_of(combinations: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Settings and trial with the most throughput of those within the bound; None where there is none."""
    good = [
        {"settings": one["settings"], "trial": trial}
        for one in combinations
        for trial in one["trials"]
        if trial["is_within"]
    ]
    return max(good, key=lambda one: float(one["trial"]["output_throughput"]), default=None)


def _device(combinations: Sequence[Mapping[str, Any]]) -> str:
    return f"{sum(one['error'] is None for one in combinations)} servers on this machine"


def shown(settings: Mapping[str, Any]) -> str:
    """As flags."""
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in settings.items()) or "as given"


def render(result: Mapping[str, Any], arguments: TuneArguments) -> str:
    """A line for each combination: its best rate within the bound, or its lowest one."""
    column, rows, errors = f"p{arguments.percentile:g}", [], []
    for one in result["combinations"]:
        if one["error"] is not None:
            errors.append(f"  {shown(one['settings'])}: {one['error']}")
            continue
        best = best_of([one])
        trial = best["trial"] if best is not None else min(one["trials"], key=lambda trial: trial["rate"])
        rate = "all at once" if math.isinf(trial["rate"]) else number(trial["rate"])
        rows.append(
            (
                shown(one["settings"]), rate, number(trial["request_throughput"]), number(trial["output_throughput"]),
                number(trial["e2el_ms"][column]), "yes" if trial["is_within"] else "no",
            )
        )  # fmt: skip
    bound = f"{arguments.max_e2el_ms:g} ms"
    header = ("settings", "requests/s sent", "requests/s", "output tokens/s", f"{column} E2E, ms", f"within {bound}")
    best = result["best"]
    if best is None:
        last = f"No combination keeps {column} of the end-to-end latency within {bound}."
    else:
        sent = best["trial"]["rate"]
        rate = "whatever the rate" if math.isinf(sent) else f"up to {number(sent)} requests/s"
        last = f"Best: {shown(best['settings'])}, {rate}: {number(best['trial']['output_throughput'])} output tokens/s."
    return "\n".join([format_table(header, rows, indent="  "), *errors, last])
