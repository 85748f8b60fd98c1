"""From a user's prompt and `SamplingParams` to `EngineRequest`s: everything that can be refused is refused here.

Bounds that need no model are checked by `SamplingParams` itself; here are those of the vocabulary, the
context length and the settings. n > 1 becomes n requests with seeds of their own.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NotRequired, TypedDict

import msgspec

from pelton import limits
from pelton.config import EngineConfig
from pelton.engine.pooling_requests import check_pooling_params, truncated
from pelton.errors import ConfigError, NotSupportedError, RequestError
from pelton.logits_processors.requests import wanted_args
from pelton.messages.request import AdapterRef, EngineRequest, PoolingParams, TensorData, check_plain_data
from pelton.model.resolved import ResolvedModel
from pelton.sampling_params import MODEL_DEFAULTS, RequestOutputKind, SamplingParams, StructuredOutputsParams

if TYPE_CHECKING:
    from pelton.logits_processors.interface import LogitsProcessor
    from pelton.messages.report import EngineInfo
    from pelton.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, {"prompt": text}, {"prompt_token_ids": ids} with the text beside it when known, {"prompt_embeds": tensor}."""

PROMPT_KEYS = ("prompt", "prompt_token_ids", "prompt_embeds")


class TextPrompt(TypedDict):
    prompt: str


class TokensPrompt(TypedDict):
    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]


class EmbedsPrompt(TypedDict):
    prompt_embeds: Any


