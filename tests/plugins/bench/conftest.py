"""A model folder with a vocabulary as large as the workloads' token ids, over the fake executor or a tiny real model."""

from __future__ import annotations

import json
import os

import pytest

from pelton.testing import fake_engine

VOCAB_SIZE = 49_000


@pytest.fixture(scope="module", autouse=True)
def all_servers_are_forks(forks: None) -> None:
    """What is measured here means nothing anyway."""


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Llama of some thousand parameters; needs load_format dummy."""
    folder = fake_engine.make_model_folder(tmp_path_factory.mktemp("bench") / "tiny")
    config = json.loads((folder / "config.json").read_text())
    config |= {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 8192, "head_dim": 8}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(fake_engine.install(tmp_path_factory.mktemp("site")))


@pytest.fixture
def fake_flags(site: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Flags of an engine over the fake executor, in this process and in those that it starts."""
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [site, os.environ.get("PYTHONPATH")])))
    return [
        "--load-format", "dummy", "--distributed-executor-backend", "fake_engine", "--max-num-seqs", "64",
        "--max-num-batched-tokens", "4096", "--num-gpu-blocks-override", "2000", "--log-level", "error",
    ]  # fmt: skip
