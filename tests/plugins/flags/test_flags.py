"""Flags made from the settings structs."""

from __future__ import annotations

import json
import re
import sys
from typing import Literal

import msgspec
import pytest

from pelton.config import CUDAGraphMode, EngineConfig
from pelton.config.engine import FIELD_HOME, SECTIONS
from pelton.errors import ConfigError, PluginError
from pelton_plugins.flags import parse_flags
from pelton_plugins.flags.field_docs import field_docs
from pelton_plugins.flags.help import help_text
from pelton_plugins.flags.table import SHORT_FLAGS, make_flags


class ShopConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a shop."""

    port: int = 8000
    """Where it listens."""
    api_key: list[str] = msgspec.field(default_factory=list)
    """Who may come in."""
    mood: Literal["calm", "busy"] = "calm"
    """How it is."""
    discount: float | None = None
    """Share off."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; use 1 to 65535.")


def parse(*argv: str, environ: dict[str, str] | None = None, **options):
    return parse_flags(argv, [ShopConfig], environ=environ or {}, **options)


def flat_value(config: EngineConfig, name: str):
    section, field = FIELD_HOME[name]
    return getattr(getattr(config, section), field)


@pytest.mark.parametrize(
    "argv, name, value",
    [
        pytest.param(["--max-num-seqs", "8"], "max_num_seqs", 8, id="int"),
        pytest.param(["--max-num-seqs=8"], "max_num_seqs", 8, id="equals-sign"),
        pytest.param(["--max_num_seqs", "8"], "max_num_seqs", 8, id="underscores"),
        pytest.param(["--max-model-len", "8k"], "max_model_len", 8_000, id="k-is-1000"),
        pytest.param(["--max-model-len", "8K"], "max_model_len", 8_192, id="K-is-1024"),
        pytest.param(["--kv-cache-memory-bytes", "1.5G"], "kv_cache_memory_bytes", 3 * 2**29, id="G"),
        pytest.param(["--gpu-memory-utilization", "0.5"], "gpu_memory_utilization", 0.5, id="float"),
        pytest.param(["--max-logprobs", "-1"], "max_logprobs", -1, id="negative-number"),
        pytest.param(["--no-enable-prefix-caching"], "enable_prefix_caching", False, id="no-bool"),
        pytest.param(["--enable-prefix-caching=false"], "enable_prefix_caching", False, id="bool-with-value"),
        pytest.param(["--enforce-eager"], "enforce_eager", True, id="bool"),
        pytest.param(["--no-async-scheduling"], "async_scheduling", False, id="async-off"),
        pytest.param(["--served-model-name", "a", "b"], "served_model_name", ["a", "b"], id="list"),
        pytest.param(["--served-model-name", '["a","b"]'], "served_model_name", ["a", "b"], id="list-as-json"),
        pytest.param(["--cudagraph-capture-sizes", "1", "2", "4"], "cudagraph_capture_sizes", [1, 2, 4], id="int-list"),
        pytest.param(["--hf-overrides", '{"rope_theta": 5}'], "hf_overrides", {"rope_theta": 5}, id="json-object"),
        pytest.param(["--hf-overrides.rope.factor", "2"], "hf_overrides", {"rope": {"factor": 2}}, id="dotted-object"),
        pytest.param(["-O0"], "optimization_level", 0, id="O0"),
        pytest.param(["-O", "3"], "optimization_level", 3, id="O-3"),
        pytest.param(["-O=1"], "optimization_level", 1, id="O=1"),
        pytest.param(["--optimization-level", "1"], "optimization_level", 1, id="long-O"),
        pytest.param(["-tp", "2"], "tensor_parallel_size", 2, id="tp"),
        pytest.param(["-pp=2"], "pipeline_parallel_size", 2, id="pp"),
        pytest.param(["-dp", "3"], "data_parallel_size", 3, id="dp"),
        pytest.param(["--attention-backend", "sdpa"], "attention_backend", "sdpa", id="attention-backend"),
        pytest.param(["--attention-config.backend", "sdpa"], "attention_backend", "sdpa", id="attention-config-dot"),
        pytest.param(
            ["--attention_config.backend=sdpa"], "attention_backend", "sdpa", id="attention-config-dot-equals"
        ),
        pytest.param(["-ac.backend", "sdpa"], "attention_backend", "sdpa", id="ac-dot"),
        pytest.param(["-ac", '{"backend": "sdpa"}'], "attention_backend", "sdpa", id="ac-json"),
        pytest.param(["--attention-backend", "TORCH_SDPA"], "attention_backend", "TORCH_SDPA", id="vllm-spelling"),
        pytest.param(["--compilation-config.cudagraph-mode", "FULL"], "cudagraph_mode", CUDAGraphMode.FULL, id="enum"),
        pytest.param(["-cc.cudagraph_mode=full"], "cudagraph_mode", CUDAGraphMode.FULL, id="enum-lower-case"),
        pytest.param(["-cc", '{"cudagraph_mode": "FULL"}'], "cudagraph_mode", CUDAGraphMode.FULL, id="enum-in-json"),
        pytest.param(["--cudagraph-capture-sizes=1"], "cudagraph_capture_sizes", [1], id="list-of-one-with-equals"),
        pytest.param(["--cudagraph-capture-sizes", "null"], "cudagraph_capture_sizes", None, id="no-list"),
        pytest.param(
            ["--compilation-config.cudagraph-capture-sizes", "1", "2"],
            "cudagraph_capture_sizes",
            [1, 2],
            id="list-by-dot",
        ),
        pytest.param(["-cc.cudagraph_capture_sizes=[1, 2]"], "cudagraph_capture_sizes", [1, 2], id="json-list-by-dot"),
        pytest.param(["--served-model-name=a"], "served_model_name", ["a"], id="name-with-equals"),
        pytest.param(["--served-model-name", "null"], "served_model_name", ["null"], id="list-that-cannot-be-unset"),
        pytest.param(["--cudagraph-mode", "null"], "cudagraph_mode", None, id="null-is-unset"),
        pytest.param(["--max-model-len", "none"], "max_model_len", None, id="none-is-unset-where-it-is-no-choice"),
        pytest.param(["--kv-cache-config.block-size", "32"], "block_size", 32, id="any-section-by-dot"),
        pytest.param(["--quantization", "none"], "quantization", None, id="none"),
        pytest.param(["models/x"], "model", "models/x", id="positional"),
        pytest.param(["--model", "models/x"], "model", "models/x", id="model-flag"),
        pytest.param(["--", "--odd-name"], "model", "--odd-name", id="after-double-dash"),
    ],
)
def test_reads_a_flag(argv, name, value):
    parsed = parse(*argv)
    assert flat_value(parsed.config, name) == value
    assert parsed.explicit == {name}
    untouched = set(FIELD_HOME) - {name}
    assert all(flat_value(parsed.config, other) == flat_value(EngineConfig(), other) for other in untouched)


