"""Counters and gauges of plugins that run in the engine's process: they travel with its stats, and stand on /metrics.

A plugin gets the engine's `PluginMetrics` with the context that its factory takes, declares what it counts once, and
counts from any thread. In the front end a stat logger does the same by `snapshot` (`metrics.interface`).
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterable, Sequence

import msgspec

from pelton.errors import PluginError
from pelton.logging import get_logger
from pelton.metrics.snapshot import Counter, Gauge, Metric

COUNTER, GAUGE = "counter", "gauge"

logger = get_logger(__name__)


class PluginSample(msgspec.Struct, array_like=True):
    """The gain of one series since the last sample, or a gauge's value now."""

    name: str
    kind: str
    documentation: str
    labels: dict[str, str]
    value: float
    declared_in: str = ""
    """The module, for the log."""


class PluginMetric:
    """One family of a plugin: a value for each combination of its labels."""

    def __init__(self, name: str, kind: str, documentation: str, label_names: Sequence[str]) -> None:
        self.name, self.kind, self.documentation = name, kind, documentation
        self.label_names = tuple(label_names)
        self.declared_in = ""
        self._changed: dict[tuple[str, ...], float] = {} if label_names else {(): 0.0}
        self._lock = threading.Lock()

    def inc(self, amount: float = 1.0, **labels: str) -> None:
        """Count. Raises `PluginError` for a gauge, other labels, or an amount below 0."""
        if self.kind != COUNTER or amount < 0:
            raise PluginError(f"Metric {self.name!r} is a {self.kind}, which cannot be counted up by {amount}.")
        key = self._key(labels)
        with self._lock:
            self._changed[key] = self._changed.get(key, 0.0) + amount

    def set(self, value: float, **labels: str) -> None:
        """Set a gauge. Raises `PluginError` for a counter, or other labels."""
        if self.kind != GAUGE:
            raise PluginError(f"Metric {self.name!r} is a {self.kind}, which cannot be set.")
        with self._lock:
            self._changed[self._key(labels)] = value

    def take(self) -> list[PluginSample]:
        with self._lock:
            changed, self._changed = self._changed, {}
        facts = self.name, self.kind, self.documentation
        return [
            PluginSample(*facts, dict(zip(self.label_names, key, strict=True)), float(value), self.declared_in)
            for key, value in changed.items()
        ]

    def _key(self, labels: dict[str, str]) -> tuple[str, ...]:
        if labels.keys() != set(self.label_names):
            raise PluginError(
                f"Metric {self.name!r} is given labels {sorted(labels)}; it has {sorted(self.label_names) or 'none'}."
            )
        return tuple(str(labels[name]) for name in self.label_names)


class PluginMetrics:
    """All of one engine's plugins."""

    def __init__(self) -> None:
        self._metrics: dict[str, PluginMetric] = {}

    def counter(self, name: str, documentation: str, label_names: Sequence[str] = ()) -> PluginMetric:
        """Declare a counter, shown as `<metrics_prefix><name>_total`. One that exists already is given again."""
        return self._declare(name, COUNTER, documentation, label_names)

    def gauge(self, name: str, documentation: str, label_names: Sequence[str] = ()) -> PluginMetric:
        """Declare a gauge, shown as `<metrics_prefix><name>`."""
        return self._declare(name, GAUGE, documentation, label_names)

    def take(self) -> list[PluginSample]:
        """Return what changed since the last call."""
        return [sample for metric in self._metrics.values() for sample in metric.take()]

    def _declare(self, name: str, kind: str, documentation: str, label_names: Sequence[str]) -> PluginMetric:
        if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or name.endswith("_total") or not documentation:
            raise PluginError(
                f"Metric {name!r} needs a name of small letters, digits and _, without _total, and a line of documentation."
            )
        found = self._metrics.setdefault(name, PluginMetric(name, kind, documentation, label_names))
        found.declared_in = sys._getframe(2).f_globals.get("__name__", "")  # of the call of `counter` or `gauge`
        if (found.kind, found.label_names) != (kind, tuple(label_names)):
            raise PluginError(
                f"Metric {name!r} is declared twice: a {found.kind} with labels {found.label_names}, and a {kind} with "
                f"{tuple(label_names)}."
            )
        return found


class PluginTotals:
    """The front end's side: totals over all samples of one engine, which survive its restart."""

    def __init__(self, prefix: str, labels: dict[str, str]) -> None:
        self._prefix, self._labels = prefix, labels
        self._totals: dict[tuple[str, tuple[tuple[str, str], ...]], PluginSample] = {}
        self._hidden: set[str] = set()

    def add(self, samples: Iterable[PluginSample]) -> None:
        for sample in samples:
            key = sample.name, tuple(sorted(sample.labels.items()))
            known = self._totals.get(key)
            if known is not None and sample.kind == COUNTER:
                sample.value += known.value
            self._totals[key] = sample

    def snapshot(self, taken: Iterable[str] = ()) -> list[Metric]:
        """As metrics. taken: names that built-in metrics have; those are left out, which the log says."""
        names, found = set(taken), []
        kinds = {COUNTER: Counter, GAUGE: Gauge}
        for sample in list(self._totals.values()):
            name, labels = self._prefix + sample.name, {**self._labels, **sample.labels}
            if name not in names:
                metric = kinds[sample.kind]
                found.append(metric(name=name, labels=labels, documentation=sample.documentation, value=sample.value))
            elif name not in self._hidden:
                self._hidden.add(name)
                logger.warning(
                    "The %s %r of %s is not shown: %s is a built-in metric. Give it another name.",
                    sample.kind, sample.name, sample.declared_in or "a plugin", name,
                )  # fmt: skip
        return found
