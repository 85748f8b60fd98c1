"""`pelton bench steps`: how long steps take, by what is in them. `pelton simulate` fits its step-time model to the result.

The engine runs in this process and is kept at several numbers of requests in turn. Requests end and others come all the time, so that
steps with and without prompt tokens are met at every size. Each step is written down with what it computed. Where a server and its
clients need the engine's cores, steps are slower than alone: its executor `recorded` writes down the steps of its own requests.
"""

from __future__ import annotations

import math
import random
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import msgspec

from pelton.cli.table import format_table
from pelton.config import EngineConfig
from pelton.config.engine import explicit_names
from pelton.errors import EngineError
from pelton.executor.interface import Executor, StepHandle
from pelton.kv_cache.spec import KVCachePlan
from pelton.messages.report import StepFit
from pelton.messages.request import EngineRequest
from pelton.messages.step import ModelOutput, SchedulerOutput
from pelton.model.resolved import ResolvedModel
from pelton.sampling_params import SamplingParams
from pelton_plugins.bench.bounds import check_at_least
from pelton_plugins.bench.metrics import percentile
from pelton_plugins.bench.record import circumstances, flat_settings, number, write_json
from pelton_plugins.bench.step_rows import count_rows
from pelton_plugins.flags import parse_flags

if TYPE_CHECKING:
    from pelton.engine.core import EngineCore

COLUMNS = (
    "num_decode_rows", "decode_context", "num_prompt_rows", "num_prompt_tokens", "prompt_pairs", "seconds", "launched_s", "ended_s",
)  # fmt: skip
"""Rows of one token and the tokens before them in all; rows of several, their tokens, and token pairs that these attend to. When the
step was launched and its result taken are by the monotonic clock, which all processes of a host share."""
KIND = "pelton step times 2"
DOC = """Time of steps by what they compute: a file for `pelton simulate --step-times`.

  pelton bench steps smollm2 --output-json steps.json
  pelton bench steps MODEL --load-format dummy --seconds 40 --output-json steps.json"""


class StepsArguments(msgspec.Struct, frozen=True, kw_only=True):
    """For how long, and with what requests."""

    seconds: float = 30.0
    """Time that is measured, over all numbers of requests."""
    concurrency: list[int] | None = None
    """Requests that are kept running, in turn; powers of 2 up to max_num_seqs when unset."""
    median_input_len: int = 160
    """Median of the prompts' log-normal lengths."""
    median_output_len: int = 60
    """The same of the answers: shorter than a chat's, so that more steps have prompts in them."""
    output_json: str | None = None
    """Write the steps here, and what a scheduler has to know of the engine."""

    def __post_init__(self) -> None:
        check_at_least(self, seconds=1, concurrency=1, median_input_len=1, median_output_len=1)


def run(argv: list[str]) -> int:
    from pelton.engine.core import EngineCore, make_executor
    from pelton.metrics.plugin_metrics import PluginMetrics
    from pelton.sdk.front_end import FrontEnd

    parsed = parse_flags(argv, [StepsArguments], program="pelton bench steps", doc=DOC)
    arguments: StepsArguments = parsed.structs["StepsArguments"]
    settings = {"skip_tokenizer_init": True, **flat_settings(parsed)}
    front = FrontEnd(EngineConfig.from_flat(**settings), explicit=explicit_names(settings))
    config = front.config
    executor = make_executor(config, front.model, front.plugins, PluginMetrics())
    recorder = StepRecorder(executor)
    core = EngineCore(config, front.model, front.plugins, executor=executor)
    try:
        measure(core, recorder, arguments)
        result = record(core.config, core.model, executor, recorder)
        result |= circumstances(core.info.report.device, settings)
    finally:
        core.shutdown()
    print(render(result))
    write_json(arguments.output_json, result)
    return 0


def facts(config: EngineConfig, model: ResolvedModel, executor: Executor, recorder: StepRecorder) -> dict[str, Any]:
    """Return what a scheduler and a KV-cache manager are made from. config: with the sizes of this device."""
    from pelton.engine.core import max_steps_in_flight

    scheduler, fit = config.scheduler, recorder.fit
    specs = executor.kv_cache_specs()
    return {
        "model": model.name, "vocab_size": model.vocab_size, "max_model_len": model.max_model_len,
        "max_num_seqs": scheduler.max_num_seqs, "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "max_mixed_prefill_tokens": scheduler.max_mixed_prefill_tokens, "num_blocks": recorder.num_blocks,
        "context_tokens": fit.context_tokens if fit else 0,
        "max_steps_in_flight": max_steps_in_flight(config, executor), "num_ranks": config.parallel.num_ranks,
        "kv_cache_specs": {name: {"type": type(spec).__name__, **asdict(spec)} for name, spec in specs.items()},
    }  # fmt: skip


def record(config: EngineConfig, model: ResolvedModel, executor: Executor, recorder: StepRecorder) -> dict[str, Any]:
    """Return all that `pelton simulate` reads."""
    return {
        "kind": KIND,
        "engine": facts(config, model, executor, recorder),
        "columns": COLUMNS,
        "steps": recorder.rows,
        "prompts": recorder.prompts,
    }


