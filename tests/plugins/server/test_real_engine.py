"""The server with its real engine process, over a tiny random checkpoint: OpenAI's own client, curl, metrics."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from pelton_e2e import eventually, gauge, serving
from pelton_late_import import LateImport

from pelton_plugins.server.low_priority import NICENESS

openai = LateImport("openai")
MESSAGES = [{"role": "user", "content": "Hello there"}]
LONG = {"prompt": "abc", "max_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    from pelton.testing.models import make_tiny_checkpoint

    return str(make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "llama"))


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server") / "log"


@pytest.fixture(scope="module")
def server(checkpoint: str, log: Path) -> Iterator[tuple[str, int]]:
    """URL and process id."""
    with serving(
        checkpoint,
        "--served-model-name",
        "tiny",
        "--max-num-seqs",
        "16",
        "--trust-request-chat-template",
        "--grammar-compile-timeout-s",
        "2",
        "--profile-dir",
        str(log.parent / "traces"),
        log=log,
    ) as (url, process):
        yield url, process.pid


@pytest.fixture(scope="module")
def url(server: tuple[str, int]) -> str:
    return server[0]


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=60)


def test_all_threads_of_the_server_have_a_lower_priority_than_its_engine(server):
    _, pid = server
    threads = [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    children = psutil.Process(pid).children()
    (engine,) = [child.pid for child in children if "pelton.engine.process" in child.cmdline()]
    own = os.getpriority(os.PRIO_PROCESS, engine)
    found = [os.getpriority(os.PRIO_PROCESS, thread) for thread in threads]
    assert set(found) == {own, min(own + NICENESS, 19)} and found.count(own) == 1, "one starts engines"


def test_its_event_loop_is_uvloops(server):
    assert "/uvloop/loop" in Path(f"/proc/{server[1]}/maps").read_text()


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(model="other", messages=MESSAGES)


def test_chat_whole_equals_chat_streamed(client):
    options = {"model": "tiny", "messages": MESSAGES, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**options)
    stream = client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert whole.usage.completion_tokens <= 24
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 16  # the first request left a full block
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason


async def test_the_async_client_streams_many_at_once(url):
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:

        async def one(seed):
            stream = await client.completions.create(
                model="tiny", prompt="ab", max_tokens=12, temperature=0.9, seed=seed, stream=True
            )
            return "".join([chunk.choices[0].text async for chunk in stream])

        together = await asyncio.gather(*(one(seed) for seed in range(12)))
        alone = [await one(seed) for seed in range(3)]
    assert together[:3] == alone
    assert len(set(together)) > 6


def test_n_samples_logprobs_and_stop(client):
    reply = client.chat.completions.create(
        model="tiny", messages=MESSAGES, n=3, max_tokens=6, seed=1, logprobs=True, top_logprobs=2
    )
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    for choice in reply.choices:
        rows = choice.logprobs.content
        assert len(rows) >= 1 and all(len(row.top_logprobs) == 2 and row.logprob <= 0 for row in rows)
        assert all(row.top_logprobs[0].logprob >= row.top_logprobs[1].logprob for row in rows)
    whole = client.completions.create(model="tiny", prompt="abc", max_tokens=24, temperature=0).choices[0].text
    middle = whole[len(whole) // 2]
    cut = client.completions.create(model="tiny", prompt="abc", max_tokens=24, temperature=0, stop=middle).choices[0]
    assert cut.text == whole.split(middle)[0]
    assert (cut.finish_reason, cut.model_extra["stop_reason"]) == ("stop", middle)


def test_echo_logprobs_are_the_same_as_of_a_longer_prompt(url):
    """Loglikelihood of a continuation: prompt logprobs by echo equal those of the generated tokens."""
    body = {
        "prompt": [5, 6, 7],
        "max_tokens": 4,
        "temperature": 0,
        "logprobs": 1,
        "return_token_ids": True,
        "ignore_eos": True,
    }
    made = httpx.post(url + "/v1/completions", json=body, timeout=60).json()["choices"][0]
    body = {"prompt": [5, 6, 7, *made["token_ids"]], "max_tokens": 0, "echo": True, "logprobs": 1}
    scored = httpx.post(url + "/v1/completions", json=body, timeout=60).json()["choices"][0]
    assert scored["logprobs"]["token_logprobs"][0] is None
    assert scored["logprobs"]["token_logprobs"][3:] == pytest.approx(made["logprobs"]["token_logprobs"], abs=1e-4)


def test_errors_as_the_client_sees_them(client, url):
    with pytest.raises(openai.BadRequestError, match="maximum context length is 512") as found:
        client.completions.create(model="tiny", prompt=[3] * 600)
    assert found.value.param == "input_tokens"
    with pytest.raises(openai.BadRequestError, match="not in the vocabulary"):
        client.completions.create(model="tiny", prompt=[3, 100_000])
    with pytest.raises(openai.BadRequestError, match="max_logprobs"):
        client.completions.create(model="tiny", prompt="a", logprobs=21)
    with pytest.raises(openai.BadRequestError, match="vocabulary"):
        client.completions.create(model="tiny", prompt="a", logit_bias={"99999": 1})
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"properties": {"a": {"type": "strng"}}}}}
    reply = httpx.post(url + "/v1/chat/completions", json={"messages": MESSAGES, "response_format": schema}, timeout=30)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "response_format")
    assert "/properties/a/type is 'strng'" in reply.json()["error"]["message"]
    reply = httpx.post(url + "/v1/completions", json={**LONG, "timeout_s": 0.05}, timeout=30)
    assert (reply.status_code, reply.json()["error"]["type"]) == (408, "RequestTimeoutError")
    assert client.completions.create(model="tiny", prompt="a", max_tokens=2).usage.completion_tokens <= 2


def test_a_schema_that_takes_too_long_is_a_400_and_others_go_on(client, url):
    """It would take 20 s and more."""
    wide = {"type": "object", "properties": {f"{index:x}": {} for index in range(18_000)}}
    form = {"type": "json_schema", "json_schema": {"name": "wide", "schema": wide}}
    with ThreadPoolExecutor(1) as pool:
        body = {"messages": MESSAGES, "response_format": form}
        job = pool.submit(httpx.post, url + "/v1/chat/completions", json=body, timeout=60)
        answered = 0
        while not job.done():
            small = {"structured_outputs": {"json": {"enum": [answered]}}}
            made = client.completions.create(model="tiny", prompt="a", max_tokens=4, extra_body=small)
            assert json.loads(made.choices[0].text) == answered
            answered += not job.done()
    reply = job.result()
    assert reply.status_code == 400 and "cannot be compiled: it takes more than 2 s" in reply.json()["error"]["message"]
    assert answered > 0


@pytest.mark.parametrize(
    "template",
    [
        pytest.param("{{ 1 / 0 }}", id="fails"),
        pytest.param("{% for %}", id="syntax"),
        pytest.param("{{ raise_exception('only one system message') }}", id="refuses"),
        pytest.param("{{ ''.__class__.__mro__[1].__subclasses__() }}", id="escape"),
        pytest.param("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", id="endless"),
        pytest.param("{{ 'x' * 10**10 }}", id="huge"),
        pytest.param("{# nothing #}", id="empty"),
    ],
)
def test_bad_templates_are_the_clients_error(url, template):
    body = {"messages": MESSAGES, "chat_template": template, "max_tokens": 1}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(httpx.post, url + "/v1/chat/completions", json=body, timeout=60)
        answered_meanwhile = 0
        while not asked.done():
            assert httpx.get(url + "/health", timeout=60).status_code == 200
            answered_meanwhile += not asked.done()
            time.sleep(0.05)
        reply = asked.result()
    assert answered_meanwhile or "range" not in template, "others wait for the template"
    assert (reply.status_code, reply.json()["error"]["type"]) == (400, "BadRequestError"), reply.text
    assert (
        httpx.post(url + "/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 1}, timeout=60).status_code
        == 200
    )


def test_a_template_of_the_request_is_used(url):
    body = {"messages": MESSAGES, "chat_template": "{{ messages[0]['content'] }}!"}
    assert httpx.post(
        url + "/detokenize", json={"tokens": httpx.post(url + "/tokenize", json=body).json()["tokens"]}, timeout=60
    ).json() == {"prompt": "Hello there!"}


def test_tokenize_agrees_with_chat(client, url):
    usage = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=1).usage
    tokens = httpx.post(url + "/tokenize", json={"messages": MESSAGES}, timeout=60).json()["tokens"]
    assert len(tokens) == usage.prompt_tokens
    text = httpx.post(url + "/detokenize", json={"tokens": tokens}, timeout=60).json()["prompt"]
    assert "Hello there" in text and text.endswith("assistant\n")


def test_metrics_count_and_rest_at_zero(client, url):
    before = gauge(url, "generation_tokens_total")
    client.completions.create(
        model="tiny", prompt=[7] * 50, max_tokens=10, temperature=0, extra_body={"ignore_eos": True}
    )
    client.completions.create(
        model="tiny", prompt=[7] * 50, max_tokens=10, temperature=0, extra_body={"ignore_eos": True}
    )
    assert eventually(lambda: gauge(url, "generation_tokens_total") == before + 20)
    assert gauge(url, "prefix_cache_hits_total") >= 48
    assert gauge(url, "time_to_first_token_seconds_count") >= 2
    assert eventually(lambda: gauge(url, "num_requests_running") == 0 and gauge(url, "kv_cache_usage_perc") == 0)
    text = httpx.get(url + "/metrics", timeout=60).text
    assert 'model_name="tiny"' in text and "pelton_cache_config_info{" in text
    assert 'pelton_step_host_seconds_count{engine="0"' in text and "pelton_startup_phase_seconds{" in text


@pytest.mark.parametrize("stream", [True, False])
def test_a_killed_curl_frees_its_blocks(url, stream):
    body = json.dumps({"prompt": "abc", "max_tokens": 480, "ignore_eos": True, "stream": stream})

    def is_killed_before_its_end() -> bool:
        before = num_aborted()
        curl = subprocess.Popen(
            ["curl", "-sN", url + "/v1/completions", "-H", "Content-Type: application/json", "-d", body],
            stdout=subprocess.DEVNULL,
        )
        eventually(lambda: gauge(url, "kv_cache_usage_perc") > 0 or curl.poll() is not None)
        curl.kill()
        curl.wait()
        assert eventually(lambda: gauge(url, "num_requests_running") == gauge(url, "kv_cache_usage_perc") == 0)
        assert eventually(lambda: httpx.get(url + "/load", timeout=60).json() == {"server_load": 0})
        return num_aborted() > before

    def num_aborted() -> float:
        text = httpx.get(url + "/metrics", timeout=60).text
        found = re.search(r'^pelton_request_success_total\{.*finished_reason="abort".*\} (\S+)$', text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    assert any(is_killed_before_its_end() for _ in range(20))


def test_the_start_table_is_printed(server, log):
    text = log.read_text()
    for word in ("LlamaForCausalLM", "attention", "KV cache", "blocks", "curl http://127.0.0.1:"):
        assert word in text


CHOICE = {"choice": ["Positive", "Negative"]}
OBJECT = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TAG = {"type": "structural_tag", "structures": [{"begin": "<f>", "schema": OBJECT, "end": "</f>"}], "triggers": ["<f>"]}


@pytest.mark.parametrize(
    "fields, pattern",
    [
        ({"structured_outputs": CHOICE}, "Positive|Negative"),
        ({"guided_choice": CHOICE["choice"]}, "Positive|Negative"),
        ({"guided_regex": "[0-9]{3}"}, "[0-9]{3}"),
        ({"guided_grammar": 'root ::= "a" | "b"'}, "[ab]"),
        ({"guided_json": OBJECT, "guided_whitespace_pattern": " ?"}, r'\{ ?"a" ?: ?\d ?, ?"b" ?: ?"[xy]" ?\}'),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "o", "schema": OBJECT}}},
            r'\{\s*"a"\s*:\s*\d\s*,\s*"b"\s*:\s*"[xy]"\s*\}',
        ),
        ({"structured_outputs": {"regex": "<f>a{2}", "reasoning_end": ""}}, None),
    ],
    ids=["choice", "guided-choice", "guided-regex", "guided-grammar", "guided-json", "json-schema", "empty-end"],
)
def test_output_keeps_the_constraint_under_each_of_its_names(url, fields, pattern):
    body = {"messages": MESSAGES, "max_tokens": 150, "temperature": 1.0, "seed": 3, **fields}
    reply = httpx.post(url + "/v1/chat/completions", json=body, timeout=60)
    if pattern is None:
        assert reply.status_code == 400
        return
    choice = reply.json()["choices"][0]
    assert re.fullmatch(pattern, choice["message"]["content"]) and choice["finish_reason"] == "stop"


def test_a_structural_tag_over_http(url):
    body = {"messages": MESSAGES, "max_tokens": 60, "response_format": TAG, "stream": True}
    assert httpx.post(url + "/v1/chat/completions", json=body, timeout=60).status_code == 200
    body["response_format"] = {**TAG, "triggers": ["<g>"]}
    reply = httpx.post(url + "/v1/chat/completions", json=body, timeout=60)
    assert "begins with none of the triggers" in reply.text


def test_a_parsed_answer_of_the_openai_client(client):
    pydantic = pytest.importorskip("pydantic")

    class Answer(pydantic.BaseModel):
        a: int
        b: bool

    made = client.chat.completions.parse(
        model="tiny", messages=MESSAGES, response_format=Answer, max_tokens=200, seed=1, extra_body={"top_k": 5}
    )
    assert isinstance(made.choices[0].message.parsed, Answer)


def schema(wanted: object) -> dict[str, object]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": wanted}}}


def forced(parameters: object) -> dict[str, object]:
    function = {"name": "f", "parameters": parameters}
    return {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}


def nested(depth: int) -> dict[str, object]:
    found: dict[str, object] = {"type": "string"}
    for _ in range(depth):
        found = {"type": "object", "properties": {"a": found}, "required": ["a"]}
    return found


DAMAGING: dict[str, tuple[dict[str, object], set[int]]] = {
    # The fields, and the statuses that are right.
    "tool with a bad pattern": (forced({"type": "object", "properties": {"a": {"type": "string", "pattern": "["}}}), {400}),
    "tool of an unknown type": (forced({"type": "something"}), {400}),
    "schema of an unknown type": (schema({"type": "something"}), {400}),
    "schema that is no object": (schema({"type": "object", "properties": 3}), {400}),
    "reference to nothing": (schema({"$ref": "#/$defs/gone"}), {400}),
    "reference to a file": (schema({"$ref": "file:///etc/passwd"}), {400}),
    "reference to itself": (schema({"$ref": "#"}), {200, 400}),
    "deep schema": (schema(nested(400)), {200, 400}),
    "many values": (schema({"enum": [f"value {number}" for number in range(20_000)]}), {200, 400}),
    "regex that backtracks": ({"structured_outputs": {"regex": "(a+)+b"}}, {200}),
    "regex of very many states": ({"structured_outputs": {"regex": "(((a{1,99}){1,99}){1,99}){1,99}"}}, {200, 400}),
    "regex that does not end": ({"structured_outputs": {"regex": "(" * 2000}}, {400}),
    "grammar that leads to itself": ({"structured_outputs": {"grammar": 'root ::= root | root "a"'}}, {200, 400}),
    "grammar of nothing": ({"structured_outputs": {"grammar": "root ::= missing"}}, {400}),
    "many choices": ({"structured_outputs": {"choice": [f"choice {number}" for number in range(20_000)]}}, {200, 400}),
    "structural tag of nonsense": ({"structured_outputs": {"structural_tag": '{"type": "structural_tag"}'}}, {400}),
}  # fmt: skip


@pytest.mark.parametrize("fields, statuses", DAMAGING.values(), ids=DAMAGING.keys())
def test_grammars_that_did_damage_end_soon(url, client, fields, statuses):
    """CVE-2025-48944 ended the engine, others kept it busy: each is refused or kept to, and another client is answered meanwhile."""
    body = {"messages": MESSAGES, "max_tokens": 4, **fields}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(httpx.post, url + "/v1/chat/completions", json=body, timeout=60)
        assert client.completions.create(model="tiny", prompt="a", max_tokens=2).usage.completion_tokens > 0
        reply = asked.result(90)
    assert reply.status_code in statuses, reply.text
    if reply.status_code == 400:
        message = reply.json()["error"]["message"]
        assert reply.json()["error"]["param"] and len(message) < 2000 and "Traceback" not in message
    assert client.completions.create(model="tiny", prompt="a", max_tokens=2).usage.completion_tokens > 0


def test_a_profile_shows_what_the_engine_did(url, client):
    def call(path: str) -> httpx.Response:
        return httpx.post(f"{url}/{path}_profile", timeout=60)

    assert call("stop").status_code == 400
    assert call("start").status_code == 200
    again = call("start")
    assert again.status_code == 400 and "runs already" in again.json()["error"]["message"]
    assert client.completions.create(model="tiny", prompt="ab", max_tokens=4).usage.completion_tokens > 0
    trace = Path(call("stop").json()["trace"])
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert sum(event["name"].startswith("aten::") for event in events if "name" in event) > 10
    assert trace.parent.name == "traces" and "rank0" in trace.name
    assert client.completions.create(model="tiny", prompt="ab", max_tokens=4).usage.completion_tokens > 0
    assert call("stop").status_code == 400
