"""Berkeley's function-calling data through every tool parser, judged by its own checker.

    python tests/tools/bfcl_parsers.py FOLDER     # bfcl-eval's wheel, unpacked; its dependencies are not needed

Each case's right answer is written as a model of each format writes it, streamed in random pieces, and parsed; then
`bfcl_eval`'s checker compares names, types and values. A line for each format: how many of how many are right.
"""

from __future__ import annotations

import json
import random
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pelton.parsing.interface import Arguments, OutputParser, ParserContext, ToolCall
from pelton_plugins.parsers import deepseek, harmony, json_formats, pythonic, xml_calls
from pelton_plugins.parsers.dsml import DSMLParser

FILES = (
    "simple_python", "multiple", "parallel", "parallel_multiple", "live_simple", "live_multiple", "live_parallel",
    "live_parallel_multiple",
)  # fmt: skip
TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}
Calls = list[tuple[str, dict[str, Any]]]


def as_schema(value: Any) -> Any:
    """The data's own types as JSON schema's."""
    if isinstance(value, dict):
        return {
            key: TYPES.get(one, one) if key == "type" and isinstance(one, str) else as_schema(one)
            for key, one in value.items()
        }
    return [as_schema(one) for one in value] if isinstance(value, list) else value


def chosen(options: Any) -> Any:
    """The first right value; "" (may be left out) is none."""
    value = next((one for one in options if one != ""), "") if isinstance(options, list) else options
    if isinstance(value, dict):
        return {key: chosen(one) for key, one in value.items() if one != [""]}
    if isinstance(value, list):
        return [{key: chosen(inner) for key, inner in one.items()} if isinstance(one, dict) else one for one in value]
    return value


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def coder(calls: Calls) -> str:
    def parameter(key: str, value: Any) -> str:
        return f"<parameter={key}>\n{value if isinstance(value, str) else dumps(value)}\n</parameter>\n"

    return "\n".join(
        f"<tool_call>\n<function={name}>\n{''.join(parameter(k, v) for k, v in given.items())}</function>\n</tool_call>"
        for name, given in calls
    )


def dsml(calls: Calls) -> str:
    def parameter(key: str, value: Any) -> str:
        is_text = isinstance(value, str)
        text = value if is_text else dumps(value)
        return f'<｜DSML｜parameter name="{key}" string="{str(is_text).lower()}">{text}</｜DSML｜parameter>\n'

    inner = "".join(
        f'<｜DSML｜invoke name="{name}">\n{"".join(parameter(k, v) for k, v in given.items())}</｜DSML｜invoke>\n'
        for name, given in calls
    )
    return f"<｜DSML｜function_calls>\n{inner}</｜DSML｜function_calls>"


