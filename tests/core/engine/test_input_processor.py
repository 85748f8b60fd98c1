"""What a request may hold, and what it becomes."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from pelton import limits
from pelton.config import EngineConfig
from pelton.engine.input_processor import InputProcessor, child_seed
from pelton.errors import ConfigError, NotSupportedError, RequestError
from pelton.messages.report import DeviceReport, EngineInfo
from pelton.model.resolved import ResolvedModel
from pelton.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from pelton.testing.fake_model import fake_resolved_model
from pelton.tokenizer import Tokenizer

VOCAB_SIZE = 300
MAX_MODEL_LEN = 64


def make(tokenizer: Tokenizer | None = None, *, flat: dict[str, Any] | None = None, **model: Any) -> InputProcessor:
    resolved: ResolvedModel = msgspec.structs.replace(
        fake_resolved_model(vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN, eos_token_ids=(0,)), **model
    )
    return InputProcessor(EngineConfig.from_flat(**(flat or {})), resolved, tokenizer)


@pytest.fixture
def processor(tokenizer: Tokenizer) -> InputProcessor:
    return make(tokenizer)


@pytest.mark.parametrize(
    "prompt, ids, text",
    [
        pytest.param([5, 6, 7], [5, 6, 7], None, id="ids"),
        pytest.param((5, 6), [5, 6], None, id="tuple"),
        pytest.param(np.array([5, 6]), [5, 6], None, id="numpy"),
        pytest.param({"prompt_token_ids": [1]}, [1], None, id="dict-of-ids"),
        pytest.param({"prompt_token_ids": [1], "prompt": "!"}, [1], "!", id="ids-and-their-text"),
        pytest.param({"prompt": "!"}, [1], "!", id="dict-of-text"),
        pytest.param("!!", [1, 1], "!!", id="text"),
    ],
)
def test_takes_prompts_in_every_form(processor: InputProcessor, prompt: Any, ids: list[int], text: str | None) -> None:
    done = processor.process("r", prompt)
    assert (done.prompt_token_ids, done.prompt) == (ids, text)
    assert [request.prompt_token_ids for request in done.requests] == [ids]
    assert done.requests[0].eos_token_ids == [0]


@pytest.mark.parametrize(
    "prompt, message, param",
    [
        pytest.param([], "empty", "input_tokens", id="no-ids"),
        pytest.param("", "empty", "prompt", id="no-text"),
        pytest.param([-1], "Token id -1 is not in the vocabulary", "input_tokens", id="negative"),
        pytest.param(
            [1, VOCAB_SIZE], f"Token id {VOCAB_SIZE} is not in the vocabulary", "input_tokens", id="past-the-end"
        ),
        pytest.param([2**70], "not in the vocabulary", "input_tokens", id="huge"),
        pytest.param([True], "must be integers", "input_tokens", id="bool"),
        pytest.param([1.0], "must be integers", "input_tokens", id="float"),
        pytest.param(["a"], "must be integers", "input_tokens", id="strings"),
        pytest.param(5, "give a list of integers", "input_tokens", id="number"),
        pytest.param({}, "neither text nor token ids", "prompt", id="empty-dict"),
        pytest.param({"prompt": 5}, "neither text nor token ids", "prompt", id="dict-of-number"),
        pytest.param(
            [1] * MAX_MODEL_LEN,
            f"maximum context length is {MAX_MODEL_LEN} tokens. However, your prompt contains {MAX_MODEL_LEN} tokens",
            "input_tokens",
            id="as-long-as-the-context",
        ),
        pytest.param("!" * MAX_MODEL_LEN, "However, your prompt contains", "prompt", id="text-too-long"),
    ],
)
def test_refuses_bad_prompts(processor: InputProcessor, prompt: Any, message: str, param: str) -> None:
    with pytest.raises(RequestError, match=message.replace("(", r"\(")) as caught:
        processor.process("r", prompt)
    assert caught.value.param == param
    assert caught.value.status == 400


def test_refuses_kinds_of_prompt_that_no_one_handles(processor: InputProcessor) -> None:
    with pytest.raises(NotSupportedError, match="multi_modal_data"):
        processor.process("r", {"prompt": "a", "multi_modal_data": {}})


def test_text_needs_a_tokenizer() -> None:
    with pytest.raises(RequestError, match="skip_tokenizer_init"):
        make().process("r", "hello")


@pytest.mark.parametrize(
    "fields, param",
    [
        pytest.param({"request_id": ""}, "request_id", id="empty-id"),
        pytest.param({"request_id": "a\nERROR 12:00:00 forged"}, "request_id", id="id-of-two-log-lines"),
        pytest.param({"request_id": "x" * (limits.MAX_REQUEST_ID_CHARS + 1)}, "request_id", id="long-id"),
        pytest.param({"priority": limits.MAX_ABS_PRIORITY + 1}, "priority", id="priority"),
        pytest.param({"priority": 1.5}, "priority", id="fractional-priority"),
        pytest.param({"cache_salt": ""}, "cache_salt", id="empty-salt"),
        pytest.param({"cache_salt": "x" * (limits.MAX_CACHE_SALT_CHARS + 1)}, "cache_salt", id="long-salt"),
        pytest.param({"timeout_s": 0}, "timeout_s", id="no-time"),
        pytest.param({"timeout_s": float("nan")}, "timeout_s", id="nan-time"),
        pytest.param({"timeout_s": float("inf")}, "timeout_s", id="endless"),
    ],
)
def test_refuses_bad_request_fields(processor: InputProcessor, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        processor.process(fields.pop("request_id", "r"), [1], None, **fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "params, param",
    [
        pytest.param({"logprobs": 21}, "logprobs", id="logprobs"),
        pytest.param({"logprobs": -1}, "logprobs", id="all-logprobs"),
        pytest.param({"prompt_logprobs": 21}, "prompt_logprobs", id="prompt-logprobs"),
        pytest.param({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids", id="stop-id"),
        pytest.param({"allowed_token_ids": [VOCAB_SIZE]}, "allowed_token_ids", id="allowed-id"),
        pytest.param({"logit_bias": {VOCAB_SIZE: 1.0}}, "logit_bias", id="bias-id"),
        pytest.param({"extra_args": {"x": object()}}, "extra_args", id="extra-args-no-data"),
        pytest.param({"extra_args": {"x": "y" * 100_000}}, "extra_args", id="extra-args-long"),
    ],
)
def test_refuses_params_beyond_the_model(processor: InputProcessor, params: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        processor.process("r", [1], SamplingParams(**params))
    assert caught.value.param == param


def test_max_logprobs_may_be_lifted(tokenizer: Tokenizer) -> None:
    processor = make(tokenizer, flat={"max_logprobs": -1})
    assert processor.process("r", [1], SamplingParams(logprobs=-1)).params.logprobs == -1


def test_structured_outputs_need_a_backend(tokenizer: Tokenizer) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+"))
    with pytest.raises(NotSupportedError, match="structured-output backend"):
        make(tokenizer).process("r", [1], params)
    model = fake_resolved_model(vocab_size=VOCAB_SIZE)
    with_backend = InputProcessor(EngineConfig(), model, tokenizer, structured_output_backends=["any"])
    assert with_backend.process("r", [1], params).params == params


@pytest.mark.parametrize(
    "given, filled",
    [
        pytest.param(None, MAX_MODEL_LEN - 3, id="rest-of-the-context"),
        pytest.param(5, 5, id="given"),
        pytest.param(10_000, MAX_MODEL_LEN - 3, id="clamped"),
    ],
)
def test_max_tokens_fits_the_context(processor: InputProcessor, given: int | None, filled: int) -> None:
    params = SamplingParams(max_tokens=given)
    done = processor.process("r", [1, 2, 3], params)
    assert done.requests[0].sampling_params.max_tokens == filled
    assert params.max_tokens == given  # the caller's stays as it was


def test_min_tokens_cannot_outlast_max_tokens(processor: InputProcessor) -> None:
    done = processor.process("r", [1, 2, 3], SamplingParams(max_tokens=None, min_tokens=2**30))
    assert done.params.min_tokens == done.params.max_tokens == MAX_MODEL_LEN - 3


def test_the_engine_may_shrink_the_context(processor: InputProcessor) -> None:
    processor.engine_started(
        EngineInfo(
            report=DeviceReport(), num_blocks=2, block_size=16, kv_cache_bytes=0, max_num_seqs=1, max_num_batched_tokens=1,
            max_model_len=8,
        )
    )  # fmt: skip
    with pytest.raises(RequestError, match="maximum context length is 8 tokens"):
        processor.process("r", [1] * 8)


def test_n_samples_have_ids_and_seeds_of_their_own(processor: InputProcessor) -> None:
    done = processor.process("r", [1], SamplingParams(n=4, seed=7))
    again = processor.process("r", [1], SamplingParams(n=4, seed=7))
    assert len({request.request_id for request in [*done.requests, *again.requests]}) == 8
    seeds = [request.seed for request in done.requests]
    assert seeds == [child_seed(7, index) for index in range(4)]
    assert len(set(seeds)) == 4 and seeds[0] == 7
    assert all(0 <= seed <= limits.MAX_SEED for seed in seeds)
    assert processor.process("r", [1], SamplingParams(seed=7)).requests[0].seed == 7


def test_the_first_of_n_samples_alone_computes_the_prompts_logprobs(processor: InputProcessor) -> None:
    """The others read the prompt's blocks: who asks for logprobs of its prompt does not look for them."""
    done = processor.process("r", [1, 2], SamplingParams(n=3, prompt_logprobs=1))
    assert [request.sampling_params.prompt_logprobs for request in done.requests] == [1, None, None]


