"""The API as /openapi.json describes it: every operation, with sound bodies whose answers are as described, and with valid and invalid
ones of schemathesis, none of which gets a 5xx or hangs."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

import hypothesis
import pytest
from pelton_fake_server import FakePoolingLLM

HI = [{"role": "user", "content": "hi"}]
CALLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
SHORT = {"max_tokens": 2}
MADE = {"request_id": "r", "choices": [{"index": 0, "token_ids": [1, 2], "finish_reason": "stop"}]}
SOUND: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {"prompt": "ab", **SHORT},
        {"prompt": [[1, 2], [3]], "n": 2, "temperature": 1, "logprobs": 2, "echo": True, "return_token_ids": True, **SHORT},
        {"prompt": "ab", "stream": True, **SHORT},
    ],
    "/v1/chat/completions": [
        {"messages": HI, **SHORT},
        {"messages": HI, "logprobs": True, "top_logprobs": 2, "return_token_ids": True, "return_metrics": True, **SHORT},
        {"messages": HI, "tools": CALLS, "stream": True, "stream_options": {"include_usage": True}},
    ],
    "/v1/responses": [{"input": "hi", "max_output_tokens": 2}, {"input": [{"role": "user", "content": "hi"}], "stream": True}],
    "/v1/responses/input_tokens": [{"input": "hi"}],
    "/v1/messages": [{"messages": HI, "max_tokens": 9}, {"messages": HI, "max_tokens": 9, "stream": True}],
    "/v1/messages/count_tokens": [{"messages": HI}],
    "/v1/messages/render": [{"messages": HI, "max_tokens": 9}],
    "/v1/responses/render": [{"input": "hi"}],
    "/v1/completions/render": [{"prompt": ["ab", "c"]}],
    "/v1/chat/completions/batch": [{"messages": [HI, HI], **SHORT}],
    "/v1/chat/completions/render": [{"messages": HI}],
    "/v1/chat/completions/derender": [{"generate_response": MADE, "chat_request": {"messages": HI}}],
    "/v1/completions/derender": [{"generate_response": MADE}],
    "/inference/v1/generate": [{"token_ids": [1, 2]}, {"token_ids": [1, 2], "stream": True}],
    "/cohere/v2/chat": [{"messages": HI, "model": "fake"}, {"messages": HI, "model": "fake", "stream": True}],
    "/v2/chat": [{"messages": HI, "model": "fake"}],
    "/invocations": [{"messages": HI}, {"prompt": "ab"}, {"prompt": "ab", "stream": True}],
    "/tokenize": [{"prompt": "ab", "return_token_strs": True}, {"messages": HI}],
    "/detokenize": [{"tokens": [1, 2]}],
    "/v1/embeddings": [{"input": ["ab", "c"]}, {"input": "ab", "encoding_format": "base64"}],
    "/classify": [{"input": "ab"}],
    "/pooling": [{"input": "ab"}, {"input": "ab", "task": "token_embed", "encoding_format": "base64"}],
    "/score": [{"text_1": "ab", "text_2": ["c", "d"]}],
    "/v1/score": [{"queries": "ab", "documents": ["c", "d"]}],
    "/rerank": [{"query": "ab", "documents": ["c", {"text": "d"}]}],
    "/v1/rerank": [{"query": "ab", "documents": ["c"], "top_n": 1}],
    "/v2/rerank": [{"query": "ab", "documents": ["c"]}],
    "/cohere/v2/embed": [{"model": "fake", "texts": ["ab"]}],
    "/v2/embed": [{"model": "fake", "texts": ["ab"], "embedding_types": ["float", "base64"]}],
    "/v1/load_lora_adapter": [],
    "/v1/unload_lora_adapter": [],
    "/scale_elastic_ep": [],
}  # fmt: skip
"""Bodies that are answered with 200, for each operation that takes one."""
OF_POOLING = {
    "/v1/embeddings", "/classify", "/pooling", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank",
    "/cohere/v2/embed", "/v2/embed",
}  # fmt: skip
WITHOUT_BODY = (
    "GET /v1/models", "GET /v1/models/{name}", "GET /v1/responses/{response_id}", "DELETE /v1/responses/{response_id}",
    "GET /v1/responses/{response_id}/input_items",
    "POST /v1/responses/{response_id}/cancel", "POST /reset_prefix_cache", "POST /start_profile", "POST /stop_profile",
    "POST /sleep", "POST /wake_up", "GET /is_sleeping", "GET /tokenizer_info", "GET /health", "GET /ready", "GET /readyz",
    "GET /live", "GET /ping", "POST /ping", "GET /load", "GET /version", "GET /server_info", "GET /metrics", "GET /openapi.json",
    "GET /docs", "POST /is_scaling_elastic_ep",
)  # fmt: skip
OPERATIONS = (*(f"POST {path}" for path in SOUND), *WITHOUT_BODY)
ANSWERED = tuple(
    name for name in WITHOUT_BODY if name.startswith("GET") and "{" not in name and name != "GET /is_sleeping"
)


@pytest.fixture(scope="module")
def generating(run_server):
    return run_server(tool_call_parser="hermes", reasoning_parser="think", max_stored_responses=4)


@pytest.fixture(scope="module")
def pooling(run_server):
    running = run_server()
    running.state.llm = running.llm = FakePoolingLLM()
    return running


@pytest.fixture(scope="module")
def described(generating, pooling):
    """Gives a name's operation, and its answer's check."""
    import schemathesis
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

    checks = [not_a_server_error, content_type_conformance, response_schema_conformance, status_code_conformance]
    schemas = [schemathesis.openapi.from_url(server.url + "/openapi.json") for server in (generating, pooling)]

    def find(name: str) -> tuple[Any, Any]:
        method, path = name.split()

        def check(case: Any) -> Any:
            reply = case.call(timeout=60)
            case.validate_response(reply, checks=checks)
            return reply

        return schemas[path in OF_POOLING][path][method], check

    return find


def test_every_operation_is_tried(generating):
    found = generating.client.get("/openapi.json").json()["paths"]
    bodies = {
        (f"{method.upper()} {path}", "requestBody" in one)
        for path, ways in found.items()
        for method, one in ways.items()
    }
    assert bodies == {(name, name not in WITHOUT_BODY) for name in OPERATIONS}
    assert all(one["responses"]["200"].get("content") for ways in found.values() for one in ways.values())


@pytest.mark.parametrize(
    "path, body", [(path, body) for path, bodies in SOUND.items() for body in bodies], ids=lambda one: str(one)[:60]
)
def test_a_sound_body_is_answered_as_described(described, path, body):
    operation, check = described(f"POST {path}")
    reply = check(operation.Case(body=body, media_type="application/json"))
    assert reply.status_code == 200, reply.text
    kind = "text/event-stream" if body.get("stream") else "application/json"
    assert reply.headers["content-type"][0].partition(";")[0] == kind


@pytest.mark.parametrize("name", ANSWERED)
def test_what_takes_no_body_is_answered_as_described(described, name):
    operation, check = described(name)
    assert check(operation.Case()).status_code == 200


ALIASES = {
    f"POST {path}" for path in ("/v2/chat", "/v1/score", "/v1/rerank", "/v2/rerank", "/cohere/v2/embed", "/invocations")
}
"""Their bodies are another operation's."""


