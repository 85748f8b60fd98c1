"""Interface of a stat logger."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from pelton.config import EngineConfig
from pelton.metrics.snapshot import Metric
from pelton.metrics.stats import IterationStats, SchedulerStats

if TYPE_CHECKING:
    from pelton.messages.report import EngineInfo


class StatLogger(Protocol):
    """One instance per engine, made in the front-end process as `cls(config=config, engine_index=0)`.

    An exception from any method is logged with the logger's name and never reaches a request.
    """

    def __init__(self, config: EngineConfig, engine_index: int = 0) -> None: ...

    def record(self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats) -> None:
        """Called for every batch of engine outputs. Must not block."""

    def log(self) -> None:
        """Called every `log_stats_interval_s` while the engine is in use, and once at shutdown.

        `LLM` and `LLMEngine` call it after a step, and that of the built-in loggers only when log lines were asked for.
        """


@runtime_checkable
class ReportsStart(Protocol):
    """A stat logger may also want to know what the engine found when it started."""

    def engine_started(self, info: EngineInfo) -> None:
        """Called once, when the engine is ready, and again when a dead engine came back."""


@runtime_checkable
class OffersSnapshot(Protocol):
    """A stat logger may also publish: its metrics are part of `LLM.get_metrics()` and of `GET /metrics`."""

    def snapshot(self) -> list[Metric]:
        """Return what was counted so far. Called from the thread that calls `record`."""
