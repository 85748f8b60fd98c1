"""Whatever a plugin's code raises while the engine starts becomes one line that names the plugin and what is to be done."""

from __future__ import annotations

import json
import sys
import time

import pytest

from pelton import LLM
from pelton.cli.main import main
from pelton.entries import Entry, ModelEntry
from pelton.errors import ConfigError, PluginError
from pelton.model.registry import find_model
from pelton.plugins import load_plugins, make
from pelton.scheduler.interface import Scheduler
from pelton.testing.models import make_tiny_checkpoint

SMALL = {"max_model_len": 64, "kv_cache_memory_bytes": 2**20, "disable_log_stats": True, "dtype": "float32"}
PLUGIN = '''
from pelton import hookimpl
from pelton.entries import *
PELTON_API = ">=1,<2"
def boom(*args, **kwargs):
    raise RuntimeError("boom")
def nothing(*args, **kwargs):
    return None
'''  # fmt: skip
MODEL = """
class Model:
    pass
from pelton_plugins.models.llama import LlamaForCausalLM
class Model(LlamaForCausalLM):
    def {method}(self, *args):
        {body}
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(make_tiny_checkpoint(tmp_path_factory.mktemp("blame") / "model", "llama"))


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Make a package with its metadata; the name of its module is that of the plugin."""
    monkeypatch.syspath_prepend(str(tmp_path))
    made = []

    def install(body: str, name: str = "acme_plugin") -> str:
        (tmp_path / f"{name}.py").write_text(PLUGIN.replace("'''", "") + body)
        info = tmp_path / f"{name}-0.3.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.3\n")
        (info / "entry_points.txt").write_text(f"[pelton]\n{name} = {name}\n")
        made.append(name)
        return name

    yield install
    for name in made:
        sys.modules.pop(name, None)


def hook(name: str, entry: str, arguments: str = "") -> str:
    return f"\n@hookimpl\ndef {name}({arguments}):\n    return [{entry}]\n"


def start(checkpoint: str, **settings) -> str:
    """What a start says that fails."""
    with pytest.raises(PluginError) as caught:
        LLM(model=checkpoint, **SMALL, **settings)
    message = str(caught.value)
    assert "\n" not in message
    return message


HANGING = """
import logging, threading
told, logger = threading.Event(), logging.getLogger("pelton.plugins")
class Handler(logging.Handler):
    def emit(self, record):
        told.set()
logger.addHandler(handler := Handler())
assert told.wait(90)
logger.removeHandler(handler)
"""
NAMED = "of acme_plugin (acme_plugin 0.3)"


@pytest.mark.parametrize(
    "hook_name, kind, settings",
    [
        ("pelton_schedulers", "Entry", {"scheduler": "mine"}),
        ("pelton_scheduling_policies", "Entry", {"scheduling_policy": "mine"}),
        ("pelton_kv_cache_managers", "Entry", {"kv_cache_manager": "mine"}),
        ("pelton_executors", "Entry", {"distributed_executor_backend": "mine"}),
        ("pelton_draft_proposers", "Entry", {"speculative_config": {"method": "mine"}}),
        ("pelton_stat_loggers", "StatLoggerEntry", {"disable_log_stats": False}),
    ],
)
@pytest.mark.parametrize("factory", ["boom", "nothing"])
def test_a_factory_that_raises_or_gives_nothing(install, checkpoint, hook_name, kind, settings, factory):
    install(hook(hook_name, f"{kind}(name='mine', load='acme_plugin:{factory}', priority=1)"))
    with pytest.raises(PluginError) as caught:
        LLM(model=checkpoint, **{**SMALL, **settings})
    message = str(caught.value)
    kind_named = hook_name if kind == "Entry" else "StatLogger"
    assert message.startswith(f"{kind_named} 'mine'") and NAMED in message
    assert "Fix the plugin, or leave it out with PELTON_PLUGINS" in message
    assert (
        "RuntimeError: boom" if factory == "boom" else "nothing" if kind == "Entry" else "has no record()"
    ) in message
    assert "\n" not in message