class StepRecorder:
    """Notes each step that an executor is given: a row of `COLUMNS` in `rows` once its result was taken.

    A step's time begins with the end of the one before, or with its launch where none was open: host time between is in it.
    """

    def __init__(self, executor: Executor) -> None:
        self.rows: list[list[float]] = []
        self.prompts: list[tuple[float, int]] = []  # of each request: when its first step was launched, its tokens
        self.is_on = False
        self.begins_at = math.inf  # by the monotonic clock, where it is not switched on by hand
        self._context: dict[int, int] = {}  # computed tokens by slot
        self._last_end = 0.0
        self.fit: StepFit | None = None  # as the engine core was told
        self.num_blocks = 0
        launch, fit_step, initialize = executor.execute, executor.fit_step, executor.initialize_kv_cache

        def initialize_kv_cache(plan: KVCachePlan) -> None:
            self.num_blocks = plan.num_blocks
            initialize(plan)

        def fit() -> StepFit | None:
            self.fit = fit_step()
            return self.fit

        def execute(output: SchedulerOutput) -> StepHandle:
            now = time.perf_counter()
            self.prompts += [
                (now, new.num_prompt_tokens) for new in output.new if len(new.token_ids) == new.num_prompt_tokens
            ]
            described = [*count_rows(output, self._context)]
            return _Timed(launch(output), self, described, now)

        executor.execute, executor.fit_step = execute, fit  # type: ignore[method-assign]
        executor.initialize_kv_cache = initialize_kv_cache  # type: ignore[method-assign]

    def ended(self, described: list[float], launched: float) -> None:
        now = time.perf_counter()
        seconds, self._last_end = now - max(self._last_end, launched), now
        if self.is_on or time.monotonic() >= self.begins_at:
            self.rows.append([*described, round(seconds, 8), launched, now])


class _Timed(StepHandle):
    def __init__(self, handle: StepHandle, recorder: StepRecorder, described: list[float], launched: float) -> None:
        self._handle, self._recorder, self._described, self._launched = handle, recorder, described, launched

    def ready(self) -> bool:
        return self._handle.ready()

    def result(self, timeout_s: float | None = None) -> ModelOutput:
        output = self._handle.result(timeout_s)
        self._recorder.ended(self._described, self._launched)
        return output


def measure(core: EngineCore, recorder: StepRecorder, arguments: StepsArguments) -> None:
    """Keep each number of requests running for its share of the time."""
    rng = random.Random(0)
    sizes = arguments.concurrency
    if sizes is None:
        sizes = sorted({min(2**power, core.info.max_num_seqs) for power in range(10)})
    requests = _Requests(core, arguments, rng)
    for size in sizes:  # first: what is compiled or captured at its first use
        requests.keep(size, arguments.seconds / len(sizes) / 4)
    requests.end()
    while core.prepare_ahead():  # as it does when it is idle
        pass
    for size in sizes:
        recorder.is_on = True
        requests.keep(size, arguments.seconds / len(sizes))
        recorder.is_on = False
        requests.end()


class _Requests:
    """Requests of random lengths, with others in the place of those that ended."""

    def __init__(self, core: EngineCore, arguments: StepsArguments, rng: random.Random) -> None:
        self._core, self._arguments, self._rng = core, arguments, rng
        self._running: set[str] = set()
        self._num_made = 0

    def keep(self, size: int, seconds: float) -> None:
        ends = time.perf_counter() + seconds
        while time.perf_counter() < ends:
            while len(self._running) < size:
                self._add()
            for output in self._core.step().outputs:
                if output.error is not None:
                    raise EngineError(f"A request failed: {output.error.message}")
                if output.finish_reason is not None:
                    self._running.discard(output.request_id)

    def end(self) -> None:
        self._core.finish_requests(list(self._running))
        self._running.clear()
        while self._core.has_work():
            self._core.step()

    def _add(self) -> None:
        most = self._core.model.max_model_len
        num_out = min(self._length(self._arguments.median_output_len), max(most // 4, 1))
        num_in = min(self._length(self._arguments.median_input_len), most - num_out)
        tokens = [self._rng.randrange(10, self._core.model.vocab_size) for _ in range(num_in)]
        params = SamplingParams(temperature=0.0, max_tokens=num_out, ignore_eos=True, detokenize=False)
        self._num_made += 1
        name = str(self._num_made)
        self._running.add(name)
        self._core.add_request(EngineRequest(request_id=name, prompt_token_ids=tokens, sampling_params=params))

    def _length(self, median: int) -> int:
        return max(int(self._rng.lognormvariate(math.log(median), 1.0)), 2)


def render(result: dict[str, Any]) -> str:
    """Medians of steps without prompt tokens, by their number of rows."""
    by_rows: dict[int, list[float]] = {}
    for decode_rows, _, prompt_rows, _, _, seconds, *_ in result["steps"]:
        if not prompt_rows and decode_rows:
            by_rows.setdefault(2 ** math.ceil(math.log2(decode_rows)), []).append(seconds * 1e3)
    rows = [
        (str(most), str(len(times)), number(percentile(times, 50)), number(percentile(times, 99)))
        for most, times in sorted(by_rows.items())
    ]
    head = f"{len(result['steps'])} steps, {result['device']}; those of decode alone:"
    return f"{head}\n" + format_table(("rows up to", "steps", "p50 ms", "p99 ms"), rows, indent="  ")