@pytest.mark.parametrize("mode", CUDAGraphMode)
@pytest.mark.parametrize("change_case", [str.upper, str.lower])
def test_reads_every_graph_mode_however_it_is_given(mode, change_case):
    """None is a value of the setting too, and NONE another."""
    text = change_case(mode.value)
    for argv in (
        ["--cudagraph-mode", text], [f"--cudagraph_mode={text}"], [f"-cc.cudagraph_mode={text}"],
        ["--compilation-config.cudagraph-mode", text], ["-cc", json.dumps({"cudagraph_mode": text})],
    ):  # fmt: skip
        parsed = parse(*argv)
        assert parsed.config.compilation.cudagraph_mode is mode, argv
        assert parsed.explicit == {"cudagraph_mode"}
    assert EngineConfig.from_flat(cudagraph_mode=text).compilation.cudagraph_mode is mode
    assert EngineConfig.from_flat(compilation_config={"cudagraph_mode": text}).compilation.cudagraph_mode is mode


@pytest.mark.parametrize(
    "argv, message",
    [
        pytest.param(["--max-num-seq", "8"], r"Unknown flag --max-num-seq\. Did you mean '--max-num-seqs'\?", id="unknown"),
        pytest.param(["--zzz"], r"Unknown flag --zzz\. --help lists all flags", id="unknown-without-a-guess"),
        pytest.param(["--max-num-seqs", "many"], r"--max-num-seqs is 'many'; expected a whole number, such as 8", id="not-an-int"),
        pytest.param(["--max-num-seqs", "1.5"], r"--max-num-seqs is '1\.5'; expected a whole number", id="not-whole"),
        pytest.param(["--max-num-seqs", "0"], r"max_num_seqs is 0; use at least 1.*Set by --max-num-seqs", id="out-of-range"),
        pytest.param(["--max-num-seqs"], r"--max-num-seqs needs a value", id="no-value"),
        pytest.param(["--max-num-seqs", "--seed", "1"], r"--max-num-seqs needs a value, and --seed is the next flag", id="flag-as-value"),
        pytest.param(["--enforce-eager=maybe"], r"--enforce-eager is 'maybe'; expected true or false", id="not-a-bool"),
        pytest.param(["--no-enforce-eager=true"], r"--no-enforce-eager takes no value", id="no-with-value"),
        pytest.param(["--seed", "1", "--seed", "2"], r"--seed and --seed both set model\.seed \(1 and 2\)", id="twice"),
        pytest.param(["--attention-backend", "a", "--attention-config.backend", "b"],
                     r"--attention-backend and --attention-config\.backend both set attention\.backend", id="excludes-dot"),
        pytest.param(["--attention-backend", "a", "-ac", '{"backend":"a"}'],
                     r"--attention-backend and -ac both set attention\.backend", id="excludes-json"),
        pytest.param(["-ac.backend", "a", "--attention-backend", "a"],
                     r"-ac\.backend and --attention-backend both set attention\.backend", id="excludes-reversed"),
        pytest.param(["-ac", "sdpa"], r"-ac is 'sdpa'; expected a JSON object, such as '\{\"backend\": \"name\"\}'", id="not-json"),
        pytest.param(["-ac.bckend", "x"], r"attention has no setting 'bckend'\. Did you mean 'backend'\?", id="unknown-field"),
        pytest.param(["-cc", '{"cudagraph_mode": "HALF"}'],
                     r"compilation\.cudagraph_mode is 'HALF': .*Example: 'NONE'", id="bad-in-json"),
        pytest.param(["-cc.cudagraph-mode", "HALF"], r"expected one of NONE, PIECEWISE, FULL,", id="bad-enum"),
        pytest.param(["--cudagraph-capture-sizes", "1", "x"],
                     r"--cudagraph-capture-sizes is '1 x'; expected a list, such as \[1, 8\]", id="bad-list"),
        pytest.param(["-cc.cudagraph-capture-sizes", "1", "x"],
                     r"-cc.cudagraph-capture-sizes is '1 x'; expected a list, such as \[1, 8\]", id="bad-list-by-dot"),
        pytest.param(["--cudagraph-capture-sizes=1,2"],
                     r"--cudagraph-capture-sizes is '1,2'; expected a list, such as \[1, 8\]", id="commas"),
        pytest.param(["--hf-overrides", "[1]"], r"--hf-overrides is '\[1\]'; expected a JSON object, such as \{\}", id="not-an-object"),
        pytest.param(["--seed.x", "1"], r"--seed takes one value", id="dot-on-scalar"),
        pytest.param(["a", "b"], r"Unexpected argument 'b'; model is 'a' already", id="two-positionals"),
        pytest.param(["--api-key", "k1", "--api-key", "k2"],
                     r"^--api-key and --api-key both set api_key; give all values behind one, as --api-key A B\.$", id="keys"),
        pytest.param(["a", "--model", "b"], r"both set model\.model", id="positional-and-flag"),
        pytest.param(["-O7"], r"level is 7; use 0 to 3", id="bad-level"),
        pytest.param(["--port", "99999"], r"port is 99999; use 1 to 65535", id="further-struct"),
        pytest.param(["--mood", "odd"], r"--mood is 'odd'; expected one of calm, busy, such as calm", id="literal"),
        pytest.param(["--trust-remote-code"], r"Pelton runs no code from model folders", id="trust-remote-code"),
        pytest.param(["--plugin-config.a", "3"], r"expected a JSON object", id="plugin-config"),
        pytest.param(["--config", "/nowhere.json"], r"--config /nowhere\.json cannot be read: No such file", id="no-config-file"),
    ],
)  # fmt: skip
def test_bad_flag_names_flag_value_and_a_right_one(argv, message):
    with pytest.raises(ConfigError, match=message):
        parse(*argv)


