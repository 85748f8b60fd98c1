"""Settings that a plugin brings are checked at the start, in whatever way they are given; its counters stand on /metrics."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import msgspec
import pytest
import torch

from pelton import LLM, SamplingParams, hookimpl
from pelton.config import EngineConfig
from pelton.config.plugin_settings import check_plugin_settings, read_settings
from pelton.entries import BackendEntry, Entry, OpEntry, SettingsEntry
from pelton.errors import ConfigError, PluginError
from pelton.metrics.manager import StatLoggers
from pelton.metrics.plugin_metrics import PluginMetrics
from pelton.metrics.stats import IterationStats, SchedulerStats
from pelton.plugins import LoadedPlugin, Plugins, load_plugins, register
from pelton.testing.models import make_tiny_checkpoint
from pelton_backends.sdpa.backend import SDPABackend
from pelton_plugins.commands.backends import describe as describe_backends
from pelton_plugins.commands.plugins import _as_text, describe
from pelton_plugins.flags import parse_flags
from pelton_plugins.scheduler.policies import FCFSPolicy
from pelton_plugins.scheduler.scheduler import DefaultScheduler
from pelton_plugins.server.metrics_text import render_text

HERE = "pelton_test_settings_module"


class FairSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the plugin under test."""

    weight: float = 1.0
    """Share of a tenant."""
    tenants: list[str] = []
    mode: str = "plain"

    def __post_init__(self) -> None:
        if self.weight <= 0:
            raise ConfigError(f"plugin_config.even.weight is {self.weight}; use a number above 0, such as 1.0.")


class Policy(FCFSPolicy):
    weights: ClassVar[list[float]] = []

    def configure(self, config):
        self.weights.append(read_settings(config, "even", FairSettings).weight)


class Scheduler(DefaultScheduler):
    def __init__(self, context):
        super().__init__(context)
        assert read_settings(context.engine_config, "even", FairSettings).weight == 2.5
        self._steps_made = context.metrics.counter("even_steps", "Steps that were made.", ["tenant"])
        context.metrics.gauge("even_weight", "The weight.").set(2.5)

    def schedule(self):
        output = super().schedule()
        if output is not None:
            self._steps_made.inc(tenant="a")
        return output


class Attention(SDPABackend):
    name = "even"
    weight: ClassVar[float] = 0.0
    made: ClassVar[list[float]] = []

    @classmethod
    def configured(cls, config):
        return type(cls.__name__, (cls,), {"weight": read_settings(config, "even", FairSettings).weight})

    @classmethod
    def unsupported(cls, needs, capability=None):
        return ["weight 9"] if cls.weight == 9.0 else super().unsupported(needs, capability)

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.made.append(self.weight)


class Product:
    """The op `linear`, for steps of as many tokens as the settings say."""

    served: ClassVar[list[tuple[float, int]]] = []

    def __init__(self, weight):
        self.weight = weight

    @classmethod
    def configured(cls, config):
        return cls(read_settings(config, "even", FairSettings).weight)

    def token_range(self, needs):
        return 0, int(self.weight)

    def unsupported(self, needs):
        return []

    def bind(self, needs, tensors):
        def product(x):
            self.served.append((self.weight, len(x)))
            return torch.nn.functional.linear(x, tensors.linear.tensors["weight"])

        return product


class FairPlugin:
    PELTON_API = ">=1,<2"

    @hookimpl
    def pelton_settings(self):
        return [SettingsEntry(name="even", load=f"{HERE}:FairSettings")]

    @hookimpl
    def pelton_schedulers(self):
        return [Entry(name="even", load=f"{HERE}:Scheduler")]

    @hookimpl
    def pelton_attention_backends(self, device_type):
        return [BackendEntry(name="even", load=f"{HERE}:Attention", priority=99)]

    @hookimpl
    def pelton_ops(self, device_type):
        return [OpEntry(name="even.linear", op="linear", load=f"{HERE}:Product", priority=99)]

    @hookimpl
    def pelton_scheduling_policies(self):
        return [Entry(name="even", load=f"{HERE}:Policy")]


@pytest.fixture
def plugins(monkeypatch) -> Plugins:
    module = ModuleType(HERE)
    for thing in (FairSettings, Scheduler, Policy, Attention, Product):
        setattr(module, thing.__name__, thing)
    monkeypatch.setitem(sys.modules, HERE, module)
    loaded = load_plugins(only=[])
    register(loaded.manager, FairPlugin(), "even", "test")
    loaded.loaded.append(LoadedPlugin("even", "test", "1.0", HERE, ["pelton_settings"]))
    return loaded


def from_flags(tmp_path, settings):
    argv = []
    for name, value in settings.items():
        argv += [
            f"--plugin-config.even.{name}",
            value if isinstance(value, str) else msgspec.json.encode(value).decode(),
        ]
    return parse_flags(argv, environ={}).config


def from_file(tmp_path, settings):
    path = tmp_path / "settings.json"
    path.write_bytes(msgspec.json.encode({"plugin_config": {"even": settings}}))
    return parse_flags(["--config", str(path)], environ={}).config


