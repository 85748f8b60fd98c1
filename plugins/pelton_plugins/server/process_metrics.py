"""Figures of the processes themselves: memory, descriptors, processor time, the interpreter's garbage collector."""

from __future__ import annotations

from collections.abc import Mapping

import prometheus_client
from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest

Samples = dict[str, float]
"""Values by name, such as process_open_fds, or python_gc_collections_total with its generation behind it."""


class ProcessMetrics:
    """`process_*` and `python_*` families of this process."""

    def __init__(self) -> None:
        self._registry = prometheus_client.CollectorRegistry()  # our own: several servers may live in one process
        prometheus_client.ProcessCollector(registry=self._registry)
        prometheus_client.PlatformCollector(registry=self._registry)
        prometheus_client.GCCollector(registry=self._registry)

    def text(self) -> str:
        return generate_latest(self._registry).decode()

    def collect(self) -> list[Metric]:
        return list(self._registry.collect())

    def samples(self) -> Samples:
        """All values, for a report to another process."""
        return {
            " ".join([sample.name, *sample.labels.values()]): sample.value
            for family in self.collect()
            for sample in family.samples
        }

    def text_of_all(self, others: Mapping[str, Samples], own: str) -> str:
        """The families over several processes, each value with the label `process`. own: this one's name."""
        told = {own: self.samples(), **others}
        lines: list[str] = []
        for family in self.collect():
            kind = "counter" if family.type == "counter" else "gauge"
            name = family.name + "_total" if kind == "counter" else family.name
            lines += [f"# HELP {name} {family.documentation}", f"# TYPE {name} {kind}"]
            for sample in family.samples:
                key = " ".join([sample.name, *sample.labels.values()])
                for process, samples in told.items():
                    if key in samples:
                        labels = {**sample.labels, "process": process}
                        shown = ",".join(f'{label}="{value}"' for label, value in sorted(labels.items()))
                        lines.append(f"{sample.name}{{{shown}}} {samples[key]!r}")
        return "\n".join(lines) + "\n"
