"""`pelton bench load`: minutes of load with random aborts, and what must be true of an engine after them.

First the saturation is measured: as many requests in flight as the engine runs at once, for some seconds. Then requests
arrive at random at a share of that rate, whatever becomes of those before. Some clients go away in the middle. At the end
nothing may be held, no request may have failed, memory and the inter-token latency may not have drifted.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pelton.cli.table import format_table
from pelton.errors import ConfigError, EngineError
from pelton_plugins.bench import memory
from pelton_plugins.bench.arrivals import arrival_times
from pelton_plugins.bench.bounds import check_at_least
from pelton_plugins.bench.http_target import HttpTarget
from pelton_plugins.bench.metrics import LogHistogram, RequestTimes
from pelton_plugins.bench.record import circumstances, flat_settings, number, write_json
from pelton_plugins.bench.table.targets import EngineTarget, Target, TargetState
from pelton_plugins.bench.workloads import random_requests
from pelton_plugins.flags import parse_flags

MIB = 2**20
POOL_SIZE = 512  # different requests; they come again with another first token
SATURATION_DRAIN_S = 300.0
DRAIN_S = 60.0  # what is still running so long after the last request was sent never ends
GIVE_UP_AFTER = 500  # requests that failed one after the other: the engine is not coming back
DOC = """Load an engine for minutes, with clients that go away, then check that nothing leaked and nothing drifted.
The engine runs in a process of its own; with --url it is a server that runs already. Host memory is not looked at then,
and device memory is that of this machine. Exit status 1 when a check fails.

  pelton bench load MODEL --load-format dummy --duration-s 900 --output-json load.json
  pelton bench load --url http://127.0.0.1:8000 --load-fraction 0.9"""


class LoadArguments(msgspec.Struct, frozen=True, kw_only=True):
    """The load, and what is allowed after it."""

    url: str | None = None
    """Load this server instead of an engine of our own."""
    duration_s: float = 900.0
    """Seconds of open-loop load."""
    saturation_s: float = 30.0
    """Seconds to measure the saturation for."""
    saturation_concurrency: int | None = None
    """Requests in flight meanwhile; what the engine runs at once (at most 512) when unset."""
    load_fraction: float = 0.9
    """Share of the saturation's request rate."""
    burstiness: float = 1.0
    """Shape of the Gamma intervals between arrivals."""
    abort_fraction: float = 0.1
    """Share of the requests whose client goes away, after a random number of tokens."""
    max_total_len: int = 2048
    """Most tokens of one request, prompt and answer."""
    sample_s: float = 5.0
    """Seconds between looks at memory."""
    max_device_growth_mib: float = 64.0
    """Device memory: the last third's highest over the first third's."""
    max_host_growth_mib: float = 256.0
    """Host memory of the same thirds, of this process and the engine's; not looked at with --url."""
    max_itl_growth: float = 1.25
    """p99 inter-token latency of the last third over the first third's."""
    output_json: str | None = None
    """Write the result here."""

    def __post_init__(self) -> None:
        if not 0 < self.load_fraction <= 2 or not 0 <= self.abort_fraction < 1:
            raise ConfigError(
                f"load_fraction is {self.load_fraction} and abort_fraction {self.abort_fraction}; use e.g. 0.9 and 0.1."
            )
        if min(self.duration_s, self.saturation_s, self.sample_s) <= 0:
            raise ConfigError("duration_s, saturation_s and sample_s are times; use positive numbers.")
        check_at_least(self, saturation_concurrency=1, max_total_len=2)


@dataclass
class Third:
    """Figures of one third of the load."""

    itls: LogHistogram = field(default_factory=LogHistogram)
    ttfts: LogHistogram = field(default_factory=LogHistogram)
    lateness: LogHistogram = field(default_factory=LogHistogram)
    """Of this client: how long after its time a request was sent. The times of the engine begin with the sending."""
    num_tokens: int = 0
    device_bytes: list[int] = field(default_factory=list)
    host_bytes: list[int] = field(default_factory=list)
    max_in_flight: int = 0


