"""Fixtures: a byte-level tokenizer, and an engine over the fake executor that also starts in its own process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pelton.testing import fake_engine
from pelton_plugins.loaders.text.tokenizer import RustTokenizer


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_engine.make_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> RustTokenizer:
    import tokenizers

    return RustTokenizer(tokenizers.Tokenizer.from_file(str(model_folder / "tokenizer.json")))


@pytest.fixture(scope="session")
def fake_engine_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_engine.install(tmp_path_factory.mktemp("site"))


@pytest.fixture
def settings(model_folder: Path, fake_engine_site: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Flat settings of an engine over the fake executor, its plugin installed."""
    monkeypatch.syspath_prepend(str(fake_engine_site))
    return fake_engine.settings(model_folder)
