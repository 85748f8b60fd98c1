"""/v1/messages over a fake engine, as the `anthropic` client sees it."""

from __future__ import annotations

import pydantic
import pytest
from pelton_late_import import LateImport

anthropic = LateImport("anthropic")

WEATHER = {
    "name": "get_weather",
    "description": "x",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
ANSWER = '<think>Hm.</think>I look.<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'
HI = {"model": "fake", "max_tokens": 150, "messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture(scope="module")
def server(run_server):
    return run_server(
        tool_call_parser="hermes", reasoning_parser="think", api_key=["secret"], public_routes=["/health"]
    )


@pytest.fixture(scope="module")
def client(server):
    return anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0)


def test_a_message_has_thinking_text_and_tool_use(server, client):
    server.llm.answer = ANSWER
    found = client.messages.create(**HI, system="Be kind.", tools=[WEATHER])
    thinking, text, use = found.content
    assert (thinking.thinking, text.text) == ("Hm.", "I look.")
    assert (use.name, use.input) == ("get_weather", {"city": "Paris"}) and use.id.startswith("toolu_")
    assert found.stop_reason == "tool_use" and found.role == "assistant"
    assert found.usage.input_tokens + found.usage.cache_read_input_tokens > 0
    assert found.usage.output_tokens == len(ANSWER)
    assert server.llm.rendered["messages"][0] == {"role": "system", "content": "Be kind."}


def test_a_stream_adds_up_to_the_message(server, client):
    server.llm.answer = ANSWER
    kinds = []
    with client.messages.stream(**HI, tools=[WEATHER]) as stream:
        for event in stream:
            kinds.append(event.type)
        found = stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop" and "message_delta" in kinds
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3
    thinking, text, use = found.content
    assert (thinking.thinking, text.text, use.input) == ("Hm.", "I look.", {"city": "Paris"})
    assert found.stop_reason == "tool_use" and found.usage.output_tokens == len(ANSWER)


def test_a_turn_with_results_reaches_the_template(server, client):
    server.llm.answer = "Rain."
    messages = [
        *HI["messages"],
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Paris"}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "rain"}]},
            {"type": "text", "text": "So?"},
        ]},
    ]  # fmt: skip
    found = client.messages.create(**{**HI, "messages": messages}, tools=[WEATHER])
    assert found.content[0].text == "Rain." and found.stop_reason == "end_turn"
    _, assistant, tool, user = server.llm.rendered["messages"]
    assert assistant["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city":"Paris"}'}
    assert assistant["reasoning"] == "Hm."
    assert tool == {"role": "tool", "content": "rain", "tool_call_id": "toolu_1"} and user["content"] == "So?"


def test_a_forced_tool_is_a_constraint(server, client):
    server.llm.constrains, server.llm.answer = True, '{"city": "Paris"}'
    try:
        found = client.messages.create(**HI, tools=[WEATHER], tool_choice={"type": "tool", "name": "get_weather"})
    finally:
        server.llm.constrains = False
    assert found.content[0].input == {"city": "Paris"} and found.stop_reason == "tool_use"


def test_a_parsed_answer_is_a_constraint(server, client):
    """`messages.parse`, and the effort that the template may read."""
    city = pydantic.create_model("City", name=str)
    server.llm.constrains, server.llm.answer = True, '<think>Hm.</think>{"name": "Paris"}'
    try:
        found = client.messages.parse(**HI, output_format=city, output_config={"effort": "low"})
    finally:
        server.llm.constrains = False
    assert found.parsed_output == city(name="Paris")
    asked = server.llm.requests[-1][1].structured_outputs
    assert asked.json["required"] == ["name"] and asked.reasoning_end == "</think>"
    assert server.llm.rendered["chat_template_kwargs"]["reasoning_effort"] == "low"
    with pytest.raises(anthropic.BadRequestError, match="task_budget"):
        client.messages.create(**HI, output_config={"task_budget": 3})


def test_limits_and_stops_have_their_reasons(server, client):
    server.llm.answer = "Hello, world."
    assert client.messages.create(**{**HI, "max_tokens": 3}).stop_reason == "max_tokens"


def test_tokens_are_counted(server, client):
    found = client.messages.count_tokens(model="fake", messages=HI["messages"], system="Be kind.")
    assert found.input_tokens > client.messages.count_tokens(model="fake", messages=HI["messages"]).input_tokens > 0


def test_errors_have_anthropics_shape(server, client):
    with pytest.raises(anthropic.NotFoundError) as found:
        client.messages.create(**{**HI, "model": "other"})
    assert found.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="not offered"):
        image = {"type": "image", "source": {"type": "url", "url": "http://x"}}
        client.messages.create(**{**HI, "messages": [{"role": "user", "content": [image]}]})
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(**{**HI, "max_tokens": 0})
    server.llm.fail_after = (2, ValueError("x"))
    try:
        with pytest.raises(anthropic.APIStatusError), client.messages.stream(**HI) as stream:
            for _ in stream:
                pass
    finally:
        server.llm.fail_after = None


def test_a_result_that_is_neither_a_text_nor_blocks_is_refused_by_name(client):
    block = {"type": "tool_result", "tool_use_id": "a", "content": 0.5}
    with pytest.raises(anthropic.BadRequestError, match="content must be a text or a list of blocks"):
        client.messages.create(**{**HI, "messages": [{"role": "user", "content": [block]}]})


def test_the_key_may_come_as_anthropics_clients_send_it(server):
    body = {"messages": HI["messages"], "max_tokens": 3}
    assert server.client.post("/v1/messages", json=body, headers={"x-api-key": "secret"}).status_code == 200
    assert server.client.post("/v1/messages", json=body, headers={"x-api-key": "wrong"}).status_code == 401