def v3(calls: Calls) -> str:
    inner = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{dumps(given)}\n```<｜tool▁call▁end｜>"
        for name, given in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def v31(calls: Calls) -> str:
    inner = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{dumps(given)}<｜tool▁call▁end｜>" for name, given in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def in_channels(calls: Calls) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{dumps(given)}<|call|>"
        for name, given in calls
    )


def listed(calls: Calls, key: str = "arguments") -> str:
    return dumps([{"name": name, key: given} for name, given in calls])


def in_python(calls: Calls) -> str:
    return "[" + ", ".join(f"{n}({', '.join(f'{k}={v!r}' for k, v in given.items())})" for n, given in calls) + "]"


FORMATS: Mapping[str, tuple[type[OutputParser], Callable[[Calls], str]]] = {
    "hermes": (json_formats.HermesParser, lambda calls: "\n".join(
        f"<tool_call>\n{dumps({'name': n, 'arguments': g})}\n</tool_call>" for n, g in calls)),
    "qwen3_coder": (xml_calls.Qwen3CoderParser, coder),
    "llama3_json": (json_formats.Llama3JsonParser, lambda calls: "; ".join(
        dumps({"name": n, "parameters": g}) for n, g in calls)),
    "llama4_pythonic": (pythonic.PythonicParser, in_python),
    "mistral": (json_formats.MistralParser, lambda calls: "[TOOL_CALLS]" + listed(calls)),
    "mistral v11": (json_formats.MistralParser, lambda calls: "".join(f"[TOOL_CALLS]{n}[ARGS]{dumps(g)}" for n, g in calls)),
    "deepseek_v3": (deepseek.DeepSeekV3Parser, v3),
    "deepseek_v31": (deepseek.DeepSeekV31Parser, v31),
    "deepseek_v32": (DSMLParser, dsml),
    "granite": (json_formats.GraniteParser, lambda calls: "<|tool_call|>" + listed(calls)),
    "gpt_oss": (harmony.HarmonyParser, in_channels),
    "json_calls": (json_formats.JsonCallsParser, lambda calls: listed(calls, "parameters")),
}  # fmt: skip


def parsed(parser: OutputParser, text: str, chooser: random.Random) -> list[dict[str, Any]]:
    """The calls of an answer that comes in pieces of 1 to 9 characters."""
    events: list[Any] = []
    while text:
        count = chooser.randrange(1, 10)
        events += parser.feed(text[:count])
        text = text[count:]
    events += parser.finish()
    names, arguments = [], []
    for event in events:
        if isinstance(event, ToolCall):
            names.append(event.name)
            arguments.append("")
        elif isinstance(event, Arguments):
            arguments[-1] += event.text
    return [{name: json.loads(given)} for name, given in zip(names, arguments, strict=True)]


def cases(folder: Path) -> Iterator[tuple[str, list[Any], list[Any]]]:
    for name in FILES:
        file = f"BFCL_v4_{name}.json"
        questions = {one["id"]: one for one in map(json.loads, (folder / file).read_text().splitlines())}
        for answer in map(json.loads, (folder / "possible_answer" / file).read_text().splitlines()):
            yield name, questions[answer["id"]]["function"], answer["ground_truth"]


def judge(folder: Path) -> dict[str, tuple[int, int, str]]:
    """How many cases of each format are right, of how many, and the first wrong one."""
    sys.path.insert(0, str(folder))
    stub = types.ModuleType(
        "bfcl_eval.constants.model_config"
    )  # of all models' clients: the checker asks one thing of it
    plain = types.SimpleNamespace(underscore_to_dot=False)
    stub.MODEL_CONFIG_MAPPING = {"pelton": plain}  # type: ignore[attr-defined]
    sys.modules[stub.__name__] = stub
    from bfcl_eval.constants.enums import Language
    from bfcl_eval.eval_checker.ast_eval.ast_checker import ast_checker

    found = []
    num_left_out = 0
    for category, functions, truth in cases(folder / "bfcl_eval/data"):
        calls = [
            (function, {key: chosen(options) for key, options in given.items() if chosen(options) != ""})
            for one in truth
            for function, given in one.items()
        ]

        def check(answer: Any, functions: Any = functions, truth: Any = truth, category: str = category) -> Any:
            return ast_checker(functions, answer, truth, Language.PYTHON, category, "pelton")

        if check([{name: given} for name, given in calls])["valid"]:  # some of the data's own answers are none
            context = ParserContext(tools=[{**one, "parameters": as_schema(one["parameters"])} for one in functions])
            found.append((context, calls, check))
        else:
            num_left_out += 1
    print(f"{len(found)} cases, {num_left_out} left out, whose own answer the checker refuses", flush=True)
    judged = {}
    for name, (parser, write) in FORMATS.items():
        chooser, right, first_wrong = random.Random(0), 0, ""
        for context, calls, check in found:
            text = write(calls)
            try:
                verdict = check(parsed(parser(context), text, chooser))
            except ValueError as error:
                verdict = {"valid": False, "error": error}
            right += verdict["valid"]
            if not verdict["valid"] and not first_wrong:
                first_wrong = f"{text[:300]!r}: {verdict['error']}"
        judged[name] = right, len(found), first_wrong
        print(f"{name:16} {right}{'   first wrong: ' + first_wrong if first_wrong else ''}", flush=True)
    return judged


if __name__ == "__main__":
    judge(Path(sys.argv[1]))
