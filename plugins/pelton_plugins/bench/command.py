"""`pelton bench`: finds the measurement and runs it. Nothing heavy is imported for the help."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from pelton.config.engine import did_you_mean
from pelton.errors import ConfigError

# name: (module of this folder, what it measures)
MEASUREMENTS = {
    "latency": ("latency", "time of one batch of equal requests, from the first to the last token"),
    "throughput": ("throughput", "many requests at once: requests and tokens a second"),
    "serve": ("serve", "requests that arrive at random at a server: TTFT, TPOT, ITL, E2E, goodput"),
    "tune": ("tune", "settings and rate with the most throughput whose end-to-end latency keeps to a bound"),
    "stream": ("stream.command", "many clients that stream at once: chunks a second, time between chunks"),
    "load": ("load", "minutes of load with random aborts: leaks, errors, memory, drift of the inter-token latency"),
    "soak": (
        "soak.command",
        "minutes of random valid requests from many clients: wrong answers, leaks, growth, streams that stand still",
    ),
    "steps": ("steps", "time of steps by what they compute, for `pelton simulate`"),
    "table": (
        "table.command",
        "the workloads that Pelton is compared by, with other engines' figures and the device's floor",
    ),
    "cpu-table": (
        "cpu.table",
        "the demo model on CPU cores: the rows that Pelton is compared by, beside other engines, also in one run",
    ),
    "embed": ("embed.command", "texts a second through an embedding model, beside other engines in one run"),
    "busy": (
        "cpu.busy",
        "speed of decoding alone, beside programs that use the same cores, and beside a second engine",
    ),
    "speculation": ("speculation", "decoding with drafts, all of them right and none, against decoding without"),
    "structured": (
        "structured.command",
        "JSON schemas of a file: those that pass, compile and mask times, what masks add to a step",
    ),
    "lora": ("lora", "decoding with adapters, against the same requests without"),
    "host": ("host.command", "host time of a step by stage, with many running requests"),
    "sparse": ("sparse", "an indexer's choice and attention to the chosen latents, against attention to all"),
    "states": ("states", "a layer with states (Mamba-2, the gated delta rule), rows of one token and prompts"),
    "chain": ("table.chain", "kernels of a decode step, in a captured chain, against the device's floor"),
}


def run(argv: list[str]) -> int:
    name, rest = (argv[0], argv[1:]) if argv else ("--help", [])
    if name in ("-h", "--help", "help"):
        print(help_text())
        return 0
    if name not in MEASUREMENTS:
        raise ConfigError(
            f"Unknown measurement {name!r}.{did_you_mean(name, MEASUREMENTS)} There are {', '.join(MEASUREMENTS)}."
        )
    measure: Callable[[list[str]], int] = importlib.import_module(f"pelton_plugins.bench.{MEASUREMENTS[name][0]}").run
    return measure(rest)


def help_text() -> str:
    width = max(map(len, MEASUREMENTS))
    return "\n".join(
        [
            "usage: pelton bench MEASUREMENT [flags]",
            "",
            *(f"  {name.ljust(width)}  {what}" for name, (_, what) in MEASUREMENTS.items()),
            "",
            "pelton bench MEASUREMENT --help lists its flags. What they mean: docs/performance.md.",
        ]
    )
