"""The same text as transformers, clear errors, and no harm from a hostile template."""

import time

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from pelton import limits
from pelton.errors import ConfigError, NotSupportedError, RequestError
from pelton_plugins.loaders.text import template_guard
from pelton_plugins.loaders.text.chat_template import ChatTemplate, read_template

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = """
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {{- "You have access to the following functions.\\n\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}" }}
        {{- "<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable and message.content is not string %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
QWEN3 = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- if '</think>' in content %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- for tool_call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' ~ tool_call.function.name ~ '", "arguments": ' }}
            {{- tool_call.function.arguments | tojson ~ '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<tool_response>\\n' ~ content ~ '\\n</tool_response>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)
GENERATION_TAG = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% if loop.index > 3 %}{% break %}{% endif %}{% endif %}{% endfor %}"
)
SPECIAL = {"bos_token": "<bos>", "eos_token": "<eos>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'It\'s <b>ä日</b> & "so"',
            "parameters": {"type": "object", "properties": {}},
        },
    }
]
TALK = [
    {"role": "user", "content": "  Hi <there> ü日\n"},
    {"role": "assistant", "content": "Hello! "},
    {"role": "user", "content": "Bye"},
]
SYSTEM = [{"role": "system", "content": " Be brief. "}, *TALK]
CALLS = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich", "n": 1.5}}}
        ],
    },
    {"role": "tool", "content": "rain"},
]
PREFILL = [{"role": "user", "content": "Count"}, {"role": "assistant", "content": "One, two,"}]


@pytest.mark.parametrize(
    "template, messages, options",
    [
        pytest.param(CHATML, TALK, {}, id="chatml"),
        pytest.param(CHATML, SYSTEM, {"add_generation_prompt": False}, id="chatml-system"),
        pytest.param(
            CHATML, PREFILL, {"continue_final_message": True, "add_generation_prompt": False}, id="chatml-continue"
        ),
        pytest.param(LLAMA3, TALK, {}, id="llama3"),
        pytest.param(LLAMA3, SYSTEM, {"tools": TOOLS}, id="llama3-tools"),
        pytest.param(LLAMA3, CALLS, {"tools": TOOLS}, id="llama3-calls"),
        pytest.param(LLAMA3, TALK, {"extra": {"date_string": "today"}}, id="llama3-kwargs"),
        pytest.param(
            LLAMA3, PREFILL, {"continue_final_message": True, "add_generation_prompt": False}, id="llama3-continue"
        ),
        pytest.param(QWEN3, SYSTEM, {}, id="qwen3"),
        pytest.param(QWEN3, SYSTEM, {"tools": TOOLS, "extra": {"enable_thinking": False}}, id="qwen3-tools"),
        pytest.param(QWEN3, CALLS, {"tools": TOOLS}, id="qwen3-calls"),
        pytest.param(GEMMA, TALK, {}, id="gemma"),
        pytest.param(GENERATION_TAG, TALK, {}, id="generation-tag-and-break"),
    ],
)
def test_renders_as_transformers_does(template, messages, options):
    theirs = {"add_generation_prompt": True, **options}
    extra = theirs.pop("extra", {})
    expected, _ = render_jinja_template([messages], chat_template=template, **theirs, **extra, **SPECIAL)
    assert ChatTemplate(template).render(messages, special_tokens=SPECIAL, **options) == expected[0]


def test_rendering_leaves_the_messages_as_they_were():
    messages = [dict(message) for message in PREFILL]
    ChatTemplate(CHATML).render(messages, continue_final_message=True, add_generation_prompt=False)
    assert messages == PREFILL


@pytest.mark.parametrize(
    "call",
    [
        "'<sep>' + call['function']['name'] + '\\n```json\\n' + call['function']['arguments'] + '\\n```'",
        "call['function']['arguments'] + '<end>'",
        "call.function.arguments",
        "call.function.name ~ call.function.arguments ~ '.'",
        "call.function.arguments | string",
    ],
)
def test_templates_that_put_arguments_into_a_text_find_what_the_model_wrote(call):
    """As DeepSeek's do; the text is what transformers makes of it."""
    source = (
        f"{{% for m in messages %}}{{% for call in m.tool_calls or [] %}}{{{{ {call} }}}}{{% endfor %}}{{% endfor %}}"
    )
    function = {"name": "f", "arguments": '{"city":  "Zürich", "n": 1.50}'}
    messages = [{"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}]
    (expected,), _ = render_jinja_template([messages], chat_template=source)
    assert "1.50" in expected
    assert ChatTemplate(source).render(messages, add_generation_prompt=False) == expected


@pytest.mark.parametrize("none", [[], None])
def test_an_answer_without_calls_may_be_sent_back_as_clients_hold_it(none):
    """With an empty list, which Llama's template would take for calls."""
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    sent_back = [messages[0], {**messages[1], "tool_calls": none, "refusal": None}, messages[2]]
    template = ChatTemplate(LLAMA3)
    assert template.render(sent_back) == template.render(messages)


def test_tool_arguments_given_as_json_text_become_mappings():
    function = {"name": "weather", "arguments": '{"city": "Zürich", "n": 1.5}'}
    as_text = [CALLS[0], {**CALLS[1], "tool_calls": [{"type": "function", "function": function}]}, CALLS[2]]
    template = ChatTemplate(LLAMA3)
    assert template.render(as_text, tools=TOOLS) == template.render(CALLS, tools=TOOLS)
    function["arguments"] = "{city"
    with pytest.raises(RequestError, match=r"messages\[1\].*not valid JSON") as caught:
        template.render(as_text)
    assert caught.value.param == "messages"


def test_text_parts_become_a_string_unless_the_template_reads_parts():
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert ChatTemplate("{{ messages[0]['content'] }}").render(parts) == "a\nb"
    reader = "{% for part in messages[0]['content'] %}[{{ part['type'] }}:{{ part.text }}]{% endfor %}"
    assert ChatTemplate(reader).render(parts) == "[text:a][text:b]"


@pytest.mark.parametrize("field", ["messages", "tools", "documents", "chat_template_kwargs"])
def test_what_is_nested_too_deeply_is_named(field):
    deep: dict = {}
    for _ in range(70):
        deep = {"a": deep}
    given = {"tools": {"tools": [deep]}, "documents": {"documents": [deep]}, "chat_template_kwargs": {"extra": deep}}
    messages = [{**TALK[0], "x": deep}] if field == "messages" else TALK
    with pytest.raises(RequestError, match=f"^{field} are nested more than 64 levels deep") as refused:
        ChatTemplate(CHATML).render(messages, **given.get(field, {}))
    assert refused.value.param == field


def test_a_picture_is_refused_with_its_type():
    picture = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    with pytest.raises(NotSupportedError, match=r"'image_url'.*text parts only"):
        ChatTemplate(CHATML).render(picture)


@pytest.mark.parametrize(
    "template, messages, message",
    [
        pytest.param(GEMMA, SYSTEM, "System role not supported", id="raise-exception"),
        pytest.param("{{ messages[3].content.x }}", TALK, "UndefinedError", id="undefined"),
        pytest.param("{{ messages + 1 }}", TALK, "TypeError", id="type"),
        pytest.param(CHATML, ["text"], r"messages\[0\] is a str", id="not-an-object"),
        pytest.param(CHATML, [{"role": "user", "content": object()}], "plain JSON", id="not-json"),
        pytest.param("{{ ''.__class__.__mro__ }}", TALK, "SecurityError|unsafe", id="sandbox"),
        pytest.param("{{ messages.append(1) }}", TALK, "SecurityError|unsafe", id="immutable"),
    ],
)
def test_what_a_template_refuses_is_the_clients_error(template, messages, message):
    with pytest.raises(RequestError, match=message) as caught:
        ChatTemplate(template).render(messages)
    assert caught.value.param == "messages" and caught.value.status == 400


@pytest.mark.parametrize("name", ["messages", "chat_template", "add_generation_prompt", "_x", "a b", ""])
def test_kwargs_cannot_replace_what_the_engine_gives(name):
    with pytest.raises(RequestError) as caught:
        ChatTemplate(CHATML).render(TALK, extra={name: "x"})
    assert caught.value.param == "chat_template_kwargs"


@pytest.mark.parametrize(
    "source, message",
    [
        pytest.param("{% for x in %}", "line 1", id="syntax"),
        pytest.param("{{ x | no_such_filter }}", "no_such_filter", id="filter"),
        pytest.param("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "compiled|sound", id="deep"),
        pytest.param("x" * (limits.MAX_CHAT_TEMPLATE_CHARS + 1), "characters", id="long"),
    ],
)
def test_a_broken_template_is_the_operators_error(source, message):
    with pytest.raises(ConfigError, match=message):
        ChatTemplate(source)


SIXTY = "{% for i in range(60) %}"
DOUBLE = "{% set ns = namespace(x='xxxxxxxxxx') %}{% for i in range(60) %}"
HOSTILE = {
    "nested-loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
    "big-range": "{{ range(10**12)|list }}",
    "power": "{{ 9**(9**9) }}",
    "squares": "{% set ns = namespace(x=3) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "multiply": "{{ 'x' * 10**11 }}",
    "concat": DOUBLE + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "plus": DOUBLE + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "block-set": DOUBLE + "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
    "join": DOUBLE + "{% set ns.x = [ns.x, ns.x]|join %}{% endfor %}",
    "join-method": DOUBLE + "{% set ns.x = ns.x.join([ns.x, ns.x]) %}{% endfor %}",
    "replace": DOUBLE + "{% set ns.x = ns.x.replace('x', 'xxxxxxxxxxxxxxxx') %}{% endfor %}",
    "replace-filter": DOUBLE + "{% set ns.x = ns.x|replace('', ns.x) %}{% endfor %}",
    "format": "{{ '%99999999999d' % 1 }}",
    "format-star": "{{ '%*d' % (10**10, 1) }}",
    "format-method": "{{ '{:99999999999}'.format(1) }}",
    "format-nested": "{{ '{:{}}'.format(1, 10**10) }}",
    "format-numbered": "{{ '{0:{1}}'.format(1, 10**10) }}",
    "format-map": "{{ '{a:99999999999}'.format_map({'a': 1}) }}",
    "format-filter": "{{ '%99999999999d'|format(1) }}",
    "ljust": "{{ 'x'.ljust(10**11) }}",
    "expandtabs": "{{ '\\t\\t\\t'.expandtabs(10**10) }}",
    "to-bytes": "{{ (1).to_bytes(10**10, 'big') }}",
    "indent": "{{ 'a\\nb'|indent(10**10) }}",
    "tojson-indent": "{{ [1]|tojson(indent=10**10) }}",
    "shared-list": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "shared-dict": "{% set ns = namespace(x=1) %}"
    + SIXTY
    + "{% set ns.x = {'a': ns.x, 'b': ns.x} %}{% endfor %}{{ ns.x|tojson }}",
    "shared-namespace": "{% set ns = namespace(x=1) %}"
    + SIXTY
    + "{% set ns.x = namespace(a=ns.x, b=ns.x) %}{% endfor %}{{ ns.x }}",
    "list-plus": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "list-sum": "{{ [[1], [2]]|sum(start=[]) }}",
    "macro": "{% macro m(n) %}{{ m(n + 1) }}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "recursive-loop": "{% for x in [[[]]] recursive %}{{ loop(range(100)) }}{% endfor %}",
    "slices": DOUBLE.replace("range(60)", "range(20)") + "{% set ns.x = ns.x + ns.x %}{% endfor %}"
    "{% set k = namespace(l=[]) %}{% for i in range(99999) %}{% set k.l = k.l + [ns.x[1:]] %}{% endfor %}",
    "output": "{% for i in range(99999) %}" + "x" * 1000 + "{% endfor %}",
    "strftime": "{{ strftime_now('%99999999d') }}",
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_template_is_stopped_soon(source, monkeypatch):
    """Within a fourth of what it may take. With the limits as they are: server/test_real_engine.py."""
    for name in ("MAX_SECONDS", "MAX_NODES", "MAX_TURNS"):
        monkeypatch.setattr(template_guard, name, getattr(template_guard, name) / 4)
    template = ChatTemplate(source)
    start = time.process_time()
    with pytest.raises(RequestError, match=r"stopped|fails|refuses"):
        template.render(TALK)
    assert time.process_time() - start < 2


def test_a_stopped_template_does_not_spoil_the_next_rendering():
    template = ChatTemplate("{% for i in range(9999) %}{{ messages[0].content }}{% endfor %}")
    with pytest.raises(RequestError, match=r"stopped"):
        template.render([{"role": "user", "content": "x" * 10_000}])
    assert template.render([{"role": "user", "content": "y"}]) == "y" * 9999


def test_formatting_with_values_works():
    source = "{{ '{}-{name}'.format(1, name='x') }} {{ '%s:%03d' % ('a', 7) }} {{ '%s'|format(messages[0].role) }}"
    assert ChatTemplate(source).render(TALK) == "1-x a:007 user"


def test_the_prompts_length_is_bounded():
    copies = limits.MAX_TEMPLATE_OUTPUT_CHARS // 2**20
    template = ChatTemplate("{% for i in range(n) %}{{ messages[0].content }}{% endfor %}")
    message = [{"role": "user", "content": "x" * 2**20}]
    assert len(template.render(message, extra={"n": copies})) == limits.MAX_TEMPLATE_OUTPUT_CHARS
    with pytest.raises(RequestError, match="more than 16777216 characters"):
        template.render(message, extra={"n": copies + 1})


def test_a_long_honest_conversation_renders():
    messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": "word " * 500} for i in range(2001)]
    assert len(ChatTemplate(LLAMA3).render(messages)) > 5_000_000


@pytest.mark.parametrize("given, expected", [("{{ 1 }}", "{{ 1 }}"), ("a\nb", "a\nb")])
def test_the_setting_takes_a_template_itself(given, expected):
    assert read_template(given) == expected


def test_the_setting_takes_a_file_and_names_one_that_is_missing(tmp_path):
    file = tmp_path / "t.jinja"
    file.write_text("{{ 2 }}")
    assert read_template(str(file)) == "{{ 2 }}"
    with pytest.raises(ConfigError, match=r"no such file"):
        read_template(str(tmp_path / "none.jinja"))
