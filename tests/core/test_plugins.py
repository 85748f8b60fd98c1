"""Loading is strict, outcomes rest on data, and a stranger's plugin comes in as the built-in ones do."""

from __future__ import annotations

import json
import logging
import random
import sys
from pathlib import Path

import pytest

from pelton import hookspecs
from pelton.cli.main import main
from pelton.config import EngineConfig
from pelton.engine.core import make_executor
from pelton.entries import Entry, ModelEntry, PlatformEntry
from pelton.errors import ConfigError, PluginError
from pelton.executor.select import start_ahead
from pelton.metrics.plugin_metrics import PluginMetrics
from pelton.plugins import load_plugins
from pelton.testing.fake_model import fake_resolved_model
from pelton.worker.interface import WorkerContext
from pelton.worker.select import start_worker

MAJOR, MINOR = hookspecs.API_VERSION
HEAD = """
from pelton import hookimpl
from pelton.entries import *
PELTON_API = ">=1,<2"
"""
MODELS = """
@hookimpl
def pelton_models():
    return [ModelEntry(name={name!r}, load="nowhere:{load}", architectures=("X",), priority={priority})]
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Puts a plugin package with its metadata on sys.path, as an installer would; returns the function that does it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    made: list[str] = []

    def install(
        name: str, body: str, *, head: str = HEAD, distribution: str | None = None, module: str | None = None
    ) -> None:
        distribution = distribution or f"dist-{name}"
        module = module or f"plugin_module_{name}_{tmp_path.name.replace('-', '_')}"
        (tmp_path / f"{module}.py").write_text(head + body)
        info = tmp_path / f"{distribution.replace('-', '_')}-1.2.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2\n")
        with (info / "entry_points.txt").open("a") as file:
            if file.tell() == 0:
                file.write("[pelton]\n")
            file.write(f"{name} = {module}\n")
        made.append(module)

    yield install
    for module in made:
        sys.modules.pop(module, None)


def model(name: str, priority: int = 50, load: str = "X") -> str:
    return MODELS.format(name=name, priority=priority, load=load)


def names(entries) -> list[str]:
    return [entry.name for entry in entries]


EXECUTORS = """
from pelton.errors import ConfigError

class Mine:
    def __init__(self, context):
        raise ConfigError(f"mine for {context.config.parallel.num_ranks}")

@hookimpl
def pelton_executors():
    return [ENTRY(name="mine", load=__name__ + ":Mine", priority=99 OPTIONS)]
"""
AHEAD = """
class Started:
    def __init__(self, config, plugins):
        self.model = config.model.model
