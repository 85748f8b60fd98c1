"""`EngineCore`: the step loop of one engine. Schedules steps ahead, waits for the oldest, takes its result in.

It owns the executor, the KV plan and the scheduler, and runs in whichever thread calls `step`: always one at a time.
No request and no failed step ends it; only a dead executor does.
"""

from __future__ import annotations

import inspect
import logging
import math
import time
from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from pelton.config import EngineConfig
from pelton.entries import Entry
from pelton.errors import (
    ConfigError,
    EngineDeadError,
    EngineError,
    ErrorInfo,
    NotSupportedError,
    PeltonError,
    RequestError,
    error_info,
)
from pelton.executor.interface import Executor, ExecutorContext, StepHandle
from pelton.executor.select import find_executor
from pelton.kv_cache.hashing import BlockHasher
from pelton.kv_cache.interface import KVCacheManager, KVManagerContext
from pelton.kv_cache.planner import plan_kv_cache
from pelton.kv_cache.spec import KVCachePlan
from pelton.kv_transfer.interface import SchedulerConnector
from pelton.kv_transfer.select import find_connector
from pelton.logging import phase
from pelton.messages.outputs import EngineOutput, EngineOutputs, FinishReason
from pelton.messages.report import EngineInfo, StepFit
from pelton.messages.request import AdapterRef, EngineRequest
from pelton.messages.step import GrammarMasks, ModelOutput, SchedulerOutput
from pelton.metrics.plugin_metrics import PluginMetrics
from pelton.metrics.stats import HOST_STAGES, STEP, WAIT
from pelton.model.resolve import load_tokenizer
from pelton.model.resolved import ResolvedModel
from pelton.plugins import Plugins, calling, make
from pelton.scheduler.interface import AdapterLoads, Scheduler, SchedulerContext
from pelton.scheduler.policy import SchedulingPolicy
from pelton.spec_decode.select import make_draft_proposer
from pelton.structured.interface import StructuredOutputBackend, StructuredOutputContext
from pelton.structured.manager import GrammarManager
from pelton.utils import garbage

logger = logging.getLogger(__name__)

IDLE_POLL_S = 0.001  # while requests wait for something that no step brings (a grammar, an adapter)
IDLE_WARNING_S = 30.0  # so long without a step, while requests wait, is said once


