"""Makes one engine's stat loggers from plugins' entries and calls them, each guarded from the others."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from pelton.config import EngineConfig
from pelton.errors import PluginError
from pelton.metrics.interface import OffersSnapshot, ReportsStart, StatLogger
from pelton.metrics.plugin_metrics import PluginTotals
from pelton.metrics.snapshot import Metric
from pelton.metrics.stats import IterationStats, SchedulerStats
from pelton.plugins import FIX_IT, calling

if TYPE_CHECKING:
    from pelton.entries import StatLoggerEntry
    from pelton.messages.report import EngineInfo
    from pelton.plugins import Plugins

logger = logging.getLogger(__name__)


class StatLoggers:
    """All stat loggers of an engine, and with the first one those of others. None with `disable_log_stats`; with quiet the default
    ones only count. engine_index: of one engine alone."""

    def __init__(
        self, config: EngineConfig, plugins: Plugins, engine_index: int | None = None, *, quiet: bool = False
    ) -> None:
        self._others: dict[int, StatLoggers] = {}
        self._make = partial(StatLoggers, config, plugins, quiet=quiet)
        self._is_elastic = engine_index is None and config.parallel.enable_elastic_ep
        if engine_index is None:
            engine_index, *more = config.parallel.served_indexes
            self._others = {index: self._make(index) for index in more}
        entries = [] if config.observability.disable_log_stats else chosen_entries(plugins)
        self.loggers: dict[str, StatLogger] = {}
        for entry in entries:
            with calling(entry):
                made = self.loggers[entry.name] = entry.resolve()(config=config, engine_index=engine_index)
            for method in ("record", "log"):
                if not callable(getattr(made, method, None)):
                    raise PluginError(f"{entry} has no {method}(); see pelton.metrics.interface.StatLogger. {FIX_IT}")
        self._silent = {entry.name for entry in entries if quiet and entry.is_default}
        self._failed: set[tuple[str, str]] = set()
        name = (config.model.served_model_name or [config.model.model])[0]
        labels = {"model_name": name, "engine": str(engine_index)}
        self._of_plugins = PluginTotals(config.observability.metrics_prefix, labels)

    def __bool__(self) -> bool:
        return bool(self.loggers)

    def of(self, engine_index: int) -> StatLoggers:
        if self._is_elastic and engine_index and engine_index not in self._others:
            return self._make(engine_index)  # it has left: its last figures are nobody's
        return self._others.get(engine_index, self)

    def started(self, info: EngineInfo, engine_index: int) -> None:
        """An engine has started, perhaps one that joined."""
        if self._is_elastic and engine_index and engine_index not in self._others:
            self._others[engine_index] = self._make(engine_index)
        self.of(engine_index).engine_started(info)

    def keep(self, num_engines: int) -> None:
        """Forget engines from this number on."""
        self._others = {index: other for index, other in self._others.items() if index < num_engines}

    def engine_started(self, info: EngineInfo) -> None:
        for name, stat_logger in self.loggers.items():
            if isinstance(stat_logger, ReportsStart):
                self._guarded(name, stat_logger.engine_started, info)

    def record(self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats) -> None:
        if scheduler_stats is not None and scheduler_stats.plugin_metrics:
            self._of_plugins.add(scheduler_stats.plugin_metrics)
        for name, stat_logger in self.loggers.items():
            try:  # inlined: once per step
                stat_logger.record(scheduler_stats, iteration_stats)
            except Exception:
                self._report(name, "record")

    def log(self) -> None:
        for name, stat_logger in self.loggers.items():
            if name not in self._silent:
                self._guarded(name, stat_logger.log)
        for other in self._others.values():
            other.log()

    def snapshot(self) -> list[Metric]:
        """The metrics of every logger that publishes, and of plugins in the engine's process."""
        publishing = [(name, one) for name, one in self.loggers.items() if isinstance(one, OffersSnapshot)]
        found = [metric for name, one in publishing for metric in self._guarded(name, snapshot_of, one) or ()]
        found += self._of_plugins.snapshot(metric.name for metric in found)
        return found + [metric for other in self._others.values() for metric in other.snapshot()]

    def _guarded(self, name: str, method: Callable[..., Any], *args: Any) -> Any:
        try:
            return method(*args)
        except Exception:
            self._report(name, method.__name__)
            return None

    def _report(self, name: str, method: str) -> None:
        """Once with its traceback; a logger that fails at every step must not fill the disk."""
        if (name, method) not in self._failed:
            self._failed.add((name, method))
            logger.exception("Stat logger %r failed in %s(); later failures there are not shown.", name, method)


def snapshot_of(stat_logger: OffersSnapshot) -> list[Metric]:
    found = list(stat_logger.snapshot())
    if not all(isinstance(metric, Metric) for metric in found):
        raise TypeError(f"it gives {found!r}; expected metrics of pelton.metrics.snapshot")
    return found


def chosen_entries(plugins: Plugins) -> list[StatLoggerEntry]:
    """Every offered logger; the default ones are left out when a custom one says that it replaces them."""
    entries: list[StatLoggerEntry] = plugins.entries("pelton_stat_loggers")
    replaced = any(entry.replaces_defaults for entry in entries)
    return [entry for entry in entries if not (replaced and entry.is_default)]
