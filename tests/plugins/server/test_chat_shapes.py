"""Chat completions: bodies, chunk order, and what each option adds."""

from __future__ import annotations

import json

import pytest

HI = {"messages": [{"role": "user", "content": "Hi"}]}


def chunks_of(response):
    text = response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    parts = text.split("\n\n")
    assert parts[-1] == "" and parts[-2] == "data: [DONE]"
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


def test_whole_answer_has_openai_shape_with_nulls(shared):
    reply = shared.post("/v1/chat/completions", {**HI, "model": "fake"}, headers={"X-Request-Id": "abc"})
    assert reply.status_code == 200
    body = reply.json()
    created = body.pop("created")
    assert isinstance(created, int)
    assert body == {
        "id": "chatcmpl-abc",
        "object": "chat.completion",
        "model": "fake",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "Hello, world.",
                    "reasoning": None,
                    "reasoning_content": None,
                    "refusal": None,
                    "annotations": None,
                    "audio": None,
                    "function_call": None,
                    "tool_calls": [],
                },
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
                "token_ids": None,
            }
        ],
        "service_tier": None,
        "system_fingerprint": None,
        "usage": {
            "prompt_tokens": 20,
            "completion_tokens": 13,
            "total_tokens": 33,
            "prompt_tokens_details": {"cached_tokens": 2},
            "completion_tokens_details": None,
        },
        "prompt_logprobs": None,
        "prompt_token_ids": None,
        "prompt_text": None,
        "kv_transfer_params": None,
        "metrics": None,
    }


def test_stream_of_two_choices_has_the_exact_chunk_order(shared):
    shared.llm.answer = "ab"
    try:
        reply = shared.post(
            "/v1/chat/completions", {**HI, "n": 2, "stream": True, "stream_options": {"include_usage": True}}
        )
    finally:
        shared.llm.answer = "Hello, world."
    chunks = chunks_of(reply)
    assert {(c["id"], c["object"], c["model"]) for c in chunks} == {(chunks[0]["id"], "chat.completion.chunk", "fake")}
    assert chunks[0]["id"].startswith("chatcmpl-")
    assert [c["choices"] for c in chunks] == [
        [{"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}],
        [{"index": 1, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {"content": "0"}, "logprobs": None, "finish_reason": None}],
        [{"index": 1, "delta": {"content": "1"}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {"content": "a"}, "logprobs": None, "finish_reason": None}],
        [{"index": 1, "delta": {"content": "a"}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {"content": "b"}, "logprobs": None, "finish_reason": "stop", "stop_reason": None}],
        [{"index": 1, "delta": {"content": "b"}, "logprobs": None, "finish_reason": "stop", "stop_reason": None}],
        [],
    ]
    assert all("usage" not in chunk for chunk in chunks[:-1])
    assert chunks[-1]["usage"] == {
        "prompt_tokens": 20,
        "completion_tokens": 6,
        "total_tokens": 26,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


def test_continuous_usage_has_running_totals_in_every_chunk(shared):
    options = {"include_usage": True, "continuous_usage_stats": True}
    reply = shared.post("/v1/chat/completions", {**HI, "stream": True, "max_tokens": 3, "stream_options": options})
    totals = [chunk["usage"]["completion_tokens"] for chunk in chunks_of(reply)]
    assert totals == [1, 1, 2, 3, 3]


def test_continuous_usage_alone_adds_nothing(shared):
    reply = shared.post(
        "/v1/chat/completions", {**HI, "stream": True, "stream_options": {"continuous_usage_stats": True}}
    )
    assert all("usage" not in chunk for chunk in chunks_of(reply))


def test_usage_may_be_forced_on_every_stream(start):
    server = start(enable_force_include_usage=True)
    reply = server.post("/v1/chat/completions", {**HI, "stream": True, "max_tokens": 2})
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks_of(reply)] == [1, 1, 2, 2]


def test_length_and_token_ids(shared):
    body = {**HI, "max_completion_tokens": 2, "max_tokens": 9, "return_token_ids": True}
    reply = shared.post("/v1/chat/completions", body).json()
    choice = reply["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"], len(choice["token_ids"])) == ("length", "He", 2)
    assert len(reply["prompt_token_ids"]) == reply["usage"]["prompt_tokens"]
    chunks = chunks_of(shared.post("/v1/chat/completions", {**body, "stream": True}))
    assert chunks[0]["choices"][0]["prompt_token_ids"] == reply["prompt_token_ids"]
    streamed = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])]
    assert streamed == choice["token_ids"]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_list_the_likeliest_and_are_finite(shared, stream):
    body = {**HI, "max_tokens": 2, "logprobs": True, "top_logprobs": 3, "stream": stream}
    reply = shared.post("/v1/chat/completions", body)
    if stream:
        rows = [
            r for c in chunks_of(reply) if c["choices"][0]["logprobs"] for r in c["choices"][0]["logprobs"]["content"]
        ]
    else:
        rows = reply.json()["choices"][0]["logprobs"]["content"]
    assert [row["token"] for row in rows] == ["H", "e"]
    assert rows[0]["logprob"] == -1.5 and rows[0]["bytes"] == [ord("H")]
    assert [(top["token"], top["logprob"]) for top in rows[0]["top_logprobs"]] == [
        ("a", -1.0),
        ("H", -1.5),
        ("b", -2.0),
    ]


