"""Routes beyond OpenAI's: /invocations, batches of chats, tokens in and out, Cohere's chat, the page of the API, the cache's reset;
and those of others that are not here."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from pelton_fake_server import VOCAB, FakeAsyncLLM
from pelton_late_import import LateImport

from pelton_plugins.server.known_routes import NOT_OFFERED

cohere = LateImport("cohere")
VLLM_ROUTES = """
    /health /load /version /v1/models /metrics /ping /invocations /kv_event_sources /docs /openapi.json
    /v1/completions /v1/chat/completions /v1/chat/completions/batch /v1/responses /v1/responses/{response_id}
    /v1/responses/{response_id}/cancel /v1/messages /v1/messages/count_tokens /cohere/v2/chat /inference/v1/generate
    /generative_scoring /v1/decisions /v1/systemone /v1/chat/completions/render /v1/completions/render
    /v1/responses/render /v1/messages/render /v1/chat/completions/derender /v1/completions/derender /v1/embeddings
    /v2/embed /pooling /classify /score /v1/score /rerank /v1/rerank /v2/rerank /v1/audio/transcriptions
    /v1/audio/translations /v1/realtime /tokenize /detokenize /tokenizer_info /v1/load_lora_adapter
    /v1/unload_lora_adapter /start_profile /stop_profile /scale_elastic_ep /is_scaling_elastic_ep
    /fault_tolerance/apply /fault_tolerance/status /ready /readyz /pause /resume /is_paused /abort_requests
    /init_weight_transfer_engine /start_weight_update /update_weights /finish_weight_update /weight_info
    /weight_checker /get_world_size /reset_prefix_cache /reset_mm_cache /reset_encoder_cache /collective_rpc
    /server_info /sleep /wake_up /is_sleeping /release_kv_cache_memory