"""


# What loads.


def test_built_ins_come_in_through_the_entry_point_group():
    plugins = load_plugins(only=[])
    assert {"core", "cpu", "sdpa", "models", "loaders", "sources", "stat_loggers", "server"} <= {
        p.name for p in plugins.loaded
    }
    assert all(p.is_builtin for p in plugins.loaded)
    assert all(p.hooks for p in plugins.loaded)


def test_a_strangers_plugin_loads_beside_them(install):
    install("mine", model("MyModel"))
    plugins = load_plugins()
    mine = plugins.loaded[-1]
    assert (mine.name, mine.distribution, mine.version, mine.hooks) == ("mine", "dist-mine", "1.2", ["pelton_models"])
    assert "MyModel" in names(plugins.entries("pelton_models"))


def test_each_call_makes_a_manager_of_its_own(install):
    install("mine", model("MyModel"))
    first, second = load_plugins(), load_plugins()
    assert first.manager is not second.manager
    assert first.digest() == second.digest()


def test_the_variable_selects_by_name(install, monkeypatch):
    install("one", model("One"))
    install("two", model("Two"))
    everything = load_plugins()
    monkeypatch.setenv("PELTON_PLUGINS", "two")
    some = load_plugins()
    assert [p.name for p in some.loaded if not p.is_builtin] == ["two"]
    assert [p.name for p in some.left_out] == ["one"]
    monkeypatch.setenv("PELTON_PLUGINS", "")
    none = load_plugins()
    assert all(p.is_builtin for p in none.loaded) and none.loaded
    assert len({everything.digest(), some.digest(), none.digest()}) == 3


def test_a_plugin_that_is_left_out_is_not_imported(install):
    install("broken", "raise RuntimeError('imported')")
    load_plugins(only=[])


# What stops the start, with one line.


def stops(match: str, **options) -> str:
    with pytest.raises(PluginError, match=match) as caught:
        load_plugins(**options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_plugin_that_fails_to_import(install):
    install("broken", "import no_such_module_anywhere")
    stops(
        r"Plugin 'broken' of dist-broken 1\.2 fails to import .*: ModuleNotFoundError: No module named 'no_such_module_anywhere'"
    )


def test_a_plugin_with_a_syntax_error(install):
    install("broken", "def x(:")
    stops(r"Plugin 'broken' .* fails to import .*: SyntaxError")


def test_a_misspelt_hook_name(install):
    install("typo", "@hookimpl\ndef pelton_modles():\n    return []\n")
    stops(
        r"Plugin 'typo' of dist-typo: unknown hook 'pelton_modles' \(near to 'pelton_models'\)\. The hooks are listed"
    )


def test_a_hook_without_its_mark(install):
    install("bare", "def pelton_models():\n    return []\n")
    stops(r"Plugin 'bare' of dist-bare: function pelton_models lacks @pelton\.hookimpl")


def test_a_hook_with_an_argument_that_is_none_of_its(install):
    install("args", "@hookimpl\ndef pelton_ops(device):\n    return []\n")
    stops(r"pelton_ops has argument 'device'; it may take device_type")


def test_a_hook_argument_with_a_default(install):
    install("args", "@hookimpl\ndef pelton_ops(device_type='cpu'):\n    return []\n")
    stops(r"pelton_ops gives 'device_type' a default")


def test_a_hook_wrapper(install):
    install("wrap", "@hookimpl(wrapper=True)\ndef pelton_models():\n    return (yield)\n")
    stops(r"pelton_models is a wrapper")


def test_a_coroutine_function_as_a_hook(install):
    install("later", "@hookimpl\nasync def pelton_models():\n    return []\n")
    stops(r"pelton_models is a coroutine function; return entries from a plain one")


def test_a_hook_under_another_name(install):
    install("alias", "@hookimpl(specname='pelton_models')\ndef models():\n    return []\n")
    stops(r"models implements pelton_models under another name")


def test_an_optional_hook_is_as_strict(install):
    install("optional", "@hookimpl(optionalhook=True)\ndef pelton_modles():\n    return []\n")
    stops("unknown hook 'pelton_modles'")


def test_a_plugin_without_any_hook(install):
    install("empty", "X = 1\n")
    stops("Plugin 'empty' of dist-empty: it implements no hook")


@pytest.mark.parametrize("api", ['">=2"', '"<1"', f'">={MAJOR}.{MINOR + 1}"', '"~=1"', "1", "None", '""'])
def test_a_wrong_api_version(install, api):
    install("old", model("X"), head=HEAD + f"PELTON_API = {api}\n")
    said = "does not say what hook API it was made for" if api == "None" else "was made for hook API .*"
    stops(rf"Plugin 'old' of dist-old {said}; this Pelton has {MAJOR}\.{MINOR}")


@pytest.mark.parametrize(
    "api", ['">=1,<2"', f'"=={MAJOR}.{MINOR}"', f'">=0.9, <={MAJOR}.{MINOR}"', f'">0,<{MAJOR}.{MINOR + 1}"']
)
def test_a_fitting_api_version(install, api):
    install("fits", model("X"), head=HEAD + f"PELTON_API = {api}\n")
    assert load_plugins().loaded[-1].name == "fits"


def test_a_plugin_that_is_named_and_missing(install, monkeypatch):
    install("jsonl", model("X"))
    monkeypatch.setenv("PELTON_PLUGINS", "jsnl")
    stops(r"PELTON_PLUGINS names 'jsnl', which no installed package offers\. Did you mean 'jsonl'\?")


def test_two_distributions_with_one_plugin_name(install):
    install("same", model("A"), distribution="dist-a", module="same_plugin_a")
    install("same", model("B"), distribution="dist-b", module="same_plugin_b")
    stops(r"Two distributions offer a plugin named 'same': dist-[ab] and dist-[ab]")


def test_a_stranger_cannot_take_a_built_ins_name(install):
    install("core", model("A"))
    stops(r"Two distributions offer a plugin named 'core'")


def test_a_hook_that_raises_names_its_plugin(install):
    install("raises", "@hookimpl\ndef pelton_models():\n    raise ValueError('no way')\n")
    plugins = load_plugins()
    with pytest.raises(PluginError, match=r"Plugin 'raises' fails in pelton_models: ValueError: no way"):
        plugins.entries("pelton_models")


def test_a_hook_that_returns_no_entries_names_its_plugin(install):
    install("odd", "@hookimpl\ndef pelton_models():\n    return ['X']\n")
    plugins = load_plugins()
    with pytest.raises(PluginError, match=r"Plugin odd \(dist-odd 1\.2\) returns \['X'\] from pelton_models"):
        plugins.entries("pelton_models")


@pytest.mark.parametrize(
    "given, line",
    [
        (
            "name='mine', load='a:B', priority='high'",
            "priority of an entry of pelton_schedulers is 'high'; give a whole number",
        ),
        ("name='mine', load=Entry", r"load of an entry of pelton_schedulers is <class '.*Entry'>; give text"),
        ("name='', load='a:B'", "name of an entry of pelton_schedulers is ''; give text"),
        (
            "name='mine', load='a:B', aliases='other'",
            "aliases of an entry of pelton_schedulers is 'other'; give a tuple of texts",
        ),
    ],
)
def test_an_entry_of_wrong_values_names_its_plugin(install, given, line):
    """Not at the first comparison of priorities, which every command makes."""
    install("odd", f"@hookimpl\ndef pelton_schedulers():\n    return [Entry({given})]\n")
    with pytest.raises(PluginError, match=rf"Plugin odd \(dist-odd 1\.2\): {line}"):
        load_plugins().entries("pelton_schedulers")


def test_one_architecture_without_its_comma_is_told(install):
    """A text would claim every architecture whose name is part of it."""
    entry = "ModelEntry(name='mine', load='a:B', architectures=('MyLlamaForCausalLM'), priority=99)"
    install("odd", f"from pelton.entries import ModelEntry\n@hookimpl\ndef pelton_models():\n    return [{entry}]\n")
    with pytest.raises(
        PluginError, match=r"architectures of an entry of pelton_models is 'MyLlama.*; give a tuple of texts"
    ):
        load_plugins().entries("pelton_models")


# Who wins.


def test_order_is_by_priority_and_name_whatever_the_install_order(install):
    bodies = [("a", model("Low", 10)), ("b", model("B", 90)), ("c", model("A", 90)), ("d", model("Mid", 50))]
    random.Random(0).shuffle(bodies)
    for name, body in bodies:
        install(name, body)
    ours = [n for n in names(load_plugins().entries("pelton_models")) if n in {"Low", "B", "A", "Mid"}]
    assert ours == ["A", "B", "Mid", "Low"]


def test_the_higher_priority_replaces_an_entry_of_its_name_and_that_is_logged(install, caplog):
    install(
        "mine", "@hookimpl\ndef pelton_schedulers():\n    return [Entry(name='default', load='mine:S', priority=60)]\n"
    )
    plugins = load_plugins()
    with caplog.at_level(logging.INFO, logger="pelton"):
        assert plugins.find("pelton_schedulers", "default", setting="scheduler").load == "mine:S"
        plugins.entries("pelton_schedulers")
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "pelton_schedulers: 'default' of mine (dist-mine 1.2) (priority 60) replaces that of scheduler "
        f"(pelton {plugins.loaded[0].version}) (priority 10)"
    ]
    replaced = [offer for offer in plugins.offers("pelton_schedulers") if offer.replaced_by is not None]
    assert [(offer.plugin.name, offer.replaced_by.name) for offer in replaced] == [("scheduler", "mine")]


def test_a_lower_priority_replaces_nothing(install):
    install(
        "mine", "@hookimpl\ndef pelton_schedulers():\n    return [Entry(name='default', load='mine:S', priority=1)]\n"
    )
    assert load_plugins().find("pelton_schedulers", "default", setting="scheduler").load != "mine:S"


def test_two_entries_of_one_name_and_priority_are_an_error(install):
    install("one", model("Same", 50, "A"))
    install("two", model("Same", 50, "B"))
    plugins = load_plugins()
    with pytest.raises(PluginError, match=r"both offer 'Same' with priority 50 \(nowhere:A and nowhere:B\)"):
        plugins.entries("pelton_models")


def test_a_name_that_no_entry_has_lists_those_there_are():
    with pytest.raises(ConfigError, match=r"scheduling_policy is 'lifo'; available: fair, fcfs, priority\."):
        load_plugins(only=[]).find("pelton_scheduling_policies", "lifo", setting="scheduling_policy")


def test_an_entry_that_cannot_be_loaded_says_what_failed():
    with pytest.raises(
        PluginError,
        match=r"Entry 'x' \(no_such_module:Y\) cannot be loaded: ModuleNotFoundError: No module named 'no_such_module'",
    ):
        Entry(name="x", load="no_such_module:Y").resolve()
    with pytest.raises(PluginError, match=r"Model 'x' \(json:Y\) cannot be loaded: .*has no attribute 'Y'"):
        ModelEntry(name="x", load="json:Y", architectures=("X",)).resolve()


def test_a_platform_that_answers_not_here_is_no_error(install):
    install(
        "device",
        "@hookimpl\ndef pelton_platforms():\n"
        "    return [PlatformEntry(name='toaster', load='x:Y', probe=lambda: 'no toaster driver')]\n",
    )
    entry = next(e for e in load_plugins().entries("pelton_platforms") if e.name == "toaster")
    assert isinstance(entry, PlatformEntry) and entry.probe() == "no toaster driver"


# The page of hooks.


def test_a_deprecated_hook_still_works_and_says_what_to_use(install, monkeypatch, caplog):
    import dataclasses

    old = dataclasses.replace(hookspecs.hooks()["pelton_models"], deprecated="use pelton_new_models; gone in 2.0")
    monkeypatch.setitem(hookspecs._HOOKS, "pelton_models", old)
    install("mine", model("MyModel"))
    with caplog.at_level(logging.WARNING, logger="pelton"):
        plugins = load_plugins()
    assert (
        "Plugin 'mine' of dist-mine implements pelton_models, which is deprecated: use pelton_new_models" in caplog.text
    )
    assert "MyModel" in names(plugins.entries("pelton_models"))


def test_loading_plugins_imports_nothing_heavy():
    import subprocess

    code = (
        "import sys; from pelton.plugins import load_plugins; from pelton_plugins.commands.plugins import all_offers\n"
        "all_offers(load_plugins(only=[]))\n"
        "print([m for m in ('torch','transformers','litestar','uvicorn','numpy','zmq','jinja2','huggingface_hub','triton')"
        " if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parent, check=True
    )
    assert done.stdout.strip() == "[]"


class BrokenDevice:
    name = "toaster"

    def __init__(self, fails):
        self.fails = fails

    def worker_class(self):
        if self.fails == "worker_class":
            raise OSError("no driver")
        return lambda *arguments: self

    def init_device(self):
        raise OSError("no driver")


@pytest.mark.parametrize("fails", ["worker_class", "init_device"])
def test_a_platform_whose_device_does_not_start_is_named(fails):
    with pytest.raises(
        PluginError, match=r"^Platform 'toaster' \(.*:BrokenDevice\) fails: OSError: no driver\. Choose another"
    ):
        start_worker(WorkerContext(config=None, model=None, platform=BrokenDevice(fails), plugins=None))


DEVICES = """
def probe():
    {probe}

