"""Every field of every request does something, is refused with a clear message, or is known to have no effect: by the table in `rules`.

A field that is new in a struct fails here until it has an example that changes what the engine is asked for, or what is answered.
"""

from __future__ import annotations

import json
import logging
import time
from typing import Any

import msgspec
import pytest
from pelton_fake_server import CharTokenizer, FakeAsyncLLM, FakePoolingLLM

from pelton.outputs import RequestMetrics
from pelton_plugins.server.anthropic_protocol import CountTokensRequest, MessagesRequest
from pelton_plugins.server.chat_batch import BatchChatRequest
from pelton_plugins.server.cohere_protocol import CohereChatRequest, CohereEmbedRequest
from pelton_plugins.server.pooling_protocol import (
    ClassifyRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from pelton_plugins.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    TokenizeRequest,
)
from pelton_plugins.server.request_log import NAMES, log_request
from pelton_plugins.server.responses_protocol import ResponsesRequest
from pelton_plugins.server.rules import OF_NO_EFFECT, WITHIN_OF_NO_EFFECT, rules_of
from pelton_plugins.server.token_protocol import DerenderChatRequest, DerenderCompletionRequest, TokensRequest

CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
ANSWER = f"<think>Hm.</think>I look.{CALL}{CALL}"
HI = [{"role": "user", "content": "hi"}]
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": FUNCTION}]
SCHEMA = {"type": "object"}
IN_JSON = {"format": {"type": "json_schema", "schema": SCHEMA}}


def made(text: str) -> dict[str, Any]:
    """What the engine made, as /inference/v1/generate answers."""
    ids = CharTokenizer().encode(text)
    return {"request_id": "r", "choices": [{"index": 0, "token_ids": ids, "finish_reason": "stop"}]}


