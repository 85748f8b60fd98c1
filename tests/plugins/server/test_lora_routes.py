"""Adapters over HTTP, with a real engine: as a model's name, loaded and unloaded while it runs, found by a resolver."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from pelton_e2e import eventually, gauge, serving
from pelton_late_import import LateImport
from pelton_lora import make_adapter

openai = LateImport("openai")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from pelton.testing.models import make_tiny_checkpoint

    folder = tmp_path_factory.mktemp("lora")
    path = str(make_tiny_checkpoint(folder / "tiny", "llama"))
    for seed, name in enumerate(("first", "cache/found", "cache/large")):
        make_adapter(folder / name, path, seed=seed, rank=32 if name.endswith("large") else 8, strength=0.3)
    return folder


@pytest.fixture(scope="module")
def client(folders: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    with serving(
        str(folders / "tiny"), "--served-model-name", "tiny", "--max-num-seqs", "8",
        "--enable-lora", "--max-loras", "2", "--lora-modules", f"first={folders / 'first'}",
        "--allow-runtime-lora-updating", "--lora-resolvers", "lora_filesystem_resolver",
        "--plugin-config.lora_resolvers.cache_dir", str(folders / "cache"), "--enable-sleep-mode",
        log=tmp_path_factory.mktemp("server") / "log",
    ) as (url, _):  # fmt: skip
        yield openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=60)


def complete(client: openai.OpenAI, model: str) -> str:
    answer = client.completions.create(
        model=model, prompt="The dog", max_tokens=12, temperature=0.0, extra_body={"ignore_eos": True}
    )
    assert answer.model == model
    return answer.choices[0].text


def post(client: openai.OpenAI, path: str, **body: object) -> httpx.Response:
    return httpx.post(str(client.base_url) + path, json=body, timeout=60)


def names(client: openai.OpenAI) -> dict[str, str | None]:
    return {model.id: getattr(model, "parent", None) for model in client.models.list().data}


def test_a_name_with_control_characters_is_refused(client, folders):
    answer = post(client, "load_lora_adapter", lora_name="a\nb", lora_path=str(folders / "first"))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "lora_name"
    assert "printable characters" in answer.json()["error"]["message"]


def test_an_adapter_from_the_start_is_a_model(client):
    assert names(client)["first"] == "tiny"
    assert complete(client, "first") != complete(client, "tiny")
    chat = client.chat.completions.create(
        model="first", messages=[{"role": "user", "content": "Hi"}], max_tokens=3, stream=True
    )
    assert next(chunk.model for chunk in chat) == "first"


def test_an_adapter_is_loaded_and_unloaded_while_the_server_runs(client, folders):
    path = str(folders / "first")
    assert post(client, "load_lora_adapter", lora_name="second", lora_path=path).status_code == 200
    assert complete(client, "second") == complete(client, "first")
    again = post(client, "load_lora_adapter", lora_name="second", lora_path=path)
    assert (again.status_code, again.json()["error"]["param"]) == (400, "lora_name")
    assert "already been loaded" in again.json()["error"]["message"]
    nowhere = post(client, "load_lora_adapter", lora_name="third", lora_path=path + "-no")
    assert (nowhere.status_code, nowhere.json()["error"]["param"]) == (404, "lora_path")
    inplace = post(client, "load_lora_adapter", lora_name="second", lora_path=path, load_inplace=True)
    assert inplace.status_code == 200
    assert complete(client, "second") == complete(client, "first")
    assert post(client, "unload_lora_adapter", lora_name="second").status_code == 200
    assert "second" not in names(client)
    missing = post(client, "unload_lora_adapter", lora_name="second")
    assert missing.status_code == 404
    bad = post(client, "load_lora_adapter", lora_name="bad", lora_path=str(folders / "cache" / "large"))
    assert bad.status_code == 400
    assert "r 32, and max_lora_rank is 16" in bad.json()["error"]["message"]
    own = post(client, "load_lora_adapter", lora_name="tiny", lora_path=path)
    assert "The model itself has this name" in own.json()["error"]["message"]


def test_an_unknown_model_is_looked_for_by_the_resolvers(client):
    assert complete(client, "found") != complete(client, "tiny")
    assert names(client)["found"] == "tiny"
    with pytest.raises(openai.NotFoundError, match=r"'absent' not found; asked: lora_filesystem_resolver"):
        complete(client, "absent")
    with pytest.raises(openai.BadRequestError, match="rank exceeds maximum"):
        complete(client, "large")
    with pytest.raises(openai.NotFoundError):
        complete(client, "../first")


def test_metrics_name_the_adapters(client):
    text = httpx.get(str(client.base_url).replace("/v1/", "/metrics"), timeout=60).text
    (line,) = [line for line in text.splitlines() if "lora_requests_info{" in line]
    assert 'max_lora="2"' in line
    assert 'running_lora_adapters=""' in line
    assert time.time() - float(line.rpartition(" ")[2]) < 3600


def test_the_engine_sleeps_and_wakes_up(client):
    url, expected = str(client.base_url).replace("/v1/", ""), complete(client, "first")

    def is_sleeping() -> bool:
        return bool(httpx.get(url + "/is_sleeping", timeout=60).json()["is_sleeping"])

    def state() -> str:
        text = httpx.get(url + "/metrics", timeout=60).text
        return ",".join(re.findall(r'pelton_engine_sleep_state\{.*sleep_state="(\w+)".*\} 1\.0', text))

    for query, name in (("", "weights_offloaded"), ("?level=2", "discard_all")):
        assert not is_sleeping()
        assert eventually(lambda: state() == "awake")
        assert httpx.post(url + "/sleep" + query, timeout=60).status_code == 200
        assert is_sleeping()
        assert eventually(lambda name=name: state() == name)
        with pytest.raises(openai.InternalServerError, match="The engine sleeps") as refused:
            complete(client, "first")
        assert refused.value.status_code == 503
        assert httpx.post(url + "/wake_up?tags=weights", timeout=60).status_code == 200
        assert is_sleeping()
        assert httpx.post(url + "/wake_up?tags=kv_cache", timeout=60).status_code == 200
        assert complete(client, "first") == expected
    assert eventually(lambda: gauge(url, "sleep_mode_operation_duration_seconds_count") >= 2)
    assert eventually(lambda: gauge(url, "sleep_mode_operations_in_flight") == 0)
    for path, param in (
        ("/sleep?level=3", "level"),
        ("/sleep?level=deep", "level"),
        (f"/sleep?level={'9' * 5000}", "level"),
    ):
        refused = httpx.post(url + path, timeout=60)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == param
