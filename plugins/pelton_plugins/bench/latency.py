"""`pelton bench latency`: the time of one batch of equal requests. Flags and figures as vLLM's command has them."""

from __future__ import annotations

import random
import sys
from typing import Any

import msgspec

from pelton.cli.table import format_table
from pelton.config.flags import parse_flags
from pelton.errors import ConfigError
from pelton_plugins.bench.metrics import percentile
from pelton_plugins.bench.offline import open_llm, run_batch
from pelton_plugins.bench.record import circumstances, flat_settings, number, write_json
from pelton_plugins.bench.workloads import equal_requests

PERCENTS = (10, 25, 50, 75, 90, 99)
DOC = """Time of one batch of equal requests in this process, from the call to the last token.
Prefix caching is off unless it is asked for: every run computes its prompts.

  pelton bench latency smollm2 --batch-size 8 --input-len 32 --output-len 128
  pelton bench latency MODEL --load-format dummy --output-json latency.json"""


class LatencyArguments(msgspec.Struct, frozen=True, kw_only=True):
    """The batch, and how often it runs."""

    input_len: int = 32
    """Tokens of each prompt."""
    output_len: int = 128
    """Tokens made for each."""
    batch_size: int = 8
    """Requests given at once."""
    num_iters_warmup: int = 10
    """Runs before those that count."""
    num_iters: int = 30
    """Runs that count."""
    output_json: str | None = None
    """Write the result here."""

    def __post_init__(self) -> None:
        for name in ("input_len", "output_len", "batch_size", "num_iters"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; use at least 1.")


def run(argv: list[str]) -> int:
    parsed = parse_flags(argv, [LatencyArguments], program="pelton bench latency", doc=DOC)
    arguments: LatencyArguments = parsed.structs["LatencyArguments"]
    settings = {"enable_prefix_caching": False, **flat_settings(parsed)}
    with open_llm(settings) as llm:
        result = measure(llm, arguments, parsed.config.model.seed)
        result |= circumstances(llm.llm_engine.info.report.device, settings)
    print(render(result))
    write_json(arguments.output_json, result)
    return 0


def measure(llm: Any, arguments: LatencyArguments, seed: int) -> dict[str, Any]:
    requests = equal_requests(
        arguments.batch_size,
        arguments.input_len,
        arguments.output_len,
        llm.llm_engine.model.vocab_size,
        random.Random(seed),
    )
    prompts, counts = [list(column) for column in zip(*requests, strict=True)]
    for index in range(arguments.num_iters_warmup):
        run_batch(llm, prompts, counts, temperature=1.0)
        print(f"\rwarm-up {index + 1} of {arguments.num_iters_warmup} ", end="", file=sys.stderr)
    latencies = []
    for index in range(arguments.num_iters):
        latencies.append(run_batch(llm, prompts, counts, temperature=1.0))
        print(f"\rrun {index + 1} of {arguments.num_iters} ", end="", file=sys.stderr)
    print(file=sys.stderr)
    return {
        "avg_latency": sum(latencies) / len(latencies),
        "latencies": latencies,
        "percentiles": {str(p): percentile(latencies, p) for p in PERCENTS},
        "input_len": arguments.input_len,
        "output_len": arguments.output_len,
        "batch_size": arguments.batch_size,
        "num_iters": arguments.num_iters,
    }


def render(result: dict[str, Any]) -> str:
    rows: list[tuple[str, str]] = [("average", number(result["avg_latency"] * 1e3, 4))]
    rows += [(f"p{percent}", number(value * 1e3, 4)) for percent, value in result["percentiles"].items()]
    what = (
        f"{result['batch_size']} x ({result['input_len']} in, {result['output_len']} out), {result['num_iters']} runs"
    )
    return f"{what}, {result['device']}\n" + format_table(("latency", "ms"), rows, indent="  ")
