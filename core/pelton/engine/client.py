"""`EngineClient`: how every front end talks to an engine, in this process or another.

Implementations: `InProcessClient` (`engine/in_process.py`), which steps the core in the caller's thread, and
`ProcessClient` (`engine/process_client.py`), which talks msgpack over ZMQ to `engine/process.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from pelton.config import EngineConfig
from pelton.errors import EngineDeadError
from pelton.messages.outputs import EngineOutputs, FinishReason
from pelton.messages.report import EngineInfo
from pelton.messages.request import EngineRequest
from pelton.model.resolved import ResolvedModel
from pelton.plugins import Plugins, make


class EngineClient(ABC):
    """Synchronous calls return at once unless they say otherwise. Raises `EngineDeadError` once the engine is gone."""

    info: EngineInfo

    @abstractmethod
    def add_request(self, request: EngineRequest) -> None: ...

    def add_requests(self, requests: Sequence[EngineRequest]) -> None:
        """Add several, in one message where the engine is in another process."""
        for request in requests:
            self.add_request(request)

    @abstractmethod
    def finish_requests(self, request_ids: Sequence[str], reason: FinishReason = FinishReason.ABORT) -> None:
        """Abort, or end with STOP after a stop string was found. Ids that are finished are not an error."""

    @abstractmethod
    def get_outputs(self, timeout_s: float | None = None) -> EngineOutputs:
        """The next outputs: steps the engine (in process), or waits for a message. Empty after `timeout_s`."""

    @abstractmethod
    async def get_outputs_async(self) -> list[EngineOutputs]:
        """All outputs that have come, in their order; waits for some without blocking the event loop."""

    @abstractmethod
    def call(self, method: str, *args: Any, timeout_s: float = 60.0) -> Any:
        """Utility call into the engine core between steps: `reset_prefix_cache`, `kv_cache_usage`, `worker.<method>`."""

    @property
    @abstractmethod
    def error(self) -> Exception | None:
        """Why the engine is dead; None while it lives."""

    @property
    def has_work(self) -> bool:
        """True while `get_outputs` has something to do or to tell at once. Work of another process is its own."""
        return False

    @property
    def last_progress_age_s(self) -> float:
        """How long the engine has been in one step, or silent; about 0 when all is well."""
        return 0.0

    @property
    def silence_s(self) -> float:
        """Since the engine's process gave its last sign of life, which comes every second whatever it does; 0 in process."""
        return 0.0

    def share_load(self, num_in_flight: int) -> int:
        """Tell other front ends of the engine how many requests of this one it has; returns how many it has of theirs."""
        return 0

    def kill(self, reason: str) -> None:  # noqa: B027
        """Kill an engine that hangs; `reason` becomes part of its error. Does nothing where another process owns the engine."""

    def supervise(self, max_restarts: int, started: Callable[[EngineInfo, int], None]) -> None:  # noqa: B027
        """For several engines: how often in a row one is started again, and who hears of each start but the very first. Called once."""

    def restart(self) -> None:
        """Start a new engine in place of a dead one; blocks until it is ready. Raises what stops it."""
        raise EngineDeadError(f"{type(self).__name__} cannot start its engine again.")

    @abstractmethod
    def shutdown(self, timeout_s: float = 10.0) -> None:
        """End the engine; prompt and idempotent. Unfinished requests are dropped."""


EngineStarter = Callable[..., EngineClient]
"""From (config, model, plugins). With the keyword `connect` the engine's process is started by that, in place of `EngineConnection`."""


def start_process(config: EngineConfig, model: ResolvedModel, plugins: Plugins, **options: Any) -> EngineClient:
    """Start an engine in a process of its own."""
    from pelton.engine.process_client import ProcessClient

    return ProcessClient(config, model, plugins, **options)


def start_engines(config: EngineConfig, model: ResolvedModel, plugins: Plugins, start: EngineStarter) -> EngineClient:
    """Start one engine by `start`, or several behind one client."""
    if not config.parallel.has_several_engines:
        return start(config, model, plugins)
    entry = plugins.find(
        "pelton_engine_clients", config.parallel.data_parallel_routing, setting="data_parallel_routing"
    )
    return make(entry, EngineClient, config, model, plugins, start)  # type: ignore[type-abstract]
