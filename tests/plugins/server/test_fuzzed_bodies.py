"""Bodies that hypothesis makes of the endpoints' own fields: whatever is in them, the answer is no server error."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pelton_fake_server import FakePoolingLLM, RoutesOnly

from pelton_plugins.server.anthropic_protocol import CountTokensRequest, MessagesRequest
from pelton_plugins.server.app import build_app
from pelton_plugins.server.batch import BatchLine, call
from pelton_plugins.server.chat_batch import BatchChatRequest
from pelton_plugins.server.cohere_protocol import CohereChatRequest, CohereEmbedRequest
from pelton_plugins.server.config import ServerConfig
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
    LoadAdapterRequest,
    TokenizeRequest,
)
from pelton_plugins.server.responses_protocol import ResponsesRequest
from pelton_plugins.server.state import ServerState
from pelton_plugins.server.token_protocol import DerenderChatRequest, DerenderCompletionRequest, TokensRequest

HI = [{"role": "user", "content": "Hi"}]
MADE = {"request_id": "r", "choices": [{"index": 0, "token_ids": [1, 2], "finish_reason": "stop"}]}
BODIES = {
    "/v1/completions": (CompletionRequest, {"prompt": "ab"}),
    "/v1/chat/completions": (ChatCompletionRequest, {"messages": HI}),
    "/v1/responses": (ResponsesRequest, {"input": "Hi"}),
    "/v1/messages": (MessagesRequest, {"messages": HI, "max_tokens": 3}),
    "/tokenize": (TokenizeRequest, {"prompt": "ab"}),
    "/v1/messages/count_tokens": (CountTokensRequest, {"messages": HI}),
    "/v1/chat/completions/batch": (BatchChatRequest, {"messages": [HI]}),
    "/v1/completions/render": (CompletionRequest, {"prompt": "ab"}),
    "/inference/v1/generate": (TokensRequest, {"token_ids": [1]}),
    "/v1/chat/completions/derender": (
        DerenderChatRequest,
        {"generate_response": MADE, "chat_request": {"messages": HI}},
    ),
    "/v1/completions/derender": (DerenderCompletionRequest, {"generate_response": MADE}),
    "/cohere/v2/chat": (CohereChatRequest, {"messages": HI}),
    "/detokenize": (DetokenizeRequest, {"tokens": [1]}),
    "/v1/load_lora_adapter": (LoadAdapterRequest, {"lora_name": "a", "lora_path": "b"}),
    "/v1/embeddings": (EmbeddingRequest, {"input": "ab"}),
    "/classify": (ClassifyRequest, {"input": "ab"}),
    "/pooling": (PoolingRequest, {"input": "ab"}),
    "/score": (ScoreRequest, {"text_1": "ab", "text_2": "c"}),
    "/rerank": (RerankRequest, {"query": "ab", "documents": ["c"]}),
    "/v2/embed": (CohereEmbedRequest, {"texts": ["ab"]}),
}
MANY = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
OF_POOLING = ("/v1/embeddings", "/classify", "/pooling", "/score", "/rerank", "/v2/embed")
KEYS = ("type", "role", "content", "text", "name", "function", "arguments", "call_id", "id", "input", "output", "tool_calls",
        "parameters", "input_schema", "thinking", "tool_use_id", "schema", "json_schema", "format")  # fmt: skip
WORDS = st.sampled_from(
    ["", "a", "user", "assistant", "tool", "text", "function", "message", "reasoning", "function_call", "function_call_output",
     "tool_use", "tool_result", "thinking", "input_text", "auto", "required", "json_schema", "json_object", "\ud7ff", "\0"]
)  # fmt: skip
LEAVES = st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([2**31, 1e308, -1.5, 0.5]) | WORDS
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=10,
)


@pytest.fixture(scope="module")
def app(make_app):
    return make_app(
        "<think>Hm.</think>Yes. <tool_call>{}</tool_call>", tool_call_parser="hermes", reasoning_parser="think",
        max_stored_responses=2, trust_request_chat_template=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def pooling_app():
    state = ServerState(config=ServerConfig(access_log=False), model_names=["fake"], llm=FakePoolingLLM())
    return build_app(state, RoutesOnly())


@pytest.mark.parametrize("path", BODIES)
def test_no_body_is_a_server_error(app, pooling_app, path):
    asked = pooling_app if path in OF_POOLING else app
    struct, sound = BODIES[path]
    names = st.sampled_from(
        [name for name in struct.__struct_fields__ if name not in ("timeout_s", "request_id", "background")]
    )

    async def ask(fields):
        line = BatchLine(custom_id="x", url=path, body=msgspec.Raw(msgspec.json.encode(sound | fields)))
        return await asyncio.wait_for(call(asked, line, "id"), 20)

    @settings(
        max_examples=150 if path in MANY else 50,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.dictionaries(names, VALUES, max_size=4))
    def check(fields):
        status, body = asyncio.run(ask(fields))
        assert status < 500, (fields, body[:500])
        if status >= 400:
            assert b'"message"' in body

    check()
