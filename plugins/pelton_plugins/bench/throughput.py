"""`pelton bench throughput`: many requests given at once. Flags and figures as vLLM's command has them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from pelton.cli.table import format_table
from pelton.errors import ConfigError
from pelton_plugins.bench.bounds import check_at_least
from pelton_plugins.bench.dataset import sharegpt_requests
from pelton_plugins.bench.offline import Batch, OfflineArguments, Prompt, makes_text, run_batch, sampled, text_note
from pelton_plugins.bench.record import circumstances, flat_settings, number, write_json
from pelton_plugins.bench.workloads import DEFAULT_OUTPUT_LEN, synthetic_requests
from pelton_plugins.flags import parse_flags

SHAREGPT, RANDOM = "sharegpt", "random"
DOC = f"""Requests and tokens a second when all requests are there at once, in this process, sampled at temperature 1.
A ShareGPT file's questions are given as text: tokenizing them counts. Other prompts are token ids. Without a file lengths are
log-normal, like a chat service's; with --input-len, and {DEFAULT_OUTPUT_LEN} tokens out unless --output-len says otherwise, they are
equal, or uniform about it with --random-range-ratio.

  pelton bench throughput MODEL --dataset-path ShareGPT.json
  pelton bench throughput MODEL --load-format dummy --num-prompts 200 --input-len 512 --output-len 128"""


class ThroughputArguments(OfflineArguments, frozen=True, kw_only=True):
    """The requests."""

    dataset_name: str = SHAREGPT
    """sharegpt, or random for prompts of --input-len, which alone means it too."""
    dataset_path: str | None = None
    """A ShareGPT file (JSON)."""
    num_prompts: int = 1000
    """How many requests."""
    input_len: int | None = None
    """Tokens of each prompt; not with a file."""
    output_len: int | None = None
    """Tokens made for each, also in place of a file's own."""
    prefix_len: int = 0
    """Tokens before those of --input-len, the same in all prompts."""
    random_range_ratio: float = 0.0
    """Lengths are uniform up to this share below and above --input-len and --output-len; under 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, num_prompts=1, input_len=1, output_len=1, prefix_len=0, random_range_ratio=0)
        if self.dataset_name not in (SHAREGPT, RANDOM):
            raise ConfigError(f"dataset_name is {self.dataset_name!r}; use {SHAREGPT} or {RANDOM}.")
        if self.random_range_ratio >= 1:
            raise ConfigError(f"random_range_ratio is {self.random_range_ratio}; use a share under 1, such as 0.2.")
        if self.dataset_path is not None and (self.input_len is not None or self.dataset_name == RANDOM):
            raise ConfigError(
                "dataset_path and random prompts (input_len) exclude each other; the file has its own prompts."
            )
        if self.input_len is None and (self.dataset_name == RANDOM or self.prefix_len or self.random_range_ratio):
            raise ConfigError("Random prompts need their length; give input_len, such as --input-len 512.")


def run(argv: list[str]) -> int:
    from pelton import LLM

    parsed = parse_flags(argv, [ThroughputArguments], program="pelton bench throughput", doc=DOC)
    arguments: ThroughputArguments = parsed.structs["ThroughputArguments"]
    detokenize = makes_text(parsed.config, arguments)
    needs_tokenizer = detokenize or arguments.dataset_path is not None
    settings = {"skip_tokenizer_init": not needs_tokenizer, **flat_settings(parsed)}
    with LLM(**settings) as llm:
        requests = make_requests(llm, arguments, random.Random(parsed.config.model.seed))
        params = sampled([count for _, count in requests], n=arguments.n, detokenize=detokenize)
        run_batch(llm, [[11] * 16] * 8, sampled([4] * 8, detokenize=detokenize))  # warm up
        batch = run_batch(llm, [prompt for prompt, _ in requests], params)
        result = figures(batch, len(requests)) | {"n": arguments.n, "detokenize": detokenize}
        result |= circumstances(llm.llm_engine.info.report.device, settings)
    print(render(result))
    write_json(arguments.output_json, result)
    return 0


def make_requests(llm: Any, arguments: ThroughputArguments, rng: random.Random) -> Sequence[tuple[Prompt, int]]:
    num, longest, vocab_size = arguments.num_prompts, llm.llm_engine.info.max_model_len, llm.llm_engine.model.vocab_size
    if arguments.dataset_path is not None:
        return sharegpt_requests(
            arguments.dataset_path, num, llm.get_tokenizer(), rng, max_tokens=longest, output_len=arguments.output_len
        )
    return synthetic_requests(
        num, arguments.input_len, arguments.output_len, vocab_size, rng, max_tokens=longest,
        prefix_len=arguments.prefix_len, range_ratio=arguments.random_range_ratio,
    )  # fmt: skip


def figures(batch: Batch, num_requests: int) -> dict[str, Any]:
    seconds, num_in, num_out = batch
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
        f"{result['num_requests']} requests, {result['num_input_tokens']} tokens in, {result['num_output_tokens']} out, "
        f"{text_note(result)}"
    )
    return f"{what}, {result['device']}\n" + format_table(("throughput", ""), rows, indent="  ")
