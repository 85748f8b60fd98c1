"""Settings: unknown fields and bad values are errors that name the field, the value and a good one."""

from __future__ import annotations

import re

import msgspec
import pytest

from pelton.config import AttentionConfig, EngineConfig, SchedulerConfig
from pelton.config.engine import FIELD_HOME, SECTIONS, example_value, explicit_names
from pelton.errors import ConfigError

BAD = {
    "model": ("", r"name a folder"),
    "dtype": ("float8", r"use one of auto, float32, bfloat16, float16"),
    "max_model_len": (0, r"use at least 1"),
    "max_logprobs": (-2, r"use -1"),
    "trust_remote_code": (True, r"runs no code"),
    "block_size": (0, r"such as 16"),
    "gpu_memory_utilization": (1.5, r"use a share"),
    "kv_cache_memory_bytes": (0, r"use a positive number"),
    "num_gpu_blocks_override": (1, r"use at least 2"),
    "kv_cache_dtype": ("int4", r"use one of auto"),
    "prefix_caching_hash_algo": ("md5", r"use one of sha256"),
    "kv_cache_metrics_sample": (0.0, r"use a share"),
    "max_num_batched_tokens": (0, r"use at least 1"),
    "max_num_seqs": (-1, r"use at least 1"),
    "max_num_queued_reqs": (0, r"use at least 1"),
    "max_num_queued_tokens": (0, r"use at least 1"),
    "max_steps_in_flight": (0, r"use at least 1"),
    "max_side_table_seqs": (0, r"use at least 1"),
    "stream_interval": (0, r"use at least 1"),
    "long_prefill_token_threshold": (-1, r"use 0"),
    "max_mixed_prefill_tokens": (-1, r"use 0"),
    "tensor_parallel_size": (0, r"use at least 1"),
    "pipeline_parallel_size": (0, r"use at least 1"),
    "data_parallel_size": (0, r"use at least 1"),
    "optimization_level": (4, r"use 0 to 3"),
    "cudagraph_capture_sizes": ([4, 0], r"at least 1, such as \[1, 8\]"),
    "log_level": ("loud", r"use one of debug"),
    "log_stats_interval_s": (0.0, r"use a number above 0"),
    "metrics_prefix": ("a b", r"use letters"),
    "show_hidden_metrics_for_version": ("new", r"use a version"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_value_names_field_value_and_a_good_one(name):
    value, good = BAD[name]
    field = FIELD_HOME[name][1]
    with pytest.raises(ConfigError, match=f"{field} is .*{good}") as caught:
        EngineConfig.from_flat(**{name: value})
    assert value == "" or str(value) in str(caught.value)


@pytest.mark.parametrize("sizes", [[], [0, -3]])
def test_capture_sizes_that_leave_no_graph_are_refused_with_the_way_to_have_none(sizes):
    with pytest.raises(ConfigError, match=r"cudagraph_capture_sizes is \[.*set enforce_eager, or cudagraph_mode NONE"):
        EngineConfig.from_flat(cudagraph_capture_sizes=sizes)


def test_a_graph_mode_that_is_none_names_field_value_and_a_good_one():
    with pytest.raises(ConfigError, match=r"compilation\.cudagraph_mode is 'half': .*Example: 'NONE'"):
        EngineConfig.from_flat(cudagraph_mode="half")


@pytest.mark.parametrize("name", FIELD_HOME)
def test_wrong_type_names_field_value_and_a_good_one(name):
    section, field = FIELD_HOME[name]
    wrong = object()
    with pytest.raises(ConfigError, match=rf"{section}\.{field} is .*Example: ") as caught:
        EngineConfig.from_flat(**{name: wrong})
    assert repr(wrong) in str(caught.value)


@pytest.mark.parametrize("name", FIELD_HOME)
def test_the_good_value_of_an_error_is_good(name):
    section, field = FIELD_HOME[name]
    if name != "trust_remote_code":
        EngineConfig.from_flat(**{name: example_value(SECTIONS[section], field)})


def test_unknown_settings_are_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match=r"Unknown setting 'max_num_seq'\. Did you mean 'max_num_seqs'\?"):
        EngineConfig.from_flat(max_num_seq=3)
    with pytest.raises(ConfigError, match=r"Unknown setting attention\.bckend\. Did you mean 'backend'\?"):
        EngineConfig.from_flat(attention_config={"bckend": "x"})
    with pytest.raises(ConfigError, match=r"Unknown setting 'backend'"):
        EngineConfig.from_flat(backend="x")


def test_sections_are_taken_as_mappings_and_as_structs():
    by_name = EngineConfig.from_flat(attention_backend="sdpa", max_num_seqs=3)
    by_mapping = EngineConfig.from_flat(attention_config={"backend": "sdpa"}, scheduler_config={"max_num_seqs": 3})
    by_struct = EngineConfig.from_flat(
        attention_config=AttentionConfig(backend="sdpa"), scheduler_config=SchedulerConfig(max_num_seqs=3)
    )
    assert by_name == by_mapping == by_struct
    with pytest.raises(ConfigError, match="attention_config is 'sdpa'; give a mapping"):
        EngineConfig.from_flat(attention_config="sdpa")


def test_one_setting_given_twice_is_refused():
    with pytest.raises(ConfigError, match=r"attention\.backend is given twice \('a' and 'b'\)"):
        EngineConfig.from_flat(attention_backend="a", attention_config={"backend": "b"})


def test_plugin_settings_are_mappings_by_plugin():
    assert EngineConfig.from_flat(plugin_config={"a": {"x": 1}}).plugin_config == {"a": {"x": 1}}
    with pytest.raises(ConfigError, match=r"plugin_config is .*give a mapping of plugin name"):
        EngineConfig.from_flat(plugin_config={"a": 1})


def test_explicit_names_takes_sections_apart():
    flat = {
        "model": "m",
        "attention_config": {"backend": "x"},
        "compilation_config": {"level": 1, "enforce_eager": True},
    }
    assert explicit_names(flat) == {"model", "attention_backend", "optimization_level", "enforce_eager"}


def test_flat_names_are_unique_and_cover_every_field():
    assert sorted(FIELD_HOME.values()) == sorted(
        (section, field) for section, struct in SECTIONS.items() for field in struct.__struct_fields__
    )


def test_settings_cannot_be_written_after_they_are_made():
    config = EngineConfig()
    with pytest.raises(AttributeError):
        config.scheduler.max_num_seqs = 3
    with pytest.raises(AttributeError):
        config.scheduler = SchedulerConfig()


def test_every_settings_struct_is_frozen_and_strict():
    for struct in (EngineConfig, *SECTIONS.values()):
        info = struct.__struct_config__
        assert info.frozen and info.forbid_unknown_fields, struct.__name__
        assert re.search(r"\w", struct.__doc__ or ""), struct.__name__


def test_settings_cross_a_process_border_unchanged():
    config = EngineConfig.from_flat(
        model="m", cudagraph_mode="FULL", plugin_config={"a": {"x": [1]}}, attention_backend="y"
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=EngineConfig) == config
