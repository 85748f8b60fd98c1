"""`SeveralEngines`: engines with a whole copy of the model each, as one client (data parallelism).

Each request goes to the engine that the router picks, and stays there. A dead or hung engine loses its own requests, with an error, and
is started again while the others go on. Calls go to all engines. Engines come and go as `scaling.py` says.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, ClassVar

import msgspec

from pelton.config import EngineConfig
from pelton.config.parallel import ParallelConfig
from pelton.engine.client import EngineClient, EngineStarter
from pelton.errors import EngineDeadError, EngineError, PeltonError, error_info
from pelton.logging import get_logger
from pelton.messages.outputs import EngineOutput, EngineOutputs, FinishReason
from pelton.messages.report import EngineInfo
from pelton.messages.request import EngineRequest
from pelton.metrics.plugin_metrics import GAUGE, PluginSample
from pelton.metrics.stats import SchedulerStats
from pelton.model.resolved import ResolvedModel
from pelton.plugins import Plugins
from pelton.sdk.supervisor import MAX_RESTARTS, Supervisor
from pelton_plugins.data_parallel.expert_group import ExpertGroup
from pelton_plugins.data_parallel.far import FarConnection
from pelton_plugins.data_parallel.router import EngineLoad, LoadRouter, RequestRouter
from pelton_plugins.data_parallel.scaling import Scaling, check_elastic
from pelton_plugins.data_parallel.secure import read_secret
from pelton_plugins.data_parallel.side_by_side import run_all, start_all

SILENT_S = 3.0
"""An engine's process says every second that it lives. One that has not for so long gets no new requests while others do."""

logger = get_logger(__name__)


def state_sample(*, is_up: bool) -> PluginSample:
    return PluginSample("engine_up", GAUGE, "1 while the engine takes requests.", {}, float(is_up))


class _Engine:
    """One of the engines."""

    def __init__(self, place: int, index: int, client: EngineClient) -> None:
        self.place, self.index, self.client = place, index, client
        self.is_up = client.error is None
        self.num_in_flight = 0
        self.num_sent = 0  # of those, at most: since its last report
        self.supervisor: Supervisor | None = None
        self.is_leaving = False  # it gets no new requests, and is closed once it has none
        self.tasks: list[asyncio.Task[None]] = []  # that follow it

    @property
    def is_well(self) -> bool:
        """False for one that is silent, or whose steps fail one after another: it would have the lowest load of all."""
        failing = self.supervisor is not None and self.supervisor.failing is not None
        return not failing and self.client.silence_s < SILENT_S

    def load_now(self, reported: EngineLoad) -> EngineLoad:
        num_of_others = self.client.share_load(self.num_in_flight)
        return reported.with_sent(self.num_sent, self.num_in_flight + num_of_others)

    def has(self, num_more: int) -> None:
        """It has so many requests more, or fewer."""
        self.num_in_flight += num_more
        self.client.share_load(self.num_in_flight)

    def down_reason(self) -> str:
        down = self.supervisor.down if self.supervisor is not None else None
        return f"Engine {self.index}: {down or self.client.error or 'it is down.'}"


