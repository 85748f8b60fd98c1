"""`AsyncLLM`: the engine for asyncio programs; the HTTP server is one of them.

The engine runs in its own process (`engine/process_client.py`), so this one imports no torch. One task
takes the engine's outputs and hands them to a queue per request; a slow consumer finds its pending
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
from pelton.engine.client import EngineClient
from pelton.engine.input_processor import InputProcessor, ProcessedRequest, Prompt
from pelton.engine.output_processor import OutputProcessor
from pelton.engine.output_queue import OnText, OutputQueue
from pelton.errors import (
    ConfigError,
    DeadlineExceededError,
    EngineDeadError,
    EngineError,
    PeltonError,
    RequestError,
    error_from_info,
)
from pelton.logging import get_logger
from pelton.lora.registry import AdapterRegistry
from pelton.lora.request import LoRARequest
from pelton.messages.outputs import EngineOutputs, FinishReason
from pelton.messages.report import EngineInfo
from pelton.messages.request import AdapterRef, PoolingParams
from pelton.metrics.manager import StatLoggers
from pelton.metrics.stats import SchedulerStats
from pelton.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput
from pelton.pooling.io_processor import DATA, NO_PROCESSOR, IOProcessor, is_for_processor, parse
from pelton.sampling_params import SamplingParams
from pelton.sdk.beam_search import BeamSearch, BeamSearchOutput, BeamSearchParams
from pelton.sdk.front_end import FrontEnd
from pelton.sdk.prompts import as_prompts
from pelton.utils import garbage

if TYPE_CHECKING:
    from pelton.metrics.snapshot import Metric
    from pelton.model.resolved import ResolvedModel
    from pelton.plugins import Plugins
    from pelton.tokenizer import Tokenizer

logger = get_logger(__name__)

LONG_PROMPT_CHARS = 4096  # tokenized on a thread: `Tokenizer.encode` lets go of the GIL, the event loop goes on
SENT_TOGETHER = 64  # prompts of one call that pool, in one message to the engine
TOKENS_SENT_TOGETHER = 16_384  # of them
DEADLINE_GRACE_S = 1.0  # the engine keeps requests' time limits; after this long it does not answer
MAX_RESTARTS = 5
LOAD_POLL_S = 0.005  # between two looks at an adapter that is being loaded
HEALTHY_S = 600.0  # after this long alive, earlier deaths are forgotten
BACKOFF_S = (0.0, 1.0, 2.0, 5.0, 10.0)

EngineStarter = Callable[[EngineConfig, "ResolvedModel", "Plugins"], EngineClient]


class AsyncLLM:
    """Make it, `await start()` (or `async with`), then `generate` from any task of that event loop.

    plugins: from `load_plugins()` when None. start_engine: makes the client, blocking; the process client
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
        self.adapters: AdapterRegistry = self._front_end.adapters
        self.output_processor = OutputProcessor(self.tokenizer, self.config)
        self.stat_loggers = StatLoggers(self.config, self.plugins) if stat_loggers is None else stat_loggers
        self._start_engine = start_engine or _start_process
        self._max_restarts = max_restarts
        self._client: EngineClient | None = None
        self._info: EngineInfo | None = None
        self._down: EngineDeadError | None = None
        self._refusal: str | None = None  # set while draining
        self._tasks: list[asyncio.Task[None]] = []
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False

    @classmethod
    def from_flat(cls, **flat: Any) -> AsyncLLM:
        """From flat setting names, as `LLM` takes them."""
        return cls(EngineConfig.from_flat(**flat), explicit=explicit_names(flat))

    # -- life cycle --

    async def start(self) -> None:
        """Start the engine; returns when it is ready. Raises what stopped it, such as `ConfigError`."""
        if self._client is not None:
            return
        began = time.monotonic()
        self._client = await asyncio.to_thread(self._start_engine, self.config, self.model, self.plugins)
        self._started(time.monotonic() - began)
        await self._load_adapters()
        self._tasks = [asyncio.create_task(self._run(), name="pelton-outputs")]
        if self.config.scheduler.max_step_s:
            watch = self._watch_steps(self.config.scheduler.max_step_s)
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
        await self.start()
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
        self._fail_all(EngineDeadError("The engine was shut down."), SchedulerStats())
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
        queue = await self._add(
            self.input_processor.process, prompt, sampling_params, request_id, priority=priority, cache_salt=cache_salt,
            timeout_s=timeout_s, kv_transfer_params=kv_transfer_params,
            adapter=None if lora_request is None else self.adapters.ref(lora_request), tenant=tenant,
            on_text=on_text,
        )  # fmt: skip
        deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s + DEADLINE_GRACE_S
        finished = False
        try:
            while not finished:
                output = await (queue.get() if deadline is None else _get_until(deadline, queue, timeout_s))
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
        own_id, step_params = request_id or uuid.uuid4().hex, params.step_params()
        ids = self.input_processor.process(own_id, prompt, step_params).prompt_token_ids
        search = BeamSearch(ids, params, self.model.eos_token_ids, self.input_processor.max_model_len)

        async def last(number: int, tokens: list[int]) -> RequestOutput:
            async with contextlib.aclosing(
                self.generate(tokens, step_params, f"{own_id}-{number}", **arguments)
            ) as found:
                return [output async for output in found][-1]

        step = 0
        while search.live:
            tasks = [asyncio.create_task(last(step + i, beam.tokens)) for i, beam in enumerate(search.live)]
            try:
                search.take(await asyncio.gather(*tasks))
            finally:
                for task in tasks:
                    task.cancel()
            step += len(tasks)
        return search.result(self.tokenizer)

    async def encode(
        self,
        prompt: Prompt | Mapping[str, Any],
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        **arguments: Any,
    ) -> AsyncGenerator[PoolingRequestOutput[Any], None]:
        """The one output of a prompt that pools. Closing or cancelling the iteration aborts it. arguments: priority,
        cache_salt, timeout_s and truncate_prompt_tokens, as `encode_all` has them. With an IO processor the prompt may be
        {"data": ...}, and `outputs` is what the processor made. Raises as `generate`."""
        request_id = request_id if request_id is not None else uuid.uuid4().hex
        if is_for_processor(prompt):
            yield await self._encode_data(prompt[DATA], pooling_params, request_id, arguments)  # type: ignore[call-overload,index]
            return
        async with contextlib.aclosing(self._encode_each([prompt], [pooling_params], request_id, arguments)) as found:
            async for _, output in found:
                yield output

    async def encode_all(
        self,
        prompts: Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams | None] | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        timeout_s: float | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Outputs of many prompts, in their order; the first that fails ends all. pooling_params: one for all, or one each."""
        if pooling_params is None or isinstance(pooling_params, PoolingParams):
            pooling_params = [pooling_params] * len(prompts)
        arguments = {
            "priority": priority, "cache_salt": cache_salt, "timeout_s": timeout_s,
            "truncate_prompt_tokens": truncate_prompt_tokens,
        }  # fmt: skip
        request_id = request_id if request_id is not None else uuid.uuid4().hex
        async with contextlib.aclosing(self._encode_each(prompts, pooling_params, request_id, arguments)) as found:
            return [output async for _, output in found]

    async def _encode_each(
        self,
        prompts: Sequence[Any],
        pooling_params: Sequence[PoolingParams | None],
        request_id: str,
        arguments: Mapping[str, Any],
    ) -> AsyncGenerator[tuple[int, PoolingRequestOutput[PoolingOutput]], None]:
        """All of them are under way together; told with their index, in order. Closing it aborts the others."""
        timeout_s = arguments.get("timeout_s")
        deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s + DEADLINE_GRACE_S
        waiting: dict[str, OutputQueue] = {}
        unsent: list[tuple[ProcessedRequest, float]] = []
        num_tokens = 0
        try:
            for index, (prompt, params) in enumerate(zip(prompts, pooling_params, strict=True)):
                own_id = request_id if len(prompts) == 1 else f"{request_id}-{index}"
                arrival = time.monotonic()
                process = self.input_processor.process_pooling
                processed = await self._processed_prompt(process, prompt, params, own_id, **arguments)
                unsent.append((processed, arrival))
                num_tokens += len(processed.prompt_token_ids)
                if len(unsent) == SENT_TOGETHER or num_tokens >= TOKENS_SENT_TOGETHER or index == len(prompts) - 1:
                    waiting |= self._send(unsent)
                    unsent, num_tokens = [], 0
            for index, own_id in enumerate(list(waiting)):
                queue = waiting[own_id]
                output = await (queue.get() if deadline is None else _get_until(deadline, queue, timeout_s))
                del waiting[own_id]
                if output.error is not None:
                    raise error_from_info(output.error)
                yield index, output
        finally:
            for own_id in waiting:
                self._abort(own_id)

    async def _encode_data(
        self, data: Any, params: PoolingParams | None, request_id: str, arguments: Mapping[str, Any]
    ) -> PoolingRequestOutput[Any]:
        processor = self._front_end.io_processor
        if processor is None:
            raise RequestError(NO_PROCESSOR, param=DATA)
        parsed = parse(processor, data)
        merged = processor.merge_pooling_params(params)
        try:
            prompts = as_prompts(await processor.pre_process_async(parsed, request_id))
            return await self._processed(processor, prompts, merged, request_id, arguments)
        finally:
            processor.discard(request_id)

    async def _processed(
        self,
        processor: IOProcessor[Any, Any],
        prompts: Sequence[Prompt],
        params: PoolingParams,
        request_id: str,
        arguments: Mapping[str, Any],
    ) -> PoolingRequestOutput[Any]:
        ids: list[int] = []

        async def each() -> AsyncGenerator[tuple[int, PoolingRequestOutput[PoolingOutput]], None]:
            found = self._encode_each(prompts, [params] * len(prompts), request_id, arguments)
            async with contextlib.aclosing(found):
                async for index, output in found:
                    ids.extend(output.prompt_token_ids)
                    yield index, output

        async with contextlib.aclosing(each()) as outputs:
            made = await processor.post_process_async(outputs, request_id)
        return PoolingRequestOutput(request_id, made, ids, True)

    async def _add(
        self,
        process: Callable[..., ProcessedRequest],
        prompt: Prompt,
        params: SamplingParams | PoolingParams | None,
        request_id: str,
        on_text: OnText | None = None,
        **arguments: Any,
    ) -> OutputQueue:
        """process: of the input processor; arguments: further ones of it."""
        arrival = time.monotonic()
        processed = await self._processed_prompt(process, prompt, params, request_id, **arguments)
        return self._send([(processed, arrival)], on_text)[request_id]

    async def _processed_prompt(
        self,
        process: Callable[..., ProcessedRequest],
        prompt: Prompt,
        params: SamplingParams | PoolingParams | None,
        request_id: str,
        **arguments: Any,
    ) -> ProcessedRequest:
        """A long one on a thread."""
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
            raise EngineDeadError("The engine is not started; await start() first.")
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

    # -- adapters --

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Have the engine read an adapter, and serve its name. Raises `RequestError` for one that it cannot serve; one of the same
        name is then still served."""
        ref = self.adapters.ref(lora_request)
        self.adapters.check_name(ref.name)
        try:
            await self._load_adapter(ref)
        except BaseException:
            if self.adapters.get(lora_request.lora_name) != lora_request:
                self.adapters.forget(lora_request)
            raise
        self.adapters.serve(lora_request)
        return True

    async def remove_lora(self, lora_name: str) -> bool:
        """Forget an adapter; requests that run with it go on. Raises `AdapterNotFoundError` for a name that is not served."""
        return await self.forget_lora(self.adapters.unserve(lora_name))

    async def forget_lora(self, lora_request: LoRARequest) -> bool:
        """Free an adapter's memory, whatever its name now stands for. An equal request is another adapter from now on."""
        ref = self.adapters.forget(lora_request)
        return ref is not None and bool(await self.call("adapter.remove", ref.id))

    def list_loras(self) -> dict[str, LoRARequest]:
        """The adapters that are served, by name."""
        return self.adapters.served

    async def pin_lora(self, lora_name: str) -> bool:
        """Keep an adapter on host and device, whatever else is asked for."""
        ref = self.adapters.ref(self.adapters.require(lora_name))
        await self.call("adapter.pin", ref.id)
        return True

    async def resolve_lora(self, lora_name: str) -> LoRARequest:
        """The adapter of this name: one that is served, or one that a resolver finds. Raises `AdapterNotFoundError`, or what
        is wrong with it."""
        if not self._front_end.resolvers:
            return self.adapters.require(lora_name)
        return await self.adapters.resolve(
            lora_name, self.config.model.model, self._front_end.resolvers, self._load_adapter
        )

    @property
    def resolves_loras(self) -> bool:
        """Return whether adapters of unknown names are looked for."""
        return bool(self._front_end.resolvers)

    async def _load_adapter(self, ref: AdapterRef) -> None:
        while not await self.call("adapter.load", ref.id, ref.name, ref.path):
            await asyncio.sleep(LOAD_POLL_S)

    async def _load_adapters(self) -> None:
        """Those that `lora_modules` names."""
        try:
            for name, path in self.config.lora.modules():
                await self.add_lora(LoRARequest(name, 1, path))
        except RequestError as error:
            self.shutdown()
            raise ConfigError(f"lora_modules: {error}") from error

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
            return "The engine was shut down."
        if self._client is None:
            return "The engine is not started."
        error = self._down or self._client.error
        return str(error) if error is not None else None

    @property
    def is_healthy(self) -> bool:
        return self.health_reason is None

    async def check_health(self) -> None:
        """Raises `EngineDeadError` with the cause while the engine is down."""
        reason = self.health_reason
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
        self._check_accepting()
        assert self._client is not None
        return await asyncio.to_thread(self._client.call, method, *args, timeout_s=timeout_s)

    async def reset_prefix_cache(self) -> bool:
        return bool(await self.call("reset_prefix_cache"))

    # -- tasks --

    async def _run(self) -> None:
        """Take outputs until the engine is dead; then start it again, a bounded number of times."""
        deaths = 0
        while True:
            since = time.monotonic()
            error = await self._take_outputs()
            deaths = 1 if time.monotonic() - since > HEALTHY_S else deaths + 1
            self._down = error
            logger.error("%s", error)
            self._fail_all(error, SchedulerStats())
            while not await self._restart(deaths, error):
                deaths += 1

    async def _take_outputs(self) -> EngineDeadError:
        """Hand outputs on until the engine is dead; returns why."""
        assert self._client is not None
        while True:
            try:
                batches = await self._client.get_outputs_async()
            except EngineDeadError as error:
                return error
            except Exception as error:
                logger.exception("Taking the engine's outputs failed")
                return EngineDeadError(f"Taking the engine's outputs failed: {type(error).__name__}: {error}")
            for outputs in batches:
                self._hand_on(outputs)
            # The engine may be faster than we are, and the next outputs are there already: those who wait for these come
            # first, and so do new requests.
            await asyncio.sleep(0)

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
        self.stat_loggers.record(outputs.stats, processed.stats)
        self._note_idle()

    async def _restart(self, deaths: int, error: EngineDeadError) -> bool:
        """Try once. True when the engine is back; never returns when there are no tries left."""
        assert self._client is not None
        if deaths > self._max_restarts:
            logger.error("The engine failed %d times and will not be restarted; restart the server.", deaths)
            self._down = EngineDeadError(f"{error} It will not be restarted (it failed {deaths} times).")
            await asyncio.Event().wait()
        await asyncio.sleep(BACKOFF_S[min(deaths - 1, len(BACKOFF_S) - 1)])
        began = time.monotonic()
        try:
            await asyncio.to_thread(self._client.restart)
        except Exception as failure:  # also what the system refuses, such as a process or a socket: later it may not
            is_known = isinstance(failure, PeltonError)
            cause = str(failure) if is_known else f"{type(failure).__name__}: {failure}"
            logger.error("Restarting the engine failed: %s", cause, exc_info=not is_known)
            self._down = EngineDeadError(f"{error} Restarting it failed: {cause}")
            return False
        self._started(time.monotonic() - began)
        self._down = None
        logger.info("The engine is running again.")
        return True

    async def _watch_steps(self, most_s: float) -> None:
        """Kill an engine whose step hangs, or whose process says nothing: `_run` then starts another."""
        interval = min(1.0, most_s / 4)
        looked = time.monotonic()
        while True:
            await asyncio.sleep(interval)
            now = time.monotonic()
            was_late, looked = (
                now - looked > 2 * interval + 1.0,
                now,
            )  # we stood still ourselves: signs of life wait to be read
            assert self._client is not None
            age = self._client.last_progress_age_s
            if age > most_s and not was_late and self._client.error is None:
                reason = f"It made no progress for {age:.1f} s (max_step_s is {most_s:g})."
                logger.error("The engine is killed. %s", reason)
                self._client.kill(reason)

    async def _log_stats(self) -> None:
        while True:
            await asyncio.sleep(self.config.observability.log_stats_interval_s)
            self.stat_loggers.log()


async def _get_until(deadline: float, queue: OutputQueue, timeout_s: float | None) -> Any:
    try:
        async with asyncio.timeout_at(deadline):
            return await queue.get()
    except TimeoutError:
        raise DeadlineExceededError(
            f"The request's time limit of {timeout_s} s passed, and the engine is not responding."
        ) from None


def _start_process(config: EngineConfig, model: ResolvedModel, plugins: Plugins) -> EngineClient:
    from pelton.engine.process_client import ProcessClient

    return ProcessClient(config, model, plugins)
