"""Refusals of requests that pool, and where a text is cut."""

from __future__ import annotations

import msgspec
import pytest

from pelton.engine.pooling_requests import check_pooling_params, truncated
from pelton.errors import NotSupportedError, RequestError
from pelton.messages.request import PoolingParams
from pelton.model.pooling import DenseSpec, PoolingSpec
from pelton.model.resolved import ResolvedModel

SPEC = PoolingSpec(tasks=["embed", "token_embed"], pooling_type="last", is_matryoshka=True)


def model(spec=SPEC):
    return ResolvedModel(
        name="m", path="m", weights_format="dummy", hf_config={"hidden_size": 16}, architecture="A", dtype="float32",
        max_model_len=32, vocab_size=50, eos_token_ids=[], generation_config={}, tokenizer_path=None, pooling=spec,
    )  # fmt: skip


def test_defaults_are_the_models_first_task():
    assert check_pooling_params(None, model()).task == "embed"
    assert check_pooling_params(None, model(msgspec.structs.replace(SPEC, tasks=["classify"]))).task == "classify"


@pytest.mark.parametrize("pooling_type, task, skips", [
    ("last", "embed", False), ("mean", "embed", True), ("cls", "embed", True), ("last", "token_embed", True),
])  # fmt: skip
def test_the_prefix_cache_is_not_read_where_every_hidden_state_is_needed(pooling_type, task, skips):
    spec = msgspec.structs.replace(SPEC, pooling_type=pooling_type)
    params = PoolingParams(task=task)
    assert check_pooling_params(params, model(spec)).skip_reading_prefix_cache is skips
    assert params.skip_reading_prefix_cache is None, "the user's own is left as it was"
    for asked in (False, True):
        params = PoolingParams(task=task, skip_reading_prefix_cache=asked)
        assert check_pooling_params(params, model(spec)).skip_reading_prefix_cache is (skips or asked)


@pytest.mark.parametrize("spec, params, error, message", [
    (None, None, RequestError, "generates; it makes no vectors"),
    (SPEC, "embed", RequestError, "pooling_params is a str"),
    (SPEC, PoolingParams(task="classify"), NotSupportedError, "no task 'classify'; it is run for embed, token_embed"),
    (SPEC, PoolingParams(dimensions=17), RequestError, "at most 16"),
    (msgspec.structs.replace(SPEC, dense=[DenseSpec(path="d", in_features=16, out_features=4)]),
     PoolingParams(dimensions=5), RequestError, "at most 4"),
    (msgspec.structs.replace(SPEC, dimensions=[4, 8]), PoolingParams(dimensions=5), RequestError, "one of 4, 8"),
    (msgspec.structs.replace(SPEC, is_matryoshka=False), PoolingParams(dimensions=4), RequestError, "--is-matryoshka"),
    (msgspec.structs.replace(SPEC, tasks=["classify"]), PoolingParams(task="classify", dimensions=4), RequestError,
     "for vectors only"),
])  # fmt: skip
def test_refusals(spec, params, error, message):
    with pytest.raises(error, match=message):
        check_pooling_params(params, model(spec))


class Tokenizer:
    """A token a character, between 1 and 2."""

    def encode(self, text, add_special_tokens=True):
        ids = [ord(char) for char in text]
        return [1, *ids, 2] if add_special_tokens else ids


def test_a_text_loses_its_last_tokens_and_keeps_the_special_ones():
    tokenizer = Tokenizer()
    ids = tokenizer.encode("abcdef")
    assert truncated(ids, "abcdef", 5, 32, tokenizer) == [1, *map(ord, "abc"), 2]
    assert truncated(ids, "abcdef", -1, 6, tokenizer) == [1, *map(ord, "abcd"), 2]
    assert truncated(ids, "abcdef", 8, 32, tokenizer) == ids
    assert truncated(ids, None, 3, 32, tokenizer) == ids[:3]
    assert truncated(ids, "abcdef", 2, 32, tokenizer) == ids[:2], "no room for a token of the text"
    for bad in (0, -2, True, 1.5):
        with pytest.raises(RequestError, match="truncate_prompt_tokens must be -1 or at least 1"):
            truncated(ids, "abcdef", bad, 32, tokenizer)
