"""How one request is sampled and when it stops: vLLM's names and meaning.

This file checks what can be checked without a model; `engine/input_processor.py` checks token ids
against the vocabulary, lengths against the context, and logprobs against `max_logprobs`.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from functools import partial
from itertools import compress
from operator import is_not
from typing import Any

import msgspec

from pelton import limits
from pelton.errors import RequestError


class RequestOutputKind(IntEnum):
    CUMULATIVE = 0
    """Every output holds all text and tokens so far."""
    DELTA = 1
    """Every output holds what is new."""
    FINAL_ONLY = 2
    """One output, at the end."""


class StructuredOutputsParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Exactly one constraint on the output's form; a structured-output plugin has to be there."""

    json: str | dict[str, Any] | None = None
    """A JSON schema."""
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    """Context-free, written as Lark, GBNF or EBNF."""
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    whitespace_pattern: str | None = None
    """Regex of the whitespace between a JSON text's parts, in place of the backend's own."""
    disable_any_whitespace: bool | None = None
    """A JSON text without whitespace between its parts; what the settings say when unset."""
    disable_additional_properties: bool | None = None
    """Objects of a JSON schema that does not say it have the properties that it names, and no others."""
    reasoning_end: str | list[int] | None = None
    """The constraint holds behind this: the text of a token, or token ids, that end the model's reasoning."""

    @property
    def kind(self) -> str:
        """Name of the constraint that is given."""
        return next((name for name in CONSTRAINTS if getattr(self, name) not in (None, False)), "")

    def __post_init__(self) -> None:
        given = [name for name in CONSTRAINTS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise RequestError(
                f"structured_outputs has {given or 'no constraint'}; give exactly one of {', '.join(CONSTRAINTS)}.",
                param="structured_outputs",
            )
        value = getattr(self, given[0])
        if isinstance(value, list):
            _length("structured_outputs.choice", value, limits.MAX_CHOICES)
            if not value or not all(isinstance(text, str) and text for text in value):
                raise RequestError("structured_outputs.choice must hold non-empty strings", param="structured_outputs")
        size = sum(map(len, value)) if isinstance(value, list) else len(value) if isinstance(value, str) else 0
        if size > limits.MAX_CONSTRAINT_CHARS:
            raise RequestError(
                f"structured_outputs.{given[0]} has {size} characters; at most {limits.MAX_CONSTRAINT_CHARS}",
                param="structured_outputs",
            )
        if self.reasoning_end is not None:
            _length("structured_outputs.reasoning_end", self.reasoning_end, limits.MAX_STOP_STRING_CHARS)
            if not self.reasoning_end:
                raise RequestError("structured_outputs.reasoning_end must not be empty", param="structured_outputs")


CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
GuidedDecodingParams = StructuredOutputsParams
"""vLLM's older name."""


MODEL_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_tokens")
"""Fields that stand in generation_config.json too, where they are the model's own defaults."""


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Sampling and stopping of one request. Raises `RequestError`, naming the field, on a bad value.

    temperature 0 is greedy. top_k 0 or -1, top_p 1 and min_p 0 are off. max_tokens None means up to the
    context's end. logprobs / prompt_logprobs: alternatives per token, -1 for the whole vocabulary.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    """Of a longer prompt the last so many tokens are read; -1: as many as leave room for max_tokens."""
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    structured_outputs: StructuredOutputsParams | None = None
    guided_decoding: StructuredOutputsParams | None = None
    """vLLM's older name of `structured_outputs`, which it becomes."""
    extra_args: dict[str, Any] | None = None
    """For plugins, by their names; `kv_transfer_params` in it goes to the KV connector, as in vLLM."""
    logits_processor_args: dict[str, Any] | None = None
    """Logits processors of plugins that this request has, by name, and what each is given: plain data that it checks."""

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        self.stop = [] if self.stop is None else self.stop
        self.stop_token_ids = [] if self.stop_token_ids is None else self.stop_token_ids
        self.bad_words = [] if self.bad_words is None else self.bad_words
        if isinstance(self.guided_decoding, StructuredOutputsParams):
            if self.structured_outputs is not None:
                raise RequestError("Give structured_outputs or guided_decoding, not both.", param="guided_decoding")
            self.structured_outputs, self.guided_decoding = self.guided_decoding, None
        self.verify()

    @property
    def is_greedy(self) -> bool:
        return self.temperature < 1e-5

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1.0

    @property
    def needs_side_slot(self) -> bool:
        """True when sampling reads a side table (token counts, bias, token sets): see `SchedulerConfig`."""
        has_sets = bool(self.logit_bias or self.bad_words) or self.allowed_token_ids is not None
        return has_sets or self.min_tokens > 0 or self.has_penalties

    def clone(self) -> SamplingParams:
        """A copy that shares no container with this one."""
        return msgspec.convert(msgspec.to_builtins(self), SamplingParams)

    def verify(self) -> None:
        """Check every field on its own and the pairs that contradict each other."""
        # Most fields of most requests hold the default itself, which is right: who sets three fields pays for three checks.
        for name, check in compress(_CHECKS, map(is_not, msgspec.structs.astuple(self), _DEFAULTS)):
            check(name, getattr(self, name))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            wrong = f"min_tokens must be at most max_tokens ({self.max_tokens})"
            raise RequestError(wrong, param="min_tokens", value=self.min_tokens)
        if self.n > 1 and self.is_greedy:
            raise RequestError("n must be 1 with greedy sampling (temperature 0)", param="n", value=self.n)
        if self.stop and not self.detokenize:
            raise RequestError("stop needs detokenize=True", param="stop", value=self.stop)


class BeamSearchParams(msgspec.Struct, kw_only=True):
    """vLLM's names. A beam's score is the sum of its logprobs over its length to the power of `length_penalty`; they are those of
    the model's own distribution, whatever `temperature` says."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0
    temperature: float = 0.0

    def __post_init__(self) -> None:
        _integer(1, limits.MAX_N, "beam_width", self.beam_width)
        _integer(1, 2**31 - 1, "max_tokens", self.max_tokens)
        _number(-10.0, 10.0, "length_penalty", self.length_penalty)

    def step_params(self) -> SamplingParams:
        """Sampling parameters that give a beam's likeliest continuations: two for each beam, as each may end with one."""
        final, most = RequestOutputKind.FINAL_ONLY, 2 * self.beam_width
        return SamplingParams(max_tokens=1, temperature=0.0, logprobs=most, ignore_eos=True, output_kind=final)


def _number(low: float, high: float, name: str, value: Any, *, low_open: bool = False) -> None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high  # not NaN
    if not good or (low_open and value == low):
        bounds = f"{'(' if low_open else '['}{low:g}, {high:g}]"
        raise RequestError(f"{name} must be a finite number in {bounds}", param=name, value=value)


def _integer(low: int, high: int, name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise RequestError(f"{name} must be an integer from {low} to {high}", param=name, value=value)


def _length(name: str, value: Any, most: int) -> None:
    if len(value) > most:
        raise RequestError(f"{name} has {len(value)} entries; at most {most}", param=name)


def _type(types: type, words: str, name: str, value: Any) -> None:
    if not isinstance(value, types):
        raise RequestError(f"{name} must be {words}", param=name, value=value)


def _strings(words: str, most: int, longest: int, name: str, value: Any) -> None:
    _type(list, words, name, value)
    _length(name, value, most)
    for word in value:
        if not isinstance(word, str) or not word:
            raise RequestError(f"{name} must hold non-empty strings", param=name, value=word)
        if len(word) > longest:
            raise RequestError(f"{name} has a string of {len(word)} characters; at most {longest}", param=name)


def _token_ids(most: int, name: str, value: Any) -> None:
    _type(list, "a list of token ids", name, value)
    _length(name, value, most)
    for token_id in value:
        _integer(0, 2**31 - 1, name, token_id)


def _allowed(name: str, value: Any) -> None:
    _token_ids(limits.MAX_ALLOWED_TOKEN_IDS, name, value)
    if not value:
        raise RequestError(f"{name} must not be empty", param=name)


def _bias(name: str, value: Any) -> None:
    _type(dict, "a map from token ids to numbers", name, value)
    _length(name, value, limits.MAX_LOGIT_BIAS_ENTRIES)
    for token_id, bias in value.items():
        _integer(0, 2**31 - 1, name, token_id)
        _number(-100.0, 100.0, name, bias)


def _max_tokens(name: str, value: Any) -> None:
    if value is not None:
        _integer(1, 2**31 - 1, name, value)


def _truncation(name: str, value: Any) -> None:
    _integer(-1, 2**31 - 1, name, value)
    if value == 0:
        raise RequestError(f"{name} must be -1 or above 0", param=name, value=0)


_FLAGS = (
    "include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens", "spaces_between_special_tokens"
)  # fmt: skip
_CHECK_OF: dict[str, Callable[[str, Any], None]] = {
    "n": partial(_integer, 1, limits.MAX_N),
    "temperature": partial(_number, 0.0, 2.0),
    "top_p": partial(_number, 0.0, 1.0, low_open=True),
    "top_k": partial(_integer, -1, 2**31 - 1),
    "min_p": partial(_number, 0.0, 1.0),
    "seed": partial(_integer, -limits.MAX_SEED, limits.MAX_SEED),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), partial(_number, -2.0, 2.0)),
    "repetition_penalty": partial(_number, 1e-6, 1e6),
    "logit_bias": _bias,
    "allowed_token_ids": _allowed,
    "bad_words": partial(_strings, "a list of strings", limits.MAX_BAD_WORDS, limits.MAX_BAD_WORD_CHARS),
    "max_tokens": _max_tokens,
    "min_tokens": partial(_integer, 0, 2**31 - 1),
    "stop": partial(_strings, "a string or a list of strings", limits.MAX_STOP_STRINGS, limits.MAX_STOP_STRING_CHARS),
    "stop_token_ids": partial(_token_ids, limits.MAX_STOP_TOKEN_IDS),
    **dict.fromkeys(_FLAGS, partial(_type, bool, "true or false")),
    **dict.fromkeys(("logprobs", "prompt_logprobs"), partial(_integer, -1, 2**31 - 1)),
    "truncate_prompt_tokens": _truncation,
    "output_kind": partial(_type, RequestOutputKind, "a RequestOutputKind"),
    "structured_outputs": partial(_type, StructuredOutputsParams, "a StructuredOutputsParams"),
    "guided_decoding": partial(_type, type(None), "a GuidedDecodingParams"),
    **dict.fromkeys(("extra_args", "logits_processor_args"), partial(_type, dict, "a map from names to plain data")),
}
"""Checks of one field's value that is not the default."""
_CHECKS = [(name, _CHECK_OF[name]) for name in SamplingParams.__struct_fields__]
_DEFAULTS = SamplingParams.__struct_defaults__
