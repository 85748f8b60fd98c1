"""Counters, gauges and histograms for Prometheus, per engine and without a global registry.

`record` only adds to plain numbers; label sets, cumulative buckets and text are made when someone looks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

from pelton import __version__
from pelton.config import EngineConfig
from pelton.metrics.snapshot import Counter, Gauge, Metric
from pelton.metrics.stats import KV_FETCH_STAGES, WAIT, FinishedRequestStats, IterationStats, SchedulerStats
from pelton_plugins.histograms.buckets import BucketCounts
from pelton_plugins.stat_loggers.families import (
    FAMILIES,
    SLEEP_STATES,
    UP_TO_MODEL_LEN,
    Family,
    help_text,
    is_shown,
    minor_version,
)
from pelton_plugins.stat_loggers.work import Work, num_computed_prompt_tokens

if TYPE_CHECKING:
    from pelton.messages.report import EngineInfo

DEFAULT_MODEL_LEN = 131_072  # for the token buckets, until the engine says its own
_OF_FINISHED = {
    "request_prompt_tokens": "num_prompt_tokens",
    "request_generation_tokens": "num_generation_tokens",
    "request_max_num_generation_tokens": "max_num_generation_tokens",
    "request_params_max_tokens": "max_tokens",
    "request_num_preemptions": "num_preemptions",
    "e2e_request_latency_seconds": "e2e_latency_s",
    "request_queue_time_seconds": "queue_time_s",
    "request_prefill_time_seconds": "prefill_time_s",
    "request_decode_time_seconds": "decode_time_s",
    "request_inference_time_seconds": "inference_time_s",
    "request_time_per_output_token_seconds": "mean_time_per_output_token_s",
}
"""Histogram to the field of `FinishedRequestStats` that it observes, unless that is None."""


class PrometheusLogger:
    """Counts one engine. `snapshot` gives the values; the HTTP server renders them."""

    def __init__(
        self,
        config: EngineConfig,
        engine_index: int = 0,
        *,
        families: Sequence[Family] = FAMILIES,
        version: str = __version__,
    ) -> None:
        observability = config.observability
        self._prefix = observability.metrics_prefix
        self._labels = {
            "model_name": (config.model.served_model_name or [config.model.model])[0],
            "engine": str(engine_index),
        }
        hidden = observability.show_hidden_metrics_for_version
        show_hidden_for = minor_version(hidden, "show_hidden_metrics_for_version") if hidden else None
        self._families = [
            family
            for family in families
            if is_shown(family, minor_version(version), show_hidden_for)
            and (family.when is None or getattr(config.kv_cache, family.when))
        ]
        self._cache_config: dict[str, str] = {}
        self._max_loras = config.lora.max_loras if config.lora.enable_lora else 0
        self._work: Work | None = None
        self._adapters: tuple[dict[str, int], dict[str, int]] = ({}, {})  # running, waiting
        self._lock = threading.Lock()
        self._values: dict[tuple[str, str | None], float] = {}
        self._buckets: dict[tuple[str, str | None], BucketCounts] = {}
        self._bounds: dict[str, tuple[float, ...]] = {}
        self._of_finished: list[tuple[Callable[[FinishedRequestStats], float | None], BucketCounts]] = []
        self._make_series(config.model.max_model_len or DEFAULT_MODEL_LEN)

    def _make_series(self, max_model_len: int) -> None:
        for family in self._families:
            labels: tuple[str | None, ...] = family.label_values if family.label else (None,)
            if family.kind != "histogram":
                for value in labels:
                    self._values.setdefault((family.name, value), 0.0)
                continue
            bounds = tuple(one_two_five(max_model_len)) if family.buckets == UP_TO_MODEL_LEN else family.buckets
            assert bounds is not None
            self._bounds[family.name] = bounds
            for value in labels:
                known = self._buckets.get((family.name, value))
                if known is None or (known.bounds != bounds and not known.count):
                    self._buckets[family.name, value] = BucketCounts(bounds)
        self._of_finished = [
            (attrgetter(field), self._buckets[name, None])
            for name, field in _OF_FINISHED.items()
            if (name, None) in self._buckets  # else it is not exported with these settings
        ]

    # What the engine tells

    def engine_started(self, info: EngineInfo) -> None:
        with self._lock:
            self._make_series(info.max_model_len)
            self._set_sleep(0)
            if self._cache_config:  # not the first
                self._add("engine_restarts", 1)
            self._work = Work(info.report)
            for phase, seconds in info.phase_s.items():
                self._values["startup_phase_seconds", phase] = seconds
            self._cache_config = {
                **info.cache_config,
                "num_gpu_blocks": str(info.num_blocks),
                "block_size": str(info.block_size),
            }

    def record(self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats) -> None:
        with self._lock:
            if scheduler_stats is not None:
                self._record_scheduler(scheduler_stats)
            self._record_iteration(iteration_stats)

    def log(self) -> None:
        """Prometheus asks; nothing is pushed."""

    # Bookkeeping, under the lock

    def _record_scheduler(self, stats: SchedulerStats) -> None:
        values = self._values
        values["num_requests_running", None] = stats.num_running_reqs
        values["num_requests_waiting", None] = stats.num_waiting_reqs
        values["num_requests_waiting_by_reason", "deferred"] = stats.num_deferred_reqs
        values["num_requests_waiting_by_reason", "capacity"] = stats.num_waiting_reqs - stats.num_deferred_reqs
        values["kv_cache_usage_perc", None] = stats.kv_cache_usage
        for stage in KV_FETCH_STAGES:
            values["num_requests_kv_fetch_by_stage", stage] = stats.kv_fetch_reqs.get(stage, 0)
        if not values["engine_sleep_state", SLEEP_STATES[stats.sleep_level]]:
            self._set_sleep(stats.sleep_level)
        self._adapters = stats.running_adapters, stats.waiting_adapters
        self._add("prefix_cache_queries", stats.prefix_cache_queries)
        self._add("prefix_cache_hits", stats.prefix_cache_hits)
        self._add("external_prefix_cache_queries", stats.external_prefix_cache_queries)
        self._add("external_prefix_cache_hits", stats.external_prefix_cache_hits)
        self._add("corrupted_requests", stats.num_corrupted_reqs)
        self._add("num_preemptions", stats.num_preemptions)
        self._add("spec_decode_num_drafts", stats.spec_num_drafts)
        self._add("spec_decode_num_draft_tokens", stats.spec_num_draft_tokens)
        self._add("spec_decode_num_accepted_tokens", stats.spec_num_accepted_tokens)
        for position, count in enumerate(stats.spec_num_accepted_by_position):
            self._add("spec_decode_num_accepted_tokens_per_pos", count, str(position))
        self._add("spec_decode_num_pauses", stats.spec_num_pauses)
        # Several steps may have passed since the last record: the mean of those stands for each of them.
        steps = max(stats.num_steps, 1)
        if self._work is not None and stats.num_scheduled_tokens:
            self._add("estimated_read_bytes_per_gpu", steps * self._work.weights_bytes)
        if stats.num_scheduled_tokens:
            self._observe_times("iteration_tokens_total", None, stats.num_scheduled_tokens / steps, steps)
        for stage, seconds in stats.host_time_s.items():
            if stage == WAIT:
                self._observe_times("step_device_wait_seconds", None, seconds / steps, steps)
            else:
                self._observe_times("step_host_seconds", stage, seconds / steps, steps)
        self._observe("grammar_compile_seconds", stats.grammar_compile_s)
        self._observe("kv_block_lifetime_seconds", stats.kv_block_lifetimes_s)
        self._observe("kv_block_idle_before_evict_seconds", stats.kv_block_idle_s)
        self._observe("kv_block_reuse_gap_seconds", stats.kv_block_reuse_gaps_s)

    def _set_sleep(self, level: int) -> None:
        for place, state in enumerate(SLEEP_STATES):
            self._values["engine_sleep_state", state] = float(place == level)

    def _record_iteration(self, stats: IterationStats) -> None:
        self._add("prompt_tokens", stats.num_prompt_tokens)
        self._add("prompt_tokens_cached", stats.num_cached_prompt_tokens)
        brought = stats.num_external_prompt_tokens
        found = stats.num_cached_prompt_tokens - brought
        for source, name, amount in (
            ("local_cache_hit", "device", found), ("external_kv_transfer", "external_unspecified", brought),
        ):  # fmt: skip
            self._add("prompt_tokens_by_source", amount, source)
            self._add("prompt_tokens_cached_by_source", amount, name)
        self._add("prompt_tokens_by_source", stats.num_prompt_tokens - stats.num_cached_prompt_tokens, "local_compute")
        self._add("generation_tokens", stats.num_generation_tokens)
        self._observe("time_to_first_token_seconds", stats.time_to_first_tokens_s)
        self._observe("inter_token_latency_seconds", stats.inter_token_latencies_s)
        for reason, count in stats.num_rejected_reqs.items():
            self._add("admission_rejections", count, reason)
        for finished in stats.finished_requests:
            self._record_finished(finished)

    def _record_finished(self, stats: FinishedRequestStats) -> None:
        self._add("request_success", 1, stats.finish_reason)
        if self._work is not None:
            for name, amount in self._work.of(stats).items():
                self._add(name, amount)
        for value_of, series in self._of_finished:
            value = value_of(stats)
            if value is not None:
                series.observe(value)
        if stats.max_num_generation_tokens is not None:  # with the sample that ends last
            self._observe("request_params_n", (stats.n,))
        self._observe("request_prefill_kv_computed_tokens", (num_computed_prompt_tokens(stats),))

    def _add(self, name: str, amount: float, label: str | None = None) -> None:
        if amount:
            self._values[name, label] = self._values.get((name, label), 0.0) + amount

    def _observe(self, name: str, values: Sequence[float]) -> None:
        series = self._buckets.get((name, None)) if values else None
        if series is not None:  # None: the family is not exported with these settings
            series.observe_all(values)

    def _observe_times(self, name: str, label: str | None, value: float, times: int) -> None:
        series = self._buckets.get((name, label))
        if series is None:
            if name not in self._bounds:
                return
            series = self._buckets[name, label] = BucketCounts(self._bounds[name])
        series.observe(value, times)

    # What others see

    def snapshot(self) -> list[Metric]:
        with self._lock:
            metrics = [metric for family in self._families for metric in self._series_of(family)]
            if self._cache_config:
                metrics.append(
                    Gauge(
                        name=self._prefix + "cache_config_info",
                        labels={**self._cache_config, **self._labels},
                        documentation="Settings of the KV cache, as labels; always 1.",
                        value=1.0,
                    )
                )
            if self._max_loras:
                metrics.append(self._adapter_info())
        return metrics

    def _adapter_info(self) -> Gauge:
        """The adapters of now, as labels; the value is the time, so that dashboards find the newest."""
        running, waiting = (",".join(sorted(names)) for names in self._adapters)
        return Gauge(
            name=self._prefix + "lora_requests_info",
            labels={
                "max_lora": str(self._max_loras), "running_lora_adapters": running, "waiting_lora_adapters": waiting,
                **self._labels,
            },
            documentation="Adapters of running and of waiting requests, as labels; the value is the time in seconds.",
            value=time.time(),
        )  # fmt: skip

    def _series_of(self, family: Family) -> list[Metric]:
        name, text = self._prefix + family.name, help_text(family)
        found: list[Metric] = []
        if family.kind == "histogram":
            for (owner, label), series in self._buckets.items():
                if owner == family.name:
                    found.append(series.as_metric(name, text, self._labels_of(family, label)))
            return found
        make = Counter if family.kind == "counter" else Gauge
        for (owner, label), value in self._values.items():
            if owner == family.name:
                found.append(make(name=name, labels=self._labels_of(family, label), documentation=text, value=value))
        return found

    def _labels_of(self, family: Family, label: str | None) -> dict[str, str]:
        if family.label is None or label is None:
            return self._labels
        return {**self._labels, family.label: label}


def one_two_five(maximum: int) -> list[float]:
    """1, 2, 5, 10, 20, 50, ... up to and including `maximum`."""
    bounds: list[float] = []
    scale = 1
    while scale <= maximum:
        bounds += [scale * step for step in (1, 2, 5) if scale * step <= maximum]
        scale *= 10
    return bounds