@dataclass
class Seen:
    """The whole load."""

    thirds: list[Third] = field(default_factory=lambda: [Third() for _ in range(3)])
    num_sent: int = 0
    num_completed: int = 0
    num_aborted: int = 0
    num_short: int = 0
    """Ended before their number of tokens, without an abort or an error."""
    num_stuck: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    failed_in_a_row: int = 0


def run(argv: list[str]) -> int:
    parsed = parse_flags(argv, [LoadArguments], program="pelton bench load", doc=DOC)
    arguments: LoadArguments = parsed.structs["LoadArguments"]
    settings = flat_settings(parsed)
    target: Target = HttpTarget(arguments.url) if arguments.url is not None else EngineTarget(settings)
    result = asyncio.run(measure(target, arguments, seed=parsed.config.model.seed))
    result |= circumstances(target.device, settings) | {"arguments": msgspec.to_builtins(arguments)}
    print(render(result))
    write_json(arguments.output_json, result)
    return 0 if all(check["ok"] for check in result["checks"]) else 1


async def measure(target: Target, arguments: LoadArguments, *, seed: int = 0) -> dict[str, Any]:
    await target.start()
    try:
        source = _Source(target, arguments, random.Random(seed))
        rate, tokens_per_s = await _saturate(target, arguments, source)
        await settle(target)
        seen = Seen()
        began = time.perf_counter()
        await _open_loop(target, arguments, source, rate * arguments.load_fraction, seen)
        loaded_s = time.perf_counter() - began
        after = await settle(target)
    finally:
        await target.close()
    return _result(
        arguments, seen, after, rate, tokens_per_s, loaded_s, has_device_memory=target.device.startswith("cuda")
    )


class _Source:
    """Requests without end, and which of them are cut where."""

    def __init__(self, target: Target, arguments: LoadArguments, rng: random.Random) -> None:
        longest = min(arguments.max_total_len, target.max_model_len)
        self._pool = random_requests(POOL_SIZE, target.vocab_size, rng, max_tokens=longest)
        self._vocab_size = target.vocab_size
        self._abort_fraction = arguments.abort_fraction
        self._rng = rng
        self.rng = rng

    def next(self) -> tuple[list[int], int, int | None]:
        """(prompt, output tokens, tokens after which the client goes away)"""
        prompt, num_out = self._rng.choice(self._pool)
        prompt = [self._rng.randrange(10, min(self._vocab_size, 49_000)), *prompt[1:]]
        is_cut = num_out > 1 and self._rng.random() < self._abort_fraction
        return prompt, num_out, self._rng.randrange(1, num_out) if is_cut else None


async def _saturate(target: Target, arguments: LoadArguments, source: _Source) -> tuple[float, float]:
    """(requests/s, tokens/s) with always the same number in flight; the first third of the time does not count."""
    concurrency = arguments.saturation_concurrency or min(target.max_num_seqs, 512)
    began = time.perf_counter()
    counted_from = began + arguments.saturation_s / 3
    end = began + arguments.saturation_s
    num_done, num_tokens = 0.0, 0

    async def client() -> None:
        nonlocal num_done, num_tokens
        while time.perf_counter() < end:
            times, sent = RequestTimes(), time.perf_counter()
            await target.request(*source.next(), times)
            if times.error is not None:
                await asyncio.sleep(0.05)
            # A request counts for the share of its tokens that came within the time.
            inside = sum(counted_from <= sent + token < end for token in times.tokens)
            num_tokens += inside
            num_done += inside / max(len(times.tokens), 1)

    _say(f"measuring the saturation: {concurrency} requests in flight for {arguments.saturation_s:g} s")
    try:
        await asyncio.wait_for(
            asyncio.gather(*(client() for _ in range(concurrency))), arguments.saturation_s + SATURATION_DRAIN_S
        )
    except TimeoutError:
        raise EngineError("Requests that measured the saturation never ended.") from None
    counted_s = end - counted_from
    if not num_done:
        raise ConfigError("No request was served while the saturation was measured; raise --saturation-s.")
    return num_done / counted_s, num_tokens / counted_s


