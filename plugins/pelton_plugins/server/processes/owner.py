"""`Owner`: the process of `pelton serve --api-server-count N`. It owns the engines, the port and the figures, and serves nothing.

With several engines it tells the API processes how much each has to do: their routers go by that.
N API processes serve, each with a socket of its own at the one port; the owner holds copies, so that connections wait while
a dead process is replaced. What one process does wrong ends its own requests only.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import sys
import time
from collections.abc import Collection
from typing import Any

import msgspec

from pelton.config import EngineConfig
from pelton.engine.process_client import ProcessClient
from pelton.errors import (
    ConfigError,
    EngineDeadError,
    EngineError,
    PeltonError,
    RequestError,
    error_from_info,
    error_info,
)
from pelton.logging import get_logger
from pelton.messages.outputs import EngineOutputs
from pelton.metrics.snapshot import Counter, Gauge, Metric
from pelton.plugins import Plugins
from pelton_plugins.server.ahead import EngineAhead
from pelton_plugins.server.config import ServerConfig
from pelton_plugins.server.http_metrics import SLEEP_OPERATIONS, HttpMetrics
from pelton_plugins.server.metrics_text import render_text
from pelton_plugins.server.process_metrics import ProcessMetrics
from pelton_plugins.server.processes import control
from pelton_plugins.server.processes.child import Child
from pelton_plugins.server.processes.load_counts import LoadCounts
from pelton_plugins.server.serve import announce, bind, url_of

logger = get_logger(__name__)

ASK_TIMEOUT_S = 2.0  # for the figures of all processes
SILENCE_S = 20.0  # an API process that tells nothing for so long is replaced
WATCH_S = 1.0
LOADS_INTERVAL_S = 0.02  # between two reports of what engines have to do
EXIT_GRACE_S = 7.0  # beyond the time that running requests get


def process_counts(prefix: str, num_ready: int, num_restarts: int) -> list[Metric]:
    """Families of a server with several API processes."""
    return [
        Gauge(name=prefix + "api_processes", documentation="API processes that serve.", value=num_ready),
        Counter(
            name=prefix + "api_process_restarts",
            documentation="API processes that ended and were replaced.",
            value=num_restarts,
        ),
    ]


class OwnedClient(ProcessClient):
    """Tells when the engine ends, and when another one took its place."""

    owner: Owner
    loop: asyncio.AbstractEventLoop
    engine: int

    async def get_outputs_async(self) -> list[EngineOutputs]:
        try:
            batches = await super().get_outputs_async()
        except EngineDeadError as error:
            self.owner.engine_down(self.engine, str(error))
            raise
        for outputs in batches:
            if outputs.stats is not None:
                self.owner.loads[self.engine] = outputs.stats.num_waiting_reqs, outputs.stats.num_running_reqs
        return batches

    def restart(self) -> None:
        super().restart()
        self.loop.call_soon_threadsafe(self.owner.engine_up, self)


class Owner:
    """The engines, one port, several processes, from the bind to the last answer."""

    def __init__(
        self, config: ServerConfig, engine_config: EngineConfig, plugins: Plugins, explicit: Collection[str] = (),
        ahead: EngineAhead | None = None,
    ) -> None:  # fmt: skip
        if engine_config.lora.allow_runtime_lora_updating:
            raise ConfigError(
                f"allow_runtime_lora_updating is set, and api_server_count is {config.api_server_count}: an adapter that is "
                "loaded through one process would be unknown to the others. Use one process, or --lora-modules."
            )
        self.config, self.engine_config, self.plugins, self.explicit = config, engine_config, plugins, explicit
        self.port, self._ahead = config.port, ahead
        self.http = HttpMetrics()
        self.num_restarts = 0
        self._llm: Any = None
        self._clients: dict[int, OwnedClient] = {}
        self._is_resolved = self._is_announced = self._is_scaling = False
        self._ups: dict[int, control.EngineUp] = {}
        self.loads: dict[int, tuple[int, int]] = {}
        self._client_indexes = itertools.count(1)
        self._numbers = itertools.count(1)
        self._process = ProcessMetrics()
        self._num_signals = 0
        self._stop = asyncio.Event()
        self._failure: PeltonError | None = None
        self.is_stopping = False
        self.children: list[Child] = []
        self._loading: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(self) -> int:
        """Serve until a signal. Returns the exit code."""
        loop = asyncio.get_running_loop()
        listeners = self._bind()
        load_file = LoadCounts.make_file(len(listeners))
        load = LoadCounts(load_file, len(listeners))
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        self.children = [Child(self, index, listener, load_file, load) for index, listener in enumerate(listeners)]
        for child in self.children:
            self._start_task(child.keep())
        self._start_task(self._watch())
        if self.engine_config.parallel.has_several_engines:
            self._start_task(self._tell_loads())
        self._loading = asyncio.create_task(self._load())
        self._loading.add_done_callback(self._on_loaded)
        try:
            await self._stop.wait()
            self.is_stopping = True
            for listener in listeners:
                listener.close()
            await asyncio.gather(
                *(child.end(self.config.graceful_shutdown_s + EXIT_GRACE_S) for child in self.children)
            )
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
            self._end()
        if self._failure is not None:
            raise self._failure
        return 0

    def _bind(self) -> list[socket.socket]:
        bind(self.config).close()  # alone: a port that another server shares is taken
        first = bind(self.config, is_shared=True)
        self.port = first.getsockname()[1]
        rest = [
            bind(self.config, port=self.port, is_shared=True) for _ in range((self.config.api_server_count or 1) - 1)
        ]
        return [first, *rest]

    def _start_task(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("The server's own work failed.", exc_info=error)
            self.fail(EngineError(f"{type(error).__name__}: {error}"))

    # The engine

    async def _load(self) -> None:
        from pelton.sdk.async_llm import AsyncLLM

        began = time.perf_counter()
        loop = asyncio.get_running_loop()
        llm = await asyncio.to_thread(
            AsyncLLM,
            self.engine_config,
            plugins=self.plugins,
            max_restarts=self.config.max_engine_restarts,
            explicit=self.explicit,
            start_engine=self._start_engine(loop),
        )
        self._is_resolved = True
        for child in self.children:
            child.send(control.Resolved())
        try:
            await llm.start()
        except BaseException:
            with contextlib.suppress(EngineDeadError):
                llm.shutdown()
            raise
        self._llm = llm
        for client in self._clients.values():
            self.engine_up(client)
        for child in self.children:
            await child.ready.wait()
        self._is_announced = True
        names = self.engine_config.model.served_model_name or [self.engine_config.model.model]
        announce(llm, self.config, names[0], url_of(self.config, self.port), time.perf_counter() - began)

    def _start_engine(self, loop: asyncio.AbstractEventLoop) -> Any:
        def start(config: EngineConfig, *arguments: Any, **options: Any) -> OwnedClient:
            connection = None if options or self._ahead is None else self._ahead.take()
            client = OwnedClient(config, *arguments, connection=connection, **options)
            client.owner, client.loop, client.engine = self, loop, config.parallel.data_parallel_rank
            self._clients[client.engine] = client
            return client

        return start

    def engine_up(self, client: OwnedClient) -> None:
        self._ups[client.engine] = control.EngineUp(client.socket_dir, 0, client.info, client.engine)
        for child in self.children:
            self._tell_up(child, client.engine)

    def _tell_up(self, child: Child, engine: int) -> None:
        up = self._ups[engine]
        child.client_indexes[engine] = next(self._client_indexes)
        child.send(control.EngineUp(up.socket_dir, child.client_indexes[engine], up.info, engine))

    def engine_down(self, engine: int, reason: str) -> None:
        self._ups.pop(engine, None)
        self.loads.pop(engine, None)
        for child in self.children:
            child.send(control.EngineDown(reason, engine))

    async def _tell_loads(self) -> None:
        told: dict[int, tuple[int, int]] = {}
        while True:
            await asyncio.sleep(LOADS_INTERVAL_S)
            told = {engine: load for engine, load in told.items() if engine in self.loads}
            changed = {engine: load for engine, load in self.loads.items() if told.get(engine) != load}
            told.update(changed)
            for child in self.children if changed else ():
                child.send(control.Loads(changed))

    def _on_loaded(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            self.fail(error if isinstance(error, PeltonError) else EngineError(f"{type(error).__name__}: {error}"))

    def fail(self, error: PeltonError) -> None:
        """End the server, which could not start."""
        self._failure = self._failure or error
        self._stop.set()

    # What API processes tell

    def greet(self, child: Child) -> None:
        """A new one is there."""
        config = control.Configure(
            self.config, self.engine_config, list(self.explicit), self.plugins.digest(), child.index, self.port,
            is_replacement=self._is_announced,
        )  # fmt: skip
        child.send(config)
        if self._is_resolved:
            child.send(control.Resolved())
        child.send(control.Scaling(self._is_scaling))
        for engine in self._ups:
            self._tell_up(child, engine)
        if self.loads:
            child.send(control.Loads(dict(self.loads)))

    def take(self, child: Child, message: control.ToOwner) -> None:
        if isinstance(message, control.Figures):
            self.http.add(message.http)
            for engine, iteration in message.iterations.items() if self._llm is not None else ():
                if engine in self._clients:  # it may have left meanwhile
                    self._llm.stat_loggers.of(engine).record(None, iteration)
        elif isinstance(message, control.AskMetrics):
            self._start_task(self._answer_metrics(child, message.number))
        elif isinstance(message, control.AskScale):
            self._start_task(self._answer_scale(child, message))
        elif isinstance(message, control.AskKept):
            self._hand_on(message)
        elif isinstance(message, control.Kept):
            self.children[message.asker].send(message)
        elif isinstance(message, control.Failed) and not self._is_announced:
            self.fail(error_from_info(message.error))

    def _hand_on(self, asked: control.AskKept) -> None:
        """To the process that keeps the response; one that is gone has lost it."""
        keeper = self.children[asked.keeper] if asked.keeper < len(self.children) else None
        if keeper is not None and keeper.is_linked and keeper.ready.is_set():
            keeper.send(asked)
        else:
            self.children[asked.asker].send(control.Kept(asked.number, asked.asker, b""))

    def forget(self, child: Child) -> None:
        """A process is gone: what it had asked for ends."""
        self.num_restarts += 1
        for engine, client_index in child.client_indexes.items():
            if engine in self._ups:
                with contextlib.suppress(EngineDeadError):
                    self._clients[engine].forget_client(client_index)
        child.client_indexes = {}

    # Another number of engines

    async def _answer_scale(self, asker: Child, asked: control.AskScale) -> None:
        error = None
        try:
            await self._scale(asked.num_engines, asked.drain_timeout_s)
        except PeltonError as found:
            error = error_info(found)
        asker.send(control.Scaled(asked.number, error))

    async def _scale(self, num_engines: int, drain_timeout_s: float) -> None:
        """API processes let engines go first, and hear of new ones last."""
        if self._llm is None or self._is_scaling:
            refusal = RequestError("The number of engines is being changed already.", param="new_data_parallel_size")
            refusal.status = 409
            raise refusal
        self._tell_scaling(True)
        try:
            await self._llm.call("check_scaling", num_engines, drain_timeout_s)
            if num_engines == await self._llm.call("num_engines"):
                return
            kept = 0 if self.engine_config.parallel.enable_expert_parallel else num_engines
            self._forget_engines(kept)
            await self._tell_engines(min(kept, len(self._clients)), drain_timeout_s)
            try:
                await self._llm.scale_elastic_ep(num_engines, 0.0)
            finally:
                present = await self._llm.call("num_engines")
                for engine in [engine for engine in self._clients if engine >= present]:
                    del self._clients[engine]
                self._forget_engines(present)
                parallel = msgspec.structs.replace(self.engine_config.parallel, data_parallel_size=max(present, 1))
                self.engine_config = msgspec.structs.replace(self.engine_config, parallel=parallel)
                for engine, client in self._clients.items():
                    if engine not in self._ups and client.error is None:
                        self.engine_up(client)
                await self._tell_engines(present, 0.0)
        finally:
            self._tell_scaling(False)

    def _forget_engines(self, num_engines: int) -> None:
        """Those from this number on leave: a new process does not hear of them."""
        for engine in [engine for engine in self._ups if engine >= num_engines]:
            del self._ups[engine]
            self.loads.pop(engine, None)

    def _tell_scaling(self, is_under_way: bool) -> None:
        self._is_scaling = is_under_way
        for child in self.children:
            child.send(control.Scaling(is_under_way))

    async def _tell_engines(self, num_engines: int, drain_timeout_s: float) -> None:
        """Wait until all API processes have let the others go; one that is late, or gone, is not waited for."""
        told = control.Engines(next(self._numbers), num_engines, drain_timeout_s)
        waiting = [asyncio.ensure_future(child.ask(told)) for child in self.children if child.is_linked]
        if waiting:
            _, late = await asyncio.wait(waiting, timeout=drain_timeout_s + SILENCE_S)
            for one in late:
                one.cancel()

    async def _answer_metrics(self, asker: Child, number: int) -> None:
        question = control.AskFigures(next(self._numbers))
        waiting = [asyncio.ensure_future(child.ask(question)) for child in self.children if child.is_linked]
        if waiting:
            _, late = await asyncio.wait(waiting, timeout=ASK_TIMEOUT_S)
            for one in late:
                one.cancel()
        asker.send(control.MetricsText(number, self.metrics_text()))

    def metrics_text(self) -> str:
        self.http.num_in_progress = sum(child.num_in_progress for child in self.children)
        for operation in SLEEP_OPERATIONS:
            self.http.num_sleeping[operation] = sum(child.num_sleeping.get(operation, 0) for child in self.children)
        found = self._llm.get_metrics() if self._llm is not None else []
        prefix = self.engine_config.observability.metrics_prefix
        num_ready = sum(child.is_linked and child.ready.is_set() for child in self.children)
        more = process_counts(prefix, num_ready, self.num_restarts)
        samples = {f"api-{child.index}": child.samples for child in self.children if child.is_linked}
        return render_text([*found, *self.http.snapshot(prefix), *more]) + self._process.text_of_all(
            samples, "engine-owner"
        )

    async def _watch(self) -> None:
        """Replace processes that stand still."""
        looked = time.monotonic()
        while not self.is_stopping:
            await asyncio.sleep(WATCH_S)
            now = time.monotonic()
            if now - looked < 5 * WATCH_S:  # else this process itself stood still
                for child in self.children:
                    child.kill_if_silent(now, SILENCE_S)
            looked = now

    # The end

    def _on_signal(self, number: int) -> None:
        """First: API processes finish what runs. Second: gone at once."""
        self._num_signals += 1
        if self._num_signals > 1:
            print("Second signal: exiting now.", file=sys.stderr, flush=True)
            for child in self.children:
                child.kill()
            os._exit(128 + number)
        self._stop.set()

    def _end(self) -> None:
        for child in self.children:
            child.kill()
        for task in list(self._tasks):
            task.cancel()
        assert self._loading is not None
        if not self._loading.done():
            # A thread is in the middle of the start and cannot be interrupted; the engine process ends when we do.
            print("Stopped while loading.", file=sys.stderr, flush=True)
            os._exit(0 if self._num_signals else 1)
        if self._llm is not None:
            with contextlib.suppress(EngineDeadError):
                self._llm.shutdown()
