"""The log line, and the Prometheus families with their buckets, labels and life cycle."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pelton.config import EngineConfig
from pelton.errors import ConfigError
from pelton.messages.report import DeviceReport, EngineInfo
from pelton.metrics.stats import FinishedRequestStats, IterationStats, SchedulerStats
from pelton.plugins import load_plugins
from pelton_plugins.server.metrics_text import render_text
from pelton_plugins.stat_loggers import families as table
from pelton_plugins.stat_loggers.log_line import LogLineLogger
from pelton_plugins.stat_loggers.prometheus import PrometheusLogger, one_two_five
from pelton_plugins.stat_loggers.work import attended

GOLDEN = Path(__file__).parent / "golden_ttft.txt"
CONFIG = EngineConfig.from_flat(model="meta-llama/Llama-3.1-8B-Instruct", max_model_len=100)

SEED_BUCKETS = "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
SEED_ITL = "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80"
SEED_LATENCY = "0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680"
EXPECTED = {
    "external_prefix_cache_queries", "external_prefix_cache_hits", "corrupted_requests",
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries", "prefix_cache_hits",
    "prompt_tokens", "generation_tokens", "request_success", "request_prompt_tokens", "request_generation_tokens",
    "time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds",
    "request_prefill_time_seconds", "request_decode_time_seconds", "request_queue_time_seconds",
    "request_inference_time_seconds", "request_max_num_generation_tokens", "request_params_n",
    "request_params_max_tokens", "request_time_per_output_token_seconds", "num_preemptions", "iteration_tokens_total",
    "engine_restarts", "prompt_tokens_by_source", "prompt_tokens_cached_by_source", "estimated_flops_per_gpu",
    "estimated_read_bytes_per_gpu", "estimated_write_bytes_per_gpu",
    "num_requests_waiting_by_reason", "prompt_tokens_cached", "admission_rejections", "request_num_preemptions",
    "request_prefill_kv_computed_tokens", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens",
    "spec_decode_num_drafts", "spec_decode_num_pauses",
    "num_requests_kv_fetch_by_stage", "engine_sleep_state",
    "startup_phase_seconds", "step_host_seconds", "step_device_wait_seconds", "grammar_compile_seconds",
}  # fmt: skip
NEVER = ("num_requests_swapped", "cpu_cache_usage_perc", "time_in_queue_requests", "gpu_cache_usage_perc",
         "prefix_cache_hit_rate", "avg_prompt_throughput", "gpu_prefix_cache")  # fmt: skip


def info():
    report = DeviceReport(**{f: _blank(f) for f in DeviceReport.__struct_fields__ if f in _required(DeviceReport)})
    return EngineInfo(
        report=report, num_blocks=64, block_size=16, kv_cache_bytes=1024, max_num_seqs=8, max_num_batched_tokens=128,
        max_model_len=40, phase_s={"load weights": 1.25, "profile": 0.5},
        cache_config={"enable_prefix_caching": "True", "cache_dtype": "auto"},
    )  # fmt: skip


def _required(struct):
    import msgspec

    return {field.name for field in msgspec.structs.fields(struct) if field.required}


def _blank(name):
    import msgspec

    kind = {field.name: field.type for field in msgspec.structs.fields(DeviceReport)}[name]
    return {str: "cpu", int: 0, float: 0.0, bool: False}.get(kind) if kind in (str, int, float, bool) else kind()


def families_of(logger):
    return {family.name: family for family in text_string_to_metric_families(render_text(logger.snapshot()))}


def value_of(logger, name, **labels):
    for family in families_of(logger).values():
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                return sample.value
    raise AssertionError(f"no {name} {labels}")


def test_golden_exposition_of_140_first_tokens():
    """13 observations up to 20 ms, 84 more up to 40, 26 up to 60, 15 up to 80, 2 up to 100."""
    logger = PrometheusLogger(CONFIG)
    values = [0.019] * 13 + [0.039] * 84 + [0.059] * 26 + [0.079] * 15 + [0.099] * 2
    logger.record(None, IterationStats(time_to_first_tokens_s=values))
    text = render_text(m for m in logger.snapshot() if m.name == "pelton_time_to_first_token_seconds")
    assert text == GOLDEN.read_text()
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if "_bucket" in line)
    seed = [
        float(value)
        for bound in ("0.001", "0.005", "0.01", "0.02", "0.04", "0.06", "0.08", "0.1")
        for key, value in lines.items()
        if f'le="{bound}"' in key
    ]
    assert seed == [0, 0, 0, 13, 97, 123, 138, 140]


@pytest.mark.parametrize(
    "ours, theirs",
    [(table.TTFT_SECONDS, SEED_BUCKETS), (table.ITL_SECONDS, SEED_ITL), (table.LATENCY_SECONDS, SEED_LATENCY)],
    ids=["ttft", "itl", "latency"],
)
def test_known_boundaries_stay_and_the_fast_end_is_finer(ours, theirs):
    known = [float(bound) for bound in theirs.split()]
    assert set(known) <= set(ours)
    assert list(ours) == sorted(set(ours))
    assert sum(bound < known[3] for bound in ours) > 3


def test_every_expected_family_is_exported_with_model_and_engine():
    logger = PrometheusLogger(EngineConfig.from_flat(served_model_name=["shown", "other"]), 3)
    logger.engine_started(info())
    logger.record(
        SchedulerStats(host_time_s={"schedule": 0.001}, num_steps=1, grammar_compile_s=[0.1]), IterationStats()
    )
    names = {metric.name for metric in logger.snapshot()}
    assert {f"pelton_{name}" for name in EXPECTED} | {"pelton_cache_config_info"} == names
    assert all(m.labels["model_name"] == "shown" and m.labels["engine"] == "3" for m in logger.snapshot())
    text = render_text(logger.snapshot())
    assert not any(name in text for name in NEVER)
    assert "pelton_tokens_total" not in text
    assert all(metric.documentation for metric in logger.snapshot())


VLLM_FAMILIES = """
    num_requests_running num_requests_waiting num_requests_waiting_by_reason num_requests_kv_fetch_by_stage engine_sleep_state
    kv_cache_usage_perc lora_requests_info cache_config_info corrupted_requests prefix_cache_queries prefix_cache_hits
    external_prefix_cache_queries external_prefix_cache_hits num_preemptions prompt_tokens prompt_tokens_by_source
    prompt_tokens_cached prompt_tokens_cached_by_source generation_tokens request_success admission_rejections
    spec_decode_num_drafts spec_decode_num_draft_tokens spec_decode_num_accepted_tokens spec_decode_num_accepted_tokens_per_pos
    estimated_flops_per_gpu estimated_read_bytes_per_gpu estimated_write_bytes_per_gpu tool_call_parser_invocations
    request_prompt_tokens request_generation_tokens iteration_tokens_total request_max_num_generation_tokens request_params_n
    request_params_max_tokens time_to_first_token_seconds inter_token_latency_seconds request_time_per_output_token_seconds
    e2e_request_latency_seconds request_queue_time_seconds request_inference_time_seconds request_prefill_time_seconds
    request_decode_time_seconds request_num_preemptions request_prefill_kv_computed_tokens kv_block_lifetime_seconds
    kv_block_idle_before_evict_seconds kv_block_reuse_gap_seconds sleep_mode_operation_duration_seconds
    sleep_mode_operations_in_flight watermark_requests mm_cache_queries mm_cache_hits
