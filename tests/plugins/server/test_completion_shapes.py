"""Completions: bodies, streams, echo, logprobs, many prompts."""

from __future__ import annotations

import json

import pytest


def chunks_of(response):
    parts = response.text.split("\n\n")
    assert parts[-1] == "" and parts[-2] == "data: [DONE]"
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


def test_whole_answer_has_openai_shape_with_nulls(shared):
    reply = shared.post("/v1/completions", {"prompt": "abc", "model": "alias"}, headers={"X-Request-Id": "r1"})
    body = reply.json()
    assert isinstance(body.pop("created"), int)
    assert body == {
        "id": "cmpl-r1",
        "object": "text_completion",
        "model": "alias",
        "choices": [
            {
                "index": 0,
                "text": "Hello, world.",
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
                "token_ids": None,
                "prompt_logprobs": None,
                "prompt_token_ids": None,
            }
        ],
        "service_tier": None,
        "system_fingerprint": None,
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 13,
            "total_tokens": 16,
            "prompt_tokens_details": {"cached_tokens": 2},
            "completion_tokens_details": None,
        },
        "kv_transfer_params": None,
        "metrics": None,
    }


def test_max_tokens_is_sixteen_when_left_out(shared):
    reply = shared.post("/v1/completions", {"prompt": "abc", "ignore_eos": True}).json()
    assert reply["usage"]["completion_tokens"] == 16
    assert reply["choices"][0]["finish_reason"] == "length"


def test_stream_has_no_role_chunk_and_ends_with_reason_usage_done(shared):
    body = {"prompt": "abc", "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}}
    chunks = chunks_of(shared.post("/v1/completions", body))
    assert [c["choices"] for c in chunks] == [
        [{"index": 0, "text": "H", "logprobs": None, "finish_reason": None, "stop_reason": None}],
        [{"index": 0, "text": "e", "logprobs": None, "finish_reason": "length", "stop_reason": None}],
        [],
    ]
    assert {c["object"] for c in chunks} == {"text_completion"}
    assert [("usage" in c) for c in chunks] == [False, False, True]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "prompt", [pytest.param(["ab", "c"], id="texts"), pytest.param([[1, 2], [3]], id="lists-of-ids")]
)
def test_index_is_prompt_times_n_plus_sample(shared, prompt, stream):
    body = {"prompt": prompt, "n": 2, "max_tokens": 2, "stream": stream, "echo": True}
    reply = shared.post("/v1/completions", body)
    texts = ["", "", "", ""]
    if stream:
        for chunk in chunks_of(reply):
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["text"]
    else:
        assert [choice["index"] for choice in reply.json()["choices"]] == [0, 1, 2, 3]
        texts = [choice["text"] for choice in reply.json()["choices"]]
        assert reply.json()["usage"]["prompt_tokens"] == 3
        assert reply.json()["usage"]["completion_tokens"] == 8
        assert reply.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    assert texts == ["ab0H", "ab1H", "c0H", "c1H"]


def test_choices_are_in_order_whichever_prompt_ends_first(start):
    server = start()
    server.llm.late_prompt = [1, 2]
    reply = server.post("/v1/completions", {"prompt": [[1, 2], [3]], "return_token_ids": True, "max_tokens": 1}).json()
    assert [(choice["index"], choice["prompt_token_ids"]) for choice in reply["choices"]] == [(0, [1, 2]), (1, [3])]


def test_one_list_of_ids_is_one_prompt(shared):
    body = {"prompt": [1, 2, 3], "return_token_ids": True, "max_tokens": 1}
    reply = shared.post("/v1/completions", body).json()
    assert len(reply["choices"]) == 1
    assert reply["choices"][0]["prompt_token_ids"] == [1, 2, 3]
    assert len(reply["choices"][0]["token_ids"]) == 1
    chunks = chunks_of(shared.post("/v1/completions", {**body, "max_tokens": 2, "stream": True}))
    assert [chunk["choices"][0]["prompt_token_ids"] for chunk in chunks] == [[1, 2, 3], None]
    assert chunks[0]["choices"][0]["token_ids"] == reply["choices"][0]["token_ids"]


