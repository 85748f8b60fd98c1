"""`pelton bench chain`: the kernels of a decode step, op by op and as a chain, against the device's floor.

Each row is captured as a graph over all layers of a model with random weights, so that no weight is in the cache when its
turn comes, and replayed many times. It is measured twice, in processes of their own: with programmatic dependent launch,
and with kernels that wait for the one before (PELTON_DEPENDENT_LAUNCH=0).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from pelton import env
from pelton.cli.table import format_table
from pelton.errors import ConfigError, EngineError
from pelton_plugins.bench.bounds import check_at_least
from pelton_plugins.bench.record import flat_settings, number, today, versions, write_json
from pelton_plugins.bench.table.shapes import DENSE, SHAPES, write_shape
from pelton_plugins.flags import parse_flags

DOC = """Time the kernels of a decode step in captured chains, with and without dependent launch, against the bytes they read.

  pelton bench chain --models qwen3-0.6b --batch-sizes 1 32 128
  pelton bench chain --models qwen3-0.6b --batch-sizes 32 --num-drafts 3
  pelton bench chain --models llama3.1-8b --batch-sizes 1 --output-json chain.json"""


class ChainArguments(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments: what is built, and at which sizes it is timed."""

    models: list[str] = msgspec.field(default_factory=lambda: list(DENSE))
    """Shapes to measure; or folders with a config.json."""
    batch_sizes: list[int] = msgspec.field(default_factory=lambda: [1, 32, 128])
    """Rows of the step, one token each."""
    context_len: int = 256
    """Tokens that each row attends to."""
    num_drafts: int = 0
    """Measure each size a second time with so many drafts a row, which the step looks up and verifies."""
    num_layers: int | None = None
    """Build this many layers only."""
    replays: int = 20
    """Replays in a row, of which the mean counts; the median of five such means is told."""
    bandwidth_gb_s: float | None = None
    """The device's copy bandwidth, read and written; measured when unset."""
    compare: bool = True
    """Measure a second time without dependent launch."""
    output_json: str | None = None
    """Write the result here."""

    def __post_init__(self) -> None:
        check_at_least(self, batch_sizes=1, context_len=1, num_drafts=0, num_layers=1, replays=1)
        if self.replays > 50:
            raise ConfigError(f"replays is {self.replays}; use at most 50.")
        if not self.batch_sizes:
            raise ConfigError("batch_sizes is empty; name one size at least, such as 32.")
        if self.bandwidth_gb_s is not None and not self.bandwidth_gb_s > 0:
            raise ConfigError(f"bandwidth_gb_s is {self.bandwidth_gb_s}; use a positive number, such as 4290.")


def run(argv: list[str]) -> int:
    parsed = parse_flags(argv, [ChainArguments], positional=None, program="pelton bench chain", doc=DOC)
    arguments: ChainArguments = parsed.structs["ChainArguments"]
    settings = flat_settings(parsed)
    result: dict[str, Any] = {"date": today(), "versions": versions(), "settings": settings, "models": {}}
    result["arguments"] = msgspec.to_builtins(arguments)
    with tempfile.TemporaryDirectory(prefix="pelton-bench-") as folder:
        for model in arguments.models:
            path = write_shape(model, Path(folder)) if model in SHAPES else Path(model)
            if arguments.num_layers is not None:
                settings = {**settings, "hf_overrides": {"num_hidden_layers": arguments.num_layers}}
            found = result["models"][path.name] = _measure(path, arguments, settings)
            print(render(path.name, found) + "\n", flush=True)
    write_json(arguments.output_json, result)
    return 0


def _measure(path: Path, arguments: ChainArguments, settings: dict[str, Any]) -> dict[str, Any]:
    job = {
        "settings": {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 8192, **settings, "model": str(path)},
        "batch_sizes": arguments.batch_sizes, "context_len": arguments.context_len, "replays": arguments.replays,
        "num_drafts": arguments.num_drafts, "bandwidth_gb_s": arguments.bandwidth_gb_s,
    }  # fmt: skip
    if arguments.num_drafts:
        drafts = {"method": "ngram", "num_speculative_tokens": arguments.num_drafts, "drafts_on_device": True}
        job["settings"]["speculative_config"] = drafts
    found = _in_process(job, dependent=True)
    if arguments.compare and found["is_captured"]:
        others = _in_process(job, dependent=False)["rows"]
        for row, other in zip(found["rows"], others, strict=True):
            row["without_us"] = other["us"]
    return found


def _in_process(job: dict[str, Any], *, dependent: bool) -> dict[str, Any]:
    command = [sys.executable, "-m", "pelton_plugins.bench.table.chain_process", json.dumps(job)]
    environ = {**os.environ, env.DEPENDENT_LAUNCH.name: "1" if dependent else "0"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environ)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise EngineError(f"The measuring process ended with status {done.returncode}; its messages are above.")
    return dict(json.loads(lines[-1]))


def render(model: str, found: dict[str, Any]) -> str:
    """Microseconds of one layer for a layer's rows, of the whole for the others."""
    rows = []
    for row in found["rows"]:
        size = row["batch"] if row["query_len"] == 1 else f"{row['batch']} x {row['query_len']}"
        floor_us = row["bytes"] / found["bandwidth_gb_s"] / 1e3
        rows.append(
            (
                size, row["part"], number(row["us"]), number(row.get("without_us")), number(floor_us or None),
                f"{floor_us / row['us']:.0%}" if floor_us and row["us"] else "-", row["op"],
            )
        )  # fmt: skip
    how = "captured" if found["is_captured"] else "not captured: this device has no graphs"
    head = (
        f"{model}, {found['num_layers']} layers, context {found['context_len']}, {found['device']}, {how}; "
        f"copy bandwidth {number(found['bandwidth_gb_s'], 4)} GB/s"
    )
    return f"{head}\n" + format_table(
        ("rows", "part", "us", "us waiting", "floor us", "of it", "op"), rows, indent="  "
    )
