"""`pelton simulate`: requests of a trace through the scheduler, the KV-cache manager and the routers, without a device.

Steps take as long as `pelton bench steps` has measured. Servers share nothing but the requests that are dealt out to them, and are
simulated one after the other, in as many processes as there are cores.
"""

from __future__ import annotations

import gc
import itertools
import json
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from pelton.cli.table import format_table
from pelton.config import EngineConfig
from pelton.errors import ConfigError, EngineError
from pelton.plugins import load_plugins
from pelton_plugins.bench.bounds import check_at_least
from pelton_plugins.bench.metrics import LogHistogram
from pelton_plugins.bench.record import flat_settings, number, today, versions, write_json
from pelton_plugins.bench.serve import LATENCIES
from pelton_plugins.bench.simulator.engine import Figures, engine_maker
from pelton_plugins.bench.simulator.fleet import Clock, SimulatedServer
from pelton_plugins.bench.simulator.paths import Paths, calibrate, read_record
from pelton_plugins.bench.simulator.step_times import fit, read_steps
from pelton_plugins.bench.trace import TraceRequest, chat_requests, read_trace, takes
from pelton_plugins.flags import parse_flags

PERCENTS = (50, 90, 99)
TIMES = {"ttft_ms": "ttft", "tpot_ms": "tpot", "itl_ms": "itl", "e2el_ms": "e2e"}
LABELS = {label: what for what, label in LATENCIES.items()}
DOC = """What clients would see of many engines under a load: the scheduler, KV-cache manager and routers as they are, over steps whose
times `pelton bench steps` has measured. Settings of engines (-dp, --max-num-seqs, ...) are those of `pelton serve`.

  pelton simulate --step-times steps.json --request-rate 8 --num-prompts 2000
  pelton simulate --step-times steps.json --trace mooncake.jsonl -dp 8 --num-servers 4 --output-json simulated.json"""


class SimulateArguments(msgspec.Struct, frozen=True, kw_only=True):
    """The requests, and how many servers there are."""

    step_times: list[str] = msgspec.field(default_factory=list)
    """What `pelton bench steps --output-json` wrote on the device; or steps of a server, a file for each of its engines."""
    trace: str | None = None
    """Requests as Mooncake's JSON lines; lengths and arrivals are drawn as a chat service's when unset."""
    rate_scale: float = 1.0
    """Requests of the trace come this many times as fast."""
    num_prompts: int | None = None
    """How many requests at most, for all servers; 1,000 when neither this nor a trace nor --duration-s is given."""
    duration_s: float | None = None
    """Requests that come within so many seconds."""
    request_rate: float = 1.0
    """Mean arrivals a second at all servers, where no trace says when they come."""
    burstiness: float = 1.0
    """Shape of the Gamma intervals: 1 is a Poisson process, less comes in bursts, more is steadier."""
    input_len: int | None = None
    """Tokens of each prompt; log-normal lengths when unset."""
    output_len: int | None = None
    """Tokens of each answer; log-normal lengths when unset."""
    num_servers: int = 1
    """Servers with -dp engines each. Requests are dealt out to them in turn, or arrive at each at random without a trace."""
    api_server_count: int | None = None
    """API processes of each server, as `pelton serve` has them: as many as engines when unset."""
    overhead_ms: float = 0.0
    """Time between a client's sending and the engine's receipt of a request, and for a token on its way back, together."""
    num_processes: int | None = None
    """Processes that simulate; one for each core when unset."""
    calibrate: list[str] = msgspec.field(default_factory=list)
    """What `pelton bench serve --output-json` measured while these steps were recorded: the ways between clients and engine are taken
    from it, and only steps of these runs."""
    compare: str | None = None
    """Show beside it what `pelton bench serve --output-json` has measured."""
    output_json: str | None = None
    """Write the result here."""
    plot: str | None = None
    """Write a picture of the comparison here (PNG); needs matplotlib. `python -m pelton_plugins.bench.simulator.plot` draws several."""

    def __post_init__(self) -> None:
        check_at_least(
            self,
            num_prompts=1,
            input_len=1,
            output_len=1,
            num_servers=1,
            num_processes=1,
            api_server_count=1,
            overhead_ms=0,
        )
        for name in ("rate_scale", "request_rate", "burstiness", "duration_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} is {value}; use a number above 0.")
        if self.plot is not None and self.compare is None:
            raise ConfigError("plot needs --compare: it shows measured beside simulated figures.")