def test_further_structs_make_flags_of_their_own():
    parsed = parse("--port", "0", "--api-key", "a", "b", "--discount", "0.1", "--max-num-seqs", "3")
    assert parsed.structs == {"ShopConfig": ShopConfig(port=0, api_key=["a", "b"], discount=0.1)}
    assert parsed.config.scheduler.max_num_seqs == 3
    assert parsed.explicit == {"port", "api_key", "discount", "max_num_seqs"}


def test_two_structs_with_one_field_are_refused():
    class Other(msgspec.Struct):
        port: int = 1

    with pytest.raises(ConfigError, match="both make --port"):
        make_flags([ShopConfig, Other])


def test_without_the_engine_its_flags_are_unknown():
    with pytest.raises(ConfigError, match="Unknown flag --max-num-seqs"):
        parse("--max-num-seqs", "1", engine=False, positional=None)
    with pytest.raises(ConfigError, match="Unexpected argument 'x'"):
        parse("x", engine=False, positional=None)


def test_plugin_settings_by_dot_and_by_object():
    parsed = parse(
        "--plugin-config.jsonl.path", "out", "--plugin-config.jsonl.every", "5", "--plugin-config", '{"b": {"c": 1}}'
    )
    assert parsed.config.plugin_config == {"jsonl": {"path": "out", "every": 5}, "b": {"c": 1}}