async def _open_loop(target: Target, arguments: LoadArguments, source: _Source, rate: float, seen: Seen) -> None:
    _say(f"load: {rate:.2f} requests/s for {arguments.duration_s:g} s")
    began = time.perf_counter()
    tasks: set[asyncio.Task[None]] = set()

    def third() -> Third:
        return seen.thirds[min(int(3 * (time.perf_counter() - began) / arguments.duration_s), 2)]

    async def one(due: float) -> None:
        prompt, num_out, stop_after = source.next()
        times = RequestTimes()
        sent_in = third()
        sent_in.max_in_flight = max(sent_in.max_in_flight, len(tasks))
        sent_in.lateness.add(time.perf_counter() - began - due)
        try:
            await target.request(prompt, num_out, stop_after, times)
        except Exception as error:  # the target's own mistake, which is to be seen at the end as well
            times.error = f"{type(error).__name__}: {error}"
        _note(seen, third(), sent_in, times, num_out)

    watcher = asyncio.create_task(_watch(target, arguments, third, lambda: len(tasks)))
    for due in arrival_times(rate, arguments.burstiness, source.rng):
        if due >= arguments.duration_s:
            break
        if seen.failed_in_a_row >= GIVE_UP_AFTER:
            _say(f"the last {seen.failed_in_a_row} requests failed: the load ends after {due:.0f} s")
            break
        delay = began + due - time.perf_counter()
        if delay > 0:
            await asyncio.sleep(delay)
        seen.num_sent += 1
        task = asyncio.create_task(one(due))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    if tasks:
        _, stuck = await asyncio.wait(tasks, timeout=DRAIN_S)
        seen.num_stuck = len(stuck)
        for task in stuck:
            task.cancel()
        await asyncio.gather(*stuck, return_exceptions=True)
    watcher.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watcher


def _note(seen: Seen, now: Third, sent_in: Third, times: RequestTimes, num_out: int) -> None:
    for itl in times.itls_s:
        now.itls.add(itl)
    now.num_tokens += len(times.tokens)
    if times.tokens:
        sent_in.ttfts.add(times.ttft_s)
    seen.failed_in_a_row = 0 if times.error is None else seen.failed_in_a_row + 1
    if times.error is not None:
        seen.errors[times.error] = seen.errors.get(times.error, 0) + 1
    elif times.was_aborted:
        seen.num_aborted += 1
    else:
        seen.num_completed += 1
        seen.num_short += len(times.tokens) != num_out


async def _watch(target: Target, arguments: LoadArguments, third: Any, num_in_flight: Any) -> None:
    """Look at memory now and then."""
    began = told = time.perf_counter()
    while True:
        now = third()
        host = await asyncio.to_thread(memory.host_bytes) if target.is_ours else None
        device = await memory.device_bytes()
        now.host_bytes += [host] if host is not None else []
        now.device_bytes += [device] if device is not None else []
        if time.perf_counter() - told >= 60:
            told = time.perf_counter()
            _say(
                f"{told - began:.0f} s: {num_in_flight()} in flight, p99 ITL {now.itls.percentile(99) * 1e3:.2f} ms, "
                f"device {number(_most_mib([device]), 4)} MiB, host {number(_most_mib([host]), 4)} MiB"
            )
        await asyncio.sleep(arguments.sample_s)


async def settle(target: Target, timeout_s: float = 10.0) -> TargetState:
    """The state once what was aborted has left the engine, or after a while."""
    deadline = time.perf_counter() + timeout_s
    while True:
        state = await target.state()
        if (state.kv_cache_usage == 0 and state.num_unfinished == 0) or time.perf_counter() > deadline:
            return state
        await asyncio.sleep(0.1)


