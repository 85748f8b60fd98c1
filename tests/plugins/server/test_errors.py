"""What a client gets for what it does wrong: status, type, field; and that the next request works."""

from __future__ import annotations

import json
import re

import msgspec
import pytest
from pelton_late_import import LateImport

from pelton import limits
from pelton.errors import DeadlineExceededError, EngineDeadError, EngineError, QueueFullError, RequestError
from pelton_plugins.server.anthropic_protocol import MessagesRequest
from pelton_plugins.server.body import decode
from pelton_plugins.server.errors import describe, scrub
from pelton_plugins.server.params import check_common
from pelton_plugins.server.protocol import ChatCompletionRequest, CompletionRequest
from pelton_plugins.server.sent_names import in_sent_names

openai = LateImport("openai")
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]


def check(reply, status, kind, param=None, text=""):
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == (kind, status)
    if param is not None:
        assert error["param"] == param, error
    assert text in error["message"], error
    return error


def next_request_works(shared):
    assert shared.post(COMPLETIONS, {"prompt": "ab", "max_tokens": 1}).status_code == 200


MUCH_TOO_LONG = "maximum context length is 256 tokens. However, your prompt contains 256 tokens"
BAD_COMPLETIONS = {
    "unknown-model": ({"model": "x"}, 404, "NotFoundError", "model", "The model `x` does not exist. Valid aliases: `fake`, `alias`."),
    "temperature-negative": ({"temperature": -1}, 400, "BadRequestError", "temperature", "(parameter=temperature, value=-1.0)"),
    "temperature-high": ({"temperature": 2.1}, 400, "BadRequestError", "temperature", ""),
    "top-p": ({"top_p": 2}, 400, "BadRequestError", "top_p", "value=2.0)"),
    "top-p-zero": ({"top_p": 0}, 400, "BadRequestError", "top_p", ""),
    "top-k": ({"top_k": -2}, 400, "BadRequestError", "top_k", ""),
    "min-p": ({"min_p": 1.5}, 400, "BadRequestError", "min_p", ""),
    "n-zero": ({"n": 0}, 400, "BadRequestError", "n", "value=0)"),
    "n-huge": ({"n": 10**12}, 400, "BadRequestError", "n", ""),
    "n-greedy": ({"n": 2, "temperature": 0}, 400, "BadRequestError", "n", "greedy"),
    "max-tokens-zero": ({"max_tokens": 0}, 400, "BadRequestError", "max_tokens", ""),
    "max-tokens-negative": ({"max_tokens": -5}, 400, "BadRequestError", "max_tokens", ""),
    "min-over-max": ({"min_tokens": 9, "max_tokens": 2}, 400, "BadRequestError", "min_tokens", ""),
    "min-tokens-huge": ({"min_tokens": 10**15}, 400, "BadRequestError", "min_tokens", ""),
    "presence": ({"presence_penalty": 3}, 400, "BadRequestError", "presence_penalty", ""),
    "frequency": ({"frequency_penalty": -3}, 400, "BadRequestError", "frequency_penalty", ""),
    "repetition": ({"repetition_penalty": 0}, 400, "BadRequestError", "repetition_penalty", ""),
    "seed-huge": ({"seed": 10**30}, 400, "BadRequestError", "seed", ""),
    "stop-empty": ({"stop": [""]}, 400, "BadRequestError", "stop", ""),
    "stop-many": ({"stop": ["x"] * 65}, 400, "BadRequestError", "stop", ""),
    "stop-long": ({"stop": "x" * 2000}, 400, "BadRequestError", "stop", ""),
    "stop-ids-negative": ({"stop_token_ids": [-1]}, 400, "BadRequestError", "stop_token_ids", ""),
    "bias-range": ({"logit_bias": {"3": 1000}}, 400, "BadRequestError", "logit_bias", ""),
    "bias-key": ({"logit_bias": {"x": 1}}, 400, "BadRequestError", "body.logit_bias", ""),
    "bias-many": ({"logit_bias": {str(i): 1 for i in range(2000)}}, 400, "BadRequestError", "logit_bias", ""),
    "logprobs-low": ({"logprobs": -2}, 400, "BadRequestError", "logprobs", ""),
    "allowed-empty": ({"allowed_token_ids": []}, 400, "BadRequestError", "allowed_token_ids", ""),
    "bad-word-long": ({"bad_words": ["x" * 300]}, 400, "BadRequestError", "bad_words", ""),
    "salt-empty": ({"cache_salt": ""}, 400, "BadRequestError", "cache_salt", ""),
    "salt-long": ({"cache_salt": "x" * 1025}, 400, "BadRequestError", "cache_salt", ""),
    "priority": ({"priority": 2**40}, 400, "BadRequestError", "priority", ""),
    "timeout": ({"timeout_s": -1}, 400, "BadRequestError", "timeout_s", ""),
    "request-id": ({"request_id": "x" * 300}, 400, "BadRequestError", "request_id", ""),
    "xargs-big": ({"vllm_xargs": {"x": "y" * 70_000}}, 400, "BadRequestError", "vllm_xargs", ""),
    "truncate": ({"truncate_prompt_tokens": 0}, 400, "BadRequestError", "truncate_prompt_tokens", ""),
    "stream-options": ({"stream_options": {"include_usage": True}}, 400, "BadRequestError", "stream_options", ""),
    "prompt-logprobs-stream": ({"prompt_logprobs": 1, "stream": True}, 400, "BadRequestError", "prompt_logprobs", ""),
    "suffix": ({"suffix": "x"}, 400, "BadRequestError", "suffix", ""),
    "beam-stream": ({"use_beam_search": True, "stream": True}, 400, "BadRequestError", "stream", "use_beam_search"),
    "beam-top-p": ({"use_beam_search": True, "top_p": 0.5}, 400, "BadRequestError", "top_p", "use_beam_search"),
    "length-penalty": ({"length_penalty": 2.0}, 400, "BadRequestError", "length_penalty", "use_beam_search"),
    "best-of-few": ({"best_of": 1, "n": 2}, 400, "BadRequestError", "best_of", "from n (2)"),
    "best-of-many": ({"best_of": 10**9}, 400, "BadRequestError", "best_of", "128"),
    "best-of-stream": ({"best_of": 2, "stream": True}, 400, "BadRequestError", "best_of", ""),
    "watermark": ({"watermarking": {"key": 1}}, 400, "BadRequestError", "watermarking", "not offered"),
    "token-offsets": ({"return_token_offsets": True}, 400, "BadRequestError", "return_token_offsets", "return_token_ids"),
    "embeds": ({"prompt_embeds": "gASV"}, 400, "BadRequestError", "prompt_embeds", ""),
    "kv-transfer": ({"kv_transfer_params": {}}, 400, "BadRequestError", "kv_transfer_params", ""),
    "schema-missing": ({"response_format": {"type": "json_schema"}}, 400, "BadRequestError", "response_format.json_schema", ""),
    "json-object": ({"response_format": {"type": "json_object"}}, 400, "BadRequestError", "response_format", ""),
    "regex": ({"structured_outputs": {"regex": "a+"}}, 400, "BadRequestError", "structured_outputs", ""),
    "two-constraints": ({"structured_outputs": {"regex": "a", "json": "{}"}}, 400, "BadRequestError", "structured_outputs", ""),
    "no-prompt": ({"prompt": None}, 400, "BadRequestError", "prompt", "empty"),
    "empty-prompt": ({"prompt": ""}, 400, "BadRequestError", "prompt", "empty"),
    "empty-list": ({"prompt": []}, 400, "BadRequestError", "prompt", "empty"),
    "empty-ids": ({"prompt": [[]]}, 400, "BadRequestError", "prompt", "empty"),
    "mixed-prompts": ({"prompt": ["a", 1]}, 400, "BadRequestError", "prompt", "mixes"),
    "negative-id": ({"prompt": [1, -1]}, 400, "BadRequestError", "input_tokens", ""),
    "huge-id": ({"prompt": [10**30]}, 400, "BadRequestError", "input_tokens", ""),
    "prompt-too-long": ({"prompt": "a" * 256}, 400, "BadRequestError", "input_text", MUCH_TOO_LONG),
    "ids-too-long": ({"prompt": [1] * 300}, 400, "BadRequestError", "input_tokens", "300 tokens"),
    "prompt-and-answer-too-long": ({"prompt": "a" * 250, "max_tokens": 7}, 400, "BadRequestError", "input_text", "7 more"),
    "many-prompts": ({"prompt": ["a"] * 2049}, 400, "BadRequestError", "prompt", "2048"),
    "many-sequences": ({"prompt": ["a"] * 2000, "n": 100}, 400, "BadRequestError", "n", "200000 sequences"),
    "type-string": ({"max_tokens": "many"}, 400, "BadRequestError", "body.max_tokens", 'input: "many"'),
    "type-bool": ({"n": True}, 400, "BadRequestError", "body.n", ""),
    "type-float": ({"top_k": 1.5}, 400, "BadRequestError", "body.top_k", ""),
    "type-nested": ({"stop": ["a", 1]}, 400, "BadRequestError", "body.stop[1]", ""),
    "prompt-object": ({"prompt": {"a": 1}}, 400, "BadRequestError", "body.prompt", ""),
}  # fmt: skip


