"""`RequestRouter`: picks one of several engines for each request. `LoadRouter`, the default."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from pelton.config import EngineConfig
from pelton.messages.report import EngineInfo
from pelton.messages.request import EngineRequest
from pelton_plugins.data_parallel.shares import CPU_STEP_COST, STEP_COST, by_length, num_certain_tokens

WAITING_WEIGHT = 4  # a request that waits costs its prompt yet


@dataclass(slots=True)
class EngineLoad:
    """An engine's requests, as it last told, and those that were sent to it since."""

    num_waiting: int = 0
    num_running: int = 0

    def with_sent(self, num_sent: int, num_in_flight: int) -> EngineLoad:
        """Return it with what was sent since and not told of, which waits there. num_in_flight: requests of the engine in all."""
        return EngineLoad(max(self.num_waiting + num_sent, num_in_flight - self.num_running), self.num_running)

    @property
    def score(self) -> int:
        return WAITING_WEIGHT * self.num_waiting + self.num_running


class RequestRouter(ABC):
    """One in each front end. Called by one thread at a time, for every request: it must not wait."""

    @abstractmethod
    def __init__(self, config: EngineConfig, num_engines: int) -> None: ...

    @abstractmethod
    def route(self, request: EngineRequest, loads: Sequence[EngineLoad], ready: Sequence[int]) -> int:
        """Return one of `ready`: places in `loads` of the engines that take requests, in order; at least one."""

    def route_batch(
        self, requests: Sequence[EngineRequest], loads: Sequence[EngineLoad], ready: Sequence[int], info: EngineInfo
    ) -> Sequence[int] | None:
        """Return a place for each of several requests that come at once, or None to have each routed for itself. info: of an engine."""
        return None

    def resize(self, num_engines: int) -> None:  # noqa: B027
        """There are so many engines from now on; those that stay keep their places."""

    def forget(self, engine: int) -> None:  # noqa: B027
        """The engine at this place holds no prefixes any more: it started anew, or its cache was reset."""


class LoadRouter(RequestRouter):
    """The lowest score; among equals the first. Requests that come at once to engines without work are shared out by their lengths, where
    these are certain."""

    def __init__(self, config: EngineConfig, num_engines: int) -> None:
        self._steps_together = config.parallel.enable_expert_parallel

    def route(self, request: EngineRequest, loads: Sequence[EngineLoad], ready: Sequence[int]) -> int:
        return min(ready, key=lambda engine: loads[engine].score)

    def route_batch(
        self, requests: Sequence[EngineRequest], loads: Sequence[EngineLoad], ready: Sequence[int], info: EngineInfo
    ) -> Sequence[int] | None:
        if self._steps_together or any(loads[engine].score for engine in ready):
            return None
        sizes = []
        for request in requests:
            count = num_certain_tokens(request)
            if count is None:
                return None
            sizes.append((max(len(request.prompt_token_ids), 1), count))
        step_cost = CPU_STEP_COST if info.report.platform == "cpu" else STEP_COST
        shares = by_length(sizes, len(ready), info.max_num_seqs, step_cost)
        return None if shares is None else [ready[share] for share in shares]
