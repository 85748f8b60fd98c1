"""One API process: `python -m pelton_plugins.server.processes.api_process`, started by `owner.py` and by nobody else.

It serves HTTP as a server of one process does; its engine belongs to the owner, and so do the figures. It ends when the
owner is gone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import zmq

from pelton.config.parallel import ParallelConfig
from pelton.errors import ErrorInfo, PeltonError, PluginError, RequestError, error_from_info, error_info
from pelton.logging import get_logger, setup
from pelton.metrics.snapshot import Metric
from pelton.metrics.stats import IterationStats, SchedulerStats
from pelton.plugins import load_plugins
from pelton.utils.own_process import read_arguments
from pelton_plugins.server.process_metrics import ProcessMetrics
from pelton_plugins.server.processes import control
from pelton_plugins.server.processes.joined_client import JoinedClient
from pelton_plugins.server.processes.load_counts import LoadCounts
from pelton_plugins.server.responses import act_here
from pelton_plugins.server.serve import Server

if TYPE_CHECKING:
    from pelton.messages.report import EngineInfo
    from pelton.sdk.async_llm import AsyncLLM

logger = get_logger(__name__)

RESTARTS = 10**9  # the owner decides how often
FIRST_ADAPTER_ID = 2**40  # ids of adapters that resolvers find: a range for each process
ASK_TIMEOUT_S = 5.0
ACCEPT_WITHIN_S = 30.0  # of a replacement's start, whatever it waits for


class GatheredStats:
    """Stand-in for the stat loggers, which run in the owner: gathers the figures for the next report."""

    def __init__(self, index: int = 0) -> None:
        self._index = index
        self._gathered = IterationStats()
        self._others: dict[int, GatheredStats] = {}

    def of(self, engine_index: int) -> GatheredStats:
        if engine_index == self._index:
            return self
        return self._others.setdefault(engine_index, GatheredStats(engine_index))

    def __bool__(self) -> bool:
        return True

    def engine_started(self, info: Any) -> None:
        """The owner knows."""

    def started(self, info: Any, engine_index: int) -> None:
        """The owner knows."""

    def record(self, scheduler_stats: SchedulerStats | None, stats: IterationStats) -> None:
        into = self._gathered
        into.num_prompt_tokens += stats.num_prompt_tokens
        into.num_cached_prompt_tokens += stats.num_cached_prompt_tokens
        into.num_external_prompt_tokens += stats.num_external_prompt_tokens
        into.num_generation_tokens += stats.num_generation_tokens
        into.num_preempted_reqs += stats.num_preempted_reqs
        into.time_to_first_tokens_s += stats.time_to_first_tokens_s
        into.inter_token_latencies_s += stats.inter_token_latencies_s
        into.finished_requests += stats.finished_requests
        for reason, count in stats.num_rejected_reqs.items():
            into.num_rejected_reqs[reason] = into.num_rejected_reqs.get(reason, 0) + count

    def take(self) -> dict[int, IterationStats]:
        """Return figures by engine."""
        gathered, self._gathered = self._gathered, IterationStats()
        taken = {self._index: gathered}
        for other in self._others.values():
            taken |= other.take()
        return taken

    def log(self) -> None:
        """The owner writes the line."""

    def snapshot(self) -> list[Metric]:
        return []


class ApiServer(Server):
    """`Server` on a socket that the owner has bound, over the owner's engine."""

    def __init__(self, configure: control.Configure, link: control.Link, listener: socket.socket) -> None:
        plugins = load_plugins()
        if plugins.digest() != configure.plugin_digest:
            raise PluginError("An API process found other plugins than the server's. Did an installation change?")
        super().__init__(configure.server, configure.engine, plugins, configure.explicit)
        self.port = configure.port
        self._link = link
        self._listener = listener
        self._index = configure.index
        self._loop = asyncio.get_running_loop()
        self._resolved: asyncio.Future[None] = self._loop.create_future()
        self._ups: dict[int, control.EngineUp] = {}
        self._is_up, self._lacks_engine = asyncio.Event(), asyncio.Event()
        self._is_replacement = configure.is_replacement
        self._clients: dict[int, JoinedClient] = {}
        self._stats = GatheredStats(configure.engine.parallel.served_indexes[0])
        self._process = ProcessMetrics()
        self._asked: dict[int, asyncio.Future[str]] = {}
        self._asked_kept: dict[int, asyncio.Future[control.Kept]] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self._num_asked = 0
        self._asked_scale: dict[int, asyncio.Future[ErrorInfo | None]] = {}
        self._llm: AsyncLLM | None = None
        self._num_engines: int | None = None
        self._changing = asyncio.Lock()
        self.state.index = configure.index
        self.state.ask_metrics = self._ask_metrics
        self.state.ask_kept = self._ask_kept
        self.state.ask_scale = self._ask_scale
        self._tasks = [self._loop.create_task(self._read()), self._loop.create_task(self._tell())]

    def _listen(self) -> socket.socket:
        return self._listener

    async def _before_accepting(self) -> None:
        """In a dead process's place: its connections wait until all but an engine is there, rather than be refused."""
        if not self._is_replacement:
            return
        assert self._loading is not None
        lacks_engine = self._loop.create_task(self._lacks_engine.wait())
        await asyncio.wait({self._loading, lacks_engine}, timeout=ACCEPT_WITHIN_S, return_when=asyncio.FIRST_COMPLETED)
        lacks_engine.cancel()

    async def _load(self) -> None:
        from pelton.sdk.async_llm import AsyncLLM

        await self._resolved
        llm = await asyncio.to_thread(
            AsyncLLM,
            self.engine_config,
            plugins=self.plugins,
            explicit=self.explicit,
            start_engine=lambda config, *_, **__: self._clients[config.parallel.data_parallel_rank],
            max_restarts=RESTARTS,
            stat_loggers=self._stats,  # type: ignore[arg-type]
        )
        number = await self._join(llm.config.parallel)
        llm.input_processor.draw_apart(number)
        await llm.start()
        llm.adapters.number_from(FIRST_ADAPTER_ID * number)
        self._llm = llm
        await self._change_engines(0.0)  # there may be others by now
        if llm.info.report.platform == "cpu":
            self.priority.lower()
        assert self.state.parsers is not None
        self.state.parsers.of_model(llm)
        self.state.llm = llm
        self._link.send(control.Ready(os.getpid()))

    async def _join(self, parallel: ParallelConfig) -> int:
        """Join the engines as soon as there is one that lives; returns a number that no other process has."""
        while True:
            if not self._ups:
                self._lacks_engine.set()
            await self._is_up.wait()
            for engine, up in list(self._ups.items()):
                try:
                    self._clients[engine] = self._join_one(engine, up)
                except zmq.ZMQError:  # it died before we heard; the owner tells of the next
                    self._note_down(engine)
            if self._clients:
                break
        live = next(iter(self._clients))
        for engine in parallel.served_indexes if parallel.has_several_engines else ():
            if engine not in self._clients:
                self._clients[engine] = self._join_one(engine, None, self._clients[live].info)
        return self._ups[live].client_index

    def _join_one(self, engine: int, up: control.EngineUp | None, info: EngineInfo | None = None) -> JoinedClient:
        return JoinedClient(up, self._loop, info, partial(self._share_load, engine))

    def _share_load(self, engine: int, num_in_flight: int) -> int:
        """Let the routers of all API processes know what each engine has to do before the owner tells them."""
        counts = self.state.load_counts
        return 0 if counts is None else counts.share(self._index, engine, num_in_flight)

    def _note_down(self, engine: int) -> None:
        self._ups.pop(engine, None)
        if not self._ups:
            self._is_up.clear()

    async def _read(self) -> None:
        """Follow the owner; without it there is nothing to serve."""
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                self._take(await self._link.receive())
        os._exit(1)

    def _take(self, message: control.ToApi) -> None:
        if isinstance(message, control.Resolved):
            if not self._resolved.done():
                self._resolved.set_result(None)
        elif isinstance(message, control.Loads):
            for engine, (num_waiting, num_running) in message.loads.items():
                if engine in self._clients:
                    self._clients[engine].told_load(num_waiting, num_running)
        elif isinstance(message, control.EngineUp):
            self._ups[message.engine] = message
            self._is_up.set()
            if message.engine in self._clients:
                self._clients[message.engine].engine_up(message)
        elif isinstance(message, control.EngineDown):
            if message.engine in self._clients:
                self._clients[message.engine].engine_down(message.reason)
            self._note_down(message.engine)
        elif isinstance(message, control.Scaling):
            self.state.is_scaling = message.is_under_way
        elif isinstance(message, control.Engines):
            self._start_task(self._take_engines(message))
        elif isinstance(message, control.Scaled):
            scaling = self._asked_scale.pop(message.number, None)
            if scaling is not None and not scaling.done():
                scaling.set_result(message.error)
        elif isinstance(message, control.AskFigures):
            self._send_figures(message.number)
        elif isinstance(message, control.MetricsText):
            asked = self._asked.pop(message.number, None)
            if asked is not None and not asked.done():
                asked.set_result(message.text)
        elif isinstance(message, control.AskKept):
            self._start_task(self._answer_kept(message))
        elif isinstance(message, control.Kept):
            waiting = self._asked_kept.pop(message.number, None)
            if waiting is not None and not waiting.done():
                waiting.set_result(message)

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _take_engines(self, message: control.Engines) -> None:
        self._num_engines = message.num_engines
        if self._llm is not None:  # else it is done behind the start
            await self._change_engines(message.drain_timeout_s)
        self._link.send(control.EnginesTaken(message.number))

    async def _change_engines(self, drain_timeout_s: float) -> None:
        """Have as many engines as the owner says."""
        async with self._changing:
            llm, num_engines = self._llm, self._num_engines
            if llm is None or num_engines is None:
                return
            for engine in range(num_engines):
                if engine not in self._clients:
                    self._clients[engine] = self._joined(engine, llm.info)
            try:
                await llm.call("take_engines", num_engines, drain_timeout_s)
            except PeltonError as error:  # we are about to end
                logger.error("Engines were not changed: %s", error)
                return
            for engine in [engine for engine in self._clients if engine >= num_engines]:
                self._ups.pop(engine, None)
                self._clients.pop(engine).shutdown()

    def _joined(self, engine: int, info: EngineInfo) -> JoinedClient:
        try:
            return self._join_one(engine, self._ups.get(engine), info)
        except zmq.ZMQError:  # it died before we heard; the owner tells of the next
            return self._join_one(engine, None, info)

    async def _ask_scale(self, num_engines: int, drain_timeout_s: float) -> None:
        """See `ServerState.ask_scale`."""
        self._num_asked += 1
        number = self._num_asked
        waiting = self._asked_scale[number] = self._loop.create_future()
        self._link.send(control.AskScale(number, num_engines, drain_timeout_s))
        error = await waiting
        if error is not None:
            raise error_from_info(error)

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(control.TELL_INTERVAL_S)
            self._send_figures(0)

    def _send_figures(self, number: int) -> None:
        self._link.send(
            control.Figures(number, self._stats.take(), self.state.http_metrics.take(), self._process.samples())
        )

    async def _ask_metrics(self) -> str:
        number = max(self._asked, default=0) + 1
        asked = self._asked[number] = self._loop.create_future()
        self._link.send(control.AskMetrics(number))
        try:
            return await asyncio.wait_for(asked, ASK_TIMEOUT_S)
        finally:
            self._asked.pop(number, None)

    async def _ask_kept(self, keeper: int, action: str, response_id: str) -> bytes:
        """See `ServerState.ask_kept`."""
        self._num_asked += 1
        number = self._num_asked
        waiting = self._asked_kept[number] = self._loop.create_future()
        self._link.send(control.AskKept(number, self._index, keeper, action, response_id))
        try:
            found = await asyncio.wait_for(waiting, ASK_TIMEOUT_S)
        except TimeoutError:
            return b""
        finally:
            self._asked_kept.pop(number, None)
        if found.error is not None:
            error = RequestError(found.error.message)
            error.status, error.param = found.error.status, found.error.param
            raise error
        body: bytes = found.body
        return body

    async def _answer_kept(self, asked: control.AskKept) -> None:
        error = None
        body = b""
        try:
            body = await act_here(self.state, asked.action, asked.response_id)
        except PeltonError as found:
            error = error_info(found)
        self._link.send(control.Kept(asked.number, asked.asker, body, error))

    def finish(self) -> None:
        self._send_figures(0)