def test_a_flag_wins_over_the_environment():
    environ = {"PELTON_LOG_LEVEL": "DEBUG", "PELTON_API_KEY": "secret"}
    parsed = parse(environ=environ)
    assert parsed.config.observability.log_level == "debug"
    assert parsed.structs["ShopConfig"].api_key == ["secret"]
    assert parsed.explicit == {"log_level", "api_key"}
    parsed = parse("--log-level", "error", "--api-key", "mine", environ=environ)
    assert parsed.config.observability.log_level == "error"
    assert parsed.structs["ShopConfig"].api_key == ["mine"]


@pytest.mark.parametrize(
    "variable, flags, ours",
    [
        ("VLLM_API_KEY", ["--api-key", "mine"], "PELTON_API_KEY"),
        ("VLLM_LOGGING_LEVEL", ["--log-level", "debug"], "PELTON_LOG_LEVEL"),
        ("VLLM_ATTENTION_BACKEND", ["--attention-backend", "sdpa"], None),
        ("VLLM_ALLOW_RUNTIME_LORA_UPDATING", ["--enable-lora", "--allow-runtime-lora-updating"], None),
        ("VLLM_LORA_RESOLVER_CACHE_DIR", ["--plugin-config.lora_resolvers.cache_dir", "/cache"], None),
        ("VLLM_PLUGINS", None, "PELTON_PLUGINS"),
    ],
)
def test_a_variable_of_vllms_says_what_is_read(capsys, variable, flags, ours):
    parse("--model", "m", environ={variable: "debug"})
    assert re.fullmatch(
        rf"warning: Environment variable {variable} is vLLM's and not read; use .*\n", capsys.readouterr().err
    )
    parse(environ={variable: "0"})
    if flags is not None:
        parse(*flags, environ={variable: "debug"})
    if ours is not None:
        parse(environ={variable: "debug", ours: "debug"})
    assert capsys.readouterr().err == ""