"""


def test_every_family_of_vllms_is_exported_under_its_name_or_said_to_be_missing():
    from pelton_plugins.server.http_metrics import HttpMetrics

    config = EngineConfig.from_flat(model="m", metrics_prefix="vllm:", kv_cache_metrics=True, enable_lora=True)
    logger, http = PrometheusLogger(config), HttpMetrics()
    logger.engine_started(info())
    logger.record(SchedulerStats(spec_num_accepted_by_position=[1]), IterationStats())
    http.count_tool_answer("hermes", 1)
    with http.sleep_operation("sleep"):
        pass
    text = render_text([*logger.snapshot(), *http.snapshot("vllm:")])
    exported = {family.name.removesuffix("_total") for family in text_string_to_metric_families(text)}
    missing = {name for why in table.NOT_EXPORTED for name in why.split(", ")}
    for name in VLLM_FAMILIES.split():
        assert ("vllm:" + name.removesuffix("_total") in exported) != (name in missing), name


def test_the_sleep_of_the_engine_is_a_state():
    logger = PrometheusLogger(CONFIG)

    def states():
        return {s.labels["sleep_state"]: s.value for s in families_of(logger)["pelton_engine_sleep_state"].samples}

    logger.engine_started(info())
    assert states() == {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
    for level, state in ((1, "weights_offloaded"), (2, "discard_all"), (0, "awake"), (2, "discard_all")):
        logger.record(SchedulerStats(sleep_level=level), IterationStats())
        assert {name for name, value in states().items() if value} == {state}
    logger.engine_started(info())  # one that died in its sleep comes back awake
    assert states()["awake"] == 1


def test_prefix_gives_the_old_names():
    logger = PrometheusLogger(EngineConfig.from_flat(metrics_prefix="vllm:"))
    text = render_text(logger.snapshot())
    assert 'vllm:num_requests_running{engine="0",model_name="smollm2"} 0.0' in text
    assert "# TYPE vllm:generation_tokens_total counter" in text


def test_gauges_and_counters_follow_the_scheduler():
    logger = PrometheusLogger(CONFIG)
    stats = SchedulerStats(
        num_running_reqs=3, num_waiting_reqs=5, num_deferred_reqs=2, kv_cache_usage=0.5, prefix_cache_queries=100,
        prefix_cache_hits=40, num_preemptions=1, num_scheduled_tokens=60, num_steps=2,
        host_time_s={"schedule": 0.0002, "update": 0.0004}, spec_num_draft_tokens=6, spec_num_accepted_tokens=4,
        external_prefix_cache_queries=9, external_prefix_cache_hits=4, num_corrupted_reqs=1,
        kv_fetch_reqs={"in_progress": 2},
    )  # fmt: skip
    logger.record(stats, IterationStats(num_prompt_tokens=10, num_generation_tokens=4, num_cached_prompt_tokens=2))
    logger.record(stats, IterationStats(num_prompt_tokens=10, num_generation_tokens=4))
    expected = {
        "num_requests_running": 3, "num_requests_waiting": 5, "kv_cache_usage_perc": 0.5,
        "prefix_cache_queries_total": 200, "prefix_cache_hits_total": 80, "num_preemptions_total": 2,
        "prompt_tokens_total": 20, "prompt_tokens_cached_total": 2, "generation_tokens_total": 8,
        "spec_decode_num_draft_tokens_total": 12, "spec_decode_num_accepted_tokens_total": 8,
        "iteration_tokens_total_count": 4, "iteration_tokens_total_sum": 120,
        "external_prefix_cache_queries_total": 18, "external_prefix_cache_hits_total": 8, "corrupted_requests_total": 2,
    }  # fmt: skip
    assert {name: value_of(logger, f"pelton_{name}") for name in expected} == expected
    assert value_of(logger, "pelton_num_requests_waiting_by_reason", reason="deferred") == 2
    assert value_of(logger, "pelton_num_requests_kv_fetch_by_stage", stage="in_progress") == 2
    assert value_of(logger, "pelton_num_requests_waiting_by_reason", reason="capacity") == 3
    assert value_of(logger, "pelton_step_host_seconds_count", stage="schedule") == 4
    assert value_of(logger, "pelton_step_host_seconds_sum", stage="update") == pytest.approx(0.0008)
    logger.record(SchedulerStats(), IterationStats())
    assert value_of(logger, "pelton_num_requests_running") == 0
    assert value_of(logger, "pelton_kv_cache_usage_perc") == 0
    assert value_of(logger, "pelton_num_requests_kv_fetch_by_stage", stage="in_progress") == 0
    assert value_of(logger, "pelton_prefix_cache_hits_total") == 80


def test_cached_tokens_by_where_they_lay():
    """What a connector brought for a request that ended before its first token is of no other."""
    logger = PrometheusLogger(CONFIG)
    logger.record(SchedulerStats(external_prefix_cache_hits=48 + 16), IterationStats())
    mixed = IterationStats(num_prompt_tokens=100, num_cached_prompt_tokens=64, num_external_prompt_tokens=48)
    logger.record(SchedulerStats(), mixed)
    logger.record(SchedulerStats(), IterationStats(num_prompt_tokens=50, num_cached_prompt_tokens=32))
    by_source = {source: value_of(logger, "pelton_prompt_tokens_by_source_total", source=source)
                 for source in ("local_compute", "local_cache_hit", "external_kv_transfer")}  # fmt: skip
    assert by_source == {"local_compute": 54, "local_cache_hit": 48, "external_kv_transfer": 48}
    assert value_of(logger, "pelton_prompt_tokens_cached_by_source_total", source="device") == 48
    assert value_of(logger, "pelton_prompt_tokens_cached_by_source_total", source="external_unspecified") == 48


@pytest.mark.parametrize("window", [0, 1, 3, 10, 100])
def test_attended_tokens_are_what_a_sum_gives(window):
    for first in range(0, 15, 2):
        for last in range(first, 25, 3):
            expected = sum(min(token + 1, window or token + 1) for token in range(first, last))
            assert attended(first, last, window) == expected, (first, last)


def test_work_is_estimated_of_finished_sequences():
    logger = PrometheusLogger(CONFIG)
    work = {"token_flops": 1000.0, "output_flops": 50.0, "context_flops 0": 7.0, "context_flops 4": 3.0,
            "context_bytes 0": 11.0, "context_bytes 4": 13.0}  # fmt: skip
    report = DeviceReport(weights_bytes=500, work=work)
    logger.engine_started(msgspec.structs.replace(info(), report=report))
    finished = FinishedRequestStats("stop", num_prompt_tokens=6, num_generation_tokens=3, num_cached_tokens=2)
    waited = FinishedRequestStats("abort", num_prompt_tokens=900)
    stats = IterationStats(finished_requests=[finished, waited])
    logger.record(SchedulerStats(num_steps=4, num_scheduled_tokens=9), stats)
    # Tokens 2 to 7 are computed: they attend to 3 to 8 tokens, or to at most 4.
    flops = 6 * 1000 + 3 * 50 + 7 * (3 + 4 + 5 + 6 + 7 + 8) + 3 * (3 + 4 * 5)
    read = 4 * 500 + 11 * (7 + 8) + 13 * (4 + 4)
    assert value_of(logger, "pelton_estimated_flops_per_gpu_total") == flops
    assert value_of(logger, "pelton_estimated_read_bytes_per_gpu_total") == read
    assert value_of(logger, "pelton_estimated_write_bytes_per_gpu_total") == 6 * (11 + 13)


def test_the_median_host_time_of_a_step_is_read_without_the_wait_for_the_device():
    """Of three steps one is above 250 us; while the device works for seconds the host does nothing."""
    logger = PrometheusLogger(CONFIG)
    for update in (0.0001, 0.00014, 0.00019):
        spent = {"schedule": 0.0001, "update": update, "step": 0.0001 + update, "wait": 2.0}
        logger.record(SchedulerStats(num_steps=1, host_time_s=spent), IterationStats())
    step = {"stage": "step"}
    below = [
        value_of(logger, "pelton_step_host_seconds_bucket", le=le, **step) for le in ("0.0002", "0.00025", "0.0003")
    ]
    assert below == [1, 2, 3]
    assert value_of(logger, "pelton_step_host_seconds_sum", **step) == pytest.approx(0.00073)
    assert value_of(logger, "pelton_step_device_wait_seconds_sum") == 6.0
    host = families_of(logger)["pelton_step_host_seconds"]
    assert {sample.labels["stage"] for sample in host.samples} == {"schedule", "update", "step"}
    assert "step is the whole" in host.documentation


def test_steps_between_two_records_count_each():
    logger = PrometheusLogger(CONFIG)
    stats = SchedulerStats(num_steps=4, num_scheduled_tokens=40, host_time_s={"step": 0.0008, "wait": 0.4})
    logger.record(stats, IterationStats())
    assert value_of(logger, "pelton_step_host_seconds_bucket", stage="step", le="0.0002") == 4
    assert value_of(logger, "pelton_step_device_wait_seconds_count") == 4
    assert value_of(logger, "pelton_iteration_tokens_total_sum") == 40


def test_finished_requests_fill_the_histograms_and_unreached_intervals_none():
    logger = PrometheusLogger(CONFIG)
    done = FinishedRequestStats(
        finish_reason="length", num_prompt_tokens=30, num_generation_tokens=8, max_tokens=8, n=2, num_cached_tokens=16,
        num_preemptions=1, e2e_latency_s=2.0, queue_time_s=1.0, prefill_time_s=2.0, decode_time_s=8.0,
        inference_time_s=10.0, mean_time_per_output_token_s=0.75,
    )  # fmt: skip
    aborted = FinishedRequestStats(
        finish_reason="abort", num_prompt_tokens=5, max_num_generation_tokens=0
    )  # in the queue
    logger.record(None, IterationStats(finished_requests=[done, aborted], num_rejected_reqs={"max_num_queued_reqs": 3}))
    for name, (count, total) in {
        "request_prompt_tokens": (2, 35), "request_generation_tokens": (2, 8), "request_params_max_tokens": (1, 8),
        "request_params_n": (1, 1), "request_prefill_kv_computed_tokens": (2, 14), "request_num_preemptions": (2, 1),
        "e2e_request_latency_seconds": (2, 2), "request_queue_time_seconds": (1, 1),
        "request_prefill_time_seconds": (1, 2), "request_decode_time_seconds": (1, 8),
        "request_inference_time_seconds": (1, 10), "request_time_per_output_token_seconds": (1, 0.75),
    }.items():  # fmt: skip
        assert value_of(logger, f"pelton_{name}_count") == count, name
        assert value_of(logger, f"pelton_{name}_sum") == total, name
    assert value_of(logger, "pelton_request_success_total", finished_reason="length") == 1
    assert value_of(logger, "pelton_request_success_total", finished_reason="abort") == 1
    assert value_of(logger, "pelton_request_success_total", finished_reason="stop") == 0
    assert value_of(logger, "pelton_admission_rejections_total", reason="max_num_queued_reqs") == 3


def test_what_is_a_requests_own_is_observed_once_for_all_its_samples():
    logger = PrometheusLogger(CONFIG)
    samples = [
        FinishedRequestStats(finish_reason="length", num_generation_tokens=made, n=3, max_num_generation_tokens=longest)
        for made, longest in ((7, None), (4, None), (2, 7))
    ]
    logger.record(None, IterationStats(finished_requests=samples))
    for name, (count, total) in {
        "request_params_n": (1, 3), "request_max_num_generation_tokens": (1, 7), "request_generation_tokens": (3, 13),
    }.items():  # fmt: skip
        assert value_of(logger, f"pelton_{name}_count") == count, name
        assert value_of(logger, f"pelton_{name}_sum") == total, name


def test_start_gives_phases_cache_config_and_token_buckets():
    logger = PrometheusLogger(EngineConfig())
    logger.engine_started(info())
    assert value_of(logger, "pelton_startup_phase_seconds", phase="load weights") == 1.25
    labels = {"enable_prefix_caching": "True", "cache_dtype": "auto", "num_gpu_blocks": "64", "block_size": "16"}
    assert value_of(logger, "pelton_cache_config_info", **labels) == 1
    bounds = [
        sample.labels["le"]
        for sample in families_of(logger)["pelton_request_prompt_tokens"].samples
        if sample.name.endswith("_bucket")
    ]
    assert bounds == ["1.0", "2.0", "5.0", "10.0", "20.0", "+Inf"]


def test_an_engine_that_comes_back_keeps_its_counts():
    logger = PrometheusLogger(CONFIG)
    logger.engine_started(info())
    logger.record(None, IterationStats(num_generation_tokens=4, time_to_first_tokens_s=[0.1]))
    logger.engine_started(info())
    assert value_of(logger, "pelton_generation_tokens_total") == 4
    assert value_of(logger, "pelton_time_to_first_token_seconds_count") == 1


def test_kv_residency_is_exported_only_when_sampled():
    stats = SchedulerStats(kv_block_lifetimes_s=[2.0], kv_block_idle_s=[1.0], kv_block_reuse_gaps_s=[0.5, 0.5])
    off, on = PrometheusLogger(EngineConfig()), PrometheusLogger(EngineConfig.from_flat(kv_cache_metrics=True))
    for logger in (off, on):
        logger.record(stats, IterationStats())
    assert not any("kv_block" in metric.name for metric in off.snapshot())
    assert value_of(on, "pelton_kv_block_lifetime_seconds_sum") == 2
    assert value_of(on, "pelton_kv_block_idle_before_evict_seconds_count") == 1
    assert value_of(on, "pelton_kv_block_reuse_gap_seconds_count") == 2


def test_several_engines_and_loggers_share_no_registry():
    import prometheus_client

    before = prometheus_client.generate_latest()
    first, second = PrometheusLogger(CONFIG, 0), PrometheusLogger(CONFIG, 1)
    first.record(None, IterationStats(num_generation_tokens=4))
    text = render_text([*first.snapshot(), *second.snapshot()])
    assert text.count("# TYPE pelton_generation_tokens_total counter") == 1
    model = 'model_name="meta-llama/Llama-3.1-8B-Instruct"'
    assert f'pelton_generation_tokens_total{{engine="0",{model}}} 4.0' in text
    assert f'pelton_generation_tokens_total{{engine="1",{model}}} 0.0' in text
    assert b"pelton_" not in prometheus_client.generate_latest() and b"pelton_" not in before


@pytest.mark.parametrize(
    "version, show, exported",
    [
        pytest.param("0.3.0", None, True, id="deprecated-but-there"),
        pytest.param("0.4.0", None, False, id="hidden"),
        pytest.param("0.4.1", "0.3", True, id="shown-again"),
        pytest.param("0.4.0", "0.2", False, id="another-version"),
        pytest.param("0.5.0", "0.3", False, id="gone"),
        pytest.param("0.2.0", None, True, id="not-yet"),
    ],
)
def test_deprecation(version, show, exported):
    family = table.Family(name="old", kind="counter", help="Old.", deprecated_in=(0, 3))
    config = EngineConfig.from_flat(show_hidden_metrics_for_version=show)
    found = PrometheusLogger(config, families=[family], version=version).snapshot()
    assert [metric.name for metric in found] == (["pelton_old"] if exported else [])
    if exported:
        assert "DEPRECATED in 0.3, hidden from 0.4" in found[0].documentation


def test_a_bad_version_is_an_error():
    with pytest.raises(ConfigError, match="show_hidden_metrics_for_version is 'old'"):
        PrometheusLogger(EngineConfig.from_flat(show_hidden_metrics_for_version="old"))


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def line(caplog):
    clock = Clock()
    caplog.set_level(logging.DEBUG, logger="pelton.stats")
    logger = LogLineLogger(EngineConfig(), 0, clock=clock)

    def step(seconds=5.0):
        clock.now += seconds
        caplog.clear()
        logger.log()
        [record] = caplog.records
        return record

    return logger, step


def test_log_line_numbers(line):
    logger, step = line
    stats = SchedulerStats(
        num_running_reqs=2, num_waiting_reqs=1, kv_cache_usage=0.125, prefix_cache_requests=1, prefix_cache_queries=200,
        prefix_cache_hits=50,
    )  # fmt: skip
    logger.record(stats, IterationStats(num_prompt_tokens=100, num_generation_tokens=5))
    logger.record(None, IterationStats(num_generation_tokens=20))
    assert step().getMessage() == (
        "Engine 000: running: 2, waiting: 1, KV cache: 12.5%, prompt: 20.0 tokens/s, generated: 5.0 tokens/s, "
        "prefix cache hits: 25.0%"
    )
    assert "prompt: 0.0 tokens/s" in step().getMessage()


def test_log_line_is_quiet_when_idle(line):
    logger, step = line
    logger.record(SchedulerStats(num_running_reqs=1), IterationStats(num_generation_tokens=5))
    assert step().levelno == logging.INFO
    logger.record(SchedulerStats(), IterationStats())
    assert step().levelno == logging.INFO  # the line that shows the return to rest
    assert [step().levelno for _ in range(3)] == [logging.DEBUG] * 3
    logger.record(SchedulerStats(num_waiting_reqs=1), IterationStats())
    assert step().levelno == logging.INFO


def test_both_are_offered_by_default_and_light_to_import():
    import subprocess
    import sys

    entries = {entry.name: entry for entry in load_plugins(only=[]).entries("pelton_stat_loggers")}
    assert {"logging", "prometheus"} <= set(entries)
    assert all(entries[name].is_default for name in ("logging", "prometheus"))
    assert entries["prometheus"].resolve() is PrometheusLogger
    code = "import sys, pelton_plugins.stat_loggers.plugin; print('prometheus_client' in sys.modules, 'torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["False", "False"]


@pytest.mark.parametrize(
    "maximum, bounds", [(1, [1]), (4, [1, 2]), (50, [1, 2, 5, 10, 20, 50]), (99, [1, 2, 5, 10, 20, 50])]
)
def test_one_two_five(maximum, bounds):
    assert one_two_five(maximum) == bounds