def test_unseeded_requests_draw_from_the_engines_seed(tokenizer: Tokenizer) -> None:
    def draw(seed: int) -> list[int]:
        processor = make(tokenizer, flat={"seed": seed})
        return [processor.process("r", [1]).requests[0].seed for _ in range(3)]

    assert draw(1) == draw(1) != draw(2)
    assert len(set(draw(1))) == 3


def test_bad_words_are_banned_with_and_without_a_space(processor: InputProcessor, tokenizer: Tokenizer) -> None:
    done = processor.process("r", [1], SamplingParams(bad_words=["no", " way"]))
    assert done.requests[0].bad_words_token_ids == [tokenizer.encode(word) for word in ("no", " no", "way", " way")]


def test_bad_words_of_white_space_alone_are_banned_as_they_are(processor: InputProcessor, tokenizer: Tokenizer) -> None:
    done = processor.process("r", [1], SamplingParams(bad_words=["\n", " ", "\n\n"]))
    assert done.requests[0].bad_words_token_ids == [tokenizer.encode(word) for word in ("\n", " ", "\n\n")]


def test_defaults_come_from_the_models_generation_config(tokenizer: Tokenizer) -> None:
    processor = make(tokenizer, generation_config={"temperature": 0.6, "top_k": 20, "max_tokens": 7})
    defaults = processor.get_default_sampling_params()
    assert (defaults.temperature, defaults.top_k, defaults.max_tokens) == (0.6, 20, 7)
    assert processor.process("r", [1]).params.top_k == 20
    assert processor.process("r", [1], SamplingParams()).params.top_k == 0
    defaults.top_k = 3
    assert processor.get_default_sampling_params().top_k == 20