def from_yaml(tmp_path, settings):
    path = tmp_path / "settings.yaml"
    path.write_bytes(msgspec.yaml.encode({"plugin_config": {"even": settings}}))
    return parse_flags(["--config", str(path)], environ={}).config


def from_sdk(tmp_path, settings):
    return EngineConfig.from_flat(plugin_config={"even": settings})


@pytest.mark.parametrize("make", [from_flags, from_file, from_yaml, from_sdk])
def test_settings_arrive_as_the_plugins_struct(plugins, tmp_path, make):
    config = make(tmp_path, {"weight": 2.5, "tenants": ["a", "b"], "mode": "strict"})
    check_plugin_settings(config, plugins)
    assert read_settings(config, "even", FairSettings) == FairSettings(weight=2.5, tenants=["a", "b"], mode="strict")
    assert read_settings(EngineConfig(), "even", FairSettings) == FairSettings()


@pytest.mark.parametrize("make", [from_flags, from_file, from_sdk])
@pytest.mark.parametrize(
    "settings, message",
    [
        (
            {"weight": "heavy"},
            r"plugin_config\.even\.weight is 'heavy': Expected `float`, got `str`\. Example: 1\.0\.",
        ),
        ({"wieght": 2}, r"Unknown setting plugin_config\.even\.wieght\. Did you mean 'weight'\?"),
        ({"weight": -1}, r"plugin_config\.even\.weight is -1.*; use a number above 0"),
        ({"tenants": 3}, r"plugin_config\.even\.tenants is 3: Expected `array`"),
    ],
)
def test_a_wrong_setting_stops_the_start_with_its_name_and_value(plugins, tmp_path, make, settings, message):
    with pytest.raises(ConfigError, match=message) as caught:
        check_plugin_settings(make(tmp_path, settings), plugins)
    assert "\n" not in str(caught.value)


def test_settings_of_nobody_are_refused(plugins):
    with pytest.raises(ConfigError, match=r"plugin_config has 'evne'.*Did you mean 'even'\?"):
        check_plugin_settings(EngineConfig.from_flat(plugin_config={"evne": {}}), plugins)


class _Required(msgspec.Struct):
    path: str


@pytest.mark.parametrize(
    "what, message",
    [(dict, r"Settings 'even' \(.* is <class 'dict'>; settings are a class made from msgspec\.Struct"),
     (_Required, r"has no default for path; each field needs one")],
)  # fmt: skip
def test_a_plugin_whose_settings_are_no_struct_is_named(plugins, monkeypatch, what, message):
    monkeypatch.setattr(sys.modules[HERE], "FairSettings", what)
    with pytest.raises(PluginError, match=message):
        check_plugin_settings(EngineConfig(), plugins)


def test_pelton_plugins_shows_settings_with_default_and_text(plugins):
    (record,) = (record for record in describe(plugins) if record["name"] == "even")
    (entry,) = (entry for entry in record["entries"] if entry["hook"] == "pelton_settings")
    assert entry["settings"]["plugin_config.even.weight"] == {"default": 1.0, "doc": "Share of a tenant."} or (
        entry["settings"]["plugin_config.even.weight"]["default"] == 1.0
    )
    assert "--plugin-config.even.mode (default 'plain')" in _as_text([record])
    assert "--plugin-config.native.isa (default None)  Instruction set" in _as_text(describe(plugins))


