"""Requests of a trace: Mooncake's JSON lines, or lengths as a chat service has them. For `bench serve` and the simulator.

A line is {"timestamp": milliseconds, "input_length": tokens, "output_length": tokens, "hash_ids": [...]}. A hash id stands for 512 tokens:
prompts whose first ids are equal begin with the same tokens.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pelton.errors import ConfigError
from pelton_plugins.bench.arrivals import arrival_times

HASHED_TOKENS = 512
MEDIAN_INPUT, SIGMA_INPUT, MOST_INPUT = 160, 1.0, 2000
MEDIAN_OUTPUT, SIGMA_OUTPUT, MOST_OUTPUT = 180, 0.8, 1000


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request, before its tokens are made."""

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...] = ()

    def tokens(self, number: int, vocab_size: int) -> list[int]:
        """Return its prompt: of its hash ids, and behind them, or without any, of its number in the trace."""
        made: list[int] = []
        for hash_id in self.hash_ids:
            made += _run(hash_id + 1, HASHED_TOKENS, vocab_size)
        missing = self.num_prompt_tokens - len(made)
        return made + _run(-1 - number, missing, vocab_size) if missing > 0 else made[: self.num_prompt_tokens]


def _run(seed: int, count: int, vocab_size: int) -> list[int]:
    """Tokens that no other seed gives: two of them spell the seed, the others follow."""
    size = vocab_size - 10
    first = seed % (size * size)
    head = [10 + first % size, 10 + first // size]
    start = 10 + (first * 7919) % max(size - count, 1)
    return [*head, *range(start, start + count)][:count]


def read_trace(path: str, *, rate_scale: float = 1.0, most: int | None = None) -> list[TraceRequest]:
    """The requests of a file by arrival; rate_scale: 2 lets them come twice as fast. Raises `ConfigError` that names the line."""
    found: list[TraceRequest] = []
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if most is not None and len(found) >= most:
                    break
                if line.strip():
                    found.append(_read_line(line, f"line {number} of {path}", rate_scale))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"trace is {path}, which cannot be read: {error}.") from error
    if not found:
        raise ConfigError(f"trace is {path}, which has no requests; use a file of JSON lines.")
    found.sort(key=lambda request: request.arrival_s)
    first = found[0].arrival_s
    return [
        TraceRequest(one.arrival_s - first, one.num_prompt_tokens, one.num_output_tokens, one.hash_ids) for one in found
    ]


def _read_line(line: str, where: str, rate_scale: float) -> TraceRequest:
    try:
        record = json.loads(line)
        arrival, num_in, num_out = float(record["timestamp"]) / 1e3, record["input_length"], record["output_length"]
        hash_ids = tuple(record.get("hash_ids") or ())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{where} is {line.strip()[:80]!r}; use an object with numbers timestamp, input_length and output_length."
        ) from error
    for name, value in (("input_length", num_in), ("output_length", num_out)):
        if type(value) is not int or value < 1:
            raise ConfigError(f"{where}: {name} is {value!r}; use an integer of at least 1.")
    if not (math.isfinite(arrival) and arrival >= 0 and all(type(one) is int and one >= 0 for one in hash_ids)):
        raise ConfigError(f"{where}: timestamp and hash_ids must be numbers of at least 0.")
    return TraceRequest(arrival / rate_scale, num_in, num_out, hash_ids)


def chat_requests(
    rate: float, burstiness: float, seed: int | str, *, max_tokens: int, input_len: int | None, output_len: int | None
) -> Iterator[TraceRequest]:
    """Requests without end whose lengths are log-normal, as the workload `sharegpt` of `bench table`, or as given."""
    rng = random.Random(seed)
    for arrival in arrival_times(rate, burstiness, rng):
        num_out = output_len or log_normal(rng, MEDIAN_OUTPUT, SIGMA_OUTPUT, min(MOST_OUTPUT, max(max_tokens // 2, 1)))
        num_in = input_len or log_normal(rng, MEDIAN_INPUT, SIGMA_INPUT, min(MOST_INPUT, max(max_tokens - num_out, 1)))
        yield TraceRequest(arrival, num_in, num_out)


def log_normal(rng: random.Random, median: float, sigma: float, most: int) -> int:
    return max(min(8, most), min(most, int(rng.lognormvariate(math.log(median), sigma))))


def takes(max_tokens: int) -> Callable[[TraceRequest], bool]:
    """Return what tells whether a request fits a model of `max_tokens`."""
    return lambda request: request.num_prompt_tokens + request.num_output_tokens <= max_tokens
