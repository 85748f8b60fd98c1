"""Prompts of the measurements: token-id prompts, and how many tokens each is continued by.

The workloads of the table draw their lengths and tokens from one random stream (Python's `random`, seed 0) in a fixed
order, the same as the script that measured the other engines: the numbers compare request by request.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from pelton.errors import ConfigError

Prompt = list[int]

MAX_TOKEN_ID = 49_000  # so that a vocabulary of any size above gives the same prompts
SHARED_PREFIX_TOKENS = 2_000
LONG_PROMPT_TOKENS = 8_000
DEFAULT_OUTPUT_LEN = 128  # of requests whose input length alone is given


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that are given to an engine at once."""

    name: str
    prompts: list[Prompt]
    num_output_tokens: list[int]
    repeats: int = 2
    shares_prefix: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    def fresh(self, repeat: int) -> list[Prompt]:
        """The prompts with first tokens of this repeat's own: none lives off an earlier one's prefix cache."""
        others = 0 if self.shares_prefix else 1
        return [
            [10 + (repeat * 7919 + index * others) % 40_000, *prompt[1:]] for index, prompt in enumerate(self.prompts)
        ]


def table_workloads(vocab_size: int) -> dict[str, Workload]:
    """The rows of `pelton bench table`, in their order."""
    rng = random.Random(0)
    tokens = _token_source(rng, vocab_size)
    found: list[Workload] = [Workload("latency1", [tokens(128)], [256], repeats=3)]
    tokens(8_000)  # drawn and not used: what follows is then as it was for the other engines
    for count in (32, 128):
        found.append(Workload(f"batch{count}", [tokens(128) for _ in range(count)], [256] * count))
    # Lengths uniform in 100..1024, in and out.
    prompts = [tokens(rng.randint(100, 1024)) for _ in range(256)]
    found.append(Workload("nano256", prompts, [rng.randint(100, 1024) for _ in range(256)]))
    prompts = [tokens(_log_normal(rng, 160, 1.0, 8, 2000)) for _ in range(1000)]
    chats = Workload("sharegpt", prompts, [_log_normal(rng, 180, 0.8, 8, 1000) for _ in range(1000)])
    found.append(chats)
    found.append(Workload("prefill", [tokens(2048) for _ in range(64)], [1] * 64))
    found += [*_many_chats(chats), *_further(vocab_size), *_sampling(vocab_size)]
    return {workload.name: workload for workload in found}


def _many_chats(chats: Workload) -> list[Workload]:
    """As many for each of two or four engines as one is measured with."""
    return [
        Workload(f"{chats.name}-{times}000", chats.prompts * times, chats.num_output_tokens * times, repeats=1)
        for times in (2, 4)
    ]


def _further(vocab_size: int) -> list[Workload]:
    """Rows without figures of other engines, from a stream of their own."""
    tokens = _token_source(random.Random(1), vocab_size)
    prefix = tokens(SHARED_PREFIX_TOKENS)
    shared = [[*prefix, *tokens(64)] for _ in range(64)]
    long = [tokens(LONG_PROMPT_TOKENS) for _ in range(16)]
    return [
        Workload("shared-prefix", shared, [128] * 64, shares_prefix=True),
        Workload("long-prompt", long, [64] * 16),
    ]


def _sampling(vocab_size: int) -> list[Workload]:
    """Batches that are sampled in several ways."""
    tokens = _token_source(random.Random(2), vocab_size)
    found = [Workload(f"sampling{count}", [tokens(128) for _ in range(count)], [128] * count) for count in (1, 32, 256)]
    return [*found, Workload("sampling16", [tokens(32) for _ in range(16)], [64] * 16)]  # for CPUs


def random_requests(
    num: int, vocab_size: int, rng: random.Random, *, max_tokens: int, output_len: int | None = None
) -> list[tuple[Prompt, int]]:
    """(prompt, output tokens) with log-normal lengths like a chat service's, at most `max_tokens` together."""
    _check_fits(1, output_len or 1, max_tokens)
    tokens = _token_source(rng, vocab_size)
    requests = []
    for _ in range(num):
        num_out = output_len or min(_log_normal(rng, 180, 0.8, 8, 1000), max(max_tokens // 2, 1))
        num_in = min(_log_normal(rng, 160, 1.0, 8, 2000), max(max_tokens - num_out, 1))
        requests.append((tokens(num_in), num_out))
    return requests


def synthetic_requests(
    num: int,
    input_len: int | None,
    output_len: int | None,
    vocab_size: int,
    rng: random.Random,
    *,
    max_tokens: int,
    prefix_len: int = 0,
    range_ratio: float = 0.0,
) -> list[tuple[Prompt, int]]:
    """(prompt, output tokens) of one length, or uniform up to `range_ratio` of it to both sides, behind one prefix.

    Without `input_len` lengths are log-normal, but for `output_len`.
    """
    if input_len is None:
        return random_requests(num, vocab_size, rng, max_tokens=max_tokens, output_len=output_len)
    output_len = output_len or DEFAULT_OUTPUT_LEN
    shortest, longest = 1 - range_ratio, 1 + range_ratio
    _check_fits(prefix_len + math.ceil(input_len * longest), math.ceil(output_len * longest), max_tokens)
    tokens = _token_source(rng, vocab_size)
    prefix = tokens(prefix_len)

    def length(mean: int) -> int:
        return max(rng.randint(math.floor(mean * shortest), math.ceil(mean * longest)), 1) if range_ratio else mean

    return [([*prefix, *tokens(length(input_len))], length(output_len)) for _ in range(num)]


def _check_fits(num_in: int, num_out: int, max_tokens: int) -> None:
    if num_in + num_out > max_tokens:
        raise ConfigError(
            f"A request of {num_in} tokens in and {num_out} out does not fit the model's {max_tokens}; lower input_len or "
            "output_len, or raise max_model_len."
        )


def _token_source(rng: random.Random, vocab_size: int) -> Callable[[int], Prompt]:
    end = min(vocab_size, MAX_TOKEN_ID)

    def draw(count: int) -> Prompt:
        return [rng.randrange(10, end) for _ in range(count)]

    return draw


def _log_normal(rng: random.Random, median: float, sigma: float, low: int, high: int) -> int:
    return max(low, min(high, int(rng.lognormvariate(math.log(median), sigma))))