class EngineCore:
    """One engine. Construct (long: loads the model), then `add_request` and `step` in turns, then `shutdown`.

    executor: for tests; otherwise the one that the settings name is built, of what was started `ahead`.
    """

    def __init__(
        self, config: EngineConfig, model: ResolvedModel, plugins: Plugins, *, executor: Executor | None = None, ahead: Any = None,
    ) -> None:  # fmt: skip
        config = without_chunks(config, model)
        budget_is_open = config.scheduler.max_num_batched_tokens is None and config.scheduler.enable_chunked_prefill
        self.config = config = resolve_sizes(config, model, plugins)
        self.model = model
        self.plugins = plugins
        self.error: Exception | None = None
        self._metrics = PluginMetrics()
        self._executor = executor or make_executor(config, model, plugins, self._metrics, ahead)
        self._is_shut_down = False
        self._context_tokens = 0
        self._grammars: GrammarManager | None = None
        try:
            # Their parts are timed by the executor, in its report: timed here too they would count twice.
            with phase("plan KV cache"), plugins.blaming("when memory for the KV cache is measured"):
                self.plan = make_plan(config, model, self._executor)
            with phase("allocate KV cache and warm up"), plugins.blaming("in the warm-up"):
                self._executor.initialize_kv_cache(self.plan)
                if budget_is_open:
                    fit = self._executor.fit_step()
                    self.config = config = with_step_budget(config, fit)
                    self._context_tokens = fit.context_tokens if fit else 0
            with plugins.blaming("when the scheduler and its parts are made"):
                self._kv = make_kv_manager(config, model, plugins, self.plan, self._metrics)
                self._grammars = make_grammar_manager(config, model, plugins, self._metrics)
                self._max_steps_in_flight = max_steps_in_flight(config, self._executor)
                self._launches_past_masks = self._executor.launches_past_masks and self._max_steps_in_flight > 1
                self._scheduler = self._make_scheduler()
                if config.lora.enable_lora and self._scheduler.adapters is None:
                    raise ConfigError(
                        f"enable_lora is set, and scheduler {config.scheduler.scheduler!r} serves no adapters. Leave it out, or choose "
                        "another scheduler."
                    )
        except BaseException:
            self.shutdown()
            raise
        self._open: deque[tuple[SchedulerOutput, StepHandle]] = deque()
        self._unmasked: deque[SchedulerOutput] = deque()  # open steps that wait for their masks
        self._kept: list[EngineOutput] = []  # outputs to be told by the next `step`
        self._has_news = False  # something ended since stats were last told
        self._num_failed_steps, self._step_failure = 0, ""
        self._request_ids: set[str] = set()
        self._host_s = dict.fromkeys((*HOST_STAGES, WAIT), 0.0)
        self._idle_mark: dict[str, float] | None = None  # `_host_s` when requests were last seen to wait for no step
        self._idle_until = 0.0
        self.info = self._describe()
        garbage.tune(self)

    def _make_scheduler(self) -> Scheduler:
        config, plugins = self.config, self.plugins
        name = config.scheduler.scheduling_policy
        entry = plugins.find("pelton_scheduling_policies", name, setting="scheduling_policy")
        policy = make(entry, SchedulingPolicy)  # type: ignore[type-abstract]
        with calling(entry):
            policy.configure(config)
        entry = plugins.find("pelton_schedulers", config.scheduler.scheduler, setting="scheduler")
        kv_cache, num_device_drafts = config.kv_cache, self._executor.report().num_draft_tokens
        hasher = None
        if kv_cache.enable_prefix_caching and self.plan.groups:
            hasher = BlockHasher(kv_cache.prefix_caching_hash_algo, self.plan.hash_block_size)
        max_num_seqs, max_num_batched_tokens = config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens
        assert max_num_seqs is not None and max_num_batched_tokens is not None  # resolved
        return make(
            entry,
            Scheduler,  # type: ignore[type-abstract]
            SchedulerContext(
                config=config.scheduler, kv_manager=self._kv, max_model_len=self.model.max_model_len,
                max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens,
                block_sizes=[group.spec.block_size for group in self.plan.groups], vocab_size=self.model.vocab_size,
                hasher=hasher, policy=policy, steps_are_ordered=self._executor.steps_are_ordered,
                max_steps_in_flight=self._max_steps_in_flight + self._launches_past_masks, grammar_source=self._grammars,
                proposer=None if num_device_drafts else make_draft_proposer(config, self.model, plugins, self._metrics),
                num_draft_tokens=num_device_drafts, connector=self._make_connector(),
                adapters=adapter_loads(config, self._executor), context_tokens=self._context_tokens,
                min_acceptance_rate=config.speculative.min_acceptance_rate, engine_config=config, metrics=self._metrics,
                is_pooling=self.model.is_pooling,
            ),
        )  # fmt: skip

    def _make_connector(self) -> SchedulerConnector | None:
        found = find_connector(self.config, self.model, self.plugins, self.plan, self._metrics)
        return None if found is None else found[0].for_scheduler(found[1])

    def _describe(self) -> EngineInfo:
        config, plan, report = self.config, self.plan, self._executor.report()
        scheduler = config.scheduler
        assert scheduler.max_num_seqs is not None and scheduler.max_num_batched_tokens is not None
        settings = {name: str(value) for name, value in msgspec.structs.asdict(config.kv_cache).items()}
        block_size = plan.groups[0].spec.block_size if plan.groups else config.kv_cache.block_size
        settings |= {"block_size": str(block_size), "num_gpu_blocks": str(plan.num_blocks)}
        if plan.num_padding_layers:
            num_layers = sum(len(group.layer_names) for group in plan.groups)
            num_places = num_layers + plan.num_padding_layers
            note = f"KV cache: {num_layers} layers take the memory of {num_places}, so that groups are of equal size"
            report = msgspec.structs.replace(report, notes=[*report.notes, note])
        return EngineInfo(
            report=report, num_blocks=plan.num_blocks, block_size=block_size,
            kv_cache_bytes=sum(tensor.size_bytes for tensor in plan.tensors), max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens, max_model_len=self.model.max_model_len,
            phase_s=dict(report.phase_s), plugin_digest=self.plugins.digest(), cache_config=settings,
        )  # fmt: skip

    # Requests.

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request. Raises `RequestError`, or `EngineDeadError`."""
        self._check_alive()
        try:
            self._scheduler.add_request(request)
        except PeltonError:
            raise
        except Exception as error:
            logger.exception("Adding request %s failed.", request.request_id)
            raise EngineError(f"Internal error while adding the request: {type(error).__name__}: {error}") from error
        self._request_ids.add(request.request_id)
        self._has_news = True  # it may wait for something that no step brings

    def try_add(self, request: EngineRequest) -> EngineOutput | None:
        """Add a request; what refuses it becomes its output."""
        try:
            self.add_request(request)
            return None
        except Exception as error:
            return EngineOutput(request.request_id, finish_reason=FinishReason.ERROR, error=error_info(error))

    def finish_requests(
        self, request_ids: Sequence[str], reason: FinishReason = FinishReason.ABORT, error: ErrorInfo | None = None
    ) -> None:
        """End requests; those with a reason other than STOP get a last output from the next `step`."""
        known = [request_id for request_id in request_ids if request_id in self._request_ids]
        if known:
            self._scheduler.finish_requests(known, reason, error)
            self._request_ids.difference_update(known)
            self._has_news = True

    def has_unfinished_requests(self) -> bool:
        return self._scheduler.has_unfinished_requests()

    def has_work(self) -> bool:
        """True while `step` has something to do or to tell, open steps of requests that ended included."""
        return bool(self._open or self._kept or self._has_news) or self._scheduler.has_unfinished_requests()

    # Steps.

    def step(self, timeout_s: float | None = None) -> EngineOutputs:
        """Launch what can be launched, then wait at most `timeout_s` for the oldest step. Empty when nothing came.

        Raises `EngineDeadError`, and nothing else.
        """
        self._check_alive()
        outputs, self._kept = self._kept, []
        try:
            self._expire()
            self._launch(outputs)
            if self._open:
                self._take_oldest(timeout_s, outputs)
            elif not outputs and self._scheduler.has_unfinished_requests():
                return self._idle(timeout_s)
        except EngineDeadError as error:
            self.error = error
            raise
        return self._tell(outputs)

    def _idle(self, timeout_s: float | None) -> EngineOutputs:
        """Requests wait, and no step is open. Whose scheduler it is gets logged where that lasts. A step's result brings new figures
        of host time, by which the next wait is known from this one: steps do nothing for it."""
        now = time.monotonic()
        if self._host_s is not self._idle_mark:
            self._idle_until = now + IDLE_WARNING_S
        elif now >= self._idle_until:
            self._idle_until = math.inf
            entry = self.plugins.find("pelton_schedulers", self.config.scheduler.scheduler, setting="scheduler")
            logger.warning(
                "%s has scheduled no step for %.0f s, and requests wait. Look at its schedule(), or leave it out with PELTON_PLUGINS, "
                "unless they wait for a grammar, an adapter or another engine's KV cache.", entry, IDLE_WARNING_S,
            )  # fmt: skip
        if not self._has_news:
            time.sleep(IDLE_POLL_S if timeout_s is None else min(IDLE_POLL_S, timeout_s))
        message = self._tell([])
        self._idle_mark = self._host_s
        return message

    def _tell(self, outputs: list[EngineOutput]) -> EngineOutputs:
        started = time.perf_counter()
        outputs += self._scheduler.take_outputs()
        message = EngineOutputs(outputs=outputs, timestamp=time.monotonic())
        for output in outputs:
            if output.finish_reason is not None:
                self._request_ids.discard(output.request_id)
        if outputs or self._has_news:
            message.stats = self._scheduler.take_stats()
            message.stats.plugin_metrics = self._metrics.take()
            message.stats.num_failed_steps, message.stats.step_failure = self._num_failed_steps, self._step_failure
            message.stats.host_time_s = told = {stage: spent for stage, spent in self._host_s.items() if spent}
            told[STEP] = sum(told.values()) - self._host_s[WAIT]
            self._host_s = dict.fromkeys(self._host_s, 0.0)
            self._has_news = False
        self._host_s["output"] += time.perf_counter() - started
        return message

    def _expire(self) -> None:
        if (deadline := self._scheduler.next_deadline()) is not None and deadline <= (now := time.monotonic()):
            self._scheduler.expire(now)

    def _launch(self, outputs: list[EngineOutput]) -> None:
        """Keep as many steps open as may be, and one more behind a step that is launched without its masks: the device has work while
        they are made. Masks behind drafts need the drafts as they are."""
        while True:
            goes_past = bool(self._unmasked) and self._launches_past_masks and not self._unmasked[-1].num_draft
            if len(self._open) >= self._max_steps_in_flight + goes_past:
                break
            if self._unmasked and (len(self._open) > 1 or not goes_past):  # first what the device waits for sooner
                if self._bring_masks(outputs):
                    continue
                if not goes_past:
                    return
            started = time.perf_counter()
            output = self._schedule(outputs)
            self._host_s["schedule"] += time.perf_counter() - started
            if output is None:
                break
            started = time.perf_counter()
            try:
                handle = self._executor.execute(output)
            except Exception as error:
                self._fail_step(output, error, outputs)
                continue
            finally:
                self._host_s["execute"] += time.perf_counter() - started
            self._open.append((output, handle))
            if output.grammar_rows:
                self._unmasked.append(output)
        while self._bring_masks(outputs):  # where a step fails, the next is the oldest
            pass

    def _schedule(self, outputs: list[EngineOutput]) -> SchedulerOutput | None:
        try:
            return self._scheduler.schedule()
        except EngineDeadError:
            raise
        except Exception as error:
            # Whose fault it was is not known; the engine goes on, without those it had.
            logger.exception("Scheduling failed; all requests end.")
            info = EngineError(f"Internal error in the scheduler: {type(error).__name__}: {error}").to_info()
            self._note_failure(info)
            self.finish_requests(list(self._request_ids), FinishReason.ERROR, info)
            return None

    def _bring_masks(self, outputs: list[EngineOutput]) -> bool:
        """Send the oldest step its masks, once every older step's result is in. False when none waits for them, or it has to wait."""
        if not self._unmasked or self._open[0][0] is not self._unmasked[0]:
            return False
        output = self._unmasked.popleft()
        cause: Exception | None = None
        try:
            masks = self._scheduler.grammar_masks(output, self._executor.mask_room(output))
            assert masks is not None, "a step with grammar rows has masks"
        except Exception as error:  # the worker waits for them all the same
            why = f"No masks could be made: {type(error).__name__}: {error}"
            cause, masks = error, GrammarMasks(step_id=output.step_id, bitmask=b"", num_masks=[], error=why)
        try:
            self._executor.sample(masks)
        except Exception as error:
            cause = cause or error
        if cause is not None:
            self._open.popleft()
            self._fail_step(output, cause, outputs)
        return True

    def _take_oldest(self, timeout_s: float | None, outputs: list[EngineOutput], *, drains: bool = False) -> None:
        """Wait for the oldest step and take its result in; then the next may get its masks. drains: no further step is launched."""
        output, handle = self._open[0]
        started = time.perf_counter()
        try:
            result = _wait(handle, timeout_s)
        except Exception as error:
            self._open.popleft()
            self._fail_step(output, error, outputs)
            return
        finally:
            waited = time.perf_counter()
            self._host_s["wait"] += waited - started
        if result is None:
            return
        self._open.popleft()
        try:
            outputs += self._scheduler.update(output, result)
            self._num_failed_steps, self._step_failure = 0, ""
        except Exception as error:
            logger.exception("Taking in step %d failed.", output.step_id)
            self._fail_step(output, error, outputs)
        self._has_news = True
        self._host_s["update"] += time.perf_counter() - waited
        if self._unmasked and not drains:
            self._launch(outputs)  # now: it may not wait until these outputs have been told

    def _fail_step(self, output: SchedulerOutput, error: Exception, outputs: list[EngineOutput]) -> None:
        """The step's requests end with an error and the engine goes on, unless the executor is dead."""
        if isinstance(error, EngineDeadError):
            raise error
        try:
            self._executor.check_health()
            self._executor.check_device()
        except Exception as cause:
            raise EngineDeadError(f"The executor died: {cause}") from cause
        logger.error("Step %d failed; its requests end.", output.step_id, exc_info=error)
        message = str(error) if isinstance(error, PeltonError) else f"{type(error).__name__}: {error}"
        self._note_failure(info := EngineError(f"The step that ran this request failed: {message}").to_info())
        self._has_news = True
        outputs += self._scheduler.update_failed(output, info)

    def _note_failure(self, info: ErrorInfo) -> None:
        self._num_failed_steps, self._step_failure = self._num_failed_steps + 1, info.message

    # The rest.

    def prepare_ahead(self) -> bool:
        """Do one piece of background work, such as a graph's capture, while the engine is idle; False when none is left.

        Raises `EngineDeadError`, and nothing else: what fails here is tried again, and reported, by the step that needs it.
        """
        self._check_alive()
        if self.has_work():
            return False
        try:
            return self._executor.prepare_ahead()
        except EngineDeadError as error:
            self.error = error
            raise
        except Exception:
            logger.exception("Preparing ahead failed.")
            return False

    def call(self, method: str, *args: Any) -> Any:
        """`reset_prefix_cache`, `kv_cache_usage`, `check_health`, `adapter.<method>` or `worker.<method>`, between steps; and
        `sleep`, `wake_up`, `is_sleeping`: see `Scheduler.rest`."""
        self._check_alive()
        if method.startswith("adapter."):
            return self._call_adapters(method.removeprefix("adapter."), *args)
        if method == "reset_prefix_cache":
            return self._scheduler.reset_prefix_cache()
        if method == "kv_cache_usage":
            return self._kv.usage
        if method == "check_health":
            return self._executor.check_health()
        if method.startswith("worker.") or method in ("sleep", "wake_up", "is_sleeping"):
            while self._open:  # a worker's methods run between steps
                if not self._bring_masks(self._kept):
                    self._take_oldest(None, self._kept, drains=True)
            if not method.startswith("worker."):
                self._has_news = True  # its stats say how deep it sleeps
                return self._scheduler.rest(self._executor.call, method, *args)
            return self._executor.call(method.removeprefix("worker."), *args)
        raise RequestError(
            "There is no such call; use reset_prefix_cache, kv_cache_usage, check_health, adapter.<method> or worker.<method>, "
            "and with enable_elastic_ep scale_elastic_ep",
            param="method",
            value=method,
        )

    def _call_adapters(self, method: str, *args: Any) -> Any:
        """`load`(id, name, path): True when the workers have it, else it is being loaded; `remove`(id), `pin`(id), `list`."""
        adapters = self._scheduler.adapters
        if adapters is None:
            raise NotSupportedError("This engine serves no adapters: enable_lora is off.", param="lora_request")
        if method == "load":
            adapter_id, name, path = args
            return adapters.request(AdapterRef(id=adapter_id, name=name, path=path))
        if method == "list":
            return adapters.loaded()
        calls = {"remove": adapters.remove, "pin": adapters.pin}
        if method not in calls:
            raise RequestError("There is no such call; use load, remove, pin or list", param="method", value=method)
        return calls[method](*args)

    def shutdown(self) -> None:
        """Stop the workers; idempotent, safe while steps are open."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        self.error = self.error or EngineDeadError("The engine was shut down.")
        if self._grammars is not None:
            self._grammars.shutdown()
        self._executor.shutdown()
        garbage.untune(self)

    def _check_alive(self) -> None:
        if self.error is not None:
            raise self.error


def _wait(handle: StepHandle, timeout_s: float | None) -> ModelOutput | None:
    """A step's result, or None when it is not there in time. Raises what the step raised."""
    try:
        return handle.result(timeout_s)
    except TimeoutError:
        if not handle.ready():
            return None
    return handle.result()  # it came just now, or the TimeoutError is its own


