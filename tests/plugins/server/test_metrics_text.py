"""Metrics as Prometheus text."""

from prometheus_client.parser import text_string_to_metric_families

from pelton.metrics.snapshot import Counter, Gauge, Histogram
from pelton_plugins.server.metrics_text import render_text


def test_exposition_is_read_back_by_prometheus_own_parser():
    labels = {"model_name": 'a "quoted"\\path\nline', "engine": "0"}
    text = render_text(
        [
            Counter(name="x_tokens", labels=labels, documentation="Tokens\nof x.", value=3),
            Gauge(name="x_running", labels=labels, documentation="Running.", value=0.25),
            Counter(name="x_tokens", labels={**labels, "engine": "1"}, documentation="Tokens\nof x.", value=4),
            Histogram(name="x_seconds", labels={}, count=2, sum=1.5, buckets={"1.0": 1, "+Inf": 2}),
        ]
    )
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert text.count("# TYPE x_tokens_total counter") == 1
    assert [(s.name, s.labels, s.value) for s in families["x_tokens"].samples] == [
        ("x_tokens_total", labels, 3.0),
        ("x_tokens_total", {**labels, "engine": "1"}, 4.0),
    ]
    assert families["x_seconds"].type == "histogram"
    assert [(s.name, s.value) for s in families["x_seconds"].samples] == [
        ("x_seconds_bucket", 1.0), ("x_seconds_bucket", 2.0), ("x_seconds_count", 2.0), ("x_seconds_sum", 1.5),
    ]  # fmt: skip
    assert render_text([]) == ""