@pytest.mark.parametrize("fields, status, kind, param, text", BAD_COMPLETIONS.values(), ids=BAD_COMPLETIONS.keys())
def test_bad_completions(shared, fields, status, kind, param, text):
    check(shared.post(COMPLETIONS, {"prompt": "ab", **fields}), status, kind, param, text)
    next_request_works(shared)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]
BAD_CHATS = {
    "no-messages": ({"messages": []}, 400, "messages"),
    "many-messages": ({"messages": HI * 4097}, 400, "messages"),
    "missing-messages": ({"messages": ...}, 400, "body.messages"),
    "messages-type": ({"messages": "Hi"}, 400, "body.messages"),
    "role": ({"messages": [{"role": "root", "content": "x"}]}, 400, "body.messages[0].role"),
    "content-type": ({"messages": [{"role": "user", "content": 3}]}, 400, "body.messages[0].content"),
    "content-missing": ({"messages": [{"role": "user"}]}, 400, "messages[0].content"),
    "text-missing": ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, 400, "messages[0].content"),
    "image": ({"messages": IMAGE}, 400, "messages[0].content"),
    "top-logprobs": ({"top_logprobs": 2}, 400, "top_logprobs"),
    "top-logprobs-low": ({"logprobs": True, "top_logprobs": -3}, 400, "top_logprobs"),
    "max-completion-tokens-low": ({"max_completion_tokens": 0}, 400, "max_completion_tokens"),
    "tools-empty": ({"tools": []}, 400, "tools"),
    "tools": ({"tools": [TOOL]}, 400, "tools"),
    "tools-auto": ({"tools": [TOOL], "tool_choice": "auto"}, 400, "tool_choice"),
    "tools-twice": ({"tools": [TOOL, TOOL], "tool_choice": "none"}, 400, "tools[1].function.name"),
    "tool-choice-alone": ({"tool_choice": "auto"}, 400, "tool_choice"),
    "tool-choice-unknown": ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, 400, "tool_choice"),
    "tool-choice-odd": ({"tools": [TOOL], "tool_choice": "maybe"}, 400, "body.tool_choice"),
    "tool-choice-malformed": ({"tools": [{"function": 3}], "tool_choice": {"function": []}}, 400, "body.tools[0].function"),
    "both-ends": ({"add_generation_prompt": True, "continue_final_message": True}, 400, "continue_final_message"),
    "template": ({"chat_template": "{{ 1 }}"}, 400, "chat_template"),
    "template-by-kwargs": ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, 400, "chat_template_kwargs.chat_template"),
    "tokenize-by-kwargs": ({"chat_template_kwargs": {"tokenize": True}}, 400, "chat_template_kwargs.tokenize"),
    "format-type": ({"response_format": {"type": "xml"}}, 400, "body.response_format.type"),
    "structural-tag": ({"response_format": {"type": "structural_tag"}}, 400, "response_format"),
    "two-names": ({"guided_regex": "a", "guided_choice": ["a"]}, 400, "guided_choice"),
    "guided": ({"guided_regex": "a"}, 400, "guided_regex"),
    "both-formats": ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, 400, "response_format"),
    "too-long": ({"messages": [{"role": "user", "content": "a" * 300}]}, 400, "input_text"),
}  # fmt: skip