@hookimpl
def pelton_platforms():
    return [PlatformEntry(name="toaster", load="json:loads", priority=1, probe=probe)]

@hookimpl
def pelton_attention_backends(device_type):
    if device_type == "toaster":
        return [BackendEntry(name="crumbs", load="no_such_module:Crumbs")]
    return []
"""


def checked(capsys):
    code = main(["plugins", "--check", "--json"])
    results = {result["name"]: result for result in json.loads(capsys.readouterr().out)}
    return code, results["bread"]


def test_check_tells_what_two_plugins_both_want(install, capsys):
    install(
        "bread",
        """
@hookimpl
def pelton_models():
    return [ModelEntry(name="loaf", load="json:loads", architectures=("LlamaForCausalLM",))]
""",
    )
    assert main(["plugins", "--check", "--json"]) == 1
    (problem,) = json.loads(capsys.readouterr().out)[-1]["problems"]
    assert "Model 'loaf'" in problem and "both offer architecture 'LlamaForCausalLM' with priority 50" in problem


def test_check_does_not_load_what_is_for_a_device_that_is_not_here(install, capsys):
    install("bread", DEVICES.format(probe="return 'no toaster'"))
    code, result = checked(capsys)
    assert (code, result["problems"]) == (0, [])
    assert result["not_here"] == ["toaster (no toaster)", "crumbs (for toaster)"]
    assert main(["plugins", "--check"]) == 0
    assert (
        "ok   bread (dist-bread 1.2)\n       not here, so not loaded: toaster (no toaster), crumbs (for toaster)"
        in (capsys.readouterr().out)
    )


def test_check_loads_what_is_for_a_device_that_is_here(install, capsys):
    install("bread", DEVICES.format(probe="return None"))
    code, result = checked(capsys)
    assert code == 1 and result["not_here"] == []
    assert any(
        "'crumbs' (no_such_module:Crumbs of " in problem and "cannot be loaded" in problem
        for problem in result["problems"]
    )
    assert any("'toaster' (json:loads) fails: AttributeError" in problem for problem in result["problems"])


def test_check_reports_a_probe_that_raises_as_its_plugins_problem(install, capsys):
    install("bread", DEVICES.format(probe="raise OSError('hot')"))
    code, result = checked(capsys)
    assert (code, result["problems"]) == (1, ["Platform 'toaster' fails in its probe: OSError: hot"])


# Executors follow from the sizes.


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_executor_that_does_not_say_what_it_runs_is_taken_for_any_size(install, ranks):
    install("mine", EXECUTORS.replace("ENTRY", "Entry").replace("OPTIONS", ""))
    with pytest.raises(ConfigError, match=f"^mine for {ranks}$"):
        make_one(tensor_parallel_size=ranks)


@pytest.mark.parametrize("ranks, runs_several", [(1, False), (2, True)])
def test_one_that_says_so_is_taken_for_its_sizes_alone(install, ranks, runs_several):
    body = EXECUTORS.replace("ENTRY", "ExecutorEntry").replace("OPTIONS", f", runs_several={runs_several}")
    install("mine", body)
    with pytest.raises(ConfigError, match=f"^mine for {ranks}$"):
        make_one(tensor_parallel_size=ranks)


def test_what_an_executor_starts_ahead_is_started_for_its_sizes(install):
    options = ', runs_several=True, ahead=__name__ + ":Started"'
    install("mine", EXECUTORS.replace("ENTRY", "ExecutorEntry").replace("OPTIONS", options) + AHEAD)
    plugins = load_plugins()
    assert start_ahead(EngineConfig.from_flat(tensor_parallel_size=2, model="m"), plugins).model == "m"
    assert start_ahead(EngineConfig(), plugins) is None  # one rank: the executor is another


def test_executors_are_found_by_what_other_engines_call_them():
    plugins = load_plugins(only=[])
    for alias, name in {"mp": "multiproc", "uni": "in_process", "multiproc": "multiproc"}.items():
        assert plugins.find("pelton_executors", alias, setting="distributed_executor_backend").name == name


def make_one(**settings):
    return make_executor(
        EngineConfig.from_flat(**settings), fake_resolved_model(max_model_len=64), load_plugins(), PluginMetrics()
    )
