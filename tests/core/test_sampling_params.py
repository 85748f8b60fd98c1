"""Every field of `SamplingParams` refuses what it cannot mean, by its name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pelton.errors import RequestError
from pelton.sampling_params import RequestOutputKind, SamplingParams

BAD: dict[str, list[Any]] = {
    "n": [0, -1, 1.5, True, "2", None],
    "temperature": [-0.1, 2.1, float("nan"), "1", True, None],
    "top_p": [0.0, 1.1, float("inf"), "1"],
    "top_k": [-2, 1.5, "5", None],
    "min_p": [-0.1, 1.1, [0.5]],
    "seed": [1.5, "7", 2**64],
    "presence_penalty": [-2.1, 2.1, "0"],
    "frequency_penalty": [-2.1, 2.1, None],
    "repetition_penalty": [0, 1e-300, -1, float("inf")],
    "logit_bias": [[1], {"a": 1.0}, {1: "x"}, {1: 101.0}, {-1: 0.0}, 5],
    "allowed_token_ids": [[], ["a"], [-1], 5, (1,)],
    "bad_words": ["abc", [""], [5], 5],
    "max_tokens": [0, -1, 2.0, "16"],
    "min_tokens": [-1, 17, "1", None],
    "stop": [5, [""], [5], ("a",), {"a": 1}, ["x" * 100_000]],
    "stop_token_ids": [5, ["a"], [-1], "12"],
    "include_stop_str_in_output": ["x", 1, None],
    "ignore_eos": ["x", 0, None],
    "logprobs": [-2, 1.5, "3"],
    "prompt_logprobs": [-2, 1.5, "3"],
    "truncate_prompt_tokens": [0, -2, 1.5, "3"],
    "detokenize": ["x", 1],
    "skip_special_tokens": [5],
    "spaces_between_special_tokens": [None],
    "output_kind": ["x", 7, None],
    "structured_outputs": [{"json": "{}"}, "x"],
    "guided_decoding": [{"json": "{}"}, "x"],
    "extra_args": [[1], "x"],
    "logits_processor_args": [[1], "x"],
}


def test_all_fields_are_here() -> None:
    assert set(BAD) == set(SamplingParams.__struct_fields__)


@pytest.mark.parametrize("name, value", [(name, value) for name, values in BAD.items() for value in values])
def test_a_value_that_a_field_cannot_have_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize("name, value", [(name, value) for name, values in BAD.items() for value in values])
def test_a_field_that_was_changed_is_checked_again(name: str, value: Any) -> None:
    params = SamplingParams()
    setattr(params, name, value)
    with pytest.raises(RequestError, match=name) as caught:
        params.verify()
    assert caught.value.param == name


@pytest.mark.parametrize(
    "name, value",
    [("n", True), ("temperature", True), ("top_p", True), ("top_k", False), ("min_p", False), ("min_tokens", 0.0)],
)  # fmt: skip
def test_a_value_of_another_type_that_equals_the_default_is_refused(name: str, value: Any) -> None:
    assert getattr(SamplingParams(), name) == value
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    "fields, name",
    [
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"temperature": 0.0, "n": 2}, "n"),
        ({"stop": "a", "detokenize": False}, "stop"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(RequestError, match=name) as caught:
        SamplingParams(**fields)
    assert caught.value.param == name
    params = SamplingParams()
    for field, value in fields.items():
        setattr(params, field, value)
    with pytest.raises(RequestError, match=name):
        SamplingParams(**msgspec.structs.asdict(params))


def test_no_bound_is_too_large_to_compare() -> None:
    with pytest.raises(RequestError, match="temperature"):
        SamplingParams(temperature=10**400)


def test_a_request_pays_for_the_fields_that_it_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def noting(name: str, value: Any) -> None:
        asked.append(name)

    monkeypatch.setattr("pelton.sampling_params._CHECKS", [(name, noting) for name in SamplingParams.__struct_fields__])
    SamplingParams(temperature=0.5, max_tokens=7, seed=3)
    assert set(asked) - {"stop", "stop_token_ids", "bad_words"} == {"temperature", "max_tokens", "seed"}


def test_a_stop_string_may_stand_alone_and_lists_may_be_left_out() -> None:
    params = SamplingParams(stop="one")
    assert (params.stop, params.stop_token_ids, params.bad_words) == (["one"], [], [])


def test_what_is_accepted_travels() -> None:
    params = SamplingParams(
        stop=["a"], bad_words=["b c"], logit_bias={3: -1.5}, allowed_token_ids=[3], output_kind=RequestOutputKind.DELTA,
        extra_args={"deep": [{"a": 1}]}, repetition_penalty=0.01,
    )  # fmt: skip
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