@pytest.mark.parametrize("fields, status, param", BAD_CHATS.values(), ids=BAD_CHATS.keys())
def test_bad_chats(shared, fields, status, param):
    body = {key: value for key, value in ({"messages": HI} | fields).items() if value is not ...}
    check(shared.post(CHAT, body), status, "BadRequestError", param)
    next_request_works(shared)


@pytest.mark.parametrize(
    "path, fields, param, values",
    [
        (CHAT, {"messages": [{"role": "x"}]}, "body.messages[0].role", "assistant, developer, function, system, tool, user"),
        (CHAT, {"tool_choice": "maybe"}, "body.tool_choice", "auto, none, required"),
        (CHAT, {"tools": [{"type": "web_search"}]}, "body.tools[0].type", "custom, function"),
        (CHAT, {"response_format": {"type": "xml"}}, "body.response_format.type", "json_object, json_schema, structural_tag, text"),
        ("/v1/responses", {"tools": [{"type": "web_search"}]}, "body.tools[0].type", "function, custom"),
        ("/v1/responses", {"input": [{"role": "x", "content": "a"}]}, "input[0].role", "assistant, developer, function, system"),
    ],
)  # fmt: skip
def test_of_a_field_with_few_values_the_error_names_them(shared, path, fields, param, values):
    reply = shared.post(path, {"messages": HI, "input": "a", **fields})
    error = check(reply, 400, "BadRequestError", param)
    assert f"; use one of {values}" in error["message"]


