"""`pelton bench soak`: minutes of random valid requests from many clients, and what must be true of a server after them.

Each client sends one request after the other: completions and chats, streamed and whole, with all sorts of sampling, of
any length. Some leave in the middle. No answer may be wrong, no stream may stand still for long, the server's processes
may not grow once they are warm, and at the end nothing may be held.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from pelton.cli.table import format_table
from pelton.errors import ConfigError, EngineError
from pelton_plugins.bench.bounds import check_at_least
from pelton_plugins.bench.cpu.engines import PELTON, Engine, serving
from pelton_plugins.bench.load import MIB, check, milliseconds, settle
from pelton_plugins.bench.memory import ProcessState, family_states
from pelton_plugins.bench.metrics import LogHistogram
from pelton_plugins.bench.record import circumstances, flat_settings, number, write_json
from pelton_plugins.bench.soak.client import SoakClient
from pelton_plugins.bench.soak.requests import LEAST_TOKEN_ID, Source
from pelton_plugins.flags import parse_flags

SETTLE_S = 30.0
SEND_AGAIN_S = 0.5  # after a failure: a server that is gone is not asked thousands of times
LEAST_PROCESS_MIB = 20  # smaller ones are helpers of Python's
DOC = """Send random valid requests from many clients for a long time, then check that nothing broke, leaked or stood still.
A server with the engine's flags is started, whose processes are watched; with --url one that runs already is taken, whose
processes are watched when --server-pid names the first of them. Exit status 1 when a check fails.

  pelton bench soak smollm2 --duration-s 1800 --clients 48 --output-json soak.json
  pelton bench soak --url http://127.0.0.1:8000 --server-pid 4711 --duration-s 600"""


class SoakArguments(msgspec.Struct, frozen=True, kw_only=True):
    """The clients, their requests, and what is allowed."""

    url: str | None = None
    """Load this server instead of one of our own."""
    server_pid: int | None = None
    """The process of that server, on this machine: it and what it started are watched."""
    duration_s: float = 1800.0
    """Seconds of load; requests that run then are waited for."""
    clients: int = 48
    """Requests in flight, always."""
    leave_fraction: float = 0.25
    """Share of the requests whose client goes away before the end."""
    max_prompt_len: int | None = None
    """Most tokens of a prompt; what the model takes when unset."""
    max_output_len: int = 128
    """Most tokens of an answer."""
    vocab_size: int = 250
    """Prompts and biases are of token ids below this."""
    sample_s: float = 5.0
    """Seconds between looks at the processes."""
    drain_s: float = 300.0
    """What still runs so long after the end never ends."""
    max_itl_ratio: float = 3.0
    """p99 of the time between chunks over its median."""
    max_growth_mib: float = 32.0
    """Of each process's resident memory, after the first third: the fitted line from there to the end."""
    max_more_fds: int = 4
    """File descriptors of each process after the load, over those before it."""
    max_more_threads: int = 8
    """Threads of each, the same."""
    output_json: str | None = None
    """Write the result here."""

    def __post_init__(self) -> None:
        if min(self.duration_s, self.sample_s, self.drain_s) <= 0 or not 0 <= self.leave_fraction < 1:
            raise ConfigError(
                "duration_s, sample_s and drain_s are positive times, leave_fraction is a share below 1; "
                f"they are {self.duration_s}, {self.sample_s}, {self.drain_s} and {self.leave_fraction}."
            )
        check_at_least(
            self, clients=1, max_prompt_len=1, max_output_len=1, vocab_size=LEAST_TOKEN_ID + 21, server_pid=1
        )
        if self.server_pid is not None and self.url is None:
            raise ConfigError("server_pid names the process of a server at --url; without --url one is started.")


@dataclass
class Seen:
    """The whole load."""

    thirds: list[Third] = field(default_factory=lambda: [Third() for _ in range(3)])
    num_sent: int = 0
    num_left: int = 0
    num_tokens: int = 0
    num_stuck: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    samples: list[tuple[float, list[ProcessState]]] = field(default_factory=list)
    """(seconds from the beginning, the processes)"""
    loads: list[float] = field(default_factory=list)
    """Load average of the machine, over a minute."""


@dataclass
class Third:
    """Figures that clients saw in one third of the load."""

    gaps: LogHistogram = field(default_factory=LogHistogram)
    ttfts: LogHistogram = field(default_factory=LogHistogram)
    num_answers: int = 0
    num_tokens: int = 0


