"""OpenTelemetry traces of requests: a span from arrival to the last byte, and its stages below it. An extra: `pelton[otel]`.

Stages are intervals of the engine's clock and of this process, laid behind each other from the arrival on: the clocks of two
processes are never compared. No span has a prompt or an answer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from litestar.types import Scope

from pelton import __version__
from pelton.errors import ConfigError
from pelton.outputs import RequestMetrics

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

NANO = 1_000_000_000
CONTEXT_HEADERS = (b"traceparent", b"tracestate", b"baggage")


@dataclass(slots=True)
class RequestTrace:
    """Facts of one request on their way to its span; the exchange fills them in."""

    context: Mapping[str, str]
    began_ns: int = field(default_factory=time.time_ns)
    began: float = field(default_factory=time.perf_counter)
    marks: dict[str, float] = field(default_factory=dict)
    """Seconds from the arrival to: body (is read), prepared (was sent to the engine), first_byte."""
    metrics: list[RequestMetrics] = field(default_factory=list)
    """Of the request's prompts, once they have ended."""

    def mark(self, name: str) -> None:
        self.marks.setdefault(name, time.perf_counter() - self.began)


class Tracing:
    """tracer: of the OpenTelemetry API. detailed: also stages of this process, which need a look at the clock more often."""

    def __init__(self, tracer: Tracer, *, detailed: bool = False, shutdown: Any = None) -> None:
        self._tracer, self.detailed, self._shutdown = tracer, detailed, shutdown

    def begin(self, scope: Scope) -> RequestTrace:
        names = {name: value for name, value in scope["headers"] if name in CONTEXT_HEADERS}
        return RequestTrace({name.decode(): value.decode("latin-1")[:8192] for name, value in names.items()})

    def end(self, trace: RequestTrace, path: str, attributes: Mapping[str, Any], error: str | None) -> None:
        """Make the spans. They leave this process later, on another thread."""
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        took_s = time.perf_counter() - trace.began
        parent = TraceContextTextMapPropagator().extract(dict(trace.context))
        span = self._tracer.start_span(
            f"llm_request {path}", parent, SpanKind.SERVER, start_time=trace.began_ns,
            attributes={**attributes, **latencies(trace.metrics), "gen_ai.latency.e2e": took_s},
        )  # fmt: skip
        if error is not None:
            span.set_status(StatusCode.ERROR, error[:1000])
        inside = set_span_in_context(span)
        for name, start_s, end_s in self._stages(trace, took_s):
            stage = self._tracer.start_span(name, inside, start_time=trace.began_ns + int(start_s * NANO))
            stage.end(trace.began_ns + int(end_s * NANO))
        span.end(trace.began_ns + int(took_s * NANO))

    def _stages(self, trace: RequestTrace, took_s: float) -> Iterator[tuple[str, float, float]]:
        """Names and times of what lies within a request, in seconds from its arrival."""
        marks = trace.marks
        if self.detailed:
            body, prepared = marks.get("body"), marks.get("prepared")
            if body is not None:
                yield "read body", 0.0, body
            if body is not None and prepared is not None:
                yield "prepare", body, prepared
            if "first_byte" in marks:
                yield "answer", marks["first_byte"], took_s
        for metrics in trace.metrics:
            at = marks.get("prepared", 0.0)
            for name, seconds in (
                ("queue", metrics.queue_time_s), ("prefill", metrics.prefill_time_s), ("decode", metrics.decode_time_s),
            ):  # fmt: skip
                if seconds is not None:
                    yield name, at, at + seconds
                    at += seconds

    def shutdown(self) -> None:
        """Send what waits; returns when it is sent, or could not be."""
        if self._shutdown is not None:
            self._shutdown()


def latencies(metrics: Sequence[RequestMetrics]) -> dict[str, float]:
    """Seconds of a request by the names that vLLM gives them; of several prompts the longest."""
    found: dict[str, float] = {}
    for name, values in (
        ("time_in_queue", [one.queue_time_s for one in metrics]),
        ("time_to_first_token", [one.time_to_first_token_s for one in metrics]),
        ("time_in_model_prefill", [one.prefill_time_s for one in metrics]),
        ("time_in_model_decode", [one.decode_time_s for one in metrics]),
        ("time_in_model_inference", [one.inference_time_s for one in metrics]),
    ):
        known = [value for value in values if value is not None]
        if known:
            found[f"gen_ai.latency.{name}"] = max(known)
    return found


def request_attributes(request: Any, model: str, request_id: str, counts: Any) -> dict[str, Any]:
    """Attributes of the generative-AI conventions that a request and its answer have; none that tells what was said."""
    wanted = {
        "gen_ai.operation.name": "chat" if hasattr(request, "messages") else "text_completion",
        "gen_ai.provider.name": "pelton",
        "gen_ai.request.id": request_id,
        "gen_ai.request.model": getattr(request, "model", None) or model,
        "gen_ai.response.model": model,
        "gen_ai.request.max_tokens": getattr(request, "max_completion_tokens", None)
        or getattr(request, "max_tokens", None),
        "gen_ai.request.n": getattr(request, "n", None),
        "gen_ai.request.temperature": getattr(request, "temperature", None),
        "gen_ai.request.top_p": getattr(request, "top_p", None),
        "gen_ai.request.stream": getattr(request, "stream", None),
    }
    if counts is not None:
        wanted |= {
            "gen_ai.usage.prompt_tokens": counts.prompt_tokens, "gen_ai.usage.input_tokens": counts.prompt_tokens,
            "gen_ai.usage.completion_tokens": counts.completion_tokens, "gen_ai.usage.output_tokens": counts.completion_tokens,
            "gen_ai.usage.cached_tokens": counts.cached_tokens,
        }  # fmt: skip
    return {name: value for name, value in wanted.items() if isinstance(value, (str, bool, int, float))}


def make_tracing(endpoint: str, *, detailed: bool) -> Tracing:
    """Spans in batches to an OTLP collector over HTTP. Raises `ConfigError` when the extra is not installed."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            f"otlp_traces_endpoint is set, and {error.name} is not installed. Install the extra: pip install 'pelton[otel]'."
        ) from None
    provider = TracerProvider(
        resource=Resource.create({"service.name": "pelton", "service.version": __version__}), shutdown_on_exit=False
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return Tracing(provider.get_tracer("pelton", __version__), detailed=detailed, shutdown=provider.shutdown)