@pytest.mark.parametrize("mode", ["positive", "negative"], ids=["valid", "invalid"])
@pytest.mark.parametrize("name", [name for name in OPERATIONS if name not in ALIASES])
def test_what_is_described_holds(described, name, mode):
    from schemathesis import GenerationMode

    operation, check = described(name)
    if mode == "negative" and name in WITHOUT_BODY:
        pytest.skip("it takes nothing that could be wrong")

    @hypothesis.settings(
        max_examples=4,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=GenerationMode(mode)))
    def run(case):
        check(case)

    run()


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
def test_curl(shared):
    def curl(*arguments: str) -> str:
        command = ["curl", "-sS", "--max-time", "60", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    body = '{"prompt": "ab", "max_tokens": 3, "stream": true}'
    stream = curl("-N", shared.url + "/v1/completions", "-H", "Content-Type: application/json", "-d", body)
    assert stream.endswith("data: [DONE]\n\n") and stream.count("data: ") >= 4
    assert (
        curl("-o", "/dev/null", "-w", "%{http_code} %{content_type}", shared.url + "/")
        == "200 text/html; charset=utf-8"
    )
    without_type = curl("-o", "/dev/null", "-w", "%{http_code}", shared.url + "/v1/completions", "-d", body)
    assert without_type == "400"
    assert "200 OK" in curl("--http1.1", "-i", shared.url + "/health").splitlines()[0]
