"""Chat completions with tools and reasoning, as the `openai` client sees them."""

from __future__ import annotations

import json
import re
from typing import ClassVar

import httpx
import msgspec
import pytest
from pelton_late_import import LateImport
from pelton_pages import settings
from tokenizers import Tokenizer

from pelton.errors import ConfigError
from pelton.parsing.interface import Arguments, Content, ParserContext, ToolCall
from pelton.structured.interface import StructuredOutputContext
from pelton.testing.models import EOS_ID, VOCAB_SIZE, make_tiny_tokenizer
from pelton.testing.output_parser import merged
from pelton_plugins.server.forced_calls import constraint
from pelton_plugins.server.http_metrics import HttpMetrics
from pelton_plugins.server.parsing import AnswerReader
from pelton_plugins.server.tools import FunctionDefinition, Offer, Tool
from pelton_plugins.structured_output.auto import AutoBackend

openai = LateImport("openai")
CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'


@pytest.fixture
def hermes(start):
    """As docs/tools.md starts it."""
    return start(**settings("tools.md"))


def client(running) -> openai.OpenAI:
    return openai.OpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0)


def test_a_whole_answer_has_reasoning_content_and_calls(hermes):
    hermes.llm.answer = f"<think>\nHm.\n</think>\n\nI look.\n{CALL}\n{CALL}"
    found = client(hermes).chat.completions.create(model="fake", messages=HI, tools=[WEATHER])
    (choice,) = found.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    assert choice.message.reasoning == choice.message.reasoning_content == "Hm."
    first, second = choice.message.tool_calls
    assert first.function.name == "get_weather" and json.loads(first.function.arguments) == {"city": "Paris"}
    assert first.id != second.id and first.id.startswith("chatcmpl-tool-")
    assert found.usage.completion_tokens_details.reasoning_tokens == 3
    assert hermes.llm.rendered["tools"][0]["function"]["name"] == "get_weather"


def test_a_stream_adds_up_to_the_whole_answer(hermes):
    hermes.llm.answer = f"<think>\nHm.\n</think>\n\nI look.\n{CALL}\n{CALL}"
    with client(hermes).chat.completions.stream(model="fake", messages=HI, tools=[WEATHER]) as stream:
        for _ in stream:
            pass
        choice = stream.get_final_completion().choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "I look."
    assert [call.function.name for call in choice.message.tool_calls] == ["get_weather"] * 2
    assert [call.function.arguments for call in choice.message.tool_calls] == ['{"city": "Paris"}'] * 2