class Marking(CharTokenizer):
    """Marks what is to have special tokens, and keeps what is decoded with them."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [*([0] if add_special_tokens else []), *super().encode(text)]


class Telling(FakeAsyncLLM):
    """Says how long requests took."""

    async def generate(self, *arguments: Any, **more: Any) -> Any:
        async for output in super().generate(*arguments, **more):
            if output.finished:
                output.metrics = RequestMetrics(arrival_time=time.time())
            yield output


Example = tuple[Any, dict[str, Any]]
"""A value, and fields that it needs beside it."""


def needs(value: Any, **others: Any) -> Example:
    return value, others


SAMPLING: dict[str, Any] = {
    "model": "alias", "n": needs(2, temperature=1), "stream": True,
    "stream_options": needs({"include_usage": True}, stream=True), "temperature": 0.5, "top_p": 0.5, "top_k": 3, "min_p": 0.1,
    "seed": 7, "stop": "l", "stop_token_ids": [3], "presence_penalty": 1, "frequency_penalty": 1, "repetition_penalty": 1.1,
    "logit_bias": {"3": 1}, "allowed_token_ids": [3], "bad_words": ["ab"], "min_tokens": 2, "ignore_eos": True,
    "include_stop_str_in_output": True, "skip_special_tokens": False, "spaces_between_special_tokens": False,
    "prompt_logprobs": 1, "add_special_tokens": ..., "truncate_prompt_tokens": 1,
    "truncation_side": needs("right", truncate_prompt_tokens=1), "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "a"}, "guided_json": SCHEMA, "guided_regex": "a", "guided_choice": ["a"],
    "guided_grammar": "root ::= 'a'", "guided_whitespace_pattern": needs("x", guided_json=SCHEMA), "priority": 1,
    "cache_salt": "x", "request_id": "mine", "timeout_s": 5.0, "return_token_ids": True,
    "return_tokens_as_token_ids": needs(True, logprobs=1), "vllm_xargs": {"a": 1}, "logits_processor_args": {"a": {}},
    "use_beam_search": needs(True, n=2, temperature=1, max_tokens=2),
    "length_penalty": needs(0.5, use_beam_search=False), "kv_transfer_params": {"a": 1}, "return_metrics": True,
}  # fmt: skip
CHAT: dict[str, Any] = {
    **SAMPLING, "echo": needs(True, messages=[*HI, {"role": "assistant", "content": "So"}]),
    "messages": [{"role": "user", "content": "ho"}], "max_completion_tokens": 2, "max_tokens": 2, "logprobs": True,
    "top_logprobs": needs(2, logprobs=True), "tools": TOOLS, "tool_choice": needs("none", tools=TOOLS),
    "parallel_tool_calls": needs(False, tools=TOOLS), "include_reasoning": False, "reasoning_effort": "low",
    "add_generation_prompt": False, "add_special_tokens": True,
    "continue_final_message": needs(True, messages=[*HI, {"role": "assistant", "content": "So"}]),
    "chat_template": "x", "chat_template_kwargs": {"a": 1}, "documents": [{"text": "a"}], "return_prompt_text": True,
    "return_tokens_as_token_ids": needs(True, logprobs=True),
}  # fmt: skip
EXAMPLES: dict[type[msgspec.Struct], tuple[str, dict[str, Any], dict[str, Any]]] = {
    CompletionRequest: (
        "/v1/completions", {"prompt": "ab"},
        {**SAMPLING, "add_special_tokens": False, "prompt": "b", "max_tokens": 2, "logprobs": 1, "echo": True,
         "best_of": needs(2, temperature=1), "prompt_embeds": "x"},
    ),
    ChatCompletionRequest: ("/v1/chat/completions", {"messages": HI}, CHAT),
    BatchChatRequest: (
        "/v1/chat/completions/batch", {"messages": [HI]},
        {**CHAT, "messages": [HI, HI], "echo": True, "continue_final_message": True,
         "stream_options": {"include_usage": True}},
    ),
    ResponsesRequest: (
        "/v1/responses", {"input": "hi"},
        {
            **{name: value for name, value in CHAT.items() if name in ResponsesRequest.__struct_fields__},
            "input": "ho", "instructions": "Be brief.", "max_output_tokens": 2, "top_logprobs": 2,
            "tools": [{"type": "function", **FUNCTION}], "tool_choice": needs("required", tools=[{"type": "function", **FUNCTION}]),
            "parallel_tool_calls": needs(False, tools=[{"type": "function", **FUNCTION}]),
            "text": {"format": {"type": "json_object"}}, "reasoning": {"effort": "low"}, "store": False,
            "previous_response_id": "resp_none", "background": True, "include": ["message.output_text.logprobs"],
        },
    ),
    MessagesRequest: (
        "/v1/messages", {"messages": HI, "max_tokens": 100},
        {
            "messages": [{"role": "user", "content": "ho"}], "model": "alias", "system": "Be brief.",
            "tools": [{"name": "f", "input_schema": SCHEMA}],
            "tool_choice": needs({"type": "any"}, tools=[{"name": "f", "input_schema": SCHEMA}]),
            "thinking": {"type": "disabled"}, "chat_template_kwargs": {"a": 1}, "max_tokens": 2, "stream": True,
            "stop_sequences": ["l"], "temperature": 0.5, "top_k": 3, "top_p": 0.5, "output_config": IN_JSON,
        },
    ),
    CountTokensRequest: (
        "/v1/messages/count_tokens", {"messages": HI},
        {
            "messages": [{"role": "user", "content": "hold"}], "model": "none", "system": "Be brief.",
            "tools": [{"name": "f", "input_schema": SCHEMA}], "tool_choice": {"type": "any"},
            "chat_template_kwargs": {"a": 1}, "output_config": {"effort": "low"},
        },
    ),
    CohereChatRequest: (
        "/cohere/v2/chat", {"messages": HI, "model": "fake"},
        {
            "messages": [{"role": "user", "content": "ho"}], "model": "none", "stream": True, "max_tokens": 2,
            "temperature": 0.5, "p": 0.5, "k": 3, "seed": 7, "stop_sequences": ["l"], "frequency_penalty": 1,
            "presence_penalty": 1, "tools": TOOLS, "tool_choice": needs("REQUIRED", tools=TOOLS), "strict_tools": needs(True, tools=TOOLS),
            "response_format": {"type": "json_object"}, "priority": 1,
        },
    ),
    TokensRequest: (
        "/inference/v1/generate", {"token_ids": [1]},
        {
            "token_ids": [2], "sampling_params": {"max_tokens": 2}, "model": "none", "request_id": "mine", "stream": True,
            "stream_options": needs({"include_usage": True}, stream=True), "priority": 1, "cache_salt": "x", "timeout_s": 5.0,
            "kv_transfer_params": {"a": 1},
        },
    ),
    TokenizeRequest: (
        "/tokenize", {"messages": HI},
        {
            "model": "none", "prompt": "ab", "messages": [{"role": "user", "content": "hold"}], "add_special_tokens": True,
            "return_token_strs": True, "add_generation_prompt": False,
            "continue_final_message": needs(True, messages=[*HI, {"role": "assistant", "content": "So"}]),
            "chat_template": "x", "chat_template_kwargs": {"a": 1}, "tools": TOOLS,
        },
    ),
    DerenderChatRequest: (
        "/v1/chat/completions/derender", {"generate_response": made(ANSWER), "chat_request": {"messages": HI}},
        {"generate_response": made("b"), "model": "none", "prompt_tokens": 3, "chat_request": {"messages": HI, "include_reasoning": False}},
    ),
    DerenderCompletionRequest: (
        "/v1/completions/derender", {"generate_response": made("a")}, {"generate_response": made("b"), "model": "none", "prompt_tokens": 3},
    ),
    DetokenizeRequest: ("/detokenize", {"tokens": [1]}, {"tokens": [2], "model": "none"}),
}  # fmt: skip

COMMON_OF_POOLING: dict[str, Any] = {
    "model": "none", "truncate_prompt_tokens": 1, "truncation_side": "left", "add_special_tokens": False, "priority": 1,
    "cache_salt": "x", "request_id": "mine", "timeout_s": 5.0,
}  # fmt: skip
TEMPLATED = {"input": None, "messages": HI}
INPUT: dict[str, Any] = {
    **COMMON_OF_POOLING, "input": "b", "messages": (HI, {"input": None}), "add_generation_prompt": (False, TEMPLATED),
    "continue_final_message": (True, {"input": None, "messages": [*HI, {"role": "assistant", "content": "So"}]}),
    "chat_template": ("x", TEMPLATED), "chat_template_kwargs": ({"a": 1}, TEMPLATED),
}  # fmt: skip
VECTORS = {**INPUT, "encoding_format": "base64", "dimensions": 1, "use_activation": False}
OF_POOLING: dict[type[msgspec.Struct], tuple[str, dict[str, Any], dict[str, Any]]] = {
    EmbeddingRequest: ("/v1/embeddings", {"input": "ab"}, VECTORS),
    ClassifyRequest: ("/classify", {"input": "ab"}, {**INPUT, "use_activation": False}),
    PoolingRequest: ("/pooling", {"input": "ab"}, {**VECTORS, "data": {"a": 1}, "task": "token_embed"}),
    ScoreRequest: (
        "/score", {"text_1": "ab", "text_2": "c"},
        {
            **COMMON_OF_POOLING, "text_1": "b", "text_2": "d", "use_activation": False,
            **{name: needs("b", text_1=None, text_2="c", **{other: "c"})
               for name, other in (("data_1", "data_2"), ("data_2", "data_1"), ("queries", "documents"),
                                   ("documents", "queries"), ("items", "queries"))},
        },
    ),
    RerankRequest: (
        "/rerank", {"query": "ab", "documents": ["c", "ad"]},
        {
            **COMMON_OF_POOLING, "query": "b", "documents": ["d"], "top_n": 1, "return_documents": False,
            "max_tokens_per_doc": 1,
        },
    ),
    CohereEmbedRequest: (
        "/v2/embed", {"model": "fake", "texts": ["ab"]},
        {
            "model": "none", "texts": ["b"], "embedding_types": ["base64"], "output_dimension": 1, "max_tokens": 1,
            "truncate": "END", "priority": 1,
        },
    ),
}  # fmt: skip

NOT_NEUTRAL: tuple[Any, ...] = ({"a": 1}, ["a"], "a", "auto", 7, True, [{"a": 1}])
"""One of these has a field's type, and asks for something."""