def test_a_variable_of_vllms_is_nothing_to_a_command_without_its_setting(capsys):
    parse_flags([], [], environ={"VLLM_API_KEY": "secret"})
    assert capsys.readouterr().err == ""


def test_a_bad_environment_variable_is_an_error():
    with pytest.raises(ConfigError, match="PELTON_LOG_LEVEL is 'loud'; use one of debug, info, warning, error"):
        parse(environ={"PELTON_LOG_LEVEL": "loud"})
    with pytest.raises(ConfigError, match="PELTON_API_KEY is empty"):
        parse(environ={"PELTON_API_KEY": ""})


@pytest.mark.parametrize("name", ["settings.json", "settings.toml", "settings.yaml"])
def test_flags_win_over_the_environment_and_that_over_a_file(tmp_path, name):
    path = tmp_path / name
    if name.endswith("json"):
        text = json.dumps({
            "max-num-seqs": 4, "seed": 7, "log_level": "error", "port": 1, "served_model_name": "x",
            "attention_config": {"backend": "sdpa"}, "plugin_config": {"p": {"a": 1, "b": 1}},
        })  # fmt: skip
    elif name.endswith("yaml"):
        text = (
            "max-num-seqs: 4\nseed: 7\nlog_level: error\nport: 1\nserved_model_name: x\n"
            "attention_config: {backend: sdpa}\nplugin_config:\n  p: {a: 1, b: 1}\n"
        )
    else:
        text = (
            'max-num-seqs = 4\nseed = 7\nlog_level = "error"\nport = 1\nserved_model_name = "x"\n'
            '[attention_config]\nbackend = "sdpa"\n[plugin_config.p]\na = 1\nb = 1\n'
        )
    path.write_text(text)
    parsed = parse(
        "--seed", "9", "--config", str(path), "--plugin-config.p.a", "2", environ={"PELTON_LOG_LEVEL": "debug"}
    )
    assert flat_value(parsed.config, "max_num_seqs") == 4
    assert flat_value(parsed.config, "seed") == 9
    assert flat_value(parsed.config, "log_level") == "debug"
    assert flat_value(parsed.config, "served_model_name") == ["x"]
    assert flat_value(parsed.config, "attention_backend") == "sdpa"
    assert parsed.config.plugin_config == {"p": {"a": 2, "b": 1}}
    assert parsed.structs["ShopConfig"].port == 1


@pytest.mark.parametrize(
    "text, message",
    [
        ('{"max_num_seq": 4}', r"unknown setting 'max_num_seq'\. Did you mean 'max_num_seqs'\?"),
        ('{"max_num_seqs": "4"}', r"scheduler\.max_num_seqs is '4': Expected `int \| null`.*Set by .*settings\.json: max_num_seqs"),
        ('{"attention_config": {"x": 1}}', "attention has no setting 'x'"),
        ("[1]", "holds no object"),
        ("{", "is not valid JSON"),
    ],
)  # fmt: skip
def test_bad_settings_file(tmp_path, text, message):
    path = tmp_path / "settings.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        parse("--config", str(path))


@pytest.mark.parametrize(
    "text, message",
    [
        ("a: [1", "is not valid YAML: while parsing"),
        ("!!python/object/apply:os.getcwd []", "is not valid YAML"),
        ("- 1", "holds no object"),
    ],
)
def test_bad_yaml(tmp_path, text, message):
    path = tmp_path / "settings.yml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        parse("--config", str(path))
    assert "\n" not in str(caught.value)