async def serve(arguments: argparse.Namespace) -> int:
    pair = socket.socket(fileno=arguments.control_fd)
    pair.setblocking(False)
    link = control.Link(*await asyncio.open_unix_connection(sock=pair), control.ToApi)
    configure: control.Configure = await link.receive()
    setup(configure.engine.observability.log_level)
    listener = socket.socket(fileno=arguments.listen_fd)
    listener.setblocking(False)
    try:
        server = ApiServer(configure, link, listener)
        server.state.load_counts = LoadCounts(arguments.load_fd, configure.server.api_server_count or 1)
        code = await server.run()
        server.finish()
    except PeltonError as error:
        link.send(control.Failed(error_info(error)))
        code = 1
    except Exception as error:
        logger.exception("API process %d failed.", configure.index)
        link.send(control.Failed(error_info(error)))
        code = 1
    link.close()
    await link.closed()
    return code


def main(argv: Sequence[str] | None = None) -> int:
    import uvloop

    parser = argparse.ArgumentParser(prog="pelton_plugins.server.processes.api_process", description=__doc__)
    for name in ("--control-fd", "--listen-fd", "--load-fd"):
        parser.add_argument(name, type=int, required=True)
    arguments = read_arguments(parser, argv)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        code = runner.run(serve(arguments))
    sys.stderr.flush()
    os._exit(code)  # the owner waits for us, and nothing is left to be freed


if __name__ == "__main__":
    main()
