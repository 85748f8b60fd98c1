"""The promise of a stat logger."""

from __future__ import annotations

from typing import Protocol

from pelton.config import EngineConfig
from pelton.metrics.stats import IterationStats, SchedulerStats


class StatLogger(Protocol):
    """One instance per engine, made in the front-end process as `cls(config, engine_index)`.

    An exception from any method is logged with the logger's name and never reaches a request.
    """

    def __init__(self, config: EngineConfig, engine_index: int = 0) -> None: ...

    def record(self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats) -> None:
        """Called for every batch of engine outputs. Must not block."""

    def log(self) -> None:
        """Called every `log_stats_interval_s` while the engine is in use, and once at shutdown."""