@pytest.mark.parametrize(
    "path, fields, param, expected",
    [
        (CHAT, {"logprobs": True, "top_logprobs": 7}, "logprobs", "top_logprobs"),
        (COMPLETIONS, {"logprobs": 7}, "logprobs", "logprobs"),
        (COMPLETIONS, {"logprobs": 7, "echo": True}, "prompt_logprobs", "logprobs"),
        (COMPLETIONS, {"logprobs": 1, "prompt_logprobs": 7}, "prompt_logprobs", "prompt_logprobs"),
        (CHAT, {"vllm_xargs": {"a": 7}}, "extra_args", "vllm_xargs"),
        (CHAT, {"max_completion_tokens": 7}, "max_tokens", "max_completion_tokens"),
        (CHAT, {"max_tokens": 7}, "max_tokens", "max_tokens"),
    ],
)
def test_errors_name_the_field_that_was_sent(start, path, fields, param, expected):
    server = start()
    server.llm.fail_before = RequestError(f"Requested {param} of 7 (max_logprobs)", param=param, value=7)
    reply = server.post(path, {"prompt": "ab", "messages": HI, **fields})
    error = check(reply, 400, "BadRequestError", expected)
    assert error["message"] == f"Requested {expected} of 7 (max_logprobs) (parameter={expected}, value=7)"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_constraints_are_named_as_they_were_sent(shared, path):
    body = {"prompt": "ab", "messages": HI}
    for field, value in (("response_format", {"type": "json_object"}), ("structured_outputs", {"regex": "a"})):
        check(shared.post(path, {**body, field: value}), 400, "BadRequestError", field)


def test_a_prompt_and_an_answer_that_are_too_long_name_the_field_that_was_sent(shared):
    body = {"messages": [{"role": "user", "content": "a" * 200}], "max_completion_tokens": 200}
    check(shared.post(CHAT, body), 400, "BadRequestError", "input_text", "max_completion_tokens asks for 200 more")


OTHER_APIS = {
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 2},
    "/cohere/v2/chat": {"messages": HI, "model": "fake"},
}


