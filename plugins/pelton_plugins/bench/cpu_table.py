"""`pelton bench cpu-table`: the demo model on CPU cores, row by row beside other engines, which may run in the same run.

Each engine has a process of its own and gets the same requests; repeats alternate between the engines, so that all see
the same machine. Servers are started in turn, one at a time.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from pelton.cli.table import format_table
from pelton.config import EngineConfig
from pelton.config.flags import parse_flags
from pelton.errors import ConfigError, EngineError
from pelton.model.resolve import DUMMY_FORMAT, locate
from pelton.plugins import load_plugins
from pelton_plugins.bench import cpu_driver
from pelton_plugins.bench.bounds import check_at_least
from pelton_plugins.bench.cpu_engines import (
    PELTON,
    Driver,
    Engine,
    Server,
    bound_to,
    find_peer,
    serving,
    usable_cores,
)
from pelton_plugins.bench.cpu_peers import DATE, DEVICE, RECORDED, ROWS, TARGETS, VERSIONS
from pelton_plugins.bench.http_target import HttpTarget
from pelton_plugins.bench.peers import Row, times_better
from pelton_plugins.bench.record import flat_settings, number, today, versions, write_json
from pelton_plugins.bench.serve import send
from pelton_plugins.bench.table import merge, read_results

DEMO = "smollm2"
NAMES = tuple(row.name for row in ROWS)
OFFLINE = ("latency", "ttft", "throughput", "prefix")
CLIENTS = 16
WARM_UP_OUTPUT = 8
CANNOT_LOAD = "cannot load the model"
DOC = f"""Measure the rows that Pelton is compared by on CPU cores, and print them beside other engines' recorded figures.
Rows: {", ".join(NAMES)}. The model is the demo model unless --model says otherwise.

  pelton bench cpu-table --results cpu.json
  pelton bench cpu-table --rows latency,ttft --peer vllm=ENV/bin/python --peer-model vllm=FOLDER
  pelton bench cpu-table --show --results cpu.json               print what was gathered

--peer and --peer-model may be given several times. Peers: {", ".join(RECORDED)}."""


class CpuTableArguments(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure, which engines beside Pelton, and where results gather."""

    rows: list[str] = msgspec.field(default_factory=lambda: list(NAMES))
    """Rows to measure, also as one comma list."""
    peer: list[str] = msgspec.field(default_factory=list)
    """NAME=PYTHON: an engine to run as well, with the interpreter of the environment that has it."""
    peer_model: list[str] = msgspec.field(default_factory=list)
    """NAME=PATH: the model in a format that this peer reads; Pelton's when unset."""
    num_cores: int | None = None
    """Cores that all processes are bound to, the load's too; those usable when unset."""
    repeats: int = 3
    """Runs of a row, of which the median counts."""
    results: str | None = None
    """A JSON file: what is in it stays, and new rows are put over old ones."""
    show: bool = False
    """Measure nothing: print what --results holds."""
    json: bool = False
    """Print JSON."""
    markdown: bool = False
    """Print the table for a page in Markdown."""

    def __post_init__(self) -> None:
        check_at_least(self, repeats=1)


def run(argv: list[str]) -> int:
    argv = join_repeated(argv, ("--peer", "--peer-model"))
    parsed = parse_flags(argv, [CpuTableArguments], positional=None, program="pelton bench cpu-table", doc=DOC)
    arguments: CpuTableArguments = parsed.structs["CpuTableArguments"]
    results = read_results(arguments.results)
    failed = False
    if not arguments.show:
        rows = check_rows(arguments.rows)
        cores = pick_cores(arguments.num_cores)
        settings = {"model": DEMO, "dtype": "bfloat16", **flat_settings(parsed)}
        check_model(results, settings["model"], arguments.results)
        with ending_on_sigterm(), bound_to(cores), tempfile.TemporaryDirectory(prefix="pelton-bench-") as folder:
            model = locate(settings["model"], parsed.config, load_plugins(), needs_weights=not is_dummy(parsed.config))
            engines = find_engines(arguments, settings, str(model), cores, Path(folder))
            table = Run(engines, rows, arguments.repeats, cores, Path(folder))
            for name, found in table.measure():
                failed |= "error" in found
                merge(results, name, {"model": settings["model"], **found})
                write_json(arguments.results, results)
    print(json.dumps(results, indent=1) if arguments.json else render(results, as_markdown=arguments.markdown))
    return 1 if failed else 0


@contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """A command that is told to end takes its engines along: they lead sessions of their own."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def join_repeated(argv: list[str], names: tuple[str, ...]) -> list[str]:
    """Flags that are given several times as one flag with several values."""
    rest: list[str] = []
    found: dict[str, list[str]] = {}
    tokens = list(argv)
    while tokens:
        name, equals, value = tokens.pop(0).partition("=")
        if name.replace("_", "-") not in names:
            rest.append(name + equals + value)
            continue
        values = found.setdefault(name.replace("_", "-"), [])
        values += [value] if equals else []
        while not equals and tokens and not tokens[0].startswith("-"):
            values.append(tokens.pop(0))
    return [*rest, *(token for name, values in found.items() for token in (name, *values))]


def check_rows(texts: list[str]) -> list[str]:
    """Names in the table's order."""
    names = [part for text in texts for part in text.split(",") if part]
    for name in names:
        if name not in NAMES:
            raise ConfigError(f"--rows has {name!r}; the rows are {', '.join(NAMES)}.")
    return [name for name in NAMES if name in names]


def pick_cores(num_cores: int | None) -> list[int]:
    usable = usable_cores()
    if num_cores is not None and not 1 <= num_cores <= len(usable):
        raise ConfigError(
            f"--num-cores is {num_cores}; this process may use {len(usable)}, so take 1 to {len(usable)}."
        )
    return usable[:num_cores]


def check_model(results: dict[str, dict[str, Any]], model: str, path: str | None) -> None:
    others = {row.get("model") for rows in results.values() for row in rows.values()} - {model}
    if others:
        raise ConfigError(f"--results {path} holds rows of {others.pop()}, not of {model}; name another file.")


def find_engines(
    arguments: CpuTableArguments, settings: dict[str, Any], model: str, cores: list[int], folder: Path
) -> list[Engine]:
    """Pelton, then the peers in their order. Raises `ConfigError` for one that is not there, before anything runs."""
    peers, models = (
        read_pairs("--peer", arguments.peer, "PYTHON"),
        read_pairs("--peer-model", arguments.peer_model, "PATH"),
    )
    for name in models:
        if name not in peers:
            raise ConfigError(f"--peer-model names {name}, which no --peer does; add --peer {name}=PYTHON.")
    engines = [Engine(PELTON, sys.executable, settings, versions=versions())]
    for name, python in peers.items():
        if shutil.which(python) is None:
            raise ConfigError(
                f"--peer {name}={python}: there is no such program. Give the path of a Python interpreter."
            )
        engines.append(find_peer(name, python, models.get(name, model), cores, folder))
    return engines