def test_a_model_source_that_raises_or_answers_nonsense(install, checkpoint):
    install(hook("pelton_model_sources", "Entry(name='mine', load='acme_plugin:boom', priority=99)"))
    assert "'mine' (acme_plugin:boom of acme_plugin (acme_plugin 0.3)) fails: RuntimeError: boom" in start(checkpoint)


def test_an_attention_backend_that_raises_is_not_the_models_fault(install, checkpoint):
    body = "\nfrom pelton.attention.interface import AttentionBackend\nclass Backend(AttentionBackend):\n"
    body += "    @classmethod\n    def unsupported(cls, needs, capability=None):\n        raise RuntimeError('boom')\n"
    entry = "BackendEntry(name='mine', load='acme_plugin:Backend', priority=99)"
    install(body + hook("pelton_attention_backends", entry, "device_type"))
    message = start(checkpoint)
    assert message.startswith(
        "Backend 'mine' (acme_plugin:Backend of acme_plugin (acme_plugin 0.3)) fails: RuntimeError"
    )
    assert "config.json" not in message


def test_an_op_that_raises_is_not_the_models_fault(install, checkpoint):
    body = "\nclass Op:\n    unsupported = staticmethod(boom)\n    bind = staticmethod(boom)\n"
    entry = "OpEntry(name='mine', seam='linear', load='acme_plugin:Op', priority=99)"
    install(body + hook("pelton_ops", entry, "device_type"))
    message = start(checkpoint)
    assert message.startswith("Op 'mine' (acme_plugin:Op of acme_plugin (acme_plugin 0.3)) fails: RuntimeError: boom")


PLATFORM = """
from pelton_platforms.cpu.platform import CPUPlatform
class Mine(CPUPlatform):
    name = "mine"
    {body}
"""


@pytest.mark.parametrize(
    "body, words",
    [
        ("def __init__(self): boom()", "RuntimeError: boom"),
        ("available_kv_cache_bytes = boom", "fails when memory for the KV cache is measured: RuntimeError: boom"),
        ("init_device = boom", "RuntimeError: boom"),
    ],
)
def test_a_platform_that_raises(install, checkpoint, body, words):
    entry = "PlatformEntry(name='mine', load='acme_plugin:Mine', priority=99, probe=lambda: None)"
    install(PLATFORM.format(body=body) + hook("pelton_platforms", entry))
    message = start(checkpoint, device="mine")
    assert words in message and "acme_plugin" in message


def test_a_platform_with_missing_methods(install, checkpoint):
    body = "\nfrom pelton.platform.interface import Platform\nclass Mine(Platform):\n    name = 'mine'\n"
    entry = "PlatformEntry(name='mine', load='acme_plugin:Mine', priority=99, probe=lambda: None)"
    install(body + hook("pelton_platforms", entry))
    message = start(checkpoint, device="mine")
    assert NAMED in message and "abstract" in message


@pytest.mark.parametrize("method, body", [("forward", "boom()"), ("compute_logits", "boom()")])
def test_a_model_that_raises_in_the_warm_up(install, checkpoint, method, body):
    entry = "ModelEntry(name='mine', load='acme_plugin:Model', architectures=('LlamaForCausalLM',), priority=99)"
    install(MODEL.format(method=method, body=body) + hook("pelton_models", entry))
    message = start(checkpoint)
    assert (
        message.startswith("Plugin acme_plugin (acme_plugin 0.3) fails ")
        and "RuntimeError: boom (in acme_plugin:" in message
    )


def test_logits_of_another_width_are_told(install, checkpoint):
    """A model whose head leaves tokens out would serve, with other tokens."""
    entry = "ModelEntry(name='mine', load='acme_plugin:Model', architectures=('LlamaForCausalLM',), priority=99)"
    body = MODEL.format(method="compute_logits", body="return super().compute_logits(*args)[:, :7]")
    install(body + hook("pelton_models", entry))
    assert "Model.compute_logits gives [1, 7] for one row; it has to be [1, 320]" in start(checkpoint)


@pytest.mark.parametrize(
    "body, words",
    [
        ("return super().compute_logits(*args).bfloat16()", "gives torch.bfloat16; it has to be torch.float32"),
        ("pass", "gives None; it has to give a tensor"),
    ],
)
def test_logits_that_kernels_would_read_as_something_else_are_told(install, checkpoint, body, words):
    entry = "ModelEntry(name='mine', load='acme_plugin:Model', architectures=('LlamaForCausalLM',), priority=99)"
    install(MODEL.format(method="compute_logits", body=body) + hook("pelton_models", entry))
    assert f"acme_plugin:Model.compute_logits {words}" in start(checkpoint)