def test_minus_infinity_becomes_a_number(shared):
    body = {**HI, "max_tokens": 1, "logprobs": True, "top_logprobs": 4}
    tops = shared.post("/v1/chat/completions", body).json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    assert tops[-1]["logprob"] == -4.0
    body = {"prompt": "x", "max_tokens": 1, "logprobs": 4}
    top = shared.post("/v1/completions", body).json()["choices"][0]["logprobs"]["top_logprobs"][0]
    assert min(top.values()) >= -9999.0


def test_logprobs_without_top_have_empty_lists(shared):
    reply = shared.post("/v1/chat/completions", {**HI, "max_tokens": 1, "logprobs": True}).json()
    assert reply["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_tokens_as_ids(shared):
    body = {**HI, "max_tokens": 1, "logprobs": True, "return_tokens_as_token_ids": True}
    row = shared.post("/v1/chat/completions", body).json()["choices"][0]["logprobs"]["content"][0]
    assert row["token"].startswith("token_id:")


def test_content_parts_are_joined_and_roles_kept(shared):
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "d"}]},
        {"role": "user", "content": [{"type": "text", "text": "e"}]},
    ]
    assert shared.post("/v1/chat/completions", {"messages": messages}).status_code == 200
    assert shared.llm.requests[-1][0]["prompt"] == "<system>a\nb\n<user>c\n<assistant>d\n<user>e\n<assistant>"


def test_echo_sends_the_text_that_is_continued(shared):
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "So"}]
    body = {"messages": messages, "echo": True, "continue_final_message": True, "max_tokens": 1}
    assert shared.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"] == "SoH"
    contents = [
        c["choices"][0]["delta"] for c in chunks_of(shared.post("/v1/chat/completions", {**body, "stream": True}))
    ]
    assert contents == [{"role": "assistant", "content": ""}, {"content": "So"}, {"content": "H"}]
    assert shared.llm.requests[-1][0]["prompt"] == "<user>q\n<assistant>So\n"
    of_a_user = {"messages": messages[:1], "echo": True, "max_tokens": 1}
    assert shared.post("/v1/chat/completions", of_a_user).json()["choices"][0]["message"]["content"] == "H"


def test_prompt_logprobs_are_of_the_whole_answer(shared):
    found = shared.post("/v1/chat/completions", {**HI, "max_tokens": 1, "prompt_logprobs": 1}).json()["prompt_logprobs"]
    assert found[0] is None and len(found) == len("<user>Hi\n<assistant>")
    assert found[1]["21"] == {"logprob": -1.5, "rank": 2, "decoded_token": "u"}


def test_fields_reach_the_engine(shared):
    body = {
        **HI, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 7, "stop": "x", "stop_token_ids": [3],
        "presence_penalty": 0.1, "frequency_penalty": 0.2, "repetition_penalty": 1.1, "logit_bias": {"5": 2},
        "allowed_token_ids": [1, 2], "bad_words": ["no"], "min_tokens": 1, "ignore_eos": True, "max_tokens": 4,
        "include_stop_str_in_output": True, "skip_special_tokens": False, "spaces_between_special_tokens": False,
        "prompt_logprobs": 1, "priority": -2, "cache_salt": "salt", "timeout_s": 9, "vllm_xargs": {"a": 1}, "unknown": {},
    }  # fmt: skip
    assert shared.post("/v1/chat/completions", body).status_code == 200
    _, params, rest = shared.llm.requests[-1]
    assert rest == {"priority": -2, "cache_salt": "salt", "timeout_s": 9.0}
    assert params.stop == ["x"] and params.logit_bias == {5: 2.0} and params.extra_args == {"a": 1}
    for name in ("temperature", "top_p", "top_k", "min_p", "seed", "stop_token_ids", "presence_penalty",
                 "frequency_penalty", "repetition_penalty", "allowed_token_ids", "bad_words", "min_tokens", "ignore_eos",
                 "max_tokens", "include_stop_str_in_output", "skip_special_tokens", "prompt_logprobs"):  # fmt: skip
        assert getattr(params, name) == body[name], name


@pytest.mark.parametrize("path, body", [("/v1/chat/completions", HI), ("/v1/completions", {"prompt": "a"})])
def test_transfer_parameters_go_to_the_connector_and_come_back(shared, monkeypatch, path, body):
    monkeypatch.setattr(shared.llm, "kv_transfer_params", {"num_saved_tokens": 16})
    answer = shared.post(path, {**body, "kv_transfer_params": {"save": True}}).json()
    assert shared.llm.requests[-1][2]["kv_transfer_params"] == {"save": True}
    assert answer["kv_transfer_params"] == {"num_saved_tokens": 16}


def test_model_defaults_fill_in_what_a_request_leaves_out(shared):
    shared.llm.model.generation_config.update(temperature=0.6, top_k=20, max_new_tokens=3, do_sample=True)
    try:
        shared.post("/v1/chat/completions", {**HI, "top_k": 3})
    finally:
        shared.llm.model.generation_config.clear()
    params = shared.llm.requests[-1][1]
    assert (params.temperature, params.top_k, params.max_tokens) == (0.6, 3, None)


def test_text_deltas_without_text_are_left_out(shared):
    chunks = chunks_of(shared.post("/v1/chat/completions", {**HI, "stream": True}))
    middle = [chunk["choices"][0] for chunk in chunks[1:-1]]
    assert all(choice["delta"]["content"] for choice in middle)