@pytest.fixture(scope="module")
def server(run_server):
    running = run_server(
        tool_call_parser="hermes", reasoning_parser="think", trust_request_chat_template=True, max_stored_responses=4,
    )  # fmt: skip
    running.state.llm = running.llm = Telling(ANSWER)
    running.llm.tokenizer, running.llm.constrains, running.llm.kv_transfer_params = Marking(), True, {"b": 2}
    return running


@pytest.fixture(scope="module")
def pooled(run_server):
    running = run_server()
    running.state.llm = running.llm = FakePoolingLLM()
    running.llm.tokenizer = Marking()
    return running


def observed(server: Any, path: str, body: dict[str, Any]) -> tuple[Any, Any]:
    """What the engine was asked for, and the answer."""
    server.llm.requests.clear()
    server.llm.rendered = {}
    reply = server.post(path, body)
    asked = [(prompt, msgspec.to_builtins(params), rest) for prompt, params, rest in server.llm.requests]
    text = reply.text
    if reply.headers["content-type"] == "application/json":
        text = json.dumps(without_chance(reply.json()))
    return (reply.status_code, asked, dict(server.llm.rendered)), text


def without_chance(value: Any) -> Any:
    """An answer without what differs from one to the next."""
    if isinstance(value, dict):
        drawn = ("created", "created_at", "completed_at", "call_id", "metrics")
        return {
            key: "(drawn)" if key in drawn and one is not None
            else "mine" if key in ("id", "request_id") and "mine" in str(one)
            else "(drawn)" if key in ("id", "request_id") and one not in ("fake", "alias")
            else without_chance(one)
            for key, one in value.items()
        }  # fmt: skip
    return [without_chance(one) for one in value] if isinstance(value, list) else value