def test_deltas_of_a_call_name_it_once(hermes):
    hermes.llm.answer = CALL
    chunks = list(client(hermes).chat.completions.create(model="fake", messages=HI, tools=[WEATHER], stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert deltas[0].role == "assistant" and deltas[0].content == ""
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    assert calls[0].id and calls[0].type == "function" and calls[0].function.name == "get_weather"
    assert all(call.id is None and call.function.name is None and call.index == 0 for call in calls[1:])
    assert len(calls) > 5, "the arguments come as they are generated"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_answers_that_a_tool_parser_reads_are_counted(hermes):
    """Whole or streamed, with calls or without; not those of requests without tools."""
    for answer, is_streamed in ((CALL, False), ("Hello.", False), (CALL, True)):
        hermes.llm.answer = answer
        assert hermes.post(CHAT, {"messages": HI, "tools": [WEATHER], "stream": is_streamed}).status_code == 200
    assert hermes.post(CHAT, {"messages": HI}).status_code == 200
    told = httpx.get(f"{hermes.url}/metrics", timeout=60).text
    assert 'pelton_tool_call_parser_invocations_total{outcome="calls",parser="hermes"} 2.0' in told
    assert 'pelton_tool_call_parser_invocations_total{outcome="no_calls",parser="hermes"} 1.0' in told
    told, added = hermes.state.http_metrics.take(), HttpMetrics()
    for _ in range(2):
        added.add(told)
    assert added.take().tool_answers == {("hermes", "calls"): 4, ("hermes", "no_calls"): 2}


def test_reasoning_streams_under_both_names(hermes):
    hermes.llm.answer = "<think>Hm.</think>Yes."
    reply = hermes.post(CHAT, {"messages": HI, "stream": True})
    deltas = [json.loads(part[6:])["choices"][0]["delta"] for part in reply.text.split("\n\n")[:-2]]
    for name in ("reasoning", "reasoning_content"):
        assert "".join(delta.get(name, "") for delta in deltas) == "Hm."
    assert "".join(delta.get("content", "") for delta in deltas) == "Yes."


def test_logprobs_of_held_back_tokens_are_not_lost(hermes):
    hermes.llm.answer = f"Ok.{CALL}"
    body = {"messages": HI, "tools": [WEATHER], "stream": True, "logprobs": True, "return_token_ids": True}
    reply = hermes.post(CHAT, body)
    choices = [json.loads(part[6:])["choices"][0] for part in reply.text.split("\n\n")[:-2]]
    tokens = [one["token"] for choice in choices for one in (choice["logprobs"] or {"content": []})["content"]]
    assert "".join(tokens) == hermes.llm.answer
    assert sum(len(choice.get("token_ids", ())) for choice in choices) == len(tokens)


def test_one_call_where_parallel_ones_are_off(hermes):
    hermes.llm.answer = CALL + CALL
    body = {"messages": HI, "tools": [WEATHER], "parallel_tool_calls": False}
    assert len(hermes.post(CHAT, body).json()["choices"][0]["message"]["tool_calls"]) == 1


def test_reasoning_is_left_out_when_asked(hermes):
    hermes.llm.answer = "<think>Hm.</think>Yes."
    message = hermes.post(CHAT, {"messages": HI, "include_reasoning": False}).json()["choices"][0]["message"]
    assert message["content"] == "Yes." and message["reasoning"] is None


def test_none_neither_offers_nor_reads_calls(hermes):
    hermes.llm.answer = CALL
    body = {"messages": HI, "tools": [WEATHER], "tool_choice": "none"}
    choice = hermes.post(CHAT, body).json()["choices"][0]
    assert choice["message"]["content"] == CALL and choice["finish_reason"] == "stop"
    assert "tools" not in hermes.llm.rendered


def test_required_is_a_constraint_whose_text_is_calls(hermes):
    hermes.llm.constrains = True
    hermes.llm.answer = '<think>Hm.</think>[{"name": "get_weather", "parameters": {"city": "Paris"}}]'
    choice = hermes.post(CHAT, {"messages": HI, "tools": [WEATHER], "tool_choice": "required"}).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    asked = hermes.llm.requests[-1][1].structured_outputs
    assert asked.json["type"] == "array" and asked.json["minItems"] == 1
    assert asked.reasoning_end == "</think>", "the constraint holds behind the reasoning"


def test_a_named_tool_makes_the_text_its_arguments(hermes):
    hermes.llm.constrains = True
    hermes.llm.answer = '<think>Hm.</think>{"city": "Paris"}'
    named = {"type": "function", "function": {"name": "get_weather"}}
    for stream in (False, True):
        found = client(hermes).chat.completions.create(
            model="fake", messages=HI, tools=[WEATHER], tool_choice=named, stream=stream
        )
        if stream:
            calls = [call for chunk in found for call in chunk.choices[0].delta.tool_calls or ()]
            assert calls[0].function.name == "get_weather"
            assert "".join(call.function.arguments for call in calls) == '{"city": "Paris"}'
        else:
            assert found.choices[0].finish_reason == "stop"
            assert found.choices[0].message.tool_calls[0].function.arguments == '{"city": "Paris"}'
    asked = hermes.llm.requests[-1][1].structured_outputs
    assert asked.json == WEATHER["function"]["parameters"] and asked.disable_additional_properties


@pytest.mark.parametrize("definitions", [5, ["a"], "a"])
@pytest.mark.parametrize("home", ["$defs", "definitions"])
def test_definitions_that_are_none_are_refused(hermes, home, definitions):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", home: definitions}}}
    reply = hermes.post(CHAT, {"messages": HI, "tools": [tool], "tool_choice": "required"})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "tools"
    assert f"The parameters of f have {home} that are not an object" in reply.json()["error"]["message"]


@pytest.mark.parametrize("parameters", [None, {}])
def test_a_forced_call_of_a_function_without_parameters_has_no_arguments(parameters):
    tool = Tool(function=FunctionDefinition(name="f", parameters=parameters))
    offers = (Offer(kind="required", tools=[tool]), Offer(kind="named", tools=[tool], named=tool))
    required, named = (constraint(offer, is_parallel=True) for offer in offers)
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    assert named.json == required.json["items"]["anyOf"][0]["properties"]["parameters"] == nothing
    assert required.disable_additional_properties


def test_without_a_backend_a_forced_call_is_refused(hermes):
    reply = hermes.post(CHAT, {"messages": HI, "tools": [WEATHER], "tool_choice": "required"})
    assert reply.status_code == 400 and "backend" in reply.json()["error"]["message"]


def test_a_conversation_with_calls_reaches_the_template(hermes):
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    messages = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Hm."},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "Rain."}]},
    ]
    assert hermes.post(CHAT, {"messages": messages, "tools": [WEATHER]}).status_code == 200
    _, assistant, tool = hermes.llm.rendered["messages"]
    assert assistant["tool_calls"][0]["function"]["name"] == "get_weather"
    assert assistant["reasoning"] == assistant["reasoning_content"] == "Hm."
    assert tool == {"role": "tool", "content": "Rain.", "tool_call_id": "c1"}


def test_ids_of_mistral_have_nine_characters(start):
    running = start(tool_call_parser="mistral")
    running.llm.answer = '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}'
    message = running.post(CHAT, {"messages": HI, "tools": [WEATHER]}).json()["choices"][0]["message"]
    assert re.fullmatch(r"[A-Za-z0-9]{9}", message["tool_calls"][0]["id"])


def test_auto_needs_a_parser_and_may_be_switched_off(shared, start):
    for running in (shared, start(tool_call_parser="hermes", enable_auto_tool_choice=False)):
        reply = running.post(CHAT, {"messages": HI, "tools": [WEATHER]})
        assert reply.status_code == 400 and "--tool-call-parser" in reply.json()["error"]["message"]


def test_an_unknown_parser_stops_the_start(start):
    with pytest.raises(ConfigError, match="tool_call_parser is 'hermse'"):
        start(tool_call_parser="hermse")


def test_the_checkpoints_own_template_is_enough(start, tmp_path):
    template = {
        "start_anchor": "<assistant>",
        "fields": {
            "reasoning_content": {"open": "<think>", "close": "</think>"},
            "tool_calls": {
                "open": "<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {},
        },
    }  # fmt: skip
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"response_template": template}))
    running = start()
    running.llm.model = msgspec.structs.replace(running.llm.model, tokenizer_path=str(tmp_path / "tokenizer.json"))
    running.llm.answer = f"<think>Hm.</think>Ok.{CALL}"
    message = running.post(CHAT, {"messages": HI, "tools": [WEATHER]}).json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("Hm.", "Ok.")
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": "Paris"}
    grammar = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "a"}}
    reply = running.post(
        CHAT,
        {"messages": HI, "tools": [WEATHER, {"type": "custom", "custom": {"name": "f", "format": grammar}}]},
    )
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "tools[1].custom.format"