@dataclass(slots=True)
class ProcessedRequest:
    """One prompt, checked; `requests` holds its n samples."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    requests: list[EngineRequest]
    pooling_params: PoolingParams | None = None
    """Set for a request that pools; `params` are unused defaults then."""


class InputProcessor:
    """Safe to call from several threads."""

    def __init__(
        self,
        config: EngineConfig,
        model: ResolvedModel,
        tokenizer: Tokenizer | None,
        *,
        structured_output_backends: Sequence[str] = (),
        logits_processors: Mapping[str, type[LogitsProcessor]] | None = None,
    ) -> None:
        self.config = config
        self.model = model
        self.tokenizer = tokenizer
        self.max_model_len = model.max_model_len
        self.vocab_size = model.vocab_size
        self._structured_output_backends = structured_output_backends
        self._processors = logits_processors or {}
        self._running_processors: frozenset[str] | None = None
        self._seeds = random.Random(config.model.seed)
        self._serial = itertools.count()
        self._defaults = _defaults_from(model.generation_config)
        # Of all requests that pool: to make and check one takes as long as the rest of such a request.
        self._unread = SamplingParams(max_tokens=1, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
        self._id_list: Any = list[Annotated[int, msgspec.Meta(ge=0, lt=model.vocab_size)]]

    def draw_apart(self, index: int) -> None:
        """Let ids, and seeds of requests without one, differ from those of the other front ends of one engine."""
        self._seeds = random.Random(f"{self.config.model.seed} {index}")
        self._serial = itertools.count(index << 40)

    def engine_started(self, info: EngineInfo) -> None:
        """The engine may have shrunk the context to what fits."""
        self.max_model_len = min(self.model.max_model_len, info.max_model_len)
        self._running_processors = frozenset(info.report.logits_processors)

    def get_default_sampling_params(self) -> SamplingParams:
        """A new `SamplingParams` with the model's own defaults (generation_config)."""
        return SamplingParams(**self._defaults)

    def text_length(self, prompt: Prompt) -> int:
        """Characters that would have to be tokenized, or bytes of embeddings."""
        if isinstance(prompt, Mapping):
            if isinstance(embeds := prompt.get("prompt_embeds"), TensorData):
                return len(embeds.data)
            prompt = "" if prompt.get("prompt_token_ids") is not None else prompt.get("prompt", "")
        return len(prompt) if isinstance(prompt, str) else 0

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        timeout_s: float | None = None,
        kv_transfer_params: Mapping[str, Any] | None = None,
        adapter: AdapterRef | None = None,
        tenant: str = "",
        output_kind: Any = None,
    ) -> ProcessedRequest:
        """Check and translate one request. Raises `RequestError` that names the field. Does not change `params`."""
        if self.model.pooling is not None:
            raise RequestError(
                f"This model does not generate; it is run for {', '.join(self.model.pooling.tasks)}.", param="model"
            )
        self._check_request_fields(request_id, priority, cache_salt, timeout_s)
        if params is None:
            params = self.get_default_sampling_params()
        elif not isinstance(params, SamplingParams):
            found = f"sampling_params is a {type(params).__name__}"
            raise RequestError(f"{found}; give SamplingParams.", param="sampling_params")
        params = msgspec.structs.replace(params)  # checked as its fields are now, whatever becomes of the user's
        embeds = self._embeds(prompt, params) if isinstance(prompt, Mapping) else None
        text, token_ids, param = (None, [0] * embeds.shape[0], "prompt_embeds") if embeds else self._tokenize(prompt)
        if (most := params.truncate_prompt_tokens) is not None and embeds is None:
            token_ids = token_ids[-(max(self.max_model_len - (params.max_tokens or 1), 1) if most == -1 else most) :]
        self._check_prompt(token_ids, param)
        bad_words = self._check_params(params)
        kv_transfer_params = self._check_transfer(kv_transfer_params, params)
        self._fill(params, len(token_ids), output_kind)
        requests = self._requests(
            request_id, params, prompt_token_ids=token_ids, bad_words_token_ids=bad_words, priority=priority,
            cache_salt=cache_salt, timeout_s=timeout_s, kv_transfer_params=kv_transfer_params, adapter=adapter, tenant=tenant,
            prompt_embeds=embeds,
        )  # fmt: skip
        return ProcessedRequest(request_id, text, token_ids, params, requests)

    def process_pooling(
        self,
        request_id: str,
        prompt: Prompt,
        params: PoolingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        timeout_s: float | None = None,
        truncate_prompt_tokens: int | None = None,
        adapter: AdapterRef | None = None,
    ) -> ProcessedRequest:
        """Check and translate one request that pools. params: of the model's first task when None. truncate_prompt_tokens: keep
        so many tokens of a longer text, -1 for as many as fit. Raises `RequestError` that names the field."""
        self._check_request_fields(request_id, priority, cache_salt, timeout_s)
        params = check_pooling_params(params, self.model)
        text, token_ids, param = self._tokenize(prompt)
        if truncate_prompt_tokens is not None:
            token_ids = truncated(token_ids, text, truncate_prompt_tokens, self.max_model_len, self.tokenizer)
        self._check_prompt(token_ids, param, num_new=0)
        request = EngineRequest(
            request_id=f"{request_id}-{next(self._serial):x}", prompt_token_ids=token_ids, sampling_params=self._unread,
            pooling_params=params, priority=priority, cache_salt=cache_salt, timeout_s=timeout_s, adapter=adapter,
        )  # fmt: skip
        return ProcessedRequest(request_id, text, token_ids, self._unread, [request], params)

    def _requests(self, request_id: str, params: SamplingParams, **fields: Any) -> list[EngineRequest]:
        """One a sample; fields: of `EngineRequest`, equal for all of them. The engine knows each by an id that never comes
        again: what it still says of a request that was aborted is of no other with the user's id."""
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(63)
        # The prompt's logprobs are the same: the first sample brings them, others find its blocks.
        others = params if params.prompt_logprobs is None else msgspec.structs.replace(params, prompt_logprobs=None)
        return [
            EngineRequest(
                request_id=f"{request_id}-{next(self._serial):x}", sampling_params=others if index else params,
                eos_token_ids=self.model.eos_token_ids, seed=child_seed(seed, index), **fields,
            )
            for index in range(params.n)
        ]  # fmt: skip

    # -- the request around the prompt --

    @staticmethod
    def _check_request_fields(request_id: str, priority: int, cache_salt: str | None, timeout_s: float | None) -> None:
        most = limits.MAX_REQUEST_ID_CHARS
        if not isinstance(request_id, str) or not 1 <= len(request_id) <= most or not request_id.isprintable():
            raise _wrong("request_id", request_id, f"a string of 1 to {most} printable characters")  # it is logged
        if type(priority) is not int or abs(priority) > limits.MAX_ABS_PRIORITY:
            most = limits.MAX_ABS_PRIORITY
            raise _wrong("priority", priority, f"an integer from {-most} to {most}")
        most = limits.MAX_CACHE_SALT_CHARS
        if cache_salt is not None and not (isinstance(cache_salt, str) and 1 <= len(cache_salt) <= most):
            raise _wrong("cache_salt", cache_salt, f"a string of 1 to {most} characters")
        is_number = isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool)
        if timeout_s is not None and not (is_number and 0 < timeout_s <= limits.MAX_TIMEOUT_S):
            raise _wrong("timeout_s", timeout_s, f"a number of seconds in (0, {limits.MAX_TIMEOUT_S:g}]")

    # -- the prompt --

    def _tokenize(self, prompt: Prompt) -> tuple[str | None, list[int], str]:
        """(text if known, token ids, name of the field to blame)."""
        text: Any = None
        ids: Any = None
        if isinstance(prompt, str):
            text = prompt
        elif isinstance(prompt, Mapping):
            unknown = [key for key in prompt if key not in PROMPT_KEYS]
            if unknown:
                known = " and ".join(PROMPT_KEYS)
                raise NotSupportedError(f"The prompt has {unknown[0]!r}; this model takes {known}.", param="prompt")
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        else:
            ids = prompt
        if ids is not None:
            return (text if isinstance(text, str) else None), self._read_ids(ids), "input_tokens"
        if not isinstance(text, str):
            wanted = 'give a string, a list of token ids, {"prompt": ...} or {"prompt_token_ids": ...}'
            kind = f"a {type(prompt).__name__} with neither text nor token ids"
            raise RequestError(f"The prompt is {kind}; {wanted}.", param="prompt")
        if self.tokenizer is None:
            wrong = "The prompt is text, but there is no tokenizer (skip_tokenizer_init)"
            raise RequestError(f"{wrong}; give prompt_token_ids.", param="prompt")
        found = self.tokenizer.encode(text)
        self._check_vocabulary(found, "prompt")
        return text, found, "prompt"

    def _embeds(self, prompt: Mapping[str, Any], params: SamplingParams) -> TensorData | None:
        given = prompt.get("prompt_embeds")
        if given is not None and not self.config.model.enable_prompt_embeds:
            raise NotSupportedError("enable_prompt_embeds is off here; send text or token ids.", param="prompt_embeds")
        of_tokens = (params.prompt_logprobs, params.truncate_prompt_tokens, prompt.get("prompt_token_ids"))
        if given is not None and any(value is not None for value in of_tokens):
            wanted = "without prompt_token_ids, prompt_logprobs and truncate_prompt_tokens, which are of tokens"
            raise _wrong("prompt_embeds", None, wanted)
        return None if given is None else read_prompt_embeds(given, self.model.hf_config["hidden_size"])

    def _read_ids(self, ids: Any) -> list[int]:
        try:  # a list that is right is checked and copied in one go; what is wrong with another is found out slowly
            found: list[int] = msgspec.convert(ids, self._id_list)
            return found
        except msgspec.ValidationError:
            found = _as_ids(ids)
            self._check_vocabulary(found, "input_tokens")
            return found

    def _check_prompt(self, token_ids: list[int], param: str, num_new: int = 1) -> None:
        """num_new: tokens that the request generates at least."""
        if not token_ids:
            raise RequestError("The prompt is empty; give at least one token.", param=param)
        if len(token_ids) + num_new > self.max_model_len:
            beside = ", and the output needs at least one" if num_new else ""
            most = f"This model's maximum context length is {self.max_model_len} tokens"
            found = f"your prompt contains {len(token_ids)} tokens{beside}"
            raise RequestError(f"{most}. However, {found}. Shorten the prompt.", param=param)

    def _check_vocabulary(self, token_ids: list[int], param: str) -> None:
        lowest, highest = min(token_ids, default=0), max(token_ids, default=0)
        if lowest < 0 or highest >= self.vocab_size:
            wrong = f"Token id {lowest if lowest < 0 else highest} is not in the vocabulary"
            raise RequestError(f"{wrong}; use 0 to {self.vocab_size - 1}.", param=param)

    # -- sampling parameters --

    def _check_params(self, params: SamplingParams) -> list[list[int]]:
        """Check against vocabulary and settings; returns the bad words' token ids. In place: the logits processors' arguments."""
        for name in ("logprobs", "prompt_logprobs"):
            self._check_logprobs(name, getattr(params, name))
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            if ids := getattr(params, name):
                self._check_ids(name, ids)
        if params.structured_outputs is not None and not self._structured_output_backends:
            missing = "structured_outputs needs a structured-output backend, and no plugin here offers one."
            raise NotSupportedError(missing, param="structured_outputs")
        if params.structured_outputs is not None and params.structured_outputs.reasoning_end is not None:
            params.structured_outputs = self._resolve_reasoning_end(params.structured_outputs)
        if params.stop and self.tokenizer is None:
            raise RequestError("stop needs a tokenizer (skip_tokenizer_init is set); use stop_token_ids.", param="stop")
        for name in ("stop", "bad_words", "structured_outputs"):  # no lone surrogates, no integers beyond 64 bits
            if value := getattr(params, name):
                check_plain_data(name, value, limits.MAX_IPC_MESSAGE_BYTES)
        if params.extra_args is not None:
            check_plain_data("extra_args", params.extra_args, limits.MAX_EXTRA_ARGS_BYTES)
        if self._processors or params.logits_processor_args is not None:
            params.logits_processor_args = wanted_args(params, self._processors, self._running_processors)
        return self._tokenize_bad_words(params.bad_words) if params.bad_words else []

    def _check_logprobs(self, name: str, value: int | None) -> None:
        most = self.config.model.max_logprobs
        if value is None or most == -1:
            return
        wanted = self.vocab_size if value == -1 else value
        if wanted > most:
            found = f"Requested {name} of {wanted}"
            raise RequestError(f"{found}; at most {most} (max_logprobs) are allowed", param=name, value=value)

    def _check_transfer(self, given: Mapping[str, Any] | None, params: SamplingParams) -> dict[str, Any] | None:
        """Return what is for the KV connector: the argument, or vLLM's place in `extra_args`."""
        found = given if given is not None else (params.extra_args or {}).get("kv_transfer_params")
        if found is None:
            return None
        if not isinstance(found, Mapping):
            raise _wrong("kv_transfer_params", found, "a map from names to plain data")
        if self.config.kv_transfer.kv_connector is None:
            missing = "No KV connector runs here; leave kv_transfer_params out."
            raise NotSupportedError(missing, param="kv_transfer_params")
        return dict(found)

    def _check_ids(self, name: str, ids: Iterable[int]) -> None:
        lowest, highest = min(ids), max(ids)
        if lowest < 0 or highest >= self.vocab_size:
            wrong = f"{name} holds a token id that is not in the vocabulary (0 to {self.vocab_size - 1})"
            raise RequestError(wrong, param=name, value=lowest if lowest < 0 else highest)

    def _resolve_reasoning_end(self, constraint: StructuredOutputsParams) -> StructuredOutputsParams:
        """The same with token ids in place of a text."""
        end = constraint.reasoning_end
        if isinstance(end, str):
            if self.tokenizer is None:
                raise RequestError("reasoning_end is a text, which needs a tokenizer.", param="structured_outputs")
            token_id = self.tokenizer.token_id(end)
            end = self.tokenizer.encode(end, add_special_tokens=False) if token_id is None else [token_id]
        self._check_ids("structured_outputs", end or [])
        return msgspec.structs.replace(constraint, reasoning_end=end)

    def _tokenize_bad_words(self, words: Sequence[str]) -> list[list[int]]:
        """Each word as it is tokenized at the start of a text and after a space."""
        if self.tokenizer is None:
            raise RequestError("bad_words needs a tokenizer (skip_tokenizer_init is set).", param="bad_words")
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            for variant in (word.lstrip() or word, " " + word.lstrip()):
                if not variant.strip() and variant != word:
                    continue
                ids = self.tokenizer.encode(variant, add_special_tokens=False)
                if ids and max(ids) < self.vocab_size:
                    found[tuple(ids)] = None
        return [list(ids) for ids in found]

    def _fill(self, params: SamplingParams, num_prompt_tokens: int, output_kind: Any) -> None:
        """In place: max_tokens becomes a number that fits the context."""
        room = self.max_model_len - num_prompt_tokens
        params.max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        params.min_tokens = min(params.min_tokens, params.max_tokens)
        if self.tokenizer is None:
            params.detokenize = False
        if output_kind is not None:
            params.output_kind = output_kind


