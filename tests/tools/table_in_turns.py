"""Measure rows of `pelton bench table` with several installed trees in turns, and print the first's figures over each other's.

    python tests/tools/table_in_turns.py --trees now=/tmp/now before=/tmp/before --models qwen3-0.6b --rows latency1 batch32 start --turns 3

A tree is a folder that `pip install --no-deps --target FOLDER .` has filled (commands find their plugins there), several with ":" between
them. Each run is a process of its own. A tree's first run compiles its kernels: measure the row "start" once before. With --deadline-s
a run for which too little time is left is not begun, and what was measured so far is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

FIGURES = {"start": ("start_s",), "latency1": ("tpot_ms", "ttft_ms")}
"""Of a row; others have output tokens a second, or all tokens where prompts are all that counts."""
TOTALS = ("prefill", "shared-prefix", "long-prompt")
Figures = dict[tuple[str, str, str], dict[str, list[float]]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trees", nargs="+", required=True, metavar="NAME=PATH", help="the one in question first")
    parser.add_argument("--models", nargs="+", default=["qwen3-0.6b"])
    parser.add_argument("--rows", nargs="+", default=["latency1", "batch32", "batch128"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--deadline-s", type=float, default=float("inf"))
    arguments = parser.parse_args()
    trees = dict(tree.split("=", 1) for tree in arguments.trees)
    began, longest = time.monotonic(), 0.0
    figures: Figures = defaultdict(lambda: defaultdict(list))
    for model in arguments.models:
        for turn in range(arguments.turns):
            for name, path in trees.items():
                left = arguments.deadline_s - (time.monotonic() - began)
                if left < longest:
                    print(
                        f"not begun: {model}, {name}, turn {turn + 1}: {left:.0f} s are left, a run took {longest:.0f}"
                    )
                    continue
                started = time.monotonic()
                for row, found in measure(path, model, arguments.rows, arguments.repeats).items():
                    for figure in FIGURES.get(row, ("total_tok_s" if row in TOTALS else "out_tok_s",)):
                        if figure in found:
                            figures[model, row, figure][name].append(found[figure])
                longest = max(longest, time.monotonic() - started)
                print(f"{model}, {name}, turn {turn + 1}: {time.monotonic() - started:.0f} s", flush=True)
    show(figures, list(trees))
    return 0


def measure(path: str, model: str, rows: list[str], repeats: int) -> dict[str, dict[str, float]]:
    """Row to figures; a row or a run that failed is told on stderr and left out."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "table.json")
        command = [sys.executable, "-m", "pelton", "bench", "table", "--models", model, "--rows", *rows]
        done = subprocess.run(
            [*command, "--repeats", str(repeats), "--results", str(results)], env=os.environ | {"PYTHONPATH": path},
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            print(done.stderr[-2000:], file=sys.stderr)
        found = json.loads(results.read_text()) if results.exists() else {}
    return {row: values for table in found.values() for row, values in table.items() if "error" not in values}


def show(figures: Figures, names: list[str]) -> None:
    first, *others = names
    for (model, row, figure), by_tree in figures.items():
        cells = [f"{name} {' '.join(f'{value:,.4g}' for value in by_tree[name])}" for name in names if by_tree[name]]
        medians = {name: statistics.median(values) for name, values in by_tree.items() if values}
        ratios = [f"x {medians[first] / medians[name]:.3f}" for name in others if first in medians and name in medians]
        print(f"{model} {row} {figure}: {'; '.join([*cells, *ratios])}")


if __name__ == "__main__":
    sys.exit(main())