def test_what_a_model_returns_is_blamed_on_it_where_a_base_class_of_ours_raises(install, checkpoint):
    entry = "ModelEntry(name='mine', load='acme_plugin:Model', architectures=('LlamaForCausalLM',), priority=99)"
    install(MODEL.format(method="forward", body="return None") + hook("pelton_models", entry))
    message = start(checkpoint)
    assert message.startswith("Plugin acme_plugin (acme_plugin 0.3) fails ")
    assert "(in pelton.layers.decoder:Decoder.compute_logits, line " in message


BACKEND = """
from pelton_backends.sdpa.backend import SDPABackend
from pelton.attention.interface import AttentionBackend
class Backend({base}):
    name = "mine"
    {body}
    @classmethod
    def unsupported(cls, needs, capability=None):
        return []
"""


@pytest.mark.parametrize(
    "base, body, words",
    [
        ("SDPABackend", "bind = nothing", "bind of <class 'acme_plugin.Backend'> gives None, not a BoundAttention"),
        (
            "AttentionBackend",
            "",
            f"Backend 'mine' (acme_plugin:Backend {NAMED}) fails: TypeError: it lacks build",
        ),
    ],
    ids=["bind-gives-nothing", "abstract"],
)
def test_an_attention_backend_that_is_not_whole(install, checkpoint, base, body, words):
    entry = "BackendEntry(name='mine', load='acme_plugin:Backend', priority=99)"
    install(BACKEND.format(base=base, body=body) + hook("pelton_attention_backends", entry, "device_type"))
    assert words in start(checkpoint)


@pytest.mark.parametrize(
    "body, words",
    [
        ("device = lambda self, local_rank: 'cpu'", "TypeError: device() gives 'cpu', not a torch.device"),
        ("default_max_num_seqs = '16'", f"{NAMED}) makes a Mine whose default_max_num_seqs is '16'"),
        ("device_type = None", f"{NAMED}) makes a Mine whose device_type is None"),
    ],
)
def test_a_platform_that_says_nonsense(install, checkpoint, body, words):
    entry = "PlatformEntry(name='mine', load='acme_plugin:Mine', priority=99, probe=lambda: None)"
    install(PLATFORM.format(body=body) + hook("pelton_platforms", entry))
    message = start(checkpoint, device="mine")
    assert message.startswith("Platform 'mine'") and words in message


def test_an_op_whose_bind_gives_nothing(install, checkpoint):
    body = "\nclass Op:\n    handles = ()\n    unsupported = staticmethod(lambda needs: [])\n    bind = staticmethod(nothing)\n"
    entry = "OpEntry(name='mine', op='linear', load='acme_plugin:Op', priority=99)"
    install(body + hook("pelton_ops", entry, "device_type"))
    message = start(checkpoint)
    assert message.startswith(f"Op 'mine' (acme_plugin:Op {NAMED}) fails: TypeError: bind gives None")


def test_a_fused_op_that_is_something_else(install, checkpoint):
    install(hook("pelton_fused_ops", "Entry(name='mine', load='acme_plugin:boom')"))
    message = start(checkpoint)
    assert message.startswith(f"pelton_fused_ops 'mine' (acme_plugin:boom {NAMED}) is a function, not a FusedOp")


@pytest.mark.parametrize("half, wanted", [("for_scheduler", "SchedulerConnector"), ("for_worker", "WorkerConnector")])
def test_a_kv_connector_without_one_of_its_halves(install, checkpoint, half, wanted):
    body = "\nfrom pelton_plugins.kv_connectors.shared_storage import SharedStorage\n"
    body += f"class Mine(SharedStorage):\n    {half} = staticmethod(nothing)\n"
    install(body + hook("pelton_kv_connectors", "Entry(name='mine', load='acme_plugin:Mine')"))
    settings = {"kv_connector": "mine", "kv_connector_extra_config": {"shared_storage_path": checkpoint}}
    message = start(checkpoint, kv_transfer_config=settings)
    assert message.startswith(f"The KV connector 'mine' gives None from {half}; it has to give a {wanted}")


