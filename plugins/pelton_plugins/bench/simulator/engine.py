"""`SimulatedEngine`: the scheduler and KV-cache manager that an engine has, over steps that take as long as `StepTimes` says.

Steps are opened and taken in as `EngineCore` does, with as many open at once. A run of steps in which all requests decode and nothing
else happens is skipped as one, where the scheduler can: the skipped steps end when they would have ended.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from pelton.config import EngineConfig
from pelton.engine.core import make_kv_manager
from pelton.errors import ConfigError
from pelton.kv_cache import spec as specs
from pelton.kv_cache.hashing import BlockHasher
from pelton.kv_cache.planner import plan_kv_cache
from pelton.kv_cache.spec import KVCacheSpec
from pelton.messages.request import EngineRequest
from pelton.messages.step import ModelOutput, SchedulerOutput
from pelton.metrics.plugin_metrics import PluginMetrics
from pelton.model.resolved import ResolvedModel
from pelton.plugins import Plugins, make
from pelton.sampling_params import SamplingParams
from pelton.scheduler.interface import Scheduler, SchedulerContext
from pelton.scheduler.policy import SchedulingPolicy
from pelton_plugins.bench.metrics import LogHistogram
from pelton_plugins.bench.simulator.paths import Paths
from pelton_plugins.bench.simulator.step_times import Scatter, StepTimes
from pelton_plugins.bench.step_rows import count_rows
from pelton_plugins.bench.trace import TraceRequest

TOKEN = 5
MOST_KEPT = 1 << 18
MOST_DRAWN, NUM_SPREAD = 24, 24  # steps whose times are drawn one by one; drawn for more than that
MOST_SKIPPED = 256  # the time of a step is taken as equal within so many


class Times:
    """Values with counts, taken into a histogram many at once."""

    def __init__(self) -> None:
        self._values, self._counts = array("d"), array("q")
        self._histogram = LogHistogram()

    def add(self, value: float, count: int = 1) -> None:
        self._values.append(value)
        self._counts.append(count)
        if len(self._values) >= MOST_KEPT:
            self.histogram()

    def histogram(self) -> LogHistogram:
        """Return the histogram of all that was added."""
        if self._values:
            self._histogram.add_many(np.frombuffer(self._values), np.frombuffer(self._counts, dtype=np.int64))
            self._values, self._counts = array("d"), array("q")
        return self._histogram


class Figures:
    """Figures of all engines as clients see them: seconds, on histograms."""

    def __init__(self) -> None:
        self.ttft, self.itl, self.tpot, self.e2e = (Times() for _ in range(4))
        self.counts = dict.fromkeys(
            ("completed", "refused", "input_tokens", "output_tokens", "preemptions", "prefix_queries", "prefix_hits", "steps", "events"),
            0,
        )  # fmt: skip
        self.busy_s = self.last_s = 0.0


class _Request:
    """Times of a request that is in flight."""

    __slots__ = ("arrival", "first", "front", "last", "num_tokens")

    def __init__(self, arrival: float, front: int) -> None:
        self.arrival, self.first, self.last, self.num_tokens = arrival, -1.0, -1.0, 0  # as its client sees them
        self.front = front


class _Run:
    """Steps that are skipped unless a request comes: the open ones end at `ends`, later ones every `step_s`.

    outs: of the open ones, seconds from there to the clients."""

    __slots__ = ("ends", "most", "outs", "step_s")

    def __init__(self, ends: list[float], outs: list[float], step_s: float, most: int) -> None:
        self.ends, self.outs, self.step_s, self.most = ends, outs, step_s, most

    def end(self, index: int) -> float:
        """When the step of this number ends, from 0."""
        known = len(self.ends)
        return self.ends[index] if index < known else self.ends[-1] + (index - known + 1) * self.step_s

    def num_ended(self, now: float) -> int:
        num = sum(end <= now for end in self.ends)
        if num == len(self.ends):
            num += int((now - self.ends[-1]) / self.step_s + 1e-9)
        return min(num, self.most)


class SimulatedEngine:
    """clock: of the scheduler's events. All times are seconds of the simulation."""

    def __init__(
        self, scheduler: Scheduler, times: StepTimes, paths: Paths, figures: Figures, max_steps_in_flight: int
    ) -> None:
        self._scheduler, self._times, self._paths, self._figures = scheduler, times, paths, figures
        self._max_open = max_steps_in_flight
        self._skipper: Any = getattr(scheduler, "skipper", None)
        self._open: deque[tuple[SchedulerOutput, float, bool, float]] = deque()
        """With its end, whether it only decodes, and how long it takes from there to the clients."""
        self._busy_until = 0.0
        self._run: _Run | None = None
        self._context: dict[int, int] = {}  # computed tokens by slot
        self._requests: dict[str, _Request] = {}
        self._num_fresh = 0  # of them, without a token so far
        self.num_waiting = self.num_running = 0  # as it last told
        self.num_of_front: dict[int, int] = {}  # requests in flight that an API process has sent

    @property
    def num_in_flight(self) -> int:
        return len(self._requests)

    @property
    def next_event(self) -> float | None:
        """When something happens here by itself."""
        if self._run is not None:
            return self._run.end(self._run.most)
        return self._open[0][1] if self._open else None

    def add(self, request: EngineRequest, now: float, sent: float, front: int = 0) -> None:
        """A request arrives that a client has sent before, through an API process. Raises what the scheduler raises."""
        if self._run is not None:
            self._leave_run(self._run.num_ended(now))
        self._scheduler.add_request(request)
        self._requests[request.request_id] = _Request(sent, front)
        self.num_of_front[front] = self.num_of_front.get(front, 0) + 1
        self._num_fresh += 1
        self._launch(now)

    def advance(self) -> None:
        """Let happen what happens at `next_event`."""
        if self._run is not None:
            self._leave_run(self._run.most)
        output, now, _, out_s = self._open.popleft()
        self._figures.counts["events"] += 1
        result = ModelOutput(
            step_id=output.step_id, token_ids=[[TOKEN] if samples else [] for samples in output.samples]
        )
        num_rows = len(output.slots)
        for told in self._scheduler.update(output, result):
            self._tell(told, now, out_s, num_rows)
        for told in self._scheduler.take_outputs():
            self._tell(told, now, out_s, num_rows)
        self._launch(now)
        stats = self._scheduler.take_stats()
        self.num_waiting, self.num_running = stats.num_waiting_reqs, stats.num_running_reqs
        counts = self._figures.counts
        counts["preemptions"] += stats.num_preemptions
        counts["prefix_queries"] += stats.prefix_cache_queries
        counts["prefix_hits"] += stats.prefix_cache_hits
        counts["steps"] += stats.num_steps
        self._figures.last_s = max(self._figures.last_s, now)
        self._try_run()

    def _tell(self, told: Any, ended: float, out_s: float, num_rows: int) -> None:
        times = self._requests.get(told.request_id)
        if times is None:
            return
        figures, count = self._figures, len(told.new_token_ids)
        if count:
            if times.first < 0:
                times.first = now = ended + self._paths.first_token(num_rows)
                self._num_fresh -= 1
                figures.ttft.add(now - times.arrival)
            else:
                now = max(ended + out_s, times.last)
                figures.itl.add(now - times.last)
            times.last = now
            times.num_tokens += count
        if told.finish_reason is not None:
            del self._requests[told.request_id]
            self.num_of_front[times.front] -= 1
            self._num_fresh -= times.first < 0
            if told.error is not None:
                figures.counts["refused"] += 1
                return
            figures.counts["completed"] += 1
            figures.counts["output_tokens"] += times.num_tokens
            figures.e2e.add(times.last - times.arrival)
            if times.num_tokens > 1:
                figures.tpot.add((times.last - times.first) / (times.num_tokens - 1))

    def _launch(self, now: float) -> None:
        while len(self._open) < self._max_open:
            output = self._scheduler.schedule()
            if output is None:
                return
            seconds, is_decode, out_s = self._seconds(output, now >= self._busy_until)
            start = max(now, self._busy_until)
            self._busy_until = start + seconds
            self._figures.busy_s += seconds
            self._open.append((output, self._busy_until, is_decode, out_s))

    def _seconds(self, output: SchedulerOutput, is_first: bool) -> tuple[float, bool, float]:
        rows, times = count_rows(output, self._context), self._times
        is_decode = not rows.num_prompt_rows
        mean = times.decode(rows.num_decode_rows, rows.decode_context) if is_decode else times.mixed(*rows)
        num_tokens = rows.num_decode_rows + rows.num_prompt_tokens
        seconds, out_s = times.draw(mean, num_tokens, is_decode=is_decode, is_first=is_first)
        return seconds, is_decode, out_s

    # Runs of steps that only decode.

    def _try_run(self) -> None:
        if self._skipper is None or self._num_fresh or len(self._open) < self._max_open:
            return
        if not all(is_decode for _, _, is_decode, _ in self._open):
            return
        most = self._skipper.most(MOST_SKIPPED)
        if most < 2:
            return
        slots = self._open[-1][0].slots
        context = sum(map(self._context.__getitem__, slots)) + len(slots) * most / 2
        step_s = self._times.decode(len(slots), context)
        self._run = _Run([end for _, end, _, _ in self._open], [out_s for *_, out_s in self._open], step_s, most)

    def _leave_run(self, count: int) -> None:
        """Take the run's first `count` steps as done; those that are open then go on."""
        run, self._run = self._run, None
        assert run is not None
        if not count:
            return
        self._skipper.skip(count, TOKEN)
        last = run.end(count - 1)
        num_later = max(count - len(run.ends), 0)  # whose ends were not drawn
        scatter = self._times.decode_scatter(len(self._open[-1][0].slots))
        known = [end + out_s for end, out_s in zip(run.ends, run.outs, strict=True)][:count]
        last_out = run.outs[count - 1] if count <= len(run.ends) else scatter.next(self._times.rng)[1]
        add = self._figures.itl.add
        for times in self._requests.values():
            add(max(known[0] - times.last, 0.0))
            times.last = last + last_out
            times.num_tokens += count
        num_rows = len(self._requests)
        for early, late in pairwise(known):
            add(max(late - early, 0.0), num_rows)
        self._add_scattered(scatter, run.step_s, num_later, num_rows)
        for slot in self._open[-1][0].slots:
            self._context[slot] += count
        outputs = [output for output, *_ in self._open]
        self._open = deque(
            (output, run.end(count + place), True, scatter.next(self._times.rng)[1])
            for place, output in enumerate(outputs)
        )
        self._busy_until = self._open[-1][1]
        self._figures.busy_s += count * run.step_s
        self._figures.last_s = max(self._figures.last_s, last)

    def _add_scattered(self, scatter: Scatter, step_s: float, num_steps: int, num_rows: int) -> None:
        """Times between tokens of skipped steps, as they are scattered: one for each where they are few."""
        add, rng = self._figures.itl.add, self._times.rng
        if num_steps <= MOST_DRAWN:
            out_s = scatter.next(rng)[1]
            for _ in range(num_steps):
                ratio, next_out = scatter.next(rng)
                add(max(step_s * ratio + next_out - out_s, 0.0), num_rows)
                out_s = next_out
            return
        share, extra = divmod(num_steps, NUM_SPREAD)
        out_s = scatter.next(rng)[1]
        for place in range(NUM_SPREAD):
            ratio, next_out = scatter.next(rng)
            add(max(step_s * ratio + next_out - out_s, 0.0), num_rows * (share + (place < extra)))
            out_s = next_out