@pytest.mark.parametrize(
    "path, fields, param, expected",
    [
        ("/v1/responses", {"max_output_tokens": 7}, "max_tokens", "max_output_tokens"),
        ("/v1/responses", {"top_logprobs": 7}, "logprobs", "top_logprobs"),
        ("/v1/responses", {"text": {"format": {"type": "json_object"}}}, "structured_outputs", "text.format"),
        ("/v1/responses", {}, "structured_outputs", "tools"),
        ("/v1/responses", {}, "response_format.json_schema", "text.format.schema"),
        ("/v1/responses", {}, "tools[3].custom.format.grammar", "tools[3].format.grammar"),
        ("/v1/responses", {}, "messages[2].content", "input"),
        ("/v1/messages", {"stop_sequences": ["x"]}, "stop", "stop_sequences"),
        ("/cohere/v2/chat", {"p": 0.5}, "top_p", "p"),
        ("/cohere/v2/chat", {"response_format": {"type": "json_object"}}, "structured_outputs", "response_format"),
    ],
)
def test_errors_of_other_apis_name_the_field_that_was_sent(start, path, fields, param, expected):
    server = start()
    server.llm.fail_before = RequestError(f"{param} is bad", param=param, value=7)
    reply = server.post(path, {**OTHER_APIS[path], **fields})
    assert reply.status_code == 400
    if path == "/v1/responses":
        assert reply.json()["error"]["param"] == expected
        if "[" not in param and "." not in param:
            assert reply.json()["error"]["message"] == f"{expected} is bad (parameter={expected}, value=7)"
    else:
        assert f"{expected} is bad (parameter={expected}, value=7)" in reply.text


def test_a_bad_tool_of_anthropics_api_is_named_by_its_fields(shared):
    tool = {"name": "f", "input_schema": {"a": "x" * limits.MAX_TOOL_BYTES}}
    request = MessagesRequest(messages=[], max_tokens=1, tools=[])
    assert in_sent_names("", "tools[0].function.parameters", request) == ("", "tools[0].input_schema")
    assert in_sent_names("", "tools[0].function.name", request) == ("", "tools[0].name")
    assert shared.post("/v1/messages", {**OTHER_APIS["/v1/messages"], "tools": [tool]}).status_code == 400


def test_clients_do_not_repeat_a_request_whose_own_time_was_up(start):
    server = start()
    server.llm.fail_before = DeadlineExceededError("The request's time limit of 1 s passed.")
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none")
    with pytest.raises(openai.APIStatusError) as failed:
        client.chat.completions.create(model="fake", messages=HI)
    assert failed.value.status_code == 408
    assert client.models.list().data and server.wait_for(lambda: not server.llm.running)
    shown = server.client.get("/metrics").text
    assert re.search(r'http_requests_total\{handler="/v1/chat/completions".*\} 1\.0', shown)


def test_a_choice_without_tools_is_refused_in_coheres_api_too(shared):
    reply = shared.post("/cohere/v2/chat", {**OTHER_APIS["/cohere/v2/chat"], "tool_choice": "REQUIRED"})
    assert reply.status_code == 400 and "tool_choice needs tools" in reply.json()["message"]