class SeveralEngines(EngineClient):
    """start: starts one engine; called for each from a thread of its own. All of them are ready when the constructor returns.

    A subclass may pick engines otherwise, by another `router_class`.
    """

    router_class: ClassVar[type[RequestRouter]] = LoadRouter
    load_class: ClassVar[type[EngineLoad]] = EngineLoad

    def __init__(self, config: EngineConfig, model: ResolvedModel, plugins: Plugins, start: EngineStarter) -> None:
        check_elastic(config.parallel)
        self._start, self._config, self._model, self._plugins = start, config, model, plugins
        self._group, parallel = self.group_of(config.parallel)
        indexes = list(parallel.served_indexes)
        self._router = self.router_class(config, len(indexes))
        self._max_step_s = config.scheduler.max_step_s
        self._max_restarts = MAX_RESTARTS
        self._tell_started: Callable[[EngineInfo, int], None] | None = None
        self._scaling = Scaling(self, config.parallel)
        self._lock = threading.Lock()  # of the tables below, and of the router
        self._drained = threading.Condition(self._lock)  # one that leaves has nothing more to do
        self._engine_of: dict[str, _Engine] = {}
        self._loads = [EngineLoad() for _ in indexes]
        self._arrived: deque[EngineOutputs] = deque()
        self._news = threading.Condition()
        self._waiter: asyncio.Future[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None  # on which engines are followed
        self._own_loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False

        if len(indexes) > len(parallel.engine_indexes):
            read_secret(parallel.data_parallel_key_file)  # before an engine starts
        clients = start_all([partial(self.start_one, parallel, index) for index in indexes])
        self._engines = [_Engine(place, *pair) for place, pair in enumerate(zip(indexes, clients, strict=True))]
        self.info = self.shared_info()

    @staticmethod
    def group_of(parallel: ParallelConfig) -> tuple[ExpertGroup | None, ParallelConfig]:
        """Return what engines that share their experts have in common, and the sizes with it."""
        group = ExpertGroup(parallel) if parallel.shares_experts else None
        return group, parallel if group is None else group.parallel

    def start_one(self, parallel: ParallelConfig, index: int) -> EngineClient:
        own = msgspec.structs.replace(parallel, data_parallel_rank=index)
        options = {} if index in parallel.engine_indexes else {"connect": FarConnection}
        return self._start(msgspec.structs.replace(self._config, parallel=own), self._model, self._plugins, **options)

    @staticmethod
    def run_node(config: EngineConfig, plugins: Plugins) -> int:
        """Run this host's engines for a server on another one, until a signal. Raises `ConfigError`."""
        from pelton_plugins.data_parallel.node import run_node

        return run_node(config, plugins)

    def shared_info(self) -> EngineInfo:
        """Return facts that hold for each engine."""
        routing = self._config.parallel.data_parallel_routing
        least = min((engine.client.info for engine in self._engines), key=lambda info: info.num_blocks)
        shown = f"{len(self._engines)}, requests by {routing}; figures are those of each"
        report = msgspec.structs.replace(least.report, choices={"engines": shown, **least.report.choices})
        length = min(engine.client.info.max_model_len for engine in self._engines)
        return msgspec.structs.replace(least, report=report, max_model_len=length)

    # -- requests --

    def add_request(self, request: EngineRequest) -> None:
        self.add_requests([request])

    def add_requests(self, requests: Sequence[EngineRequest]) -> None:
        """Send each to an engine. Raises `EngineDeadError` (503) when none takes requests."""
        left = list(requests)
        while left:
            shares: dict[_Engine, list[EngineRequest]] = {}
            with self._lock:
                for request, engine in zip(left, self._route(left), strict=True):
                    shares.setdefault(engine, []).append(request)
            left = []
            for engine, share in shares.items():
                try:
                    engine.client.add_requests(share)
                except EngineDeadError:  # just now; its supervisor is about to hear of it
                    with self._lock:
                        engine.is_up = False
                        share = [one for one in share if self._engine_of.get(one.request_id) is engine]
                        for request in share:
                            self._forget(request.request_id)
                    left += share

    def _route(self, requests: Sequence[EngineRequest]) -> list[_Engine]:
        """Return the engine of each; the caller holds the lock."""
        places: Sequence[int] | None = None
        if len(requests) > 1:
            places = self._router.route_batch(requests, self._loads_now(), self._ready(), self.info)
        chosen = []
        for index, request in enumerate(requests):
            place = self._router.route(request, self._loads_now(), self._ready()) if places is None else places[index]
            engine = self._engines[place]
            self._engine_of[request.request_id] = engine
            engine.has(1)
            engine.num_sent += 1
            chosen.append(engine)
        return chosen

    def _ready(self) -> list[int]:
        """Return the places of the engines that take requests. Raises `EngineDeadError` where none does."""
        up = [engine for engine in self._engines if engine.is_up and not engine.is_leaving]
        if not up or self._is_closed:
            error = self.error or EngineDeadError("The number of engines is being changed.")
            dead = EngineDeadError(f"{error} New requests are refused until an engine is back.")
            dead.status = 503
            raise dead
        return [engine.place for engine in up if engine.is_well] or [engine.place for engine in up]

    def _loads_now(self) -> list[EngineLoad]:
        return [engine.load_now(load) for engine, load in zip(self._engines, self._loads, strict=True)]

    def _forget(self, request_id: str) -> None:
        """A request has ended; the caller holds the lock."""
        engine = self._engine_of.pop(request_id, None)
        if engine is not None:
            engine.has(-1)
            engine.num_sent = min(engine.num_sent, engine.num_in_flight)  # it may end between two reports
            if engine.is_leaving and not engine.num_in_flight:
                self._drained.notify_all()

    def finish_requests(self, request_ids: Sequence[str], reason: FinishReason = FinishReason.ABORT) -> None:
        shares: dict[_Engine, list[str]] = {}
        with self._lock:
            for request_id in request_ids:
                engine = self._engine_of.get(request_id)
                if engine is not None:
                    shares.setdefault(engine, []).append(request_id)
                    if reason == FinishReason.STOP:  # nothing more comes of it
                        self._forget(request_id)
        for engine, share in shares.items():
            with contextlib.suppress(EngineDeadError):  # its requests end anyway
                engine.client.finish_requests(share, reason)

    # -- outputs --

    def get_outputs(self, timeout_s: float | None = None) -> EngineOutputs:
        """Engines are followed on an event loop of its own, in a thread."""
        if self._own_loop is None:
            self._own_loop = asyncio.new_event_loop()
            threading.Thread(target=self._own_loop.run_forever, name="pelton-engines", daemon=True).start()
            self._own_loop.call_soon_threadsafe(self._follow)
        with self._news:
            self._news.wait_for(lambda: self._arrived or self._is_closed, timeout_s)
            if self._arrived:
                return self._arrived.popleft()
        if self._is_closed:
            raise EngineDeadError("The engine was shut down.")
        return EngineOutputs()

    async def get_outputs_async(self) -> list[EngineOutputs]:
        if self._loop is None:
            self._follow()
        while not self._arrived:
            if self._is_closed:
                raise EngineDeadError("The engine was shut down.")
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        outputs = list(self._arrived)
        self._arrived.clear()
        return outputs

    def supervise(self, max_restarts: int, started: Callable[[EngineInfo, int], None]) -> None:
        self._max_restarts, self._tell_started = max_restarts, started
        for engine in self._engines[1:]:
            started(engine.client.info, engine.index)

    def _follow(self) -> None:
        """Start what takes outputs and watches over each engine, on the running loop."""
        loop = asyncio.get_running_loop()
        with self._lock:
            self._loop, engines = loop, list(self._engines)
        for engine in engines:
            self._follow_one(engine)
        if self._config.parallel.enable_expert_parallel:
            self._tasks.append(loop.create_task(ExpertGroup.watch(self._engines)))

    def _follow_one(self, engine: _Engine) -> None:
        loop = asyncio.get_running_loop()
        supervisor = engine.supervisor = Supervisor(
            engine.client, max_restarts=self._max_restarts, hand_on=partial(self._hand_on, engine),
            died=partial(self._died, engine), started=partial(self._restarted, engine), name=f"Engine {engine.index}",
        )  # fmt: skip
        engine.tasks.append(loop.create_task(supervisor.run(), name=f"pelton-outputs-{engine.index}"))
        is_ours = type(engine.client).kill is not EngineClient.kill
        if self._max_step_s and is_ours:
            engine.tasks.append(loop.create_task(supervisor.watch(self._max_step_s)))
        self._tell_state(engine)

    def _hand_on(self, engine: _Engine, outputs: EngineOutputs) -> None:
        outputs.engine_index = engine.index
        with self._lock:
            for output in outputs.outputs:
                if output.finish_reason is not None:
                    self._forget(output.request_id)
            if outputs.stats is not None:
                load = self._loads[engine.place]
                load.num_waiting, load.num_running = outputs.stats.num_waiting_reqs, outputs.stats.num_running_reqs
                engine.num_sent = 0
        self._put(outputs)

    def _put(self, outputs: EngineOutputs) -> None:
        with self._news:
            self._arrived.append(outputs)
            self._news.notify()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -- engines that end and come back --

    def _died(self, engine: _Engine, error: EngineDeadError) -> None:
        """End its requests; those of the others go on."""
        reason = EngineDeadError(f"Engine {engine.index}, which ran this request, is gone: {error}")
        reason.status = error.status
        with self._lock:
            engine.is_up = False
            ended = self._end_requests(engine, reason)
            self._loads[engine.place] = EngineLoad()
        if self._group is not None:
            self._group.end_others(engine, self._engines)
        self._tell_state(engine, ended)

    def _end_requests(self, engine: _Engine, reason: PeltonError) -> list[EngineOutput]:
        """Forget what an engine that is gone had; the caller holds the lock."""
        lost = [name for name, owner in self._engine_of.items() if owner is engine]
        for request_id in lost:
            self._forget(request_id)
        self._router.forget(engine.place)
        info = error_info(reason)
        return [EngineOutput(name, finish_reason=FinishReason.ERROR, error=info) for name in lost]

    def _restarted(self, engine: _Engine, took_s: float) -> None:
        with self._lock:
            engine.is_up = True
        if self._tell_started is not None:
            self._tell_started(engine.client.info, engine.index)
        self._tell_state(engine)

    def _tell_state(self, engine: _Engine, ended: Sequence[EngineOutput] = ()) -> None:
        """Empty figures, and whether the engine is up."""
        stats = SchedulerStats(plugin_metrics=[state_sample(is_up=engine.is_up)])
        self._put(EngineOutputs(list(ended), stats=stats, engine_index=engine.index))

    # -- engines that come and leave --

    @property
    def num_engines(self) -> int:
        return len(self._engines)

    def set_group(self, group: ExpertGroup | None) -> None:
        """Take what the engines that join next have in common."""
        before, self._group = self._group, group
        if before is not None:
            before.close()

    def join(self, clients: Sequence[EngineClient]) -> None:
        """Have these engines too. From another thread than the loop's. Raises `EngineDeadError` behind a shutdown."""
        joined: list[_Engine] = []

        def follow() -> None:
            with self._lock:
                self.check_open()
                for client in clients:
                    joined.append(_Engine(len(self._engines), len(self._engines), client))
                    self._engines.append(joined[-1])
                    self._loads.append(EngineLoad())
                self._router.resize(len(self._engines))
                loop = self._loop
            for engine in joined:
                if loop is not None:
                    loop.call_soon_threadsafe(self._follow_one, engine)
                if self._tell_started is not None:
                    self._tell_started(engine.client.info, engine.index)

        self._on_loop(follow)

    def leave(self, num_left: int, timeout_s: float) -> list[EngineClient]:
        """Have engines from this number on no more: they get no new requests, and up to `timeout_s` for those that they have. Returns
        their clients, which are to be closed. From another thread than the loop's. Raises `EngineDeadError` behind a shutdown."""
        with self._lock:
            leaving = self._engines[num_left:]
            if not leaving:
                return []
            for engine in leaving:
                engine.is_leaving = True
            self._drained.wait_for(
                lambda: self._is_closed or not any(engine.num_in_flight for engine in leaving), timeout_s
            )
            self.check_open()
        reason = EngineError(
            f"The number of engines was changed, and this request did not finish within {timeout_s:g} s. Send it again."
        )
        reason.status = 503

        def end() -> None:
            for engine in leaving:
                for task in engine.tasks:
                    task.cancel()
                with self._lock:
                    engine.is_up = False
                    ended = self._end_requests(engine, reason)
                self._put(EngineOutputs(ended, engine_index=engine.index))
            with self._lock:
                del self._engines[num_left:], self._loads[num_left:]
                self._router.resize(num_left)

        self._on_loop(end)
        return [engine.client for engine in leaving]

    def _on_loop(self, job: Callable[[], None]) -> None:
        """Run it where engines are followed, and wait for it."""
        with self._lock:
            loop = self._loop
        if loop is None:
            job()
            return
        done: Future[None] = Future()

        def run() -> None:
            try:
                job()
                done.set_result(None)
            except BaseException as error:
                done.set_exception(error)

        loop.call_soon_threadsafe(run)
        while not done.done():
            self.check_open()
            wait([done], 0.2)
        done.result()

    def check_open(self) -> None:
        """Raise `EngineDeadError` behind a shutdown."""
        if self._is_closed:
            raise EngineDeadError("The engine was shut down.")

    # -- all engines --

    def call(self, method: str, *args: Any, timeout_s: float = 60.0) -> Any:
        """To all engines that live; an engine that comes back later starts without what was loaded, and loads it when it is asked for.
        What changes the number of engines is for us: see `Scaling`."""
        if method in self._scaling.calls:
            return self._scaling.calls[method](*args)
        live = [engine for engine in self._engines if engine.client.error is None]
        results, errors = [], []
        for future in run_all(
            [partial(engine.client.call, method, *args, timeout_s=timeout_s) for engine in live]
        ):  # fmt: skip
            try:
                results.append(future.result())
            except EngineDeadError as error:
                errors.append(error)
        if not results:
            raise errors[0] if errors else EngineDeadError(str(self.error or "No engine is up."))
        if method == "reset_prefix_cache":
            with self._lock:
                for engine in live:
                    self._router.forget(engine.place)
        return joined(method, results)

    @property
    def error(self) -> Exception | None:
        """None while one engine at least takes requests."""
        if self._is_closed:
            return EngineDeadError("The engine was shut down.")
        if any(engine.is_up and not engine.is_leaving for engine in self._engines):
            return None
        if self._scaling.why_none is not None:
            return EngineDeadError(self._scaling.why_none)
        return EngineDeadError(" ".join(engine.down_reason() for engine in self._engines))

    @property
    def last_progress_age_s(self) -> float:
        """Age of the progress of the engine that is best off."""
        return min((engine.client.last_progress_age_s for engine in self._engines if engine.is_up), default=0.0)

    @property
    def silence_s(self) -> float:
        return min((engine.client.silence_s for engine in self._engines if engine.is_up), default=0.0)

    def shutdown(self, timeout_s: float = 10.0) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        loop = self._own_loop
        if loop is None:
            self._stop_following()
        else:
            loop.call_soon_threadsafe(self._stop_following)
            loop.call_soon_threadsafe(loop.call_later, 0.01, loop.stop)  # once what follows engines has ended
        with self._lock:
            self._drained.notify_all()
        stops = [partial(engine.client.shutdown, timeout_s) for engine in self._engines]
        for future in run_all(stops):
            with contextlib.suppress(EngineDeadError):
                future.result()
        if self._group is not None:
            self._group.close()
        with self._news:
            self._news.notify_all()

    def _stop_following(self) -> None:
        for task in [*self._tasks, *(task for engine in self._engines for task in engine.tasks)]:
            task.cancel()
        self._wake()


def joined(method: str, results: Sequence[Any]) -> Any:
    """One result of what each engine gave: all of them did it, the mean of shares, all that are loaded; else the first one's."""
    if method == "adapter.remove":
        return any(results)
    if method == "adapter.list":
        return list(dict.fromkeys(one for result in results for one in result))
    if method == "worker.expert_load":  # each has counted what its own ranks' experts were given
        return {
            name: [sum(loads) for loads in zip(*(one[name] for one in results), strict=True)] for name in results[0]
        }
    if all(isinstance(result, bool) for result in results):
        return all(results)
    if all(isinstance(result, float) for result in results):
        return sum(results) / len(results)
    return results[0]
