"""`LLMEngine`: add requests, step, take what came out. `LLM` is a loop around it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from pelton.config import EngineConfig
from pelton.config.engine import explicit_names
from pelton.engine.client import EngineClient, EngineStarter, start_engines, start_process
from pelton.engine.in_process import InProcessClient
from pelton.engine.input_processor import ProcessedRequest, Prompt
from pelton.engine.output_processor import OutputProcessor
from pelton.errors import ConfigError, EngineDeadError, RequestError
from pelton.executor.select import start_ahead
from pelton.logging import get_logger
from pelton.lora.request import LoRARequest
from pelton.messages.outputs import FinishReason
from pelton.messages.report import EngineInfo
from pelton.messages.request import PoolingParams
from pelton.metrics.manager import StatLoggers
from pelton.metrics.stats import IterationStats, SchedulerStats
from pelton.sampling_params import SamplingParams
from pelton.sdk.front_end import FrontEnd
from pelton.sdk.supervisor import MAX_RESTARTS

if TYPE_CHECKING:
    from pelton.metrics.snapshot import Metric
    from pelton.plugins import Plugins

logger = get_logger(__name__)

REST_S = 1.0  # the most that figures wait for steps behind the last request
LOAD_POLL_S = 0.002
"""Between two looks at an adapter that is being loaded."""
ASKS_FOR_LOG_LINES = frozenset({"disable_log_stats", "log_stats_interval_s"})


class LLMEngine:
    """One thread at a time. The engine runs in this process, or with engine_process in one of its own.

    explicit: flat names of the settings that the user gave. The built-in stat loggers only count, and write nothing,
    when none of them asks for log lines: who generates offline has the progress bar and the outputs.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        engine_process: bool = False,
        plugins: Plugins | None = None,
        explicit: Collection[str] = (),
    ) -> None:
        start: EngineStarter = start_process

        def before_model(config: EngineConfig, plugins: Plugins) -> None:
            nonlocal start
            if not (engine_process or config.parallel.has_several_engines):
                ahead = start_ahead(config, plugins)
                start = partial(InProcessClient, ahead=ahead)
                if ahead is not None:
                    stack.callback(ahead.close)

        with ExitStack() as stack:
            self.front_end = FrontEnd(config, plugins, explicit, before_model)
            self.config = self.front_end.config
            self.plugins = self.front_end.plugins
            self.model = self.front_end.model
            self.tokenizer = self.front_end.tokenizer
            self.input_processor = self.front_end.input_processor
            self.adapters = self.front_end.adapters
            self.output_processor = OutputProcessor(self.tokenizer, self.config)
            self.stat_loggers = StatLoggers(self.config, self.plugins, quiet=ASKS_FOR_LOG_LINES.isdisjoint(explicit))
            self.num_preemptions = 0
            began = time.monotonic()
            self.client: EngineClient = start_engines(self.config, self.model, self.plugins, start)
        self.client.supervise(MAX_RESTARTS, self.stat_loggers.started)
        self.info: EngineInfo = self.client.info
        self.front_end.engine_started(self.info, time.monotonic() - began)
        self.stat_loggers.engine_started(self.info)
        self._load_adapters()
        self._next_log = time.monotonic() + self.config.observability.log_stats_interval_s
        self._is_closed, self.turn = False, threading.RLock()

    def _load_adapters(self) -> None:
        """Those that `lora_modules` names."""
        try:
            for name, path in self.config.lora.modules():
                self.add_lora(LoRARequest(name, 1, path))
        except RequestError as error:
            self.client.shutdown()
            raise ConfigError(f"lora_modules: {error}") from error

    @classmethod
    def from_engine_args(
        cls, engine_args: Mapping[str, Any] | None = None, *, engine_process: bool = False, **flat: Any
    ) -> LLMEngine:
        """From `EngineArgs`, or flat setting names, as `LLM` takes them."""
        flat = {**(engine_args or {}), **flat}
        return cls(EngineConfig.from_flat(**flat), engine_process=engine_process, explicit=explicit_names(flat))

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        timeout_s: float | None = None,
        kv_transfer_params: Mapping[str, Any] | None = None,
        lora_request: LoRARequest | None = None,
    ) -> None:
        """Queue a request. Raises `RequestError`; nothing is queued then."""
        adapter = None if lora_request is None else self.adapters.ref(lora_request)
        given: dict[str, Any] = {
            "priority": priority, "cache_salt": cache_salt, "timeout_s": timeout_s, "adapter": adapter,
        }  # fmt: skip
        process: Callable[..., ProcessedRequest] = self.input_processor.process_pooling
        if not isinstance(params, PoolingParams):
            process, given["kv_transfer_params"] = self.input_processor.process, kv_transfer_params
        self.add_processed(process(request_id, prompt, params, **given))

    def add_processed(self, *several: ProcessedRequest) -> None:
        """Add requests that come at once."""
        for processed in several:
            self.output_processor.add(processed, arrival=time.monotonic())
        try:
            self.client.add_requests([request for processed in several for request in processed.requests])
        except BaseException:
            self.abort_request([processed.request_id for processed in several])
            raise

    def step(self) -> list[Any]:
        """Run the engine until it has outputs, and return those that are due now: `RequestOutput`s, of a model that pools
        `PoolingRequestOutput`s. Empty when nothing is unfinished."""
        outputs, _ = self.step_with_stats()
        return outputs

    def step_with_stats(self) -> tuple[list[Any], IterationStats]:
        try:
            batch = self.client.get_outputs()
            now = time.monotonic()
            done = self.output_processor.process(batch, now)
            if done.stopped:
                self.client.finish_requests(done.stopped, FinishReason.STOP)
            if done.aborted:
                self.client.finish_requests(done.aborted)
        except EngineDeadError as error:
            self.stat_loggers.record(SchedulerStats(), self.output_processor.fail_all(error))
            raise
        if batch.stats is not None:
            self.num_preemptions += batch.stats.num_preemptions
        if self.stat_loggers:
            self.stat_loggers.of(batch.engine_index).record(batch.stats, done.stats)
            if now >= self._next_log:
                self.log_stats()
        return done.outputs, done.stats

    def log_stats(self) -> None:
        """Let the stat loggers write now. Steps do it once an interval, and `shutdown` does."""
        self._next_log = time.monotonic() + self.config.observability.log_stats_interval_s
        self.stat_loggers.log()

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """End requests; their outputs are dropped. Ids that are finished are not an error."""
        ids = [request_id] if isinstance(request_id, str) else request_id
        engine_ids = self.output_processor.abort(ids)
        if engine_ids and self.client.error is None:
            self.client.finish_requests(engine_ids)

    def has_unfinished_requests(self) -> bool:
        return self.output_processor.num_unfinished > 0

    def get_num_unfinished_requests(self) -> int:
        return self.output_processor.num_unfinished

    def get_metrics(self) -> list[Metric]:
        if self.client.error is None and not self.has_unfinished_requests():
            self.client.call("check_health")  # an engine in another process tells all before it answers
            self.come_to_rest()
        return self.stat_loggers.snapshot()

    def come_to_rest(self, most_s: float = REST_S) -> None:
        """Take in what the engine has still to do and to tell behind the last request's end: it holds blocks and slots."""
        until = time.monotonic() + most_s  # a KV connector may take long
        if self.turn.acquire(blocking=False):  # else another thread steps
            try:
                while not self.has_unfinished_requests() and self.client.has_work and time.monotonic() < until:
                    self.step_with_stats()
            finally:
                self.turn.release()

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Have the engine read an adapter before a request names it. Raises `RequestError` for one that it cannot serve."""
        ref = self.adapters.ref(lora_request)
        self.adapters.check_name(ref.name)
        try:
            while not self.client.call("adapter.load", ref.id, ref.name, ref.path):
                time.sleep(LOAD_POLL_S)
        except BaseException:
            self.adapters.forget(lora_request)
            raise
        self.adapters.serve(lora_request)
        return True

    def remove_lora(self, lora_name: str) -> bool:
        """Forget an adapter; requests that run with it go on. Raises `AdapterNotFoundError` for a name that was not added."""
        ref = self.adapters.forget(self.adapters.unserve(lora_name))
        return ref is not None and bool(self.client.call("adapter.remove", ref.id))

    def list_loras(self) -> dict[str, LoRARequest]:
        """Those that were added, by name."""
        return self.adapters.served

    def pin_lora(self, lora_name: str) -> bool:
        """Keep an adapter that was added on host and device, whatever else is asked for."""
        ref = self.adapters.ref(self.adapters.require(lora_name))
        self.client.call("adapter.pin", ref.id)
        return True

    def reset_prefix_cache(self) -> bool:
        self.come_to_rest()
        return bool(self.client.call("reset_prefix_cache"))

    def kv_cache_usage(self) -> float:
        """Share of KV blocks in use, 0 to 1."""
        self.come_to_rest()
        return float(self.client.call("kv_cache_usage"))

    def shutdown(self) -> None:
        """End the engine and free its memory. Idempotent."""
        self.client.shutdown()
        if self._is_closed:
            return
        self._is_closed = True
        lost = self.output_processor.fail_all(EngineDeadError("The engine was shut down."))
        self.stat_loggers.record(SchedulerStats(), lost)
        self.log_stats()