def _result(
    arguments: LoadArguments,
    seen: Seen,
    after: TargetState,
    rate: float,
    tokens_per_s: float,
    loaded_s: float,
    *,
    has_device_memory: bool,
) -> dict[str, Any]:
    first, last = seen.thirds[0], seen.thirds[2]
    itl_growth = last.itls.percentile(99) / first.itls.percentile(99)
    device, host = (
        _growth_mib(first.device_bytes, last.device_bytes),
        _growth_mib(first.host_bytes, last.host_bytes),
    )
    checks = [
        check("requests failed", sum(seen.errors.values()), 0),
        check("requests with too few tokens", seen.num_short, 0),
        check("requests that never ended", seen.num_stuck, 0),
        check("requests left in the engine", after.num_unfinished, 0),
        check("KV blocks held, share", after.kv_cache_usage, 0),
        check("p99 ITL, last third over first", itl_growth, arguments.max_itl_growth),
    ]
    if device is not None or has_device_memory:  # not read: NaN, which is not well
        checks.append(
            check("device memory growth, MiB", math.nan if device is None else device, arguments.max_device_growth_mib)
        )
    if host is not None:
        checks.append(check("host memory growth, MiB", host, arguments.max_host_growth_mib))
    return {
        "saturation": {"requests_per_s": rate, "output_tokens_per_s": tokens_per_s},
        "requests_per_s": rate * arguments.load_fraction,
        "duration_s": loaded_s,
        "num_sent": seen.num_sent,
        "num_completed": seen.num_completed,
        "num_aborted": seen.num_aborted,
        "errors": seen.errors,
        "thirds": [
            {
                "output_tokens": third.num_tokens,
                "itl_ms": milliseconds(third.itls),
                "ttft_ms": milliseconds(third.ttfts),
                "sent_late_ms": milliseconds(third.lateness),
                "max_in_flight": third.max_in_flight,
                "device_mib": _most_mib(third.device_bytes),
                "host_mib": _most_mib(third.host_bytes),
            }
            for third in seen.thirds
        ],
        "checks": checks,
    }


def milliseconds(times: LogHistogram) -> dict[str, float]:
    percents = {"p50": 50, "p90": 90, "p99": 99, "max": 100}
    return {name: times.percentile(percent) * 1e3 for name, percent in percents.items()}


def _growth_mib(first: list[int], last: list[int]) -> float | None:
    return (max(last) - max(first)) / MIB if first and last else None


def _most_mib(seen: Sequence[int | None]) -> float | None:
    """None when it was never read."""
    return max((count / MIB for count in seen if count is not None), default=None)


def check(name: str, value: float, limit: float) -> dict[str, Any]:
    return {"name": name, "value": value, "limit": limit, "ok": not math.isnan(value) and value <= limit}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def render(result: dict[str, Any]) -> str:
    rows = [
        (
            name,
            *(number(third[times][which]) for times in ("itl_ms", "ttft_ms") for which in ("p50", "p99", "max")),
            number(third["sent_late_ms"]["p99"]),
            third["max_in_flight"],
            number(third["device_mib"], 4),
            number(third["host_mib"], 4),
        )
        for name, third in zip(("first", "second", "last"), result["thirds"], strict=True)
    ]
    header = (
        "third", "itl p50 ms", "p99", "max", "ttft p50 ms", "p99", "max", "sent late p99", "in flight", "device MiB",
        "host MiB",
    )  # fmt: skip
    checks = [
        ("ok" if check["ok"] else "FAILED", check["name"], number(check["value"]), number(check["limit"]))
        for check in result["checks"]
    ]
    saturation = result["saturation"]
    return "\n".join(
        [
            f"{result['num_sent']} requests in {number(result['duration_s'])} s, {result['num_completed']} completed, "
            f"{result['num_aborted']} aborted, {result['device']}",
            f"  saturation {number(saturation['requests_per_s'])} requests/s, "
            f"{number(saturation['output_tokens_per_s'])} output tokens/s; loaded at {number(result['requests_per_s'])}",
            format_table(header, rows, indent="  "),
            "",
            format_table(("", "check", "value", "at most"), checks, indent="  "),
            *(f"  error: {message} ({count} times)" for message, count in list(result["errors"].items())[:5]),
        ]
    )