def run(argv: list[str]) -> int:
    parsed = parse_flags(argv, [SimulateArguments], positional=None, program="pelton simulate", doc=DOC)
    arguments: SimulateArguments = parsed.structs["SimulateArguments"]
    began = time.perf_counter()
    job = Job(argv)
    num_processes = min(arguments.num_processes or os.cpu_count() or 1, arguments.num_servers)
    shares = [range(place, arguments.num_servers, num_processes) for place in range(num_processes)]
    if num_processes == 1:
        found = [to_plain(job.simulate(shares[0]))]
    else:
        found = _in_processes(argv, shares)
    result = joined(found)
    parallel = job.config.parallel
    num_engines = arguments.num_servers * parallel.data_parallel_size
    result |= {
        "num_engines": num_engines, "num_devices": num_engines * job.facts["num_ranks"], "model": job.facts["model"],
        "took_s": time.perf_counter() - began, "measured_on": job.device, "date": today(), "versions": versions(),
        "settings": flat_settings(parsed), "arguments": msgspec.to_builtins(arguments),
    }  # fmt: skip
    measured = read_record(arguments.compare, "compare") if arguments.compare else None
    if measured is not None:
        result["compared"] = compared(result, measured)
    print(render(result, measured))
    write_json(arguments.output_json, result)
    if arguments.plot and measured is not None:
        from pelton_plugins.bench.simulator.plot import plot

        label = f"{number(measured['request_throughput'])} requests/s"
        plot(arguments.plot, f"{result['model']} on {result['measured_on']}", [(label, result["compared"])])
    return 0


class Job:
    """A command line as each process of a simulation reads it."""

    def __init__(self, argv: list[str]) -> None:
        parsed = parse_flags(argv, [SimulateArguments], positional=None, program="pelton simulate", doc=DOC)
        self.arguments: SimulateArguments = parsed.structs["SimulateArguments"]
        if not self.arguments.step_times:
            raise ConfigError("step_times is not given; use a file that `pelton bench steps --output-json` wrote.")
        recorded = [read_steps(path) for path in self.arguments.step_times]
        self.facts, self.device = recorded[0]["engine"], recorded[0]["device"]
        self.config = _resolved(parsed.config, self.facts)
        self.max_model_len = parsed.config.model.max_model_len or self.facts["max_model_len"]
        self._plugins = load_plugins()
        most = self.config.scheduler.max_num_batched_tokens or 1
        self._seed = parsed.config.model.seed  # of arrivals, lengths and the scatter of step times
        self._rng = random.Random(self._seed)
        calibration = None
        if self.arguments.calibrate:
            calibration = calibrate(
                recorded, self.arguments.calibrate, self._rng, self.config.parallel.data_parallel_size
            )
        self._paths = calibration.paths if calibration is not None else Paths(rng=self._rng)
        steps = [step for one in recorded for step in one["steps"]]
        self._times = fit(steps, most + (self.config.scheduler.max_num_seqs or 1), self._rng, calibration)

    def simulate(self, servers: range) -> Figures:
        clock, figures = Clock(), Figures()
        make_engine = engine_maker(self.config, self.facts, self._plugins, self._times, clock, self._paths)
        overhead_s = self.arguments.overhead_ms / 1e3
        num_fronts = self.arguments.api_server_count or self.config.parallel.data_parallel_size
        gc.disable()  # it would look through all requests again and again, and free none
        try:
            for place in servers:
                self._rng.seed(f"{self._seed} {place}")
                self._times.restart()
                server = SimulatedServer(
                    self.config, self._plugins, make_engine, figures, clock, self._paths, num_fronts
                )
                server.run(self._requests(place), self.facts["vocab_size"], overhead_s)
                del server
                gc.collect()  # its engines, whose parts know each other
        finally:
            gc.enable()
        return figures

    def _requests(self, place: int) -> Iterator[TraceRequest]:
        arguments, count = self.arguments, self.arguments.num_servers
        found: Iterator[TraceRequest]
        most = arguments.num_prompts
        if arguments.trace is not None:
            trace = read_trace(arguments.trace, rate_scale=arguments.rate_scale, most=most)
            found = itertools.islice(trace, place, None, count)
        else:
            found = chat_requests(
                arguments.request_rate / count, arguments.burstiness, f"{self._seed} requests {place}",
                max_tokens=self.max_model_len, input_len=arguments.input_len, output_len=arguments.output_len,
            )  # fmt: skip
            if arguments.duration_s is None or most is not None:
                total = most or 1000
                found = itertools.islice(found, total // count + (place < total % count))
        if arguments.duration_s is not None:
            ends = arguments.duration_s
            found = itertools.takewhile(lambda request: request.arrival_s < ends, found)
        return filter(takes(self.max_model_len), found)


def _resolved(config: EngineConfig, facts: dict[str, Any]) -> EngineConfig:
    """Fill in what the engine found out of itself where the step times were measured."""
    scheduler = config.scheduler
    names = ("max_num_seqs", "max_num_batched_tokens", "max_mixed_prefill_tokens")
    found = {name: facts[name] for name in names if getattr(scheduler, name) is None}
    return msgspec.structs.replace(config, scheduler=msgspec.structs.replace(scheduler, **found))


def _in_processes(argv: list[str], shares: list[range]) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "pelton_plugins.bench.simulator.part"]
    parts = []
    try:
        for share in shares:
            part = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            parts.append(part)
            assert part.stdin is not None
            part.stdin.write(json.dumps({"argv": argv, "servers": [share.start, share.stop, share.step]}))
            part.stdin.close()
        found = []
        for part in parts:
            assert part.stdout is not None
            told = part.stdout.read()
            if part.wait():
                raise EngineError(f"A process of the simulation ended with status {part.returncode}.")
            found.append(json.loads(told))
    finally:
        for part in parts:
            if part.poll() is None:
                part.kill()
                part.wait()
    return found


