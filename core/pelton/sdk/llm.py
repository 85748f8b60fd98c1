"""`LLM`: offline use, with vLLM's names and meaning for what Pelton has."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from math import inf
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, cast

from msgspec.structs import replace

from pelton.config import EngineConfig
from pelton.config.engine import explicit_names
from pelton.engine.input_processor import ProcessedRequest, Prompt
from pelton.engine.start_table import start_table
from pelton.errors import RequestError
from pelton.logging import get_logger
from pelton.lora.request import LoRARequest
from pelton.messages.request import AdapterRef, PoolingParams
from pelton.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from pelton.pooling.io_processor import DATA, NO_PROCESSOR, discarding, is_for_processor, parse, prompts_of
from pelton.pooling.scoring import cosine, pair_prompt, paired, reads_pairs, score_of
from pelton.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from pelton.sdk.llm_engine import LLMEngine
from pelton.sdk.progress import ProgressBar
from pelton.sdk.prompts import as_prompts, as_several, as_texts, tokenization
from pelton.utils import garbage

if TYPE_CHECKING:
    from pelton.metrics.snapshot import Metric
    from pelton.plugins import Plugins
    from pelton.sdk.beam_search import BeamSearchOutput
    from pelton.tokenizer import Tokenizer

logger = get_logger(__name__)

Message = Mapping[str, Any]


class PoolingOptions(TypedDict, total=False):
    """Arguments of `LLM.embed`, `classify` and `reward`, as `LLM.encode` has them."""

    use_tqdm: bool
    pooling_params: PoolingParams | Sequence[PoolingParams] | None
    truncate_prompt_tokens: int | None
    lora_request: LoRARequest | Sequence[LoRARequest | None] | None
    tokenization_kwargs: Mapping[str, Any] | None


class LLM:
    """A model and its engine, for programs that bring many prompts at once.

        with LLM(model="smollm2", max_model_len=2048) as llm:
            for output in llm.generate(["Hello", "The sky is"], SamplingParams(max_tokens=32)):
                print(output.outputs[0].text)

    settings: any setting of the engine by its flat name; an unknown one is a `ConfigError`. engine_process: run the
    engine in a process of its own. Threads may call it at once: they take turns. A server's log lines are written only when
    `log_stats_interval_s` or `disable_log_stats=False` is given; figures are counted without them.
    """

    def __init__(
        self, model: str | None = None, *, engine_process: bool = False, plugins: Plugins | None = None, **settings: Any
    ) -> None:
        if model is not None:
            settings["model"] = model
        config, explicit = EngineConfig.from_flat(**settings), explicit_names(settings)
        mode = config.scheduler.performance_mode or "throughput"
        config = replace(config, scheduler=replace(config.scheduler, performance_mode=mode))
        self.llm_engine = LLMEngine(config, engine_process=engine_process, plugins=plugins, explicit=explicit)
        self._ids = itertools.count()
        logger.info("ready\n%s", start_table(self.llm_engine.info, self.llm_engine.model))

    # -- generating --

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
        cache_salt: str | None = None,
        kv_transfer_params: Mapping[str, Any] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Continue every prompt; outputs in the order of the prompts.

        prompts: one or many of text, token ids, {"prompt": ...}, {"prompt_token_ids": ...}. sampling_params: one for
        all, one each, or None for the model's defaults. use_tqdm: show progress. kv_transfer_params: for the KV connector, the
        same for all prompts. lora_request: the adapter of all prompts, or one each, None for the model alone.
        tokenization_kwargs: of texts, such as {"add_special_tokens": False, "truncate_prompt_tokens": 512}.
        A bad prompt raises `RequestError` before anything is queued; a request that fails later has an `error` in its output.
        """
        many, (special, most) = as_prompts(prompts), tokenization(tokenization_kwargs, None)
        params = _one_each("sampling_params", sampling_params, len(many), (SamplingParams, type(None)))
        if most is not None:
            defaults = self.get_default_sampling_params()
            params = [replace(one or defaults, truncate_prompt_tokens=most) for one in params]
        priorities = _one_each("priority", priority, len(many), (int,))
        adapters = self._adapters(lora_request, len(many))
        shared = {"cache_salt": cache_salt, "kv_transfer_params": kv_transfer_params}
        return self._run(self._process(self._tokenize(many, special), params, priorities, adapters, shared), use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: int | Sequence[int] = 0,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, rendered with the model's chat template."""
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other; set add_generation_prompt=False.",
                param="continue_final_message",
            )
        front_end = self.llm_engine.front_end
        prompts: list[Prompt] = []
        wanted = "a list of messages, or a list of such lists"
        for conversation in as_several("messages", messages, part=Mapping, wanted=wanted, param="messages"):
            text = front_end.render_chat(
                conversation, chat_template=chat_template, tools=tools, chat_template_kwargs=chat_template_kwargs,
                add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message,
            )  # fmt: skip
            assert isinstance(text, str) and front_end.tokenizer is not None
            # The template wrote the special tokens itself.
            ids = front_end.tokenizer.encode(text, add_special_tokens=False)
            prompts.append({"prompt": text, "prompt_token_ids": ids})
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, priority=priority, lora_request=lora_request)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[BeamSearchOutput]:
        """The likeliest continuations of every prompt, `params.beam_width` each; outputs in the order of the prompts."""
        from pelton.sdk.beam_search import BeamSearch

        many, engine = as_prompts(prompts), self.llm_engine
        adapters, step_params = self._adapters(lora_request, len(many)), params.step_params()

        def process(given: list[Prompt], adapters: Sequence[AdapterRef | None]) -> Iterator[ProcessedRequest]:
            return self._process(given, [step_params] * len(given), [0] * len(given), adapters, {})

        bounds = (engine.model.eos_token_ids, engine.input_processor.max_model_len)
        first = process(self._tokenize(many), adapters)
        searches = [BeamSearch(one.prompt_token_ids, params, *bounds) for one in first]
        while any(search.live for search in searches):
            of_beams = [adapter for search, adapter in zip(searches, adapters, strict=True) for _ in search.live]
            beams: list[Prompt] = [beam.tokens for search in searches for beam in search.live]
            outputs = iter(self._run(process(beams, of_beams), use_tqdm=False))
            for search in searches:
                search.take([next(outputs) for _ in search.live])
        return [search.result(engine.tokenizer) for search in searches]

    def _adapters(self, lora_request: Any, count: int) -> Sequence[AdapterRef | None]:
        """One each; all of them checked before anything is queued."""
        given = _one_each("lora_request", lora_request, count, (LoRARequest, type(None)))
        ref = self.llm_engine.adapters.ref
        return [None if one is None else ref(one) for one in given]

    # -- pooling --

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt] | Mapping[str, Any],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        pooling_task: str | None = None,
        use_tqdm: bool = True,
        truncate_prompt_tokens: int | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[Any]]:
        """Run prompts through a model that pools; `outputs` of each is a `PoolingOutput`.

        pooling_params: one for all, one each, or None for the task `pooling_task`, by default the model's first.
        truncate_prompt_tokens: keep so many tokens of a longer prompt, -1 for as many as fit. lora_request and
        tokenization_kwargs: as `generate` has them.
        With an IO processor `encode({"data": ...})` gives one output, whose `outputs` is what the processor made.
        """
        if is_for_processor(prompts):
            return [self._encode_data(prompts, pooling_params, use_tqdm, lora_request)]  # type: ignore[arg-type]
        many = as_prompts(prompts)
        if pooling_params is None and pooling_task is not None:
            pooling_params = PoolingParams(task=pooling_task)
        params = _one_each("pooling_params", pooling_params, len(many), (PoolingParams, type(None)))
        if pooling_task is not None and any(one is not None and one.task != pooling_task for one in params):
            raise RequestError("pooling_task and pooling_params name different tasks.", param="pooling_task")
        process = self.llm_engine.input_processor.process_pooling
        special, most = tokenization(tokenization_kwargs, truncate_prompt_tokens)
        rows = zip(self._tokenize(many, special), params, self._adapters(lora_request, len(many)), strict=True)
        made = (
            self._blamed(index, len(many), process, prompt, one, adapter=adapter, truncate_prompt_tokens=most)
            for index, (prompt, one, adapter) in enumerate(rows)
        )
        return self._run(made, use_tqdm, "encode")

    def embed(
        self, prompts: Prompt | Sequence[Prompt], **options: Unpack[PoolingOptions]
    ) -> list[EmbeddingRequestOutput]:
        """A vector for each prompt."""
        found = self.encode(prompts, pooling_task="embed", **options)
        return [_of(output, lambda pooled: EmbeddingOutput(pooled.numbers())) for output in found]

    def classify(
        self, prompts: Prompt | Sequence[Prompt], **options: Unpack[PoolingOptions]
    ) -> list[ClassificationRequestOutput]:
        """The probability of each class, for each prompt."""
        found = self.encode(prompts, pooling_task="classify", **options)
        return [_of(output, lambda pooled: ClassificationOutput(pooled.numbers())) for output in found]

    def reward(
        self, prompts: Prompt | Sequence[Prompt], **options: Unpack[PoolingOptions]
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """The bare numbers of the model's head, for each prompt."""
        return self.encode(prompts, pooling_task="reward", **options)

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        use_tqdm: bool = True,
        truncate_prompt_tokens: int | None = None,
        lora_request: LoRARequest | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well texts fit each other: one against each of `data_2`, or each against its own. A cross-encoder reads both
        texts; of a model that embeds it is the cosine of their vectors. truncate_prompt_tokens: of a pair, or of each text."""
        first, second = as_texts("data_1", data_1), as_texts("data_2", data_2)
        engine, pairs = self.llm_engine, paired(first, second)
        options: PoolingOptions = {"use_tqdm": use_tqdm, "lora_request": lora_request}
        if reads_pairs(engine.model):
            most = engine.input_processor.max_model_len if truncate_prompt_tokens == -1 else truncate_prompt_tokens
            made = [pair_prompt(pair, engine.tokenizer, max_tokens=most) for pair in pairs]
            options["pooling_params"] = [params for _, params in made]
            found = self.encode([prompt for prompt, _ in made], **options)
            return [_of(output, lambda pooled: ScoringOutput(score_of(pooled))) for output in found]
        options["truncate_prompt_tokens"] = truncate_prompt_tokens
        vectors = self.encode([*first, *second], pooling_task="embed", **options)
        return [_compared(one, other) for one, other in paired(vectors[: len(first)], vectors[len(first) :])]

    def _encode_data(
        self, given: Mapping[str, Any], params: Any, use_tqdm: bool, lora_request: Any
    ) -> PoolingRequestOutput[Any]:
        processor = self.llm_engine.front_end.io_processor
        if processor is None:
            raise RequestError(NO_PROCESSOR, param="data")
        request_id = str(next(self._ids))
        parsed = parse(processor, given[DATA])
        merged = processor.merge_pooling_params(params)
        with discarding(processor, request_id):
            prompts = prompts_of(processor, processor.pre_process(parsed, request_id))
            outputs = self.encode(prompts, merged, use_tqdm=use_tqdm, lora_request=lora_request)
            error = next((output.error for output in outputs if output.error is not None), None)
            made = processor.post_process(outputs, request_id) if error is None else None
        ids = [token_id for output in outputs for token_id in output.prompt_token_ids]
        return PoolingRequestOutput(request_id, made, ids, True, error=error)

    def _tokenize(self, prompts: list[Prompt], add_special_tokens: bool = True) -> list[Prompt]:
        """Many texts at once are tokenized on all cores."""
        tokenizer = self.llm_engine.tokenizer
        at = [index for index, prompt in enumerate(prompts) if isinstance(prompt, str)]
        if tokenizer is None or (len(at) < 2 and add_special_tokens):
            return prompts
        done, texts = list(prompts), [cast(str, prompts[index]) for index in at]
        for index, text, ids in zip(at, texts, tokenizer.encode_batch(texts, add_special_tokens), strict=True):
            done[index] = {"prompt": text, "prompt_token_ids": ids}
        return done

    def _process(
        self,
        prompts: list[Prompt],
        params: Sequence[Any],
        priorities: Sequence[int],
        adapters: Sequence[AdapterRef | None],
        shared: Mapping[str, Any],
    ) -> Iterator[ProcessedRequest]:
        rows = enumerate(zip(prompts, params, priorities, adapters, strict=True))
        return (
            self._blamed(
                index, len(prompts), self.llm_engine.input_processor.process, prompt, one, priority=priority,
                adapter=adapter, output_kind=RequestOutputKind.FINAL_ONLY, **shared,
            )
            for index, (prompt, one, priority, adapter) in rows
        )  # fmt: skip

    def _blamed(
        self, index: int, count: int, process: Callable[..., ProcessedRequest], *given: Any, **options: Any
    ) -> ProcessedRequest:
        """One of `count` prompts; an error says which."""
        try:
            return process(str(next(self._ids)), *given, **options)
        except RequestError as error:
            if count > 1:
                error.args = (f"Prompt {index}: {error}",)
            raise

    def _run(self, made: Iterable[ProcessedRequest], use_tqdm: bool, title: str = "generate") -> list[Any]:
        """Make all, then add all, then step until all are done. Whatever interrupts it leaves nothing running."""
        engine = self.llm_engine
        outputs: dict[str, RequestOutput | PoolingRequestOutput[Any]] = {}
        with ExitStack() as turn, ExitStack() as start:
            start.enter_context(garbage.paused())  # it would look at every token of every prompt while the device waits
            requests = list(made)
            if not engine.turn.acquire(blocking=False):
                start.close()  # another thread's call may take long
                engine.turn.acquire()
            turn.callback(engine.turn.release)
            ids = [request.request_id for request in requests]
            bar = ProgressBar(title, len(requests)) if use_tqdm and requests else None
            try:
                engine.add_processed(*requests)
                while engine.has_unfinished_requests():
                    finished, stats = engine.step_with_stats()
                    start.close()  # the first step is over
                    for output in finished:
                        outputs[output.request_id] = output
                        if output.error is not None:
                            logger.warning("Request %s failed: %s", output.request_id, output.error.message)
                    if bar is not None:
                        bar.update(len(finished), stats.num_prompt_tokens, stats.num_generation_tokens)
                engine.come_to_rest(most_s=inf)
            except BaseException:
                engine.abort_request(ids)
                raise
            finally:
                if bar is not None:
                    bar.close()
        return [outputs[request_id] for request_id in ids]

    # -- adapters --

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """See `LLMEngine.add_lora`."""
        return self.llm_engine.add_lora(lora_request)

    def remove_lora(self, lora_name: str) -> bool:
        return self.llm_engine.remove_lora(lora_name)

    def list_loras(self) -> dict[str, LoRARequest]:
        return self.llm_engine.list_loras()

    def pin_lora(self, lora_name: str) -> bool:
        return self.llm_engine.pin_lora(lora_name)

    # -- state --

    def get_tokenizer(self) -> Tokenizer:
        tokenizer = self.llm_engine.tokenizer
        if tokenizer is None:
            raise RequestError("There is no tokenizer: skip_tokenizer_init is set.")
        return tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's own sampling defaults, from its generation_config."""
        return self.llm_engine.input_processor.get_default_sampling_params()

    def get_metrics(self) -> list[Metric]:
        """Return what was counted so far; empty with disable_log_stats."""
        return self.llm_engine.get_metrics()

    def call(self, method: str, *args: Any, timeout_s: float = 60.0) -> Any:
        """Call a method of the engine, or `worker.NAME` of its workers, between two steps: `call("worker.start_profile", folder)`."""
        return self.llm_engine.client.call(method, *args, timeout_s=timeout_s)

    def kv_cache_usage(self) -> float:
        """Share of KV blocks in use, 0 to 1."""
        return self.llm_engine.kv_cache_usage()

    def num_preemptions(self) -> int:
        """How often a running request had to give up its blocks, since the start."""
        return self.llm_engine.num_preemptions

    def reset_prefix_cache(self) -> bool:
        """Forget cached blocks; False while requests hold blocks."""
        return self.llm_engine.reset_prefix_cache()

    def sleep(self, level: int = 1) -> None:
        """Give memory back, while no request runs. Weights go to the host (level 1), or are dropped and later read again (2)."""
        self.llm_engine.client.call("sleep", level, timeout_s=600.0)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take memory back for "weights", then "kv_cache"; for both without tags."""
        self.llm_engine.client.call("wake_up", list(tags or ()), timeout_s=600.0)

    def scale_elastic_ep(self, new_data_parallel_size: int, drain_timeout: float = 120.0) -> None:
        """See `AsyncLLM.scale_elastic_ep`."""
        self.llm_engine.client.call("scale_elastic_ep", new_data_parallel_size, drain_timeout)
        self.llm_engine.stat_loggers.keep(new_data_parallel_size)

    def shutdown(self) -> None:
        """End the engine and free its memory. Idempotent."""
        self.llm_engine.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()


def _of(output: PoolingRequestOutput[PoolingOutput], make: Callable[[PoolingOutput], Any]) -> PoolingRequestOutput[Any]:
    """With what `make` says of the outputs; without them where the request failed."""
    return output if output.error is not None else output.of(make(output.outputs))


def _compared(
    one: PoolingRequestOutput[PoolingOutput], other: PoolingRequestOutput[PoolingOutput]
) -> ScoringRequestOutput:
    failed = next((output for output in (one, other) if output.error is not None), None)
    if failed is not None:
        return failed.of(None)
    both = [*one.prompt_token_ids, *other.prompt_token_ids]
    return PoolingRequestOutput(other.request_id, ScoringOutput(cosine(one.outputs, other.outputs)), both, True)


def _one_each(name: str, value: Any, count: int, types: tuple[type, ...]) -> Sequence[Any]:
    if isinstance(value, types):
        return [value] * count
    if not isinstance(value, Sequence) or len(value) != count:
        found = f"has {len(value)} entries" if isinstance(value, Sequence) else f"is a {type(value).__name__}"
        raise RequestError(f"{name} {found} for {count} prompts; give one for all, or one each.", param=name)
    return value
