"""Offers the parsers of tool calls and of reasoning."""

from __future__ import annotations

from collections.abc import Sequence

from pelton.entries import Entry
from pelton.hookspecs import hookimpl

PELTON_API = ">=1.2,<2"

_HOME = "pelton_plugins.parsers"


@hookimpl
def pelton_tool_parsers() -> Sequence[Entry]:
    hermes = f"{_HOME}.json_formats:HermesParser"
    coder = f"{_HOME}.xml_calls:Qwen3CoderParser"
    pythonic = f"{_HOME}.pythonic:PythonicParser"
    return [
        Entry(name="hermes", load=hermes, doc="<tool_call> with a JSON object: Hermes, Qwen 2.5, Qwen 3, Granite 4"),
        Entry(name="qwen", load=hermes, doc="as hermes"),
        Entry(name="qwen3_coder", load=coder, doc="<function=NAME><parameter=KEY>: Qwen 3 Coder, Qwen 3.5"),
        Entry(name="qwen3_xml", load=coder, doc="as qwen3_coder"),
        Entry(name="llama3_json", load=f"{_HOME}.json_formats:Llama3JsonParser", doc="a JSON object: Llama 3.1, 3.2"),
        Entry(name="llama4_pythonic", load=pythonic, doc="a list of Python calls: Llama 4"),
        Entry(name="pythonic", load=pythonic, doc="as llama4_pythonic: Llama 3.2, ToolACE"),
        Entry(name="mistral", load=f"{_HOME}.json_formats:MistralParser", doc="[TOOL_CALLS], in all its versions"),
        Entry(name="deepseek_v3", load=f"{_HOME}.deepseek:DeepSeekV3Parser", doc="DeepSeek V3 and R1"),
        Entry(name="deepseek_v31", load=f"{_HOME}.deepseek:DeepSeekV31Parser", doc="DeepSeek V3.1"),
        Entry(name="deepseek_v32", load=f"{_HOME}.dsml:DSMLParser", doc="<｜DSML｜invoke>: DeepSeek V3.2"),
        Entry(name="deepseek_v4", load=f"{_HOME}.dsml:DSMLParser", doc="as deepseek_v32: DeepSeek V4"),
        Entry(name="granite", load=f"{_HOME}.json_formats:GraniteParser", doc="<|tool_call|> with a list: Granite 3"),
        Entry(name="openai", load=f"{_HOME}.harmony:HarmonyParser", doc="Harmony: gpt-oss"),
        Entry(name="gpt_oss", load=f"{_HOME}.harmony:HarmonyParser", doc="as openai"),
        Entry(name="json_calls", load=f"{_HOME}.json_formats:JsonCallsParser", doc="a list of calls and nothing else"),
        Entry(
            name="response_template",
            load=f"{_HOME}.response_template:ResponseTemplateParser",
            doc="what the checkpoint says itself",
        ),
    ]


@hookimpl
def pelton_reasoning_parsers() -> Sequence[Entry]:
    think = f"{_HOME}.reasoning:ThinkParser"
    return [
        Entry(name="think", load=think, doc="<think>, in the answer or in the prompt"),
        Entry(name="qwen3", load=think, doc="as think"),
        Entry(
            name="deepseek_r1", load=f"{_HOME}.reasoning:DeepSeekR1Parser", doc="the same; thinks first without a tag"
        ),
        Entry(name="mistral", load=f"{_HOME}.reasoning:MistralReasoningParser", doc="[THINK]: Magistral"),
        Entry(
            name="granite",
            load=f"{_HOME}.reasoning:GraniteReasoningParser",
            doc='"Here is my thought process:": Granite 3.2',
        ),
        Entry(name="openai_gptoss", load=f"{_HOME}.harmony:HarmonyParser", doc="Harmony: gpt-oss"),
        Entry(name="gpt_oss", load=f"{_HOME}.harmony:HarmonyParser", doc="as openai_gptoss"),
        Entry(
            name="response_template",
            load=f"{_HOME}.response_template:ResponseTemplateParser",
            doc="what the checkpoint says itself",
        ),
    ]