def test_a_wrong_key_is_told_to_nobody(tmp_path):
    path = tmp_path / "settings.json"
    path.write_text('{"api-key": ["sesame", 5]}')
    with pytest.raises(ConfigError, match="api_key is not told here: Expected `str`, got `int`") as refusal:
        parse("--config", str(path))
    assert "sesame" not in str(refusal.value)


def test_yaml_without_its_package_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    path = tmp_path / "settings.yaml"
    path.write_text("seed: 1")
    with pytest.raises(ConfigError, match=r"^--config \S+ is YAML, .*pip install pyyaml"):
        parse("--config", str(path))


def test_every_setting_has_a_flag_with_help(capsys):
    for section, struct in SECTIONS.items():
        missing = set(struct.__struct_fields__) - field_docs(struct).keys()
        assert not missing, f"{section} has fields without a text below them: {missing}"
    with pytest.raises(SystemExit) as end:
        parse("--help")
    assert end.value.code == 0
    text = capsys.readouterr().out
    for flag in make_flags([ShopConfig]).values():
        assert flag.name in text
    assert all(short in text for short in SHORT_FLAGS)


def test_help_of_one_word_shows_only_what_has_it():
    text = help_text([ShopConfig], only="prefix")
    assert "--enable-prefix-caching" in text and "--prefix-caching-hash-algo" in text
    assert "--seed" not in text and "usage" not in text
    assert "No flag has 'zebra'" in help_text([ShopConfig], only="zebra")


VLLM_NAMES = """
    model tokenizer dtype seed revision max-model-len quantization served-model-name hf-overrides load-format
    download-dir generation-config override-generation-config enforce-eager trust-remote-code
    tensor-parallel-size pipeline-parallel-size data-parallel-size distributed-executor-backend
    gpu-memory-utilization kv-cache-memory-bytes kv-cache-dtype block-size num-gpu-blocks-override
    enable-prefix-caching prefix-caching-hash-algo max-num-seqs max-num-batched-tokens max-num-queued-reqs
    scheduling-policy async-scheduling stream-interval attention-backend optimization-level
    cudagraph-capture-sizes chat-template disable-log-stats max-logprobs enable-chunked-prefill
    long-prefill-token-threshold show-hidden-metrics-for-version skip-tokenizer-init
    disable-hybrid-kv-cache-manager
"""


@pytest.mark.parametrize("name", VLLM_NAMES.split())
def test_has_the_flag_that_users_of_vllm_know(name):
    assert f"--{name}" in make_flags()


# Flags by vLLM's names.


@pytest.mark.parametrize(
    "argv, name, value",
    [
        (["--guided-decoding-backend", "outlines"], "structured_outputs_backend", "outlines"),
        (["--guided-decoding-backend=outlines"], "structured_outputs_backend", "outlines"),
        (["--guided-decoding-disable-any-whitespace"], "disable_any_whitespace", True),
        (["--no-guided-decoding-disable-any-whitespace"], "disable_any_whitespace", False),
        (["--pooler-config", '{"pooling_type": "CLS"}'], "pooling_type", "cls"),
        (["--override-pooler-config.pooling-type", "MEAN"], "pooling_type", "mean"),
        (["--pooling-config.seq_pooling_type=LAST"], "pooling_type", "last"),
        (["--compilation-config", '{"mode": 3, "cudagraph_mode": "FULL"}'], "cudagraph_mode", CUDAGraphMode.FULL),
        (["-cc.mode=3", "-cc.cudagraph_mode=FULL"], "cudagraph_mode", CUDAGraphMode.FULL),
        (["-ac.use_cudnn_prefill=0", "-ac.backend", "sdpa"], "attention_backend", "sdpa"),
        (["--use-v2-block-manager", "--max-num-seqs", "8"], "max_num_seqs", 8),
        (["--tokenizer-mode", "auto", "--nnodes=1", "--max-num-seqs", "8"], "max_num_seqs", 8),
        (["--no-enable-ssl-refresh", "--max-num-seqs", "8"], "max_num_seqs", 8),
        (["--use-v2-block-manager", "folder"], "model", "folder"),
    ],
)
def test_vllms_flags_set_the_setting_or_ask_for_nothing(argv, name, value):
    assert flat_value(parse(*argv).config, name) == value