def without_chunks(config: EngineConfig, model: ResolvedModel) -> EngineConfig:
    """Switch chunked prefill off for a model whose tokens see later ones: it needs each prompt whole."""
    if model.pooling is None or not model.pooling.attends_both_ways:
        return config
    scheduler = msgspec.structs.replace(config.scheduler, enable_chunked_prefill=False)
    return msgspec.structs.replace(config, scheduler=scheduler)


def resolve_sizes(config: EngineConfig, model: ResolvedModel, plugins: Plugins) -> EngineConfig:
    """Fill in the batch sizes that the settings leave to the platform."""
    from pelton.platform.select import select_platform

    scheduler = config.scheduler
    num_seqs, num_tokens, parallel = scheduler.max_num_seqs, scheduler.max_num_batched_tokens, config.parallel
    if num_seqs is None or num_tokens is None:
        platform = select_platform(config, plugins)
        scale = platform.encoder_scale if model.pooling is not None and model.pooling.attends_both_ways else 1
        num_seqs = num_seqs or platform.default_max_num_seqs * scale
        shares_steps = parallel.pipeline_parallel_size > 1 or parallel.shares_experts
        if scheduler.performance_mode == "throughput" and not shares_steps:
            scale *= platform.throughput_scale
        least = 0 if scheduler.enable_chunked_prefill else model.max_model_len
        num_tokens = num_tokens or max(platform.default_max_num_batched_tokens * scale, least)
    resolved = msgspec.structs.replace(scheduler, max_num_seqs=num_seqs, max_num_batched_tokens=num_tokens)
    return msgspec.structs.replace(config, scheduler=resolved)