def test_echo_with_no_tokens_returns_the_prompt_and_its_logprobs(shared):
    """What lm-eval's loglikelihood asks for."""
    body = {"prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 1}
    reply = shared.post("/v1/completions", body).json()
    choice = reply["choices"][0]
    assert choice["text"] == "abc"
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "c"],
        "token_logprobs": [None, -1.5, -1.5],
        "top_logprobs": [None, {"a": -1.0, "b": -1.5}, {"a": -1.0, "c": -1.5}],
        "text_offset": [0, 1, 2],
    }
    assert reply["usage"]["completion_tokens"] == 0
    (chunk,) = chunks_of(shared.post("/v1/completions", {**body, "stream": True}))
    assert (chunk["choices"][0]["text"], chunk["choices"][0]["logprobs"]) == ("abc", choice["logprobs"])
    assert shared.llm.requests[-1][1].max_tokens == 1


def test_echo_with_tokens_joins_prompt_and_answer(shared):
    body = {"prompt": "ab", "max_tokens": 2, "echo": True, "logprobs": 0}
    choice = shared.post("/v1/completions", body).json()["choices"][0]
    assert choice["text"] == "abHe"
    assert choice["logprobs"]["tokens"] == ["a", "b", "H", "e"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3]
    assert choice["logprobs"]["token_logprobs"] == [None, -1.5, -1.5, -1.5]


def test_streamed_logprobs_keep_counting_offsets(shared):
    body = {"prompt": "ab", "max_tokens": 3, "echo": True, "logprobs": 1, "stream": True}
    chunks = chunks_of(shared.post("/v1/completions", body))
    assert chunks[0]["choices"][0]["text"] == "abH"
    offsets = [offset for chunk in chunks for offset in chunk["choices"][0]["logprobs"]["text_offset"]]
    assert offsets == [0, 1, 2, 3, 4]


def test_logprobs_hold_the_sampled_token_beside_the_likeliest(shared):
    body = {"prompt": "ab", "max_tokens": 1, "logprobs": 1}
    found = shared.post("/v1/completions", body).json()["choices"][0]["logprobs"]
    assert found["top_logprobs"] == [{"a": -1.0, "H": -1.5}]
    assert found["text_offset"] == [0]


def test_prompt_logprobs_come_as_vllm_has_them(shared):
    body = {"prompt": "ab", "max_tokens": 1, "prompt_logprobs": 1}
    found = shared.post("/v1/completions", body).json()["choices"][0]["prompt_logprobs"]
    assert found[0] is None
    assert found[1]["2"] == {"logprob": -1.5, "rank": 2, "decoded_token": "b"}


@pytest.mark.parametrize(
    "fields, kept",
    [
        pytest.param({"truncate_prompt_tokens": 2}, [4, 5], id="keeps-the-end"),
        pytest.param({"truncate_prompt_tokens": 2, "truncation_side": "right"}, [1, 2], id="keeps-the-start"),
        pytest.param({"truncate_prompt_tokens": 9}, [1, 2, 3, 4, 5], id="long-enough"),
    ],
)
def test_truncation(shared, fields, kept):
    shared.post("/v1/completions", {"prompt": [1, 2, 3, 4, 5], **fields})
    assert shared.llm.requests[-1][0]["prompt_token_ids"] == kept


def test_truncation_to_the_context_leaves_room_for_the_answer(shared):
    reply = shared.post("/v1/completions", {"prompt": [1] * 300, "truncate_prompt_tokens": -1, "max_tokens": 6})
    assert reply.status_code == 200
    assert len(shared.llm.requests[-1][0]["prompt_token_ids"]) == 250


def test_best_of_returns_the_likeliest_and_counts_all(start):
    server = start()
    body = server.post(
        "/v1/completions", {"prompt": "ab", "n": 2, "best_of": 4, "temperature": 1, "max_tokens": 3}
    ).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["usage"]["completion_tokens"] == 12
    assert server.llm.requests[-1][1].n == 4 and body["choices"][0]["logprobs"] is None


def test_every_sample_of_a_stream_has_the_prompts_logprobs(shared):
    wanted = {"prompt": "abc", "n": 3, "max_tokens": 2, "echo": True, "logprobs": 1, "temperature": 1}
    whole = shared.post("/v1/completions", wanted).json()["choices"]
    reply = shared.post("/v1/completions", {**wanted, "stream": True})
    tokens = {0: [], 1: [], 2: []}
    for part in reply.text.split("\n\n")[:-2]:
        (choice,) = json.loads(part[6:])["choices"]
        tokens[choice["index"]] += choice["logprobs"]["tokens"]
    assert tokens == {choice["index"]: choice["logprobs"]["tokens"] for choice in whole}


def test_one_model_can_be_asked_for(shared):
    assert shared.client.get("/v1/models/alias").json()["id"] == "alias"
    assert shared.client.get("/v1/models/other").status_code == 404