def engine_maker(
    config: EngineConfig,
    facts: dict[str, Any],
    plugins: Plugins,
    times: StepTimes,
    clock: Callable[[], float],
    paths: Paths,
) -> Callable[[Figures], SimulatedEngine]:
    """Return what makes one engine after the other. facts: `engine` of what `pelton bench steps` wrote; settings of `config` that were
    given win over them. Raises `ConfigError`."""
    scheduler_config, kv_cache = config.scheduler, config.kv_cache
    model = ResolvedModel(
        name=facts["model"], path="", weights_format="dummy", hf_config={}, architecture="none", dtype="bfloat16",
        max_model_len=config.model.max_model_len or facts["max_model_len"], vocab_size=facts["vocab_size"], eos_token_ids=[],
        generation_config={}, tokenizer_path=None,
    )  # fmt: skip
    plan = plan_kv_cache(
        {name: _spec(dict(fields)) for name, fields in facts["kv_cache_specs"].items()}, 0,
        num_blocks_override=kv_cache.num_gpu_blocks_override or facts["num_blocks"], max_model_len=model.max_model_len,
        disable_hybrid=kv_cache.disable_hybrid_kv_cache_manager, max_num_batched_tokens=scheduler_config.max_num_batched_tokens,
    )  # fmt: skip
    policy_entry = plugins.find(
        "pelton_scheduling_policies", scheduler_config.scheduling_policy, setting="scheduling_policy"
    )
    entry = plugins.find("pelton_schedulers", scheduler_config.scheduler, setting="scheduler")
    max_open = facts["max_steps_in_flight"] if scheduler_config.async_scheduling else 1

    def make_one(figures: Figures) -> SimulatedEngine:
        metrics = PluginMetrics()
        kv_manager = make_kv_manager(config, model, plugins, plan, metrics)
        policy = make(policy_entry, SchedulingPolicy)  # type: ignore[type-abstract]
        policy.configure(config)
        hasher = None
        if kv_cache.enable_prefix_caching and plan.groups:
            hasher = BlockHasher(kv_cache.prefix_caching_hash_algo, plan.hash_block_size)
        context = SchedulerContext(
            config=scheduler_config, kv_manager=kv_manager, max_model_len=model.max_model_len,
            max_num_seqs=scheduler_config.max_num_seqs or 1, max_num_batched_tokens=scheduler_config.max_num_batched_tokens or 1,
            block_sizes=[group.spec.block_size for group in plan.groups], vocab_size=model.vocab_size, hasher=hasher, policy=policy,
            max_steps_in_flight=max_open, context_tokens=facts["context_tokens"], engine_config=config, clock=clock, metrics=metrics,
        )  # fmt: skip
        return SimulatedEngine(make(entry, Scheduler, context), times, paths, figures, max_open)  # type: ignore[type-abstract]

    return make_one


def _spec(fields: dict[str, Any]) -> KVCacheSpec:
    kind = getattr(specs, str(fields.pop("type", "")), None)
    if not (isinstance(kind, type) and issubclass(kind, KVCacheSpec)):
        raise ConfigError("step_times has a kind of KV cache that is a plugin's; the simulator knows Pelton's own.")
    return kind(**fields)


def engine_request(request: TraceRequest, number: int, vocab_size: int) -> EngineRequest:
    params = SamplingParams(temperature=0.0, max_tokens=request.num_output_tokens, ignore_eos=True, detokenize=False)
    return EngineRequest(
        request_id=str(number), prompt_token_ids=request.tokens(number, vocab_size), sampling_params=params
    )
