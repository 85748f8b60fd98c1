"""Spans of requests, at an exporter in this process and at a collector behind a socket; and the log of requests."""

from __future__ import annotations

import http.server
import logging
import threading

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pelton.errors import ConfigError, EngineError
from pelton.outputs import RequestMetrics
from pelton_plugins.flags import parse_flags
from pelton_plugins.server.config import ServerConfig
from pelton_plugins.server.tracing import Tracing, make_tracing

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SECRET = "abc<secret>"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


class Traced:
    def __init__(self, server, *, detailed: bool = False) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.server = server
        server.state.tracing = Tracing(provider.get_tracer("test"), detailed=detailed)
        original = server.llm.generate

        async def generate(*args, **more):
            async for output in original(*args, **more):
                if output.finished:
                    output.metrics = RequestMetrics(
                        time_to_first_token_s=0.3, queue_time_s=0.1, prefill_time_s=0.2, decode_time_s=0.4,
                        inference_time_s=0.6,
                    )  # fmt: skip
                yield output

        server.llm.generate = generate

    def spans(self):
        self.server.wait_for(lambda: any(s.name.startswith("llm_request") for s in self.exporter.get_finished_spans()))
        return self.exporter.get_finished_spans()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "path, body", [(COMPLETIONS, {"prompt": SECRET}), (CHAT, {"messages": [{"role": "user", "content": SECRET}]})]
)
def test_a_request_is_a_span_with_its_stages(start, path, body, stream):
    traced = Traced(start())
    headers = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
    reply = traced.server.post(path, {**body, "max_tokens": 5, "temperature": 0.5, "stream": stream}, headers=headers)
    assert reply.status_code == 200
    spans = {span.name: span for span in traced.spans()}
    assert spans.keys() == {f"llm_request {path}", "queue", "prefill", "decode"}
    request = spans[f"llm_request {path}"]
    assert f"{request.context.trace_id:032x}" == TRACE and f"{request.parent.span_id:016x}" == "00f067aa0ba902b7"
    found = request.attributes
    assert found["gen_ai.usage.completion_tokens"] == 5 and found["gen_ai.usage.prompt_tokens"] > 0
    assert (found["gen_ai.request.temperature"], found["gen_ai.request.max_tokens"]) == (0.5, 5)
    assert (found["gen_ai.latency.time_in_queue"], found["gen_ai.latency.time_to_first_token"]) == (0.1, 0.3)
    assert found["gen_ai.latency.e2e"] >= 0
    seconds = {name: round((span.end_time - span.start_time) / 1e9, 3) for name, span in spans.items()}
    assert (seconds["queue"], seconds["prefill"], seconds["decode"]) == (0.1, 0.2, 0.4)
    assert spans["prefill"].start_time == spans["queue"].end_time
    assert all(
        span.parent.span_id == request.context.span_id for name, span in spans.items() if name in ("queue", "decode")
    )
    assert "secret" not in str([dict(span.attributes or {}) for span in spans.values()])


def test_detailed_traces_have_the_stages_of_the_server(start):
    traced = Traced(start(), detailed=True)
    traced.server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 2})
    assert {span.name for span in traced.spans()} >= {"read body", "prepare", "answer", "queue"}


def test_errors_are_on_the_span(start):
    traced = Traced(start())
    traced.server.llm.fail_before = EngineError("the device is on fire")
    traced.server.post(COMPLETIONS, {"prompt": "a"})
    [span] = traced.spans()
    assert span.status.status_code.name == "ERROR" and "on fire" in span.status.description


def test_spans_reach_a_collector():
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    bodies: list[bytes] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        tracing = make_tracing(f"http://127.0.0.1:{collector.server_port}/v1/traces", detailed=False)
        trace = tracing.begin({"headers": []})
        tracing.end(trace, COMPLETIONS, {"gen_ai.request.n": 1}, None)
        tracing.shutdown()
        collector.shutdown()
    [body] = bodies
    [resource] = ExportTraceServiceRequest.FromString(body).resource_spans
    assert {a.key: a.value.string_value for a in resource.resource.attributes}["service.name"] == "pelton"
    assert resource.scope_spans[0].spans[0].name == f"llm_request {COMPLETIONS}"


def test_bad_settings():
    with pytest.raises(ConfigError, match="4318"):
        ServerConfig(otlp_traces_endpoint="localhost:4317")
    with pytest.raises(ConfigError, match="log_requests"):
        ServerConfig(log_request_prompts=True)


@pytest.mark.parametrize("with_prompts", [False, True])
def test_the_log_of_requests_has_prompts_only_when_asked(start, caplog, with_prompts):
    server = start(log_requests=True, log_request_prompts=with_prompts)
    with caplog.at_level(logging.INFO, logger="pelton.requests"):
        server.post(COMPLETIONS, {"prompt": "ab\nc secret", "max_tokens": 3, "temperature": 0.5})
        server.post(CHAT, {"messages": [{"role": "user", "content": "secret"}], "max_tokens": 3})
    assert len(caplog.records) == 2
    text = "\n".join(record.getMessage() for record in caplog.records)
    assert '"max_tokens":3' in text and '"temperature":0.5' in text and '"num_prompt":11' in text
    assert ("secret" in text) is with_prompts
    assert all(record.getMessage().isprintable() for record in caplog.records)


def served(*flags: str) -> ServerConfig:
    parsed = parse_flags([*flags], [ServerConfig], environ={})
    assert parsed.config.model.model == "smollm2"  # no value was taken for the model
    found = parsed.structs["ServerConfig"]
    assert isinstance(found, ServerConfig)
    return found


def test_detailed_traces_are_asked_for_as_in_vllm():
    assert served("--collect-detailed-traces").collect_detailed_traces is True
    assert served("--collect-detailed-traces", "all").collect_detailed_traces == "all"
    assert not served("--no-collect-detailed-traces").collect_detailed_traces
    for part in ("model", "worker"):
        with pytest.raises(ConfigError, match=f"collect_detailed_traces is '{part}'; use all"):
            served(f"--collect-detailed-traces={part}")


def test_logs_by_vllms_flags():
    assert served("--enable-log-requests").log_requests and not served("--disable-log-requests").log_requests
    assert (
        not served("--disable-uvicorn-access-log").access_log and served("--no-disable-uvicorn-access-log").access_log
    )
    with pytest.raises(ConfigError, match="--uvicorn-log-level is 'info'; Pelton has no such setting: use log_level"):
        served("--uvicorn-log-level", "info")
