"""`pelton bench throughput`: many requests given at once. Flags and figures as vLLM's command has them."""

from __future__ import annotations

import random
from typing import Any

import msgspec

from pelton.cli.table import format_table
from pelton.config.flags import parse_flags
from pelton.errors import ConfigError
from pelton_plugins.bench.dataset import sharegpt_requests
from pelton_plugins.bench.offline import open_llm, run_batch
from pelton_plugins.bench.record import circumstances, flat_settings, number, write_json
from pelton_plugins.bench.workloads import equal_requests, random_requests

DOC = """Requests and tokens a second when all requests are there at once, in this process.
Without --dataset-path lengths are log-normal, like a chat service's; --input-len and --output-len make them equal.

  pelton bench throughput MODEL --dataset-path ShareGPT.json
  pelton bench throughput MODEL --load-format dummy --num-prompts 200 --input-len 512 --output-len 128"""


class ThroughputArguments(msgspec.Struct, frozen=True, kw_only=True):
    """The requests."""

    dataset_path: str | None = None
    """A ShareGPT file (JSON)."""
    num_prompts: int = 1000
    """How many requests."""
    input_len: int | None = None
    """Tokens of each prompt; not with a dataset."""
    output_len: int | None = None
    """Tokens made for each."""
    output_json: str | None = None
    """Write the result here."""

    def __post_init__(self) -> None:
        if self.num_prompts < 1:
            raise ConfigError(f"num_prompts is {self.num_prompts}; use at least 1.")
        if self.dataset_path is None and (self.input_len is None) != (self.output_len is None):
            raise ConfigError("input_len and output_len go together; give both, or none for log-normal lengths.")
        if self.dataset_path is not None and self.input_len is not None:
            raise ConfigError("input_len and dataset_path exclude each other; the dataset has its own prompts.")


def run(argv: list[str]) -> int:
    parsed = parse_flags(argv, [ThroughputArguments], program="pelton bench throughput", doc=DOC)
    arguments: ThroughputArguments = parsed.structs["ThroughputArguments"]
    settings = {"skip_tokenizer_init": arguments.dataset_path is None, **flat_settings(parsed)}
    with open_llm(settings) as llm:
        requests = make_requests(llm, arguments, random.Random(parsed.config.model.seed))
        prompts, counts = [list(column) for column in zip(*requests, strict=True)]
        run_batch(llm, [[11] * 16] * 8, [4] * 8)  # warm up
        seconds = run_batch(llm, prompts, counts)
        result = figures(seconds, sum(map(len, prompts)), sum(counts), len(counts))
        result |= circumstances(llm.llm_engine.info.report.device, settings)
    print(render(result))
    write_json(arguments.output_json, result)
    return 0


def make_requests(llm: Any, arguments: ThroughputArguments, rng: random.Random) -> list[tuple[list[int], int]]:
    engine, num = llm.llm_engine, arguments.num_prompts
    longest = engine.info.max_model_len
    if arguments.dataset_path is not None:
        return sharegpt_requests(
            arguments.dataset_path, num, llm.get_tokenizer(), rng, max_tokens=longest, output_len=arguments.output_len
        )
    if arguments.input_len is not None and arguments.output_len is not None:
        return equal_requests(num, arguments.input_len, arguments.output_len, engine.model.vocab_size, rng)
    return random_requests(num, engine.model.vocab_size, rng, max_tokens=longest)


def figures(seconds: float, num_in: int, num_out: int, num_requests: int) -> dict[str, Any]:
    return {
        "elapsed_time": seconds,
        "num_requests": num_requests,
        "num_input_tokens": num_in,
        "num_output_tokens": num_out,
        "total_num_tokens": num_in + num_out,
        "requests_per_second": num_requests / seconds,
        "tokens_per_second": (num_in + num_out) / seconds,
        "output_tokens_per_second": num_out / seconds,
    }


def render(result: dict[str, Any]) -> str:
    rows = [
        ("requests/s", number(result["requests_per_second"], 4)),
        ("total tokens/s", number(result["tokens_per_second"], 5)),
        ("output tokens/s", number(result["output_tokens_per_second"], 5)),
        ("seconds", number(result["elapsed_time"], 4)),
    ]
    what = (
        f"{result['num_requests']} requests, {result['num_input_tokens']} tokens in, {result['num_output_tokens']} out"
    )
    return f"{what}, {result['device']}\n" + format_table(("throughput", ""), rows, indent="  ")
