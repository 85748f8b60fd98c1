"""Clients of OpenAI and Anthropic against a real engine over a tiny random checkpoint: every endpoint, whole and streamed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Literal

import httpx
import pydantic
import pytest
from pelton_e2e import serving
from pelton_late_import import LateImport

from pelton.testing.models import CHAT_TEMPLATE, make_tiny_checkpoint

anthropic, openai = LateImport("anthropic"), LateImport("openai")
MESSAGES = [{"role": "user", "content": "Hello there"}]
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}},
}
TEMPLATE = (
    CHAT_TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
CLOSED = {"chat_template_kwargs": {"enable_thinking": False}}
"""The template then closes the reasoning itself, so that a constraint holds from the first token."""
SHORT = {"model": "tiny", "temperature": 0}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("clients")
    checkpoint = make_tiny_checkpoint(folder / "tiny", "llama")
    flags = (
        "--served-model-name", "tiny", "--max-num-seqs", "16", "--tool-call-parser", "hermes", "--reasoning-parser",
        "think", "--max-stored-responses", "10", "--enable-request-id-headers", "--chat-template", TEMPLATE,
    )  # fmt: skip
    with serving(str(checkpoint), *flags, log=folder / "log") as (url, _):
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=60)


def test_completions(client):
    whole = client.completions.create(prompt=["a b", "c d"], max_tokens=8, logprobs=2, echo=True, **SHORT)
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert whole.choices[0].text.startswith("a b") and whole.choices[0].logprobs.token_logprobs[0] is None
    only_prompt = client.completions.create(prompt="a b", max_tokens=0, logprobs=1, echo=True, **SHORT)
    assert only_prompt.choices[0].text == "a b"
    stream = client.completions.create(prompt="a b", max_tokens=8, stream=True, **SHORT)
    text = "".join(chunk.choices[0].text for chunk in stream)
    assert "a b" + text == whole.choices[0].text
    best = client.completions.create(model="tiny", prompt="a b", max_tokens=8, best_of=4, n=2, temperature=1, seed=1)
    assert len(best.choices) == 2 and best.usage.completion_tokens > 2


def test_beam_search(client):
    found = client.completions.create(
        model="tiny",
        prompt="a b",
        max_tokens=4,
        n=3,
        logprobs=1,
        extra_body={"use_beam_search": True, "ignore_eos": True},
    )
    scores = [sum(choice.logprobs.token_logprobs) for choice in found.choices]
    assert scores == sorted(scores, reverse=True) and len({choice.text for choice in found.choices}) > 1
    assert all(all(choice.logprobs.tokens) for choice in found.choices)
    greedy = client.completions.create(prompt="a b", max_tokens=4, logprobs=1, extra_body={"ignore_eos": True}, **SHORT)
    assert scores[0] >= sum(greedy.choices[0].logprobs.token_logprobs) - 1e-3
    with pytest.raises(openai.BadRequestError, match="max_logprobs"):
        client.completions.create(model="tiny", prompt="a", n=11, extra_body={"use_beam_search": True})


def test_chat(client):
    options = {"messages": MESSAGES, "max_completion_tokens": 12, **SHORT}
    whole = client.chat.completions.create(**options, extra_body={"return_metrics": True})
    assert whole.metrics["e2e_latency_s"] >= whole.metrics["time_to_first_token_s"] > 0
    chunks = client.chat.completions.create(**options, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    tools = client.chat.completions.create(**options, tools=[TOOL])
    assert tools.choices[0].message.tool_calls is None or tools.choices[0].message.tool_calls == []
    raw = client.chat.completions.with_raw_response.create(**options, extra_headers={"X-Request-Id": "mine"})
    assert raw.headers["x-request-id"] == "mine" and raw.parse().id == "chatcmpl-mine"


def test_forced_calls_are_valid_whatever_the_model(client):
    """A model with random weights: the grammar alone makes the arguments what the schema asks for."""
    schema = {"type": "object", "properties": {"x": {"enum": [1, 2]}, "s": {"enum": ["a", "b"]}}, "required": ["x", "s"],
              "additionalProperties": False}  # fmt: skip
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}} for name in ("f", "g")]
    more = {"model": "tiny", "messages": MESSAGES, "tools": tools, "max_tokens": 300, "extra_body": CLOSED}
    for choice in ("required", {"type": "function", "function": {"name": "g"}}):
        for stream in (False, True):
            answer = client.chat.completions.create(
                **more, tool_choice=choice, stream=stream, parallel_tool_calls=False
            )
            if stream:
                calls = [call for chunk in answer for call in chunk.choices[0].delta.tool_calls or ()]
                name, text = calls[0].function.name, "".join(call.function.arguments or "" for call in calls)
            else:
                (call,) = answer.choices[0].message.tool_calls
                name, text = call.function.name, call.function.arguments
                assert answer.choices[0].finish_reason == ("tool_calls" if choice == "required" else "stop")
            assert name == "g" if choice != "required" else name in ("f", "g")
            found = json.loads(text)
            assert found["x"] in (1, 2) and found["s"] in ("a", "b")


def test_parse_gives_an_object_of_the_clients_own_class(client):
    class Point(pydantic.BaseModel):
        x: Literal[1, 2]
        name: Literal["a", "b"]

    # A tiny model may write whitespace to the end: with this seed it does not.
    more = {"extra_body": CLOSED | {"seed": 3}}
    options = {"model": "tiny", "messages": MESSAGES, "max_tokens": 200, **more}
    chat = client.chat.completions.parse(**options, response_format=Point)
    assert chat.choices[0].message.parsed.x in (1, 2)
    response = client.responses.parse(model="tiny", input="Hi", text_format=Point, max_output_tokens=200, **more)
    assert response.output_parsed.name in ("a", "b")


async def test_asynchronous_clients_together(url):
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        one = client.chat.completions.create(messages=MESSAGES, max_tokens=6, **SHORT)
        other = client.responses.create(model="tiny", input="Hello there", max_output_tokens=6, temperature=0)
        chat, response = await asyncio.gather(one, other)
    assert chat.choices[0].message.content == response.output_text


def test_responses(client):
    first = client.responses.create(model="tiny", input="Hello there", max_output_tokens=8, temperature=0)
    assert first.status in ("completed", "incomplete") and first.output_text
    stream = client.responses.create(model="tiny", input="Hello there", max_output_tokens=8, temperature=0, stream=True)
    assert list(stream)[-1].response.output_text == first.output_text
    second = client.responses.create(model="tiny", input="Go on", previous_response_id=first.id, max_output_tokens=4)
    assert second.usage.input_tokens > first.usage.input_tokens
    assert client.responses.retrieve(second.id).output_text == second.output_text
    slow = client.responses.create(
        model="tiny", input="Hi", background=True, max_output_tokens=400, extra_body={"ignore_eos": True}
    )
    assert client.responses.cancel(slow.id).status in ("cancelled", "incomplete")


def test_messages(url):
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    options = {"model": "tiny", "max_tokens": 12, "messages": MESSAGES, "extra_body": {"temperature": 0}}
    whole = client.messages.create(**options)
    with client.messages.stream(**options) as stream:
        found = stream.get_final_message()
    assert found.content[0].text == whole.content[0].text and found.stop_reason == whole.stop_reason
    answer = pydantic.create_model("Answer", kind=Literal["a", "b"])
    parsed = client.messages.parse(
        model="tiny",
        max_tokens=60,
        messages=MESSAGES,
        output_format=answer,
        extra_body=CLOSED,
    )
    assert parsed.parsed_output.kind in ("a", "b")
    assert (
        found.usage.input_tokens + (found.usage.cache_read_input_tokens or 0)
        == client.messages.count_tokens(model="tiny", messages=MESSAGES).input_tokens
    )


def test_conversations_go_on_with_what_the_clients_were_given(client, url):
    """Objects of their own classes, as users append them: answers, calls, and results of calls."""
    schema = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    named = {"type": "function", "function": {"name": "f"}}
    more = {"model": "tiny", "max_tokens": 60, "extra_body": CLOSED}
    answer = client.chat.completions.create(messages=MESSAGES, **more).choices[0].message
    messages = [*MESSAGES, answer, {"role": "user", "content": "Now call"}]
    called = client.chat.completions.create(messages=messages, tools=[tool], tool_choice=named, **more)
    (call,) = called.choices[0].message.tool_calls
    messages += [called.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
    assert client.chat.completions.create(messages=messages, tools=[tool], **more).usage.prompt_tokens > 0

    flat = {"type": "function", **tool["function"]}
    first = client.responses.create(
        model="tiny", input="Call", tools=[flat], tool_choice={"type": "function", "name": "f"}, max_output_tokens=60,
        extra_body=CLOSED,
    )  # fmt: skip
    (item,) = [one for one in first.output if one.type == "function_call"]
    result = {"type": "function_call_output", "call_id": item.call_id, "output": "3"}
    given = [{"role": "user", "content": "Call"}, *first.output, result]
    assert client.responses.create(model="tiny", input=given, tools=[flat], max_output_tokens=4).usage.input_tokens > 0

    theirs = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    of_theirs = {"name": "f", "input_schema": schema}
    found = theirs.messages.create(
        model="tiny", max_tokens=60, messages=MESSAGES, tools=[of_theirs], tool_choice={"type": "tool", "name": "f"}, extra_body=CLOSED,
    )  # fmt: skip
    (use,) = [block for block in found.content if block.type == "tool_use"]
    turn = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "3"}]}
    messages = [*MESSAGES, {"role": "assistant", "content": found.content}, turn]
    again = theirs.messages.create(model="tiny", max_tokens=4, messages=messages, tools=[of_theirs])
    assert again.usage.output_tokens > 0


def test_the_description_of_the_api_is_true_of_each_answer(url):
    """Required fields of each response, and no key where none is needed."""
    spec = httpx.get(url + "/openapi.json", timeout=60).json()
    schemas = spec["components"]["schemas"]
    bodies = {
        "/v1/completions": {"prompt": "a", "max_tokens": 1},
        "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 1},
        "/v1/responses": {"input": "a", "max_output_tokens": 1},
        "/v1/messages": {"messages": MESSAGES, "max_tokens": 1},
        "/v1/messages/count_tokens": {"messages": MESSAGES},
        "/tokenize": {"prompt": "a"},
        "/detokenize": {"tokens": [5]},
    }
    for path, body in bodies.items():
        operation = spec["paths"][path]["post"]
        assert "security" not in operation
        reply = httpx.post(url + path, json=body, timeout=30)
        assert reply.status_code == 200, reply.text
        name = operation["responses"]["200"]["content"]["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
        assert set(schemas[name]["required"]) <= reply.json().keys() <= schemas[name]["properties"].keys() | {
            "background"
        } or (path == "/v1/responses")
        assert httpx.post(url + path, json={}, timeout=30).status_code == 400, (
            "an empty body is wrong by the description too"
        )
        name = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
        assert schemas[name].get("required") or path in ("/v1/completions", "/tokenize")


def test_langchains_chat(url):
    """Whole, streamed, with a schema by either way that has one, and with a tool that it must call."""
    from langchain_openai import ChatOpenAI

    class Answer(pydantic.BaseModel):
        kind: Literal["a", "b"]

    chat = ChatOpenAI(
        model="tiny", base_url=url + "/v1", api_key="none", temperature=0, max_retries=0, max_completion_tokens=40,
        extra_body=CLOSED,
    )  # fmt: skip
    whole = chat.invoke("Hello there")
    assert whole.content and whole.usage_metadata["output_tokens"] > 0
    assert "".join(part.content for part in chat.stream("Hello there")) == whole.content
    for method in ("json_schema", "function_calling"):
        assert chat.with_structured_output(Answer, method=method, strict=True).invoke("Hello there").kind in ("a", "b")
    called = chat.bind_tools([TOOL], tool_choice="f").invoke("Hello there")
    assert called.tool_calls[0]["name"] == "f"
