"""The built-in resolvers: the checks and the four errors that the documents name, and names that lead elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pelton.config import EngineConfig
from pelton.errors import AdapterNotFoundError, AdapterRankError, ConfigError, InvalidAdapterError
from pelton.lora.request import LoRARequest
from pelton.lora.resolver import ResolverContext
from pelton_plugins.lora_resolvers.filesystem import FilesystemResolver
from pelton_plugins.lora_resolvers.hub import HubResolver

SAMPLE = {
    "peft_type": "LORA", "base_model_name_or_path": "your-base-model-name", "r": 16, "lora_alpha": 32,
    "target_modules": ["q_proj", "v_proj"], "bias": "none", "modules_to_save": None, "use_rslora": False,
    "use_dora": False,
}  # fmt: skip


def context(**settings: Any) -> ResolverContext:
    return ResolverContext(
        config=EngineConfig.from_flat(plugin_config={"lora_resolvers": settings}), max_lora_rank=16,
        target_modules=["q_proj", "v_proj"], base_model_names=["/models/your-base-model-name", "served"],
    )  # fmt: skip


def write(folder: Path, **fields: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(SAMPLE | fields))
    (folder / "adapter_model.safetensors").touch()
    return folder


async def ask(cache_dir: Path, name: str) -> LoRARequest | None:
    return await FilesystemResolver(context(cache_dir=str(cache_dir))).resolve_lora("base", name)


async def test_an_adapter_is_the_folder_of_its_name(tmp_path):
    folder = write(tmp_path / "cache" / "my_sql_adapter")
    assert await ask(tmp_path / "cache", "my_sql_adapter") == LoRARequest("my_sql_adapter", 1, str(folder))
    assert await ask(tmp_path / "cache", "other") is None


@pytest.mark.parametrize("value", [None, "/nowhere/at/all"])
def test_the_cache_folder_has_to_be_there(value):
    with pytest.raises(ConfigError, match=r"cache_dir is .*must be set to a valid directory"):
        FilesystemResolver(context(cache_dir=value))


@pytest.mark.parametrize(
    ("fields", "error", "match"),
    [
        ({"peft_type": "IA3"}, InvalidAdapterError, "Invalid adapter configuration: peft_type"),
        (
            {"base_model_name_or_path": "other"},
            InvalidAdapterError,
            "base_model_name_or_path is 'other', and this server's",
        ),
        ({"base_model_name_or_path": None}, InvalidAdapterError, "base_model_name_or_path is missing"),
        ({"target_modules": ["c_attn"]}, InvalidAdapterError, "target_modules has 'c_attn'"),
        ({"r": 64}, AdapterRankError, "LoRA rank exceeds maximum"),
    ],
)
async def test_what_is_wrong_is_one_of_the_named_errors(tmp_path, fields, error, match):
    write(tmp_path / "x", **fields)
    with pytest.raises(error, match=match):
        await ask(tmp_path, "x")


async def test_a_folder_without_its_files_is_not_found(tmp_path):
    (write(tmp_path / "x") / "adapter_model.safetensors").unlink()
    with pytest.raises(AdapterNotFoundError, match="'x' not found"):
        await ask(tmp_path, "x")


async def test_a_base_by_path_or_served_name_is_the_same_model(tmp_path):
    for index, base in enumerate(("org/your-base-model-name", "/elsewhere/your-base-model-name", "served")):
        write(tmp_path / str(index), base_model_name_or_path=base)
        assert await ask(tmp_path, str(index)) is not None


@pytest.mark.parametrize(
    "name", ["..", "../secret", "a/../../secret", "/etc", "", ".", "./x", "x\0", "..\\secret", "link", "x" * 300]
)
async def test_no_name_leads_out_of_the_folder(tmp_path, name):
    write(tmp_path / "secret")
    cache = tmp_path / "cache"
    cache.mkdir()
    write(cache / "x")
    (cache / "link").symlink_to(tmp_path / "secret")
    assert await ask(cache, name) is None


async def test_the_hub_is_asked_for_listed_repositories_alone(tmp_path, monkeypatch):
    import huggingface_hub

    asked: list[tuple[str, list[str]]] = []

    def download(repository: str, *, allow_patterns: list[str]) -> str:
        asked.append((repository, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    write(tmp_path / "sql")
    resolver = HubResolver(context(hub_repositories=["org/adapters"]))
    assert await resolver.resolve_lora("base", "org/adapters/sql") == LoRARequest(
        "org/adapters/sql", 1, str(tmp_path / "sql")
    )
    assert asked == [
        ("org/adapters", [f"sql/adapter_{end}" for end in ("config.json", "model.safetensors", "model.bin")])
    ]
    for name in ("org/other/sql", "sql", "org/adapters/../x", "org/adapters/*", "org"):
        assert await resolver.resolve_lora("base", name) is None
    assert len(asked) == 1


async def test_a_hub_that_cannot_be_reached_has_none(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    resolver = HubResolver(context(hub_repositories=["no-such-owner/no-such-adapter"]))
    assert await resolver.resolve_lora("base", "no-such-owner/no-such-adapter") is None


@pytest.mark.parametrize("repositories", [[], ["name"], ["../x"]])
def test_the_hub_needs_repositories(repositories):
    with pytest.raises(ConfigError, match="hub_repositories"):
        HubResolver(context(hub_repositories=repositories))
