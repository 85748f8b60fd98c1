"""A plugin that was made for hook API 1.0 goes on working: a wheel that nobody edits, with the imports of its time."""

from __future__ import annotations

import hashlib
import importlib
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pelton import LLM, SamplingParams, hookspecs
from pelton.cli.main import main
from pelton.plugins import load_plugins
from pelton.testing.server import write_tiny_model

WHEEL = Path(__file__).parent / "data/pelton_of_1_0-1.0-py3-none-any.whl"
SHA256 = "a2d7b9b40defad038dca8f035b9c0f1e50208cf3ed41a941bf1f340c74ecfea4"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with zipfile.ZipFile(WHEEL) as wheel:
        wheel.extractall(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    importlib.invalidate_caches()
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "pelton_of_1_0"]:
        del sys.modules[name]


def test_its_bytes_are_those_of_then():
    assert hashlib.sha256(WHEEL.read_bytes()).hexdigest() == SHA256
    assert hookspecs.API_VERSION[0] == 1, "with version 2 keep another wheel, and let this one be refused with one line"


def test_it_loads_and_its_command_runs(installed, capsys):
    plugins = load_plugins(only=["of_1_0"])
    assert "of_1_0" in {plugin.name for plugin in plugins.loaded}
    assert main(["of-1-0", "you"]) == 0
    assert "hello from 1.0 you" in capsys.readouterr().out


@pytest.mark.filterwarnings("default::DeprecationWarning", "default::FutureWarning")
def test_its_parts_serve(installed, tmp_path):
    """Policy, scheduler, KV manager, source, settings, stat logger and adjustment, in one engine."""
    model = write_tiny_model(tmp_path / "tiny")
    settings = {
        "load_format": "dummy", "max_model_len": 128, "kv_cache_memory_bytes": 2**21, "scheduler": "of_1_0",
        "scheduling_policy": "of_1_0", "kv_cache_manager": "of_1_0", "plugin_config": {"of_1_0": {"weight": 5}},
    }  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    with LLM(model=f"of-1-0:{model}", **settings) as llm:
        answers = llm.generate([{"prompt_token_ids": [5, 6, 7]}] * 2, params, use_tqdm=False)
        assert [len(answer.outputs[0].token_ids) for answer in answers] == [4, 4]
        metrics = {metric.name: metric for metric in llm.get_metrics()}
        assert metrics["of_1_0_finished"].value == 10
        assert next(metric.value for name, metric in metrics.items() if name.endswith("of_1_0_steps")) >= 4
        assert llm.llm_engine.config.scheduler.max_num_seqs == 3


def test_trace_says_who_answered_what(installed, monkeypatch, capsys):
    load_plugins(only=["of_1_0"]).entries("pelton_scheduling_policies")
    assert "plugin trace" not in capsys.readouterr().err
    monkeypatch.setenv("PELTON_TRACE_PLUGINS", "1")
    plugins = load_plugins(only=["of_1_0"])
    plugins.entries("pelton_scheduling_policies")
    plugins.entries("pelton_ops", device_type="cpu")
    err = capsys.readouterr().err
    assert (
        "plugin trace: pelton_scheduling_policies(): of_1_0 gives of_1_0 (priority 50, pelton_of_1_0.parts:LongestFirst)"
        in err
    )
    assert "plugin trace: pelton_ops(device_type='cpu'): native gives " in err