QUANTIZATION = """
from pelton.quantization.plain import PlainWeights
class Mine(PlainWeights):
    name = "mine"
    def __init__(self, config, model): pass
    {body}
"""


@pytest.mark.parametrize(
    "body, place",
    [
        ("def create(self, *args, **kwargs): boom()", "create"),
        (
            "def expect(self, config, shard, target): config.weights.expect(shard.name + '.weight', None, target, fill=boom)",
            "boom",
        ),
    ],
    ids=["create", "fill"],
)
def test_a_quantization_method_that_raises_is_not_the_models_fault(install, checkpoint, body, place):
    install(
        QUANTIZATION.format(body=body)
        + hook("pelton_quantization_methods", "Entry(name='mine', load='acme_plugin:Mine')")
    )
    message = start(checkpoint, quantization="mine")
    assert message.startswith("Plugin acme_plugin (acme_plugin 0.3) fails when the executor starts: RuntimeError: boom")
    assert "config.json" not in message


def test_a_quantization_method_that_creates_nothing_is_not_the_models_fault(install, checkpoint):
    install(
        QUANTIZATION.format(body="create = nothing")
        + hook("pelton_quantization_methods", "Entry(name='mine', load='acme_plugin:Mine')")
    )
    assert start(checkpoint, quantization="mine") == (
        "Quantization method 'mine' (acme_plugin:Mine.create) gives None for model.embed_tokens; it has to give LinearWeights. Fix the "
        "plugin, or leave it out with PELTON_PLUGINS."
    )


def test_a_model_that_is_not_a_module_is_told_so(install, checkpoint):
    body = "\nclass Model:\n    def __init__(self, *, config, prefix=''): pass\n"
    body += "    forward = compute_logits = load_weights = nothing\n"
    entry = "ModelEntry(name='mine', load='acme_plugin:Model', architectures=('LlamaForCausalLM',), priority=99)"
    install(body + hook("pelton_models", entry))
    assert start(checkpoint) == (
        f"Model 'mine' (acme_plugin:Model {NAMED}) makes a Model; it has to make a torch.nn.Module. Fix the plugin, or leave it out "
        "with PELTON_PLUGINS."
    )


def test_a_factory_of_a_quantization_method_that_gives_nothing(install, checkpoint):
    install(hook("pelton_quantization_methods", "Entry(name='mine', load='acme_plugin:nothing')"))
    assert f"'mine' (acme_plugin:nothing {NAMED}) makes nothing; it has to make" in start(
        checkpoint, quantization="mine"
    )


def test_a_draft_proposer_without_a_number_of_drafts(install, checkpoint):
    body = "\nfrom pelton.spec_decode.interface import DraftProposer\nclass Mine(DraftProposer):\n"
    body += "    def __init__(self, context): pass\n    def propose(self, request_id, token_ids): return []\n"
    install(body + hook("pelton_draft_proposers", "Entry(name='mine', load='acme_plugin:Mine')"))
    message = start(checkpoint, speculative_config={"method": "mine"})
    assert f"{NAMED}) makes a Mine whose max_draft_tokens is None" in message


def test_a_stat_logger_that_publishes_something_else_costs_the_others_nothing(install, checkpoint, caplog):
    body = "\nclass Mine:\n    def __init__(self, config, engine_index=0): pass\n    record = log = nothing\n"
    body += "    def snapshot(self): return {'a': 1}\n"
    install(body + hook("pelton_stat_loggers", "StatLoggerEntry(name='mine', load='acme_plugin:Mine')"))
    with LLM(model=checkpoint, **{**SMALL, "disable_log_stats": False}) as llm:
        names = {metric.name for metric in llm.get_metrics()}
    assert "pelton_num_requests_running" in names
    assert "Stat logger 'mine' failed in snapshot_of()" in caplog.text


