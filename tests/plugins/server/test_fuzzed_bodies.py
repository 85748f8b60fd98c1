"""Bodies that hypothesis makes of the endpoints' own fields: whatever is in them, the answer is no server error."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pelton_plugins.server.anthropic_protocol import MessagesRequest
from pelton_plugins.server.batch import BatchLine, call
from pelton_plugins.server.protocol import ChatCompletionRequest, CompletionRequest, TokenizeRequest
from pelton_plugins.server.responses_protocol import ResponsesRequest

BODIES = {
    "/v1/completions": (CompletionRequest, {"prompt": "ab"}),
    "/v1/chat/completions": (ChatCompletionRequest, {"messages": [{"role": "user", "content": "Hi"}]}),
    "/v1/responses": (ResponsesRequest, {"input": "Hi"}),
    "/v1/messages": (MessagesRequest, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}),
    "/tokenize": (TokenizeRequest, {"prompt": "ab"}),
}
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


@pytest.mark.parametrize("path", BODIES)
def test_no_body_is_a_server_error(app, path):
    struct, sound = BODIES[path]
    names = st.sampled_from(
        [name for name in struct.__struct_fields__ if name not in ("timeout_s", "request_id", "background")]
    )

    async def ask(fields):
        line = BatchLine(custom_id="x", url=path, body=msgspec.Raw(msgspec.json.encode(sound | fields)))
        return await asyncio.wait_for(call(app, line, "id"), 20)

    @settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.dictionaries(names, VALUES, max_size=4))
    def check(fields):
        status, body = asyncio.run(ask(fields))
        assert status < 500, (fields, body[:500])
        if status >= 400:
            assert b'"message"' in body

    check()
