"""A server's engines on one time line, behind the router that `--data-parallel-routing` names; and many servers side by side."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from typing import Any

from pelton.config import EngineConfig
from pelton.errors import ConfigError, RequestError
from pelton.plugins import Plugins
from pelton_plugins.bench.simulator.engine import Figures, SimulatedEngine, engine_request
from pelton_plugins.bench.simulator.paths import Paths
from pelton_plugins.bench.trace import TraceRequest


class Clock:
    """Seconds of the simulation."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class SimulatedServer:
    """Engines that share the requests of one trace."""

    def __init__(
        self,
        config: EngineConfig,
        plugins: Plugins,
        make_engine: Callable[[Figures], SimulatedEngine],
        figures: Figures,
        clock: Clock,
        paths: Paths,
    ) -> None:
        size = config.parallel.data_parallel_size
        self._figures, self._clock, self._paths = figures, clock, paths
        self._engines = [make_engine(figures) for _ in range(size)]
        self._num_sent = [0] * size  # to each engine since it told of itself
        self._events: list[tuple[float, int]] = []  # an engine's next event, or an older one of it
        self._router: Any = None
        if size > 1:
            name = config.parallel.data_parallel_routing
            client = plugins.find("pelton_engine_clients", name, setting="data_parallel_routing").resolve()
            try:
                self._router, self._load_class = client.router_class(config, size), client.load_class
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
        place = 0 if self._router is None else self._route(made)
        engine = self._engines[place]
        try:
            engine.add(made, now, request.arrival_s)
        except RequestError:
            self._figures.counts["refused"] += 1
            return
        self._figures.counts["input_tokens"] += request.num_prompt_tokens
        self._num_sent[place] += 1
        self._note(place)

    def _route(self, request: Any) -> int:
        loads = [
            self._load_class(engine.num_waiting, engine.num_running).with_sent(sent, engine.num_in_flight)
            for engine, sent in zip(self._engines, self._num_sent, strict=True)
        ]
        chosen: int = self._router.route(request, loads, range(len(loads)))
        return chosen

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
            self._clock.now = due
            engine.advance()
            self._num_sent[place] = 0
            self._note(place)