def to_plain(figures: Figures) -> dict[str, Any]:
    times = {name: getattr(figures, name).histogram().to_dict() for name in TIMES.values()}
    return {"times": times, "counts": figures.counts, "busy_s": figures.busy_s, "last_s": figures.last_s}


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of all servers, by the names that `bench serve` gives them. parts: of `to_plain`."""
    counts = {name: sum(part["counts"][name] for part in parts) for name in parts[0]["counts"]}
    seconds = max(1e-9, *(part["last_s"] for part in parts))
    result: dict[str, Any] = {
        "duration_s": seconds, "completed": counts["completed"], "failed": counts["refused"],
        "total_input_tokens": counts["input_tokens"], "total_output_tokens": counts["output_tokens"],
        "request_throughput": counts["completed"] / seconds, "output_throughput": counts["output_tokens"] / seconds,
        "num_preemptions": counts["preemptions"], "num_steps": counts["steps"], "num_scheduled": counts["events"],
        "prefix_hit_rate": counts["prefix_hits"] / max(counts["prefix_queries"], 1), "busy_s": sum(part["busy_s"] for part in parts),
    }  # fmt: skip
    for label, name in TIMES.items():
        histogram = LogHistogram()
        for part in parts:
            histogram.merge(LogHistogram.from_dict(part["times"][name]))
        result[label] = {f"p{percent}": histogram.percentile(percent) * 1e3 for percent in PERCENTS}
    return result


def compared(result: dict[str, Any], measured: dict[str, Any]) -> list[tuple[str, float, float]]:
    """(what, simulated, measured) of all that both have."""
    found = [
        (name.replace("_", " "), result[name], measured[name]) for name in ("request_throughput", "output_throughput")
    ]
    for label in TIMES:
        both = [
            name for name in result[label] if measured.get(label, {}).get(name)
        ]  # null where requests had one token
        found += [(f"{LABELS[label]} {name}", result[label][name], measured[label][name]) for name in both]
    return found


def render(result: dict[str, Any], measured: dict[str, Any] | None) -> str:
    device_s = result["num_devices"] * result["duration_s"]
    busy = 100 * result["busy_s"] / (result["num_engines"] * result["duration_s"])
    lines = [
        f"{result['num_engines']} engines, {result['num_devices']} devices as {result['measured_on']}, {result['model']}: "
        f"{result['completed']:,} requests in {number(result['duration_s'])} s, {result['failed']} refused; "
        f"{result['total_input_tokens']:,} tokens in, {result['total_output_tokens']:,} out",
        f"  {number(result['request_throughput'])} requests/s, {number(result['output_throughput'])} output tokens/s; busy "
        f"{busy:.0f} %, prefix hits {100 * result['prefix_hit_rate']:.0f} %, "
        f"{result['num_preemptions']} preemptions",
        f"  {result['num_steps']:,} steps, {result['num_scheduled']:,} one by one; simulated in {number(result['took_s'])} s: "
        f"{number(device_s / 3600 / result['took_s'] * 60)} device hours a minute",
    ]
    if measured is None:
        columns = [f"p{percent}" for percent in PERCENTS]
        rows = [(LABELS[label], *(number(result[label][name]) for name in columns)) for label in TIMES]
        return "\n".join([*lines, format_table(("ms", *columns), rows, indent="  ")])
    found = [
        (what, number(ours), number(theirs), f"{ours / theirs:.2f}")
        for what, ours, theirs in compared(result, measured)
    ]
    return "\n".join([*lines, format_table(("ms", "simulated", "measured", "ratio"), found, indent="  ")])
