"""What a plugin offers through a hook is what the engine uses: one run with everything replaceable replaced."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

from pelton import LLM, SamplingParams, hookimpl
from pelton.engine.start_table import start_table
from pelton.entries import Entry, LoaderEntry
from pelton.errors import ConfigError
from pelton.executor.interface import ExecutorContext
from pelton.plugins import Plugins, load_plugins, register
from pelton.scheduler.policy import SchedulingPolicy
from pelton.spec_decode.interface import DraftProposer
from pelton.testing.models import make_tiny_checkpoint
from pelton.worker.select import worker_class
from pelton_platforms.device.worker import DeviceWorker
from pelton_plugins.executors.in_process import InProcessExecutor
from pelton_plugins.kv_cache.manager import PagedKVCacheManager
from pelton_plugins.loaders.hf_folder.format import HFFolderFormat
from pelton_plugins.scheduler.scheduler import DefaultScheduler

HERE = "pelton_test_hooks_module"
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, detokenize=False)
SMALL = {
    "max_num_seqs": 1,
    "max_model_len": 64,
    "kv_cache_memory_bytes": 2**20,
    "disable_log_stats": True,
    "dtype": "float32",
}
PROMPTS = [{"prompt_token_ids": [5, 6, 7]}, {"prompt_token_ids": [8, 9]}, {"prompt_token_ids": [10, 11, 12, 13]}]

used: list[str] = []


class Executor(InProcessExecutor):
    def execute(self, output):
        used.append("executor")
        return super().execute(output)


class Worker(DeviceWorker):
    def execute(self, output):
        used.append("worker")
        return super().execute(output)


class OldExecutor(Executor):
    """Takes what an `ExecutorContext` has one by one, as executors did."""

    def __init__(self, config, model, plugins):
        super().__init__(ExecutorContext(config=config, model=model, plugins=plugins))


class Scheduler(DefaultScheduler):
    def schedule(self):
        used.append("scheduler")
        return super().schedule()


class NoAdapters(DefaultScheduler):
    def __init__(self, context):
        super().__init__(context)
        self.adapters = None


class Manager(PagedKVCacheManager):
    def allocate(self, *args, **kwargs):
        used.append("manager")
        return super().allocate(*args, **kwargs)


class LastComeFirstServed(SchedulingPolicy):
    def rank(self, request):
        used.append("policy")
        return (-request.arrival,)


class Proposer(DraftProposer):
    def __init__(self, context):
        assert context.config.method == "mine" and context.vocab_size > 7
        self.max_draft_tokens = context.config.num_speculative_tokens

    def propose(self, request_id, token_ids):
        used.append("proposer")
        return [7] * self.max_draft_tokens


class Format(HFFolderFormat):
    """A folder whose name ends in .mine, with its weights under another name."""

    def matches(self, path: Path) -> bool:
        return path.suffix == ".mine"

    def weights_format(self, path: Path) -> str:
        used.append("format")
        return "mine"


def make_loader(config, model):
    from pelton_plugins.loaders.safetensors_loader import SafetensorsLoader

    used.append("loader")
    hidden = Path(model.path) / "weights.hidden"
    hidden.rename(hidden.with_name("model.safetensors"))
    return SafetensorsLoader(config, model)


def find_source(request) -> str | None:
    if not request.name.startswith("mine:"):
        return None
    used.append("source")
    return request.name.removeprefix("mine:")


class EverythingPlugin:
    """Takes the place of the built-in parts: by name where there is a setting, by priority where there is none."""

    PELTON_API = ">=1,<2"

    @hookimpl
    def pelton_executors(self):
        return [Entry(name="mine", load=f"{HERE}:Executor", priority=60)]

    @hookimpl
    def pelton_workers(self, device_type):
        return [Entry(name="mine", load=f"{HERE}:Worker", priority=60)] if device_type == "cpu" else []

    @hookimpl
    def pelton_schedulers(self):
        return [Entry(name="mine", load=f"{HERE}:Scheduler"), Entry(name="plain", load=f"{HERE}:NoAdapters")]

    @hookimpl
    def pelton_scheduling_policies(self):
        return [Entry(name="lifo", load=f"{HERE}:LastComeFirstServed")]

    @hookimpl
    def pelton_kv_cache_managers(self):
        return [Entry(name="mine", load=f"{HERE}:Manager.make", priority=60)]

    @hookimpl
    def pelton_draft_proposers(self):
        return [Entry(name="mine", load=f"{HERE}:Proposer")]

    @hookimpl
    def pelton_model_loaders(self):
        return [LoaderEntry(name="mine", load=f"{HERE}:make_loader")]

    @hookimpl
    def pelton_model_formats(self):
        return [Entry(name="mine", load=f"{HERE}:Format", priority=60)]

    @hookimpl
    def pelton_model_sources(self):
        return [Entry(name="mine", load=f"{HERE}:find_source", priority=60)]

    @hookimpl
    def pelton_config_adjustments(self, config):
        return {
            "scheduler": ("mine", "the plugin brings one"),
            "scheduling_policy": ("lifo", "newest first is what it wants"),
            "max_num_seqs": (3, "the user's one is kept"),
        }

    @hookimpl
    def pelton_worker_settings(self, config, device_type):
        own = config.plugin_config.get("everything", {})
        if own.get("colour") == "infrared":
            raise ConfigError("plugin_config.everything.colour is 'infrared'; use one that can be seen.")
        return {"colour": f"{own.get('colour', 'grey')} on {device_type}"}


@pytest.fixture
def plugins(monkeypatch) -> Plugins:
    module = ModuleType(HERE)
    for thing in (
        Executor,
        OldExecutor,
        Worker,
        Scheduler,
        NoAdapters,
        Manager,
        LastComeFirstServed,
        Proposer,
        Format,
        make_loader,
        find_source,
    ):
        setattr(module, thing.__name__, thing)
    monkeypatch.setitem(sys.modules, HERE, module)
    used.clear()
    loaded = load_plugins(only=[])
    register(loaded.manager, EverythingPlugin(), "everything", "test")
    return loaded


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("hooks") / "model", "llama")


def finish_order(llm: LLM) -> list[str]:
    for index, prompt in enumerate(PROMPTS):
        llm.llm_engine.add_request(str(index), prompt, GREEDY)
    done = []
    while llm.llm_engine.has_unfinished_requests():
        done += [output.request_id for output in llm.llm_engine.step() if output.finished]
    return done


def test_what_a_plugin_offers_is_what_runs(plugins, checkpoint, tmp_path):
    mine = tmp_path / "model.mine"
    shutil.copytree(checkpoint, mine)
    (mine / "model.safetensors").rename(mine / "weights.hidden")
    with LLM(model=str(checkpoint), plugins=load_plugins(only=[]), **SMALL) as llm:
        expected = [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
        assert finish_order(llm) == ["0", "1", "2"]
    assert not used
    with LLM(model=f"mine:{mine}", plugins=plugins, speculative_config={"method": "mine"}, **SMALL) as llm:
        assert llm.llm_engine.config.scheduler.max_num_seqs == 1
        answers = [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
        assert finish_order(llm) == ["2", "1", "0"]
    assert answers == expected
    assert {"executor", "worker", "scheduler", "manager", "policy", "proposer", "format", "loader", "source"} == set(
        used
    )


def test_a_platform_whose_type_of_device_has_no_worker_is_told_so(plugins):
    class Toaster:
        name = device_type = "toaster"

        def worker_class(self):
            return None

    assert worker_class(Toaster(), load_plugins(only=[])) is DeviceWorker
    plugins.manager.unregister(name="device_worker")
    with pytest.raises(ConfigError, match="No plugin offers a worker for device type 'toaster'"):
        worker_class(Toaster(), plugins)


def test_a_scheduler_that_serves_no_adapters_is_refused_with_lora(plugins, checkpoint):
    with pytest.raises(ConfigError, match="scheduler 'plain' serves no adapters"):
        LLM(model=str(checkpoint), plugins=plugins, scheduler="plain", enable_lora=True, **SMALL)


def test_a_plugin_takes_its_own_settings_where_the_worker_runs(plugins, checkpoint):
    def make(colour):
        return LLM(model=str(checkpoint), plugins=plugins, plugin_config={"everything": {"colour": colour}}, **SMALL)

    with make("red") as llm:
        assert llm.llm_engine.info.report.choices["colour"] == "red on cpu"
        assert " red on cpu\n" in start_table(llm.llm_engine.info, llm.llm_engine.model)
    with pytest.raises(ConfigError, match="'infrared'; use one that can be seen"):
        make("infrared")


def test_a_kv_cache_manager_is_named_by_the_settings(plugins, checkpoint, caplog):
    """One that is not built in is named in the log of the start."""
    caplog.set_level("INFO", "pelton")
    with LLM(model=str(checkpoint), plugins=plugins, kv_cache_manager="default", **SMALL) as llm:
        llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    assert "manager" not in used
    assert "KV-cache manager: " not in caplog.text
    with LLM(model=str(checkpoint), plugins=plugins, kv_cache_manager="mine", **SMALL) as llm:
        llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    assert "manager" in used
    assert "KV-cache manager: pelton_kv_cache_managers 'mine' (" in caplog.text


def test_a_kv_cache_manager_of_the_old_form_is_made_with_a_warning(plugins, checkpoint, monkeypatch, caplog):
    monkeypatch.setattr(
        EverythingPlugin, "pelton_kv_cache_managers",
        hookimpl(lambda self: [Entry(name="mine", load=f"{HERE}:Manager", priority=60)]),
    )  # fmt: skip
    old = load_plugins(only=[])
    register(old.manager, EverythingPlugin(), "everything", "test")
    with LLM(model=str(checkpoint), plugins=old, **SMALL) as llm:
        llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    assert "manager" in used and "take a KVManagerContext" in caplog.text


def test_an_executor_of_the_old_form_is_made_with_a_warning(plugins, checkpoint, monkeypatch, caplog):
    monkeypatch.setattr(
        EverythingPlugin, "pelton_executors",
        hookimpl(lambda self: [Entry(name="mine", load=f"{HERE}:OldExecutor", priority=60)]),
    )  # fmt: skip
    old = load_plugins(only=[])
    register(old.manager, EverythingPlugin(), "everything", "test")
    with LLM(model=str(checkpoint), plugins=old, **SMALL) as llm:
        llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    assert "executor" in used and "take an ExecutorContext" in caplog.text


def test_the_users_setting_wins_over_the_plugins(plugins, checkpoint):
    with LLM(model=str(checkpoint), plugins=plugins, scheduling_policy="fcfs", scheduler="default", **SMALL) as llm:
        assert finish_order(llm) == ["0", "1", "2"]
    assert "policy" not in used and "scheduler" not in used
    assert "executor" in used and "manager" in used


@pytest.mark.parametrize(
    "setting, message",
    [
        ("scheduler", "scheduler is 'none'; available: mine, plain, default"),
        ("scheduling_policy", "scheduling_policy is 'none'; available: lifo, fair, fcfs, priority"),
        ("distributed_executor_backend", "distributed_executor_backend is 'none'; available: mine, in_process"),
        ("kv_cache_manager", "kv_cache_manager is 'none'; available: mine, default"),
        ("load_format", r"load_format is 'none'; available: .*mine"),
    ],
)
def test_a_name_that_nobody_offers_lists_those_there_are(plugins, checkpoint, setting, message):
    with pytest.raises(ConfigError, match=message):
        LLM(model=str(checkpoint), plugins=plugins, **SMALL, **{setting: "none"})