def child_seed(seed: int, index: int) -> int:
    """Seed of sample `index` of a request: its own for the first, so that n = 1 is the first of n."""
    if index == 0:
        return seed
    # splitmix64's finalizer: neighbours in (seed, index) share no pattern.
    value = (seed + index * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (value ^ (value >> 31)) & limits.MAX_SEED


_FLOATS = {"float32": "<f4", "bfloat16": "<u2", "float16": "<f2"}


def read_prompt_embeds(given: Any, hidden_size: int) -> TensorData:
    """Return embeddings [T, hidden_size]. given: a torch tensor, what torch makes one of, or `TensorData`. Raises `RequestError`."""
    if not isinstance(given, TensorData):
        import torch

        try:
            tensor = torch.as_tensor(given).detach().cpu()
        except (TypeError, ValueError, RuntimeError) as error:
            raise _wrong("prompt_embeds", None, f"a tensor: {error}") from None
        data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        given = TensorData(data, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
    shape = given.shape[1:] if len(given.shape) == 3 and given.shape[0] == 1 else given.shape
    if given.dtype not in _FLOATS or len(shape) != 2 or not shape[0] or shape[1] != hidden_size:
        found = f"{given.dtype} {list(given.shape)}"
        raise _wrong("prompt_embeds", found, f"[tokens, {hidden_size}] of {', '.join(_FLOATS)}")
    import numpy as np  # whoever gives none does without

    numbers: Any = np.frombuffer(given.data, _FLOATS[given.dtype])
    if given.dtype == "bfloat16":
        numbers = (numbers.astype("<u4") << 16).view("<f4")
    # What is not finite would stay in blocks that other requests get.
    if not (largest := float(np.abs(numbers).max())) <= limits.MAX_ABS_PROMPT_EMBEDS:
        raise _wrong("prompt_embeds", largest, f"of numbers up to {limits.MAX_ABS_PROMPT_EMBEDS:g} in size")
    return TensorData(given.data, given.dtype, shape)


def _wrong(name: str, value: Any, words: str) -> RequestError:
    return RequestError(f"{name} must be {words}", param=name, value=value)


def _as_ids(ids: Any) -> list[int]:
    tolist = getattr(ids, "tolist", None)  # numpy arrays and tensors
    found = tolist() if tolist is not None else ids
    if not isinstance(found, (list, tuple)):
        raise RequestError(f"Token ids are a {type(ids).__name__}; give a list of integers.", param="input_tokens")
    if set(map(type, found)) - {int}:
        odd = next(item for item in found if type(item) is not int)
        raise RequestError("Token ids must be integers", param="input_tokens", value=odd)
    return list(found)


def _defaults_from(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    defaults = {name: generation_config[name] for name in MODEL_DEFAULTS if generation_config.get(name) is not None}
    try:
        SamplingParams(**defaults)
    except RequestError as error:
        raise ConfigError(
            f"The model's generation_config has a bad sampling default: {error}. Fix it with "
            "override_generation_config, or set generation_config to pelton."
        ) from None
    return defaults