def test_deep_vllm_xargs_are_no_server_error(shared):
    for depth in range(960, 1001):  # about where it decodes, and does not encode
        deep = b'{"a":' * depth + b"1" + b"}" * depth
        body = b'{"prompt": "a", "max_tokens": 1, "vllm_xargs": ' + deep + b"}"
        reply = shared.client.post(COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
        assert reply.status_code == 200 or "too deeply" in check(reply, 400, "BadRequestError")["message"]


def test_vllm_xargs_that_decode_but_do_not_encode(monkeypatch):
    def encode(value):
        raise RecursionError

    monkeypatch.setattr(msgspec.json, "encode", encode)
    with pytest.raises(RequestError, match="vllm_xargs is nested too deeply") as found:
        check_common(CompletionRequest(vllm_xargs={"a": 1}))
    assert found.value.param == "vllm_xargs"


@pytest.mark.parametrize("text", [r"\ud800", r"\uDc00 x", r"\ud800\u0041"])
def test_half_of_a_surrogate_pair_is_called_so(shared, text):
    for body in ('{"prompt": "%s"}', '{"n": "x", "prompt": "%s"}'):
        content = (body % text).encode()
        reply = shared.client.post(COMPLETIONS, content=content, headers={"Content-Type": "application/json"})
        check(reply, 400, "BadRequestError", "body", "body: a string has an unpaired surrogate.")
    cut = shared.client.post(COMPLETIONS, content=b'{"prompt": "\\ud800', headers={"Content-Type": "application/json"})
    check(cut, 400, "BadRequestError", "body", "truncated")


def test_tools_that_may_not_be_called_are_no_error(shared):
    assert shared.post(CHAT, {"messages": HI, "tools": [TOOL], "tool_choice": "none"}).status_code == 200


NONSENSE = {
    "not-json": b"{",
    "empty": b"",
    "nan": b'{"prompt": "a", "temperature": NaN}',
    "infinity": b'{"prompt": "a", "temperature": Infinity}',
    "huge-number": b'{"prompt": "a", "temperature": 1e999}',
    "trailing": b'{"prompt": "a"}{',
    "array": b"[1]",
    "number": b"1",
    "null": b"null",
    "deep": b'{"prompt": "a", "x": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "deep-known-field": b'{"prompt": "a", "vllm_xargs": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
    "not-utf8": b'{"prompt": "\xff\xfe"}',
    "lone-surrogate": b'{"prompt": "\\ud800"}',
    "long-digits": b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}",
    "zeros": b"\x00" * 1000,
    "pickle": b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x94.",
}


@pytest.mark.parametrize("body", NONSENSE.values(), ids=NONSENSE.keys())
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_nonsense_bodies(shared, path, body):
    reply = shared.client.post(path, content=body, headers={"Content-Type": "application/json"})
    error = check(reply, 400, "BadRequestError")
    assert len(error["message"]) < 1000
    next_request_works(shared)


@pytest.mark.parametrize("name", ["not-json", "empty", "nan", "array", "deep", "not-utf8", "pickle"])
@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_nonsense_bodies_of_token_routes(shared, path, name):
    reply = shared.client.post(path, content=NONSENSE[name], headers={"Content-Type": "application/json"})
    check(reply, 400, "BadRequestError")
    next_request_works(shared)


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded", "application/jsonp"])
def test_other_content_types(shared, content_type):
    headers = {"Content-Type": content_type} if content_type else {}
    reply = shared.client.post(COMPLETIONS, content=b'{"prompt": "a"}', headers=headers)
    check(reply, 400, "BadRequestError", text="application/json")


def test_a_body_that_is_encoded_is_refused_by_name(shared):
    for encoding, status in (("gzip", 400), ("br, gzip", 400), ("identity", 200)):
        headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
        reply = shared.client.post(COMPLETIONS, content=b'{"prompt": "a"}', headers=headers)
        assert reply.status_code == status
        if status == 400:
            check(reply, 400, "BadRequestError", "Content-Encoding", repr(encoding))


def test_content_type_may_name_a_charset(shared):
    headers = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert shared.client.post(COMPLETIONS, content=b'{"prompt": "a"}', headers=headers).status_code == 200


def test_ten_megabytes_are_refused_before_parsing(shared):
    reply = shared.client.post(COMPLETIONS, content=b"x" * (10 * 2**20), headers={"Content-Type": "application/json"})
    check(reply, 413, "RequestTooLargeError", text=str(limits.MAX_BODY_BYTES))
    next_request_works(shared)


def test_a_long_body_without_a_length_is_refused_too(shared):
    def parts():
        for _ in range(10):
            yield b"x" * 2**20

    reply = shared.client.post(COMPLETIONS, content=parts(), headers={"Content-Type": "application/json"})
    check(reply, 413, "RequestTooLargeError")
    next_request_works(shared)


def test_at_most_ten_mistakes_are_listed_each_cut_short():
    names = [name for name in CompletionRequest.__struct_fields__ if name not in ("prompt", "prompt_embeds")]
    body = msgspec.json.encode({name: [["x" * 1000]] for name in names})
    with pytest.raises(ValueError) as found:
        decode(body, CompletionRequest)
    message = str(found.value)
    assert re.match(r"\d\d validation errors: body\.", message)
    assert message.count("Expected") == 10 and message.endswith("more")
    assert len(message) < 10 * 350


def test_every_missing_and_wrong_field_is_told_at_once():
    with pytest.raises(ValueError, match=r"2 validation errors: body\.n: .*; body\.messages: field required"):
        decode(b'{"n": "x"}', ChatCompletionRequest)


@pytest.mark.parametrize(
    "method, path, status, kind",
    [
        pytest.param("GET", "/nowhere", 404, "NotFoundError", id="path"),
        pytest.param("GET", "/v1/nowhere", 404, "NotFoundError", id="v1-path"),
        pytest.param("GET", COMPLETIONS, 405, "MethodNotAllowedError", id="get-for-post"),
        pytest.param("DELETE", "/v1/models", 405, "MethodNotAllowedError", id="delete"),
        pytest.param("POST", "/health", 405, "MethodNotAllowedError", id="post-for-get"),
        pytest.param("GET", "/../../etc/passwd", 404, "NotFoundError", id="traversal"),
    ],
)
def test_unknown_paths_and_methods_have_the_error_shape(shared, method, path, status, kind):
    check(shared.client.request(method, path), status, kind)


@pytest.mark.parametrize(
    "path, message",
    [
        ("/chat/completions", "There is no route '/chat/completions'. Did you mean /v1/chat/completions?"),
        ("/v1/v1/models", "There is no route '/v1/v1/models'. Did you mean /v1/models?"),
        ("/v1/embedding", "There is no route '/v1/embedding'. Did you mean /v1/embeddings?"),
        ("/nowhere", "There is no route '/nowhere'."),
        ("/" + "x" * 5000, "There is no route '/" + "x" * 99 + "...'."),
    ],
)
def test_the_404_of_a_route_names_the_one_that_may_be_meant(shared, path, message):
    assert shared.client.get(path).json()["error"]["message"] == message


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "error, status, kind",
    [
        pytest.param(QueueFullError("full"), 503, "ServiceUnavailableError", id="queue-full"),
        pytest.param(EngineError("died at 0x7f3a22bc in /opt/x/y.py"), 500, "InternalServerError", id="engine-error"),
        pytest.param(EngineDeadError("exit code -9"), 500, "InternalServerError", id="engine-dead"),
        pytest.param(ZeroDivisionError("/secret/path"), 500, "InternalServerError", id="unforeseen"),
    ],
)
def test_errors_before_the_first_token_are_plain_http(start, error, status, kind, stream):
    server = start()
    server.llm.fail_before = error
    found = check(server.post(COMPLETIONS, {"prompt": "ab", "stream": stream}), status, kind)
    assert "0x7f" not in found["message"] and "/opt" not in found["message"] and "/secret" not in found["message"]
    server.llm.fail_before = None
    next_request_works(server)


