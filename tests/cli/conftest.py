"""A tiny checkpoint for the commands that run a model."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from pelton.testing.models import make_tiny_checkpoint


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "llama"))


@pytest.fixture(autouse=True)
def log_as_at_first(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Commands that ran in this process before have sent the log to stderr."""
    logger = logging.getLogger("pelton")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", True)
    level = logger.level
    logger.setLevel(logging.NOTSET)
    yield
    logger.setLevel(level)
