"""A tiny checkpoint for the commands that run a model."""

from __future__ import annotations

import pytest

from pelton.testing.models import make_tiny_checkpoint


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "llama"))