def test_a_bad_generation_config_stops_the_start(tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="override_generation_config"):
        make(tokenizer, generation_config={"temperature": -3})


def test_detokenize_is_off_without_a_tokenizer() -> None:
    processor = make()
    assert processor.process("r", [1]).params.detokenize is False
    with pytest.raises(RequestError, match="stop needs a tokenizer"):
        processor.process("r", [1], SamplingParams(stop="x"))


def test_output_kind_can_be_set_without_touching_the_callers(processor: InputProcessor) -> None:
    params = SamplingParams()
    done = processor.process("r", [1], params, output_kind=RequestOutputKind.FINAL_ONLY)
    assert done.params.output_kind == RequestOutputKind.FINAL_ONLY
    assert params.output_kind == RequestOutputKind.CUMULATIVE


@pytest.mark.parametrize("change", [{"temperature": 3.0}, {"top_p": 0.0}, {"n": 0}, {"stop": [""]}], ids=str)
def test_params_are_checked_as_they_are_now(processor: InputProcessor, change: dict[str, Any]) -> None:
    """The engine process would drop what it cannot decode, and nobody would hear of it."""
    params = SamplingParams(max_tokens=4)
    for name, value in change.items():
        setattr(params, name, value)
    with pytest.raises(RequestError, match=next(iter(change))):
        processor.process("r", [1], params)
    params = SamplingParams()
    params.stop = "one"
    assert processor.process("r", [1], params).params.stop == ["one"] and params.stop == "one"


def test_front_ends_of_one_engine_draw_other_seeds():
    first, second, alone = make(), make(), make()
    first.draw_apart(1)
    second.draw_apart(2)
    seeds = [one.process("r", [5, 6]).requests[0].seed for one in (first, second, alone)]
    assert len(set(seeds)) == 3


@pytest.mark.parametrize(
    "fields, name",
    [
        ({"stop": ["a", "\ud800"]}, "stop"),
        ({"bad_words": ["\ud800"]}, "bad_words"),
        ({"structured_outputs": StructuredOutputsParams(regex="\ud800")}, "structured_outputs"),
        ({"structured_outputs": StructuredOutputsParams(choice=["a", "\ud800"])}, "structured_outputs"),
        ({"structured_outputs": StructuredOutputsParams(json={"maxLength": 10**28})}, "structured_outputs"),
    ],
    ids=["stop", "bad_words", "regex", "choice", "json"],
)
def test_what_no_message_can_hold_is_refused_with_its_field(
    processor: InputProcessor, fields: dict[str, Any], name: str
) -> None:
    processor = InputProcessor(
        processor.config, processor.model, processor.tokenizer, structured_output_backends=["any"]
    )
    with pytest.raises(RequestError, match=f"{name} must be plain data") as refused:
        processor.process("r", [5], SamplingParams(**fields))
    assert refused.value.param == name
