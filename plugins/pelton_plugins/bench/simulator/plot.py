"""A picture of simulated beside measured figures."""

from __future__ import annotations

from typing import Any

from pelton.errors import ConfigError
from pelton_plugins.bench.simulator.command import compared


def plot(path: str, result: dict[str, Any], measured: dict[str, Any]) -> None:
    """Write bars of simulated / measured, with the band of 10 %. Raises `ConfigError` without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("plot needs matplotlib: pip install matplotlib.") from error
    found = compared(result, measured)
    figure = Figure(figsize=(8, 0.4 * len(found) + 1.2), layout="constrained")
    axes = figure.subplots()
    axes.barh([what for what, *_ in found], [ours / theirs for _, ours, theirs in found])
    axes.axvspan(0.9, 1.1, alpha=0.2)
    axes.axvline(1.0, linewidth=1)
    axes.invert_yaxis()
    axes.set_xlabel("simulated / measured")
    axes.set_title(f"{result['model']} on {result['measured_on']}")
    figure.savefig(path, dpi=120)
