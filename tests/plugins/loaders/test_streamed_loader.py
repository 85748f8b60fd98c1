"""A model whose weights come over HTTP, by range requests, or from one path, is the same model."""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from safetensors.torch import load_file, save_file

from pelton import LLM, SamplingParams
from pelton.config import EngineConfig
from pelton.errors import ConfigError
from pelton.model.resolved import ResolvedModel
from pelton.testing.model_loader import WeightLoaderConformance
from pelton.testing.models import make_tiny_checkpoint
from pelton_plugins.loaders import streamed_loader
from pelton_plugins.loaders.streamed_loader import StreamedLoader

PROMPTS = [{"prompt_token_ids": [5, 6, 7, 8, 9]}, {"prompt_token_ids": list(range(20, 60))}]


class Store(ThreadingHTTPServer):
    """Serves a folder; `mode` says how it misbehaves."""

    daemon_threads = True

    def __init__(self, folder):
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.mode, self.num_requests = folder, "", 0
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def uri(self, name):
        return f"http://127.0.0.1:{self.server_address[1]}/{name}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_GET(self):
        store = self.server
        store.num_requests += 1
        file = store.folder / self.path.lstrip("/")
        if not file.is_file():
            self._answer(404, b"")
            return
        content, found = file.read_bytes(), re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"] or "")
        if store.mode == "whole" or not found:
            self._answer(200, content)
            return
        if store.mode == "flaky" and store.num_requests % 3 == 0:
            self.close_connection = True
            self.connection.close()
            return
        if store.mode == "busy" and store.num_requests % 3 == 0:
            self._answer(503, b"")
            return
        first, last = int(found[1]), int(found[2])
        self._answer(206, content[first : last + 1], f"bytes {first}-{last}/{len(content)}")

    def _answer(self, status, body, content_range=None):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if content_range:
            self.send_header("Content-Range", content_range)
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setattr(streamed_loader, "FIRST_PAUSE_S", 0.001)
    server = Store(tmp_path)
    yield server
    server.shutdown()
    server.server_close()


def loader(uri, **extra):
    model = ResolvedModel(
        name="m", path="", weights_format="streamed", hf_config={}, architecture="X", dtype="float32", max_model_len=8,
        vocab_size=8, eos_token_ids=[], generation_config={}, tokenizer_path=None,
    )  # fmt: skip
    return StreamedLoader(
        EngineConfig.from_flat(load_format="streamed", model_loader_extra_config={"uri": uri, **extra}), model
    )


class TestConformance(WeightLoaderConformance):
    loader_class = StreamedLoader

    def write(self, folder, weights):
        save_file(weights, folder / "model.safetensors")
        return folder / "model.safetensors"

    def make(self, path):
        return loader(str(path))


@pytest.mark.parametrize("mode", ["", "flaky", "busy"])
def test_large_tensors_come_by_ranges(store, mode):
    weights = {"a": torch.randn(1000, 900), "b": torch.randn(1200, 500).bfloat16(), "c": torch.arange(3)}
    save_file(weights, store.folder / "model.safetensors")
    made = loader(store.uri("model.safetensors"), concurrency=3)
    store.mode = mode
    targets = {}
    for name, weight in made.weights():
        target = torch.zeros_like(weights[name])
        if weight.fill_later(target):
            targets[name] = target
        assert torch.equal(weight.read(), weights[name])
        assert torch.equal(weight.read(0, 1, 3), weights[name][1:3])
    assert targets.keys() == {"a", "b"} and all(torch.equal(targets[name], weights[name]) for name in targets)


@pytest.mark.parametrize("where", ["one file", "index", "path"])
def test_a_streamed_model_answers_as_the_folder(store, tmp_path, where):
    path = make_tiny_checkpoint(tmp_path / "llama", "llama")
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    settings = {"device": "cpu", "enforce_eager": True, "kv_cache_memory_bytes": 2**20, "disable_log_stats": True}
    with LLM(str(path), **settings) as llm:
        expected = [list(one.outputs[0].token_ids) for one in llm.generate(PROMPTS, params, use_tqdm=False)]
    weights = load_file(path / "model.safetensors")
    (path / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    uri = store.uri("elsewhere.safetensors")
    if where == "path":
        uri = f"file://{tmp_path}/elsewhere.safetensors"
    elif where == "index":
        names = sorted(weights)
        shards = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
        for file, own in shards.items():
            save_file({name: weights[name] for name in own}, tmp_path / file)
        weight_map = {name: file for file, own in shards.items() for name in own}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        uri = store.uri("model.safetensors.index.json")
    with LLM(str(path), load_format="streamed", model_loader_extra_config={"uri": uri}, **settings) as llm:
        assert [list(one.outputs[0].token_ids) for one in llm.generate(PROMPTS, params, use_tqdm=False)] == expected
    assert store.num_requests > (0 if where != "path" else -1)


def test_what_cannot_be_read_is_said_in_one_line(store):
    save_file({"a": torch.zeros(3)}, store.folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"nothing\.safetensors cannot be read by range requests: status 404"):
        loader(store.uri("nothing.safetensors"))
    store.mode = "whole"
    with pytest.raises(ConfigError, match=r"it sends whole files only. Use a server that answers them with 206"):
        loader(store.uri("model.safetensors"))
    with pytest.raises(ConfigError, match=r"cannot be read .*Is the server up"):
        loader("http://127.0.0.1:1/model.safetensors")
    with pytest.raises(ConfigError, match="uri 's3://bucket/x'; use http://, https:// or a path"):
        loader("s3://bucket/x")
    with pytest.raises(ConfigError, match=r"concurrency is 0, use 1 to 256.*For example: \{\"uri\""):
        loader("x", concurrency=0)
    with pytest.raises(ConfigError, match=r"load_format 'streamed' is .*it has no uri"):
        loader("")
    with pytest.raises(ConfigError, match="speed"):
        loader("x", speed=1)
