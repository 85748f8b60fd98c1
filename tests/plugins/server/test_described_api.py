"""The API as /openapi.json describes it, tried by schemathesis: valid and invalid requests, none of which gets a 5xx or hangs."""

from __future__ import annotations

import shutil
import subprocess

import hypothesis
import pytest

PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/messages/render",
    "/v1/responses/render",
    "/v1/completions/render",
    "/v1/chat/completions/batch",
    "/v1/chat/completions/render",
    "/v1/chat/completions/derender",
    "/v1/completions/derender",
    "/inference/v1/generate",
    "/cohere/v2/chat",
    "/tokenize",
    "/detokenize",
    "/v1/models",
    "/server_info",
)
GETS = ("/v1/models", "/server_info")


@pytest.fixture(scope="module")
def schema(shared):
    import schemathesis

    return schemathesis.openapi.from_url(shared.url + "/openapi.json")


@pytest.mark.parametrize("mode", ["positive", "negative"], ids=["valid", "invalid"])
@pytest.mark.parametrize("path", PATHS)
def test_what_is_described_holds(schema, path, mode):
    from schemathesis import GenerationMode
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

    if mode == "negative" and path in GETS:
        pytest.skip("it takes nothing that could be wrong")
    operation = schema[path]["GET" if path in GETS else "POST"]
    checks = [not_a_server_error, content_type_conformance, response_schema_conformance]

    @hypothesis.settings(
        max_examples=6,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=GenerationMode(mode)))
    def run(case):
        case.validate_response(case.call(timeout=20), checks=checks)

    run()


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
def test_curl(shared):
    def curl(*arguments: str) -> str:
        command = ["curl", "-sS", "--max-time", "20", *arguments]
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