@pytest.mark.parametrize("engine_process", [False])
def test_settings_and_counters_of_a_plugin_in_the_engine(plugins, tmp_path, engine_process):
    path = make_tiny_checkpoint(tmp_path / "model", "llama")
    Policy.weights.clear()
    options = {"scheduler": "even", "scheduling_policy": "even", "plugin_config": {"even": {"weight": 2.5}}}
    with LLM(model=str(path), plugins=plugins, max_model_len=64, kv_cache_memory_bytes=2**20, **options) as llm:
        llm.generate({"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=5, ignore_eos=True), use_tqdm=False)
        text = render_text(llm.get_metrics())
    assert Policy.weights == [2.5]
    lines = [line for line in text.splitlines() if "even_" in line]
    assert lines[:2] == [
        "# HELP pelton_even_steps_total Steps that were made.",
        "# TYPE pelton_even_steps_total counter",
    ]
    assert lines[2].startswith(f'pelton_even_steps_total{{engine="0",model_name="{path}",tenant="a"}} ')
    assert float(lines[2].split()[-1]) >= 5
    assert lines[-1].endswith(" 2.5") and lines[-1].startswith("pelton_even_weight{")


def test_attention_and_ops_have_the_settings_of_their_engine(plugins, tmp_path):
    """Of two engines of one process each its own; and what a backend can serve may depend on them."""
    path = str(make_tiny_checkpoint(tmp_path / "model", "llama"))
    options = {"plugins": plugins, "max_model_len": 64, "kv_cache_memory_bytes": 2**20, "enforce_eager": True}
    prompt, params = (
        {"prompt_token_ids": [1, 2, 3, 4, 5]},
        SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True),
    )
    Attention.made.clear()
    answers = []
    with (
        LLM(model=path, plugin_config={"even": {"weight": 2.0}}, **options) as small,
        LLM(model=path, plugin_config={"even": {"weight": 4000.0}}, **options) as large,
    ):
        assert Attention.made == [2.0, 4000.0] and Attention.weight == 0.0
        for llm in (small, large, small):
            Product.served.clear()
            (output,) = llm.generate(prompt, params, use_tqdm=False)
            answers.append((list(output.outputs[0].token_ids), set(Product.served)))
    assert len({tuple(ids) for ids, _ in answers}) == 1
    assert [served for _, served in answers] == [{(2.0, 1)}, {(4000.0, 1), (4000.0, 5)}, {(2.0, 1)}]

    refusing = EngineConfig.from_flat(model=path, plugin_config={"even": {"weight": 9.0}})
    (table,) = describe_backends(refusing, plugins)["attention"]
    assert table["rows"][0]["name"] == "even" and table["rows"][0]["verdict"] == "weight 9"
    assert [row["name"] for row in table["rows"] if row["is_chosen"]] != ["even"]


# The registry, and the front end's totals.


def loggers(**flat) -> StatLoggers:
    nothing = SimpleNamespace(entries=lambda hook: [])
    return StatLoggers(EngineConfig.from_flat(model="m", **flat), nothing)


def told(stat_loggers: StatLoggers) -> dict[tuple[str, tuple[str, ...]], float]:
    return {
        (
            metric.name,
            tuple(sorted(item for item in metric.labels.items() if item[0] not in ("engine", "model_name"))),
        ): metric.value
        for metric in stat_loggers.snapshot()
    }


def test_counters_add_up_and_gauges_stay_as_they_were_set():
    engine, front = PluginMetrics(), loggers()
    hits = engine.counter("hits", "Hits.", ["kind", "zone"])
    plain, level = engine.counter("plain", "Plain."), engine.gauge("level", "Level.")
    hits.inc(kind="a", zone="x")
    hits.inc(2, zone="x", kind="a")
    hits.inc(kind="b", zone="x")
    level.set(7)
    front.record(SchedulerStats(plugin_metrics=engine.take()), IterationStats())
    hits.inc(4, kind="b", zone="x")
    level.set(3)
    sent = msgspec.msgpack.encode(SchedulerStats(plugin_metrics=engine.take()))
    front.record(msgspec.msgpack.decode(sent, type=SchedulerStats), IterationStats())
    assert engine.take() == []
    assert told(front) == {
        ("pelton_hits", (("kind", "a"), ("zone", "x"))): 3.0, ("pelton_hits", (("kind", "b"), ("zone", "x"))): 5.0,
        ("pelton_plain", ()): 0.0, ("pelton_level", ()): 3.0,
    }  # fmt: skip
    assert plain.take() == []


def test_a_restarted_engine_begins_at_zero_and_the_totals_go_on():
    front = loggers(metrics_prefix="x_")
    for _ in range(2):
        engine = PluginMetrics()
        engine.counter("hits", "Hits.").inc(5)
        front.record(SchedulerStats(plugin_metrics=engine.take()), IterationStats())
    assert told(front) == {("x_hits", ()): 10.0}


def test_a_name_of_a_built_in_metric_is_left_to_it(caplog):
    totals, engine = loggers()._of_plugins, PluginMetrics()
    hits = engine.counter("hits", "Hits.", ["kind"])
    for kind in ("a", "b"):
        hits.inc(kind=kind)
    totals.add(engine.take())
    assert len(totals.snapshot(["pelton_other"])) == 2 and not caplog.records
    for _ in range(2):
        assert totals.snapshot(["pelton_hits"]) == []
    (record,) = caplog.records
    assert record.getMessage() == (
        f"The counter 'hits' of {__name__} is not shown: pelton_hits is a built-in metric. Give it another name."
    )


@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda m: m.counter("Hits", "Hits."), "small letters"),
        (lambda m: m.counter("hits_total", "Hits."), "without _total"),
        (lambda m: m.counter("hits", ""), "a line of documentation"),
        (lambda m: (m.counter("hits", "H."), m.gauge("hits", "H.")), "declared twice: a counter"),
        (lambda m: (m.counter("hits", "H."), m.counter("hits", "H.", ["a"])), "declared twice"),
        (lambda m: m.counter("hits", "H.", ["a"]).inc(b="1"), r"labels \['b'\]; it has \['a'\]"),
        (lambda m: m.counter("hits", "H.").inc(-1), "cannot be counted up by -1"),
        (lambda m: m.counter("hits", "H.").set(1), "is a counter, which cannot be set"),
        (lambda m: m.gauge("level", "L.").inc(), "is a gauge, which cannot be counted"),
    ],
)
def test_a_wrong_use_is_told(wrong, message):
    with pytest.raises(PluginError, match=message):
        wrong(PluginMetrics())
