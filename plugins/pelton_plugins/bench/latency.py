"""`pelton bench latency`: the time of one batch of equal requests. Flags and figures as vLLM's command has them."""

from __future__ import annotations

import random
import statistics
import sys
from typing import Any

from pelton.cli.table import format_table
from pelton_plugins.bench.bounds import check_at_least
from pelton_plugins.bench.metrics import percentile
from pelton_plugins.bench.offline import OfflineArguments, makes_text, run_batch, sampled, text_note
from pelton_plugins.bench.record import circumstances, flat_settings, number, write_json
from pelton_plugins.bench.workloads import synthetic_requests
from pelton_plugins.flags import parse_flags

PERCENTS = (10, 25, 50, 75, 90, 99)
DOC = """Time of one batch of equal requests in this process, from the call to the last token, sampled at temperature 1.
Prefix caching is off unless it is asked for: every run computes its prompts.

  pelton bench latency smollm2 --batch-size 8 --input-len 32 --output-len 128
  pelton bench latency MODEL --load-format dummy --output-json latency.json"""


class LatencyArguments(OfflineArguments, frozen=True, kw_only=True):
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

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, input_len=1, output_len=1, batch_size=1, num_iters_warmup=0, num_iters=1)


def run(argv: list[str]) -> int:
    from pelton import LLM

    parsed = parse_flags(argv, [LatencyArguments], program="pelton bench latency", doc=DOC)
    arguments: LatencyArguments = parsed.structs["LatencyArguments"]
    detokenize = makes_text(parsed.config, arguments)
    settings = {"enable_prefix_caching": False, "skip_tokenizer_init": not detokenize, **flat_settings(parsed)}
    with LLM(**settings) as llm:
        result = measure(llm, arguments, parsed.config.model.seed, detokenize=detokenize)
        result |= circumstances(llm.llm_engine.info.report.device, settings)
    print(render(result))
    write_json(arguments.output_json, result)
    return 0


def measure(llm: Any, arguments: LatencyArguments, seed: int, *, detokenize: bool) -> dict[str, Any]:
    engine = llm.llm_engine
    requests = synthetic_requests(
        arguments.batch_size, arguments.input_len, arguments.output_len, engine.model.vocab_size, random.Random(seed),
        max_tokens=engine.info.max_model_len,
    )  # fmt: skip
    prompts, counts = [list(column) for column in zip(*requests, strict=True)]
    params = sampled(counts, n=arguments.n, detokenize=detokenize)
    for index in range(arguments.num_iters_warmup):
        run_batch(llm, prompts, params)
        print(f"\rwarm-up {index + 1} of {arguments.num_iters_warmup} ", end="", file=sys.stderr)
    latencies = []
    for index in range(arguments.num_iters):
        latencies.append(run_batch(llm, prompts, params).seconds)
        print(f"\rrun {index + 1} of {arguments.num_iters} ", end="", file=sys.stderr)
    print(file=sys.stderr)
    return {
        "avg_latency": statistics.fmean(latencies),
        "std_latency": statistics.pstdev(latencies),
        "latencies": latencies,
        "percentiles": {str(p): percentile(latencies, p) for p in PERCENTS},
        "input_len": arguments.input_len,
        "output_len": arguments.output_len,
        "batch_size": arguments.batch_size,
        "n": arguments.n,
        "detokenize": detokenize,
        "num_iters": arguments.num_iters,
    }


def render(result: dict[str, Any]) -> str:
    figures = {"average": result["avg_latency"], "deviation": result["std_latency"]}
    figures |= {f"p{percent}": value for percent, value in result["percentiles"].items()}
    rows = [(name, number(value * 1e3, 4)) for name, value in figures.items()]
    out = f"{result['n']} x {result['output_len']}" if result["n"] > 1 else result["output_len"]
    what = f"{result['batch_size']} x ({result['input_len']} in, {out} out), {text_note(result)}, {result['num_iters']} runs"
    return f"{what}, {result['device']}\n" + format_table(("latency", "ms"), rows, indent="  ")
