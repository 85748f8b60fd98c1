"""`AsyncLLM`: the engine for asyncio programs; the HTTP server is one of them.

The engine runs in its own process (`engine/process_client.py`), so this one imports no torch. One task
(`supervisor.py`) takes the engine's outputs, which go to a queue per request; a slow consumer finds its pending
outputs merged into one. A dead engine fails every waiting request, then comes back by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pelton.config import EngineConfig
from pelton.config.engine import explicit_names
from pelton.engine.client import EngineClient, EngineStarter, start_engines, start_process
from pelton.engine.input_processor import InputProcessor, ProcessedRequest, Prompt
from pelton.engine.output_processor import OutputProcessor
from pelton.engine.output_queue import OnText, OutputQueue
from pelton.errors import DeadlineExceededError, EngineDeadError, EngineError, PeltonError, error_from_info
from pelton.logging import get_logger
from pelton.lora.registry import AdapterRegistry
from pelton.lora.request import LoRARequest
from pelton.messages.outputs import EngineOutputs, FinishReason
from pelton.messages.report import EngineInfo
from pelton.messages.request import PoolingParams
from pelton.metrics.manager import StatLoggers
from pelton.metrics.stats import SchedulerStats
from pelton.outputs import RequestOutput
from pelton.sampling_params import BeamSearchParams, SamplingParams
from pelton.sdk.async_adapters import AsyncAdapters
from pelton.sdk.async_pooling import AsyncPooling, deadline_of, get_until
from pelton.sdk.beam_search import BeamSearch, BeamSearchOutput
from pelton.sdk.front_end import FrontEnd
from pelton.sdk.supervisor import MAX_RESTARTS, Supervisor
from pelton.utils import garbage

if TYPE_CHECKING:
    from pelton.lora.resolver import LoRAResolver
    from pelton.metrics.snapshot import Metric
    from pelton.model.resolved import ResolvedModel
    from pelton.plugins import Plugins
    from pelton.tokenizer import Tokenizer

logger = get_logger(__name__)

SHUT_DOWN = "The engine was shut down."
LONG_PROMPT_CHARS = 4096  # tokenized on a thread: `Tokenizer.encode` lets go of the GIL, the event loop goes on


class AsyncLLM(AsyncPooling, AsyncAdapters):
    """Make it, then `generate` from any task of one event loop. `start`, or else the first request, starts the engine.

    plugins: from `load_plugins()` when None. start_engine: makes the client of an engine, blocking; the process client
    when None. max_restarts: how often in a row a dead engine is started again. explicit: flat names of the settings
    that the user gave, which plugins may not change. stat_loggers: where figures go; those of the settings when None.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        plugins: Plugins | None = None,
        start_engine: EngineStarter | None = None,
        max_restarts: int = MAX_RESTARTS,
        explicit: Collection[str] = (),
        stat_loggers: StatLoggers | None = None,
    ) -> None:
        self._front_end = FrontEnd(config, plugins, explicit)
        self.config = self._front_end.config
        self.plugins = self._front_end.plugins
        self.model: ResolvedModel = self._front_end.model
        self.tokenizer: Tokenizer | None = self._front_end.tokenizer
        self.input_processor: InputProcessor = self._front_end.input_processor
        self.io_processor = self._front_end.io_processor
        self.adapters: AdapterRegistry = self._front_end.adapters
        self.output_processor = OutputProcessor(self.tokenizer, self.config)
        self.stat_loggers = StatLoggers(self.config, self.plugins) if stat_loggers is None else stat_loggers
        self._start_engine = start_engine or start_process
        self._max_restarts = max_restarts
        self._client: EngineClient | None = None
        self._supervisor: Supervisor | None = None
        self._info: EngineInfo | None = None
        self._refusal: str | None = None  # set while draining
        self._start_task: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []  # none before the engine is ready
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False

    @classmethod
    def from_engine_args(cls, engine_args: Mapping[str, Any]) -> AsyncLLM:
        return cls(EngineConfig.from_flat(**engine_args), explicit=explicit_names(engine_args))

    @classmethod
    def from_flat(cls, **flat: Any) -> AsyncLLM:
        """From flat setting names, as `LLM` takes them."""
        return cls.from_engine_args(flat)

    # -- life cycle --

    async def start(self) -> None:
        """Start the engine, once; returns when it is ready. Raises what stopped it, such as `ConfigError`; then it may be called again."""
        if self._closed:
            raise EngineDeadError(f"{SHUT_DOWN} Make another one.")
        if self._start_task is None:  # one task for all who wait: each of them may be cancelled
            self._start_task = asyncio.create_task(self._start(), name="pelton-start")
        await asyncio.shield(self._start_task)

    async def _start(self) -> None:
        began = time.monotonic()
        try:
            client = await asyncio.to_thread(start_engines, self.config, self.model, self.plugins, self._start_engine)
        except BaseException:
            self._start_task = None
            raise
        if self._closed:
            await asyncio.to_thread(client.shutdown)
            raise EngineDeadError(SHUT_DOWN)
        self._client = client
        self._client.supervise(self._max_restarts, self.stat_loggers.started)
        self._started(time.monotonic() - began)
        await self._load_adapters()
        self._supervisor = Supervisor(
            self._client, max_restarts=self._max_restarts, hand_on=self._hand_on, started=self._started,
            died=lambda error: self._fail_all(error, SchedulerStats()),
        )  # fmt: skip
        self._tasks = [asyncio.create_task(self._supervisor.run(), name="pelton-outputs")]
        if self.config.scheduler.max_step_s:
            watch = self._supervisor.watch(self.config.scheduler.max_step_s)
            self._tasks.append(asyncio.create_task(watch, name="pelton-watch"))
        if self.stat_loggers:
            self._tasks.append(asyncio.create_task(self._log_stats(), name="pelton-stats"))
        garbage.tune(self)

    def _started(self, took_s: float) -> None:
        assert self._client is not None
        self._info = self._client.info
        self._front_end.engine_started(self._info, took_s)
        self.stat_loggers.engine_started(self._info)

    async def __aenter__(self) -> AsyncLLM:
        try:
            await self.start()
        except BaseException:  # nobody else ends what is still starting
            self.shutdown()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.shutdown()

    async def drain(self, deadline_s: float) -> None:
        """Take no more requests and wait for the running ones; those left at the deadline end with an error."""
        self._refusal = "The server is shutting down."
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), deadline_s)
        left = self.output_processor.unfinished_ids()
        if left:
            self._send_finish(self.output_processor.engine_ids(left))
            error = EngineError(f"The server is shutting down; the request did not finish within {deadline_s:g} s.")
            error.status = 503
            self._fail_all(error)

    def shutdown(self, timeout_s: float = 5.0) -> None:
        """End the engine and this object's tasks. Idempotent; waiting requests get an error."""
        if self._closed:
            return
        self._closed = True
        for task in self._tasks:
            task.cancel()
        self._fail_all(EngineDeadError(SHUT_DOWN), SchedulerStats())
        if self._client is not None:
            self._client.shutdown(timeout_s)
        self.stat_loggers.log()
        garbage.untune(self)

    # -- requests --

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        timeout_s: float | None = None,
        kv_transfer_params: Mapping[str, Any] | None = None,
        lora_request: LoRARequest | None = None,
        tenant: str = "",
        on_text: OnText | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one request, as `sampling_params.output_kind` says. Closing or cancelling the iteration aborts it.

        tenant: whose share of the engine it is charged to, where the scheduling policy has shares.
        on_text: for streams of deltas, of which many run at once. Called with (text, number of tokens) in place of an output
        that would tell nothing else; it must not wait, and where it returns False the output comes as any other.

        Raises `RequestError` for a bad request, `EngineDeadError` when the engine dies.
        """
        request_id = request_id if request_id is not None else uuid.uuid4().hex
        arrival = time.monotonic()
        processed = await self._processed_prompt(
            self.input_processor.process, prompt, sampling_params, request_id, priority=priority, cache_salt=cache_salt,
            timeout_s=timeout_s, kv_transfer_params=kv_transfer_params, tenant=tenant,
            adapter=None if lora_request is None else self.adapters.ref(lora_request),
        )  # fmt: skip
        queue = self._send([(processed, arrival)], on_text)[request_id]
        deadline = deadline_of(timeout_s)
        finished = False
        try:
            while not finished:
                output = await (queue.get() if deadline is None else get_until(deadline, queue, timeout_s))
                finished = output.finished
                if output.error is not None:
                    raise error_from_info(output.error)
                yield output
        finally:
            if not finished:
                self._abort(request_id)

    async def beam_search(
        self, prompt: Prompt, params: BeamSearchParams, request_id: str | None = None, **arguments: Any
    ) -> BeamSearchOutput:
        """The likeliest continuations of a prompt. arguments: as `generate` has them. Raises as `generate`."""
        own_id, step_params, limit_s = request_id or uuid.uuid4().hex, params.step_params(), arguments.get("timeout_s")
        ids = self.input_processor.process(own_id, prompt, step_params, timeout_s=limit_s).prompt_token_ids
        search = BeamSearch(ids, params, self.model.eos_token_ids, self.input_processor.max_model_len)

        async def last(number: int, tokens: list[int]) -> RequestOutput:
            stream = self.generate(tokens, step_params, f"{own_id}-{number}", **arguments)
            async with contextlib.aclosing(stream) as found:
                return [output async for output in found][-1]

        step = 0
        until = None if limit_s is None else asyncio.get_running_loop().time() + limit_s
        while search.live:
            tasks = [asyncio.create_task(last(step + i, beam.tokens)) for i, beam in enumerate(search.live)]
            try:
                async with asyncio.timeout_at(until):
                    search.take(await asyncio.gather(*tasks))
            except TimeoutError:
                raise DeadlineExceededError(f"The request's time limit of {limit_s} s passed.") from None
            finally:
                for task in tasks:
                    task.cancel()
            step += len(tasks)
        return search.result(self.tokenizer)

    async def _processed_prompt(
        self,
        process: Callable[..., ProcessedRequest],
        prompt: Prompt,
        params: SamplingParams | PoolingParams | None,
        request_id: str,
        **arguments: Any,
    ) -> ProcessedRequest:
        """A long one on a thread."""
        if not self._tasks:
            await self.start()
        self._check_accepting()
        if self.input_processor.text_length(prompt) <= LONG_PROMPT_CHARS:
            return process(request_id, prompt, params, **arguments)
        processed = await asyncio.to_thread(process, request_id, prompt, params, **arguments)
        self._check_accepting()
        return processed

    def _send(
        self, unsent: Sequence[tuple[ProcessedRequest, float]], on_text: OnText | None = None
    ) -> dict[str, OutputQueue]:
        """Send requests and when they came, in one message; their queues by id."""
        queues: dict[str, OutputQueue] = {}
        assert self._client is not None
        self._idle.clear()
        try:
            for processed, arrival in unsent:
                queue = OutputQueue(on_text)
                self.output_processor.add(processed, arrival=arrival, queue=queue)
                queues[processed.request_id] = queue
            self._client.add_requests([request for processed, _ in unsent for request in processed.requests])
        except PeltonError:
            self._send_finish(self.output_processor.abort(list(queues)))
            self._note_idle()
            raise
        return queues

    def _check_accepting(self) -> None:
        if self._refusal is not None:
            error = EngineError(self._refusal)
            error.status = 503
            raise error
        if self._client is None or self._closed:
            raise EngineDeadError(SHUT_DOWN)
        if self._down is not None:
            error_503 = EngineDeadError(f"{self._down} New requests are refused until it is back.")
            error_503.status = 503
            raise error_503

    async def abort(self, request_id: str | Sequence[str]) -> None:
        """End requests; who iterates over them gets what there is, with finish_reason "abort"."""
        for one in [request_id] if isinstance(request_id, str) else request_id:
            self._abort(one)

    def _abort(self, request_id: str) -> None:
        self._send_finish(self.output_processor.abort([request_id]))
        self._note_idle()

    def _send_finish(self, engine_ids: Sequence[str], reason: FinishReason = FinishReason.ABORT) -> None:
        if engine_ids and self._client is not None and self._down is None:
            with contextlib.suppress(EngineDeadError):  # the output task reports it to everyone
                self._client.finish_requests(engine_ids, reason)

    def _fail_all(self, error: PeltonError, scheduler_stats: SchedulerStats | None = None) -> None:
        """End every unfinished request and count it. scheduler_stats: empty when there is no engine any more."""
        self.stat_loggers.record(scheduler_stats, self.output_processor.fail_all(error))
        self._note_idle()

    def _note_idle(self) -> None:
        if not self.output_processor.num_unfinished:
            self._idle.set()

    # -- prompts --

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str | list[int]:
        """The prompt that the chat template makes of `messages`; options as `LLM.chat` has them (tools, chat_template,
        add_generation_prompt, continue_final_message, chat_template_kwargs), and tokenize=True for token ids."""
        return self._front_end.render_chat(messages, **options)

    def get_default_sampling_params(self) -> SamplingParams:
        return self.input_processor.get_default_sampling_params()

    # -- state --

    @property
    def info(self) -> EngineInfo:
        """Facts of the started engine."""
        if self._info is None:
            raise EngineDeadError("The engine is not started; await start() first.")
        return self._info

    @property
    def health_reason(self) -> str | None:
        """Why new requests are refused; None when all is well."""
        if self._closed:
            return SHUT_DOWN
        if self._client is None:
            return "The engine is not started."
        error = self._down or self._client.error
        return str(error) if error is not None else None

    @property
    def is_healthy(self) -> bool:
        return self.health_reason is None

    async def check_health(self) -> None:
        """Raises `EngineDeadError` with the cause while the engine is down, or steps fail one after another (`Supervisor.failing`)."""
        reason = self.health_reason or (self._supervisor.failing if self._supervisor is not None else None)
        if reason is not None:
            raise EngineDeadError(reason)

    @property
    def last_progress_age_s(self) -> float:
        """How long the engine's step loop has been in one step, or the engine silent; about 0 when all is well."""
        return self._client.last_progress_age_s if self._client is not None else 0.0

    @property
    def silence_s(self) -> float:
        """Since the engine's process gave its last sign of life; one comes every second."""
        return self._client.silence_s if self._client is not None else 0.0

    @property
    def num_unfinished_requests(self) -> int:
        return self.output_processor.num_unfinished

    def get_metrics(self) -> list[Metric]:
        return self.stat_loggers.snapshot()

    async def call(self, method: str, *args: Any, timeout_s: float = 60.0) -> Any:
        """Utility call into the engine core, such as `reset_prefix_cache` or `kv_cache_usage`."""
        if self._client is None:
            await self.start()
        self._check_accepting()
        assert self._client is not None
        return await asyncio.to_thread(self._client.call, method, *args, timeout_s=timeout_s)

    async def reset_prefix_cache(self) -> bool:
        return bool(await self.call("reset_prefix_cache"))

    async def sleep(self, level: int = 1) -> None:
        await self.call("sleep", level, timeout_s=600.0)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        await self.call("wake_up", list(tags or ()), timeout_s=600.0)

    async def scale_elastic_ep(self, new_data_parallel_size: int, drain_timeout: float = 120.0) -> None:
        """Have so many engines from now on; returns once they are there. Needs `enable_elastic_ep`. Those that leave take no new requests,
        and finish theirs within `drain_timeout` seconds; what is left ends with an error."""
        await self.call("scale_elastic_ep", new_data_parallel_size, drain_timeout)
        self.stat_loggers.keep(new_data_parallel_size)

    @property
    def _resolvers(self) -> Sequence[tuple[str, LoRAResolver]]:
        return self._front_end.resolvers

    @property
    def _down(self) -> EngineDeadError | None:
        return None if self._supervisor is None else self._supervisor.down

    # -- outputs --

    def _hand_on(self, outputs: EngineOutputs) -> None:
        processor = self.output_processor
        try:
            processed = processor.process(outputs, time.monotonic())
        except Exception as error:  # our own mistake: say so, fail the requests, keep serving
            logger.exception("Processing engine outputs failed")
            self._send_finish(processor.engine_ids(processor.unfinished_ids()))
            failure = EngineError(f"Processing engine outputs failed: {type(error).__name__}: {error}")
            self._fail_all(failure, outputs.stats)
            return
        self._send_finish(processed.stopped, FinishReason.STOP)
        self._send_finish(processed.aborted)
        self.stat_loggers.of(outputs.engine_index).record(outputs.stats, processed.stats)
        self._note_idle()

    async def _log_stats(self) -> None:
        while True:
            await asyncio.sleep(self.config.observability.log_stats_interval_s)
            self.stat_loggers.log()


AsyncLLMEngine = AsyncLLM
"""vLLM's older name."""