@pytest.mark.parametrize("path, body", [(CHAT, {"messages": HI}), (COMPLETIONS, {"prompt": "ab"})])
def test_errors_after_the_first_token_are_an_event_and_then_done(start, path, body):
    server = start()
    server.llm.fail_after = (2, EngineDeadError("The engine process is gone (exit code -9)."))
    reply = server.post(path, {**body, "stream": True})
    assert reply.status_code == 200
    parts = [part for part in reply.text.split("\n\n") if part]
    assert parts[-1] == "data: [DONE]"
    error = json.loads(parts[-2].removeprefix("data: "))["error"]
    assert error == {"message": "The engine process is gone (exit code -9).", "type": "InternalServerError",
                     "param": None, "code": 500}  # fmt: skip


def test_scrubbing():
    trace = 'Failed\nTraceback (most recent call last):\n  File "/usr/lib/x.py", line 1'
    assert scrub(trace) == "Failed"
    assert scrub("<obj at 0x7f00aa> in /home/me/a/b.py, see http://x.org/a/b") == (
        "<obj <address>> in <path>, see http://x.org/a/b"
    )
    assert scrub("10 tokens/s and 1/2") == "10 tokens/s and 1/2"


def test_detail_is_shown_when_asked_for():
    body = describe(ValueError("in /a/b/c"), "id", in_detail=True)
    assert body.error.message == "ValueError: in /a/b/c"
    assert "id7" in describe(ValueError("in /a/b/c"), "id7").error.message
