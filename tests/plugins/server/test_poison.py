"""Requests that ended, hung or opened engines like this one, by the class of their advisories: each is refused with a clear 4xx,
and the next request is answered. What needs no request is tested elsewhere: no pickle, eval or torch.load (tests/core/
test_architecture.py), keys compared in constant time (test_auth.py), blocks shared by salt (tests/core/kv_cache)."""

from __future__ import annotations

import time

import pytest

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
    began = time.monotonic()
    reply = shared.post(path, body)
    assert 400 <= reply.status_code < 500 or reply.status_code == 501, reply.text
    error = reply.json()["error"]
    assert error["message"] and "Traceback" not in error["message"] and len(error["message"]) < 4000
    assert time.monotonic() - began < 5
    good = shared.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1})
    assert good.status_code == 200


@pytest.mark.parametrize("body", RAW.values(), ids=RAW.keys())
def test_bodies_that_are_no_sound_json(shared, body):
    reply = shared.client.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 400 and reply.json()["error"]["message"]
    assert shared.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1}).status_code == 200
