"""Custom tools, and choices among some of the tools, as the `openai` client sends and sees them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pelton_late_import import LateImport

from pelton_plugins.server.custom_tools import (
    CustomDefinition,
    CustomFormat,
    GrammarDefinition,
    InputReader,
    arguments_of,
    as_function,
)

openai = LateImport("openai")
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
HI = [{"role": "user", "content": "Hi"}]
PLAIN = {"type": "custom", "custom": {"name": "run", "description": "Runs code."}}
LARK = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "a" /[0-9]+/'}}
REGEX = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "a[0-9]+"}}
FUNCTION = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>{"name": "run", "arguments": {"input": "print(\\"a\\")\\n"}}</tool_call>'
OTHER = '<tool_call>{"name": "get_time", "arguments": {"zone": "x"}}</tool_call>'
SHOWN = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


def custom(format):
    return {"type": "custom", "custom": {"name": "run", "format": format}}


@pytest.fixture(scope="module")
def server(run_server):
    found = run_server(tool_call_parser="hermes", max_stored_responses=3)
    found.llm.constrains = True
    return found


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def asked(server):
    return server.llm.requests[-1][1].structured_outputs


def test_a_call_of_a_custom_tool_has_its_input(server, client):
    server.llm.answer = f"Ok.{CALL}{OTHER}"
    found = client.chat.completions.create(model="fake", messages=HI, tools=[PLAIN, FUNCTION])
    (choice,) = found.choices
    assert choice.message.content == "Ok." and choice.finish_reason == "tool_calls"
    first, second = choice.message.tool_calls
    assert (first.type, first.custom.name, first.custom.input) == ("custom", "run", 'print("a")\n')
    assert second.type == "function" and second.function.arguments == '{"zone": "x"}'
    shown = server.llm.rendered["tools"][0]["function"]
    assert shown == {"name": "run", "description": "Runs code.", "parameters": SHOWN} and asked(server) is None
    chunks = client.chat.completions.create(model="fake", messages=HI, tools=[PLAIN, FUNCTION], stream=True)
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    mine = [call for call in calls if call.index == 0]
    assert mine[0].type == "custom" and mine[0].id and mine[0].custom["name"] == "run"
    assert "".join(call.custom["input"] for call in mine) == 'print("a")\n' and len(mine) > 5
    assert "".join(call.function.arguments for call in calls if call.index == 1) == '{"zone": "x"}'


def test_a_conversation_with_a_custom_call_reaches_the_template_as_a_functions(server, client):
    server.llm.answer = "Yes."
    call = {"id": "c1", "type": "custom", "custom": {"name": "run", "input": 'say "é"'}}
    messages = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
    ]
    assert (
        client.chat.completions.create(model="fake", messages=messages, tools=[PLAIN]).choices[0].message.content
        == "Yes."
    )
    function = {"name": "run", "arguments": '{"input": "say \\"é\\""}'}
    assert server.llm.rendered["messages"][1]["tool_calls"] == [{"id": "c1", "type": "function", "function": function}]
    del call["custom"]["input"]
    reply = server.post(CHAT, {"messages": messages, "tools": [PLAIN]})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "messages[1].tool_calls[0]"


def test_responses_have_custom_tool_calls(server, client):
    server.llm.answer = CALL
    tool = {"type": "custom", "name": "run", "description": "Runs code.", "format": {"type": "text"}}
    found = client.responses.create(model="fake", input="Hi", tools=[tool])
    (item,) = found.output
    assert (item.type, item.name, item.input) == ("custom_tool_call", "run", 'print("a")\n') and item.call_id
    assert found.tools[0].type == "custom" and found.status == "completed"
    events = list(client.responses.create(model="fake", input="Hi", tools=[tool], stream=True))
    kinds = [event.type for event in events]
    ordered = [kind for place, kind in enumerate(kinds) if place == 0 or kinds[place - 1] != kind]
    assert ordered == [
        "response.created", "response.in_progress", "response.output_item.added", "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip
    deltas = "".join(event.delta for event in events if event.type == "response.custom_tool_call_input.delta")
    (done,) = [event for event in events if event.type == "response.custom_tool_call_input.done"]
    assert deltas == done.input == events[-1].response.output[0].input == 'print("a")\n'
    result = {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "a"}
    client.responses.create(model="fake", input=[result], tools=[tool], previous_response_id=found.id)
    _, assistant, answer = server.llm.rendered["messages"]
    assert json.loads(assistant["tool_calls"][0]["function"]["arguments"]) == {"input": 'print("a")\n'}
    assert answer == {"role": "tool", "content": "a", "tool_call_id": item.call_id}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_the_text_of_a_named_tool_with_a_grammar_is_its_input(server, client, stream):
    server.llm.answer = '{"input": 1}'
    named = {"type": "custom", "custom": {"name": "run"}}
    found = client.chat.completions.create(
        model="fake", messages=HI, tools=[custom(LARK)], tool_choice=named, stream=stream
    )
    if stream:
        calls = [call for chunk in found for call in chunk.choices[0].delta.tool_calls or ()]
        text = "".join(call.custom["input"] for call in calls)
    else:
        text = found.choices[0].message.tool_calls[0].custom.input
    assert text == '{"input": 1}' and asked(server).grammar == LARK["grammar"]["definition"]


def test_what_holds_an_input(server):
    """A grammar is a part of a structural tag, but for the answer that is an input; without one only a forced call is held."""
    server.llm.answer = '{"input": "a1"}'
    named = {"type": "custom", "custom": {"name": "run"}}
    assert server.post(CHAT, {"messages": HI, "tools": [PLAIN], "tool_choice": named}).json()["choices"][0]["message"][
        "tool_calls"
    ][0]["custom"] == {"name": "run", "input": "a1"}
    assert asked(server).json == SHOWN
    server.post(CHAT, {"messages": HI, "tools": [custom(REGEX)], "tool_choice": named})
    assert asked(server).regex == "a[0-9]+"
    server.post(CHAT, {"messages": HI, "tools": [custom(REGEX), FUNCTION], "tool_choice": "required"})
    assert "start: /a[0-9]+/" in json.dumps(asked(server).structural_tag)
    server.llm.answer = '[{"name":"run","parameters":{"input":"a1"}}]'
    body = {"messages": HI, "tools": [custom(LARK), FUNCTION], "tool_choice": "required"}
    assert server.post(CHAT, body).json()["choices"][0]["message"]["tool_calls"][0]["custom"]["input"] == "a1"
    assert "json_text" in json.dumps(asked(server).structural_tag)
    server.post(CHAT, {"messages": HI, "tools": [custom(LARK)]})
    assert asked(server).structural_tag["format"]["type"] == "guarded"
    assert (
        LARK["grammar"]["definition"]
        in server.llm.rendered["tools"][0]["function"]["parameters"]["properties"]["input"]["description"]
    )
    server.post(RESPONSES, {"input": "x", "tools": [{"type": "custom", "name": "run", "format": {"type": "grammar", **REGEX["grammar"]}}],
                            "tool_choice": {"type": "custom", "name": "run"}})  # fmt: skip
    assert asked(server).regex == "a[0-9]+"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_tools_that_are_not_allowed_are_neither_shown_nor_called(server, client, stream):
    server.llm.answer = CALL + OTHER
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [PLAIN]}}
    found = client.chat.completions.create(
        model="fake", messages=HI, tools=[FUNCTION, PLAIN], tool_choice=choice, stream=stream
    )
    if stream:
        deltas = [chunk.choices[0].delta for chunk in found]
        text = "".join(delta.content or "" for delta in deltas)
        names = [call.custom["name"] for delta in deltas for call in delta.tool_calls or () if call.id]
    else:
        message = found.choices[0].message
        text, names = message.content, [call.custom.name for call in message.tool_calls]
    assert names == ["run"] and json.loads(text) == {"name": "get_time", "arguments": {"zone": "x"}}
    assert [tool["function"]["name"] for tool in server.llm.rendered["tools"]] == ["run"]


def test_one_of_the_allowed_tools_may_be_required(server, client):
    server.llm.answer = '[{"name":"get_time","parameters":{}}]'
    function = {"type": "function", "function": {"name": "get_time"}}
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [function]}}
    found = client.chat.completions.create(model="fake", messages=HI, tools=[FUNCTION, PLAIN], tool_choice=choice)
    assert found.choices[0].message.tool_calls[0].function.name == "get_time"
    (call,) = asked(server).json["items"]["anyOf"]
    assert call["properties"]["name"]["enum"] == ["get_time"]
    flat = [{"type": "function", "name": "get_time", "parameters": {}}, {"type": "custom", "name": "run"}]
    chosen = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_time"}]}
    response = client.responses.create(model="fake", input="Hi", tools=flat, tool_choice=chosen)
    assert response.output[0].name == "get_time" and response.tool_choice.to_dict() == chosen
    (call,) = asked(server).json["items"]["anyOf"]
    assert call["properties"]["name"]["enum"] == ["get_time"]


def allowed(*tools, mode="auto"):
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


@pytest.mark.parametrize(
    "body, param",
    [
        ({"tools": [{"type": "custom"}]}, "tools[0].custom"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "custom", "custom": {"name": ""}}]}, "tools[0].custom.name"),
        ({"tools": [PLAIN, PLAIN]}, "tools[1].custom.name"),
        ({"tools": [custom({"type": "grammar"})]}, "tools[0].custom.format.grammar"),
        ({"tools": [custom({"type": "grammar", "grammar": {"syntax": "gbnf", "definition": "x"}})]},
         "body.tools[0].custom.format.grammar.syntax"),
        ({"tools": [PLAIN], "tool_choice": {"type": "custom"}}, "tool_choice.custom"),
        ({"tools": [PLAIN], "tool_choice": {"type": "function", "function": {"name": "run"}}}, "tool_choice"),
        ({"tools": [PLAIN], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        ({"tools": [PLAIN], "tool_choice": allowed()}, "tool_choice.allowed_tools"),
        ({"tools": [PLAIN], "tool_choice": allowed(FUNCTION)}, "tool_choice.allowed_tools.tools[0]"),
        ({"tools": [PLAIN], "tool_choice": allowed(PLAIN, mode="x")}, "body.tool_choice.allowed_tools.mode"),
        ({"tool_choice": allowed(PLAIN)}, "tool_choice"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_wrong_is_named(server, body, param):
    reply = server.post(CHAT, {"messages": HI, **body})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param, reply.text


@pytest.mark.parametrize(
    "body, param",
    [
        ({"tools": [{"type": "custom", "name": "f", "format": {"type": "grammar", "syntax": "lark"}}]}, "tools[0].format"),
        ({"tools": [{"type": "custom", "name": "f"}], "tool_choice": {"type": "custom"}}, "tool_choice.name"),
        ({"tools": [{"type": "custom", "name": "f"}], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.mode"),
        ({"tools": [{"type": "custom", "name": "f"}], "tool_choice": {"type": "allowed_tools", "mode": "auto"}},
         "tool_choice.tools"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_wrong_in_a_request_for_a_response_is_named(server, body, param):
    reply = server.post(RESPONSES, {"input": "x", **body})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param, reply.text


def test_a_tool_without_its_definition_is_refused_wherever_tools_may_stand(server):
    for path in ("/tokenize", "/v1/chat/completions/render", CHAT):
        for tools in ([{"type": "function"}], [{"type": "custom"}]):
            reply = server.post(path, {"messages": HI, "tools": tools})
            assert reply.status_code == 400 and reply.json()["error"]["param"].startswith("tools[0]"), reply.text


@settings(deadline=None, max_examples=200, derandomize=True, database=None)
@given(st.text(st.characters(exclude_categories=["Cs"])), st.booleans(), st.lists(st.integers(1, 7), min_size=1))
def test_an_input_is_the_same_however_its_arguments_are_cut(text, is_ascii, sizes):
    written = json.dumps({"input": text}, indent=1) if is_ascii else arguments_of(text)
    reader, found, at = InputReader(), "", 0
    for size in sizes * (len(written) // len(sizes) + 1):
        found += reader.feed(written[at : at + size])
        at += size
    assert found + reader.finish() == text


@pytest.mark.parametrize(
    "arguments, text",
    [
        ("{}", ""), ('{"in', ""), ('{"input":"ab\\', "ab"), ('{"input":"ab\\ud83d', "ab"), ('{"input":"\\ud83dx"}', "�x"),
        ('{"patch": "x"}', '{"patch": "x"}'), ("print(1)", "print(1)"), ('{"input": 3}', '{"input": 3}'), ('{"input":"\\q"}', "\\q"),
    ],
)  # fmt: skip
def test_arguments_of_another_form_are_the_input_as_they_are(arguments, text):
    for size in range(1, len(arguments) + 1):
        reader = InputReader()
        found = "".join(reader.feed(arguments[at : at + size]) for at in range(0, len(arguments), size))
        assert found + reader.finish() == text


@pytest.mark.parametrize(
    "regex, lark",
    [("a+", "a+"), ("^a|b$", "a|b"), (r"a\$", r"a\$"), (r"a\\$", r"a\\"), ("a/b\n", r"a\/b\n"), (r"a\/b", r"a\/b")],
)
def test_a_regex_as_a_grammar(regex, lark):
    tool = CustomDefinition(
        name="f", format=CustomFormat(type="grammar", grammar=GrammarDefinition(syntax="regex", definition=regex))
    )
    assert as_function(tool)["grammar"] == f"start: /{lark}/"