def test_definitions_of_several_tools_do_not_meet():
    def tool(name, kind):
        parameters = {
            "properties": {"x": {"$ref": "#/$defs/X"}},
            "$defs": {"X": {"type": kind, "not": {"$ref": "#/$defs/X"}}},
        }
        return Tool(function=FunctionDefinition(name=name, parameters=parameters))

    schema = constraint(
        Offer(kind="required", tools=[tool("a", "string"), tool("b", "integer")]), is_parallel=False
    ).json
    assert schema["maxItems"] == 1
    assert {name: one["type"] for name, one in schema["$defs"].items()} == {"tool0_X": "string", "tool1_X": "integer"}
    second = schema["items"]["anyOf"][1]["properties"]["parameters"]
    assert second["properties"]["x"] == {"$ref": "#/$defs/tool1_X"}
    assert schema["$defs"]["tool1_X"]["not"] == {"$ref": "#/$defs/tool1_X"}
    named = constraint(Offer(kind="named", named=tool("a", "string")), is_parallel=True)
    assert named.json["$defs"]["X"]["type"] == "string"


TREE = {
    "type": "object",
    "properties": {"value": {"type": "integer"}, "left": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["value"],
    "additionalProperties": False,
}
PAIR = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}, "b": {"$ref": "#/properties/a"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "schema, right, wrong",
    [(TREE, '{"value":1,"left":{"value":2}}', '{"value":1,"left":['), (PAIR, '{"a":"x","b":"y"}', '{"a":"x","b":"z')],
    ids=["itself", "a-part-of-itself"],
)
def test_parameters_that_refer_to_themselves_are_what_they_are_in_the_list_of_calls(tmp_path, schema, right, wrong):
    path = make_tiny_tokenizer(tmp_path)
    context = StructuredOutputContext(tokenizer_path=str(path), vocab_size=VOCAB_SIZE, eos_token_ids=[EOS_ID])
    tools = [Tool(function=FunctionDefinition(name=name, parameters=schema)) for name in ("f", "g")]
    grammar = AutoBackend(context).compile(constraint(Offer(kind="required", tools=tools), is_parallel=True))
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))

    def taken(text: str) -> bool:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        return grammar.validate(ids) == len(ids)

    assert taken(f'[{{"name":"f","parameters":{right}}},{{"name":"g","parameters":{right}}}]')
    assert not taken(f'[{{"name":"f","parameters":{wrong}')


class SpecialTokens:
    """A tokenizer in which some markers are special tokens."""

    texts: ClassVar[dict[int, str]] = {1: "[TOOL_CALLS]", 2: "[ARGS]", 3: "<eos>", 4: "<pad>"}
    skipped_token_ids = frozenset(texts)

    def token_text(self, token_id: int) -> str:
        return self.texts[token_id]


def test_a_parser_sees_the_special_tokens_of_its_format_alone(start):
    running = start(tool_call_parser="mistral")
    parsers = running.state.parsers
    plan = parsers.plan(ParserContext(), tools="auto")
    hidden = parsers.hidden(plan, SpecialTokens())
    reader = AnswerReader(plan, hidden)
    events = [event for text in ("Ok<pad>", "[TOOL_CALLS]f", "[ARGS]", "{}<eos>") for event in reader.feed(text)]
    assert merged([*events, *reader.finish()]) == [Content("Ok"), ToolCall("f"), Arguments("{}")]
    think = start(reasoning_parser="think").state.parsers
    assert think.hidden(think.plan(ParserContext(), tools="none"), SpecialTokens()) is None, (
        "its markers are plain text"
    )


def test_auto_without_a_parser_stops_the_start(start):
    running = start(enable_auto_tool_choice=True)
    with pytest.raises(ConfigError, match="tool_call_parser: the checkpoint has no response_template"):
        running.state.parsers.of_model(running.llm)
