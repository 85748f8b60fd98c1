"""The load of the engine in the head of an answer (Open Request Cost Aggregation), for balancers that ask for it."""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

from pelton.metrics.snapshot import Gauge
from pelton_plugins.server.state import ServerState

ASKS, TELLS = b"endpoint-load-metrics-format", b"endpoint-load-metrics"
FIGURES: dict[str, Callable[[list[float]], float]] = {"kv_cache_usage_perc": max, "num_requests_waiting": sum}
"""Gauge: what stands for all engines together."""


async def load_header(state: ServerState, wanted: bytes) -> tuple[bytes, bytes] | None:
    """Return the header in the form TEXT or JSON; None for another form, and where nothing is counted."""
    form = wanted.strip().upper()
    if form not in (b"TEXT", b"JSON"):
        return None
    found = await _figures(state)
    if not found:
        return None
    if form == b"JSON":
        return TELLS, b"JSON " + msgspec.json.encode({"named_metrics": found})
    return TELLS, b"TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in found.items()).encode()


async def _figures(state: ServerState) -> dict[str, float]:
    """Ask the process that knows the figures of all, where several serve."""
    values: dict[str, list[float]] = {}
    prefix = state.metrics_prefix
    if state.ask_metrics is not None:
        try:
            text = await state.ask_metrics()
        except TimeoutError:
            return {}
        for name in FIGURES:
            lines = re.findall(rf"^{re.escape(prefix + name)}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
            values[name] = [float(value) for value in lines]
    else:
        for metric in state.llm.get_metrics() if state.llm is not None else ():
            if isinstance(metric, Gauge) and (name := metric.name.removeprefix(prefix)) in FIGURES:
                values.setdefault(name, []).append(metric.value)
    return {name: float(over(values[name])) for name, over in FIGURES.items() if values.get(name)}
