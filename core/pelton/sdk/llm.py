"""`LLM`: offline use, with vLLM's names and meaning for what Pelton has."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from pelton.config import EngineConfig
from pelton.config.engine import explicit_names
from pelton.engine.input_processor import ProcessedRequest, Prompt
from pelton.engine.start_table import start_table
from pelton.errors import RequestError
from pelton.logging import get_logger
from pelton.outputs import RequestOutput
from pelton.sampling_params import RequestOutputKind, SamplingParams
from pelton.sdk.llm_engine import LLMEngine
from pelton.sdk.progress import ProgressBar

if TYPE_CHECKING:
    from pelton.metrics.snapshot import Metric
    from pelton.plugins import Plugins
    from pelton.tokenizer import Tokenizer

logger = get_logger(__name__)

Message = Mapping[str, Any]


class LLM:
    """A model and its engine, for programs that bring many prompts at once.

        with LLM(model="smollm2", max_model_len=2048) as llm:
            for output in llm.generate(["Hello", "The sky is"], SamplingParams(max_tokens=32)):
                print(output.outputs[0].text)

    settings: any setting of the engine by its flat name; an unknown one is a `ConfigError`. engine_process: run the
    engine in a process of its own. One thread at a time. A server's log lines are written only when
    `log_stats_interval_s` or `disable_log_stats=False` is given; figures are counted without them.
    """

    def __init__(
        self, model: str | None = None, *, engine_process: bool = False, plugins: Plugins | None = None, **settings: Any
    ) -> None:
        if model is not None:
            settings["model"] = model
        self.llm_engine = LLMEngine(
            EngineConfig.from_flat(**settings),
            engine_process=engine_process,
            plugins=plugins,
            explicit=explicit_names(settings),
        )
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
    ) -> list[RequestOutput]:
        """Continue every prompt; outputs in the order of the prompts.

        prompts: one or many of text, token ids, {"prompt": ...}, {"prompt_token_ids": ...}. sampling_params: one for
        all, one each, or None for the model's defaults. use_tqdm: show progress. kv_transfer_params: for the KV connector, the
        same for all prompts. A bad prompt raises `RequestError`
        before anything is queued; a request that fails later has an `error` in its output, and the others go on.
        """
        many = as_prompts(prompts)
        params = _one_each("sampling_params", sampling_params, len(many), (SamplingParams, type(None)))
        priorities = _one_each("priority", priority, len(many), (int,))
        shared = {"cache_salt": cache_salt, "kv_transfer_params": kv_transfer_params}
        return self._run(self._process(self._tokenize(many), params, priorities, shared), use_tqdm)

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
        for conversation in _as_several("messages", messages, part=Mapping, wanted=wanted, param="messages"):
            text = front_end.render_chat(
                conversation,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
            )
            assert isinstance(text, str) and front_end.tokenizer is not None
            # The template wrote the special tokens itself.
            prompts.append(
                {"prompt": text, "prompt_token_ids": front_end.tokenizer.encode(text, add_special_tokens=False)}
            )
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, priority=priority)

    def _tokenize(self, prompts: list[Prompt]) -> list[Prompt]:
        """Many texts at once are tokenized on all cores."""
        tokenizer = self.llm_engine.tokenizer
        at = [index for index, prompt in enumerate(prompts) if isinstance(prompt, str)]
        if tokenizer is None or len(at) < 2:
            return prompts
        texts = [cast(str, prompts[index]) for index in at]
        done = list(prompts)
        for index, text, ids in zip(at, texts, tokenizer.encode_batch(texts), strict=True):
            done[index] = {"prompt": text, "prompt_token_ids": ids}
        return done

    def _process(
        self, prompts: list[Prompt], params: Sequence[Any], priorities: Sequence[int], shared: Mapping[str, Any]
    ) -> list[ProcessedRequest]:
        process = self.llm_engine.input_processor.process
        done: list[ProcessedRequest] = []
        for index, (prompt, one, priority) in enumerate(zip(prompts, params, priorities, strict=True)):
            try:
                done.append(
                    process(
                        str(next(self._ids)),
                        prompt,
                        one,
                        priority=priority,
                        output_kind=RequestOutputKind.FINAL_ONLY,
                        **shared,
                    )
                )
            except RequestError as error:
                if len(prompts) > 1:
                    error.args = (f"Prompt {index}: {error}",)
                raise
        return done

    def _run(self, requests: list[ProcessedRequest], use_tqdm: bool) -> list[RequestOutput]:
        """Add all, step until all are done. Whatever interrupts it leaves nothing running."""
        engine = self.llm_engine
        ids = [request.request_id for request in requests]
        outputs: dict[str, RequestOutput] = {}
        bar = ProgressBar("generate", len(requests)) if use_tqdm and requests else None
        try:
            for request in requests:
                engine.add_processed(request)
            while engine.has_unfinished_requests():
                finished, stats = engine.step_with_stats()
                for output in finished:
                    outputs[output.request_id] = output
                    if output.error is not None:
                        logger.warning("Request %s failed: %s", output.request_id, output.error.message)
                if bar is not None:
                    bar.update(len(finished), stats.num_prompt_tokens, stats.num_generation_tokens)
            while engine.client.has_work:  # a step launched before the last EOS was known still holds its blocks
                engine.step_with_stats()
        except BaseException:
            engine.abort_request(ids)
            raise
        finally:
            if bar is not None:
                bar.close()
        return [outputs[request_id] for request_id in ids]

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

    def kv_cache_usage(self) -> float:
        """Share of KV blocks in use, 0 to 1."""
        return self.llm_engine.kv_cache_usage()

    def num_preemptions(self) -> int:
        """How often a running request had to give up its blocks, since the start."""
        return self.llm_engine.num_preemptions

    def reset_prefix_cache(self) -> bool:
        """Forget cached blocks; False while requests hold blocks."""
        return self.llm_engine.reset_prefix_cache()

    def shutdown(self) -> None:
        """End the engine and free its memory. Idempotent."""
        self.llm_engine.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()


def as_prompts(prompts: Any) -> list[Prompt]:
    """One prompt or several, as several."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    wanted = "text, token ids, a prompt dictionary, or a list of these"
    return _as_several("prompts", prompts, part=int, wanted=wanted, param="prompt")


def _as_several(name: str, value: Any, *, part: type, wanted: str, param: str) -> list[Any]:
    """A list whose entries are `part`s is one of what is asked for, any other list holds several."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise RequestError(f"{name} is a {type(value).__name__}; give {wanted}.", param=param)
    return [value] if value and isinstance(value[0], part) else list(value)


def _one_each(name: str, value: Any, count: int, types: tuple[type, ...]) -> Sequence[Any]:
    if isinstance(value, types):
        return [value] * count
    if not isinstance(value, Sequence) or len(value) != count:
        found = f"has {len(value)} entries" if isinstance(value, Sequence) else f"is a {type(value).__name__}"
        raise RequestError(f"{name} {found} for {count} prompts; give one for all, or one each.", param=name)
    return value
