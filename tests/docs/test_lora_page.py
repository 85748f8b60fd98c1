"""The Python of docs/lora.md runs as it stands, and its resolver is found through the hook."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pelton_lora import make_adapter

from pelton import LLM, hookimpl
from pelton.config import EngineConfig
from pelton.entries import Entry
from pelton.errors import ConfigError, PluginError
from pelton.lora.resolvers import make_resolvers
from pelton.messages.report import DeviceReport, EngineInfo
from pelton.plugins import Plugins, load_plugins, register

PAGE = (Path(__file__).resolve().parents[2] / "docs/lora.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
HERE = "pelton_test_lora_page"
INFO = EngineInfo(
    report=DeviceReport(adapter_modules=["q_proj"]), num_blocks=1, block_size=1, kv_cache_bytes=1, max_num_seqs=1,
    max_num_batched_tokens=1, max_model_len=1,
)  # fmt: skip


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    from pelton.testing.models import make_tiny_checkpoint

    folder = tmp_path_factory.mktemp("page")
    path = str(make_tiny_checkpoint(folder / "model", "llama"))
    make_adapter(folder / "adapter", path)
    return {"MODEL": path, "ADAPTER": str(folder / "adapter")}


def test_the_first_example(names: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"max_model_len": 128, "max_num_seqs": 2, "kv_cache_memory_bytes": 2**22}
    init = LLM.__init__
    monkeypatch.setattr(LLM, "__init__", lambda self, **settings: init(self, **settings, **small))
    found = dict(names)
    exec(EXAMPLES[0], found)  # noqa: S102
    assert [len(output.outputs[0].token_ids) > 0 for output in found["outputs"]] == [True, True]
    assert all(output.error is None for output in found["outputs"])


class Offer:
    PELTON_API = ">=1,<2"

    @hookimpl
    def pelton_lora_resolvers(self) -> list[Entry]:
        return [
            Entry(name="team", load=f"{HERE}:TeamResolver"),
            Entry(name="broken", load=f"{HERE}:broken"),
        ]


def plugins() -> Plugins:
    found = load_plugins(only=[])
    register(found.manager, Offer(), "team", "tests")
    return found


async def test_the_resolver_is_found_by_the_hook_in_the_listed_order(
    names: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = ModuleType(HERE)
    module.__dict__.update(names)
    exec(EXAMPLES[1], module.__dict__)  # noqa: S102
    module.__dict__["broken"] = lambda context: context.no_such_thing
    monkeypatch.setitem(sys.modules, HERE, module)

    def resolvers(*listed: str) -> Any:
        config = EngineConfig.from_flat(
            enable_lora=True, allow_runtime_lora_updating=True, lora_resolvers=list(listed),
            plugin_config={"lora_resolvers": {"cache_dir": str(tmp_path)}},
        )  # fmt: skip
        return make_resolvers(config, plugins(), INFO)

    made = resolvers("lora_filesystem_resolver", "team")
    assert [name for name, _ in made] == ["lora_filesystem_resolver", "team"]
    resolver = made[1][1]
    assert (await resolver.resolve_lora("base", "team-a")).lora_path == names["ADAPTER"]
    assert await resolver.resolve_lora("base", "other") is None
    with pytest.raises(ConfigError, match=r"lora_resolvers.*'absent'"):
        resolvers("absent")
    with pytest.raises(PluginError, match="broken"):
        resolvers("broken")
    module.__dict__["broken"] = lambda context: object()
    with pytest.raises(
        PluginError, match=r"broken.* makes a object; it has to make a pelton\.lora\.resolver\.LoRAResolver"
    ):
        resolvers("broken")
    assert make_resolvers(EngineConfig(), plugins(), INFO) == []
