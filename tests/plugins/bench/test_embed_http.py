"""`pelton bench embed --http` against a tiny model's server."""

from __future__ import annotations

import json

import msgspec
import pytest

from pelton.cli.main import main
from pelton.errors import ConfigError
from pelton.testing.models import make_tiny_checkpoint
from pelton_plugins.bench.embed import client as embed_client
from pelton_plugins.bench.embed import command as embed

JOB = embed_client.Job(
    host="127.0.0.1", port=80, path="/v1/embeddings", headers="", model="m", length=8, batch_size=3, connections=1, vocab_size=50,
    warm_s=0.0, seconds=1.0, seed=1,
)  # fmt: skip


def inputs_of(request: bytes) -> list:
    head, _, body = request.partition(b"\r\n\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    return json.loads(body)["input"]


def test_no_input_comes_twice():
    source = embed_client.Source(JOB)
    inputs = [one for _ in range(50) for one in inputs_of(source.next())]
    assert {len(one) for one in inputs} == {8} and len({tuple(one) for one in inputs}) == 150


def test_texts_leave_room_for_special_tokens():
    source = embed_client.Source(msgspec.structs.replace(JOB, words=["a", "b"], num_special=2))
    assert all(len(text.split()) == 6 for text in inputs_of(source.next()))


def test_counts_inputs_that_come_back(tmp_path):
    path = make_tiny_checkpoint(tmp_path / "tiny", "qwen3", with_tokenizer=False)
    result = tmp_path / "result.json"
    arguments = [
        "--http", "--runner", "pooling", "--skip-tokenizer-init", "--kv-cache-memory-bytes", str(2**22), "--max-model-len", "64",
        "--lengths", "8", "--num-clients", "2", "--connections", "2", "--batch-size", "4", "--seconds", "1", "--warm-s", "0.1",
        "--repeats", "1", "--output-json", str(result),
    ]  # fmt: skip
    assert main(["bench", "embed", str(path), *arguments]) == 0
    found = json.loads(result.read_text())
    [turn] = found["lengths"]["8"]
    assert turn["inputs_per_s"] > 0 and turn["tokens_per_s"] == 8 * turn["inputs_per_s"]
    assert turn["dimensions"] == json.loads((path / "config.json").read_text())["hidden_size"]
    assert found["inputs"] == "token ids" and turn["latency_ms"]["p99"] >= turn["latency_ms"]["p50"] > 0


def test_refuses_seconds_that_are_none():
    with pytest.raises(ConfigError, match="seconds is 0"):
        embed.EmbedArguments(seconds=0.0)
