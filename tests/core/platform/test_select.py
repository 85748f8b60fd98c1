"""Which platform wins: priority, a named device, strangers, reasons."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from pelton.config import EngineConfig
from pelton.entries import PlatformEntry
from pelton.errors import ConfigError, PluginError
from pelton.platform.select import choose_platform, platform_statuses, select_platform
from pelton.plugins import LoadedPlugin, Offer, load_plugins
from pelton_plugins.commands.platforms import describe_platforms

BUILTIN = LoadedPlugin("core", "pelton", "1", "m")
STRANGER = LoadedPlugin("ext", "pelton-ext", "1", "m")
OTHER = LoadedPlugin("ext2", "pelton-ext2", "1", "m")


def offer(name: str, priority: int, reason: str | None = None, plugin: LoadedPlugin = BUILTIN, **fields) -> Offer:
    entry = PlatformEntry(name=name, load="pelton_platforms.cpu.platform:CPUPlatform", priority=priority,
                          probe=lambda: reason, **fields)  # fmt: skip
    return Offer("pelton_platforms", entry, plugin)


def plugins(*offers: Offer):
    return SimpleNamespace(offers=lambda hook: sorted(offers, key=lambda o: (-o.entry.priority, o.entry.name)))


@pytest.mark.parametrize(
    "offers, device, winner",
    [
        pytest.param([offer("cpu", 10), offer("cuda", 50)], None, "cuda", id="higher-priority-wins"),
        pytest.param([offer("cpu", 10), offer("cuda", 50, "no driver")], None, "cpu", id="not-here-is-no-error"),
        pytest.param([offer("b", 10), offer("a", 10)], None, "a", id="tie-goes-by-name"),
        pytest.param([offer("cpu", 10), offer("cuda", 50)], "cpu", "cpu", id="named-wins"),
        pytest.param([offer("cpu", 10), offer("npu", 90, plugin=STRANGER)], None, "npu", id="one-stranger-is-fine"),
        pytest.param(
            [offer("npu", 90, plugin=STRANGER), offer("tpu", 95, "no chip", OTHER)], None, "npu", id="absent-stranger"
        ),
        pytest.param(
            [offer("npu", 90, plugin=STRANGER), offer("tpu", 95, plugin=OTHER)], "npu", "npu", id="named-stranger"
        ),
    ],
)
def test_chooses(offers, device, winner):
    for order in (offers, offers[::-1]):
        assert choose_platform(platform_statuses(plugins(*order)), device).name == winner


def test_two_strangers_are_an_error_until_one_is_named():
    both = plugins(offer("npu", 90, plugin=STRANGER), offer("tpu", 95, plugin=OTHER))
    with pytest.raises(ConfigError, match=r"(?s)More than one.*tpu of ext2.*npu of ext.*--device"):
        choose_platform(platform_statuses(both), None)


def test_nothing_here_lists_every_reason():
    with pytest.raises(ConfigError, match="cuda: no driver; cpu: on strike"):
        choose_platform(platform_statuses(plugins(offer("cpu", 10, "on strike"), offer("cuda", 50, "no driver"))), None)


def test_named_device_that_is_not_here_fails_with_its_reason():
    with pytest.raises(ConfigError, match=r"device is 'cuda'.*no driver"):
        choose_platform(platform_statuses(plugins(offer("cpu", 10), offer("cuda", 50, "no driver"))), "cuda")


def test_unknown_device_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"device is 'gpu'; available: cuda, cpu\."):
        choose_platform(platform_statuses(plugins(offer("cpu", 10), offer("cuda", 50))), "gpu")


def test_probe_that_raises_names_its_plugin():
    def broken() -> str:
        raise OSError("boom")

    bad = Offer("pelton_platforms", PlatformEntry(name="bad", load="x:y", probe=broken), STRANGER)
    with pytest.raises(PluginError, match=r"'bad' of ext \(pelton-ext 1\).*OSError: boom.*pelton plugins --check"):
        platform_statuses(plugins(bad))


def test_replaced_offers_are_not_asked():
    replaced = Offer("pelton_platforms", offer("cpu", 5, "never asked").entry, BUILTIN, replaced_by=STRANGER)
    assert [s.name for s in platform_statuses(plugins(replaced, offer("cpu", 10)))] == ["cpu"]


def test_load_that_is_no_platform_is_refused():
    entry = PlatformEntry(name="odd", load="builtins:dict", probe=lambda: None)
    with pytest.raises(PluginError, match="builtins:dict"):
        select_platform(EngineConfig(), plugins(Offer("pelton_platforms", entry, STRANGER)))


def test_description_marks_the_chosen_one():
    offers = plugins(offer("cpu", 10), offer("cuda", 50, "no driver"))
    found = [(str(status), chosen) for status, chosen in describe_platforms(EngineConfig(), offers)]
    assert found == [("cuda: no driver", False), ("cpu: here", True)]
    nothing = describe_platforms(EngineConfig.from_flat(device="cuda"), offers)
    assert not any(chosen for _, chosen in nothing)


def test_built_in_cpu_is_found_without_torch():
    code = (
        "import sys\n"
        "from pelton.config import EngineConfig\n"
        "from pelton.plugins import load_plugins\n"
        "from pelton.platform.select import select_platform\n"
        "p = select_platform(EngineConfig.from_flat(device='cpu'), load_plugins(only=[]))\n"
        "print(p.name, p.describe(), 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.stdout.startswith("cpu cpu: ") and done.stdout.endswith("False\n"), done.stderr


def test_cpu_is_chosen_here():
    config = EngineConfig.from_flat(device="cpu")
    assert select_platform(config, load_plugins(only=[])).device_type == "cpu"
