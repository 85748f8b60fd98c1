"""Functions that are strict under `tool_choice: auto`, as OpenAI's client sends them, over a model with random weights."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from pelton_e2e import serving
from pelton_late_import import LateImport

from pelton.testing.models import CHAT_TEMPLATE, EOS_ID, VOCAB_SIZE, make_tiny_checkpoint

openai = LateImport("openai")
MESSAGES = [{"role": "user", "content": "Hello there"}]
TEMPLATE = (
    CHAT_TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
CLOSED = {"chat_template_kwargs": {"enable_thinking": False}}
TOOL_CALL = VOCAB_SIZE - 1
"""Id of the token that begins a call."""


def name_token(checkpoint: Path, token_id: int, text: str) -> None:
    """Let the last token that was merged stand for a text of its own, as tokenizers of models that call tools have it."""
    path = checkpoint / "tokenizer.json"
    read = json.loads(path.read_text())
    (merged,) = [name for name, one in read["model"]["vocab"].items() if one == token_id]
    del read["model"]["vocab"][merged]
    read["model"]["merges"] = [
        pair
        for pair in read["model"]["merges"]
        if "".join(pair if isinstance(pair, list) else pair.split(" ")) != merged
    ]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    read["added_tokens"].append({"id": token_id, "content": text, **flags})
    path.write_text(json.dumps(read))


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    folder = tmp_path_factory.mktemp("strict")
    checkpoint = make_tiny_checkpoint(folder / "tiny", "llama")
    name_token(checkpoint, TOOL_CALL, "<tool_call>")
    flags = (
        "--served-model-name", "tiny", "--max-num-seqs", "4", "--tool-call-parser", "hermes", "--reasoning-parser", "think",
        "--chat-template", TEMPLATE,
    )  # fmt: skip
    with serving(str(checkpoint), *flags, log=folder / "log") as (url, _):
        yield openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)


def test_calls_of_the_models_choice_keep_to_the_schema_of_a_strict_function(client):
    """A model with random weights that is made to begin a call, with nothing else to lead it. Without `strict` it writes anything."""
    schema = {"type": "object", "properties": {"x": {"enum": [1, 2]}, "s": {"enum": ["a", "b"]}}, "required": ["x", "s"],
              "additionalProperties": False}  # fmt: skip
    function = {"name": "f", "parameters": schema, "strict": True}
    begins = {"logit_bias": {str(TOOL_CALL): 100, str(EOS_ID): 50}, "parallel_tool_calls": False}
    more = {"model": "tiny", "messages": MESSAGES, "max_tokens": 300, **begins}
    for body in (CLOSED, {}):
        for stream in (False, True):
            answer = client.chat.completions.create(
                **more, tools=[{"type": "function", "function": function}], stream=stream, extra_body=body
            )
            if stream:
                calls = [call for chunk in answer for call in chunk.choices[0].delta.tool_calls or ()]
                text = "".join(call.function.arguments or "" for call in calls)
            else:
                (call,) = answer.choices[0].message.tool_calls
                assert call.function.name == "f" and answer.choices[0].finish_reason == "tool_calls"
                text = call.function.arguments
            found = json.loads(text)
            assert found["x"] in (1, 2) and found["s"] in ("a", "b")
    loose = {"type": "function", "function": {"name": "f", "parameters": schema}}
    assert not client.chat.completions.create(**more, tools=[loose]).choices[0].message.tool_calls
    given = client.responses.create(
        model="tiny", input="Hi", max_output_tokens=300, tools=[{"type": "function", **function}], parallel_tool_calls=False,
        extra_body={"logit_bias": begins["logit_bias"]},
    )  # fmt: skip
    (item,) = [one for one in given.output if one.type == "function_call"]
    assert json.loads(item.arguments)["s"] in ("a", "b")
    bad = {"type": "object", "properties": {"a": {"type": "array", "contains": {"type": "string"}}}}
    with pytest.raises(
        openai.BadRequestError, match="The schema of g at /properties/a/contains cannot be enforced"
    ) as refused:
        client.chat.completions.create(
            **more, tools=[{"type": "function", "function": {"name": "g", "strict": True, "parameters": bad}}]
        )
    assert refused.value.param == "tools"


WORD = {"type": "json_schema", "json_schema": {"name": "word", "schema": {"enum": ["x", "y"]}}}


def test_with_a_response_format_an_answer_is_that_or_a_call(client):
    """A model with random weights, pushed to begin a call or not; with strict functions and without."""
    schema = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"], "additionalProperties": False}
    more = {
        "model": "tiny",
        "messages": MESSAGES,
        "max_tokens": 300,
        "response_format": WORD,
        "parallel_tool_calls": False,
    }
    url = str(client.base_url).replace("/v1/", "/tokenize")
    (quote,) = httpx.post(url, json={"prompt": '"', "add_special_tokens": False}).json()["tokens"]
    for strict in (True, False):
        tools = [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": strict}}]
        for thought in (CLOSED, {}):
            called = client.chat.completions.create(
                **more, tools=tools, extra_body=thought, logit_bias={str(TOOL_CALL): 100, str(EOS_ID): 50}
            )
            (call,) = called.choices[0].message.tool_calls
            assert call.function.name == "f" and called.choices[0].message.content is None
            assert not strict or json.loads(call.function.arguments)["x"] in (1, 2)
        plain = client.chat.completions.create(**more, tools=tools, extra_body=CLOSED, logit_bias={str(quote): 100})
        message = plain.choices[0].message
        assert json.loads(message.content) in ("x", "y") and not message.tool_calls


def test_an_input_keeps_to_its_grammar_whoever_chooses_the_call(client):
    """Lines of digits, within the JSON of a call that the model chooses or has to make, and as the text of one that is named."""
    grammar = {"syntax": "lark", "definition": r'start: (/[0-9]"/ "\n"){1,3}'}
    tool = {"type": "custom", "custom": {"name": "lines", "format": {"type": "grammar", "grammar": grammar}}}
    begins = {"logit_bias": {str(TOOL_CALL): 100, str(EOS_ID): 50}, "parallel_tool_calls": False}
    more = {"model": "tiny", "messages": MESSAGES, "tools": [tool], "max_tokens": 300, "extra_body": CLOSED, **begins}
    for choice in ("auto", "required", {"type": "custom", "custom": {"name": "lines"}}):
        (call,) = client.chat.completions.create(**more, tool_choice=choice).choices[0].message.tool_calls
        assert re.fullmatch(r'([0-9]"\n){1,3}', call.custom.input), choice
    flat = {"type": "custom", "name": "lines", "format": {"type": "grammar", **grammar}}
    items = client.responses.create(
        model="tiny", input="Hi", max_output_tokens=300, tools=[flat], extra_body={"logit_bias": begins["logit_bias"]}
    ).output
    assert any(item.type == "custom_tool_call" and re.fullmatch(r'([0-9]"\n){1,3}', item.input) for item in items)
    tool["custom"]["format"]["grammar"]["definition"] = "start: /a$/"
    with pytest.raises(openai.BadRequestError, match="The grammar of lines cannot be held within a call") as refused:
        client.chat.completions.create(**more)
    assert refused.value.param == "tools"