def no_effect(kind: type[msgspec.Struct]) -> set[str]:
    return {name for base in kind.__mro__ for name in OF_NO_EFFECT.get(base, ())}


def refused(kind: type[msgspec.Struct]) -> set[str]:
    return {name for name in rules_of(kind) if "." not in name}


CASES = [(kind, name) for kind in (*EXAMPLES, *OF_POOLING) for name in kind.__struct_fields__]


@pytest.mark.parametrize("kind, name", CASES, ids=[f"{kind.__name__}-{name}" for kind, name in CASES])
def test_a_field_does_what_the_table_says(server, pooled, kind, name):
    if kind in OF_POOLING:
        check_field(pooled, kind, name, *OF_POOLING[kind])
    else:
        check_field(server, kind, name, *EXAMPLES[kind])


def check_field(server: Any, kind: Any, name: str, path: str, base: dict[str, Any], examples: dict[str, Any]) -> None:
    if name in refused(kind):
        neutral, _ = rules_of(kind)[name]
        (asked, before), replies = observed(server, path, base), []
        for value in neutral:
            assert observed(server, path, base | {name: value}) == (asked, before)
        for value in NOT_NEUTRAL:
            if value not in neutral:
                replies.append(server.post(path, base | {name: value}).json())
        messages = [found.get("message") or found["error"]["message"] for found in replies if "choices" not in found]
        assert any(f"{name} is not offered: " in message for message in messages), messages
        return
    value, more = examples.get(name, ...), {}
    if isinstance(value, tuple):
        value, more = value
    if name in no_effect(kind) and value is ...:
        of = next(field.type for field in msgspec.structs.fields(kind) if field.name == name)
        value = fitting(of)
        assert observed(server, path, base | {name: value})[0] == observed(server, path, base)[0]
        return
    assert value is not ..., f"{name} of {kind.__name__} needs an example, or a rule"
    assert observed(server, path, base | more | {name: value}) != observed(server, path, base | more)


def fitting(kind: Any) -> Any:
    """A value of a field's type that says something."""
    for value in (*NOT_NEUTRAL, {"type": "enabled", "budget_tokens": 7}, {"include_obfuscation": True}):
        try:
            msgspec.convert(value, kind)
        except msgspec.ValidationError:
            continue
        return value
    raise AssertionError(kind)


@pytest.mark.parametrize(
    "body, name",
    [
        ({"text": {"verbosity": "high"}}, "text.verbosity"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"reasoning": {"generate_summary": "concise"}}, "reasoning.generate_summary"),
    ],
)
def test_fields_within_a_field(server, body, name):
    error = server.post("/v1/responses", {"input": "hi"} | body).json()["error"]
    assert error["param"] == name and error["message"].startswith(f"{name} is not offered: ")


