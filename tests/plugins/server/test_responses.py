"""/v1/responses over a fake engine, as the `openai` client sees it."""

from __future__ import annotations

import json

import pytest
from pelton_late_import import LateImport

from pelton.parsing.interface import Arguments, Content, ToolCall
from pelton_plugins.server.protocol import ChatLogprob, ChatLogprobs, Usage
from pelton_plugins.server.responses_events import ResponseBuilder
from pelton_plugins.server.responses_protocol import ResponsesRequest

openai = LateImport("openai")

RESPONSES = "/v1/responses"
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
ANSWER = '<think>Hm.</think>I look.<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'


@pytest.fixture(scope="module")
def server(run_server):
    return run_server(tool_call_parser="hermes", reasoning_parser="think", max_stored_responses=3)


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def test_a_text_is_answered(server, client):
    server.llm.answer = "Hello, world."
    found = client.responses.create(model="fake", input="Hi", instructions="Be kind.", metadata={"a": "b"})
    assert found.output_text == "Hello, world." and found.status == "completed"
    assert [message["role"] for message in server.llm.rendered["messages"]] == ["system", "user"]
    assert found.usage.output_tokens == 13 and found.usage.input_tokens_details.cached_tokens == 2
    assert found.metadata == {"a": "b"} and found.store is True


