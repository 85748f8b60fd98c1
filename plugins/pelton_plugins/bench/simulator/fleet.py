"""A server's engines on one time line, behind the router that `--data-parallel-routing` names; and many servers side by side."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pelton.config import EngineConfig
from pelton.errors import ConfigError, RequestError
from pelton.plugins import Plugins
from pelton_plugins.bench.simulator.engine import Figures, SimulatedEngine, engine_request
from pelton_plugins.bench.simulator.paths import Paths
from pelton_plugins.bench.trace import TraceRequest

LOADS_INTERVAL_S = 0.02
"""Between two reports of what engines have to do, from the owner of several API processes."""


class Clock:
    """Seconds of the simulation."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class _Front:
    """An API process with its router: loads of the engines as it was last told, what it has sent since, and how many requests each has."""

    def __init__(self, number: int, router: Any, load_class: Any, size: int) -> None:
        self.number, self._router = number, router
        self._load_class = load_class
        self._told = [(0, 0)] * size
        self._num_sent = [0] * size

    def tell(self, place: int, load: tuple[int, int]) -> None:
        self._told[place], self._num_sent[place] = load, 0

    def route(self, request: Any, engines: Sequence[SimulatedEngine]) -> int:
        loads = []
        for place, engine in enumerate(engines):
            num_sent = min(self._num_sent[place], engine.num_of_front.get(self.number, 0))  # some may have ended since
            loads.append(self._load_class(*self._told[place]).with_sent(num_sent, engine.num_in_flight))
        chosen: int = self._router.route(request, loads, range(len(engines)))
        self._num_sent[chosen] += 1
        return chosen


class SimulatedServer:
    """Engines that share the requests of one trace, behind so many API processes."""

    def __init__(
        self,
        config: EngineConfig,
        plugins: Plugins,
        make_engine: Callable[[Figures], SimulatedEngine],
        figures: Figures,
        clock: Clock,
        paths: Paths,
        num_fronts: int = 1,
    ) -> None:
        size = config.parallel.data_parallel_size
        self._figures, self._clock, self._paths = figures, clock, paths
        self._engines = [make_engine(figures) for _ in range(size)]
        self._events: list[tuple[float, int]] = []  # an engine's next event, or an older one of it
        self._fronts: list[_Front] = []
        self._next_report_s = LOADS_INTERVAL_S
        self._told = [(0, 0)] * size  # to all API processes, where there are several
        if size > 1:
            name = config.parallel.data_parallel_routing
            client = plugins.find("pelton_engine_clients", name, setting="data_parallel_routing").resolve()
            try:
                self._fronts = [
                    _Front(number, client.router_class(config, size), client.load_class, size)
                    for number in range(num_fronts)
                ]
            except AttributeError as error:
                raise ConfigError(
                    f"data_parallel_routing is {name!r}, which has no router_class for the simulator."
                ) from error

    def run(self, requests: Iterable[TraceRequest], vocab_size: int, overhead_s: float = 0.0) -> None:
        """Serve them to the end. overhead_s: between the client's sending and the engine's receipt, besides what the paths say."""
        coming: list[tuple[float, int, TraceRequest]] = []  # that are on their way to an engine
        for number, request in enumerate(requests):
            self._deliver(coming, request.arrival_s, vocab_size)
            self._advance(request.arrival_s)
            most = max(engine.num_in_flight for engine in self._engines)
            arrival = request.arrival_s + overhead_s + self._paths.to_engine(most)
            heapq.heappush(coming, (arrival, number, request))
        self._deliver(coming, math.inf, vocab_size)
        self._advance(None)

    def _deliver(self, coming: list[tuple[float, int, TraceRequest]], until: float, vocab_size: int) -> None:
        """Give the engines what comes before `until`, each at its time."""
        while coming and coming[0][0] <= until:
            arrival, number, request = heapq.heappop(coming)
            self._advance(arrival)
            self._clock.now = arrival
            self._add(request, number, arrival, vocab_size)

    def _add(self, request: TraceRequest, number: int, now: float, vocab_size: int) -> None:
        made = engine_request(request, number, vocab_size)
        place = front = 0
        if self._fronts:
            front = self._paths.rng.randrange(len(self._fronts))  # the kernel's choice among the sockets of a port
            place = self._fronts[front].route(made, self._engines)
        engine = self._engines[place]
        try:
            engine.add(made, now, request.arrival_s, front)
        except RequestError:
            self._figures.counts["refused"] += 1
            return
        self._figures.counts["input_tokens"] += request.num_prompt_tokens
        self._note(place)

    def _tell_loads(self, now: float) -> None:
        """Several API processes hear now and then of the engines whose load has changed; one hears of each step."""
        if len(self._fronts) < 2 or now < self._next_report_s:
            return
        self._next_report_s = now - now % LOADS_INTERVAL_S + LOADS_INTERVAL_S
        for place, engine in enumerate(self._engines):
            load = engine.num_waiting, engine.num_running
            if load != self._told[place]:
                self._told[place] = load
                for front in self._fronts:
                    front.tell(place, load)

    def _note(self, place: int) -> None:
        due = self._engines[place].next_event
        if due is not None:
            heapq.heappush(self._events, (due, place))

    def _advance(self, until: float | None) -> None:
        """Let all happen that happens before `until`."""
        events = self._events
        while events and (until is None or events[0][0] <= until):
            due, place = heapq.heappop(events)
            engine = self._engines[place]
            if engine.next_event != due:
                continue  # it was put off or came earlier, and has an event of its own
            self._tell_loads(due)
            self._clock.now = due
            engine.advance()
            if len(self._fronts) == 1:
                self._fronts[0].tell(place, (engine.num_waiting, engine.num_running))
            self._note(place)
        if until is not None:
            self._tell_loads(until)
