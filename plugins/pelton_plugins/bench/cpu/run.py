"""One run of `pelton bench cpu-table` with one instruction set: engines, rows, repeats.

Each engine has a process of its own and gets the same requests; repeats alternate between the engines, so that all see
the same machine. Servers are started in turn, one at a time.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from pelton.errors import EngineError
from pelton_plugins.bench.cpu import driver as cpu_driver
from pelton_plugins.bench.cpu import sets as cpu_sets
from pelton_plugins.bench.cpu.engines import PELTON, Driver, Engine, Server, serving
from pelton_plugins.bench.cpu.peers import PEER_ROWS
from pelton_plugins.bench.http_target import HttpTarget
from pelton_plugins.bench.record import today
from pelton_plugins.bench.serve import send
from pelton_plugins.bench.table.command import lines_of

OFFLINE = ("latency", "ttft", "batch16", "throughput", "prefix")
FIRST_START = "first-start"
SAMPLING = "sampling16"
SHARED = ("latency", "ttft", "batch16", "throughput")
"""Rows whose share of the measured ceiling is told."""
CLIENTS = 16
WARM_UP_OUTPUT = 8
CANNOT_LOAD = "cannot load the model"
CANNOT_RUN = "not run"


class Run:
    """Engines, rows, repeats: one run of the table with one instruction set."""

    def __init__(
        self,
        engines: list[Engine],
        rows: list[str],
        repeats: int,
        cores: list[int],
        folder: Path,
        *,
        work: cpu_sets.ModelWork | None = None,
    ) -> None:
        self.engines, self.rows, self.repeats, self.folder, self.work = engines, rows, repeats, folder, work
        self.isa = engines[0].isa
        self.about: dict[str, Any] = {"run": today(), "date": today(), "num_cores": len(cores), "repeats": repeats}
        # What else ran on the machine before: a run beside others is not a measurement of the engine.
        self.about["load_average"] = round(os.getloadavg()[0], 2)
        self.about["features"] = cpu_sets.features()
        self.broken = {one.name: f"{CANNOT_RUN}: {one.cannot_run}" for one in engines if one.cannot_run}
        """Engines that ended, did not start or cannot run, and why."""
        self.timed: dict[str, tuple[dict[str, list[float]], dict[str, str]]] = {}
        """By workload, for two rows may need the same: once more, and its prompts would be in the prefix caches."""
        self.ceilings = cpu_sets.Ceilings(self.isa)
        self.near: dict[tuple[str, str], list[dict[str, Any]]] = {}
        """By workload and engine: what the machine could do at most around each repeat. It changes within minutes."""

    def measure(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """(engine, row) as they are measured; one that failed has the reason."""
        offline = [name for name in self.rows if name in OFFLINE]
        if offline:
            yield from self._offline(offline)
        served = [name for name in self.rows if name not in (*OFFLINE, SAMPLING)]
        if served:
            yield from self._servers(served)
        if SAMPLING in self.rows:
            yield self._sampling()

    def _having(self, names: list[str]) -> list[Engine]:
        return [one for one in self.engines if one.kind == PELTON or set(names) & set(PEER_ROWS[one.kind])]

    def _row(self, engine: Engine, name: str, **found: Any) -> tuple[str, dict[str, Any]]:
        print(f"{engine.key}: {name} {found.get('error', 'done')}", file=sys.stderr)
        about = {"versions": engine.versions, "settings": engine.settings, "environment": engine.environ}
        return engine.key, {"row": name, **found, **self.about, **about}

    # One process an engine: its `LLM`, or what it has in place of one.

    def _offline(self, names: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        with ExitStack() as stack:
            drivers: dict[str, Driver] = {}
            loaded: dict[str, dict[str, Any]] = {}
            for engine in self._having(names):
                if engine.name in self.broken:
                    continue
                print(f"{engine.key}: load", file=sys.stderr)
                driver = stack.enter_context(Driver(engine, self.folder))
                try:
                    loaded[engine.name] = driver.ask(
                        do="load", name=engine.kind, settings=engine.settings, num_threads=self.about["num_cores"],
                        isa=self.isa,
                    )  # fmt: skip
                    drivers[engine.name] = driver
                except EngineError as error:
                    self.broken[engine.name] = f"{CANNOT_LOAD}: {error}"
            stack.enter_context(self.ceilings)
            for name in names:
                times, errors = self._repeats(drivers, name)
                for engine in self._having([name]):
                    if engine.name in self.broken:
                        yield self._row(engine, name, error=self.broken[engine.name])
                    elif engine.name in errors:
                        yield self._row(engine, name, error=errors[engine.name])
                    else:
                        found = figures(name, times[engine.name]) | loaded[engine.name]
                        yield self._row(engine, name, **found, **self._shares(engine, name, times[engine.name], found))

    def _shares(
        self, engine: Engine, name: str, times: dict[str, list[float]], loaded: dict[str, Any]
    ) -> dict[str, Any]:
        """The best ceiling, and the median of each repeat's share of what the machine could do around it."""
        near = [one for one in self.near.get((name, engine.name), []) if one]
        if not near:
            return {}
        about: dict[str, Any] = {"ceiling": cpu_sets.better_ceiling(*near)}
        if self.work is None:
            return about
        weight_bytes, shares = weight_bytes_of(engine, loaded, self.work), []
        for repeat, ceiling in enumerate(near):
            found = figures(name, {workload: [seconds[repeat]] for workload, seconds in times.items()})
            found["ceiling"] = ceiling
            share = cpu_sets.share_of_ceiling(name, found, self.work, weight_bytes, cpu_driver.batch_of(name, 0))
            shares += [share] if share is not None and math.isfinite(share) else []
        return {**about, "share": statistics.median(shares), "all_shares": shares} if shares else about

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
        before = self._ceiling(workload)
        for repeat in range(self.repeats):
            for engine in self._having([name]):
                one, driver = engine.name, drivers.get(engine.name)
                if one in errors or driver is None:
                    continue
                try:
                    seconds[one].append(driver.ask(do="time", workload=workload, repeat=repeat)["seconds"])
                except EngineError as error:
                    errors[one] = str(error)
                    continue
                after = self._ceiling(workload)
                self.near.setdefault((workload, one), []).append(cpu_sets.ceiling_between(before, after))
                before = after
        return seconds, errors

    def _ceiling(self, workload: str) -> dict[str, Any]:
        return self.ceilings.measure() if workload in SHARED else {}

    def _sampling(self) -> tuple[str, dict[str, Any]]:
        """Requests that ask for more than greedy tokens, of Pelton alone."""
        engine = self.engines[0]
        job = {
            "settings": {"skip_tokenizer_init": True, **engine.settings},
            "rows": [SAMPLING],
            "repeats": self.repeats,
        }
        found: dict[str, Any] = {}
        try:
            for told in lines_of(job, {**os.environ, **engine.environ}):
                found |= {key: value for key, value in told.items() if key in ("device", "kinds", "error")}
        except EngineError as error:
            found = {"error": str(error)}
        return self._row(engine, SAMPLING, **found)

    # One server at a time, a fresh one each repeat.

    def _servers(self, names: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        engines = self._having(names)
        found: dict[str, list[dict[str, float]]] = {one.name: [] for one in engines}
        errors: dict[str, str] = {}
        for engine in engines:
            if engine.name in self.broken:
                errors[engine.name] = self.broken[engine.name]
            elif engine.kind == "vllm" and engine.isa != cpu_sets.AUTO:
                errors[engine.name] = f"{CANNOT_RUN}: its server takes the best of its builds for this CPU"
        for repeat in range(self.repeats):
            for engine in engines:
                if engine.name not in errors:
                    try:
                        found[engine.name].append(self._serve(engine, repeat, names))
                    except EngineError as error:
                        errors[engine.name] = str(error)
        for name in names:
            for engine in self._having([name]):
                if engine.name in errors:
                    yield self._row(engine, name, error=errors[engine.name])
                else:
                    yield self._row(engine, name, **server_figures(name, found[engine.name]))

    def _serve(self, engine: Engine, repeat: int, names: list[str]) -> dict[str, float]:
        has_load = bool({"serve", "memory"} & set(names))
        if FIRST_START not in names or engine.kind != PELTON:
            with serving(engine, self.folder) as server:
                return measure_server(server, repeat, has_load=has_load)
        with tempfile.TemporaryDirectory(dir=self.folder, prefix="cache-") as cache:
            engine = replace(engine, environ={**engine.environ, "XDG_CACHE_HOME": cache})
            with serving(engine, self.folder) as server:
                first_start_s = server.start_s
            with serving(engine, self.folder) as server:
                found = measure_server(server, repeat, has_load=has_load)
        return {**found, "first_start_s": first_start_s, "compile_s": first_start_s - found["start_s"]}


def weight_bytes_of(engine: Engine, found: dict[str, Any], work: cpu_sets.ModelWork) -> float:
    """Bytes of the weights that a token reads: packed ones as the engine or its file says."""
    if engine.kind == PELTON and engine.settings.get("quantization"):
        return float(found.get("weights_bytes") or math.nan)
    path = Path(engine.settings["model"])
    if engine.kind == "llama.cpp" and path.is_file():
        return float(path.stat().st_size)
    return work.weight_bytes(str(engine.settings["dtype"]))


def figures(name: str, times: dict[str, list[float]]) -> dict[str, Any]:
    """Return the figures of a row: medians over the repeats."""
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
    """Measure one server: memory when it is up, the load's figures, memory after it."""
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
        FIRST_START: ("compile_s", "first_start_s", "start_s"),
    }[name]  # fmt: skip
    figure = fields[0]
    medians = {field: statistics.median(one[field] for one in found) for field in fields}
    return {**medians, f"all_{figure}": [one[figure] for one in found]}