def test_a_stream_has_all_events_in_their_order(server, client):
    server.llm.answer = ANSWER
    events = list(client.responses.create(model="fake", input="Hi", tools=[WEATHER], stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    ordered = [kind for place, kind in enumerate(kinds) if place == 0 or kinds[place - 1] != kind]
    assert ordered == [
        "response.created", "response.in_progress",
        "response.output_item.added", "response.content_part.added", "response.reasoning_text.delta",
        "response.reasoning_text.done", "response.content_part.done", "response.output_item.done",
        "response.output_item.added", "response.content_part.added", "response.output_text.delta",
        "response.output_text.done", "response.content_part.done", "response.output_item.done",
        "response.output_item.added", "response.function_call_arguments.delta",
        "response.function_call_arguments.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip
    reasoning, message, call = events[-1].response.output
    assert (reasoning.content[0].text, message.content[0].text) == ("Hm.", "I look.")
    assert json.loads(call.arguments) == {"city": "Paris"} and call.name == "get_weather"
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call.arguments


def test_the_clients_own_stream_helper_adds_up(server, client):
    server.llm.answer = ANSWER
    with client.responses.stream(model="fake", input="Hi", tools=[WEATHER]) as stream:
        for _ in stream:
            pass
        found = stream.get_final_response()
    assert [item.type for item in found.output] == ["reasoning", "message", "function_call"]


def test_a_conversation_goes_on(server, client):
    server.llm.answer = ANSWER
    first = client.responses.create(model="fake", input="Hi", tools=[WEATHER])
    server.llm.answer = "Rain."
    result = {"type": "function_call_output", "call_id": first.output[2].call_id, "output": "rain"}
    second = client.responses.create(model="fake", input=[result], tools=[WEATHER], previous_response_id=first.id)
    assert second.output_text == "Rain." and second.previous_response_id == first.id
    user, assistant, tool = server.llm.rendered["messages"]
    assert user["content"] == "Hi" and assistant["reasoning"] == "Hm." and assistant["content"] == "I look."
    assert assistant["tool_calls"][0]["id"] == tool["tool_call_id"] and tool["content"] == "rain"


def test_what_is_kept_can_be_had_and_forgotten(server, client):
    server.llm.answer = "Yes."
    first = client.responses.create(model="fake", input="Hi")
    assert client.responses.retrieve(first.id).output_text == "Yes."
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    old = client.responses.create(model="fake", input="Hi")
    for _ in range(3):
        client.responses.create(model="fake", input="Hi")
    with pytest.raises(openai.NotFoundError, match="max_stored_responses is 3"):
        client.responses.retrieve(old.id)
    unkept = client.responses.create(model="fake", input="Hi", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unkept.id)


def test_what_a_response_was_asked_with_can_be_listed(server, client):
    server.llm.answer = "Yes."
    items = [{"role": "user", "content": text} for text in "abc"]
    found = client.responses.create(model="fake", input=items)
    assert [item.content for item in client.responses.input_items.list(found.id)] == ["c", "b", "a"]
    pages = client.responses.input_items.list(found.id, limit=2, order="asc")
    assert [item.content for item in pages.data] == ["a", "b"] and pages.has_more
    assert [item.content for item in pages] == ["a", "b", "c"]
    for more in ({"limit": 0}, {"limit": "x"}, {"order": "x"}, {"after": "nobody"}):
        reply = server.client.get(f"{RESPONSES}/{found.id}/input_items", params=more)
        assert reply.status_code == 400 and reply.json()["error"]["param"] == next(iter(more))
    assert server.client.get(f"{RESPONSES}/resp_none/input_items").status_code == 404
    with pytest.raises(openai.BadRequestError, match="leave stream out"):
        client.responses.retrieve(found.id, stream=True)


def test_tokens_of_a_prompt_are_counted(server, client):
    server.llm.answer = "Yes."
    counted = client.responses.input_tokens.count(model="fake", input="Hi", instructions="Be kind.").input_tokens
    used = client.responses.create(model="fake", input="Hi", instructions="Be kind.").usage.input_tokens
    assert counted == used > 0
    with pytest.raises(openai.NotFoundError):
        client.responses.input_tokens.count(model="other", input="Hi")


def test_one_in_the_background_can_be_cancelled(server, client):
    server.llm.answer, server.llm.step_s = "Hello", 0.05
    try:
        found = client.responses.create(model="fake", input="Hi", background=True, extra_body={"ignore_eos": True})
        assert found.status == "in_progress"
        with pytest.raises(openai.BadRequestError, match="is in progress; wait for its end") as refusal:
            client.responses.create(model="fake", input="And?", previous_response_id=found.id)
        assert refusal.value.param == "previous_response_id"
        assert client.responses.cancel(found.id).status == "cancelled"
        assert client.responses.retrieve(found.id).status == "cancelled"
        assert server.wait_for(lambda: not server.llm.running)
    finally:
        server.llm.step_s = 0.0
    done = client.responses.create(model="fake", input="Hi", background=True)
    assert server.wait_for(lambda: client.responses.retrieve(done.id).status == "completed")
    assert client.responses.retrieve(done.id).output_text == "Hello"


def test_length_makes_it_incomplete(server, client):
    server.llm.answer = "Hello, world."
    found = client.responses.create(model="fake", input="Hi", max_output_tokens=4)
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert found.output_text == "Hell"


def test_errors_before_and_after_the_first_event(server, client):
    server.llm.fail_before = ValueError("x")
    try:
        with pytest.raises(openai.InternalServerError):
            client.responses.create(model="fake", input="Hi", stream=True)
        server.llm.fail_before, server.llm.fail_after = None, (2, ValueError("x"))
        events = list(client.responses.create(model="fake", input="Hi", stream=True))
        assert events[-1].type == "response.failed" and events[-1].response.error.code == "server_error"
    finally:
        server.llm.fail_before = server.llm.fail_after = None


@pytest.mark.parametrize(
    "body, param",
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].arguments"),
        ({"input": "x", "previous_response_id": "resp_no"}, "previous_response_id"),
        ({"input": "x", "conversation": "c"}, "conversation"),
        ({"input": "x", "truncation": "auto"}, "truncation"),
        ({"input": "x", "include": ["file_search_call.results"]}, "include"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "body.tools[0].type"),
        ({"input": "x", "background": True, "store": False}, "background"),
        ({}, "body.input"),
    ],
    ids=str,
)
def test_what_is_not_offered_is_named(server, body, param):
    reply = server.post(RESPONSES, body)
    assert reply.status_code in (400, 404), reply.text
    assert reply.json()["error"]["param"] == param


def test_logprobs_of_tokens_without_text_come_with_the_next_text_or_at_the_end():
    builder = ResponseBuilder("resp_1", "fake", ResponsesRequest(input="Hi"), is_stored=False)

    def logprobs(token: str) -> ChatLogprobs:
        return ChatLogprobs(content=[ChatLogprob(token=token, logprob=-1.0)])

    assert builder.take([], logprobs("a")) == []
    delta = builder.take([Content("ab")], logprobs("b"))[-1]
    assert [row["token"] for row in delta["logprobs"]] == ["a", "b"]
    assert builder.take([], logprobs("end")) == []
    events = builder.finish("stop", Usage(prompt_tokens=1, completion_tokens=3, total_tokens=4))
    assert [row["token"] for row in events[0]["logprobs"]] == ["a", "b", "end"]
    assert [row["token"] for row in builder.output[0]["content"][0]["logprobs"]] == ["a", "b", "end"]
    # Tokens of a call are of no text.
    other = ResponseBuilder("resp_2", "fake", ResponsesRequest(input="Hi"), is_stored=False)
    other.take([], logprobs("<"))
    other.take([ToolCall("f", "call_1"), Arguments("{}")], logprobs("f"))
    assert [row["token"] for row in other.take([Content("x")], logprobs("x"))[-1]["logprobs"]] == ["x"]