"""
HI = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


def without_ids(body: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in body.items() if key not in ("id", "created")}


# /invocations


@pytest.mark.parametrize(
    "path, body",
    [
        ("/v1/chat/completions", {"messages": HI, "max_tokens": 3}),
        ("/v1/completions", {"prompt": "ab", "max_tokens": 3}),
    ],
)
def test_an_invocation_is_answered_as_its_own_route_does(shared, path, body):
    found = shared.post("/invocations", body)
    assert found.status_code == 200
    assert without_ids(found.json()) == without_ids(shared.post(path, body).json())
    streamed = shared.post("/invocations", body | {"stream": True})
    assert streamed.text.endswith("data: [DONE]\n\n") and streamed.text.count("data: ") >= 4


@pytest.mark.parametrize(
    "body, status, words",
    [
        (b"", 400, "empty"),
        (b"{", 400, "truncated"),
        (b"[1]", 400, "object"),
        (b"{}", 400, "messages"),
        (b'{"prompt": ""}', 400, "prompt is empty"),
        (b'{"input": "a"}', 400, "makes no vectors"),
        (b"x" * (9 * 2**20), 413, "at most"),
    ],
)
def test_bad_invocations(shared, body, status, words):
    reply = shared.client.post("/invocations", content=body, headers={"Content-Type": "application/json"})
    assert reply.status_code == status, reply.text
    assert words in reply.json()["error"]["message"]


# Batches


def test_a_batch_answers_each_conversation(shared):
    several = [HI, [{"role": "user", "content": "ho"}], HI]
    found = shared.post("/v1/chat/completions/batch", {"messages": several, "max_tokens": 4}).json()
    alone = [
        shared.post("/v1/chat/completions", {"messages": one, "max_tokens": 4}).json()["choices"][0] for one in several
    ]
    assert found["choices"] == [choice | {"index": index} for index, choice in enumerate(alone)]
    assert found["usage"]["completion_tokens"] == 12
    assert found["object"] == "chat.completion"


@pytest.mark.parametrize(
    "more, param",
    [
        ({"messages": []}, "messages"),
        ({"messages": [HI, []]}, "messages[1]"),
        ({"messages": HI}, "body.messages[0]"),
        ({"stream": True}, "stream"),
        ({"n": 2}, "n"),
        ({"messages": [HI] * 2049}, "messages"),
        ({"messages": [HI, [{"role": "user"}]]}, "messages[1][0].content"),
    ],
)
def test_bad_batches(shared, more, param):
    reply = shared.post("/v1/chat/completions/batch", {"messages": [HI]} | more)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text


# Tokens in and out


@pytest.fixture(scope="module")
def hermes(run_server):
    return run_server(tool_call_parser="hermes", reasoning_parser="think")


def through_tokens(server, chat: dict[str, Any]) -> dict[str, Any]:
    rendered = server.post("/v1/chat/completions/render", chat)
    assert rendered.status_code == 200, rendered.text
    generated = server.post("/inference/v1/generate", rendered.json())
    assert generated.status_code == 200, generated.text
    body = {
        "generate_response": generated.json(), "prompt_tokens": len(rendered.json()["token_ids"]), "chat_request": chat,
    }  # fmt: skip
    found = server.post("/v1/chat/completions/derender", body)
    assert found.status_code == 200, found.text
    return found.json()


@pytest.mark.parametrize("answer", ["Hello.", f"<think>Hm.</think>I look.{CALL}", "<think>Never ends"])
@pytest.mark.parametrize("more", [{}, {"n": 2, "temperature": 1}, {"logprobs": True, "top_logprobs": 2}])
def test_the_three_steps_are_what_one_chat_is(hermes, answer, more):
    hermes.llm.answer = answer
    chat = {"messages": HI, "tools": [WEATHER]} | more
    found, whole = through_tokens(hermes, chat), hermes.post("/v1/chat/completions", chat).json()
    assert len(found["choices"]) == len(whole["choices"])
    for one, other in zip(found["choices"], whole["choices"], strict=True):
        for message in (one["message"], other["message"]):
            for call in message["tool_calls"]:
                assert call.pop("id")
        assert one == other
    assert found["usage"]["total_tokens"] == whole["usage"]["total_tokens"]


def test_prompts_are_rendered_one_by_one(shared):
    body = {"prompt": ["ab", "c"], "max_tokens": 3, "temperature": 0.5, "stop": "x"}
    first, second = shared.post("/v1/completions/render", body).json()
    assert first["token_ids"] == [1, 2] and second["token_ids"] == [3]
    assert first["request_id"] != second["request_id"]
    assert first["sampling_params"] == {"temperature": 0.5, "max_tokens": 3, "stop": ["x"]}
    generated = shared.post("/inference/v1/generate", first).json()
    assert generated["choices"][0]["token_ids"] == [VOCAB.find(char) for char in "Hel"]
    found = shared.post("/v1/completions/derender", {"generate_response": generated, "prompt_tokens": 2}).json()
    assert (found["choices"][0]["text"], found["choices"][0]["finish_reason"]) == ("Hel", "length")
    assert found["usage"]["total_tokens"] == 5 and found["id"] == first["request_id"]


def test_tokens_are_streamed(shared):
    body = {"token_ids": [1], "sampling_params": {"max_tokens": 3}, "stream": True}
    parts = shared.post("/inference/v1/generate", body | {"stream_options": {"include_usage": True}}).text.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(part[6:]) for part in parts[:-2]]
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks[:-1]] == [[VOCAB.find(char)] for char in "Hel"]
    assert chunks[-1]["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    "path, body, param",
    [
        ("/inference/v1/generate", {"token_ids": []}, "token_ids"),
        ("/inference/v1/generate", {"token_ids": [1] * 300}, "input_tokens"),
        ("/inference/v1/generate", {"token_ids": [10**6]}, "input_tokens"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"temperature": 9}}, "sampling_params"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"tempreature": 1}}, "sampling_params"),
        ("/inference/v1/generate", {"token_ids": [1], "features": {}}, "features"),
        ("/inference/v1/generate", {"token_ids": [1], "model": "other"}, "model"),
        ("/inference/v1/generate", {"token_ids": [1], "stream_options": {}}, "stream_options"),
        ("/v1/completions/derender", {"generate_response": {"request_id": "a", "choices": [{"index": 0, "token_ids": [-1]}]}},
         "generate_response.choices.token_ids"),
        ("/v1/completions/derender", {"generate_response": {"request_id": "a", "choices": []}, "stream": True}, "stream"),
        ("/v1/chat/completions/derender", {"generate_response": {"request_id": "a"}}, "body.generate_response"),
        ("/v1/chat/completions/render", {"messages": []}, "messages"),
        ("/v1/completions/render", {"prompt": []}, "prompt"),
    ],
)  # fmt: skip
def test_bad_tokens(shared, path, body, param):
    reply = shared.post(path, body)
    assert (400 <= reply.status_code < 500, reply.json()["error"]["param"]) == (True, param), reply.text


def test_a_server_that_reads_calls_asks_for_the_chat(hermes):
    body = {"generate_response": {"request_id": "a", "choices": [{"index": 0, "token_ids": [1]}]}}
    reply = hermes.post("/v1/chat/completions/derender", body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "chat_request")


def test_an_end_of_text_has_no_text(shared):
    given = {"request_id": "a", "choices": [{"index": 0, "token_ids": [1, 2, 0], "finish_reason": "stop"}]}
    found = shared.post("/v1/chat/completions/derender", {"generate_response": given}).json()
    assert found["choices"][0]["message"]["content"] == "ab"
    assert found["usage"]["completion_tokens"] == 3


def test_every_shape_of_a_chat_is_rendered_as_the_chat_is(hermes):
    chat = {"messages": [{"role": "system", "content": "Be brief."}, *HI], "temperature": 0.5, "stream": False}
    expected = hermes.post("/v1/chat/completions/render", chat | {"max_tokens": 5}).json()
    for path, body in (
        (
            "/v1/responses/render",
            {"instructions": "Be brief.", "input": "hi", "temperature": 0.5, "max_output_tokens": 5},
        ),
        ("/v1/messages/render", {"system": "Be brief.", "messages": HI, "temperature": 0.5, "max_tokens": 5}),
    ):
        found = hermes.post(path, body)
        assert found.status_code == 200, found.text
        assert found.json()["token_ids"] == expected["token_ids"]
        assert found.json()["sampling_params"] == expected["sampling_params"]
        assert hermes.post("/inference/v1/generate", found.json()).status_code == 200
    refused = hermes.post("/v1/messages/render", {"messages": [], "max_tokens": 5}).json()
    assert (refused["type"], refused["error"]["type"]) == ("error", "invalid_request_error")
    gone = hermes.post("/v1/responses/render", {"input": "hi", "previous_response_id": "resp_no"})
    assert gone.status_code == 404


# Cohere's chat, by its own client


def client_of(server) -> cohere.ClientV2:
    return cohere.ClientV2(api_key="none", base_url=server.url + "/cohere")


def test_coheres_client_chats(hermes):
    hermes.llm.answer = "<think>Hm.</think>Hello."
    found = client_of(hermes).chat(model="fake", messages=HI, k=3, p=0.5, temperature=0.3)
    assert [part.type for part in found.message.content] == ["thinking", "text"]
    assert found.message.content[1].text == "Hello." and found.finish_reason == "COMPLETE"
    assert found.usage.tokens.output_tokens == len(hermes.llm.answer)
    params = hermes.llm.requests[-1][1]
    assert (params.top_k, params.top_p, params.temperature) == (3, 0.5, 0.3)
    assert client_of(hermes).chat(model="fake", messages=HI, max_tokens=3).finish_reason == "MAX_TOKENS"


def test_coheres_client_streams_and_calls_tools(hermes):
    hermes.llm.answer = f"I look.{CALL}"
    whole = client_of(hermes).chat(model="fake", messages=HI, tools=[WEATHER])
    assert whole.finish_reason == "TOOL_CALL"
    assert json.loads(whole.message.tool_calls[0].function.arguments) == {"city": "Paris"}
    events = list(client_of(hermes).chat_stream(model="fake", messages=HI, tools=[WEATHER]))
    kinds = [event.type for event in events]
    assert kinds[0] == "message-start" and kinds[-1] == "message-end"
    assert [kind for kind in kinds if kind.endswith(("-start", "-end"))] == [
        "message-start", "content-start", "content-end", "tool-call-start", "tool-call-end", "message-end",
    ]  # fmt: skip
    text = "".join(event.delta.message.content.text for event in events if event.type == "content-delta")
    arguments = "".join(
        event.delta.message.tool_calls.function.arguments for event in events if event.type == "tool-call-delta"
    )
    assert (text, json.loads(arguments)) == ("I look.", {"city": "Paris"})
    assert events[-1].delta.finish_reason == "TOOL_CALL"


def test_coheres_client_is_refused_in_its_own_words(hermes):
    with pytest.raises(cohere.core.api_error.ApiError) as refusal:
        client_of(hermes).chat(model="fake", messages=HI, temperature=9)
    assert refusal.value.status_code == 400 and "temperature" in refusal.value.body["message"]
    with pytest.raises(cohere.core.api_error.ApiError, match="documents"):
        client_of(hermes).chat(model="fake", messages=HI, documents=["a"])


# The page, and the cache


def test_the_page_of_the_api_needs_nothing_from_elsewhere(shared, start):
    reply = shared.client.get("/docs")
    assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    assert "<script" not in reply.text and not re.search(r"(src|href)=.?(https?:)?//", reply.text)
    for text in ("POST /v1/chat/completions", "max_completion_tokens", "(required)", "openapi.json"):
        assert text in reply.text
    without = start(disable_fastapi_docs=True).client
    assert without.get("/docs").status_code == without.get("/openapi.json").status_code == 404
    assert start(api_key=["k"]).client.get("/docs").status_code == 401


def test_the_prefix_cache_is_reset_when_nothing_runs(start):
    server = start(FakeAsyncLLM())
    assert server.client.post("/reset_prefix_cache").status_code == 200
    server.llm.running.add("one")
    reply = server.client.post("/reset_prefix_cache")
    assert reply.status_code in (429, 503) and "blocks" in reply.json()["error"]["message"]


# What the server is, and what it is not


def test_the_server_tells_what_it_runs_with(start):
    server = start(api_key=["hush", "hush2"])
    found = server.client.get("/server_info", headers={"Authorization": "Bearer hush"})
    assert found.status_code == 200 and "hush" not in found.text
    info = found.json()
    assert info["server_config"]["api_key"] == "set" and info["server_config"]["max_body_bytes"] > 0
    assert info["engine_config"]["scheduler"]["scheduling_policy"] == "fcfs"
    assert info["engine"]["max_model_len"] == 256 and info["engine"]["report"]["device"] == "fake"
    assert info["models"] == ["fake", "alias"] and info["version"] and info["system"]["python"]
    server.state.llm = None
    loading = server.client.get("/server_info", headers={"Authorization": "Bearer hush"}).json()
    assert loading["engine"] is loading["engine_config"] is None
    assert server.client.get("/server_info").status_code == 401


@pytest.mark.parametrize("path", NOT_OFFERED)
def test_a_route_that_others_have_says_what_to_do_instead(shared, path):
    for method, url in (("GET", path), ("POST", path), ("POST", path + "/")):
        reply = shared.client.request(method, url, json={} if method == "POST" else None)
        error = reply.json()["error"]
        assert (reply.status_code, error["type"]) == (404, "NotFoundError")
        assert error["message"] == f"{path} is not offered: {NOT_OFFERED[path]}."


def test_a_client_does_not_choose_the_engine(shared):
    reply = shared.post("/v1/completions", {"prompt": "a"}, headers={"X-data-parallel-rank": "0"})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "X-data-parallel-rank")
    assert "--data-parallel-routing" in error["message"]


def test_every_route_of_vllm_is_here_or_named(shared):
    """The routes of vLLM 0.33's server: each is in the description of the API, or among those that say what to do instead."""
    described = shared.client.get("/openapi.json").json()["paths"]
    missing = {path for path in VLLM_ROUTES.split() if path not in described and path not in NOT_OFFERED}
    assert not missing
    assert not set(NOT_OFFERED) & set(described)


# What the operator has to allow


@pytest.mark.parametrize(
    "method, path, body, flag",
    [
        ("POST", "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/x"}, "--allow-runtime-lora-updating"),
        ("POST", "/v1/unload_lora_adapter", {"lora_name": "x"}, "--allow-runtime-lora-updating"),
        ("POST", "/sleep", None, "--enable-sleep-mode"),
        ("POST", "/wake_up", None, "--enable-sleep-mode"),
        ("GET", "/is_sleeping", None, "--enable-sleep-mode"),
        ("POST", "/start_profile", None, "--profile-dir"),
        ("POST", "/stop_profile", None, "--profile-dir"),
    ],
)
def test_without_its_setting_a_route_names_it(shared, method, path, body, flag):
    reply = shared.client.request(method, path, json=body)
    assert (reply.status_code, reply.json()["error"]["type"]) == (403, "PermissionDeniedError")
    assert flag in reply.json()["error"]["message"]
