"""Write one JSON line an interval: what runs, what was finished, how long first tokens took."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from pelton.config import EngineConfig
from pelton.config.plugin_settings import read_settings
from pelton.metrics.stats import IterationStats, SchedulerStats


class JsonlStatsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of this plugin: `--plugin-config.jsonl_stats.path FILE`."""

    path: str = "pelton-stats.jsonl"
    """File that lines are added to."""


class Line(msgspec.Struct, kw_only=True):
    """One interval. Counters are of the interval, gauges of its last step."""

    time: float
    engine: int
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_finished: int = 0
    num_preemptions: int = 0
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    kv_cache_usage: float = 0.0
    time_to_first_tokens_s: list[float] = []


class JsonlStatLogger:
    """One instance per engine. `record` only adds up; `log` writes."""

    def __init__(self, config: EngineConfig, engine_index: int = 0) -> None:
        self._path = Path(read_settings(config, "jsonl_stats", JsonlStatsConfig).path)
        self._engine_index = engine_index
        self._line = self._new_line()

    def _new_line(self) -> Line:
        return Line(time=time.time(), engine=self._engine_index)

    def record(self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats) -> None:
        line = self._line
        line.num_prompt_tokens += iteration_stats.num_prompt_tokens
        line.num_generation_tokens += iteration_stats.num_generation_tokens
        line.num_finished += len(iteration_stats.finished_requests)
        line.time_to_first_tokens_s += iteration_stats.time_to_first_tokens_s
        if scheduler_stats is not None:
            line.num_steps += scheduler_stats.num_steps
            line.num_preemptions += scheduler_stats.num_preemptions
            line.num_running_reqs = scheduler_stats.num_running_reqs
            line.num_waiting_reqs = scheduler_stats.num_waiting_reqs
            line.kv_cache_usage = scheduler_stats.kv_cache_usage

    def log(self) -> None:
        line, self._line = self._line, self._new_line()
        line.time = time.time()
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")