def test_an_error_of_our_own_stays_what_it_is(checkpoint, monkeypatch):
    monkeypatch.setattr("pelton.engine.core.make_plan", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        LLM(model=checkpoint, plugins=load_plugins(only=[]), **SMALL)


def test_a_quantization_method_that_raises(install, checkpoint):
    install(hook("pelton_quantization_methods", "Entry(name='mine', load='acme_plugin:boom')"))
    message = start(checkpoint, quantization="mine")
    assert message.startswith(
        "pelton_quantization_methods 'mine' (acme_plugin:boom of acme_plugin (acme_plugin 0.3)) fails"
    )


@pytest.mark.parametrize("said", ["'plenty'", "-1.5", "None"])
def test_a_platform_whose_memory_is_not_a_number_of_bytes(install, checkpoint, said):
    body = f"def available_kv_cache_bytes(self, *args, **kwargs): return {said}"
    entry = "PlatformEntry(name='mine', load='acme_plugin:Mine', priority=99, probe=lambda: None)"
    install(PLATFORM.format(body=body) + hook("pelton_platforms", entry))
    settings = {name: value for name, value in SMALL.items() if name != "kv_cache_memory_bytes"}
    with pytest.raises(PluginError) as caught:
        LLM(model=checkpoint, device="mine", **settings)
    message = str(caught.value)
    assert message.startswith("Platform 'mine' (acme_plugin:Mine)") and f"{said}; it has to be" in message


# Entries.


@pytest.mark.parametrize(
    "body, message",
    [
        (
            "\n@hookimpl\ndef pelton_models():\n    pass\n",
            "returns nothing from pelton_models; return a list of entries",
        ),
        (
            hook("pelton_models", "Entry(name='mine', load='x:y')"),
            "offers 'mine' from pelton_models, of class Entry; the class has to be ModelEntry",
        ),
        ("\nimport sys\nsys.exit(3)\n", "fails to import acme_plugin: SystemExit: 3"),
        (
            "\n@hookimpl\ndef pelton_models():\n    raise SystemExit(3)\n",
            "Plugin 'acme_plugin' fails in pelton_models: SystemExit: 3",
        ),
    ],
    ids=["none", "kind", "exit", "exit-in-the-hook"],
)
def test_what_a_hook_returns_is_checked(install, body, message):
    install(body)
    with pytest.raises(PluginError) as caught:
        load_plugins().entries("pelton_models")
    assert message in str(caught.value) and "acme_plugin" in str(caught.value)


@pytest.mark.parametrize(
    "hook_name, arguments, wanted",
    [
        ("pelton_worker_settings", "config, device_type", "names to texts"),
        ("pelton_config_adjustments", "config", "names to (value, reason)"),
    ],
)
def test_a_list_where_a_mapping_is_due_is_the_plugins_mistake(install, checkpoint, hook_name, arguments, wanted):
    install(hook(hook_name, "3", arguments))
    assert start(checkpoint) == (
        f"Plugin 'acme_plugin' returns [3] from {hook_name}; return a mapping of {wanted}. Fix the plugin, or leave it out with "
        "PELTON_PLUGINS."
    )


def test_a_choice_that_is_not_a_text_is_the_plugins_mistake(install, checkpoint):
    install("\n@hookimpl\ndef pelton_worker_settings(config):\n    return {'colour': 3}\n")
    assert start(checkpoint).startswith(
        "Plugin 'acme_plugin' returns {'colour': 3} from pelton_worker_settings; return"
    )


def test_a_plugins_print_does_not_spoil_what_a_command_prints(install, capsys, tmp_path):
    """Not when it is imported, in its hooks, nor in what they name."""
    body = "@hookimpl\ndef pelton_models():\n    print('hello from the hook')\n    return []\n"
    install(
        f"\nprint('hello from acme')\n{body}" + hook("pelton_schedulers", "Entry(name='mine', load='acme_parts:boom')")
    )
    (tmp_path / "acme_parts.py").write_text(
        "print('hello from the parts')\ndef boom(*args):\n    raise ValueError('bang')\n"
    )
    assert main(["plugins", "--json"]) == 0
    captured = capsys.readouterr()
    assert "acme_plugin" in {plugin["name"] for plugin in json.loads(captured.out)}
    assert "hello from acme" in captured.err and "hello from the hook" in captured.err
    plugins = load_plugins()
    (entry,) = (entry for entry in plugins.entries("pelton_schedulers") if entry.name == "mine")
    parts = entry.resolve()
    captured = capsys.readouterr()
    assert captured.out == "" and "hello from the parts" in captured.err
    with (
        pytest.raises(
            PluginError, match=r"Plugin acme_plugin .* fails in a test: ValueError: bang \(in acme_parts:boom"
        ),
        plugins.blaming("in a test"),
    ):  # a package that the plugin's entries name is the plugin's
        parts()
    sys.modules.pop("acme_parts")


def test_an_import_that_hangs_is_named(install, caplog, monkeypatch):
    """While it hangs: the plugin's import ends once it has seen the line."""
    monkeypatch.setattr("pelton.plugins.HANGING_LOAD_S", 0.01)
    install(HANGING + hook("pelton_models", ""))
    load_plugins()
    line = "Plugin acme_plugin (acme_plugin 0.3) is being imported (acme_plugin), for more than 0.0 s by now"
    end = time.monotonic() + 60
    while (
        line not in caplog.text and time.monotonic() < end
    ):  # the thread that tells it may be on its way to this listener
        time.sleep(0.001)
    assert line in caplog.text


def test_a_slow_import_is_told(install, caplog, monkeypatch):
    monkeypatch.setattr("pelton.plugins.SLOW_LOAD_S", 0.02)
    install("\nimport time\ntime.sleep(0.05)\n" + hook("pelton_models", ""))
    plugins = load_plugins()
    load_s = plugins.loaded[-1].load_s
    assert f"Plugin acme_plugin (acme_plugin 0.3) takes {load_s:.1f} s to import" in caplog.text
    assert load_s >= 0.05


@pytest.mark.parametrize("load", ["module", "module:", ":name"])
def test_a_load_without_both_parts(load):
    with pytest.raises(PluginError, match="write 'module:attribute'"):
        Entry(name="x", load=load).resolve()


def test_make_says_what_came_instead():
    entry = Entry(name="x", load="builtins:dict", plugin="acme 1.0")
    with pytest.raises(
        PluginError, match=r"Entry 'x' \(builtins:dict of acme 1\.0\) makes a dict; it has to make a .*Scheduler"
    ):
        make(entry, Scheduler)


# Architectures.


def entry(name, *architectures, priority=50, kind="generate"):
    return ModelEntry(
        name=name, load="x:y", architectures=architectures, priority=priority, plugin=f"of-{name}", kind=kind
    )


def test_two_models_of_one_architecture_are_an_error():
    with pytest.raises(
        PluginError, match=r"Model 'a' \(x:y of of-a\) and Model 'b' .* architecture 'X' with priority 50"
    ):
        find_model([entry("a", "X"), entry("b", "Y", "X")], "X")
    assert find_model([entry("a", "X"), entry("b", "Y", "X")], "Y").name == "b"


def test_a_higher_priority_takes_an_architecture_over_and_that_is_logged(caplog):
    with caplog.at_level("INFO"):
        assert find_model([entry("a", "X"), entry("b", "X", priority=60)], "X").name == "b"
    assert "takes architecture 'X' (priority 60) from Model 'a'" in caplog.text


def test_a_fallback_serves_what_no_other_entry_names():
    entries = [entry("any", "*", priority=90), entry("x", "X")]
    assert find_model(entries, "X").name == "x"
    assert find_model(entries, "Z").name == "any"


def test_a_model_that_does_something_else_is_refused():
    with pytest.raises(ConfigError, match=r"Model 'a' .* is a model to draw; this Pelton runs models to generate"):
        find_model([entry("a", "X", kind="draw")], "X")


def test_a_stat_logger_that_names_its_arguments_otherwise_is_told_so(install):
    """It is made by keyword: `config` and `engine_index`."""
    from pelton.config import EngineConfig
    from pelton.metrics.manager import StatLoggers

    install(
        "class Logger:\n"
        "    def __init__(self, c, i): pass\n"
        "@hookimpl\n"
        "def pelton_stat_loggers():\n"
        "    return [StatLoggerEntry(name='mine', load='acme_plugin:Logger')]\n"
    )
    with pytest.raises(PluginError, match=r"StatLogger 'mine' .*acme_plugin.* fails: TypeError: .*'config'"):
        StatLoggers(EngineConfig(), load_plugins())
