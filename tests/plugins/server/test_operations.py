"""Health, models, metrics, tokens, and the description of the API."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

import pelton
from pelton.errors import EngineDeadError
from pelton.metrics.snapshot import Gauge
from pelton_plugins.server.metrics_text import render_text


def test_models(shared):
    body = shared.client.get("/v1/models").json()
    assert body["object"] == "list"
    assert [card["id"] for card in body["data"]] == ["fake", "alias"]
    card = body["data"][0]
    assert (card["object"], card["owned_by"], card["root"], card["parent"], card["max_model_len"]) == (
        "model", "pelton", "fake", None, 256,
    )  # fmt: skip
    assert card["permission"][0]["object"] == "model_permission"


def test_version(shared):
    assert shared.client.get("/version").json() == {"version": pelton.__version__}


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_ping(shared, method):
    assert shared.client.request(method, "/ping").status_code == 200


def test_health_is_empty_when_all_is_well(shared):
    reply = shared.client.get("/health")
    assert (reply.status_code, reply.content) == (200, b"")


def test_health_names_the_reason_and_comes_back(start):
    server = start()
    server.llm.down = EngineDeadError("The engine process is gone (killed by signal 9).")
    reply = server.client.get("/health")
    assert reply.status_code == 503
    assert reply.json()["error"]["message"] == "The engine process is gone (killed by signal 9)."
    assert server.post("/v1/completions", {"prompt": "a"}).status_code == 500
    server.llm.down = None
    assert server.client.get("/health").status_code == 200


def test_health_does_not_lie_about_an_engine_that_hangs(start):
    server = start(max_engine_silence_s=5)
    server.llm.last_progress_age_s = 4.0
    assert server.client.get("/health").status_code == 200
    server.llm.last_progress_age_s = 7.0
    reply = server.client.get("/health")
    assert reply.status_code == 503 and "no progress for 7 s" in reply.json()["error"]["message"]


def test_health_says_that_the_engine_process_stands_still(start):
    server = start()
    server.llm.silence_s = 11.0
    assert server.client.get("/live").status_code == 200
    for route in ("/health", "/ready"):
        reply = server.client.get(route)
        assert reply.status_code == 503 and "no sign of life for 11 s" in reply.json()["error"]["message"]
        assert int(reply.headers["retry-after"]) >= 1


def test_while_the_model_loads_everything_says_so(start):
    server = start()
    server.state.llm, server.state.phase = None, "loading weights"
    for reply in (
        server.client.get("/health"),
        server.client.get("/v1/models"),
        server.post("/v1/completions", {"prompt": "a"}),
    ):
        assert reply.status_code == 503
        assert "loading weights" in reply.json()["error"]["message"]
    assert server.client.get("/metrics").status_code == 200
    assert server.client.get("/version").status_code == 200


def test_metrics_are_valid_exposition(shared):
    shared.post("/v1/completions", {"prompt": "ab", "max_tokens": 1})
    shared.client.get("/nowhere-" + "x" * 50)
    reply = shared.client.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = {family.name: family for family in text_string_to_metric_families(reply.text)}
    assert families["pelton_num_requests_running"].samples[0].value == 0
    counts = {tuple(s.labels.values()): s.value for s in families["http_requests"].samples}
    assert counts["/v1/completions", "POST", "2xx"] >= 1
    assert all("xxx" not in label for labels in counts for label in labels)
    assert families.keys() >= {
        "http_request_size_bytes", "http_response_size_bytes", "http_request_duration_seconds",
        "http_request_duration_highr_seconds", "process_resident_memory_bytes", "process_cpu_seconds", "python_info",
        "python_gc_collections", "python_gc_objects_collected", "python_gc_objects_uncollectable",
    }  # fmt: skip


def test_tokenize_and_detokenize(shared):
    reply = shared.post("/tokenize", {"prompt": "ab", "return_token_strs": True})
    assert reply.json() == {"count": 2, "max_model_len": 256, "tokens": [1, 2], "token_strs": ["a", "b"]}
    assert shared.post("/detokenize", {"tokens": [1, 2]}).json() == {"prompt": "ab"}
    chat = shared.post("/tokenize", {"messages": [{"role": "user", "content": "x"}]}).json()
    assert shared.post("/detokenize", {"tokens": chat["tokens"]}).json() == {"prompt": "<user>x\n<assistant>"}
    no_prompt = {"messages": [{"role": "user", "content": "x"}], "add_generation_prompt": False}
    assert shared.post("/tokenize", no_prompt).json()["count"] == len("<user>x\n")


@pytest.mark.parametrize(
    "path, body, param",
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x"}], "chat_template": "{{ x }}"}, "chat_template"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**20]}, "tokens"),
        ("/detokenize", {"tokens": "ab"}, "body.tokens"),
        ("/detokenize", {}, "body.tokens"),
    ],
)
def test_bad_token_requests(shared, path, body, param):
    reply = shared.post(path, body)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param


def test_no_tokenizer(start):
    server = start()
    server.llm.tokenizer = None
    assert server.post("/v1/completions", {"prompt": [1, 2], "max_tokens": 1}).status_code == 200
    assert server.post("/v1/completions", {"prompt": "ab"}).json()["error"]["param"] == "prompt"
    assert server.post("/detokenize", {"tokens": [1]}).status_code == 400


def test_openapi_lists_every_route_with_its_structs(shared):
    spec = shared.client.get("/openapi.json").json()
    assert spec["openapi"].startswith("3.1")
    assert set(spec["paths"]) == {
        "/v1/models", "/v1/models/{name}", "/v1/completions", "/v1/chat/completions", "/v1/responses",
        "/v1/responses/{response_id}", "/v1/responses/{response_id}/cancel", "/v1/responses/{response_id}/input_items",
        "/v1/responses/input_tokens", "/v1/messages", "/v1/messages/count_tokens",
        "/tokenize", "/detokenize", "/tokenizer_info", "/health", "/ready", "/live", "/ping", "/load",
        "/version", "/metrics", "/openapi.json", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/embeddings",
        "/classify", "/pooling", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank", "/docs", "/invocations",
        "/v1/chat/completions/batch", "/v1/chat/completions/render", "/v1/chat/completions/derender", "/v1/completions/render",
        "/v1/completions/derender", "/inference/v1/generate", "/reset_prefix_cache", "/cohere/v2/chat", "/v2/chat", "/v2/embed",
        "/cohere/v2/embed",
        "/sleep", "/wake_up", "/is_sleeping", "/start_profile", "/stop_profile", "/server_info", "/readyz",
        "/v1/responses/render", "/v1/messages/render", "/scale_elastic_ep", "/is_scaling_elastic_ep",
    }  # fmt: skip
    chat = spec["paths"]["/v1/chat/completions"]["post"]
    assert chat["summary"] == "Answer a conversation."
    ref = chat["requestBody"]["content"]["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
    schema = spec["components"]["schemas"][ref]
    assert schema["required"] == ["messages"] and "max_completion_tokens" in schema["properties"]
    refs = set()

    def walk(value):
        if isinstance(value, dict):
            refs.update([value["$ref"]] if "$ref" in value else [])
            for item in value.values():
                walk(item)
        elif isinstance(value, list):
            for item in value:
                walk(item)

    walk(spec)
    assert all(ref.rsplit("/", 1)[1] in spec["components"]["schemas"] for ref in refs)


def test_the_plugin_module_imports_nothing_heavy():
    import subprocess
    import sys

    code = (
        "import sys, pelton_plugins.server.plugin as p; p.pelton_cli_commands(); p.pelton_http_routes();"
        "print([m for m in ('litestar', 'uvicorn', 'torch', 'prometheus_client') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_the_server_process_imports_neither_torch_nor_transformers():
    import subprocess
    import sys

    code = (
        "import sys, pelton_plugins.server.serve, pelton_plugins.server.routes.openai,"
        "pelton_plugins.server.routes.operations, pelton_plugins.server.routes.tokens,"
        "pelton_plugins.stat_loggers.prometheus;"
        "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() in ("[]", "['numpy']")


@pytest.mark.parametrize(
    "form, expected",
    [
        ("TEXT", "TEXT named_metrics.kv_cache_usage_perc=0.5, named_metrics.num_requests_waiting=5.0"),
        ("json", 'JSON {"named_metrics":{"kv_cache_usage_perc":0.5,"num_requests_waiting":5.0}}'),
        ("BIN", None),
        (None, None),
    ],
)
@pytest.mark.parametrize("several", [False, True])
def test_a_balancer_is_told_the_load_when_it_asks(start, form, expected, several):
    server = start()
    found = [
        Gauge(name="pelton_" + name, labels={"engine": str(engine)}, value=value)
        for name, values in (("kv_cache_usage_perc", (0.5, 0.25)), ("num_requests_waiting", (2, 3)), ("other", (1, 1)))
        for engine, value in enumerate(values)
    ]
    server.llm.get_metrics = lambda: found

    async def ask() -> str:
        return render_text(found)

    server.state.ask_metrics = ask if several else None
    headers = {} if form is None else {"endpoint-load-metrics-format": form}
    reply = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, headers=headers)
    assert reply.status_code == 200 and reply.headers.get("endpoint-load-metrics") == expected
    stream = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "stream": True}, headers=headers)
    assert stream.status_code == 200 and "endpoint-load-metrics" not in stream.headers
