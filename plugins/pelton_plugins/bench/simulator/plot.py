"""A picture of simulated beside measured figures: `python -m pelton_plugins.bench.simulator.plot OUT.png RESULTS.json ...`.

The results are what `pelton simulate --compare ... --output-json` wrote, or lists of [label, [[figure, simulated, measured], ...]].
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pelton.errors import ConfigError

Rows = Sequence[tuple[str, float, float]]
MARKERS = "osD^vP"
REACH = 0.5
"""Ratios are drawn from 1 - REACH to 1 + REACH, those beyond at the edge."""


def plot(path: str, title: str, loads: Sequence[tuple[str, Rows]]) -> None:
    """Write points of simulated / measured for each load, with the band of 10 %. Raises `ConfigError` without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("plot needs matplotlib: pip install matplotlib.") from error
    names = [what for what, *_ in loads[0][1]]
    figure = Figure(figsize=(8, 0.3 * len(names) + 1.4), layout="constrained")
    axes = figure.subplots()
    for place, (label, rows) in enumerate(loads):
        ratios = {what: min(max(ours / theirs, 1 - REACH), 1 + REACH) for what, ours, theirs in rows}
        known = [name for name in names if name in ratios]
        axes.plot([ratios[name] for name in known], known, MARKERS[place % len(MARKERS)], label=label, alpha=0.8)
    axes.axvspan(0.9, 1.1, alpha=0.2)
    axes.axvline(1.0, linewidth=1)
    axes.invert_yaxis()
    axes.set_xlabel("simulated / measured")
    axes.set_title(title)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=90)


def read_results(paths: Sequence[str]) -> list[tuple[str, Rows]]:
    """Raises `ConfigError` for a file without a comparison."""
    found: list[tuple[str, Rows]] = []
    for path in paths:
        try:
            told: Any = json.loads(Path(path).read_text())
            if isinstance(told, dict):
                told = [[f"{told['request_throughput']:.3g} requests/s", told["compared"]]]
            found += [
                (label, [(what, float(ours), float(theirs)) for what, ours, theirs in rows]) for label, rows in told
            ]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path} has no comparison; use what `pelton simulate --compare --output-json` wrote: {error!r}."
            ) from error
    return found


def main(argv: Sequence[str]) -> int:
    if len(argv) < 2:
        print("Usage: python -m pelton_plugins.bench.simulator.plot OUT.png RESULTS.json ...", file=sys.stderr)
        return 2
    try:
        plot(argv[0], "simulated / measured", read_results(argv[1:]))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
