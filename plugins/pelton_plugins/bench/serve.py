"""`pelton bench serve`: requests that arrive at random at a server. Figures as vLLM's command defines them.

TTFT is the time to the first token, an ITL the time between two, TPOT a request's mean ITL, E2E its TTFT and all its
ITLs. Goodput counts the requests that meet every objective.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from pelton.cli.table import format_table
from pelton.errors import ConfigError, EngineError
from pelton_plugins.bench.arrivals import arrival_times
from pelton_plugins.bench.bounds import check_at_least
from pelton_plugins.bench.http_target import HttpTarget
from pelton_plugins.bench.metrics import RequestTimes, read_slos, summary
from pelton_plugins.bench.record import circumstances, number, write_json
from pelton_plugins.bench.table.targets import Target
from pelton_plugins.bench.trace import read_trace, takes
from pelton_plugins.bench.workloads import synthetic_requests
from pelton_plugins.flags import parse_flags

MIN_VOCAB_SIZE = 11  # prompts are made of token ids from 10 on
DOC = """Send requests to a running server at random times, and measure what its clients see.

  pelton bench serve --url http://127.0.0.1:8000 --request-rate 4 --num-prompts 200
  pelton bench serve --request-rate 16 --burstiness 0.5 --max-concurrency 64 --goodput ttft:300 tpot:30"""


class ServeArguments(msgspec.Struct, frozen=True, kw_only=True):
    """The server, and how requests arrive."""

    url: str = "http://127.0.0.1:8000"
    """Where it listens."""
    model: str | None = None
    """Its name for the model; the first that it names when unset."""
    num_prompts: int = 1000
    """How many requests."""
    request_rate: float = math.inf
    """Mean arrivals a second; all at once when unset."""
    burstiness: float = 1.0
    """Shape of the Gamma intervals: 1 is a Poisson process, less comes in bursts, more is steadier."""
    max_concurrency: int | None = None
    """Requests in flight; those above wait at the client, and their clock starts when they are sent."""
    client_processes: int = 1
    """Processes that send them and read the answers, where one would take tokens late. Not with max_concurrency."""
    trace: str | None = None
    """Requests as Mooncake's JSON lines, in place of those that are drawn: their times, lengths and shared beginnings."""
    input_len: int | None = None
    """Tokens of each prompt; log-normal lengths when unset."""
    output_len: int | None = None
    """Tokens of each answer; 128 with --input-len alone, else log-normal too when unset."""
    vocab_size: int = 10_000
    """Prompts are random token ids below this."""
    goodput: list[str] = msgspec.field(default_factory=list)
    """Objectives in milliseconds, such as ttft:200 tpot:20 e2el:4000."""
    metric_percentiles: list[float] = msgspec.field(default_factory=lambda: [50.0, 90.0, 99.0])
    """Percentiles to show."""
    seed: int = 0
    """Of arrivals, lengths and tokens."""
    output_json: str | None = None
    """Write the result here, with every request's times."""

    def __post_init__(self) -> None:
        check_at_least(
            self,
            num_prompts=1,
            max_concurrency=1,
            client_processes=1,
            input_len=1,
            output_len=1,
            vocab_size=MIN_VOCAB_SIZE,
        )
        if self.max_concurrency is not None and self.client_processes > 1:
            raise ConfigError("client_processes do not know of each other's requests; leave out max_concurrency.")
        for percent in self.metric_percentiles:
            if not 0 <= percent <= 100:
                raise ConfigError(f"metric_percentiles has {percent}; use numbers from 0 to 100.")


def run(argv: list[str]) -> int:
    arguments = read_arguments(argv)
    slos = read_slos(arguments.goodput)
    target = target_of(arguments)
    if arguments.client_processes == 1:
        done, seconds = asyncio.run(measure(target, arguments))
    else:
        from pelton_plugins.bench.serve_clients import measure_in_processes

        asyncio.run(_start(target, arguments.url))
        done, seconds = measure_in_processes(argv, arguments.client_processes)
    result = figures(done, seconds, slos, arguments.metric_percentiles)
    result |= circumstances(target.device, msgspec.to_builtins(arguments))
    print(render(result))
    details = [_times_record(times) for times in done]
    write_json(arguments.output_json, {**result, "requests": details})
    return 1 if result["failed"] else 0


def read_arguments(argv: list[str]) -> ServeArguments:
    parsed = parse_flags(
        argv, [ServeArguments], positional=None, program="pelton bench serve", doc=DOC, engine=False, environ={}
    )
    found: ServeArguments = parsed.structs["ServeArguments"]
    return found


def target_of(arguments: ServeArguments) -> Target:
    return HttpTarget(arguments.url, model=arguments.model, vocab_size=arguments.vocab_size)


async def _start(target: Target, url: str) -> None:
    try:
        await target.start()
    except OSError as error:
        raise EngineError(f"{url} cannot be reached: {error}. Is the server running?") from error