@pytest.mark.parametrize(
    "argv, message",
    [
        (
            ["--swap-space", "4"],
            r"--swap-space is 4; Pelton has no such setting: a preempted request is computed again",
        ),
        (["--swap-space=4"], r"--swap-space is 4; Pelton has no such setting"),
        (["--disable-custom-all-reduce"], r"--disable-custom-all-reduce is True; .*pelton_communicators"),
        (["--disable-custom-all-reduce=true"], r"--disable-custom-all-reduce is True;"),
        (["--scheduler-cls"], "--scheduler-cls needs a value"),
        (["-cc.mode=1"], r"compilation\.mode is 1; .*no graph is compiled"),
        (["-ac", '{"use_cudnn_prefill": 1}'], r"attention\.use_cudnn_prefill is 1; .*`pelton backends` lists"),
        (["--compilation-config.modes=1"], r"compilation has no setting 'modes'"),
        (["--enable-log-requests"], r"Unknown flag --enable-log-requests"),  # of a command without such a setting
        (["--swap-spaces", "4"], r"Unknown flag --swap-spaces"),
        (
            ["--guided-decoding-backend", "a", "--structured-outputs-backend", "b"],
            "both set structured_outputs.backend",
        ),
    ],
)
def test_vllms_flags_that_ask_for_more_say_what_to_do(argv, message):
    with pytest.raises(ConfigError, match=message):
        parse(*argv)


def test_vllms_names_in_a_file(tmp_path):
    file = tmp_path / "settings.json"
    file.write_text(
        json.dumps({"guided-decoding-backend": "outlines", "swap_space": 0, "compilation_config": {"mode": 3}})
    )
    config = parse("--config", str(file)).config
    assert config == EngineConfig.from_flat(structured_outputs_backend="outlines")
    file.write_text(json.dumps({"swap_space": 4}))
    with pytest.raises(ConfigError, match="swap_space is 4; Pelton has no such setting"):
        parse("--config", str(file))


def test_a_command_without_an_engine_has_no_flags_of_vllms():
    with pytest.raises(ConfigError, match="Unknown flag --swap-space"):
        parse_flags(["--swap-space", "0"], [ShopConfig], positional=None, environ={}, engine=False)


def test_a_command_without_an_engine_need_not_say_that_it_has_no_model(capsys):
    assert parse_flags([], [ShopConfig], environ={}, engine=False).structs["ShopConfig"] == ShopConfig()
    with pytest.raises(ConfigError, match="Unexpected argument 'x'"):
        parse_flags(["x"], [ShopConfig], environ={}, engine=False)
    with pytest.raises(SystemExit):
        parse_flags(["--help"], [ShopConfig], program="shop", environ={}, engine=False)
    assert "usage: shop [flags]" in capsys.readouterr().out


def test_a_positional_that_no_struct_has_is_the_commands_mistake():
    with pytest.raises(PluginError, match="positional='modle'; fields are "):
        parse_flags([], [ShopConfig], positional="modle", environ={}, engine=False)


def test_a_name_behind_a_switch_that_takes_names_is_its_value():
    class PackConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
        """Packing."""

        wrap: bool | Literal["all", "some"] = False
        """What is wrapped."""

    def wrap(*argv):
        parsed = parse_flags(argv, [PackConfig], environ={})
        return parsed.structs["PackConfig"].wrap, parsed.config.model.model

    assert wrap("--wrap") == (True, "smollm2")
    assert wrap("--wrap", "all") == wrap("--wrap=all") == ("all", "smollm2")
    assert wrap("--wrap", "folder") == (True, "folder")
    assert wrap("--wrap=false") == wrap("--no-wrap") == (False, "smollm2")