def run(argv: list[str]) -> int:
    parsed = parse_flags(argv, [SoakArguments], program="pelton bench soak", doc=DOC)
    arguments: SoakArguments = parsed.structs["SoakArguments"]
    settings, seed = flat_settings(parsed), parsed.config.model.seed
    if arguments.url is not None:
        result = asyncio.run(measure(arguments.url, arguments.server_pid, arguments, seed=seed))
    else:
        with tempfile.TemporaryDirectory(prefix="pelton-bench-") as folder:
            engine = Engine(PELTON, sys.executable, {"model": parsed.config.model.model, **settings})
            with serving(engine, Path(folder)) as server:
                result = asyncio.run(measure(server.url, server.pid, arguments, seed=seed))
    result |= circumstances(arguments.url or "a server of our own", settings) | {
        "arguments": msgspec.to_builtins(arguments)
    }
    print(render(result))
    write_json(arguments.output_json, result)
    return 0 if all(one["ok"] for one in result["checks"]) else 1


async def measure(url: str, pid: int | None, arguments: SoakArguments, *, seed: int = 0) -> dict[str, Any]:
    client = SoakClient(url)
    try:
        await client.start()
    except OSError as error:
        raise EngineError(f"{url} cannot be reached: {error}. Is the server running?") from error
    source = Source(
        random.Random(seed), str(client.model), client.max_model_len, max_output_len=arguments.max_output_len,
        vocab_size=arguments.vocab_size, leave_fraction=arguments.leave_fraction,
        max_prompt_len=arguments.max_prompt_len or 0,
    )  # fmt: skip
    for _ in range(2 * arguments.clients):  # what starts with the first requests is there before
        await client.send(source.short())
    before = look(pid)
    seen = Seen()
    await _load(client, source, arguments, pid, seen)
    state = await settle(client, SETTLE_S)
    return _result(arguments, seen, state.kv_cache_usage, state.num_unfinished, before, look(pid))


async def _load(client: SoakClient, source: Source, arguments: SoakArguments, pid: int | None, seen: Seen) -> None:
    began = time.perf_counter()

    def third() -> Third:
        return seen.thirds[min(int(3 * (time.perf_counter() - began) / arguments.duration_s), 2)]

    async def one_client() -> None:
        while time.perf_counter() - began < arguments.duration_s:
            seen.num_sent += 1
            answer = await client.send(source.next())
            now = third()
            now.num_answers += 1
            now.num_tokens += answer.num_tokens
            seen.num_left += answer.has_left
            for gap in answer.gaps_s:
                now.gaps.add(gap)
            if answer.ttft_s is not None:
                now.ttfts.add(answer.ttft_s)
            if answer.error is not None:
                seen.errors[answer.error[:300]] += 1
                await asyncio.sleep(SEND_AGAIN_S)

    _say(f"{arguments.clients} clients for {arguments.duration_s:g} s")
    watcher = asyncio.create_task(_watch(arguments, pid, began, seen))
    tasks = [asyncio.create_task(one_client()) for _ in range(arguments.clients)]
    _, stuck = await asyncio.wait(tasks, timeout=arguments.duration_s + arguments.drain_s)
    seen.num_stuck = len(stuck)
    for task in [*stuck, watcher]:
        task.cancel()
    await asyncio.gather(*stuck, watcher, return_exceptions=True)
    for task in tasks:
        if task not in stuck:
            task.result()  # our own mistakes are raised


async def _watch(arguments: SoakArguments, pid: int | None, began: float, seen: Seen) -> None:
    told = began
    while True:
        now = time.perf_counter()
        if now - began < arguments.duration_s:
            seen.samples.append((now - began, look(pid)))
        with contextlib.suppress(OSError):  # a system that does not say
            seen.loads.append(os.getloadavg()[0])
        if now - told >= 30.0:
            told = now
            memory = ", ".join(f"process {one.pid} {one.resident_bytes / MIB:.0f} MiB" for one in look(pid))
            _say(f"{now - began:.0f} s: {seen.num_sent} sent, {sum(seen.errors.values())} failed; {memory}")
        await asyncio.sleep(arguments.sample_s)


def look(pid: int | None) -> list[ProcessState]:
    """The server's processes but for small helpers; none where they cannot be seen."""
    if pid is None:
        return []
    with contextlib.suppress(OSError):
        return [one for one in family_states(pid) if one.resident_bytes >= LEAST_PROCESS_MIB * MIB]
    return []


def fitted_growth(times: Sequence[float], values: Sequence[float]) -> float:
    """How much the line through the values rises from the first time to the last; NaN of fewer than three."""
    if len(times) < 3:
        return math.nan
    mean_time, mean = sum(times) / len(times), sum(values) / len(values)
    spread = sum((time - mean_time) ** 2 for time in times)
    slope = sum((time - mean_time) * (value - mean) for time, value in zip(times, values, strict=True)) / spread
    return slope * (times[-1] - times[0])