async def measure(
    target: Target, arguments: ServeArguments, place: int = 0, begins: Callable[[], float] = time.perf_counter
) -> tuple[list[RequestTimes], float]:
    """Send the requests of one of the client processes; returns their times, and when the last has ended, in seconds from the beginning.

    begins: called once all is ready; returns when the trace begins, by `time.perf_counter`.
    """
    await _start(target, arguments.url)
    requests, arrivals = _workload(arguments, target.max_model_len)
    count = arguments.client_processes
    own = list(itertools.islice(arrivals, len(requests)))[place::count]
    began = begins()
    await asyncio.sleep(max(began - time.perf_counter(), 0))
    done = await send(target, requests[place::count], own, arguments.max_concurrency)
    return done, time.perf_counter() - began


def _workload(arguments: ServeArguments, max_tokens: int) -> tuple[list[tuple[list[int], int]], Iterable[float]]:
    """(prompt, output tokens) of each request, and when it is sent."""
    if arguments.trace is not None:
        trace = list(filter(takes(max_tokens), read_trace(arguments.trace, most=arguments.num_prompts)))
        made = [one.tokens(number, arguments.vocab_size) for number, one in enumerate(trace)]
        counts = [one.num_output_tokens for one in trace]
        return list(zip(made, counts, strict=True)), [one.arrival_s for one in trace]
    rng = random.Random(arguments.seed)
    requests = synthetic_requests(
        arguments.num_prompts,
        arguments.input_len,
        arguments.output_len,
        arguments.vocab_size,
        rng,
        max_tokens=max_tokens,
    )
    return requests, arrival_times(arguments.request_rate, arguments.burstiness, rng)


async def send(
    target: Target,
    requests: Sequence[tuple[list[int], int]],
    arrivals: Iterable[float],
    max_concurrency: int | None = None,
) -> list[RequestTimes]:
    """Send each request at its time, whatever became of those before; returns when all are done."""
    gate = asyncio.Semaphore(max_concurrency) if max_concurrency is not None else contextlib.nullcontext()
    done = [RequestTimes() for _ in requests]

    async def one(index: int) -> None:
        async with gate:
            await target.request(*requests[index], None, done[index])

    began = time.perf_counter()
    tasks = []
    for index, due in zip(range(len(requests)), arrivals, strict=False):
        delay = began + due - time.perf_counter()
        if delay > 0:
            await asyncio.sleep(delay)
        tasks.append(asyncio.create_task(one(index)))
    await asyncio.gather(*tasks)
    return done


def figures(
    done: Sequence[RequestTimes], seconds: float, slos_ms: Mapping[str, float], percents: Sequence[float]
) -> dict[str, Any]:
    good = [times for times in done if times.error is None and times.tokens]
    num_out = sum(len(times.tokens) for times in good)
    tpots = [tpot for times in good if (tpot := times.tpot_s) is not None]
    result: dict[str, Any] = {
        "duration_s": seconds,
        "completed": len(good),
        "failed": len(done) - len(good),
        "errors": sorted({times.error for times in done if times.error is not None})[:5],
        "total_input_tokens": sum(times.num_prompt_tokens for times in good),
        "total_output_tokens": num_out,
        "request_throughput": len(good) / seconds,
        "output_throughput": num_out / seconds,
        "ttft_ms": summary([times.ttft_s for times in good], percents, scale=1e3),
        "tpot_ms": summary(tpots, percents, scale=1e3),
        "itl_ms": summary([itl for times in good for itl in times.itls_s], percents, scale=1e3),
        "e2el_ms": summary([times.e2e_s for times in good], percents, scale=1e3),
    }
    if slos_ms:
        num_good = sum(times.meets(slos_ms) for times in good)
        result |= {"goodput_slos_ms": dict(slos_ms), "good_completed": num_good, "request_goodput": num_good / seconds}
    return result


def _times_record(times: RequestTimes) -> dict[str, Any]:
    return {
        "num_prompt_tokens": times.num_prompt_tokens, "sent_s": times.sent_s, "token_times_s": times.tokens, "error": times.error,
    }  # fmt: skip


LATENCIES = {
    "time to first token": "ttft_ms",
    "time per output token": "tpot_ms",
    "inter-token latency": "itl_ms",
    "end-to-end latency": "e2el_ms",
}


def render(result: dict[str, Any]) -> str:
    columns = list(result["ttft_ms"])
    rows = [(label, *(number(result[name][column]) for column in columns)) for label, name in LATENCIES.items()]
    lines = [
        f"{result['completed']} requests in {number(result['duration_s'])} s, {result['failed']} failed; "
        f"{result['total_input_tokens']} tokens in, {result['total_output_tokens']} out, {result['device']}",
        f"  {number(result['request_throughput'])} requests/s, {number(result['output_throughput'])} output tokens/s",
    ]
    if "request_goodput" in result:
        limits = ", ".join(f"{name} <= {limit:g} ms" for name, limit in result["goodput_slos_ms"].items())
        lines.append(f"  {number(result['request_goodput'])} requests/s of goodput ({limits})")
    lines.append(format_table(("ms", *columns), rows, indent="  "))
    return "\n".join([*lines, *(f"  error: {error}" for error in result["errors"])])