def read_pairs(flag: str, texts: list[str], what: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if name not in RECORDED or not value:
            raise ConfigError(f"{flag} is {text!r}; use NAME={what} with a NAME of {', '.join(RECORDED)}.")
        if name in found:
            raise ConfigError(f"{flag} names {name} twice; give it once.")
        found[name] = value
    return found


class Run:
    """Engines, rows, repeats: one run of the table."""

    def __init__(self, engines: list[Engine], rows: list[str], repeats: int, cores: list[int], folder: Path) -> None:
        self.engines, self.rows, self.repeats, self.folder = engines, rows, repeats, folder
        self.about: dict[str, Any] = {"run": today(), "date": today(), "num_cores": len(cores), "repeats": repeats}
        # What else ran on the machine before: a run beside others is no measurement of the engine.
        self.about["load_average"] = round(os.getloadavg()[0], 2)
        self.broken: dict[str, str] = {}
        """Engines that ended or did not start, and why."""
        self.timed: dict[str, tuple[dict[str, list[float]], dict[str, str]]] = {}
        """By workload, for two rows may need the same: once more, and its prompts would be in the prefix caches."""

    def measure(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """(engine, row) as they are measured; one that failed has the reason."""
        offline = [name for name in self.rows if name in OFFLINE]
        if offline:
            yield from self._offline(offline)
        if len(offline) < len(self.rows):
            yield from self._servers([name for name in self.rows if name not in OFFLINE])

    def _having(self, names: list[str]) -> list[Engine]:
        return [one for one in self.engines if one.name == PELTON or set(names) & RECORDED[one.name].keys()]

    def _row(self, engine: Engine, name: str, **found: Any) -> tuple[str, dict[str, Any]]:
        print(f"{engine.name}: {name} {found.get('error', 'done')}", file=sys.stderr)
        about = {"versions": engine.versions, "settings": engine.settings, "environment": engine.environ}
        return engine.name, {"row": name, **found, **self.about, **about}

    # One process an engine: its `LLM`, or what it has in place of one.

    def _offline(self, names: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        with ExitStack() as stack:
            drivers: dict[str, Driver] = {}
            loaded: dict[str, dict[str, Any]] = {}
            for engine in self._having(names):
                print(f"{engine.name}: load", file=sys.stderr)
                driver = stack.enter_context(Driver(engine, self.folder))
                try:
                    loaded[engine.name] = driver.ask(
                        do="load", name=engine.name, settings=engine.settings, num_threads=self.about["num_cores"]
                    )
                    drivers[engine.name] = driver
                except EngineError as error:
                    self.broken[engine.name] = f"{CANNOT_LOAD}: {error}"
            for name in names:
                times, errors = self._repeats(drivers, name)
                for engine in self._having([name]):
                    if engine.name in self.broken:
                        yield self._row(engine, name, error=self.broken[engine.name])
                    elif engine.name in errors:
                        yield self._row(engine, name, error=errors[engine.name])
                    else:
                        yield self._row(engine, name, **figures(name, times[engine.name]), **loaded[engine.name])

    def _repeats(
        self, drivers: dict[str, Driver], name: str
    ) -> tuple[dict[str, dict[str, list[float]]], dict[str, str]]:
        """Engine to workload to the seconds of each repeat, and engine to error."""
        workloads = ("ttft", "latency") if name == "latency" else (name,)
        errors: dict[str, str] = {}
        for workload in workloads:
            if workload not in self.timed:
                self.timed[workload] = self._time(drivers, name, workload)
            errors = self.timed[workload][1] | errors
        return {one: {workload: self.timed[workload][0][one] for workload in workloads} for one in drivers}, errors

    def _time(
        self, drivers: dict[str, Driver], name: str, workload: str
    ) -> tuple[dict[str, list[float]], dict[str, str]]:
        """Engine to the seconds of each repeat, and engine to error."""
        seconds: dict[str, list[float]] = {one: [] for one in drivers}
        errors: dict[str, str] = {}
        for repeat in range(self.repeats):
            for one, driver in drivers.items():
                if one in errors or (one != PELTON and name not in RECORDED[one]):
                    continue
                try:
                    seconds[one].append(driver.ask(do="time", workload=workload, repeat=repeat)["seconds"])
                except EngineError as error:
                    errors[one] = str(error)
        return seconds, errors

    # One server at a time, a fresh one each repeat.

    def _servers(self, names: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        engines = self._having(names)
        found: dict[str, list[dict[str, float]]] = {one.name: [] for one in engines}
        errors: dict[str, str] = {}
        for repeat in range(self.repeats):
            for engine in engines:
                if engine.name not in errors:
                    try:
                        with serving(engine, self.folder) as server:
                            found[engine.name].append(measure_server(server, repeat, has_load=names != ["start"]))
                    except EngineError as error:
                        errors[engine.name] = str(error)
        for name in names:
            for engine in self._having([name]):
                if engine.name in errors:
                    yield self._row(engine, name, error=errors[engine.name])
                else:
                    yield self._row(engine, name, **server_figures(name, found[engine.name]))


def is_dummy(config: EngineConfig) -> bool:
    return config.load.load_format == DUMMY_FORMAT


def figures(name: str, times: dict[str, list[float]]) -> dict[str, Any]:
    """Of a row: medians over the repeats."""
    seconds = {workload: statistics.median(values) for workload, values in times.items()}
    if name == "ttft":
        return {"ttft_ms": seconds["ttft"] * 1e3, "all_seconds": times["ttft"]}
    if name == "latency":
        rest = seconds["latency"] - seconds["ttft"]
        return {
            "tpot_ms": rest / (cpu_driver.LATENCY_OUTPUT - 1) * 1e3,
            "ttft_ms": seconds["ttft"] * 1e3,
            "all_seconds": times["latency"],
            "all_ttft_seconds": times["ttft"],
        }
    requests = cpu_driver.batch_of(name, 0)
    num_out = sum(count for _, count in requests)
    num_in = sum(len(prompt) for prompt, _ in requests)
    return {
        "seconds": seconds[name],
        "all_seconds": times[name],
        "out_tok_s": num_out / seconds[name],
        "total_tok_s": (num_in + num_out) / seconds[name],
    }


def measure_server(server: Server, repeat: int, *, has_load: bool) -> dict[str, float]:
    """What one server does: memory when it is up, the load's figures, memory after it."""
    found = {"start_s": server.start_s, "idle_rss_mib": server.rss_mib()}
    if has_load:
        asyncio.run(send_load(server.url, cpu_driver.serve("warm", CLIENTS, WARM_UP_OUTPUT)))
        found |= asyncio.run(send_load(server.url, cpu_driver.serve(repeat)))
        found["rss_mib"] = server.rss_mib()
    return found


async def send_load(url: str, requests: cpu_driver.Requests) -> dict[str, float]:
    """All requests, `CLIENTS` in flight. Raises `EngineError` when one failed or has another number of tokens."""
    target = HttpTarget(url)
    await target.start()
    began = time.perf_counter()
    done = await send(target, requests, itertools.repeat(0.0), CLIENTS)
    took = time.perf_counter() - began
    for times, (_, count) in zip(done, requests, strict=True):
        if times.error is not None or len(times.tokens) != count:
            raise EngineError(times.error or f"A request got {len(times.tokens)} tokens; {count} were asked for.")
    itls = [itl for times in done for itl in times.itls_s]
    return {
        "out_tok_s": sum(count for _, count in requests) / took,
        "ttft_ms": statistics.median(times.ttft_s for times in done) * 1e3,
        "itl_ms": statistics.median(itls) * 1e3,
    }


def server_figures(name: str, found: list[dict[str, float]]) -> dict[str, Any]:
    fields = {
        "serve": ("out_tok_s", "ttft_ms", "itl_ms"), "start": ("start_s",), "memory": ("rss_mib", "idle_rss_mib"),
    }[name]  # fmt: skip
    figure = fields[0]
    medians = {field: statistics.median(one[field] for one in found) for field in fields}
    return {**medians, f"all_{figure}": [one[figure] for one in found]}


# The table.


def render(results: dict[str, dict[str, Any]], *, as_markdown: bool = False) -> str:
    """Pelton's figures, those of peers that ran, and the recorded ones."""
    ran = [name for name in RECORDED if name in results]
    header = ["row", "pelton", "unit", "target", "reached"]
    for name in ran:
        header += [name, f"x {name}"]
    header += [f"{VERSIONS[name]}, recorded" for name in RECORDED]
    measured = results.get(PELTON, {})
    lines = [_line(row, measured.get(row.name, {}), results, ran) for row in ROWS]
    if as_markdown:
        table = "\n".join(f"| {' | '.join(cells)} |" for cells in [header, ["---"] * len(header), *lines])
    else:
        table = format_table(header, lines, indent="  ")
    errors = [
        f"  {name}, {row}: {why}"
        for name, rows in results.items()
        for row, one in rows.items()
        if (why := one.get("error") or one.get("last_error"))
    ]
    gap = [""] if as_markdown else []
    return "\n".join([_head(results), *gap, table, *errors, "", FOOT])


FOOT = (
    f"Recorded: {DEVICE}, {DATE}; the better of several runs. x NAME: how many times as good as that engine in the same "
    "run, above 1 is better in time and memory as in rate; a dash where they did not run together."
)


def _head(results: dict[str, dict[str, Any]]) -> str:
    """Model, device, cores and dates of what was measured."""
    rows = [row for found in results.values() for row in found.values()]
    if not rows:
        return "not measured yet"
    told = {name: next((row[name] for row in rows if name in row), None) for name in ("model", "device", "num_cores")}
    dates = sorted({str(row["date"])[:10] for row in rows if "date" in row})
    parts = [str(told["model"]), str(told["device"] or "unknown device"), f"{told['num_cores']} cores"]
    backend = next((row["attention_backend"] for row in rows if "attention_backend" in row), None)
    parts += [f"attention {backend}"] if backend else []
    return ", ".join([*parts, " to ".join(dict.fromkeys(dates[:1] + dates[-1:]))])


def _line(row: Row, found: dict[str, Any], results: dict[str, dict[str, Any]], ran: list[str]) -> list[str]:
    ours, target = found.get(row.figure), TARGETS[row.name]
    reached = "-" if not ours else "yes" if (times_better(row, ours, target) or 0) >= 1 else "no"
    cells = [row.label, _cell(row, found), row.unit, number(target, _digits(row)), reached]
    for name in ran:
        other = results[name].get(row.name, {})
        is_same_run = ours is not None and found.get("run") == other.get("run")
        ratio = times_better(row, ours, other.get(row.figure)) if ours is not None and is_same_run else None
        cells += [_cell(row, other), number(ratio)]
    return [*cells, *(number(RECORDED[name].get(row.name), _digits(row)) for name in RECORDED)]


def _digits(row: Row) -> int:
    return 3 if row.is_time else 5


def _cell(row: Row, found: dict[str, Any]) -> str:
    if row.figure in found:
        return number(found[row.figure], _digits(row))
    error = str(found.get("error", ""))
    return "cannot load" if error.startswith(CANNOT_LOAD) else "failed" if error else "-"
