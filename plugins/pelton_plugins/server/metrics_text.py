"""Metrics as Prometheus text. Snapshots of several loggers and engines are joined before they are rendered, so that each family has
one HELP and one TYPE line."""

from __future__ import annotations

from collections.abc import Iterable

from pelton.metrics.snapshot import Counter, Gauge, Histogram, Metric

_KINDS: dict[type[Metric], str] = {Counter: "counter", Gauge: "gauge", Histogram: "histogram"}


def render_text(metrics: Iterable[Metric]) -> str:
    """Prometheus text exposition (format 0.0.4); families in the order in which they first appear."""
    families: dict[str, list[Metric]] = {}
    for metric in metrics:
        families.setdefault(metric.name, []).append(metric)
    lines: list[str] = []
    for name, members in families.items():
        kind = _KINDS[type(members[0])]
        shown = _counter_name(name) if kind == "counter" else name
        lines.append(f"# HELP {shown} {_escape_help(members[0].documentation)}")
        lines.append(f"# TYPE {shown} {kind}")
        for member in members:
            _render_one(shown, member, lines)
    return "\n".join(lines) + "\n" if lines else ""


def _render_one(name: str, metric: Metric, lines: list[str]) -> None:
    if isinstance(metric, Histogram):
        for bound, cumulative in metric.buckets.items():
            lines.append(f"{name}_bucket{_labels({**metric.labels, 'le': bound})} {float(cumulative)!r}")
        lines.append(f"{name}_count{_labels(metric.labels)} {float(metric.count)!r}")
        lines.append(f"{name}_sum{_labels(metric.labels)} {metric.sum!r}")
    elif isinstance(metric, (Counter, Gauge)):
        lines.append(f"{name}{_labels(metric.labels)} {float(metric.value)!r}")


def _counter_name(name: str) -> str:
    return name if name.endswith("_total") else name + "_total"


def _labels(labels: dict[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{key}="{_escape_label(value)}"' for key, value in sorted(labels.items())) + "}"


def _escape_label(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _escape_help(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")