_MIXED_SHARE, _LEAST_MIXED_TOKENS = 8, 64


def with_step_budget(config: EngineConfig, fit: StepFit | None) -> EngineConfig:
    """With `max_num_batched_tokens` lowered to what an executor has found to fit into a step, and fewer prompt tokens beside
    rows that decode, unless a setting says how many."""
    scheduler = config.scheduler
    if fit is None or scheduler.max_num_batched_tokens is None:
        return config
    most, mixed = min(fit.num_tokens, scheduler.max_num_batched_tokens), scheduler.max_mixed_prefill_tokens
    mixed = max(most // _MIXED_SHARE, _LEAST_MIXED_TOKENS) if mixed is None else mixed
    scheduler = msgspec.structs.replace(scheduler, max_num_batched_tokens=most, max_mixed_prefill_tokens=mixed)
    return msgspec.structs.replace(config, scheduler=scheduler)


def make_executor(
    config: EngineConfig, model: ResolvedModel, plugins: Plugins, metrics: PluginMetrics, ahead: Any = None
) -> Executor:
    """Make the executor that the settings name, or the best there is."""
    entry = find_executor(config.parallel, plugins)
    with plugins.blaming("when the executor starts"):
        if len(_parameters(entry)) == 3:
            logger.warning(
                "%s takes three arguments, which ends with the next minor version; take an ExecutorContext.", entry
            )
            return make(entry, Executor, config, model, plugins)  # type: ignore[type-abstract]
        context = ExecutorContext(config=config, model=model, plugins=plugins, metrics=metrics, ahead=ahead)
        return make(entry, Executor, context)  # type: ignore[type-abstract]


def make_plan(config: EngineConfig, model: ResolvedModel, executor: Executor) -> KVCachePlan:
    kv_cache = config.kv_cache
    return plan_kv_cache(
        executor.kv_cache_specs(), executor.available_kv_cache_bytes(),
        num_blocks_override=kv_cache.num_gpu_blocks_override, max_model_len=model.max_model_len,
        disable_hybrid=kv_cache.disable_hybrid_kv_cache_manager,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
    )  # fmt: skip


def make_kv_manager(
    config: EngineConfig, model: ResolvedModel, plugins: Plugins, plan: KVCachePlan, metrics: PluginMetrics
) -> KVCacheManager:
    """The KV-cache manager that the settings name, or the best that is offered, with the managers of plugins' specs."""
    name, entries = config.kv_cache.kv_cache_manager, plugins.entries("pelton_kv_cache_managers")
    entry = entries[0] if name is None else plugins.find("pelton_kv_cache_managers", name, setting="kv_cache_manager")
    _say_whose("KV-cache manager", entry, plugins)
    context = KVManagerContext(
        plan=plan, config=config.kv_cache, max_model_len=model.max_model_len, engine_config=config, metrics=metrics,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        extra_managers=[entry.resolve() for entry in plugins.entries("pelton_kv_cache_specs")],
    )  # fmt: skip
    if "max_model_len" in _parameters(entry):
        logger.warning(
            "%s takes keywords one by one, which ends with the next minor version; take a KVManagerContext.", entry
        )
        return make(
            entry, KVCacheManager, plan, config.kv_cache,  # type: ignore[type-abstract]
            max_model_len=context.max_model_len, max_num_batched_tokens=context.max_num_batched_tokens,
            extra_managers=context.extra_managers,
        )  # fmt: skip
    return make(entry, KVCacheManager, context)  # type: ignore[type-abstract]


def _parameters(entry: Entry) -> Collection[str]:
    with calling(entry):
        return inspect.signature(entry.resolve()).parameters


def _say_whose(what: str, entry: Entry, plugins: Plugins) -> None:
    """Log what is taken, for all to see where it is not built in."""
    is_built_in = entry.plugin in {str(plugin) for plugin in plugins.loaded if plugin.is_builtin}
    (logger.debug if is_built_in else logger.info)("%s: %s", what, entry)


def make_grammar_manager(
    config: EngineConfig, model: ResolvedModel, plugins: Plugins, metrics: PluginMetrics
) -> GrammarManager | None:
    """Over the structured-output backend that the settings name, or the best; None without one, or without tokenizer."""
    name, hook = config.structured_outputs.backend, "pelton_structured_output_backends"
    found = [plugins.find(hook, name, setting="structured_outputs_backend")] if name else plugins.entries(hook)
    if not found or model.tokenizer_path is None:
        return None
    _say_whose("Structured-output backend", found[0], plugins)
    context = StructuredOutputContext(
        tokenizer_path=model.tokenizer_path, vocab_size=model.vocab_size, eos_token_ids=model.eos_token_ids,
        engine_config=config, metrics=metrics, load_tokenizer=lambda: load_tokenizer(config, model, plugins),
    )  # fmt: skip
    return GrammarManager(lambda: make(found[0], StructuredOutputBackend, context))  # type: ignore[type-abstract]


def adapter_loads(config: EngineConfig, executor: Executor) -> AdapterLoads | None:
    """None without `enable_lora`. Raises `ConfigError` for an executor that cannot serve adapters."""
    lora = config.lora
    if not lora.enable_lora:
        return None
    if not executor.steps_are_ordered:
        raise ConfigError(
            "enable_lora needs an executor whose steps are ordered: a slot gets its next adapter behind the steps that use it."
        )

    def load(ref: AdapterRef, load_id: int) -> Future[Any]:
        return executor.call_beside("load_adapter", load_id, ref.name, ref.path)

    return AdapterLoads(num_slots=lora.max_loras, num_host=lora.num_host_adapters, load=load)


def max_steps_in_flight(config: EngineConfig, executor: Executor) -> int:
    most = min(config.max_steps_in_flight, executor.max_concurrent_steps)
    return most if config.scheduler.async_scheduling else 1