def _result(
    arguments: SoakArguments,
    seen: Seen,
    kv_cache_usage: float,
    num_unfinished: int,
    before: list[ProcessState],
    after: list[ProcessState],
) -> dict[str, Any]:
    gaps = LogHistogram()
    for third in seen.thirds:
        gaps.merge(third.gaps)
    checks = [
        check("requests that failed", sum(seen.errors.values()), 0),
        check("requests that never ended", seen.num_stuck, 0),
        check("requests left in the engine", num_unfinished, 0),
        check("KV blocks held, share", kv_cache_usage, 0),
        check("p99 ITL over its median", gaps.percentile(99) / gaps.percentile(50), arguments.max_itl_ratio),
    ]
    processes = []
    for state in before:
        told = _process(state, seen, after, arguments.duration_s / 3)
        processes.append(told)
        name = f"process {state.pid}"
        checks += [
            check(f"{name}: memory after the first third, MiB", told["growth_mib"], arguments.max_growth_mib),
            check(f"{name}: file descriptors more", told["more_fds"], arguments.max_more_fds),
            check(f"{name}: threads more", told["more_threads"], arguments.max_more_threads),
        ]
    return {
        "num_sent": seen.num_sent,
        "num_left": seen.num_left,
        "errors": dict(seen.errors),
        "duration_s": arguments.duration_s,
        "itl_ms": milliseconds(gaps),
        "thirds": [
            {
                "answers": third.num_answers, "output_tokens": third.num_tokens, "itl_ms": milliseconds(third.gaps),
                "ttft_ms": milliseconds(third.ttfts),
            }
            for third in seen.thirds
        ],
        "processes": processes,
        "load_average": {"mean": sum(seen.loads) / len(seen.loads), "max": max(seen.loads)} if seen.loads else None,
        "checks": checks,
    }  # fmt: skip


def _process(before: ProcessState, seen: Seen, after: list[ProcessState], warm_s: float) -> dict[str, Any]:
    """One process: memory over time, and what it has more than before. One that is gone has NaN, which is not well."""
    samples = [(at, one.resident_bytes / MIB) for at, states in seen.samples for one in states if one.pid == before.pid]
    late = [(at, mib) for at, mib in samples if at >= warm_s]
    last = next((one for one in after if one.pid == before.pid), None)
    return {
        "name": before.name,
        "pid": before.pid,
        "first_mib": before.resident_bytes / MIB,
        "warm_mib": late[0][1] if late else math.nan,
        "last_mib": last.resident_bytes / MIB if last else math.nan,
        "growth_mib": fitted_growth([at for at, _ in late], [mib for _, mib in late]),
        "more_fds": last.num_fds - before.num_fds if last else math.nan,
        "more_threads": last.num_threads - before.num_threads if last else math.nan,
        "samples": samples,
    }


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def render(result: dict[str, Any]) -> str:
    thirds = [
        (
            name,
            third["answers"],
            third["output_tokens"],
            *(number(third[times][which]) for times in ("itl_ms", "ttft_ms") for which in ("p50", "p99", "max")),
        )
        for name, third in zip(("first", "second", "last"), result["thirds"], strict=True)
    ]
    header = ("third", "answers", "tokens", "itl p50 ms", "p99", "max", "ttft p50 ms", "p99", "max")
    processes = [
        (
            f"{one['name']} {one['pid']}",
            *(number(one[key], 4) for key in ("first_mib", "warm_mib", "last_mib", "growth_mib")),
        )
        for one in result["processes"]
    ]
    checks = [
        ("ok" if one["ok"] else "FAILED", one["name"], number(one["value"]), number(one["limit"]))
        for one in result["checks"]
    ]
    load = result["load_average"]
    machine = f"; load average {load['mean']:.1f}, at most {load['max']:.1f}" if load else ""
    parts = [
        f"{result['num_sent']} requests in {number(result['duration_s'])} s, {result['num_left']} clients left, "
        f"{sum(result['errors'].values())} failed, {result['device']}{machine}",
        format_table(header, thirds, indent="  "),
    ]
    if processes:
        columns = ("process", "before, MiB", "after a third", "at the end", "fitted growth since")
        parts.append(format_table(columns, processes, indent="  "))
    parts.append(format_table(("", "check", "value", "at most"), checks, indent="  "))
    errors = [f"  error: {message} ({count} times)" for message, count in list(result["errors"].items())[:5]]
    return "\n\n".join(parts) + "".join(f"\n{line}" for line in errors)
