"""Dashboard and alert rules: every metric in their queries is exported, with the labels that they use."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pelton.config import EngineConfig
from pelton.messages.report import DeviceReport, EngineInfo
from pelton_plugins.server.http_metrics import HttpMetrics
from pelton_plugins.server.metrics_text import render_text
from pelton_plugins.server.process_metrics import ProcessMetrics
from pelton_plugins.stat_loggers.prometheus import PrometheusLogger

FOLDER = Path(__file__).resolve().parents[2] / "examples/monitoring"
OF_SEVERAL_PROCESSES = {"pelton_api_processes": set(), "pelton_api_process_restarts_total": set()}
WORDS = {"sum", "by", "rate", "increase", "histogram_quantile", "max", "le", "stage", "status", "reason"}


def exported() -> dict[str, set[str]]:
    """Sample names to their labels."""
    logger = PrometheusLogger(EngineConfig())
    info = EngineInfo(
        report=DeviceReport(), num_blocks=2, block_size=16, kv_cache_bytes=1, max_num_seqs=1, max_num_batched_tokens=1,
        max_model_len=64, phase_s={"load": 1.0},
    )  # fmt: skip
    logger.engine_started(info)
    logger._observe_times("step_host_seconds", "schedule", 0.1, 1)
    http = HttpMetrics()
    http.observe("/v1/completions", "POST", 200, 0.1, 1, 1)
    text = render_text([*logger.snapshot(), *http.snapshot()]) + ProcessMetrics().text_of_all({}, "api-0")
    found: dict[str, set[str]] = dict(OF_SEVERAL_PROCESSES)
    for name, labels in re.findall(r"^([a-zA-Z_:]\w*)(?:\{(.*)\})? \S+$", text, re.MULTILINE):
        found.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    return found


def queries() -> list[str]:
    dashboard = json.loads((FOLDER / "grafana-dashboard.json").read_text())
    found = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    found += re.findall(r"^ +expr: (.+)$", (FOLDER / "alerts.yaml").read_text(), re.MULTILINE)
    return found


@pytest.mark.parametrize("query", queries())
def test_queries_ask_for_what_is_exported(query):
    known = exported()
    bare = re.sub(r'"[^"]*"|\[[^\]]*\]', "", query)
    names = set(re.findall(r"\b(?:pelton|http|process|python)_\w+", bare))
    assert names and names <= known.keys(), names - known.keys()
    labels = set(re.findall(r"(\w+)\s*(?:=~|=|!=)", bare))
    labels |= {label.strip() for group in re.findall(r"by \(([^)]*)\)", bare) for label in group.split(",")}
    for name in names:
        assert labels <= known[name] | {"model_name"} | ({"le"} if name.endswith("_bucket") else set()), name


def test_there_is_a_rule_for_saturation_and_each_rule_says_what_it_is():
    text = (FOLDER / "alerts.yaml").read_text()
    assert "PeltonSaturated" in text
    assert text.count("- alert:") == text.count("expr:") == text.count("summary:")
