"""The bounds of `pelton.limits` that the server applies: the last good value passes, the next one is named and refused."""

from __future__ import annotations

import msgspec
import pytest

from pelton import limits
from pelton.errors import RequestError
from pelton_plugins.server.params import check_chat, check_common, check_template
from pelton_plugins.server.prompts import check_fan_out
from pelton_plugins.server.protocol import ChatCompletionRequest, CompletionRequest, Message, TokenizeRequest
from pelton_plugins.server.tools import FunctionDefinition, Tool, check_tools


def test_prompts_per_request():
    check_fan_out(limits.MAX_PROMPTS_PER_REQUEST, 1)
    with pytest.raises(RequestError, match="at most 2048") as found:
        check_fan_out(limits.MAX_PROMPTS_PER_REQUEST + 1, 1)
    assert found.value.param == "prompt"


def test_sequences_per_request():
    check_fan_out(limits.MAX_TOTAL_SEQUENCES_PER_REQUEST // 64, 64)
    with pytest.raises(RequestError, match="at most 4096") as found:
        check_fan_out(limits.MAX_TOTAL_SEQUENCES_PER_REQUEST // 64 + 1, 64)
    assert found.value.param == "n"


def test_messages():
    message = Message(role="user", content="x")
    check_chat(ChatCompletionRequest(messages=[message] * limits.MAX_MESSAGES), trust_template=False)
    with pytest.raises(RequestError, match="at most 4096") as found:
        check_chat(ChatCompletionRequest(messages=[message] * (limits.MAX_MESSAGES + 1)), trust_template=False)
    assert found.value.param == "messages"


def test_tools():
    def tools(count=1, name="f", size=0):
        named = [f"{name}{index}" if count > 1 else name for index in range(count)]
        return [Tool(function=FunctionDefinition(name=one, parameters={"x": "y" * size})) for one in named]

    empty = len(msgspec.json.encode(FunctionDefinition(name="f", parameters={"x": ""})))
    check_tools(tools(limits.MAX_TOOLS), None)
    check_tools(tools(name="x" * limits.MAX_TOOL_NAME_CHARS), None)
    check_tools(tools(size=limits.MAX_TOOL_BYTES - empty), None)
    for bad, field in (
        (tools(limits.MAX_TOOLS + 1), "tools"),
        (tools(name="x" * (limits.MAX_TOOL_NAME_CHARS + 1)), "tools[0].function.name"),
        (tools(name=""), "tools[0].function.name"),
        (tools(size=limits.MAX_TOOL_BYTES - empty + 1), "tools[0].function.parameters"),
    ):
        with pytest.raises(RequestError) as found:
            check_tools(bad, None)
        assert found.value.param == field and len(str(found.value)) < 500


def test_template_length():
    def check(length):
        check_template(TokenizeRequest(chat_template="x" * length), trust_template=True)

    check(limits.MAX_CHAT_TEMPLATE_CHARS)
    with pytest.raises(RequestError, match=f"at most {limits.MAX_CHAT_TEMPLATE_CHARS}") as found:
        check(limits.MAX_CHAT_TEMPLATE_CHARS + 1)
    assert found.value.param == "chat_template"


@pytest.mark.parametrize(
    "field, good, bad",
    [
        ("cache_salt", "x" * limits.MAX_CACHE_SALT_CHARS, "x" * (limits.MAX_CACHE_SALT_CHARS + 1)),
        ("priority", limits.MAX_ABS_PRIORITY, limits.MAX_ABS_PRIORITY + 1),
        ("priority", -limits.MAX_ABS_PRIORITY, -limits.MAX_ABS_PRIORITY - 1),
        ("request_id", "x" * limits.MAX_REQUEST_ID_CHARS, "x" * (limits.MAX_REQUEST_ID_CHARS + 1)),
        ("timeout_s", limits.MAX_TIMEOUT_S, limits.MAX_TIMEOUT_S + 1),
        ("vllm_xargs", {"a": "x" * (limits.MAX_EXTRA_ARGS_BYTES - 8)}, {"a": "x" * (limits.MAX_EXTRA_ARGS_BYTES - 7)}),
    ],
)
def test_fields_of_both_endpoints(field, good, bad):
    check_common(CompletionRequest(**{field: good}))
    with pytest.raises(RequestError) as found:
        check_common(CompletionRequest(**{field: bad}))
    assert found.value.param == field


@pytest.mark.parametrize("over, status", [(0, 200), (1, 413)])
def test_body_bytes(shared, over, status):
    head, tail = b'{"prompt": "a", "max_tokens": 1, "user": "', b'"}'
    body = head + b"x" * (limits.MAX_BODY_BYTES + over - len(head) - len(tail)) + tail
    reply = shared.client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert reply.status_code == status


def test_a_long_request_id_still_fits_the_engine(shared):
    """The engine's id is the response's with a suffix: both stay within MAX_REQUEST_ID_CHARS."""
    body = {"prompt": ["a"] * 3, "max_tokens": 1, "request_id": "x" * limits.MAX_REQUEST_ID_CHARS}
    assert shared.post("/v1/completions", body).status_code == 200
    ids = shared.llm.last_ids
    assert len(set(ids)) == 3 and all(len(one) <= limits.MAX_REQUEST_ID_CHARS for one in ids)
