"""`pelton chaos`: faults at random times while clients ask, and a look at what became of every request.

The server is our own, over an engine without a device, or over a tiny model on a CPU whose KV blocks go to files: killed and
stopped processes, clients that leave, clients that read slowly, a disk that is full, and at the end a SIGTERM while streams run.
Every request has to end in a whole answer or a clear error.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import resource
import signal
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from pelton.cli.table import format_table
from pelton_plugins.bench.bounds import check_at_least
from pelton_plugins.bench.load import check
from pelton_plugins.bench.record import circumstances, number, write_json
from pelton_plugins.bench.soak.chaos_client import Outcome, ask, get
from pelton_plugins.bench.stream.command import own_server
from pelton_plugins.flags import parse_flags

ENGINE, API = "pelton.engine.process", "pelton_plugins.server.processes.api_process"
RANK = "pelton_plugins.executors.multiproc.rank"
STEP_S, MAX_STEP_S = 0.01, 3.0
SETTLE_S = 60.0
DOC = """Kill and stop the processes of a server while clients use it, and see that every request ends and nothing is left.

  pelton chaos                                  ten minutes
  pelton chaos --with-disk                      an engine that computes, KV blocks in files, a disk that fills up
  pelton chaos --num-ranks 2                    an engine that computes on two ranks, which are killed and stopped too
  pelton chaos --num-ranks 2 --num-engines 2    two such engines
  pelton chaos --duration-s 20 --clients 8"""


class ChaosArguments(msgspec.Struct, frozen=True, kw_only=True):
    """How long, how many clients, how often something breaks."""

    duration_s: float = 600.0
    """Seconds of faults."""
    clients: int = 24
    """Requests in flight."""
    api_server_count: int = 2
    """Processes that serve."""
    with_disk: bool = False
    """A tiny model on a CPU, which keeps the KV blocks of prompts in files; at times its engine cannot write any."""
    num_ranks: int = 1
    """Ranks of the engine: more than one compute a tiny model on a CPU, and are killed and stopped like the others."""
    num_engines: int = 1
    """Engines behind the server (`-dp`), with so many ranks each."""
    mean_fault_s: float = 4.0
    """Seconds between two faults, on average."""
    seed: int = 0
    """Of faults and requests."""
    output_json: str | None = None
    """Write the result here."""

    def __post_init__(self) -> None:
        check_at_least(
            self, duration_s=1.0, clients=1, api_server_count=2, mean_fault_s=0.1, num_ranks=1, num_engines=1
        )


def run(argv: list[str]) -> int:
    parsed = parse_flags(
        argv, [ChaosArguments], positional=None, program="pelton chaos", doc=DOC, engine=False, environ={}
    )
    arguments: ChaosArguments = parsed.structs["ChaosArguments"]
    result = torment(arguments)
    result |= circumstances("no device", msgspec.to_builtins(arguments))
    print(render(result))
    write_json(arguments.output_json, result)
    return 0 if all(one["ok"] for one in result["checks"]) else 1


def torment(arguments: ChaosArguments) -> dict[str, Any]:
    flags = ["--max-step-s", str(MAX_STEP_S), "--graceful-shutdown-s", "15", "--max-engine-restarts", "1000000"]
    with tempfile.TemporaryDirectory(prefix="pelton-chaos-") as folder, tempfile.TemporaryDirectory() as blocks:
        if arguments.with_disk:
            storage = {"shared_storage_path": blocks}
            transfer = {"kv_connector": "shared_storage", "kv_role": "kv_both", "kv_connector_extra_config": storage}
            flags += ["--kv-transfer-config", json.dumps(transfer)]
        if arguments.num_engines > 1:
            flags += ["--data-parallel-size", str(arguments.num_engines)]
        sizes = {"num_seqs": 64, "max_model_len": 512}
        step_s = None if arguments.with_disk or arguments.num_ranks > 1 else STEP_S
        with own_server(
            arguments.api_server_count, step_s, *flags, **sizes, temporary=folder, num_ranks=arguments.num_ranks
        ) as (url, process):
            chaos = _Chaos(url, process, arguments, folder)
            asyncio.run(chaos.run())
        num_blocks = sum(1 for _ in Path(blocks).rglob("*.safetensors"))
        num_parts = sum(1 for _ in Path(blocks).rglob("*.part"))
        left = sorted(path.name for path in Path(folder).iterdir())
    chaos.checks.append(check("folders left", len(left), 0))
    if arguments.with_disk:
        chaos.checks.append(check("no block was written", num_blocks == 0, 0))
        # A killed process leaves at most the one that it was writing.
        chaos.checks.append(
            check("parts of files left", num_parts, chaos.faults["kill engine"] + chaos.faults["hang engine"])
        )
    return chaos.result()


class _Chaos:
    def __init__(self, url: str, process: subprocess.Popen[str], arguments: ChaosArguments, folder: str) -> None:
        self._folder = folder
        parts = urlsplit(url)
        self.host, self.port = str(parts.hostname), int(parts.port or 0)
        self.process, self.arguments = process, arguments
        self.rng = random.Random(arguments.seed)
        self.faults: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.bad: list[str] = []
        self.checks: list[dict[str, Any]] = []
        self._stopped: set[int] = set()
        self._is_over = False

    async def run(self) -> None:
        clients = [asyncio.create_task(self._client()) for _ in range(self.arguments.clients)]
        end = time.monotonic() + self.arguments.duration_s
        while (left := end - time.monotonic()) > 0:
            await asyncio.sleep(min(self.rng.expovariate(1 / self.arguments.mean_fault_s), left))
            await self._fault()
        self._is_over = True
        _, stuck = await asyncio.wait(clients, timeout=SETTLE_S)
        for task in stuck:
            task.cancel()
        self.checks.append(check("requests that never ended", len(stuck), 0))
        self.checks.append(check("requests with a wrong end", len(self.bad), 0))
        await self._look()
        await self._end()

    async def _client(self) -> None:
        while not self._is_over:
            outcome = await ask(self.host, self.port, self.rng, prompt_len=100 if self.arguments.with_disk else 3)
            self._note(outcome)
            if outcome.kind in ("refused", "cut", "error"):
                await asyncio.sleep(0.1)

    def _note(self, outcome: Outcome) -> None:
        self.outcomes[outcome.kind] += 1
        if outcome.kind == "wrong":
            self.bad.append(outcome.detail)

    # Faults

    async def _fault(self) -> None:
        disk = ("full disk", "full disk") if self.arguments.with_disk else ()
        ranks = ("kill rank", "hang rank") * 2 if self.arguments.num_ranks > 1 else ()
        names = ("kill engine", "kill API process", "stop engine", "hang engine", "stop API process", *disk, *ranks)
        name = self.rng.choice(names)
        if name == "full disk":
            await self._fill_disk()
            return
        wanted = ENGINE if "engine" in name else API
        found = self._ranks() if "rank" in name else _children(self.process.pid, wanted)
        found = [pid for pid in found if pid not in self._stopped]
        if not found:
            return
        pid = self.rng.choice(found)
        with contextlib.suppress(ProcessLookupError):
            if name.startswith("kill"):
                os.kill(pid, signal.SIGKILL)
            else:
                os.kill(pid, signal.SIGSTOP)
                if not name.startswith("hang"):  # which is for the server to notice
                    self._stopped.add(pid)
                    await asyncio.sleep(self.rng.uniform(0.1, 0.5 * MAX_STEP_S))
                    self._stopped.discard(pid)
                    os.kill(pid, signal.SIGCONT)
        self.faults[name] += 1

    def _ranks(self) -> list[int]:
        return [rank for engine in _children(self.process.pid, ENGINE) for rank in _children(engine, RANK)]

    async def _fill_disk(self) -> None:
        """No file of the engine can grow beyond some bytes for a while: what a full disk looks like to who writes."""
        for pid in _children(self.process.pid, ENGINE):
            most = self.rng.choice((0, 1000))  # nothing is written, or a part
            with contextlib.suppress(ProcessLookupError):
                _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (most, hard))
                await asyncio.sleep(self.rng.uniform(0.5, 4.0))
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))
            self.faults["full disk"] += 1

    # What is left

    async def _look(self) -> None:
        deadline = time.monotonic() + SETTLE_S
        state: dict[str, float] = {}
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, ValueError, TimeoutError):
                state = await self._state()
                is_idle = state == {"health": 200, "load": 0, "running": 0, "blocks": 0}
                if is_idle and self._all_are_back():
                    break
            await asyncio.sleep(0.2)
        self.checks += [
            check("health is not 200", state.get("health") != 200, 0),
            check("open requests left", state.get("load", -1) != 0, 0),
            check("requests left in the engine", state.get("running", -1) != 0, 0),
            check("KV blocks left", state.get("blocks", -1) != 0, 0),
            check("engines beyond those wanted, or missing", abs(self._num_engines_alive() - self.arguments.num_engines), 0),
            check(
                "API processes missing",
                self.arguments.api_server_count - len(_children(self.process.pid, API)), 0,
            ),
            check("ranks beyond the engines', or missing", abs(self._num_ranks_alive() - self._num_ranks_wanted), 0),
        ]  # fmt: skip
        answer = await ask(self.host, self.port, random.Random(1), plain=True)
        if answer.kind != "whole":
            self.bad.append(f"after all: {answer.kind} {answer.detail}")
        self.checks.append(check("a request after all that fails", answer.kind != "whole", 0))

    @property
    def _num_ranks_wanted(self) -> int:
        arguments = self.arguments
        return arguments.num_engines * arguments.num_ranks if arguments.num_ranks > 1 else 0

    def _all_are_back(self) -> bool:
        """With one engine or one API process of several the server is healthy too, and for a moment beside one that hangs."""
        wanted = self.arguments.num_engines, self._num_ranks_wanted, self.arguments.api_server_count
        servers, engines = _children(self.process.pid, API), _children(self.process.pid, ENGINE)
        if any(map(_is_stopped, [*servers, *engines, *self._ranks()])):
            return False
        return (len(engines), self._num_ranks_alive(), len(servers)) == wanted

    def _num_engines_alive(self) -> int:
        return len(_children(self.process.pid, ENGINE))

    def _num_ranks_alive(self) -> int:
        """Count the ranks of all engines that this server has had, by the folder for sockets in their environment."""
        mark = f"TMPDIR={self._folder}".encode()
        found = 0
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if RANK.encode() in (path / "cmdline").read_bytes() and mark in (path / "environ").read_bytes():
                    found += _is_alive(int(path.name))
        return found

    async def _state(self) -> dict[str, float]:
        status, _ = await get(self.host, self.port, "/health")
        _, load = await get(self.host, self.port, "/load")
        _, text = await get(self.host, self.port, "/metrics")
        return {
            "health": status,
            "load": msgspec.json.decode(load)["server_load"],
            "running": _sample(text.decode(), "pelton_num_requests_running"),
            "blocks": _sample(text.decode(), "pelton_kv_cache_usage_perc"),
        }

    async def _end(self) -> None:
        """SIGTERM while streams run: they end, and so does the server."""
        family = [self.process.pid, *_children(self.process.pid, ""), *self._ranks()]
        streams = [asyncio.create_task(ask(self.host, self.port, random.Random(n), plain=True)) for n in range(4)]
        await asyncio.sleep(0.1)
        self.process.send_signal(signal.SIGTERM)
        for outcome in await asyncio.gather(*streams):
            self._note(outcome)
            self.checks.append(check("a stream did not survive SIGTERM", outcome.kind not in ("whole", "refused"), 0))
        code = await asyncio.to_thread(self.process.wait, 30)
        await asyncio.sleep(0.5)
        self.checks.append(check("exit status", code, 0))
        self.checks.append(check("processes left", sum(map(_is_alive, family)), 0))

    def result(self) -> dict[str, Any]:
        return {
            "faults": dict(self.faults),
            "outcomes": dict(self.outcomes),
            "wrong": self.bad[:10],
            "checks": self.checks,
        }


def _sample(text: str, name: str) -> float:
    values = [float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name + "{")]
    if not values:
        raise ValueError(name)
    return sum(values)


def _is_stopped(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def _children(pid: int, wanted: str) -> list[int]:
    """Process ids of children whose command line names a module."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in task.read_text().split():
                with contextlib.suppress(OSError):
                    if wanted.encode() in Path(f"/proc/{child}/cmdline").read_bytes() and _is_alive(int(child)):
                        found.append(int(child))
    return found


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] != "Z"
    except OSError:
        return False


def render(result: dict[str, Any]) -> str:
    rows = [
        ("ok" if one["ok"] else "FAILED", one["name"], number(float(one["value"])), number(one["limit"]))
        for one in result["checks"]
    ]
    return "\n".join(
        [
            f"faults: {_counts(result['faults'])}",
            f"requests: {_counts(result['outcomes'])}",
            format_table(("", "check", "value", "at most"), rows, indent="  "),
            *(f"  wrong: {text}" for text in result["wrong"]),
        ]
    )


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "none"
