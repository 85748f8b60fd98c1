"""Requests that ended, hung or opened engines like this one, by the class of their advisories: each is refused with a clear 4xx,
and the next request is answered. `ADVISORIES` says of each one where its test is, also of those that need no request."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from pelton_e2e import greedy, make_llm

from pelton.parsing.interface import ParserContext
from pelton.testing.models import make_tiny_checkpoint
from pelton_plugins.parsers.plugin import pelton_tool_parsers

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
DEEP = "[" * 50_000 + "]" * 50_000


def text(**fields: object) -> tuple[str, dict[str, object]]:
    return COMPLETIONS, {"prompt": "ab", "max_tokens": 1, **fields}


def chat(content: object = "hi", **fields: object) -> tuple[str, dict[str, object]]:
    return CHAT, {"messages": [{"role": "user", "content": content}], "max_tokens": 1, **fields}


def part(**fields: object) -> tuple[str, dict[str, object]]:
    return chat([fields])


POISON = {
    # Deserialisation: CVE-2025-62164, a pickled tensor as prompt embeddings.
    "pickled embeddings": text(prompt=None, prompt_embeds="gASVDAAAAAAAAACMBG9zLg=="),
    "embeddings that are no base64": text(prompt_embeds="\u0000"),
    # Code by template: CVE-2025-61620, CVE-2025-62426, CVE-2026-5760.
    "own template": chat(chat_template="{{ ''.__class__.__mro__ }}"),
    "template by kwargs": chat(chat_template_kwargs={"chat_template": "{% for x in range(10**9) %}{% endfor %}"}),
    "tokenize by kwargs": chat(chat_template_kwargs={"tokenize": False, "chat_template": "x"}),
    "code by media options": chat(mm_processor_kwargs={"code_revision": "evil"}),
    # Server-side requests and files: CVE-2025-6242, CVE-2026-24779, CVE-2026-25960.
    "file as image": part(type="image_url", image_url={"url": "file:///etc/passwd"}),
    "metadata service as image": part(type="image_url", image_url={"url": "http://169.254.169.254/latest/meta-data"}),
    "backslash in a host": part(type="image_url", image_url={"url": "http://good.example\\@127.0.0.1/"}),
    "video": part(type="video_url", video_url={"url": "http://127.0.0.1:1/x.mp4"}),
    "audio": part(type="input_audio", input_audio={"data": "AAAA", "format": "wav"}),
    # Sizes without a bound: CVE-2026-34756, GHSA-wpww-v874-ph2p, GHSA-87x5-vmc3-756j, GHSA-4xqp-c3mv-qff7.
    "n": text(n=10**9),
    "n beyond 64 bits": text(n=2**70),
    "prompts": text(prompt=["a"] * 5000),
    "prompts times n": text(prompt=["a"] * 2000, n=100),
    "salt": text(cache_salt="x" * 10**6),
    "min_tokens": text(min_tokens=10**9),
    "max_tokens": text(max_tokens=10**12),
    "stop strings": text(stop=["x"] * 10_000),
    "long stop string": text(stop="x" * 10**6),
    "stop ids": text(stop_token_ids=list(range(100_000))),
    "bias": text(logit_bias={str(i): 1 for i in range(50_000)}),
    "bad words": text(bad_words=["x"] * 10_000),
    "messages": (CHAT, {"messages": [{"role": "user", "content": "a"}] * 10_000}),
    "timeout": text(timeout_s=1e308),
    "priority": text(priority=2**70),
    "seed": text(seed=2**70),
    # One request that ends the engine: GHSA-25q3-v2hm-8vpf, GHSA-55m4-88pw-2875, GHSA-7h4p-rffg-7823, GHSA-8wr5-jm2h-8r4f.
    "negative token id": text(prompt=[-1]),
    "token id beyond the vocabulary": text(prompt=[2**31]),
    "token id beyond 64 bits": text(prompt=[2**70]),
    "token id as a float": text(prompt=[1.5]),
    "token ids mixed with text": text(prompt=[1, "a"]),
    "negative allowed id": text(allowed_token_ids=[-1]),
    "no allowed id": text(allowed_token_ids=[]),
    "bias of a negative id": text(logit_bias={"-1": 1.0}),
    "negative temperature": text(temperature=-1e308),
    "huge penalty": text(repetition_penalty=1e308),
    "zero penalty": text(repetition_penalty=0),
    "top_p": text(top_p=-0.5),
    "empty prompt": text(prompt=[]),
    "prompt of no prompts": text(prompt=[[]]),
    "role alone": (CHAT, {"messages": [{"role": "user"}]}),
    "no messages": (CHAT, {"messages": []}),
    # Grammars and schemas: CVE-2025-48944, CVE-2025-29770.
    "constraint of two kinds": text(structured_outputs={"regex": "a", "json": "{}"}),
    "schema that is a number": chat(response_format={"type": "json_schema", "json_schema": 3}),
    "unknown format": chat(response_format={"type": "yaml"}),
    "tool without a name": chat(tools=[{"type": "function", "function": {}}]),
    "tool choice of a number": chat(tools=[], tool_choice=3),
}  # fmt: skip

RAW = {
    "NaN": b'{"prompt": "a", "temperature": NaN}',
    "Infinity": b'{"prompt": "a", "top_p": Infinity}',
    "1e400": b'{"prompt": "a", "temperature": 1e400}',
    "half a pair": b'{"prompt": "\\ud800"}',
    "no utf-8": b'{"prompt": "\xff"}',
    "deep": b'{"prompt": ' + DEEP.encode() + b"}",
    "many digits": b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
    "a list": b"[]",
    "nothing": b"",
    "cut": b'{"prompt": "a"',
}


@pytest.mark.parametrize("path, body", POISON.values(), ids=POISON.keys())
def test_poison_is_refused_and_the_next_request_answered(shared, path, body):
    began = time.process_time()
    reply = shared.post(path, body)
    assert 400 <= reply.status_code < 500, reply.text  # clients try a 501 again
    error = reply.json()["error"]
    assert error["message"] and "Traceback" not in error["message"] and len(error["message"]) < 4000
    assert time.process_time() - began < 5
    good = shared.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1})
    assert good.status_code == 200


@pytest.mark.parametrize("body", RAW.values(), ids=RAW.keys())
def test_bodies_that_are_no_sound_json(shared, body):
    reply = shared.client.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 400 and reply.json()["error"]["message"]
    assert shared.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1}).status_code == 200


def qwen3_coder(argument: str) -> str:
    return f"<tool_call>\n<function=f>\n<parameter=a>\n{argument}\n</parameter>\n</function>\n</tool_call>"


OWN_TEMPLATE = {
    "start_anchor": "assistant\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>\s*(?P<name>\w*)", "close": "</tool_call>", "repeats": True, "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": ["<|im_end|>"]},
    },
}  # fmt: skip
EVIL = "__import__('os').system('touch pelton_was_here')"
ANSWERS = {
    "code as an argument": qwen3_coder(EVIL),
    "code as a call": f"[{EVIL}]",
    "code as arguments": f'<tool_call>{{"name": "f", "arguments": {EVIL}}}</tool_call>',
    "brackets": "[" * 20_000,
    "calls that do not end": "[f(a=" * 4000,
    "texts that do not end": '[f(a="' + "\\" * 20_000,
    "tags": "<tool_call>" * 4000,
    "commas": "[f(a=1" + ",a=1" * 5000,
    "spaces": "<tool_call>\n{" + " " * 20_000,
}
"""Of a model that was told what to write: CVE-2025-9141 evaluated it, CVE-2025-48887 matched it for ever."""


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS.keys())
@pytest.mark.parametrize("parser", {entry.load: entry.name for entry in pelton_tool_parsers()}.values())
def test_answers_are_read_and_not_run_and_in_little_time(parser, answer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    entry = next(entry for entry in pelton_tool_parsers() if entry.name == parser)
    tools = [{"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "object"}}}}]
    reader = entry.resolve()(ParserContext(prompt="", tools=tools, response_template=OWN_TEMPLATE))
    began = time.process_time()
    for start in range(0, len(answer), 50):
        reader.feed(answer[start : start + 50])
    reader.finish()
    assert time.process_time() - began < 2
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_that_names_code_runs_none(tmp_path):
    """CVE-2026-22807: `auto_map` ran before anybody asked whether the checkpoint is trusted."""
    folder, mark = make_tiny_checkpoint(tmp_path / "tiny", "llama"), tmp_path / "mark"
    (folder / "evil.py").write_text(f"open({str(mark)!r}, 'w')\n")
    for name, key in (("config.json", "AutoModelForCausalLM"), ("tokenizer_config.json", "AutoTokenizer")):
        found = json.loads((folder / name).read_text())
        found["auto_map"] = {"AutoConfig": "evil.Config", key: "evil.Model"}
        (folder / name).write_text(json.dumps(found))
    llm = make_llm(str(folder), skip_tokenizer_init=False)
    try:
        assert llm.generate("a", greedy(2), use_tqdm=False)[0].outputs[0].token_ids
    finally:
        llm.shutdown()
    assert not mark.exists()


NO_MEDIA = "not here: no model reads images, sound or video; parts of messages that are those are refused (POISON)"
HERE = "tests/plugins/server/test_poison.py::"
ADVISORIES: dict[str, dict[str, str]] = {
    "Pickle between processes": {
        "CVE-2025-32444": "not here: there is no such KV connector; tests/core/test_architecture.py::test_no_pickle_no_eval_no_unsafe_load",
        "CVE-2025-47277": "tests/core/test_architecture.py::test_no_pickle_no_eval_no_unsafe_load",
        "CVE-2025-30202": "tests/core/engine/test_engine_process.py::test_sockets_lie_in_a_private_directory_that_goes_away",
        "CVE-2025-24357": "tests/core/test_architecture.py::test_no_pickle_no_eval_no_unsafe_load",
        "CVE-2025-62164": "tests/plugins/server/test_prompt_embeds.py::test_others_are_refused",
        "CVE-2026-3059": "tests/core/engine/test_engine_process.py::test_garbage_on_a_socket_is_dropped",
        "CVE-2026-7301": "tests/plugins/server/test_auth.py::test_reachable_addresses_need_a_key",
    },
    "Code by configuration, model or template": {
        "CVE-2025-9141": HERE + "test_answers_are_read_and_not_run_and_in_little_time",
        "CVE-2026-22807": HERE + "test_a_checkpoint_that_names_code_runs_none",
        "GHSA-h3rc-6mm3-gc2m": "POISON: code by media options",
        "CVE-2026-22778": NO_MEDIA,
        "CVE-2026-53923": "tests/plugins/loaders/test_gguf_file.py::test_a_hostile_file_is_one_clear_error",
        "CVE-2026-5760": "tests/plugins/server/test_real_engine.py::test_bad_templates_are_the_clients_error",
    },
    "Server-side requests and files": {
        "CVE-2025-6242": "POISON: metadata service as image",
        "CVE-2026-24779": "POISON: backslash in a host",
        "CVE-2026-25960": "POISON: file as image",
        "CVE-2026-34753": "tests/cli/test_run_batch.py::test_a_batch_is_answered_and_gone_on_with",
    },
    "Grammars, regexes and templates": {
        "CVE-2025-29770": "tests/plugins/structured_output/test_backends.py::test_a_constraint_is_compiled_once",
        "CVE-2025-48944": "tests/plugins/server/test_real_engine.py::test_grammars_that_did_damage_end_soon",
        "GHSA-j828-28rj-hfhp": "tests/plugins/server/test_real_engine.py::test_grammars_that_did_damage_end_soon",
        "GHSA-rwxx-mrjm-wc2m": "tests/plugins/structured_output/test_backends.py::test_a_regex_that_takes_too_long_is_stopped",
        "CVE-2025-61620": "POISON: own template",
        "CVE-2025-62426": "POISON: tokenize by kwargs",
        "CVE-2025-48887": HERE + "test_answers_are_read_and_not_run_and_in_little_time",
    },
    "Sizes without a bound": {
        "CVE-2026-34756": "POISON: n",
        "GHSA-wpww-v874-ph2p": "POISON: salt",
        "GHSA-87x5-vmc3-756j": "POISON: prompts times n",
        "GHSA-p6g9-7v3x-m8mv": NO_MEDIA,
        "GHSA-jcq2-4gch-5qhf": "POISON: audio",
        "CVE-2026-5497": "POISON: video",
        "GHSA-4xqp-c3mv-qff7": "POISON: min_tokens",
    },
    "One request that ends the engine": {
        "CVE-2026-22773": NO_MEDIA,
        "GHSA-55m4-88pw-2875": "POISON: negative token id",
        "GHSA-8wr5-jm2h-8r4f": "tests/e2e/test_speculation.py::test_seeded_samples_are_those_without_drafts",
        "GHSA-7h4p-rffg-7823": "RAW: NaN",
        "GHSA-33cg-gxv8-3p8g": "tests/e2e/test_prompt_embeds.py::test_a_model_that_reads_more_than_embeddings_is_refused",
        "GHSA-j682-9xp5-rrf3": "POISON: video",
        "GHSA-25q3-v2hm-8vpf": "POISON: negative token id",
        "GHSA-pr7f-p5mw-fc87": "tests/e2e/test_prompt_embeds.py::test_ids_equal_those_of_tokens",
        "GHSA-p92p-rxj5-7p2x": NO_MEDIA,
        "GHSA-823j-m4cj-hmjf": NO_MEDIA,
    },
    "Side channels and keys": {
        "CVE-2025-25183": "tests/core/kv_cache/test_hashing.py::test_other_processes_make_the_same_hashes",
        "CVE-2025-46570": "tests/core/kv_cache/test_hashing.py::test_the_adapter_changes_every_block_and_the_salt_the_first_and_hence_all",
        "CVE-2025-59425": "tests/plugins/server/test_auth.py::test_no_route_opens_without_a_key",
    },
}
"""Class, advisory, and what shows that it is none here."""


def test_each_advisory_has_its_test():
    root = Path(__file__).parents[3]
    for found in ADVISORIES.values():
        for advisory, shown in found.items():
            table, _, key = shown.partition(": ")
            if table in ("POISON", "RAW"):
                assert key in (POISON if table == "POISON" else RAW), advisory
            else:
                for path, name in re.findall(r"(tests/\S+)::(\w+)", shown):
                    assert f"def {name}(" in (root / path).read_text(), f"{advisory}: {path}::{name}"
                assert "::" in shown or "not here: " in shown
    assert sum(map(len, ADVISORIES.values())) > 40