WITHIN: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "response_format.json_schema": (
        "/v1/chat/completions", {"messages": HI, "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        {"response_format": {"type": "json_schema", "json_schema": {
            "schema": SCHEMA, "name": "a", "description": "b", "strict": False}}},
    ),
    "text.format": (
        "/v1/responses", {"input": "hi", "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}},
        {"text": {"format": {"type": "json_schema", "name": "b", "description": "c", "schema": SCHEMA, "strict": False}}},
    ),
    "thinking": (
        "/v1/messages", {"messages": HI, "max_tokens": 100, "thinking": {"type": "enabled"}},
        {"thinking": {"type": "enabled", "budget_tokens": 5, "display": "omitted"}},
    ),
    "stream_options of responses": (
        "/v1/responses", {"input": "hi", "stream": True}, {"stream_options": {"include_obfuscation": True}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("place", WITHIN_OF_NO_EFFECT)
def test_what_is_within_a_field_and_has_no_effect(server, place):
    path, base, more = WITHIN[place]
    (status, asked, rendered), _ = observed(server, path, base)
    (again, also, drawn), _ = observed(server, path, base | more)
    names, _ = WITHIN_OF_NO_EFFECT[place]
    assert status == again == 200 and asked == also
    assert all(f"'{name}'" in str(more) for name in names)
    assert drawn == rendered


STRICT_TOOL = {"name": "f", "parameters": SCHEMA, "strict": True}
OF_STRICT: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI, "tools": [{"type": "function", "function": STRICT_TOOL}]},
    "/v1/responses": {"input": "hi", "tools": [{"type": "function", **STRICT_TOOL}]},
    "/v1/messages": {"messages": HI, "max_tokens": 9, "tools": [{"name": "f", "input_schema": SCHEMA, "strict": True}]},
    "/cohere/v2/chat": {"model": "fake", "messages": HI, "tools": TOOLS, "strict_tools": True},
}


@pytest.mark.parametrize("path", OF_STRICT)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_strict_of_a_function_holds_the_calls_that_the_model_chooses(server, path, is_streamed):
    body = OF_STRICT[path] | {"stream": is_streamed}
    (status, asked, _), _ = observed(server, path, body)
    assert status == 200 and "structural_tag" in str(asked) and "'repeats': True" in str(asked)
    loose = json.loads(json.dumps(body).replace('"strict": true', '"strict": false')) | {"strict_tools": False}
    if path != "/cohere/v2/chat":
        del loose["strict_tools"]
    (status, asked, _), _ = observed(server, path, loose)
    assert status == 200 and "structural_tag" not in str(asked)


def test_the_table_names_fields_that_there_are():
    """And none that also says it does something."""
    from pelton_plugins.server.rules import NOT_OFFERED

    for kind, rules in NOT_OFFERED.items():
        assert {name.split(".")[0] for name in rules} <= set(kind.__struct_fields__), kind
    for kind, names in OF_NO_EFFECT.items():
        assert set(names) <= set(kind.__struct_fields__), kind
        assert not set(names) & refused(kind)
    assert refused(GenerateRequest) <= refused(ChatCompletionRequest) <= refused(BatchChatRequest)


OF_CLIENTS: dict[type[msgspec.Struct], str] = {
    CompletionRequest: """model prompt best_of echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream
        stream_options suffix temperature top_p user""",
    ChatCompletionRequest: """messages model audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens
        max_tokens metadata modalities moderation n parallel_tool_calls prediction presence_penalty prompt_cache_key
        prompt_cache_options prompt_cache_retention reasoning_effort response_format safety_identifier seed service_tier stop store
        stream stream_options temperature tool_choice tools top_logprobs top_p user verbosity web_search_options""",
    EmbeddingRequest: "input model dimensions encoding_format user",
    ResponsesRequest: """access_programs background background_options context_management conversation image include input
        instructions max_output_tokens max_tool_calls metadata model moderation parallel_tool_calls previous_response_id prompt
        prompt_cache_key prompt_cache_options prompt_cache_retention reasoning safety_identifier service_tier store stream
        stream_options temperature text tool_choice tools top_logprobs top_p truncation user""",
    MessagesRequest: """max_tokens messages model cache_control container diagnostics inference_geo metadata output_config service_tier
        speed stop_sequences stream system thinking tool_choice tools user_profile_id workspace_id""",
    CountTokensRequest: """messages model cache_control output_config speed system thinking tool_choice tools user_profile_id
        workspace_id""",
    CohereChatRequest: """model messages tools strict_tools documents citation_options response_format safety_mode max_tokens
        stop_sequences temperature seed frequency_penalty presence_penalty k p logprobs tool_choice thinking priority""",
    CohereEmbedRequest: "model input_type texts images inputs max_tokens output_dimension embedding_types truncate priority",
    RerankRequest: "model query documents top_n max_tokens_per_doc relevant_spans priority",
}
"""What the methods of openai 3.57, anthropic 2.14 and cohere 7.3 take."""


@pytest.mark.parametrize("kind", OF_CLIENTS)
def test_no_field_of_the_clients_is_unknown(kind):
    """One that is would be ignored: names that nobody knows are."""
    assert set(OF_CLIENTS[kind].split()) <= set(kind.__struct_fields__)


@pytest.mark.parametrize("kind", [*EXAMPLES, *OF_POOLING])
def test_the_log_of_requests_says_nothing_of_what_was_said(kind, caplog):
    _, base, _ = (EXAMPLES | OF_POOLING)[kind]
    said = "s3cret"
    values = (
        said,
        [said],
        {"a": said},
        [{"role": "user", "content": said}],
        [[{"role": "user", "content": said}]],
        [{"type": "function", "function": {"name": said}}],
    )
    for field in msgspec.structs.fields(kind):
        for value in values:
            try:
                request = msgspec.convert(base | {field.name: value}, kind)
            except msgspec.ValidationError:
                continue
            with caplog.at_level(logging.INFO, logger="pelton.requests"):
                log_request("id", request, with_prompts=False)
            assert len(caplog.records) == 1
            assert said not in caplog.text or field.name in NAMES, field.name
            caplog.clear()
